//! Converts blocks between memory, where data and tags are apart, and the wire, where they are interleaved; chooses the
//! checks that a command requests of the target.

use std::cell::Cell;

use sealblock_block::BadBlock;
use sealblock_integrity::{Checks, GuardKind, Mismatch, PiFormat, ProtectionType, Sealed, Tags, Unverified};
use sealblock_protocols_nvme::nvm::{Prchk, ProtectionInfo};
use sealblock_protocols_nvme_tcp::host::ReadData;
use sealblock_protocols_nvme_tcp::{BlockCrcs, BlockLayout, Payload};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::{BlockSize, Extent, Lba};

use crate::namespace_profile::{NamespaceProfile, PiMode};
use crate::options::add;

/// Blocks of at least this many bytes are sent without a copy, with their tags between them; smaller ones are copied
/// together, because their gather list would cost more than the copy.
const GATHER_BYTES: usize = 4096;
/// The application tag that disables checking of a block.
const UNCHECKED_APP_TAG: u16 = 0xFFFF;

/// The wire format of a namespace's blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockCodec {
    pub(crate) size: BlockSize,
    pub(crate) pi_mode: PiMode,
    storage_tag_mask: u64,
    /// Set if one CRC serves data digests and guards.
    pub(crate) crc_layout: Option<BlockLayout>,
}

impl BlockCodec {
    pub(crate) fn new(profile: &NamespaceProfile, data_digest: bool) -> BlockCodec {
        let (size, pi_mode) = (profile.geometry.block_size, profile.pi_mode);
        let shares_crcs = data_digest && crate::namespace_profile::shares_crcs(pi_mode);
        let tuple_bytes = pi_mode.shown().map_or(0, PiFormat::tuple_bytes);
        let crcs = if shares_crcs { BlockLayout::new(size.bytes(), tuple_bytes) } else { None };
        BlockCodec { size, pi_mode, storage_tag_mask: profile.storage_tag_mask, crc_layout: crcs }
    }

    /// Bytes that a Read of these blocks transfers.
    pub(crate) fn read_bytes(&self, extent: Extent) -> usize {
        extent.len() as usize * (self.size.bytes() + self.pi_mode.shown().map_or(0, PiFormat::tuple_bytes))
    }

    /// The fields of a Read or Verify that request these checks, and true if they express all of them.
    pub(crate) fn read_checks(&self, extent: Extent, checks: &Checks, is_verify: bool) -> (ProtectionInfo, bool) {
        match self.pi_mode {
            PiMode::None => (ProtectionInfo::NONE, true),
            // This host does not receive the tags, so the target checks all it can.
            PiMode::Target(format) => {
                let info =
                    read_checks(format, extent.start(), &Checks::full(format, extent.start()), self.storage_tag_mask).0;
                (ProtectionInfo { pract: !is_verify, ..info }, true)
            }
            PiMode::Host(format) => read_checks(format, extent.start(), checks, self.storage_tag_mask),
        }
    }

    /// True if a Verify or Read with these checks compares the guard of every block.
    pub(crate) fn checks_seals(&self, checks: &Checks) -> bool {
        match self.pi_mode {
            PiMode::None => false,
            PiMode::Target(_) => true,
            PiMode::Host(_) => checks.guard,
        }
    }

    /// The fields of a Write of this data. The target always checks guards and reference tags; it checks application and
    /// storage tags if all blocks have the same. So a tag that changes in transfer is detected.
    pub(crate) fn write_checks(&self, extent: Extent, data: &Sealed) -> ProtectionInfo {
        match self.pi_mode {
            PiMode::None => ProtectionInfo::NONE,
            PiMode::Target(format) => {
                let initial_ref_tag = if format.protection().increments_ref_tag() { extent.start().get() } else { 0 };
                ProtectionInfo { pract: true, prchk: Prchk::GUARD, ..ProtectionInfo::NONE }.with_tags(
                    format,
                    0,
                    initial_ref_tag,
                )
            }
            PiMode::Host(format) => self.offer_tags(format, extent, data),
        }
    }

    fn offer_tags(&self, format: PiFormat, extent: Extent, data: &Sealed) -> ProtectionInfo {
        let mut tuples = data.tuples();
        let Some(first) = tuples.next() else { return ProtectionInfo::NONE };
        let (mut same_app, mut same_storage) = (first.app_tag != UNCHECKED_APP_TAG, format.storage_tag_bits() > 0);
        for tuple in tuples {
            same_app &= tuple.app_tag == first.app_tag;
            same_storage &= tuple.storage_tag == first.storage_tag;
        }
        let reference = match format.protection() {
            ProtectionType::Type1 => extent.start().get(),
            ProtectionType::Type2 | ProtectionType::Type3 => first.ref_tag,
        };
        let mut prchk = Prchk::GUARD;
        if format.protection().increments_ref_tag() && format.reference_tag_bits() > 0 {
            prchk |= Prchk::REFERENCE_TAG;
        }
        let mut info = ProtectionInfo { prchk, stc: same_storage, ..ProtectionInfo::NONE };
        if same_app {
            info =
                ProtectionInfo { prchk: prchk | Prchk::APPLICATION_TAG, lbat: first.app_tag, lbatm: u16::MAX, ..info };
        }
        info.with_tags(format, first.storage_tag, reference)
    }

    /// The fields of Write Zeroes: the target generates the tags.
    pub(crate) fn zeroes(&self, extent: Extent) -> ProtectionInfo {
        let Some(format) = self.pi_mode.kept() else { return ProtectionInfo::NONE };
        let initial_ref_tag = if format.protection().increments_ref_tag() { extent.start().get() } else { 0 };
        ProtectionInfo { pract: true, ..ProtectionInfo::NONE }.with_tags(format, 0, initial_ref_tag)
    }

