//! Lists that are kept over an opening, and what is not taken for one.

use sealblock_block::{BadBlockCause, DamageRun, Durability, Expectations};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::{Config, Reactor, yield_now};
use sealblock_units::{BlockSize, Extent, Lba};

use super::*;

const LEAF: [u8; 16] = [8; 16];

fn on_reactor(test: impl AsyncFnOnce(Rc<MemoryDevice>)) {
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
    reactor.block_on(test(Rc::new(MemoryDevice::new(BlockSize::B512, 1000, None))));
}

async fn open(device: &Rc<MemoryDevice>, leaf: [u8; 16]) -> Rc<Recorded<Rc<MemoryDevice>>> {
    Recorded::kept(Rc::clone(device), "v", leaf, &|| false).await
}

fn listed<D: Device + 'static>(recorded: &Recorded<D>) -> Vec<(u64, u64)> {
    recorded.record().runs().iter().map(|run| (run.first, run.last)).collect()
}

/// Makes blocks unreadable, as a host does.
async fn make_bad(device: &impl Device, first: u64, blocks: u64) {
    let extent = Extent::from_raw(first, blocks).unwrap();
    device.execute(Request::write_uncorrectable(extent, Durability::Volatile)).await.unwrap();
}

async fn area(device: &MemoryDevice) -> Slice {
    match device.execute(Request::read_reserved(ReservedArea::ScrubState)).await.unwrap() {
        Response::Reserved(bytes) => bytes,
        _ => unreachable!(),
    }
}

async fn set_area(device: &MemoryDevice, bytes: &[u8]) {
    device.execute(Request::write_reserved(ReservedArea::ScrubState, Slice::copy_from(bytes))).await.unwrap();
}

#[test]
fn what_is_bad_is_known_after_a_restart_until_this_device_says_otherwise() {
    on_reactor(async |device| {
        let first = open(&device, LEAF).await;
        make_bad(&first, 5, 2).await;
        first.save().await;
        drop(first);
        let second = open(&device, LEAF).await;
        assert_eq!(listed(&second), [(5, 6)]);
        let read = Request::read(Extent::one(Lba::new(5)), Expectations::NONE);
        second.execute(read).await.unwrap_err();
        let write = Request::write_zeroes(Extent::one(Lba::new(5)), true, Durability::Volatile);
        second.execute(write).await.unwrap();
        second.save().await;
        drop(second);
        assert_eq!(listed(&*open(&device, LEAF).await), [(6, 6)]);
        assert_eq!(listed(&*open(&device, [9; 16]).await), [], "another volume's list is not taken");
    });
}

#[test]
fn a_change_is_saved_without_a_request_for_it() {
    on_reactor(async |device| {
        let recorded = open(&device, LEAF).await;
        make_bad(&recorded, 5, 1).await;
        while area(&device).await.is_empty() {
            yield_now().await;
        }
        assert_eq!(SavedState::decode(&area(&device).await).unwrap().damage.len(), 1);
        // Nothing changes, nothing is written; and the task ends with the device.
        let state = Rc::downgrade(&recorded);
        recorded.save().await;
        drop(recorded);
        assert!(state.upgrade().is_none());
    });
}

#[test]
fn the_state_of_a_scrub_and_the_list_are_one_record_and_neither_loses_the_other() {
    on_reactor(async |device| {
        let recorded = open(&device, LEAF).await;
        make_bad(&recorded, 5, 1).await;
        let scrub = SavedState { capacity_blocks: 77, device: [3; 16], writes: 4, ..SavedState::default() };
        set_area_through(&recorded, &scrub).await;
        let saved = SavedState::decode(&area(&device).await).unwrap();
        let damage = vec![DamageRun { is_made: true, ..DamageRun::exact(5, 5, BadBlockCause::Media) }];
        assert_eq!(saved, SavedState { leaf: LEAF, damage, ..scrub.clone() });
        make_bad(&recorded, 9, 1).await;
        recorded.save().await;
        let saved = SavedState::decode(&area(&device).await).unwrap();
        assert_eq!((saved.damage.len(), saved.writes, saved.device), (2, 4, [3; 16]));
        drop(recorded);
        // A state of before there were lists is read, and gets one.
        let old = SavedState { leaf: [0; 16], damage: Vec::new(), ..scrub };
        set_area(&device, &old.encode()).await;
        let recorded = open(&device, LEAF).await;
        assert!(listed(&recorded).is_empty() && recorded.is_kept());
    });
}

