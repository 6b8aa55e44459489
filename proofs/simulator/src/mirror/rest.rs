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
    for piece in up.client.pieces(&up.random) {
        up.client.read(piece).await?;
        up.client.verify(piece).await?;
        for one in if alike(up, piece).await { None } else { Some(piece) }.into_iter().flat_map(|piece| piece.iter()) {
            if !alike(up, Extent::one(one)).await && !all_unreadable(up, Extent::one(one)).await {
                up.world.find(format!("at rest, legs differ in block {one}"));
                return Err(Stop);
            }
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

async fn all_unreadable(up: &Up, extent: Extent) -> bool {
    for site in up.in_use() {
        if read(&site, extent).await.is_some() {
            return false;
        }
    }
    true
}
