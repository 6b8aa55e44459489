//! Each operation as requests.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{BadBlocks, Durability, Error, Outcome, RequestKind, Response};
use sealblock_integrity::{Checks, Sealed, Unverified};
use sealblock_protocols_nbd::client::{Answer as Reply, ClientRequest};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::Extent;

use crate::facts::add;
use crate::hunt;
use crate::map::HoleMap;
use crate::reconnecting_session::{Answered, ReconnectingSession};
use crate::status::{failure, is_about_blocks};

/// Questions about holes for one operation; what is still open then counts as data.
const QUESTIONS: usize = 1024;
/// Status bits of `base:allocation` that together say: takes no space, and reads as zeroes.
const HOLE_AND_ZERO: u32 = 3;

/// Carries operations out on one export.
pub(crate) struct Io {
    pub(crate) link: Rc<ReconnectingSession>,
}

impl Io {
    pub(crate) fn block_shift(&self) -> u32 {
        self.link.shape.geometry.block_size.shift()
    }

    /// Where blocks are, and how long they are, in bytes.
    fn bytes(&self, extent: Extent) -> (u64, u64) {
        (extent.start().get() << self.block_shift(), extent.len() << self.block_shift())
    }

    /// A read, whatever it is answered with.
    pub(crate) async fn read_once(&self, extent: Extent) -> Result<Answered, Error> {
        let (offset, length) = self.bytes(extent);
        // The gate keeps reads far below 4 GiB.
        let length = length as u32;
        let answered = self.link.run(|| Ok(ClientRequest::Read { offset, length, whole: false })).await?;
        if answered.outcome.is_ok() {
            add(&self.link.counting.received_bytes, length.into());
        }
        Ok(answered)
    }

    pub(crate) async fn read(&self, extent: Extent) -> Outcome {
        let troubles = match self.read_once(extent).await?.outcome {
            Ok(reply) => return self.data(reply),
            Err(troubles) if is_about_blocks(&troubles) => troubles,
            Err(troubles) => return Err(failure(RequestKind::Read, Some(extent), &troubles)),
        };
        if let Some(faults) = BadBlocks::new(hunt::damaged(self, extent, troubles).await?) {
            return Err(faults.into());
        }
        // Each block can be read by itself. If they still cannot be together, nobody can say which is bad.
        match self.read_once(extent).await?.outcome {
            Ok(reply) => self.data(reply),
            Err(troubles) => Err(failure(RequestKind::Read, Some(extent), &troubles)),
        }
    }

    fn data(&self, reply: Reply) -> Outcome {
        let buffer: Buffer = match reply {
            Reply::Data(buffer) => buffer,
            Reply::Done | Reply::Status(_) => unreachable!("the core answers reads with data"),
        };
        let size = self.link.shape.geometry.block_size;
        let plain = Unverified::new(buffer.freeze(), Slice::empty(), size, None).expect("whole blocks were asked for");
        Ok(Response::Data(plain.verify(&Checks::NONE).expect("there is nothing to check")))
    }

    /// A request that changes something and answers nothing.
    async fn change(&self, kind: RequestKind, extent: Extent, ask: ClientRequest) -> Result<u64, Error> {
        let answered = self.link.run(|| Ok(ask.clone())).await?;
        match answered.outcome {
            Ok(_) => Ok(answered.epoch),
            Err(troubles) => Err(failure(kind, Some(extent), &troubles)),
        }
    }

    /// Makes a change durable that could not be asked to be so by itself, or enters it in the ledger.
    async fn settle(&self, epoch: u64, durability: Durability) -> Outcome {
        let is_durable = durability == Durability::ForceUnitAccess;
        if is_durable && self.link.shape.fua {
            return Ok(Response::Done);
        }
        self.link.ledger.write_completed(epoch);
        if is_durable { self.flush().await } else { Ok(Response::Done) }
    }

    fn fua(&self, durability: Durability) -> bool {
        durability == Durability::ForceUnitAccess && self.link.shape.fua
    }

    pub(crate) async fn write(&self, extent: Extent, data: Sealed, durability: Durability) -> Outcome {
        let (offset, length) = self.bytes(extent);
        let ask = ClientRequest::Write { offset, data: data.into_parts().0, fua: self.fua(durability) };
        let epoch = self.change(RequestKind::Write, extent, ask).await?;
        add(&self.link.counting.sent_bytes, length);
        self.settle(epoch, durability).await
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        let (offset, length) = self.bytes(extent);
        let ask =
            ClientRequest::WriteZeroes { offset, length, fua: self.fua(durability), no_hole: !may_unmap, fast: false };
        let epoch = self.change(RequestKind::WriteZeroes, extent, ask).await?;
        self.settle(epoch, durability).await
    }

    /// What a Discard loses is what it asked to lose, so it is in no ledger.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for extent in extents {
            let (offset, length) = self.bytes(*extent);
            self.change(RequestKind::Discard, *extent, ClientRequest::Trim { offset, length, fua: false }).await?;
        }
        Ok(Response::Done)
    }

    pub(crate) async fn flush(&self) -> Outcome {
        // A server without FLUSH has, as far as a client can know, no cache.
        if !self.link.shape.flush {
            return Ok(Response::Done);
        }
        let mark = Cell::new(0);
        let build = || {
            mark.set(self.link.ledger.flush_started()?);
            Ok(ClientRequest::Flush)
        };
        let answered = self.link.run(build).await?;
        match answered.outcome {
            Ok(_) => {
                self.link.ledger.flush_completed(answered.epoch, mark.get());
                Ok(Response::Done)
            }
            Err(troubles) => Err(failure(RequestKind::Flush, None, &troubles)),
        }
    }

    /// Which blocks are holes: asks on behind what was answered, because servers tell as much as they like.
    pub(crate) async fn allocation(&self, extent: Extent) -> Outcome {
        let (start, length) = self.bytes(extent);
        let end = start + length;
        let mut map = HoleMap::new(start, self.block_shift());
        for _ in 0..QUESTIONS {
            let offset = map.next_block();
            if offset >= end {
                break;
            }
            let length = end - offset;
            let answered = self.link.run(|| Ok(ClientRequest::BlockStatus { offset, length, one: false })).await?;
            match answered.outcome {
                Ok(Reply::Status(runs)) => {
                    runs.iter().for_each(|run| map.push(run.length, run.status & HOLE_AND_ZERO == HOLE_AND_ZERO));
                    map.end_of_answer();
                }
                Ok(Reply::Done | Reply::Data(_)) => unreachable!("the core answers status with runs"),
                Err(troubles) => return Err(failure(RequestKind::BlockStatus, Some(extent), &troubles)),
            }
        }
        Ok(Response::BlockStatus(map.finish(end)))
    }
}
