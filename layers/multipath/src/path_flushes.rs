//! Which completed writes a Flush makes durable if they used several paths. Pure.
//!
//! A Flush makes durable the writes that its controller completed before (NVM Command Set specification, Flush), so
//! every path with completed writes since its last Flush gets one. A path that fails leaves *unflushed writes* in the
//! target's volatile cache. A restart of the target would lose these writes, but also every path. So a Flush on a
//! *continuous path*, one that was open since before these writes, makes them durable. Without a continuous path they
//! may be lost, and the next Flush fails once to report it.

/// Completed writes by path, in the order of an event counter.
#[derive(Debug)]
pub(crate) struct PathFlushes {
    now: u64,
    has_volatile_cache: bool,
    paths: Vec<Option<OpenPath>>,
    unflushed: Vec<UnflushedWrite>,
    writes_lost: bool,
}

#[derive(Clone, Copy, Debug)]
struct OpenPath {
    incarnation: u64,
    since: u64,
    /// When the oldest write completed that no Flush has made durable yet.
    oldest: Option<u64>,
    last: u64,
}

#[derive(Debug)]
struct UnflushedWrite {
    since: u64,
    /// Paths, by incarnation.
    continuous_paths: Vec<u64>,
}

/// Completed writes may be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "paths failed after writes that completed and were not flushed, and no other path was up all the time: these writes \
     may be lost and have to be repeated"
)]
pub(crate) struct WritesLost;

/// The paths on which a Flush must be sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FlushPlan {
    /// The Flush makes durable what completed until this event.
    pub(crate) mark: u64,
    /// These paths and their incarnations; empty if any path will do.
    pub(crate) paths: Vec<(usize, u64)>,
}

impl PathFlushes {
    pub(crate) fn new(paths: usize, has_volatile_cache: bool) -> PathFlushes {
        PathFlushes { now: 0, has_volatile_cache, paths: vec![None; paths], unflushed: Vec::new(), writes_lost: false }
    }

    /// Records that a path was opened.
    pub(crate) fn path_opened(&mut self, path: usize, incarnation: u64) {
        self.now += 1;
        self.paths[path] = Some(OpenPath { incarnation, since: self.now, oldest: None, last: 0 });
    }

    /// Records that a write completed that may be lost until a Flush completes.
    pub(crate) fn write_completed(&mut self, path: usize, incarnation: u64) {
        self.now += 1;
        match &mut self.paths[path] {
            Some(open) if open.incarnation == incarnation => {
                open.oldest.get_or_insert(self.now);
                open.last = self.now;
            }
            // The completion was the last on a path that has failed since.
            _ => self.writes_lost |= self.has_volatile_cache,
        }
    }

    /// Records that a path failed.
    pub(crate) fn path_lost(&mut self, path: usize) {
        self.now += 1;
        let Some(lost) = self.paths[path].take() else { return };
        for write in &mut self.unflushed {
            write.continuous_paths.retain(|path_incarnation| *path_incarnation != lost.incarnation);
        }
        if let (Some(oldest), true) = (lost.oldest, self.has_volatile_cache) {
            let continuous_paths = self.paths.iter().flatten().filter(|open| open.since < oldest);
            let continuous_paths = continuous_paths.map(|open| open.incarnation).collect();
            self.unflushed.push(UnflushedWrite { since: self.now, continuous_paths });
        }
        let before = self.unflushed.len();
        self.unflushed.retain(|write| !write.continuous_paths.is_empty());
        self.writes_lost |= self.unflushed.len() < before;
    }

    /// Starts a Flush. Fails once if completed writes may be lost.
    pub(crate) fn flush_started(&mut self) -> Result<FlushPlan, WritesLost> {
        if std::mem::take(&mut self.writes_lost) {
            return Err(WritesLost);
        }
        let of =
            |(path, open): (usize, &Option<OpenPath>)| open.as_ref().map(|open| (path, open.incarnation, open.oldest));
        let open: Vec<_> = self.paths.iter().enumerate().filter_map(of).collect();
        let is_asked = |incarnation: u64, dirty: bool| {
            dirty || self.unflushed.iter().any(|write| write.continuous_paths.first() == Some(&incarnation))
        };
        let asked = open.into_iter().filter(|(_, incarnation, oldest)| is_asked(*incarnation, oldest.is_some()));
        Ok(FlushPlan { mark: self.now, paths: asked.map(|(path, incarnation, _)| (path, incarnation)).collect() })
    }

