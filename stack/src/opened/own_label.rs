//! What the label of a member of a group says of its own device, while that is open by itself.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{Device, DynDevice, Error, ErrorKind, Request, RequestKind, ReservedArea, Response, WhyOlder};
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_layers_stripe::label::Label as StripeLabel;
use sealblock_runtime_memory::Slice;

use crate::identity::uuid_text;

/// Why a device may be older than what was written, by its own label.
async fn why_older_by_label(device: &DynDevice) -> Option<WhyOlder> {
    why_older_by(read_label(device).await.as_ref()?)
}

/// The same by this label.
pub(super) fn why_older_by(label: &Result<Slice, Error>) -> Option<WhyOlder> {
    match label {
        Ok(label) => is_out_of_sync(label).then_some(WhyOlder::OutOfSync),
        // Nothing is left of it, or it cannot be read.
        Err(error) if matches!(error.kind(), ErrorKind::Media { .. }) => Some(WhyOlder::LabelLost),
        Err(_) => None,
    }
}

/// Reads the label of a device; `None` if it has no room for one.
pub(super) async fn read_label(device: &DynDevice) -> Option<Result<Slice, Error>> {
    if !device.abilities().is_native(RequestKind::ReadReserved) {
        return None;
    }
    match device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
        Ok(Response::Reserved(label)) => Some(Ok(label)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    }
}

/// The label of a stripe, if this is one.
pub(super) fn stripe_label(label: &[u8]) -> Option<Box<StripeLabel>> {
    StripeLabel::decode(label).ok().flatten().map(Box::new)
}

/// What the label of a member says of its content while the member is open by itself.
#[derive(Clone, Default, Debug)]
pub struct OwnLabel(Rc<Cell<Option<WhyOlder>>>);

impl OwnLabel {
    /// What the label of this device says now.
    pub(crate) async fn of(device: &DynDevice) -> OwnLabel {
        OwnLabel(Rc::new(Cell::new(why_older_by_label(device).await)))
    }

    /// The label was written.
    pub(crate) fn set(&self, label: &[u8]) {
        self.0.set(is_out_of_sync(label).then_some(WhyOlder::OutOfSync));
    }

    /// Why the content may be older than what was written to the group, if it may.
    pub fn why_older(&self) -> Option<WhyOlder> {
        self.0.get()
    }
}

/// Why the content of a device that is made the source of a mirror may be older than what was written, by its own label, as text.
pub(crate) async fn doubt_by_label(device: &DynDevice) -> Option<String> {
    match read_label(device).await? {
        Ok(bytes) => match Label::decode(&bytes) {
            Ok(Some(label)) if is_out_of_sync(&bytes) => {
                let (state, uuid) = (label.replicas[label.own_index].state, uuid_text(&label.uuid));
                let state = state.as_str().replace('_', " ");
                Some(format!("its label marked it as {state}, as a replica of mirror {uuid}"))
            }
            _ => None,
        },
        Err(_) => why_older_by_label(device).await.map(|why| why.to_string()),
    }
}

/// True if a mirror label marks its own replica as not in sync. A removed replica does not count.
fn is_out_of_sync(label: &[u8]) -> bool {
    let Ok(Some(label)) = Label::decode(label) else { return false };
    matches!(label.replicas[label.own_index].state, ReplicaState::OutOfSync | ReplicaState::Resyncing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_readable_label_of_a_mirror_says_it() {
        for bytes in [&b""[..], b"SBMIRROR", b"SBSTRIPE"] {
            assert!(!is_out_of_sync(bytes));
        }
    }
}
