//! How a drive verifies and compares: which form of VERIFY it supports, found out by sending it, and whether it really
//! does what the command requires.
//!
//! Many emulated drives reply GOOD to every VERIFY and read nothing, and adapters for ATA drives ignore BYTCHK. The
//! replies of such a drive are not a check of its blocks. So a drive is trusted only after it has refused a VERIFY of a
//! block that does not exist, and has distinguished equal data from different data.

use sealblock_block::{Device, Expectations, Request, Response};
use sealblock_protocols_scsi::{BlockCommand, ByteCheck, Command, PiProfile, Protect};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::Transfer;
use sealblock_units::{Extent, Lba};

use super::answer::{AnswerClass, AnswerText};
use super::transport::{Answer, OpenError, Transport};
use super::unit::{Pages, Unit};

/// Vendors of emulated drives whose VERIFY refuses blocks that do not exist, but otherwise reads nothing.
const READ_NOTHING: [(&str, &str); 1] = [("LIO-ORG", "the kernel's own target")];
/// Blocks that VERIFY (10) can address.
const SHORT_BLOCKS: u64 = u32::MAX as u64;

/// A form of VERIFY.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct VerifyForm {
    /// VERIFY (10), for drives without VERIFY (16).
    is_short: bool,
    /// The protection information that the drive checks, and by which protection field.
    protection: Option<(PiProfile, Protect)>,
    /// True if guards of all blocks are checked.
    pub(crate) is_sealed: bool,
}

impl VerifyForm {
    /// The forms that a drive may support, best first.
    pub(crate) fn candidates(pages: &Pages, profile: Option<PiProfile>) -> Vec<VerifyForm> {
        let checks_guard = pages.extended.checks_guard;
        let plain = VerifyForm {
            is_short: false,
            protection: None,
            // 000b: the drive checks the tags that it has, unless DPICZ forbids it (SBC-4, "VRPROTECT field").
            is_sealed: profile.is_some() && checks_guard && !pages.control.no_check_without_protect,
        };
        let protected = profile.filter(|_| checks_guard).map(|profile| VerifyForm {
            protection: Some((profile, Protect::ALL)),
            is_sealed: true,
            ..plain
        });
        let is_small = pages.capacity.last_lba < SHORT_BLOCKS;
        let short = is_small.then_some(VerifyForm { is_short: true, ..plain });
        protected.into_iter().chain([plain]).chain(short).collect()
    }

    /// The command for these blocks. Data for a comparison have no tags.
    pub(crate) fn command(self, extent: Extent, check: ByteCheck) -> Command {
        let blocks = BlockCommand::new(extent);
        let blocks = match (self.protection, check) {
            (Some((profile, protect)), ByteCheck::Medium) => profile.protect(blocks, protect),
            _ => blocks,
        };
        if self.is_short { Command::Verify10(blocks, check) } else { Command::Verify(blocks, check) }
    }

    /// The form in which a drive compares: the one with which it verifies. A drive whose VERIFY does not read blocks
    /// may still compare them.
    pub(crate) fn comparing(form: Option<VerifyForm>) -> VerifyForm {
        form.unwrap_or(VerifyForm { is_short: false, protection: None, is_sealed: false })
    }

    /// Blocks of one command.
    pub(crate) const fn max_blocks(self) -> u32 {
        if self.is_short { u16::MAX as u32 } else { u32::MAX }
    }

    /// The name of the command.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            VerifyForm { is_short: true, .. } => "VERIFY (10)",
            VerifyForm { protection: Some((profile, _)), .. } => match profile.protection {
                sealblock_integrity::ProtectionType::Type2 => "VERIFY (32)",
                _ => "VERIFY (16)",
            },
            VerifyForm { protection: None, .. } => "VERIFY (16)",
        }
    }
}

/// The comparisons that a drive supports.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Compares {
    /// BYTCHK 01b.
    pub(crate) blocks: bool,
    /// BYTCHK 11b.
    pub(crate) one_block: bool,
}

