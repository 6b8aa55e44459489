//! How a mount that can be changed ends, and what becomes of what programs wrote last.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use sealblock_fuse::{Ended, Options, WriteOptions};
use sealblock_proofs_btrfs_images::content::noise;

use crate::can_mount;
use crate::changes::number;
use crate::disk::{ServedDisk, writable};
use crate::processes::unmount_when_idle;

const BYTES: usize = 20_000_003;

/// Waits until something is so.
pub fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_stop_with_no_file_open_loses_nothing() {
    if !can_mount() {
        return;
    }
    for round in 0..3 {
        let mut served = ServedDisk::start(writable());
        let content = noise(BYTES, round);
        fs::write(served.path("file"), &content).unwrap();
        assert_eq!(served.stop(), Ended::Stopped);
        assert!(served.at_end("/file").unwrap() == content);
        assert_eq!(served.asked.open_files.load(Ordering::SeqCst), 0);
        assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0, "nothing is mounted any more");
    }
}

#[test]
fn a_stop_with_a_file_open_loses_nothing_and_the_file_fails_from_then_on() {
    if !can_mount() {
        return;
    }
    for round in 0..3 {
        let mut served = ServedDisk::start(writable());
        let content = noise(BYTES, round);
        let open = OpenOptions::new().read(true).write(true).create_new(true).open(served.path("file")).unwrap();
        open.write_all_at(&content, 0).unwrap();
        assert_eq!(served.stop(), Ended::Stopped);
        assert!(served.at_end("/file").unwrap() == content);
        assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0, "nothing is mounted any more");
        let lost = open.write_all_at(b"x", 0).and_then(|()| open.sync_all()).unwrap_err();
        assert!([ErrorKind::NotConnected, ErrorKind::ConnectionAborted].contains(&lost.kind()), "{lost}");
    }
}

/// The filesystem takes long for what the kernel writes back when it must stop.
#[test]
fn a_stop_waits_for_slow_writes() {
    if !can_mount() {
        return;
    }
    // Most of them wait in the kernel's queue.
    let mut served = ServedDisk::start(Options { calls: 3, ..writable() });
    let content = noise(BYTES, 9);
    let open = File::create(served.path("file")).unwrap();
    open.write_all_at(&content, 0).unwrap();
    served.asked.holds_writes.store(true, Ordering::SeqCst);
    served.tell_to_stop();
    until(|| served.asked.held.load(Ordering::SeqCst) > 0);
    thread::sleep(Duration::from_millis(300));
    assert!(!served.has_ended());
    served.asked.holds_writes.store(false, Ordering::SeqCst);
    assert_eq!(served.wait(), Ended::Stopped);
    assert!(served.at_end("/file").unwrap() == content);
}

#[test]
fn a_stop_does_not_wait_forever() {
    if !can_mount() {
        return;
    }
    let write = WriteOptions { patience: Duration::from_millis(300), ..WriteOptions::default() };
    let mut served = ServedDisk::start(Options { write: Some(write), ..Options::default() });
    fs::write(served.path("safe"), b"safe").unwrap();
    let open = File::create(served.path("file")).unwrap();
    open.write_all_at(&noise(BYTES, 9), 0).unwrap();
    served.asked.holds_writes.store(true, Ordering::SeqCst);
    let start = Instant::now();
    served.tell_to_stop();
    let lost = served.result().unwrap_err().to_string();
    assert!(lost.contains("may be lost: nothing could be written for 0.3 s"), "{lost}");
    assert!((Duration::from_millis(300)..Duration::from_secs(10)).contains(&start.elapsed()));
    assert_eq!(served.at_end("/safe").unwrap(), b"safe");
    assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0, "nothing is mounted any more");
    let lost = open.sync_all().unwrap_err();
    assert!(matches!(number(&lost), Errno::NOTCONN | Errno::CONNABORTED | Errno::IO), "{lost}");
}

