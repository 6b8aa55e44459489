//! The volumes of version 2 that a specimen consists of: itself, or its shards.
//!
//! A shard knows nothing of the others: the addresses of its blocks, reference tags of Types 1 and 2, and offsets count
//! from its own start. Everything outside this file counts blocks and bytes of the whole specimen.

use sealblock_integrity::Sealed;
use sealblock_media_volume::format::{Container, Layout, MapEntry, Region, Seed};
use sealblock_runtime_memory::Slice;
use sealblock_simulator::checker::Patterns;
use sealblock_simulator::system::VolumeProfile;
use sealblock_units::Lba;

/// A range of bytes of the medium: the first, and the one after the last.
pub type Range = (u64, u64);

/// A volume of version 2.
pub struct Part {
    /// Its identity.
    pub uuid: [u8; 16],
    /// Its layout.
    pub layout: Layout,
    /// For a shard: the volume, and its number in it.
    shard: Option<(Container, u32)>,
}

impl Part {
    /// A volume that has no shards.
    pub fn whole(uuid: [u8; 16], layout: Layout) -> Part {
        Part { uuid, layout, shard: None }
    }

    /// The shards of a volume.
    pub fn shards(container: &Container) -> Vec<Part> {
        let part = |shard| Part {
            uuid: container.shard_uuid(shard),
            layout: *container.shard_layout(),
            shard: Some((*container, shard)),
        };
        (0..container.shards()).map(part).collect()
    }

    /// Salt of its checksums.
    pub fn seed(&self) -> Seed {
        Seed::of(&self.uuid)
    }

    /// Its bytes on the medium.
    pub fn range(&self) -> Range {
        let start = self.shard.map_or(0, |(container, shard)| container.window(shard).offset);
        (start, start + self.layout.medium_bytes())
    }

    /// An offset in it, as one of the medium.
    pub fn at(&self, offset: u64) -> u64 {
        self.range().0 + offset
    }

    /// Its regions, at their places on the medium.
    pub fn regions(&self) -> Vec<Region> {
        match self.shard {
            Some((container, shard)) => container.shard_regions(shard),
            None => self.layout.regions(),
        }
    }

    /// The block that one of its blocks is. The last ones of a shard may be behind the end of the volume.
    pub fn block(&self, place: Lba) -> Lba {
        self.shard.map_or(place, |(container, shard)| container.block_at(shard, place))
    }

    /// Where a block is, if it is here.
    pub fn place(&self, lba: Lba) -> Option<Lba> {
        let Some((container, shard)) = self.shard else { return Some(lba) };
        let (of, place) = container.shard_of(lba);
        (of == shard).then_some(place)
    }

    /// The place of the data of a map entry of this part.
    pub fn data(&self, entry: &MapEntry) -> Option<Range> {
        let start = self.at(self.layout.data_offset(entry)?);
        Some((start, start + self.layout.block_size().bytes() as u64))
    }

    /// True if a map entry of this part has the tags that its block has with this version.
    pub fn has_tags(
        &self,
        entry: &MapEntry,
        version: u64,
        data: &[u8],
        (shape, patterns): (&VolumeProfile, &Patterns),
    ) -> bool {
        let Some(format) = shape.protection else { return false };
        let mut tags = patterns.tags(self.block(entry.lba), version);
        if format.protection().increments_ref_tag() {
            tags.initial_ref_tag = entry.lba.get();
        }
        let due = Sealed::seal(Slice::copy_from(data), shape.block_size, shape.protection, &tags);
        due.joined_tags()[..] == *entry.tags(format)
    }
}
