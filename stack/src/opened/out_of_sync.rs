//! Replicas that are opened alone although their own label marks them as out of sync: the other replicas of the mirror have newer
//! blocks, which no seal shows. So readers are told that the content may be older than what was written.
//!
//! The mirror itself goes by the labels of all its replicas, and so does another host's mirror: their members are not marked. Nor is
//! a member that is open for writing by itself, since marked ones are not written.

use futures_util::future::LocalBoxFuture;
use sealblock_block::{
    Abilities, Device, Freshness, Geometry, Outcome, Request, RequestKind, Response, Unchecked, WhyOlder,
};

use crate::opened::OpenTarget;
use crate::opened::own_label::{read_label, stripe_label, why_older_by};

/// The same target, which says that it may be older than what was written if its label does, or if it had one that is lost.
pub(crate) fn mark(opened: OpenTarget) -> LocalBoxFuture<'static, OpenTarget> {
    Box::pin(mark_opened(opened))
}

async fn mark_opened(mut opened: OpenTarget) -> OpenTarget {
    let Some(label) = read_label(&opened.device).await else { return opened };
    opened.info.stripe_label = label.as_ref().ok().and_then(|label| stripe_label(label));
    if !opened.device.abilities().freshness.is_current() {
        return opened;
    }
    let Some(why) = why_older_by(&label) else { return opened };
    let OpenTarget { device, info, held, target, is_part } = opened;
    OpenTarget { is_part, ..OpenTarget::new(&target, OutOfSync(device, why), info, held) }
}

/// Notes the label of a stripe on a device, if it has one: layers above may hide it.
pub(crate) async fn note_stripe_label(opened: &mut OpenTarget) {
    if let Some(Ok(label)) = read_label(&opened.device).await {
        opened.info.stripe_label = stripe_label(&label);
    }
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

    fn executes_in_place(&self) -> bool {
        self.0.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if request.kind() == RequestKind::Read { self.0.try_execute(request) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use sealblock_block::{DynDevice, Expectations};
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
}
