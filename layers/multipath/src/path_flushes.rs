//! Which writes a Flush can vouch for, when they went over several paths. Pure.
//!
//! A Flush vouches for the writes that the controller it is sent to has answered (NVM Command Set specification, Flush),
//! so every path over which writes were answered since its last Flush gets one. Writes answered over a path that has failed
//! since are *orphans*. They are in the cache of the target still, unless the target has crashed, and that a path would not
//! outlive: so a path that was open before the orphans' first write and is still is a *witness*, and a Flush over it
//! vouches for them. Without a witness they may be lost, and the next Flush fails and says so, once.

/// Writes by path, in the order of a count of events.
#[derive(Debug)]
pub(crate) struct PathFlushes {
    now: u64,
    volatile: bool,
    paths: Vec<Option<Open>>,
    orphans: Vec<UnflushedWrite>,
    in_doubt: bool,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    incarnation: u64,
    since: u64,
    /// No write before this that no Flush has vouched for.
    oldest: Option<u64>,
    last: u64,
}

#[derive(Debug)]
struct UnflushedWrite {
    since: u64,
    /// Paths, by incarnation.
    continuous_paths: Vec<u64>,
}

/// Writes that were answered may be gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "paths were lost after writes that were answered and not flushed, and none that is left saw the target all the \
     time: these writes may be lost and are to be written again"
)]
pub(crate) struct InDoubt;

/// What a Flush takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FlushPlan {
    /// It vouches for what was answered until then.
    pub(crate) mark: u64,
    /// Paths that get one, and their incarnations; none where any will do.
    pub(crate) paths: Vec<(usize, u64)>,
}

impl PathFlushes {
    pub(crate) fn new(paths: usize, volatile: bool) -> PathFlushes {
        PathFlushes { now: 0, volatile, paths: vec![None; paths], orphans: Vec::new(), in_doubt: false }
    }

    /// A path is open.
    pub(crate) fn opened(&mut self, path: usize, incarnation: u64) {
        self.now += 1;
        self.paths[path] = Some(Open { incarnation, since: self.now, oldest: None, last: 0 });
    }

    /// A write that may be lost until a Flush was answered.
    pub(crate) fn wrote(&mut self, path: usize, incarnation: u64) {
        self.now += 1;
        match &mut self.paths[path] {
            Some(open) if open.incarnation == incarnation => {
                open.oldest.get_or_insert(self.now);
                open.last = self.now;
            }
            // Its answer came with the last bytes of a path that is gone.
            _ => self.in_doubt |= self.volatile,
        }
    }

    /// A path is lost.
    pub(crate) fn lost(&mut self, path: usize) {
        self.now += 1;
        let Some(lost) = self.paths[path].take() else { return };
        for orphan in &mut self.orphans {
            orphan.continuous_paths.retain(|witness| *witness != lost.incarnation);
        }
        if let (Some(oldest), true) = (lost.oldest, self.volatile) {
            let witnesses = self.paths.iter().flatten().filter(|open| open.since < oldest);
            let witnesses = witnesses.map(|open| open.incarnation).collect();
            self.orphans.push(UnflushedWrite { since: self.now, continuous_paths: witnesses });
        }
        let before = self.orphans.len();
        self.orphans.retain(|orphan| !orphan.continuous_paths.is_empty());
        self.in_doubt |= self.orphans.len() < before;
    }

    /// A Flush begins. Writes that may be lost make it fail, once.
    pub(crate) fn begin(&mut self) -> Result<FlushPlan, InDoubt> {
        if std::mem::take(&mut self.in_doubt) {
            return Err(InDoubt);
        }
        let of = |(path, open): (usize, &Option<Open>)| open.as_ref().map(|open| (path, open.incarnation, open.oldest));
        let open: Vec<_> = self.paths.iter().enumerate().filter_map(of).collect();
        let is_asked = |incarnation: u64, dirty: bool| {
            dirty || self.orphans.iter().any(|orphan| orphan.continuous_paths.first() == Some(&incarnation))
        };
        let asked = open.into_iter().filter(|(_, incarnation, oldest)| is_asked(*incarnation, oldest.is_some()));
        Ok(FlushPlan { mark: self.now, paths: asked.map(|(path, incarnation, _)| (path, incarnation)).collect() })
    }

