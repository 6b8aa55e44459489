//! What happens to legs while hosts use the mirror.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::{LegSource, Reopen};
use sealblock_units::Extent;

use super::machine::Up;
use super::site::{Line, Site};

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
        if site.line.get() == Line::Gone && up.random.chance(85) {
            continue;
        }
        match up.random.below(100) {
            0..25 => leave(&up, &site),
            25..40 => hang(&up, &site),
            40..52 => fill(&up, &site),
            52..64 => up.executor.spawn("release", release(site)).await,
            64..88 => repair(&up).await,
            88..94 => add(&up).await,
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

async fn release(site: Rc<Site>) {
    site.held.set(false);
}

/// After a while, lets the leg be opened anew, unless something else has happened to it since.
fn later(up: &Up, site: &Rc<Site>, then: impl FnOnce(&Site) + 'static) {
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

fn leave(up: &Up, site: &Rc<Site>) {
    site.held.set(true);
    site.break_line(Line::Gone);
    up.world.say(format!("at {:?} leg {} goes away", up.executor.now(), site.number));
    later(up, site, |site| site.held.set(false));
}

fn hang(up: &Up, site: &Rc<Site>) {
    if site.line.get() == Line::Up {
        up.world.say(format!("at {:?} leg {} hangs", up.executor.now(), site.number));
        site.break_line(Line::Hung);
        later(up, site, |site| site.break_line(Line::Gone));
    }
}

fn fill(up: &Up, site: &Rc<Site>) {
    if site.line.get() == Line::Up {
        up.world.say(format!("at {:?} leg {} fails changes", up.executor.now(), site.number));
        site.break_line(Line::Full);
        later(up, site, |site| site.break_line(Line::Up));
    }
}

async fn repair(up: &Up) {
    let blocks = up.random.between(1, up.client.capacity_blocks().min(32));
    let first = up.random.below(up.client.capacity_blocks() - blocks + 1);
    if let Ok(extent) = Extent::from_raw(first, blocks) {
        let _ = up.client.repair(extent).await;
    }
}

/// What the mirror is to know of a leg.
pub(super) fn reopen(site: &Rc<Site>) -> Reopen {
    let site = site.clone();
    Box::new(move || site.open())
}

async fn add(up: &Up) {
    let spare = up.world.sites.borrow().iter().find(|site| site.is_spare.get()).cloned();
    let (Some(spare), Some(mirror)) = (spare, up.world.mirror.borrow().clone()) else { return };
    spare.is_spare.set(false);
    *spare.allowed.borrow_mut() = (0..1 << 12).collect();
    let device = spare.open().await;
    let source = LegSource { name: spare.name.clone(), device, reopen: Some(reopen(&spare)) };
    let added = mirror.add(source, true).await;
    up.world.say(format!("at {:?} leg {} is added: {added:?}", up.executor.now(), spare.number));
    spare.is_member.set(added.is_ok());
}

async fn remove(up: &Up, site: &Rc<Site>) {
    let Some(mirror) = up.world.mirror.borrow().clone() else { return };
    if up.in_use().len() < 3 || up.world.has_bare_leg() {
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
