//! What the kernel caches: content, attributes, names, directories; and what goes past its caches.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, IFlags, OFlags, ioctl_getflags, ioctl_setflags};
use rustix::io::Errno;
use sealblock_fuse::WriteDurability;
use sealblock_proofs_btrfs_images::content::{noise, text};

use crate::can_mount;
use crate::changes::number;
use crate::disk::{ServedDisk, writable, write_through};
use crate::disk_requests::{PANICS, REMOVES, REPLACED, REPLACES, RETURNS_TOO_MUCH};
use crate::endings::until;

/// Opens for reading and writing with these flags of open(2), and creates if needed.
fn open(path: &Path, flags: OFlags) -> File {
    let flags = flags.bits() as i32;
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path).unwrap()
}

#[test]
fn cached_and_direct_files_show_the_same() {
    if !can_mount() {
        return;
    }
    for options in [writable(), write_through()] {
        let served = ServedDisk::start(options);
        let (cached, direct) =
            (open(&served.path("file"), OFlags::empty()), open(&served.path("file"), OFlags::DIRECT));
        let mut random = fastrand::Rng::with_seed(3);
        let mut expected = vec![0; 200_000];
        cached.write_all_at(&expected, 0).unwrap();
        for step in 0..300 {
            let (offset, bytes) = (random.usize(..190_000), random.usize(1..10_000));
            let (writer, reader) = if random.bool() { (&cached, &direct) } else { (&direct, &cached) };
            let piece = noise(bytes, step);
            writer.write_all_at(&piece, offset as u64).unwrap();
            expected[offset..offset + bytes].copy_from_slice(&piece);
            let mut found = vec![0; expected.len()];
            reader.read_exact_at(&mut found, 0).unwrap();
            assert!(found == expected, "step {step}");
        }
    }
}

#[test]
fn all_writes_change_the_time_that_programs_see() {
    if !can_mount() {
        return;
    }
    for (options, flags) in [
        (writable(), OFlags::empty()),
        (writable(), OFlags::DIRECT),
        (write_through(), OFlags::empty()),
        (write_through(), OFlags::DIRECT),
    ] {
        let served = ServedDisk::start(options);
        let file = open(&served.path("file"), flags);
        file.write_all_at(&[1; 8192], 0).unwrap();
        let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        file.set_modified(long_ago).unwrap();
        assert_eq!(fs::metadata(served.path("file")).unwrap().modified().unwrap(), long_ago);
        file.write_all_at(&[2; 4096], 0).unwrap();
        assert!(fs::metadata(served.path("file")).unwrap().modified().unwrap() > long_ago, "{flags:?}");
    }
}

/// The kernel sends no sync after a write that bypasses its cache.
#[test]
fn direct_writes_are_as_durable_as_they_were_asked_to_be() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(write_through());
    let write = |flags| open(&served.path("file"), flags).write_all_at(b"data", 0).unwrap();
    // Not the constant of rustix, which is that of O_SYNC.
    let data = OFlags::from_bits_retain(0o10000);
    write(OFlags::DIRECT);
    assert_eq!(*served.asked.durable.lock().unwrap(), []);
    write(OFlags::DIRECT | data);
    write(OFlags::DIRECT | OFlags::SYNC);
    assert_eq!(*served.asked.durable.lock().unwrap(), [WriteDurability::Data, WriteDurability::All]);
    assert_eq!(served.asked.syncs.load(Ordering::SeqCst), 0);
    // Others are written, and then synced.
    write(OFlags::SYNC);
    assert!(served.asked.syncs.load(Ordering::SeqCst) > 0);
    let writes = served.asked.writes.load(Ordering::SeqCst);
    assert_eq!(writes, 4, "the last one has arrived, too");
    File::open(&served.point).unwrap().sync_all().unwrap();
    assert_eq!(served.asked.directory_syncs.load(Ordering::SeqCst), 1);
}

#[test]
fn direct_writes_to_one_file_come_at_the_same_time() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(write_through());
    let direct = Arc::new(open(&served.path("file"), OFlags::DIRECT));
    direct.write_all_at(&[0; 40_960], 0).unwrap();
    served.asked.holds_writes.store(true, Ordering::SeqCst);
    let writers: Vec<_> = (0..8_u64)
        .map(|number| {
            let direct = Arc::clone(&direct);
            thread::spawn(move || direct.write_all_at(&[number as u8; 4096], number * 4096).unwrap())
        })
        .collect();
    until(|| served.asked.held.load(Ordering::SeqCst) == 8);
    served.asked.holds_writes.store(false, Ordering::SeqCst);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let content = fs::read(served.path("file")).unwrap();
    assert!(content.chunks(4096).take(8).zip(0..).all(|(page, number)| page == [number; 4096]));
}

#[test]
fn space_is_allocated_punched_and_zeroed() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let file = open(&served.path("file"), OFlags::empty());
    let mut expected = text(100_000);
    file.write_all_at(&expected, 0).unwrap();
    let allocate = |flags, offset, bytes| rustix::fs::fallocate(&file, flags, offset, bytes);
    allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 10_001, 20_000).unwrap();
    expected[10_001..30_001].fill(0);
    assert!(fs::read(served.path("file")).unwrap() == expected);
    allocate(FallocateFlags::ZERO_RANGE, 90_000, 20_000).unwrap();
    expected.resize(110_000, 0);
    expected[90_000..].fill(0);
    assert!(fs::read(served.path("file")).unwrap() == expected);
    allocate(FallocateFlags::KEEP_SIZE, 110_000, 1000).unwrap();
    assert!(fs::read(served.path("file")).unwrap() == expected);
    allocate(FallocateFlags::empty(), 110_000, 1000).unwrap();
    expected.resize(111_000, 0);
    assert!(fs::read(served.path("file")).unwrap() == expected);
    for flags in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        assert_eq!(allocate(flags, 0, 4096), Err(Errno::OPNOTSUPP));
    }
    assert_eq!(allocate(FallocateFlags::empty(), 1 << 40, 1), Err(Errno::NOSPC));
}