impl<T: Transport> Unit<T> {
    /// The form of VERIFY that the drive supports and really executes; and the reason why no better one is used.
    pub(crate) async fn find_verify(
        &self,
        pages: &Pages,
        profile: Option<PiProfile>,
        refused: &mut Vec<String>,
    ) -> Result<Option<VerifyForm>, OpenError> {
        let vendor = pages.inquiry.vendor.as_str();
        if let Some((_, who)) = READ_NOTHING.iter().find(|(name, _)| *name == vendor) {
            refused.push(format!("verify: the drive is emulated by {who}, whose VERIFY reads nothing"));
            return Ok(None);
        }
        for form in VerifyForm::candidates(pages, profile) {
            let command = form.command(Extent::one(Lba::ZERO), ByteCheck::Medium);
            let answer = match self.try_command(form.name(), &command, Transfer::None).await {
                Ok((answer, _)) => answer,
                // The kernel lets unprivileged processes send some forms and not others.
                Err(error @ OpenError::Privilege { .. }) => {
                    refused.push(format!("verify: {error}"));
                    continue;
                }
                Err(error) => return Err(error),
            };
            match AnswerClass::of(&answer) {
                AnswerClass::Good | AnswerClass::Bad(_) => return self.is_executed(form, pages, refused).await,
                _ => refused.push(refusal("verify", form.name(), &answer)),
            }
        }
        Ok(None)
    }

    /// The form, if the drive really reads its blocks: then it refuses a block that does not exist.
    async fn is_executed(
        &self,
        form: VerifyForm,
        pages: &Pages,
        refused: &mut Vec<String>,
    ) -> Result<Option<VerifyForm>, OpenError> {
        let behind = Extent::one(Lba::new(pages.capacity.last_lba + 1));
        let command = form.command(behind, ByteCheck::Medium);
        let (answer, _) = self.try_command(form.name(), &command, Transfer::None).await?;
        match AnswerClass::of(&answer) {
            AnswerClass::Refused | AnswerClass::Unsupported => Ok(Some(form)),
            _ => {
                let what = format!("{} of a block behind the last one", form.name());
                refused.push(format!("{}, so it does not look at blocks", refusal("verify", &what, &answer)));
                Ok(None)
            }
        }
    }

    /// The comparisons that the drive supports: it must find its first block equal to itself, and different from its
    /// complement.
    pub(crate) async fn find_compares<D: Device>(
        &self,
        form: VerifyForm,
        ordinary: &D,
        refused: &mut Vec<String>,
    ) -> Result<Compares, OpenError> {
        let first = Extent::one(Lba::ZERO);
        let block = match ordinary.execute(Request::read(first, Expectations::NONE)).await {
            Ok(Response::Data(block)) => block.joined_data(),
            Ok(_) => return Ok(Compares::default()),
            Err(error) => {
                refused.push(format!("compare: the first block, to try it with, cannot be read: {error}"));
                return Ok(Compares::default());
            }
        };
        let mut compares = Compares::default();
        for (check, bits) in [(ByteCheck::Blocks, "01b"), (ByteCheck::OneBlock, "11b")] {
            let what = format!("{} with BYTCHK {bits}", form.name());
            match self.can_compare(form, check, &block).await? {
                Ok(()) if check == ByteCheck::Blocks => compares.blocks = true,
                Ok(()) => compares.one_block = true,
                Err(answer) => refused.push(refusal("compare", &what, &answer)),
            }
        }
        Ok(compares)
    }

    async fn can_compare(
        &self,
        form: VerifyForm,
        check: ByteCheck,
        block: &Slice,
    ) -> Result<Result<(), Answer>, OpenError> {
        const WHAT: &str = "VERIFY with data";
        let command = form.command(Extent::one(Lba::ZERO), check);
        let complement: Vec<u8> = block.iter().map(|byte| !byte).collect();
        for (data, expected) in
            [(Slice::copy_from(&complement), AnswerClass::Miscompare), (block.clone(), AnswerClass::Good)]
        {
            let (answer, _) = self.try_command(WHAT, &command, Transfer::Out(data)).await?;
            if AnswerClass::of(&answer) != expected {
                return Ok(Err(answer));
            }
        }
        Ok(Ok(()))
    }
}

fn refusal(kind: &str, what: &str, answer: &Answer) -> String {
    format!("{kind}: the drive answered {what} with {}", AnswerText(answer))
}
