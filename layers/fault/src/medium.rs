//! Injects faults into a medium, by sector and byte, such as torn sectors.

use sealblock_block::{Clock, Medium, MediumError, MediumErrorKind, NoteKeeping};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::rng::{Counts, FaultRng};
use crate::rules::{Fault, Rules, Span};

/// `M` with injected faults. Units in rules are its sectors. Punching and zeroing get errors and delays only.
pub struct FaultMedium<M, C> {
    inner: M,
    clock: C,
    rng: FaultRng,
}

impl<M: Medium, C: Clock> FaultMedium<M, C> {
    /// Injects faults into `inner` by `rules`; `clock` measures delays.
    pub fn new(inner: M, rules: Rules, clock: C) -> FaultMedium<M, C> {
        FaultMedium { inner, clock, rng: FaultRng::new(rules) }
    }

    /// The faults injected so far.
    pub fn counts(&self) -> &Counts {
        &self.rng.counts
    }

    /// The inner medium.
    pub fn inner(&self) -> &M {
        &self.inner
    }

    fn sector(&self) -> u64 {
        u64::from(self.inner.sector_bytes())
    }

    /// The sectors of a range; `None` for an empty one, which gets no fault.
    fn span(&self, offset_bytes: u64, length_bytes: u64) -> Option<Span> {
        let last = offset_bytes.checked_add(length_bytes.checked_sub(1)?)?;
        Some(Span { first: offset_bytes / self.sector(), last: last / self.sector() })
    }

    /// Fails if a sector of `span` gets this fault now.
    fn error(&self, fault: Fault, kind: MediumErrorKind, doing: &'static str, span: Span) -> Result<(), MediumError> {
        match self.rng.first_hit(fault, span) {
            None => Ok(()),
            Some(sector) => {
                let reason = format!("{} by rule at sector {sector}", fault.name());
                Err(MediumError { kind, doing, offset_bytes: sector.saturating_mul(self.sector()), reason })
            }
        }
    }

    /// Waits, and fails a change if a rule says so.
    async fn before_change(&self, doing: &'static str, offset: u64, length: u64) -> Result<(), MediumError> {
        let Some(span) = self.span(offset, length) else { return Ok(()) };
        self.rng.wait(&self.clock, Some(span)).await;
        self.error(Fault::WriteError, MediumErrorKind::Failed, doing, span)?;
        self.error(Fault::NoSpace, MediumErrorKind::NoSpace, doing, span)
    }

    /// Restores the old bytes of torn sectors, from a random byte on.
    async fn tear(&self, sectors: &[u64], first: u64, bytes: &mut Buffer) -> Result<(), MediumError> {
        for sector in sectors {
            let (result, old) =
                self.inner.read(sector * self.sector(), self.inner.buffer(self.sector() as usize)).await;
            result?;
            // At least one byte is new and one is old; otherwise nothing would be torn.
            let kept = 1 + self.rng.below(self.sector() - 1) as usize;
            let at = ((sector - first) * self.sector()) as usize;
            bytes[at + kept..at + old.len()].copy_from_slice(&old[kept..]);
        }
        Ok(())
    }

    /// Executes a write with faults: tears and flips sectors, omits lost ones and misdirects others.
    async fn write_badly(&self, span: Span, from: &Slice, fate: WriteFate) -> Result<(), MediumError> {
        let (first, sector) = (span.first, self.sector());
        let mut bytes = self.inner.buffer(from.len());
        bytes.copy_from_slice(from);
        let part = |at: u64| ((at - first) * sector) as usize..((at - first + 1) * sector) as usize;
        self.tear(&fate.torn, first, &mut bytes).await?;
        for &at in &fate.flipped {
            self.rng.flip(at, &mut bytes[part(at)]);
        }
        let bytes = bytes.freeze();
        let (mut at, mut run) = (first, first);
        while at <= span.last {
            let astray = fate.misdirected.binary_search(&at).is_ok();
            if astray || fate.lost.binary_search(&at).is_ok() {
                self.write_run(first, run..at, &bytes).await?;
                run = at + 1;
            }
            if astray {
                let elsewhere = self.rng.elsewhere(at, self.inner.len_bytes() / sector);
                self.inner.write(elsewhere * sector, bytes.slice(part(at))).await?;
            }
            at += 1;
        }
        self.write_run(first, run..at, &bytes).await
    }

