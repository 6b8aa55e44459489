//! The size of a logical block's data.

use std::fmt;

/// Bytes of data in one logical block, without any protection information.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockSize {
    /// 512 bytes.
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// Bytes in one block.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }

    /// Power of two of the size: `1 << shift` bytes.
    pub const fn shift(self) -> u32 {
        match self {
            BlockSize::B512 => 9,
            BlockSize::B4096 => 12,
        }
    }

    /// The block size of this many bytes, if it is one that is supported.
    pub const fn from_bytes(bytes: u64) -> Option<BlockSize> {
        match bytes {
            512 => Some(BlockSize::B512),
            4096 => Some(BlockSize::B4096),
            _ => None,
        }
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bytes())
    }
}

impl fmt::Debug for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.bytes())
    }
}
