//! The data of a file: in the item itself, in an extent, a hole, or an extent that was allocated and never written.

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{DecodeError, head, whole};

/// How the data of an extent are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Compression {
    /// Not compressed.
    None,
    /// Deflate in the frame of RFC 1950.
    Zlib,
    /// LZO1X, in segments of a sector.
    Lzo,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// All, in the order of their numbers.
    pub const ALL: [Compression; 4] = [Compression::None, Compression::Zlib, Compression::Lzo, Compression::Zstd];

    /// The one with this number.
    pub fn from_number(number: u8) -> Option<Compression> {
        Compression::ALL.get(usize::from(number)).copied()
    }
}

/// The fixed first part of all file extents, 21 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FileExtentHead {
    /// The transaction that was open when the data were written.
    pub generation: U64,
    /// Bytes of the whole extent, uncompressed.
    pub ram_bytes: U64,
    /// The number of a [`Compression`].
    pub compression: u8,
    /// 0.
    pub encryption: u8,
    /// 0.
    pub other_encoding: U16,
    /// 0 inline, 1 regular, 2 allocated and not written.
    pub kind: u8,
}

/// Where the data are, for extents outside the item, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentLocation {
    /// The logical address of the whole extent; 0 for a hole.
    pub disk_bytenr: U64,
    /// Bytes of the whole extent, as stored.
    pub disk_num_bytes: U64,
    /// The first byte of the extent that the file uses, counted in the uncompressed extent.
    pub offset: U64,
    /// The number of bytes from there that the file uses, uncompressed.
    pub num_bytes: U64,
}

impl ExtentLocation {
    /// True if it has no data and reads as zeroes.
    pub fn is_hole(&self) -> bool {
        self.disk_bytenr.get() == 0
    }
}

/// The content of a file from the key's offset on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileExtent<'a> {
    /// Data within the item, as stored: compressed if the head says so.
    Inline(&'a FileExtentHead, &'a [u8]),
    /// Data in an extent, or a hole.
    Regular(&'a FileExtentHead, &'a ExtentLocation),
    /// An allocated extent that was never written; reads as zeroes.
    Prealloc(&'a FileExtentHead, &'a ExtentLocation),
}

/// The numbers of the three kinds.
pub mod kind {
    /// Data within the item.
    pub const INLINE: u8 = 0;
    /// Data in an extent, or a hole.
    pub const REGULAR: u8 = 1;
    /// An extent that was allocated and not written.
    pub const PREALLOC: u8 = 2;
}

impl<'a> FileExtent<'a> {
    const WHAT: &'static str = "file extent";

    /// Reads the item.
    ///
    /// # Errors
    /// If the kind is unknown, or if a kind with a location does not have 53 bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<FileExtent<'a>, DecodeError> {
        let (fixed, rest) = head::<FileExtentHead>(Self::WHAT, bytes, 0)?;
        match fixed.kind {
            kind::INLINE => Ok(FileExtent::Inline(fixed, rest)),
            kind::REGULAR => Ok(FileExtent::Regular(fixed, whole("location of a file extent", rest)?)),
            kind::PREALLOC => Ok(FileExtent::Prealloc(fixed, whole("location of a file extent", rest)?)),
            other => Err(DecodeError::Layout { what: Self::WHAT, field: "type", value: u64::from(other) }),
        }
    }

    /// The fixed part.
    pub fn head(&self) -> &'a FileExtentHead {
        match self {
            FileExtent::Inline(head, _) | FileExtent::Regular(head, _) | FileExtent::Prealloc(head, _) => head,
        }
    }

    /// The location of the data, if not in the item.
    pub fn location(&self) -> Option<&'a ExtentLocation> {
        match self {
            FileExtent::Inline(..) => None,
            FileExtent::Regular(_, location) | FileExtent::Prealloc(_, location) => Some(location),
        }
    }

    /// The number of bytes of the file that it covers; for an inline extent the uncompressed size that it records.
    pub fn file_bytes(&self) -> u64 {
        self.location().map_or(self.head().ram_bytes, |location| location.num_bytes).get()
    }

    /// Appends its bytes.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.head().as_bytes());
        match self {
            FileExtent::Inline(_, data) => out.extend_from_slice(data),
            FileExtent::Regular(_, location) | FileExtent::Prealloc(_, location) => {
                out.extend_from_slice(location.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head_of(kind: u8, ram_bytes: u64) -> FileExtentHead {
        FileExtentHead {
            generation: 7.into(),
            ram_bytes: ram_bytes.into(),
            compression: 0,
            encryption: 0,
            other_encoding: 0.into(),
            kind,
        }
    }

    #[test]
    fn an_inline_extent_is_twenty_one_bytes_and_its_data() {
        let bytes = [head_of(kind::INLINE, 5).as_bytes(), b"hello"].concat();
        let extent = FileExtent::decode(&bytes).unwrap();
        assert!(matches!(extent, FileExtent::Inline(_, b"hello")));
        assert_eq!((bytes.len(), extent.file_bytes(), extent.location()), (26, 5, None));
    }

    #[test]
    fn other_kinds_have_a_location_and_nothing_else() {
        let location = ExtentLocation {
            disk_bytenr: 13_631_488.into(),
            disk_num_bytes: 8192.into(),
            offset: 4096.into(),
            num_bytes: 4096.into(),
        };
        for kind in [kind::REGULAR, kind::PREALLOC] {
            let bytes = [head_of(kind, 8192).as_bytes(), location.as_bytes()].concat();
            let extent = FileExtent::decode(&bytes).unwrap();
            assert_eq!((bytes.len(), extent.file_bytes(), extent.location()), (53, 4096, Some(&location)));
            let mut again = Vec::new();
            extent.write(&mut again);
            assert_eq!(again, bytes);
            assert!(FileExtent::decode(&bytes[..52]).is_err());
            assert!(FileExtent::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
        assert!(ExtentLocation { disk_bytenr: 0.into(), ..location }.is_hole() && !location.is_hole());
    }

    #[test]
    fn an_unknown_kind_and_a_cut_head_are_refused() {
        let error = FileExtent::decode(head_of(3, 0).as_bytes()).unwrap_err();
        assert_eq!(error, DecodeError::Layout { what: "file extent", field: "type", value: 3 });
        assert!(FileExtent::decode(&head_of(0, 0).as_bytes()[..20]).is_err());
    }
}
