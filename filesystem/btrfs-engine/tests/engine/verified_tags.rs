//! Verification of data without checksums by their tags: what it finds, what it cannot say, and what it transfers.

use std::collections::BTreeMap;

use futures_executor::block_on;
use futures_util::future::LocalBoxFuture;
use sealblock_btrfs::verify::{
    BadData, DataFault, Finding, Mode, Progress, Report, Unwatched, Verdict, VerifyOptions, Watch, WhyUnchecked,
    find_unsummed, verify_files,
};
use sealblock_btrfs::{CopyFault, Place};
use sealblock_btrfs_engine::reseal::Resealed;

use crate::disks::Disks;
use crate::files::{Kind, ROOT, create, write};
use crate::tags::{MIRROR, SECTOR, engine_on, lose_tags, overwrite, places_of};

/// Its data, as what of a file they are, and where; whether they are lost; and the fault.
fn data_of(report: &Report) -> Vec<(u64, u64, u64, Place, bool, CopyFault)> {
    let one = |finding: &Finding| match finding {
        Finding::Data(data) => {
            let BadData { fault: DataFault::Copy { copy, is_lost, .. }, uses, .. } = &**data else { panic!("{data}") };
            let [file] = &uses.files[..] else { panic!("{uses:?}") };
            (file.ino, file.offset, file.bytes, copy.place, *is_lost, copy.fault.clone())
        }
        other => panic!("{other}"),
    };
    report.findings.iter().map(one).collect()
}

/// Both modes say the same.
fn verified(disks: &Disks) -> Report {
    let [report, emulated] = [Mode::Auto, Mode::Emulate].map(|mode| disks.verify(mode));
    let shown = |report: &Report| -> Vec<String> { report.findings.iter().map(ToString::to_string).collect() };
    assert_eq!(shown(&report), shown(&emulated));
    assert_eq!((report.bytes_verified, report.damage_count), (emulated.bytes_verified, emulated.damage_count));
    assert_eq!((&report.unchecked, &report.unattested), (&emulated.unchecked, &emulated.unattested));
    report
}

fn unattested(bytes: usize) -> BTreeMap<WhyUnchecked, u64> {
    BTreeMap::from([(WhyUnchecked::Unattested, bytes as u64)])
}

#[test]
fn writes_that_were_lost_or_went_elsewhere_are_found_where_they_are() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let engine = engine_on(&disks);
        let file = create(&engine, "file", Kind::NoSum);
        write(&engine, file, 0, &[1; 300 * SECTOR]);
        let first = block_on(engine.commit()).unwrap();
        write(&engine, file, 100 * SECTOR as u64, &[2; 100 * SECTOR]);
        let second = block_on(engine.commit()).unwrap();
        drop(engine);
        let report = verified(&disks);
        assert_eq!((report.verdict(), report.unchecked.len()), (Verdict::Clean, 0));
        // Only nodes were transferred.
        assert_eq!(report.bytes_transferred, report.bytes_verified - (devices * 300 * SECTOR) as u64);
        let mut expected = Vec::new();
        for (sector, tag) in [(7, Some(second)), (8, None), (150, Some(first)), (299, Some(second + 5))] {
            let at = (sector * SECTOR) as u64;
            let (places, _) = places_of(&disks, file, at);
            overwrite(&disks, places[0], tag);
            expected.push((file, at, SECTOR as u64, places[0], devices == 1));
        }
        let report = verified(&disks);
        let found = data_of(&report);
        let mut seen: Vec<_> =
            found.iter().map(|(ino, at, bytes, place, lost, _)| (*ino, *at, *bytes, *place, *lost)).collect();
        seen.sort_by_key(|one| one.1);
        assert_eq!(seen, expected);
        assert!(found.iter().all(|(.., fault)| matches!(fault, CopyFault::Tag(_))), "{found:?}");
        assert!(report.unchecked.is_empty(), "{:?}", report.unchecked);
        // The same of the file alone.
        let filesystem = disks.open();
        let tree = block_on(filesystem.tree(ROOT)).unwrap().unwrap();
        let inode = block_on(filesystem.inode(tree, file)).unwrap();
        let alone = block_on(verify_files(&filesystem, inode, VerifyOptions::default(), &Unwatched)).unwrap();
        assert_eq!(alone.damage_count, 4, "{:?}", alone.findings);
        if devices == 2 {
            // The engine takes the good copies, and writes the others anew.
            let engine = engine_on(&disks);
            crate::files::assert_content(
                &engine,
                file,
                &[[1; 100 * SECTOR], [2; 100 * SECTOR], [1; 100 * SECTOR]].concat(),
            );
            drop(engine);
            assert_eq!(verified(&disks).verdict(), Verdict::Clean);
            for at in [7, 8] {
                let (places, _) = places_of(&disks, file, (at * SECTOR) as u64);
                places.iter().for_each(|place| overwrite(&disks, *place, Some(second)));
            }
            let found = data_of(&verified(&disks));
            assert!(found.len() == 4 && found.iter().all(|(_, _, _, _, is_lost, _)| *is_lost), "{found:?}");
        }
    }
}

