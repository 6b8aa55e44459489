//! References to extents: those that the extent tree records, and those that nodes and file extents make.
//!
//! The recorded ones are read first and sorted; each that is made is then looked up and counted. What remains at the
//! end is a difference.

use std::fmt;

use sealblock_btrfs_format::key::objectid;

use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;

/// What makes a reference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Maker {
    /// A node of this tree, or the root item of this tree: to a node.
    Tree(u64),
    /// The node with this address, which has FULL_BACKREF: to a node.
    Parent(u64),
    /// Extents of a file whose leaf has no FULL_BACKREF: to data.
    File { root: u64, ino: u64, offset: u64 },
    /// Extents of files in the leaf with this address, which has FULL_BACKREF: to data.
    Leaf(u64),
}

impl Maker {
    /// True for references to nodes.
    pub fn is_of_node(self) -> bool {
        matches!(self, Maker::Tree(_) | Maker::Parent(_))
    }
}

impl fmt::Display for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Maker::Tree(objectid::TREE_RELOC) => f.write_str("tree -8"),
            Maker::Tree(objectid::DATA_RELOC_TREE) => f.write_str("tree -9"),
            Maker::Tree(root) => write!(f, "tree {root}"),
            Maker::Parent(parent) => write!(f, "node {parent}"),
            Maker::File { root, ino, offset } => {
                write!(f, "tree {}, inode {ino}, offset {}", root as i64, offset as i64)
            }
            Maker::Leaf(parent) => write!(f, "leaf {parent}"),
        }
    }
}

/// A reference.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Reference {
    /// The first logical address of the extent.
    pub extent: u64,
    pub maker: Maker,
}

/// A reference in the extent tree.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    reference: Reference,
    count: u32,
    found: u32,
}

/// All references.
pub(super) struct References {
    recorded: Vec<Recorded>,
    is_sorted: bool,
    /// References that are made and not recorded, once for each time.
    unrecorded: Vec<Reference>,
    most: usize,
    is_cut: bool,
}

/// The maximum number of references that are made and not recorded, and that are counted together.
const MAX_UNRECORDED: usize = 1 << 20;

impl References {
    pub fn new(most: usize) -> References {
        References { recorded: Vec::new(), is_sorted: true, unrecorded: Vec::new(), most, is_cut: false }
    }

    /// True if some recorded references did not fit.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Adds a reference of the extent tree.
    pub fn record(&mut self, reference: Reference, count: u32) {
        if self.recorded.len() >= self.most {
            self.is_cut = true;
            return;
        }
        self.recorded.push(Recorded { reference, count, found: 0 });
        self.is_sorted = false;
    }

    /// Sorts the recorded references, and reports those that are recorded twice.
    pub fn sort(&mut self, session: &Session<'_>) {
        self.recorded.sort_unstable_by_key(|one| one.reference);
        self.recorded.dedup_by(|later, kept| {
            let is_same = later.reference == kept.reference;
            if is_same {
                let why = format!("the extent tree has the reference from {} twice", kept.reference.maker);
                session.found(Rule::ReferenceTwice, Place::at(kept.reference.extent), why);
                kept.count = kept.count.saturating_add(later.count);
            }
            is_same
        });
        self.is_sorted = true;
        session.count(|report| report.references = self.recorded.len() as u64);
    }

    /// True if a reference is recorded.
    pub fn has(&self, reference: Reference) -> bool {
        debug_assert!(self.is_sorted);
        self.recorded.binary_search_by_key(&reference, |one| one.reference).is_ok()
    }

    /// Counts a reference that is made. Returns false if it is not recorded.
    pub fn made(&mut self, reference: Reference) -> bool {
        debug_assert!(self.is_sorted);
        match self.recorded.binary_search_by_key(&reference, |one| one.reference) {
            Ok(index) => {
                let one = &mut self.recorded[index];
                one.found = one.found.saturating_add(1);
                true
            }
            Err(_) => false,
        }
    }

    /// Keeps a reference that is made and not recorded, for [`References::finish`].
    pub fn keep_unrecorded(&mut self, session: &Session<'_>, reference: Reference) {
        if self.unrecorded.len() < MAX_UNRECORDED {
            self.unrecorded.push(reference);
        } else {
            let why = format!("{} refers to it, which the extent tree does not record", reference.maker);
            session.found(Rule::ReferenceNotRecorded, Place::at(reference.extent), why);
        }
    }

    /// Reports the differences. If nodes are lost, recorded references that nothing makes are not judged.
    pub fn finish(mut self, session: &Session<'_>, has_lost_nodes: bool) {
        self.unrecorded.sort_unstable();
        for run in self.unrecorded.chunk_by(|a, b| a == b) {
            let Reference { extent, maker } = run[0];
            let times = if run.len() > 1 { format!(" {} times", run.len()) } else { String::new() };
            let why = format!("{maker} refers to it{times}, and the extent tree does not record that");
            session.found(Rule::ReferenceNotRecorded, Place::at(extent), why);
        }
        for Recorded { reference: Reference { extent, maker }, count, found } in self.recorded {
            if found > count {
                let why = format!("{maker} refers to it {found} times, and the extent tree records {count}");
                session.found(Rule::ReferenceNotRecorded, Place::at(extent), why);
            } else if found < count && has_lost_nodes {
                session.not_checked(WhyNotChecked::LostNodes);
            } else if found < count {
                let why = match found {
                    0 => format!("the extent tree records a reference from {maker}, which does not refer to it"),
                    _ => format!("the extent tree records {count} references from {maker}, and there are {found}"),
                };
                session.found(Rule::ReferenceNotFound, Place::at(extent), why);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn makers_sort_by_kind_and_print_what_they_are() {
        let file = Maker::File { root: 5, ino: 257, offset: 4096_u64.wrapping_neg() };
        let all = [Maker::Tree(5), Maker::Parent(1), file, Maker::Leaf(0)];
        assert!(all.is_sorted());
        let text: Vec<String> = all.iter().map(Maker::to_string).collect();
        assert_eq!(text, ["tree 5", "node 1", "tree 5, inode 257, offset -4096", "leaf 0"]);
        assert_eq!(Maker::Tree(objectid::TREE_RELOC).to_string(), "tree -8");
        assert!(all[0].is_of_node() && all[1].is_of_node() && !all[2].is_of_node() && !all[3].is_of_node());
    }

    #[test]
    fn a_recorded_reference_needs_little_memory() {
        assert!(size_of::<Recorded>() <= 48, "{}", size_of::<Recorded>());
    }
}
