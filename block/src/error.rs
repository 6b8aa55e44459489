//! Errors: what failed, on which blocks, and on which device.

use std::fmt;

use sealblock_integrity::{Checks, Field, Mismatch, PiFormat, Sealed, verify};
use sealblock_units::{Extent, Lba};

use crate::{BadBlock, Coverage, Expectations, RequestKind, WhyOlder};

/// The bad blocks of one request: at least one, in ascending order, each once per member that holds a bad copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadBlocks {
    list: Vec<BadBlock>,
    coverage: Coverage,
}

impl BadBlocks {
    /// Sorts the bad blocks and drops duplicates; `None` if there are no bad blocks.
    pub fn new(mut bad_blocks: Vec<BadBlock>) -> Option<BadBlocks> {
        bad_blocks.sort_by_key(|bad_block| (bad_block.lba, bad_block.member));
        bad_blocks.dedup_by_key(|bad_block| (bad_block.lba, bad_block.member));
        if bad_blocks.is_empty() { None } else { Some(BadBlocks { list: bad_blocks, coverage: Coverage::default() }) }
    }

    /// Fails with these bad blocks, if there are any.
    ///
    /// # Errors
    /// The bad blocks.
    pub fn fail_if_any(bad_blocks: Vec<BadBlock>) -> Result<(), Error> {
        BadBlocks::new(bad_blocks).map_or(Ok(()), |bad_blocks| Err(bad_blocks.into()))
    }

    /// The same bad blocks, with the coverage of the check that found them.
    #[must_use]
    pub fn with_coverage(self, coverage: Coverage) -> BadBlocks {
        BadBlocks { coverage, ..self }
    }

    /// The coverage of the check that found them; complete for reads.
    pub fn coverage(&self) -> &Coverage {
        &self.coverage
    }

    /// The first bad block.
    pub fn first(&self) -> &BadBlock {
        &self.list[0]
    }

    /// All bad blocks.
    pub fn as_slice(&self) -> &[BadBlock] {
        &self.list
    }

    /// All bad blocks, and the coverage of the check that found them.
    pub fn into_parts(self) -> (Vec<BadBlock>, Coverage) {
        (self.list, self.coverage)
    }
}

impl fmt::Display for BadBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first())?;
        match self.list.len() {
            1 => Ok(()),
            n => write!(f, " (and {} more damaged blocks)", n - 1),
        }
    }
}

/// The kind of an error.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ErrorKind {
    /// The device's own check found blocks that are not as they were written, or that are unreadable.
    #[error("integrity error: {0}")]
    Integrity(BadBlocks),
    /// A good block has another tag than the requester expected ([`crate::Expectations`]). This answers the request,
    /// and is no damage.
    #[error("block {lba} has the {field} {actual:#x}, and the request expects {expected:#x}")]
    Expectation {
        /// The first such block.
        lba: Lba,
        /// The first field of it that differs.
        field: Field,
        /// The expected value; bits that are not compared are as found.
        expected: u64,
        /// The actual value.
        actual: u64,
    },
    /// Compared data differ.
    #[error("block {lba} differs from the data it was compared with")]
    Miscompare {
        /// The first block that differs.
        lba: Lba,
    },
    /// The medium failed.
    #[error("the medium failed: {reason}")]
    Media {
        /// The error of the medium.
        reason: String,
    },
    /// The medium is full.
    #[error("no space left on the medium: {reason}")]
    NoSpace {
        /// What was written.
        reason: String,
    },
    /// The device is read-only.
    #[error("the device is open for reading only")]
    ReadOnly,
    /// Blocks past the end of the device.
    #[error("{extent} go past the last block, {last}")]
    Range {
        /// The requested blocks.
        extent: Extent,
        /// The last block of the device.
        last: Lba,
    },
    /// The request exceeds a limit or does not fit the device's geometry.
    #[error("{what}: {actual}, the device takes {limit}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// The device's value.
        limit: u64,
        /// The request's value.
        actual: u64,
    },
    /// The device does not support requests of this kind.
    #[error("the device does not support {}", .0.name())]
    Absent(RequestKind),
    /// The newest writes may be missing, and the caller that opened the device did not accept that.
    #[error("blocks may be older than what was written: {0}")]
    MayBeOlder(WhyOlder),
    /// The device is unreachable.
    #[error("the device cannot be reached: {reason}")]
    Unreachable {
        /// The reason.
        reason: String,
    },
}

/// An error, and the device that it happened on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    kind: Box<ErrorKind>,
    device_name: Option<Box<str>>,
}

impl Error {
    /// The kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The kind of the error, owned.
    pub fn into_kind(self) -> ErrorKind {
        *self.kind
    }

    /// The name of the device that failed, once its gate has added it.
    pub fn device_name(&self) -> Option<&str> {
        self.device_name.as_deref()
    }

    /// Names the device that failed, unless a device further down is named already.
    pub fn with_device(mut self, name: &str) -> Error {
        self.device_name.get_or_insert_with(|| name.into());
        self
    }

