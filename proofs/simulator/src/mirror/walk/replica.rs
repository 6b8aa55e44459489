//! A replica in RAM whose content can be copied, restored, damaged and truncated, and whose requests can be stopped
//! halfway.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use sealblock_block::{
    BadBlock, BadBlocks, BlockState, Checksum, Error, ErrorKind, Operation, Outcome, Request, RequestKind,
    ReservedArea, Response, Salvaged, StatusRuns, VerifyStats,
};
use sealblock_integrity::{Checks, PiFormat, Sealed, Tags, Unverified};
use sealblock_layers_mirror::label::Label;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockCount, BlockSize, Extent, Lba};

use super::model::{ImageInfo, Stamp};
use crate::random::Random;

/// Bytes of a block.
pub const SIZE: BlockSize = BlockSize::B512;
/// Blocks of a replica.
pub const BLOCKS: u64 = 48;

/// The content of a block.
#[derive(Clone, Debug)]
pub enum Stored {
    /// Never written; reads as zeroes.
    Hole,
    /// Data and tags, which may not match.
    Data(Slice, Slice),
    /// Reading it gives a medium error.
    Unreadable,
}

/// The content of a replica, and the model's information about it.
#[derive(Clone)]
pub struct Image {
    blocks: Vec<Stored>,
    reserved: Vec<(ReservedArea, Slice)>,
    /// The earlier contents of blocks changed since the last flush, oldest first.
    before: BTreeMap<usize, Vec<Stored>>,
    pub known: ImageInfo,
}

/// The data of a block with a stamp; they also contain the block's number.
pub fn content(lba: Lba, stamp: Stamp) -> Vec<u8> {
    [stamp.to_le_bytes(), lba.get().to_le_bytes()].concat().repeat(SIZE.bytes() / 16)
}

/// The stamp in the data of a block; zeroes are stamp 0. `None` if these bytes are not content of this block.
pub fn stamp_of(lba: Lba, data: &[u8]) -> Option<Stamp> {
    if data.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let stamp = Stamp::from_le_bytes(data.first_chunk().copied()?);
    (data == content(lba, stamp)).then_some(stamp)
}

/// The tags of blocks.
pub fn tags(extent: Extent) -> Tags {
    Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: extent.start().get() }
}

impl Image {
    /// A device that was never written.
    pub fn blank(known: ImageInfo) -> Image {
        Image { blocks: vec![Stored::Hole; BLOCKS as usize], reserved: Vec::new(), before: BTreeMap::new(), known }
    }

    /// Its label.
    pub fn label(&self) -> Option<Label> {
        let (_, bytes) = self.reserved.iter().find(|(slot, _)| *slot == ReservedArea::GroupLabel)?;
        Label::decode(bytes).ok().flatten()
    }

    fn at(lba: Lba) -> usize {
        lba.get() as usize
    }

    fn change(&mut self, lba: Lba, stored: Stored) {
        let old = std::mem::replace(&mut self.blocks[Image::at(lba)], stored);
        self.before.entry(Image::at(lba)).or_default().push(old);
    }

    /// Fills some blocks with the content of this stamp; returns which ones.
    pub fn fill(&mut self, random: &Random, format: Option<PiFormat>, stamp: Stamp) -> Vec<usize> {
        let blocks: Vec<u64> = (0..BLOCKS).filter(|_| random.chance(30)).collect();
        for lba in blocks.iter().map(|block| Lba::new(*block)) {
            let (one, data) = (Extent::one(lba), Slice::copy_from(&content(lba, stamp)));
            self.write(one, &Sealed::seal(data, SIZE, format, &tags(one)));
        }
        self.flush();
        blocks.into_iter().map(|block| block as usize).collect()
    }

    /// Damages a stored block; false if it has no data.
    pub fn damage(&mut self, lba: Lba, random: &Random) -> bool {
        let block = &mut self.blocks[Image::at(lba)];
        match block {
            Stored::Data(data, tags) if !tags.is_empty() && random.chance(80) => {
                let mut spoilt = data.to_vec();
                spoilt[random.below(SIZE.bytes() as u64) as usize] ^= 1 << random.below(8);
                *data = Slice::copy_from(&spoilt);
                true
            }
            Stored::Data(..) => {
                *block = Stored::Unreadable;
                true
            }
            Stored::Hole | Stored::Unreadable => false,
        }
    }

