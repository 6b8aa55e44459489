//! Several targets as one device: one function for each kind.

mod mirror;
mod multipath;

use std::time::Duration;

use futures_util::future::join_all;
use sealblock_layers_stripe::{CHUNK, StripeLayer};
use sealblock_units::ByteCount;

use super::{Access, Facts, Opened};
use crate::exit::{Cause, Failure};
use crate::target::{GroupKind, Target};

pub use mirror::{OpenMirror, create as create_mirror};
pub(super) use multipath::Paths;

/// How long a path or leg over NVMe/TCP may take to answer, and how long its target waits for a sign of life, unless told. Short,
/// since there is another one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Opens a group.
pub(super) async fn open(target: &Target, kind: GroupKind, legs: &[Target], access: Access) -> Result<Opened, Failure> {
    match kind {
        GroupKind::Mirror => mirror::open(target, legs, access).await,
        GroupKind::Stripe { chunk } => stripe(target, chunk.unwrap_or(CHUNK), legs, access).await,
        GroupKind::Multipath => multipath::open(target, legs, access).await,
    }
}

/// Opens the legs of a stripe, all at once.
async fn stripe(target: &Target, chunk: ByteCount, legs: &[Target], access: Access) -> Result<Opened, Failure> {
    let opened = all_or_none(join_all(legs.iter().map(|leg| super::open(leg, access))).await).await?;
    let (mut gates, mut facts, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for leg in opened {
        gates.push(leg.gate);
        facts.push(leg.facts);
        held.extend(leg.held);
    }
    match StripeLayer::new(gates, chunk) {
        Ok(device) => Ok(Opened::new(target, device, Facts::over("stripe", facts), held)),
        Err(error) => {
            // What is wrong with the legs is to be said, not what is wrong with closing them.
            let _ = super::close_all(&held).await;
            Err(Failure::new(Cause::Unsuitable, "opening", error).on(target))
        }
    }
}

/// All legs, or why one of them is not there; the others are closed then.
async fn all_or_none(legs: Vec<Result<Opened, Failure>>) -> Result<Vec<Opened>, Failure> {
    let (mut opened, mut failed) = (Vec::new(), None);
    for leg in legs {
        match leg {
            Ok(leg) => opened.push(leg),
            Err(failure) => failed = failed.or(Some(failure)),
        }
    }
    let Some(failure) = failed else { return Ok(opened) };
    for leg in opened {
        let _ = leg.close(Ok(())).await;
    }
    Err(failure)
}

/// The same target, which gives up sooner where it was not told how long to try.
fn hasty(target: &Target) -> Target {
    let mut target = target.clone();
    hasten(&mut target);
    target
}

fn hasten(target: &mut Target) {
    match target {
        Target::NvmeTcp { options, .. } => {
            options.timeout.get_or_insert(PATIENCE);
            options.keep_alive.get_or_insert(PATIENCE);
            options.reconnect.get_or_insert(Duration::ZERO);
        }
        Target::Group { legs, .. } => legs.iter_mut().for_each(hasten),
        Target::Offset { target, .. } | Target::Fault { target, .. } => hasten(target),
        Target::File(_)
        | Target::Raw(_)
        | Target::Linux(_)
        | Target::Memory(_)
        | Target::Null(_)
        | Target::Nbd { .. } => {}
    }
}
