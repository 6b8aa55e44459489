//! Room beside the blocks.
//!
//! A few kilobytes that belong to whoever stands on the device: a mirror notes there which of its legs are current, a scrub
//! how far it has come. They are no blocks, so a device keeps its size, and its content stays equal to that of its copies.

/// A part of the room beside the blocks. Each is read and written as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AnnexSlot {
    /// The label of the group whose leg the device is.
    Group,
    /// The state of the scrub of the device.
    Scrub,
}

impl AnnexSlot {
    /// All slots.
    pub const ALL: [AnnexSlot; 2] = [AnnexSlot::Group, AnnexSlot::Scrub];

    /// The most that the slot holds, in bytes.
    pub const fn most_bytes(self) -> usize {
        match self {
            AnnexSlot::Group => (20 << 10) - 64,
            AnnexSlot::Scrub => (8 << 10) - 64,
        }
    }

    /// Position in tables.
    pub const fn index(self) -> usize {
        self as usize
    }
}
