//! Changes through a mount: names, attributes, content, and errors.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use sealblock_fuse::Ended;
use sealblock_proofs_btrfs_images::content::{noise, text};

use crate::can_mount;
use crate::disk::{MAX_FILE_BYTES, ServedDisk, writable, write_through};

/// The error number.
pub fn number(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap()
}

#[test]
fn names_are_made_changed_and_removed() {
    if !can_mount() {
        return;
    }
    let mut served = ServedDisk::start(writable());
    let path = |name: &str| served.point.join(name);
    assert_eq!(fs::metadata(path("new")).unwrap_err().kind(), io::ErrorKind::NotFound);
    fs::write(path("new"), b"content").unwrap();
    assert_eq!(fs::read(path("new")).unwrap(), b"content", "the kernel forgets that there was nothing");
    fs::create_dir(path("directory")).unwrap();
    fs::hard_link(path("new"), path("directory/linked")).unwrap();
    assert_eq!(fs::metadata(path("new")).unwrap().nlink(), 2);
    symlink("directory/linked", path("link")).unwrap();
    assert_eq!(fs::read_link(path("link")).unwrap().to_str(), Some("directory/linked"));
    assert_eq!(fs::read(path("link")).unwrap(), b"content");
    fs::rename(path("new"), path("directory/renamed")).unwrap();
    assert!(!path("new").exists());
    assert_eq!(fs::read(path("directory/renamed")).unwrap(), b"content");
    fs::remove_file(path("link")).unwrap();
    assert_eq!(number(&fs::remove_dir(path("directory")).unwrap_err()), Errno::NOTEMPTY);
    fs::remove_file(path("directory/renamed")).unwrap();
    assert_eq!(fs::metadata(path("directory/linked")).unwrap().nlink(), 1);
    fs::remove_file(path("directory/linked")).unwrap();
    fs::remove_dir(path("directory")).unwrap();
    assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0);
    let name = "n".repeat(256);
    assert_eq!(number(&File::create(path(&name)).unwrap_err()), Errno::NAMETOOLONG);
    fs::write(path(&name[1..]), b"").unwrap();
    assert_eq!(number(&fs::rename(path(&name[1..]), path(&name)).unwrap_err()), Errno::NAMETOOLONG);
    assert_eq!(served.stop(), Ended::Stopped);
}

#[test]
fn nodes_have_their_kinds_and_numbers() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let device = rustix::fs::makedev(259, 0x1_2345);
    for (name, kind) in
        [("fifo", FileType::Fifo), ("char", FileType::CharacterDevice), ("block", FileType::BlockDevice)]
    {
        rustix::fs::mknodat(CWD, served.path(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
    }
    UnixListener::bind(served.path("socket")).unwrap();
    let metadata = |name: &str| fs::symlink_metadata(served.path(name)).unwrap();
    assert!(metadata("fifo").file_type().is_fifo());
    assert!(metadata("socket").file_type().is_socket());
    assert_eq!((metadata("char").rdev(), metadata("block").rdev()), (device, device));
    assert_eq!(number(&File::open(served.path("char")).unwrap_err()), Errno::ACCESS, "devices cannot be opened");
    assert_eq!(metadata("fifo").mode() & 0o7777, 0o640);
}

#[test]
fn renames_replace_exchange_or_leave_a_whiteout() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let path = |name: &str| served.path(name);
    let rename = |from: &str, to: &str, flags| rustix::fs::renameat_with(CWD, path(from), CWD, path(to), flags);
    let is = |name: &str, content: &str| assert_eq!(fs::read(path(name)).unwrap(), content.as_bytes(), "{name}");
    fs::create_dir(path("directory")).unwrap();
    fs::write(path("one"), b"one").unwrap();
    fs::write(path("directory/two"), b"two").unwrap();
    assert_eq!(rename("one", "directory/two", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename("one", "directory/two", RenameFlags::EXCHANGE).unwrap();
    is("one", "two");
    is("directory/two", "one");
    assert_eq!(rename("one", "absent", RenameFlags::EXCHANGE), Err(Errno::NOENT));
    rename("one", "three", RenameFlags::NOREPLACE).unwrap();
    is("three", "two");
    rename("three", "directory/two", RenameFlags::empty()).unwrap();
    is("directory/two", "two");
    rename("directory/two", "four", RenameFlags::WHITEOUT).unwrap();
    is("four", "two");
    let whiteout = fs::symlink_metadata(path("directory/two")).unwrap();
    assert!(whiteout.file_type().is_char_device());
    assert_eq!(whiteout.rdev(), 0);
    let contradiction = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
    assert_eq!(rename("four", "five", contradiction), Err(Errno::INVAL));
    // A directory that moves has another parent.
    fs::create_dir_all(path("a/b")).unwrap();
    fs::rename(path("a/b"), path("directory/b")).unwrap();
    let ino = |name: &str| fs::metadata(path(name)).unwrap().ino();
    assert_eq!(ino("directory/b/.."), ino("directory"));
}

#[test]
fn attributes_change_as_they_are_set() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let file = served.path("file");
    fs::write(&file, b"0123456789").unwrap();
    let metadata = || fs::metadata(&file).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o6751)).unwrap();
    assert_eq!(metadata().mode() & 0o7777, 0o6751);
    // Changing the owner removes both bits.
    std::os::unix::fs::chown(&file, Some(12), Some(34)).unwrap();
    assert_eq!((metadata().uid(), metadata().gid(), metadata().mode() & 0o7777), (12, 34, 0o751));
    let open = OpenOptions::new().write(true).open(&file).unwrap();
    open.set_len(4).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"0123");
    open.set_len(8).unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"0123\0\0\0\0");
    assert_eq!(number(&open.set_len(MAX_FILE_BYTES + 1).unwrap_err()), Errno::NOSPC);
    for (seconds, nanoseconds) in [(1_000_000_000, 123_456_789), (-5, 500), (-1, 999_999_999), (1 << 33, 1)] {
        let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, &file, &times, AtFlags::empty()).unwrap();
        assert_eq!((metadata().mtime(), metadata().mtime_nsec()), (seconds, nanoseconds));
        assert_eq!((metadata().atime(), metadata().atime_nsec()), (seconds, nanoseconds));
    }
    let before = SystemTime::now() - Duration::from_secs(1);
    open.set_modified(SystemTime::now()).unwrap();
    assert!(metadata().modified().unwrap() > before);
    assert_eq!(fs::read(&file).unwrap().len(), 8);
}

