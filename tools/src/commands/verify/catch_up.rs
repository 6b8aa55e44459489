//! Before a repair: waits for the resync of replicas that are out of sync.
//!
//! The process that has the mirror open for writing resyncs by itself, this one or a server; here the command waits as long as there
//! is progress. The verify that follows reports a replica that cannot be resynced as unchecked.

use std::time::Duration;

use sealblock_block::{Device, WhyUnchecked};
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{MirrorInfo, ReplicaInfo};
use sealblock_stack::{OpenTarget, StackError};
use sealblock_units::{ByteCount, Extent};

use super::job::coverage_of;
use crate::progress::{Progress, Show};

/// How often progress is probed.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Probes in a row without progress after which the wait ends. A mirror retries every two seconds.
const MAX_IDLE_PROBES: u32 = 50;
/// How often the resync of a remote member may fail until the wait ends.
const MAX_SETBACKS: u32 = 3;

/// Waits until no resync runs or is about to start.
pub(super) async fn wait(opened: &OpenTarget, show: Show) -> Result<(), StackError> {
    wait_here(opened, show).await;
    let abilities = opened.device.abilities();
    if abilities.copies && abilities.offloads { wait_remote(opened).await } else { Ok(()) }
}

/// Waits for the mirrors that this process has open, at any depth, as long as they make progress.
async fn wait_here(opened: &OpenTarget, show: Show) {
    let mirrors: Vec<_> = opened.info.all().into_iter().filter_map(|info| info.mirror.clone()).collect();
    let began: Vec<MirrorInfo> = mirrors.iter().map(|mirror| mirror.describe()).collect();
    let left_bytes = || -> u64 {
        let now = mirrors.iter().map(|mirror| mirror.describe());
        now.zip(&began).map(|(now, began)| waiting_bytes(&now, began)).fold(0, u64::saturating_add)
    };
    let total = left_bytes();
    let doing = format!("resyncing members of {}", opened.target());
    let progress = Progress::new(&doing, Some(ByteCount::new(total)), show);
    let (mut least, mut vain) = (total, 0);
    while least > 0 && vain < MAX_IDLE_PROBES {
        sealblock_runtime_reactor::sleep(PROBE_INTERVAL).await;
        let left = left_bytes();
        vain = if left < least { 0 } else { vain + 1 };
        progress.advance(least.saturating_sub(left));
        least = least.min(left);
    }
}

/// Bytes of a mirror that are still to resync. A replica that failed since may stay out of sync.
fn waiting_bytes(now: &MirrorInfo, began: &MirrorInfo) -> u64 {
    let failures = |at: usize| began.replicas.get(at).map_or(0, |replica| replica.failures);
    let waits = |(at, replica): &(usize, &ReplicaInfo)| {
        let is_behind = matches!(replica.state, ReplicaState::OutOfSync | ReplicaState::Resyncing);
        is_behind && replica.is_online && replica.failures == failures(*at)
    };
    // The last step of a resync writes the labels: at least one byte is left until then.
    let missed = now.replicas.iter().enumerate().filter(waits).map(|(_, replica)| replica.out_of_sync_bytes.max(1));
    missed.fold(now.nosync_bytes, u64::saturating_add)
}

/// Waits for the replicas of another host, whose Verify responses report their coverage.
async fn wait_remote(opened: &OpenTarget) -> Result<(), StackError> {
    let Ok(first) = Extent::from_raw(0, 1) else { return Ok(()) };
    let (mut vain, mut setbacks, mut was_busy) = (0, 0, false);
    while vain < MAX_IDLE_PROBES && setbacks < MAX_SETBACKS {
        let coverage = coverage_of(opened, first).await?;
        let is_so = |why: WhyUnchecked| coverage.unchecked().iter().any(|run| run.why == why);
        let is_busy = is_so(WhyUnchecked::Resyncing);
        match (is_busy, is_so(WhyUnchecked::OutOfSync)) {
            (true, _) => vain = 0,
            (false, true) => {
                vain += 1;
                setbacks += u32::from(was_busy);
            }
            (false, false) => break,
        }
        was_busy = is_busy;
        sealblock_runtime_reactor::sleep(PROBE_INTERVAL).await;
    }
    Ok(())
}
