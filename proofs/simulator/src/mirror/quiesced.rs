//! Requirements once the mirror is quiesced: all replicas are in sync, identical, and have the hosts' content.

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
const LOOKS: usize = 2_000;

/// Brings every replica online, waits until the mirror is quiesced, and compares the replicas.
pub(super) async fn quiesce_and_compare(up: &RunningMirror) -> Result<(), Stop> {
    quiesce(up).await?;
    up.report_quiesced();
    compare(up).await
}

/// Brings every replica online, and waits until the mirror is quiesced.
pub(super) async fn quiesce(up: &RunningMirror) -> Result<(), Stop> {
    for env in up.in_use() {
        env.held.set(false);
        match env.link.get() {
            ReplicaLink::Hung => up.harness.break_link(&env, ReplicaLink::Gone),
            ReplicaLink::Full => up.harness.break_link(&env, ReplicaLink::Up),
            ReplicaLink::Up | ReplicaLink::Gone => {}
        }
    }
    for _ in 0..LOOKS {
        if is_quiesced(up) && are_stale_lists_short(up).await {
            return Ok(());
        }
        make_replicas(up).await;
        if up.in_use().iter().any(|env| env.link.get() == ReplicaLink::Gone) {
            // The mirror notices an offline replica when it sends a request.
            let _ = up.client.verify(Extent::one(Lba::new(0))).await;
        }
        up.executor.delay(Duration::from_millis(1).max(Duration::from_millis(200) / up.factor)).await;
    }
    let is_split = |replica: &ReplicaInfo| replica.last_error.contains("split brain");
    if up.harness.is_in_doubt.get() && up.harness.describe().is_some_and(|now| now.replicas.iter().any(is_split)) {
        return Err(Stop);
    }
    up.harness.find(format!("the mirror does not come to rest: {:?}", up.harness.describe()));
    Err(Stop)
}

/// Adds devices that are in the place of a replica and have no label of the mirror.
async fn make_replicas(up: &RunningMirror) {
    let (Some(description), Some(mirror)) = (up.harness.describe(), up.harness.mirror.borrow().clone()) else { return };
    for env in up.in_use() {
        let is_nothing = |replica: &&ReplicaInfo| {
            replica.name == env.name && !replica.is_online && replica.last_error.contains("mirror replace")
        };
        if description.replicas.iter().any(|replica| is_nothing(&replica)) {
            env.is_lent.set(true);
            let done = mirror.replace(&env.name, up.harness.source(&env).await, true).await;
            env.is_lent.set(false);
            up.harness.say(format!("at {:?} replica {} is made a replica: {done:?}", up.executor.now(), env.number));
        }
    }
}

fn is_quiesced(up: &RunningMirror) -> bool {
    let is_current = |env: &Rc<ReplicaEnv>| {
        env.link.get() == ReplicaLink::Up && up.harness.state(env) == Some((ReplicaState::InSync, true))
    };
    up.in_use().iter().all(is_current) && up.harness.describe().is_some_and(|now| now.dirty_bytes == 0)
}

/// True if the replicas' labels list no more older copies than are withheld: their overwrites are known to be durable.
async fn are_stale_lists_short(up: &RunningMirror) -> bool {
    let Some(description) = up.harness.describe() else { return false };
    let withheld: u64 = description.replicas.iter().map(|replica| replica.stale_blocks).sum();
    for env in up.in_use().iter().filter(|env| !env.has_no_label) {
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

async fn compare(up: &RunningMirror) -> Result<(), Stop> {
    let mut kept = vec![0; up.harness.envs.borrow().len()];
    for piece in up.client.pieces(&up.random) {
        up.client.read(piece).await?;
        up.client.verify(piece).await?;
        if are_identical(up, piece).await {
            continue;
        }
        for one in piece.iter().map(Extent::one) {
            if !are_identical(up, one).await && !is_kept(up, one, &mut kept).await {
                up.harness.find(format!("at rest, replicas differ in block {}", one.start()));
                return Err(Stop);
            }
        }
    }
    let Some(description) = up.harness.describe() else { return Ok(()) };
    for env in up.in_use() {
        let infos = description.replicas.iter().filter(|replica| replica.name == env.name);
        let listed: u64 = infos.map(|replica| replica.stale_blocks).sum();
        if kept[env.number] > listed {
            let (number, kept) = (env.number, kept[env.number]);
            up.harness.find(format!(
                "replica {number} has content in {kept} unreadable blocks; {listed} are listed as stale"
            ));
            return Err(Stop);
        }
    }
    Ok(())
}

/// True if a replica by itself can read blocks.
pub(super) async fn holds(up: &RunningMirror, replica: usize, extent: Extent) -> bool {
    let env = up.in_use().into_iter().find(|env| env.number == replica);
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

async fn are_identical(up: &RunningMirror, extent: Extent) -> bool {
    let mut first: Option<Sealed> = None;
    for env in up.in_use() {
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

/// True if the mirror refuses to read a block. Replicas that can read it have an older copy, which is counted: the
/// block was made unreadable while they were offline. That may be true of each replica, for different times.
async fn is_kept(up: &RunningMirror, one: Extent, kept: &mut [u64]) -> bool {
    for env in up.in_use() {
        if read(&env, one).await.is_some() {
            kept[env.number] += 1;
        }
    }
    up.client.stack().execute(Request::read(one, Expectations::NONE)).await.is_err()
}
