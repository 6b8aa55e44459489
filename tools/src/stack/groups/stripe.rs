//! Stripes: whether the legs are those of one stripe, as their labels have it, or nobody is to ask.

use futures_util::future::join_all;
use sealblock_layers_stripe::{CHUNK, Refusal, StripeLayer};
use sealblock_units::ByteCount;

use super::super::{Access, Facts, Opened, Usage, close_all, open_for};
use crate::commands::create::new_uuid;
use crate::exit::{Cause, CliError};
use crate::target::{GroupKind, TargetName};

/// Opens the legs of a stripe, all at once.
pub(super) async fn open(
    target: &TargetName,
    chunk: Option<ByteCount>,
    labelled: bool,
    legs: &[TargetName],
    (access, usage): (Access, Usage),
) -> Result<Opened, CliError> {
    // Without labels a leg is a device by itself, which may be a member of something else.
    let of_leg = if labelled { Usage::Member } else { usage.hidden() };
    let opened = all_or_none(join_all(legs.iter().map(|leg| open_for(leg, access, of_leg))).await).await?;
    let (mut gates, mut facts, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for leg in opened {
        gates.push(leg.gate);
        facts.push(leg.facts);
        held.extend(leg.held);
    }
    let made = StripeLayer::new(gates, chunk.unwrap_or(CHUNK))
        .map_err(|error| CliError::new(Cause::Unsuitable, "opening", error).on(target));
    let made = match made {
        Ok(device) if labelled => match new_uuid() {
            Ok(uuid) => device.labelled(uuid, access.writes()).await.map_err(|error| of_refusal(&error, target)),
            Err(failure) => Err(failure),
        },
        made => made,
    };
    match made {
        Ok(device) => Ok(Opened::new(target, device, Facts::over("stripe", facts), held)),
        Err(failure) => {
            // What is wrong with the legs is to be said, not what is wrong with closing them.
            let _ = close_all(&held).await;
            Err(failure)
        }
    }
}

/// All legs, or why one of them is not there; the others are closed then.
async fn all_or_none(legs: Vec<Result<Opened, CliError>>) -> Result<Vec<Opened>, CliError> {
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

/// Devices that are not put together, with the target that would be.
fn of_refusal(refusal: &Refusal, target: &TargetName) -> CliError {
    let TargetName::Group { kind: GroupKind::Stripe { chunk, .. }, legs } = target else {
        return CliError::new(Cause::Unsuitable, "opening", refusal).on(target);
    };
    let group = |chunk, labelled, legs| TargetName::Group { kind: GroupKind::Stripe { chunk, labelled }, legs };
    let unlabelled =
        || format!("{} to go by this order and this size of chunks unasked", group(*chunk, false, legs.clone()));
    let (cause, advice) = match refusal {
        Refusal::Many | Refusal::NoRoom(_) | Refusal::Unlabelled(_) => (Cause::Refused, unlabelled()),
        Refusal::Order(own) => match in_order(legs, own) {
            Some(legs) => (Cause::Refused, group(*chunk, true, legs).to_string()),
            None => (Cause::Refused, "each member of the stripe once".to_owned()),
        },
        Refusal::Chunk { there, .. } => (Cause::Refused, group(Some(*there), true, legs.clone()).to_string()),
        Refusal::Foreign { .. } | Refusal::OtherGroup(_) | Refusal::Stranger(_) => {
            (Cause::Refused, "the members of one stripe".to_owned())
        }
        Refusal::Count { members, .. } => (Cause::Refused, format!("all {members} members, in their order")),
        Refusal::Shape { .. } => (Cause::Unsuitable, "the members as they were when they were striped".to_owned()),
        Refusal::Label { .. } => (Cause::Damaged, unlabelled()),
        Refusal::Device { .. } => (Cause::Io, "again when the members are there".to_owned()),
    };
    let named =
        legs.iter().enumerate().map(|(member, leg)| format!("{member} is {leg}")).collect::<Vec<_>>().join(", ");
    CliError::new(cause, "opening", format!("{refusal} ({named})")).on(target).advise(advice)
}

/// The legs in the order that their numbers say; nothing where one is missing.
fn in_order(legs: &[TargetName], own: &[usize]) -> Option<Vec<TargetName>> {
    let at = |number| own.iter().position(|own| *own == number).and_then(|leg| legs.get(leg).cloned());
    (0..legs.len()).map(at).collect()
}
