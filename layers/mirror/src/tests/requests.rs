//! Requests of all kinds, and mirrors of unlike replicas.

use futures_util::FutureExt;
use sealblock_block::{
    BadBlockCause, Device, Durability, ErrorKind, Expectations, Operation, Request, ReservedArea, Response,
};
use sealblock_integrity::{ChecksumKind, GuardKind, PiFormat, ProtectionType};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Lba};

use super::*;
use crate::MirrorError;

#[test]
fn every_change_is_on_every_replica() {
    for format in [Some(TYPE1), None] {
        let (a, b, mirror) = pair(format);
        write(&mirror, extent(0, 600), 1).unwrap();
        let durability = Durability::ForceUnitAccess;
        run(&mirror, Request::write_zeroes(extent(3, 5), false, durability)).unwrap();
        run(&mirror, Request::discard([extent(100, 2), extent(400, 1)])).unwrap();
        run(&mirror, Request::write_uncorrectable(extent(50, 1), durability)).unwrap();
        run(&mirror, Request::flush()).unwrap();
        for device in [&*a.memory, &*b.memory] {
            assert_reads(device, extent(8, 42), 1);
            for zero in [extent(3, 5), extent(100, 2), extent(400, 1)] {
                assert!(read(device, zero).unwrap().iter().all(|byte| *byte == 0));
            }
            assert!(read(device, extent(50, 1)).is_err());
        }
        assert!(read(&mirror, extent(50, 1)).is_err(), "unreadable on purpose, and not to be repaired");
    }
}

#[test]
fn compares_and_checksums_cover_all_replicas() {
    let (_, b, mirror) = pair(Some(TYPE1));
    let at = extent(0, 64);
    write(&mirror, at, 1).unwrap();
    let Operation::Write(data) = write_of(&mirror, at, 1).operation else { unreachable!("a write") };
    let compare = || run(&mirror, Request::compare(at, data.clone().into_sealed()));
    assert!(matches!(compare(), Ok(Response::Done)));
    let checksum = |kind| run(&mirror, Request::checksum(at, kind, Expectations::NONE));
    for kind in ChecksumKind::ALL {
        let Ok(Response::Checksum(found)) = checksum(kind) else { panic!("a checksum") };
        assert_eq!((found.kind, found.value), (kind, kind.compute(&content(at, 1))));
    }
    write(&*b.memory, extent(9, 2), 2).unwrap();
    assert_eq!(compare().unwrap_err().into_kind(), ErrorKind::Miscompare { lba: Lba::new(9) });
    for kind in ChecksumKind::ALL {
        assert_eq!(checksum(kind).unwrap_err().bad_blocks().unwrap().as_slice().len(), 2);
    }
}

/// There is nothing to compare with then, but the client asked for the checksum of the data all the same.
#[test]
fn a_mirror_with_one_replica_left_returns_the_checksum_of_its_data() {
    let (_, b, mirror) = pair(Some(TYPE1));
    let at = extent(0, 64);
    b.is_offline.set(true);
    write(&mirror, at, 1).unwrap();
    for kind in ChecksumKind::ALL {
        let found = run(&mirror, Request::checksum(at, kind, Expectations::NONE));
        let Ok(Response::Checksum(found)) = found else { panic!("{found:?}") };
        assert_eq!((found.kind, found.value), (kind, kind.compute(&content(at, 1))));
    }
}

#[test]
fn replicas_of_unlike_protection_are_refused_with_both_formats() {
    let crc16 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    let (a, b) = (TestReplica::new("a", Some(TYPE1)), TestReplica::new("b", Some(crc16)));
    let refused = try_open(&[&a, &b], false).unwrap_err().to_string();
    assert!(refused.contains("crc16 Type 1") && refused.contains("crc64 Type 1"), "{refused}");
    let refused = try_open(&[&a, &TestReplica::new("c", None)], false).unwrap_err().to_string();
    assert!(refused.contains("c has no protection information, the mirror has protection"), "{refused}");
    let mirror = opened(&[&a, &TestReplica::new("d", Some(TYPE1))]);
    let added = mirror.add(b.source(), true).now_or_never().unwrap();
    assert!(matches!(added, Err(crate::ReplicaError::Unfit(MirrorError::Protection { .. }))), "{added:?}");
}

#[test]
fn a_replica_that_is_shown_without_its_tags_the_next_time_is_refused() {
    let (a, mut b, mirror) = pair(Some(TYPE1));
    write(&mirror, extent(5, 30), 1).unwrap();
    mirror.close().now_or_never().unwrap().unwrap();
    b.hides_pi = true;
    // Its data would be sealed without a check against its own tags.
    assert!(matches!(try_open(&[&a, &b], false), Err(MirrorError::Protection { .. })));
    b.hides_pi = false;
    let mirror = opened(&[&a, &b]);
    assert_eq!(mirror.geometry().protection, Some(TYPE1));
    verify(&mirror).unwrap();
}

#[test]
fn replicas_must_fit() {
    let (a, b) = (TestReplica::new("a", None), TestReplica::new("b", None));
    assert!(matches!(try_open(&[&a], false), Err(MirrorError::ReplicaCount(1))));
    let mut small = TestReplica::new("s", None);
    small.memory = std::rc::Rc::new(sealblock_block::Gate::new(
        "s",
        sealblock_media_memory::MemoryDevice::new(BlockSize::B512, BLOCKS, None),
    ));
    assert!(matches!(try_open(&[&a, &small], false), Err(MirrorError::BlockSize { .. })));
    assert!(try_open(&[&a, &b], false).is_ok());
}

