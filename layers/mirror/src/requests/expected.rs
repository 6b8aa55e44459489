//! Tags that a reader expects, where replicas do not have them all.
//!
//! A replica that has lost a write holds the older block with the older tag: it is good by itself, and nothing but the
//! reader's expectation shows that it is not the last one. If another replica has the block as expected, that one
//! counts, and the first one is rewritten from it, data and tags. If none has it, the expectation is not met, and
//! nothing is written.
//!
//! Who demands that blocks were written ([`Checks::checks_escapes`]) has met a copy that was not as expected. Another turn
//! would go to another replica, so all of them are checked then, and those that have lost the write are healed.
//!
//! Invariants:
//! - All of it happens under the lock of the blocks, so that replicas do not differ just because one has executed a
//!   change before the other. Where a crash may have left them different, they are reconciled first.
//! - In a block that one replica does not have as expected, another one counts only if its tag was compared: one that
//!   disables checks, as of a block that was never written, says nothing.

use std::collections::BTreeSet;
use std::rc::Rc;

use sealblock_block::{
    BadBlock, BadBlockCause, BadBlocks, Clock, Error, ErrorKind, Expectations, Request, Tally, Unchecked, WhyUnchecked,
};
use sealblock_integrity::{Checks, PiFormat, Sealed};
use sealblock_units::{BlockCount, Extent, Lba};

use crate::mirror::delegation::LockedBlocks;
use crate::mirror::replica::{Replica, runs_between};
use crate::mirror::{Mirror, Replicas};

/// Blocks of one request of the search for blocks that are not as expected.
const PIECE_BLOCKS: u32 = 256;
/// Blocks that a check lists because replicas have different tags there, at most.
const MAX_DISPUTED: usize = 256;

/// What the replicas have from a block on.
enum Found {
    /// Blocks that are good and as expected.
    Blocks(Sealed),
    /// No replica has the first block as expected.
    Unexpected(Error),
    /// No replica has the first block, or nothing tells which one counts.
    Lost(BadBlock),
}

/// The first block of a run that a replica does not have as expected.
struct Fault {
    lba: Lba,
    /// The tag that was not expected, or damage.
    why: Result<Error, BadBlock>,
}

/// A search for blocks that are as expected.
struct Search<'a> {
    replicas: &'a Replicas,
    extent: Extent,
    expectations: Expectations,
    format: Option<PiFormat>,
    /// The blocks that some replica does not have as expected.
    disputed: BTreeSet<Lba>,
    /// The replicas on which a fault was met, by index.
    faulty: BTreeSet<usize>,
}

impl Search<'_> {
    /// What is expected of a part.
    fn expected(&self, part: Extent) -> Expectations {
        self.expectations.advance(part.start().get() - self.extent.start().get(), self.format)
    }

    /// The same, for blocks that disable checks, too.
    fn strictly_expected(&self, part: Extent) -> Expectations {
        Expectations::new(Checks { checks_escapes: true, ..*self.expected(part).checks() })
    }

    /// Fails if a copy of a block is not as expected.
    fn check(&self, one: Extent, block: &Sealed) -> Result<(), Error> {
        match self.disputed.contains(&one.start()) {
            true => self.strictly_expected(one).check(one, block),
            false => self.expected(one).check(one, block),
        }
    }

    /// Reads a part from a replica: good and as expected, or the first fault.
    ///
    /// # Errors
    /// When the replica fails otherwise.
    async fn read(&mut self, at: usize, part: Extent) -> Result<Result<Sealed, Fault>, Error> {
        let replica = &self.replicas[at];
        let fault = match replica.read_expecting(part, &self.expected(part)).await {
            Ok(data) => match self.first_disputed(part, &data) {
                None => return Ok(Ok(data)),
                Some((lba, error)) => Fault { lba, why: Ok(error.with_device(&replica.name())) },
            },
            Err(error) => match *error.kind() {
                ErrorKind::Expectation { lba, .. } => Fault { lba, why: Ok(error) },
                _ => {
                    let bad_blocks = error.into_bad_blocks()?;
                    let first = bad_blocks.first().copied().unwrap_or(BadBlock::media(part.start()));
                    Fault { lba: first.lba, why: Err(first) }
                }
            },
        };
        self.faulty.insert(at);
        if fault.why.is_ok() {
            self.disputed.insert(fault.lba);
        }
        Ok(Err(fault))
    }

    /// The first disputed block of a part whose copy is not as expected.
    fn first_disputed(&self, part: Extent, data: &Sealed) -> Option<(Lba, Error)> {
        self.disputed.range(part.start()..=part.last()).find_map(|lba| {
            let block = data.slice((lba.get() - part.start().get()) as usize, 1);
            self.check(Extent::one(*lba), &block).err().map(|error| (*lba, error))
        })
    }
}