    /// A Flush of that mark succeeded over this path.
    pub(crate) fn flushed(&mut self, path: usize, incarnation: u64, mark: u64) {
        if let Some(open) = self.paths[path].as_mut().filter(|open| open.incarnation == incarnation) {
            open.oldest = (open.last > mark).then_some(mark + 1);
        }
        self.orphans.retain(|orphan| orphan.since > mark || !orphan.continuous_paths.contains(&incarnation));
    }

    /// Whether everything until that mark is vouched for, so that the Flush may be answered.
    pub(crate) fn is_clear(&self, mark: u64) -> bool {
        let is_dirty = |open: &Open| open.oldest.is_some_and(|oldest| oldest <= mark);
        !self.in_doubt && self.orphans.is_empty() && !self.paths.iter().flatten().any(is_dirty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths 0 and 1, open as incarnations 1 and 2.
    fn two() -> PathFlushes {
        let mut ledger = PathFlushes::new(2, true);
        ledger.opened(0, 1);
        ledger.opened(1, 2);
        ledger
    }

    #[test]
    fn every_path_with_writes_gets_a_flush() {
        let mut ledger = two();
        assert_eq!(ledger.begin().unwrap().paths, []);
        ledger.wrote(1, 2);
        assert_eq!(ledger.begin().unwrap().paths, [(1, 2)]);
        ledger.wrote(0, 1);
        let plan = ledger.begin().unwrap();
        assert_eq!(plan.paths, [(0, 1), (1, 2)]);
        ledger.flushed(0, 1, plan.mark);
        assert!(!ledger.is_clear(plan.mark));
        ledger.wrote(0, 1);
        ledger.flushed(1, 2, plan.mark);
        assert!(ledger.is_clear(plan.mark), "a write after its beginning is not the flush's business");
        assert_eq!(ledger.begin().unwrap().paths, [(0, 1)]);
    }

    #[test]
    fn a_path_that_saw_it_all_vouches_for_one_that_failed() {
        let mut ledger = two();
        ledger.wrote(0, 1);
        ledger.lost(0);
        let plan = ledger.begin().unwrap();
        assert_eq!(plan.paths, [(1, 2)]);
        assert!(!ledger.is_clear(plan.mark));
        ledger.flushed(1, 2, plan.mark);
        assert!(ledger.is_clear(plan.mark));
        ledger.lost(1);
        assert!(ledger.begin().is_ok(), "it was flushed before");
    }

    #[test]
    fn without_such_a_path_the_next_flush_fails_and_only_that() {
        let mut ledger = two();
        ledger.wrote(0, 1);
        ledger.lost(0);
        ledger.lost(1);
        ledger.opened(0, 3);
        assert_eq!(ledger.begin(), Err(InDoubt));
        assert!(ledger.begin().is_ok());
    }

    #[test]
    fn a_path_that_was_opened_later_is_no_witness() {
        let mut ledger = PathFlushes::new(2, true);
        ledger.opened(0, 1);
        ledger.wrote(0, 1);
        ledger.opened(1, 2);
        ledger.lost(0);
        assert_eq!(ledger.begin(), Err(InDoubt));
        // Written after both were there: the other one is a witness.
        ledger.opened(0, 3);
        ledger.wrote(1, 2);
        let plan = ledger.begin().unwrap();
        ledger.flushed(1, 2, plan.mark);
        ledger.wrote(1, 2);
        ledger.lost(1);
        assert_eq!(ledger.begin().unwrap().paths, [(0, 3)]);
    }

    #[test]
    fn a_flush_that_began_before_the_loss_does_not_vouch_for_the_orphans() {
        let mut ledger = two();
        ledger.wrote(0, 1);
        let plan = ledger.begin().unwrap();
        ledger.lost(0);
        ledger.flushed(1, 2, plan.mark);
        assert!(!ledger.is_clear(plan.mark));
    }

    #[test]
    fn without_a_volatile_cache_nothing_is_in_doubt() {
        let mut ledger = PathFlushes::new(1, false);
        ledger.opened(0, 1);
        ledger.wrote(0, 1);
        ledger.lost(0);
        ledger.wrote(0, 1);
        assert!(ledger.begin().is_ok());
    }
}