#[test]
fn extended_attributes_are_set_replaced_and_removed() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let file = served.path("file");
    fs::write(&file, b"").unwrap();
    let set = |value: &[u8], flags| rustix::fs::setxattr(&file, "user.one", value, flags);
    let get = || {
        let mut value = [0; 100];
        rustix::fs::getxattr(&file, "user.one", &mut value[..]).map(|bytes| value[..bytes].to_vec())
    };
    assert_eq!(set(b"x", XattrFlags::REPLACE), Err(Errno::NODATA));
    set(b"first", XattrFlags::CREATE).unwrap();
    assert_eq!(get(), Ok(b"first".to_vec()));
    assert_eq!(set(b"x", XattrFlags::CREATE), Err(Errno::EXIST));
    set(b"", XattrFlags::REPLACE).unwrap();
    assert_eq!(get(), Ok(Vec::new()));
    set(&[7; 65_536], XattrFlags::empty()).unwrap();
    assert_eq!(rustix::fs::getxattr_query(&file, "user.one"), Ok(65_536));
    rustix::fs::removexattr(&file, "user.one").unwrap();
    assert_eq!(get(), Err(Errno::NODATA));
    assert_eq!(rustix::fs::removexattr(&file, "user.one"), Err(Errno::NODATA));
}

/// Writes at all places, with and without the page cache for writes, and reads them back, also after a remount of
/// sorts.
#[test]
fn what_is_written_is_read() {
    if !can_mount() {
        return;
    }
    for (options, is_collected) in [(writable(), true), (write_through(), false)] {
        let mut served = ServedDisk::start(options);
        let file = served.path("file");
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&file).unwrap();
        let mut expected = noise(3_000_001, 1);
        open.write_all_at(&expected, 0).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        for step in 0..300 {
            let (offset, bytes) = (random.usize(..3_100_000), random.usize(..20_000));
            let piece = noise(bytes, step);
            if expected.len() < offset + bytes {
                expected.resize(offset + bytes, 0);
            }
            expected[offset..offset + bytes].copy_from_slice(&piece);
            open.write_all_at(&piece, offset as u64).unwrap();
        }
        assert!(fs::read(&file).unwrap() == expected);
        open.sync_all().unwrap();
        assert!(served.asked.syncs.load(Ordering::SeqCst) >= 1);
        let largest = served.asked.largest_write.load(Ordering::SeqCst);
        assert!((512 << 10..=1 << 20).contains(&largest), "{largest}");
        // Appending, and a handle that cannot read: the kernel reads what surrounds the piece with it.
        let mut appending = OpenOptions::new().append(true).open(&file).unwrap();
        appending.write_all(b"appended").unwrap();
        expected.extend(b"appended");
        let writes = served.asked.writes.load(Ordering::SeqCst);
        (0..100).for_each(|_| open.write_all_at(b"x", 5).unwrap());
        expected[5] = b'x';
        let more = served.asked.writes.load(Ordering::SeqCst) - writes;
        assert!(if is_collected { more < 50 } else { more >= 100 }, "{more}");
        drop((open, appending));
        served.stop();
        assert!(served.at_end("/file").unwrap() == expected);
    }
}

#[test]
fn errors_of_the_filesystem_reach_programs() {
    if !can_mount() {
        return;
    }
    let mut served = ServedDisk::start(writable());
    let open = |name: &str| File::create(served.path(name)).unwrap();
    // Written later, the error comes with the sync.
    for name in ["damaged", "panics"] {
        let file = open(name);
        file.write_all_at(b"x", 0).unwrap();
        assert_eq!(number(&file.sync_all().unwrap_err()), Errno::IO, "{name}");
        assert_eq!(number(&file.set_len(9).unwrap_err()), Errno::IO, "{name}");
    }
    let through = OpenOptions::new().write(true).custom_flags(0o40000 | 0o4_010_000).open(served.path("damaged"));
    assert_eq!(number(&through.unwrap().write_all_at(b"x", 0).unwrap_err()), Errno::IO);
    let full = open("full");
    full.write_all_at(b"x", MAX_FILE_BYTES).unwrap();
    assert_eq!(number(&full.sync_all().unwrap_err()), Errno::NOSPC);
    // The server goes on.
    fs::write(served.path("good"), text(1000)).unwrap();
    let mut content = Vec::new();
    File::open(served.path("good")).unwrap().read_to_end(&mut content).unwrap();
    assert_eq!(content, text(1000));
    drop(full);
    assert_eq!(served.stop(), Ended::Stopped);
}
