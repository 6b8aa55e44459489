//! Executes block requests as NVM commands.

use sealblock_block::{
    Ability, BadBlock, BadBlockCause, BadBlocks, Coverage, Durability, Error, ErrorKind, Outcome, RequestKind,
    Response, Tally, Unchecked, VerifyStats, WhyUnchecked,
};
use sealblock_integrity::{Checks, Sealed};
use sealblock_protocols_nvme::extensions::Extensions;
use sealblock_protocols_nvme::nvm::{
    BlockCommand, DatasetManagement, DsmRange, IoCommand, ProtectionInfo, WriteZeroes,
};
use sealblock_protocols_nvme::{Invalid, StatusCode};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};
use zerocopy::IntoBytes;

use crate::bad_block_search::{BadBlockSearch, Probe, logged_block};
use crate::block_codec;
use crate::commands::{CompletedCommand, Io};

use crate::session::Session;
use crate::status::bad_block_cause;

impl Io {
    /// Verifies the data of a Read that succeeded.
    fn check_read(&self, extent: Extent, checks: &Checks, completed: CompletedCommand) -> Outcome {
        let needed = self.codec.read_bytes(extent);
        let read = completed.result.data.filter(|data| data.buffer.len() == needed && !data.is_damaged);
        let Some(read) = read else {
            let reason =
                format!("the target says that it has read {extent}, and sent less than the {needed} bytes of them");
            return Err(ErrorKind::Media { reason }.into());
        };
        let checksummed_bytes = &self.session.counters.guard_bytes_checksummed;
        match self.codec.check_read(read, checks, completed.session.pool(), checksummed_bytes) {
            Ok(sealed) => Ok(Response::Data(sealed)),
            Err(mismatches) => Err(integrity(block_codec::bad_blocks(extent.start(), &mismatches))),
        }
    }

    pub(crate) async fn read(&self, extent: Extent, checks: Checks) -> Outcome {
        let (protection, _) = self.codec.read_checks(extent, &checks, false);
        let completed = self.read_once(extent, protection).await?;
        let status = completed.status();
        if status.is_success() {
            return self.check_read(extent, &checks, completed);
        }
        let Some(cause) = bad_block_cause(status) else {
            return Err(self.failed(RequestKind::Read, Some(extent), &completed));
        };
        let is_seen_here = self.codec.pi_mode.shown().is_some() && cause != BadBlockCause::Media;
        if is_seen_here {
            // The target found wrong tags. Read again without its checks: this host then finds every bad block, with the
            // expected and actual values.
            let unchecked = self.read_once(extent, ProtectionInfo::NONE).await?;
            if unchecked.status().is_success() {
                return self.check_read(extent, &checks, unchecked);
            }
        }
        Err(match BadBlocks::new(BadBlockSearch::new(self, checks, self.probe()).of(extent, &completed).await?) {
            Some(bad_blocks) => bad_blocks.into(),
            None => self.failed(RequestKind::Read, Some(extent), &completed),
        })
    }

    /// The command that searches for bad blocks.
    pub(crate) fn probe(&self) -> Probe {
        if self.session.profile.abilities.verify == Ability::Native { Probe::Verify } else { Probe::Read }
    }

    pub(crate) async fn write(&self, extent: Extent, data: &Sealed, durability: Durability) -> Outcome {
        let force_unit_access = durability == Durability::ForceUnitAccess;
        let protection = self.codec.write_checks(extent, data);
        let blocks = BlockCommand { protection, force_unit_access, ..BlockCommand::new(extent) };
        let command = self.encode(IoCommand::Write(blocks))?;
        let build = |session: &Session| Ok((command, HostData::Write(self.codec.payload(data, session.pool()))));
        let completed = self.execute(build).await?;
        if completed.status().is_success() {
            self.note_write(&completed, durability);
            return Ok(Response::Done);
        }
        Err(match bad_block_cause(completed.status()) {
            Some(cause) => self.write_refused(extent, data, cause, &completed).await,
            None => self.failed(RequestKind::Write, Some(extent), &completed),
        })
    }

