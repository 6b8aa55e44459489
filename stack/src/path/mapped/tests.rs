//! Devices that are made of simulated drives.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::prelude::*;
use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Coverage, Device, DynDevice, ErrorKind, Expectations, Geometry, Limits,
    Operation, Outcome, Request, RequestKind, Response, VerifyStats, WhyUnchecked,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::{BlockSize, Extent, Lba};

use super::device::MappedDevice;
use super::plan::Plan;
use crate::kernel::DeviceNumber;
use crate::kernel::below::{Arrangement, DeviceNode, Map, NodeKind, On, Sectors, Segment};

const PI: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);

fn number(minor: u32) -> DeviceNumber {
    DeviceNumber { major: 8, minor }
}

fn node(minor: u32, kind: NodeKind, sectors: u64, members: Vec<DeviceNode>, segments: Vec<Segment>) -> DeviceNode {
    let map = (!segments.is_empty()).then(|| Map::new(segments, members.len()).unwrap());
    let name = format!("sd{minor}");
    DeviceNode { number: number(minor), name, kind, sectors, id: None, members, map, unknown: None }
}

fn disk(minor: u32) -> DeviceNode {
    node(minor, NodeKind::Disk, 1 << 20, Vec::new(), Vec::new())
}

fn segment(start: u64, count: u64, how: Arrangement) -> Segment {
    Segment { sectors: Sectors { start, count }, how }
}

fn on(member: usize, sector: u64) -> On {
    On { member, sector }
}

/// What a drive was asked.
type Asked = Rc<RefCell<Vec<Extent>>>;

/// A drive of which some blocks are bad, and which remembers what it was asked.
struct Drive {
    geometry: Geometry,
    bad: BTreeSet<u64>,
    asked: Asked,
    is_gone: bool,
}

impl Device for Drive {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities { offloads: true, ..Abilities::BASIC }.with([RequestKind::Verify], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let Operation::Verify(_) = request.operation else { panic!("a drive gets nothing but Verify") };
        let extent = request.extents.one();
        self.asked.borrow_mut().push(extent);
        if self.is_gone {
            return Err(ErrorKind::Unreachable { reason: "it is gone".to_owned() }.into());
        }
        let bad = extent.iter().filter(|lba| self.bad.contains(&lba.get())).map(BadBlock::media);
        match BadBlocks::new(bad.collect()) {
            Some(bad) => Err(bad.with_coverage(Coverage::of(true)).into()),
            None => Ok(Response::Verified(VerifyStats::default())),
        }
    }
}

/// A device whose ordinary way reads nothing, with its drives.
struct Made {
    device: DynDevice,
    asked: Vec<Asked>,
    /// What the kernel tells from now on.
    now: Rc<RefCell<DeviceNode>>,
}

fn geometry(block_size: BlockSize, capacity_blocks: u64, protection: Option<PiFormat>) -> Geometry {
    Geometry { block_size, capacity_blocks, protection, limits: Limits::new(block_size, 1 << 20, u32::MAX) }
}

fn made(top: DeviceNode, size: BlockSize, bad: &[&[u64]], gone: Option<usize>) -> Made {
    let plan = Plan::new(top.clone(), size.bytes() as u64).unwrap();
    let mut asked = Vec::new();
    let drives = plan.drives().iter().enumerate().map(|(drive, _)| {
        let record = Rc::new(RefCell::new(Vec::new()));
        asked.push(Rc::clone(&record));
        let geometry = geometry(size, (1 << 20) / (size.bytes() as u64 / 512), Some(PI));
        let bad = bad.get(drive).map_or(BTreeSet::new(), |bad| bad.iter().copied().collect());
        DynDevice::new(format!("drive {drive}"), Drive { geometry, bad, asked: record, is_gone: gone == Some(drive) })
    });
    let drives = drives.collect();
    let blocks = top.sectors / (size.bytes() as u64 / 512);
    let ordinary = sealblock_media_memory::MemoryDevice::new(size, blocks, None);
    let now = Rc::new(RefCell::new(top));
    let told = Rc::clone(&now);
    let device = MappedDevice::new(ordinary, plan, drives, Box::new(move || Ok(told.borrow().clone())));
    Made { device: DynDevice::new("made", device), asked, now }
}

fn verify(device: &DynDevice, first: u64, blocks: u64) -> Outcome {
    let extent = Extent::from_raw(first, blocks).unwrap();
    futures_util::FutureExt::now_or_never(device.execute(Request::verify(extent, Expectations::NONE)))
        .expect("nothing waits")
}

fn found(outcome: Outcome) -> (Vec<(u64, usize)>, Coverage) {
    let (bad, coverage) = outcome.map_or_else(
        |error| error.into_damage().unwrap(),
        |response| match response {
            Response::Verified(stats) => (Vec::new(), stats.coverage),
            other => panic!("{other:?}"),
        },
    );
    (bad.iter().map(|bad| (bad.lba.get(), bad.member.outermost().unwrap().0)).collect(), coverage)
}

