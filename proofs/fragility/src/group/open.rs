//! Opens members and groups with the product's own code, as the commands do, and reads them.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, DynDevice, Freshness, Request, ReservedArea, Response};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Mirror, MirrorInfo, MirrorState, OpenOptions, ReplicaSource, TestHooks};
use sealblock_layers_stripe::StripeLayer;
use sealblock_media_volume::OpenOptions as VolumeOptions;
use sealblock_runtime_memory::Slice;
use sealblock_simulator::executor::Executor;
use sealblock_simulator::random::mix;
use sealblock_simulator::system::BoxedWork;
use sealblock_units::{ByteCount, Extent, Lba};

use crate::group::shape::{Machine, Shape, pieces};
use crate::look::{BlockChecker, Seen};
use crate::medium::Overlay;

/// The pause between two checks whether a mirror has reconciled its replicas, and the maximum number of checks.
const ASKED_EVERY: Duration = Duration::from_secs(1);
const ASKED_AT_MOST: u32 = 120;

/// A group that is open.
pub struct OpenGroup {
    /// The group, behind its gate.
    pub stack: DynDevice,
    mirror: Option<Rc<Mirror<Executor>>>,
    /// Each replica of a mirror by itself, or the stripe.
    replicas: Vec<Option<DynDevice>>,
    close: Vec<BoxedWork<()>>,
}

/// The members of a group: a medium for each volume, and whether its replica is online.
pub type Media = Vec<Overlay>;

async fn open_volume(
    overlay: &Overlay,
    machine: &Machine,
    accept_older: bool,
) -> Result<(DynDevice, BoxedWork<()>), String> {
    let options = VolumeOptions {
        read_only: machine.read_only,
        accept_older,
        cache_bytes: 1 << 20,
        keeps_answered: false,
        ..VolumeOptions::default()
    };
    let opened = sealblock_media_volume::open(overlay.clone(), machine.executor.clone(), &options).await;
    let opened = opened.map_err(|error| error.to_string())?;
    drop(machine.executor.spawn("volume's worker", opened.worker.run()));
    let volume = opened.volume;
    let device = DynDevice::new("volume", volume.clone());
    // Every command refuses a volume that may be older unless its caller accepts that.
    if let (Freshness::MayBeOlder(why), false) = (device.abilities().freshness, accept_older) {
        return Err(format!("may be older: {why}"));
    }
    Ok((device, Box::pin(async move { volume.close().await.map_err(|error| error.to_string()) })))
}

/// Opens a replica: a volume, or a stripe of several. The mirror decides about its state.
async fn open_replica(
    shape: &Shape,
    media: &[Overlay],
    machine: &Machine,
    close: &mut Vec<BoxedWork<()>>,
) -> Result<DynDevice, String> {
    let (mut devices, is_replica) = (Vec::new(), shape.kind.is_mirror());
    for overlay in media {
        let (device, work) = open_volume(overlay, machine, is_replica).await?;
        devices.push(device);
        close.push(work);
    }
    if media.len() == 1 {
        return Ok(devices.swap_remove(0));
    }
    let chunk = ByteCount::new(shape.chunk_bytes());
    let stripe = StripeLayer::new(devices, chunk).map_err(|error| error.to_string())?;
    let stripe = stripe.labelled(machine.random, !machine.read_only).await.map_err(|error| error.to_string())?;
    Ok(DynDevice::new("stripe", stripe))
}

/// Opens a group of these members; replicas that are not `present` are offline.
///
/// # Errors
/// If it is refused; the error has the reason.
pub async fn open_group(
    shape: &Shape,
    media: &Media,
    present: &[bool],
    machine: &Machine,
) -> Result<OpenGroup, String> {
    let (mut close, mut replicas) = (Vec::new(), Vec::new());
    for (replica, present) in shape.kind.replicas().into_iter().zip(present) {
        let opened = match present {
            true => open_replica(shape, &media[replica], machine, &mut close).await,
            false => Err("away".to_owned()),
        };
        replicas.push(opened);
    }
    if !shape.kind.is_mirror() {
        let stack = replicas.swap_remove(0)?;
        return Ok(OpenGroup { replicas: vec![Some(stack.clone())], stack, mirror: None, close });
    }
    let source = |(number, device): (usize, &Result<DynDevice, String>)| {
        ReplicaSource::new(replica_name(number), device.clone(), None)
    };
    let sources = replicas.iter().enumerate().map(source).collect();
    // Like an operator who continues with the other replicas. Otherwise a mirror with a replica that lost its label is
    // not opened for writing.
    let options = OpenOptions { is_read_only: machine.read_only, accepts_lost_label: true, random: machine.random };
    let hooks = TestHooks { region_shift: Some(shape.region_shift), ..TestHooks::default() };
    let opened = sealblock_layers_mirror::open_with_hooks(sources, machine.executor.clone(), options, hooks).await;
    let opened = opened.map_err(|error| error.to_string())?;
    drop(machine.executor.spawn("mirror's worker", opened.worker.run()));
    let stack = DynDevice::new("mirror", opened.mirror.clone());
    if let Freshness::MayBeOlder(why) = stack.abilities().freshness {
        return Err(format!("may be older: {why}"));
    }
    let replicas = replicas.into_iter().map(Result::ok).collect();
    Ok(OpenGroup { stack, mirror: Some(opened.mirror), replicas, close })
}

