//! Ranges of blocks as people write them: `FIRST..LAST` with both ends included, `FIRST..`, `..LAST`, or one block `N`.
//!
//! A range is written before the device is open, so its end may be unknown; [`BlockRange::resolve`] settles it against a
//! capacity. Both steps refuse what would be an empty range: a command that silently does nothing hides a mistake.

use std::fmt;
use std::str::FromStr;

use sealblock_units::{BlockCount, Extent, Lba};
use serde::Serialize;

use crate::quantity::count;

/// A range as it was written: from a first block to a last one, or to the end of the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRange {
    first: Lba,
    last: Option<Lba>,
}

/// Why a text is no range, or a range does not lie on a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RangeError {
    /// Neither a number nor numbers around two dots.
    #[error("'{0}' is not a range of blocks: use FIRST..LAST, FIRST.., ..LAST or one block number")]
    Form(String),
    /// A number that does not match in 64 bits.
    #[error("'{0}' is larger than the last block address, 2^64 - 1")]
    TooLarge(String),
    /// The first block is after the last.
    #[error("the range {first}..{last} ends before it begins: give the smaller block number first")]
    Reversed {
        /// First block written.
        first: u64,
        /// Last block written.
        last: u64,
    },
    /// The range goes past the end of the device.
    #[error("block {block} is past the end: the device has {}, numbered from 0", count(*capacity_blocks, "block"))]
    PastEnd {
        /// The first or last block of the range, whichever is past the end.
        block: u64,
        /// Blocks of the device.
        capacity_blocks: u64,
    },
}

impl BlockRange {
    /// All blocks, however many there are.
    pub const ALL: BlockRange = BlockRange { first: Lba::ZERO, last: None };

    /// From `first` to `last`, both included, or to the end of the device. Fails when `last` lies before `first`.
    pub fn new(first: Lba, last: Option<Lba>) -> Result<BlockRange, RangeError> {
        match last {
            Some(last) if last < first => Err(RangeError::Reversed { first: first.get(), last: last.get() }),
            _ => Ok(BlockRange { first, last }),
        }
    }

    /// The first block.
    pub const fn first(self) -> Lba {
        self.first
    }

    /// The last block, or nothing when the range goes to the end of the device.
    pub const fn last(self) -> Option<Lba> {
        self.last
    }

    /// True if both have a block in common, on a device that is long enough for both.
    pub fn overlaps(self, other: BlockRange) -> bool {
        let ends_before = |a: BlockRange, b: BlockRange| a.last.is_some_and(|last| last < b.first);
        !ends_before(self, other) && !ends_before(other, self)
    }

    /// The range on a device of this many blocks. Fails when any of it would be past the end.
    pub fn resolve(self, capacity_blocks: u64) -> Result<BlockSpan, RangeError> {
        let past_end = |block: Lba| RangeError::PastEnd { block: block.get(), capacity_blocks };
        let end = capacity_blocks.checked_sub(1).map(Lba::new).ok_or(past_end(self.first))?;
        let last = self.last.unwrap_or(end);
        match (self.first > end, last > end) {
            (true, _) => Err(past_end(self.first)),
            (false, true) => Err(past_end(last)),
            (false, false) => Ok(BlockSpan { first: self.first, last }),
        }
    }
}

/// A range with both ends known: never empty, and possibly longer than an [`Extent`] can be.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockSpan {
    first: Lba,
    last: Lba,
}

impl BlockSpan {
    /// The first block.
    pub const fn first(self) -> Lba {
        self.first
    }

    /// The last block.
    pub const fn last(self) -> Lba {
        self.last
    }

    /// How many blocks; at least one. All 2^64 addresses at once would be one too many, and count as 2^64 - 1.
    pub const fn blocks(self) -> u64 {
        (self.last.get() - self.first.get()).saturating_add(1)
    }

    /// The span as extents of at most `most` blocks, in order.
    pub fn extents(self, most: BlockCount) -> impl Iterator<Item = Extent> {
        let (mut next, last) = (Some(self.first.get()), self.last.get());
        std::iter::from_fn(move || {
            let start = next?;
            let blocks = (last - start).saturating_add(1).min(u64::from(most.get()));
            next = start.checked_add(blocks).filter(|next| *next <= last);
            Extent::from_raw(start, blocks).ok()
        })
    }
}

/// Consecutive blocks with one finding.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Run<T> {
    /// The first block.
    pub lba: u64,
    /// How many.
    pub blocks: u64,
    /// The finding.
    #[serde(flatten)]
    pub what: T,
}

impl<T> Run<T> {
    /// A run.
    pub const fn new(lba: u64, blocks: u64, what: T) -> Run<T> {
        Run { lba, blocks, what }
    }

    /// The block behind it.
    pub const fn end(&self) -> u64 {
        self.lba.saturating_add(self.blocks)
    }

    /// `block 7`, or `blocks 7..9`.
    pub fn place(&self) -> String {
        match self.blocks {
            1 => format!("block {}", self.lba),
            _ => format!("blocks {}..{}", self.lba, self.end() - 1),
        }
    }
}

/// Appends a run; merges it with the last run if it is adjacent and equal.
pub fn join_run<T: PartialEq>(runs: &mut Vec<Run<T>>, more: Run<T>) {
    match runs.last_mut() {
        Some(run) if run.end() == more.lba && run.what == more.what => run.blocks += more.blocks,
        _ => runs.push(more),
    }
}

