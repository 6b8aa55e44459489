//! Calls between threads, and shutdown.

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{
    Config, CoreAddress, CoreGone, CoreHandle, CoreLocal, Cores, File, Options, Placement, Reactor, StartError,
    Stopped, shutdown_requested, sleep, spawn, yield_now,
};

const HOUR: Duration = Duration::from_secs(3600);

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// An executor that is not a reactor.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        thread::park();
    }
}

fn each(test: impl Fn(Config)) {
    common::configurations().into_iter().for_each(test);
}

#[test]
fn calls_come_from_many_threads() {
    each(|config| {
        let cores = Cores::start(Placement::Count(2), Config { calls_in_flight_limit: 3, ..config }).expect("starts");
        assert_eq!(cores.len(), 2);
        thread::scope(|scope| {
            for number in 0..4usize {
                let handles = cores.handles();
                scope.spawn(move || {
                    for i in 0..300usize {
                        let local = std::rc::Rc::new(number * 1000 + i);
                        let sent = *local;
                        let result = block_on(handles[i % 2].call(move || async move {
                            // Values created on the core need not be `Send`.
                            let local = std::rc::Rc::new(sent);
                            sealblock_runtime_reactor::yield_now().await;
                            *local * 2
                        }));
                        assert_eq!(result, Ok(*local * 2));
                    }
                });
            }
        });
        assert_eq!(cores.shutdown(HOUR), Stopped::default());
    });
}

#[test]
fn cores_call_each_other() {
    each(|config| {
        let cores = Cores::start(Placement::Count(2), config).expect("starts");
        let (first, second) = (cores.handle(0).expect("two"), cores.handle(1).expect("two"));
        let result = block_on(first.call(move || async move {
            let mut sum = 0;
            for i in 0..200u64 {
                sum += second.call(move || async move { i }).await.expect("the core lives");
            }
            (sum, thread::current().name().map(str::to_owned))
        }));
        let (sum, name) = result.expect("the core lives");
        assert_eq!(sum, 19_900);
        assert!(name.expect("cores are named").starts_with("core-"));
        assert_eq!(cores.handle(2).map(drop), None);
    });
}