async fn set_area_through(recorded: &Recorded<Rc<MemoryDevice>>, state: &SavedState) {
    let bytes = Slice::copy_from(&state.encode());
    recorded.execute(Request::write_reserved(ReservedArea::ScrubState, bytes)).await.unwrap();
}

#[test]
fn a_list_that_is_lost_is_saved_as_lost_until_every_block_was_checked() {
    on_reactor(async |device| {
        let lost = Recorded::kept(Rc::clone(&device), "v", LEAF, &|| true).await;
        assert_eq!((lost.record().forgotten_from(), lost.is_kept()), (Some(0), true));
        lost.save().await;
        drop(lost);
        assert_eq!(SavedState::decode(&area(&device).await).unwrap().forgotten_from, Some(0));
        let second = open(&device, LEAF).await;
        let check = |first, blocks| Request::verify(Extent::from_raw(first, blocks).unwrap(), Expectations::NONE);
        second.execute(check(0, 600)).await.unwrap();
        // A scrub saves how far it has come.
        set_area_through(&second, &SavedState { capacity_blocks: 1000, ..SavedState::default() }).await;
        drop(second);
        let third = open(&device, LEAF).await;
        assert_eq!(third.record().forgotten_from(), Some(600));
        third.execute(check(600, 400)).await.unwrap();
        third.save().await;
        drop(third);
        let saved = SavedState::decode(&area(&device).await).unwrap();
        assert_eq!((saved.forgotten_from, open(&device, LEAF).await.record().forgotten_from()), (None, None));
        // Twin: an area in which there never was anything.
        set_area(&device, &[]).await;
        let fresh = open(&device, LEAF).await;
        fresh.save().await;
        assert!(fresh.record().forgotten_from().is_none() && area(&device).await.is_empty());
    });
}

#[test]
fn what_a_later_version_wrote_is_left_as_it_is_and_what_is_damaged_begins_anew() {
    on_reactor(async |device| {
        let mut later = SavedState::default().encode();
        later[8] = 9;
        let checksum = sealblock_integrity::guard::crc32c(&later[8..]);
        later[4..8].copy_from_slice(&checksum.to_le_bytes());
        set_area(&device, &later).await;
        let recorded = open(&device, LEAF).await;
        make_bad(&recorded, 5, 1).await;
        recorded.save().await;
        assert!(!recorded.is_kept() && area(&device).await[..] == later[..]);
        assert_eq!(listed(&recorded), [(5, 5)], "it is known in memory");
        drop(recorded);
        later[20] ^= 1;
        set_area(&device, &later).await;
        let recorded = open(&device, LEAF).await;
        make_bad(&recorded, 5, 1).await;
        recorded.save().await;
        assert!(recorded.is_kept());
        let saved = SavedState::decode(&area(&device).await).unwrap();
        assert_eq!((saved.damage.len(), saved.forgotten_from), (1, Some(0)), "what the damaged list had is lost");
    });
}

