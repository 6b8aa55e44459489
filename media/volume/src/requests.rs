//! A volume as a device: what it can do, and which function executes a request.

mod ahead;
pub(crate) mod gather;
pub(crate) mod lookup;
pub(crate) mod noting;
pub(crate) mod read;
pub(crate) mod write;

use sealblock_block::{
    Abilities, Ability, Clock, Device, ErrorKind, Geometry, Medium, Operation, Outcome, Request, RequestKind, Response,
};

use crate::space::turns;
use crate::volume::Volume;

/// What every volume can do.
const ABILITIES: Abilities = Abilities::COMPLETE
    .with([RequestKind::Salvage, RequestKind::BlockStatus, RequestKind::ReadReserved], Ability::Native)
    .with([RequestKind::Compare], Ability::Absent);

impl<M: Medium, C: Clock> Device for Volume<M, C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            writable: !self.is_read_only,
            bitmap_pages: self.layout.bitmap_pages(),
            // Also without protection information: each map entry has a CRC-32C of its block.
            seals: true,
            freshness: self.freshness(),
            ..ABILITIES
        }
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.upkeep.note_request();
        let _turn = self.turns.take(turns::weight(&request, self.geometry.block_size)).await;
        let kind = request.kind();
        if self.keeps_lost_log.get() && kind.changes_blocks() {
            Box::pin(self.give_up_log()).await?;
        }
        let Request { operation, extents, durability } = request;
        // Rare requests are boxed, so that the future of a read or write has no room for them: it is moved several
        // times.
        match operation {
            Operation::Read(expectations) => self.read(extents.one(), &expectations).await,
            Operation::Salvage => Box::pin(self.salvage(extents.one())).await,
            Operation::Verify(expectations) => Box::pin(self.verify(extents.one(), &expectations)).await,
            Operation::Write(data) => self.write(extents.one(), &data, durability).await,
            Operation::Flush => self.flush().await,
            Operation::Discard => Box::pin(self.discard(&extents)).await,
            Operation::WriteZeroes { may_unmap } => {
                Box::pin(self.write_zeroes(extents.one(), may_unmap, durability)).await
            }
            Operation::WriteUncorrectable { .. } => Box::pin(self.write_uncorrectable(extents.one(), durability)).await,
            Operation::Checksum(kind, expectations) => {
                Box::pin(self.checksum(extents.one(), kind, &expectations)).await
            }
            Operation::ReadReserved(area) => {
                Ok(Response::Reserved(Box::pin(self.reserved.read(&self.medium, area)).await?))
            }
            Operation::WriteReserved(area, bytes) => {
                let _change = self.begin_change()?;
                Box::pin(self.write_reserved(area, &bytes)).await?;
                Ok(Response::Done)
            }
            Operation::BlockStatus => Box::pin(self.allocation(extents.one())).await,
            Operation::Copy { .. } | Operation::Compare(_) | Operation::CompareAndWrite(_) | Operation::Repair => {
                Err(ErrorKind::Absent(kind).into())
            }
        }
    }
}
