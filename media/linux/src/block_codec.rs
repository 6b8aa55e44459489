//! Converts blocks between memory, where data and tuples are separate, and the layout of commands and transfers:
//! metadata after each block or in a separate buffer; the tuple is all of the metadata, its first bytes or its last
//! ones.
//!
//! The guard of a tuple that is last covers the metadata before it too (NVM, "Guard Field"). In memory guards cover
//! data only, so these are converted: the CRC of a block is continued over its metadata. A wrong guard stays wrong, in
//! the same bits.

use sealblock_block::{BadBlocks, Expectations, Outcome, Response};
use sealblock_integrity::{Checks, PiFormat, Sealed, Tuple, Unverified, guard};
use sealblock_media_nvme::{Metadata, NamespaceProfile, bad_blocks};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::{BlockSize, Extent};

/// The memory of one command: its data, and its metadata if they have a separate buffer.
#[derive(Debug)]
pub(crate) struct Memory<T> {
    pub(crate) data: T,
    pub(crate) metadata: Option<T>,
}

/// How blocks are laid out in the memory of commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockCodec {
    size: BlockSize,
    /// The tuples that this host makes and checks.
    shown: Option<PiFormat>,
    metadata: Metadata,
}

impl BlockCodec {
    pub(crate) fn new(profile: &NamespaceProfile) -> BlockCodec {
        let (size, metadata) = (profile.geometry.block_size, profile.metadata);
        BlockCodec { size, shown: profile.pi_mode.shown(), metadata }
    }

    /// For blocks whose metadata are in a separate buffer, this many bytes for each block, with a tuple at this offset.
    pub(crate) fn apart(size: BlockSize, format: PiFormat, bytes: usize, tuple_at: usize) -> BlockCodec {
        let metadata = Metadata { bytes, is_interleaved: false, tuple_at };
        BlockCodec { size, shown: Some(format), metadata }
    }

    /// Bytes from one block to the next.
    fn stride(&self) -> usize {
        self.size.bytes() + if self.metadata.is_interleaved { self.metadata.bytes } else { 0 }
    }

    /// Memory for a Read.
    pub(crate) fn room(&self, extent: Extent, pool: &Pool) -> Memory<Buffer> {
        let blocks = extent.len() as usize;
        let is_apart = self.metadata.bytes > 0 && !self.metadata.is_interleaved;
        let metadata = is_apart.then(|| pool.take(blocks * self.metadata.bytes));
        Memory { data: pool.take(blocks * self.stride()), metadata }
    }

    /// The blocks of a Write or Compare. If [`NamespaceProfile::metadata`] leaves a tuple of the data to the drive, the
    /// tuple is the block's only metadata.
    pub(crate) fn memory_of(&self, data: &Sealed, pool: &Pool) -> Memory<Slice> {
        let tuple_bytes = data.format().map_or(0, PiFormat::tuple_bytes);
        let metadata = match self.metadata.bytes {
            0 => Metadata { bytes: tuple_bytes, tuple_at: 0, ..self.metadata },
            _ => self.metadata,
        };
        match (metadata.bytes, metadata.is_interleaved) {
            (0, _) => Memory { data: data.joined_data(), metadata: None },
            (bytes, false) if bytes == tuple_bytes => {
                Memory { data: data.joined_data(), metadata: Some(data.joined_tags()) }
            }
            (_, false) => {
                Memory { data: data.joined_data(), metadata: Some(woven(data, 0, metadata, tuple_bytes, pool)) }
            }
            (_, true) => Memory { data: woven(data, self.size.bytes(), metadata, tuple_bytes, pool), metadata: None },
        }
    }

    /// The blocks of a Read, after checking that their tags match them and are as expected.
    pub(crate) fn check_read(
        &self,
        extent: Extent,
        read: Memory<Buffer>,
        expectations: &Expectations,
        pool: &Pool,
    ) -> Outcome {
        let (data, tags) = self.take_apart(read, pool);
        let blocks = Unverified::new(data, tags, self.size, self.shown).expect("one tuple was taken from each block");
        let own = self.shown.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
        match blocks.verify(&own) {
            Ok(sealed) => {
                expectations.beyond(&own).check(extent, &sealed)?;
                Ok(Response::Data(sealed))
            }
            Err(mismatches) => {
                let bad_blocks = BadBlocks::new(bad_blocks(extent.start(), &mismatches));
                Err(bad_blocks.expect("a mismatch is about a block").into())
            }
        }
    }