#[test]
fn what_a_name_opens_executes_in_place_and_on_every_core_if_its_device_does() {
    on_reactor(async |_| {
        let devices = [
            ("null:1MiB", true),
            ("mem:1MiB", true),
            ("stripe-nolabel:mem:1MiB,null:1MiB", true),
            ("stripe-nolabel:mem:1MiB,[fault:[delay=1ms],mem:1MiB]", false),
        ];
        for (name, is_everywhere) in devices {
            let opened = crate::open::open(&name.parse().unwrap(), crate::Access::Read).await.unwrap();
            assert!(opened.device.executes_in_place(), "{name}");
            let read = Request::read(Extent::one(Lba::new(5)), Expectations::NONE);
            assert!(opened.device.try_execute(&read).is_some(), "{name}");
            assert_eq!(opened.device.source().is_some(), is_everywhere, "{name}");
            let Some(source) = opened.device.source() else { continue };
            let elsewhere = source.open_here().unwrap();
            let (of_home, of_other) = (opened.device.geometry(), elsewhere.geometry());
            assert_eq!((of_other, elsewhere.name()), (of_home, opened.device.name()));
            assert!(elsewhere.try_execute(&read).is_some());
        }
    });
}

#[test]
fn a_group_on_another_core_has_the_same_blocks() {
    const GROUPS: [&str; 2] = ["stripe-4KiB-nolabel:mem:1MiB,mem:1MiB,mem:1MiB", "mirror:mem:1MiB,mem:1MiB"];
    for group in GROUPS {
        a_group_has_the_same_blocks_elsewhere(group);
    }
}

fn a_group_has_the_same_blocks_elsewhere(group: &str) {
    on_reactor(async |_| {
        let opened = crate::open::open(&group.parse().unwrap(), crate::Access::Write).await.unwrap();
        let elsewhere = opened.device.source().unwrap().open_here().unwrap();
        let (size, extent) = (opened.device.geometry().block_size, Extent::from_raw(3, 100).unwrap());
        let bytes: Vec<u8> = (0..extent.bytes(size)).map(|at| (at / 512) as u8 ^ (at as u8)).collect();
        let data = Slice::copy_from(&bytes);
        opened
            .device
            .execute(Request::write(
                extent,
                sealblock_integrity::Unsealed::new(data, size, None, Default::default()),
                Durability::Volatile,
            ))
            .await
            .unwrap();
        let read = elsewhere.execute(Request::read(extent, Expectations::NONE)).await.unwrap();
        assert_eq!(&crate::opened::data_of(read)[..], bytes);
        elsewhere.execute(Request::write_zeroes(extent, false, Durability::Volatile)).await.unwrap();
        elsewhere.execute(Request::flush()).await.unwrap();
        let read = opened.read(extent).await.unwrap();
        assert!(crate::opened::data_of(read).iter().all(|byte| *byte == 0));
        drop(elsewhere);
        opened.close(Ok(())).await.unwrap();
    });
}

#[test]
fn a_raw_file_is_on_every_core_only_past_the_page_cache() {
    on_reactor(async |_| {
        for (folder, is_cached) in [(std::path::PathBuf::from("/dev/shm"), true), (std::env::temp_dir(), false)] {
            let file = tempfile::NamedTempFile::new_in(folder).unwrap();
            file.as_file().set_len(1 << 20).unwrap();
            let name = format!("raw:{}", file.path().display());
            let opened = crate::open::open(&name.parse().unwrap(), crate::Access::Write).await.unwrap();
            let is_direct = opened.info.file.as_ref().unwrap().is_direct;
            assert_eq!(opened.device.source().is_some(), is_direct, "{name}");
            assert!(!(is_cached && is_direct), "tmpfs has no direct I/O: {name}");
            let Some(source) = opened.device.source() else { continue };
            let elsewhere = source.open_here().unwrap();
            assert_eq!(elsewhere.geometry(), opened.device.geometry());
            let extent = Extent::one(Lba::new(5));
            opened.device.execute(Request::write_zeroes(extent, false, Durability::Volatile)).await.unwrap();
            elsewhere.execute(Request::read(extent, Expectations::NONE)).await.unwrap();
            elsewhere.execute(Request::flush()).await.unwrap();
        }
    });
}
