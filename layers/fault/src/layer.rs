//! A faulty device made of a good one.
//!
//! Invariants: a write of which some blocks go astray still stores all the others; one bad block never hides another, be
//! it made here or found below; a block flipped on its way up is checked again as the request asked, so that the layer looks
//! like a device that checks what it has really read.

use std::time::Duration;

use sealblock_block::{
    Abilities, Ability, BadBlock as Found, BadBlocks, Clock, Device, Durability, Error, ErrorKind, Geometry, Outcome,
    Request, Response,
};
use sealblock_integrity::{Checks, Sealed, Unverified};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockCount, Extent, Lba};

use crate::counts::Counts;
use crate::rng::FaultRng;
use crate::rules::{Fault, Rules, Span};

/// Blocks of one request without payload, which the rules are asked about one by one.
const BLOCKS_AT_ONCE: u32 = 1 << 16;

/// `D` with faults. Numbers in rules are its block addresses.
pub struct FaultLayer<D, C> {
    below: D,
    clock: C,
    dice: FaultRng,
    geometry: Geometry,
}

/// What becomes of the blocks of a write.
#[derive(Default)]
struct WriteFate {
    /// Runs that are stored where they belong.
    stored: Vec<Extent>,
    /// Blocks that are stored elsewhere: from where to where.
    misdirected: Vec<(Lba, Lba)>,
}

impl<D: Device, C: Clock> FaultLayer<D, C> {
    /// Makes `below`, which is behind its gate, faulty by `rules`; `clock` measures delays.
    pub fn new(below: D, rules: Rules, clock: C) -> FaultLayer<D, C> {
        let mut geometry = below.geometry().clone();
        let most = BlockCount::new(BLOCKS_AT_ONCE).expect("the constant is not zero");
        geometry.limits.max_verify_blocks = geometry.limits.max_verify_blocks.min(most);
        geometry.limits.max_zero_blocks = geometry.limits.max_zero_blocks.min(most);
        FaultLayer { below, clock, dice: FaultRng::new(rules), geometry }
    }

    /// The faults made so far.
    pub fn counts(&self) -> &Counts {
        &self.dice.counts
    }

    /// The device below.
    pub fn below(&self) -> &D {
        &self.below
    }

    async fn wait(&self, span: Option<Span>) {
        match self.dice.delay(span) {
            Duration::ZERO => {}
            delay => self.clock.sleep(delay).await,
        }
    }

    async fn read(&self, extent: Extent, checks: Checks) -> Outcome {
        let unreadable = self.dice.counted_hits(Fault::ReadError, span(extent));
        let flipped = self.dice.counted_hits(Fault::Flip, span(extent));
        let mut faults: Vec<Found> = unreadable.into_iter().map(|block| Found::media(Lba::new(block))).collect();
        let outcome = self.below.execute(Request::Read { extent, checks }).await;
        let mut answer = None;
        match outcome {
            Ok(Response::Data(data)) => match self.flip_up(extent, data, &flipped, &checks) {
                Ok(data) => answer = Some(data),
                Err(found) => faults.extend(found),
            },
            Ok(other) => return Ok(other),
            Err(error) => {
                faults.extend(error.into_bad_blocks()?);
                // Damage below says nothing about other blocks, so the flipped ones are looked at alone.
                for block in flipped {
                    faults.extend(self.read_flipped(extent, Lba::new(block), &checks).await);
                }
            }
        }
        match (BadBlocks::new(faults), answer) {
            (None, Some(data)) => Ok(Response::Data(data)),
            (Some(faults), _) => Err(faults.into()),
            (None, None) => Err(ErrorKind::Media { reason: "a read ended without data or damage".to_owned() }.into()),
        }
    }

    /// The faults that one flipped block of `extent` has.
    async fn read_flipped(&self, extent: Extent, lba: Lba, checks: &Checks) -> Vec<Found> {
        let checks = match self.geometry.protection {
            Some(format) => checks.advance(lba.get() - extent.start().get(), format),
            None => *checks,
        };
        let alone = Extent::one(lba);
        match self.below.execute(Request::Read { extent: alone, checks }).await {
            Ok(Response::Data(data)) => self.flip_up(alone, data, &[lba.get()], &checks).err().unwrap_or_default(),
            // What is damaged below was found there already.
            Ok(_) | Err(_) => Vec::new(),
        }
    }

    /// Inverts bits of blocks on their way up and checks the whole again.
    fn flip_up(&self, extent: Extent, data: Sealed, blocks: &[u64], checks: &Checks) -> Result<Sealed, Vec<Found>> {
        if blocks.is_empty() {
            return Ok(data);
        }
        let flipped = self.flip(extent, &data, blocks);
        flipped.verify(checks).map_err(|mismatches| {
            mismatches.iter().map(|mismatch| Found::of_mismatch(extent.start(), mismatch)).collect()
        })
    }

    /// A copy of `data` with the bad bit of each of `blocks` inverted, and with the tags it had.
    fn flip(&self, extent: Extent, data: &Sealed, blocks: &[u64]) -> Unverified {
        let size = data.size().bytes();
        let mut bytes = Buffer::copy_from(data.data());
        for block in blocks {
            let at = (block - extent.start().get()) as usize * size;
            self.dice.flip(*block, &mut bytes[at..at + size]);
        }
        Unverified::new(bytes.freeze(), data.tags().clone(), data.size(), data.format()).expect("the shape it had")
    }