    /// Records that a Flush with this mark succeeded on this path.
    pub(crate) fn flush_completed(&mut self, path: usize, incarnation: u64, mark: u64) {
        if let Some(open) = self.paths[path].as_mut().filter(|open| open.incarnation == incarnation) {
            open.oldest = (open.last > mark).then_some(mark + 1);
        }
        self.unflushed.retain(|write| write.since > mark || !write.continuous_paths.contains(&incarnation));
    }

    /// True if everything up to `mark` is durable, so that the Flush may complete.
    pub(crate) fn is_durable(&self, mark: u64) -> bool {
        let is_dirty = |open: &OpenPath| open.oldest.is_some_and(|oldest| oldest <= mark);
        !self.writes_lost && self.unflushed.is_empty() && !self.paths.iter().flatten().any(is_dirty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths 0 and 1, open as incarnations 1 and 2.
    fn two() -> PathFlushes {
        let mut path_flushes = PathFlushes::new(2, true);
        path_flushes.path_opened(0, 1);
        path_flushes.path_opened(1, 2);
        path_flushes
    }

    #[test]
    fn every_path_with_writes_gets_a_flush() {
        let mut path_flushes = two();
        assert_eq!(path_flushes.flush_started().unwrap().paths, []);
        path_flushes.write_completed(1, 2);
        assert_eq!(path_flushes.flush_started().unwrap().paths, [(1, 2)]);
        path_flushes.write_completed(0, 1);
        let plan = path_flushes.flush_started().unwrap();
        assert_eq!(plan.paths, [(0, 1), (1, 2)]);
        path_flushes.flush_completed(0, 1, plan.mark);
        assert!(!path_flushes.is_durable(plan.mark));
        path_flushes.write_completed(0, 1);
        path_flushes.flush_completed(1, 2, plan.mark);
        assert!(path_flushes.is_durable(plan.mark), "a write after its start does not hold up the flush");
        assert_eq!(path_flushes.flush_started().unwrap().paths, [(0, 1)]);
    }

    #[test]
    fn a_flush_on_a_continuous_path_makes_writes_of_a_failed_one_durable() {
        let mut path_flushes = two();
        path_flushes.write_completed(0, 1);
        path_flushes.path_lost(0);
        let plan = path_flushes.flush_started().unwrap();
        assert_eq!(plan.paths, [(1, 2)]);
        assert!(!path_flushes.is_durable(plan.mark));
        path_flushes.flush_completed(1, 2, plan.mark);
        assert!(path_flushes.is_durable(plan.mark));
        path_flushes.path_lost(1);
        assert!(path_flushes.flush_started().is_ok(), "it was flushed before");
    }

    #[test]
    fn without_a_continuous_path_the_next_flush_fails_and_only_that() {
        let mut path_flushes = two();
        path_flushes.write_completed(0, 1);
        path_flushes.path_lost(0);
        path_flushes.path_lost(1);
        path_flushes.path_opened(0, 3);
        assert_eq!(path_flushes.flush_started(), Err(WritesLost));
        assert!(path_flushes.flush_started().is_ok());
    }

    #[test]
    fn a_path_that_was_opened_later_is_not_continuous() {
        let mut path_flushes = PathFlushes::new(2, true);
        path_flushes.path_opened(0, 1);
        path_flushes.write_completed(0, 1);
        path_flushes.path_opened(1, 2);
        path_flushes.path_lost(0);
        assert_eq!(path_flushes.flush_started(), Err(WritesLost));
        // Written after both were open, so the other one is continuous.
        path_flushes.path_opened(0, 3);
        path_flushes.write_completed(1, 2);
        let plan = path_flushes.flush_started().unwrap();
        path_flushes.flush_completed(1, 2, plan.mark);
        path_flushes.write_completed(1, 2);
        path_flushes.path_lost(1);
        assert_eq!(path_flushes.flush_started().unwrap().paths, [(0, 3)]);
    }

    #[test]
    fn a_flush_that_started_before_the_loss_does_not_cover_the_unflushed_writes() {
        let mut path_flushes = two();
        path_flushes.write_completed(0, 1);
        let plan = path_flushes.flush_started().unwrap();
        path_flushes.path_lost(0);
        path_flushes.flush_completed(1, 2, plan.mark);
        assert!(!path_flushes.is_durable(plan.mark));
    }

    #[test]
    fn without_a_volatile_cache_no_write_is_lost() {
        let mut path_flushes = PathFlushes::new(1, false);
        path_flushes.path_opened(0, 1);
        path_flushes.write_completed(0, 1);
        path_flushes.path_lost(0);
        path_flushes.write_completed(0, 1);
        assert!(path_flushes.flush_started().is_ok());
    }
}
