//! Reads a damaged volume: opens it read-only, reads every block separately, and runs Verify.

use std::collections::BTreeSet;
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Device, DynDevice, Expectations, Medium, Request, Response};
use sealblock_integrity::{GuardKind, PiFormat, Sealed, guard};
use sealblock_layers_stripe::ShardLayer;
use sealblock_media_volume::shards::{OpenShards, open_shards, summarise};
use sealblock_media_volume::{OpenOptions, OpenVolume, Volume, VolumeError, VolumeInfo, open};
use sealblock_simulator::checker::{Content, Patterns};
use sealblock_simulator::executor::{Executor, RunEnd, RunLimits};
use sealblock_simulator::random::Random;
use sealblock_simulator::random::Trace;
use sealblock_simulator::system::BoxedWork;
use sealblock_units::{ByteCount, Extent, Lba};

use crate::medium::Overlay;
use crate::model::Model;
use crate::specimen::Specimen;

/// The limits after which a machine counts as stuck.
pub const LIMITS: RunLimits = RunLimits { steps: 20_000_000, seconds: 3600 };

/// The result of reading one block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// This content, with its tags.
    Content(Content),
    /// An error for this block.
    Lost(String),
    /// Bytes that no client wrote, with a 16-bit guard that matches by chance: one damaged block in 65,536 does.
    Collision,
    /// Bytes that no client wrote, or wrong tags.
    Foreign(String),
}

/// The result of reading a volume.
pub struct VolumeView {
    /// The content of every tested block.
    pub blocks: Vec<(Lba, Seen)>,
    /// The blocks in Verify's report.
    pub named: BTreeSet<Lba>,
    /// True if Verify or the open reports an error: bad blocks, lost copies, or an incomplete check.
    pub is_told: bool,
}

/// An open volume.
pub struct Open {
    /// The volume, behind its gate.
    pub stack: DynDevice,
    /// Closes it in good order.
    pub close: BoxedWork<()>,
    /// What the open and the reads found.
    pub description: VolumeInfo,
}

impl Open {
    /// Reads the blocks, and collects the reports.
    pub async fn look(&self, checker: &BlockChecker, watched: &[Extent]) -> VolumeView {
        let mut looked = checker.look(&self.stack, watched).await;
        let info = &self.description;
        let is_lost = info.superblocks.iter().any(|copy| copy.lost.is_some());
        looked.is_told |= is_lost || info.log_lost > 0 || info.lost_copies.count() > 0 || !looked.named.is_empty();
        looked
    }
}

/// Opens a volume.
///
/// # Errors
/// If it is refused; the error has the reason.
pub async fn start(overlay: &Overlay, executor: &Executor, read_only: bool) -> Result<Open, String> {
    let shape = OpenOptions { cache_bytes: 1 << 20, keeps_answered: false, ..OpenOptions::default() };
    let options = OpenOptions { read_only, accept_older: read_only, ..shape };
    let to_text = |error: VolumeError| error.to_string();
    let shards = open_shards(overlay.clone(), executor.clone(), &options).await.map_err(to_text)?;
    if let Some(OpenShards { shards, volumes }) = shards {
        let container = shards.container();
        let (mut infos, mut handles) = (Vec::new(), Vec::new());
        for (shard, OpenVolume { volume, worker, description }) in (0..).zip(volumes) {
            drop(executor.spawn("worker", worker.run()));
            infos.push((shard, description));
            handles.push(volume);
        }
        let description = summarise(container, shards.copies(), &infos);
        let unit = ByteCount::new(container.unit_blocks() << container.block_size().shift());
        let layer = ShardLayer::new(handles.clone(), unit, container.capacity_blocks());
        let stack = DynDevice::new("volume", layer.map_err(|error| error.to_string())?);
        return Ok(Open { stack, close: close(handles), description });
    }
    let opened = open(overlay.clone(), executor.clone(), &options).await.map_err(to_text)?;
    drop(executor.spawn("worker", opened.worker.run()));
    let stack = DynDevice::new("volume", opened.volume.clone());
    Ok(Open { stack, close: close(vec![opened.volume]), description: opened.description })
}

fn close<M: Medium + 'static>(volumes: Vec<Rc<Volume<M, Executor>>>) -> BoxedWork<()> {
    Box::pin(async move {
        let closed = join_all(volumes.iter().map(|volume| volume.close())).await;
        closed.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())
    })
}

