//! Types that prove a check: data that was checked, and data that was not.
//!
//! [`Unverified`] is data from a network or a disk. A [`Sealed`] is created only by sealing ([`Sealed::seal`]) or by
//! checking ([`Unverified::verify`]), so a function that takes one need not check again, and a path without a check
//! does not compile. Data and tags are in separate memory, because media need aligned data; interleaved buffers, as
//! networks transfer them, are split.
//!
//! A [`Sealed`] is a list of [`Segment`]s, in the order of their blocks, so that blocks from several buffers become one
//! run without a copy. Nearly all have one segment, which is stored in the value itself.
//!
//! The 32-bit guard of a block is the CRC-32C of its data, and data digests are combined from the same CRC. So one pass
//! over the data is enough: [`Sealed::seal_with_crcs`] and [`Unverified::verify_with_crcs`] take CRCs that were
//! computed for a digest, and [`Sealed::block_crcs`] returns the verified guards for computing one.
//!
//! Invariants: each segment is whole blocks. Such CRCs are used only for a guard of this kind, and only if there is one
//! for each block. [`Sealed::block_crcs`] returns `None` for blocks whose guards were not compared with their data, so
//! that no digest covers bytes that were not checked. The caller guarantees that the CRCs are those of exactly these
//! bytes; debug builds check it.

use std::iter;
use std::slice;
use std::sync::Arc;

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::BlockSize;

use crate::checks::CompiledChecks;
use crate::tuple::{self, Crc32c, GuardFormat};
use crate::{Checks, ChecksumKind, GuardKind, Mismatch, PiFormat, Tags, Tuple, guard, seal, verify};

/// Blocks whose tags match their data in all fields that were checked. Blocks without a protection format always match.
#[derive(Clone, Debug)]
pub struct Sealed {
    segments: Segments,
    size: BlockSize,
    format: Option<PiFormat>,
    has_verified_guards: bool,
}

/// Consecutive blocks whose data are contiguous in memory, and whose tuples are contiguous in memory.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The data, block after block.
    pub data: Slice,
    /// The tuples, one for each block; empty without a protection format.
    pub tags: Slice,
}

#[derive(Clone, Debug)]
enum Segments {
    One(Segment),
    Many(Arc<[Segment]>),
}

impl Sealed {
    /// Computes the tags of `data`, whose length must be a multiple of the block size.
    ///
    /// # Panics
    /// If the length of `data` is not a multiple of the block size: a bug of the caller, which no input causes.
    pub fn seal(data: Slice, size: BlockSize, format: Option<PiFormat>, with: &Tags) -> Sealed {
        assert_eq!(data.len() % size.bytes(), 0, "data must be whole blocks");
        let tags = match format {
            Some(format) => {
                let mut tags = Buffer::zeroed((data.len() >> size.shift()) * format.tuple_bytes());
                seal(format, size, &data, &mut tags, with);
                tags.freeze()
            }
            None => Slice::empty(),
        };
        Sealed::from_verified(data, tags, size, format, true)
    }

    /// Combines data and tags that this crate has sealed or checked.
    pub(crate) fn from_verified(
        data: Slice,
        tags: Slice,
        size: BlockSize,
        format: Option<PiFormat>,
        has_verified_guards: bool,
    ) -> Sealed {
        Sealed { segments: Segments::One(Segment { data, tags }), size, format, has_verified_guards }
    }

    /// The same blocks with other data, but with all that was known of the old data: simulates a fault after the last
    /// check. Only for the injection of faults.
    ///
    /// # Panics
    /// If the data have another length: a bug of the caller, which no input causes.
    #[must_use]
    pub fn with_fault(self, data: Slice) -> Sealed {
        let tags = self.joined_tags();
        assert_eq!(data.len() >> self.size.shift(), self.blocks(), "as many blocks");
        Sealed::from_verified(data, tags, self.size, self.format, self.has_verified_guards)
    }

    /// True if every guard is known to match its data. False if a host requested no check of guards, or if a tuple
    /// disables the check of its block.
    pub fn has_verified_guards(&self) -> bool {
        self.has_verified_guards
    }

    /// The segments, in the order of their blocks.
    pub fn segments(&self) -> &[Segment] {
        match &self.segments {
            Segments::One(segment) => slice::from_ref(segment),
            Segments::Many(segments) => segments,
        }
    }