#[test]
fn no_more_calls_run_than_the_limit_allows() {
    each(|config| {
        let config = Config { calls_in_flight_limit: 3, ..config };
        let cores = Cores::start(Placement::Count(1), config).expect("starts");
        let handle = cores.handle(0).expect("one");
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let work = |handle: CoreHandle| {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            call_owned(handle, move || async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                running.fetch_sub(1, Ordering::SeqCst);
            })
        };
        let local = Reactor::new(common::syscalls()).expect("starts");
        local.block_on(async {
            let calls: Vec<_> = (0..20).map(|_| spawn(work(handle.clone()))).collect();
            // By now all have called, so some of them wait.
            yield_now().await;
            // Dropped callers that wait must not take the turn of other callers with them.
            for call in calls.iter().skip(1).step_by(3) {
                call.abort();
            }
            for (i, call) in calls.into_iter().enumerate() {
                if i % 3 != 1 {
                    call.await.expect("not aborted").expect("the core lives");
                }
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
    });
}

async fn call_owned<W, F>(handle: CoreHandle, work: W) -> Result<(), CoreGone>
where
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    handle.call(work).await
}

#[test]
fn a_panic_in_a_call_is_told_and_survived() {
    each(|config| {
        let cores = Cores::start(Placement::Count(1), config).expect("starts");
        let handle = cores.handle(0).expect("one");
        assert_eq!(block_on(handle.call(|| async { panic!("inside") })), Err::<(), _>(CoreGone::Panicked));
        let in_closure = |_: ()| -> std::future::Ready<()> { panic!("before") };
        assert_eq!(block_on(handle.call(move || in_closure(()))), Err(CoreGone::Panicked));
        assert_eq!(block_on(handle.call(|| async { 4 })), Ok(4));
    });
}

#[test]
fn a_stopped_core_refuses_calls() {
    each(|config| {
        let cores = Cores::start(Placement::Count(1), config).expect("starts");
        let handle = cores.handle(0).expect("one");
        assert_eq!(block_on(handle.call(|| async { 4 })), Ok(4));
        assert_eq!(cores.shutdown(HOUR), Stopped::default());
        assert_eq!(block_on(handle.call(|| async { 4 })), Err(CoreGone::Stopped));
    });
}

#[test]
fn shutdown_waits_for_tasks_that_end() {
    each(|config| {
        let cores = Cores::start(Placement::Count(1), config).expect("starts");
        let handle = cores.handle(0).expect("one");
        let done = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&done);
        block_on(handle.call(move || async move {
            drop(spawn(async move {
                shutdown_requested().await;
                sleep(Duration::from_millis(3)).await;
                count.fetch_add(1, Ordering::SeqCst);
            }));
        }))
        .expect("the core lives");
        assert_eq!(cores.shutdown(HOUR), Stopped::default());
        assert_eq!(done.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn shutdown_aborts_tasks_that_do_not_end() {
    each(|config| {
        let cores = Cores::start(Placement::Count(2), config).expect("starts");
        let handle = cores.handle(1).expect("two");
        block_on(handle.call(|| async { drop(spawn(std::future::pending::<()>())) })).expect("the core lives");
        let stopped = cores.shutdown(Duration::from_millis(5));
        assert_eq!(stopped, Stopped { aborted_tasks: 1, panicked_cores: 0 });
    });
}

#[test]
fn shutdown_under_load_completes_every_call() {
    each(|config| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
        let cores = Cores::start(Placement::Count(2), config).expect("starts");
        let completed = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..4usize {
                let handle = cores.handle(number % 2).expect("two");
                let (path, completed) = (dir.path().join(number.to_string()), &completed);
                scope.spawn(move || {
                    loop {
                        let path = path.clone();
                        let result = block_on(handle.call(move || async move {
                            let options = Options { write: true, create: true, ..Options::default() };
                            let file = File::open(path, options)?;
                            file.write_all_at(Slice::copy_from(&[1; 8192]), 0).await?;
                            file.sync_data().await
                        }));
                        match result {
                            Ok(result) => result.expect("a core that completes a call has done the work"),
                            Err(gone) => return assert_eq!(gone, CoreGone::Stopped),
                        }
                        completed.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            while completed.load(Ordering::SeqCst) < 50 {
                thread::yield_now();
            }
            assert_eq!(cores.shutdown(HOUR), Stopped::default());
        });
    });
}

#[test]
fn a_core_that_cannot_start_says_why() {
    let config = Config { refuse_uring: Some(libc::EPERM), ..common::uring() };
    let error = Cores::start(Placement::Count(2), config).expect_err("a ring was required");
    assert!(matches!(error, StartError::Uring(_)), "{error}");
    let cores = Cores::start(Placement::Cpus(vec![0]), common::syscalls()).expect("starts");
    assert_eq!(cores.backend(0).expect("one").to_string(), "system calls on 4 threads");
}

#[test]
fn what_is_posted_is_done_in_order_unless_the_core_stops() {
    each(|config| {
        let cores = Cores::start(Placement::Count(1), config).expect("starts");
        let post = cores.handle(0).unwrap().address();
        assert!(!post.is_here());
        let (send, receive) = std::sync::mpsc::channel();
        for number in 0..100 {
            let (send, post, inner) = (send.clone(), post.clone(), post.clone());
            post.send(move || send.send((number, inner.is_here() && inner == CoreAddress::here())).unwrap()).unwrap();
        }
        post.send(|| panic!("work that fails alone")).unwrap();
        let got: Vec<_> = (0..100).map(|_| receive.recv().unwrap()).collect();
        assert_eq!(got, (0..100).map(|number| (number, true)).collect::<Vec<_>>());
        assert_eq!(block_on(cores.handle(0).unwrap().call(|| async { 7 })), Ok(7), "the core goes on");
        cores.shutdown(HOUR);
        assert_eq!(post.send(|| ()), Err(CoreGone::Stopped));
    });
}

/// Sends the thread on which it is dropped.
struct DropSender(std::sync::mpsc::Sender<thread::ThreadId>);

impl Drop for DropSender {
    fn drop(&mut self) {
        self.0.send(thread::current().id()).unwrap();
    }
}

#[test]
fn homed_values_are_used_and_dropped_at_home() {
    each(|config| {
        let cores = Cores::start(Placement::Count(2), config).expect("starts");
        let (send, receive) = std::sync::mpsc::channel();
        let make = |send: &std::sync::mpsc::Sender<thread::ThreadId>| {
            let send = send.clone();
            let handle = cores.handle(0).unwrap();
            let made = handle.call(move || async move {
                let local = CoreLocal::new(std::rc::Rc::new(DropSender(send)));
                assert!(local.get().is_some());
                (local, thread::current().id())
            });
            block_on(made).unwrap()
        };
        let (local, home) = make(&send);
        assert!(local.get().is_none(), "this is no reactor");
        let elsewhere = local.clone();
        let there = block_on(cores.handle(1).unwrap().call(move || async move { elsewhere.get().is_some() }));
        assert_eq!(there, Ok(false));
        drop(local);
        assert_eq!(receive.recv(), Ok(home), "the last handle takes the value along");
        let (kept, home) = make(&send);
        cores.shutdown(HOUR);
        assert_eq!(receive.recv(), Ok(home), "the end of the home does, too");
        drop(kept);
    });
}
