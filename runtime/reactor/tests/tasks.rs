//! Tasks and timers, on every backend.

#![allow(clippy::async_yields_async, reason = "handles are taken out of a reactor on purpose")]

mod common;

use std::cell::{Cell, RefCell};
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::time::Duration;

use common::everywhere;
use sealblock_runtime_reactor::{Aborted, Elapsed, now, sleep, sleep_until, spawn, timeout, yield_now};

struct OnDrop(Rc<Cell<u32>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn handles_give_the_value() {
    everywhere(|reactor| {
        let sum = reactor.block_on(async {
            let tasks: Vec<_> = (0..1000u64)
                .map(|i| {
                    spawn(async move {
                        yield_now().await;
                        i
                    })
                })
                .collect();
            let mut sum = 0;
            for task in tasks {
                sum += task.await.expect("not aborted");
            }
            sum
        });
        assert_eq!(sum, 499_500);
    });
}

#[test]
fn a_task_outlives_its_handle() {
    everywhere(|reactor| {
        let done = Rc::new(Cell::new(0));
        reactor.block_on(async {
            let guard = OnDrop(Rc::clone(&done));
            drop(spawn(async move {
                sleep(Duration::from_millis(1)).await;
                drop(guard);
            }));
            while done.get() == 0 {
                yield_now().await;
            }
        });
        assert_eq!(done.get(), 1);
    });
}

#[test]
fn an_aborted_task_is_dropped_at_once_and_says_so() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let dropped = Rc::new(Cell::new(0));
            let guard = OnDrop(Rc::clone(&dropped));
            let task = spawn(async move {
                let _guard = guard;
                sleep(Duration::from_secs(3600)).await;
            });
            yield_now().await;
            assert_eq!((dropped.get(), task.is_finished()), (0, false));
            task.abort();
            assert_eq!((dropped.get(), task.is_finished()), (1, true));
            assert_eq!(task.await, Err(Aborted));

            let done = spawn(async { 5 });
            yield_now().await;
            yield_now().await;
            done.abort();
            assert_eq!(done.await, Ok(5), "a task that has ended is left as it is");
        });
    });
}

#[test]
fn a_task_may_abort_itself() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let own = Rc::new(RefCell::new(None::<sealblock_runtime_reactor::JoinHandle<()>>));
            let inside = Rc::clone(&own);
            let reached = Rc::new(Cell::new(false));
            let flag = Rc::clone(&reached);
            let task = spawn(async move {
                inside.borrow().as_ref().expect("set before the task runs").abort();
                yield_now().await;
                flag.set(true);
            });
            *own.borrow_mut() = Some(task);
            for _ in 0..5 {
                yield_now().await;
            }
            let task = own.take().expect("still there");
            assert_eq!(task.await, Err(Aborted));
            assert!(!reached.get());
        });
    });
}

#[test]
fn a_panic_goes_on_in_the_joiner() {
    everywhere(|reactor| {
        let task = reactor.block_on(async { spawn(async { panic!("seven") }) });
        let caught = std::panic::catch_unwind(AssertUnwindSafe(|| reactor.block_on(task)));
        let panic = caught.expect_err("the joiner panics");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"seven"));
        assert_eq!(reactor.block_on(async { 1 }), 1, "the reactor goes on");
    });
}

#[test]
fn timers_never_end_early() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let tasks: Vec<_> = [15u64, 3, 9, 0, 6, 12]
                .into_iter()
                .map(|ms| {
                    spawn(async move {
                        let start = now();
                        sleep(Duration::from_millis(ms)).await;
                        assert!(now() - start >= Duration::from_millis(ms));
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("not aborted");
            }
            let past = now();
            sleep_until(past).await;
        });
    });
}

#[test]
fn a_timeout_lets_pass_what_is_in_time() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let hour = Duration::from_secs(3600);
            assert_eq!(timeout(hour, async { 3 }).await, Ok(3));
            let short = Duration::from_millis(2);
            assert_eq!(timeout(short, std::future::pending::<()>()).await, Err(Elapsed(short)));
            assert_eq!(timeout(short, sleep(Duration::MAX)).await, Err(Elapsed(short)));
        });
    });
}

#[test]
fn tasks_that_are_always_ready_do_not_starve_the_others() {
    everywhere(|reactor| {
        reactor.block_on(async {
            let busy = spawn(async {
                loop {
                    yield_now().await;
                }
            });
            sleep(Duration::from_millis(2)).await;
            busy.abort();
            assert_eq!(busy.await, Err(Aborted));
        });
    });
}

#[test]
fn a_reactor_drops_its_tasks() {
    everywhere(|_| {});
    for config in common::configurations() {
        let dropped = Rc::new(Cell::new(0));
        let reactor = sealblock_runtime_reactor::Reactor::new(config).expect("starts");
        let task = reactor.block_on(async {
            let guard = OnDrop(Rc::clone(&dropped));
            spawn(async move {
                let _guard = guard;
                std::future::pending::<()>().await;
            })
        });
        drop(reactor);
        assert_eq!((dropped.get(), task.is_finished()), (1, true));
    }
}

#[test]
fn wakers_work_from_other_threads_and_after_the_end() {
    everywhere(|reactor| {
        let (send, receive) = std::sync::mpsc::channel::<std::task::Waker>();
        let flag = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let set = std::sync::Arc::clone(&flag);
        let thread = std::thread::spawn(move || {
            let waker = receive.recv().expect("the task sends its waker");
            set.store(true, std::sync::atomic::Ordering::Release);
            waker.wake_by_ref();
            waker
        });
        reactor.block_on(async {
            let task = spawn(std::future::poll_fn(move |cx| {
                if flag.load(std::sync::atomic::Ordering::Acquire) {
                    return std::task::Poll::Ready(());
                }
                // The thread ends after the first waker, so a second one has no receiver.
                let _ = send.send(cx.waker().clone());
                std::task::Poll::Pending
            }));
            task.await.expect("not aborted");
        });
        let stale = thread.join().expect("the thread does not panic");
        stale.wake_by_ref();
        reactor.block_on(async { spawn(async { stale.wake() }).await.expect("not aborted") });
    });
}

#[test]
#[should_panic(expected = "inside another")]
fn a_reactor_does_not_run_inside_another() {
    let outer = sealblock_runtime_reactor::Reactor::new(common::syscalls()).expect("starts");
    let inner = sealblock_runtime_reactor::Reactor::new(common::syscalls()).expect("starts");
    outer.block_on(async { inner.block_on(async {}) });
}
