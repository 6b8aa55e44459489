//! A namespace as a block device.
//!
//! Blocks without tags are read and written by the kernel's ordinary block I/O if possible: it costs less, and other
//! users of the block device see the same. Everything that only the drive can do, and blocks whose tags are
//! transferred, go through passthrough.

use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Device, ErrorKind, Geometry, Operation, Outcome, Request, RequestKind, Response,
};
use sealblock_media_nvme::requests::Requests;
use sealblock_media_nvme::{CompletedCommand, Namespace, PiMode};
use sealblock_protocols_nvme::nvm::IoCommand;

use super::commands::Drive;
use super::open::{NvmeInfo, NvmeNamespace};

/// An NVMe drive's namespace as a block device. Clones are the same device. `D` is the same drive through the kernel's
/// ordinary block I/O.
pub struct NvmeDevice<D>(Rc<NvmeDeviceState<D>>);

struct NvmeDeviceState<D> {
    drive: Drive,
    info: NvmeInfo,
    ordinary: Option<D>,
}

impl<D> Clone for NvmeDevice<D> {
    fn clone(&self) -> NvmeDevice<D> {
        NvmeDevice(Rc::clone(&self.0))
    }
}

impl<D: Device> NvmeDevice<D> {
    /// The device of a namespace. `ordinary` is the same blocks through the kernel's block I/O, without its page cache.
    /// It is dropped if it cannot transfer everything: if blocks have metadata, or if its size differs from the
    /// namespace's.
    pub fn new(namespace: NvmeNamespace, ordinary: Option<D>) -> NvmeDevice<D> {
        let NvmeNamespace { drive, info } = namespace;
        let (profile, has_metadata) = (&drive.profile, info.metadata_bytes > 0);
        let is_same = |other: &D| {
            let (one, other) = (&profile.geometry, other.geometry());
            (one.block_size, one.capacity_blocks) == (other.block_size, other.capacity_blocks)
        };
        let fits = profile.pi_mode == PiMode::None && !has_metadata;
        let ordinary = ordinary.filter(|other| fits && is_same(other));
        NvmeDevice(Rc::new(NvmeDeviceState { drive, info, ordinary }))
    }

    /// What the drive reports.
    pub fn info(&self) -> &NvmeInfo {
        &self.0.info
    }

    /// True if reads and writes use the kernel's ordinary block I/O.
    pub fn uses_ordinary_way(&self) -> bool {
        self.0.ordinary.is_some()
    }

    async fn flush(&self) -> Outcome {
        let drive = &self.0.drive;
        let completed = drive.execute_once(IoCommand::Flush).await?;
        match completed.status().is_success() {
            true => Ok(Response::Done),
            false => Err(drive.failed(RequestKind::Flush, None, &completed)),
        }
    }
}

impl<D: Device> Device for NvmeDevice<D> {
    fn geometry(&self) -> &Geometry {
        &self.0.drive.profile.geometry
    }

    fn abilities(&self) -> Abilities {
        let own = self.0.drive.profile.abilities;
        let Some(ordinary) = self.0.ordinary.as_ref().map(Device::abilities) else { return own };
        let zeroes = if own.is_native(RequestKind::WriteZeroes) { own } else { ordinary };
        let (writable, unmap_zeroes) = (own.writable && ordinary.writable, zeroes.unmap_zeroes);
        Abilities { writable, unmap_zeroes, ..own }
            .with([RequestKind::Discard], ordinary.get(RequestKind::Discard))
            .with([RequestKind::BlockStatus], ordinary.get(RequestKind::BlockStatus))
            .with([RequestKind::WriteZeroes], zeroes.get(RequestKind::WriteZeroes))
    }

    async fn execute(&self, request: Request) -> Outcome {
        let (drive, kind) = (&self.0.drive, request.kind());
        if let Some(ordinary) = &self.0.ordinary {
            let is_native = drive.profile.abilities.of(kind) == Ability::Native;
            match kind {
                RequestKind::Verify | RequestKind::Compare | RequestKind::Copy => {}
                RequestKind::WriteZeroes if is_native => {}
                _ => return ordinary.execute(request).await,
            }
        }
        let requests = Requests(drive);
        let Request { operation, extents, durability } = request;
        match operation {
            Operation::Read(expectations) => requests.read(extents.one(), &expectations).await,
            Operation::Write(data) => requests.write(extents.one(), &data.into_sealed(), durability).await,
            Operation::Flush => self.flush().await,
            Operation::Discard => requests.discard(&extents).await,
            Operation::WriteZeroes { may_unmap } => requests.write_zeroes(extents.one(), may_unmap, durability).await,
            Operation::Copy { source, expectations } => {
                requests.copy(source, extents.one(), &expectations, durability).await
            }
            Operation::Verify(expectations) => requests.verify(extents.one(), &expectations).await,
            Operation::Compare(data) => requests.compare(extents.one(), &data).await,
            // The kernel refuses commands with flags, so fused ones too.
            Operation::CompareAndWrite(_)
            | Operation::WriteUncorrectable { .. }
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::BlockStatus
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..) => Err(ErrorKind::Absent(kind).into()),
        }
    }
}
