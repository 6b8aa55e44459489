//! Waiting until started operations are in the kernel.
//!
//! An operation that a task starts is in the ring's queue until the reactor's next turn submits it with all others. A
//! task that continues to compute would keep it there; one that waits for [`submitted`] first computes while the
//! operation is in flight.

use std::future::poll_fn;
use std::task::Poll;

use crate::core;

/// Resolves when the reactor has made its next turn: everything that was started before has then been submitted, as far
/// as the backend has room for it. Other ready tasks run first.
///
/// # Panics
/// Outside a reactor.
pub async fn submitted() {
    let core = core::current();
    let begun = core.turns.get();
    poll_fn(|cx| {
        if core.turns.get() != begun {
            return Poll::Ready(());
        }
        core.after_turn.borrow_mut().push(cx.waker().clone());
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    use crate::{Config, Reactor, sleep, spawn, yield_now};

    use super::submitted;

    fn turns() -> u64 {
        crate::core::current().turns.get()
    }

    #[test]
    fn a_task_goes_on_behind_a_turn_and_not_before() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let task = spawn(async {
                let before = turns();
                // Twin: letting others run is not a turn.
                yield_now().await;
                assert_eq!(turns(), before);
                submitted().await;
                assert_eq!(turns(), before + 1);
            });
            task.await.unwrap();
        });
    }

    #[test]
    fn the_turn_does_not_sleep_although_a_timer_is_far_off() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let ended = Rc::new(Cell::new(false));
            let far = spawn({
                let ended = Rc::clone(&ended);
                async move {
                    sleep(Duration::from_secs(600)).await;
                    ended.set(true);
                }
            });
            let begun = Instant::now();
            spawn(submitted()).await.unwrap();
            submitted().await;
            assert!(begun.elapsed() < Duration::from_secs(300) && !ended.get());
            far.abort();
        });
    }

    #[test]
    fn one_that_is_dropped_wakes_nobody_wrongly() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let task = spawn(submitted());
            yield_now().await;
            task.abort();
            submitted().await;
            assert!(task.await.is_err(), "it was dropped");
        });
    }
}