impl<C: Clock> Mirror<C> {
    /// True if the caller expects something of tags.
    pub(crate) fn expects_tags(&self, expectations: &Expectations) -> bool {
        self.geometry.protection.is_some() && !expectations.is_none()
    }

    /// Reads blocks that `met` does not have as expected, or whose copies are known to differ: each from a replica that has
    /// it. The others are rewritten there before the read completes.
    pub(crate) async fn read_expected(
        &self,
        extent: Extent,
        expectations: &Expectations,
        met: Option<&Rc<Replica>>,
    ) -> Result<Sealed, Error> {
        let (outcome, is_repaired) = {
            let _guard = self.lock_reconciled(extent).await?;
            self.read_locked(extent, expectations, met).await?
        };
        let lost = outcome.as_ref().err().and_then(Error::bad_blocks).map_or(&[][..], BadBlocks::as_slice);
        if !self.is_read_only {
            self.accept_stale_if_proven(lost).await;
        }
        if is_repaired || !lost.is_empty() {
            self.forget_repaired().await;
        }
        outcome
    }

    /// Accepts withheld copies of lost blocks, where what is left of the blocks elsewhere proves that they are current.
    async fn accept_stale_if_proven(&self, lost: &[BadBlock]) {
        for bad in lost {
            for replica in self.in_sync() {
                let is_withheld = !replica.stale.borrow().within(Extent::one(bad.lba)).is_empty();
                if is_withheld {
                    self.repair_block(&replica, bad).await;
                }
            }
        }
    }

