//! Errors of mirrors and their replicas as failures of commands.

use sealblock_layers_mirror::label::LabelError;
use sealblock_layers_mirror::label::assemble::AssembleError;
use sealblock_layers_mirror::{MirrorError, ReplicaError};
use sealblock_layers_stripe::label::MAGIC as STRIPE_MAGIC;

use crate::error::{Cause, StackError};
use crate::failures::OLDER;

/// What is being done by a command for the replicas.
pub const CHANGING: &str = "change";
/// What is said of a device with the label of a stripe.
const OF_A_STRIPE: &str = "it is a member of a stripe";
/// What would make replicas fit.
const SHOWN: &str = "use devices of one kind; serve a replica on another host with `--protection shown`";

/// Whether a device that is to be a replica has the label of a stripe, which only a stripe knows.
fn is_stripe_label(why: &LabelError) -> bool {
    matches!(why, LabelError::Other(STRIPE_MAGIC))
}

/// Why replicas make no mirror.
pub(super) fn mirror_error(error: &MirrorError) -> StackError {
    let (cause, advice) = match error {
        MirrorError::ReplicaCount(_) => (Cause::Usage, None),
        MirrorError::Assemble { error: refusal, .. } => advice(refusal),
        // It is whole as what it is, and no copy of anything: creating something there would destroy its group.
        MirrorError::Label { error: why, .. } if is_stripe_label(why) => {
            (Cause::Refused, Some("use stripe:A,B with all members of the stripe in their order"))
        }
        MirrorError::Label { error: LabelError::Other(_), .. } => {
            (Cause::Refused, Some("give the replicas of one mirror"))
        }
        MirrorError::Label { .. } => {
            (Cause::Damaged, Some("omit out-of-sync replicas, or use `sealblock create --force`"))
        }
        MirrorError::Replica { .. } | MirrorError::WriteLabels(_) => (Cause::Io, None),
        MirrorError::BlockSize { .. } | MirrorError::Size { .. } => (
            Cause::Unsuitable,
            Some(
                "devices of one kind and size; a replica that is not any more what it was is moved out of the way: the mirror runs without it, \
                 and `sealblock mirror replace TARGET OLD NEW` puts another one in its place",
            ),
        ),
        MirrorError::Capacity { .. } | MirrorError::Pages { .. } => (Cause::Unsuitable, None),
        MirrorError::Protection { .. } => (Cause::Unsuitable, Some(SHOWN)),
    };
    let failure = match error {
        MirrorError::Label { replica, error: why } if is_stripe_label(why) => {
            StackError::new(cause, "open", format!("{replica}: {OF_A_STRIPE}"))
        }
        _ => StackError::new(cause, "open", error),
    };
    let failure = failure.advise_if(advice);
    // What labels forbid needs a command that changes replicas or labels.
    if cause == Cause::Refused { failure.lasting() } else { failure }
}

fn advice(refusal: &AssembleError) -> (Cause, Option<&'static str>) {
    match refusal {
        AssembleError::NoReplica | AssembleError::NewWithoutReplica { .. } | AssembleError::NoneInSync => {
            (Cause::Unreachable, Some("wait until the replicas are online"))
        }
        AssembleError::OnlyUnfit { .. } => (
            Cause::Unsuitable,
            Some(
                "give its device its size again; or inspect each replica separately, move this one away, \
                 then use `sealblock mirror replace TARGET OLD NEW`",
            ),
        ),
        AssembleError::NotAReplica { .. } => {
            (Cause::Refused, Some("use `sealblock mirror add TARGET REPLICA` to add and resync a new replica"))
        }
        AssembleError::Removed { .. } => (
            Cause::Refused,
            Some(
                "use the mirror without it, or where only one replica is left, that one by itself (--force-member to write to it); \
                 `sealblock mirror add TARGET REPLICA --force` adds it again, to the mirror or to that one",
            ),
        ),
        AssembleError::NotCreated { .. } => (
            Cause::Refused,
            Some("use `sealblock mirror create A B .. --from A` to create a mirror with the content of A"),
        ),
        AssembleError::NoRoom => (Cause::Refused, Some("include a protected volume (`sealblock create`)")),
        AssembleError::OtherMirror { .. } | AssembleError::Duplicate { .. } => {
            (Cause::Refused, Some("give the replicas of one mirror"))
        }
        AssembleError::SplitBrain { .. } => (
            Cause::Refused,
            Some(
                "inspect each replica separately, move the one to discard away, then use `sealblock mirror replace TARGET OLD NEW`",
            ),
        ),
    }
}

