//! Writes of several blocks, PDU by PDU, so that they can be cut at any byte.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use sealblock_integrity::ProtectionType;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, Prchk};
use sealblock_protocols_nvme::{Command, Completion};
use sealblock_units::Extent;

use crate::formats::{FormattedNamespace, TagMaker};
use crate::wire::{Data, Pdu, Peer, R2T, RESPONSE, capsule, h2c, in_capsule, transport};

/// Bytes of data that a capsule may carry.
const CAPSULE_BYTES: usize = 8192;

/// How a write is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteMode {
    /// The namespace.
    pub kind: FormattedNamespace,
    /// Whether the host or the target makes the tags.
    pub maker: TagMaker,
    /// True if the capsule carries the data; otherwise the target requests it by R2T.
    pub in_capsule: bool,
}

impl WriteMode {
    /// All four modes for a namespace.
    pub fn all(kind: FormattedNamespace) -> [WriteMode; 4] {
        [(TagMaker::Host, true), (TagMaker::Host, false), (TagMaker::Target, true), (TagMaker::Target, false)]
            .map(|(maker, in_capsule)| WriteMode { kind, maker, in_capsule })
    }

    /// Blocks from `start` on: `most` of them, or as many as a capsule holds.
    pub fn extent(&self, start: u64, most: u64) -> Extent {
        let room = CAPSULE_BYTES / self.kind.sent_bytes(self.maker);
        let blocks = if self.in_capsule { most.min(room as u64) } else { most };
        Extent::from_raw(start, blocks).expect("the namespace is longer")
    }

    fn command(&self, blocks: BlockCommand, cid: u16, data: &[u8]) -> Result<Command> {
        let command = IoCommand::Write(blocks).encode(self.kind.nsid)?.with_cid(cid);
        Ok(if self.in_capsule { in_capsule(command, data) } else { transport(command, data.len()) })
    }

    /// Returns what is sent before the target replies, and what is sent after its R2T.
    fn parts(&self, peer: &Peer, command: &Command, r2t: (u16, u16), data: &[u8]) -> (Part, Vec<Part>) {
        if self.in_capsule {
            return (Part::new(peer, &capsule(command, data), 0..data.len()), Vec::new());
        }
        // Two PDUs that divide a block if the number of blocks is odd.
        let middle = (data.len() / 2) & !3;
        let (cid, ttag) = r2t;
        let halves = [0..middle, middle..data.len()].map(|range| {
            let pdu = h2c(range.end == data.len(), cid, ttag, range.start as u32, &data[range.clone()]);
            Part::new(peer, &pdu, range)
        });
        (Part::new(peer, &capsule(command, &[]), 0..0), halves.into())
    }

    /// Returns all cut points for a write of this extent, in order; the last one is after its last byte.
    pub fn cuts(&self, peer: &Peer, extent: Extent) -> Result<Vec<CutPoint>> {
        let data = vec![0; extent.len() as usize * self.kind.sent_bytes(self.maker)];
        let command = self.command(BlockCommand::new(extent), 0, &data)?;
        let (first, rest) = self.parts(peer, &command, (0, 0), &data);
        let all = std::iter::once(first).chain(rest).enumerate();
        Ok(all
            .flat_map(|(pdu, part)| part.points(self).into_iter().map(move |bytes| CutPoint { pdu, bytes }))
            .collect())
    }

    /// Sends a write up to a cut point, or all of it. Does not wait for the completion, but returns one that arrives
    /// instead of an R2T.
    pub fn send(
        &self,
        peer: &mut Peer,
        blocks: BlockCommand,
        data: &[u8],
        cut: Option<CutPoint>,
    ) -> Result<Option<Pdu>> {
        let cid = peer.cid();
        let command = self.command(blocks, cid, data)?;
        let (first, _) = self.parts(peer, &command, (cid, 0), data);
        if let Some(CutPoint { pdu: 0, bytes }) = cut {
            peer.send(&first.bytes[..bytes])?;
            return Ok(None);
        }
        peer.send(&first.bytes)?;
        if self.in_capsule {
            return Ok(None);
        }
        let pdu = peer.receive()?;
        if pdu.kind == RESPONSE {
            return Ok(Some(pdu));
        }
        let whole = (0, data.len() as u32);
        ensure!(pdu.kind == R2T && (pdu.dword(12), pdu.dword(16)) == whole, "a Write is answered by {pdu:?}");
        for (index, part) in (1..).zip(self.parts(peer, &command, (cid, pdu.short(10)), data).1) {
            match cut {
                Some(CutPoint { pdu, bytes }) if pdu == index => {
                    peer.send(&part.bytes[..bytes])?;
                    break;
                }
                _ => peer.send(&part.bytes)?,
            }
        }
        Ok(None)
    }

