//! Block requests as NVM commands.

use sealblock_block::{
    BadBlockCause, BadBlocks, Coverage, Durability, Error, ErrorKind, Expectations, Outcome, RequestKind, Response,
    Tally, VerifyStats,
};
use sealblock_integrity::Sealed;
use sealblock_protocols_nvme::nvm::{
    BlockCommand, DatasetManagement, DsmRange, IoCommand, ProtectionInfo, WriteZeroes,
};
use sealblock_protocols_nvme::{Invalid, StatusCode};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};
use zerocopy::IntoBytes;

use crate::bad_block_search::{BadBlockSearch, Probe, logged_block};
use crate::status::{bad_block_cause, is_copy_refused};
use crate::{CompletedCommand, Namespace};

/// The block requests of a namespace.
///
/// # Errors
/// Bad blocks by address; other statuses as in the table of `status.rs`; errors of the connection or passthrough.
pub struct Requests<'a, N>(pub &'a N);

impl<N: Namespace> Requests<'_, N> {
    /// Reads blocks and checks their tags. The controller makes only the namespace's own check, so that whatever it
    /// finds is damage; the caller's expectations are compared here.
    pub async fn read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let profile = self.0.profile();
        let (protection, _) = profile.read_checks(extent, &profile.own_checks(extent.start()), false);
        let completed = self.0.read_once(extent, protection).await?;
        let status = completed.status();
        if status.is_success() {
            let outcome = self.0.check_read(extent, expectations, completed);
            return match outcome {
                Err(error) if profile.abilities.copies && matches!(error.kind(), ErrorKind::Expectation { .. }) => {
                    self.read_other_copy(extent, expectations, error).await
                }
                outcome => outcome,
            };
        }
        let Some(cause) = bad_block_cause(status) else {
            return Err(self.0.failed(RequestKind::Read, Some(extent), &completed));
        };
        let is_seen_here = self.0.profile().pi_mode.shown().is_some() && cause != BadBlockCause::Media;
        if is_seen_here {
            // The controller found wrong tags. Read again without its checks: this host then finds every bad block,
            // with the expected and actual values.
            let unchecked = self.0.read_once(extent, ProtectionInfo::NONE).await?;
            if unchecked.status().is_success() {
                return self.0.check_read(extent, expectations, unchecked);
            }
        }
        Err(match BadBlocks::new(BadBlockSearch::new(self.0, self.probe()).of(extent, &completed).await?) {
            Some(bad_blocks) => bad_blocks.into(),
            None => self.0.failed(RequestKind::Read, Some(extent), &completed),
        })
    }

    /// Reads blocks of which one copy is not as expected, where the target has several: it compares them itself this time,
    /// and may have another copy.
    async fn read_other_copy(&self, extent: Extent, expectations: &Expectations, unexpected: Error) -> Outcome {
        let Some(protection) = self.checks_in_place(extent, expectations) else { return Err(unexpected) };
        match self.0.read_once(extent, protection).await {
            Ok(completed) if completed.status().is_success() => self.0.check_read(extent, expectations, completed),
            Ok(_) => Err(unexpected),
            Err(error) if is_no_longer_offered(&error) => Err(unexpected),
            Err(error) => Err(error),
        }
    }

    /// The command that searches for bad blocks.
    pub fn probe(&self) -> Probe {
        if self.0.profile().abilities.is_native(RequestKind::Verify) { Probe::Verify } else { Probe::Read }
    }

    /// Writes blocks, with tags made here or by the controller.
    pub async fn write(&self, extent: Extent, data: &Sealed, durability: Durability) -> Outcome {
        let force_unit_access = durability == Durability::ForceUnitAccess;
        let protection = self.0.profile().write_checks(extent, data);
        let blocks = BlockCommand { protection, force_unit_access, ..BlockCommand::new(extent) };
        let completed = self.0.write_once(blocks, data).await?;
        if completed.status().is_success() {
            self.note_write(&completed, durability);
            return Ok(Response::Done);
        }
        Err(match bad_block_cause(completed.status()) {
            Some(_) => self.write_refused(extent, data, &completed),
            None => self.0.failed(RequestKind::Write, Some(extent), &completed),
        })
    }

    /// The error of a Write whose tags the controller rejected: the data to be written are wrong, the stored data are
    /// not damaged. Reports the first block whose tags mismatch here already; otherwise the tags changed in transfer.
    fn write_refused(&self, extent: Extent, data: &Sealed, completed: &N::Completed) -> Error {
        let expected = Expectations::new(self.0.profile().own_checks(extent.start()));
        match expected.check(extent, data) {
            Err(wrong) => wrong,
            Ok(()) => self.0.failed(RequestKind::Write, Some(extent), completed),
        }
    }

    /// The block that the error log names for this command for certain.
    async fn named_block(&self, completed: &N::Completed, extent: Extent) -> Option<Lba> {
        if N::LOG_NAMES_COMMANDS { logged_block(self.0, completed, extent).await } else { None }
    }

    fn note_write(&self, completed: &N::Completed, durability: Durability) {
        if durability == Durability::Volatile {
            self.0.write_completed(completed);
        }
    }

    /// Makes blocks read as zeroes; deallocates them if they are guaranteed to read as zeroes then.
    pub async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        let force_unit_access = durability == Durability::ForceUnitAccess;
        let blocks = BlockCommand {
            protection: self.0.profile().new_tags(extent),
            force_unit_access,
            ..BlockCommand::new(extent)
        };
        let deallocate = may_unmap && self.0.profile().abilities.unmap_zeroes;
        let zeroes = WriteZeroes { blocks, deallocate, whole_namespace: false };
        let completed = self.0.execute_once(IoCommand::WriteZeroes(zeroes)).await?;
        if !completed.status().is_success() {
            return Err(self.0.failed(RequestKind::WriteZeroes, Some(extent), &completed));
        }
        self.note_write(&completed, durability);
        Ok(Response::Done)
    }

    /// Deallocates the extents. A lost Discard loses no data, so it is not recorded as an unflushed write.
    pub async fn discard(&self, extents: &[Extent]) -> Outcome {
        let shape = self.0.profile();
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
        let ranges: Vec<DsmRange> = extents.iter().map(|extent| DsmRange::new(*extent)).collect();
        let list = Slice::copy_from(ranges.as_slice().as_bytes());
        let completed = self.0.execute_with_ranges(IoCommand::DatasetManagement(dsm), list, extents).await?;
        match completed.status().is_success() {
            true => Ok(()),
            false => Err(self.0.failed(RequestKind::Discard, extents.first().copied(), &completed)),
        }
    }

    /// Copies blocks within the namespace, with as many source ranges in a command as the controller allows. Ends at
    /// the first command that fails; such a command has copied nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Absent`] if no command can express the request, or if the controller refuses it in this form.
    pub async fn copy(
        &self,
        source: Extent,
        destination: Extent,
        expectations: &Expectations,
        durability: Durability,
    ) -> Outcome {
        let profile = self.0.profile();
        let absent = || Error::from(ErrorKind::Absent(RequestKind::Copy));
        let plan = profile.copy.ok_or_else(absent)?;
        for part in source.split_aligned(plan.command_blocks) {
            let onward = part.start().get() - source.start().get();
            let to = Extent::from_raw(destination.start().get() + onward, part.len()).map_err(|_| absent())?;
            let expected = expectations.advance(onward, profile.pi_mode.shown());
            let checks = expected.joined(&profile.own_checks(part.start())).ok_or_else(absent)?;
            let (command, ranges) = profile.copy_command(&plan, part, to, &checks, durability).ok_or_else(absent)?;
            let list = command.encode_ranges(&ranges).map_err(|_| absent())?;
            let list = Slice::copy_from(&list);
            let completed = self.0.execute_with_ranges(IoCommand::Copy(command), list, &[to, part]).await?;
            if completed.status().is_success() {
                self.note_write(&completed, durability);
                continue;
            }
            if is_copy_refused(completed.status()) {
                tracing::warn!(status = %completed.status(), %part, "Copy is refused; blocks are read and written instead");
                return Err(absent());
            }
            // QEMU's drives return this if a check of the source has failed.
            let is_unsaid = completed.status().code() == StatusCode::INTERNAL_ERROR;
            if is_unsaid || bad_block_cause(completed.status()).is_some() {
                self.fail_if_bad(part, &expected, self.probe(), &completed).await?;
            }
            return Err(self.0.failed(RequestKind::Copy, Some(part), &completed));
        }
        Ok(Response::Done)
    }

    /// Finds out why a command for these blocks has failed: damage, whatever was expected, or otherwise blocks that are
    /// not as expected.
    ///
    /// # Errors
    /// Returns that error. If the failure was transient, nothing is found.
    pub async fn fail_if_bad(
        &self,
        extent: Extent,
        expectations: &Expectations,
        probe: Probe,
        completed: &N::Completed,
    ) -> Result<(), Error> {
        BadBlocks::fail_if_any(BadBlockSearch::new(self.0, probe).of(extent, completed).await?)?;
        if expectations.beyond(&self.0.profile().own_checks(extent.start())).is_none() {
            return Ok(());
        }
        self.fail_if_unexpected(extent, expectations, completed).await
    }

    /// Finds the first block that is not as expected, where a command that checks has failed over good blocks. Verify
    /// commands narrow it down, and only that block is read, for its tag; all are read if no Verify can express the
    /// expectations, or if it finds nothing any more.
    async fn fail_if_unexpected(
        &self,
        extent: Extent,
        expectations: &Expectations,
        completed: &N::Completed,
    ) -> Result<(), Error> {
        if self.probe() == Probe::Verify && self.checks_in_place(extent, expectations).is_some() {
            match self.first_unexpected(extent, expectations, completed).await {
                Ok(lba) => {
                    let onward = lba.get() - extent.start().get();
                    let expected = expectations.advance(onward, self.0.profile().pi_mode.shown());
                    self.read(Extent::one(lba), &expected).await?;
                }
                Err(error) if is_no_longer_offered(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.read_all(extent, expectations, |_| ()).await.map(|_| ())
    }

    /// The first block of a run that a Verify finds not to be as expected. If it finds nothing any more, any block.
    async fn first_unexpected(
        &self,
        extent: Extent,
        expectations: &Expectations,
        completed: &N::Completed,
    ) -> Result<Lba, Error> {
        let start = extent.start().get();
        let is_met = async |run: Extent| {
            let expected = expectations.advance(run.start().get() - start, self.0.profile().pi_mode.shown());
            let Some(protection) = self.checks_in_place(run, &expected) else { return Ok(false) };
            let command = IoCommand::Verify(BlockCommand { protection, ..BlockCommand::new(run) });
            let verified = self.0.execute_once(command).await?;
            match (verified.status().is_success(), bad_block_cause(verified.status())) {
                (true, _) => Ok(true),
                (false, Some(_)) => Ok(false),
                (false, None) => Err(self.0.failed(RequestKind::Verify, Some(run), &verified)),
            }
        };
        let mut run = extent;
        if let Some(lba) = self.named_block(completed, extent).await {
            // The log names a block that failed, which need not be the first.
            match Extent::from_raw(start, lba.get() - start) {
                Ok(before) if !is_met(before).await? => run = before,
                _ => return Ok(lba),
            }
        }
        while let Some([first, second]) = run.halves() {
            run = if is_met(first).await? { second } else { first };
        }
        Ok(run.start())
    }

    /// The protection fields of a command that checks blocks in place for everything expected and for damage; `None` if
    /// no command can express that.
    pub fn checks_in_place(&self, extent: Extent, expectations: &Expectations) -> Option<ProtectionInfo> {
        let profile = self.0.profile();
        let joined = expectations.joined(&profile.own_checks(extent.start()))?;
        // Who checks blocks whose tuples disable checks makes its own check as well, without being asked. If it were asked
        // for the guard, it would find that of a block that was never written wrong, and not its tag.
        let checks = if joined.checks_escapes { *expectations.checks() } else { joined };
        let (protection, says_all) = profile.read_checks(extent, &checks, true);
        says_all.then_some(protection)
    }

    /// Verifies blocks in place.
    pub async fn verify(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let Some(protection) = self.checks_in_place(extent, expectations) else {
            return self.verify_by_read(extent, expectations).await;
        };
        let command = IoCommand::Verify(BlockCommand { protection, ..BlockCommand::new(extent) });
        let completed = match self.0.execute_once(command).await {
            Err(error) if protection.checks_escapes && is_no_longer_offered(&error) => {
                return self.verify_by_read(extent, expectations).await;
            }
            completed => completed?,
        };
        let coverage = self.0.verify_coverage(extent, &completed);
        if !completed.status().is_success() {
            if bad_block_cause(completed.status()).is_none() {
                return Err(self.0.failed(RequestKind::Verify, Some(extent), &completed));
            }
            let mut tally = Tally { coverage, ..Tally::default() };
            match self.fail_if_bad(extent, expectations, Probe::Verify, &completed).await {
                // The search re-read every block, so the failure was transient.
                Ok(()) => {}
                Err(error) => tally.take(error)?,
            }
            let coverage = tally.finish()?;
            return Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage }));
        }
        Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage }))
    }

    async fn verify_by_read(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let (bytes_transferred, coverage) = self.read_all(extent, expectations, |_| ()).await?;
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage }))
    }

    /// Reads all blocks in order and checks them here, if no command can express the checks; returns the bytes read and
    /// the coverage.
    pub async fn read_all(
        &self,
        extent: Extent,
        expectations: &Expectations,
        mut each: impl FnMut(&Sealed),
    ) -> Result<(u64, Coverage), Error> {
        let mut bytes_transferred = 0;
        let mut tally = Tally { coverage: self.0.read_coverage(extent), ..Tally::default() };
        for piece in extent.split_aligned(self.0.profile().geometry.limits.max_transfer_blocks) {
            let onward = piece.start().get() - extent.start().get();
            let expected = expectations.advance(onward, self.0.profile().pi_mode.shown());
            bytes_transferred += piece.bytes(self.0.profile().geometry.block_size);
            match self.read(piece, &expected).await {
                Ok(Response::Data(part)) => each(&part),
                Ok(_) => unreachable!("a Read is answered with data"),
                Err(error) => tally.take(error)?,
            }
        }
        Ok((bytes_transferred, tally.finish()?))
    }

    /// Compares blocks with this data.
    pub async fn compare(&self, extent: Extent, data: &Sealed) -> Outcome {
        let comparand = self.0.profile().comparand(extent, data);
        let completed = self.0.compare_once(BlockCommand::new(extent), &comparand).await?;
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
                    .unwrap_or_else(|| self.0.failed(RequestKind::Compare, Some(extent), &completed)),
                None => self.0.failed(RequestKind::Compare, Some(extent), &completed),
            });
        }
        let logged = self.named_block(&completed, extent).await;
        match (logged, self.0.profile().pi_mode.kept()) {
            (Some(lba), None) => Err(ErrorKind::Miscompare { lba }.into()),
            // The controller compares tags too, but only different data is a miscompare.
            (logged, _) => self.compare_read(extent, data, logged.unwrap_or(extent.start())).await,
        }
    }

    /// Finds the first block from `from` whose data differs, by reading.
    async fn compare_read(&self, extent: Extent, data: &Sealed, from: Lba) -> Outcome {
        let rest = Extent::from_raw(from.get(), extent.len() - (from.get() - extent.start().get()));
        let rest = rest.expect("the block is one of the extent");
        for piece in rest.split_aligned(self.0.profile().geometry.limits.max_transfer_blocks) {
            let Response::Data(stored) = self.read(piece, &Expectations::NONE).await? else {
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

/// True if a command was not sent, since the controller that would get it offers no extension that it needs.
pub fn is_no_longer_offered(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Absent(_))
}
