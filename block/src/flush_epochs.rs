//! Which writes a Flush can still vouch for.
//!
//! A server with a volatile write cache may have lost, together with a connection, writes that it had acknowledged: from
//! here a crash and a broken cable look the same. A later Flush on a new connection would succeed and vouch for what is
//! gone. So the first Flush after such a loss fails and says so; then whoever flushes knows, and what is written from there
//! on is vouched for again. Writes are not kept to be repeated: another client may have written the same blocks since,
//! and the memory of a writer's buffers is not the device's to hold.
//!
//! Invariant: a Flush vouches for a write only if both were acknowledged in the same session.

use std::cell::Cell;

use crate::{Error, ErrorKind};

/// The writes of a device behind a connection, by count, and whether any of them are in doubt. A *session* is the time for
/// which the server is sure to be the same. Belongs to one core.
#[derive(Default)]
pub struct FlushEpochs {
    /// The session that counts now.
    epoch: Cell<u64>,
    /// Volatile writes that were acknowledged in this session.
    written: Cell<u64>,
    /// Of these, how many a Flush has made durable.
    flushed: Cell<u64>,
    in_doubt: Cell<bool>,
}

impl FlushEpochs {
    /// The session that counts now. Whoever sends a request notes it first, and tells it with the answer.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// A volatile write was acknowledged in this session.
    pub fn write_completed(&self, epoch: u64) {
        match epoch == self.epoch.get() {
            true => self.written.set(self.written.get() + 1),
            // Its answer came with the last bytes of a connection that is gone.
            false => self.in_doubt.set(true),
        }
    }

    /// A Flush starts: the mark of the writes it will vouch for, for [`FlushEpochs::flushed`].
    ///
    /// # Errors
    /// Writes in doubt make it fail, once.
    pub fn flush_started(&self) -> Result<u64, WritesLost> {
        if self.in_doubt.take() { Err(WritesLost) } else { Ok(self.written.get()) }
    }

    /// A Flush of that mark succeeded in this session.
    pub fn flush_completed(&self, epoch: u64, mark: u64) {
        if epoch == self.epoch.get() {
            self.flushed.set(self.flushed.get().max(mark));
        }
    }

    /// The session is over. Where writes are volatile, those that were not flushed are in doubt.
    pub fn session_lost(&self, is_volatile: bool) {
        if is_volatile && self.written.get() > self.flushed.get() {
            self.in_doubt.set(true);
        }
        self.epoch.set(self.epoch.get() + 1);
        self.written.set(0);
        self.flushed.set(0);
    }
}

/// Writes that were acknowledged may be gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the connection was lost after writes that were acknowledged and not flushed: these writes may be lost and are to be \
     written again"
)]
pub struct WritesLost;

impl From<WritesLost> for Error {
    fn from(doubt: WritesLost) -> Error {
        ErrorKind::Media { reason: doubt.to_string() }.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_vouches_for_the_writes_before_it() {
        let ledger = FlushEpochs::default();
        ledger.write_completed(0);
        let mark = ledger.flush_started().unwrap();
        ledger.flush_completed(0, mark);
        ledger.session_lost(true);
        assert_eq!(ledger.flush_started(), Ok(0));
    }

    #[test]
    fn a_write_that_was_not_flushed_makes_the_next_flush_fail_and_only_that() {
        let ledger = FlushEpochs::default();
        let mark = ledger.flush_started().unwrap();
        ledger.write_completed(0);
        ledger.flush_completed(0, mark);
        ledger.session_lost(true);
        assert_eq!(ledger.flush_started(), Err(WritesLost));
        assert_eq!(ledger.flush_started(), Ok(0));
    }

    #[test]
    fn where_writes_are_durable_at_once_nothing_is_in_doubt() {
        let ledger = FlushEpochs::default();
        ledger.write_completed(0);
        ledger.session_lost(false);
        assert_eq!(ledger.flush_started(), Ok(0));
    }

    #[test]
    fn an_answer_that_is_read_after_its_session_is_in_doubt() {
        let ledger = FlushEpochs::default();
        ledger.session_lost(true);
        ledger.write_completed(0);
        assert_eq!(ledger.flush_started(), Err(WritesLost));
        ledger.write_completed(1);
        ledger.flush_completed(0, 1);
        ledger.session_lost(true);
        assert_eq!(
            ledger.flush_started(),
            Err(WritesLost),
            "a flush of an earlier session does not vouch for this one"
        );
    }

    #[test]
    fn a_failed_flush_says_that_writes_may_be_lost() {
        let failure = Error::from(WritesLost).into_kind();
        assert!(matches!(&failure, ErrorKind::Media { reason } if reason.contains("may be lost")), "{failure}");
    }
}
