//! Devices that refuse writes: members of mirrors and stripes that are opened by themselves, and read-only views.
//!
//! A write to only one replica is unknown to the others: the mirror would read either content, or
//! undo the write. So a device with a member's label refuses writes by itself, unless `--force-member` is given; then a replica
//! is marked out of sync first, so that the mirror resyncs it. A member that is served for a mirror or stripe on
//! another host is the exception: it accepts writes after the host that assembles the group has written its label.

use std::cell::Cell;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{
    Abilities, Device, DynDevice, ErrorKind as BlockFailure, Geometry, Operation, Outcome, Request, RequestKind,
    ReservedArea, Response,
};
use sealblock_layers_mirror::label::{Label as MirrorLabel, ReplicaState};
use sealblock_layers_mirror::mark_written_alone;
use sealblock_layers_stripe::label::Label as StripeLabel;

use crate::error::{Cause, StackError};
use crate::failures::device_error;
use crate::identity::uuid_text;
use crate::opened::OpenTarget;
use crate::opened::held::Usage;
use crate::opened::info::TargetInfo;
use crate::opened::out_of_sync::note_stripe_label;
use crate::opened::own_label::OwnLabel;
use crate::program::note;

/// The group in the label of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Membership {
    /// A member of a mirror or stripe.
    Known { is_mirror: bool, uuid: [u8; 16], own_index: usize, members: usize },
    /// The last replica of a mirror, whose others were removed.
    LastReplica([u8; 16]),
    /// A member of an unknown group, and why it is unknown.
    Unknown(String),
}

impl Membership {
    /// Reads a label. A removed replica is no member.
    fn of(bytes: &[u8]) -> Option<Membership> {
        let known = |is_mirror, uuid, own_index, members| Membership::Known { is_mirror, uuid, own_index, members };
        match StripeLabel::decode(bytes) {
            Ok(Some(label)) => return Some(known(false, label.uuid, label.own_index, label.members)),
            Ok(None) => {}
            Err(why) => return Some(Membership::Unknown(why.to_string())),
        }
        match MirrorLabel::decode(bytes) {
            Ok(None) => None,
            Ok(Some(label)) if label.replicas[label.own_index].state == ReplicaState::Removed => None,
            Ok(Some(label))
                if label.replicas.iter().filter(|other| other.state != ReplicaState::Removed).count() == 1 =>
            {
                Some(Membership::LastReplica(label.uuid))
            }
            Ok(Some(label)) => Some(known(true, label.uuid, label.own_index, label.replicas.len())),
            Err(why) => Some(Membership::Unknown(why.to_string())),
        }
    }

    fn to_text(&self) -> String {
        match self {
            Membership::Known { is_mirror, uuid, own_index, members } => {
                let (own, uuid) = (own_index + 1, uuid_text(uuid));
                let (group, why) = match is_mirror {
                    true => ("mirror", "a write would leave the other members out of sync"),
                    false => ("stripe", "has only a part of the blocks"),
                };
                format!("it is member {own} of {members} of {group} {uuid}, and {why}")
            }
            Membership::LastReplica(uuid) => format!("it is the last replica of mirror {}", uuid_text(uuid)),
            Membership::Unknown(why) => format!("it is a member of a mirror or stripe, but {why}"),
        }
    }

    fn advice(&self) -> String {
        let whole = match self {
            Membership::Known { is_mirror: true, .. } => "use mirror:A,B with all its members",
            Membership::Known { is_mirror: false, .. } => "use stripe:A,B with all its members in their order",
            Membership::LastReplica(_) => "`sealblock mirror add TARGET REPLICA --force` makes it a mirror again",
            Membership::Unknown(_) => "use mirror:A,B or stripe:A,B with all its members",
        };
        format!(
            "{whole}; `serve --as-member` if another host assembles it; --force-member to write to this member alone"
        )
    }
}

/// Refuses to open a single member of a group for writing.
///
/// # Errors
/// If it is a member of a group and `--force-member` is not given; it is closed then. If its label cannot be read or marked.
pub(crate) fn guard(opened: OpenTarget, usage: Usage) -> LocalBoxFuture<'static, Result<OpenTarget, StackError>> {
    Box::pin(guard_opened(opened, usage))
}

async fn guard_opened(mut opened: OpenTarget, usage: Usage) -> Result<OpenTarget, StackError> {
    if matches!(usage, Usage::Unchanged | Usage::Member)
        || !opened.device.abilities().is_native(RequestKind::ReadReserved)
    {
        return Ok(opened);
    }
    let membership = match membership(&opened).await {
        Ok(membership) => membership,
        Err(failure) => return opened.close(Err(failure)).await,
    };
    if membership.is_some() {
        note_stripe_label(&mut opened).await;
    }
    match (membership, usage) {
        (_, Usage::AsMember) => Ok(single(opened, false).await),
        (None, _) => Ok(opened),
        (Some(membership), Usage::Forced) => {
            note(format_args!("{} is written without its group: {}", opened.target(), membership.to_text()));
            let marked = match membership {
                Membership::Known { is_mirror: true, .. } | Membership::LastReplica(_) => {
                    mark_written_alone(&opened.device).await
                }
                Membership::Known { is_mirror: false, .. } | Membership::Unknown(_) => Ok(()),
            };
            match marked.map_err(|error| device_error("mark as changed outside its mirror", &error)) {
                Ok(()) => Ok(single(opened, true).await),
                Err(failure) => opened.close(Err(failure)).await,
            }
        }
        (Some(membership), _) => {
            let refused = StackError::new(Cause::Refused, "write to", membership.to_text());
            let refused = refused.on(opened.target()).advise(membership.advice()).lasting();
            opened.close(Err(refused)).await
        }
    }
}

