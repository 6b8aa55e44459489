//! Several targets as one device: one function for each kind.

mod multipath;

use futures_util::future::join_all;
use sealblock_layers_stripe::{CHUNK, StripeLayer};
use sealblock_units::ByteCount;

use super::{Access, Facts, Opened, absent};
use crate::exit::{Cause, Failure};
use crate::target::{GroupKind, Target};

pub(super) use multipath::Paths;

/// Opens a group.
pub(super) async fn open(target: &Target, kind: GroupKind, legs: &[Target], access: Access) -> Result<Opened, Failure> {
    match kind {
        GroupKind::Mirror => Err(absent(target, "mirrors are")),
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