    /// Locks blocks in which in-sync replicas have the same, if none of them has lost a write.
    async fn lock_reconciled(&self, extent: Extent) -> Result<LockedBlocks<'_>, Error> {
        loop {
            self.reconcile_for_read(extent).await?;
            let guard = self.lock_blocks(extent).await;
            if self.is_read_only || !self.is_nosync(extent) {
                return Ok(guard);
            }
        }
    }

    /// The same with blocks that the caller has locked; also returns whether something was rewritten.
    async fn read_locked(
        &self,
        extent: Extent,
        expectations: &Expectations,
        met: Option<&Rc<Replica>>,
    ) -> Result<(Result<Sealed, Error>, bool), Error> {
        let mut replicas = self.in_sync();
        // First, so that what it lacks is known when the others are asked.
        replicas.sort_by_key(|replica| met.is_none_or(|met| met.id != replica.id));
        let conflicts: BTreeSet<Lba> = match replicas.len() {
            0 | 1 => BTreeSet::new(),
            _ => self.conflicts.borrow().range(extent.start()..=extent.last()).copied().collect(),
        };
        let (expectations, format) = (*expectations, self.geometry.protection);
        let (disputed, faulty) = (conflicts.clone(), BTreeSet::new());
        let mut search = Search { replicas: &replicas, extent, expectations, format, disputed, faulty };
        let (mut parts, mut lost, mut rest) = (Vec::new(), Vec::new(), Some(extent));
        while let Some(run) = rest {
            let found = match conflicts.range(run.start()..).next() {
                Some(lba) if *lba == run.start() => self.settle(&mut search, *lba).await?,
                Some(lba) => self.longest(&mut search, before(run, *lba)).await?,
                None => self.longest(&mut search, run).await?,
            };
            let done = match found {
                Found::Blocks(data) => {
                    let part = Extent::from_raw(run.start().get(), data.blocks() as u64).expect("a part of the run");
                    parts.push((part, data));
                    part.last()
                }
                Found::Lost(bad) => {
                    lost.push(bad);
                    run.start()
                }
                Found::Unexpected(error) => {
                    // Damage comes first, wherever it is.
                    lost.extend(self.gather(&replicas, run).await?.1);
                    return Ok((BadBlocks::fail_if_any(lost).and(Err(error)), false));
                }
            };
            rest = behind(run, done);
        }
        if is_strict(&expectations) {
            self.find_faulty(&mut search).await;
        }
        let repaired = if self.is_read_only { 0 } else { self.repair_faulty(&search, &parts, &conflicts).await };
        let gone = lost.iter().filter(|bad| bad.cause != BadBlockCause::Conflict).count();
        self.lost_blocks.set(self.lost_blocks.get() + gone as u64);
        let data = BadBlocks::fail_if_any(lost).map(|()| Sealed::join(parts.into_iter().map(|(_, data)| data)));
        Ok((data, repaired > 0))
    }

    /// The most blocks from the start of a run that one replica has as expected.
    async fn longest(&self, search: &mut Search<'_>, run: Extent) -> Result<Found, Error> {
        let (mut unexpected, mut damage, mut failed): (Option<Error>, Option<BadBlock>, Option<Error>) =
            (None, None, None);
        // For each replica, the first block that it lacks, as far as is known: all it has lies before.
        let mut ends: Vec<(Option<Lba>, usize)> = (0..search.replicas.len()).map(|at| (None, at)).collect();
        while let Some((end, at)) = take_longest(&mut ends) {
            let replica = &search.replicas[at];
            if !replica.is_readable() {
                failed.get_or_insert_with(|| self.no_replica());
                continue;
            }
            let part = end.map_or(run, |end| before(run, end));
            match search.read(at, part).await {
                Ok(Ok(data)) => return Ok(Found::Blocks(data)),
                Ok(Err(fault)) if fault.lba > run.start() => ends.push((Some(fault.lba), at)),
                Ok(Err(Fault { why: Ok(error), .. })) => unexpected = unexpected.or(Some(error)),
                Ok(Err(Fault { why: Err(bad), .. })) => {
                    damage = damage.filter(|known| known.cause != BadBlockCause::Stale).or(Some(bad));
                }
                Err(error) => {
                    self.fail_if_unreachable(replica, &error);
                    failed = Some(error);
                }
            }
        }
        match (unexpected, damage, failed) {
            (Some(error), ..) => Ok(Found::Unexpected(error)),
            (None, Some(bad), _) => Ok(Found::Lost(bad)),
            (None, None, failed) => Err(failed.unwrap_or_else(|| self.no_replica())),
        }
    }

    /// Finds the replicas that were not asked, and do not have all blocks as expected.
    async fn find_faulty(&self, search: &mut Search<'_>) {
        let expected = search.expected(search.extent);
        for (at, replica) in search.replicas.iter().enumerate() {
            if self.is_read_only || search.faulty.contains(&at) || !replica.is_readable() {
                continue;
            }
            let Err(error) = replica.execute(Request::verify(search.extent, expected)).await else { continue };
            match error.kind() {
                ErrorKind::Expectation { .. } | ErrorKind::Integrity(_) => {
                    search.faulty.insert(at);
                }
                _ => self.fail_if_unreachable(replica, &error),
            }
        }
    }

    /// A block of which a check has found copies that differ: those that are as expected count, if they are alike.
    async fn settle(&self, search: &mut Search<'_>, lba: Lba) -> Result<Found, Error> {
        let one = Extent::one(lba);
        let (mut copies, mut unexpected): (Vec<Sealed>, Option<Error>) = (Vec::new(), None);
        for at in 0..search.replicas.len() {
            match search.read(at, one).await {
                Ok(Ok(data)) => copies.push(data),
                Ok(Err(Fault { why: Ok(error), .. })) => unexpected = unexpected.or(Some(error)),
                Ok(Err(_)) => {}
                Err(error) => self.fail_if_unreachable(&search.replicas[at], &error),
            }
        }
        let is_one = copies.windows(2).all(|pair| pair[0].first_difference(&pair[1], true).is_none());
        Ok(match (copies.pop(), unexpected) {
            (Some(copy), _) if is_one => Found::Blocks(copy),
            (None, Some(error)) => Found::Unexpected(error),
            _ => Found::Lost(BadBlock::new(lba, BadBlockCause::Conflict, None, None)),
        })
    }

    /// Rewrites, on the replicas on which a fault was met, all blocks that are bad or not as expected; returns how many.
    async fn repair_faulty(&self, search: &Search<'_>, parts: &[(Extent, Sealed)], conflicts: &BTreeSet<Lba>) -> usize {
        let mut repaired = 0;
        for replica in search.faulty.iter().map(|at| &search.replicas[*at]) {
            for (part, data) in parts {
                for bad in self.faults(search, replica, *part, data).await {
                    let one = Extent::one(bad.lba);
                    let copy = data.slice((bad.lba.get() - part.start().get()) as usize, 1);
                    let attach_count = replica.attach_count();
                    let is_good = self.rewrite(replica, attach_count, (one, &copy), &bad, search.expected(one)).await;
                    repaired += usize::from(is_good);
                }
            }
        }
        for lba in conflicts.iter().filter(|lba| parts.iter().any(|(part, _)| part.contains(**lba))) {
            if self.are_identical(&self.in_sync(), Extent::one(*lba)).await.unwrap_or(false) {
                self.forget_conflicts(Extent::one(*lba));
            }
        }
        repaired
    }

    /// The blocks of a replica that are bad, or not as expected while those that were found are.
    async fn faults(&self, search: &Search<'_>, replica: &Rc<Replica>, part: Extent, found: &Sealed) -> Vec<BadBlock> {
        let mut faults = match replica.read(part).await.map_err(Error::into_bad_blocks) {
            Ok(stored) => return unexpected_blocks(search, part, &stored, (part, found)),
            Err(Ok(bad_blocks)) => bad_blocks,
            Err(Err(error)) => {
                self.fail_if_unreachable(replica, &error);
                return Vec::new();
            }
        };
        let bad = faults.iter().map(|bad| bad.lba).collect();
        for run in runs_between(part, &bad) {
            if let Ok(stored) = replica.read(run).await {
                faults.extend(unexpected_blocks(search, run, &stored, (part, found)));
            }
        }
        faults
    }

    /// Lists the blocks that some of these replicas have as expected and others do not, with the replicas that do not, as
    /// a check of all of them found some that were not; returns these blocks. Ends at the first one that none has as
    /// expected.
    pub(crate) async fn list_disputed(
        &self,
        asked: &Replicas,
        strays: Vec<(usize, Lba)>,
        (extent, expectations): (Extent, &Expectations),
        tally: &mut Tally,
        bad: &mut [BTreeSet<Lba>],
    ) -> Result<Vec<Lba>, Error> {
        let format = self.geometry.protection;
        let piece_blocks = BlockCount::new(PIECE_BLOCKS).expect("not 0");
        let (mut seen, mut disputed) = (BTreeSet::new(), Vec::new());
        for (at, first) in strays {
            let replica = &asked[at];
            let rest = behind_or_at(extent, first);
            let mut pieces: Vec<Extent> = rest.split_aligned(piece_blocks).collect();
            pieces.reverse();
            while let Some(piece) = pieces.pop() {
                let expected = expectations.advance(piece.start().get() - extent.start().get(), format);
                let Err(error) = replica.execute(Request::verify(piece, expected)).await else { continue };
                let ErrorKind::Expectation { lba, .. } = *error.kind() else {
                    // It has failed, or has become bad, since it was asked for all of them.
                    self.fail_if_unreachable(replica, &error);
                    let bad_blocks = error.into_bad_blocks().unwrap_or_default();
                    tally.bad_blocks.extend(bad_blocks.iter().map(|bad| replica.bad_block(bad)));
                    let rest = Unchecked::new(behind_or_at(extent, piece.start()), WhyUnchecked::Failed);
                    tally.coverage.add(replica.unchecked(rest));
                    break;
                };
                pieces.extend(behind(piece, lba));
                if !seen.insert(lba) {
                    continue;
                }
                let offset = lba.get() - extent.start().get();
                let strays = self.compare_tags(asked, lba, &expectations.advance(offset, format)).await;
                match strays {
                    Err(error) => {
                        // The request fails with it. Others behind it would not change that.
                        tally.take(error)?;
                        return Ok(disputed);
                    }
                    Ok(strays) if strays.is_empty() => continue,
                    Ok(strays) => {
                        for (at, _) in &strays {
                            bad[*at].insert(lba);
                        }
                        tally.bad_blocks.extend(strays.iter().map(|(at, bad)| asked[*at].bad_block(bad)));
                        disputed.push(lba);
                    }
                }
                if let (true, Some(rest)) = (disputed.len() >= MAX_DISPUTED, behind(extent, lba)) {
                    let unlisted =
                        |replica: &Rc<Replica>| replica.unchecked(Unchecked::new(rest, WhyUnchecked::Failed));
                    asked.iter().for_each(|replica| tally.coverage.add(unlisted(replica)));
                    return Ok(disputed);
                }
            }
        }
        Ok(disputed)
    }

    /// The replicas, by index, whose copy of a block is not as expected while that of another one is.
    ///
    /// # Errors
    /// If none has it as expected: the first one's tag.
    async fn compare_tags(
        &self,
        asked: &Replicas,
        lba: Lba,
        expected: &Expectations,
    ) -> Result<Vec<(usize, BadBlock)>, Error> {
        let one = Extent::one(lba);
        let _guard = self.lock_blocks(one).await;
        let strictly = Expectations::new(Checks { checks_escapes: true, ..*expected.checks() });
        let (mut strays, mut first, mut has_expected) = (Vec::new(), None, false);
        for (at, replica) in asked.iter().enumerate().filter(|(_, replica)| replica.is_readable()) {
            match replica.execute(Request::verify(one, strictly)).await {
                Ok(_) => has_expected = true,
                Err(error) => {
                    strays.extend(stray(&error).map(|bad| (at, bad)));
                    first = first.or(stray(&error).map(|_| error));
                }
            }
        }
        match first {
            Some(error) if !has_expected => Err(error),
            // After a crash they may differ, and are reconciled.
            _ if self.is_nosync(one) => Ok(Vec::new()),
            _ => Ok(strays),
        }
    }
}