#[test]
fn ranges_are_copied_by_the_filesystem() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let (from, to) = (open(&served.path("from"), OFlags::empty()), open(&served.path("to"), OFlags::empty()));
    let content = text(300_000);
    from.write_all_at(&content, 0).unwrap();
    to.write_all_at(&[b'-'; 1000], 0).unwrap();
    let (mut offset, mut target) = (1000, 500);
    let copied = rustix::fs::copy_file_range(&from, Some(&mut offset), &to, Some(&mut target), 1 << 40).unwrap();
    assert_eq!((copied, offset, target), (299_000, 300_000, 299_500));
    assert_eq!(served.asked.copies.load(Ordering::SeqCst), 1);
    let found = fs::read(served.path("to")).unwrap();
    assert!(found[..500] == [b'-'; 500] && found[500..] == content[1000..]);
    // Within a file, and to where nothing is yet.
    let (mut offset, mut target) = (0, 400_000);
    rustix::fs::copy_file_range(&from, Some(&mut offset), &from, Some(&mut target), 1000).unwrap();
    let found = fs::read(served.path("from")).unwrap();
    assert!(found.len() == 401_000 && found[400_000..] == content[..1000]);
}

/// The kernel is told of what changes behind its back.
#[test]
fn commands_reach_the_filesystem_and_what_they_change_is_seen() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    let path = served.path("file");
    fs::write(&path, text(50_000)).unwrap();
    let file = File::open(&path).unwrap();
    let set = |flags: u32| ioctl_setflags(&file, IFlags::from_bits_retain(flags));
    let get = || ioctl_getflags(&file).map(|flags| flags.bits());
    assert_eq!(get(), Ok(0));
    assert_eq!(fs::read(&path).unwrap(), text(50_000));
    set(REPLACES).unwrap();
    assert_eq!(get(), Ok(REPLACES));
    until(|| fs::read(&path).unwrap().starts_with(REPLACED));
    assert!(fs::read(&path).unwrap()[REPLACED.len()..] == text(50_000)[REPLACED.len()..]);
    set(RETURNS_TOO_MUCH).unwrap();
    assert_eq!(get(), Err(Errno::IO));
    assert_eq!(set(PANICS), Err(Errno::IO));

    let directory = served.path("directory");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("victim"), b"x").unwrap();
    fs::write(directory.join("other"), b"x").unwrap();
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
    let opened = File::open(&directory).unwrap();
    ioctl_setflags(&opened, IFlags::from_bits_retain(REMOVES)).unwrap();
    until(|| fs::metadata(directory.join("victim")).is_err());
    until(|| fs::read_dir(&directory).unwrap().count() == 1);
    assert_eq!(ioctl_getflags(&opened).unwrap().bits(), REMOVES);
    // What the filesystem does not know.
    assert_eq!(rustix::fs::ioctl_blksszget(&file).map(drop), Err(Errno::NOTTY));
    assert_eq!(rustix::fs::ioctl_ficlone(&opened, &file), Err(Errno::ISDIR));
}

/// Renaming gives an entry a higher cookie, so that a listing would meet it again and again.
#[test]
fn listing_a_directory_ends_although_its_entries_are_renamed() {
    if !can_mount() {
        return;
    }
    const ENTRIES: usize = 1000;
    let served = ServedDisk::start(writable());
    let path = |name: &str| served.path("directory").join(name);
    fs::create_dir(served.path("directory")).unwrap();
    (0..ENTRIES).for_each(|number| drop(File::create(path(&format!("{number:0>100}"))).unwrap()));
    let mut directory = rustix::fs::Dir::new(File::open(served.path("directory")).unwrap()).unwrap();
    let mut seen = 0;
    while let Some(entry) = directory.read() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_str().unwrap();
        if !matches!(name, "." | "..") {
            seen += 1;
            assert!(seen <= ENTRIES, "it does not end");
            fs::rename(path(name), path(&format!("renamed-{name}"))).unwrap();
        }
    }
    assert_eq!(seen, ENTRIES);
    // From the beginning again, it has what is there now.
    fs::write(path("new"), b"").unwrap();
    directory.rewind();
    let names: BTreeSet<_> = directory.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
    assert_eq!(names.len(), ENTRIES + 3);
    assert!(names.contains("new"));
    assert!(names.iter().filter(|name| name.starts_with("renamed-")).count() == ENTRIES);
}

#[test]
fn an_unknown_file_has_no_error_number() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    assert_eq!(number(&fs::read(served.path("absent")).unwrap_err()), Errno::NOENT);
    fs::write(served.path("absent"), b"now").unwrap();
    assert_eq!(fs::read(served.path("absent")).unwrap(), b"now");
    fs::remove_file(served.path("absent")).unwrap();
    assert_eq!(number(&fs::read(served.path("absent")).unwrap_err()), Errno::NOENT);
    fs::create_dir(served.path("absent")).unwrap();
    assert!(fs::metadata(served.path("absent")).unwrap().is_dir());
}
