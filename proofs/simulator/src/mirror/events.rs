//! What happens to legs while hosts use the mirror.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Reopen, ReplicaSource};
use sealblock_units::Extent;

use super::machine::Up;
use super::site::{ReplicaEnv, ReplicaLink};

/// Lets things happen until `done`.
pub(super) async fn trouble(up: Up, done: Rc<Cell<bool>>) {
    while !done.get() {
        pause(&up).await;
        if done.get() {
            return;
        }
        let sites = up.in_use();
        // When all legs with labels are gone nothing can be noted, and the mirror waits for them.
        let victims: Vec<_> = sites.iter().filter(|site| site.bare || !up.world.has_bare_leg()).collect();
        let site = (*up.random.pick(&victims)).clone();
        if site.line.get() == ReplicaLink::Gone && up.random.chance(85) {
            continue;
        }
        match up.random.below(100) {
            0..25 => leave(&up, &site),
            25..40 => hang(&up, &site),
            40..52 => fill(&up, &site),
            52..64 => up.executor.spawn("release", release(site)).await,
            64..88 => repair(&up).await,
            88..92 => add(&up).await,
            92..96 => replace(&up, &site).await,
            _ => remove(&up, &site).await,
        }
    }
}

async fn pause(up: &Up) {
    let microseconds = *up.random.pick(&[
        up.random.between(20, 500),
        up.random.between(500, 10_000),
        up.random.between(500, 10_000),
        up.random.between(10_000, 300_000),
    ]);
    up.executor.delay(Duration::from_micros(microseconds)).await;
}

async fn release(site: Rc<ReplicaEnv>) {
    site.held.set(false);
}

/// After a while, lets the leg be opened anew, unless something else has happened to it since.
fn later(up: &Up, site: &Rc<ReplicaEnv>, then: impl FnOnce(&ReplicaEnv) + 'static) {
    let (site, executor, epoch) = (site.clone(), up.executor.clone(), site.epoch.get());
    let most = *up.random.pick(&[200, 5_000, 50_000, 2_000_000]);
    let delay = Duration::from_micros(up.random.between(10, most));
    drop(up.executor.spawn("later", async move {
        executor.delay(delay).await;
        if site.epoch.get() == epoch {
            then(&site);
        }
    }));
}

fn leave(up: &Up, site: &Rc<ReplicaEnv>) {
    site.held.set(true);
    site.break_line(ReplicaLink::Gone);
    up.world.say(format!("at {:?} leg {} goes away", up.executor.now(), site.number));
    later(up, site, |site| site.held.set(false));
}

fn hang(up: &Up, site: &Rc<ReplicaEnv>) {
    if site.line.get() == ReplicaLink::Up {
        up.world.say(format!("at {:?} leg {} hangs", up.executor.now(), site.number));
        site.break_line(ReplicaLink::Hung);
        later(up, site, |site| site.break_line(ReplicaLink::Gone));
    }
}

fn fill(up: &Up, site: &Rc<ReplicaEnv>) {
    if site.line.get() == ReplicaLink::Up {
        up.world.say(format!("at {:?} leg {} fails changes", up.executor.now(), site.number));
        site.break_line(ReplicaLink::Full);
        later(up, site, |site| site.break_line(ReplicaLink::Up));
    }
}

async fn repair(up: &Up) {
    let blocks = up.random.between(1, up.client.capacity_blocks().min(32));
    let first = up.random.below(up.client.capacity_blocks() - blocks + 1);
    if let Ok(extent) = Extent::from_raw(first, blocks) {
        let _ = up.client.repair(extent).await;
    }
}

fn reopen(site: &Rc<ReplicaEnv>) -> Reopen {
    let site = site.clone();
    Box::new(move || match site.is_lent.get() {
        true => Box::pin(std::future::ready(Err("it is in use".to_owned()))),
        false => site.open(),
    })
}

/// What the mirror is to know of a leg, which is opened for it.
pub(super) async fn source(site: &Rc<ReplicaEnv>) -> ReplicaSource {
    let device = site.open().await;
    ReplicaSource { name: site.name.clone(), device, reopen: Some(reopen(site)) }
}

/// A device that is no leg and can be made one.
fn take_spare(up: &Up) -> Option<Rc<ReplicaEnv>> {
    let spare = up.world.sites.borrow().iter().find(|site| site.is_spare.get()).cloned()?;
    spare.is_spare.set(false);
    spare.held.set(false);
    *spare.allowed.borrow_mut() = (0..spare.shape.capacity_blocks).collect();
    Some(spare)
}

async fn add(up: &Up) {
    let Some(mirror) = up.world.mirror.borrow().clone() else { return };
    let Some(spare) = take_spare(up) else { return };
    let added = mirror.add(source(&spare).await, true).await;
    up.world.say(format!("at {:?} leg {} is added: {added:?}", up.executor.now(), spare.number));
    spare.is_member.set(added.is_ok());
}

/// Looks until a leg that is to take another one's place has everything.
const LOOKS: usize = 500;

/// Puts another device in the place of a leg: at once where that is not up to date, else when the new one has everything.
pub(super) async fn replace(up: &Up, old: &Rc<ReplicaEnv>) {
    let Some(mirror) = up.world.mirror.borrow().clone() else { return };
    if up.world.has_bare_leg() || old.is_leaving.get() {
        return;
    }
    let Some(spare) = take_spare(up) else { return };
    spare.replaces.set(Some(old.number));
    let source = source(&spare).await;
    let done = mirror.replace(&old.name, source, true).await;
    up.world.say(format!("at {:?} leg {} is replaced by {}: {done:?}", up.executor.now(), old.number, spare.number));
    let is_out = up.world.standing(old).is_none();
    spare.is_member.set(done.is_ok());
    if done.is_ok() {
        spare.replaces.set(None);
        old.is_removed.set(old.is_removed.get() || is_out);
    }
    if done.is_err() || is_out {
        return;
    }
    for _ in 0..LOOKS {
        if up.world.standing(&spare) == Some((ReplicaState::InSync, true)) {
            return remove(up, old).await;
        }
        up.executor.delay(Duration::from_millis(1)).await;
    }
}

async fn remove(up: &Up, site: &Rc<ReplicaEnv>) {
    let Some(mirror) = up.world.mirror.borrow().clone() else { return };
    let is_other = up.world.has_bare_leg() || site.is_removed.get();
    if up.in_use().len() < 3 || is_other {
        return;
    }
    site.is_removed.set(true);
    site.is_leaving.set(true);
    let removed = mirror.remove(&site.name).await;
    up.world.say(format!("at {:?} leg {} is removed: {removed:?}", up.executor.now(), site.number));
    site.is_leaving.set(false);
    if removed.is_err() {
        site.is_removed.set(false);
    }
}
