//! Records every write, and derives the possible contents of every block.
//!
//! The rules are those of a disk with a volatile cache. A read returns a write that was not overtaken by another write
//! which had ended before the read was issued. A crash may undo writes that were not durable. A write is durable once
//! it completed with force unit access, or once a Flush completed that was issued after the write had completed.
//! Content found on the disk after a power cut is durable.

mod block;
mod content;
#[cfg(test)]
mod tests;

pub use block::Moment;
pub use content::{Content, Patterns};

use std::collections::{BTreeMap, BTreeSet};

use sealblock_integrity::Sealed;
use sealblock_units::{Extent, Lba};

use block::{Block, Snapshot};

/// A violation: the block, the content found, and the permitted contents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation(pub String);

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A change in flight.
#[derive(Debug)]
#[must_use = "a change must be ended"]
pub struct Change {
    /// When it was issued; 0 if the device may execute it without writing anything.
    issued: Moment,
    request_id: u64,
    extents: Vec<Extent>,
    force_unit_access: bool,
}

/// A Flush in flight.
#[derive(Debug)]
#[must_use = "a flush must be ended"]
pub struct Flush {
    issued: Moment,
}

/// A read in flight.
#[derive(Debug)]
#[must_use = "a read must be ended"]
pub struct Read {
    issued: Moment,
    extent: Extent,
    snapshots: Vec<Snapshot>,
}

/// A completed write that is not durable.
#[derive(Clone)]
struct Unflushed {
    issued: Moment,
    completed: Moment,
    request_id: u64,
    extents: Vec<Extent>,
}

/// The possible contents of every block.
#[derive(Clone)]
pub struct Checker {
    patterns: Patterns,
    blocks: BTreeMap<Lba, Block>,
    now: Moment,
    requests: u64,
    unflushed: Vec<Unflushed>,
    /// When the newest durable write was issued, for each part of the device that commits by itself.
    newest_durable: Vec<Moment>,
    /// Blocks of a unit; units are dealt to the parts in turn.
    unit_blocks: u64,
    blocks_checked: u64,
    /// Blocks that may be damaged because reads of the medium failed.
    doubted: BTreeSet<Lba>,
    /// True if a machine found that changes may be lost, and has not reported it to hosts yet.
    must_report_loss: bool,
}

impl Checker {
    /// The checker of a new volume: all blocks read as zeroes.
    pub fn new(patterns: Patterns) -> Checker {
        let (blocks, unflushed) = (BTreeMap::new(), Vec::new());
        Checker {
            patterns,
            blocks,
            now: 1,
            requests: 0,
            unflushed,
            newest_durable: vec![0],
            unit_blocks: 1,
            blocks_checked: 0,
            doubted: BTreeSet::new(),
            must_report_loss: false,
        }
    }

    /// The checker of a device whose blocks are dealt, in units of so many, to so many parts that commit by themselves.
    #[must_use]
    pub fn in_parts(self, parts: u32, unit_blocks: u64) -> Checker {
        Checker { newest_durable: vec![0; parts as usize], unit_blocks, ..self }
    }

    /// The part of the device that a block is in.
    fn part(&self, lba: Lba) -> usize {
        (lba.get() / self.unit_blocks % self.newest_durable.len() as u64) as usize
    }

    /// A write of this block is durable that was issued then.
    fn is_durable_since(&mut self, lba: Lba, issued: Moment) {
        let part = self.part(lba);
        self.newest_durable[part] = self.newest_durable[part].max(issued);
    }

    /// Makes and recognises contents.
    pub fn patterns(&self) -> Patterns {
        self.patterns
    }

    /// The number of blocks whose content was checked.
    pub fn blocks_checked(&self) -> u64 {
        self.blocks_checked
    }

    /// Blocks that were ever written, in order.
    pub fn touched(&self) -> Vec<Lba> {
        self.blocks.keys().copied().collect()
    }

    /// A new version.
    pub fn new_version(&self) -> u64 {
        self.requests + 1
    }