    /// Data and tuples of memory that [`BlockCodec::room`] returned.
    fn take_apart(&self, read: Memory<Buffer>, pool: &Pool) -> (Slice, Slice) {
        let (size, tuple_bytes) = (self.size.bytes(), self.shown.map_or(0, PiFormat::tuple_bytes));
        let Memory { mut data, metadata } = read;
        let (stride, at) = match &metadata {
            Some(_) => (self.metadata.bytes, self.metadata.tuple_at),
            None => (self.stride(), size + self.metadata.tuple_at),
        };
        let blocks = data.len() / self.stride();
        let tags = match metadata {
            _ if tuple_bytes == 0 => Slice::empty(),
            Some(metadata) if stride == tuple_bytes => metadata.freeze(),
            metadata => {
                let from: &[u8] = metadata.as_deref().unwrap_or(&data);
                let mut tags = pool.take(blocks * tuple_bytes);
                for (tag, block) in tags.chunks_exact_mut(tuple_bytes).zip(from.chunks_exact(stride)) {
                    tag.copy_from_slice(&block[at..at + tuple_bytes]);
                }
                if let Some(format) = self.shown.filter(|_| self.metadata.tuple_at > 0) {
                    let blocks = data.chunks_exact(self.stride()).map(|block| &block[..size]);
                    let before = from.chunks_exact(stride).map(|block| &block[at - self.metadata.tuple_at..at]);
                    for ((tag, data), before) in tags.chunks_exact_mut(tuple_bytes).zip(blocks).zip(before) {
                        cover_data_only(format, tag, data, before);
                    }
                }
                tags.freeze()
            }
        };
        if self.stride() > size {
            for block in 1..blocks {
                data.copy_within(block * self.stride()..block * self.stride() + size, block * size);
            }
            data.truncate(blocks * size);
        }
        (data.freeze(), tags)
    }
}

/// Makes the guard of a tuple cover the metadata before it, too.
fn cover_metadata(format: PiFormat, tuple: &mut [u8], before: &[u8]) {
    let read = Tuple::read(format, tuple);
    Tuple { guard: guard::append(format.guard(), read.guard, before), ..read }.write(format, tuple);
}

/// Makes the guard of a tuple cover its block's data only. A wrong guard stays wrong: CRCs are linear.
fn cover_data_only(format: PiFormat, tuple: &mut [u8], data: &[u8], before: &[u8]) {
    let read = Tuple::read(format, tuple);
    let of_data = guard::compute(format.guard(), data);
    let wrong_bits = read.guard ^ guard::append(format.guard(), of_data, before);
    Tuple { guard: of_data ^ wrong_bits, ..read }.write(format, tuple);
}

