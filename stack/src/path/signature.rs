//! What lies on a device or in a file that is about to be overwritten: file systems, volume managers, partition tables and file formats, by
//! the magic numbers that everybody goes by.
//!
//! A signature only has somebody asked. So what is not known here is overwritten as usual, and what cannot be read is none. Numbers and places
//! are those that the formats' own documentation names. A format whose first superblock is lost is known by its backups.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use futures_util::future::LocalBoxFuture;
use sealblock_block::Medium;
use sealblock_media_file::FileMedium;

use crate::error::{Cause, StackError};
use crate::path::backups;
use crate::path::seen::{Seen, apart};

/// Bytes of the start that are looked at: the last magic number there is that of ZFS.
const START_BYTES: u64 = 256 << 10;
/// Where the uberblocks of the first label of ZFS are.
const ZFS_RING: Range<u64> = 128 << 10..START_BYTES;
/// Bytes of the end that are looked at: a superblock of md 0.90 begins at the last multiple of 64 KiB that leaves as many.
const END_BYTES: u64 = 128 << 10;
/// Where ext2, ext3 and ext4 have their first superblock.
const EXT_AT: u64 = 1024;
/// The number of md.
const MD: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];

/// Something with a magic number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signature {
    /// What it is, such as "an ext4 file system".
    pub name: &'static str,
    /// Where its number is, in bytes from the start; of a backup, where that begins.
    pub offset_bytes: u64,
    /// Whether only a backup of its superblock or header was found: the first one is lost, and the data may still be there.
    pub is_backup: bool,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backup = if self.is_backup { "backup at " } else { "" };
        write!(f, "{} ({backup}byte {})", self.name, self.offset_bytes)
    }
}

