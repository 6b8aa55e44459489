//! Each rule of `docs/formats/btrfs.md` for the tags of data, by itself: which tag data have after each way to write, cut,
//! share and move them, and what is demanded after Linux had its turn, also if that crashed.

use std::fs::{File, OpenOptions as FileOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;

use futures_executor::block_on;
use sealblock_btrfs::tags::tag_of;
use sealblock_btrfs::verify::{Mode, Verdict, WhyUnchecked, repair};
use sealblock_btrfs_engine::data::FilePlace;
use sealblock_btrfs_engine::operations::{NewSnapshot, SubvolumePlace};
use sealblock_media_memory::Corruption;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_units::Lba;

use crate::data_faults::{place, time};
use crate::disks::Disks;
use crate::files::{Kind, ROOT, assert_content, create, read_committed, write};
use crate::tags::{MIRROR, SECTOR, assert_tagged, engine_on, lose_tags, overwrite, places_of, tuple_at};

const ONE: [&str; 2] = ["-m", "single"];

fn at(sector: usize) -> u64 {
    (sector * SECTOR) as u64
}

/// Everything is attested.
#[track_caller]
fn assert_clean(disks: &Disks) {
    let report = disks.verify(Mode::Auto);
    let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(report.verdict(), Verdict::Clean, "{findings:#?} {:?}", report.unchecked);
}

/// Nothing is damaged, and so many sectors are unattested.
#[track_caller]
fn assert_unattested(disks: &Disks, sectors: usize) {
    let report = disks.verify(Mode::Emulate);
    let findings: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    let unattested = report.unchecked.get(&WhyUnchecked::Unattested).copied().unwrap_or_default();
    assert_eq!((report.damage_count, unattested), (0, at(sectors)), "{findings:#?} {:?}", report.unchecked);
}

#[test]
fn what_is_left_of_an_extent_keeps_its_transaction() {
    let Some(disks) = Disks::make(1, 256, &ONE) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[1; 20 * SECTOR]);
    let first = block_on(engine.commit()).unwrap();
    write(&engine, file, at(8), &[2; 2 * SECTOR]);
    block_on(engine.punch(ROOT, file, at(2), at(1))).unwrap();
    block_on(engine.truncate(ROOT, file, at(15))).unwrap();
    let second = block_on(engine.commit()).unwrap();
    // The end goes on in another transaction, at the next place.
    write(&engine, file, at(15), &[3; 2 * SECTOR]);
    let third = block_on(engine.commit()).unwrap();
    drop(engine);
    for (sectors, generation) in [(&[0, 1, 3, 7, 10, 14][..], first), (&[8, 9], second), (&[15, 16], third)] {
        for sector in sectors {
            assert_eq!(assert_tagged(&disks, file, at(*sector)), generation, "sector {sector}");
        }
    }
    assert_clean(&disks);
    disks.assert_checked_by_program();
}

#[test]
fn what_is_shared_keeps_its_transaction_on_both_sides() {
    let Some(disks) = Disks::make(1, 256, &ONE) else { return };
    let engine = engine_on(&disks);
    let [file, clone] = ["file", "clone"].map(|name| create(&engine, name, Kind::NoSum));
    write(&engine, file, 0, &[1; 10 * SECTOR]);
    let first = block_on(engine.commit()).unwrap();
    let from = |ino| FilePlace { root: ROOT, ino, offset: 0 };
    block_on(engine.clone_range(from(file), from(clone), at(10))).unwrap();
    let new = NewSnapshot { source: ROOT, uuid: [7; 16], is_read_only: false };
    block_on(engine.create_snapshot(new, SubvolumePlace { root: ROOT, place: place("snapshot") }, time())).unwrap();
    block_on(engine.commit()).unwrap();
    write(&engine, file, at(4), &[2; SECTOR]);
    let later = block_on(engine.commit()).unwrap();
    drop(engine);
    assert_eq!(assert_tagged(&disks, file, at(4)), later);
    assert_eq!([at(3), at(5)].map(|at| assert_tagged(&disks, file, at)), [first; 2]);
    assert_eq!(assert_tagged(&disks, clone, at(4)), first);
    assert_clean(&disks);
}

