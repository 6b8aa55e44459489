//! Opens the device that a target name names.
//!
//! Everything here runs on a reactor. A target that is opened for writing has to be closed, so that a volume is clean; a
//! process that dies before leaves the volume as after a crash, and loses no flushed write.

mod alone;
mod failures;
mod files;
mod groups;
mod holder;
mod info;
mod nbd;
mod read_only;
mod remote;
mod salvage;
mod whole;

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Clock, Device, DynDevice, Error, Gate, Medium, Outcome, Request, Response};
use sealblock_integrity::Checks;
use sealblock_layers_fault::{FaultLayer, Rules};
use sealblock_layers_offset::OffsetLayer;
use sealblock_media_file::FileMedium;
use sealblock_media_memory::MemoryDevice;
use sealblock_media_nbd::NbdDevice;
use sealblock_media_null::NullDevice;
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_media_volume::{UpkeepCounts, Volume};
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::{BlockSize, ByteCount, Extent, Lba};

use crate::exit::{Cause, CliError};
use crate::range::{BlockRange, BlockSpan};
use crate::tally::count;
use crate::target::TargetName;
use crate::uring;
use files::Plain;

pub use alone::{Usage, bars_resizing};
pub use failures::{of_block, of_medium, of_open, of_resize, of_volume};
pub use files::{
    FileKind, OpenVolume, Overwritten, RAW_FILE, inspect, of_remains, open_again, open_medium, open_shapeless,
    open_truncated, open_volume, overwrite,
};
pub use groups::{OpenMirror, create_mirror};
pub use holder::process_text;
pub use info::TargetInfo;
pub use nbd::exports;
pub use read_only::ReadOnly;
pub use remote::discover;
pub use salvage::{Lost, Salvaged, damage, in_groups};
pub use whole::Whole;

/// A volume in a file, on the reactor's clock. The file and its lock may outlive the volume.
pub type FileVolume = Volume<Rc<FileMedium>, ReactorClock>;

/// The time of the reactor.
#[derive(Clone, Copy, Debug)]
pub struct ReactorClock;

impl Clock for ReactorClock {
    async fn sleep(&self, delay: Duration) {
        sealblock_runtime_reactor::sleep(delay).await;
    }
}

/// How a command accesses a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reads, shared with other readers.
    Read,
    /// Reads and writes, exclusively.
    Write,
    /// The same, and volumes do not move blocks while they are idle.
    WriteInPlace,
}

impl Access {
    /// True if it writes.
    pub fn writes(self) -> bool {
        self != Access::Read
    }
}

/// What an open target has to close.
#[derive(Clone)]
enum CloseHandle {
    Volume(Rc<FileVolume>),
    Remote(NvmeTcpDevice),
    Paths(Rc<groups::Paths>),
    Mirror(Rc<groups::OpenMirror>),
    Nbd(NbdDevice),
}

/// An open target.
pub struct OpenTarget {
    /// The device with its gate.
    pub gate: Gate<DynDevice>,
    /// What it is made of.
    pub info: TargetInfo,
    held: Vec<CloseHandle>,
    target: TargetName,
}

impl OpenTarget {
    fn new(target: &TargetName, device: impl Device + 'static, info: TargetInfo, held: Vec<CloseHandle>) -> OpenTarget {
        OpenTarget { gate: Gate::new(target.to_string(), DynDevice::new(device)), info, held, target: target.clone() }
    }

    fn plain(target: &TargetName, device: impl Device + 'static, kind: &'static str) -> OpenTarget {
        OpenTarget::new(target, device, TargetInfo::plain(kind), Vec::new())
    }

    /// Splits it into a shared device, its parts, and what closes it cleanly.
    pub fn share(self) -> (Rc<Gate<DynDevice>>, TargetInfo, Closer) {
        (Rc::new(self.gate), self.info, Closer { held: self.held, target: self.target })
    }

    /// Bytes of payload received from other hosts until now; `None` for a local target.
    pub fn received_bytes(&self) -> Option<u64> {
        received_bytes(&self.held)
    }

    /// The name it was opened by.
    pub fn target(&self) -> &TargetName {
        &self.target
    }

    /// Closes volumes cleanly; returns `result`, or the failure to close after a success.
    pub async fn close<T>(self, result: Result<T, CliError>) -> Result<T, CliError> {
        let closed = Closer { held: self.held, target: self.target }.close().await;
        let value = result?;
        closed?;
        Ok(value)
    }

    /// Refuses a target of less than one block.
    pub fn check_blocks(&self, doing: &str) -> Result<(), CliError> {
        let geometry = self.gate.geometry();
        if geometry.capacity_blocks > 0 {
            return Ok(());
        }
        let why = format!("it has no blocks: there is less than one of {} bytes", geometry.block_size);
        Err(CliError::new(Cause::Unsuitable, doing, why).on(&self.target))
    }