    async fn write_run(&self, first: u64, run: std::ops::Range<u64>, bytes: &Slice) -> Result<(), MediumError> {
        if run.is_empty() {
            return Ok(());
        }
        let part = ((run.start - first) * self.sector()) as usize..((run.end - first) * self.sector()) as usize;
        self.inner.write(run.start * self.sector(), bytes.slice(part)).await
    }
}

/// The sectors of a write that get a fault, in ascending order.
struct WriteFate {
    lost: Vec<u64>,
    misdirected: Vec<u64>,
    torn: Vec<u64>,
    flipped: Vec<u64>,
}

impl WriteFate {
    fn decide(rng: &FaultRng, span: Span) -> Option<WriteFate> {
        let lost = rng.counted_hits(Fault::LostWrite, span);
        let hits = |fault: Fault, earlier: &[&[u64]]| {
            let mut hits = rng.hits(fault, span);
            hits.retain(|at| earlier.iter().all(|others| others.binary_search(at).is_err()));
            rng.counts.add(fault, hits.len() as u64);
            hits
        };
        let misdirected = hits(Fault::MisdirectedWrite, &[&lost]);
        let torn = hits(Fault::TornWrite, &[&lost, &misdirected]);
        let flipped = hits(Fault::FlipWrite, &[&lost]);
        let fate = WriteFate { lost, misdirected, torn, flipped };
        let any = [&fate.lost, &fate.misdirected, &fate.torn, &fate.flipped].iter().any(|hits| !hits.is_empty());
        any.then_some(fate)
    }
}

impl<M: Medium, C: Clock> Medium for FaultMedium<M, C> {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        self.inner.sector_bytes()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn can_punch(&self) -> bool {
        self.inner.can_punch()
    }

    fn buffer(&self, len_bytes: usize) -> Buffer {
        self.inner.buffer(len_bytes)
    }

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let Some(span) = self.span(offset_bytes, into.len() as u64) else {
            return self.inner.read(offset_bytes, into).await;
        };
        self.rng.wait(&self.clock, Some(span)).await;
        if let Err(error) = self.error(Fault::ReadError, MediumErrorKind::Failed, "read", span) {
            return (Err(error), into);
        }
        let (result, mut into) = self.inner.read(offset_bytes, into).await;
        if result.is_ok() {
            let flipped = self.rng.counted_hits(Fault::Flip, span);
            for (bytes, sector) in into.chunks_mut(self.sector() as usize).zip(span.first..) {
                if flipped.binary_search(&sector).is_ok() {
                    self.rng.flip(sector, bytes);
                }
            }
        }
        (result, into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        let length_bytes = from.len() as u64;
        self.before_change("write", offset_bytes, length_bytes).await?;
        let whole = offset_bytes.is_multiple_of(self.sector()) && length_bytes.is_multiple_of(self.sector());
        let there = offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.len_bytes());
        // A write that the inner medium refuses gets no fault.
        let span = self.span(offset_bytes, length_bytes).filter(|_| whole && there && !self.is_read_only());
        match span.and_then(|span| Some((span, WriteFate::decide(&self.rng, span)?))) {
            Some((span, fate)) => self.write_badly(span, &from, fate).await,
            None => self.inner.write(offset_bytes, from).await,
        }
    }

    fn note_keeping(&self) -> NoteKeeping {
        self.inner.note_keeping()
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        self.inner.note(offset_bytes, bytes)
    }

    fn submitted(&self) -> impl Future<Output = ()> {
        self.inner.submitted()
    }

    async fn sync(&self) -> Result<(), MediumError> {
        self.rng.wait(&self.clock, None).await;
        if self.rng.hits_flush(Fault::FlushError) {
            let reason = "flush-error by rule".to_owned();
            return Err(MediumError { kind: MediumErrorKind::Failed, doing: "sync", offset_bytes: 0, reason });
        }
        if self.rng.hits_flush(Fault::LostFlush) {
            return Ok(());
        }
        self.inner.sync().await
    }

    async fn drain(&self) {
        self.inner.drain().await;
    }

    fn can_discard(&self) -> bool {
        self.inner.can_discard()
    }

    async fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.before_change("discard", offset_bytes, length_bytes).await?;
        self.inner.discard(offset_bytes, length_bytes).await
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.before_change("punch a hole", offset_bytes, length_bytes).await?;
        self.inner.punch(offset_bytes, length_bytes).await
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.before_change("write zeroes", offset_bytes, length_bytes).await?;
        self.inner.zero(offset_bytes, length_bytes).await
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        self.inner.set_len(length_bytes).await
    }
}

#[cfg(test)]
mod tests;
