//! The changes in flight on a device's owner core, by the session that sent them, so that the end of a session can find
//! them.
//!
//! Invariant: a change is listed before it claims its blocks, and until it has ended.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use sealblock_block::Request;
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

/// The changes in flight on a device's owner core that did not complete at once.
#[derive(Default)]
pub(crate) struct ChangesInFlight(RefCell<Slab<Change>>);

struct Change {
    session: SessionId,
    blocks: RangeInclusive<u64>,
    source: Option<RangeInclusive<u64>>,
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
        let key = self.0.borrow_mut().insert(Change { session, blocks, source });
        Some(ChangeGuard { changes: self, key })
    }

    /// The blocks of a session's changes.
    pub(crate) fn of(&self, session: SessionId) -> Vec<RangeInclusive<u64>> {
        let changes = self.0.borrow();
        let own = changes.iter().map(|(_, change)| change).filter(|change| change.session == session);
        own.flat_map(|change| std::iter::once(&change.blocks).chain(&change.source)).cloned().collect()
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.changes.0.borrow_mut().remove(self.key);
    }
}
