//! The walk through all trees: each node is visited once, whatever shares it, and gives its references to its children
//! and to data.
//!
//! Invariants:
//! - The number of visits is that of nodes, not that of paths to them. What a shared node says about files is kept, and
//!   used again for each subvolume that shares it.
//! - The extent tree is read before, because its flags decide how the children of a node are referred to.

use std::collections::HashMap;
use std::rc::Rc;

use sealblock_btrfs_format::checker::Expected;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::node::Node;

use super::data::{LastInode, Sums, take_files};
use super::descent::{Descent, Event, Found, Tree};
use super::devices::Devices;
use super::extents::{Extents, Reached};
use super::free_space::FreeSpace;
use super::groups::Groups;
use super::names::{Hashes, NameTable};
use super::references::{Maker, Reference};
use super::report::{Place, Rule, WhyNotChecked};
use super::roots::Roots;
use super::session::{Session, Stopped};
use super::summary::{Files, Summary};
use crate::error::FsError;

/// The first key of a lost node, and the first one after it.
type LostKeys = (Option<Key>, Option<Key>);

/// Everything that the walk collects.
pub(super) struct Walk<'s, 'a> {
    pub session: &'s Session<'a>,
    pub extents: Extents,
    pub sums: Sums,
    pub groups: Groups,
    pub devices: Devices,
    pub free_space: FreeSpace,
    pub roots: Roots,
    pub hashes: Hashes,
    /// The tree with block groups.
    pub group_tree: u64,
    /// True if a node could not be read, so that references that it makes are missing.
    pub has_lost: bool,
    /// What shared nodes of subvolumes say about files.
    summaries: HashMap<u64, Rc<Summary>>,
    /// The inodes without links and the orphans in these.
    summarized: usize,
    /// The same, each time that they were used again.
    reused: usize,
    /// Shared nodes: a hash of what their pointers must say, and their last keys. A node is read once, and each pointer
    /// to it can be wrong.
    shared: HashMap<u64, (u64, Option<Key>)>,
    /// Nodes that were read to compare names.
    compared: u64,
}

/// The lists of shared nodes are used again until this number of times their limit.
const MAX_REUSED: usize = 16;
/// The names of subvolumes are compared one by one until this number of times the nodes of all trees were read: a
/// damaged tree of a thousand snapshots is not read a thousand times.
const MAX_COMPARED: u64 = 16;

/// The inner nodes on the path, each with the summary of what was visited below it.
struct Open {
    bytenr: u64,
    is_shared: bool,
    summary: Summary,
}

impl<'s, 'a> Walk<'s, 'a> {
    pub fn new(session: &'s Session<'a>, group_tree: u64) -> Walk<'s, 'a> {
        let options = &session.options;
        Walk {
            session,
            extents: Extents::new(options.most_extents),
            sums: Sums::new(options.most_ranges),
            groups: Groups::new(group_tree),
            devices: Devices::default(),
            free_space: FreeSpace::new(options.most_ranges),
            roots: Roots::new(options.most_names),
            hashes: Hashes::default(),
            group_tree,
            has_lost: false,
            summaries: HashMap::new(),
            summarized: 0,
            reused: 0,
            shared: HashMap::new(),
            compared: 0,
        }
    }

