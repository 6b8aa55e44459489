//! A hash over everything that happened, in order: two runs of a seed are the same run exactly if their hashes agree.

use std::cell::Cell;
use std::rc::Rc;

use crate::random::mix;

/// A running hash that the parts of a run share.
#[derive(Clone, Debug, Default)]
pub struct Trace(Rc<Cell<u64>>);

impl Trace {
    /// Adds an event: what it was, and two numbers that describe it.
    pub fn note(&self, what: u8, first: u64, second: u64) {
        let word = mix(self.0.get() ^ u64::from(what)) ^ first;
        self.0.set(mix(mix(word) ^ second));
    }

    /// The hash so far.
    pub fn hash(&self) -> u64 {
        self.0.get()
    }
}