/// Each block's first `data_bytes` bytes and its metadata; metadata bytes besides the tuple are zero.
fn woven(data: &Sealed, data_bytes: usize, metadata: Metadata, tuple_bytes: usize, pool: &Pool) -> Slice {
    let mut whole = pool.take(data.blocks() * (data_bytes + metadata.bytes));
    for (to, (block, tags)) in whole.chunks_exact_mut(data_bytes + metadata.bytes).zip(data.iter()) {
        let (to_data, to_metadata) = to.split_at_mut(data_bytes);
        to_data.copy_from_slice(&block[..data_bytes]);
        to_metadata.fill(0);
        let (before, tuple) = to_metadata.split_at_mut(metadata.tuple_at);
        tuple[..tuple_bytes].copy_from_slice(tags);
        if let Some(format) = data.format().filter(|_| !before.is_empty()) {
            cover_metadata(format, tuple, before);
        }
    }
    whole.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_integrity::{Field, GuardKind, ProtectionType, Tags};
    use sealblock_units::Lba;

    fn format() -> PiFormat {
        PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1)
    }

    fn codec(shown: bool, bytes: usize, is_interleaved: bool, tuple_at: usize) -> BlockCodec {
        let metadata = Metadata { bytes, is_interleaved, tuple_at };
        BlockCodec { size: BlockSize::B512, shown: shown.then(format), metadata }
    }

    fn sealed(format: Option<PiFormat>, blocks: usize) -> Sealed {
        let bytes: Vec<u8> = (0..blocks * 512).map(|i| (i / 3) as u8).collect();
        let tags = Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: 7 };
        Sealed::seal(Slice::copy_from(&bytes), BlockSize::B512, format, &tags)
    }

    fn extent(blocks: u64) -> Extent {
        Extent::from_raw(7, blocks).unwrap()
    }

    fn received(codec: BlockCodec, sent: &Memory<Slice>, blocks: u64, pool: &Pool) -> Memory<Buffer> {
        let mut room = codec.room(extent(blocks), pool);
        room.data.copy_from_slice(&sent.data);
        if let (Some(to), Some(from)) = (&mut room.metadata, &sent.metadata) {
            to.copy_from_slice(from);
        }
        room
    }

    #[test]
    fn blocks_come_back_as_they_went_wherever_their_metadata_are() {
        let pool = Pool::new(0, usize::MAX);
        let layouts = [(8, true, 0), (8, false, 0), (16, true, 0), (16, true, 8), (16, false, 8), (64, false, 0)];
        for (bytes, is_interleaved, tuple_at) in layouts {
            for blocks in [1, 2, 5] {
                let codec = codec(true, bytes, is_interleaved, tuple_at);
                let data = sealed(Some(format()), blocks);
                let sent = codec.memory_of(&data, &pool);
                assert_eq!(sent.metadata.is_none(), is_interleaved);
                let read = received(codec, &sent, blocks as u64, &pool);
                let Ok(Response::Data(back)) =
                    codec.check_read(extent(blocks as u64), read, &Expectations::NONE, &pool)
                else {
                    panic!("good blocks are good");
                };
                assert_eq!(back.first_difference(&data, true), None);
                let mut read = received(codec, &sent, blocks as u64, &pool);
                let stride = codec.stride();
                read.data[(blocks - 1) * stride + 100] ^= 1;
                let bad = codec.check_read(extent(blocks as u64), read, &Expectations::NONE, &pool).unwrap_err();
                let first = *bad.bad_blocks().unwrap().first();
                assert_eq!(first.lba, Lba::new(6 + blocks as u64));
                assert_eq!(first.cause, sealblock_block::BadBlockCause::Tag(Field::Guard));
            }
        }
    }

    #[test]
    fn the_tuple_is_where_the_format_has_it_and_the_rest_is_zero() {
        let pool = Pool::new(0, usize::MAX);
        let data = sealed(Some(format()), 1);
        let tuple = data.joined_tags();
        let last = codec(true, 64, false, 56).memory_of(&data, &pool).metadata.unwrap();
        assert_eq!((&last[58..], last[..56].iter().all(|byte| *byte == 0)), (&tuple[2..], true));
        let whole = guard::crc16_append(guard::crc16(&data.joined_data()), &[0; 56]);
        assert_eq!(last[56..58], whole.to_be_bytes(), "the guard covers what is in front of it");
        let first = codec(true, 16, true, 0).memory_of(&data, &pool).data;
        assert_eq!((&first[512..520], &first[520..]), (&tuple[..], &[0; 8][..]));
    }

    #[test]
    fn metadata_in_front_of_a_tuple_are_covered_by_its_guard() {
        let pool = Pool::new(0, usize::MAX);
        for is_interleaved in [true, false] {
            let codec = codec(true, 16, is_interleaved, 8);
            let sent = codec.memory_of(&sealed(Some(format()), 2), &pool);
            let mut read = received(codec, &sent, 2, &pool);
            let at = if is_interleaved { 512 + 3 } else { 3 };
            read.metadata.as_deref_mut().unwrap_or(&mut read.data)[at] ^= 1;
            let bad = codec.check_read(extent(2), read, &Expectations::NONE, &pool).unwrap_err();
            assert_eq!(bad.bad_blocks().unwrap().as_slice().len(), 1);
            assert_eq!(bad.bad_blocks().unwrap().first().lba, Lba::new(7));
        }
    }

    #[test]
    fn metadata_without_tuples_is_zero_and_dropped() {
        let pool = Pool::new(0, usize::MAX);
        for is_interleaved in [true, false] {
            let codec = codec(false, 16, is_interleaved, 0);
            let data = sealed(None, 3);
            let sent = codec.memory_of(&data, &pool);
            let mut read = received(codec, &sent, 3, &pool);
            let metadata = read.metadata.as_deref_mut().unwrap_or(&mut read.data[512..528]);
            metadata.fill(0xA5);
            let Ok(Response::Data(back)) = codec.check_read(extent(3), read, &Expectations::NONE, &pool) else {
                panic!("nothing is checked");
            };
            assert_eq!(back.first_difference(&data, false), None);
        }
    }

    #[test]
    fn what_the_drive_makes_does_not_travel_but_a_comparand_brings_it() {
        let pool = Pool::new(0, usize::MAX);
        let codec = codec(false, 0, true, 0);
        assert_eq!(codec.room(extent(2), &pool).data.len(), 1024);
        assert_eq!(codec.memory_of(&sealed(None, 2), &pool).data.len(), 1024);
        assert_eq!(codec.memory_of(&sealed(Some(format()), 2), &pool).data.len(), 2 * 520);
    }
}
