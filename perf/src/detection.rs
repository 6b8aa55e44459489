//! Faults that guards do not detect: injected from seeds, counted, and compared with theory.
//!
//! The same faults are injected for all guards. A trial takes some tens of nanoseconds, because it computes no guard of
//! a whole block (see [`residues`]). So even faults that a 16-bit guard misses once in 65,536 times occur more than a
//! thousand times. Trials are divided into parts, each with its own seed, and each of as many threads as there are CPUs
//! takes the next part, so counts do not depend on the machine.

mod count;
mod faults;
mod places;
mod residues;
mod theory;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use sealblock_integrity::GuardKind;
use sealblock_units::BlockSize;

pub use count::Count;
pub use faults::Fault;
pub use places::{Displaced, Seen};

/// The number of parts of the trials of one kind of fault.
const PARTS: u64 = 64;

/// The undetected faults of one guard and kind.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Measured {
    /// The count.
    pub count: Count,
    /// The theoretical rate.
    pub theory: f64,
}

impl Measured {
    /// True if the count fits the theory.
    pub fn fits(&self) -> bool {
        self.count.fits(self.theory)
    }
}

/// Injects faults into blocks of one size.
pub struct Detection {
    size: BlockSize,
    tables: faults::Tables,
}

impl Detection {
    /// For blocks of this size.
    pub fn new(size: BlockSize) -> Detection {
        Detection { size, tables: faults::Tables::new(size.bytes()) }
    }

    /// The kinds of faults within a block of this size.
    pub fn faults(&self) -> Vec<Fault> {
        Fault::all(self.size.bytes())
    }

    /// Injects at least this number of faults of one kind; returns the counts of each guard, in the order of
    /// [`GuardKind::ALL`].
    pub fn inject(&self, fault: Fault, trials: u64) -> Vec<Measured> {
        let next = AtomicU64::new(0);
        let counts = Mutex::new([Count::default(); GuardKind::ALL.len()]);
        let part_trials = trials.div_ceil(PARTS);
        let work = || loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= PARTS {
                return;
            }
            let part_counts = self.part(fault, part, part_trials);
            let mut counts = counts.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            counts.iter_mut().zip(part_counts).for_each(|(count, part)| count.add(part));
        };
        thread::scope(|scope| {
            let cpus = thread::available_parallelism().map_or(1, usize::from);
            (0..cpus).for_each(|_| drop(scope.spawn(work)));
        });
        let counts = counts.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let with_theory = |(kind, count): (GuardKind, Count)| Measured {
            count,
            theory: theory::undetected(kind, fault, self.size.bytes()),
        };
        GuardKind::ALL.into_iter().zip(counts).map(with_theory).collect()
    }

    fn part(&self, fault: Fault, part: u64, trials: u64) -> [Count; GuardKind::ALL.len()] {
        // Each part of each kind has its own seed; the number of a kind is its index in the list for the larger blocks.
        let kinds = Fault::all(BlockSize::B4096.bytes());
        let kind = kinds.iter().position(|other| *other == fault).unwrap_or(kinds.len()) as u64;
        let seed = (kind << 32 | part << 16) + self.size.bytes() as u64;
        let mut injector = faults::Injector::new(fault, &self.tables, seed);
        let mut undetected = [0_u64; GuardKind::ALL.len()];
        for _ in 0..trials {
            undetected.iter_mut().zip(injector.inject()).for_each(|(count, unseen)| *count += u64::from(unseen));
        }
        undetected.map(|undetected| Count { trials, undetected })
    }

    /// Puts this number of whole blocks into wrong places, for each guard in the order of [`GuardKind::ALL`].
    pub fn displace(&self, displaced: Displaced, trials: u64) -> Vec<Seen> {
        let inject = |(seed, kind)| places::inject(displaced, kind, self.size, trials, seed);
        (1..).zip(GuardKind::ALL).map(inject).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_fit_the_theory() {
        for size in [BlockSize::B512, BlockSize::B4096] {
            let detection = Detection::new(size);
            for fault in detection.faults() {
                for (kind, measured) in GuardKind::ALL.into_iter().zip(detection.inject(fault, 400_000)) {
                    assert!(measured.count.trials >= 400_000);
                    assert!(measured.fits(), "{kind}, {size:?}, {fault:?}: {measured:?}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_theory_does_not_fit() {
        let swapped = Detection::new(BlockSize::B512).inject(Fault::SwappedWords, 100_000);
        let ip = swapped[3];
        assert_eq!((ip.theory, ip.count.undetected), (1.0, ip.count.trials));
        assert!(ip.fits() && !Measured { theory: 0.99, ..ip }.fits() && !Measured { theory: 0.0, ..ip }.fits());
        assert!(swapped[1].fits() && !Measured { theory: 0.01, ..swapped[1] }.fits());
    }

    #[test]
    fn counts_are_the_same_in_every_run() {
        let detection = Detection::new(BlockSize::B512);
        let once = detection.inject(Fault::Flips(2), 100_000);
        assert_eq!(once, detection.inject(Fault::Flips(2), 100_000));
        assert_ne!(once[3].count, detection.inject(Fault::Flips(3), 100_000)[3].count);
    }
}
