//! A chunk whose payload is arriving, and what its request allows.

use sealblock_runtime_memory::Buffer;

use crate::client::pending::PendingRequest;
use crate::client::request::RequestFields;
use crate::client::violation::Violation;
use crate::input::Fill;
use crate::reply::StatusDescriptor;
use crate::wire::{STRING_BYTES, chunk, command, flag};

/// The header of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkHeader {
    pub(super) is_last: bool,
    pub(super) kind: u16,
    pub(super) length: u64,
}

/// Longest payload of an error: number, length of the text, text, offset.
const ERROR_BYTES: u64 = 4 + 2 + STRING_BYTES as u64 + 8;
/// Bit 15 of a chunk's type: an error, even if the type is unknown.
const IS_ERROR: u16 = 1 << 15;

/// A chunk whose payload is arriving.
pub(super) struct Chunk {
    pub(super) place: usize,
    pub(super) is_last: bool,
    pub(super) kind: u16,
    /// Bytes of the payload that were not read.
    pub(super) left: u64,
    pub(super) is_extended: bool,
    pub(super) data: Option<DataChunk>,
    pub(super) status: Option<StatusChunk>,
}

/// Data that is arriving: the memory of the read, split into three parts.
pub(super) struct DataChunk {
    pub(super) before: Buffer,
    pub(super) fill: Fill,
    pub(super) behind: Buffer,
    pub(super) left: usize,
}

/// Descriptors so far, and the bytes that they cover.
pub(super) struct StatusChunk {
    pub(super) runs: Vec<StatusDescriptor>,
    /// Descriptors that have not arrived.
    pub(super) runs_left: u64,
    pub(super) reached: u64,
}

impl Chunk {
    /// The chunk of this header; refuses types and lengths that its request does not allow.
    pub(super) fn begin(
        place: usize,
        fields: RequestFields,
        header: ChunkHeader,
        is_extended: bool,
    ) -> Result<Chunk, Violation> {
        let ChunkHeader { is_last, kind, length } = header;
        let wants = |good: bool| if good { Ok(()) } else { Err(Violation::Chunk { kind, command: fields.kind }) };
        let is_long = match kind {
            chunk::NONE => {
                wants(is_last)?;
                length == 0
            }
            chunk::OFFSET_DATA => {
                wants(fields.kind == command::READ)?;
                length > 8 && length - 8 <= fields.length
            }
            chunk::OFFSET_HOLE => {
                wants(fields.kind == command::READ)?;
                length == 12
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                wants(fields.kind == command::BLOCK_STATUS && (kind == chunk::BLOCK_STATUS_EXT) == is_extended)?;
                let (head, run) = if is_extended { (8, 16) } else { (4, 8) };
                length > head && (length - head).is_multiple_of(run)
            }
            error if error & IS_ERROR != 0 => (6..=ERROR_BYTES).contains(&length),
            _ => return Err(Violation::Chunk { kind, command: fields.kind }),
        };
        if !is_long {
            return Err(Violation::ChunkLength { kind, length });
        }
        Ok(Chunk { place, is_last, kind, left: length, is_extended, data: None, status: None })
    }

    /// All data of a read after a simple reply.
    pub(super) fn whole_data(place: usize, pending: &mut PendingRequest, len: usize) -> Chunk {
        let data = Some(DataChunk::of(pending, 0, len));
        let (kind, left) = (chunk::OFFSET_DATA, 0);
        Chunk { place, is_last: true, kind, left, is_extended: false, data, status: None }
    }

    /// Memory of the data, and how much is missing.
    pub(super) fn fill(&mut self) -> Option<(&mut Fill, &mut usize)> {
        self.data.as_mut().map(|data| (&mut data.fill, &mut data.left))
    }
}

impl DataChunk {
    /// Takes the memory of these bytes out of the read.
    pub(super) fn of(pending: &mut PendingRequest, at: usize, len: usize) -> DataChunk {
        let mut before = std::mem::take(&mut pending.data);
        let behind = before.split_off(at + len);
        let fill = Fill::new(before.split_off(at));
        DataChunk { before, fill, behind, left: len }
    }

    /// The memory of the read, in one piece again.
    pub(super) fn join(self) -> Buffer {
        const SAME: &str = "these are parts of one buffer, in order";
        self.before.try_join(self.fill.finish()).expect(SAME).try_join(self.behind).expect(SAME)
    }
}

impl StatusChunk {
    /// Adds the next descriptor. Only the last may go beyond the request, where it is cut; with REQ_ONE none may.
    pub(super) fn take(&mut self, fields: RequestFields, length: u64, flags: u64) -> Result<(), Violation> {
        let is_one = fields.flags & flag::REQ_ONE != 0;
        let left = fields.length - self.reached;
        let is_single = self.runs.is_empty() && self.runs_left == 0;
        if length == 0 || left == 0 || is_one && (!is_single || length > left) {
            return Err(Violation::Runs);
        }
        let length = length.min(left);
        self.reached += length;
        // Unknown flag bits are dropped.
        self.runs.push(StatusDescriptor { length, status: flags as u32 });
        Ok(())
    }
}
