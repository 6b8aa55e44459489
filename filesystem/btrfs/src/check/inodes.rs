//! The items of one inode, from one leaf or several, and the rules that they must obey together.
//!
//! An inode may lie across leaves of which only some are shared with snapshots. So its items are collected in pieces
//! that can be joined, and the rules are checked once all pieces are there.

use sealblock_btrfs_format::features::Incompat;
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::FileExtent;
use sealblock_btrfs_format::items::inode::{InodeFlags, InodeItem};
use sealblock_btrfs_format::key::{ItemType, Key, objectid};

use super::names::{Hashes, NameSums, is_dots, shown};
use super::report::{Place, Rule};
use super::session::Session;
use crate::inode::FileKind;

/// What the rules need of an INODE_ITEM.
#[derive(Clone, Copy, Debug)]
pub(super) struct InodeFacts {
    pub mode: u32,
    pub nlink: u32,
    pub size: u64,
    pub nbytes: u64,
    pub flags: InodeFlags,
}

impl From<&InodeItem> for InodeFacts {
    fn from(item: &InodeItem) -> InodeFacts {
        InodeFacts {
            mode: item.mode.get(),
            nlink: item.nlink.get(),
            size: item.size.get(),
            nbytes: item.nbytes.get(),
            flags: item.flags(),
        }
    }
}

/// File extents in a row.
#[derive(Clone, Copy, Debug)]
struct Run {
    first: u64,
    end: u64,
    /// What they add to the bytes of the inode.
    bytes: u64,
    /// The first hole between them that has no item.
    first_gap: Option<u64>,
    count: u64,
    /// For a single inline extent that is not compressed: its bytes.
    plain_inline: Option<u64>,
}

/// The items of one inode, or a piece of them.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub ino: u64,
    pub facts: Option<InodeFacts>,
    /// True if items beside them are lost.
    pub is_cut: bool,
    /// Names, not counting that of a top directory in itself.
    links: u64,
    has_dots: bool,
    index_name_bytes: u64,
    has_entries: bool,
    run: Option<Run>,
    /// What its names and entries add to the sums of the subvolume.
    pub sums: NameSums,
}

impl Piece {
    pub fn new(ino: u64) -> Piece {
        Piece {
            ino,
            facts: None,
            is_cut: false,
            links: 0,
            has_dots: false,
            index_name_bytes: 0,
            has_entries: false,
            run: None,
            sums: NameSums::default(),
        }
    }

    /// Adds an item.
    pub fn add(&mut self, session: &Session<'_>, tree: u64, hashes: &Hashes, (key, data): (Key, &[u8])) {
        let sums = &mut self.sums;
        match Item::decode(key, data) {
            Ok(Item::Inode(item)) => self.facts = Some(item.into()),
            Ok(Item::InodeRefs(refs)) => {
                for one in refs.iter() {
                    if is_dots(self.ino, key.offset, one.name) {
                        self.has_dots = true;
                        if one.index != 0 {
                            let why = format!("the name of the top directory in itself has the index {}", one.index);
                            session.found(Rule::Name, Place { ino: Some(self.ino), ..Place::item(tree, key) }, why);
                        }
                    } else {
                        self.links += 1;
                        sums.add_name(hashes, key.offset, one.index, self.ino, one.name);
                    }
                }
            }
            Ok(Item::InodeExtrefs(refs)) => {
                for one in refs.iter() {
                    self.links += 1;
                    sums.add_name(hashes, one.parent, one.index, self.ino, one.name);
                }
            }
            Ok(Item::DirItems(entries)) => {
                self.has_entries = true;
                for (index, entry) in entries.iter().enumerate() {
                    sums.add_entry(hashes, self.ino, &entry);
                    if entries.iter().take(index).any(|other| other.name == entry.name) {
                        let why = format!("the directory has the name {} twice", shown(entry.name));
                        session.found(Rule::Name, Place { ino: Some(self.ino), ..Place::item(tree, key) }, why);
                    }
                }
            }
            Ok(Item::DirIndex(entries)) => {
                self.has_entries = true;
                for entry in entries.iter() {
                    self.index_name_bytes = self.index_name_bytes.saturating_add(entry.name.len() as u64);
                    sums.add_index(hashes, self.ino, key.offset, &entry);
                }
            }
            Ok(Item::FileExtent(extent)) => {
                check_extent(session, tree, key, &extent);
                let run = run_of(session, key.offset, &extent);
                self.add_run(session, tree, run);
            }
            _ => {}
        }
    }

