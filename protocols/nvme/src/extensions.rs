//! Sealblock's vendor specific extensions: the command Checksum, the reserved area beside the blocks of a namespace, and the
//! log page that reports both. `docs/formats/vendor-extensions.md` specifies their bytes.
//!
//! Opcodes and identifiers from C0h up are vendor specific. So a host uses them only on a namespace whose log page C1h has
//! the signature and the bits; to read that page has no effect, whatever it means for another vendor.

use sealblock_integrity::guard;

use crate::error::Invalid;
use crate::features::FeatureId;
use crate::wire::{TooShort, flags, layout};

flags! {
    /// Extensions that a namespace supports.
    pub struct Extensions(u32) {
        /// The I/O command Checksum.
        CHECKSUM = 0,
        /// The features of its reserved area.
        RESERVED = 1,
        /// Dword 0 of the completion of a Verify reports what was not checked.
        COVERAGE = 2,
        /// A Verify or Read checks every block against a seal, even if the namespace has no protection information.
        SEALS = 3,
        /// The namespace has several copies; a Checksum does not report which of them it did not check.
        COPIES = 4,
        /// Checksum of the kind CRC-32C too; means nothing without CHECKSUM.
        CHECKSUM_CRC32C = 5,
        /// The feature End Controller, by which a host ends its lost controller and has nothing of it executed any more.
        FENCE = 6,
        /// A Read, Verify or Checksum with the field CEB also checks blocks whose tuples disable checks.
        ESCAPES = 7,
    }
}

impl Extensions {
    /// Where the bits begin that say why blocks of the namespace may be older than what was written to it.
    const OLDER_SHIFT: u32 = 8;
    /// All of these, known and unknown: a host takes any of them for content that may be older.
    const OLDER: Extensions = Extensions::from_bits_retain(0xFF << Extensions::OLDER_SHIFT);

    /// The same, with the bits that say why blocks of the namespace may be older; 0 where its content is current.
    #[must_use]
    pub fn with_older(self, bits: u8) -> Extensions {
        self | Extensions::from_bits_retain(u32::from(bits) << Extensions::OLDER_SHIFT)
    }

    /// The bits that say why blocks of the namespace may be older; 0 where its content is current.
    pub const fn older(self) -> u8 {
        (self.bits() >> Extensions::OLDER_SHIFT) as u8
    }
}

layout! {
    /// The page Extensions of one namespace.
    pub struct ExtensionsLog[64] {
        /// Signature, see [`ExtensionsLog::SIGNATURE`].
        0 => signature: [u8; 8],
        /// Version, see [`ExtensionsLog::VERSION`].
        8 => version: u16,
        /// NSID: the namespace.
        12 => nsid: u32,
        /// Extensions of the namespace.
        16 => extensions: Extensions,
        /// Bytes of each frame, in the order of [`ReservedArea::ALL`]; 0 without RESERVED.
        20 => reserved_bytes: [u32; 2],
        /// Bytes of the frame of a bitmap page; 0 without RESERVED.
        28 => page_bytes: u32,
        /// Number of bitmap pages in the reserved area.
        32 => pages: u32,
        /// The identity of the namespace at another target that this namespace is; zeroes if it is none.
        36 => origin: [u8; 16],
        /// How many identities follow the page: that of the device, and of all those at other targets that it lies on.
        52 => identities: u32,
        /// A number that is another one if something else is in the place of what the namespace lies on; 0 if unknown.
        56 => content: u64,
    }
}

impl ExtensionsLog {
    /// Magic of the page.
    pub const SIGNATURE: [u8; 8] = *b"SBEXTEND";
    /// The version of this layout.
    pub const VERSION: u16 = 1;
    /// A namespace that lists more identities is none that a host uses.
    pub const MAX_IDENTITIES: u32 = 1024;

    /// The page of a namespace with these extensions, and this many bitmap pages if it has a reserved area.
    pub fn new(nsid: u32, extensions: Extensions, pages: u32) -> ExtensionsLog {
        let has_reserved = extensions.contains(Extensions::RESERVED);
        let reserved_bytes = ReservedArea::ALL.map(|area| if has_reserved { area.frame_bytes() as u32 } else { 0 });
        let (signature, version) = (ExtensionsLog::SIGNATURE, ExtensionsLog::VERSION);
        let (page_bytes, pages) =
            if has_reserved { (ReservedArea::Bitmap.frame_bytes() as u32, pages) } else { (0, 0) };
        ExtensionsLog {
            signature,
            version,
            nsid,
            extensions,
            reserved_bytes,
            page_bytes,
            pages,
            origin: [0; 16],
            identities: 0,
            content: 0,
        }
    }

