//! What must hold once the mirror is quiesced: all replicas are in sync, are identical, and have the hosts' content.

use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Expectations, Request, ReservedArea, Response};
use sealblock_integrity::Sealed;
use sealblock_layers_mirror::ReplicaInfo;
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_units::{Extent, Lba};

use super::machine::RunningMirror;
use super::replica_env::{ReplicaEnv, ReplicaLink};
use crate::client::Stop;

/// The maximum number of checks until the mirror is quiesced.
const LOOKS: usize = 10_000;

/// Brings every replica online, waits until the mirror is quiesced, and compares the replicas.
pub(super) async fn quiesce_and_compare(running: &RunningMirror) -> Result<(), Stop> {
    quiesce(running).await?;
    running.report_quiesced();
    compare(running).await
}

/// Brings every replica online, and waits until the mirror is quiesced.
pub(super) async fn quiesce(running: &RunningMirror) -> Result<(), Stop> {
    for env in running.in_use() {
        env.held.set(false);
        match env.link.get() {
            ReplicaLink::Hung | ReplicaLink::Stuck => running.harness.break_link(&env, ReplicaLink::Gone),
            ReplicaLink::Full => running.harness.break_link(&env, ReplicaLink::Up),
            ReplicaLink::Up | ReplicaLink::Gone => {}
        }
    }
    for _ in 0..LOOKS {
        if is_quiesced(running) && are_stale_lists_short(running).await {
            return Ok(());
        }
        make_replicas(running).await;
        if running.in_use().iter().any(|env| env.link.get() == ReplicaLink::Gone) {
            // The mirror notices that a replica is offline only when it sends a request.
            let _ = running.client.verify(Extent::one(Lba::new(0))).await;
        }
        running.executor.delay(Duration::from_millis(1).max(Duration::from_millis(200) / running.factor)).await;
    }
    let is_split = |replica: &ReplicaInfo| replica.last_error.contains("split brain");
    if running.harness.is_in_doubt.get()
        && running.harness.describe().is_some_and(|now| now.replicas.iter().any(is_split))
    {
        return Err(Stop);
    }
    running.harness.find(format!("the mirror does not come to rest: {:?}", running.harness.describe()));
    Err(Stop)
}

/// Adds devices that are in the place of a replica but have no label of the mirror.
async fn make_replicas(running: &RunningMirror) {
    let (Some(description), Some(mirror)) = (running.harness.describe(), running.harness.mirror.borrow().clone())
    else {
        return;
    };
    for env in running.in_use() {
        let is_nothing = |replica: &&ReplicaInfo| {
            replica.name == env.name && !replica.is_online && replica.last_error.contains("mirror replace")
        };
        if description.replicas.iter().any(|replica| is_nothing(&replica)) {
            env.is_lent.set(true);
            let done = mirror.replace(&env.name, running.harness.source(&env).await, true).await;
            env.is_lent.set(false);
            env.replaced_count.set(env.replaced_count.get() + 1);
            running.harness.log(format!(
                "at {:?} replica {} is made a replica: {done:?}",
                running.executor.now(),
                env.number
            ));
        }
    }
}

fn is_quiesced(running: &RunningMirror) -> bool {
    let is_current = |env: &Rc<ReplicaEnv>| {
        env.link.get() == ReplicaLink::Up && running.harness.state(env) == Some((ReplicaState::InSync, true))
    };
    running.in_use().iter().all(is_current) && running.harness.describe().is_some_and(|now| now.dirty_bytes == 0)
}

/// True if the replicas' labels list no more older copies than are withheld from reads, so that their overwrites are
/// known to be durable.
async fn are_stale_lists_short(running: &RunningMirror) -> bool {
    let Some(description) = running.harness.describe() else { return false };
    let withheld: u64 = description.replicas.iter().map(|replica| replica.stale_blocks).sum();
    for env in running.in_use().iter().filter(|env| !env.has_no_label) {
        let Some(volume) = env.volume.borrow().clone() else { return false };
        let reserved = volume.execute(Request::read_reserved(ReservedArea::GroupLabel)).await;
        let Ok(Response::Reserved(bytes)) = reserved else { return false };
        let Ok(Some(label)) = Label::decode(&bytes) else { return false };
        let listed: usize = label.replicas.iter().map(|member| member.stale.len()).sum();
        if listed as u64 != withheld {
            return false;
        }
    }
    true
}

async fn compare(running: &RunningMirror) -> Result<(), Stop> {
    let mut kept = vec![0; running.harness.envs.borrow().len()];
    for piece in running.client.pieces(&running.random) {
        running.client.read(piece).await?;
        running.client.verify(piece).await?;
        if are_identical(running, piece).await {
            continue;
        }
        for one in piece.iter().map(Extent::one) {
            if !are_identical(running, one).await && !is_kept(running, one, &mut kept).await {
                running.harness.find(format!("at rest, replicas differ in block {}", one.start()));
                return Err(Stop);
            }
        }
    }
    let Some(description) = running.harness.describe() else { return Ok(()) };
    for env in running.in_use() {
        let infos = description.replicas.iter().filter(|replica| replica.name == env.name);
        let listed: u64 = infos.map(|replica| replica.stale_blocks).sum();
        if kept[env.number] > listed {
            let (number, kept) = (env.number, kept[env.number]);
            running.harness.find(format!(
                "replica {number} has content in {kept} unreadable blocks; {listed} are listed as stale"
            ));
            return Err(Stop);
        }
    }
    Ok(())
}

/// True if this replica alone can read the blocks.
pub(super) async fn holds(running: &RunningMirror, replica: usize, extent: Extent) -> bool {
    let env = running.in_use().into_iter().find(|env| env.number == replica);
    match env {
        Some(env) => read(&env, extent).await.is_some(),
        None => false,
    }
}

async fn read(env: &ReplicaEnv, extent: Extent) -> Option<Sealed> {
    let volume = env.volume.borrow().clone()?;
    match volume.execute(Request::read(extent, Expectations::NONE)).await {
        Ok(Response::Data(data)) => Some(data),
        _ => None,
    }
}

async fn are_identical(running: &RunningMirror, extent: Extent) -> bool {
    let mut first: Option<Sealed> = None;
    for env in running.in_use() {
        let Some(data) = read(&env, extent).await else { return false };
        if first.as_ref().is_some_and(|first| {
            first.joined_data()[..] != data.joined_data()[..] || first.joined_tags()[..] != data.joined_tags()[..]
        }) {
            return false;
        }
        first.get_or_insert(data);
    }
    true
}

/// True if the mirror refuses to read a block. Replicas that can read it have an older copy, because the block was made
/// unreadable while they were offline; these copies are counted. Several replicas may have one, from different times.
async fn is_kept(running: &RunningMirror, one: Extent, kept: &mut [u64]) -> bool {
    for env in running.in_use() {
        if read(&env, one).await.is_some() {
            kept[env.number] += 1;
        }
    }
    running.client.stack().execute(Request::read(one, Expectations::NONE)).await.is_err()
}