    /// Adds the piece that follows in the order of keys.
    pub fn join(&mut self, session: &Session<'_>, tree: u64, later: Piece) {
        debug_assert_eq!(self.ino, later.ino);
        self.facts = self.facts.or(later.facts);
        self.is_cut |= later.is_cut;
        self.links += later.links;
        self.has_dots |= later.has_dots;
        self.index_name_bytes = self.index_name_bytes.saturating_add(later.index_name_bytes);
        self.has_entries |= later.has_entries;
        self.sums.add(&later.sums);
        if let Some(run) = later.run {
            self.add_run(session, tree, run);
        }
    }

    fn add_run(&mut self, session: &Session<'_>, tree: u64, later: Run) {
        let Some(run) = &mut self.run else {
            self.run = Some(later);
            return;
        };
        if later.first < run.end {
            let why =
                format!("the file extent at {} begins before the one before it ends, at {}", later.first, run.end);
            session.found(Rule::FileOverlap, Place::inode(tree, self.ino), why);
        }
        if later.first > run.end {
            run.first_gap = run.first_gap.or(Some(run.end));
        }
        run.first_gap = run.first_gap.or(later.first_gap);
        run.end = run.end.max(later.end);
        run.bytes = run.bytes.saturating_add(later.bytes);
        run.count += later.count;
        run.plain_inline = None;
    }

    /// Checks the rules of an inode all of whose items are there. Returns its link count.
    pub fn finish(&self, session: &Session<'_>, tree: u64, root_dirid: u64) -> Option<u32> {
        let place = Place::inode(tree, self.ino);
        // The items of orphans have no inode, and neither have old caches of inode numbers names.
        if self.is_cut || !(objectid::FIRST_FREE..=objectid::LAST_FREE).contains(&self.ino) {
            return None;
        }
        session.count(|report| report.inodes += 1);
        let Some(facts) = self.facts else {
            session.found(Rule::NoInode, place, "there are items of this inode, and no INODE_ITEM");
            return None;
        };
        let unknown = facts.flags.difference(InodeFlags::all()).bits();
        if unknown != 0 {
            let why = format!("the inode has the unknown flags {unknown:#x}, with which Linux does not write to it");
            session.found(Rule::InodeKind, place, why);
        }
        let kind = FileKind::of_mode(facts.mode);
        if kind == Some(FileKind::Symlink) && facts.flags.intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
            session.found(Rule::InodeKind, place, "the symbolic link is immutable or append-only");
        }
        self.check_links(session, place, &facts, self.ino == root_dirid);
        if kind == Some(FileKind::Directory) {
            let size = self.index_name_bytes.saturating_mul(2);
            // A directory to be deleted may have lost some of its entries.
            if facts.size != size && facts.nlink > 0 {
                let why = format!("the directory has size {}, and its names need {size}", facts.size);
                session.found(Rule::DirectorySize, place, why);
            }
        } else if self.has_entries {
            session.found(Rule::InodeKind, place, "there are directory entries, and it is no directory");
        }
        match (kind, self.run) {
            (Some(FileKind::Symlink), run) => check_symlink(session, place, &facts, run),
            (Some(FileKind::Regular), run) => check_holes(session, place, &facts, run),
            (_, Some(_)) => {
                session.found(Rule::InodeKind, place, "there are file extents, and it is no file");
            }
            (_, None) => {}
        }
        let bytes = self.run.map_or(0, |run| run.bytes);
        // An inode to be deleted may be half truncated.
        if matches!(kind, Some(FileKind::Regular | FileKind::Symlink)) && facts.nlink > 0 && facts.nbytes != bytes {
            let why = format!("the inode counts {} bytes, and its extents have {bytes}", facts.nbytes);
            session.found(Rule::InodeBytes, place, why);
        }
        Some(facts.nlink)
    }

    fn check_links(&self, session: &Session<'_>, place: Place, facts: &InodeFacts, is_top: bool) {
        if self.has_dots && !is_top {
            let why = "it has a name in itself, and it is not the top directory";
            session.found(Rule::Links, place, why);
        }
        let links = self.links + u64::from(self.has_dots);
        if u64::from(facts.nlink) != links {
            let why = format!("the link count is {}, and the inode has {links} names", facts.nlink);
            session.found(Rule::Links, place, why);
        } else if links > 1 && FileKind::of_mode(facts.mode) == Some(FileKind::Directory) {
            session.found(Rule::Links, place, format!("the directory has {links} names"));
        }
    }

    /// The number of names that directories contain.
    pub fn links(&self) -> u64 {
        self.links
    }
}