#[test]
fn what_no_tag_shows_is_unattested_and_not_damage() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = engine_on(&disks);
    let [file, plain] =
        [("in place", Kind::NoCow), ("plain", Kind::NoSum)].map(|(name, kind)| create(&engine, name, kind));
    for ino in [file, plain] {
        write(&engine, ino, 0, &[1; 100 * SECTOR]);
    }
    block_on(engine.commit()).unwrap();
    assert_eq!(verified(&disks).verdict(), Verdict::Clean);
    // Zeroes that the device made have no tags.
    block_on(engine.write_zeroes(ROOT, file, 0, 8 * SECTOR as u64)).unwrap();
    block_on(engine.commit()).unwrap();
    drop(engine);
    let report = disks.verify(Mode::Emulate);
    assert_eq!((report.verdict(), report.unchecked), (Verdict::Incomplete, unattested(8 * SECTOR)));
    verified(&disks);
    // Linux may have written in place, and ended before its transaction.
    let (places, _) = places_of(&disks, file, 50 * SECTOR as u64);
    overwrite(&disks, places[0], None);
    let report = disks.verify(Mode::Emulate);
    assert_eq!((report.verdict(), report.unchecked), (Verdict::Incomplete, unattested(9 * SECTOR)));
    verified(&disks);
    // A first write that was lost, to a file that is not written in place.
    let (places, _) = places_of(&disks, plain, 50 * SECTOR as u64);
    overwrite(&disks, places[0], None);
    let found = data_of(&verified(&disks));
    assert!(found.len() == 1 && (found[0].0, found[0].1) == (plain, 50 * SECTOR as u64), "{found:?}");
    // Nothing is demanded of a copy of the bytes.
    lose_tags(disks.memory(0));
    let report = verified(&disks);
    assert_eq!((report.verdict(), report.unchecked), (Verdict::Incomplete, unattested(200 * SECTOR)));
}

/// Gives all data the tags that they lack.
pub fn reseal(disks: &Disks) -> Resealed {
    let filesystem = disks.open();
    let (report, data) = block_on(find_unsummed(&filesystem, VerifyOptions::default(), &Unwatched)).unwrap();
    assert!(report.damage_count == 0 && report.unchecked.is_empty(), "{report:?}");
    let engine = engine_on(disks);
    block_on(engine.reseal(&data, &Unwatched)).unwrap()
}

