//! Waiting for a shutdown: of the process, by SIGTERM or SIGINT, or by SIGHUP if that is wanted, and of one core.
//!
//! Shape: a thread takes the signals and wakes the futures. It exists only after the first such future was polled.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};

use crate::core::{self, Core};
use crate::sync::{Waiters, lock};

/// A shutdown signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM, from a service manager; or SIGHUP, if it counts ([`hangup_is_shutdown`]).
    Terminate,
    /// SIGINT, from a terminal.
    Interrupt,
}

static STATE: Mutex<SignalState> = Mutex::new(SignalState { installed: None, received: None, waiting: Waiters::new() });

struct SignalState {
    installed: Option<Handle>,
    received: Option<Signal>,
    waiting: Waiters,
}

/// Resolves when the process has received SIGTERM or SIGINT since the first such future was polled; this applies to all
/// such futures, including later ones. The second signal of the same kind has its default effect and ends the process,
/// so that an operator can end a shutdown that hangs.
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
        let mut state = lock(&STATE);
        if let Err(error) = state.install() {
            return Poll::Ready(Err(error));
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
        let waker = lock(&STATE).waiting.leave(&mut self.ticket);
        drop(waker);
    }
}

/// From now on SIGHUP, of a terminal that is closed, has the effect of SIGTERM. A second one has none.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn hangup_is_shutdown() -> io::Result<()> {
    let mut state = lock(&STATE);
    state.install()?.add_signal(SIGHUP)
}

impl SignalState {
    /// Installs the handlers, unless they are.
    fn install(&mut self) -> io::Result<&Handle> {
        let handle = match self.installed.take() {
            Some(handle) => handle,
            None => install()?,
        };
        Ok(self.installed.insert(handle))
    }
}

fn install() -> io::Result<Handle> {
    // The thread comes first: without it, a signal would have no effect.
    let mut signals = Signals::new([0; 0])?;
    let handle = signals.handle();
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let mut state = lock(&STATE);
            state.received.get_or_insert(if signal == SIGINT { Signal::Interrupt } else { Signal::Terminate });
            let waiting = state.waiting.take_all();
            drop(state);
            waiting.for_each(Waker::wake);
        }
    })?;
    for signal in [SIGTERM, SIGINT] {
        // The first signal sets the flag, which makes the second one end the process.
        let is_second = Arc::new(AtomicBool::new(false));
        flag::register_conditional_default(signal, Arc::clone(&is_second))?;
        flag::register(signal, is_second)?;
        handle.add_signal(signal)?;
    }
    Ok(handle)
}

/// Waits until a shutdown of the core is requested ([`crate::Cores::shutdown`]), so that tasks that would run forever
/// can end in time. On a reactor outside of [`crate::Cores`] it never resolves.
///
/// # Panics
/// Outside a reactor.
pub fn shutdown_requested() -> ShutdownRequested {
    ShutdownRequested { core: core::current(), ticket: None }
}

/// The future of [`shutdown_requested`].
pub struct ShutdownRequested {
    core: Rc<Core>,
    ticket: Option<u64>,
}

impl Future for ShutdownRequested {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.core.stop_by.get().is_some() {
            return Poll::Ready(());
        }
        let ShutdownRequested { core, ticket } = &mut *self;
        let previous = core.shutdown_waiters.borrow_mut().enter(ticket, cx.waker());
        drop(previous);
        Poll::Pending
    }
}

impl Drop for ShutdownRequested {
    fn drop(&mut self) {
        let waker = self.core.shutdown_waiters.borrow_mut().leave(&mut self.ticket);
        drop(waker);
    }
}
