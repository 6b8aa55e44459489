//! Room beside the blocks.
//!
//! A few kilobytes that belong to whoever stands on the device: a mirror notes there which of its legs are current, a scrub
//! how far it has come. They are no blocks, so a device keeps its size, and its content stays equal to that of its copies.

/// Bytes of a device for each bit of the bitmap pages, while it has no more than [`MOST_BITS`] of them.
const BYTES_PER_BIT: u64 = 64 << 10;
/// Bits of a bitmap at most. What is larger is tracked more coarsely.
const MOST_BITS: u64 = 1 << 24;
/// A bitmap of so many bits needs no pages: it fits the label.
const BITS_WITHOUT_PAGES: u64 = 8192;
/// Bitmaps of a group: where its members may differ, and what each of up to eight has missed.
const BITMAPS: u64 = 9;
/// Bytes of a bitmap page, and of the head that its owner puts there.
const PAGE_BYTES: usize = 4096;
const PAGE_HEAD_BYTES: usize = 64;

/// A part of the room beside the blocks. Each is read and written as a whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ReservedArea {
    /// The label of the group whose leg the device is.
    GroupLabel,
    /// The state of the scrub of the device.
    ScrubState,
    /// A page of the group's bitmaps. It is written in place, so a write that is cut short leaves anything there: whoever
    /// reads it checks it.
    Bitmap {
        /// From 0; as many as [`crate::Abilities::annex_pages`] says.
        page: u32,
    },
}

impl ReservedArea {
    /// The slots that every annex has, each replaced all or nothing.
    pub const ALL: [ReservedArea; 2] = [ReservedArea::GroupLabel, ReservedArea::ScrubState];

    /// How many bitmap pages a device of this many bytes has, if it has an annex: none while the label is enough.
    pub const fn bitmap_pages(capacity_bytes: u64) -> u32 {
        let bits = capacity_bytes.div_ceil(BYTES_PER_BIT);
        let bits = if bits > MOST_BITS { MOST_BITS } else { bits };
        if bits <= BITS_WITHOUT_PAGES {
            return 0;
        }
        (BITMAPS * bits.div_ceil((PAGE_BYTES - PAGE_HEAD_BYTES) as u64 * 8)) as u32
    }

    /// The most that the slot holds, in bytes.
    pub const fn max_bytes(self) -> usize {
        match self {
            ReservedArea::GroupLabel => (20 << 10) - 64,
            ReservedArea::ScrubState => (8 << 10) - 64,
            ReservedArea::Bitmap { .. } => PAGE_BYTES,
        }
    }

    /// How many bitmap pages there are at least where the slot is.
    pub const fn pages(self) -> u32 {
        match self {
            ReservedArea::GroupLabel | ReservedArea::ScrubState => 0,
            ReservedArea::Bitmap { page } => page.saturating_add(1),
        }
    }

    /// Position among [`ReservedArea::ALL`]; pages, whichever they are, come behind them.
    pub const fn index(self) -> usize {
        match self {
            ReservedArea::GroupLabel => 0,
            ReservedArea::ScrubState => 1,
            ReservedArea::Bitmap { .. } => ReservedArea::ALL.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_grow_with_the_device_and_end_where_tracking_gets_coarser() {
        let pages = ReservedArea::bitmap_pages;
        assert_eq!([pages(0), pages(4096), pages(512 << 20)], [0; 3], "the label is enough");
        assert_eq!(pages((512 << 20) + 1), 9);
        assert_eq!(pages(1 << 40), 9 * 521, "18.3 MiB");
        assert_eq!(pages(u64::MAX), pages(1 << 40));
    }
}
