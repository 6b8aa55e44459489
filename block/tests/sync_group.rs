//! Syncs of several users of one medium, under random interleavings of their steps: each rule of `sync_group.rs`, and
//! variants that break one, which must be caught.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use shuttle::future::block_on;
use shuttle::{check_random, thread};

/// The model checker's lock replaces the standard one for the file that is included below.
mod primitives {
    pub use shuttle::sync::{Mutex, MutexGuard};
}

#[path = "../src/sync_group.rs"]
mod sync_group;

use sync_group::SyncGroup;

const INTERLEAVINGS: usize = 20_000;
const USERS: usize = 3;

/// A medium whose syncs cover what was written when they began. Its own lock is no step of the model.
#[derive(Default)]
struct Medium {
    group: SyncGroup,
    state: std::sync::Mutex<State>,
}

#[derive(Default)]
struct State {
    written: Vec<usize>,
    durable: Vec<usize>,
    syncs: usize,
    in_flight: usize,
    /// The number of the sync that fails, and loses what it should have made durable.
    fails_at: Option<usize>,
}

impl Medium {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn write(&self, user: usize) {
        self.state().written.push(user);
        thread::yield_now();
    }

    async fn sync(&self) -> Result<(), &'static str> {
        let (covered, fails) = {
            let mut state = self.state();
            state.syncs += 1;
            state.in_flight += 1;
            assert_eq!(state.in_flight, 1, "two syncs run at once");
            (state.written.clone(), state.fails_at == Some(state.syncs))
        };
        pause().await;
        let mut state = self.state();
        state.in_flight -= 1;
        if fails {
            // It is reported once, and a later sync succeeds without these writes.
            state.written.retain(|user| !covered.contains(user));
            return Err("a write-back failed");
        }
        state.durable.extend(covered);
        Ok(())
    }

    fn is_durable(&self, user: usize) -> bool {
        self.state().durable.contains(&user)
    }
}

/// Lets other threads run in the middle of a future.
async fn pause() {
    let mut has_paused = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_paused, true) {
            return Poll::Ready(());
        }
        thread::yield_now();
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// How a user syncs.
type Sync = fn(&Medium) -> Result<(), String>;

fn in_group(medium: &Medium) -> Result<(), String> {
    block_on(medium.group.sync(|| medium.sync()))
}

/// Each user writes and syncs. What a sync said to be durable is durable.
fn run(fails_at: Option<usize>, syncs: [Sync; USERS]) {
    let medium = Arc::new(Medium::default());
    medium.state().fails_at = fails_at;
    let users: Vec<_> = (0..USERS)
        .map(|user| {
            let (medium, sync) = (Arc::clone(&medium), syncs[user]);
            thread::spawn(move || {
                medium.write(user);
                let synced = sync(&medium);
                assert!(synced.is_err() || medium.is_durable(user), "a sync ended well that did not cover the write");
                synced.is_err()
            })
        })
        .collect();
    let failed = users.into_iter().map(|user| user.join().unwrap()).filter(|failed| *failed).count();
    let syncs = medium.state().syncs;
    assert!(syncs <= USERS, "{syncs} syncs");
    assert_eq!(medium.group.failure().is_some(), failed > 0);
    assert!(fails_at.is_none_or(|at| at > syncs || failed > 0), "a failure was told to nobody");
}

#[test]
fn a_sync_that_ends_well_covers_what_was_written_before() {
    check_random(|| run(None, [in_group; USERS]), INTERLEAVINGS);
}

#[test]
fn after_a_failure_no_sync_ends_well() {
    check_random(|| run(Some(1), [in_group; USERS]), INTERLEAVINGS);
    check_random(|| run(Some(2), [in_group; USERS]), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "did not cover the write")]
fn one_that_joins_the_running_sync_is_caught() {
    /// Takes the end of the sync that runs already.
    fn join_running(medium: &Medium) -> Result<(), String> {
        let syncs = medium.state().syncs;
        if medium.state().in_flight == 0 {
            return in_group(medium);
        }
        while medium.state().in_flight > 0 && medium.state().syncs == syncs {
            thread::yield_now();
        }
        medium.group.failure().map_or(Ok(()), |why| Err(why.to_owned()))
    }
    check_random(|| run(None, [join_running; USERS]), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "did not cover the write")]
fn a_failure_that_only_one_learns_of_is_caught() {
    /// Each of them syncs by itself, one after the other, and takes the answer of the system.
    fn alone(medium: &Medium) -> Result<(), String> {
        loop {
            if medium.state().in_flight == 0 {
                let synced = block_on(medium.sync()).map_err(str::to_owned);
                if let Err(why) = &synced {
                    medium.group.fail(why);
                }
                return synced;
            }
            thread::yield_now();
        }
    }
    check_random(|| run(Some(1), [alone; USERS]), INTERLEAVINGS);
}

#[test]
fn one_of_those_that_wait_runs_the_sync_of_one_that_was_dropped() {
    check_random(
        || {
            let medium = Arc::new(Medium::default());
            medium.write(0);
            let dropped = Arc::clone(&medium);
            let first = thread::spawn(move || {
                let mut sync = pin!(dropped.group.sync(|| dropped.sync_and_stay()));
                let _ = sync.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            });
            let other = Arc::clone(&medium);
            let second = thread::spawn(move || {
                other.write(1);
                in_group(&other).unwrap();
                assert!(other.is_durable(1));
            });
            first.join().unwrap();
            second.join().unwrap();
        },
        INTERLEAVINGS,
    );
}

impl Medium {
    /// A sync that does not end.
    async fn sync_and_stay(&self) -> Result<(), &'static str> {
        thread::yield_now();
        std::future::pending().await
    }
}