    fn tick(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    fn block(&mut self, lba: Lba) -> &mut Block {
        self.blocks.entry(lba).or_insert_with(Block::unwritten)
    }

    /// A Write, WriteZeroes or Discard (`optional`) is issued.
    pub fn begin_change(
        &mut self,
        extents: Vec<Extent>,
        content: Content,
        optional: bool,
        force_unit_access: bool,
    ) -> Change {
        self.requests += 1;
        let (request_id, now) = (self.requests, self.tick());
        for extent in &extents {
            extent.iter().for_each(|lba| self.block(lba).issue(request_id, content, now, optional));
        }
        // A Discard of blocks that were never written writes nothing, so it does not prove that the device committed
        // anything.
        let issued = if matches!(content, Content::Version(_)) { now } else { 0 };
        Change { issued, request_id, extents, force_unit_access }
    }

    /// The change completed or failed; after an error it may or may not have taken effect.
    pub fn end_change(&mut self, change: Change, done: bool) {
        let now = self.tick();
        let Change { issued, request_id, extents, force_unit_access } = change;
        for extent in &extents {
            extent.iter().for_each(|lba| self.block(lba).end(request_id, now, done, done && force_unit_access));
        }
        if done && force_unit_access {
            for lba in extents.iter().flat_map(|extent| extent.iter()) {
                self.is_durable_since(lba, issued);
            }
        } else if done {
            self.unflushed.push(Unflushed { issued, completed: now, request_id, extents });
        }
    }

    /// A Flush is issued.
    pub fn begin_flush(&mut self) -> Flush {
        Flush { issued: self.tick() }
    }

    /// The Flush ended. A failed one makes nothing durable.
    pub fn end_flush(&mut self, flush: Flush, done: bool) {
        if !done {
            return;
        }
        let (covered, left) =
            std::mem::take(&mut self.unflushed).into_iter().partition(|one| one.completed < flush.issued);
        self.unflushed = left;
        let (covered, now): (Vec<Unflushed>, Moment) = (covered, self.tick());
        for Unflushed { issued, request_id, extents, .. } in covered {
            for lba in extents.iter().flat_map(|extent| extent.iter()) {
                self.is_durable_since(lba, issued);
                self.block(lba).make_durable(request_id, now);
            }
        }
    }

    /// A Read is issued.
    pub fn begin_read(&mut self, extent: Extent) -> Read {
        let issued = self.tick();
        let snapshots = extent.iter().map(|lba| self.block(lba).snapshot()).collect();
        Read { issued, extent, snapshots }
    }

    /// The Read completed with these blocks.
    pub fn end_read(&mut self, read: Read, found: &Sealed) -> Result<(), Violation> {
        let contents = self.patterns.contents(read.extent, found).map_err(Violation)?;
        self.end_read_as(read, contents)
    }

    /// The Read of one block failed, with an error that it is unreadable.
    pub fn end_failed_read(&mut self, read: Read) -> Result<(), Violation> {
        let contents = vec![Content::Unreadable; read.snapshots.len()];
        self.end_read_as(read, contents)
    }

    fn end_read_as(&mut self, read: Read, contents: Vec<Content>) -> Result<(), Violation> {
        for ((lba, content), snapshot) in read.extent.iter().zip(contents).zip(&read.snapshots) {
            self.blocks_checked += 1;
            let block = self.block(lba);
            if !block.permits(content, snapshot, read.issued) {
                let permitted = block.permitted();
                return Err(Violation(format!("block {lba}: read {content:?}; permitted now: {permitted:?}")));
            }
            block.observe(content, read.issued);
        }
        Ok(())
    }

    /// The machine stopped.
    pub fn crash(&mut self) {
        let now = self.tick();
        self.blocks.values_mut().for_each(|block| block.crash(now));
        self.unflushed.clear();
    }

    /// The process was killed, and its system runs on: all completed changes are there, and those in flight may be.
    pub fn kill(&mut self) {
        let now = self.tick();
        self.blocks.values_mut().for_each(|block| block.kill(now));
    }

    /// The device opened; `is_reported` is whether it reports that completed changes may be lost. It must report that
    /// until hosts know.
    pub fn check_loss_report(&mut self, is_reported: bool) -> Result<(), String> {
        if self.must_report_loss && !is_reported {
            return Err("changes may be lost, no host was told, and the device does not say so any more".to_owned());
        }
        self.must_report_loss = is_reported;
        Ok(())
    }

    /// The loss was reported to hosts, or is being reported.
    pub fn loss_reported(&mut self) {
        self.must_report_loss = false;
    }

    /// Unflushed writes may or may not be there from now on, while the machine runs on.
    pub fn lose(&mut self) {
        let now = self.tick();
        self.blocks.values_mut().for_each(|block| block.lose(now));
        self.unflushed.clear();
    }

    /// The checker of a device whose previous versions have numbers up to `requests`.
    pub fn after(patterns: Patterns, requests: u64) -> Checker {
        Checker { requests, ..Checker::new(patterns) }
    }

    /// Reads of the medium fail: from now on any block that was ever written may be damaged, and may be reported as
    /// such. A physical block that is unreadable after a crash may belong to a write that never arrived; an unreadable
    /// sector of records is rewritten.
    pub fn doubt_all(&mut self) {
        let extents: Vec<Extent> = self.blocks.keys().map(|lba| Extent::one(*lba)).collect();
        self.doubted.extend(self.blocks.keys());
        let change = self.begin_change(extents, Content::Unreadable, false, false);
        self.end_change(change, false);
    }

    /// True if a block may be damaged because reads of the medium failed.
    pub fn is_doubted(&self, lba: Lba) -> bool {
        self.doubted.contains(&lba)
    }

    /// Records that a block has this content, which must not contradict anything known.
    pub fn learn(&mut self, lba: Lba, content: Content) {
        self.blocks.insert(lba, Block::holding(content));
    }

    /// The device was shortened: blocks from `capacity_blocks` on must not have had content, and are blank if they come
    /// back.
    ///
    /// # Errors
    /// If one of them certainly had content.
    pub fn cut(&mut self, capacity_blocks: u64) -> Result<(), Violation> {
        let gone: Vec<Lba> = self.blocks.range(Lba::new(capacity_blocks)..).map(|(lba, _)| *lba).collect();
        for lba in gone {
            let permitted = self.block(lba).permitted();
            if !permitted.contains(&Content::Zero) {
                return Err(Violation(format!("block {lba}: cut off, and may hold only {permitted:?}")));
            }
            self.blocks.remove(&lba);
            self.doubted.remove(&lba);
        }
        Ok(())
    }

    /// The number of requests so far, each with its own version.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// These blocks were read after a crash. After a power cut (`is_durable`) the content is durable.
    pub fn audit(&mut self, extent: Extent, found: &Sealed, is_durable: bool) -> Result<(), Violation> {
        let contents = self.patterns.contents(extent, found).map_err(Violation)?;
        self.audit_as(extent, contents, is_durable)
    }

    /// Reading a block after a crash failed, with an error that it is unreadable.
    pub fn audit_failed(&mut self, lba: Lba, is_durable: bool) -> Result<(), Violation> {
        self.audit_as(Extent::one(lba), vec![Content::Unreadable], is_durable)
    }

    fn audit_as(&mut self, extent: Extent, contents: Vec<Content>, is_durable: bool) -> Result<(), Violation> {
        let now = self.tick();
        for (lba, content) in extent.iter().zip(contents) {
            self.blocks_checked += 1;
            let Some(block) = self.blocks.get_mut(&lba) else {
                if content != Content::Zero {
                    return Err(Violation(format!("block {lba} was never written and holds {content:?}")));
                }
                continue;
            };
            let permitted = block.permitted();
            if !permitted.contains(&content) {
                return Err(Violation(format!("block {lba}: holds {content:?}; permitted: {permitted:?}")));
            }
            if is_durable {
                block.set_durable(content, now);
            } else if let Some(request_id) = block.find(content) {
                let extents = vec![Extent::one(lba)];
                self.unflushed.push(Unflushed { issued: 0, completed: now, request_id, extents });
            }
        }
        Ok(())
    }

    /// The volume was closed, which makes all completed changes durable.
    pub fn closed(&mut self) {
        let flush = self.begin_flush();
        self.end_flush(flush, true);
    }

    /// Blocks with one permitted content, which was durable before another durable write to the same part of the device
    /// was issued. That part has committed since then, so no write of these blocks was in flight, and damage to them must be found.
    pub fn long_durable(&self) -> Vec<Lba> {
        let old = |(lba, block): &(&Lba, &Block)| {
            block.certain().is_some() && block.was_durable_before(self.newest_durable[self.part(**lba)])
        };
        self.blocks.iter().filter(old).map(|(lba, _)| *lba).collect()
    }

    /// True if a block was made unreadable and can have no other content now.
    pub fn is_unreadable(&self, lba: Lba) -> bool {
        let permitted = self.blocks.get(&lba).map(Block::permitted).unwrap_or_default();
        !permitted.is_empty() && permitted.iter().all(|content| *content == Content::Unreadable)
    }

    /// True if a block may be unreadable because it was made so.
    pub fn may_be_unreadable(&self, lba: Lba) -> bool {
        self.blocks.get(&lba).is_some_and(Block::was_made_unreadable)
    }

    /// The content that a block must have now and after any crash, if only one is permitted.
    pub fn certain(&self, lba: Lba) -> Option<Content> {
        self.blocks.get(&lba).map_or(Some(Content::Zero), Block::certain)
    }
}