fn run_of(session: &Session<'_>, first: u64, extent: &FileExtent<'_>) -> Run {
    let (bytes, length, plain_inline) = match extent {
        FileExtent::Inline(head, data) => {
            let bytes = head.ram_bytes.get();
            let length = bytes.checked_next_multiple_of(session.sector_bytes()).unwrap_or(u64::MAX);
            (bytes, length, (head.compression == 0).then_some(data.len() as u64))
        }
        FileExtent::Regular(_, location) | FileExtent::Prealloc(_, location) => {
            let bytes = location.num_bytes.get();
            (if location.is_hole() { 0 } else { bytes }, bytes, None)
        }
    };
    Run { first, end: first.saturating_add(length), bytes, first_gap: None, count: 1, plain_inline }
}

/// The rules of one file extent that the checker of nodes does not have, since they forbid only writing it.
fn check_extent(session: &Session<'_>, tree: u64, key: Key, extent: &FileExtent<'_>) {
    let head = extent.head();
    let place = || Place { ino: Some(key.objectid), ..Place::item(tree, key) };
    let sector = session.sector_bytes();
    match extent {
        FileExtent::Inline(_, data) => {
            let plain = head.ram_bytes.get();
            let is_long = if head.compression == 0 { plain >= sector } else { plain > sector };
            if plain == 0 || data.is_empty() {
                session.found(Rule::FileExtent, place(), "the inline extent is empty");
            } else if is_long {
                let why = format!("the inline extent has {plain} bytes, which is too much for sectors of {sector}");
                session.found(Rule::FileExtent, place(), why);
            }
        }
        FileExtent::Regular(_, location) | FileExtent::Prealloc(_, location) => {
            if matches!(extent, FileExtent::Prealloc(..)) {
                if location.is_hole() {
                    session.found(Rule::FileExtent, place(), "the preallocated extent has no address");
                }
                if head.compression != 0 {
                    session.found(Rule::FileExtent, place(), "the preallocated extent is compressed");
                }
            }
            let (offset, bytes) = (location.offset.get(), location.num_bytes.get());
            if key.offset.checked_add(bytes).is_none_or(|end| end > i64::MAX as u64) {
                session.found(Rule::FileExtent, place(), "the extent ends behind the largest file");
            }
            if !location.is_hole() && offset.saturating_add(bytes) > head.ram_bytes.get() {
                let why = format!(
                    "the file uses {bytes} bytes from {offset} on of an extent whose ram_bytes are {}",
                    head.ram_bytes
                );
                session.found(Rule::FileExtent, place(), why);
            }
        }
    }
}

/// A hole needs an item without NO_HOLES, up to the size of the file.
fn check_holes(session: &Session<'_>, place: Place, facts: &InodeFacts, run: Option<Run>) {
    if session.has(Incompat::NO_HOLES) || facts.nlink == 0 {
        return;
    }
    let gap = match run {
        None => Some(0),
        Some(run) if run.first > 0 => Some(0),
        Some(run) => run.first_gap.or(Some(run.end)),
    };
    if let Some(gap) = gap.filter(|gap| *gap < facts.size) {
        let why = format!("the hole at {gap} has no item, which only NO_HOLES allows");
        session.found(Rule::FileHole, place, why);
    }
}

fn check_symlink(session: &Session<'_>, place: Place, facts: &InodeFacts, run: Option<Run>) {
    let why = match run {
        None => "the symbolic link has no target".to_owned(),
        // `btrfs-convert` also stores the zero byte that ends the target.
        Some(Run { count: 1, first: 0, plain_inline: Some(bytes), .. })
            if bytes == facts.size || Some(bytes) == facts.size.checked_add(1) =>
        {
            return;
        }
        Some(Run { count: 1, first: 0, plain_inline: Some(bytes), .. }) => {
            format!("the symbolic link has size {}, and its target {bytes} bytes", facts.size)
        }
        Some(_) => "the target of the symbolic link is not in one plain inline extent".to_owned(),
    };
    session.found(Rule::Symlink, place, why);
}

/// True for the types of items that an inode can have.
pub(super) fn is_known(item_type: ItemType) -> bool {
    matches!(
        item_type,
        ItemType::INODE_ITEM
            | ItemType::INODE_REF
            | ItemType::INODE_EXTREF
            | ItemType::XATTR_ITEM
            | ItemType::VERITY_DESC_ITEM
            | ItemType::VERITY_MERKLE_ITEM
            | ItemType::DIR_ITEM
            | ItemType::DIR_INDEX
            | ItemType::EXTENT_DATA
            // The header of an old cache of inode numbers.
            | ItemType::UNTYPED
    )
}