    /// Executes a write, and returns its status.
    pub fn write(&self, peer: &mut Peer, blocks: BlockCommand, data: &[u8]) -> Result<u16> {
        let answer = match self.send(peer, blocks, data, None)? {
            Some(early) => early,
            None => peer.receive()?,
        };
        answered(&answer)
    }
}

/// Returns the status of a completed write.
pub fn answered(pdu: &Pdu) -> Result<u16> {
    ensure!(pdu.kind == RESPONSE, "a Write is answered by {pdu:?}");
    let completion = Completion::from_prefix(&pdu.header[8..]).context("a response is short")?;
    Ok(completion.status().code().get())
}

/// Where a write is cut: after this many bytes of this PDU. Zero bytes of the first PDU after the capsule means that
/// the R2T was received before the cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CutPoint {
    /// The PDU: 0 is the capsule.
    pub pdu: usize,
    /// Bytes of it that are sent.
    pub bytes: usize,
}

/// A PDU, its part of the data, and the offset of that part.
struct Part {
    bytes: Vec<u8>,
    header_bytes: usize,
    data_at: usize,
    data: Range<usize>,
}

impl Part {
    fn new(peer: &Peer, pdu: &[u8], data: Range<usize>) -> Part {
        let header_bytes = usize::from(pdu[2]);
        let bytes = peer.digested(pdu, data.len());
        Part { bytes, header_bytes, data_at: header_bytes + peer.digest_bytes().0, data }
    }

    /// Returns cut points in the header and its digest, at and between block boundaries, in the tuples, and in the data
    /// digest.
    fn points(&self, mode: &WriteMode) -> Vec<usize> {
        let header = self.header_bytes;
        let mut points = vec![0, 1, 4, 8, header / 2, header - 1, header, header + 2, self.data_at];
        let (unit, block) = (mode.kind.sent_bytes(mode.maker), mode.kind.size.bytes());
        for start in (self.data.start / unit * unit..self.data.end).step_by(unit) {
            let within = [start, start + block / 2, start + block - 1, start + block, start + (block + unit) / 2];
            let inside = within.iter().filter(|at| self.data.contains(at));
            points.extend(inside.map(|at| self.data_at + at - self.data.start));
        }
        let end = self.data_at + self.data.len();
        points.extend([end, end + 2, self.bytes.len()]);
        points.retain(|at| *at <= self.bytes.len());
        points.sort_unstable();
        points.dedup();
        points
    }
}

/// Reads blocks with their tuples, without checks by the target.
pub fn read(peer: &mut Peer, kind: &FormattedNamespace, extent: Extent) -> Result<Vec<u8>> {
    let command = IoCommand::Read(BlockCommand::new(extent)).encode(kind.nsid)?;
    let answer = peer.call(command, Data::Read(extent.len() as usize * kind.unit_bytes()))?;
    ensure!(answer.status == 0, "Read of {extent}: {:#x}", answer.status);
    Ok(answer.data)
}

/// Verifies a whole namespace: guards, and reference tags where they are addresses.
pub fn verify(peer: &mut Peer, kind: &FormattedNamespace) -> Result<()> {
    let all = Extent::from_raw(0, crate::formats::BLOCKS).context("a namespace")?;
    let mut blocks = kind.command(0, all, TagMaker::Host);
    blocks.protection.prchk =
        if kind.format.protection() == ProtectionType::Type1 { kind.checks() } else { Prchk::GUARD };
    blocks.protection.stc = false;
    let answer = peer.call(IoCommand::Verify(blocks).encode(kind.nsid)?, Data::None)?;
    ensure!(answer.status == 0, "Verify of {kind:?}: {:#x}", answer.status);
    Ok(())
}
