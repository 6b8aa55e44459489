//! Shared code of the targets: reading their input piece by piece, and forging metadata with valid checksums.
//!
//! A changed byte in metadata fails the checksum, so a target that only mutates bytes tests nothing but the checksum.
//! The forging functions update the checksum, so that the code after the check is tested too.

pub mod block_map;
pub mod btrfs;
pub mod btrfs_edit;
pub mod btrfs_filesystem;
pub mod controller;
pub mod image;
pub mod labels;
pub mod nvme;
pub mod values;
pub mod volume;

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, guard};
use sealblock_media_volume::format::{MAP_ENTRY_BYTES, RESERVED_HEAD_BYTES};

/// Splits an input into pieces. After the end of the input it returns zeroes, so any input is long enough.
pub struct Pieces<'a>(&'a [u8]);

impl<'a> Pieces<'a> {
    /// The pieces of `input`.
    pub fn new(input: &'a [u8]) -> Pieces<'a> {
        Pieces(input)
    }

    /// True at the end of the input.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rest of the input.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// At most `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (head, tail) = self.0.split_at(count.min(self.0.len()));
        self.0 = tail;
        head
    }

    /// The next eight bytes as a number, little-endian.
    pub fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let bytes = self.bytes(8);
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// The next two bytes as a number, little-endian.
    pub fn short(&mut self) -> u16 {
        let mut short = [0; 2];
        let bytes = self.bytes(2);
        short[..bytes.len()].copy_from_slice(bytes);
        u16::from_le_bytes(short)
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }
}

/// A format of protection information, or none.
pub fn format(pieces: &mut Pieces) -> Option<PiFormat> {
    let byte = pieces.byte();
    let guard = GuardKind::ALL.get(usize::from(byte & 7)).copied()?;
    let protection = ProtectionType::ALL[usize::from(byte >> 3) % 3];
    let default = PiFormat::with_default_storage_tag(guard, protection);
    Some(PiFormat::new(guard, protection, pieces.byte()).unwrap_or(default))
}

fn put_checksum(bytes: &mut [u8], at: usize, checksum: u32) {
    bytes[at..at + 4].copy_from_slice(&checksum.to_le_bytes());
}

/// Updates the checksum of a superblock.
pub fn forge_superblock(bytes: &mut [u8]) {
    let checksum = guard::crc32c(&bytes[..508]);
    put_checksum(bytes, 508, checksum);
}

/// Updates the checksum of a mirror's label, if it is long enough to have one.
pub fn forge_label(bytes: &mut [u8]) {
    if bytes.len() >= 16 {
        let checksum = guard::crc32c(&bytes[16..]);
        put_checksum(bytes, 12, checksum);
    }
}

/// Updates the checksum of a stripe's label, if it is long enough to have one.
pub fn forge_stripe_label(bytes: &mut [u8]) {
    if bytes.len() >= 16 {
        let checksum = guard::crc32c(&bytes[..12]) ^ guard::crc32c(&bytes[16..]).rotate_left(1);
        put_checksum(bytes, 12, checksum);
    }
}

/// Updates the checksum of a map entry of the volume `uuid`.
pub fn forge_map_entry(bytes: &mut [u8], uuid: &[u8; 16]) {
    let checksum = guard::crc32c(&bytes[..28]) ^ guard::crc32c(uuid);
    put_checksum(bytes, 28, checksum);
}

/// Updates the checksums of a log sector of the volume `uuid`, and of all map entries in it.
pub fn forge_log_sector(bytes: &mut [u8], uuid: &[u8; 16]) {
    bytes[..4].copy_from_slice(b"SLOG");
    for entry in bytes[32..].chunks_exact_mut(MAP_ENTRY_BYTES) {
        forge_map_entry(entry, uuid);
    }
    forge_sector(bytes, uuid);
}

/// Updates the checksum of a copy of a reserved area of the volume `uuid`, if it is long enough to have one.
pub fn forge_reserved_area(bytes: &mut [u8], uuid: &[u8; 16]) {
    let Some(length) = bytes.get(16..20).map(|length| u32::from_le_bytes([length[0], length[1], length[2], length[3]]))
    else {
        return;
    };
    let end = bytes.len().min(RESERVED_HEAD_BYTES.saturating_add(length as usize));
    let checksum = guard::crc32c(&bytes[8..end]) ^ guard::crc32c(uuid);
    put_checksum(bytes, 4, checksum);
}

/// Updates the checksum of a metadata sector of the volume `uuid`: generations, block group map, or log.
pub fn forge_sector(bytes: &mut [u8], uuid: &[u8; 16]) {
    let checksum = guard::crc32c(&bytes[8..]) ^ guard::crc32c(uuid);
    put_checksum(bytes, 4, checksum);
}
