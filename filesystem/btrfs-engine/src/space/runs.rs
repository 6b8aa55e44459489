//! Runs of free addresses, from which space is allocated.
//!
//! Invariants:
//! - Runs do not touch each other.
//! - What is taken out was all free, and what is put in was not: [`Runs::remove`] and [`Runs::insert`] say if it is
//!   otherwise, and change nothing then.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free runs of a block group.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Runs {
    /// Ends by starts.
    runs: BTreeMap<u64, u64>,
    free_bytes: u64,
    /// Where the search for space begins: behind what was allocated last, so what is written together lies together.
    next: u64,
}

impl Runs {
    /// Bytes of all runs.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The runs, rising.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.runs.iter().map(|(start, end)| *start..*end)
    }

    /// True if all of a range is free.
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.run_at(range.start).is_some_and(|run| range.end <= run.end)
    }

    /// The run that has an address.
    fn run_at(&self, at: u64) -> Option<Range<u64>> {
        let (start, end) = self.runs.range(..=at).next_back()?;
        (at < *end).then_some(*start..*end)
    }

    /// Takes a range out. Returns false if it is not all free.
    #[must_use]
    pub fn remove(&mut self, range: Range<u64>) -> bool {
        let Some(run) = self.run_at(range.start).filter(|run| range.end <= run.end) else { return false };
        self.runs.remove(&run.start);
        for rest in [run.start..range.start, range.end..run.end].into_iter().filter(|rest| !rest.is_empty()) {
            self.runs.insert(rest.start, rest.end);
        }
        self.free_bytes -= range.end - range.start;
        true
    }

    /// Takes out what is free of a range.
    pub fn remove_free(&mut self, range: Range<u64>) {
        let mut at = range.start;
        while at < range.end {
            let next = self.run_at(at).or_else(|| self.runs.range(at..).next().map(|(start, end)| *start..*end));
            let Some(run) = next.filter(|run| run.start < range.end) else { return };
            let part = run.start.max(range.start)..run.end.min(range.end);
            at = run.end;
            let was_free = self.remove(part);
            debug_assert!(was_free);
        }
    }

    /// Puts a range in. Returns false if some of it is free already, or it is empty.
    #[must_use]
    pub fn insert(&mut self, range: Range<u64>) -> bool {
        let behind = self.runs.range(range.start..).next().map(|(start, end)| *start..*end);
        let before = self.runs.range(..range.start).next_back().map(|(start, end)| *start..*end);
        let overlaps = before.as_ref().is_some_and(|run| run.end > range.start)
            || behind.as_ref().is_some_and(|run| run.start < range.end);
        if overlaps || range.is_empty() {
            return false;
        }
        let mut whole = range.clone();
        if let Some(run) = before.filter(|run| run.end == range.start) {
            whole.start = run.start;
        }
        if let Some(run) = behind.filter(|run| run.start == range.end) {
            whole.end = run.end;
            self.runs.remove(&run.start);
        }
        self.runs.insert(whole.start, whole.end);
        self.free_bytes += range.end - range.start;
        true
    }

    /// Allocates a run of exactly these bytes, whose distance from `origin` is a multiple of `unit`.
    pub fn allocate(&mut self, bytes: u64, origin: u64, unit: u64) -> Option<u64> {
        let fit = |run: Range<u64>| {
            let start = origin + run.start.saturating_sub(origin).next_multiple_of(unit);
            (start.checked_add(bytes)? <= run.end).then_some(start)
        };
        let around = self.run_at(self.next).map(|run| self.next..run.end);
        let behind = self.runs.range(self.next..).map(|(start, end)| *start..*end);
        let before = self.runs.range(..self.next).map(|(start, end)| *start..*end);
        let start = around.into_iter().chain(behind).chain(before).find_map(fit)?;
        let removed = self.remove(start..start + bytes);
        debug_assert!(removed);
        self.next = start + bytes;
        Some(start)
    }

    /// The number of runs of these bytes that can be allocated one after the other, counted up to `most`.
    pub fn count(&self, bytes: u64, origin: u64, unit: u64, most: u64) -> u64 {
        let mut count = 0;
        for run in self.iter() {
            let start = origin + run.start.saturating_sub(origin).next_multiple_of(unit);
            count += run.end.saturating_sub(start) / bytes;
            if count >= most {
                return most;
            }
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_runs_are_those_of_a_bitmap() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..40 {
            let (mut runs, mut model) = (Runs::default(), [false; 200]);
            for _ in 0..400 {
                let start = random.usize(..199);
                let range = start..random.usize(start + 1..=(start + 12).min(200));
                let wide = range.start as u64..range.end as u64;
                match random.u8(..4) {
                    0 => {
                        let fits = model[range.clone()].iter().all(|free| !free);
                        assert_eq!(runs.insert(wide), fits);
                        model[range].iter_mut().for_each(|free| *free |= fits);
                    }
                    1 => {
                        let fits = model[range.clone()].iter().all(|free| *free);
                        assert_eq!((runs.has(&wide), runs.remove(wide)), (fits, fits));
                        model[range].iter_mut().for_each(|free| *free &= !fits);
                    }
                    2 => {
                        runs.remove_free(wide);
                        model[range].fill(false);
                    }
                    _ => {
                        let (bytes, unit) = (random.usize(1..5), random.usize(1..4));
                        let fits = |start: &usize| {
                            start.is_multiple_of(unit) && model[*start..start + bytes].iter().all(|free| *free)
                        };
                        let is_there = (0..=200 - bytes).any(|start| fits(&start));
                        let found = runs.allocate(bytes as u64, 0, unit as u64);
                        assert_eq!(found.is_some(), is_there);
                        if let Some(start) = found {
                            assert!(fits(&(start as usize)));
                            model[start as usize..start as usize + bytes].fill(false);
                        }
                    }
                }
                assert_eq!(runs.free_bytes(), model.iter().filter(|free| **free).count() as u64);
                let all: Vec<Range<u64>> = runs.iter().collect();
                assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start), "runs do not touch");
                assert!(all.iter().all(|run| run.clone().all(|at| model[at as usize])));
                assert_eq!(runs.count(1, 0, 1, u64::MAX), runs.free_bytes());
            }
        }
    }
}