    /// The data and the tuple of each block, in order. The tuples are empty without a protection format.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let (size, tuple) = (self.size.bytes(), self.tuple_bytes());
        self.segments().iter().flat_map(move |segment| {
            let blocks = segment.data.chunks_exact(size).enumerate();
            blocks.map(move |(i, data)| (data, &segment.tags[i * tuple..(i + 1) * tuple]))
        })
    }

    /// The tuples of all blocks, in order; none without a protection format.
    pub fn tuples(&self) -> impl Iterator<Item = Tuple> {
        self.format.into_iter().flat_map(|format| {
            let segments = self.segments().iter();
            segments.flat_map(move |segment| {
                segment.tags.chunks_exact(format.tuple_bytes()).map(move |tuple| Tuple::read(format, tuple))
            })
        })
    }

    /// The data in one slice: shared if there is one segment, copied otherwise.
    pub fn joined_data(&self) -> Slice {
        self.joined(|segment| &segment.data)
    }

    /// The tuples in one slice: shared if there is one segment, copied otherwise.
    pub fn joined_tags(&self) -> Slice {
        self.joined(|segment| &segment.tags)
    }

    fn joined(&self, bytes: impl Fn(&Segment) -> &Slice) -> Slice {
        let segments = match self.segments() {
            [segment] => return bytes(segment).clone(),
            segments => segments.iter(),
        };
        let mut whole = Buffer::zeroed(segments.clone().map(|segment| bytes(segment).len()).sum());
        let mut at = 0;
        for part in segments.map(bytes) {
            whole[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        whole.freeze()
    }

    /// The size of a block.
    pub fn size(&self) -> BlockSize {
        self.size
    }

    /// The format of the tuples.
    pub fn format(&self) -> Option<PiFormat> {
        self.format
    }

    fn tuple_bytes(&self) -> usize {
        self.format.map_or(0, PiFormat::tuple_bytes)
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.segments().iter().map(|segment| segment.data.len()).sum::<usize>() >> self.size.shift()
    }

    /// `blocks` blocks, beginning with the one at index `first`. The bytes are shared.
    ///
    /// # Panics
    /// If the run is not within the data.
    pub fn slice(&self, first: usize, blocks: usize) -> Sealed {
        let segments = match &self.segments {
            Segments::One(segment) => Segments::One(self.cut(segment, first, blocks)),
            Segments::Many(segments) => self.cut_of(segments, first, blocks),
        };
        Sealed { segments, ..*self }
    }

    fn cut(&self, segment: &Segment, first: usize, blocks: usize) -> Segment {
        let cut = |bytes: &Slice, unit: usize| bytes.slice(first * unit..(first + blocks) * unit);
        let tags = if self.format.is_none() { Slice::empty() } else { cut(&segment.tags, self.tuple_bytes()) };
        Segment { data: cut(&segment.data, self.size.bytes()), tags }
    }

    fn cut_of(&self, segments: &[Segment], mut first: usize, blocks: usize) -> Segments {
        let (mut parts, mut left) = (Vec::new(), blocks);
        for segment in segments {
            let held = segment.data.len() >> self.size.shift();
            let taken = left.min(held.saturating_sub(first));
            if taken > 0 {
                parts.push(self.cut(segment, first, taken));
            }
            (first, left) = (first.saturating_sub(held), left - taken);
        }
        assert!(left == 0 && first == 0, "a run of {blocks} blocks beyond the data");
        Segments::new(parts)
    }

    /// Concatenates runs of blocks, without copying.
    ///
    /// # Panics
    /// If there is no part, or the parts differ in block size or format.
    pub fn join(parts: impl IntoIterator<Item = Sealed>) -> Sealed {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().expect("callers join at least one part");
        let mut segments = Vec::new();
        for part in parts {
            assert!(part.size == whole.size && part.format == whole.format, "parts of one size and format");
            if segments.is_empty() {
                segments.extend_from_slice(whole.segments());
            }
            segments.extend_from_slice(part.segments());
            whole.has_verified_guards &= part.has_verified_guards;
        }
        if !segments.is_empty() {
            whole.segments = Segments::new(segments);
        }
        whole
    }

    /// Index of the first block whose data, or with `with_tags` whose tuple, differs from that of `other`. Compares
    /// only as many blocks as both have.
    pub fn first_difference(&self, other: &Sealed, with_tags: bool) -> Option<usize> {
        if let ([one], [another]) = (self.segments(), other.segments())
            && one.data[..] == another.data[..]
            && (!with_tags || one.tags[..] == another.tags[..])
        {
            return None;
        }
        let mut pairs = iter::zip(self.iter(), other.iter());
        pairs.position(|(one, another)| one.0 != another.0 || with_tags && one.1 != another.1)
    }

    /// Continues a checksum: that of the bytes that `before` covers, followed by the data. If the guards are the same
    /// CRC and are known to match the data, the data are not read again.
    pub fn checksum_append(&self, kind: ChecksumKind, before: u64) -> u64 {
        let format = self.format.filter(|_| self.has_verified_guards);
        self.segments().iter().fold(before, |before, segment| {
            let of_guards = format.and_then(|format| kind.append_guards(before, format, self.size, &segment.tags));
            of_guards.unwrap_or_else(|| kind.append(before, &segment.data))
        })
    }

    /// The checksum of the data.
    pub fn checksum(&self, kind: ChecksumKind) -> u64 {
        self.checksum_append(kind, 0)
    }

    /// Each block's data followed by its tuple, as in an extended logical block. The bytes are shared.
    pub fn interleaved(&self) -> impl Iterator<Item = Slice> {
        let (size, tuple) = (self.size.bytes(), self.tuple_bytes());
        self.segments().iter().flat_map(move |segment| {
            (0..segment.data.len() / size).flat_map(move |i| {
                [segment.data.slice(i * size..(i + 1) * size), segment.tags.slice(i * tuple..(i + 1) * tuple)]
            })
        })
    }

    /// Moves the blocks to other addresses: adds one of `deltas` to each reference tag, modulo its width. `deltas` has
    /// one value per block, in order. A wrong tag stays wrong by the same difference. Tuples that disable the check do
    /// not change, and neither do blocks without tags or with reference tags that do not count blocks (Type 3).
    ///
    /// The data are shared and not read, so a guard stays as right or wrong as it was; but the new tuples count as
    /// unchecked ([`Sealed::has_verified_guards`]).
    ///
    /// # Panics
    /// If there are fewer values than blocks.
    pub fn with_ref_tags_shifted(self, deltas: impl Iterator<Item = u64> + Clone) -> Sealed {
        let Some(format) = self.format.filter(|format| format.protection().increments_ref_tag()) else { return self };
        if deltas.clone().take(self.blocks()).all(|delta| delta == 0) {
            return self;
        }
        let mut deltas = deltas;
        let mut shifted = |segment: &Segment| {
            let mut tags = Buffer::copy_from(&segment.tags);
            for bytes in tags.chunks_exact_mut(format.tuple_bytes()) {
                let (tuple, delta) = (Tuple::read(format, bytes), deltas.next().expect("one addend for each block"));
                if !tuple.is_escaped(format) {
                    Tuple { ref_tag: format.reference_tag(tuple.ref_tag, delta), ..tuple }.write(format, bytes);
                }
            }
            Segment { data: segment.data.clone(), tags: tags.freeze() }
        };
        let segments = match &self.segments {
            Segments::One(segment) => Segments::One(shifted(segment)),
            Segments::Many(segments) => Segments::Many(segments.iter().map(shifted).collect()),
        };
        Sealed { segments, has_verified_guards: false, ..self }
    }
}

impl Segments {
    fn new(mut segments: Vec<Segment>) -> Segments {
        match segments.len() {
            0 => Segments::One(Segment { data: Slice::empty(), tags: Slice::empty() }),
            1 => Segments::One(segments.remove(0)),
            _ => Segments::Many(segments.into()),
        }
    }
}

/// Blocks whose tags were not checked yet.
#[derive(Debug)]
pub struct Unverified {
    data: Slice,
    tags: Slice,
    size: BlockSize,
    format: Option<PiFormat>,
}

/// The lengths of data and tags do not match.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{data_bytes} bytes of data and {tag_bytes} bytes of tags are not whole blocks with one tag each")]
pub struct ShapeError {
    /// The number of bytes of data.
    pub data_bytes: usize,
    /// The number of bytes of tags.
    pub tag_bytes: usize,
}

impl Unverified {
    /// Separate data and tags; `tags` must be empty without a protection format.
    pub fn new(data: Slice, tags: Slice, size: BlockSize, format: Option<PiFormat>) -> Result<Unverified, ShapeError> {
        let required = (data.len() >> size.shift()) * format.map_or(0, PiFormat::tuple_bytes);
        if !data.len().is_multiple_of(size.bytes()) || tags.len() != required {
            return Err(ShapeError { data_bytes: data.len(), tag_bytes: tags.len() });
        }
        Ok(Unverified { data, tags, size, format })
    }

    /// Blocks that are each followed by their tuple, as in extended logical blocks. Copies data and tags into separate
    /// buffers.
    pub fn from_interleaved(bytes: &[u8], size: BlockSize, format: PiFormat) -> Result<Unverified, ShapeError> {
        let stride = size.bytes() + format.tuple_bytes();
        if !bytes.len().is_multiple_of(stride) {
            return Err(ShapeError { data_bytes: bytes.len(), tag_bytes: 0 });
        }
        let blocks = bytes.len() / stride;
        let (mut data, mut tags) =
            (Buffer::zeroed(blocks << size.shift()), Buffer::zeroed(blocks * format.tuple_bytes()));
        let apart = data.chunks_exact_mut(size.bytes()).zip(tags.chunks_exact_mut(format.tuple_bytes()));
        for (block, (data, tuple)) in bytes.chunks_exact(stride).zip(apart) {
            data.copy_from_slice(&block[..size.bytes()]);
            tuple.copy_from_slice(&block[size.bytes()..]);
        }
        Ok(Unverified { data: data.freeze(), tags: tags.freeze(), size, format: Some(format) })
    }

    /// Checks the tags against the data.
    ///
    /// # Errors
    /// Every block that does not match, with its first field that is wrong.
    pub fn verify(self, checks: &Checks) -> Result<Sealed, Vec<Mismatch>> {
        let mut mismatches = Vec::new();
        if let Some(format) = self.format {
            verify(format, self.size, &self.data, &self.tags, checks, &mut |mismatch| mismatches.push(mismatch));
        }
        if mismatches.is_empty() { Ok(self.into_sealed(checks)) } else { Err(mismatches) }
    }

    /// Converts blocks that passed these checks.
    pub(crate) fn into_sealed(self, checks: &Checks) -> Sealed {
        let has_verified_guards = checks.guard && !self.has_escapes();
        Sealed::from_verified(self.data, self.tags, self.size, self.format, has_verified_guards)
    }

    pub(crate) fn data(&self) -> &Slice {
        &self.data
    }

    pub(crate) fn tags(&self) -> &Slice {
        &self.tags
    }

    pub(crate) fn size(&self) -> BlockSize {
        self.size
    }

    pub(crate) fn format(&self) -> Option<PiFormat> {
        self.format
    }

    /// True if any tuple disables the check of its block.
    pub(crate) fn has_escapes(&self) -> bool {
        self.format.is_some_and(|format| tuple::any_is_escaped(format, &self.tags))
    }
}

impl Sealed {
    /// Creates the tags of `data` like [`Sealed::seal`], but from the CRC-32C of each block instead of from the data.
    /// The CRCs must be those of exactly these bytes.
    ///
    /// # Panics
    /// If the guard of `format` is not CRC-32C, if `data` is not a whole number of blocks, or if there is not one CRC
    /// for each of them: a bug of the caller, which no input causes.
    pub fn seal_with_crcs(data: Slice, size: BlockSize, format: PiFormat, with: &Tags, crcs: &[u32]) -> Sealed {
        assert_crcs(format, size, &data, crcs);
        let mut tags = Buffer::zeroed(crcs.len() * format.tuple_bytes());
        let fixed = Tuple { guard: 0, app_tag: with.app_tag, storage_tag: with.storage_tag, ref_tag: 0 };
        let fixed = tuple::pack(format, &fixed);
        for (block, (crc, bytes)) in crcs.iter().zip(tags.chunks_exact_mut(Crc32c::TUPLE_BYTES)).enumerate() {
            let reference = u128::from(format.reference_tag(with.initial_ref_tag, block as u64));
            tuple::store(Crc32c::TUPLE_BYTES, u128::from(*crc) << Crc32c::GUARD_SHIFT | fixed | reference, bytes);
        }
        Sealed::from_verified(data, tags.freeze(), size, Some(format), true)
    }

    /// The CRC-32C of each block's data, if its tags prove it: only with the 32-bit guard, and only if every guard was
    /// computed from the data or compared with it.
    pub fn block_crcs(&self) -> Option<impl Iterator<Item = u32>> {
        let has_crcs = self.format.is_some_and(|format| format.guard() == GuardKind::Crc32c);
        if !has_crcs || !self.has_verified_guards {
            return None;
        }
        Some(self.tuples().map(|tuple| tuple.guard as u32))
    }
}

impl Unverified {
    /// Checks the tags like [`Unverified::verify`], but compares guards with the given CRC-32C of each block instead of
    /// reading the data. The CRCs must be those of exactly these bytes.
    ///
    /// # Errors
    /// Every block that does not match, with its first field that is wrong.
    ///
    /// # Panics
    /// If the guard is not CRC-32C, or if there is not one CRC for each block: a bug of the caller, which no input
    /// causes.
    pub fn verify_with_crcs(self, checks: &Checks, crcs: &[u32]) -> Result<Sealed, Vec<Mismatch>> {
        let format = self.format().expect("a caller with CRCs has blocks with guards");
        assert_crcs(format, self.size(), self.data(), crcs);
        let compiled = CompiledChecks::new(format, checks);
        let mut mismatches = Vec::new();
        for (block, (crc, bytes)) in crcs.iter().zip(self.tags().chunks_exact(Crc32c::TUPLE_BYTES)).enumerate() {
            let found = tuple::load(Crc32c::TUPLE_BYTES, bytes);
            let required = compiled.tuple(block, u128::from(*crc) << Crc32c::GUARD_SHIFT);
            if !compiled.is_escaped(found) && !compiled.matches(found, required) {
                mismatches.push(compiled.mismatch(block, found, required));
            }
        }
        if mismatches.is_empty() { Ok(self.into_sealed(checks)) } else { Err(mismatches) }
    }
}

/// Panics unless the guard is CRC-32C and there is one CRC for each block; debug builds check that the CRCs are right.
fn assert_crcs(format: PiFormat, size: BlockSize, data: &[u8], crcs: &[u32]) {
    assert_eq!(format.guard(), GuardKind::Crc32c, "only a CRC-32C can stand for the guard");
    assert_eq!(crcs.len() * size.bytes(), data.len(), "one CRC for each block");
    debug_assert!(
        data.chunks_exact(size.bytes()).map(guard::crc32c).eq(crcs.iter().copied()),
        "the CRCs are not those of the data"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Field, Masked, ProtectionType};
    use proptest::prelude::*;

    const SIZE: BlockSize = BlockSize::B512;
    const BLOCKS: usize = 4;

    fn format(kind: GuardKind, protection: ProtectionType) -> PiFormat {
        PiFormat::with_default_storage_tag(kind, protection)
    }

    fn block_crcs(data: &[u8]) -> Vec<u32> {
        data.chunks(SIZE.bytes()).map(guard::crc32c).collect()
    }

    fn noise(seed: u8) -> Slice {
        let bytes: Vec<u8> = (0..BLOCKS * SIZE.bytes()).map(|i| (i * 13 + i / 77) as u8 ^ seed).collect();
        Slice::copy_from(&bytes)
    }

    fn unverified(data: &Slice, tags: &[u8], format: PiFormat) -> Unverified {
        Unverified::new(data.clone(), Slice::copy_from(tags), SIZE, Some(format)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Given CRCs seal and check exactly like computed ones, for any wrong byte of the tags and any checks.
        #[test]
        fn given_crcs_work_like_computed_ones(
            protection in prop::sample::select(&ProtectionType::ALL[..]), with in any::<(u16, u64, u64)>(),
            wrong in any::<(prop::sample::Index, u8)>(), asked in any::<(bool, Option<u16>, Option<u64>)>(),
        ) {
            let format = format(GuardKind::Crc32c, protection);
            let data = noise(with.0 as u8);
            let with = Tags { app_tag: with.0, storage_tag: with.1, initial_ref_tag: with.2 };
            let made = Sealed::seal(data.clone(), SIZE, Some(format), &with);
            let given = Sealed::seal_with_crcs(data.clone(), SIZE, format, &with, &block_crcs(&data));
            prop_assert_eq!(&made.joined_tags()[..], &given.joined_tags()[..]);
            prop_assert_eq!(made.has_verified_guards(), given.has_verified_guards());
            let mut tags = made.joined_tags().to_vec();
            tags[wrong.0.index(BLOCKS * 16)] ^= wrong.1;
            let app_tag = asked.1.map(|expected| Masked { expected, mask: u16::MAX });
            let checks = Checks { guard: asked.0, app_tag, initial_ref_tag: asked.2.or(Some(with.initial_ref_tag)), ..Checks::NONE };
            let by_data = unverified(&data, &tags, format).verify(&checks);
            let by_crcs = unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data));
            match (by_data, by_crcs) {
                (Ok(one), Ok(other)) => prop_assert_eq!(one.has_verified_guards(), other.has_verified_guards()),
                (one, other) => prop_assert_eq!(one.err(), other.err()),
            }
        }
    }

    #[test]
    fn a_guard_that_is_not_the_crc_is_found() {
        let (format, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(1));
        let mut tags = Sealed::seal(data.clone(), SIZE, Some(format), &Tags::default()).joined_tags().to_vec();
        let checks = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data)).is_ok());
        tags[2 * 16 + 3] ^= 1;
        let found = unverified(&data, &tags, format).verify_with_crcs(&checks, &block_crcs(&data)).unwrap_err();
        assert_eq!(found.iter().map(|bad| (bad.block, bad.field)).collect::<Vec<_>>(), [(2, Field::Guard)]);
    }

    #[test]
    fn only_guards_that_were_compared_are_crcs() {
        let (crc32c, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(2));
        let sealed = Sealed::seal(data.clone(), SIZE, Some(crc32c), &Tags::default());
        assert_eq!(sealed.block_crcs().unwrap().collect::<Vec<_>>(), block_crcs(&data));
        assert_eq!(sealed.slice(1, 2).block_crcs().unwrap().collect::<Vec<_>>(), block_crcs(&data)[1..3]);
        let full = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, &sealed.joined_tags(), crc32c).verify(&full).unwrap().block_crcs().is_some());
        assert!(
            unverified(&data, &sealed.joined_tags(), crc32c).verify(&Checks::NONE).unwrap().block_crcs().is_none(),
            "unchecked"
        );
        let crc16 =
            Sealed::seal(data.clone(), SIZE, Some(format(GuardKind::Crc16, ProtectionType::Type1)), &Tags::default());
        assert!(crc16.block_crcs().is_none(), "another guard");
        assert!(Sealed::seal(data, SIZE, None, &Tags::default()).block_crcs().is_none(), "no guard");
    }

    /// Blocks whose tuples disable the check pass with any data, so no checksum may be combined from their guards.
    #[test]
    fn escaped_blocks_have_no_crcs() {
        let (format, data) = (format(GuardKind::Crc32c, ProtectionType::Type1), noise(3));
        let mut tags = Sealed::seal(data.clone(), SIZE, Some(format), &Tags::default()).joined_tags().to_vec();
        tags[16..32].fill(0xFF);
        let full = Checks { guard: true, ..Checks::NONE };
        assert!(unverified(&data, &tags, format).verify(&full).unwrap().block_crcs().is_none());
        assert!(
            unverified(&data, &tags, format)
                .verify_with_crcs(&full, &block_crcs(&data))
                .unwrap()
                .block_crcs()
                .is_none()
        );
        let rest = unverified(&data, &tags, format).verify(&full).unwrap();
        assert!(Sealed::join([rest.slice(0, 1), rest.slice(2, 2)]).block_crcs().is_none());
    }

    #[test]
    #[should_panic(expected = "stand for the guard")]
    fn crcs_of_another_kind_are_rejected() {
        Sealed::seal_with_crcs(
            noise(4),
            SIZE,
            format(GuardKind::Crc64, ProtectionType::Type1),
            &Tags::default(),
            &[0; BLOCKS],
        );
    }

    #[test]
    #[should_panic(expected = "one CRC for each block")]
    fn a_block_without_a_crc_is_rejected() {
        let (data, crc32c) = (noise(5), format(GuardKind::Crc32c, ProtectionType::Type1));
        Sealed::seal_with_crcs(data.clone(), SIZE, crc32c, &Tags::default(), &block_crcs(&data)[1..]);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "not those of the data")]
    fn data_that_changed_after_its_crc_was_made_is_noticed_by_debug_builds() {
        let crc32c = format(GuardKind::Crc32c, ProtectionType::Type1);
        Sealed::seal_with_crcs(noise(6), SIZE, crc32c, &Tags::default(), &block_crcs(&noise(7)));
    }
}