#[test]
fn bad_blocks_of_drives_are_told_with_addresses_of_the_device_and_the_drive() {
    // A striped table over a partition and a whole drive.
    let part =
        node(1, NodeKind::Partition, 4000, vec![disk(0)], vec![segment(0, 4000, Arrangement::Linear(on(0, 2048)))]);
    let striped = Arrangement::Striped { chunk: 16, members: vec![on(0, 0), on(1, 800)] };
    let top = node(9, NodeKind::DeviceMapper, 640, vec![part, disk(2)], vec![segment(0, 640, striped)]);
    let made = made(top, BlockSize::B4096, &[&[256, 258, 297, 4000], &[100, 139, 140]], None);
    // Chunk 1 of the stripe is blocks 2 and 3, on the second drive from block 100 on.
    assert_eq!(found(verify(&made.device, 0, 80)).0, [(0, 0), (2, 1), (4, 0), (79, 1)]);
    assert_eq!(found(verify(&made.device, 3, 1)).0, []);
    assert_eq!(found(verify(&made.device, 79, 1)).0, [(79, 1)]);
    // Chunks that follow each other on a drive are one request.
    let first = made.asked[0].borrow()[0];
    assert_eq!(first, Extent::from_raw(256, 40).unwrap());
    assert!(made.device.abilities().offloads && made.device.geometry().protection.is_none());
}

#[test]
fn every_copy_in_sync_is_verified_and_others_are_told() {
    let array = |absent, ons: &[On]| {
        let segments = vec![segment(0, 800, Arrangement::Copies(ons.to_vec()))];
        let kind = NodeKind::Md { level: "raid1".to_owned(), absent };
        node(9, kind, 800, vec![disk(0), disk(1)], segments)
    };
    let both = made(array(0, &[on(0, 8), on(1, 16)]), BlockSize::B4096, &[&[11], &[2, 12]], None);
    let (bad, coverage) = found(verify(&both.device, 0, 100));
    assert_eq!((bad, coverage.is_complete()), (vec![(0, 1), (10, 0), (10, 1)], true));
    let one = made(array(0, &[on(1, 16)]), BlockSize::B4096, &[&[12]], None);
    assert_eq!(one.asked.len(), 1, "what is not in sync is not asked");
    let (bad, coverage) = found(verify(&one.device, 0, 100));
    assert_eq!(bad, [(10, 0)]);
    assert_eq!(coverage.unchecked()[0].why, WhyUnchecked::OutOfSync);
    let absent = made(array(1, &[on(0, 8), on(1, 16)]), BlockSize::B4096, &[], None);
    let (_, coverage) = found(verify(&absent.device, 5, 10));
    let run = coverage.unchecked()[0];
    assert_eq!((run.first.get(), run.last.get(), run.why), (5, 14, WhyUnchecked::Absent));
}

#[test]
fn nothing_is_said_of_a_device_that_lies_elsewhere_by_now_or_whose_drive_is_gone() {
    let part = |start| {
        node(1, NodeKind::Partition, 800, vec![disk(0)], vec![segment(0, 800, Arrangement::Linear(on(0, start)))])
    };
    let moved = made(part(8), BlockSize::B512, &[], None);
    assert!(verify(&moved.device, 0, 8).is_ok());
    *moved.now.borrow_mut() = part(16);
    let error = verify(&moved.device, 0, 8).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Unreachable { .. })
            && error.to_string().contains("mapping to drives changed"),
        "{error}"
    );
    *moved.now.borrow_mut() = part(8);
    assert!(verify(&moved.device, 0, 8).is_ok());
    let gone = made(part(8), BlockSize::B512, &[], Some(0));
    assert!(matches!(verify(&gone.device, 0, 8).unwrap_err().kind(), ErrorKind::Unreachable { .. }));
    // Bad blocks elsewhere do not hide it.
    let both = Arrangement::Copies(vec![on(0, 0), on(1, 0)]);
    let array = node(9, NodeKind::DeviceMapper, 80, vec![disk(0), disk(1)], vec![segment(0, 80, both)]);
    let gone = made(array, BlockSize::B512, &[&[3], &[]], Some(1));
    assert!(matches!(verify(&gone.device, 0, 8).unwrap_err().kind(), ErrorKind::Unreachable { .. }));
}

