//! A SCSI drive as a block device.
//!
//! Everything that the kernel's block layer can do is left to it: it makes and checks tags if the host adapter supports
//! it, knows the drives on which some commands do harm, zeroes and unmaps as the drive's pages allow, and keeps its
//! page cache correct. Only operations without a request of the block layer go through passthrough: Verify and Compare,
//! which change no block, and CompareAndWrite, which is atomic for every initiator of the drive only in this way. The
//! block I/O may carry tags of this host ([`crate::TaggedDevice`]); then a Verify with checks that the command lacks
//! reads the tags.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{
    Abilities, BadBlockCause, BadBlocks, BlockProbe, Coverage, Device, Error, ErrorKind, Expectations, Geometry,
    Operation, Outcome, Request, RequestKind, Response, Tally, VerifyStats, find_bad_blocks,
};
use sealblock_integrity::{Checks, Sealed};
use sealblock_protocols_scsi::ByteCheck;
use sealblock_runtime_reactor::{File, Transfer};
use sealblock_units::{Extent, Lba};

use super::answer::{AnswerClass, AnswerText, failure};
use super::open::{KernelView, OpenDrive, ScsiInfo};
use super::transport::{Answer, OpenError, SgIo, Transport};
use super::verify::VerifyForm;

/// How long the kernel waits for one command before it aborts it.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A SCSI drive as a block device. Clones are the same device. `D` is the same drive through the kernel's ordinary
/// block I/O, `T` sends commands.
pub struct ScsiDevice<D, T = SgIo>(Rc<State<D, T>>);

struct State<D, T> {
    drive: OpenDrive<T>,
    ordinary: D,
}

impl<D, T> Clone for ScsiDevice<D, T> {
    fn clone(&self) -> ScsiDevice<D, T> {
        ScsiDevice(Rc::clone(&self.0))
    }
}

impl<D: Device> ScsiDevice<D> {
    /// Opens the drive whose block device has this node, which `file` is open on; `ordinary` is its blocks through the
    /// kernel's block I/O, without its page cache.
    ///
    /// # Errors
    /// The reason why the drive does no integrity work, with `ordinary` unchanged.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn open(file: File, block: &Path, ordinary: D) -> Result<ScsiDevice<D>, (OpenError, D)> {
        // Data written through the page cache are not on the drive yet.
        if let Err(error) = file.sync_data().await {
            return Err((OpenError::call_error("a Flush", error), ordinary));
        }
        ScsiDevice::with(SgIo::new(file, TIMEOUT), ordinary, &KernelView::of(block)).await
    }
}

impl<D: Device, T: Transport> ScsiDevice<D, T> {
    pub(crate) async fn with(
        transport: T,
        ordinary: D,
        kernel: &KernelView,
    ) -> Result<ScsiDevice<D, T>, (OpenError, D)> {
        match OpenDrive::open(transport, &ordinary, kernel).await {
            Ok(drive) => Ok(ScsiDevice(Rc::new(State { drive, ordinary }))),
            Err(error) => Err((error, ordinary)),
        }
    }

    /// What the drive reports.
    pub fn info(&self) -> &ScsiInfo {
        &self.0.drive.info
    }

    #[cfg(test)]
    pub(crate) fn transport(&self) -> &T {
        &self.0.drive.unit.transport
    }

    async fn send(&self, form: VerifyForm, extent: Extent, check: ByteCheck, data: Transfer) -> Result<Answer, Error> {
        self.0.drive.unit.execute(form.name(), &form.command(extent, check), data).await
    }