/// Why replicas cannot become a mirror, or stay what they are.
pub(super) fn replica_error(error: &ReplicaError) -> StackError {
    let failure = |cause| StackError::new(cause, CHANGING, error);
    match error {
        ReplicaError::Full | ReplicaError::LastInSync { .. } => failure(Cause::Refused),
        ReplicaError::ReadOnly => failure(Cause::Refused).advise("open the mirror for writing"),
        ReplicaError::Offline { .. } => failure(Cause::Unreachable),
        ReplicaError::OutOfSync(_) => {
            failure(Cause::Refused).advise("wait for the end of its resync, which `sealblock mirror status` shows")
        }
        ReplicaError::BadLabel { replica, reason } => match is_stripe_label(reason) {
            true => {
                let why = format!("{replica} is a device whose label cannot be used: {OF_A_STRIPE}");
                StackError::new(Cause::Refused, CHANGING, why)
            }
            false => failure(Cause::Refused),
        }
        .advise(
            "inspect its content (`sealblock copy`), which may be the only good copy, or use another device; --force erases it",
        ),
        ReplicaError::Unusable { .. } => failure(Cause::Older).advise(OLDER),
        ReplicaError::Labelled { .. } => failure(Cause::Refused).advise(
            "use another device, or --force to overwrite it; if a `replace` of this mirror was cut off, \
             `sealblock verify mirror:A,B,NEW --repair` resyncs the new replica, and `sealblock mirror remove mirror:A,B,NEW OLD` ends it",
        ),
        ReplicaError::NotBlank { .. } => {
            failure(Cause::Refused).advise("use another device, or --force to overwrite it")
        }
        ReplicaError::InUse { .. } => failure(Cause::Refused),
        ReplicaError::Replicas { .. } => failure(Cause::Refused).advise(
            "use `mirror:A,B` with all replicas to open it; `sealblock mirror add` and `replace` change its replicas",
        ),
        ReplicaError::OnlyCopy { .. } => failure(Cause::Refused).advise(
            "use `mirror create --from` that device to keep its content, or `sealblock create DEVICE --force` first to erase it",
        ),
        ReplicaError::AmbiguousSource { .. } => {
            failure(Cause::Refused).advise("use --from DEVICE --force, to keep the content of DEVICE")
        }
        ReplicaError::NoRoom(_) => failure(Cause::Unsuitable)
            .advise("use a protected volume (`sealblock create`) or a namespace of sealblock as the first replica"),
        ReplicaError::Unfit(MirrorError::ReplicaCount(_)) => failure(Cause::Usage),
        ReplicaError::Unfit(error @ MirrorError::Assemble { .. }) => mirror_error(error),
        ReplicaError::Unfit(MirrorError::Protection { .. }) => failure(Cause::Unsuitable).advise(SHOWN),
        // Only a new mirror refuses a device that is larger than others.
        ReplicaError::Unfit(MirrorError::Size { expected, actual, .. }) if actual > expected => {
            failure(Cause::Unsuitable)
                .advise("use devices of one size for a new mirror; `sealblock mirror add` adds a larger one to a mirror")
        }
        ReplicaError::Unfit(_) => failure(Cause::Unsuitable)
            .advise("use devices of the same block size, protection information and size; a new replica may be larger"),
        ReplicaError::Unknown(_) => failure(Cause::Usage).advise("`sealblock mirror status` lists the replicas"),
        ReplicaError::Ambiguous { .. } => failure(Cause::Refused).advise(
            "again when one of them is back, or --force to go by the order of the names: a replica that is taken for another is out, and \
             loses nothing",
        ),
        ReplicaError::WriteLabels(_) | ReplicaError::WriteBlocks(_) => failure(Cause::Io),
    }
}