    /// The same page of a namespace that is one at another target.
    pub fn with_origin(self, origin: Option<[u8; 16]>) -> ExtensionsLog {
        ExtensionsLog { origin: origin.unwrap_or_default(), ..self }
    }

    /// The same page of a namespace with this number of its content.
    pub fn with_content(self, content: Option<u64>) -> ExtensionsLog {
        ExtensionsLog { content: content.unwrap_or_default(), ..self }
    }

    /// The number of the content of namespace `nsid` by this page.
    pub fn content(page: &[u8], nsid: u32) -> Option<u64> {
        ExtensionsLog::known(page, nsid).map(|log| log.content).filter(|content| *content != 0)
    }

    /// The bytes of the page, with the identities of the device and of those at other targets that it lies on.
    pub fn encode_with(self, identities: &[[u8; 16]]) -> Vec<u8> {
        let page = ExtensionsLog { identities: identities.len() as u32, ..self };
        [page.encode().as_slice(), identities.as_flattened()].concat()
    }

    /// The number of identities that follow this page of namespace `nsid`.
    pub fn identity_count(page: &[u8], nsid: u32) -> u32 {
        ExtensionsLog::known(page, nsid).map_or(0, |log| log.identities)
    }

    /// The identities that follow this page of namespace `nsid`, as far as they were read.
    pub fn identities(page: &[u8], nsid: u32) -> Vec<[u8; 16]> {
        let (listed, _) = page.get(ExtensionsLog::BYTES..).unwrap_or_default().as_chunks();
        listed.iter().take(ExtensionsLog::identity_count(page, nsid) as usize).copied().collect()
    }

    /// The bytes of the page with so many identities behind it.
    pub const fn bytes_with(identities: u32) -> u64 {
        ExtensionsLog::BYTES as u64 + 16 * identities as u64
    }

    /// The identity of the namespace at another target that namespace `nsid` is by this page.
    pub fn origin(page: &[u8], nsid: u32) -> Option<[u8; 16]> {
        ExtensionsLog::known(page, nsid).map(|log| log.origin).filter(|origin| *origin != [0; 16])
    }

    /// The extensions of namespace `nsid` by this page: none if it is another vendor's page, another version, too short, or
    /// about another namespace; no reserved area of another size.
    pub fn read(page: &[u8], nsid: u32) -> Extensions {
        let Some(log) = ExtensionsLog::known(page, nsid) else { return Extensions::NONE };
        let checks = Extensions::CHECKSUM | Extensions::COVERAGE | Extensions::SEALS | Extensions::COPIES;
        let checks = checks | Extensions::FENCE | Extensions::ESCAPES;
        let has_reserved = log.reserved_bytes == ReservedArea::ALL.map(|area| area.frame_bytes() as u32);
        let has_checksum = log.extensions.contains(Extensions::CHECKSUM);
        let checks = if has_checksum { checks | Extensions::CHECKSUM_CRC32C } else { checks };
        let checks = checks | Extensions::OLDER;
        let usable = if has_reserved { checks | Extensions::RESERVED } else { checks };
        Extensions::from_bits_retain(log.extensions.bits() & usable.bits())
    }

    /// The number of bitmap pages of namespace `nsid` by this page: none with frames of another size.
    pub fn bitmap_pages(page: &[u8], nsid: u32) -> u32 {
        let log =
            ExtensionsLog::known(page, nsid).filter(|_| ExtensionsLog::read(page, nsid).contains(Extensions::RESERVED));
        let log = log.filter(|log| log.page_bytes == ReservedArea::Bitmap.frame_bytes() as u32);
        log.map_or(0, |log| log.pages)
    }

    /// The page, if it is sealblock's and about that namespace.
    fn known(page: &[u8], nsid: u32) -> Option<ExtensionsLog> {
        ExtensionsLog::decode(page).ok().filter(|log| {
            (log.signature, log.version, log.nsid) == (ExtensionsLog::SIGNATURE, ExtensionsLog::VERSION, nsid)
        })
    }
}

/// A part of a namespace's reserved area: a feature with data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReservedArea {
    /// The label of the group of which the namespace is a member.
    Group,
    /// The state of its scrub.
    Scrub,
    /// A page of the group's bitmaps; dword 11 says which.
    Bitmap,
}

