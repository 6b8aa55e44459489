//! What a piece of work has moved, and how fast: said in the same words by every command.
//!
//! Only bytes that were read from a device or written to one make a rate. Holes that a device reports, and blocks that it unmaps
//! or checks where it is, are covered in no time and would make any device look fast.

use std::fmt::Write;
use std::time::Duration;

use sealblock_units::ByteCount;

/// Bytes that were moved in some time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Tally {
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were written.
    pub written: u64,
    /// How long it took.
    pub elapsed: Duration,
}

impl Tally {
    /// Time, bytes and rate: `in 2.00 s (1 GiB read, 512 MiB/s)`.
    pub fn to_text(&self) -> String {
        let moved = [(self.read, "read"), (self.written, "written")].into_iter().filter(|(bytes, _)| *bytes > 0);
        let parts: Vec<String> = moved.map(|(bytes, how)| format!("{} {how}", ByteCount::new(bytes))).collect();
        let mut words = format!("in {:.2} s", self.elapsed.as_secs_f64());
        if !parts.is_empty() {
            // Infallible for a text.
            let _ = write!(words, " ({}, {})", parts.join(", "), rate(self.read.max(self.written), self.elapsed));
        }
        words
    }
}

/// A rate in words, in the unit of `--rate`; the least time that counts is a microsecond.
pub fn rate(bytes: u64, elapsed: Duration) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let per_second = bytes as f64 / elapsed.as_secs_f64().max(1e-6) / MIB;
    let decimals = match per_second {
        0.0..1.0 => 2,
        1.0..10.0 => 1,
        _ => 0,
    };
    format!("{per_second:.decimals$} MiB/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_moved_makes_a_rate() {
        let elapsed = Duration::from_secs(2);
        let words = |read, written| Tally { read, written, elapsed }.to_text();
        assert_eq!(words(0, 0), "in 2.00 s");
        assert_eq!(words(1 << 30, 0), "in 2.00 s (1 GiB read, 512 MiB/s)");
        assert_eq!(words(4096, 8192), "in 2.00 s (4 KiB read, 8 KiB written, 0.00 MiB/s)");
        assert_eq!(words(0, 3_000_000), "in 2.00 s (2.9 MiB written, 1.4 MiB/s)");
        let at_once = Tally { read: 1, written: 0, elapsed: Duration::ZERO };
        assert_eq!(at_once.to_text(), "in 0.00 s (1 B read, 0.95 MiB/s)");
    }
}
