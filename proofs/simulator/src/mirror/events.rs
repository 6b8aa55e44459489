//! Events that affect replicas while hosts use the mirror.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_units::Extent;

use super::harness::Harness;
use super::machine::RunningMirror;
use super::replica_env::{ReplicaEnv, ReplicaLink};

/// Injects events until `done`.
pub(super) async fn disturb(running: RunningMirror, done: Rc<Cell<bool>>) {
    while !done.get() {
        pause(&running).await;
        if done.get() {
            return;
        }
        let envs = running.in_use();
        // While all replicas with labels are offline, no label can be written, and the mirror waits for them.
        let victims: Vec<_> =
            envs.iter().filter(|env| env.has_no_label || !running.harness.has_unlabelled_replica()).collect();
        let env = (*running.random.pick(&victims)).clone();
        if env.link.get() == ReplicaLink::Gone && running.random.chance(85) {
            continue;
        }
        match running.random.below(100) {
            0..25 => disconnect(&running, &env),
            25..40 => hang(&running, &env),
            40..52 => fill(&running, &env),
            52..64 => running.executor.spawn("release", release(env)).await,
            64..88 => repair(&running).await,
            88..92 => add(&running).await,
            92..96 => replace(&running, &env).await,
            _ => remove(&running, &env).await,
        }
    }
}

async fn pause(running: &RunningMirror) {
    let microseconds = *running.random.pick(&[
        running.random.between(20, 500),
        running.random.between(500, 10_000),
        running.random.between(500, 10_000),
        running.random.between(10_000, 300_000),
    ]);
    running.executor.delay(Duration::from_micros(microseconds)).await;
}

async fn release(env: Rc<ReplicaEnv>) {
    env.held.set(false);
}

/// After a delay, allows the replica to be opened again, unless another event has affected it since.
fn later(running: &RunningMirror, env: &Rc<ReplicaEnv>, then: impl FnOnce(&Harness, &ReplicaEnv) + 'static) {
    let (harness, env, executor, epoch) =
        (running.harness.clone(), env.clone(), running.executor.clone(), env.epoch.get());
    let most = *running.random.pick(&[200, 5_000, 50_000, 2_000_000]);
    let delay = Duration::from_micros(running.random.between(10, most));
    drop(running.executor.spawn("later", async move {
        executor.delay(delay).await;
        if env.epoch.get() == epoch {
            then(&harness, &env);
        }
    }));
}

fn disconnect(running: &RunningMirror, env: &Rc<ReplicaEnv>) {
    env.held.set(true);
    running.harness.break_link(env, ReplicaLink::Gone);
    running.harness.log(format!("at {:?} replica {} goes away", running.executor.now(), env.number));
    later(running, env, |_, env| env.held.set(false));
}

fn hang(running: &RunningMirror, env: &Rc<ReplicaEnv>) {
    if env.link.get() == ReplicaLink::Up {
        running.harness.log(format!("at {:?} replica {} hangs", running.executor.now(), env.number));
        running.harness.break_link(env, ReplicaLink::Hung);
        later(running, env, |harness, env| harness.break_link(env, ReplicaLink::Gone));
    }
}

fn fill(running: &RunningMirror, env: &Rc<ReplicaEnv>) {
    if env.link.get() == ReplicaLink::Up {
        running.harness.log(format!("at {:?} replica {} fails changes", running.executor.now(), env.number));
        running.harness.break_link(env, ReplicaLink::Full);
        later(running, env, |harness, env| harness.break_link(env, ReplicaLink::Up));
    }
}

async fn repair(running: &RunningMirror) {
    let blocks = running.random.between(1, running.client.capacity_blocks().min(32));
    let first = running.random.below(running.client.capacity_blocks() - blocks + 1);
    if let Ok(extent) = Extent::from_raw(first, blocks) {
        let _ = running.client.repair(extent).await;
    }
}

/// A device that is not a replica and can become one.
fn take_spare(running: &RunningMirror) -> Option<Rc<ReplicaEnv>> {
    let spare = running.harness.envs.borrow().iter().find(|env| env.is_spare.get()).cloned()?;
    spare.is_spare.set(false);
    spare.held.set(false);
    *spare.allowed.borrow_mut() = (0..spare.profile.capacity_blocks).collect();
    Some(spare)
}

async fn add(running: &RunningMirror) {
    let Some(mirror) = running.harness.mirror.borrow().clone() else { return };
    let Some(spare) = take_spare(running) else { return };
    let added = mirror.add(running.harness.source(&spare).await, true).await;
    running.harness.log(format!("at {:?} replica {} is added: {added:?}", running.executor.now(), spare.number));
    spare.is_member.set(added.is_ok());
}

/// The maximum number of checks whether a replacement has all data.
const LOOKS: usize = 500;

/// Replaces a replica by another device: at once if it is not in sync, otherwise when the new one has all data.
pub(super) async fn replace(running: &RunningMirror, old: &Rc<ReplicaEnv>) {
    let Some(mirror) = running.harness.mirror.borrow().clone() else { return };
    if running.harness.has_unlabelled_replica() || old.is_leaving.get() {
        return;
    }
    let Some(spare) = take_spare(running) else { return };
    spare.replaces.set(Some(old.number));
    let source = running.harness.source(&spare).await;
    let done = mirror.replace(&old.name, source, true).await;
    running.harness.log(format!(
        "at {:?} replica {} is replaced by {}: {done:?}",
        running.executor.now(),
        old.number,
        spare.number
    ));
    let is_out = running.harness.state(old).is_none();
    spare.is_member.set(done.is_ok());
    if done.is_ok() {
        spare.replaces.set(None);
        old.is_removed.set(old.is_removed.get() || is_out);
    }
    if done.is_err() || is_out {
        return;
    }
    for _ in 0..LOOKS {
        if running.harness.state(&spare) == Some((ReplicaState::InSync, true)) {
            return remove(running, old).await;
        }
        running.executor.delay(Duration::from_millis(1)).await;
    }
}

async fn remove(running: &RunningMirror, env: &Rc<ReplicaEnv>) {
    let Some(mirror) = running.harness.mirror.borrow().clone() else { return };
    let is_other = running.harness.has_unlabelled_replica() || env.is_removed.get();
    if running.in_use().len() < 3 || is_other {
        return;
    }
    env.is_removed.set(true);
    env.is_leaving.set(true);
    let removed = mirror.remove(&env.name).await;
    running.harness.log(format!("at {:?} replica {} is removed: {removed:?}", running.executor.now(), env.number));
    // A removal that failed may be recorded in some labels all the same.
    env.is_leaving.set(removed.is_err());
    env.is_removed.set(removed.is_ok());
}
