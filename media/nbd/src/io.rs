//! Executes block requests as NBD requests.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{
    BadBlockCause, BadBlocks, BlockProbe, Durability, Error, Outcome, RequestKind, Response, WriteSet, find_bad_blocks,
};
use sealblock_integrity::{Checks, Sealed, Unverified};
use sealblock_protocols_nbd::client::{ClientRequest, Reply, ServerError};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{Extent, Lba};

use crate::connection::ReplyResult;
use crate::hole_map::HoleMap;
use crate::options::add;
use crate::remote_export::{self, CompletedRequest, ReconnectingSession};
use crate::status::{failure, is_about_blocks, text};

/// Maximum BLOCK_STATUS requests for one block request; the rest of its extent counts as data.
const MAX_STATUS_REQUESTS: usize = 1024;
/// NBD_STATE_HOLE and NBD_STATE_ZERO of `base:allocation`: unallocated, and reads as zeroes.
const HOLE_AND_ZERO: u32 = 3;

/// Executes block requests on one export.
pub(crate) struct Io {
    pub(crate) session: Rc<ReconnectingSession>,
}

impl Io {
    fn block_shift(&self) -> u32 {
        self.session.profile.geometry.block_size.shift()
    }

    /// Offset and length of an extent, in bytes.
    fn bytes(&self, extent: Extent) -> (u64, u64) {
        (extent.start().get() << self.block_shift(), extent.len() << self.block_shift())
    }

    /// Executes one Read; returns the reply, success or not.
    async fn read_once(&self, extent: Extent) -> Result<CompletedRequest, Error> {
        let (offset, length) = self.bytes(extent);
        // The gate keeps reads far below 4 GiB.
        let length = length as u32;
        let build = || Ok(ClientRequest::Read { offset, length, whole: false });
        let completed = remote_export::execute(&self.session, WriteSet::default(), build).await?;
        if completed.result.is_ok() {
            add(&self.session.counters.received_bytes, length.into());
        }
        Ok(completed)
    }

    pub(crate) async fn read(&self, extent: Extent) -> Outcome {
        let errors = match self.read_once(extent).await?.result {
            Ok(reply) => return self.data(reply),
            Err(errors) if is_about_blocks(&errors) => errors,
            Err(errors) => return Err(failure(RequestKind::Read, Some(extent), &errors)),
        };
        let read = async |part| Ok(self.read_once(part).await?.result);
        let search = Search { read, shift: self.block_shift() };
        if let Some(bad_blocks) = BadBlocks::new(find_bad_blocks(&search, extent, &errors).await?) {
            return Err(bad_blocks.into());
        }
        // Every block alone is readable. If the whole extent still fails, no bad block can be named.
        match self.read_once(extent).await?.result {
            Ok(reply) => self.data(reply),
            Err(errors) => Err(failure(RequestKind::Read, Some(extent), &errors)),
        }
    }

    fn data(&self, reply: Reply) -> Outcome {
        let buffer: Buffer = match reply {
            Reply::Data(buffer) => buffer,
            Reply::Done | Reply::Status(_) => unreachable!("the core answers reads with data"),
        };
        let size = self.session.profile.geometry.block_size;
        let plain = Unverified::new(buffer.freeze(), Slice::empty(), size, None).expect("a read has whole blocks");
        Ok(Response::Data(plain.verify(&Checks::NONE).expect("there is nothing to check")))
    }

    /// Executes a request that changes blocks; returns its epoch.
    async fn change(&self, kind: RequestKind, extent: Extent, request: ClientRequest) -> Result<u64, Error> {
        let changed = WriteSet::of_extents([extent]);
        let completed = remote_export::execute(&self.session, changed, || Ok(request.clone())).await?;
        match completed.result {
            Ok(_) => Ok(completed.epoch),
            Err(errors) => Err(failure(kind, Some(extent), &errors)),
        }
    }

    /// Completes a change: flushes it if it must be durable and the server has no FUA, otherwise records it as
    /// unflushed.
    async fn make_durable(&self, epoch: u64, durability: Durability) -> Outcome {
        let is_durable = durability == Durability::ForceUnitAccess;
        if is_durable && self.session.profile.fua {
            return Ok(Response::Done);
        }
        self.session.flush_epochs.write_completed(epoch);
        if is_durable { self.flush().await } else { Ok(Response::Done) }
    }

    fn fua(&self, durability: Durability) -> bool {
        durability == Durability::ForceUnitAccess && self.session.profile.fua
    }

