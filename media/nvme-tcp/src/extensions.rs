//! Operations that take extensions of sealblock: Digest, and the annex.
//!
//! Invariant: a command of an extension goes only to a session whose target has said that the namespace has it. A target
//! that took the place of another may be of another kind, and the same number may mean anything there.

use sealblock_block::{BadBlocks, Checksum, Coverage, Error, ErrorKind, Outcome, RequestKind, ReservedArea, Response};
use sealblock_integrity::{Checks, guard};
use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures, SetFeatures};
use sealblock_protocols_nvme::extensions::{Extensions, ReservedArea as Frame};
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use crate::bad_block_search::BadBlockSearch;
use crate::io::Io;
use crate::reconnecting_session::Answered;
use crate::session::Session;
use crate::status::field;

impl Io {
    /// A Digest, with whatever status.
    async fn digest_once(&self, extent: Extent, checks: &Checks) -> Result<Answered, Error> {
        let (protection, _) = self.wire.read_checks(extent, checks, true);
        let command = self.encode(IoCommand::Digest(BlockCommand { protection, ..BlockCommand::new(extent) }))?;
        let build = |session: &Session| {
            offered(session, Extensions::DIGEST, RequestKind::Checksum)?;
            Ok((command, HostData::None))
        };
        self.link.run(build).await
    }

    pub(crate) async fn digest(&self, extent: Extent, checks: Checks) -> Outcome {
        let (_, says_all) = self.wire.read_checks(extent, &checks, true);
        if !says_all {
            let mut crc64 = guard::crc64(&[]);
            let each = |part: &sealblock_integrity::Sealed| crc64 = guard::crc64_append(crc64, part.data());
            let (bytes_transferred, coverage) = self.read_all(extent, &checks, each).await?;
            return Ok(Response::Checksum(Checksum { crc64, bytes_transferred, coverage }));
        }
        let answered = self.digest_once(extent, &checks).await?;
        if answered.status().is_success() {
            return self.digested(extent, checks, &answered).await;
        }
        if field(answered.status()).is_none() {
            return Err(self.failed(RequestKind::Checksum, Some(extent), &answered));
        }
        if let Some(faults) =
            BadBlocks::new(BadBlockSearch::new(self, checks, self.probe()).of(extent, &answered).await?)
        {
            let coverage = match self.beside_digest(extent, checks, &answered).await.map_err(Error::into_damage) {
                Ok(coverage) | Err(Ok((_, coverage))) => coverage,
                Err(Err(error)) => return Err(error),
            };
            return Err(faults.covering(coverage).into());
        }
        // The hunt read every block again and found them good: the target has got over it, and can be asked once more.
        let again = self.digest_once(extent, &checks).await?;
        match again.status().is_success() {
            true => self.digested(extent, checks, &again).await,
            false => Err(self.failed(RequestKind::Checksum, Some(extent), &again)),
        }
    }

    /// The answer of a Digest that succeeded. Both dwords of its completion are the sum, so which copies it has not looked at is
    /// asked with a Verify, where there are any.
    async fn digested(&self, extent: Extent, checks: Checks, answered: &Answered) -> Outcome {
        let coverage = self.beside_digest(extent, checks, answered).await?;
        let crc64 = answered.finished.completion.result.get();
        Ok(Response::Checksum(Checksum { crc64, bytes_transferred: 0, coverage }))
    }

    /// How far a Digest went that was answered so.
    async fn beside_digest(&self, extent: Extent, checks: Checks, answered: &Answered) -> Result<Coverage, Error> {
        let extensions = answered.session.pages.extensions;
        if !extensions.contains(Extensions::COPIES) {
            return Ok(self.reach(&checks, extensions));
        }
        match self.verify(extent, checks).await? {
            Response::Verified(verified) => Ok(verified.coverage),
            _ => unreachable!("a Verify is answered with what it cost"),
        }
    }

    pub(crate) async fn read_annex(&self, slot: ReservedArea) -> Outcome {
        let (frame, cdw11) = frame(slot);
        let (fid, nsid) = (frame.feature().code(), self.nsid());
        let ask = GetFeatures { fid, select: FeatureSelect::Current, nsid, cdw11 }.encode();
        let data = || HostData::Read { buffer: Buffer::zeroed(frame.frame_bytes()), shape: None };
        let answered = self.annex(RequestKind::ReadReserved, ask, data).await?;
        let came = answered.finished.data.filter(|data| !data.damaged);
        let came = came.map(|data| data.buffer).unwrap_or_default();
        match frame.decode(&came) {
            Ok(bytes) => Ok(Response::Reserved(Slice::copy_from(bytes))),
            Err(why) => {
                let reason = format!("what the target sent of the annex of namespace {nsid} cannot be used: {why}");
                Err(ErrorKind::Media { reason }.into())
            }
        }
    }

    /// Durable when it is answered, so it is in no ledger; repeated, it writes the same.
    pub(crate) async fn write_annex(&self, slot: ReservedArea, bytes: &[u8]) -> Outcome {
        let (frame, cdw11) = frame(slot);
        let (limit, actual) = (frame.most_bytes() as u64, bytes.len() as u64);
        let too_long = ErrorKind::Limit { what: "bytes for the annex", limit, actual };
        let data = Slice::copy_from(&frame.encode(bytes).ok_or(too_long)?);
        let set = SetFeatures { fid: frame.feature().code(), save: false, nsid: self.nsid(), cdw11 }.encode();
        self.annex(RequestKind::WriteReserved, set, || HostData::Write(data.clone().into())).await?;
        Ok(Response::Done)
    }

    /// A command about the annex, which succeeded.
    async fn annex(&self, kind: RequestKind, command: Command, data: impl Fn() -> HostData) -> Result<Answered, Error> {
        let build = |session: &Session| {
            offered(session, Extensions::ANNEX, kind)?;
            Ok((command, data()))
        };
        let answered = self.link.run_admin(build).await?;
        match answered.status().is_success() {
            true => Ok(answered),
            false => Err(self.failed(kind, None, &answered)),
        }
    }
}

/// Refuses what the session's target has not offered.
fn offered(session: &Session, extension: Extensions, kind: RequestKind) -> Result<(), Error> {
    match session.pages.extensions.contains(extension) {
        true => Ok(()),
        false => Err(ErrorKind::Absent(kind).into()),
    }
}

/// The feature of a slot, and its dword 11.
const fn frame(slot: ReservedArea) -> (Frame, u32) {
    match slot {
        ReservedArea::GroupLabel => (Frame::Group, 0),
        ReservedArea::ScrubState => (Frame::Scrub, 0),
        ReservedArea::Bitmap { page } => (Frame::Bitmap, page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_room_for_all_that_a_slot_holds() {
        for slot in [ReservedArea::GroupLabel, ReservedArea::ScrubState, ReservedArea::Bitmap { page: 7 }] {
            assert_eq!(frame(slot).0.most_bytes(), slot.max_bytes());
        }
    }
}
