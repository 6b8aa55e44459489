//! Inodes and names: every type of file, owners, modes and times at their limits, attributes, many links, names with
//! any bytes, names with the same hash, deep and large directories.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags, makedev, mknodat, utimensat,
};
use sealblock_btrfs_format::names::name_hash;

use crate::content::{noise, text};

/// The number of links with names of 200 bytes that exceeds one item at every node size.
const LONG_LINKS: usize = 400;
/// The number of entries of a directory before most of them are removed.
const CROWD: usize = 10_000;
/// One in this many entries stays.
const CROWD_LEFT: usize = 150;

/// Makes all of them in a folder.
///
/// # Errors
/// If something cannot be made; devices need root.
pub fn fill(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    types(&folder.join("types"))?;
    modes_and_owners(&folder.join("modes"))?;
    times(&folder.join("times"))?;
    attributes(&folder.join("attributes"))?;
    links(&folder.join("links"))?;
    names(&folder.join("names"))?;
    collisions(&folder.join("collisions"))?;
    deep(&folder.join("deep"))
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())?)
}

/// Makes a folder; returns its path.
fn folder(path: &Path) -> io::Result<impl Fn(&str) -> PathBuf> {
    fs::create_dir(path)?;
    let path = path.to_owned();
    Ok(move |name: &str| path.join(name))
}

fn types(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    fs::write(path("file"), text(10))?;
    fs::create_dir(path("directory"))?;
    for (name, file_type, device) in [
        ("fifo", FileType::Fifo, 0),
        ("socket", FileType::Socket, 0),
        ("char-device", FileType::CharacterDevice, makedev(1, 3)),
        ("block-device", FileType::BlockDevice, makedev(259, 0xf_ffff)),
        ("device-of-zeroes", FileType::CharacterDevice, makedev(0, 0)),
        ("highest-device", FileType::CharacterDevice, makedev(4095, 0xf_ffff)),
    ] {
        mknodat(CWD, path(name), file_type, Mode::from_raw_mode(0o640), device)?;
    }
    symlink("file", path("link"))?;
    symlink("no/such/file\nat all", path("dangling"))?;
    // Slightly shorter than the longest possible target; small nodes cannot hold it.
    let long = |bytes: usize| symlink("x/".repeat(bytes / 2), path("long-link"));
    if let Err(error) = long(4000) {
        if error.kind() != io::ErrorKind::InvalidFilename {
            return Err(error);
        }
        long(3900)?;
    }
    symlink(OsStr::from_bytes(b"not \xff UTF-8 \x01"), path("odd-link"))
}

