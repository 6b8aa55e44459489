//! Recovery: decides whether notes count, and reads them.
//!
//! Notes count if everything is as after the death of the process alone, and then all of them count. The conditions:
//! they belong to this boot of the machine and to the last open, none is missing, the log has the same map entries for
//! the same memtables, and the data of the newest change of each block are in its physical block, which no other block
//! uses. Then the newest note of a block is its newest change. Otherwise none counts, and the volume is as after a
//! power cut: the disk was lost and returned, or this is a copy that was made while the volume was in use. So whatever
//! notes contain, no block is older than its entry in the log, and none has another block's data.
//!
//! Notes outlive only this boot, so their content is made durable in the log before the block map gets any of it. Until
//! then the superblock records which notes were counted: if the process dies again, these count, even if the log that
//! they were compared with is in the block map by then.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use rustc_hash::{FxHashMap, FxHashSet};
use sealblock_block::{Medium, NoteKeeping};
use sealblock_integrity::guard;

use crate::format::{
    Answered, CountedNotes, LogPosition, MapEntryKind, MapEntryRun, NOTE_PAGE_BYTES, NOTES_PER_PAGE, Note, NoteHead,
    NotesPlace, Superblock, WhyLost,
};
use crate::life::recovery::{DataPresence, Recovered, fits, has_data};
use crate::map::map_entries::MapEntries;
use crate::medium::read_sectors;
use crate::options::{Mutation, OpenOptions, VolumeError};
use crate::volume::AnsweredChanges;

/// The number of blocks whose data are read at once.
const BLOCKS_IN_FLIGHT: usize = 64;

/// What the notes of a volume contain.
pub(crate) struct NotedChanges {
    /// The newest map entry of each noted block; empty if the notes do not count.
    pub entries: MapEntries,
    /// Where the notes are, and which of them count.
    pub place: Option<NotesPlace>,
    pub answered: AnsweredChanges,
}

/// The notes of one memtable, oldest first.
struct Gathered {
    base: LogPosition,
    /// The number of the first note.
    first: u64,
    notes: Vec<Note>,
}

impl Gathered {
    /// The number of the note after these.
    fn next(&self) -> u64 {
        self.first + self.notes.len() as u64
    }
}

/// A valid page.
struct Page {
    head: NoteHead,
    notes: usize,
    bytes: Vec<u8>,
}

/// Reads the notes of a volume with this recovered log, and decides whether they count.
pub(crate) async fn read<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    recovered: &Recovered,
    options: &OpenOptions,
) -> Result<NotedChanges, VolumeError> {
    let nothing = |answered| NotedChanges { entries: MapEntries::default(), place: None, answered };
    if superblock.is_clean {
        return Ok(nothing(AnsweredChanges::AllDurable));
    }
    let place = match superblock.answered {
        Answered::Volatile => {
            return Ok(nothing(AnsweredChanges::MayBeLost(WhyLost::InMemory)));
        }
        Answered::Durable => return Ok(nothing(AnsweredChanges::AllDurable)),
        Answered::Noted(place) => place,
    };
    let found = match find(medium, superblock, &place, recovered).await? {
        Ok(found) => found,
        Err(why) => return Ok(nothing(AnsweredChanges::MayBeLost(why))),
    };
    let newest = found.last().map(|gathered| gathered.next() - 1);
    let is_trusted = options.mutation.is(Mutation::TrustNotes);
    // If the notes were counted before, the log with which they were compared may be gone.
    if place.counted.is_none() && !is_trusted && !agrees_with_log(&found, recovered) {
        return Ok(nothing(AnsweredChanges::MayBeLost(WhyLost::NotNoted)));
    }
    if place.counted.is_some_and(|counted| Some(counted.newest) != newest) {
        return Ok(nothing(AnsweredChanges::MayBeLost(WhyLost::Gone)));
    }
    let entries = memtable_of(found.iter().flat_map(|gathered| &gathered.notes));
    if !is_trusted && !is_all_there(medium, superblock, &found, &entries).await? {
        return Ok(nothing(AnsweredChanges::MayBeLost(WhyLost::DataGone)));
    }
    let Some(newest) = newest else { return Ok(nothing(AnsweredChanges::Noted(0))) };
    let floor = place.counted.map_or(recovered.durable_end, |counted| counted.floor);
    let place = NotesPlace { counted: Some(CountedNotes { floor, newest }), ..place };
    let changes = found.iter().map(|gathered| gathered.notes.len() as u64).sum();
    Ok(NotedChanges { entries, place: Some(place), answered: AnsweredChanges::Noted(changes) })
}