/// Numbers at one place from the start, in the order in which they count.
const AT_START: &[(u64, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "a LUKS container"),
    (0, b"XFSB", "an XFS file system"),
    (65_600, b"_BHRfS_M", "a Btrfs file system"),
    (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "a bcachefs file system"),
    (4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "a bcachefs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (0, &MD, "a member of an md array"),
    (4096, &MD, "a member of an md array"),
    (4086, b"SWAPSPACE2", "swap space"),
    // Of machines with pages of 8 to 64 KiB.
    (8182, b"SWAPSPACE2", "swap space"),
    (16_374, b"SWAPSPACE2", "swap space"),
    (32_758, b"SWAPSPACE2", "swap space"),
    (65_526, b"SWAPSPACE2", "swap space"),
    (0, b"dmvdo001", "a VDO volume"),
    (0, b"verity\0\0\x01", "a dm-verity hash tree"),
    (32, b"ORCLDISK", "an Oracle ASM disk"),
    (516, b"!Stra0tis\x86\xff\x02", "a member of a Stratis pool"),
    (32_768, b"JFS1", "a JFS file system"),
    (65_588, b"ReIsEr", "a ReiserFS file system"),
    (65_536, b"\x01\x16\x19\x70", "a GFS2 file system"),
    (1024, b"OCFSV2", "an OCFS2 file system"),
    (2048, b"OCFSV2", "an OCFS2 file system"),
    (4096, b"OCFSV2", "an OCFS2 file system"),
    (8192, b"OCFSV2", "an OCFS2 file system"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (3, b"ReFS", "a ReFS file system"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT1", "a FAT file system"),
    (82, b"FAT32", "a FAT file system"),
    (32_769, b"CD001", "an ISO 9660 file system"),
    (32_769, b"BEA01", "a UDF file system"),
    (0, b"hsqs", "a SquashFS file system"),
    (0, b"\xce\xfa\xad\x1b", "a BFS file system"),
    (32, b"NXSB", "an APFS container"),
    (1024, b"H+", "an HFS+ file system"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
];

/// Numbers of formats that have nothing at the start, by how many bytes before the end they are.
const AT_END: &[(u64, &[u8], &str)] = &[
    (512, b"\xde\x11\xde\x11", "a member of a DDF array"),
    (1024, b"Intel Raid ISM Cfg Sig. ", "a member of an Intel RAID array"),
    (1024, b"NVIDIA  ", "a member of an NVIDIA RAID array"),
];

/// Numbers of DRBD in its metadata, which has the last whole page of a device: of versions 8 and 8.4 and of version 9.
const DRBD: [[u8; 4]; 3] = [[0x83, 0x74, 0x02, 0x6b], [0x83, 0x74, 0x02, 0x6c], [0x83, 0x74, 0x02, 0x6d]];
/// Where they are in that page.
const DRBD_MAGIC_AT: u64 = 60;
/// Where Minix has its superblock, and the bytes of one.
const MINIX_AT: u64 = 1024;
const MINIX_BYTES: usize = 32;

/// Backups near the start, for sectors of 512 bytes.
const BACKUPS_AT_START: &[(u64, &[u8], &str)] = &[
    (3072 + 82, b"FAT32   ", "a FAT file system"),
    (6144 + 3, b"EXFAT   ", "an exFAT file system"),
    (4096 + 1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
];

/// Backups at the end, by how many bytes before it their numbers are.
const BACKUPS_AT_END: &[(u64, &[u8], &str)] = &[
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (512 - 3, b"NTFS    ", "an NTFS file system"),
    (1024, b"H+\0\x04", "an HFS+ file system"),
];

/// Formats of plain files that are no images of disks, by numbers at one place.
const FILES: &[(usize, &[u8], &str)] = &[
    (0, b"\x7fELF", "a program (ELF)"),
    (0, b"#!", "a script"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"\xfd7zXZ\0", "an xz archive"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (0, b"BZh", "a bzip2 archive"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"!<arch>\n", "an ar archive or a Debian package"),
    (0, b"\xed\xab\xee\xdb", "an RPM package"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"070701", "a cpio archive"),
    (0, b"\xc7\x71", "a cpio archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"MSCF\0\0\0\0", "a cabinet archive"),
    (0, b"\x04\x22\x4d\x18", "an LZ4 archive"),
    (0, b"\x5d\0\0\x80\0", "an LZMA archive"),
    (0, b"LZIP\x01", "an lzip archive"),
    (0, b"\x1f\x9d\x90", "a compressed file (.Z)"),
    (0, b"xar!", "a xar archive"),
    (0, b"PACK\0\0\0\x02", "a Git pack"),
    (0, b"MZ\x90\0", "a program (PE)"),
    (0, b"\xfe\xed\xfa\xce", "a program (Mach-O)"),
    (0, b"\xcf\xfa\xed\xfe", "a program (Mach-O)"),
    (0, b"\xca\xfe\xba\xbe", "a program (Mach-O or Java)"),
    (0, b"\0asm\x01\0\0\0", "a program (WebAssembly)"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document"),
    (4, b"Standard Jet DB", "an Access database"),
    (4, b"Standard ACE DB", "an Access database"),
    (0, b"!BDN", "an Outlook mailbox"),
    (0, b"\x03\xd9\xa2\x9a", "a KeePass database"),
    (0, b"\x1a\x45\xdf\xa3", "a Matroska or WebM file"),
    (0, b"II*\0", "a TIFF image"),
    (0, b"MM\0*", "a TIFF image"),
    (0, b"conectix", "a VHD image"),
    (0, b"%PDF-", "a PDF document"),
    (0, b"\x89PNG\r\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"ID3", "an MP3 file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"RIFF", "a RIFF file, such as WAV"),
    (4, b"ftyp", "an MP4 or MOV file"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"KDMV", "a VMDK image"),
    (0, b"vhdxfile", "a VHDX image"),
    (64, b"\x7f\x10\xda\xbe", "a VDI image"),
];

/// Bytes by which [`file_format`] goes.
pub const FORMAT_BYTES: usize = 4096;

/// The format of a file that is no image of a disk, by its first bytes; `None` for an image, and what is not known.
pub fn file_format(start: &[u8]) -> Option<&'static str> {
    let start = &start[..start.len().min(FORMAT_BYTES)];
    let known = FILES.iter().find(|(at, magic, _)| has(start, *at, magic)).map(|(.., name)| *name);
    known.or_else(|| is_text(start).then_some("plain text"))
}

/// The smallest number of bytes that are text in an encoding of one byte for each character.
const MIN_TEXT_BYTES: usize = 64;

/// True if these bytes are text without control characters: in UTF-8, in UTF-16 with a byte order mark, or in an
/// encoding of one byte for each character, such as Latin-1. The last character may be cut.
fn is_text(start: &[u8]) -> bool {
    let is_printed = |char: char| !char.is_control() || matches!(char, '\n' | '\r' | '\t' | '\x0c' | '\x1b');
    let in_utf16 = |bytes: &[u8], unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        // The first half of a pair may be the last unit.
        let is_cut = units.last().is_some_and(|last| (0xd800..0xdc00).contains(last));
        let whole = &units[..units.len() - usize::from(is_cut)];
        !whole.is_empty() && char::decode_utf16(whole.iter().copied()).all(|char| char.is_ok_and(is_printed))
    };
    match start {
        [] => false,
        [0xff, 0xfe, units @ ..] => in_utf16(units, u16::from_le_bytes),
        [0xfe, 0xff, units @ ..] => in_utf16(units, u16::from_be_bytes),
        _ => match std::str::from_utf8(start) {
            Ok(text) => text.chars().all(is_printed),
            Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
                let text = std::str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default();
                text.chars().all(is_printed)
            }
            // Fewer bytes may be anything.
            Err(_) => start.len() >= MIN_TEXT_BYTES && start.iter().all(|byte| is_printed(char::from(*byte))),
        },
    }
}

fn has(bytes: &[u8], at: usize, magic: &[u8]) -> bool {
    bytes.get(at..).is_some_and(|bytes| bytes.starts_with(magic))
}

/// The bytes of a device of this length that [`find`] looks at.
pub(crate) fn places(len_bytes: u64) -> Vec<Range<u64>> {
    let ends = [0..START_BYTES, len_bytes.saturating_sub(END_BYTES)..len_bytes];
    ends.into_iter().chain(backups::places(len_bytes)).collect()
}

/// The first signature of a device. A backup counts only where no first superblock is known.
pub(crate) fn find(seen: &Seen) -> Option<Signature> {
    let found = |(name, offset_bytes)| Signature { name, offset_bytes, is_backup: false };
    first(seen).map(found).or_else(|| {
        let backup = at_ends(seen).or_else(|| backups::find(seen));
        backup.map(|backup| Signature { is_backup: true, ..found(backup) })
    })
}

/// What a device is by its first superblock, which some have at the end.
fn first(seen: &Seen) -> Option<(&'static str, u64)> {
    const LVM: &str = "an LVM physical volume";
    const MD_MEMBER: &str = "a member of an md array";
    if let Some(superblock) = seen.bytes(EXT_AT, backups::EXT_BYTES)
        && superblock[backups::EXT_MAGIC_AT..].starts_with(&backups::EXT_MAGIC)
    {
        return Some((backups::ext(superblock), EXT_AT + backups::EXT_MAGIC_AT as u64));
    }
    if let Some((at, _, name)) = AT_START.iter().find(|(at, magic, _)| seen.has(*at, magic)) {
        return Some((name, *at));
    }
    if let Some(at) = (0..2048).step_by(512).find(|at| seen.has(*at, b"LABELONE")) {
        return Some((LVM, at));
    }
    if let Some(at) = backups::uberblock(seen, ZFS_RING) {
        return Some(("a member of a ZFS pool", at));
    }
    if seen.bytes(0, 512).is_some_and(is_mbr) {
        return Some(("an MBR partition table", 510));
    }
    if seen.bytes(MINIX_AT, MINIX_BYTES).is_some_and(is_minix) {
        return Some(("a Minix file system", MINIX_AT));
    }
    let md_090 = (seen.len_bytes() & !0xffff).checked_sub(64 << 10);
    let md_1 = seen.len_bytes().checked_sub(8 << 10).map(|at| at & !0xfff);
    let md = [md_090, md_1].into_iter().flatten().find(|at| seen.has(*at, &MD)).map(|at| (MD_MEMBER, at));
    let page = (seen.len_bytes() & !0xfff).checked_sub(4096).map(|page| page + DRBD_MAGIC_AT);
    let drbd = page.filter(|at| DRBD.iter().any(|magic| seen.has(*at, magic))).map(|at| ("a DRBD device", at));
    md.or(drbd).or_else(|| from_end(seen, AT_END))
}

/// A backup at the start or at the end.
fn at_ends(seen: &Seen) -> Option<(&'static str, u64)> {
    let start = BACKUPS_AT_START.iter().find(|(at, magic, _)| seen.has(*at, magic));
    start.map(|(at, _, name)| (*name, *at)).or_else(|| from_end(seen, BACKUPS_AT_END))
}

/// The first of these numbers that the end of a device has: its name, and where it is from the start.
fn from_end(seen: &Seen, numbers: &[(u64, &[u8], &'static str)]) -> Option<(&'static str, u64)> {
    let found = |(before, magic, name): &(u64, &[u8], &'static str)| {
        let at = seen.len_bytes().checked_sub(*before)?;
        seen.has(at, magic).then_some((*name, at))
    };
    numbers.iter().find_map(found)
}

/// A table with at least one partition, and nothing that none has: boot code of other things ends with the same two bytes.
fn is_mbr(sector: &[u8]) -> bool {
    let Some(table) = sector.get(446..510).filter(|_| has(sector, 510, &[0x55, 0xaa])) else { return false };
    let entries = || table.chunks_exact(16);
    entries().all(|entry| matches!(entry[0], 0 | 0x80))
        && entries().any(|entry| entry[4] != 0 && entry[12..16] != [0; 4])
}

/// A superblock of Minix, in little-endian order: with a number of two bytes, which is not much, and maps of inodes and zones of a size
/// that can be.
fn is_minix(superblock: &[u8]) -> bool {
    let word = |at: usize| u16::from_le_bytes([superblock[at], superblock[at + 1]]);
    // Versions 1 and 2, each with names of 14 or 30 characters; version 3.
    let maps_at = match (word(16), word(24)) {
        (0x137f | 0x138f | 0x2468 | 0x2478, _) => 4,
        (_, 0x4d5a) => 6,
        _ => return false,
    };
    let [inode_blocks, zone_blocks, first_zone, zone_shift] = [0, 2, 4, 6].map(|at| word(maps_at + at));
    inode_blocks > 0
        && zone_blocks > 0
        && zone_shift == 0
        && u32::from(first_zone) > u32::from(inode_blocks) + u32::from(zone_blocks)
}

/// The known content of a device.
pub fn signature(medium: &FileMedium) -> LocalBoxFuture<'_, Option<Signature>> {
    Box::pin(async move {
        let read = async |offset_bytes: u64, length_bytes: u64| {
            let (read, bytes) = medium.read(offset_bytes, medium.buffer(length_bytes as usize)).await;
            read.inspect_err(|error| tracing::debug!(%error, "cannot look for signatures")).ok()?;
            Some(bytes.to_vec())
        };
        let size = (medium.len_bytes(), u64::from(medium.sector_bytes()));
        find(&Seen::read(size, places(size.0), read).await)
    })
}

/// All places of a device of this length where signatures and their backups are, in whole pages as far as the device
/// reaches, in order and apart from each other. Together they are less than 1 MiB.
pub fn signature_places(len_bytes: u64) -> Vec<Range<u64>> {
    apart(places(len_bytes), len_bytes)
}

/// Zeroes all places where signatures and their backups are: a new volume need not reach them, and others would find themselves there.
///
/// # Errors
/// When the medium fails.
pub fn wipe(medium: &FileMedium) -> LocalBoxFuture<'_, Result<(), sealblock_block::MediumError>> {
    Box::pin(async move {
        for place in signature_places(medium.len_bytes()) {
            let mut zeroes = medium.buffer((place.end - place.start) as usize);
            zeroes.fill(0);
            medium.write(place.start, zeroes.freeze()).await?;
        }
        Ok(())
    })
}

/// The first bytes of a plain file, as many as [`file_format`] goes by. A medium has whole sectors only, and many files are shorter than one.
///
/// # Errors
/// When it cannot be read.
pub fn file_start(path: &Path) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    File::open(path)?.take(FORMAT_BYTES as u64).read_to_end(&mut start)?;
    Ok(start)
}

/// Refuses a block device that holds something known, or a plain file of another format than `like`, the format of what is to be
/// written.
///
/// # Errors
/// Names what is there.
pub(crate) async fn check_free(medium: &FileMedium, like: Option<&str>) -> Result<(), StackError> {
    let there = match medium.is_block_device() {
        true => signature(medium).await.map(|found| found.to_string()),
        false => {
            let start = file_start(medium.path()).unwrap_or_default();
            file_format(&start).filter(|format| Some(*format) != like).map(str::to_owned)
        }
    };
    match there {
        None => Ok(()),
        Some(there) => Err(occupied(medium.path().display(), &there)),
    }
}

/// Why a place is not overwritten.
pub(crate) fn occupied(place: impl fmt::Display, there: &str) -> StackError {
    StackError::new(Cause::Refused, "write", format!("it has {there}"))
        .on(place)
        .advise("use another path, or --force to overwrite it")
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const LENGTH: u64 = 1 << 20;

    /// What is found on a device of 1 MiB with these bytes in it.
    fn signature(parts: &[(u64, &[u8])]) -> Option<Signature> {
        let mut bytes = vec![0; LENGTH as usize];
        for (at, part) in parts {
            bytes[*at as usize..][..part.len()].copy_from_slice(part);
        }
        let read = async |at: u64, length: u64| Some(bytes[at as usize..][..length as usize].to_vec());
        let seen = Seen::read((LENGTH, 512), places(LENGTH), read).now_or_never().unwrap();
        find(&seen)
    }

    fn found(parts: &[(u64, &[u8])]) -> Option<&'static str> {
        signature(parts).map(|found| found.name)
    }

    #[test]
    fn every_signature_is_found_at_its_place_and_nowhere_else() {
        assert_eq!(found(&[]), None);
        let at_end = BACKUPS_AT_END.iter().map(|(before, magic, name)| (LENGTH - before, *magic, *name));
        let backups: Vec<_> = BACKUPS_AT_START.iter().copied().chain(at_end).collect();
        let firsts_at_end = AT_END.iter().map(|(before, magic, name)| (LENGTH - before, *magic, *name));
        for (at, magic, name) in AT_START.iter().copied().chain(firsts_at_end).chain(backups.iter().copied()) {
            let is_backup = backups.contains(&(at, magic, name));
            assert_eq!(signature(&[(at, magic)]), Some(Signature { name, offset_bytes: at, is_backup }));
            let beside = if at == 0 { 1 } else { at - 1 };
            assert_eq!(found(&[(beside, magic)]), None, "{name}");
            assert_eq!(found(&[(at, &magic[..magic.len() - 1])]), None, "{name}");
        }
        for at in [0, 512, 1024, 1536] {
            assert_eq!(found(&[(at, b"LABELONE")]), Some("an LVM physical volume"));
        }
        assert_eq!(found(&[(2048, b"LABELONE")]), None);
        assert_eq!(found(&[((128 << 10) + 5 * 1024, &backups::ZFS[0])]), Some("a member of a ZFS pool"));
        assert_eq!(found(&[(LENGTH - (64 << 10), &MD)]), Some("a member of an md array"));
        assert_eq!(found(&[(LENGTH - (8 << 10), &MD)]), Some("a member of an md array"));
        assert_eq!(found(&[(LENGTH - (12 << 10), &MD)]), None);
    }

    #[test]
    fn a_backup_counts_where_the_first_superblock_is_lost_and_says_that_it_is_one() {
        let at = 16_384_u64.to_be_bytes();
        let luks: [(u64, &[u8]); 2] = [(16_384, b"SKUL\xba\xbe\0\x02"), (16_384 + 256, &at)];
        let backup = signature(&luks).unwrap();
        assert_eq!(backup.to_string(), "a LUKS container (backup at byte 16384)");
        let whole = signature(&[(0, b"LUKS\xba\xbe"), luks[0], luks[1]]).unwrap();
        assert_eq!(whole.to_string(), "a LUKS container (byte 0)");
        let other = signature(&[(0, b"XFSB"), luks[0], luks[1], (LENGTH - 512, b"EFI PART")]).unwrap();
        assert_eq!(other.to_string(), "an XFS file system (byte 0)");
    }

    #[test]
    fn file_systems_of_one_family_are_told_apart_and_count_before_what_is_left_behind_them() {
        const MAGIC_AT: u64 = EXT_AT + backups::EXT_MAGIC_AT as u64;
        let features =
            |compatible: u32, incompatible: u32| [compatible.to_le_bytes(), incompatible.to_le_bytes()].concat();
        let of = |features: &[u8]| found(&[(MAGIC_AT, &backups::EXT_MAGIC), (EXT_AT + 0x5c, features)]);
        assert_eq!(of(&features(0, 2)), Some("an ext2 file system"));
        assert_eq!(of(&features(4, 2)), Some("an ext3 file system"));
        assert_eq!(of(&features(4, 0x2c2)), Some("an ext4 file system"));
        let ext2 = found(&[(MAGIC_AT, &backups::EXT_MAGIC), (LENGTH - 512, b"EFI PART")]);
        assert_eq!(ext2, Some("an ext2 file system"));
    }

    #[test]
    fn drbd_has_the_last_whole_page() {
        for magic in DRBD {
            assert_eq!(found(&[(LENGTH - 4096 + 60, &magic)]), Some("a DRBD device"));
            assert_eq!(found(&[(LENGTH - 4096 + 56, &magic)]), None);
            assert_eq!(found(&[(LENGTH - 8192 + 60, &magic)]), None);
        }
    }

    /// As mkfs.minix of util-linux makes them on 1 MiB: what follows the number of inodes.
    #[test]
    fn minix_is_known_by_its_number_and_its_maps() {
        let words = |words: &[u16]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        for magic in [0x137f, 0x138f, 0x2468, 0x2478] {
            let superblock = |first| words(&[352, 1024, 1, 1, first, 0, 0, 0x1008, magic, 1]);
            assert_eq!(found(&[(1024, &superblock(15))]), Some("a Minix file system"), "{magic:x}");
            assert_eq!(found(&[(1024, &superblock(2))]), None, "{magic:x}: that is no place for zones");
            assert_eq!(found(&[(1024, &words(&[0, 0, 0, 0, 0, 0, 0, 0, magic]))]), None, "{magic:x}");
        }
        let third = words(&[352, 0, 0, 1, 1, 26, 0, 0, 0xffff, 0x7fff, 1024, 0, 0x4d5a, 0, 1024]);
        assert_eq!(found(&[(1024, &third)]), Some("a Minix file system"));
        assert_eq!(found(&[(1024, &third[..24])]), None);
    }

    #[test]
    fn boot_code_is_no_partition_table() {
        let entry = [0x80, 0, 1, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0];
        assert_eq!(found(&[(446, &entry), (510, &[0x55, 0xaa])]), Some("an MBR partition table"));
        assert_eq!(found(&[(446, &entry)]), None);
        assert_eq!(found(&[(510, &[0x55, 0xaa])]), None, "no partition");
        assert_eq!(found(&[(446, &entry), (462, &[7]), (510, &[0x55, 0xaa])]), None, "that is code");
    }

    #[test]
    fn files_are_known_by_their_format_and_images_of_disks_are_none() {
        for (at, magic, name) in FILES {
            let mut bytes = vec![0; 512];
            bytes[*at..][..magic.len()].copy_from_slice(magic);
            assert_eq!(file_format(&bytes), Some(*name));
        }
        assert_eq!(file_format("Liebes Tagebuch, heute ä".as_bytes()), Some("plain text"));
        assert_eq!(file_format(&"ä".repeat(4000).as_bytes()[..4095]), Some("plain text"), "cut in a character");
        assert_eq!((file_format(b""), file_format(&[0; 4096]), file_format(&[0xe9, 1, 2, 3])), (None, None, None));
        assert_eq!(file_format(&b"caf\xe9 au lait ".repeat(5)), Some("plain text"), "Latin-1");
        assert_eq!(file_format(b"caf\xe9 au lait"), None, "too short to tell");
        let units: Vec<u16> = "heute \u{1f980}".encode_utf16().collect();
        let [low, high] = [u16::to_le_bytes, u16::to_be_bytes]
            .map(|bytes| [0xfeff].iter().chain(&units).flat_map(|unit| bytes(*unit)).collect::<Vec<u8>>());
        assert_eq!((file_format(&low), file_format(&high)), (Some("plain text"), Some("plain text")), "UTF-16");
        assert_eq!((file_format(b"\xff\xfe"), file_format(b"\xff\xfe\0\0")), (None, None), "no text");
        assert_eq!(file_format(b"text\0and something else"), None);
    }
}
