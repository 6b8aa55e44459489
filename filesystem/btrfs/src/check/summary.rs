//! What is known about a part of a subvolume's tree: a leaf, a subtree, the whole.
//!
//! Summaries of neighbours are joined in the order of keys, and the result does not depend on how the tree is cut into
//! parts. So the summary of a node that snapshots share is computed once and used in each of them.
//!
//! Only the first and the last inode of a part may continue outside; all others are checked as soon as they are
//! complete.

use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::key::ItemType;
use sealblock_btrfs_format::node::Node;

use super::descent::Tree;
use super::inodes::{InodeFacts, Piece, is_known};
use super::names::{Hashes, NameSums, kind_of_mode};
use super::report::{Place, Rule, WhyNotChecked};
use super::session::Session;
use crate::inode::FileKind;

/// A summary.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    /// The first inode, which may continue before it, and after it if there is no `tail`.
    head: Option<Box<Piece>>,
    /// The last inode, if there are several.
    tail: Option<Box<Piece>>,
    sums: NameSums,
    /// True if nodes of it are lost or were not walked.
    is_incomplete: bool,
    /// True if what begins it is lost, before the first inode that is there.
    starts_lost: bool,
    /// True if what ends it is lost.
    ends_lost: bool,
    /// Inodes without links, and inodes that have an ORPHAN_ITEM.
    unlinked: Vec<u64>,
    orphans: Vec<u64>,
    /// The type of the top directory, once it was seen.
    top: Option<u32>,
}

/// Checks files of subvolumes.
pub(super) struct Files<'s, 'a> {
    pub session: &'s Session<'a>,
    pub hashes: &'s Hashes,
}

impl Summary {
    /// That of a node that is lost.
    pub fn lost() -> Summary {
        Summary { is_incomplete: true, starts_lost: true, ends_lost: true, ..Summary::default() }
    }

    /// The number of inodes in its lists.
    pub fn list_lengths(&self) -> usize {
        self.unlinked.len() + self.orphans.len()
    }

    /// The number and the item of its last inode, which may continue after it.
    pub fn last_inode(&self) -> Option<(u64, Option<InodeFacts>)> {
        let last = self.tail.as_ref().or(self.head.as_ref())?;
        Some((last.ino, last.facts))
    }

    fn last_mut(&mut self) -> Option<&mut Box<Piece>> {
        self.tail.as_mut().or(self.head.as_mut())
    }
}

impl Files<'_, '_> {
    /// The summary of a leaf.
    pub fn leaf(&self, tree: &Tree, leaf: &Node<'_>) -> Summary {
        let mut summary = Summary::default();
        let mut piece: Option<Piece> = None;
        for (key, data) in leaf.entries() {
            if key.item_type == ItemType::ORPHAN_ITEM {
                summary.orphans.push(key.offset);
                continue;
            }
            if !is_known(key.item_type) {
                let place = Place::item(tree.root.id, key);
                self.session.found(Rule::UnknownItem, place, "no item of this type belongs in a subvolume");
            }
            if key.objectid == tree.root_dirid
                && key.item_type == ItemType::INODE_ITEM
                && let Ok(Item::Inode(item)) = Item::decode(key, data)
            {
                summary.top = Some(item.mode.get());
            }
            match &mut piece {
                Some(piece) if piece.ino == key.objectid => {}
                other => {
                    if let Some(before) = other.replace(Piece::new(key.objectid)) {
                        self.push(&mut summary, tree, Box::new(before));
                    }
                }
            }
            if let Some(piece) = &mut piece {
                piece.add(self.session, tree.root.id, self.hashes, (key, data));
            }
        }
        if let Some(last) = piece {
            self.push(&mut summary, tree, Box::new(last));
        }
        summary
    }

    /// Adds an inode that begins after the last one of a summary.
    fn push(&self, summary: &mut Summary, tree: &Tree, piece: Box<Piece>) {
        if summary.head.is_none() {
            summary.head = Some(piece);
        } else if let Some(before) = summary.tail.replace(piece) {
            self.finish(summary, tree, &before);
        }
    }

    /// Joins a summary with that of what follows.
    pub fn join(&self, summary: &mut Summary, tree: &Tree, later: Summary) {
        let Summary { head, tail, sums, is_incomplete, starts_lost, ends_lost, unlinked, orphans, top } = later;
        summary.sums.add(&sums);
        summary.is_incomplete |= is_incomplete;
        summary.top = summary.top.or(top);
        let most = self.session.options.most_names;
        if summary.unlinked.len().saturating_add(unlinked.len()) > most || summary.orphans.len() + orphans.len() > most
        {
            self.session.not_checked(WhyNotChecked::TooManyNames);
            summary.is_incomplete = true;
        } else {
            summary.unlinked.extend(unlinked);
            summary.orphans.extend(orphans);
        }
        if starts_lost {
            match summary.last_mut() {
                Some(last) => last.is_cut = true,
                None => summary.starts_lost = true,
            }
        }
        let Some(mut head) = head else {
            summary.ends_lost |= ends_lost;
            return;
        };
        head.is_cut |= starts_lost || std::mem::take(&mut summary.ends_lost);
        match summary.last_mut().filter(|last| last.ino == head.ino) {
            Some(last) => last.join(self.session, tree.root.id, *head),
            None => self.push(summary, tree, head),
        }
        if let Some(tail) = tail {
            self.push(summary, tree, tail);
        }
        summary.ends_lost = ends_lost;
    }

    /// Checks an inode that is complete.
    fn finish(&self, summary: &mut Summary, tree: &Tree, piece: &Piece) {
        let nlink = piece.finish(self.session, tree.root.id, tree.root_dirid);
        match nlink {
            // A directory to be deleted may still have entries for inodes that are gone.
            Some(0) => summary.unlinked.push(piece.ino),
            _ => summary.sums.add(&piece.sums),
        }
        if let Some(facts) = piece.facts {
            summary.sums.add_kind(self.hashes, piece.ino, kind_of_mode(facts.mode), piece.links());
        }
    }

    /// Checks a whole subvolume. Returns true if its names must be compared one by one.
    pub fn finish_tree(&self, mut summary: Summary, tree: &Tree) -> bool {
        let (session, id) = (self.session, tree.root.id);
        let (starts_lost, ends_lost) = (summary.starts_lost, summary.ends_lost);
        if let Some(head) = &mut summary.head {
            head.is_cut |= starts_lost;
        }
        if let Some(last) = summary.last_mut() {
            last.is_cut |= ends_lost;
        }
        let (head, tail) = (summary.head.take(), summary.tail.take());
        [head, tail].iter().flatten().for_each(|piece| self.finish(&mut summary, tree, piece));
        if summary.is_incomplete {
            session.not_checked(WhyNotChecked::LostInodes);
            return false;
        }
        let top = Place::inode(id, tree.root_dirid);
        match summary.top.map(FileKind::of_mode) {
            Some(Some(FileKind::Directory)) => {}
            Some(_) => session.found(Rule::TopDirectory, top, "the top of the subvolume is no directory"),
            None => session.found(Rule::TopDirectory, top, "the subvolume has no top directory"),
        }
        summary.orphans.sort_unstable();
        for ino in summary.unlinked.iter().filter(|ino| summary.orphans.binary_search(ino).is_err()) {
            let why = "the inode has no links, and no ORPHAN_ITEM, so it is never deleted";
            session.found(Rule::NoOrphan, Place::inode(id, *ino), why);
        }
        !summary.sums.is_zero()
    }
}
