//! What must hold once nothing happens any more: all legs are up to date, alike, and as the hosts left them.

use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Answer, Device, Operation};
use sealblock_integrity::{Checks, Sealed};
use sealblock_layers_mirror::label::Standing;
use sealblock_units::{Extent, Lba};

use super::machine::Up;
use super::site::{Line, Site};
use crate::client::Stop;

/// Looks that the mirror has to come to rest.
const LOOKS: usize = 2_000;

/// Lets every leg come back, waits until the mirror is at rest, and compares the legs.
pub(super) async fn settle(up: &Up) -> Result<(), Stop> {
    for site in up.in_use() {
        site.held.set(false);
        match site.line.get() {
            Line::Hung => site.break_line(Line::Gone),
            Line::Full => site.break_line(Line::Up),
            Line::Up | Line::Gone => {}
        }
    }
    for _ in 0..LOOKS {
        if is_at_rest(up) {
            up.report_rest();
            return compare(up).await;
        }
        if up.in_use().iter().any(|site| site.line.get() == Line::Gone) {
            // The mirror notices that a leg has gone when it asks it for something.
            let _ = up.client.verify(Extent::one(Lba::new(0))).await;
        }
        up.executor.delay(Duration::from_millis(1).max(Duration::from_millis(200) / up.factor)).await;
    }
    up.world.find(format!("the mirror does not come to rest: {:?}", up.world.describe()));
    Err(Stop)
}

fn is_at_rest(up: &Up) -> bool {
    let is_current =
        |site: &Rc<Site>| site.line.get() == Line::Up && up.world.standing(site) == Some((Standing::Current, true));
    up.in_use().iter().all(is_current) && up.world.describe().is_some_and(|now| now.unsettled_bytes == 0)
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
        let of_it = description.legs.iter().filter(|leg| leg.name == site.name);
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

async fn read(site: &Site, extent: Extent) -> Option<Sealed> {
    let volume = site.volume.borrow().clone()?;
    let checks = volume.geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
    match volume.execute(Operation::Read { extent, checks }).await {
        Ok(Answer::Data(data)) => Some(data),
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

/// Whether a block is unreadable, on all legs or on those that do not keep an older copy of it, which are counted: it was
/// made unreadable while they were away, and nobody reads them.
async fn is_kept(up: &Up, one: Extent, kept: &mut [u64]) -> bool {
    let legs = up.in_use();
    let mut readable = Vec::new();
    for site in &legs {
        if read(site, one).await.is_some() {
            readable.push(site.number);
        }
    }
    readable.iter().for_each(|leg| kept[*leg] += 1);
    let checks =
        up.client.stack().geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, one.start()));
    let refused = up.client.stack().execute(Operation::Read { extent: one, checks }).await.is_err();
    readable.len() < legs.len() && refused
}