    async fn verify(&self, form: VerifyForm, extent: Extent) -> Outcome {
        let coverage = Coverage::of(form.is_sealed);
        let answer = self.send(form, extent, ByteCheck::Medium, Transfer::None).await?;
        match AnswerClass::of(&answer) {
            AnswerClass::Good => {}
            AnswerClass::Bad(_) => {
                let search = Search { device: self, form };
                if let Some(bad_blocks) = BadBlocks::new(find_bad_blocks(&search, extent, &answer).await?) {
                    return Err(bad_blocks.with_coverage(coverage).into());
                }
                // The search verified every block again, so the failure was transient.
            }
            _ => return Err(failure(RequestKind::Verify, extent, &answer)),
        }
        Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage }))
    }

    /// Verifies by reads: VERIFY checks tags only against expected ones, and is sent none.
    async fn verify_by_reading(&self, extent: Extent, expectations: &Expectations) -> Outcome {
        let geometry = self.0.ordinary.geometry();
        let mut tally = Tally { coverage: Coverage::of(geometry.protection.is_some()), ..Tally::default() };
        let mut bytes_transferred = 0;
        for piece in extent.split_aligned(geometry.limits.max_transfer_blocks) {
            let done = piece.start().get() - extent.start().get();
            let expected = expectations.advance(done, geometry.protection);
            if let Err(error) = self.0.ordinary.execute(Request::read(piece, expected)).await {
                tally.take(error)?;
            }
            bytes_transferred += piece.bytes(geometry.block_size);
        }
        Ok(Response::Verified(VerifyStats { bytes_transferred, coverage: tally.finish()? }))
    }

    /// True if a VERIFY checks everything expected: with its protection information, guards and the reference tags of
    /// Type 1.
    fn is_verified(&self, extent: Extent, expectations: &Expectations) -> bool {
        let all = Checks { guard: true, initial_ref_tag: expectations.checks().initial_ref_tag, ..Checks::NONE };
        let format = self.0.ordinary.geometry().protection;
        expectations.beyond(&format.map_or(all, |format| Checks::full(format, extent.start()))).is_none()
    }

    /// Compares blocks with this data: only with its first block if all are equal and the drive supports it.
    async fn compare(&self, form: VerifyForm, extent: Extent, wanted: &Sealed) -> Outcome {
        let data = wanted.joined_data();
        let block_bytes = self.geometry().block_size.bytes();
        let (first, rest) = data.split_at(block_bytes.min(data.len()));
        let is_one = self.0.drive.compares.one_block
            && !rest.is_empty()
            && rest.chunks_exact(block_bytes).all(|block| block == first);
        let (check, data) = match is_one {
            true => (ByteCheck::OneBlock, data.slice(0..block_bytes)),
            false => (ByteCheck::Blocks, data),
        };
        let sent_bytes = data.len();
        let answer = self.send(form, extent, check, Transfer::Out(data)).await?;
        match AnswerClass::of(&answer) {
            AnswerClass::Good if answer.moved_bytes == sent_bytes => Ok(Response::Done),
            AnswerClass::Good => {
                let moved = answer.moved_bytes;
                let reason = format!("the drive compared {extent} with {moved} of {sent_bytes} bytes");
                Err(ErrorKind::Media { reason }.into())
            }
            AnswerClass::Miscompare | AnswerClass::Bad(_) => self.compare_read(extent, wanted).await,
            _ => Err(failure(RequestKind::Compare, extent, &answer)),
        }
    }

    /// Finds the first block that differs by reading: a VERIFY does not report which it is (SBC-4, "VERIFY (10)
    /// command").
    async fn compare_read(&self, extent: Extent, wanted: &Sealed) -> Outcome {
        let Response::Data(stored) = self.0.ordinary.execute(Request::read(extent, Expectations::NONE)).await? else {
            unreachable!("a Read is answered with data");
        };
        match stored.first_difference(wanted, false).and_then(|index| extent.iter().nth(index)) {
            Some(lba) => Err(ErrorKind::Miscompare { lba }.into()),
            None => Ok(Response::Done),
        }
    }
}

impl<D: Device, T: Transport> Device for ScsiDevice<D, T> {
    fn geometry(&self) -> &Geometry {
        &self.0.drive.geometry
    }

    fn abilities(&self) -> Abilities {
        self.0.drive.abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        match (&request.operation, self.0.drive.form) {
            (Operation::Verify(expectations), Some(_)) if !self.is_verified(request.extents.one(), expectations) => {
                self.verify_by_reading(request.extents.one(), expectations).await
            }
            (Operation::Verify(_), Some(form)) => self.verify(form, request.extents.one()).await,
            (Operation::Compare(data), form) if self.0.drive.compares.blocks => {
                self.compare(VerifyForm::comparing(form), request.extents.one(), data).await
            }
            (Operation::CompareAndWrite(data), _) => {
                let State { drive, ordinary } = &*self.0;
                drive.unit.compare_and_write(request.extents.one(), data, request.durability, ordinary).await
            }
            _ => self.0.ordinary.execute(request).await,
        }
    }
}

/// Probes blocks by VERIFY.
struct Search<'a, D, T> {
    device: &'a ScsiDevice<D, T>,
    form: VerifyForm,
}

impl<D: Device, T: Transport> BlockProbe for Search<'_, D, T> {
    type Failed = Answer;

    async fn probe(&self, run: Extent) -> Result<Option<Answer>, Error> {
        let answer = self.device.send(self.form, run, ByteCheck::Medium, Transfer::None).await?;
        match AnswerClass::of(&answer) {
            AnswerClass::Good => Ok(None),
            AnswerClass::Bad(_) => Ok(Some(answer)),
            _ => Err(failure(RequestKind::Verify, run, &answer)),
        }
    }

    fn cause(&self, failed: &Answer) -> BadBlockCause {
        match AnswerClass::of(failed) {
            AnswerClass::Bad(cause) => cause,
            _ => BadBlockCause::Media,
        }
    }

    async fn hints(&self, extent: Extent, failed: &Answer) -> Vec<Lba> {
        Vec::from_iter(self.named(extent, failed).await)
    }

    /// INFORMATION is the address of the first block that failed (SBC-4, "Sense-key specific and INFORMATION field"),
    /// and only a hint.
    async fn named(&self, _: Extent, failed: &Answer) -> Option<Lba> {
        failed.sense?.information.map(Lba::new)
    }

    fn describe(&self, failed: &Answer) -> String {
        AnswerText(failed).to_string()
    }
}