/// Runs `work` to its end.
///
/// # Errors
/// If it does not end.
pub fn on_executor<T: 'static, F: Future<Output = T> + 'static>(work: impl FnOnce(Executor) -> F) -> Result<T, String> {
    let executor = Executor::new(Random::new(1), Trace::default());
    match executor.run(LIMITS, work(executor.clone())) {
        RunEnd::Finished(value) => Ok(value),
        RunEnd::Halted => Err("halted".to_owned()),
        RunEnd::Stuck(stuck) => Err(format!("hangs: {stuck}")),
    }
}

/// Opens a volume read-only and reads it.
///
/// # Errors
/// If it is refused; the error has the reason.
pub fn look(specimen: &Specimen, overlay: &Overlay) -> Result<VolumeView, String> {
    let (overlay, watched, checker) = (overlay.clone(), specimen.watched.clone(), BlockChecker::of(specimen));
    on_executor(|executor| async move {
        let session = start(&overlay, &executor, true).await?;
        Ok(session.look(&checker, &watched).await)
    })?
}

/// Recognises contents.
#[derive(Clone)]
pub struct BlockChecker {
    patterns: Patterns,
    model: Model,
    has_short_guard: bool,
}

impl BlockChecker {
    /// For the blocks of this volume.
    pub fn of(specimen: &Specimen) -> BlockChecker {
        BlockChecker::new(specimen.patterns, &specimen.model, specimen.shape.protection)
    }

    /// For blocks with these possible contents, in this format of protection information.
    pub fn new(patterns: Patterns, model: &Model, protection: Option<PiFormat>) -> BlockChecker {
        let has_short_guard = protection.map(|format| format.guard()) == Some(GuardKind::Crc16);
        BlockChecker { patterns, model: model.clone(), has_short_guard }
    }

    /// Reads and verifies blocks.
    pub async fn look(&self, stack: &DynDevice, watched: &[Extent]) -> VolumeView {
        let (mut blocks, mut named, mut is_told) = (Vec::new(), BTreeSet::new(), false);
        for extent in watched {
            blocks.extend(self.see(stack, *extent).await);
            match stack.execute(Request::verify(*extent, Expectations::NONE)).await {
                Ok(Response::Verified(stats)) => is_told |= !stats.coverage.is_complete(),
                Ok(_) => {}
                Err(error) => {
                    is_told = true;
                    let bad_blocks = error.into_bad_blocks().ok();
                    named.extend(bad_blocks.iter().flat_map(|bad| bad.iter()).map(|bad_block| bad_block.lba));
                }
            }
        }
        VolumeView { blocks, named, is_told }
    }

    /// Reads blocks together; if that fails, one by one.
    pub async fn see(&self, stack: &DynDevice, extent: Extent) -> Vec<(Lba, Seen)> {
        if let Ok(data) = read(stack, extent).await
            && let Ok(contents) = self.patterns.contents(extent, &data)
        {
            return extent.iter().zip(contents.into_iter().map(Seen::Content)).collect();
        }
        let mut blocks = Vec::new();
        for lba in extent.iter() {
            let one = Extent::one(lba);
            let seen = match read(stack, one).await {
                Err(error) => Seen::Lost(error),
                Ok(data) => match self.patterns.contents(one, &data) {
                    Ok(contents) => Seen::Content(contents[0]),
                    Err(_) if self.collides(lba, &data.joined_data()) => Seen::Collision,
                    Err(why) => Seen::Foreign(why),
                },
            };
            blocks.push((lba, seen));
        }
        blocks
    }

    fn collides(&self, lba: Lba, found: &[u8]) -> bool {
        let due = self.model.permitted(lba).iter();
        let crc = guard::crc16(found);
        self.has_short_guard && due.into_iter().any(|&due| guard::crc16(&self.patterns.block(lba, due)) == crc)
    }
}

/// Reads blocks with all checks.
///
/// # Errors
/// If the volume reports an error.
pub async fn read(stack: &DynDevice, extent: Extent) -> Result<Sealed, String> {
    match stack.execute(Request::read(extent, Expectations::NONE)).await {
        Ok(Response::Data(data)) => Ok(data),
        Ok(other) => Err(format!("a read was answered {other:?}")),
        Err(error) => Err(error.to_string()),
    }
}