#[test]
fn a_device_whose_blocks_are_no_blocks_of_drives_is_read_and_why_is_told() {
    let refused = |node: DeviceNode, block_bytes| Plan::new(node, block_bytes).unwrap_err();
    let linear = |sector, count| vec![segment(0, count, Arrangement::Linear(on(0, sector)))];
    let part = |sector, count| node(1, NodeKind::Partition, 800, vec![disk(0)], linear(sector, count));
    assert!(Plan::new(part(8, 800), 4096).is_ok() && Plan::new(part(9, 800), 512).is_ok());
    let last = |first| Plan::new(part(8, 800), 4096).unwrap().spans(Extent::from_raw(first, 1).unwrap());
    assert!(last(99).is_ok_and(|(spans, _)| spans.len() == 1), "the last block");
    assert!(last(100).unwrap_err().to_string().contains("are on no drive"), "and none behind it");
    assert!(refused(part(9, 800), 4096).contains("are not aligned to"));
    assert!(refused(part(8, 792), 4096).contains("shorter"));
    let kind = NodeKind::Loop { file: "/srv/image".into(), offset_bytes: 0 };
    assert!(refused(node(1, kind, 800, vec![disk(0)], linear(0, 800)), 512).contains("loop"));
    let unknown = DeviceNode {
        unknown: Some("it is a crypt".to_owned()),
        ..node(1, NodeKind::DeviceMapper, 8, vec![disk(0)], Vec::new())
    };
    assert!(refused(unknown, 512).contains("it is a crypt"));
    let nowhere = vec![segment(0, 800, Arrangement::Nowhere)];
    assert!(refused(node(1, NodeKind::DeviceMapper, 800, vec![disk(0)], nowhere), 512).contains("on no drive"));
    let members: Vec<DeviceNode> = (0..65).map(disk).collect();
    let copies = vec![segment(0, 800, Arrangement::Copies((0..65).map(|member| on(member, 0)).collect()))];
    assert!(refused(node(99, NodeKind::DeviceMapper, 800, members, copies), 512).contains("65 drives"));
    let chunk = vec![segment(0, 800, Arrangement::Striped { chunk: 10, members: vec![on(0, 0)] })];
    assert!(refused(node(1, NodeKind::DeviceMapper, 800, vec![disk(0)], chunk), 4096).contains("are not aligned to"));
}

/// An arrangement of whole blocks of 4096 bytes over three members, and how many sectors it has.
fn arrangement() -> impl Strategy<Value = (u64, Arrangement)> {
    let on = || (0_usize..3, 0_u64..40).prop_map(|(member, block)| on(member, block * 8));
    prop_oneof![
        (1_u64..40, on()).prop_map(|(blocks, on)| (blocks * 8, Arrangement::Linear(on))),
        (1_u64..20, prop::collection::vec(on(), 1..4)).prop_map(|(blocks, ons)| (blocks * 8, Arrangement::Copies(ons))),
        (1_u64..4, 1_u64..6, prop::collection::vec(on(), 1..4)).prop_map(|(chunk, rows, members)| {
            (chunk * 8 * rows * members.len() as u64, Arrangement::Striped { chunk: chunk * 8, members })
        }),
    ]
}

proptest! {
    #[test]
    fn every_block_goes_down_to_where_it_lies_and_comes_up_at_its_address(
        parts in prop::collection::vec(arrangement(), 1..5),
        first in 0_u64..60,
        blocks in 1_u64..60,
    ) {
        let (mut start, mut segments) = (0, Vec::new());
        for (count, how) in parts {
            segments.push(segment(start, count, how));
            start += count;
        }
        let part = |minor, below, from| {
            node(minor, NodeKind::Partition, 4000, vec![disk(below)], vec![segment(0, 4000, Arrangement::Linear(on(0, from)))])
        };
        // Two members on one drive.
        let members = vec![part(10, 0, 0), part(11, 0, 4000), disk(2)];
        let top = node(9, NodeKind::DeviceMapper, start, members, segments);
        let (first, blocks) = (first % (start / 8), blocks.min(start / 8 - first % (start / 8)));
        let plan = Plan::new(top.clone(), 4096).unwrap();
        let (spans, _) = plan.spans(Extent::from_raw(first, blocks).unwrap()).unwrap();
        let mut seen = BTreeSet::new();
        for span in &spans {
            for lba in span.extent.iter() {
                let up = span.up(lba).unwrap().get();
                prop_assert!((first..first + blocks).contains(&up));
                seen.insert(up);
                // The map of below tells the same, from the drive upwards.
                let there = top.up_from(plan.drives()[span.drive], Sectors { start: lba.get() * 8, count: 8 }, 1000);
                prop_assert!(there.iter().any(|sectors| sectors.start / 8 == up), "{up} of {lba}: {there:?}");
            }
            prop_assert_eq!(span.up(Lba::new(span.extent.last().get() + 1)), None);
        }
        prop_assert_eq!(seen.len() as u64, blocks);
        let copies: u64 = spans.iter().map(|span| span.extent.len()).sum();
        let wanted = (first..first + blocks).map(|lba| copies_of(&top, lba)).sum::<u64>();
        prop_assert_eq!(copies, wanted);
    }
}

fn copies_of(top: &DeviceNode, lba: u64) -> u64 {
    top.map.as_ref().unwrap().down(Sectors { start: lba * 8, count: 8 }).count() as u64
}