/// The notes that are newer than what is known to be durable, by memtable, oldest first; or why they do not count.
async fn find<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    place: &NotesPlace,
    recovered: &Recovered,
) -> Result<Result<Vec<Gathered>, WhyLost>, VolumeError> {
    match medium.note_keeping() {
        NoteKeeping::UntilReboot(boot) if boot == place.boot => {}
        NoteKeeping::UntilReboot(_) => return Ok(Err(WhyLost::OtherBoot)),
        NoteKeeping::None | NoteKeeping::Needless => return Ok(Err(WhyLost::NoNotes)),
    }
    let seed = superblock.seed();
    let floor = place.counted.map_or(recovered.durable_end, |counted| counted.floor);
    let mut pages: BTreeMap<LogPosition, BTreeMap<u32, Page>> = BTreeMap::new();
    for half in [0, 1] {
        let offset = place.offset + half * u64::from(place.half_bytes);
        let length = place.half_bytes as usize;
        let (bytes, missing) = read_sectors(medium, offset, length, medium.sector_bytes() as usize).await?;
        if !missing.is_empty() {
            return Ok(Err(WhyLost::Unreadable));
        }
        for page in bytes.chunks_exact(NOTE_PAGE_BYTES) {
            let is_ours = |(head, _): &(NoteHead, usize)| (head.run, head.boot) == (place.run, place.boot);
            match NoteHead::decode(page, seed).filter(is_ours) {
                Some((head, notes)) if head.base >= floor => {
                    let page = Page { head, notes, bytes: page.to_vec() };
                    pages.entry(head.base).or_default().insert(head.number, page);
                }
                Some(_) => {}
                // A page without valid notes must be zero: the place was filled with zeroes.
                None if page.iter().any(|byte| *byte != 0) => return Ok(Err(WhyLost::Damaged)),
                None => {}
            }
        }
    }
    // Older memtables are durable, and their notes are partly overwritten.
    let newest: Vec<LogPosition> = pages.keys().rev().take(2).rev().copied().collect();
    let mut found: Vec<Gathered> = Vec::new();
    for base in newest {
        let Some(gathered) = whole(base, &pages[&base], superblock) else {
            return Ok(Err(WhyLost::Missing));
        };
        if found.last().is_some_and(|before| before.next() != gathered.first) {
            return Ok(Err(WhyLost::Missing));
        }
        found.push(gathered);
    }
    Ok(Ok(found))
}

/// The notes in the pages of one memtable; `None` unless all pages and notes are there and fit the volume.
fn whole(base: LogPosition, pages: &BTreeMap<u32, Page>, superblock: &Superblock) -> Option<Gathered> {
    let first = pages.values().next()?.head.first;
    let mut gathered = Gathered { base, first, notes: Vec::new() };
    for ((number, page), expected) in pages.iter().zip(0..) {
        let is_last = expected as usize + 1 == pages.len();
        let is_in_place = *number == expected && page.head.first == gathered.next();
        if !is_in_place || page.notes < NOTES_PER_PAGE && !is_last {
            return None;
        }
        for at in 0..page.notes {
            let note = Note::decode(&page.bytes, at).filter(|note| fits(superblock, &note.entries))?;
            gathered.notes.push(note);
        }
    }
    Some(gathered)
}

/// The content of a memtable after these changes.
fn memtable_of<'a>(notes: impl Iterator<Item = &'a Note>) -> MapEntries {
    let mut entries = MapEntries::default();
    for Note { entries: run, .. } in notes {
        match run.first.kind {
            MapEntryKind::Stored => drop(entries.put(run.first)),
            MapEntryKind::Deallocated | MapEntryKind::Uncorrectable => drop(entries.put_run(*run)),
        }
    }
    entries
}

/// True if the log has, for the memtables of these notes, only map entries that the notes have, too. At any time two
/// memtables have notes; if only one has, the log must not have entries of an older one.
fn agrees_with_log(found: &[Gathered], recovered: &Recovered) -> bool {
    let start = found.first().map_or((u64::MAX, 0), |first| first.base);
    let is_before = |position: &LogPosition| (recovered.durable_end..start).contains(position);
    if found.len() < 2 && recovered.tail.iter().any(|(position, _)| is_before(position)) {
        return false;
    }
    let alike = |run: &MapEntryRun| {
        let mut run = *run;
        run.first.generation = 0;
        run
    };
    found.iter().enumerate().all(|(at, gathered)| {
        let end = found.get(at + 1).map(|next| next.base);
        let of_memtable = |position: &LogPosition| *position >= gathered.base && end.is_none_or(|end| *position < end);
        let mut logged = recovered.tail.iter().filter(|(position, _)| of_memtable(position)).peekable();
        if logged.peek().is_none() {
            return true;
        }
        let noted: FxHashMap<u64, MapEntryRun> =
            memtable_of(gathered.notes.iter()).in_order().iter().map(|run| (run.start(), alike(run))).collect();
        logged.all(|(_, run)| noted.get(&run.start()) == Some(&alike(run)))
    })
}

/// True if the data of all blocks are in their physical blocks, and no two blocks share one.
async fn is_all_there<M: Medium>(
    medium: &M,
    superblock: &Superblock,
    found: &[Gathered],
    entries: &MapEntries,
) -> Result<bool, VolumeError> {
    let crcs: FxHashMap<u64, u32> = found
        .iter()
        .flat_map(|gathered| &gathered.notes)
        .filter(|note| note.entries.first.guard_unverified)
        .map(|note| (note.entries.start(), note.data_crc))
        .collect();
    let mut stored: Vec<_> = entries.in_order().iter().map(|run| run.first).collect();
    stored.retain(|entry| entry.kind == MapEntryKind::Stored);
    let layout = &superblock.layout;
    let mut places = FxHashSet::default();
    if !stored.iter().all(|entry| places.insert((layout.group_of(entry.lba), entry.pbn))) {
        return Ok(false);
    }
    stored.sort_by_key(|entry| layout.data_offset(entry));
    for some in stored.chunks(BLOCKS_IN_FLIGHT) {
        let checks = some.iter().map(|entry| {
            let crc = crcs.get(&entry.lba.get()).copied();
            async move {
                match entry.guard_unverified {
                    false => Ok(has_data(medium, superblock, entry).await? != DataPresence::No),
                    true => {
                        let offset = layout.data_offset(entry).expect("the map entry was found to fit the volume");
                        let length = layout.block_size().bytes();
                        let (data, missing) = read_sectors(medium, offset, length, length).await?;
                        Ok(!missing.is_empty() || crc == Some(guard::crc32c(&data)))
                    }
                }
            }
        });
        let checked: Vec<Result<bool, VolumeError>> = join_all(checks).await;
        for is_there in checked {
            if !is_there? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