/// The blocks of `stored` that are not as expected, where those of `found` are.
fn unexpected_blocks(
    search: &Search<'_>,
    run: Extent,
    stored: &Sealed,
    (part, found): (Extent, &Sealed),
) -> Vec<BadBlock> {
    let mut unexpected = Vec::new();
    for (index, lba) in run.iter().enumerate() {
        let one = Extent::one(lba);
        let Err(error) = search.check(one, &stored.slice(index, 1)) else { continue };
        let copy = found.slice((lba.get() - part.start().get()) as usize, 1);
        if search.strictly_expected(one).check(one, &copy).is_ok() {
            unexpected.extend(stray(&error));
        }
    }
    unexpected
}

/// True if the caller demands that blocks were written.
pub(crate) fn is_strict(expectations: &Expectations) -> bool {
    expectations.checks().checks_escapes
}

/// A copy whose tag is not as expected, as a bad block.
fn stray(error: &Error) -> Option<BadBlock> {
    match *error.kind() {
        ErrorKind::Expectation { lba, field, expected, actual } => {
            Some(BadBlock::new(lba, BadBlockCause::Tag(field), Some(expected), Some(actual)))
        }
        _ => None,
    }
}

/// Takes the replica that may have the most blocks: one that was not asked yet, or the one whose first missing block is
/// the last.
fn take_longest(ends: &mut Vec<(Option<Lba>, usize)>) -> Option<(Option<Lba>, usize)> {
    let longest = ends.iter().enumerate().max_by_key(|(at, (end, _))| (end.is_none(), *end, usize::MAX - at));
    longest.map(|(at, _)| at).map(|at| ends.swap_remove(at))
}

/// The blocks of a run before one that is not its first.
fn before(run: Extent, lba: Lba) -> Extent {
    Extent::from_raw(run.start().get(), lba.get() - run.start().get()).expect("a block before it")
}

/// The blocks of a run behind one of them.
fn behind(run: Extent, lba: Lba) -> Option<Extent> {
    Extent::from_raw(lba.get() + 1, run.last().get() - lba.get()).ok()
}

/// The blocks of a run from one of them on.
fn behind_or_at(run: Extent, lba: Lba) -> Extent {
    Extent::from_raw(lba.get(), run.last().get() - lba.get() + 1).expect("the block itself")
}
