//! The changes in flight on a core that has a device open, by the session that sent them, so that the end of a session
//! can find them.
//!
//! Invariant: a change is listed before it claims its blocks, and until it has ended.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use sealblock_block::{Error, ErrorKind, Request};
use slab::Slab;

/// Identifies a session of a client; unique in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SessionId(u64);

impl SessionId {
    /// An identifier that was never used before.
    pub(crate) fn new() -> SessionId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        SessionId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The changes in flight on a core that has a device open that did not complete at once.
#[derive(Default)]
pub(crate) struct ChangesInFlight(RefCell<Slab<Change>>);

struct Change {
    session: SessionId,
    blocks: RangeInclusive<u64>,
    source: Option<RangeInclusive<u64>>,
    is_fenced: bool,
}

/// Removes a change from those in flight when dropped.
pub(crate) struct ChangeGuard<'a> {
    changes: &'a ChangesInFlight,
    key: usize,
}

impl ChangesInFlight {
    /// Adds a request that is about to claim its blocks; `None` for one that changes no blocks.
    pub(crate) fn start(&self, session: SessionId, request: &Request) -> Option<ChangeGuard<'_>> {
        let blocks = request.changed()?;
        let source = request.source().map(|source| source.start().get()..=source.last().get());
        let key = self.0.borrow_mut().insert(Change { session, blocks, source, is_fenced: false });
        Some(ChangeGuard { changes: self, key })
    }

    /// The blocks of a session's changes, which are fenced from now on.
    pub(crate) fn fence(&self, session: SessionId) -> Vec<RangeInclusive<u64>> {
        let mut changes = self.0.borrow_mut();
        let mut blocks = Vec::new();
        for (_, change) in changes.iter_mut().filter(|(_, change)| change.session == session) {
            change.is_fenced = true;
            blocks.extend(std::iter::once(&change.blocks).chain(&change.source).cloned());
        }
        blocks
    }
}

impl ChangeGuard<'_> {
    /// Refuses a change that has not claimed its blocks yet, if its session has ended: the fence has not waited for it.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.changes.0.borrow()[self.key].is_fenced {
            true => Err(session_has_ended()),
            false => Ok(()),
        }
    }
}

/// The error of a change that began after the end of its session.
pub(crate) fn session_has_ended() -> Error {
    ErrorKind::Unreachable { reason: "the session of its client has ended".to_owned() }.into()
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.changes.0.borrow_mut().remove(self.key);
    }
}
