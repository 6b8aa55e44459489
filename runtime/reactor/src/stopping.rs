//! Telling tasks that their core is to stop.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::executor::{self, Core};

/// Ends when the core is asked to stop ([`crate::Cores::shutdown`]), so that tasks that serve for ever can end in time. On a
/// reactor that belongs to no [`crate::Cores`] it never ends.
///
/// # Panics
/// Outside a reactor.
pub fn stopping() -> Stopping {
    Stopping { core: executor::current(), ticket: None }
}

/// The future of [`stopping`].
pub struct Stopping {
    core: Rc<Core>,
    ticket: Option<u64>,
}

impl Future for Stopping {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.core.stop_by().is_some() {
            return Poll::Ready(());
        }
        let Stopping { core, ticket } = &mut *self;
        let previous = core.stop_waiters.borrow_mut().enter(ticket, cx.waker());
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        let waker = self.core.stop_waiters.borrow_mut().leave(&mut self.ticket);
        drop(waker);
    }
}