    async fn write(&self, extent: Extent, data: Sealed, durability: Durability) -> Outcome {
        self.refuse(extent)?;
        let flipped = self.dice.counted_hits(Fault::FlipWrite, span(extent));
        let data = match flipped.as_slice() {
            [] => data,
            blocks => self.flip(extent, &data, blocks).verify(&Checks::NONE).expect("nothing is asked to be checked"),
        };
        let Some(fate) = self.fate(extent, true) else {
            return self.below.execute(Request::Write { extent, data, durability }).await;
        };
        let index = |lba: Lba| (lba.get() - extent.start().get()) as usize;
        for run in fate.stored {
            let data = data.slice(index(run.start()), run.len() as usize);
            self.below.execute(Request::Write { extent: run, data, durability }).await?;
        }
        for (from, to) in fate.misdirected {
            let data = data.slice(index(from), 1);
            self.below.execute(Request::Write { extent: Extent::one(to), data, durability }).await?;
        }
        Ok(Response::Done)
    }

    async fn write_zeroes(&self, extent: Extent, may_unmap: bool, durability: Durability) -> Outcome {
        self.refuse(extent)?;
        let Some(fate) = self.fate(extent, false) else {
            return self.below.execute(Request::WriteZeroes { extent, may_unmap, durability }).await;
        };
        for extent in fate.stored {
            self.below.execute(Request::WriteZeroes { extent, may_unmap, durability }).await?;
        }
        Ok(Response::Done)
    }

    /// As a write without payload: it can be refused, torn and lost.
    async fn write_uncorrectable(&self, extent: Extent, durability: Durability) -> Outcome {
        self.refuse(extent)?;
        let stored = self.fate(extent, false).map_or_else(|| vec![extent], |fate| fate.stored);
        for extent in stored {
            self.below.execute(Request::WriteUncorrectable { extent, durability }).await?;
        }
        Ok(Response::Done)
    }

    async fn flush(&self) -> Outcome {
        if self.dice.hits_flush(Fault::FlushError) {
            return Err(ErrorKind::Media { reason: "flush-error by rule".to_owned() }.into());
        }
        if self.dice.hits_flush(Fault::LostFlush) {
            return Ok(Response::Done);
        }
        self.below.execute(Request::Flush).await
    }

    /// Fails a write that a rule does not let through.
    fn refuse(&self, extent: Extent) -> Result<(), Error> {
        if let Some(block) = self.dice.first_hit(Fault::WriteError, span(extent)) {
            return Err(ErrorKind::Media { reason: format!("write-error by rule at block {block}") }.into());
        }
        if let Some(block) = self.dice.first_hit(Fault::NoSpace, span(extent)) {
            return Err(ErrorKind::NoSpace { reason: format!("no-space by rule at block {block}") }.into());
        }
        Ok(())
    }

    /// What becomes of the blocks, or nothing if all of them are stored where they belong.
    fn fate(&self, extent: Extent, has_payload: bool) -> Option<WriteFate> {
        let torn = self.dice.hits(Fault::TornWrite, span(extent)).first().copied();
        self.dice.counts.add(Fault::TornWrite, u64::from(torn.is_some()));
        // Blocks behind the tear reach the device no more, so nothing else befalls them.
        let reached = |block: &u64| torn.is_none_or(|torn| *block < torn);
        let lost: Vec<u64> = self.dice.hits(Fault::LostWrite, span(extent)).into_iter().filter(reached).collect();
        let mut astray = Vec::new();
        if has_payload {
            astray = self.dice.hits(Fault::MisdirectedWrite, span(extent));
            astray.retain(|block| reached(block) && lost.binary_search(block).is_err());
        }
        self.dice.counts.add(Fault::LostWrite, lost.len() as u64);
        self.dice.counts.add(Fault::MisdirectedWrite, astray.len() as u64);
        if torn.is_none() && lost.is_empty() && astray.is_empty() {
            return None;
        }
        let is_stored =
            |block: &u64| reached(block) && lost.binary_search(block).is_err() && astray.binary_search(block).is_err();
        let stored = runs(extent.iter().map(Lba::get).filter(is_stored));
        let capacity = self.geometry.capacity_blocks;
        let elsewhere = |block: u64| (Lba::new(block), Lba::new(self.dice.elsewhere(block, capacity)));
        Some(WriteFate { stored, misdirected: astray.into_iter().map(elsewhere).collect() })
    }
}

/// Rising blocks put together to runs.
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
        let mut abilities = self.below.abilities();
        // The device below would check and compare past the faults made here, so the gate above has to read.
        if self.dice.knows(Fault::ReadError) || self.dice.knows(Fault::Flip) {
            abilities.verify = Ability::Absent;
            abilities.compare = Ability::Absent;
            abilities.checksum = Ability::Absent;
            // Only what is sealed here is checked behind a bit that flips on the way up.
            abilities.seals &= self.geometry.protection.is_some();
        }
        abilities
    }

    async fn execute(&self, operation: Request) -> Outcome {
        self.wait(operation.extent().map(span)).await;
        match operation {
            Request::Read { extent, checks } => self.read(extent, checks).await,
            Request::Write { extent, data, durability } => self.write(extent, data, durability).await,
            Request::WriteZeroes { extent, may_unmap, durability } => {
                self.write_zeroes(extent, may_unmap, durability).await
            }
            Request::WriteUncorrectable { extent, durability } => self.write_uncorrectable(extent, durability).await,
            Request::Flush => self.flush().await,
            // A discard promises nothing that could be broken.
            Request::Discard { .. }
            | Request::Verify { .. }
            | Request::Checksum { .. }
            | Request::Repair { .. }
            | Request::BlockStatus { .. }
            | Request::ReadReserved { .. }
            | Request::WriteReserved { .. }
            | Request::Compare { .. } => self.below.execute(operation).await,
        }
    }
}

#[cfg(test)]
mod tests;