layout! {
    /// Header of a frame, before the bytes of the area.
    pub struct ReservedHeader[64] {
        /// Signature, see [`ReservedHeader::SIGNATURE`].
        0 => signature: [u8; 8],
        /// Version, see [`ReservedHeader::VERSION`].
        8 => version: u16,
        /// FID of the area.
        10 => feature: u8,
        /// Bytes that the area holds; 0 if it was never written.
        12 => length_bytes: u32,
        /// CRC-64/NVME of these bytes.
        16 => crc64: u64,
    }
}

/// Why the frame of a reserved area is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReservedError {
    /// The length is not the frame's.
    #[error("the frame has {needed_bytes} bytes, and there are {got_bytes}")]
    Length {
        /// Bytes of the frame.
        needed_bytes: u64,
        /// Bytes there were.
        got_bytes: u64,
    },
    /// The frame has a bad magic.
    #[error("the frame has a bad magic")]
    Signature,
    /// The version is unknown.
    #[error("unknown version {0} of the reserved area")]
    Version(u16),
    /// The frame is of another area.
    #[error("the frame is of feature {0:#04x}")]
    Feature(u8),
    /// The header announces more bytes than the area holds.
    #[error("{0} bytes are announced, which is more than the area holds")]
    TooLong(u32),
    /// The checksum is not that of the bytes.
    #[error("the checksum is {stored:#018x} and that of the bytes is {computed:#018x}")]
    Checksum {
        /// The CRC in the header.
        stored: u64,
        /// The CRC of the bytes.
        computed: u64,
    },
}

impl ReservedHeader {
    /// Magic of a frame.
    pub const SIGNATURE: [u8; 8] = *b"SBANNEX\0";
    /// The version of this layout.
    pub const VERSION: u16 = 1;
}

impl ReservedArea {
    /// The areas that every reserved area has.
    pub const ALL: [ReservedArea; 2] = [ReservedArea::Group, ReservedArea::Scrub];

    /// The area of a feature, if it is one.
    pub fn of_feature(feature: FeatureId) -> Option<ReservedArea> {
        let areas = [ReservedArea::Group, ReservedArea::Scrub, ReservedArea::Bitmap];
        areas.into_iter().find(|area| area.feature() == feature)
    }

    /// The feature of the area.
    pub const fn feature(self) -> FeatureId {
        match self {
            ReservedArea::Group => FeatureId::ReservedGroupLabel,
            ReservedArea::Scrub => FeatureId::ReservedScrubState,
            ReservedArea::Bitmap => FeatureId::ReservedBitmap,
        }
    }

    /// Bytes of a frame: the header and the whole area, whatever it holds.
    pub const fn frame_bytes(self) -> usize {
        match self {
            ReservedArea::Group => 20 << 10,
            ReservedArea::Scrub => 8 << 10,
            ReservedArea::Bitmap => (4 << 10) + ReservedHeader::BYTES,
        }
    }

    /// Maximum bytes that the area holds.
    pub const fn max_bytes(self) -> usize {
        self.frame_bytes() - ReservedHeader::BYTES
    }

    /// The frame of an area that holds `bytes`; `None` if there are more than it can hold.
    pub fn encode(self, bytes: &[u8]) -> Option<Vec<u8>> {
        if bytes.len() > self.max_bytes() {
            return None;
        }
        let head = ReservedHeader {
            signature: ReservedHeader::SIGNATURE,
            version: ReservedHeader::VERSION,
            feature: self.feature().code(),
            length_bytes: bytes.len() as u32,
            crc64: guard::crc64(bytes),
        };
        let mut frame = head.encode().to_vec();
        frame.extend_from_slice(bytes);
        frame.resize(self.frame_bytes(), 0);
        Some(frame)
    }

    /// The bytes that a frame holds. Bytes after them are ignored.
    pub fn decode(self, frame: &[u8]) -> Result<&[u8], ReservedError> {
        let (needed_bytes, got_bytes) = (self.frame_bytes() as u64, frame.len() as u64);
        let wrong_length = ReservedError::Length { needed_bytes, got_bytes };
        if needed_bytes != got_bytes {
            return Err(wrong_length);
        }
        let head = ReservedHeader::decode(frame).map_err(|_: TooShort| wrong_length)?;
        if head.signature != ReservedHeader::SIGNATURE {
            return Err(ReservedError::Signature);
        }
        if head.version != ReservedHeader::VERSION {
            return Err(ReservedError::Version(head.version));
        }
        if head.feature != self.feature().code() {
            return Err(ReservedError::Feature(head.feature));
        }
        let length = usize::try_from(head.length_bytes).ok().filter(|length| *length <= self.max_bytes());
        let length = length.ok_or(ReservedError::TooLong(head.length_bytes))?;
        let bytes = &frame[ReservedHeader::BYTES..][..length];
        match guard::crc64(bytes) {
            computed if computed == head.crc64 => Ok(bytes),
            computed => Err(ReservedError::Checksum { stored: head.crc64, computed }),
        }
    }
}