fn modes_and_owners(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    for mode in [0o000, 0o777, 0o4755, 0o2755, 0o1777, 0o7777] {
        fs::write(path(&format!("file-{mode:04o}")), b"x")?;
        fs::create_dir(path(&format!("dir-{mode:04o}")))?;
        for kind in ["file", "dir"] {
            fs::set_permissions(path(&format!("{kind}-{mode:04o}")), fs::Permissions::from_mode(mode))?;
        }
    }
    for (uid, gid) in [(1, 0), (0, 1), (65_534, 65_535), (1_000_000_007, 4_000_000_000), (u32::MAX - 1, u32::MAX - 1)] {
        let owned = path(&format!("of-{uid}-{gid}"));
        fs::write(&owned, b"x")?;
        rustix::fs::chown(&owned, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    }
    Ok(())
}

fn times(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    let of = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    for (number, (access, change)) in [
        (of(-1, 999_999_999), of(-1, 1)),
        (of(-2_208_988_800, 500_000_000), of(0, 0)),
        (of(1 << 31, 1), of((1 << 32) + 7, 123_456_789)),
        (of(253_402_300_799, 999_999_999), of(-62_135_596_800, 0)),
    ]
    .into_iter()
    .enumerate()
    {
        let times = Timestamps { last_access: access, last_modification: change };
        fs::write(path(&format!("file-{number}")), b"x")?;
        symlink("x", path(&format!("link-{number}")))?;
        for kind in ["file", "link"] {
            utimensat(CWD, path(&format!("{kind}-{number}")), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
    Ok(())
}

/// The attribute by which Linux keeps an access control list (`system.posix_acl_access`): version 2, then tag,
/// permissions and id of each entry. This one permits everything to the user, reading and executing to the group, and
/// nothing to others.
pub fn acl(user: u32, group: u32) -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries =
        [(1_u16, 6_u16, NOBODY), (2, 7, user), (4, 4, NOBODY), (8, 5, group), (16, 7, NOBODY), (32, 0, NOBODY)];
    let mut acl = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        acl.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    acl
}

fn attributes(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    for name in ["file", "dir", "acl", "many"] {
        if name == "dir" { fs::create_dir(path(name))? } else { fs::write(path(name), b"x")? }
    }
    symlink("nowhere", path("link"))?;
    set_xattr(&path("file"), "user.small", b"value")?;
    set_xattr(&path("file"), "user.empty", b"")?;
    set_xattr(&path("file"), "user.binary", &noise(256, 1))?;
    // Nearly all the space that a leaf of 4 KiB has left beside the inode.
    set_xattr(&path("file"), "user.large", &noise(3500, 2))?;
    set_xattr(&path("file"), &format!("user.{}", "n".repeat(250)), b"long name")?;
    set_xattr(&path("file"), "security.something", b"of a module")?;
    set_xattr(&path("link"), "trusted.of-a-link", b"itself")?;
    set_xattr(&path("dir"), "user.of-a-directory", &noise(1000, 3))?;
    for number in 0..60 {
        set_xattr(&path("many"), &format!("user.number-{number}"), &noise(number * 20, number as u64))?;
    }
    // Only in nodes in which it fits; smaller ones refuse it.
    fs::write(path("largest"), b"x")?;
    let _ = set_xattr(&path("largest"), "user.largest", &noise(16_000, 4));
    set_xattr(&path("acl"), "system.posix_acl_access", &acl(1234, 5678))?;
    set_xattr(&path("dir"), "system.posix_acl_default", &acl(77, 88))?;
    // The file inherits the list from the directory.
    fs::write(path("dir/inherits"), b"x")
}

fn links(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    fs::write(path("linked"), text(5000))?;
    for number in 0..LONG_LINKS {
        fs::hard_link(path("linked"), path(&format!("{number:0>200}")))?;
    }
    fs::write(path("everywhere"), text(300))?;
    for directory in ["a", "b", "a/c"] {
        fs::create_dir(path(directory))?;
        fs::hard_link(path("everywhere"), path(&format!("{directory}/one")))?;
        fs::hard_link(path("everywhere"), path(&format!("{directory}/another")))?;
    }
    symlink("target", path("link"))?;
    rustix::fs::linkat(CWD, path("link"), CWD, path("a/same-link"), AtFlags::empty())?;
    // One of three links is removed, and one is moved.
    fs::remove_file(path("b/one"))?;
    fs::rename(path("b/another"), path("moved"))
}

fn names(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    let all_bytes: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    let odd: [&[u8]; 14] = [
        b"not \xff UTF-8",
        b"\xc3",
        b"new\nline",
        b"tab\tand \"quotes\" and \\",
        b" ",
        b"-",
        b"...",
        b".hidden",
        b"%41",
        b"a=b",
        "\u{e4}\u{f6}\u{fc} \u{65e5}\u{672c}".as_bytes(),
        b"\x01",
        b"\x7f\x80",
        &all_bytes,
    ];
    for name in odd.iter().copied().chain([[b'n'; 255].as_slice(), &[0xff; 255]]) {
        fs::write(path.join(OsStr::from_bytes(name)), name)?;
    }
    fs::create_dir(path.join(OsStr::from_bytes(b"d\xff\n")))?;
    fs::write(path.join(OsStr::from_bytes(b"d\xff\n/in\xfe")), b"x")
}

/// Names with the same hash and this prefix.
pub fn colliding(prefix: &str) -> [String; 2] {
    let name = |number: u64| format!("{prefix}{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut seen = HashMap::new();
    let pair = (1..).find_map(|number| {
        let earlier = seen.insert(name_hash(name(number).as_bytes()), number)?;
        Some([name(earlier), name(number)])
    });
    pair.expect("there are more names than hashes")
}

/// Directory entries and attributes that share an item.
fn collisions(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    for name in colliding("") {
        fs::write(path(&name), name.as_bytes())?;
    }
    for name in colliding("dir-") {
        fs::create_dir(path(&name))?;
    }
    fs::write(path("attributes"), b"x")?;
    for name in colliding("user.") {
        set_xattr(&path("attributes"), &name, name.as_bytes())?;
    }
    // One of two is removed again.
    let [gone, stays] = colliding("gone-");
    fs::write(path(&gone), b"x")?;
    fs::write(path(&stays), b"x")?;
    fs::remove_file(path(&gone))
}

fn deep(path: &Path) -> io::Result<()> {
    let path = (0..200).fold(path.to_owned(), |path, number| path.join(format!("level-{number}")));
    fs::create_dir_all(&path)?;
    fs::write(path.join("bottom"), b"deep")
}

/// Many small files, 500 in each directory: inline, of one sector, empty.
///
/// # Errors
/// If something cannot be made.
pub fn many(folder: &Path, files: usize) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for number in 0..files {
        let directory = folder.join(format!("{}", number / 500));
        if number % 500 == 0 {
            fs::create_dir(&directory)?;
        }
        let content = match number % 4 {
            0 => format!("file {number}").into_bytes(),
            1 => noise(1500, number as u64),
            2 => Vec::new(),
            _ => text(20 + number % 5000),
        };
        fs::write(directory.join(format!("file-{number}")), content)?;
    }
    Ok(())
}

/// A directory that had 10,000 entries and lost most of them, so that its indexes have gaps and leaves were emptied.
///
/// # Errors
/// If something cannot be made.
pub fn crowd(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let name = |number: usize| folder.join(format!("entry-{number}"));
    (0..CROWD).try_for_each(|number| File::create(name(number)).map(drop))?;
    File::open(folder)?.sync_all()?;
    (0..CROWD).filter(|number| number % CROWD_LEFT != 0).try_for_each(|number| fs::remove_file(name(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colliding_names_differ_and_have_one_hash() {
        for prefix in ["", "user.", "dir-", "gone-"] {
            let [one, other] = colliding(prefix);
            assert!(one != other && one.starts_with(prefix) && other.starts_with(prefix));
            assert_eq!(name_hash(one.as_bytes()), name_hash(other.as_bytes()));
        }
    }

    #[test]
    fn a_list_has_a_version_and_eight_bytes_for_each_entry() {
        let acl = acl(1, 2);
        assert_eq!((acl.len(), &acl[..4]), (4 + 6 * 8, &2_u32.to_le_bytes()[..]));
    }
}
