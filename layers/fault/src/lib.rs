//! Faults by rule and by seed: errors, aborted commands, delays, flipped bits, torn, lost and misdirected writes.
//!
//! [`FaultLayer`] injects faults into a device, by block; [`FaultMedium`] injects them into a medium, by sector and
//! byte, since a block device cannot tear a block. Both follow the same [`Rules`], as in
//! `fault:[seed=7;read-error@100..200;flip@5;lost-write%0.01;delay=10ms@0..99],TARGET`.
//!
//! Invariants: the same rules and the same requests in the same order get the same faults, on every machine; nothing
//! here uses a clock or a random source of the system. A request without a fault is neither changed nor copied. A write
//! to a device that loses or misdirects some blocks still stores all others. One bad block never hides another, whether
//! it was injected here or reported by the inner device. A block whose bit is flipped on a read is checked again, so
//! that the layer behaves like a device that checks what it reads.

mod medium;
mod rng;
mod rules;

use std::time::Duration;

use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Clock, Device, Error, ErrorKind, Expectations, Geometry, Operation,
    Outcome, Request, RequestKind, Response, WriteData,
};
use sealblock_integrity::{Checks, Sealed, verify};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockCount, Extent, Lba};

use rng::FaultRng;

pub use medium::FaultMedium;
pub use rng::Counts;
pub use rules::{Chance, Fault, Rule, RuleError, Rules, Span};

/// The maximum number of blocks of one request without payload, since faults are drawn for each block.
const BLOCKS_AT_ONCE: u32 = 1 << 16;

/// `D` with injected faults. Units in rules are its block addresses.
pub struct FaultLayer<D, C> {
    inner: D,
    clock: C,
    rng: FaultRng,
    geometry: Geometry,
}

/// Where the blocks of a write are stored, if at all.
#[derive(Default)]
struct WriteFate {
    /// Runs that are stored at their own addresses.
    stored: Vec<Extent>,
    /// Blocks that are stored at another address: from, to.
    misdirected: Vec<(Lba, Lba)>,
}

impl<D: Device, C: Clock> FaultLayer<D, C> {
    /// Injects faults into `inner`, which is behind its gate, by `rules`; `clock` measures delays.
    pub fn new(inner: D, rules: Rules, clock: C) -> FaultLayer<D, C> {
        let mut geometry = inner.geometry().clone();
        let most = BlockCount::new(BLOCKS_AT_ONCE).expect("the constant is not zero");
        geometry.limits.max_verify_blocks = geometry.limits.max_verify_blocks.min(most);
        geometry.limits.max_zero_blocks = geometry.limits.max_zero_blocks.min(most);
        FaultLayer { inner, clock, rng: FaultRng::new(rules), geometry }
    }

    /// The faults injected so far.
    pub fn counts(&self) -> &Counts {
        &self.rng.counts
    }