/// A stop takes longer than its patience, as long as something goes on.
#[test]
fn a_stop_waits_while_writes_succeed() {
    if !can_mount() {
        return;
    }
    let write = WriteOptions { patience: Duration::from_millis(600), ..WriteOptions::default() };
    let mut served = ServedDisk::start(Options { write: Some(write), calls: 3, ..Options::default() });
    let content = noise(BYTES, 9);
    let open = File::create(served.path("file")).unwrap();
    open.write_all_at(&content, 0).unwrap();
    served.asked.holds_writes.store(true, Ordering::SeqCst);
    let start = Instant::now();
    served.tell_to_stop();
    while start.elapsed() < Duration::from_millis(1500) && !served.has_ended() {
        thread::sleep(Duration::from_millis(100));
        until(|| served.asked.held.load(Ordering::SeqCst) > 0 || served.has_ended());
        served.asked.holds_writes.store(false, Ordering::SeqCst);
        let all = served.asked.held.load(Ordering::SeqCst);
        until(|| served.asked.held.load(Ordering::SeqCst) < all || served.has_ended());
        served.asked.holds_writes.store(true, Ordering::SeqCst);
    }
    served.asked.holds_writes.store(false, Ordering::SeqCst);
    assert_eq!(served.wait(), Ended::Stopped);
    assert!(served.at_end("/file").unwrap() == content);
}

#[test]
fn unmounting_writes_everything_and_forgets_everything() {
    if !can_mount() {
        return;
    }
    let mut served = ServedDisk::start(writable());
    let content = noise(BYTES, 3);
    let open = File::create(served.path("file")).unwrap();
    open.write_all_at(&content, 0).unwrap();
    let unmount = || rustix::mount::unmount(&served.point, UnmountFlags::empty());
    assert_eq!(unmount(), Err(Errno::BUSY));
    fs::create_dir(served.path("directory")).unwrap();
    let inodes = ["file", "directory"].map(|name| fs::metadata(served.path(name)).unwrap().ino());
    drop(open);
    unmount_when_idle(&served.point);
    assert_eq!(served.wait(), Ended::Unmounted);
    assert!(served.at_end("/file").unwrap() == content);
    let forgotten = served.asked.forgotten.lock().unwrap().clone();
    for ino in inodes {
        assert_eq!(forgotten.iter().filter(|one| **one == ino).count(), 1, "{forgotten:?}");
    }
}

/// A file without a name is deleted when it is closed, and at the latest at the end.
#[test]
fn files_without_names_live_until_they_are_forgotten() {
    if !can_mount() {
        return;
    }
    let mut served = ServedDisk::start(writable());
    let open = |name: &str| OpenOptions::new().read(true).write(true).create_new(true).open(served.path(name)).unwrap();
    let (closed, kept) = (open("closed"), open("kept"));
    let [of_closed, of_kept] = [&closed, &kept].map(|file| file.metadata().unwrap().ino());
    for (file, name) in [(&closed, "closed"), (&kept, "kept")] {
        file.write_all_at(b"before", 0).unwrap();
        fs::remove_file(served.path(name)).unwrap();
        file.write_all_at(b"AFTER", 3).unwrap();
        file.sync_all().unwrap();
        let mut content = [0; 8];
        file.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"befAFTER");
        assert_eq!(file.metadata().unwrap().nlink(), 0);
    }
    drop(closed);
    until(|| served.asked.deleted.lock().unwrap().contains(&of_closed));
    assert_eq!(*served.asked.deleted.lock().unwrap(), [of_closed]);
    served.stop();
    assert_eq!(*served.asked.deleted.lock().unwrap(), [of_closed, of_kept]);
    drop(kept);
}

#[test]
fn dropping_a_session_that_nobody_serves_unmounts() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let session = sealblock_fuse::Session::mount(folder.path(), crate::disk::ROOT, &writable()).unwrap();
    let notifier = session.notifier();
    drop(session);
    // Nobody is there any more.
    notifier.inode(crate::disk::ROOT);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
