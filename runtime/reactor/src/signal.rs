//! Shutdown signals: SIGTERM and SIGINT as a future.
//!
//! Shape: a handler may do next to nothing, so it writes one byte to a pipe that lives as long as the process; a thread
//! waits there and wakes the futures. The thread exists only after the first such future was polled.

use std::future::Future;
use std::io::{self, Read};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::sync::Waiters;

/// A shutdown signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM, from a service manager.
    Terminate,
    /// SIGINT, from a terminal.
    Interrupt,
}

/// The write end of the pipe, for the handler; -1 before there is one.
static PIPE: AtomicI32 = AtomicI32::new(-1);
static STATE: Mutex<SignalState> =
    Mutex::new(SignalState { installed: false, received: None, waiting: Waiters::new() });

struct SignalState {
    installed: bool,
    received: Option<Signal>,
    waiting: Waiters,
}

fn state() -> MutexGuard<'static, SignalState> {
    // Only moves happen under the lock, so a panic leaves the state consistent.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends when the process has received SIGTERM or SIGINT since the first such future was polled; every such future does,
/// also later ones. The second signal of the same kind has its default effect and ends the process, so that an operator can end
/// a shutdown that hangs.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn shutdown_signal() -> ShutdownSignal {
    ShutdownSignal { ticket: None }
}

/// The future of [`shutdown_signal`].
#[derive(Debug)]
pub struct ShutdownSignal {
    ticket: Option<u64>,
}

impl Future for ShutdownSignal {
    type Output = io::Result<Signal>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<Signal>> {
        let mut state = state();
        if !state.installed {
            if let Err(error) = install() {
                return Poll::Ready(Err(error));
            }
            state.installed = true;
        }
        if let Some(signal) = state.received {
            return Poll::Ready(Ok(signal));
        }
        let previous = state.waiting.enter(&mut self.ticket, cx.waker());
        drop(state);
        drop(previous);
        Poll::Pending
    }
}

impl Drop for ShutdownSignal {
    fn drop(&mut self) {
        let waker = state().waiting.leave(&mut self.ticket);
        drop(waker);
    }
}

fn install() -> io::Result<()> {
    let (read, write) = pipe()?;
    let reader = std::fs::File::from(read);
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || deliver(reader))?;
    // The write end is never closed, so the handler never writes to another file under its number.
    PIPE.store(write.into_raw_fd(), Ordering::Release);
    handle(libc::SIGTERM)?;
    handle(libc::SIGINT)
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    // SAFETY: the call fills both places. The write end's reader never lags by a whole pipe, as there are two signals.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both descriptors are new, so no other handle owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

fn handle(signal: i32) -> io::Result<()> {
    // SAFETY: all-zero is a valid action: the default one, without flags or mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_RESETHAND;
    // SAFETY: the handler only calls what is safe in a handler, and the old action is not asked for.
    match unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_signal(signal: i32) {
    // SAFETY: this is the calling thread's own error number, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    let byte = signal as u8;
    // SAFETY: writing to a descriptor is allowed in a handler; the byte lives in this frame.
    unsafe { libc::write(PIPE.load(Ordering::Acquire), (&raw const byte).cast(), 1) };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn deliver(mut pipe: std::fs::File) {
    let mut byte = [0];
    // `read_exact` goes on after an interruption, and the write end is never closed.
    while pipe.read_exact(&mut byte).is_ok() {
        let signal = if i32::from(byte[0]) == libc::SIGINT { Signal::Interrupt } else { Signal::Terminate };
        let mut state = state();
        state.received.get_or_insert(signal);
        let waiting = state.waiting.take_all();
        drop(state);
        waiting.for_each(Waker::wake);
    }
}