    /// Power cut: each unflushed block gets one of the contents that it had since the last flush.
    pub fn lose_power(&mut self, random: &Random) {
        for (at, mut older) in std::mem::take(&mut self.before) {
            let which = random.below(older.len() as u64 + 1) as usize;
            if which < older.len() {
                self.blocks[at] = older.swap_remove(which);
            }
        }
    }

    /// Flush: nothing can be lost any more.
    pub fn flush(&mut self) {
        self.before.clear();
    }

    /// The good content of a block; `None` if it cannot be read.
    pub fn good(&self, lba: Lba, format: Option<PiFormat>) -> Option<Stamp> {
        let one = Extent::one(lba);
        let sealed = self.read(one, format).ok()?;
        // Any other content counts as a stamp that no write has.
        Some(stamp_of(lba, &sealed.joined_data()).unwrap_or(Stamp::MAX))
    }

    /// Blocks as they are stored, and which of them are unreadable.
    fn load(&self, extent: Extent, format: Option<PiFormat>) -> (Unverified, Vec<BadBlock>) {
        let tuple = format.map_or(0, PiFormat::tuple_bytes);
        let (mut data, mut tags, mut bad_blocks) = (Vec::new(), Vec::new(), Vec::new());
        for lba in extent.iter() {
            match &self.blocks[Image::at(lba)] {
                Stored::Data(block, tag) => {
                    data.extend_from_slice(block);
                    tags.extend_from_slice(tag);
                    continue;
                }
                Stored::Hole => {}
                Stored::Unreadable => bad_blocks.push(BadBlock::media(lba)),
            }
            data.resize(data.len() + SIZE.bytes(), 0);
            tags.resize(tags.len() + tuple, 0xFF);
        }
        let read = Unverified::new(Slice::copy_from(&data), Slice::copy_from(&tags), SIZE, format);
        (read.expect("a tuple was copied for each block"), bad_blocks)
    }

    fn read(&self, extent: Extent, format: Option<PiFormat>) -> Result<Sealed, Error> {
        let (loaded, mut bad_blocks) = self.load(extent, format);
        match loaded.verify(&full(format, extent)) {
            Ok(sealed) if bad_blocks.is_empty() => return Ok(sealed),
            Ok(_) => {}
            Err(bad) => bad_blocks.extend(bad.iter().map(|bad| BadBlock::of_mismatch(extent.start(), bad))),
        }
        Err(BadBlocks::new(bad_blocks).expect("a failed read names a block").into())
    }

    fn salvage(&self, extent: Extent, format: Option<PiFormat>) -> Salvaged {
        let bad_blocks = match self.read(extent, format).map_err(Error::into_bad_blocks) {
            Ok(_) | Err(Err(_)) => Vec::new(),
            Err(Ok(bad_blocks)) => bad_blocks,
        };
        let blocks = self.load(extent, format).0.verify(&Checks::NONE).expect("nothing is checked");
        Salvaged { blocks, bad_blocks }
    }

    fn write(&mut self, extent: Extent, data: &Sealed) {
        for (index, lba) in extent.iter().enumerate() {
            let one = data.slice(index, 1);
            let stored = Stored::Data(Slice::copy_from(&one.joined_data()), Slice::copy_from(&one.joined_tags()));
            self.change(lba, stored);
        }
    }

    fn block_status(&self, extent: Extent) -> Outcome {
        let mut runs = StatusRuns::default();
        for lba in extent.iter() {
            let is_hole = matches!(self.blocks[Image::at(lba)], Stored::Hole);
            runs.push(BlockCount::ONE, if is_hole { BlockState::Hole } else { BlockState::Allocated });
        }
        Ok(Response::BlockStatus(runs.into_vec()))
    }

    fn write_reserved(&mut self, slot: ReservedArea, bytes: &Slice) {
        self.reserved.retain(|(other, _)| *other != slot);
        self.reserved.push((slot, Slice::copy_from(bytes)));
    }