    pub(crate) async fn write(&self, extent: Extent, data: Sealed, durability: Durability) -> Outcome {
        let (offset, length) = self.bytes(extent);
        let request = ClientRequest::Write { offset, data: data.joined_data(), fua: self.fua(durability) };
        let epoch = self.change(RequestKind::Write, extent, request).await?;
        add(&self.session.counters.sent_bytes, length);
        self.make_durable(epoch, durability).await
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        let (offset, length) = self.bytes(extent);
        let request =
            ClientRequest::WriteZeroes { offset, length, fua: self.fua(durability), no_hole: !may_unmap, fast: false };
        let epoch = self.change(RequestKind::WriteZeroes, extent, request).await?;
        self.make_durable(epoch, durability).await
    }

    /// Deallocates the extents. A lost Discard loses no data, so it is not recorded as an unflushed write.
    pub(crate) async fn discard(&self, extents: &[Extent]) -> Outcome {
        for extent in extents {
            let (offset, length) = self.bytes(*extent);
            self.change(RequestKind::Discard, *extent, ClientRequest::Trim { offset, length, fua: false }).await?;
        }
        Ok(Response::Done)
    }

    pub(crate) async fn flush(&self) -> Outcome {
        // A server without FLUSH is assumed to have no volatile cache.
        if !self.session.profile.flush {
            return Ok(Response::Done);
        }
        let mark = Cell::new(0);
        let build = || {
            mark.set(self.session.flush_epochs.flush_started()?);
            Ok(ClientRequest::Flush)
        };
        let completed = remote_export::execute(&self.session, WriteSet::default(), build).await?;
        match completed.result {
            Ok(_) => {
                self.session.flush_epochs.flush_completed(completed.epoch, mark.get());
                Ok(Response::Done)
            }
            Err(errors) => Err(failure(RequestKind::Flush, None, &errors)),
        }
    }

    /// Reports which blocks are holes. A server may describe less than the requested length, so the loop continues
    /// where the reply ends.
    pub(crate) async fn block_status(&self, extent: Extent) -> Outcome {
        let (start, length) = self.bytes(extent);
        let end = start + length;
        let mut holes = HoleMap::new(start, self.block_shift());
        for _ in 0..MAX_STATUS_REQUESTS {
            let offset = holes.next_block();
            if offset >= end {
                break;
            }
            let length = end - offset;
            let build = || Ok(ClientRequest::BlockStatus { offset, length, one: false });
            let completed = remote_export::execute(&self.session, WriteSet::default(), build).await?;
            match completed.result {
                Ok(Reply::Status(runs)) => {
                    runs.iter().for_each(|run| holes.push(run.length, run.status & HOLE_AND_ZERO == HOLE_AND_ZERO));
                    holes.end_reply();
                }
                Ok(Reply::Done | Reply::Data(_)) => unreachable!("the core answers status with runs"),
                Err(errors) => return Err(failure(RequestKind::BlockStatus, Some(extent), &errors)),
            }
        }
        Ok(Response::BlockStatus(holes.finish(end)))
    }
}

/// Uses Read for the search of bad blocks. A block that the server names in its error is a hint, as for every device.
struct Search<R> {
    /// Executes one Read.
    read: R,
    /// The block size is 1 << `shift` bytes.
    shift: u32,
}

impl<R: AsyncFn(Extent) -> Result<ReplyResult, Error>> BlockProbe for Search<R> {
    type Failed = Vec<ServerError>;

    async fn probe(&self, run: Extent) -> Result<Option<Vec<ServerError>>, Error> {
        match (self.read)(run).await? {
            Ok(_) => Ok(None),
            Err(errors) if is_about_blocks(&errors) => Ok(Some(errors)),
            Err(errors) => Err(failure(RequestKind::Read, Some(run), &errors)),
        }
    }

    fn cause(&self, _: &Vec<ServerError>) -> BadBlockCause {
        BadBlockCause::Media
    }

    async fn hints(&self, _: Extent, failed: &Vec<ServerError>) -> Vec<Lba> {
        named(failed, self.shift).collect()
    }

    async fn named(&self, run: Extent, failed: &Vec<ServerError>) -> Option<Lba> {
        named(failed, self.shift).find(|lba| run.contains(*lba))
    }

    fn describe(&self, failed: &Vec<ServerError>) -> String {
        text(failed)
    }
}

/// The blocks that errors name.
fn named(errors: &[ServerError], shift: u32) -> impl Iterator<Item = Lba> {
    errors.iter().filter_map(move |error| error.offset).map(move |offset| Lba::new(offset >> shift))
}
