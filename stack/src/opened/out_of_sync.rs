//! Replicas that are opened alone although their own label marks them as out of sync: the other replicas of the mirror have newer
//! blocks, which no seal shows. So readers are told that the content may be older than what was written.
//!
//! The mirror itself goes by the labels of all its replicas, and so does another host's mirror: their members are not marked. Of a
//! member that is open for writing by itself, [`OwnLabel`] keeps what its label says, for reports about it: the device stays
//! unmarked, since marked ones are not written.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Device, DynDevice, Error, ErrorKind, Freshness, Geometry, Outcome, Request, RequestKind, ReservedArea,
    Response, Unchecked, WhyOlder,
};
use sealblock_layers_mirror::label::{Label, ReplicaState};
use sealblock_layers_stripe::label::Label as StripeLabel;
use sealblock_runtime_memory::Slice;

use crate::identity::uuid_text;
use crate::opened::OpenTarget;

/// The same target, which says that it may be older than what was written if its label does, or if it had one that is lost.
pub(crate) async fn mark(mut opened: OpenTarget) -> OpenTarget {
    let Some(label) = read_label(&opened.device).await else { return opened };
    opened.info.stripe_label = label.as_ref().ok().and_then(|label| stripe_label(label));
    if !opened.device.abilities().freshness.is_current() {
        return opened;
    }
    let Some(why) = why_older_by(&label) else { return opened };
    let OpenTarget { device, info, held, target, is_part } = opened;
    OpenTarget { is_part, ..OpenTarget::new(&target, OutOfSync(device, why), info, held) }
}

/// Why a device may be older than what was written, by its own label.
async fn why_older_by_label(device: &DynDevice) -> Option<WhyOlder> {
    why_older_by(read_label(device).await.as_ref()?)
}

fn why_older_by(label: &Result<Slice, Error>) -> Option<WhyOlder> {
    match label {
        Ok(label) => is_out_of_sync(label).then_some(WhyOlder::OutOfSync),
        // Nothing is left of it, or it cannot be read.
        Err(error) if matches!(error.kind(), ErrorKind::Media { .. }) => Some(WhyOlder::LabelLost),
        Err(_) => None,
    }
}

/// Reads the label of a device; `None` if it has no room for one.
async fn read_label(device: &DynDevice) -> Option<Result<Slice, Error>> {
    if !device.abilities().is_native(RequestKind::ReadReserved) {
        return None;
    }
    match device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
        Ok(Response::Reserved(label)) => Some(Ok(label)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    }
}

/// Notes the label of a stripe on a device, if it has one: layers above may hide it.
pub(crate) async fn note_stripe_label(opened: &mut OpenTarget) {
    if let Some(Ok(label)) = read_label(&opened.device).await {
        opened.info.stripe_label = stripe_label(&label);
    }
}

fn stripe_label(label: &[u8]) -> Option<Box<StripeLabel>> {
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

/// A replica that is out of sync, or may be.
struct OutOfSync<D>(D, WhyOlder);

impl<D: Device> Device for OutOfSync<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { freshness: Freshness::MayBeOlder(self.1), ..self.0.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let extent = request.extent();
        let mut outcome = self.0.execute(request).await;
        // Each block matches its seal, and none is known to be the last that was written.
        let unchecked = extent.map(|extent| Unchecked::new(extent, self.1.why_unchecked()));
        match (&mut outcome, unchecked) {
            (Ok(Response::Verified(checked)), Some(unchecked)) => checked.coverage.add(unchecked),
            (Ok(Response::Checksum(checksum)), Some(unchecked)) => checksum.coverage.add(unchecked),
            _ => {}
        }
        outcome
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if request.kind() == RequestKind::Read { self.0.try_execute(request) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use sealblock_block::Expectations;
    use sealblock_media_memory::MemoryDevice;
    use sealblock_units::{BlockSize, Extent};

    #[test]
    fn checks_of_an_out_of_sync_replica_are_incomplete_and_reads_are_as_ever() {
        let memory = || DynDevice::new("replica", MemoryDevice::new(BlockSize::B512, 8, None));
        let extent = Extent::from_raw(2, 3).unwrap();
        let check = |device: &dyn Fn(Request) -> Outcome| match device(Request::verify(extent, Expectations::NONE)) {
            Ok(Response::Verified(stats)) => stats.coverage.unchecked().to_vec(),
            other => panic!("{other:?}"),
        };
        let (plain, marked) = (memory(), OutOfSync(memory(), WhyOlder::OutOfSync));
        assert!(check(&|request| plain.execute(request).now_or_never().unwrap()).is_empty());
        let expected = [Unchecked::new(extent, WhyOlder::OutOfSync.why_unchecked())];
        assert_eq!(check(&|request| marked.execute(request).now_or_never().unwrap()), expected);
        let verify = Request::verify(extent, Expectations::NONE);
        assert!(marked.try_execute(&verify).is_none(), "the way past the coverage is closed");
        let read = marked.execute(Request::read(extent, Expectations::NONE)).now_or_never().unwrap();
        assert!(matches!(read, Ok(Response::Data(_))));
        assert_eq!(marked.abilities().freshness.why_older(), Some(WhyOlder::OutOfSync));
    }

    #[test]
    fn only_a_readable_label_of_a_mirror_says_it() {
        for bytes in [&b""[..], b"SBMIRROR", b"SBSTRIPE"] {
            assert!(!is_out_of_sync(bytes));
        }
    }
}
