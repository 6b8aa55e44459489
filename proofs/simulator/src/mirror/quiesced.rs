//! What must hold once nothing happens any more: all legs are up to date, alike, and as the hosts left them.

use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Device, Request, ReservedArea, Response};
use sealblock_integrity::{Checks, Sealed};
use sealblock_layers_mirror::ReplicaInfo;
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_units::{Extent, Lba};

use super::events::source;
use super::machine::Up;
use super::site::{ReplicaEnv, ReplicaLink};
use crate::client::Stop;

/// Looks that the mirror has to come to rest.
const LOOKS: usize = 2_000;

/// Lets every leg come back, waits until the mirror is at rest, and compares the legs.
pub(super) async fn settle(up: &Up) -> Result<(), Stop> {
    come_to_rest(up).await?;
    up.report_rest();
    compare(up).await
}

/// Lets every leg come back, and waits until the mirror is at rest.
pub(super) async fn come_to_rest(up: &Up) -> Result<(), Stop> {
    for site in up.in_use() {
        site.held.set(false);
        match site.line.get() {
            ReplicaLink::Hung => site.break_line(ReplicaLink::Gone),
            ReplicaLink::Full => site.break_line(ReplicaLink::Up),
            ReplicaLink::Up | ReplicaLink::Gone => {}
        }
    }
    for _ in 0..LOOKS {
        if is_at_rest(up) && lists_are_short(up).await {
            return Ok(());
        }
        make_legs(up).await;
        if up.in_use().iter().any(|site| site.line.get() == ReplicaLink::Gone) {
            // The mirror notices that a leg has gone when it asks it for something.
            let _ = up.client.verify(Extent::one(Lba::new(0))).await;
        }
        up.executor.delay(Duration::from_millis(1).max(Duration::from_millis(200) / up.factor)).await;
    }
    let is_split = |leg: &ReplicaInfo| leg.last_error.contains("split brain");
    if up.world.is_in_doubt.get() && up.world.describe().is_some_and(|now| now.replicas.iter().any(is_split)) {
        return Err(Stop);
    }
    up.world.find(format!("the mirror does not come to rest: {:?}", up.world.describe()));
    Err(Stop)
}

/// Makes legs of devices that are in the place of one and have no label of the mirror's.
async fn make_legs(up: &Up) {
    let (Some(description), Some(mirror)) = (up.world.describe(), up.world.mirror.borrow().clone()) else { return };
    for site in up.in_use() {
        let is_nothing =
            |leg: &&ReplicaInfo| leg.name == site.name && !leg.is_online && leg.last_error.contains("mirror replace");
        if description.replicas.iter().any(|leg| is_nothing(&leg)) {
            site.is_lent.set(true);
            let done = mirror.replace(&site.name, source(&site).await, true).await;
            site.is_lent.set(false);
            up.world.say(format!("at {:?} leg {} is made a leg: {done:?}", up.executor.now(), site.number));
        }
    }
}

fn is_at_rest(up: &Up) -> bool {
    let is_current = |site: &Rc<ReplicaEnv>| {
        site.line.get() == ReplicaLink::Up && up.world.standing(site) == Some((ReplicaState::InSync, true))
    };
    up.in_use().iter().all(is_current) && up.world.describe().is_some_and(|now| now.dirty_bytes == 0)
}

/// Whether the legs' labels list no more older copies than are withheld: what was written over others is known to be durable.
async fn lists_are_short(up: &Up) -> bool {
    let Some(description) = up.world.describe() else { return false };
    let withheld: u64 = description.replicas.iter().map(|leg| leg.stale_blocks).sum();
    for site in up.in_use().iter().filter(|site| !site.bare) {
        let Some(volume) = site.volume.borrow().clone() else { return false };
        let annex = volume.execute(Request::ReadReserved { area: ReservedArea::GroupLabel }).await;
        let Ok(Response::Reserved(bytes)) = annex else { return false };
        let Ok(Some(label)) = Label::decode(&bytes) else { return false };
        let listed: usize = label.replicas.iter().map(|member| member.stale.len()).sum();
        if listed as u64 != withheld {
            return false;
        }
    }
    true
}

async fn compare(up: &Up) -> Result<(), Stop> {
    let mut kept = vec![0; up.world.sites.borrow().len()];
    for piece in up.client.pieces(&up.random) {
        up.client.read(piece).await?;
        up.client.verify(piece).await?;
        if alike(up, piece).await {
            continue;
        }
        for one in piece.iter().map(Extent::one) {
            if !alike(up, one).await && !is_kept(up, one, &mut kept).await {
                up.world.find(format!("at rest, legs differ in block {}", one.start()));
                return Err(Stop);
            }
        }
    }
    let Some(description) = up.world.describe() else { return Ok(()) };
    for site in up.in_use() {
        let of_it = description.replicas.iter().filter(|leg| leg.name == site.name);
        let listed: u64 = of_it.map(|leg| leg.stale_blocks).sum();
        if kept[site.number] > listed {
            let (number, kept) = (site.number, kept[site.number]);
            up.world
                .find(format!("leg {number} has content in {kept} unreadable blocks; {listed} are listed as stale"));
            return Err(Stop);
        }
    }
    Ok(())
}

/// Whether a leg by itself can read blocks.
pub(super) async fn holds(up: &Up, leg: usize, extent: Extent) -> bool {
    let site = up.in_use().into_iter().find(|site| site.number == leg);
    match site {
        Some(site) => read(&site, extent).await.is_some(),
        None => false,
    }
}

async fn read(site: &ReplicaEnv, extent: Extent) -> Option<Sealed> {
    let volume = site.volume.borrow().clone()?;
    let checks = volume.geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
    match volume.execute(Request::Read { extent, checks }).await {
        Ok(Response::Data(data)) => Some(data),
        _ => None,
    }
}

async fn alike(up: &Up, extent: Extent) -> bool {
    let mut first: Option<Sealed> = None;
    for site in up.in_use() {
        let Some(data) = read(&site, extent).await else { return false };
        if first
            .as_ref()
            .is_some_and(|first| first.data()[..] != data.data()[..] || first.tags()[..] != data.tags()[..])
        {
            return false;
        }
        first.get_or_insert(data);
    }
    true
}

/// Whether the mirror refuses to read a block. Legs that can read it keep an older copy, which is counted: the block was made
/// unreadable while they were away. That may be so of each of them, as of different times.
async fn is_kept(up: &Up, one: Extent, kept: &mut [u64]) -> bool {
    for site in up.in_use() {
        if read(&site, one).await.is_some() {
            kept[site.number] += 1;
        }
    }
    let checks =
        up.client.stack().geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, one.start()));
    up.client.stack().execute(Request::Read { extent: one, checks }).await.is_err()
}