    /// The inner device.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    async fn read(&self, extent: Extent, expectations: Expectations) -> Outcome {
        let unreadable = self.rng.counted_hits(Fault::ReadError, span(extent));
        let flipped = self.rng.counted_hits(Fault::Flip, span(extent));
        let mut bad_blocks: Vec<BadBlock> =
            unreadable.into_iter().map(|block| BadBlock::media(Lba::new(block))).collect();
        let outcome = self.inner.execute(Request::read(extent, expectations)).await;
        let mut response = None;
        match outcome {
            Ok(Response::Data(data)) => match self.flip_up(extent, data, &flipped) {
                Ok(data) => response = Some(data),
                Err(found) => bad_blocks.extend(found),
            },
            Ok(other) => return Ok(other),
            // The device found its blocks good; some of them may be flipped on the way up.
            Err(error) if matches!(error.kind(), ErrorKind::Expectation { .. }) => {
                for block in flipped {
                    bad_blocks.extend(self.read_flipped(Lba::new(block)).await);
                }
                if bad_blocks.is_empty() {
                    return Err(error);
                }
            }
            Err(error) => {
                bad_blocks.extend(error.into_bad_blocks()?);
                // The inner error says nothing about other blocks, so each flipped block is read separately.
                for block in flipped {
                    bad_blocks.extend(self.read_flipped(Lba::new(block)).await);
                }
            }
        }
        match (BadBlocks::new(bad_blocks), response) {
            (None, Some(data)) => Ok(Response::Data(data)),
            (Some(bad_blocks), _) => Err(bad_blocks.into()),
            (None, None) => Err(ErrorKind::Media { reason: "a read ended without data or damage".to_owned() }.into()),
        }
    }

    /// Reads one block with its bit flipped; returns the bad block that results.
    async fn read_flipped(&self, lba: Lba) -> Vec<BadBlock> {
        let alone = Extent::one(lba);
        match self.inner.execute(Request::read(alone, Expectations::NONE)).await {
            Ok(Response::Data(data)) => self.flip_up(alone, data, &[lba.get()]).err().unwrap_or_default(),
            // The inner device has reported this block already.
            Ok(_) | Err(_) => Vec::new(),
        }
    }

    /// Inverts the bad bit of `blocks` in data that was read, and checks these blocks as a device does.
    fn flip_up(&self, extent: Extent, data: Sealed, blocks: &[u64]) -> Result<Sealed, Vec<BadBlock>> {
        if blocks.is_empty() {
            return Ok(data);
        }
        let bytes = self.flipped(extent, &data, blocks);
        let Some(format) = self.geometry.protection else { return Ok(data.with_fault(bytes)) };
        let mut bad: Vec<BadBlock> = Vec::new();
        let mut note = |mismatch| bad.push(BadBlock::of_mismatch(extent.start(), &mismatch));
        let checks = Checks::full(format, extent.start());
        verify(format, data.size(), &bytes, &data.joined_tags(), &checks, &mut note);
        // A tag that its host wrote wrong is no fault of another block.
        bad.retain(|bad| blocks.contains(&bad.lba.get()));
        if bad.is_empty() { Ok(data.with_fault(bytes)) } else { Err(bad) }
    }

    /// The bytes of `data` with the bad bit of each of `blocks` inverted.
    fn flipped(&self, extent: Extent, data: &Sealed, blocks: &[u64]) -> Slice {
        let size = data.size().bytes();
        let mut bytes = Buffer::copy_from(&data.joined_data());
        for block in blocks {
            let at = (block - extent.start().get()) as usize * size;
            self.rng.flip(*block, &mut bytes[at..at + size]);
        }
        bytes.freeze()
    }

    /// Executes a request that writes, zeroes or poisons blocks: it can fail, be torn and be lost; data can also be
    /// flipped and be misdirected.
    async fn change(&self, mut request: Request) -> Outcome {
        let (extent, format) = (request.extents.one(), self.geometry.protection);
        self.refuse(extent)?;
        let has_payload = matches!(request.operation, Operation::Write(_));
        if has_payload {
            let flipped = self.rng.counted_hits(Fault::FlipWrite, span(extent));
            if !flipped.is_empty() {
                // Sealed before the flip: the fault is in data that have their tags.
                let flip = |data: WriteData| {
                    let sealed = data.into_sealed();
                    let bytes = self.flipped(extent, &sealed, &flipped);
                    sealed.with_fault(bytes).into()
                };
                request = request.map_data(flip);
            }
        }
        let Some(fate) = self.fate(extent, has_payload) else { return self.inner.execute(request).await };
        for run in fate.stored {
            self.inner.execute(request.part(extent, run, format)).await?;
        }
        for (from, to) in fate.misdirected {
            let misdirected = request.part(extent, Extent::one(from), format);
            self.inner.execute(Request { extents: Extent::one(to).into(), ..misdirected }).await?;
        }
        Ok(Response::Done)
    }

    async fn flush(&self) -> Outcome {
        if self.rng.hits_flush(Fault::FlushError) {
            return Err(ErrorKind::Media { reason: "flush-error by rule".to_owned() }.into());
        }
        if self.rng.hits_flush(Fault::LostFlush) {
            return Ok(Response::Done);
        }
        self.inner.execute(Request::flush()).await
    }

    /// Fails a request if a rule aborts it.
    fn abort(&self, request: &Request) -> Result<(), Error> {
        let kind = request.kind();
        if !self.rng.has_rule(Fault::Abort(kind)) {
            return Ok(());
        }
        let spans: Vec<Span> = request.extents.iter().map(|extent| span(*extent)).collect();
        match self.rng.hits_request(Fault::Abort(kind), &spans) {
            true => Err(ErrorKind::Absent(kind).into()),
            false => Ok(()),
        }
    }

    /// Fails a write if a rule says so.
    fn refuse(&self, extent: Extent) -> Result<(), Error> {
        if let Some(block) = self.rng.first_hit(Fault::WriteError, span(extent)) {
            return Err(ErrorKind::Media { reason: format!("write-error by rule at block {block}") }.into());
        }
        if let Some(block) = self.rng.first_hit(Fault::NoSpace, span(extent)) {
            return Err(ErrorKind::NoSpace { reason: format!("no-space by rule at block {block}") }.into());
        }
        Ok(())
    }

    /// Draws where the blocks are stored; `None` if all of them are stored at their own addresses.
    fn fate(&self, extent: Extent, has_payload: bool) -> Option<WriteFate> {
        let torn = self.rng.hits(Fault::TornWrite, span(extent)).first().copied();
        self.rng.counts.add(Fault::TornWrite, u64::from(torn.is_some()));
        // Blocks after the tear do not reach the device, so they get no other fault.
        let reached = |block: &u64| torn.is_none_or(|torn| *block < torn);
        let lost: Vec<u64> = self.rng.hits(Fault::LostWrite, span(extent)).into_iter().filter(reached).collect();
        let mut astray = Vec::new();
        if has_payload {
            astray = self.rng.hits(Fault::MisdirectedWrite, span(extent));
            astray.retain(|block| reached(block) && lost.binary_search(block).is_err());
        }
        self.rng.counts.add(Fault::LostWrite, lost.len() as u64);
        self.rng.counts.add(Fault::MisdirectedWrite, astray.len() as u64);
        if torn.is_none() && lost.is_empty() && astray.is_empty() {
            return None;
        }
        let is_stored =
            |block: &u64| reached(block) && lost.binary_search(block).is_err() && astray.binary_search(block).is_err();
        let stored = runs(extent.iter().map(Lba::get).filter(is_stored));
        let capacity = self.geometry.capacity_blocks;
        let elsewhere = |block: u64| (Lba::new(block), Lba::new(self.rng.elsewhere(block, capacity)));
        Some(WriteFate { stored, misdirected: astray.into_iter().map(elsewhere).collect() })
    }
}