    /// Executes a whole request.
    pub fn execute(&mut self, request: Request, format: Option<PiFormat>) -> Outcome {
        let Request { operation, extents, .. } = &request;
        match operation {
            Operation::Read(_) => return self.read(extents.one(), format).map(Response::Data),
            Operation::Salvage => return Ok(Response::Salvaged(self.salvage(extents.one(), format))),
            Operation::Verify(_) => {
                return self.read(extents.one(), format).map(|_| Response::Verified(VerifyStats::default()));
            }
            Operation::Checksum(kind, _) => {
                let value = self.read(extents.one(), format)?.checksum(*kind);
                return Ok(Response::Checksum(Checksum { kind: *kind, value, ..Checksum::default() }));
            }
            Operation::ReadReserved(area) => {
                let found = self.reserved.iter().find(|(other, _)| other == area);
                return Ok(Response::Reserved(found.map_or_else(Slice::empty, |(_, bytes)| bytes.clone())));
            }
            Operation::BlockStatus => return self.block_status(extents.one()),
            Operation::WriteReserved(area, bytes) => self.write_reserved(*area, bytes),
            Operation::Write(data) => self.write(extents.one(), &data.clone().into_sealed()),
            Operation::WriteZeroes { may_unmap: true } => {
                extents.one().iter().for_each(|lba| self.change(lba, Stored::Hole));
            }
            Operation::WriteZeroes { may_unmap: false } => {
                let extent = extents.one();
                let zeroes = Slice::copy_from(&vec![0; extent.bytes(SIZE) as usize]);
                self.write(extent, &Sealed::seal(zeroes, SIZE, format, &tags(extent)));
            }
            Operation::WriteUncorrectable { .. } => {
                extents.one().iter().for_each(|lba| self.change(lba, Stored::Unreadable));
            }
            Operation::Flush => self.flush(),
            Operation::Discard
            | Operation::Copy { .. }
            | Operation::Compare(_)
            | Operation::CompareAndWrite(_)
            | Operation::Repair => {
                return Err(ErrorKind::Absent(request.kind()).into());
            }
        }
        Ok(Response::Done)
    }

    /// Executes a part of a request because the machine stops: any of its blocks; a label completely or not at all.
    /// True if all of it was executed.
    pub fn begin(&mut self, request: Request, format: Option<PiFormat>, random: &Random) -> bool {
        let is_whole = random.chance(50);
        match &request.operation {
            Operation::Write(data) if !is_whole => {
                let data = data.clone().into_sealed();
                for (index, lba) in request.extents.one().iter().enumerate().filter(|_| random.chance(50)) {
                    self.write(Extent::one(lba), &data.slice(index, 1));
                }
            }
            _ if is_whole => drop(self.execute(request, format)),
            _ => {}
        }
        is_whole
    }
}

/// Checks every block of an extent.
fn full(format: Option<PiFormat>, extent: Extent) -> Checks {
    format.map_or(Checks::NONE, |format| Checks::full(format, extent.start()))
}

/// What the link to a replica does with requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaLink {
    /// It executes them.
    Up,
    /// Reads are executed, changes fail.
    Full,
    /// Changes of blocks fail; other requests are executed.
    Worn,
    /// Every request fails.
    Gone,
}

/// A place for a replica. Its content outlives machines.
pub struct Replica {
    pub name: String,
    pub number: usize,
    pub image: RefCell<Image>,
    pub link: Cell<ReplicaLink>,
    /// Counts breaks of the link; handles from before a break get no more replies.
    pub epoch: Cell<u64>,
    /// The epoch of the last open.
    pub opened: Cell<u64>,
    /// Counts opens; each one ends the requests in flight of earlier opens.
    pub openings: Cell<u64>,
    /// True if the image was replaced since then.
    pub is_swapped: Cell<bool>,
    /// The held requests; `None` if none is held.
    pub held: Cell<Option<HeldRequests>>,
    /// True if a request is being held.
    pub is_waiting: Cell<bool>,
}

/// The kind of requests that a replica holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeldRequests {
    Flushes,
    /// True for requests that return or check content.
    Looks,
}

impl HeldRequests {
    pub fn holds(self, request: &Request) -> bool {
        match self {
            HeldRequests::Flushes => request.kind() == RequestKind::Flush,
            HeldRequests::Looks => matches!(
                request.kind(),
                RequestKind::Read | RequestKind::Verify | RequestKind::Checksum | RequestKind::Compare
            ),
        }
    }
}

impl Replica {
    pub fn new(number: usize) -> Replica {
        Replica {
            name: format!("{}", (b'a' + number as u8) as char),
            number,
            image: RefCell::new(Image::blank(ImageInfo::default())),
            link: Cell::new(ReplicaLink::Up),
            epoch: Cell::new(0),
            opened: Cell::new(0),
            openings: Cell::new(0),
            is_swapped: Cell::new(false),
            held: Cell::default(),
            is_waiting: Cell::default(),
        }
    }

    /// True if the link of the last open is intact.
    pub fn is_reached(&self) -> bool {
        self.epoch.get() == self.opened.get()
    }

    pub fn break_link(&self, link: ReplicaLink) {
        self.link.set(link);
        if link == ReplicaLink::Gone {
            self.epoch.set(self.epoch.get() + 1);
        }
    }
}