    /// The blocks of a range; all of them without one.
    pub fn span(&self, range: Option<BlockRange>) -> Result<BlockSpan, CliError> {
        let usage =
            |why: &dyn std::fmt::Display| CliError::new(Cause::Usage, "reading the range", why).on(&self.target);
        self.check_blocks("reading the range")?;
        let whole = BlockRange::new(Lba::ZERO, None).map_err(|error| usage(&error))?;
        range.unwrap_or(whole).resolve(self.gate.geometry().capacity_blocks).map_err(|error| usage(&error))
    }

    /// The checks that every block of the target must pass, for a run from `extent` on.
    pub fn checks(&self, extent: Extent) -> Checks {
        self.gate.geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, extent.start()))
    }

    /// Reads blocks, fully checked.
    pub async fn read(&self, extent: Extent) -> Outcome {
        self.gate.execute(Request::Read { extent, checks: self.checks(extent) }).await
    }

    /// Makes all completed writes durable.
    pub async fn flush(&self) -> Result<(), CliError> {
        self.gate.execute(Request::Flush).await.map(drop).map_err(|error| of_block("flushing", &error))
    }
}

/// Closes an open target after its last use.
pub struct Closer {
    held: Vec<CloseHandle>,
    target: TargetName,
}

impl Closer {
    /// The volume, if the target is a single volume and has nothing else to close.
    pub fn lone_volume(&self) -> Option<&Rc<FileVolume>> {
        match (&self.target, &self.held[..]) {
            (TargetName::File(_) | TargetName::Linux(_), [CloseHandle::Volume(volume)]) => Some(volume),
            _ => None,
        }
    }

    /// Closes volumes cleanly. Later requests to the device fail.
    ///
    /// # Errors
    /// The first volume that could not be closed; the others are closed all the same.
    pub async fn close(&self) -> Result<(), CliError> {
        close_all(&self.held).await.map_err(|error| of_block("closing", &error).on(&self.target))
    }
}

/// Closes everything, one after the other. Boxed, since paths have close handles in turn.
fn close_all(held: &[CloseHandle]) -> LocalBoxFuture<'_, Result<(), Error>> {
    Box::pin(async move {
        let mut closed = Ok(());
        for held in held {
            match held {
                CloseHandle::Volume(volume) => {
                    closed = closed.and(volume.close().await);
                    log_maintenance(volume);
                }
                CloseHandle::Remote(device) => device.close().await,
                CloseHandle::Paths(paths) => closed = closed.and(paths.close().await),
                CloseHandle::Mirror(mirror) => closed = closed.and(mirror.close().await),
                CloseHandle::Nbd(device) => device.close().await,
            }
        }
        closed
    })
}

/// Logs background work of a volume.
fn log_maintenance(volume: &FileVolume) {
    let UpkeepCounts { blocks_moved, blocks_unfit, bytes_punched } = volume.upkeep();
    if blocks_moved + blocks_unfit + bytes_punched > 0 {
        let path = volume.medium().path().display();
        tracing::info!(%path, blocks_moved, blocks_unfit, bytes_punched, "what the volume did while it was idle");
    }
}

fn received_bytes(held: &[CloseHandle]) -> Option<u64> {
    let remotes = held.iter().filter_map(|held| match held {
        CloseHandle::Volume(_) => None,
        CloseHandle::Remote(device) => Some(device.counters().received_bytes),
        CloseHandle::Nbd(device) => Some(device.counters().received_bytes),
        CloseHandle::Paths(paths) => paths.received_bytes(),
        CloseHandle::Mirror(mirror) => mirror.received_bytes(),
    });
    remotes.reduce(u64::saturating_add)
}

/// The settings of a command's reactors: less registered memory than a server's, since registration dominates the time of a
/// short command, and an ordinary user may lock little memory.
pub fn config() -> Config {
    const POOL_BYTES: usize = 8 << 20;
    Config { pool_arena_bytes: POOL_BYTES, ..Config::default() }
}

/// Runs a command's work on a reactor of this thread.
pub fn on_reactor<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    let reactor = Reactor::new(config()).map_err(|error| uring::of_start(&error))?;
    reactor.block_on(work)
}

/// Opens a target by itself.
///
/// # Errors
/// Says what could not be opened and why; bad usage if the target's numbers are invalid. A member of a mirror or stripe
/// is not opened for writing.
pub fn open(target: &TargetName, access: Access) -> LocalBoxFuture<'_, Result<OpenTarget, CliError>> {
    open_for(target, access, Usage::Alone)
}

