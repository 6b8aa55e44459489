//! Requests that need sealblock's vendor specific extensions: Checksum, and the reserved area.
//!
//! Invariant: a vendor specific command is sent only on a session whose target offers it. After a reconnect the target
//! may be another vendor's, where the same opcode may mean anything.

use sealblock_block::{
    Checksum, Coverage, Error, ErrorKind, Expectations, Outcome, RequestKind, ReservedArea, Response, Tally, WriteSet,
};
use sealblock_integrity::{ChecksumKind, Sealed};
use sealblock_media_nvme::requests::{Requests, is_no_longer_offered};
use sealblock_media_nvme::{CompletedCommand as _, Namespace, bad_block_cause};
use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures, SetFeatures};
use sealblock_protocols_nvme::extensions::{Extensions, ReservedArea as ReservedFrame};
use sealblock_protocols_nvme::nvm::{self, BlockCommand, IoCommand};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use crate::commands::{CompletedCommand, Io};
use crate::session::Session;

impl Io {
    /// Executes one Checksum; returns its completion, whatever the status.
    async fn checksum_once(&self, blocks: BlockCommand, kind: ChecksumKind) -> Result<CompletedCommand, Error> {
        let command = self.encode(IoCommand::Checksum(nvm::Checksum { blocks, kind }))?;
        let mut extension = match kind {
            ChecksumKind::Crc64Nvme => Extensions::CHECKSUM,
            ChecksumKind::Crc32c => Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C,
        };
        if blocks.protection.checks_escapes {
            extension |= Extensions::ESCAPES;
        }
        let build = |session: &Session| {
            session.offers(extension, RequestKind::Checksum)?;
            Ok((command, HostData::None))
        };
        self.execute(build).await
    }

    pub(crate) async fn checksum(&self, extent: Extent, kind: ChecksumKind, expectations: &Expectations) -> Outcome {
        let requests = Requests(self);
        let Some(protection) = requests.checks_in_place(extent, expectations) else {
            return self.checksum_by_read(extent, kind, expectations).await;
        };
        let blocks = BlockCommand { protection, ..BlockCommand::new(extent) };
        let completed = match self.checksum_once(blocks, kind).await {
            Err(error) if protection.checks_escapes && is_no_longer_offered(&error) => {
                return self.checksum_by_read(extent, kind, expectations).await;
            }
            completed => completed?,
        };
        if completed.status().is_success() {
            return self.checksum_response(extent, kind, &completed).await;
        }
        if bad_block_cause(completed.status()).is_none() {
            return Err(self.failed(RequestKind::Checksum, Some(extent), &completed));
        }
        if let Err(error) = requests.fail_if_bad(extent, expectations, requests.probe(), &completed).await {
            let coverage = match self.checksum_coverage(extent, &completed).await.map_err(Error::into_damage) {
                Ok(coverage) | Err(Ok((_, coverage))) => coverage,
                Err(Err(error)) => return Err(error),
            };
            let mut tally = Tally { coverage, ..Tally::default() };
            tally.take(error)?;
            tally.finish()?;
        }
        // The search re-read every block, so the failure was transient: retry once.
        let again = self.checksum_once(blocks, kind).await?;
        match again.status().is_success() {
            true => self.checksum_response(extent, kind, &again).await,
            false => Err(self.failed(RequestKind::Checksum, Some(extent), &again)),
        }
    }

