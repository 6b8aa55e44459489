//! Syncs of one medium that several users share, on any cores.
//!
//! A sync covers the writes that had returned before it began. So whoever wants one needs a sync that begins after its
//! call: if none is running, it runs one; if one is running, it waits for the next, which one of those that wait runs
//! for all of them. N users that sync at once cost at most two syncs.
//!
//! Invariants:
//! - A call that succeeds was covered by a sync that began after the call and succeeded.
//! - The system reports a failed write-back only once, to one caller, whoever wrote the data; a later sync may succeed
//!   although they are lost. So after one failed sync every other one fails, and [`SyncGroup::failure`] says why.
//! - If the future of the one that runs a sync is dropped, another one of those that wait runs it. As with any operation
//!   whose future is dropped, nobody learns how that sync ended.

use std::future::{Future, poll_fn};
use std::sync::{OnceLock, PoisonError};
use std::task::{Poll, Waker};

use crate::primitives::{Mutex, MutexGuard};

/// The syncs of one medium. See the file's header.
#[derive(Default)]
pub struct SyncGroup {
    syncs: Mutex<Syncs>,
    failure: OnceLock<Box<str>>,
}

#[derive(Default)]
struct Syncs {
    /// How many have begun.
    begun: u64,
    /// The last one that succeeded.
    succeeded: u64,
    is_running: bool,
    waiting: Vec<Waker>,
}

/// A sync that is running.
struct RunningSync<'a> {
    group: &'a SyncGroup,
    number: u64,
}

impl SyncGroup {
    /// Runs `sync`, or waits for the success of one that another user runs, but that begins after this call.
    ///
    /// # Errors
    /// Why this sync, or an earlier one, failed; or the reason of [`SyncGroup::fail`].
    pub async fn sync<F, E>(&self, sync: impl FnOnce() -> F) -> Result<(), String>
    where
        F: Future<Output = Result<(), E>>,
        E: ToString,
    {
        let wanted = self.lock().begun + 1;
        let Some(running) = poll_fn(|cx| self.begin(wanted, cx.waker())).await else { return self.check() };
        let ended = sync().await;
        match ended {
            Ok(()) => running.succeed(),
            Err(error) => self.fail(&error.to_string()),
        }
        self.check()
    }

    /// Begins a sync; `None` once the wanted one has succeeded, or after a failure.
    fn begin(&self, wanted: u64, waker: &Waker) -> Poll<Option<RunningSync<'_>>> {
        let mut syncs = self.lock();
        if syncs.succeeded >= wanted || self.failure().is_some() {
            return Poll::Ready(None);
        }
        if syncs.is_running {
            if !syncs.waiting.iter().any(|waiting| waiting.will_wake(waker)) {
                syncs.waiting.push(waker.clone());
            }
            return Poll::Pending;
        }
        syncs.is_running = true;
        syncs.begun += 1;
        Poll::Ready(Some(RunningSync { group: self, number: syncs.begun }))
    }

    /// Makes all users stop writing: from now on every sync fails with this reason. A second reason is ignored.
    pub fn fail(&self, reason: &str) {
        let _ = self.failure.set(reason.into());
        self.wake_all();
    }

    /// Why nothing may be written any more; `None` while nothing has failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(AsRef::as_ref)
    }

    fn check(&self) -> Result<(), String> {
        self.failure().map_or(Ok(()), |reason| Err(reason.to_owned()))
    }

    fn wake_all(&self) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Syncs> {
        self.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningSync<'_> {
    fn succeed(self) {
        self.group.lock().succeeded = self.number;
    }
}

impl Drop for RunningSync<'_> {
    fn drop(&mut self) {
        self.group.lock().is_running = false;
        self.group.wake_all();
    }
}
