//! Proof types: data that was checked, and data that was not.
//!
//! [`Unverified`] is what comes off a wire or a disk. [`Sealed`] can only be had by making tags ([`Sealed::seal`]) or by
//! checking them ([`Unverified::verify`]), so a function that takes one need not check again, and a path that forgets to
//! check does not compile. Data and tags lie apart, because media want the data naturally aligned; buffers that interleave
//! them, as wires do, are taken apart while they are checked.

use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::BlockSize;

use crate::{Checks, Mismatch, PiFormat, Tags, Tuple, seal, verify};

/// Blocks whose tags match their data, as far as was asked. Without a protection format there is nothing to match.
#[derive(Clone, Debug)]
pub struct Sealed {
    data: Slice,
    tags: Slice,
    size: BlockSize,
    format: Option<PiFormat>,
    has_verified_guards: bool,
}

impl Sealed {
    /// Makes the tags of `data`, whose length must be a multiple of the block size.
    ///
    /// # Panics
    /// When the length of `data` is no multiple of the block size: a caller's bug, not an input's.
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
        Sealed { data, tags, size, format, has_verified_guards: true }
    }

    /// Puts together what was made or checked in this crate.
    pub(crate) fn checked(
        data: Slice,
        tags: Slice,
        size: BlockSize,
        format: Option<PiFormat>,
        guards_hold: bool,
    ) -> Sealed {
        Sealed { data, tags, size, format, has_verified_guards: guards_hold }
    }

    /// Whether every guard is known to match its data. Not so where a host asked for no check of guards, or where a tuple
    /// escapes checking.
    pub fn has_verified_guards(&self) -> bool {
        self.has_verified_guards
    }

    /// The data, block after block.
    pub fn data(&self) -> &Slice {
        &self.data
    }

    /// The tuples, one a block; empty without a protection format.
    pub fn tags(&self) -> &Slice {
        &self.tags
    }

    /// The data and the tuples.
    pub fn into_parts(self) -> (Slice, Slice) {
        (self.data, self.tags)
    }

    /// The size of a block.
    pub fn size(&self) -> BlockSize {
        self.size
    }

    /// The format of the tuples.
    pub fn format(&self) -> Option<PiFormat> {
        self.format
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.data.len() >> self.size.shift()
    }

    /// `blocks` blocks from the one with index `first`, sharing the bytes.
    ///
    /// # Panics
    /// When the run is not within the data.
    pub fn slice(&self, first: usize, blocks: usize) -> Sealed {
        let cut = |bytes: &Slice, unit: usize| bytes.slice(first * unit..(first + blocks) * unit);
        Sealed {
            data: cut(&self.data, self.size.bytes()),
            tags: self.format.map_or_else(Slice::empty, |format| cut(&self.tags, format.tuple_bytes())),
            ..*self
        }
    }

    /// Runs of blocks put behind one another, by copying.
    ///
    /// # Panics
    /// When there is no part, or the parts differ in block size or format.
    pub fn join(parts: &[Sealed]) -> Sealed {
        Sealed::join_in(parts, Buffer::zeroed)
    }

    /// The same in memory that `take` gives, which is asked for as many bytes as it has to give. Fresh memory costs more than
    /// the copy, so whoever joins often gives memory that was used before.
    ///
    /// # Panics
    /// When there is no part, the parts differ in block size or format, or `take` gives another length.
    pub fn join_in(parts: &[Sealed], take: impl Fn(usize) -> Buffer) -> Sealed {
        let first = parts.first().expect("callers join at least one part");
        assert!(parts.iter().all(|part| part.size == first.size && part.format == first.format), "parts of one shape");
        if parts.len() == 1 {
            return first.clone();
        }
        let concat = |bytes: fn(&Sealed) -> &Slice| {
            let mut whole = take(parts.iter().map(|part| bytes(part).len()).sum());
            let mut at = 0;
            for part in parts {
                whole[at..at + bytes(part).len()].copy_from_slice(bytes(part));
                at += bytes(part).len();
            }
            assert_eq!(at, whole.len(), "memory of the length asked for");
            whole.freeze()
        };
        let guards_hold = parts.iter().all(Sealed::has_verified_guards);
        Sealed { data: concat(Sealed::data), tags: concat(Sealed::tags), has_verified_guards: guards_hold, ..*first }
    }

    /// The same data where its blocks have other addresses: with something added to each reference tag, modulo its width.
    /// `gains` has one addend for each block, in order. A wrong tag stays exactly as wrong as it was. Tuples that switch
    /// checking off stay, and so does everything where reference tags do not count blocks (Type 3) or there are no tags.
    ///
    /// Data is shared and not read, so guards are as right as before; but new tuples count as unchecked
    /// ([`Sealed::has_verified_guards`]).
    ///
    /// # Panics
    /// When there are fewer addends than blocks.
    pub fn with_ref_tags_shifted(self, gains: impl Iterator<Item = u64> + Clone) -> Sealed {
        let Some(format) = self.format.filter(|format| format.protection().increments_ref_tag()) else { return self };
        if gains.clone().take(self.blocks()).all(|gain| gain == 0) {
            return self;
        }
        let (mut tags, mut gains) = (Buffer::copy_from(&self.tags), gains);
        for bytes in tags.chunks_exact_mut(format.tuple_bytes()) {
            let (tuple, gain) = (Tuple::read(format, bytes), gains.next().expect("one addend for each block"));
            if !tuple.is_escaped(format) {
                Tuple { ref_tag: format.reference_tag(tuple.ref_tag, gain), ..tuple }.write(format, bytes);
            }
        }
        Sealed { tags: tags.freeze(), has_verified_guards: false, ..self }
    }
}

