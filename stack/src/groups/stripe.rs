//! Opens stripes: checks by the labels that the members belong to one stripe, unless the target is `stripe-nolabel`.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use sealblock_block::DynDevice;
use sealblock_layers_stripe::label::Label;
use sealblock_layers_stripe::{AssembleError, CHUNK, StripeLayer};
use sealblock_units::ByteCount;

use crate::error::{Cause, StackError, shell_word};
use crate::identity::new_uuid;
use crate::opened::closing::CloseLimit;
use crate::opened::damage_view::DamageView;
use crate::opened::held::{Access, Usage, close_all};
use crate::opened::info::TargetInfo;
use crate::opened::same_remote::refuse_shared;
use crate::opened::target_identity::opening_order;
use crate::opened::{OpenTarget, Opener};
use crate::target::{GroupKind, TargetName};

/// Opens the members of a stripe; concurrently, to read them.
pub(crate) async fn open(
    target: &TargetName,
    chunk: Option<ByteCount>,
    labelled: bool,
    members: &[TargetName],
    (access, usage): (Access, Usage),
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    // Without labels each member is opened by itself: it may be a member of another group.
    let of_leg = if labelled { Usage::Member } else { usage.hidden() };
    let opened = all_or_none(open_members(members, access, of_leg, opener).await).await?;
    let (mut devices, mut info, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for member in opened {
        devices.push(member.device);
        info.push(member.info);
        held.extend(member.held);
    }
    let made = async {
        let named = members.iter().zip(&info).map(|(member, info)| (member.to_string(), info.remote_devices(member)));
        refuse_shared("open", target, &named.collect::<Vec<_>>())?;
        let device = StripeLayer::new(devices, chunk.unwrap_or(CHUNK))
            .map_err(|error| StackError::new(Cause::Unsuitable, "open", error).on(target))?;
        match labelled {
            true => {
                let device = device.labelled(new_uuid()?, access.writes()).await;
                device.map_err(|error| assemble_error(&error, target, true))
            }
            // Labels that are there are believed, also by who does not ask for them.
            false => match device.contradiction().await {
                Some(refusal) => Err(assemble_error(&refusal, target, true)),
                None => match device.contradiction_below(&labels_below(&info)) {
                    Some(refusal) => Err(assemble_error(&refusal, target, false)),
                    None => Ok(device),
                },
            },
        }
    };
    match made.await {
        Ok(device) => {
            let members = info.iter().map(|info| info.damage.clone()).collect();
            let damage = DamageView::stripe(members, device.chunk_blocks());
            let (members, elsewhere) = (device.members().to_vec(), device.elsewhere());
            let device = DynDevice::new(target.to_string(), device).made_of(&members, elsewhere);
            Ok(OpenTarget::of(target, device, TargetInfo { damage, ..TargetInfo::over("stripe", info) }, held))
        }
        Err(failure) => {
            // A failure to close the members would hide the first failure.
            let _ = close_all(&held, CloseLimit::OF_PROGRAM).await;
            Err(failure)
        }
    }
}

/// Opens the members: to write to them, up to the first that cannot be opened.
async fn open_members(
    members: &[TargetName],
    access: Access,
    usage: Usage,
    opener: Opener,
) -> Vec<Result<OpenTarget, StackError>> {
    if !access.writes() {
        return join_all(members.iter().map(|member| opener(member, access, usage))).await;
    }
    let mut opened = BTreeMap::new();
    for number in opening_order(members) {
        let member = opener(&members[number], access, usage).await;
        let is_open = member.is_ok();
        opened.insert(number, member);
        if !is_open {
            break;
        }
    }
    opened.into_values().collect()
}

/// All members, or why one could not be opened; the others are closed then.
async fn all_or_none(members: Vec<Result<OpenTarget, StackError>>) -> Result<Vec<OpenTarget>, StackError> {
    let (mut opened, mut failed) = (Vec::new(), None);
    for member in members {
        match member {
            Ok(member) => opened.push(member),
            Err(failure) => failed = failed.or(Some(failure)),
        }
    }
    let Some(failure) = failed else { return Ok(opened) };
    for member in opened {
        let _ = member.close(Ok(())).await;
    }
    Err(failure)
}

/// The label of the device below each member, which the member's own layers may hide.
fn labels_below(members: &[TargetInfo]) -> Vec<Option<Label>> {
    members.iter().map(|member| member.stripe_label_below().cloned()).collect()
}

/// Why the members are not one stripe, with the target name that is; one without labels where the members do not show theirs.
fn assemble_error(refusal: &AssembleError, target: &TargetName, show_labels: bool) -> StackError {
    let TargetName::Group { kind: GroupKind::Stripe { chunk, .. }, members } = target else {
        return StackError::new(Cause::Unsuitable, "open", refusal).on(target);
    };
    let group = |chunk, labelled, members| {
        shell_word(TargetName::Group { kind: GroupKind::Stripe { chunk, labelled }, members })
    };
    let unlabelled = || format!("use {} to trust this order and chunk size", group(*chunk, false, members.clone()));
    let (cause, advice) = match refusal {
        AssembleError::Many | AssembleError::NoRoom(_) | AssembleError::Unlabelled(_) => (Cause::Refused, unlabelled()),
        AssembleError::Order(own) => match in_order(members, own) {
            Some(members) => (Cause::Refused, group(*chunk, show_labels, members)),
            None => (Cause::Refused, "give each member of the stripe once".to_owned()),
        },
        AssembleError::Chunk { actual, .. } => (Cause::Refused, group(Some(*actual), show_labels, members.clone())),
        AssembleError::Foreign { .. } | AssembleError::OtherGroup(_) | AssembleError::NoLabel(_) => {
            (Cause::Refused, "give the members of one stripe".to_owned())
        }
        AssembleError::Count { members, .. } => (Cause::Refused, format!("give all {members} members, in their order")),
        AssembleError::Shape { .. } => {
            (Cause::Unsuitable, "give the members as they were when the stripe was created".to_owned())
        }
        AssembleError::Label { .. } => (Cause::Damaged, unlabelled()),
        AssembleError::Device { .. } => (Cause::Io, "wait until the members are online".to_owned()),
    };
    let named = members
        .iter()
        .enumerate()
        .map(|(number, member)| format!("{number} is {member}"))
        .collect::<Vec<_>>()
        .join(", ");
    StackError::new(cause, "open", format!("{refusal} ({named})")).on(target).advise(advice)
}

/// The members in the order of their labels; `None` if one is missing.
fn in_order(members: &[TargetName], own: &[usize]) -> Option<Vec<TargetName>> {
    let at = |number| own.iter().position(|own| *own == number).and_then(|member| members.get(member).cloned());
    (0..members.len()).map(at).collect()
}
