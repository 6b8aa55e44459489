//! Replicas whose devices are smaller than their labels say: nothing of the device is used, and what its label says counts.

use futures_util::FutureExt;
use sealblock_block::{Freshness, Gate, Request, ReservedArea, Response, WhyOlder};
use sealblock_media_memory::MemoryDevice;

use super::*;
use crate::label::assemble::AssembleError;
use crate::mark_written_alone;

/// A device of another size with the label of this one, and with the content that it has room for.
fn resized(replica: &TestReplica, blocks: u64) -> TestReplica {
    let device = MemoryDevice::new(BlockSize::B4096, blocks, None);
    let resized =
        TestReplica { memory: Rc::new(Gate::new(replica.name, device)), ..TestReplica::new(replica.name, None) };
    resized.freshness.set(replica.freshness.get());
    resized.is_offline.set(replica.is_offline.get());
    let slot = ReservedArea::GroupLabel;
    let Ok(Response::Reserved(label)) = run(&*replica.memory, Request::read_reserved(slot)) else { panic!("no label") };
    run(&*resized.memory, Request::write_reserved(slot, label)).unwrap();
    let at = extent(0, blocks.min(BLOCKS));
    let Ok(Response::Data(data)) = run(&*replica.memory, Request::read(at, Expectations::NONE)) else {
        panic!("no data")
    };
    run(&*resized.memory, Request::write(at, data, Durability::Volatile)).unwrap();
    resized
}

fn cut(replica: &TestReplica) -> TestReplica {
    resized(replica, BLOCKS / 2)
}

/// What opening devices as a mirror makes of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Found {
    /// The content of this seed, and writes are taken; so many replicas are online.
    Content(u8, usize),
    /// The content of this seed, which may be older for this reason; nothing is written.
    MayBeOlder(u8, WhyOlder),
    Refused(&'static str),
}

const ONLY_UNFIT: Found = Found::Refused("only one that cannot be used is in sync");
const NONE_IN_SYNC: Found = Found::Refused("none is in sync");
const SPLIT_BRAIN: Found = Found::Refused("split brain");
const OTHER_MIRROR: Found = Found::Refused("another mirror");
const DUPLICATE: Found = Found::Refused("duplicate");
const REMOVED: Found = Found::Refused("removed");

fn refused(error: MirrorError) -> Found {
    match error {
        MirrorError::Assemble { error: AssembleError::OnlyUnfit { .. }, replicas } => {
            assert!(replicas[0].ends_with(": its device has 1024 blocks, and its label says 2048"), "{replicas:?}");
            ONLY_UNFIT
        }
        MirrorError::Assemble { error: AssembleError::NoneInSync, .. } => NONE_IN_SYNC,
        MirrorError::Assemble { error: AssembleError::SplitBrain { .. }, .. } => SPLIT_BRAIN,
        MirrorError::Assemble { error: AssembleError::OtherMirror { .. }, .. } => OTHER_MIRROR,
        MirrorError::Assemble { error: AssembleError::Duplicate { .. }, .. } => DUPLICATE,
        MirrorError::Assemble { error: AssembleError::Removed { .. }, .. } => REMOVED,
        other => panic!("{other}"),
    }
}

/// Opens images of devices.
fn found(replicas: &[&TestReplica], is_read_only: bool) -> Found {
    let same_size = |replica: &&TestReplica| resized(replica, replica.memory.geometry().capacity_blocks);
    let images: Vec<TestReplica> = replicas.iter().map(same_size).collect();
    let mirror = match try_open(&images.iter().collect::<Vec<_>>(), is_read_only) {
        Ok(mirror) => mirror,
        Err(error) => return refused(error),
    };
    let seed = read(&*mirror, extent(0, 1)).unwrap()[8];
    assert_reads(&*mirror, extent(0, 600), seed);
    if mirror.abilities().writable {
        write(&*mirror, extent(0, 1), seed).unwrap();
    }
    for image in images.iter().filter(|image| image.memory.geometry().capacity_blocks < BLOCKS) {
        assert_eq!((image.written_blocks.get(), image.label_writes.get()), (0, 0), "nothing is written to it");
    }
    let is_online = |replica: &&crate::ReplicaInfo| replica.is_online;
    match mirror.abilities().freshness {
        Freshness::Current => Found::Content(seed, mirror.describe().replicas.iter().filter(is_online).count()),
        Freshness::MayBeOlder(why) => Found::MayBeOlder(seed, why),
    }
}

/// A case in any order of the names and both ways to open.
fn assert_found(what: &str, replicas: &[&TestReplica], expected: Found) {
    for is_read_only in [true, false] {
        for first in 0..replicas.len() {
            let mut replicas = replicas.to_vec();
            replicas.rotate_left(first);
            assert_eq!(found(&replicas, is_read_only), expected, "{what}: {first} first, read only: {is_read_only}");
        }
    }
}

