//! The application tags of data without checksums, and of the nodes of a filesystem without any, on devices with protection
//! information.
//!
//! A device checks by itself that data match their guard and lie where they were written. It cannot know whether they are
//! what was written there last. So the engine gives data the tag of the transaction in which they were written, which the
//! item of the file has, too: data of another transaction in the same place are found, as after a write that was lost or
//! went elsewhere. Blocks that were never written have no tag at all.
//!
//! Invariants:
//! - A tag is demanded only of data that nobody but the engine can have written ([`OwnWindows`]), on a device whose data
//!   have tags. Whatever is not demanded is not called damage: another program gives no tags.
//! - The engine gives superblocks the tag of their transaction. If one that it wrote has none, somebody has copied the bytes
//!   of the device without its tags: nothing is demanded of such a device.
//! - Nodes have tags only in a filesystem without checksums, which no other program writes. So on a device that has shown
//!   that it keeps its tags, each block of a node must have that of its node's transaction, and nothing else passes
//!   (`Demand::of_node`). On any other device nothing shows whether a node is the one that was written.
//! - Data that are written in place keep the number of their extent. Another program that has written since may have
//!   written them, so nothing is demanded then. It may also have ended before its transaction: so data in place may lack a
//!   tag at any time. Those of an earlier write to the same place pass.

use std::collections::BTreeSet;

use sealblock_block::Expectations;
use sealblock_btrfs_format::commit_record::CommitRecord;
use sealblock_btrfs_format::own_windows::OwnWindows;
use sealblock_btrfs_format::superblock::Superblock;
use sealblock_integrity::{Checks, Masked, PiFormat, Sealed, Tags};

/// Tags from 1 on: 0 is what programs write that give none, and FFFFh disables checks.
const TAGS: u64 = 0xFFFE;
/// The tag of data that were written without one.
const UNTAGGED: u16 = 0;
/// The tag of blocks that were never written, and of deallocated ones.
const UNWRITTEN: u16 = 0xFFFF;

/// When data without checksums were written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct WrittenIn {
    /// The transaction that the file's item has.
    pub generation: u64,
    /// True for a file without copy-on-write, whose data may have been written over since.
    pub is_in_place: bool,
}

/// The tags for blocks of a transaction; for `None`, those of blocks that have none.
pub fn tags_of(generation: Option<u64>, initial_ref_tag: u64) -> Tags {
    let app_tag = generation.map_or(UNTAGGED, tag_of);
    Tags { app_tag, storage_tag: generation.unwrap_or(0), initial_ref_tag }
}

/// The application tag of a transaction.
pub fn tag_of(generation: u64) -> u16 {
    1 + (generation % TAGS) as u16
}

/// True if blocks have the tag of a transaction.
pub fn has_tag_of(blocks: &Sealed, generation: u64) -> bool {
    blocks.format().is_some() && blocks.tuples().all(|tuple| tuple.app_tag == tag_of(generation))
}

/// What the tags of blocks say about a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TagState {
    /// All have its tag.
    Own,
    /// Some have none, and the others its tag.
    Lacking,
    /// None has any tag.
    Untagged,
    /// Some have the tag of another transaction.
    Other(u16),
}

impl TagState {
    /// That of some blocks.
    pub fn of(blocks: &Sealed, generation: u64) -> TagState {
        let Some(format) = blocks.format() else { return TagState::Untagged };
        let (mut has_own, mut has_none) = (false, false);
        for tuple in blocks.tuples() {
            match tuple.app_tag {
                tag if tag == tag_of(generation) && tuple.storage_tag == storage_tag(format, generation) => {
                    has_own = true
                }
                UNTAGGED | UNWRITTEN => has_none = true,
                tag => return TagState::Other(tag),
            }
        }
        match (has_own, has_none) {
            (_, false) => TagState::Own,
            (true, true) => TagState::Lacking,
            (false, true) => TagState::Untagged,
        }
    }
}

impl TagMismatch {
    /// True if there is no tag, as in what another program wrote.
    pub(crate) fn is_untagged(&self) -> bool {
        self.actual == UNTAGGED
    }

    /// Data that lack the tag of a transaction, and are not those of another copy that has it.
    pub(crate) fn untagged(generation: u64) -> TagMismatch {
        TagMismatch { generation, actual: UNTAGGED, storage_tags: None }
    }

    fn kind(&self) -> &'static str {
        if self.storage_tags.is_some() { "storage" } else { "application" }
    }

    /// The tag that is demanded and the one that is there, in hexadecimal digits: storage tags if only these differ.
    pub fn values(&self) -> (String, String) {
        match self.storage_tags {
            Some((demanded, actual)) => (format!("{demanded:x}"), format!("{actual:x}")),
            None => (format!("{:04x}", tag_of(self.generation)), format!("{:04x}", self.actual)),
        }
    }
}

