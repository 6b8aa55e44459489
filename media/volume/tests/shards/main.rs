//! Volumes in shards, all of whose shards are on one core: that they keep what was written, that nothing else is taken
//! for one, and that a failure of one shard stops all.

mod disk;
mod whose;

use disk::{Disk, Harness, created, length_of, options, pattern};
use sealblock_block::{Device, Durability, ErrorKind, Request, ReservedArea, Response};
use sealblock_media_volume::shards::{create_shards, open_shards, probe_shards};
use sealblock_media_volume::{AnsweredChanges, OpenOptions, Recognised, VolumeError, recognise};
use sealblock_runtime_memory::Slice;
use sealblock_units::{Extent, Lba};

const MIB: u64 = 1 << 20;
/// Blocks of a unit.
const UNIT: u64 = 256;

#[test]
fn what_is_written_is_read_in_whatever_order_and_after_reopening() {
    let disk = created(130 * MIB + 4096, 2);
    let open = Harness::open(&disk).unwrap();
    assert_eq!(open.device.geometry().capacity_blocks, 130 * UNIT + 1);
    assert!(open.info.is_clean && open.info.uuid == disk::UUID);
    // Over several units of both shards, and the last block of the volume.
    let long = pattern(1, 3 * UNIT + 5);
    open.write(UNIT - 2, &long).unwrap();
    open.write(130 * UNIT, &pattern(2, 1)).unwrap();
    assert_eq!(open.read(UNIT - 2, 3 * UNIT + 5).unwrap(), long);
    assert_eq!(open.read(UNIT + 1, 1).unwrap(), long[3 * 4096..4 * 4096]);
    open.verify().unwrap();
    open.close().unwrap();
    let again = Harness::open(&disk).unwrap();
    assert!(again.info.is_clean);
    assert_eq!(again.read(UNIT - 2, 3 * UNIT + 5).unwrap(), long);
    assert_eq!(again.read(130 * UNIT, 1).unwrap(), pattern(2, 1));
    assert!(matches!(again.read(130 * UNIT + 1, 1).unwrap_err().kind(), ErrorKind::Range { .. }));
    again.verify().unwrap();
    let zeroed = Request::write_zeroes(Extent::from_raw(0, 300).unwrap(), true, Durability::Volatile);
    again.execute(zeroed).unwrap();
    assert_eq!(again.read(UNIT - 2, 4).unwrap(), vec![0; 4 * 4096]);
}

#[test]
fn what_was_flushed_survives_a_crash_in_every_shard() {
    let disk = created(256 * MIB, 4);
    let open = Harness::open(&disk).unwrap();
    let data = pattern(3, 6 * UNIT);
    open.write(100, &data).unwrap();
    open.flush().unwrap();
    let crashed = disk.copy();
    let again = Harness::open(&crashed).unwrap();
    assert!(!again.info.is_clean && again.info.recovered >= 6 * UNIT, "{}", again.info.recovered);
    assert_eq!(again.read(100, 6 * UNIT).unwrap(), data);
    again.verify().unwrap();
    assert!(!matches!(again.info.answered, AnsweredChanges::Noted(_)));
    // For reading, nothing is written.
    let crashed = disk.copy();
    let reader = Harness::open_with(&crashed, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    assert_eq!(reader.read(100, 6 * UNIT).unwrap(), data);
    assert!(reader.write(0, &pattern(1, 1)).is_err());
    assert!(*crashed.bytes.borrow() == *disk.bytes.borrow(), "a reader wrote");
}

#[test]
fn a_flush_of_all_shards_costs_few_syncs() {
    let disk = created(512 * MIB, 8);
    let open = Harness::open(&disk).unwrap();
    // The first one also marks each log as in use.
    open.write(0, &pattern(1, 9 * UNIT)).unwrap();
    open.flush().unwrap();
    open.write(0, &pattern(2, 9 * UNIT)).unwrap();
    let before = disk.syncs.get();
    open.flush().unwrap();
    let syncs = disk.syncs.get() - before;
    assert!((1..=2).contains(&syncs), "{syncs} syncs");
}

#[test]
fn damage_has_the_address_of_the_volume() {
    let disk = created(128 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 4 * UNIT)).unwrap();
    open.flush().unwrap();
    let (shard, place) = open.container.shard_of(Lba::new(3 * UNIT + 7));
    open.run(open.volumes[shard as usize].damage(place, sealblock_media_volume::CorruptionKind::Data)).unwrap();
    open.close().unwrap();
    let open = Harness::open(&disk).unwrap();
    let error = open.verify().unwrap_err();
    let ErrorKind::Integrity(found) = error.kind() else { panic!("{error}") };
    let bad: Vec<_> = found.as_slice().iter().map(|bad| (bad.lba.get(), bad.member.outermost().is_some())).collect();
    assert_eq!(bad, [(3 * UNIT + 7, false)]);
}

