//! The data of a Write: sealed, or to be sealed by the device.

use sealblock_integrity::{PiFormat, Sealed, Unsealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

/// The data of a Write.
///
/// A caller that has no tags and needs none leaves the sealing to the device. A device that lists Writes as native
/// ([`crate::Abilities::get`]) chooses when to seal; for any other device the gate seals. Either way the blocks are
/// sealed once. So a layer that turns one write into several with the same data must not list it.
#[derive(Clone, Debug)]
pub enum WriteData {
    /// With tags, which the caller made or checked.
    Sealed(Sealed),
    /// With a format of the tags that the device makes.
    Unsealed(Unsealed),
}

impl WriteData {
    /// The blocks with their tags, which are made now if they are missing.
    pub fn into_sealed(self) -> Sealed {
        match self {
            WriteData::Sealed(data) => data,
            WriteData::Unsealed(data) => data.seal(),
        }
    }

    /// True if the tags are present.
    pub fn is_sealed(&self) -> bool {
        matches!(self, WriteData::Sealed(_))
    }

    /// The size of a block.
    pub fn size(&self) -> BlockSize {
        match self {
            WriteData::Sealed(data) => data.size(),
            WriteData::Unsealed(data) => data.size(),
        }
    }

    /// The format of the tuples.
    pub fn format(&self) -> Option<PiFormat> {
        match self {
            WriteData::Sealed(data) => data.format(),
            WriteData::Unsealed(data) => data.format(),
        }
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        match self {
            WriteData::Sealed(data) => data.blocks(),
            WriteData::Unsealed(data) => data.blocks(),
        }
    }

    /// The buffers with the data, in order.
    pub fn slices(&self) -> impl Iterator<Item = &Slice> {
        let (segments, alone) = match self {
            WriteData::Sealed(data) => (data.segments(), None),
            WriteData::Unsealed(data) => (&[][..], Some(data.data())),
        };
        segments.iter().map(|segment| &segment.data).chain(alone)
    }

    /// `blocks` blocks from the one with index `first`; shares the bytes.
    ///
    /// # Panics
    /// When the run is not within the data.
    #[must_use]
    pub fn slice(&self, first: usize, blocks: usize) -> WriteData {
        match self {
            WriteData::Sealed(data) => WriteData::Sealed(data.slice(first, blocks)),
            WriteData::Unsealed(data) => WriteData::Unsealed(data.slice(first, blocks)),
        }
    }

    /// Moves the blocks to other addresses: adds `delta` to each reference tag, as [`Sealed::with_ref_tags_shifted`]
    /// does.
    #[must_use]
    pub fn with_ref_tags_shifted(self, delta: u64) -> WriteData {
        match self {
            WriteData::Sealed(data) => WriteData::Sealed(data.with_ref_tags_shifted(std::iter::repeat(delta))),
            WriteData::Unsealed(data) => WriteData::Unsealed(data.with_ref_tags_shifted(delta)),
        }
    }
}

impl From<Sealed> for WriteData {
    fn from(data: Sealed) -> WriteData {
        WriteData::Sealed(data)
    }
}

impl From<Unsealed> for WriteData {
    fn from(data: Unsealed) -> WriteData {
        WriteData::Unsealed(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::{GuardKind, ProtectionType, Tags};

    #[test]
    fn both_kinds_say_the_same_of_themselves_and_of_their_parts() {
        let size = BlockSize::B512;
        let format = Some(PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1));
        let tags = Tags { app_tag: 3, storage_tag: 0, initial_ref_tag: 40 };
        let bytes: Vec<u8> = (0..4 * 512).map(|i| (i / 5) as u8).collect();
        let data = Slice::copy_from(&bytes);
        let sealed = WriteData::from(Sealed::seal(data.clone(), size, format, &tags));
        let unsealed = WriteData::from(Unsealed::new(data, size, format, tags));
        assert!(sealed.is_sealed() && !unsealed.is_sealed());
        for (of, first, blocks) in [(0, 0, 4), (7, 1, 2)] {
            let [one, other] = [&sealed, &unsealed].map(|data| data.slice(first, blocks).with_ref_tags_shifted(of));
            assert_eq!((one.size(), one.format(), one.blocks()), (other.size(), other.format(), other.blocks()));
            assert_eq!((one.is_sealed(), other.is_sealed()), (true, false), "neither is sealed by being cut or moved");
            let joined = |data: &WriteData| data.slices().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
            assert_eq!(joined(&one), joined(&other));
            assert_eq!(joined(&one), bytes[first * 512..(first + blocks) * 512]);
            assert_eq!(one.into_sealed().joined_tags()[..], other.into_sealed().joined_tags()[..]);
        }
    }
}