/// A tag that is not the demanded one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("its data are not those of transaction {generation}: {} tag {} instead of {}", self.kind(), self.values().1, self.values().0)]
pub struct TagMismatch {
    /// The transaction of which the data should be.
    pub generation: u64,
    /// The application tag that they have.
    pub actual: u16,
    /// The storage tags that are demanded and that they have, if only these differ.
    pub storage_tags: Option<(u64, u64)>,
}

/// What is demanded of the tags of some data on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Demand {
    generation: u64,
    /// True if they may lack a tag: another program may have moved or written them, or they may be zeroes that the device
    /// made, in blocks that were never written.
    may_lack_tag: bool,
}

impl Demand {
    /// That of the nodes of a transaction.
    pub(crate) fn of_node(generation: u64) -> Demand {
        Demand { generation, may_lack_tag: false }
    }

    /// Blocks that meet these have the tag.
    pub(crate) fn strict(&self, format: PiFormat) -> Expectations {
        Expectations::new(Checks { checks_escapes: true, ..self.checks(format) })
    }

    /// Blocks that meet this have no tag; `None` if they must have one.
    pub(crate) fn untagged(&self) -> Option<Expectations> {
        let app_tag = Some(Masked { expected: UNTAGGED, mask: u16::MAX });
        self.may_lack_tag.then_some(Expectations::new(Checks { app_tag, ..Checks::NONE }))
    }

    fn checks(&self, format: PiFormat) -> Checks {
        let app_tag = Some(Masked { expected: tag_of(self.generation), mask: u16::MAX });
        let mask = format.storage_tag_mask();
        let storage_tag = Masked { expected: storage_tag(format, self.generation), mask };
        Checks { app_tag, storage_tag: (mask != 0).then_some(storage_tag), ..Checks::NONE }
    }

    /// Checks the tags of blocks. Returns true if all of them show that the data are those of the transaction.
    ///
    /// # Errors
    /// The first tag that is not as demanded.
    pub fn check(&self, read: &Sealed) -> Result<bool, TagMismatch> {
        let mismatch = |actual| {
            let storage_tags = self.other_storage_tags(read).filter(|_| actual == tag_of(self.generation));
            Err(TagMismatch { generation: self.generation, actual, storage_tags })
        };
        match TagState::of(read, self.generation) {
            TagState::Own => Ok(true),
            TagState::Lacking | TagState::Untagged if self.may_lack_tag || read.format().is_none() => Ok(false),
            TagState::Lacking | TagState::Untagged => {
                let lacking = read.tuples().map(|tuple| tuple.app_tag).find(|tag| matches!(*tag, UNTAGGED | UNWRITTEN));
                mismatch(lacking.unwrap_or(UNTAGGED))
            }
            TagState::Other(actual) => mismatch(actual),
        }
    }

    /// The demanded storage tag, and the first other one.
    fn other_storage_tags(&self, read: &Sealed) -> Option<(u64, u64)> {
        let demanded = storage_tag(read.format()?, self.generation);
        let mut tags = read.tuples().map(|tuple| tuple.storage_tag);
        tags.find(|tag| *tag != demanded).map(|tag| (demanded, tag))
    }
}

/// The part of the number that the format's storage tag has room for.
fn storage_tag(format: PiFormat, generation: u64) -> u64 {
    generation & format.storage_tag_mask()
}

/// What can be demanded of the tags of a filesystem.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DataTags {
    windows: OwnWindows,
    /// The newest transaction.
    newest: u64,
    /// The devices whose data have tags.
    tagged: BTreeSet<u64>,
}

impl DataTags {
    /// What the record of a superblock says, of these devices that have protection information, and have not lost their
    /// tags: their numbers and UUIDs.
    pub fn new(superblock: &Superblock, devices: impl IntoIterator<Item = (u64, [u8; 16])>) -> DataTags {
        let Some(record) = CommitRecord::read(superblock) else { return DataTags::default() };
        let tagged = devices.into_iter().filter(|(_, uuid)| record.is_tagged(*uuid)).map(|(devid, _)| devid).collect();
        DataTags { windows: record.windows, newest: superblock.generation.get(), tagged }
    }

    /// As the engine has it: it writes all transactions from `from` on, with tags on these devices.
    pub fn writing(windows: &OwnWindows, tagged: BTreeSet<u64>) -> DataTags {
        let Some(last) = windows.last() else { return DataTags::default() };
        DataTags { windows: windows.with(last, true, u64::MAX), newest: u64::MAX, tagged }
    }

    /// What is demanded of data on a device; `None` if nothing can be.
    pub fn demand(&self, devid: u64, written: WrittenIn) -> Option<Demand> {
        self.demand_anywhere(written).filter(|_| self.tagged.contains(&devid))
    }

