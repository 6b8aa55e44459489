//! Long steps share a part of each turn: tasks with long computations take turns, so that they do not all compute in
//! the same turn.
//!
//! A task that computes in steps lets others run between two of its steps ([`crate::submitted`]). But if there are many
//! such tasks, each has a step in every turn, and a short request, which takes several turns, waits for all of these in
//! each turn.
//!
//! Invariants: in one turn of the reactor the last step begins less than `MAX_STEPPING` after the first one, and there
//! is at least one step if any task waits. Steps begin in the order of their requests. A waiting task that is dropped
//! does not block others. If no step began since the last turn and some tasks wait, the first of them was woken, so the
//! reactor may sleep.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::core::{Core, try_current};

/// A place in the queue, until it is dropped.
struct Place {
    core: Rc<Core>,
    number: u64,
}

impl Place {
    fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        let steps = &self.core.long_steps;
        if steps.begin(self.number, self.core.turns.get()) {
            // The place ends with this poll, and wakes the next one.
            return Poll::Ready(());
        }
        steps.wait(self.number, cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.core.long_steps.leave(self.number);
    }
}

/// Resolves when a step of long computation may begin: at once if no other one began earlier in this turn of the
/// reactor and none waits. Outside a reactor it always resolves at once.
pub async fn long_step() {
    let Some(core) = try_current() else { return };
    let number = core.long_steps.join();
    let place = Place { core, number };
    poll_fn(|cx| place.poll(cx)).await;
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    use crate::{Config, Reactor, sleep, spawn, submitted, yield_now};

    use super::long_step;
    use crate::long_steps::MAX_STEPPING;

    /// A step so long that no other one begins in its turn.
    fn compute() {
        let begun = Instant::now();
        while begun.elapsed() < MAX_STEPPING {}
    }

    fn turns() -> u64 {
        crate::core::current().turns.get()
    }

    /// Tasks that request one step each, in order; each records its number and the turn of its step.
    fn ask(count: usize, seen: &Rc<RefCell<Vec<(usize, u64)>>>) -> Vec<crate::JoinHandle<()>> {
        let one = |number| {
            let seen = Rc::clone(seen);
            spawn(async move {
                long_step().await;
                seen.borrow_mut().push((number, turns()));
                compute();
            })
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn of_steps_as_long_as_that_one_begins_in_each_turn_in_order_and_others_run_meanwhile() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let seen = Rc::default();
            let first = turns();
            let asked = ask(20, &seen);
            // Twin: a short task runs in each turn, whatever else waits.
            let short = spawn(async {
                let begun = turns();
                for _ in 0..3 {
                    submitted().await;
                }
                assert_eq!(turns(), begun + 3);
            });
            short.await.unwrap();
            assert!(seen.borrow().len() <= 5, "a short request does not wait for all long ones");
            for task in asked {
                task.await.unwrap();
            }
            let expected: Vec<_> = (0..20).map(|number| (number, first + number as u64)).collect();
            assert_eq!(*seen.borrow(), expected);
        });
    }

    #[test]
    fn one_alone_does_not_wait() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let begun = turns();
            long_step().await;
            assert_eq!(turns(), begun);
            compute();
            long_step().await;
            assert_eq!(turns(), begun + 1, "the second one of a turn");
        });
    }

    #[test]
    fn those_that_are_dropped_hold_nobody_up() {
        let reactor = Reactor::new(Config::default()).unwrap();
        reactor.block_on(async {
            let seen = Rc::default();
            let mut asked = ask(6, &seen);
            yield_now().await;
            for dropped in [4, 2, 1] {
                asked.remove(dropped).abort();
            }
            // The reactor sleeps meanwhile if nothing seems to wait.
            sleep(Duration::from_millis(50)).await;
            let numbers: Vec<_> = seen.borrow().iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers, [0, 3, 5]);
        });
    }
}
