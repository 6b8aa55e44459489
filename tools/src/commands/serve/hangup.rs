//! SIGHUP as a future that comes true once for each time it was sent.

use std::future::poll_fn;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread;

use futures_util::task::AtomicWaker;

/// SIGHUP, which from now on does not end the process.
pub struct Hangups(Arc<Shared>);

#[derive(Default)]
struct Shared {
    came: AtomicBool,
    waker: AtomicWaker,
}

impl Hangups {
    /// Watches from now on. A signal handler can do no more than write to a socket; a thread waits at its other end.
    ///
    /// # Errors
    /// When the system has no socket or thread for it.
    pub fn watch() -> io::Result<Hangups> {
        let (mut read, write) = UnixStream::pair()?;
        let shared = Arc::new(Shared::default());
        let told = Arc::clone(&shared);
        let deliver = move || {
            // Several at once are as good as one: each makes everything be read again.
            while read.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {
                told.came.store(true, Ordering::Release);
                told.waker.wake();
            }
        };
        thread::Builder::new().name("hangups".to_owned()).spawn(deliver)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, write)?;
        Ok(Hangups(shared))
    }

    /// Waits for the next one.
    pub async fn next(&self) {
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.0.came.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}