/// The member, which keeps what its label says; without `is_claimed` it refuses changes at first.
async fn single(opened: OpenTarget, is_claimed: bool) -> OpenTarget {
    let OpenTarget { device, info, held, target, is_part } = opened;
    let label = OwnLabel::of(&device).await;
    let info = TargetInfo { own_label: Some(label.clone()), ..info };
    OpenTarget { is_part, ..OpenTarget::new(&target, SingleMember::new(device, label, is_claimed), info, held) }
}

/// Why a volume with this label is not resized, if so: the other members of its group would have another size.
pub fn bars_resizing(label: &[u8]) -> Option<String> {
    Membership::of(label).map(|membership| membership.to_text())
}

async fn membership(opened: &OpenTarget) -> Result<Option<Membership>, StackError> {
    match opened.device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
        Ok(Response::Reserved(bytes)) => Ok(Membership::of(&bytes)),
        Ok(_) => unreachable!("a gate completes a read of the reserved area with its content"),
        // A mirror uses the label area itself: it cannot be a labelled member of another group.
        Err(error) if matches!(error.kind(), BlockFailure::Absent(_)) => Ok(None),
        // Of which nothing is left: the device was a member of something.
        Err(error) if matches!(error.kind(), BlockFailure::Media { .. }) => {
            Ok(Some(Membership::Unknown(error.kind().to_string())))
        }
        Err(error) => Err(device_error("find the label", &error)),
    }
}

/// A member that is open by itself. One that is served for its group refuses writes until its label was written through this open,
/// which the host that assembles the group does first. So a host that takes it for its own disk cannot write to it by accident.
struct SingleMember {
    inner: DynDevice,
    label: OwnLabel,
    is_claimed: Cell<bool>,
    is_logged: Cell<bool>,
}

impl SingleMember {
    fn new(inner: DynDevice, label: OwnLabel, is_claimed: bool) -> SingleMember {
        SingleMember { inner, label, is_claimed: Cell::new(is_claimed), is_logged: Cell::new(false) }
    }

    fn refuse(&self) -> Outcome {
        if !self.is_logged.replace(true) {
            tracing::warn!(
                "a change was refused: the device is served as a member (--as-member), and no mirror or stripe has written its \
                 label since; whoever writes to it has to put its members together"
            );
        }
        Err(BlockFailure::ReadOnly.into())
    }
}

impl Device for SingleMember {
    fn geometry(&self) -> &Geometry {
        self.inner.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.inner.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        if request.kind().changes_blocks() && !self.is_claimed.get() {
            return self.refuse();
        }
        let written = match &request.operation {
            Operation::WriteReserved(ReservedArea::GroupLabel, label) => Some(label.clone()),
            _ => None,
        };
        let outcome = self.inner.execute(request).await;
        if let (Some(label), Ok(_)) = (written, &outcome) {
            self.label.set(&label);
            self.is_claimed.set(true);
        }
        outcome
    }
}

/// `D`, read-only.
pub struct ReadOnly<D>(D);

impl<D> ReadOnly<D> {
    /// The same blocks. `below` is behind its gate.
    pub fn new(below: D) -> ReadOnly<D> {
        ReadOnly(below)
    }
}

impl<D: Device> Device for ReadOnly<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { writable: false, ..self.0.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        match kind.changes_blocks() || kind == RequestKind::WriteReserved {
            true => Err(BlockFailure::ReadOnly.into()),
            false => self.0.execute(request).await,
        }
    }

    fn executes_in_place(&self) -> bool {
        self.0.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        let kind = request.kind();
        let is_refused = kind.changes_blocks() || kind == RequestKind::WriteReserved;
        if is_refused { None } else { self.0.try_execute(request) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use sealblock_block::Durability;
    use sealblock_media_memory::MemoryDevice;
    use sealblock_runtime_memory::Slice;
    use sealblock_units::{BlockSize, Extent};

    #[test]
    fn a_served_member_takes_changes_only_after_its_label_was_written() {
        let memory = DynDevice::new("member", MemoryDevice::new(BlockSize::B512, 8, None));
        let device = SingleMember::new(memory, OwnLabel::default(), false);
        let extent = Extent::from_raw(0, 1).unwrap();
        let run = |operation| device.execute(operation).now_or_never().expect("RAM never waits");
        let zero = || Request::write_zeroes(extent, true, Durability::Volatile);
        let write = |slot| Request::write_reserved(slot, Slice::copy_from(b"label"));
        let is_refused = |outcome: Outcome| outcome.is_err_and(|error| *error.kind() == BlockFailure::ReadOnly);
        for operation in [zero(), Request::discard(vec![extent])] {
            assert!(is_refused(run(operation)));
        }
        assert!(run(Request::flush()).is_ok());
        run(write(ReservedArea::ScrubState)).unwrap();
        assert!(is_refused(run(zero())), "the notes of a scrub are no label");
        run(write(ReservedArea::GroupLabel)).unwrap();
        assert!(run(zero()).is_ok());
    }

    #[test]
    fn labels_that_cannot_be_read_are_labels() {
        assert_eq!(Membership::of(b""), None);
        for bytes in [&b"SBSTRIPE"[..], b"SBMIRROR", b"something of a later version"] {
            assert!(matches!(Membership::of(bytes), Some(Membership::Unknown(_))));
        }
    }
}