    /// Reads a tree before the walk. `take` gets its leaves, and the keys of lost nodes, which the walk reports.
    pub async fn read(
        &mut self,
        tree: Tree,
        take: fn(&mut Walk<'s, 'a>, Result<&Node<'_>, LostKeys>),
    ) -> Result<(), Stopped> {
        let session = self.session;
        let mut descent = Descent::new(session, tree);
        while let Some(event) = descent.next() {
            let Event::Found(found) = event else { continue };
            match descent.enter(found, &|_| true).await {
                Ok(node) if found.expected.level == 0 => take(self, Ok(&node.view())),
                Ok(_) => {}
                Err(_) => take(self, Err((found.expected.first_key, found.before))),
            }
            session.step().await?;
        }
        Ok(())
    }

    /// Walks a tree. Returns true if it is a subvolume whose names must be compared one by one.
    pub async fn walk(&mut self, tree: Tree) -> Result<bool, Stopped> {
        let session = self.session;
        let bytenr = tree.root.bytenr;
        // The root node of a relocation refers to itself.
        let maker =
            if tree.root.id == objectid::TREE_RELOC { Maker::Parent(bytenr) } else { Maker::Tree(tree.root.id) };
        self.extents.made(session, Reference { extent: bytenr, maker });
        let mut descent = Descent::new(session, tree);
        // The first one stands for the tree.
        let mut open = vec![Open { bytenr: 0, is_shared: false, summary: Summary::default() }];
        let mut last: LastInode = None;
        while let Some(event) = descent.next() {
            match event {
                Event::Left => self.leave(&tree, &mut open),
                Event::Found(found) => self.visit(&tree, &mut descent, found, &mut open, &mut last).await?,
            }
        }
        let whole = open.pop().map(|open| open.summary).filter(|_| tree.has_files);
        let files = Files { session, hashes: &self.hashes };
        Ok(whole.is_some_and(|summary| files.finish_tree(summary, &tree)))
    }

    /// Ends an inner node: what was visited below it belongs to its parent.
    fn leave(&mut self, tree: &Tree, open: &mut Vec<Open>) {
        let Some(Open { bytenr, is_shared, summary }) = open.pop() else { return };
        self.give(tree, open, (bytenr, is_shared), summary);
    }

    /// Adds the summary of a node to that of its parent, and keeps it if the node is shared.
    fn give(&mut self, tree: &Tree, open: &mut [Open], (bytenr, is_shared): (u64, bool), summary: Summary) {
        if !tree.has_files {
            return;
        }
        if is_shared {
            self.summarized = self.summarized.saturating_add(summary.list_lengths());
            if self.summarized > self.session.options.most_names {
                // Without a summary, the files of its other subvolumes are not judged.
                self.session.not_checked(WhyNotChecked::TooManyNames);
            } else if self.summaries.len() < self.session.options.most_shared {
                self.summaries.insert(bytenr, Rc::new(summary.clone()));
            } else {
                self.session.not_checked(WhyNotChecked::TooManyShared);
            }
        }
        let files = Files { session: self.session, hashes: &self.hashes };
        if let Some(parent) = open.last_mut() {
            files.join(&mut parent.summary, tree, summary);
        }
    }

    async fn visit(
        &mut self,
        tree: &Tree,
        descent: &mut Descent<'_>,
        found: Found,
        open: &mut Vec<Open>,
        last: &mut LastInode,
    ) -> Result<(), Stopped> {
        let (session, id) = (self.session, tree.root.id);
        let bytenr = found.expected.bytenr;
        let (is_full, is_shared) = match self.extents.reach(session, bytenr, id) {
            Reached::First { is_full, is_shared } => (is_full, is_shared),
            Reached::Again => {
                if let Some(error) = self.compare_pointer(descent, found).await {
                    session.step().await?;
                    self.lost_below(tree, found, &error, (open, last), false);
                } else {
                    self.visit_again(tree, bytenr, open, last);
                }
                return Ok(());
            }
        };
        let extents = &self.extents;
        let entered = descent.enter(found, &|bytenr| !extents.is_reached(bytenr)).await;
        session.step().await?;
        let node = match entered {
            Ok(node) => node,
            Err(error) => {
                self.lost_below(tree, found, &error, (open, last), is_shared);
                return Ok(());
            }
        };
        session.count(|report| report.nodes += 1);
        let view = node.view();
        if is_shared {
            self.remember(&view);
        }
        self.extents.check_node(session, view.header(), (id, found.expected.first_key.is_none()));
        if view.header().level > 0 {
            let owner = view.header().owner.get();
            let maker = if is_full { Maker::Parent(bytenr) } else { Maker::Tree(owner) };
            // What a half deleted subvolume has lost of this node was no longer referred to.
            let pointers = view.pointers();
            for (slot, pointer) in pointers.iter().enumerate() {
                let before = pointers.get(slot + 1).map(|next| next.key()).or(found.before);
                if before.is_none_or(|before| before > tree.from) {
                    self.extents.made(session, Reference { extent: pointer.blockptr.get(), maker });
                }
            }
            open.push(Open { bytenr, is_shared, summary: Summary::default() });
            return Ok(());
        }
        self.take_leaf(tree, is_full, &view, last);
        let summary = match tree.has_files {
            true => Files { session, hashes: &self.hashes }.leaf(tree, &view),
            false => Summary::default(),
        };
        self.give(tree, open, (bytenr, is_shared), summary);
        Ok(())
    }

    /// Reports a node that a pointer does not lead to, and goes on after it.
    fn lost_below(
        &mut self,
        tree: &Tree,
        found: Found,
        error: &FsError,
        (open, last): (&mut [Open], &mut LastInode),
        is_shared: bool,
    ) {
        let bytenr = found.expected.bytenr;
        let place = Place { key: found.expected.first_key, ..Place::tree(tree.root.id) };
        self.session.lost_node(Place { logical: Some(bytenr), ..place }, error);
        self.lose(tree, found);
        *last = None;
        self.give(tree, open, (bytenr, is_shared), Summary::lost());
    }

    /// Keeps what later pointers to a node are compared with.
    fn remember(&mut self, node: &Node<'_>) {
        if self.shared.len() >= self.session.options.most_shared {
            self.session.not_checked(WhyNotChecked::TooManyShared);
            return;
        }
        let header = node.header();
        let (owner, generation) = (header.owner.get(), header.generation.get());
        let hash = self.hashes.node(owner, header.level, generation, node.first_key());
        self.shared.insert(header.bytenr.get(), (hash, node.last_key()));
    }

    /// Compares a pointer with the node that it leads to, which was visited before.
    async fn compare_pointer(&self, descent: &Descent<'_>, found: Found) -> Option<FsError> {
        // A node that is not shared has more pointers than are recorded, which is a finding.
        let (hash, last_key) = self.shared.get(&found.expected.bytenr)?;
        let Expected { owner, level, generation, first_key, .. } = found.expected;
        // A root item has no key, and only the node itself shows whether the rest is right.
        let is_equal = first_key.is_some() && self.hashes.node(owner, level, generation, first_key) == *hash;
        let is_before = last_key.zip(found.before).is_none_or(|(last, before)| last < before);
        if is_equal && is_before { None } else { descent.compare(found).await.err() }
    }

    /// Uses what is known about a node that was visited before.
    fn visit_again(&mut self, tree: &Tree, bytenr: u64, open: &mut [Open], last: &mut LastInode) {
        if !tree.has_files {
            return;
        }
        let known = self.summaries.get(&bytenr).map(Rc::clone);
        self.reused = self.reused.saturating_add(known.as_ref().map_or(0, |known| known.list_lengths()));
        let is_too_much = self.reused / MAX_REUSED > self.session.options.most_names;
        if is_too_much {
            self.session.not_checked(WhyNotChecked::TooManyNames);
        }
        let known = known.filter(|_| !is_too_much);
        // Without a summary, the node is reached by more paths than are recorded, which is a finding, or there are too
        // many summaries.
        let summary = known.map_or_else(Summary::lost, |known| (*known).clone());
        *last = summary.last_inode().map(|(ino, facts)| (ino, facts.map(|facts| facts.flags)));
        let files = Files { session: self.session, hashes: &self.hashes };
        if let Some(parent) = open.last_mut() {
            files.join(&mut parent.summary, tree, summary);
        }
    }

    /// Records that a node is lost, for those who would have taken its leaves.
    fn lose(&mut self, tree: &Tree, found: Found) {
        self.has_lost = true;
        let id = tree.root.id;
        match id {
            objectid::CHUNK_TREE => self.groups.has_lost_chunks = true,
            objectid::DEV_TREE => self.devices.has_lost = true,
            objectid::CSUM_TREE => self.sums.lost(found.expected.first_key, found.before),
            objectid::FREE_SPACE_TREE => self.free_space.lost(),
            objectid::ROOT_TREE => self.roots.has_lost = true,
            _ => {}
        }
        if id == self.group_tree {
            self.groups.has_lost_groups = true;
        }
    }

    fn take_leaf(&mut self, tree: &Tree, is_full: bool, leaf: &Node<'_>, last: &mut LastInode) {
        let (session, id) = (self.session, tree.root.id);
        match id {
            objectid::CHUNK_TREE => {
                self.groups.take_chunks(session, leaf);
                self.devices.take_items(leaf);
            }
            objectid::DEV_TREE => self.devices.take_extents(session, leaf),
            objectid::CSUM_TREE => self.sums.take(session, leaf),
            objectid::FREE_SPACE_TREE => self.free_space.take(session, &self.groups, &self.extents, leaf),
            _ => take_files(session, (&mut self.extents, &mut self.sums), (id, is_full), leaf, last),
        }
        if id == self.group_tree {
            self.groups.take_groups(session, leaf);
        }
    }

    /// Compares the names of a subvolume one by one. They disagree, so there is always a finding.
    pub async fn compare_names(&mut self, tree: Tree) -> Result<(), Stopped> {
        let session = self.session;
        let before = session.finding_count();
        if self.compared <= session.node_count().saturating_mul(MAX_COMPARED) {
            self.report_names(tree).await?;
        }
        if session.finding_count() == before {
            let why = "the names of inodes and the entries of directories do not agree";
            session.found(Rule::Name, Place::tree(tree.root.id), why);
        }
        Ok(())
    }

    async fn report_names(&mut self, tree: Tree) -> Result<(), Stopped> {
        let session = self.session;
        let mut table = NameTable::new(&self.hashes, session.options.most_names);
        for is_report in [false, true] {
            let mut descent = Descent::new(session, tree);
            while let Some(event) = descent.next() {
                let Event::Found(found) = event else { continue };
                if let Ok(node) = descent.enter(found, &|_| true).await
                    && found.expected.level == 0
                {
                    match is_report {
                        true => table.report(session, tree.root.id, &node.view()),
                        false => table.count(&node.view()),
                    }
                }
                self.compared += 1;
                session.step().await?;
            }
        }
        Ok(())
    }
}
