//! The interface to a service manager and the operator: SIGHUP as a future, and `sd_notify(3)`.

use std::env;
use std::future::poll_fn;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread;

use futures_util::task::AtomicWaker;
use rustix::time::{ClockId, clock_gettime};

/// SIGHUP as a future: it completes once for each signal. SIGHUP no longer ends the process.
pub struct Hangups(Arc<HangupState>);

#[derive(Default)]
struct HangupState {
    is_pending: AtomicBool,
    waker: AtomicWaker,
}

impl Hangups {
    /// Watches from now on. A signal handler can do no more than write to a socket; a thread waits at its other end.
    ///
    /// # Errors
    /// When the system has no socket or thread for it.
    pub fn watch() -> io::Result<Hangups> {
        let (mut read, write) = UnixStream::pair()?;
        let state = Arc::new(HangupState::default());
        let delivered = Arc::clone(&state);
        let deliver = move || {
            // Several pending signals are one: each has the whole configuration read again.
            while read.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {
                delivered.is_pending.store(true, Ordering::Release);
                delivered.waker.wake();
            }
        };
        thread::Builder::new().name("hangups".to_owned()).spawn(deliver)?;
        signal_hook::low_level::pipe::register(signal_hook::consts::SIGHUP, write)?;
        Ok(Hangups(state))
    }

    /// Waits for the next signal.
    pub async fn next(&self) {
        poll_fn(|cx| {
            self.0.waker.register(cx.waker());
            if self.0.is_pending.swap(false, Ordering::AcqRel) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// How far the server is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceState {
    /// It accepts connections, and what is to be read again has been.
    Ready,
    /// It reads the configuration again.
    Reloading,
    /// Requests in flight end before the server stops.
    Stopping,
}

impl ServiceState {
    fn to_text(self) -> String {
        match self {
            ServiceState::Ready => "READY=1".to_owned(),
            // By the time, `Type=notify-reload` (systemd 253 and later) distinguishes this reload from an earlier one.
            ServiceState::Reloading => format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_us()),
            ServiceState::Stopping => "STOPPING=1".to_owned(),
        }
    }
}

/// Sends the state to the service manager, if there is one. A failure to send is ignored.
pub fn notify(state: ServiceState) {
    let Some(name) = env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        // The manual's form of an abstract address.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.to_text().as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!("the service manager was not told '{state:?}': {error}");
    }
}

/// Microseconds of the clock that the manager compares with.
fn monotonic_us() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000 + time.tv_nsec / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_says_when_it_began() {
        let us = |state: ServiceState| {
            let words = state.to_text();
            words.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse::<i64>().unwrap()
        };
        let (first, second) = (us(ServiceState::Reloading), us(ServiceState::Reloading));
        assert!(0 < first && first <= second, "{first} {second}");
        assert_eq!(
            (ServiceState::Ready.to_text().as_str(), ServiceState::Stopping.to_text().as_str()),
            ("READY=1", "STOPPING=1")
        );
    }
}