#[test]
fn after_a_shard_has_failed_no_shard_takes_changes_and_the_reason_is_told() {
    let disk = created(128 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 2 * UNIT)).unwrap();
    open.flush().unwrap();
    // The log of shard 1 cannot be written any more.
    let log = open.container.window(1).offset + open.container.shard_layout().log_offset();
    disk.unwritable.set((log, log + open.container.shard_layout().log_bytes()));
    let failed = open.write(UNIT, &pattern(2, 1)).and_then(|()| open.flush());
    let reason = failed.unwrap_err().to_string();
    assert!(reason.contains("a bad place"), "{reason}");
    let reason = open.write(0, &pattern(3, 1)).unwrap_err().to_string();
    assert!(
        reason.contains("shard 1 failed, writes of all shards are disabled") && reason.contains("a bad place"),
        "{reason}"
    );
    assert!(open.flush().is_err());
    assert_eq!(open.read(0, 1).unwrap(), pattern(1, 1), "reads go on");
    assert!(open.close().is_err());
    disk.unwritable.set((0, 0));
    let again = Harness::open(&disk).unwrap();
    assert_eq!(again.read(0, UNIT).unwrap(), pattern(1, 2 * UNIT)[..(UNIT << 12) as usize]);
}

#[test]
fn a_failed_sync_fails_the_flush_of_every_shard_for_good() {
    let disk = created(128 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 2 * UNIT)).unwrap();
    disk.sync_fails.set(true);
    assert!(open.flush().is_err());
    for start in [0, UNIT] {
        assert!(open.write(start, &pattern(2, 1)).is_err(), "block {start}");
    }
    assert!(open.flush().is_err() && open.close().is_err(), "what was lost stays lost");
}