    /// What is demanded of data on devices with tags; `None` if nothing can be, or there is no such device.
    pub(crate) fn demand_anywhere(&self, written: WrittenIn) -> Option<Demand> {
        let WrittenIn { generation, is_in_place } = written;
        let has_other = self.windows.has_other_after(generation, self.newest);
        let is_own = !self.tagged.is_empty() && self.windows.contains(generation) && !(is_in_place && has_other);
        // Another program may also have let this file share zeroes of one that is written in place.
        is_own.then_some(Demand { generation, may_lack_tag: is_in_place || has_other })
    }
}

#[cfg(test)]
mod tests {
    use sealblock_integrity::{GuardKind, ProtectionType};
    use sealblock_runtime_memory::Slice;
    use sealblock_units::BlockSize;

    use super::*;

    const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

    fn written(generation: u64, is_in_place: bool) -> WrittenIn {
        WrittenIn { generation, is_in_place }
    }

    fn block(app_tag: u16, storage_tag: u64) -> Sealed {
        let tags = Tags { app_tag, storage_tag, initial_ref_tag: 7 };
        Sealed::seal(Slice::copy_from(&[1; 4096]), BlockSize::B4096, Some(FORMAT), &tags)
    }

    #[test]
    fn tags_are_never_those_that_mean_something_else() {
        assert_eq!([0, 1, 65_532, 65_533, 65_534].map(tag_of), [1, 2, 65_533, 65_534, 1]);
        assert_eq!(tags_of(None, 9), Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 9 });
        assert_eq!(tags_of(Some(65_534), 9), Tags { app_tag: 1, storage_tag: 65_534, initial_ref_tag: 9 });
    }

    /// Windows 4 to 9 and 15 to 20. 10 to 14 are Linux's; device 2 has no tags.
    #[test]
    fn tags_are_demanded_only_of_what_nobody_else_can_have_written() {
        let windows = OwnWindows::default().with(1, true, 4).with(4, true, 9).with(12, true, 15).with(15, true, 20);
        let tags = DataTags { windows, newest: 20, tagged: BTreeSet::from([1]) };
        let demand = |generation, may_lack_tag| Some(Demand { generation, may_lack_tag });
        assert_eq!(tags.demand(1, written(17, false)), demand(17, false));
        assert_eq!(tags.demand(1, written(17, true)), demand(17, true), "Linux may have ended before its transaction");
        assert_eq!(tags.demand(1, written(7, false)), demand(7, true), "Linux may have moved it");
        assert_eq!(tags.demand(1, written(7, true)), None, "Linux may have written over it");
        for (devid, generation) in [(1, 12), (1, 3), (1, 21), (2, 17)] {
            assert_eq!(tags.demand(devid, written(generation, false)), None);
        }
        // Linux has written once more.
        let later = DataTags { newest: 21, ..tags.clone() };
        assert_eq!(later.demand(1, written(17, false)), demand(17, true));
        assert_eq!(later.demand(1, written(17, true)), None);
        // The engine goes on.
        let writing = DataTags::writing(&tags.windows, BTreeSet::from([1]));
        assert_eq!(writing.demand(1, written(25, true)), demand(25, true));
        assert_eq!(writing.demand(1, written(7, false)), demand(7, true));
        assert_eq!(DataTags::default().demand(1, written(5, false)), None);
    }

    #[test]
    fn what_is_tolerated_attests_nothing() {
        let mismatch = |actual| Err(TagMismatch { generation: 9, actual, storage_tags: None });
        for (may_lack_tag, [own, none, never]) in
            [(false, [Ok(true), mismatch(0), mismatch(0xFFFF)]), (true, [Ok(true), Ok(false), Ok(false)])]
        {
            let demand = Demand { generation: 9, may_lack_tag };
            assert_eq!(demand.check(&block(10, 9)), own);
            assert_eq!(demand.check(&block(0, 0)), none);
            assert_eq!(demand.check(&block(0xFFFF, u64::MAX)), never);
            assert_eq!(demand.check(&block(11, 10)), mismatch(11), "another transaction");
            if FORMAT.storage_tag_bits() > 0 {
                let later = demand.check(&block(10, 9 + 65_534)).unwrap_err();
                assert_eq!(later.storage_tags, Some((9, 7)), "65,534 transactions later, in 16 bits");
                assert!(later.to_string().ends_with("storage tag 7 instead of 9"), "{later}");
            }
        }
        // What a device with several copies is asked for is never tolerant.
        let demand = Demand { generation: 9, may_lack_tag: true };
        let expected = demand.strict(FORMAT);
        let passes = |app_tag, storage_tag| {
            let one = sealblock_units::Extent::from_raw(7, 1).unwrap();
            expected.check(one, &block(app_tag, storage_tag)).is_ok()
        };
        assert!(passes(10, 9) && !passes(0, 0) && !passes(0xFFFF, u64::MAX) && !passes(11, 10));
        let untagged = Sealed::seal(Slice::copy_from(&[1; 4096]), BlockSize::B4096, None, &Tags::default());
        let demand = Demand { generation: 9, may_lack_tag: false };
        assert_eq!(demand.check(&untagged), Ok(false));
    }
}