    /// Data of a Write in wire format.
    pub(crate) fn payload(&self, data: &Sealed, pool: &Pool) -> Payload {
        match self.pi_mode.shown() {
            Some(format) => self.with_tags(format, data, pool),
            None => Payload::from(data),
        }
    }

    /// Data of a Compare in wire format. The target compares tags too, so data without the namespace's tags gets those
    /// that a target would generate.
    pub(crate) fn comparand(&self, extent: Extent, data: &Sealed, pool: &Pool) -> Payload {
        let Some(format) = self.pi_mode.kept() else { return Payload::from(data) };
        if data.format() == Some(format) {
            return self.with_tags(format, data, pool);
        }
        let initial_ref_tag = if format.protection().increments_ref_tag() { extent.start().get() } else { 0 };
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag };
        self.with_tags(format, &Sealed::seal(data.joined_data(), self.size, Some(format), &tags), pool)
    }

    fn with_tags(&self, format: PiFormat, data: &Sealed, pool: &Pool) -> Payload {
        let (size, tuple) = (self.size.bytes(), format.tuple_bytes());
        let payload = if size >= GATHER_BYTES {
            Payload::new(data.interleaved())
        } else {
            let mut whole = pool.take(data.blocks() * (size + tuple));
            for (block, (data, tags)) in whole.chunks_exact_mut(size + tuple).zip(data.iter()) {
                block[..size].copy_from_slice(data);
                block[size..].copy_from_slice(tags);
            }
            Payload::from(whole.freeze())
        };
        match (&self.crc_layout, data.block_crcs()) {
            (Some(profile), Some(guards)) => {
                payload.with_crcs(BlockCrcs { layout: profile.clone(), guards: guards.collect() })
            }
            // Unverified guards must not yield a digest: it would hide their mismatch with the data.
            _ => payload,
        }
    }

    /// Verifies received blocks. `read` has whole blocks.
    pub(crate) fn check_read(
        &self,
        read: ReadData,
        checks: &Checks,
        pool: &Pool,
        guard_bytes_checksummed: &Cell<u64>,
    ) -> Result<Sealed, Vec<Mismatch>> {
        let Some(format) = self.pi_mode.shown() else {
            let plain = Unverified::new(read.buffer.freeze(), Slice::empty(), self.size, None);
            return plain.expect("the length was checked").verify(&Checks::NONE);
        };
        let (data, tags) = self.split_tags(format, read.buffer, pool);
        let len = data.len() as u64;
        let blocks = Unverified::new(data, tags, self.size, Some(format)).expect("one tuple was taken from each block");
        // Block CRCs are present only if a data digest over these bytes matched.
        if let Some(crcs) = read.crcs.filter(|_| format.guard() == GuardKind::Crc32c) {
            return blocks.verify_with_crcs(checks, &crcs.guards);
        }
        if checks.guard {
            add(guard_bytes_checksummed, len);
        }
        blocks.verify(checks)
    }

    /// Separates data and tags in place; a single block is not moved.
    fn split_tags(&self, format: PiFormat, mut buffer: Buffer, pool: &Pool) -> (Slice, Slice) {
        let (size, tuple) = (self.size.bytes(), format.tuple_bytes());
        let (stride, blocks) = (size + tuple, buffer.len() / (size + tuple));
        if blocks == 1 {
            let both = buffer.freeze();
            return (both.slice(..size), both.slice(size..));
        }
        let mut tags = pool.take(blocks * tuple);
        for (i, tag) in tags.chunks_exact_mut(tuple).enumerate() {
            tag.copy_from_slice(&buffer[i * stride + size..(i + 1) * stride]);
            buffer.copy_within(i * stride..i * stride + size, i * size);
        }
        buffer.truncate(blocks * size);
        (buffer.freeze(), tags.freeze())
    }
}

/// The bad blocks of mismatches in blocks from `start`.
pub(crate) fn bad_blocks(start: Lba, mismatches: &[Mismatch]) -> Vec<BadBlock> {
    mismatches.iter().map(|mismatch| BadBlock::of_mismatch(start, mismatch)).collect()
}

/// Checks as fields of a command, and true if the fields express all of them. They cannot express every mask of a storage
/// tag, and with Type 1 no reference tag but the LBA (NVM, "Protection Information").
fn read_checks(format: PiFormat, start: Lba, checks: &Checks, storage_tag_mask: u64) -> (ProtectionInfo, bool) {
    let mut info = ProtectionInfo::NONE;
    let mut is_all = true;
    if checks.guard {
        info.prchk |= Prchk::GUARD;
    }
    if let Some(app) = checks.app_tag {
        info.prchk |= Prchk::APPLICATION_TAG;
        (info.lbat, info.lbatm) = (app.expected, app.mask);
    }
    let mut storage_tag = 0;
    if let Some(storage) = checks.storage_tag.filter(|storage| storage.mask & format.storage_tag_mask() != 0) {
        let mask = format.storage_tag_mask();
        if storage.mask & mask == storage_tag_mask & mask {
            info.stc = true;
            storage_tag = storage.expected;
        } else {
            is_all = false;
        }
    }
    let mut reference = if format.protection().increments_ref_tag() { start.get() } else { 0 };
    if let Some(first) =
        checks.initial_ref_tag.filter(|_| format.protection().increments_ref_tag() && format.reference_tag_bits() > 0)
    {
        let is_address = (first ^ start.get()) & format.reference_tag_mask() == 0;
        if format.protection() == ProtectionType::Type1 && !is_address {
            is_all = false;
        } else {
            info.prchk |= Prchk::REFERENCE_TAG;
            reference = first;
        }
    }
    (info.with_tags(format, storage_tag, reference), is_all)
}

#[cfg(test)]
mod tests;