#[test]
fn data_get_the_tags_that_they_lack_and_then_these_are_demanded() {
    for (devices, options) in [(1, &["-m", "single"][..]), (2, &MIRROR)] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        let engine = engine_on(&disks);
        let [file, in_place] = [("file", Kind::NoSum), ("in place", Kind::NoCow)].map(|(name, kind)| {
            let ino = create(&engine, name, kind);
            write(&engine, ino, 0, &[1; 200 * SECTOR]);
            block_on(engine.commit()).unwrap();
            write(&engine, ino, 20 * SECTOR as u64, &[2; 100 * SECTOR]);
            block_on(engine.commit()).unwrap();
            ino
        });
        drop(engine);
        (0..devices).for_each(|index| lose_tags(disks.memory(index)));
        assert_eq!(disks.verify(Mode::Emulate).unchecked, unattested(devices * 400 * SECTOR));
        let resealed = reseal(&disks);
        assert_eq!((resealed.bytes, resealed.refused_count), ((devices * 400 * SECTOR) as u64, 0), "{resealed:?}");
        assert_eq!(verified(&disks).verdict(), Verdict::Clean);
        // A second time there is nothing to do.
        assert_eq!(reseal(&disks).bytes, 0);
        for ino in [file, in_place] {
            let (places, generation) = places_of(&disks, ino, 50 * SECTOR as u64);
            overwrite(&disks, places[0], Some(generation + 1));
        }
        let found = data_of(&verified(&disks));
        assert!(found.len() == 2 && found.iter().all(|one| one.4 == (devices == 1)), "{found:?}");
        // Damage gets no tag, unless another copy is attested.
        let resealed = reseal(&disks);
        if devices == 2 {
            assert!(resealed.bytes > 0 && resealed.refused_count == 0, "{resealed:?}");
            assert_eq!(verified(&disks).verdict(), Verdict::Clean, "written anew from the other copy");
            disks.assert_consistent();
            continue;
        }
        assert_eq!((resealed.bytes, resealed.refused_count), (0, 2), "the tag of another transaction: {resealed:?}");
        assert_eq!(verified(&disks).damage_count, 2);
        // What is forgotten is not demanded.
        let engine = engine_on(&disks);
        block_on(engine.forget_tags()).unwrap();
        drop(engine);
        let report = verified(&disks);
        assert_eq!((report.verdict(), report.unchecked), (Verdict::Incomplete, unattested(devices * 400 * SECTOR)));
        let resealed = reseal(&disks);
        // Where nothing is demanded, what is there is taken for what should be.
        assert!(resealed.bytes >= 2 * SECTOR as u64 && resealed.refused_count == 0, "{resealed:?}");
        assert_eq!(verified(&disks).verdict(), Verdict::Clean);
        disks.assert_consistent();
        disks.assert_checked_by_program();
    }
}

#[test]
fn copies_that_differ_get_no_tags() {
    let Some(disks) = Disks::make(2, 256, &MIRROR) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &[1; 100 * SECTOR]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    [0, 1].into_iter().for_each(|index| lose_tags(disks.memory(index)));
    let (places, _) = places_of(&disks, file, 50 * SECTOR as u64);
    overwrite(&disks, places[1], None);
    let resealed = reseal(&disks);
    assert_eq!((resealed.bytes, resealed.refused_count), (2 * 99 * SECTOR as u64, 1), "{resealed:?}");
    assert!(resealed.refused[0].1.contains("copies differ"), "{resealed:?}");
    // Those that have tags are attested. None is demanded, as long as not all have one.
    let report = verified(&disks);
    assert_eq!((report.damage_count, report.unchecked), (0, unattested(2 * SECTOR)));
}

/// Stops everything at once.
struct Stop;

impl Watch for Stop {
    fn go_on(&self, _: Progress) -> LocalBoxFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }
}

#[test]
fn a_reseal_that_is_stopped_begins_nothing_more_and_demands_nothing() {
    let Some(disks) = Disks::make(1, 256, &["-m", "single"]) else { return };
    let engine = engine_on(&disks);
    let file = create(&engine, "file", Kind::NoSum);
    write(&engine, file, 0, &vec![1; 64 << 20]);
    block_on(engine.commit()).unwrap();
    drop(engine);
    lose_tags(disks.memory(0));
    let (_, data) = block_on(find_unsummed(&disks.open(), VerifyOptions::default(), &Unwatched)).unwrap();
    let engine = engine_on(&disks);
    let resealed = block_on(engine.reseal(&data, &Stop)).unwrap();
    drop(engine);
    assert!(!resealed.is_whole && resealed.refused_count == 0 && resealed.bytes < 32 << 20, "{resealed:?}");
    let report = disks.verify(Mode::Auto);
    assert_eq!((report.damage_count, report.verdict()), (0, Verdict::Incomplete));
    assert_eq!(reseal(&disks).bytes + resealed.bytes, 64 << 20);
    assert_eq!(verified(&disks).verdict(), Verdict::Clean);
}