#[test]
fn space_in_advance_keeps_its_transaction_and_is_not_read_before_it_is_written() {
    let Some(disks) = Disks::make(1, 256, &ONE) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    block_on(engine.allocate_range(ROOT, file, (0, at(16)), false)).unwrap();
    let first = block_on(engine.commit()).unwrap();
    write(&engine, file, at(4), &[1; 2 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    assert_eq!(assert_tagged(&disks, file, at(4)), first);
    // What lies in the rest is of no meaning, even if it is damaged.
    let (places, _) = places_of(&disks, file, at(4));
    let lba = places[0].offset / SECTOR as u64 + 6;
    overwrite(&disks, sealblock_btrfs::Place { devid: 1, offset: lba * SECTOR as u64 }, Some(77));
    assert!(disks.memory(0).damage(Lba::new(lba), Corruption::Data { at: 5, mask: 1 }));
    assert_clean(&disks);
    let content = read_committed(&disks, file);
    assert!(content[4 * SECTOR..6 * SECTOR] == [1; 2 * SECTOR] && content[6 * SECTOR..] == [0; 10 * SECTOR]);
}

#[test]
fn a_place_that_is_used_again_has_another_tag() {
    let Some(disks) = Disks::make(1, 256, &ONE) else { return };
    let engine = engine_on(&disks);
    let fill = |name: &str, byte: u8| {
        let ino = create(&engine, name, Kind::NoSum);
        write(&engine, ino, 0, &vec![byte; 64 << 20]);
        block_on(engine.commit()).unwrap();
        ino
    };
    let mut seen: std::collections::BTreeMap<u64, u16> = std::collections::BTreeMap::new();
    let mut reused = 0;
    for round in 0..6_u8 {
        let name = format!("file {round}");
        let ino = fill(&name, round);
        for sector in (0..(64 << 20) / SECTOR).step_by(997) {
            let (places, generation) = places_of(&disks, ino, at(sector));
            let tag = tuple_at(&disks, places[0]).app_tag;
            assert_eq!(tag, tag_of(generation));
            reused += usize::from(seen.insert(places[0].offset, tag).is_some_and(|before| {
                assert_ne!(before, tag, "a lost write would not be found");
                true
            }));
        }
        let unlinked = block_on(engine.unlink(ROOT, place(&name), time())).unwrap();
        block_on(engine.release(ROOT, unlinked.ino)).unwrap();
        block_on(engine.commit()).unwrap();
    }
    assert!(reused > 0, "no place was used twice");
}

/// A file that is copied on write, and one that is written in place.
fn both_kinds(disks: &Disks) -> [u64; 2] {
    let engine = engine_on(disks);
    let files = [("file", Kind::NoSum), ("in place", Kind::NoCow)].map(|(name, kind)| {
        let ino = create(&engine, name, kind);
        write(&engine, ino, 0, &[1; 10 * SECTOR]);
        ino
    });
    block_on(engine.commit()).unwrap();
    files
}

/// Writes in place through the kernel, which does not commit: the file's blocks are on the device.
fn write_directly(mount: &Mount, name: &str, sector: usize, byte: u8) {
    let mut file = FileOptions::new().write(true).custom_flags(libc::O_DIRECT).open(mount.path(name)).unwrap();
    let layout = std::alloc::Layout::from_size_align(SECTOR, SECTOR).unwrap();
    let buffer: Vec<u8> = vec![byte; 2 * SECTOR];
    let start = buffer.as_ptr().align_offset(layout.align());
    file.seek(SeekFrom::Start(at(sector))).unwrap();
    assert_eq!(file.write(&buffer[start..start + SECTOR]).unwrap(), SECTOR);
}

#[test]
fn what_linux_wrote_before_it_crashed_is_unattested() {
    for (devices, options) in [(1, &ONE[..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let [file, in_place] = both_kinds(&disks);
        assert_clean(&disks);
        disks.save();
        let mount = Mount::new(&disks.images, "noatime,commit=300").unwrap();
        // The kernel writes in place at once, and has not committed when the power fails.
        write_directly(&mount, "in place", 4, 9);
        write_directly(&mount, "in place", 5, 9);
        let cut: Vec<Vec<u8>> = disks.images.iter().map(|image| std::fs::read(image).unwrap()).collect();
        mount.unmount().unwrap();
        for (image, content) in disks.images.iter().zip(cut) {
            std::fs::write(image, content).unwrap();
        }
        disks.load();
        assert_unattested(&disks, 2 * devices);
        let [unattested] = &disks.verify(Mode::Auto).unattested[..] else { panic!("one range") };
        let named = unattested.uses.files.iter().map(|file| (file.ino, file.offset, file.bytes, file.paths.clone()));
        assert_eq!(named.collect::<Vec<_>>(), [(in_place, at(4), at(2), vec![b"/in place".to_vec()])]);
        let content = read_committed(&disks, in_place);
        assert!(content[4 * SECTOR..6 * SECTOR] == [9; 2 * SECTOR] && content[..4 * SECTOR] == [1; 4 * SECTOR]);
        assert!(read_committed(&disks, file) == [1; 10 * SECTOR]);
        // What the engine writes there is attested again.
        let engine = engine_on(&disks);
        assert_content(&engine, file, &[1; 10 * SECTOR]);
        write(&engine, in_place, at(4), &[3; 2 * SECTOR]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        assert_clean(&disks);
    }
}

#[test]
fn what_linux_wrote_or_moved_is_unattested_and_what_it_left_alone_is_not() {
    let Some(disks) = Disks::make(1, 512, &ONE) else { return };
    let [file, in_place] = both_kinds(&disks);
    disks.save();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    let mut changed = FileOptions::new().write(true).open(mount.path("file")).unwrap();
    changed.seek(SeekFrom::Start(at(3))).unwrap();
    changed.write_all(&[2; 2 * SECTOR]).unwrap();
    drop(changed);
    mount.unmount().unwrap();
    disks.load();
    // Two sectors of one file, and all of the one where Linux may have written in place.
    assert_unattested(&disks, 2 + 10);
    // A write of the engine's that is lost is still found in the rest of the first.
    let (places, generation) = places_of(&disks, file, at(7));
    let good = tuple_at(&disks, places[0]);
    overwrite(&disks, places[0], Some(generation - 1));
    assert_eq!(disks.verify(Mode::Auto).damage_count, 1);
    let data = vec![1; SECTOR];
    let tags = sealblock_integrity::Tags {
        app_tag: good.app_tag,
        storage_tag: good.storage_tag,
        initial_ref_tag: places[0].offset / SECTOR as u64,
    };
    crate::disks::write_block(disks.memory(0), places[0].offset / SECTOR as u64, &data, tags);
    assert_unattested(&disks, 2 + 10);
    // A balance moves all of it, with the transactions of the items.
    disks.save();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    run("btrfs", ["balance", "start", "--full-balance", mount.path("").to_str().unwrap()]).unwrap();
    let mut content = Vec::new();
    File::open(mount.path("file")).unwrap().read_to_end(&mut content).unwrap();
    mount.unmount().unwrap();
    disks.load();
    assert_unattested(&disks, 20);
    assert!(read_committed(&disks, file) == content && read_committed(&disks, in_place) == [1; 10 * SECTOR]);
}

#[test]
fn a_copy_that_is_healed_has_the_tags_of_the_good_one() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[1; 10 * SECTOR]);
    let first = block_on(engine.commit()).unwrap();
    let (places, _) = places_of(&disks, file, at(5));
    // Bit rot of one copy, which a read finds first.
    assert!(
        disks
            .memory(places[0].devid as usize - 1)
            .damage(Lba::new(places[0].offset / SECTOR as u64), Corruption::Data { at: 9, mask: 4 })
    );
    assert_content(&engine, file, &[1; 10 * SECTOR]);
    drop(engine);
    assert_eq!(tuple_at(&disks, places[0]).app_tag, tag_of(first));
    assert_clean(&disks);
    // Where no copy has a tag, none is made.
    (0..2).for_each(|index| lose_tags(disks.memory(index)));
    assert!(
        disks
            .memory(places[0].devid as usize - 1)
            .damage(Lba::new(places[0].offset / SECTOR as u64), Corruption::Data { at: 9, mask: 4 })
    );
    let engine = engine_on(&disks);
    assert_content(&engine, file, &[1; 10 * SECTOR]);
    drop(engine);
    assert_eq!(tuple_at(&disks, places[0]).app_tag, 0);
    assert_unattested(&disks, 20);
}

/// Writes other data without a tag, as if a write of the engine's had been lost.
fn lose_write(disks: &Disks, file: u64, sector: usize) -> u64 {
    let (places, generation) = places_of(disks, file, at(sector));
    overwrite(disks, *places.iter().find(|place| place.devid == 1).unwrap(), None);
    generation
}

/// Linux writes something else.
fn let_linux_write(disks: &Disks) {
    disks.save();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    std::fs::write(mount.path("linux"), [5; SECTOR]).unwrap();
    mount.unmount().unwrap();
    disks.load();
}

#[test]
fn a_copy_that_is_proven_is_read_before_one_that_is_not() {
    for how in ["Linux wrote", "tags lost"] {
        let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
        let engine = engine_on(&disks);
        let file = create(&engine, "file", Kind::NoSum);
        write(&engine, file, 0, &[1; 100 * SECTOR]);
        block_on(engine.commit()).unwrap();
        drop(engine);
        match how {
            "Linux wrote" => let_linux_write(&disks),
            _ => lose_tags(disks.memory(0)),
        }
        let generation = lose_write(&disks, file, 50);
        assert!(read_committed(&disks, file) == [1; 100 * SECTOR], "{how}");
        // The copy that differs from it is damaged, whoever checks it, and is written anew.
        for mode in [Mode::Auto, Mode::Emulate] {
            let report = disks.verify(mode);
            assert_eq!(report.damage_count, 1, "{how} {mode:?}: {:?}", report.findings);
        }
        let repaired = block_on(repair(&disks.open(), &disks.verify(Mode::Auto))).unwrap();
        assert_eq!((repaired.data_bytes, repaired.failed.len()), (SECTOR as u64, 0), "{how}");
        assert_eq!(disks.verify(Mode::Auto).damage_count, 0, "{how}");
        lose_write(&disks, file, 50);
        // A write of some bytes keeps the others, and what was bad is written anew.
        let engine = engine_on(&disks);
        assert_content(&engine, file, &[1; 100 * SECTOR]);
        let mut content = vec![1; 100 * SECTOR];
        content[50 * SECTOR + 7..][..10].fill(9);
        write(&engine, file, at(50) + 7, &[9; 10]);
        assert_content(&engine, file, &content);
        block_on(engine.commit()).unwrap();
        drop(engine);
        assert!(read_committed(&disks, file) == content, "{how}");
        assert_eq!(disks.verify(Mode::Auto).damage_count, 0, "{how}");
        let places = places_of(&disks, file, at(50)).0;
        assert!(places.iter().all(|place| tuple_at(&disks, *place).app_tag != 0 && generation > 0), "{how}");
    }
}

#[test]
fn a_copy_that_linux_repaired_is_not_damaged() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[0xee; 10 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    // Linux writes a copy that it cannot read from the other one, without a tag and without a transaction.
    let (places, _) = places_of(&disks, file, at(5));
    overwrite(&disks, places[0], None);
    assert_unattested(&disks, 1);
    assert!(read_committed(&disks, file) == [0xee; 10 * SECTOR]);
    assert_eq!(crate::verified_tags::reseal(&disks).refused_count, 0);
    assert_clean(&disks);
    // If it is not the same, it is damaged, and so it is without any proof.
    let engine = engine_on(&disks);
    write(&engine, file, 0, &[1; 10 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    let (places, _) = places_of(&disks, file, at(5));
    overwrite(&disks, places[0], None);
    assert_eq!(disks.verify(Mode::Auto).damage_count, 1);
    overwrite(&disks, places[1], None);
    assert_eq!(disks.verify(Mode::Auto).damage_count, 2);
}

#[test]
fn items_that_linux_joins_are_resealed() {
    let Some(disks) = Disks::make(1, 256, &ONE) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    block_on(engine.allocate_range(ROOT, file, (0, at(16)), false)).unwrap();
    write(&engine, file, at(4), &[1; SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    disks.save();
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    let mut linux = FileOptions::new().write(true).open(mount.path("file")).unwrap();
    linux.seek(SeekFrom::Start(at(5))).unwrap();
    linux.write_all(&[2; SECTOR]).unwrap();
    drop(linux);
    mount.unmount().unwrap();
    disks.load();
    let [four, five] = [4, 5].map(|sector| places_of(&disks, file, at(sector)).1);
    assert_eq!(disks.verify(Mode::Auto).damage_count, 0);
    let resealed = crate::verified_tags::reseal(&disks);
    assert_eq!(resealed.refused_count, 0, "transactions {four} and {five}: {resealed:?}");
    assert_clean(&disks);
    let content = read_committed(&disks, file);
    assert!(content[4 * SECTOR..5 * SECTOR] == [1; SECTOR] && content[5 * SECTOR..6 * SECTOR] == [2; SECTOR]);
}

#[test]
fn of_a_file_in_place_no_copy_is_right_because_it_has_a_tag() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let [file, in_place] = both_kinds(&disks);
    for ino in [file, in_place] {
        let (places, _) = places_of(&disks, ino, at(5));
        overwrite(&disks, places[1], None);
    }
    // Linux may have written one copy in place when it crashed.
    let resealed = crate::verified_tags::reseal(&disks);
    assert_eq!(resealed.refused_count, 1, "{resealed:?}");
    assert!(resealed.refused[0].1.contains("copies differ"), "{resealed:?}");
    let (places, _) = places_of(&disks, in_place, at(5));
    assert_eq!(tuple_at(&disks, places[1]).app_tag, 0, "it stays as it was");
    assert!(read_committed(&disks, file) == [1; 10 * SECTOR]);
}
