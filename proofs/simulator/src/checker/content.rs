//! The content of writes: a pattern made from seed, block and version, so that a mix of two versions matches neither.

use sealblock_integrity::{PiFormat, Sealed, Tags, Unsealed};
use sealblock_runtime_memory::Buffer;
use sealblock_units::{BlockSize, Extent, Lba};

use crate::random::mix;

/// The content of one block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Content {
    /// Zeroes.
    Zero,
    /// No content: the block was made unreadable, and every read of it fails.
    Unreadable,
    /// The pattern of this version. The same version has other bytes in another block.
    Version(u64),
}

/// Makes and recognises contents.
#[derive(Clone, Copy, Debug)]
pub struct Patterns {
    seed: u64,
    size: BlockSize,
    format: Option<PiFormat>,
}

impl Patterns {
    /// Patterns of one run, for blocks of one shape.
    pub fn new(seed: u64, size: BlockSize, format: Option<PiFormat>) -> Patterns {
        Patterns { seed, size, format }
    }

    fn words(&self, lba: Lba, version: u64) -> impl Iterator<Item = u64> + use<> {
        let base = mix(self.seed ^ mix(lba.get())) ^ mix(version.wrapping_add(0x5ea1));
        let body = (1u64..).map(move |i| mix(base.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15))));
        // The first word is the version, which identifies the content.
        std::iter::once(version ^ mix(self.seed)).chain(body)
    }

    fn fill(&self, lba: Lba, content: Content, into: &mut [u8]) {
        match content {
            Content::Zero | Content::Unreadable => into.fill(0),
            Content::Version(version) => {
                let words = self.words(lba, version);
                into.chunks_exact_mut(8)
                    .zip(words)
                    .for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
            }
        }
    }

    /// The bytes of one block.
    pub fn block(&self, lba: Lba, content: Content) -> Vec<u8> {
        let mut bytes = vec![0; self.size.bytes()];
        self.fill(lba, content, &mut bytes);
        bytes
    }

    /// The content that these bytes are for `lba`, if any.
    pub fn recognise(&self, lba: Lba, bytes: &[u8]) -> Option<Content> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Some(Content::Zero);
        }
        let first = u64::from_le_bytes(*bytes.first_chunk()?);
        let version = first ^ mix(self.seed);
        let same = bytes.as_chunks::<8>().0.iter().zip(self.words(lba, version)).all(|(b, w)| *b == w.to_le_bytes());
        same.then_some(Content::Version(version))
    }

    /// The tags that a host would give to this version. They depend on the version, so stale tags are detected like
    /// stale data.
    pub fn tags(&self, lba: Lba, version: u64) -> Tags {
        let word = mix(self.seed ^ mix(version ^ 0x7a65));
        let counts = self.format.is_none_or(|format| format.protection().increments_ref_tag());
        // FFFFh disables checks, so a test with it could never fail.
        let app_tag = (word as u16).min(0xfffe);
        Tags { app_tag, storage_tag: word >> 16, initial_ref_tag: if counts { lba.get() } else { word >> 8 } }
    }

    /// Blocks of this version, with tags made by the host.
    pub fn sealed(&self, extent: Extent, version: u64) -> Sealed {
        self.unsealed(extent, version).seal()
    }

    /// Blocks of this version, for which the device makes the guards and uses the host's other tags.
    pub fn unsealed(&self, extent: Extent, version: u64) -> Unsealed {
        let mut data = Buffer::zeroed(extent.bytes(self.size) as usize);
        for (lba, block) in extent.iter().zip(data.chunks_exact_mut(self.size.bytes())) {
            self.fill(lba, Content::Version(version), block);
        }
        Unsealed::new(data.freeze(), self.size, self.format, self.tags(extent.start(), version))
    }

    /// The contents of blocks that were read, or the error of the first block with an unknown content or with wrong
    /// tags.
    pub fn contents(&self, extent: Extent, read: &Sealed) -> Result<Vec<Content>, String> {
        if read.blocks() as u64 != extent.len() {
            return Err(format!("{extent}: {} blocks were read", read.blocks()));
        }
        let blocks = extent.iter().zip(read.iter().map(|(block, _)| block));
        blocks.enumerate().map(|(i, (lba, bytes))| self.content(lba, bytes, &read.slice(i, 1))).collect()
    }

    fn content(&self, lba: Lba, bytes: &[u8], read: &Sealed) -> Result<Content, String> {
        let Some(content) = self.recognise(lba, bytes) else {
            return Err(format!("block {lba}: {}", self.describe(lba, bytes)));
        };
        let (Content::Version(version), Some(_)) = (content, self.format) else { return Ok(content) };
        let due = Sealed::seal(read.joined_data(), self.size, self.format, &self.tags(lba, version));
        if due.joined_tags()[..] != read.joined_tags()[..] {
            let (due, read) = (due.joined_tags().to_vec(), read.joined_tags().to_vec());
            return Err(format!("block {lba}: version {version} has tags {read:02x?}, not {due:02x?}"));
        }
        Ok(content)
    }

    /// Describes bytes that are no content of the block.
    fn describe(&self, lba: Lba, bytes: &[u8]) -> String {
        let sectors = bytes.chunks_exact(512).enumerate().map(|(i, sector)| {
            let near = (0..1u64 << 12).find(|version| {
                let mut words = self.words(lba, *version).skip(i * 64);
                sector.as_chunks::<8>().0.iter().all(|word| words.next() == Some(u64::from_le_bytes(*word)))
            });
            match near {
                _ if sector.iter().all(|byte| *byte == 0) => "zeroes".to_owned(),
                Some(version) => format!("version {version}"),
                None => "foreign".to_owned(),
            }
        });
        format!("no content of this block; its sectors are {}", sectors.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::{GuardKind, ProtectionType};

    #[test]
    fn contents_are_recognised_and_mixes_are_not() {
        let patterns = Patterns::new(5, BlockSize::B4096, None);
        let (a, b) = (Lba::new(3), Lba::new(4));
        let one = patterns.block(a, Content::Version(1));
        let two = patterns.block(a, Content::Version(2));
        assert_eq!(patterns.recognise(a, &one), Some(Content::Version(1)));
        assert_eq!(patterns.recognise(b, &one), None);
        assert_eq!(patterns.recognise(a, &[0; 4096]), Some(Content::Zero));
        let torn = [&one[..512], &two[512..]].concat();
        assert_eq!(patterns.recognise(a, &torn), None);
        assert!(patterns.describe(a, &torn).contains("version 1, version 2, version 2"));
    }

    #[test]
    fn foreign_tags_are_noticed() {
        let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type3);
        let patterns = Patterns::new(5, BlockSize::B512, Some(format));
        let extent = Extent::from_raw(8, 2).unwrap();
        let good = patterns.sealed(extent, 9);
        assert_eq!(patterns.contents(extent, &good), Ok(vec![Content::Version(9); 2]));
        let stale = Sealed::seal(good.joined_data(), BlockSize::B512, Some(format), &patterns.tags(extent.start(), 8));
        assert!(patterns.contents(extent, &stale).unwrap_err().contains("has tags"));
    }
}
