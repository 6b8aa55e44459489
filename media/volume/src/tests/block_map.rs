//! Damage to the block map: each sector costs its own blocks or nothing, and no damage makes a block look unwritten.

use sealblock_block::{BadBlock, BadBlockCause};
use sealblock_integrity::{Field, GuardKind, ProtectionType};
use sealblock_units::{BlockSize, Lba};

use super::setup::{Harness, TestMedium, created, pattern, protection};
use crate::format::{GroupMapSector, Layout, MAP_ENTRY_BYTES, PAGE_SECTORS, Superblock};

const SIZE: BlockSize = BlockSize::B4096;

/// Damage to sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Harm {
    Zeroed,
    Random,
    Unreadable,
    /// Restored from an earlier checkpoint.
    Stale,
}

const HARMS: [Harm; 4] = [Harm::Zeroed, Harm::Random, Harm::Unreadable, Harm::Stale];

/// A volume with a history: blocks below `WRITTEN` were written, those below `CHANGED` once more after a checkpoint,
/// and some were deallocated. The others were never written.
struct Old {
    layout: Layout,
    before: Vec<u8>,
    now: Vec<u8>,
    data: Vec<u8>,
}

const BLOCKS: u64 = 700;
const WRITTEN: u64 = 300;
const CHANGED: u64 = 20;
const GIVEN_UP: std::ops::Range<u64> = 280..290;