fn replica_name(number: usize) -> String {
    format!("replica-{number}")
}

impl OpenGroup {
    /// The mirror's report about itself; `None` for a stripe.
    pub fn info(&self) -> Option<MirrorInfo> {
        self.mirror.as_ref().map(|mirror| mirror.describe())
    }

    /// The replicas that are reported as in sync and online, by number. An open stripe counts as one.
    pub fn in_sync(&self) -> Vec<usize> {
        let Some(info) = self.info() else { return vec![0] };
        let is_it = |number: &usize| {
            let mut named = info.replicas.iter().filter(|replica| replica.name == replica_name(*number));
            named.any(|replica| replica.is_online && replica.state == ReplicaState::InSync)
        };
        (0..self.replicas.len()).filter(is_it).collect()
    }

    /// True if it reports no error.
    pub fn is_optimal(&self) -> bool {
        self.info().is_none_or(|info| info.state == MirrorState::Optimal)
    }

    /// The reported state of the replicas, as text.
    pub fn replicas_text(&self) -> String {
        let Some(info) = self.info() else { return "a stripe".to_owned() };
        let each = info.replicas.iter().map(|replica| {
            let online = if replica.is_online { "" } else { ", offline" };
            format!("{}: {}{online} {}", replica.name, replica.state.as_str(), replica.last_error)
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// The content of each replica that is reported as in sync, read from that replica alone.
    pub async fn look_at_replicas(
        &self,
        checker: &BlockChecker,
        watched: &[Extent],
    ) -> BTreeMap<usize, Vec<(Lba, Seen)>> {
        let mut replicas = BTreeMap::new();
        for number in self.in_sync() {
            let Some(Some(replica)) = self.replicas.get(number) else { continue };
            let mut blocks = Vec::new();
            for extent in watched {
                blocks.extend(checker.see(replica, *extent).await);
            }
            replicas.insert(number, blocks);
        }
        replicas
    }

    /// Waits until the mirror has reconciled all online replicas, up to a time limit.
    pub async fn wait_for_resync(&self, executor: &Executor) {
        for _ in 0..ASKED_AT_MOST {
            let Some(info) = self.info() else { return };
            let is_equal = |state| matches!(state, ReplicaState::InSync | ReplicaState::Removed);
            let mut online = info.replicas.iter().filter(|replica| replica.is_online);
            if info.nosync_bytes == 0 && online.all(|replica| is_equal(replica.state)) {
                return;
            }
            executor.delay(ASKED_EVERY).await;
        }
    }

    /// Closes the mirror and then its members.
    ///
    /// # Errors
    /// If data could not be made durable; the error has the reason.
    pub async fn close(self) -> Result<(), String> {
        let mut result = match &self.mirror {
            Some(mirror) => mirror.close().await.map_err(|error| error.to_string()),
            None => Ok(()),
        };
        for close in self.close {
            // A replica that is not in use is expected to report losses.
            let closed = close.await;
            result = if self.mirror.is_some() { result } else { result.and(closed) };
        }
        result
    }
}

/// A member's record of its group, read through the member.
///
/// # Errors
/// If there is none; the error has the reason.
pub async fn read_record(overlay: &Overlay, area: ReservedArea, machine: &Machine) -> Result<Slice, String> {
    let (device, _) = open_volume(overlay, machine, true).await?;
    match device.execute(Request::read_reserved(area)).await {
        Ok(Response::Reserved(bytes)) => Ok(bytes),
        Ok(other) => Err(format!("a read of a label was answered {other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Writes a record through the member, so that it is a valid record of the member.
///
/// # Errors
/// If it cannot be written; the error has the reason.
pub async fn write_record(
    overlay: &Overlay,
    area: ReservedArea,
    bytes: Slice,
    machine: &Machine,
) -> Result<(), String> {
    let (device, _) = open_volume(overlay, machine, true).await?;
    let written = device.execute(Request::write_reserved(area, bytes)).await;
    written.map(drop).map_err(|error| error.to_string())
}

/// The content of a single replica.
///
/// # Errors
/// If it does not open; the error has the reason.
pub async fn look_at_replica(
    shape: &Shape,
    media: &Media,
    replica: usize,
    checker: &BlockChecker,
    machine: &Machine,
) -> Result<Vec<(Lba, Seen)>, String> {
    let members = shape.kind.replicas()[replica].clone();
    let device = open_replica(shape, &media[members], machine, &mut Vec::new()).await?;
    let mut seen = Vec::new();
    for extent in pieces(shape.capacity_blocks) {
        seen.extend(checker.see(&device, extent).await);
    }
    Ok(seen)
}

/// A hash of each block of a member, whatever its content; `None` for an unreadable block.
///
/// # Errors
/// If it does not open; the error has the reason.
pub async fn fingerprint(overlay: &Overlay, machine: &Machine) -> Result<Vec<Option<u64>>, String> {
    let (device, _) = open_volume(overlay, machine, true).await?;
    let mut numbers = Vec::new();
    for lba in (0..device.geometry().capacity_blocks).map(Lba::new) {
        let data = crate::look::read(&device, Extent::one(lba)).await.ok();
        numbers.push(data.map(|data| {
            let bytes = data.joined_data();
            bytes.iter().fold(0, |number, byte| mix(number ^ u64::from(*byte)))
        }));
    }
    Ok(numbers)
}