    /// The error of a Write whose tags the target rejected. Reports the blocks whose tags mismatch here already; else the
    /// tags changed in transfer or do not match the command, and the target's error log names the first block.
    async fn write_refused(
        &self,
        extent: Extent,
        data: &Sealed,
        cause: BadBlockCause,
        completed: &CompletedCommand,
    ) -> Error {
        if let Some(format) = self.codec.pi_mode.shown() {
            let mut wrong = Vec::new();
            let checks = Checks::full(format, extent.start());
            let on_wrong = &mut |mismatch| wrong.push(mismatch);
            let (data, tags) = (data.joined_data(), data.joined_tags());
            sealblock_integrity::verify(format, self.codec.size, &data, &tags, &checks, on_wrong);
            if !wrong.is_empty() {
                return integrity(block_codec::bad_blocks(extent.start(), &wrong));
            }
        }
        match logged_block(completed, extent).await {
            Some(lba) => integrity(vec![BadBlock::new(lba, cause, None, None)]),
            None => self.failed(RequestKind::Write, Some(extent), completed),
        }
    }

    fn note_write(&self, completed: &CompletedCommand, durability: Durability) {
        if durability == Durability::Volatile {
            self.session.flush_epochs.write_completed(completed.epoch);
        }
    }

    pub(crate) async fn flush(&self) -> Outcome {
        let command = self.encode(IoCommand::Flush)?;
        let mark = std::cell::Cell::new(0);
        let build = |_: &Session| {
            mark.set(self.session.flush_epochs.flush_started()?);
            Ok((command, HostData::None))
        };
        let completed = self.execute(build).await?;
        if !completed.status().is_success() {
            return Err(self.failed(RequestKind::Flush, None, &completed));
        }
        self.session.flush_epochs.flush_completed(completed.epoch, mark.get());
        Ok(Response::Done)
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        let force_unit_access = durability == Durability::ForceUnitAccess;
        let blocks =
            BlockCommand { protection: self.codec.zeroes(extent), force_unit_access, ..BlockCommand::new(extent) };
        let deallocate = may_unmap && self.session.profile.abilities.unmap_zeroes;
        let zeroes = WriteZeroes { blocks, deallocate, whole_namespace: false };
        let completed = self.execute_without_data(self.encode(IoCommand::WriteZeroes(zeroes))?).await?;
        if !completed.status().is_success() {
            return Err(self.failed(RequestKind::WriteZeroes, Some(extent), &completed));
        }
        self.note_write(&completed, durability);
        Ok(Response::Done)
    }

