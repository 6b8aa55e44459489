//! Simple faults: the n-th write or sync fails, in a given way.

use std::cell::Cell;
use std::fmt;

use sealblock_block::{MediumError, MediumErrorKind};

/// The kinds of I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoKind {
    /// Read sectors.
    Read,
    /// Write sectors.
    Write,
    /// Make writes durable.
    Sync,
    /// Zero sectors and deallocate them.
    Punch,
    /// Zero sectors.
    Zero,
    /// Change the length.
    Length,
}

impl IoKind {
    /// The name in errors.
    pub const fn name(self) -> &'static str {
        match self {
            IoKind::Read => "read",
            IoKind::Write => "write",
            IoKind::Sync => "sync",
            IoKind::Punch => "punch",
            IoKind::Zero => "zero",
            IoKind::Length => "change of length",
        }
    }
}

/// `count` I/Os of one kind fail, from the `first` on, counted from 1.
#[derive(Clone, Copy, Debug)]
pub struct FaultRule {
    /// The kind that fails.
    pub on: IoKind,
    /// The first failing I/O, counted from 1.
    pub first: u64,
    /// The number of failing I/Os in a row.
    pub count: u64,
    /// The error. For "no space" nothing was written; for other errors any part of it may have been.
    pub how: MediumErrorKind,
    /// A failed sync also drops its writes, so that no later sync makes them durable.
    pub forgets: bool,
}

impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s fail from number {} on, {} in all, {:?}", self.on.name(), self.first, self.count, self.how)?;
        if self.on == IoKind::Sync && self.forgets { write!(f, ", forgetting what they were to do") } else { Ok(()) }
    }
}

/// The rules of one disk, and the number of I/Os of each kind.
#[derive(Default)]
pub(crate) struct Faults {
    rules: Vec<FaultRule>,
    done: [Cell<u64>; 6],
    fired: Cell<u64>,
}

impl Faults {
    pub(crate) fn new(rules: Vec<FaultRule>) -> Faults {
        Faults { rules, ..Faults::default() }
    }

    /// The fault of the I/O that is about to start, if it has one.
    pub(crate) fn next(&self, kind: IoKind) -> Option<FaultRule> {
        let done = &self.done[kind as usize];
        done.set(done.get() + 1);
        let hit = |rule: &&FaultRule| rule.on == kind && (rule.first..rule.first + rule.count).contains(&done.get());
        let rule = self.rules.iter().find(hit).copied();
        self.fired.set(self.fired.get() + u64::from(rule.is_some()));
        rule
    }

    /// The number of injected failures.
    pub(crate) fn fired(&self) -> u64 {
        self.fired.get()
    }
}

pub(crate) fn error(kind: MediumErrorKind, on: IoKind, offset_bytes: u64, reason: &str) -> MediumError {
    MediumError { kind, doing: on.name(), offset_bytes, reason: reason.to_owned() }
}