/// Joins ascending blocks into runs.
fn runs(blocks: impl Iterator<Item = u64>) -> Vec<Extent> {
    let mut spans: Vec<Span> = Vec::new();
    for block in blocks {
        match spans.last_mut() {
            Some(run) if run.last + 1 == block => run.last = block,
            _ => spans.push(Span { first: block, last: block }),
        }
    }
    spans.into_iter().filter_map(|run| Extent::from_raw(run.first, run.last - run.first + 1).ok()).collect()
}

fn span(extent: Extent) -> Span {
    Span { first: extent.start().get(), last: extent.last().get() }
}

impl<D: Device, C: Clock> Device for FaultLayer<D, C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        let mut abilities = self.inner.abilities();
        // Kinds that a rule aborts must arrive here, rather than be emulated by reads and writes.
        for kind in [RequestKind::Verify, RequestKind::Compare, RequestKind::WriteZeroes] {
            if abilities.get(kind) == Ability::Emulated && self.rng.has_rule(Fault::Abort(kind)) {
                abilities.set(kind, Ability::Native);
            }
        }
        // A Copy would bypass the faults injected here, and the delays of its source.
        if self.rng.has_block_faults() || self.rng.has_rule(Fault::Delay(Duration::ZERO)) {
            abilities.set(RequestKind::Copy, Ability::Absent);
        }
        if self.rng.has_block_faults() {
            abilities.compare_and_write_blocks = 0;
        }
        // The inner device would verify and compare without the faults injected here, so the gate must read instead.
        if self.rng.has_rule(Fault::ReadError) || self.rng.has_rule(Fault::Flip) {
            let kinds = [RequestKind::Verify, RequestKind::Compare, RequestKind::Salvage];
            abilities = abilities.with(kinds, Ability::Absent).with_checksums(Ability::Absent);
            // Without protection information a flipped bit is not detected.
            abilities.seals &= self.geometry.protection.is_some();
        }
        abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.rng.wait(&self.clock, request.extent().map(span)).await;
        self.abort(&request)?;
        match request.operation {
            Operation::Read(expectations) => self.read(request.extents.one(), expectations).await,
            Operation::Write(_) | Operation::WriteZeroes { .. } | Operation::WriteUncorrectable { .. } => {
                self.change(request).await
            }
            Operation::Flush => self.flush().await,
            // A discard guarantees nothing that a fault could break.
            Operation::Discard
            | Operation::Copy { .. }
            | Operation::CompareAndWrite(_)
            | Operation::Verify(_)
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::BlockStatus
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..)
            | Operation::Compare(_) => self.inner.execute(request).await,
        }
    }
}

#[cfg(test)]
mod tests;