    /// Deallocates the extents. A lost Discard loses no data, so it is not recorded as an unflushed write.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        let shape = &self.session.profile;
        let mut rest = extents;
        while !rest.is_empty() {
            let mut blocks = 0_u64;
            let fits = rest.iter().take(shape.discard_ranges).take_while(|extent| {
                blocks = blocks.saturating_add(extent.len());
                blocks <= shape.discard_blocks
            });
            let count = fits.count().max(1);
            let (now, later) = rest.split_at(count);
            self.deallocate(now).await?;
            rest = later;
        }
        Ok(Response::Done)
    }

    async fn deallocate(&self, extents: &[Extent]) -> Result<(), Error> {
        let too_many = |invalid: Invalid| Error::from(ErrorKind::Media { reason: invalid.to_string() });
        let dsm = DatasetManagement::deallocate(extents.len()).map_err(too_many)?;
        let command = self.encode(IoCommand::DatasetManagement(dsm))?;
        let ranges: Vec<DsmRange> = extents.iter().map(|extent| DsmRange::new(*extent)).collect();
        let list = Slice::copy_from(ranges.as_slice().as_bytes());
        let completed = self.execute(|_| Ok((command, HostData::Write(list.clone().into())))).await?;
        match completed.status().is_success() {
            true => Ok(()),
            false => Err(self.failed(RequestKind::Discard, extents.first().copied(), &completed)),
        }
    }

    pub(crate) async fn verify(&self, extent: Extent, checks: Checks) -> Outcome {
        let (_, says_all) = self.codec.read_checks(extent, &checks, true);
        if !says_all {
            let (bytes_transferred, coverage) = self.read_all(extent, &checks, |_| ()).await?;
            return Ok(Response::Verified(VerifyStats { bytes_transferred, coverage }));
        }
        let completed = self.verify_once(extent, &checks).await?;
        let coverage = self.coverage(extent, &checks, &completed);
        if completed.status().is_success() {
            return Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage }));
        }
        if bad_block_cause(completed.status()).is_none() {
            return Err(self.failed(RequestKind::Verify, Some(extent), &completed));
        }
        match BadBlocks::new(BadBlockSearch::new(self, checks, Probe::Verify).of(extent, &completed).await?) {
            Some(bad_blocks) => Err(bad_blocks.with_coverage(coverage).into()),
            // The search re-read every block, so the failure was transient.
            None => Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage })),
        }
    }

    /// Coverage of a Verify. Uses the extensions of the session that executed it: a later session may have another target.
    fn coverage(&self, extent: Extent, checks: &Checks, completed: &CompletedCommand) -> Coverage {
        match completed.session.pages.extensions.contains(Extensions::COVERAGE) {
            true => Coverage::from_bits(completed.result.completion.dword0(), extent),
            false => Coverage::of(self.codec.checks_seals(checks)),
        }
    }

    /// Coverage of Reads, which check one copy only.
    fn reach_of_reads(&self, extent: Extent, checks: &Checks, extensions: Extensions) -> Coverage {
        let mut coverage = self.reach(checks, extensions);
        if extensions.contains(Extensions::COPIES) {
            coverage.add(Unchecked::new(extent, WhyUnchecked::OneCopy));
        }
        coverage
    }

    /// Coverage of these checks by a target with these extensions: whether they compare seals.
    pub(crate) fn reach(&self, checks: &Checks, extensions: Extensions) -> Coverage {
        let is_plain = self.codec.pi_mode.kept().is_none();
        Coverage::of(self.codec.checks_seals(checks) || is_plain && extensions.contains(Extensions::SEALS))
    }

    /// Reads all blocks in order and checks them here, for checks that no command can express; returns the bytes read and
    /// the coverage.
    pub(crate) async fn read_all(
        &self,
        extent: Extent,
        checks: &Checks,
        mut each: impl FnMut(&Sealed),
    ) -> Result<(u64, Coverage), Error> {
        let mut bytes_transferred = 0;
        let extensions = self.session.current_session().map_or(Extensions::NONE, |session| session.pages.extensions);
        let mut tally = Tally { coverage: self.reach_of_reads(extent, checks, extensions), ..Tally::default() };
        for piece in extent.split_aligned(self.session.profile.geometry.limits.max_transfer_blocks) {
            let onward = piece.start().get() - extent.start().get();
            let checks = self.codec.pi_mode.shown().map_or(*checks, |format| checks.advance(onward, format));
            bytes_transferred += piece.bytes(self.codec.size);
            match self.read(piece, checks).await {
                Ok(Response::Data(part)) => each(&part),
                Ok(_) => unreachable!("a Read is answered with data"),
                Err(error) => tally.take(error)?,
            }
        }
        Ok((bytes_transferred, tally.finish()?))
    }

    pub(crate) async fn compare(&self, extent: Extent, data: &Sealed) -> Outcome {
        let command = self.encode(IoCommand::Compare(BlockCommand::new(extent)))?;
        let build =
            |session: &Session| Ok((command, HostData::Write(self.codec.comparand(extent, data, session.pool()))));
        let completed = self.execute(build).await?;
        let status = completed.status();
        if status.is_success() {
            return Ok(Response::Done);
        }
        if status.code() != StatusCode::COMPARE_FAILURE {
            return Err(match bad_block_cause(status) {
                Some(_) => self
                    .compare_read(extent, data, extent.start())
                    .await
                    .err()
                    .unwrap_or_else(|| self.failed(RequestKind::Compare, Some(extent), &completed)),
                None => self.failed(RequestKind::Compare, Some(extent), &completed),
            });
        }
        let logged = logged_block(&completed, extent).await;
        match (logged, self.codec.pi_mode.kept()) {
            (Some(lba), None) => Err(ErrorKind::Miscompare { lba }.into()),
            // The target compares tags too, but only different data is a miscompare.
            (logged, _) => self.compare_read(extent, data, logged.unwrap_or(extent.start())).await,
        }
    }

    /// Finds the first block from `from` whose data differs, by reading.
    async fn compare_read(&self, extent: Extent, data: &Sealed, from: Lba) -> Outcome {
        let rest = Extent::from_raw(from.get(), extent.len() - (from.get() - extent.start().get()));
        let rest = rest.expect("the block is one of the extent");
        for piece in rest.split_aligned(self.session.profile.geometry.limits.max_transfer_blocks) {
            let checks = self.codec.pi_mode.shown().map_or(Checks::NONE, |format| Checks::full(format, piece.start()));
            let Response::Data(stored) = self.read(piece, checks).await? else {
                unreachable!("a Read is answered with data");
            };
            let first = (piece.start().get() - extent.start().get()) as usize;
            let wanted = data.slice(first, piece.len() as usize);
            if let Some(lba) = stored.first_difference(&wanted, false).and_then(|index| piece.iter().nth(index)) {
                return Err(ErrorKind::Miscompare { lba }.into());
            }
        }
        Ok(Response::Done)
    }
}

/// The error of these bad blocks, at least one.
fn integrity(bad_blocks: Vec<BadBlock>) -> Error {
    BadBlocks::new(bad_blocks).expect("a mismatch is about a block").into()
}