#[test]
fn a_lost_log_of_one_shard_makes_the_whole_volume_perhaps_older() {
    let disk = created(128 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    open.write(0, &pattern(1, 2 * UNIT)).unwrap();
    open.flush().unwrap();
    let (window, layout) = (open.container.window(1), *open.container.shard_layout());
    let crashed = disk.copy();
    crashed.fill(window.offset + layout.log_offset(), layout.log_bytes(), 0);
    let refused = Harness::open(&crashed).err().unwrap();
    let VolumeError::Shard { shard: 1, error } = &refused else { panic!("{refused}") };
    assert!(matches!(**error, VolumeError::LogDamaged { .. }), "{refused}");
    // The other shard was closed again: nothing of it is in its log any more.
    let reader = OpenOptions { read_only: true, accept_older: true, ..OpenOptions::default() };
    let older = Harness::open_with(&crashed, &reader).unwrap();
    assert!(older.info.log_lost > 0 && !older.info.is_clean && older.info.recovered == 0);
    assert!(older.device.abilities().freshness.why_older().is_some());
    assert_eq!(older.read(0, UNIT).unwrap(), pattern(1, 2 * UNIT)[..(UNIT << 12) as usize]);
    assert!(Harness::open(&disk).unwrap().device.abilities().freshness.why_older().is_none());
}

#[test]
fn the_reserved_areas_of_all_shards_are_one() {
    let disk = created(1100 * MIB, 2);
    let open = Harness::open(&disk).unwrap();
    let pages = open.device.abilities().bitmap_pages;
    assert_eq!(pages, ReservedArea::bitmap_pages(1100 * MIB));
    assert!(pages > 2);
    let areas = (0..pages).map(|page| ReservedArea::Bitmap { page });
    let areas: Vec<_> = areas.chain([ReservedArea::GroupLabel, ReservedArea::ScrubState]).collect();
    let content = |at: usize| Slice::copy_from(&[at as u8 + 1; 512]);
    for (at, area) in areas.iter().enumerate() {
        open.execute(Request::write_reserved(*area, content(at))).unwrap();
    }
    open.close().unwrap();
    let open = Harness::open(&disk).unwrap();
    for (at, area) in areas.iter().enumerate() {
        match open.execute(Request::read_reserved(*area)).unwrap() {
            Response::Reserved(bytes) => assert_eq!(bytes[..512], content(at)[..], "{area:?}"),
            other => panic!("{other:?}"),
        }
    }
    let past = Request::read_reserved(ReservedArea::Bitmap { page: pages + 40 });
    assert!(open.execute(past).is_err());
}

#[test]
fn a_medium_that_is_too_short_or_a_volume_too_small_is_refused() {
    let disk = Disk::new(length_of(128 * MIB, 2) - 4096);
    let made = futures_executor::block_on(create_shards(&disk, &options(128 * MIB), 2));
    assert!(matches!(made, Err(VolumeError::Truncated { .. })), "{made:?}");
    let made = futures_executor::block_on(create_shards(&disk, &options(100 * MIB), 2));
    assert!(made.unwrap_err().to_string().contains("too small for 2 shards"));
    assert!(disk.bytes.borrow().iter().all(|byte| *byte == 0), "nothing was written");
    // A medium that was cut off.
    let disk = created(128 * MIB, 2);
    let cut = disk.bytes.borrow().len() - (8 << 20);
    disk.bytes.borrow_mut().truncate(cut);
    assert!(matches!(Harness::open(&disk), Err(VolumeError::Truncated { .. })));
    let truncated = OpenOptions { read_only: true, truncated: true, ..OpenOptions::default() };
    assert!(Harness::open_with(&disk, &truncated).is_ok());
}

#[test]
fn a_crash_at_any_step_of_create_leaves_nothing_that_opens_or_all_of_it() {
    let (mut opened, mut left) = (0, 0);
    loop {
        let disk = Disk::new(length_of(128 * MIB, 2));
        disk.left.set(Some(left));
        let made = futures_executor::block_on(create_shards(&disk, &options(128 * MIB), 2));
        disk.left.set(None);
        let found = futures_executor::block_on(probe_shards(&disk)).unwrap();
        match (&made, found) {
            (Ok(_), None) => panic!("it was created and is not found"),
            (_, Some(_)) => {
                // At most the last copies are missing.
                opened += 1;
                let open = Harness::open(&disk).unwrap();
                open.write(0, &pattern(1, 2 * UNIT)).unwrap();
                open.verify().unwrap();
            }
            (Err(_), None) => {
                let recognised = futures_executor::block_on(recognise(&disk)).unwrap();
                assert!(!matches!(recognised, Recognised::Volume), "after {left} steps");
                let opened =
                    futures_executor::block_on(open_shards(disk.clone(), disk::NoClock, &OpenOptions::default()));
                assert!(opened.unwrap().is_none());
            }
        }
        if made.is_ok() {
            break;
        }
        left += 1;
    }
    assert_eq!(opened, 4, "with one copy, two, three, and the last sync");
}