impl From<ReservedError> for Invalid {
    /// Names the data pointer, which starts in dword 6 of the command.
    fn from(why: ReservedError) -> Invalid {
        match why {
            ReservedError::Length { needed_bytes, got_bytes } => Invalid::DataLength { needed_bytes, got_bytes },
            _ => Invalid::field("DPTR", 6, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_page_has_these_bytes_and_is_read_back() {
        let both = Extensions::CHECKSUM | Extensions::RESERVED;
        let page = ExtensionsLog::new(3, both, 0x0102_0304).encode();
        let mut expected = [0_u8; 64];
        expected[..20].copy_from_slice(b"SBEXTEND\x01\0\0\0\x03\0\0\0\x03\0\0\0");
        expected[20..36].copy_from_slice(&[0, 0x50, 0, 0, 0, 0x20, 0, 0, 0x40, 0x10, 0, 0, 4, 3, 2, 1]);
        assert_eq!(page, expected);
        assert_eq!((ExtensionsLog::read(&page, 3), ExtensionsLog::bitmap_pages(&page, 3)), (both, 0x0102_0304));
        let gateway = ExtensionsLog::new(3, both, 0x0102_0304).with_origin(Some([7; 16])).encode();
        assert_eq!((&gateway[..36], &gateway[36..52]), (&page[..36], &[7; 16][..]));
        assert_eq!([&gateway, &page].map(|page| ExtensionsLog::origin(page, 3)), [Some([7; 16]), None]);
        assert_eq!(ExtensionsLog::origin(&gateway, 4), None, "of another namespace");
        let group = ExtensionsLog::new(3, both, 0x0102_0304).encode_with(&[[8; 16], [9; 16]]);
        assert_eq!((&group[..52], &group[52..56]), (&page[..52], &[2, 0, 0, 0][..]));
        assert_eq!((&group[64..80], &group[80..]), (&[8; 16][..], &[9; 16][..]));
        assert_eq!(ExtensionsLog::identities(&group, 3), [[8; 16], [9; 16]]);
        assert_eq!((ExtensionsLog::identity_count(&group, 3), ExtensionsLog::bytes_with(2)), (2, 96));
        assert_eq!(
            (ExtensionsLog::identities(&group, 4), ExtensionsLog::identities(&group[..95], 3)),
            (vec![], vec![[8; 16]])
        );
        assert_eq!(ExtensionsLog::identities(&page, 3), [] as [[u8; 16]; 0]);
        let plain = ExtensionsLog::new(3, both, 0x0102_0304).with_content(Some(0x0807_0605_0403_0201)).encode();
        assert_eq!((&plain[..56], &plain[56..]), (&page[..56], &[1, 2, 3, 4, 5, 6, 7, 8][..]));
        assert_eq!(
            [(&plain, 3), (&plain, 4), (&page, 3)].map(|(page, nsid)| ExtensionsLog::content(page, nsid)),
            [Some(0x0807_0605_0403_0201), None, None]
        );
        let digest = ExtensionsLog::new(3, Extensions::CHECKSUM, 9).encode();
        assert_eq!(ExtensionsLog::bitmap_pages(&digest, 3), 0);
        assert_eq!(digest[16..64], [[1].as_slice(), &[0; 47]].concat());
        assert_eq!(ExtensionsLog::read(&digest, 3), Extensions::CHECKSUM);
    }

    #[test]
    fn other_pages_promise_nothing() {
        let page = ExtensionsLog::new(3, Extensions::CHECKSUM | Extensions::RESERVED, 9).encode();
        let changed = |at: usize, byte: u8| {
            let mut page = page;
            page[at] = byte;
            ExtensionsLog::read(&page, 3)
        };
        for (at, byte) in [(0, b'X'), (7, 0), (8, 2), (9, 1), (12, 4), (15, 1)] {
            assert_eq!(changed(at, byte), Extensions::NONE, "byte {at}");
        }
        assert_eq!(ExtensionsLog::read(&page[..63], 3), Extensions::NONE);
        assert_eq!(ExtensionsLog::read(&page, 4), Extensions::NONE, "of another namespace");
        for at in 20..28 {
            assert_eq!(changed(at, 0xFF), Extensions::CHECKSUM, "a reserved area of another size, byte {at}");
        }
        for at in 28..32 {
            let mut page = page;
            page[at] ^= 1;
            assert_eq!(ExtensionsLog::bitmap_pages(&page, 3), 0, "pages of another size, byte {at}");
        }
        let all = Extensions::from_bits_retain(0xFF);
        assert_eq!(changed(16, 0xFF), all, "every bit has a meaning");
        assert_eq!(changed(18, 0xFF), Extensions::CHECKSUM | Extensions::RESERVED, "later bits mean nothing yet");
        assert_eq!(changed(16, 0x80), Extensions::ESCAPES);
        assert_eq!(changed(16, 0x20), Extensions::NONE, "a kind of a command that is not there");
        assert_eq!(changed(16, 0x21), Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C);
        assert_eq!((changed(17, 0x81).older(), changed(18, 1).older(), changed(17, 0).older()), (0x81, 0, 0));
        assert_eq!(Extensions::CHECKSUM.with_older(0x81), changed(17, 0x81) & !Extensions::RESERVED);
    }

    #[test]
    fn a_frame_has_these_bytes() {
        let frame = ReservedArea::Scrub.encode(b"123456789").unwrap();
        assert_eq!(frame[..16], *b"SBANNEX\0\x01\0\xC1\0\x09\0\0\0");
        // The check value of CRC-64/NVME.
        assert_eq!(frame[16..24], 0xAE8B_1486_0A79_9888_u64.to_le_bytes());
        assert_eq!((&frame[64..73], frame.len()), (b"123456789".as_slice(), 8192));
        assert!(frame[24..64].iter().chain(&frame[73..]).all(|&byte| byte == 0));
    }

    #[test]
    fn an_area_holds_its_maximum_bytes() {
        for area in [ReservedArea::Group, ReservedArea::Scrub, ReservedArea::Bitmap] {
            let bytes = vec![7; area.max_bytes()];
            let frame = area.encode(&bytes).unwrap();
            assert_eq!((area.decode(&frame), frame.len()), (Ok(bytes.as_slice()), area.frame_bytes()));
            assert_eq!(area.encode(&vec![7; area.max_bytes() + 1]), None);
            assert_eq!(area.decode(&area.encode(&[]).unwrap()), Ok([].as_slice()));
            assert_eq!(ReservedArea::of_feature(area.feature()), Some(area));
        }
        assert_eq!(ReservedArea::of_feature(FeatureId::HostIdentifier), None);
    }

    #[test]
    fn other_data_are_refused() {
        let area = ReservedArea::Group;
        let frame = area.encode(b"label").unwrap();
        let changed = |at: usize, byte: u8| {
            let mut frame = frame.clone();
            frame[at] = byte;
            area.decode(&frame).map(<[u8]>::len)
        };
        assert_eq!(changed(5, 0), Err(ReservedError::Signature));
        assert_eq!(changed(8, 2), Err(ReservedError::Version(2)));
        assert_eq!(changed(10, 0xC1), Err(ReservedError::Feature(0xC1)));
        assert_eq!(changed(15, 0xFF), Err(ReservedError::TooLong(0xFF00_0005)));
        assert_eq!(changed(13, 0x50), Err(ReservedError::TooLong(0x5005)));
        assert!(matches!(changed(12, 6), Err(ReservedError::Checksum { .. })));
        assert!(matches!(changed(64, b'L'), Err(ReservedError::Checksum { .. })));
        assert_eq!(changed(70, 1), Ok(5), "behind the bytes");
        let short = area.decode(&frame[..frame.len() - 4]).map_err(Invalid::from);
        assert_eq!(short, Err(Invalid::DataLength { needed_bytes: 20_480, got_bytes: 20_476 }));
        assert!(ReservedArea::Scrub.decode(&frame).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..128), ours: bool) {
            if ours && bytes.len() >= 24 {
                bytes[..12].copy_from_slice(b"SBANNEX\0\x01\0\xC1\0");
            }
            let _ = (ExtensionsLog::read(&bytes, 1), ExtensionsLog::bitmap_pages(&bytes, 1));
            bytes.resize(ReservedArea::Scrub.frame_bytes(), 0);
            let _ = ReservedArea::Scrub.decode(&bytes);
        }
    }
}