/// Blocks with tags that nobody has checked yet.
#[derive(Debug)]
pub struct Unverified {
    data: Slice,
    tags: Slice,
    size: BlockSize,
    format: Option<PiFormat>,
}

/// Data and tags whose lengths do not belong together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{data_bytes} bytes of data and {tag_bytes} bytes of tags are not whole blocks with one tag each")]
pub struct ShapeError {
    /// Bytes of data given.
    pub data_bytes: usize,
    /// Bytes of tags given.
    pub tag_bytes: usize,
}

impl Unverified {
    /// Data and tags that lie apart; `tags` must be empty without a protection format.
    pub fn new(data: Slice, tags: Slice, size: BlockSize, format: Option<PiFormat>) -> Result<Unverified, ShapeError> {
        let due = (data.len() >> size.shift()) * format.map_or(0, PiFormat::tuple_bytes);
        if !data.len().is_multiple_of(size.bytes()) || tags.len() != due {
            return Err(ShapeError { data_bytes: data.len(), tag_bytes: tags.len() });
        }
        Ok(Unverified { data, tags, size, format })
    }

    /// Blocks each followed by its tuple, as an extended logical block carries them. Copies both apart.
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

    /// Checks the tags against the data, as `checks` asks.
    ///
    /// # Errors
    /// Every block that fails, with the first field of it that does.
    pub fn verify(self, checks: &Checks) -> Result<Sealed, Vec<Mismatch>> {
        let mut mismatches = Vec::new();
        if let Some(format) = self.format {
            verify(format, self.size, &self.data, &self.tags, checks, &mut |mismatch| mismatches.push(mismatch));
        }
        if mismatches.is_empty() { Ok(self.into_sealed(checks)) } else { Err(mismatches) }
    }

    /// After nothing wrong was found by these checks.
    pub(crate) fn into_sealed(self, checks: &Checks) -> Sealed {
        let guards_hold = checks.guard && !self.escapes();
        Sealed::checked(self.data, self.tags, self.size, self.format, guards_hold)
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

    /// Whether any tuple says that its block is not to be checked.
    fn escapes(&self) -> bool {
        self.format.is_some_and(|format| {
            self.tags.chunks_exact(format.tuple_bytes()).any(|tags| Tuple::read(format, tags).is_escaped(format))
        })
    }
}