/// The content of a mirror is 2, and then 3, which `b` lacks at first.
#[test]
fn the_label_of_a_smaller_device_counts_and_its_device_does_not() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 600), 2).unwrap();
    close(&mirror);
    let (same_a, same_b) = (a.image(), b.image());
    let mirror = opened(&[&a, &b]);
    b.is_offline.set(true);
    write(&*mirror, extent(0, 600), 3).unwrap();
    close(&mirror);
    // `b` knows nothing of that: its label is older, and calls both in sync.
    let (ahead, behind) = (a.image(), b.image());
    b.is_offline.set(false);
    let apart = behind.image();
    let mirror = opened(&[&apart, &TestReplica { is_offline: Rc::new(Cell::new(true)), ..ahead.image() }]);
    write(&*mirror, extent(0, 600), 4).unwrap();
    close(&mirror);
    let mirror = opened(&[&a, &b]);
    mirror.start_resync(&mirror.named_replica("b").unwrap());
    mirror.write_labels().now_or_never().unwrap().unwrap();
    drop(mirror);
    let (beside, out_of_sync) = (a.image(), b.image());
    let alone = ahead.image();
    mark_written_alone(&alone.stack()).now_or_never().unwrap().unwrap();
    let other = TestReplica::new("c", None);
    let mirror = opened(&[&other, &TestReplica::new("d", None)]);
    write(&*mirror, extent(0, 600), 9).unwrap();
    close(&mirror);
    let away = TestReplica::new("b", None);
    away.is_offline.set(true);
    let lost = same_b.image();
    set_label(&lost, &[&b"SBMIRROR\x02\0"[..], &[0; 200]].concat());
    let (blank, log_lost) = (TestReplica::new("b", None), same_b.image());
    log_lost.freshness.set(Freshness::MayBeOlder(WhyOlder::LogLost));
    let cases = [
        ("both in sync, and fit", [&same_a, &same_b], Found::Content(2, 2)),
        ("both in sync, one larger", [&same_a, &resized(&same_b, BLOCKS + 64)], Found::Content(2, 2)),
        ("both in sync, one smaller", [&same_a, &cut(&same_b)], Found::Content(2, 1)),
        ("smaller, and known to be out of sync", [&ahead, &cut(&behind)], Found::Content(3, 1)),
        ("smaller, and out of sync by its own label", [&beside, &cut(&out_of_sync)], Found::Content(3, 1)),
        ("smaller, and the only one in sync by its label", [&behind, &cut(&ahead)], ONLY_UNFIT),
        ("smaller, and the only one in sync by both", [&out_of_sync, &cut(&beside)], ONLY_UNFIT),
        ("larger, and the only one in sync", [&behind, &resized(&ahead, BLOCKS + 64)], Found::Content(3, 2)),
        ("smaller, and written apart", [&ahead, &cut(&apart)], SPLIT_BRAIN),
        ("written by itself", [&behind, &alone], NONE_IN_SYNC),
        ("smaller, and written by itself", [&behind, &cut(&alone)], NONE_IN_SYNC),
        ("smaller, and another mirror's", [&same_a, &cut(&other)], OTHER_MIRROR),
        ("smaller, and the same replica's", [&same_a, &cut(&same_a)], DUPLICATE),
        ("smaller, beside one that is away", [&away, &cut(&same_a)], ONLY_UNFIT),
        ("smaller, beside one without a label", [&blank, &cut(&same_a)], ONLY_UNFIT),
        ("smaller, beside a lost label", [&lost, &cut(&same_a)], ONLY_UNFIT),
        ("both smaller", [&cut(&same_b), &cut(&same_a)], ONLY_UNFIT),
        ("smaller, beside one without its log", [&cut(&same_a), &log_lost], Found::MayBeOlder(2, WhyOlder::LogLost)),
    ];
    for (what, replicas, expected) in cases {
        assert_found(what, &replicas, expected);
    }
}

