//! Timers: futures that end at an instant.

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::core::{self, Core};

/// The clock of the reactor: monotonic time.
pub fn now() -> Instant {
    Instant::now()
}

/// Resolves after `duration`, by the monotonic clock, never earlier. Durations beyond the clock's range never end.
///
/// # Panics
/// Outside a reactor.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { core: core::current(), deadline: now().checked_add(duration), key: None }
}

/// Resolves at `deadline`, never earlier. Timers with different deadlines resolve in the order of these.
///
/// # Panics
/// Outside a reactor.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { core: core::current(), deadline: Some(deadline), key: None }
}

/// The future of [`sleep`] and [`sleep_until`].
pub struct Sleep {
    core: Rc<Core>,
    /// `None` if it is beyond the clock's range.
    deadline: Option<Instant>,
    key: Option<(Instant, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.deadline else { return Poll::Pending };
        if now() >= deadline {
            return Poll::Ready(());
        }
        let waker = cx.waker().clone();
        let previous = match self.key {
            // A timer that fired early for an earlier waker is gone; inserting it starts it again.
            Some(key) => self.core.timers.borrow_mut().restart(key, waker),
            None => {
                let key = self.core.timers.borrow_mut().start(deadline, waker);
                self.key = Some(key);
                None
            }
        };
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let waker = self.core.timers.borrow_mut().stop(key);
            drop(waker);
        }
    }
}

/// A future did not end in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not done after {0:?}")]
pub struct Elapsed(pub Duration);

/// The output of `future`, or [`Elapsed`] if it takes longer than `duration`; the future is then dropped.
///
/// # Panics
/// Outside a reactor.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut sleep = sleep(duration);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        Pin::new(&mut sleep).poll(cx).map(|()| Err(Elapsed(duration)))
    })
    .await
}

/// Lets every other ready task run first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}
