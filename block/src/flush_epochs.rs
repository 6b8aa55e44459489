//! Flush epochs: which completed writes a Flush can make durable on a device that may lose its connection.
//!
//! A server with a volatile write cache may lose completed writes together with the connection: the client cannot
//! distinguish a crash from a broken cable. A Flush on the next connection would succeed although those writes are
//! gone. So the first Flush after such a loss fails, which reports it to the client, and later writes can be flushed
//! again. Writes are not kept for a retry: another client may have written the same blocks since, and the device does
//! not own the buffers of a writer.
//!
//! Invariant: a Flush makes a write durable only if both completed in the same session.

use std::cell::Cell;

use crate::{Error, ErrorKind};

/// Counts the writes of a device behind a connection, and records whether some may be lost. A *session* is a period in
/// which the server certainly did not restart. Belongs to one core.
#[derive(Default)]
pub struct FlushEpochs {
    /// The number of the current session.
    epoch: Cell<u64>,
    /// Volatile writes that completed in this session.
    written: Cell<u64>,
    /// The number of these that a Flush has made durable.
    flushed: Cell<u64>,
    /// True if completed writes may be lost and no Flush has failed for them yet.
    has_lost_writes: Cell<bool>,
}

impl FlushEpochs {
    /// The number of the current session. The sender of a request reads it first and passes it with the completion.
    pub fn epoch(&self) -> u64 {
        self.epoch.get()
    }

    /// Records that a volatile write of session `epoch` completed.
    pub fn write_completed(&self, epoch: u64) {
        match epoch == self.epoch.get() {
            true => self.written.set(self.written.get() + 1),
            // The response was the last on a connection that is lost by now.
            false => self.has_lost_writes.set(true),
        }
    }

    /// Starts a Flush. Returns the count of writes that it will make durable, for [`FlushEpochs::flush_completed`].
    ///
    /// # Errors
    /// Once after completed writes may have been lost.
    pub fn flush_started(&self) -> Result<u64, WritesLost> {
        if self.has_lost_writes.take() { Err(WritesLost) } else { Ok(self.written.get()) }
    }

    /// Records that a Flush of session `epoch` succeeded that had started at the count `mark`.
    pub fn flush_completed(&self, epoch: u64, mark: u64) {
        if epoch == self.epoch.get() {
            self.flushed.set(self.flushed.get().max(mark));
        }
    }

    /// Records that the session is lost. If writes are volatile, those that were not flushed may be lost.
    pub fn session_lost(&self, is_volatile: bool) {
        if is_volatile && self.written.get() > self.flushed.get() {
            self.has_lost_writes.set(true);
        }
        self.epoch.set(self.epoch.get() + 1);
        self.written.set(0);
        self.flushed.set(0);
    }
}

/// Completed writes may be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the connection was lost after writes that were acknowledged and not flushed: these writes may be lost and must be \
     written again"
)]
pub struct WritesLost;

impl From<WritesLost> for Error {
    fn from(lost: WritesLost) -> Error {
        ErrorKind::Media { reason: lost.to_string() }.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_makes_the_writes_before_it_durable() {
        let epochs = FlushEpochs::default();
        epochs.write_completed(0);
        let mark = epochs.flush_started().unwrap();
        epochs.flush_completed(0, mark);
        epochs.session_lost(true);
        assert_eq!(epochs.flush_started(), Ok(0));
    }

    #[test]
    fn a_write_that_was_not_flushed_makes_the_next_flush_fail_and_only_that() {
        let epochs = FlushEpochs::default();
        let mark = epochs.flush_started().unwrap();
        epochs.write_completed(0);
        epochs.flush_completed(0, mark);
        epochs.session_lost(true);
        assert_eq!(epochs.flush_started(), Err(WritesLost));
        assert_eq!(epochs.flush_started(), Ok(0));
    }

    #[test]
    fn durable_writes_are_never_lost() {
        let epochs = FlushEpochs::default();
        epochs.write_completed(0);
        epochs.session_lost(false);
        assert_eq!(epochs.flush_started(), Ok(0));
    }

    #[test]
    fn a_write_that_completes_after_its_session_may_be_lost() {
        let epochs = FlushEpochs::default();
        epochs.session_lost(true);
        epochs.write_completed(0);
        assert_eq!(epochs.flush_started(), Err(WritesLost));
        epochs.write_completed(1);
        epochs.flush_completed(0, 1);
        epochs.session_lost(true);
        assert_eq!(
            epochs.flush_started(),
            Err(WritesLost),
            "a flush of an earlier session covers no write of this one"
        );
    }

    #[test]
    fn a_failed_flush_says_that_writes_may_be_lost() {
        let failure = Error::from(WritesLost).into_kind();
        assert!(matches!(&failure, ErrorKind::Media { reason } if reason.contains("may be lost")), "{failure}");
    }
}