/// Opens a target for a certain use.
///
/// # Errors
/// As [`open`], but for what `usage` allows.
pub fn open_for(target: &TargetName, access: Access, usage: Usage) -> LocalBoxFuture<'_, Result<OpenTarget, CliError>> {
    Box::pin(async move {
        let opened = open_device(target, access, usage).await?;
        if access.writes() { alone::guard(opened, usage).await } else { Ok(opened) }
    })
}

fn open_device(target: &TargetName, access: Access, usage: Usage) -> LocalBoxFuture<'_, Result<OpenTarget, CliError>> {
    Box::pin(async move {
        match target {
            TargetName::File(path) | TargetName::Linux(path) => files::open(target, path, access, Plain::Refused).await,
            TargetName::Raw(path) => files::open_raw(target, path, access).await,
            TargetName::Memory(size) => {
                let (block_size, blocks) = blocks_of(target, *size)?;
                Ok(OpenTarget::plain(target, MemoryDevice::new(block_size, blocks, None), "memory"))
            }
            TargetName::Null(size) => {
                let (block_size, blocks) = blocks_of(target, *size)?;
                Ok(OpenTarget::plain(target, NullDevice::new(block_size, blocks, None), "null"))
            }
            TargetName::Offset { range, target: whole } => open_offset(target, *range, whole, access, usage).await,
            TargetName::Fault { rules, target: inner } => open_fault(target, rules, inner, access, usage).await,
            TargetName::Group { kind, members } => groups::open(target, *kind, members, access, usage).await,
            TargetName::NvmeTcp { address, nqn, nsid, options } => {
                let device = remote::connect(address, nqn, *nsid, options).await.map_err(|error| error.on(target))?;
                let info = TargetInfo { remote: Some(device.info()), ..TargetInfo::plain("NVMe/TCP namespace") };
                Ok(OpenTarget::new(target, device.clone(), info, vec![CloseHandle::Remote(device)]))
            }
            TargetName::Nbd { address, export, connections } => {
                let device = nbd::connect(address, export, *connections).await.map_err(|error| error.on(target))?;
                let info = TargetInfo { export: Some(device.info().clone()), ..TargetInfo::plain("NBD export") };
                Ok(OpenTarget::new(target, device.clone(), info, vec![CloseHandle::Nbd(device)]))
            }
        }
    })
}

/// Opens a slice of another target.
async fn open_offset(
    target: &TargetName,
    range: BlockRange,
    whole: &TargetName,
    access: Access,
    usage: Usage,
) -> Result<OpenTarget, CliError> {
    let below = open_for(whole, access, usage.hidden()).await?;
    let span = below.span(Some(range))?;
    let device = OffsetLayer::new(below.gate, span.first(), span.blocks())
        .map_err(|error| CliError::new(Cause::Usage, "opening", error).on(target))?;
    Ok(OpenTarget::new(target, device, TargetInfo::over("offset", [below.info]), below.held))
}

/// Opens a target with injected faults.
async fn open_fault(
    target: &TargetName,
    rules: &str,
    inner: &TargetName,
    access: Access,
    usage: Usage,
) -> Result<OpenTarget, CliError> {
    let rules: Rules =
        rules.parse().map_err(|error| CliError::new(Cause::Usage, "reading the rules", error).on(target))?;
    let below = open_for(inner, access, usage).await?;
    let device = FaultLayer::new(below.gate, rules, ReactorClock);
    Ok(OpenTarget::new(target, device, TargetInfo::over("fault", [below.info]), below.held))
}

/// The blocks of a device that only a size is known of: the larger ones where they fit.
fn blocks_of(target: &TargetName, size: ByteCount) -> Result<(BlockSize, u64), CliError> {
    let fitting = [BlockSize::B4096, BlockSize::B512]
        .into_iter()
        .find(|block| size.get().is_multiple_of(block.bytes() as u64))
        .ok_or_else(|| {
            CliError::new(
                Cause::Usage,
                "reading the size",
                format!("{} cannot be parted into blocks", count(size.get(), "byte")),
            )
            .on(target)
            .advise("a multiple of 512")
        })?;
    Ok((fitting, size.get() >> fitting.shift()))
}

/// The data of a read.
pub fn data_of(answer: Response) -> sealblock_runtime_memory::Slice {
    match answer {
        Response::Data(sealed) => sealed.data().clone(),
        _ => unreachable!("gates answer reads with data"),
    }
}

/// Whether a medium's length holds whole blocks of some size, and which.
pub(crate) fn raw_block_size(medium: &impl Medium) -> BlockSize {
    if medium.sector_bytes() > 512 { BlockSize::B4096 } else { BlockSize::B512 }
}
