//! Requests as operations of a device: the one translation, and what of them is more than one operation.

use std::cell::Cell;

use sealblock_block::{Ability, Answer, Device, Durability, Error, Operation};
use sealblock_integrity::{Checks, Sealed, Tags};
use sealblock_layers_remote_core::Attached;
use sealblock_protocols_nbd::{Command, ErrorCode, Failed, Run};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use crate::refusal::of_error;

/// How much is trimmed or zeroed at once, in bytes: a long request of a client that has left ends after the next piece.
const PIECE_BYTES: u64 = 256 << 20;
/// How much is read at once for CACHE, in bytes.
const CACHE_BYTES: u64 = 1 << 20;

/// What a request that succeeded is answered with.
pub(crate) enum Reply {
    Done,
    Data(Slice),
    Status(Vec<Run>),
}

/// A request that failed, and what a read may give of the data before.
pub(crate) struct Trouble {
    pub(crate) failed: Failed,
    pub(crate) before: Option<Slice>,
}

impl From<Failed> for Trouble {
    fn from(failed: Failed) -> Trouble {
        Trouble { failed, before: None }
    }
}

impl From<ErrorCode> for Trouble {
    fn from(code: ErrorCode) -> Trouble {
        Failed::from(code).into()
    }
}

/// A device as requests reach it.
pub(crate) struct Mounted {
    pub(crate) device: Attached,
    /// Whether a failed read may give the data before what failed.
    pub(crate) gives_parts: bool,
}

impl Mounted {
    /// Carries a request out. A long one ends early once `is_gone`.
    pub(crate) async fn carry_out(&self, command: Command, is_gone: &Cell<bool>) -> Result<Reply, Trouble> {
        match command {
            Command::Read { offset, length } => self.read(offset, length.into()).await,
            Command::Write { offset, data, fua } => self.write(offset, data, fua).await,
            Command::Flush => self.run(Operation::Flush).await.map(|_| Reply::Done),
            Command::Trim { offset, length, fua } => {
                let discard = |extent| Operation::Discard { extents: vec![extent] };
                self.in_pieces(offset, length, PIECE_BYTES, is_gone, discard).await?;
                // Discards have no durability of their own.
                if fua { self.run(Operation::Flush).await.map(|_| Reply::Done) } else { Ok(Reply::Done) }
            }
            Command::Cache { offset, length } => {
                let read = |extent| self.read_of(extent);
                self.in_pieces(offset, length.into(), CACHE_BYTES, is_gone, read).await
            }
            Command::WriteZeroes { fast: true, no_hole, .. } if no_hole || !self.zeroes_fast() => {
                Err(ErrorCode::NotSupported.into())
            }
            Command::WriteZeroes { offset, length, fua, no_hole, .. } => {
                let (may_unmap, durability) = (!no_hole, durability(fua));
                let zero = |extent| Operation::WriteZeroes { extent, may_unmap, durability };
                self.in_pieces(offset, length, PIECE_BYTES, is_gone, zero).await
            }
            Command::BlockStatus { offset, length, one } => self.status(offset, length, one, is_gone).await,
        }
    }

    /// Whether zeroes cost less than writing them: only where the device takes the space back.
    fn zeroes_fast(&self) -> bool {
        let abilities = self.device.abilities();
        abilities.write_zeroes == Ability::Native && abilities.unmap_zeroes
    }

    pub(crate) fn extent(&self, offset: u64, length: u64) -> Result<Extent, Trouble> {
        let shift = self.block_shift();
        Extent::from_raw(offset >> shift, length >> shift).map_err(|_| ErrorCode::Invalid.into())
    }

    pub(crate) fn block_shift(&self) -> u32 {
        self.device.geometry().block_size.shift()
    }

    fn failed(&self, error: &Error) -> Failed {
        of_error(error, self.device.geometry().block_size)
    }

    pub(crate) async fn run(&self, operation: Operation) -> Result<Answer, Trouble> {
        self.device.execute(operation).await.map_err(|error| self.failed(&error).into())
    }

    /// A read that checks all there is to check.
    fn read_of(&self, extent: Extent) -> Operation {
        let format = self.device.geometry().protection;
        Operation::Read { extent, checks: format.map_or(Checks::NONE, |format| Checks::full(format, extent.start())) }
    }

    async fn read(&self, offset: u64, length: u64) -> Result<Reply, Trouble> {
        let extent = self.extent(offset, length)?;
        match self.device.execute(self.read_of(extent)).await {
            Ok(Answer::Data(sealed)) => Ok(Reply::Data(sealed.into_parts().0)),
            Ok(_) => Err(ErrorCode::Io.into()),
            Err(error) => {
                let failed = self.failed(&error);
                let before = self.before(extent, failed.offset).await;
                Err(Trouble { failed, before })
            }
        }
    }

    /// The data of a failed read up to the first damaged block, read again. Best effort: the read has failed anyway.
    async fn before(&self, asked: Extent, damaged: Option<u64>) -> Option<Slice> {
        let size = self.device.geometry().block_size;
        let offset = asked.start().get() << size.shift();
        let length = damaged?.checked_sub(offset).filter(|length| (1..asked.bytes(size)).contains(length))?;
        if !self.gives_parts {
            return None;
        }
        let extent = self.extent(offset, length).ok()?;
        match self.device.execute(self.read_of(extent)).await {
            Ok(Answer::Data(sealed)) => Some(sealed.into_parts().0),
            _ => None,
        }
    }

    async fn write(&self, offset: u64, data: Buffer, fua: bool) -> Result<Reply, Trouble> {
        let extent = self.extent(offset, data.len() as u64)?;
        let geometry = self.device.geometry();
        let tags = Tags { app_tag: 0, storage_tag: 0, first_ref: extent.start().get() };
        let data = Sealed::seal(data.freeze(), geometry.block_size, geometry.protection, &tags);
        self.run(Operation::Write { extent, data, durability: durability(fua) }).await.map(|_| Reply::Done)
    }

    async fn in_pieces(
        &self,
        offset: u64,
        length: u64,
        piece_bytes: u64,
        is_gone: &Cell<bool>,
        operation: impl Fn(Extent) -> Operation,
    ) -> Result<Reply, Trouble> {
        let end = offset + length;
        let mut at = offset;
        while at < end && !is_gone.get() {
            let piece = piece_bytes.min(end - at);
            self.run(operation(self.extent(at, piece)?)).await?;
            at += piece;
        }
        // Nobody reads the answer to what was given up half-way.
        if at < end { Err(ErrorCode::Shutdown.into()) } else { Ok(Reply::Done) }
    }
}

fn durability(fua: bool) -> Durability {
    if fua { Durability::ForceUnitAccess } else { Durability::Volatile }
}