#[test]
fn what_is_left_without_a_label_is_called_so() {
    let (a, mut bare) = (TestReplica::new("a", None), TestReplica::new("bare", None));
    bare.has_no_label_room = true;
    let mirror = opened(&[&a, &bare]);
    assert_eq!(mirror.state(), crate::MirrorState::Optimal);
    mirror.remove("a").now_or_never().unwrap().unwrap();
    assert_eq!((mirror.state(), mirror.describe().uuid), (crate::MirrorState::Unlabelled, None));
    let (_a, _b, twin) = pair(None);
    twin.remove("a").now_or_never().unwrap().unwrap();
    assert_eq!(twin.state(), crate::MirrorState::Optimal, "the other one has a label");
}

#[test]
fn the_scrubs_slot_is_on_every_replica_and_the_label_out_of_reach() {
    let (a, b, mirror) = pair(None);
    let note = |slot| run(&mirror, Request::write_reserved(slot, Slice::copy_from(b"here")));
    note(ReservedArea::ScrubState).unwrap();
    for device in [&*a.memory, &*b.memory] {
        let held = run(device, Request::read_reserved(ReservedArea::ScrubState));
        assert!(matches!(held, Ok(Response::Reserved(bytes)) if bytes[..] == *b"here"));
    }
    assert!(matches!(run(&mirror, Request::read_reserved(ReservedArea::ScrubState)), Ok(Response::Reserved(_))));
    assert!(matches!(note(ReservedArea::GroupLabel).unwrap_err().into_kind(), ErrorKind::Absent(_)));
}

#[test]
fn overlapping_writes_reach_all_replicas_in_one_order() {
    let (a, b, mirror) = pair(None);
    write(&mirror, extent(0, 4), 0).unwrap();
    b.is_hung.set(true);
    let mut first = Box::pin(mirror.execute(write_of(&mirror, extent(0, 4), 1)));
    assert!(first.as_mut().now_or_never().is_none());
    b.is_hung.set(false);
    let mut second = Box::pin(mirror.execute(write_of(&mirror, extent(3, 4), 2)));
    assert!(second.as_mut().now_or_never().is_none(), "it waits for the first");
    // No reader sees content of one replica while the other one may still fail to get it.
    let at = extent(0, 3);
    let mut reader = Box::pin(mirror.execute(Request::read(at, Expectations::NONE)));
    assert!(reader.as_mut().now_or_never().is_none());
    drop((first, second, reader));
    assert!(mirror.describe().dirty_bytes > 0);
    assert_reads(&mirror, extent(0, 4), 1);
    for device in [&*a.memory, &*b.memory] {
        assert_reads(device, extent(0, 4), 1);
    }
}

#[test]
fn bad_blocks_where_a_crash_left_replicas_different_are_not_read_from_another_replica() {
    let (a, b, mirror) = pair(Some(TYPE1));
    for at in [extent(0, 4), extent(600, 4)] {
        write(&mirror, at, 1).unwrap();
    }
    close(&mirror);
    drop(mirror);
    let mirror = opened(&[&a, &b]);
    write(&mirror, extent(8, 4), 3).unwrap();
    b.is_hung.set(true);
    assert!(mirror.execute(write_of(&mirror, extent(0, 4), 2)).now_or_never().is_none(), "only one replica gets it");
    drop(mirror);
    b.is_hung.set(false);
    let reader = try_open(&[&a, &b], true).unwrap();
    assert_reads(&reader, extent(0, 4), 2);
    for lba in [1, 601] {
        assert!(a.memory.device().damage(Lba::new(lba), sealblock_media_memory::Corruption::Tag { at: 1, mask: 1 }));
    }
    let error = read(&reader, extent(0, 4)).unwrap_err();
    let bad_blocks: Vec<_> =
        error.bad_blocks().unwrap().as_slice().iter().map(|bad| (bad.lba.get(), bad.cause)).collect();
    assert_eq!(bad_blocks, [(1, BadBlockCause::Unsettled)]);
    assert_reads(&reader, extent(2, 2), 2);
    assert_reads(&reader, extent(600, 4), 1);
    drop(reader);
    // A mirror that may reconcile decides it for all readers.
    let mirror = opened(&[&a, &b]);
    let settled = read(&mirror, extent(1, 1)).unwrap();
    assert!(settled == content(extent(1, 1), 1));
    assert_reads(&*a.memory, extent(1, 1), 1);
}

#[test]
fn mirrors_nest() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, Some(TYPE1)));
    let inner = opened(&[&replicas[0], &replicas[1]]);
    let stack = || sealblock_block::DynDevice::new("ab", inner.clone());
    let sources = vec![crate::ReplicaSource::new("ab", Ok(stack()), None), replicas[2].source()];
    let options = crate::OpenOptions { is_read_only: false, accepts_lost_label: false, random: random() };
    let outer = crate::open(sources, StoppedClock, options).now_or_never().unwrap().unwrap().mirror;
    write(&outer, extent(0, 10), 1).unwrap();
    let at = extent(0, BLOCKS);
    // Whichever copy the inner mirror reads next.
    for damaged in [1, 0, 0, 1] {
        let memory = replicas[damaged].memory.device();
        assert!(memory.damage(Lba::new(4), sealblock_media_memory::Corruption::Tag { at: 1, mask: 1 }));
        let error = run(&outer, Request::repair(at)).unwrap_err();
        let bad = error.bad_blocks().unwrap().as_slice()[0];
        let (outermost, within) = bad.member.outermost().unwrap();
        assert_eq!((outermost, within.outermost().unwrap().0, bad.repaired), (0, damaged, true));
        verify(&outer).unwrap();
    }
    assert!(matches!(run(&outer, Request::verify(at, Expectations::NONE)), Ok(Response::Verified(_))));
}
