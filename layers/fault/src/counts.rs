//! What has gone wrong so far.

use std::cell::Cell;

use crate::rules::Fault;

/// Faults made so far, by kind. What befalls single units counts units; what befalls a whole request (a failed write, a
/// failed read of a medium, a device's torn write, a delay, a flush) counts requests.
#[derive(Default)]
pub struct Counts([Cell<u64>; Fault::KINDS]);

impl Counts {
    /// How often this kind of fault was made; the length of a delay plays no part.
    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault.index()].get()
    }

    /// Every kind of fault and how often it was made.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = Fault::WITHOUT_TIME.into_iter().map(Fault::name).chain(["delay"]);
        names.zip(self.0.iter().map(Cell::get))
    }

    pub(crate) fn add(&self, fault: Fault, count: u64) {
        let cell = &self.0[fault.index()];
        cell.set(cell.get() + count);
    }
}