    /// The bad blocks, if the kind is [`ErrorKind::Integrity`].
    pub fn bad_blocks(&self) -> Option<&BadBlocks> {
        match &*self.kind {
            ErrorKind::Integrity(bad_blocks) => Some(bad_blocks),
            _ => None,
        }
    }

    /// The bad blocks, owned.
    ///
    /// # Errors
    /// An error of another kind.
    pub fn into_bad_blocks(self) -> Result<Vec<BadBlock>, Error> {
        self.into_damage().map(|(bad_blocks, _)| bad_blocks)
    }

    /// The bad blocks, and the coverage of the check that found them.
    ///
    /// # Errors
    /// An error of another kind.
    pub fn into_damage(self) -> Result<(Vec<BadBlock>, Coverage), Error> {
        match *self.kind {
            ErrorKind::Integrity(bad_blocks) => Ok(bad_blocks.into_parts()),
            kind => Err(Error { kind: Box::new(kind), device_name: self.device_name }),
        }
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Error {
        Error { kind: Box::new(kind), device_name: None }
    }
}

impl From<BadBlocks> for Error {
    fn from(bad_blocks: BadBlocks) -> Error {
        ErrorKind::Integrity(bad_blocks).into()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device_name {
            Some(name) => write!(f, "{name}: {}", self.kind),
            None => write!(f, "{}", self.kind),
        }
    }
}

impl std::error::Error for Error {}

impl Expectations {
    /// Checks whether blocks that were read from `extent` are as expected.
    ///
    /// # Errors
    /// [`ErrorKind::Expectation`] with the first block that is not.
    pub fn check(&self, extent: Extent, read: &Sealed) -> Result<(), Error> {
        let Some(format) = read.format().filter(|_| !self.is_none()) else { return Ok(()) };
        // Guards that are known to match are not checked again.
        let all = *self.checks();
        let checks = Checks { guard: all.guard && !read.has_verified_guards(), ..all };
        let (mut first, mut done): (Option<Mismatch>, usize) = (None, 0);
        for segment in read.segments() {
            let part = checks.advance(done as u64, format);
            let mut note = |found: Mismatch| {
                first.get_or_insert(Mismatch { block: done + found.block, ..found });
            };
            verify(format, read.size(), &segment.data, &segment.tags, &part, &mut note);
            done += segment.data.len() >> read.size().shift();
        }
        first.map_or(Ok(()), |first| Err(ErrorKind::unexpected(extent.start(), &first).into()))
    }
}

impl ErrorKind {
    /// A tag in a run of blocks from `start` that is not as the requester expected.
    pub fn unexpected(start: Lba, mismatch: &Mismatch) -> ErrorKind {
        let Mismatch { block, field, expected, actual } = *mismatch;
        ErrorKind::Expectation { lba: Lba::new(start.get().saturating_add(block as u64)), field, expected, actual }
    }

    /// The same failed expectation, at the address and with the reference tag that the requester sees. Errors of other
    /// kinds are unchanged.
    #[must_use]
    pub fn expectation_at(self, to: Lba, format: Option<PiFormat>) -> ErrorKind {
        let ErrorKind::Expectation { lba, field, expected, actual } = self else { return self };
        let delta = to.get().wrapping_sub(lba.get());
        let moved = |tag| match format {
            Some(format) if field == Field::RefTag => format.reference_tag(tag, delta),
            _ => tag,
        };
        ErrorKind::Expectation { lba: to, field, expected: moved(expected), actual: moved(actual) }
    }
}

/// Collects the bad blocks and the coverage of several checks, of several extents or copies.
#[derive(Default)]
pub struct Tally {
    /// The bad blocks of all checks.
    pub bad_blocks: Vec<BadBlock>,
    /// The coverage of all checks.
    pub coverage: Coverage,
    /// The first expectation of the requester that was not met. Bad blocks take precedence, wherever they are.
    pub unexpected: Option<Error>,
}

impl Tally {
    /// Adds the bad blocks and the coverage of a check that failed, or records that an expectation was not met.
    ///
    /// # Errors
    /// An error of another kind.
    pub fn take(&mut self, error: Error) -> Result<(), Error> {
        if matches!(error.kind(), ErrorKind::Expectation { .. }) {
            self.unexpected.get_or_insert(error);
            return Ok(());
        }
        let (bad_blocks, coverage) = error.into_damage()?;
        self.bad_blocks.extend(bad_blocks);
        self.coverage.merge(coverage);
        Ok(())
    }

    /// The coverage of the checks, if they found no bad block and everything was as expected.
    ///
    /// # Errors
    /// The bad blocks; without any, the first expectation that was not met.
    pub fn finish(self) -> Result<Coverage, Error> {
        match (BadBlocks::new(self.bad_blocks), self.unexpected) {
            (Some(bad_blocks), _) => Err(bad_blocks.with_coverage(self.coverage).into()),
            (None, Some(unexpected)) => Err(unexpected),
            (None, None) => Ok(self.coverage),
        }
    }
}
