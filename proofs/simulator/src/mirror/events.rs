//! Events that hit replicas while hosts use the mirror.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_units::Extent;

use super::harness::Harness;
use super::machine::RunningMirror;
use super::replica_env::{ReplicaEnv, ReplicaLink};

/// Injects events until `done`.
pub(super) async fn disturb(up: RunningMirror, done: Rc<Cell<bool>>) {
    while !done.get() {
        pause(&up).await;
        if done.get() {
            return;
        }
        let envs = up.in_use();
        // While all replicas with labels are offline no label can be written, and the mirror waits for them.
        let victims: Vec<_> =
            envs.iter().filter(|env| env.has_no_label || !up.harness.has_unlabelled_replica()).collect();
        let env = (*up.random.pick(&victims)).clone();
        if env.link.get() == ReplicaLink::Gone && up.random.chance(85) {
            continue;
        }
        match up.random.below(100) {
            0..25 => disconnect(&up, &env),
            25..40 => hang(&up, &env),
            40..52 => fill(&up, &env),
            52..64 => up.executor.spawn("release", release(env)).await,
            64..88 => repair(&up).await,
            88..92 => add(&up).await,
            92..96 => replace(&up, &env).await,
            _ => remove(&up, &env).await,
        }
    }
}

async fn pause(up: &RunningMirror) {
    let microseconds = *up.random.pick(&[
        up.random.between(20, 500),
        up.random.between(500, 10_000),
        up.random.between(500, 10_000),
        up.random.between(10_000, 300_000),
    ]);
    up.executor.delay(Duration::from_micros(microseconds)).await;
}

async fn release(env: Rc<ReplicaEnv>) {
    env.held.set(false);
}

/// After a delay, lets the replica be opened again, unless another event has hit it since.
fn later(up: &RunningMirror, env: &Rc<ReplicaEnv>, then: impl FnOnce(&Harness, &ReplicaEnv) + 'static) {
    let (harness, env, executor, epoch) = (up.harness.clone(), env.clone(), up.executor.clone(), env.epoch.get());
    let most = *up.random.pick(&[200, 5_000, 50_000, 2_000_000]);
    let delay = Duration::from_micros(up.random.between(10, most));
    drop(up.executor.spawn("later", async move {
        executor.delay(delay).await;
        if env.epoch.get() == epoch {
            then(&harness, &env);
        }
    }));
}

fn disconnect(up: &RunningMirror, env: &Rc<ReplicaEnv>) {
    env.held.set(true);
    up.harness.break_link(env, ReplicaLink::Gone);
    up.harness.say(format!("at {:?} replica {} goes away", up.executor.now(), env.number));
    later(up, env, |_, env| env.held.set(false));
}

fn hang(up: &RunningMirror, env: &Rc<ReplicaEnv>) {
    if env.link.get() == ReplicaLink::Up {
        up.harness.say(format!("at {:?} replica {} hangs", up.executor.now(), env.number));
        up.harness.break_link(env, ReplicaLink::Hung);
        later(up, env, |harness, env| harness.break_link(env, ReplicaLink::Gone));
    }
}

fn fill(up: &RunningMirror, env: &Rc<ReplicaEnv>) {
    if env.link.get() == ReplicaLink::Up {
        up.harness.say(format!("at {:?} replica {} fails changes", up.executor.now(), env.number));
        up.harness.break_link(env, ReplicaLink::Full);
        later(up, env, |harness, env| harness.break_link(env, ReplicaLink::Up));
    }
}

async fn repair(up: &RunningMirror) {
    let blocks = up.random.between(1, up.client.capacity_blocks().min(32));
    let first = up.random.below(up.client.capacity_blocks() - blocks + 1);
    if let Ok(extent) = Extent::from_raw(first, blocks) {
        let _ = up.client.repair(extent).await;
    }
}

/// A device that is not a replica and can become one.
fn take_spare(up: &RunningMirror) -> Option<Rc<ReplicaEnv>> {
    let spare = up.harness.envs.borrow().iter().find(|env| env.is_spare.get()).cloned()?;
    spare.is_spare.set(false);
    spare.held.set(false);
    *spare.allowed.borrow_mut() = (0..spare.profile.capacity_blocks).collect();
    Some(spare)
}

async fn add(up: &RunningMirror) {
    let Some(mirror) = up.harness.mirror.borrow().clone() else { return };
    let Some(spare) = take_spare(up) else { return };
    let added = mirror.add(up.harness.source(&spare).await, true).await;
    up.harness.say(format!("at {:?} replica {} is added: {added:?}", up.executor.now(), spare.number));
    spare.is_member.set(added.is_ok());
}

/// Waits until a replacement has all data.
const LOOKS: usize = 500;

/// Replaces a replica by another device: at once if it is not in sync, otherwise when the new one has all data.
pub(super) async fn replace(up: &RunningMirror, old: &Rc<ReplicaEnv>) {
    let Some(mirror) = up.harness.mirror.borrow().clone() else { return };
    if up.harness.has_unlabelled_replica() || old.is_leaving.get() {
        return;
    }
    let Some(spare) = take_spare(up) else { return };
    spare.replaces.set(Some(old.number));
    let source = up.harness.source(&spare).await;
    let done = mirror.replace(&old.name, source, true).await;
    up.harness.say(format!(
        "at {:?} replica {} is replaced by {}: {done:?}",
        up.executor.now(),
        old.number,
        spare.number
    ));
    let is_out = up.harness.state(old).is_none();
    spare.is_member.set(done.is_ok());
    if done.is_ok() {
        spare.replaces.set(None);
        old.is_removed.set(old.is_removed.get() || is_out);
    }
    if done.is_err() || is_out {
        return;
    }
    for _ in 0..LOOKS {
        if up.harness.state(&spare) == Some((ReplicaState::InSync, true)) {
            return remove(up, old).await;
        }
        up.executor.delay(Duration::from_millis(1)).await;
    }
}

async fn remove(up: &RunningMirror, env: &Rc<ReplicaEnv>) {
    let Some(mirror) = up.harness.mirror.borrow().clone() else { return };
    let is_other = up.harness.has_unlabelled_replica() || env.is_removed.get();
    if up.in_use().len() < 3 || is_other {
        return;
    }
    env.is_removed.set(true);
    env.is_leaving.set(true);
    let removed = mirror.remove(&env.name).await;
    up.harness.say(format!("at {:?} replica {} is removed: {removed:?}", up.executor.now(), env.number));
    env.is_leaving.set(false);
    if removed.is_err() {
        env.is_removed.set(false);
    }
}
