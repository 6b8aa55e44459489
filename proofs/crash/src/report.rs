//! The worker's report, one line for each event.
//!
//! The worker writes each line with one system call before it continues, so the order of lines is the order of events.
//! The kill may truncate the last line; a truncated line is not an event.

use std::fmt;

use sealblock_units::Extent;

use crate::pattern::Version;

/// The content that a request stores in its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Change {
    /// The pattern of this version.
    Write(Version),
    /// Zeroes, from a WriteZeroes or a Discard: a volume reads as zeroes after both.
    Zero,
}

/// One event in the life of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The volume is open.
    Ready,
    /// A change is about to be sent.
    Begin {
        /// The request's number.
        request_id: u64,
        /// Its blocks.
        extent: Extent,
        /// The content that it stores.
        change: Change,
        /// True if it is durable once it completes.
        fua: bool,
    },
    /// The change completed.
    Done {
        /// The request's number.
        request_id: u64,
    },
    /// A flush is about to be sent.
    FlushBegin {
        /// The flush's number.
        request_id: u64,
    },
    /// The flush completed: changes that completed before it started are durable.
    FlushDone {
        /// The flush's number.
        request_id: u64,
    },
}

impl fmt::Display for Event {
    /// Writes the line with its end mark, by which a reader recognises a complete line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Ready => writeln!(f, "ready."),
            Event::Begin { request_id, extent, change, fua } => {
                let version = match change {
                    Change::Write(version) => *version,
                    Change::Zero => 0,
                };
                let (first, blocks) = (extent.start().get(), extent.len());
                writeln!(f, "begin {request_id} {first} {blocks} {version} {}.", u8::from(*fua))
            }
            Event::Done { request_id } => writeln!(f, "done {request_id}."),
            Event::FlushBegin { request_id } => writeln!(f, "flush {request_id}."),
            Event::FlushDone { request_id } => writeln!(f, "flushed {request_id}."),
        }
    }
}

impl Event {
    /// Reads a line without its line feed; `None` for a truncated one.
    pub fn parse(line: &str) -> Option<Event> {
        let mut words = line.strip_suffix('.')?.split(' ');
        let name = words.next()?;
        let numbers = words.map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>()?;
        Some(match (name, &numbers[..]) {
            ("ready", []) => Event::Ready,
            ("begin", &[request_id, first, blocks, version, fua]) => Event::Begin {
                request_id,
                extent: Extent::from_raw(first, blocks).ok()?,
                change: if version == 0 { Change::Zero } else { Change::Write(version) },
                fua: fua == 1,
            },
            ("done", &[request_id]) => Event::Done { request_id },
            ("flush", &[request_id]) => Event::FlushBegin { request_id },
            ("flushed", &[request_id]) => Event::FlushDone { request_id },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_parse_and_truncated_ones_do_not() {
        let extent = Extent::from_raw(30, 8).unwrap();
        for event in [
            Event::Ready,
            Event::Begin { request_id: 12, extent, change: Change::Write(99), fua: true },
            Event::Begin { request_id: 13, extent, change: Change::Zero, fua: false },
            Event::Done { request_id: 12 },
            Event::FlushBegin { request_id: 14 },
            Event::FlushDone { request_id: 14 },
        ] {
            let line = event.to_string();
            assert_eq!(Event::parse(line.trim_end()), Some(event));
            for end in 0..line.len() - 1 {
                assert_eq!(Event::parse(&line[..end]), None, "{}", &line[..end]);
            }
        }
    }
}
