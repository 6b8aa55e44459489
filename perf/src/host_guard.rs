//! A boundary at which one pass checks the host's tags and makes those of the device.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Device, Error, ErrorKind, Expectations, Geometry, Operation, Outcome,
    Request, RequestKind, Response,
};
use sealblock_integrity::{Checks, Keep, Mismatch, PiFormat, RebaseTags, Sealed, Unverified};
use sealblock_units::{Extent, Lba};

use crate::cpu::thread_cpu;

/// One in this many conversions is timed, because reading the CPU time takes as long as converting a few blocks.
const TIMED: u64 = 16;

/// A device for a host that uses its own guard.
pub struct HostGuarded<D> {
    device: Rc<D>,
    geometry: Geometry,
    host: PiFormat,
    conversions: Cell<u64>,
    timed_seconds: Cell<f64>,
}

impl<D: Device> HostGuarded<D> {
    /// The device, whose blocks have tags, for a host with tags of this format.
    pub fn new(device: Rc<D>, host: PiFormat) -> HostGuarded<D> {
        let geometry = Geometry { protection: Some(host), ..device.geometry().clone() };
        HostGuarded { device, geometry, host, conversions: Cell::default(), timed_seconds: Cell::default() }
    }

    /// CPU seconds of all conversions so far, extrapolated from the timed ones.
    pub fn boundary_cpu(&self) -> f64 {
        let conversions = self.conversions.get();
        self.timed_seconds.get() * conversions as f64 / conversions.div_ceil(TIMED).max(1) as f64
    }

    /// Converts, and measures the time at intervals.
    fn converted(&self, blocks: &Sealed, to: PiFormat, extent: Extent) -> Result<Sealed, Error> {
        let number = self.conversions.replace(self.conversions.get() + 1);
        if !number.is_multiple_of(TIMED) {
            return self.rebased(blocks, to, extent);
        }
        let start = thread_cpu();
        let rebased = self.rebased(blocks, to, extent);
        self.timed_seconds.set(self.timed_seconds.get() + thread_cpu() - start);
        rebased
    }

    /// The same blocks with tags of another format; the same pass checks the old ones.
    fn rebased(&self, blocks: &Sealed, to: PiFormat, extent: Extent) -> Result<Sealed, Error> {
        let from = blocks.format().ok_or_else(|| missing(extent))?;
        let (size, first) = (self.geometry.block_size, extent.start());
        let arrived = Unverified::new(blocks.joined_data(), blocks.joined_tags(), size, Some(from));
        let arrived = arrived.map_err(|_| missing(extent))?;
        let output = RebaseTags { initial_ref_tag: Keep::Replace(first.get()), ..RebaseTags::default() };
        arrived.rebase(Some(to), &Checks::full(from, first), &output).map_err(|found| bad(first, &found))
    }

    async fn read(&self, extent: Extent) -> Outcome {
        let request = Request::read(extent, Expectations::NONE);
        let Response::Data(blocks) = self.device.execute(request).await? else { return Err(missing(extent)) };
        let arrived = self.converted(&blocks, self.host, extent)?;
        // Checks the tags, as the host's block layer does with what it has read.
        let (data, tags) = (arrived.joined_data(), arrived.joined_tags());
        let arrived = Unverified::new(data, tags, self.geometry.block_size, Some(self.host));
        let arrived = arrived.map_err(|_| missing(extent))?;
        let checked = arrived.verify(&Checks::full(self.host, extent.start()));
        checked.map(Response::Data).map_err(|found| bad(extent.start(), &found))
    }
}

fn bad(first: Lba, found: &[Mismatch]) -> Error {
    let list = found.iter().map(|mismatch| BadBlock::of_mismatch(first, mismatch)).collect();
    BadBlocks::new(list).map_or_else(|| ErrorKind::Media { reason: "no block is bad".to_owned() }.into(), Error::from)
}

fn missing(extent: Extent) -> Error {
    ErrorKind::Media { reason: format!("{extent} came without tags") }.into()
}

impl<D: Device> Device for HostGuarded<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        // The tags are the host's own, and were made in its format before this point.
        self.device.abilities().with([RequestKind::Write], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> Outcome {
        match &request.operation {
            Operation::Read(_) => self.read(request.extents.one()).await,
            Operation::Write(data) => {
                let extent = request.extents.one();
                let device = self.device.geometry().protection.ok_or_else(|| missing(extent))?;
                let data = self.converted(&data.clone().into_sealed(), device, extent)?;
                self.device.execute(Request::write(extent, data, request.durability)).await
            }
            _ => self.device.execute(request).await,
        }
    }
}