fn old(sector_bytes: u32) -> Old {
    let medium = created(SIZE, sector_bytes, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let mut data = vec![0; (BLOCKS as usize) * SIZE.bytes()];
    let put = |harness: &Harness, data: &mut Vec<u8>, blocks: u64, seed: u64| {
        let bytes = pattern(seed, blocks as usize * SIZE.bytes());
        harness.write(0, &bytes).unwrap();
        data[..bytes.len()].copy_from_slice(&bytes);
    };
    let harness = Harness::open(&medium, false).unwrap();
    put(&harness, &mut data, WRITTEN, 1);
    discard(&harness, GIVEN_UP.start, GIVEN_UP.end - GIVEN_UP.start);
    data[GIVEN_UP.start as usize * SIZE.bytes()..GIVEN_UP.end as usize * SIZE.bytes()].fill(0);
    let before = harness.close().bytes.borrow().clone();
    let harness = Harness::open(&medium, false).unwrap();
    put(&harness, &mut data, CHANGED, 2);
    let layout = harness.gate.device().layout;
    let now = harness.close().bytes.borrow().clone();
    Old { layout, before, now, data }
}

fn discard(harness: &Harness, start: u64, blocks: u64) {
    use sealblock_block::{Device, Request};
    let extents = vec![sealblock_units::Extent::from_raw(start, blocks).unwrap()];
    harness.run(harness.gate.execute(Request::discard(extents))).unwrap();
}

impl Old {
    /// The medium with damage to the sectors from offset `at`.
    fn harmed(&self, at: u64, bytes: u64, harm: Harm) -> TestMedium {
        let medium = TestMedium::new(0, self.layout.sector_bytes());
        let mut image = self.now.clone();
        let range = at as usize..(at + bytes) as usize;
        match harm {
            Harm::Zeroed => image[range].fill(0),
            Harm::Random => image[range].copy_from_slice(&pattern(at, bytes as usize)),
            Harm::Stale => image[range.clone()].copy_from_slice(&self.before[range]),
            Harm::Unreadable => medium.unreadable.set((at, at + bytes)),
        }
        *medium.bytes.borrow_mut() = image;
        medium
    }

    /// The blocks that do not verify. All others must have their content.
    fn lost(&self, harness: &Harness, doing: &str) -> Vec<u64> {
        let mut lost = Vec::new();
        for lba in 0..BLOCKS {
            match harness.read(lba, 1) {
                Ok(found) => {
                    let at = lba as usize * SIZE.bytes();
                    assert!(found == self.data[at..at + SIZE.bytes()], "{doing}: block {lba} has other content");
                }
                Err(error) => {
                    assert_eq!(error.bad_blocks().expect("it is damage").as_slice().len(), 1, "{doing}");
                    lost.push(lba);
                }
            }
        }
        let verified: Vec<u64> = match harness.verify() {
            Ok(()) => Vec::new(),
            Err(error) => error.bad_blocks().unwrap().as_slice().iter().map(|bad_block| bad_block.lba.get()).collect(),
        };
        assert_eq!(verified, lost, "{doing}: verify names what reads find");
        lost
    }
}

/// The written blocks whose map entries are in sector `sector` of page `page`; with `changed`, only those that changed
/// since the old image.
fn hit(layout: &Layout, page: u64, sector: u64, changed: bool) -> Vec<u64> {
    let per_sector = u64::from(layout.sector_bytes()) / MAP_ENTRY_BYTES as u64;
    let first = page * layout.page_blocks() + (sector - 1) * per_sector;
    let written = |lba: &u64| if changed { *lba < CHANGED } else { *lba < WRITTEN };
    (first..first + per_sector)
        .filter(|lba| *lba < BLOCKS && (lba / layout.page_blocks()) == page)
        .filter(written)
        .collect()
}

#[test]
fn each_sector_of_the_map_pages_costs_its_own_blocks_or_nothing() {
    for sector_bytes in [512, 4096] {
        let old = old(sector_bytes);
        let (layout, sector) = (old.layout, u64::from(sector_bytes));
        for page in layout.pages_of_group(0) {
            let place = layout.page_offsets(page).unwrap();
            let entries = (1..PAGE_SECTORS).map(|at| (place.offset + at * sector, Some(at)));
            let heads = [(place.offset, None), (place.second_offset, None)];
            for ((at, entries), harm) in heads.into_iter().chain(entries).flat_map(|at| HARMS.map(|harm| (at, harm))) {
                let doing = format!("sectors of {sector}, page {page}, {entries:?}, {harm:?}");
                let due = entries.map_or(Vec::new(), |entries| hit(&layout, page, entries, harm == Harm::Stale));
                let medium = old.harmed(at, sector, harm);
                let harness = Harness::open(&medium, true).unwrap();
                assert_eq!(old.lost(&harness, &doing), due, "{doing}");
                let is_copy = entries.is_none() && (harm != Harm::Stale || page == 0);
                assert_eq!(harness.lost_copies(), u64::from(is_copy), "{doing}");
                drop(harness);
                repaired(&old, &medium, &due, &doing);
            }
        }
    }
}

/// Opens for writing, which must succeed; writes to the lost blocks and others, and finds no damage after that.
fn repaired(old: &Old, medium: &TestMedium, lost: &[u64], doing: &str) {
    let harness = Harness::open(medium, false).unwrap();
    assert_eq!(old.lost(&harness, doing), lost, "{doing}");
    // A block in each page, in another sector if there is one: lost blocks stay lost, and no other is lost.
    for lba in [299, 500] {
        harness.write(lba, &pattern(lba, SIZE.bytes())).unwrap();
    }
    harness.flush().unwrap();
    harness.close();
    // A sector that was rewritten can be read again.
    medium.unreadable.set((0, 0));
    let harness = Harness::open(medium, false).unwrap();
    let still: Vec<u64> = lost.iter().copied().filter(|lba| *lba != 299).collect();
    for lba in (0..BLOCKS).filter(|lba| ![299, 500].contains(lba)) {
        assert_eq!(harness.read(lba, 1).is_err(), still.contains(&lba), "{doing}: block {lba}");
    }
    still.iter().for_each(|lba| harness.write(*lba, &pattern(7, SIZE.bytes())).unwrap());
    harness.verify().unwrap();
    let harness = Harness::open(&harness.close(), false).unwrap();
    harness.verify().unwrap();
    assert_eq!(harness.lost_copies(), 0, "{doing}");
    harness.read(500, 1).map(|found| assert!(found == pattern(500, SIZE.bytes()))).unwrap();
}

#[test]
fn any_64_kib_of_the_map_pages_cost_the_blocks_whose_map_entries_lay_there_and_zeroes_are_no_blanks() {
    let old = old(512);
    let layout = old.layout;
    let group = layout.block_group(0).unwrap();
    for at in (group.pages_offset - (64 << 10)..group.data_offset).step_by(4096 + 512) {
        for harm in HARMS {
            let doing = format!("64 KiB at {at}, {harm:?}");
            let harness = Harness::open(&old.harmed(at, 64 << 10, harm), true).unwrap();
            let lost = old.lost(&harness, &doing);
            let hit = |lba: &u64| {
                let (page, index) = layout.page_of(Lba::new(*lba));
                let entry = layout.page_offsets(page).unwrap().offset + 512 * (1 + index as u64 / 16);
                let is_lost = if harm == Harm::Stale { *lba < CHANGED } else { *lba < WRITTEN };
                is_lost && (at..at + (64 << 10)).contains(&entry)
            };
            let pbns = |lba: &u64| at + (64 << 10) > group.data_offset && *lba < WRITTEN;
            assert!(lost.iter().all(|lba| hit(lba) || pbns(lba)), "{doing}: {lost:?}");
            assert!((0..BLOCKS).filter(hit).all(|lba| lost.contains(&lba)), "{doing}: {lost:?}");
        }
    }
}

#[test]
fn both_copies_of_the_generations_lost_leave_what_checks_and_nothing_unwritten() {
    let old = old(512);
    for page in [0, 1] {
        let place = old.layout.page_offsets(page).unwrap();
        let medium = old.harmed(place.offset, 512, Harm::Zeroed);
        medium.bytes.borrow_mut()[place.second_offset as usize..][..512].fill(0xee);
        let due: Vec<u64> =
            (place.first.get()..place.first.get() + place.blocks).filter(|lba| *lba >= WRITTEN).collect();
        let harness = Harness::open(&medium, true).unwrap();
        assert_eq!(old.lost(&harness, "both copies"), due);
        assert_eq!(harness.lost_copies(), 2);
        drop(harness);
        // An open for writing records this for good, so they do not read as unwritten later.
        drop(Harness::open(&medium, false).unwrap().close());
        assert_eq!(old.lost(&Harness::open(&medium, true).unwrap(), "both copies, written anew"), due);
    }
}

#[test]
fn a_stale_map_entry_is_named_and_stale_map_entries_with_one_copy_of_the_generations_too() {
    let old = old(512);
    let place = old.layout.page_offsets(0).unwrap();
    let length = old.layout.page_bytes();
    for (at, bytes) in [(place.offset + 512, length - 512), (place.offset, length)] {
        let harness = Harness::open(&old.harmed(at, bytes, Harm::Stale), true).unwrap();
        let bad_blocks = harness.verify().unwrap_err().bad_blocks().unwrap().as_slice().to_vec();
        let lbas: Vec<u64> = bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect();
        assert_eq!(lbas, (0..CHANGED).collect::<Vec<_>>());
        assert!(
            bad_blocks.iter().all(|bad_block| bad_block.cause == BadBlockCause::Tag(Field::StorageTag)),
            "{bad_blocks:?}"
        );
    }
    // All three restored together: nothing detects it here, as the documentation says.
    let medium = old.harmed(place.offset, length, Harm::Stale);
    let second = place.second_offset as usize..place.second_offset as usize + 512;
    medium.bytes.borrow_mut()[second.clone()].copy_from_slice(&old.before[second]);
    Harness::open(&medium, true).unwrap().read(0, 1).ok();
}

#[test]
fn a_block_group_map_that_is_lost_or_old_hides_nothing() {
    let old = old(512);
    let [a, b] = [0, 1].map(|copy| old.layout.group_map_offset(copy));
    for at in [a, b] {
        for harm in HARMS {
            let doing = format!("group map at {at}, {harm:?}");
            let medium = old.harmed(at, 512, harm);
            let harness = Harness::open(&medium, true).unwrap();
            assert_eq!(old.lost(&harness, &doing), [0; 0]);
            assert_eq!(harness.lost_copies(), u64::from(harm != Harm::Stale), "{doing}");
            drop(harness);
            medium.unreadable.set((0, 0));
            drop(Harness::open(&medium, false).unwrap());
            assert_eq!(Harness::open(&medium, true).unwrap().lost_copies(), 0, "{doing}: written anew");
        }
    }
    // Both copies lost, or both from before the block group was initialized: the superblock counts more block groups,
    // and the block map is there.
    let new = created(SIZE, 512, BLOCKS, None).bytes.borrow().clone();
    for harm in [Harm::Zeroed, Harm::Stale] {
        let medium = old.harmed(a, 512, Harm::Zeroed);
        for at in [a, b] {
            let to = &mut medium.bytes.borrow_mut()[at as usize..at as usize + 512];
            match harm {
                Harm::Stale => to.copy_from_slice(&new[at as usize..at as usize + 512]),
                _ => to.fill(0),
            }
        }
        for read_only in [true, false, true] {
            let harness = Harness::open(&medium, read_only).unwrap();
            assert_eq!(old.lost(&harness, &format!("{harm:?}")), [0; 0]);
        }
    }
}

/// A block group that the superblock counts but that is not found was written, wherever it was.
#[test]
fn map_pages_that_are_lost_with_the_map_are_damage_and_not_unwritten() {
    let old = old(512);
    let first = old.layout.page_offsets(0).unwrap();
    let pages = old.layout.pages_of_group(0).filter_map(|page| old.layout.page_offsets(page));
    let seconds: Vec<u64> = pages.map(|page| page.second_offset).collect();
    let maps = [0, 1].map(|copy| old.layout.group_map_offset(copy));
    let due: Vec<u64> = (0..first.blocks).filter(|lba| *lba >= WRITTEN).collect();
    for with in [0, 0xee] {
        let medium = old.harmed(first.offset, 512, Harm::Zeroed);
        for at in seconds.iter().chain(&maps) {
            medium.bytes.borrow_mut()[*at as usize..][..512].fill(with);
        }
        for read_only in [true, false, true] {
            assert_eq!(old.lost(&Harness::open(&medium, read_only).unwrap(), "map and generations"), due);
        }
    }
}

/// A newer copy never has fewer bits than an older one. If a valid copy nevertheless lacks a block group, its map pages
/// are not initialized again.
#[test]
fn a_copy_of_the_block_group_map_that_denies_a_block_group_is_not_believed() {
    let old = old(512);
    let seed = Superblock::decode(&old.now[..512]).unwrap().seed();
    for (copy, newer_by) in [(0, 0), (1, 0), (0, 1), (1, 9)] {
        let a = old.layout.group_map_offset(copy);
        let medium = old.harmed(a, 512, Harm::Zeroed);
        let at = a as usize..a as usize + 512;
        let mut denying = GroupMapSector::decode(&old.now[at.clone()], seed, 0).unwrap();
        denying.bits.fill(0);
        denying.write_seq += newer_by;
        denying.encode(&mut medium.bytes.borrow_mut()[at], seed);
        for (read_only, lost_copies) in [(true, 1), (false, 1), (true, 0)] {
            let harness = Harness::open(&medium, read_only).unwrap();
            assert_eq!(
                (old.lost(&harness, "denied"), harness.lost_copies()),
                (vec![], lost_copies),
                "newer by {newer_by}"
            );
        }
    }
}

#[test]
fn a_medium_that_gives_nothing_is_not_taken_for_one_on_which_nothing_was_written() {
    let old = old(512);
    let start = old.layout.group_map_offset(0);
    let medium = old.harmed(start, old.layout.block_group(0).unwrap().data_offset - start, Harm::Unreadable);
    for read_only in [true, false] {
        assert!(Harness::open(&medium, read_only).is_err(), "neither map nor map pages tell");
    }
    medium.unreadable.set((0, 0));
    assert_eq!(old.lost(&Harness::open(&medium, false).unwrap(), "read again"), [0; 0]);
    // Only the block map is unreadable: its blocks are damage, and nothing is overwritten that may become readable
    // again.
    let group = old.layout.block_group(0).unwrap();
    let medium = old.harmed(group.pages_offset, group.data_offset - group.pages_offset, Harm::Unreadable);
    let harness = Harness::open(&medium, false).unwrap();
    assert!(harness.read(0, 1).is_err() && harness.write(0, &pattern(1, SIZE.bytes())).is_err());
    medium.unreadable.set((0, 0));
    harness.verify().unwrap();
    assert_eq!(old.lost(&harness, "read again"), [0; 0]);
    assert_eq!(old.lost(&Harness::open(&harness.close(), true).unwrap(), "closed"), [0; 0]);
}

#[test]
fn a_transfer_over_more_pages_than_are_kept_ends() {
    let harness = Harness::new(BlockSize::B512, 4096, protection(GuardKind::Crc16, ProtectionType::Type1));
    let data = pattern(1, 2048 * 512);
    harness.write(2047, &data).unwrap();
    let harness = Harness::open(&harness.close(), true).unwrap();
    assert!(harness.read(2047, 2048).unwrap() == data);
    harness.verify().unwrap();
}

#[test]
fn what_lies_where_map_pages_go_does_not_matter_until_they_are_made() {
    let layout = Layout::new(SIZE, 512, BLOCKS).unwrap();
    let medium = TestMedium::new(layout.medium_bytes(), 512);
    let rubbish = pattern(3, layout.medium_bytes() as usize);
    medium.bytes.borrow_mut().copy_from_slice(&rubbish);
    let options = crate::CreateOptions {
        block_size: SIZE,
        capacity_blocks: BLOCKS,
        protection: protection(GuardKind::Crc16, ProtectionType::Type1),
        uuid: super::setup::UUID,
        preallocate: false,
    };
    futures_executor::block_on(crate::create(&medium, &options)).unwrap();
    let group = layout.block_group(0).unwrap();
    let tables = group.pages_offset as usize..group.data_offset as usize;
    assert!(medium.bytes.borrow()[tables.clone()] == rubbish[tables], "creating writes no map pages");
    let harness = Harness::open(&medium, false).unwrap();
    assert!(harness.read(0, BLOCKS).unwrap() == vec![0; BLOCKS as usize * SIZE.bytes()]);
    harness.write(300, &pattern(1, 4096)).unwrap();
    let harness = Harness::open(&harness.close(), false).unwrap();
    harness.verify().unwrap();
    assert!(harness.read(300, 1).unwrap() == pattern(1, 4096));
    assert!(harness.read(0, 300).unwrap() == vec![0; 300 * SIZE.bytes()]);
    assert!(harness.read(301, 399).unwrap() == vec![0; 399 * SIZE.bytes()]);
    // Damaged map entries take no physical blocks.
    assert_eq!(harness.gate.device().allocator.free(0), 0, "the block group is not loaded yet");
    harness.write(301, &pattern(2, 4096)).unwrap();
    assert_eq!(harness.gate.device().allocator.free(0), group.physical_blocks - 2);
}

#[test]
fn a_block_group_half_way_to_its_map_pages_is_unwritten_and_gets_them_again() {
    let medium = created(SIZE, 512, BLOCKS, protection(GuardKind::Crc16, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    harness.write(5, &pattern(1, 4096)).unwrap();
    harness.flush().unwrap();
    // The generations are written, and their sync fails.
    medium.syncs_left.set(0);
    assert!(harness.run(harness.gate.device().close()).is_err());
    medium.syncs_left.set(u64::MAX);
    drop(harness);
    for read_only in [true, false] {
        let harness = Harness::open(&medium, read_only).unwrap();
        assert!(harness.read(5, 1).unwrap() == pattern(1, 4096));
        harness.verify().unwrap();
        assert!(harness.read(6, 600).unwrap() == vec![0; 600 * SIZE.bytes()]);
    }
}

#[test]
fn a_block_group_gets_its_map_pages_in_few_writes() {
    for sector_bytes in [512, 4096] {
        let blocks = 16384;
        let medium = created(SIZE, sector_bytes, blocks, protection(GuardKind::Crc32c, ProtectionType::Type1));
        let harness = Harness::open(&medium, false).unwrap();
        let layout = harness.gate.device().layout;
        harness.write(5, &pattern(1, 4096)).unwrap();
        harness.flush().unwrap();
        let before = medium.changes_left.get();
        drop(harness.close());
        // The others are pages, superblocks, the group map, the last log sector's other copy and syncs.
        let (pages, changes) = (blocks.div_ceil(layout.page_blocks()), before - medium.changes_left.get());
        assert!(changes <= 31, "{changes} for {pages} pages of sectors of {sector_bytes} bytes");
        let harness = Harness::open(&medium, true).unwrap();
        assert!(harness.read(5, 1).unwrap() == pattern(1, 4096));
        assert!(harness.read(6, 600).unwrap() == vec![0; 600 * SIZE.bytes()]);
        harness.verify().unwrap();
        assert_eq!(harness.lost_copies(), 0);
    }
}

#[test]
fn many_block_groups_without_map_pages_do_not_wait_for_the_close() {
    let medium = created(SIZE, 512, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    let harness = Harness::open(&medium, false).unwrap();
    let volume = harness.gate.device();
    let write = |lba| {
        harness.write(lba, &pattern(lba, 4096)).unwrap();
        harness.flush().unwrap();
        harness.idle();
        (volume.new_groups.get(), volume.block_map.groups.initialized_count())
    };
    assert_eq!([write(1), write(2)], [(1, 0); 2], "one is no reason for a checkpoint");
    volume.new_groups.set(128);
    assert_eq!([write(3), write(4)], [(0, 1); 2]);
    drop(harness.close());
}

#[test]
fn physical_blocks_of_a_lost_sector_do_not_cost_other_blocks_when_it_comes_back() {
    let old = old(512);
    let place = old.layout.page_offsets(0).unwrap();
    // The map entries of blocks 0 to 15 are unreadable for a while. Meanwhile the whole block group is written twice.
    let medium = old.harmed(place.offset + 512, 512, Harm::Unreadable);
    let harness = Harness::open(&medium, false).unwrap();
    for seed in [8, 9] {
        harness.write(16, &pattern(seed, (BLOCKS as usize - 16) * SIZE.bytes())).unwrap();
        harness.flush().unwrap();
    }
    medium.unreadable.set((0, 0));
    harness.write(0, &pattern(4, SIZE.bytes())).unwrap();
    harness.flush().unwrap();
    harness.write(600, &pattern(5, 100 * SIZE.bytes())).unwrap();
    let harness = Harness::open(&harness.close(), false).unwrap();
    assert!(harness.read(16, 584).unwrap() == pattern(9, (BLOCKS as usize - 16) * SIZE.bytes())[..584 * SIZE.bytes()]);
    assert!(harness.read(0, 1).unwrap() == pattern(4, SIZE.bytes()));
    let bad_blocks = harness.verify().unwrap_err().bad_blocks().unwrap().as_slice().to_vec();
    assert_eq!(bad_blocks, (1..16).map(|lba| BadBlock::media(Lba::new(lba))).collect::<Vec<_>>());
}
