//! The process that is killed: several tasks that change the same few blocks, and report each change before and after
//! it.

use std::cell::Cell;
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, anyhow};
use fastrand::Rng;
use futures_util::future::try_join_all;
use sealblock_block::{Device, Durability, Gate, Geometry, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_file::Options;
use sealblock_media_volume::{Mutation, OpenOptions, VolumeMedium};
use sealblock_runtime_memory::Buffer;
use sealblock_stack::{
    FileVolume, ReactorClock, StackError, device_error, on_reactor, open_error, open_medium, volume_error,
};
use sealblock_units::Extent;

use crate::pattern::{self, Version, rng};
use crate::report::{Change, Event};

/// Concurrent tasks.
const TASKS: u64 = 6;
/// Maximum blocks of one change.
const BLOCKS_MAX: u64 = 8;
/// Most changes are in these first blocks, so that they overlap.
const CROWDED_BLOCKS: u64 = 48;
/// Changes of one task; after these the worker ends on its own, in case no parent kills it.
const CHANGES_MAX: u64 = 100_000;

/// The state that the tasks share.
struct Worker {
    gate: Gate<Rc<FileVolume>>,
    round: u64,
    requests: Cell<u64>,
}

/// Changes the volume until it is killed. `round` makes the versions of this worker unique; `mutation` is a defect
/// injected into the volume.
///
/// # Errors
/// If the volume cannot be opened or a request fails, which must not happen on an undamaged volume.
pub fn run(path: &Path, seed: u64, round: u64, mutation: Mutation) -> Result<()> {
    on_reactor(async {
        let volume = open(path, mutation).await.map_err(|failure| failure.on(path.display()))?;
        let worker = Worker { gate: Gate::new("volume", volume.clone()), round, requests: Cell::new(0) };
        worker.report(Event::Ready);
        try_join_all((0..TASKS).map(|task| worker.work(rng(seed, round * TASKS + task)))).await?;
        volume.close().await.map_err(|error| device_error("close", &error))
    })
    .map_err(|failure| anyhow!("{failure}"))
    .context("the worker failed")
}

/// Opens the volume as the command line does, with the mutation added.
async fn open(path: &Path, mutation: Mutation) -> Result<Rc<FileVolume>, StackError> {
    let medium = open_medium(path, Options::WRITE).await.map_err(|error| open_error("open", &error))?;
    let options = OpenOptions { mutation, ..OpenOptions::default() };
    let opened = sealblock_media_volume::open(VolumeMedium::whole(Rc::new(medium)), ReactorClock, &options).await;
    let opened = opened.map_err(|error| volume_error("open", &error))?;
    drop(sealblock_runtime_reactor::spawn(opened.worker.run()));
    Ok(opened.volume)
}

impl Worker {
    /// Writes a line with one system call. If standard output is closed, the parent has ended, so the worker exits.
    fn report(&self, event: Event) {
        let mut output = io::stdout().lock();
        if write!(output, "{event}").and_then(|()| output.flush()).is_err() {
            std::process::exit(1);
        }
    }

    fn next_request_id(&self) -> u64 {
        self.requests.set(self.requests.get() + 1);
        self.requests.get()
    }

    async fn work(&self, mut rng: Rng) -> Result<(), StackError> {
        for _ in 0..CHANGES_MAX {
            match rng.u64(..16) {
                0 => self.flush().await?,
                1 => self.zero(&mut rng).await?,
                2 => self.discard(&mut rng).await?,
                3..6 => self.write(&mut rng, Durability::ForceUnitAccess).await?,
                _ => self.write(&mut rng, Durability::Volatile).await?,
            }
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), StackError> {
        let request_id = self.next_request_id();
        self.report(Event::FlushBegin { request_id });
        self.gate.execute(Request::flush()).await.map_err(|error| device_error("flush", &error))?;
        self.report(Event::FlushDone { request_id });
        Ok(())
    }

    async fn zero(&self, rng: &mut Rng) -> Result<(), StackError> {
        let extent = self.extent(rng);
        let durability = if rng.u64(..4) == 0 { Durability::ForceUnitAccess } else { Durability::Volatile };
        let request = Request::write_zeroes(extent, rng.u64(..2) == 0, durability);
        self.change(extent, Change::Zero, durability, request).await
    }

    async fn discard(&self, rng: &mut Rng) -> Result<(), StackError> {
        let extent = self.extent(rng);
        self.change(extent, Change::Zero, Durability::Volatile, Request::discard([extent])).await
    }

    async fn write(&self, rng: &mut Rng, durability: Durability) -> Result<(), StackError> {
        let extent = self.extent(rng);
        let version = self.round << 32 | (self.requests.get() + 1);
        let data = sealed(self.gate.geometry(), extent, version);
        let request = Request::write(extent, data, durability);
        self.change(extent, Change::Write(version), durability, request).await
    }

    async fn change(
        &self,
        extent: Extent,
        change: Change,
        durability: Durability,
        request: Request,
    ) -> Result<(), StackError> {
        let request_id = self.next_request_id();
        self.report(Event::Begin { request_id, extent, change, fua: durability == Durability::ForceUnitAccess });
        let doing = format!("request {request_id}, {:?} of {extent}", request.kind());
        self.gate.execute(request).await.map_err(|error| device_error(doing, &error))?;
        self.report(Event::Done { request_id });
        Ok(())
    }

    /// Chooses the blocks of the next change, mostly among the crowded ones.
    fn extent(&self, rng: &mut Rng) -> Extent {
        let capacity = self.gate.geometry().capacity_blocks;
        let blocks = 1 + rng.u64(..BLOCKS_MAX);
        let within = if rng.u64(..8) == 0 { capacity } else { capacity.min(CROWDED_BLOCKS) };
        Extent::from_raw(rng.u64(..within - blocks + 1), blocks).expect("drawn inside the volume")
    }
}

/// The data of a version for these blocks, with protection information for the device.
pub fn sealed(geometry: &Geometry, extent: Extent, version: Version) -> Sealed {
    let size = geometry.block_size;
    let mut data = Buffer::zeroed(extent.bytes(size) as usize);
    for (lba, block) in extent.iter().zip(data.chunks_mut(size.bytes())) {
        pattern::fill(block, version, lba);
    }
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
    Sealed::seal(data.freeze(), size, geometry.protection, &tags)
}