#[test]
fn of_three_the_label_of_a_smaller_device_decides_as_it_would_if_it_were_whole() {
    let replicas = ["a", "b", "c"].map(|name| TestReplica::new(name, None));
    let [a, b, c] = &replicas;
    let mirror = opened(&[a, b, c]);
    write(&*mirror, extent(0, 600), 1).unwrap();
    close(&mirror);
    let [old_a, old_b, old_c] = [a, b, c].map(TestReplica::image);
    assert_found("all in sync", &[&cut(&old_a), &old_b, &old_c], Found::Content(1, 2));
    let lost = old_c.image();
    set_label(&lost, &[&b"SBMIRROR\x02\0"[..], &[0; 200]].concat());
    let label_lost = Found::MayBeOlder(1, WhyOlder::LabelLost);
    assert_found("and one label is lost", &[&cut(&old_a), &old_b, &lost], label_lost);
    let mirror = opened(&[a, b, c]);
    c.is_offline.set(true);
    write(&*mirror, extent(0, 600), 2).unwrap();
    c.is_offline.set(false);
    let [mid_a, mid_b] = [a, b].map(TestReplica::image);
    assert_found("one is out of sync", &[&cut(&mid_a), &mid_b, &old_c], Found::Content(2, 2));
    assert_found("and its label is lost", &[&cut(&mid_a), &mid_b, &lost], Found::Content(2, 1));
    assert_found("the other one is cut, too", &[&cut(&mid_a), &cut(&mid_b), &old_c], ONLY_UNFIT);
    b.is_offline.set(true);
    write(&*mirror, extent(0, 600), 3).unwrap();
    b.is_offline.set(false);
    close(&mirror);
    assert_found("both others are out of sync", &[&cut(a), &mid_b, &old_c], ONLY_UNFIT);
    assert_found("both others are out of sync, and fit", &[a, &mid_b, &old_c], Found::Content(3, 3));
    // The label of the second tells what its device lacks; the label of the first is older and says nothing of it.
    assert_found("an older image is cut", &[&cut(&old_a), &mid_b, &old_c], Found::Content(2, 2));
    let mirror = opened(&[a, b, c]);
    resync(&mirror);
    mirror.remove("c").now_or_never().unwrap().unwrap();
    close(&mirror);
    assert_found("removed", &[a, b, &cut(c)], REMOVED);
}

#[test]
fn a_smaller_device_is_left_out_by_name() {
    let (a, b, mirror) = pair(None);
    close(&mirror);
    let cut = cut(&b);
    for order in [[&a, &cut], [&cut, &a]] {
        let info = try_open(&order, true).unwrap().describe();
        let left_out = info.replicas.iter().find(|replica| replica.name == "b").unwrap();
        assert!(info.state == crate::MirrorState::Degraded && !left_out.is_online, "{info:?}");
        assert_eq!(left_out.last_error, "its device has 1024 blocks, and its label says 2048");
    }
    // Its label tells which one it is, also where another one is away.
    let other = TestReplica::new("c", None);
    let mirror = opened(&[&a, &b]);
    mirror.add(other.source(), true).now_or_never().unwrap().unwrap();
    resync(&mirror);
    close(&mirror);
    b.is_offline.set(true);
    let cut = super::unfit::cut(&other);
    let mirror = opened(&[&a, &cut, &b]);
    let info = mirror.describe();
    let named: Vec<_> = info.replicas.iter().map(|replica| &*replica.name).collect();
    assert_eq!(named, ["a", "b", "c"]);
    mirror.remove("c").now_or_never().unwrap().unwrap();
}

#[test]
fn a_replica_that_has_its_size_again_gets_what_it_lacks() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 600), 1).unwrap();
    close(&mirror);
    for (seed, cut) in [(2, cut(&b)), (3, cut(&b))] {
        let mirror = opened(&[&a, &cut]);
        write(&*mirror, extent(16, 8), seed).unwrap();
        close(&mirror);
    }
    let mirror = opened(&[&b, &a]);
    assert_reads(&*mirror, extent(16, 8), 3);
    let lacks = mirror.describe().replicas.iter().map(|replica| replica.out_of_sync_bytes).max();
    assert!(lacks.is_some_and(|bytes| (1..BLOCKS << 12).contains(&bytes)), "not all of it: {lacks:?}");
    resync(&mirror);
    close(&mirror);
    assert_eq!(states(&opened(&[&a, &b])), [ReplicaState::InSync; 2]);
    assert_reads(&*b.memory, extent(16, 8), 3);
}

#[test]
fn a_smaller_device_is_not_reattached_and_its_changes_are_said() {
    let (a, b, mirror) = pair(None);
    write(&*mirror, extent(0, 600), 1).unwrap();
    close(&mirror);
    let (old_a, old_b) = (a.image(), b.image());
    b.is_offline.set(true);
    let mirror = opened(&[&a, &b]);
    write(&*mirror, extent(0, 600), 2).unwrap();
    close(&mirror);
    // `b` goes on alone with the label that knows nothing of that.
    let cut_old_a = cut(&old_a);
    old_a.is_offline.set(true);
    let mirror = opened(&[&old_a, &old_b]);
    let size = "its device has 1024 blocks, and its label says 2048";
    assert_eq!(reattach(&mirror, &cut_old_a).unwrap_err(), size);
    let refused = reattach(&mirror, &cut(&a)).unwrap_err();
    assert!(refused.starts_with(size) && refused.contains("has changes that this mirror lacks"), "{refused}");
    let blank = TestReplica::sized("a", None, BLOCKS / 2);
    assert_eq!(reattach(&mirror, &blank).unwrap_err(), "a has 1024 blocks, the mirror 2048");
    old_a.is_offline.set(false);
    reattach(&mirror, &old_a).unwrap();
}
