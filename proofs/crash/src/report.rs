//! What the worker tells, one line for each event.
//!
//! A line is written in one piece before the worker goes on, so the order of lines is the order of events. The last line
//! may be cut off by the kill; a cut-off line is no event.

use std::fmt;

use sealblock_units::Extent;

use crate::pattern::Version;

/// What a request leaves in its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Change {
    /// The pattern of this version.
    Write(Version),
    /// Zeroes, from a WriteZeroes or a Discard: a volume promises zeroes for both.
    Zero,
}

/// One event in the worker's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The volume is open.
    Ready,
    /// A change is about to be asked for.
    Begin {
        /// The request's number.
        request: u64,
        /// Its blocks.
        extent: Extent,
        /// What it does to them.
        change: Change,
        /// Whether its answer means that it is durable.
        fua: bool,
    },
    /// The change was answered.
    Done {
        /// The request's number.
        request: u64,
    },
    /// A flush is about to be asked for.
    FlushBegin {
        /// The flush's number.
        request: u64,
    },
    /// The flush was answered: what was done before it began is durable.
    FlushDone {
        /// The flush's number.
        request: u64,
    },
}

impl fmt::Display for Event {
    /// The line, with its end, by which a whole line is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Ready => writeln!(f, "ready."),
            Event::Begin { request, extent, change, fua } => {
                let version = match change {
                    Change::Write(version) => *version,
                    Change::Zero => 0,
                };
                let (first, blocks) = (extent.start().get(), extent.len());
                writeln!(f, "begin {request} {first} {blocks} {version} {}.", u8::from(*fua))
            }
            Event::Done { request } => writeln!(f, "done {request}."),
            Event::FlushBegin { request } => writeln!(f, "flush {request}."),
            Event::FlushDone { request } => writeln!(f, "flushed {request}."),
        }
    }
}

impl Event {
    /// Reads a line without its line feed; nothing for one that was cut off.
    pub fn parse(line: &str) -> Option<Event> {
        let mut words = line.strip_suffix('.')?.split(' ');
        let name = words.next()?;
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        Some(match (name, &numbers[..]) {
            ("ready", []) => Event::Ready,
            ("begin", &[request, first, blocks, version, fua]) => Event::Begin {
                request,
                extent: Extent::from_raw(first, blocks).ok()?,
                change: if version == 0 { Change::Zero } else { Change::Write(version) },
                fua: fua == 1,
            },
            ("done", &[request]) => Event::Done { request },
            ("flush", &[request]) => Event::FlushBegin { request },
            ("flushed", &[request]) => Event::FlushDone { request },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_read_back_and_cut_off_ones_do_not() {
        let extent = Extent::from_raw(30, 8).unwrap();
        for event in [
            Event::Ready,
            Event::Begin { request: 12, extent, change: Change::Write(99), fua: true },
            Event::Begin { request: 13, extent, change: Change::Zero, fua: false },
            Event::Done { request: 12 },
            Event::FlushBegin { request: 14 },
            Event::FlushDone { request: 14 },
        ] {
            let line = event.to_string();
            assert_eq!(Event::parse(line.trim_end()), Some(event));
            for end in 0..line.len() - 1 {
                assert_eq!(Event::parse(&line[..end]), None, "{}", &line[..end]);
            }
        }
    }
}