    async fn checksum_by_read(&self, extent: Extent, kind: ChecksumKind, expectations: &Expectations) -> Outcome {
        let mut value = 0;
        let each = |part: &Sealed| value = part.checksum_append(kind, value);
        let (bytes_transferred, coverage) = Requests(self).read_all(extent, expectations, each).await?;
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred, coverage }))
    }

    /// The response to a Checksum that succeeded. Its completion has room for the checksum only, so if there are
    /// several copies, a Verify reports which of them were not checked.
    async fn checksum_response(&self, extent: Extent, kind: ChecksumKind, completed: &CompletedCommand) -> Outcome {
        let asked = nvm::Checksum { blocks: BlockCommand::new(extent), kind };
        let value = asked.checksum(completed.result.completion.result.get()).ok_or_else(|| {
            let reason = format!("the target lists checksums of kind {kind} and returned one of another kind");
            ErrorKind::Media { reason }
        })?;
        let coverage = self.checksum_coverage(extent, completed).await?;
        Ok(Response::Checksum(Checksum { kind, value, bytes_transferred: 0, coverage }))
    }

    /// Coverage of a Checksum.
    async fn checksum_coverage(&self, extent: Extent, completed: &CompletedCommand) -> Result<Coverage, Error> {
        let extensions = completed.session.pages.extensions;
        if !extensions.contains(Extensions::COPIES) {
            return Ok(self.reach(extensions));
        }
        match Requests(self).verify(extent, &Expectations::NONE).await? {
            Response::Verified(verified) => Ok(verified.coverage),
            _ => unreachable!("a Verify is answered with what it cost"),
        }
    }

    pub(crate) async fn read_reserved(&self, area: ReservedArea) -> Outcome {
        let (frame, cdw11) = frame_of(area);
        let (fid, nsid) = (frame.feature().code(), self.nsid());
        let request = GetFeatures { fid, select: FeatureSelect::Current, nsid, cdw11 }.encode();
        let data = || HostData::Read { buffer: Buffer::zeroed(frame.frame_bytes()), layout: None };
        let completed = self.reserved_command(RequestKind::ReadReserved, request, data).await?;
        let received = completed.result.data.filter(|data| !data.is_damaged);
        let received = received.map(|data| data.buffer).unwrap_or_default();
        match frame.decode(&received) {
            Ok(bytes) => Ok(Response::Reserved(Slice::copy_from(bytes))),
            Err(why) => {
                let reason = format!("the reserved area of namespace {nsid} is invalid: {why}");
                Err(ErrorKind::Media { reason }.into())
            }
        }
    }

    /// Writes the reserved area: durable once complete, so it is not recorded as an unflushed write. Idempotent.
    pub(crate) async fn write_reserved(&self, area: ReservedArea, bytes: &[u8]) -> Outcome {
        let (frame, cdw11) = frame_of(area);
        let (limit, actual) = (frame.max_bytes() as u64, bytes.len() as u64);
        let too_long = ErrorKind::Limit { what: "bytes for the reserved area", limit, actual };
        let data = Slice::copy_from(&frame.encode(bytes).ok_or(too_long)?);
        let set = SetFeatures { fid: frame.feature().code(), save: false, nsid: self.nsid(), cdw11 }.encode();
        self.reserved_command(RequestKind::WriteReserved, set, || HostData::Write(data.clone().into())).await?;
        Ok(Response::Done)
    }

    /// Executes a command on the reserved area, which must succeed.
    async fn reserved_command(
        &self,
        kind: RequestKind,
        command: Command,
        data: impl Fn() -> HostData,
    ) -> Result<CompletedCommand, Error> {
        let build = |session: &Session| {
            session.offers(Extensions::RESERVED, kind)?;
            Ok((command, data()))
        };
        let changed = match kind {
            RequestKind::WriteReserved => WriteSet::reserved_area(),
            _ => WriteSet::default(),
        };
        let completed = self.execute_admin(changed, build).await?;
        match completed.status().is_success() {
            true => Ok(completed),
            false => Err(self.failed(kind, None, &completed)),
        }
    }
}

/// The feature of a reserved area, and its dword 11.
const fn frame_of(area: ReservedArea) -> (ReservedFrame, u32) {
    match area {
        ReservedArea::GroupLabel => (ReservedFrame::Group, 0),
        ReservedArea::ScrubState => (ReservedFrame::Scrub, 0),
        ReservedArea::Bitmap { page } => (ReservedFrame::Bitmap, page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_room_for_a_whole_reserved_area() {
        for area in [ReservedArea::GroupLabel, ReservedArea::ScrubState, ReservedArea::Bitmap { page: 7 }] {
            assert_eq!(frame_of(area).0.max_bytes(), area.max_bytes());
        }
    }
}