impl FromStr for BlockRange {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<BlockRange, RangeError> {
        let Some((first, last)) = text.split_once("..") else {
            let only = number(text, text)?;
            return BlockRange::new(only, Some(only));
        };
        match (first.is_empty(), last.is_empty()) {
            (true, true) => Err(RangeError::Form(text.to_owned())),
            (false, true) => BlockRange::new(number(first, text)?, None),
            (true, false) => BlockRange::new(Lba::ZERO, Some(number(last, text)?)),
            (false, false) => BlockRange::new(number(first, text)?, Some(number(last, text)?)),
        }
    }
}

fn number(digits: &str, whole: &str) -> Result<Lba, RangeError> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(RangeError::Form(whole.to_owned()));
    }
    digits.parse().map(Lba::new).map_err(|_| RangeError::TooLarge(digits.to_owned()))
}

impl fmt::Display for BlockRange {
    /// The canonical form, which reads back: `FIRST..LAST` or `FIRST..`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.last {
            Some(last) => write!(f, "{}..{last}", self.first),
            None => write!(f, "{}..", self.first),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> (u64, Option<u64>) {
        let range: BlockRange = text.parse().unwrap();
        (range.first().get(), range.last().map(Lba::get))
    }

    #[test]
    fn ranges_overlap_where_they_have_a_block_in_common() {
        let range = |text: &str| text.parse::<BlockRange>().unwrap();
        for (a, b, expected) in [
            ("0..9", "10..19", false),
            ("10..19", "0..9", false),
            ("0..10", "10..19", true),
            ("0..", "1000..1000", true),
            ("5..", "0..4", false),
            ("0..99", "10..19", true),
        ] {
            assert_eq!(range(a).overlaps(range(b)), expected, "{a} {b}");
        }
    }

    #[test]
    fn the_forms_of_a_range() {
        assert_eq!(range("5..9"), (5, Some(9)));
        assert_eq!(range("5..5"), (5, Some(5)));
        assert_eq!(range("5.."), (5, None));
        assert_eq!(range("..9"), (0, Some(9)));
        assert_eq!(range("7"), (7, Some(7)));
        assert_eq!(range("0..18446744073709551615"), (0, Some(u64::MAX)));
    }

    #[test]
    fn what_is_no_range_says_why() {
        for text in ["", "..", "a", "1..b", "1...3", "1..2..3", "-1", "+1", "1 ..2", "0x10", "\u{0661}"] {
            assert_eq!(text.parse::<BlockRange>(), Err(RangeError::Form(text.to_owned())), "{text}");
        }
        assert_eq!("9..5".parse::<BlockRange>(), Err(RangeError::Reversed { first: 9, last: 5 }));
        let large = "18446744073709551616";
        assert_eq!(format!("0..{large}").parse::<BlockRange>(), Err(RangeError::TooLarge(large.to_owned())));
    }

    #[test]
    fn a_range_resolves_inside_the_device_and_not_past_its_end() {
        let resolved = |text: &str, capacity| {
            text.parse::<BlockRange>().unwrap().resolve(capacity).map(|span| (span.first().get(), span.last().get()))
        };
        assert_eq!(resolved("2..9", 10), Ok((2, 9)));
        assert_eq!(resolved("2..", 10), Ok((2, 9)));
        assert_eq!(resolved("2..10", 10), Err(RangeError::PastEnd { block: 10, capacity_blocks: 10 }));
        assert_eq!(resolved("10..", 10), Err(RangeError::PastEnd { block: 10, capacity_blocks: 10 }));
        let one = "1".parse::<BlockRange>().unwrap().resolve(1).unwrap_err();
        assert_eq!(one.to_string(), "block 1 is past the end: the device has 1 block, numbered from 0");
        assert_eq!(resolved("0..", 0), Err(RangeError::PastEnd { block: 0, capacity_blocks: 0 }));
    }

    #[test]
    fn a_span_is_covered_by_its_extents_in_order() {
        let span = "3..12".parse::<BlockRange>().unwrap().resolve(20).unwrap();
        assert_eq!(span.blocks(), 10);
        let most = BlockCount::new(4).unwrap();
        let pieces: Vec<_> = span.extents(most).map(|extent| (extent.start().get(), extent.len())).collect();
        assert_eq!(pieces, [(3, 4), (7, 4), (11, 2)]);
        let last = BlockSpan { first: Lba::new(u64::MAX - 1), last: Lba::new(u64::MAX) };
        assert_eq!(
            last.extents(BlockCount::ONE).map(|extent| extent.start().get()).collect::<Vec<_>>(),
            [u64::MAX - 1, u64::MAX]
        );
        let all = BlockSpan { first: Lba::ZERO, last: Lba::new(u64::MAX) };
        assert_eq!(all.blocks(), u64::MAX);
        assert_eq!(all.extents(BlockCount::MAX).next().unwrap().blocks(), BlockCount::MAX);
    }

    proptest::proptest! {
        #[test]
        fn a_range_prints_as_it_reads(first: u64, length: Option<u64>) {
            let last = length.map(|length| Lba::new(first.saturating_add(length)));
            let range = BlockRange::new(Lba::new(first), last).unwrap();
            proptest::prop_assert_eq!(range.to_string().parse(), Ok(range));
        }

        #[test]
        fn no_text_panics(text in "[0-9.]{0,24}|\\PC{0,12}") {
            if let Ok(range) = text.parse::<BlockRange>() {
                proptest::prop_assert_eq!(range.to_string().parse(), Ok(range));
            }
        }
    }
}
