//! A filesystem in memory, mounted through /dev/fuse and used as programs use it.
//!
//! Needs root and /dev/fuse. Without these the tests print what is missing and are skipped.

mod caches;
mod changes;
mod disk;
mod disk_requests;
mod endings;
mod load;
mod memory;
mod processes;
mod rights;
mod served;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;

use rustix::fs::{FileType, Mode, XattrFlags, setxattr};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use sealblock_fuse::{Ended, Options, Session};
use sealblock_proofs_btrfs_images::content::{noise, text};
use sealblock_proofs_btrfs_images::inodes::acl;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::skip;

use memory::Served;

/// The number of entries in a directory that takes several calls to read.
const CROWD: usize = 600;

/// Checks whether this process can mount.
pub fn can_mount() -> bool {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let why = match device {
        Err(error) => format!("/dev/fuse: {error}"),
        Ok(_) if !rustix::process::geteuid().is_root() => "not root".to_owned(),
        Ok(_) => return true,
    };
    skip(&why);
    false
}

/// A directory with entries of all types.
pub fn source() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for bytes in [0, 1, 4096, 5000, 3_000_001] {
        fs::write(path(&format!("file-{bytes}")), text(bytes)).unwrap();
    }
    fs::write(path("holes"), [vec![0; 8192], noise(5000, 1), vec![0; 20_000]].concat()).unwrap();
    fs::create_dir_all(path("deep/er")).unwrap();
    fs::hard_link(path("file-5000"), path("deep/er/linked")).unwrap();
    symlink("deep/er/linked", path("link")).unwrap();
    symlink("x".repeat(4000), path("long-link")).unwrap();
    for (name, value) in [("user.small", &b"value"[..]), ("user.empty", b""), ("user.large", &[b'v'; 1500])] {
        setxattr(path("file-4096"), name, value, XattrFlags::empty()).unwrap();
    }
    for (name, kind) in [("fifo", FileType::Fifo), ("device", FileType::CharacterDevice)] {
        let device = rustix::fs::makedev(259, 0x1_2345);
        rustix::fs::mknodat(rustix::fs::CWD, path(name), kind, Mode::from_raw_mode(0o640), device).unwrap();
    }
    let time = std::time::UNIX_EPOCH - std::time::Duration::new(5, 500);
    File::open(path("file-1")).unwrap().set_modified(time).unwrap();
    fs::set_permissions(path("file-1"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::write(path("private"), b"private").unwrap();
    fs::set_permissions(path("private"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(path("crowd")).unwrap();
    (0..CROWD).for_each(|number| fs::write(path(&format!("crowd/entry-{number:0>200}")), b"").unwrap());
    fs::write(path("damaged"), b"damaged!").unwrap();
    fs::write(path("panics"), b"panics!!").unwrap();
    fs::write(path("slow"), b"slow slow").unwrap();
    folder
}

/// Everything but the unreadable files.
fn without_traps(mut manifest: Manifest) -> Manifest {
    for trap in ["damaged", "panics", "slow"] {
        manifest.entries.remove(trap.as_bytes());
    }
    manifest
}

#[test]
fn a_mount_shows_what_the_filesystem_has() {
    if !can_mount() {
        return;
    }
    let source = source();
    for trap in ["damaged", "panics", "slow"] {
        fs::remove_file(source.path().join(trap)).unwrap();
    }
    // Reading may update the access time, so the first scan is not compared.
    Manifest::scan(source.path()).unwrap();
    let expected = Manifest::scan(source.path()).unwrap();
    let mut served = Served::start(source.path(), Options::default());
    let found = Manifest::scan(&served.point).unwrap();
    assert_eq!(without_traps(expected).difference(&found), Vec::<String>::new());
    assert_eq!(served.stop(), Ended::Stopped);
    assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0, "nothing is mounted any more");
}

#[test]
fn directories_have_their_dots_and_go_on_from_any_entry() {
    if !can_mount() {
        return;
    }
    let source = source();
    let served = Served::start(source.path(), Options::default());
    let names = |path: &Path| -> Vec<(String, u64)> {
        let directory = rustix::fs::Dir::new(File::open(path).unwrap()).unwrap();
        directory
            .map(|entry| entry.map(|one| (one.file_name().to_str().unwrap().to_owned(), one.ino())).unwrap())
            .collect()
    };
    let crowd = names(&served.path("crowd"));
    let ino = |name: &str| fs::metadata(served.path(name)).unwrap().ino();
    assert_eq!(crowd.len(), CROWD + 2);
    assert!(served.seen.directory_reads.load(Ordering::SeqCst) >= 3, "it needs several calls");
    assert_eq!(crowd[..2], [(".".to_owned(), ino("crowd")), ("..".to_owned(), ino(""))]);
    let mut sorted = crowd.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(sorted.len(), CROWD + 2, "each entry comes once");
    // The result is the same from the kernel's cache and when it is read from the filesystem again.
    assert_eq!(names(&served.path("crowd")), crowd);
    let mut directory = rustix::fs::Dir::new(File::open(served.path("crowd")).unwrap()).unwrap();
    let offset = directory.nth(399).unwrap().unwrap().offset();
    directory.seek(offset).unwrap();
    let next = directory.next().unwrap().unwrap();
    assert_eq!(next.file_name().to_str().unwrap(), crowd[400].0);
}

#[test]
fn a_listing_with_attributes_needs_no_lookups_and_goes_on_at_damaged_inodes() {
    if !can_mount() {
        return;
    }
    let source = source();
    fs::write(source.path().join("crowd/damaged"), b"no inode").unwrap();
    let served = Served::start(source.path(), Options::default());
    let crowd = served.path("crowd");
    fs::metadata(&crowd).unwrap();
    let before = served.seen.lookups.load(Ordering::SeqCst);
    let (mut good, mut damaged) = (0, 0);
    for entry in fs::read_dir(&crowd).unwrap() {
        match entry.unwrap().metadata() {
            Ok(metadata) => good += usize::from(metadata.is_file()),
            Err(error) => damaged += usize::from(Errno::from_io_error(&error) == Some(Errno::IO)),
        }
    }
    assert_eq!((good, damaged), (CROWD, 1));
    let lookups = served.seen.lookups.load(Ordering::SeqCst) - before;
    assert!(lookups < CROWD as u64 / 2, "{lookups} for {CROWD} entries");
}

/// Entries before the damage are listed, and then reading fails, with and without attributes.
#[test]
fn a_directory_that_is_damaged_in_the_middle_is_read_up_to_there() {
    if !can_mount() {
        return;
    }
    let source = source();
    // In the order of names it comes after the many other entries.
    fs::write(source.path().join("crowd/f-damaged-entry"), b"").unwrap();
    let served = Served::start(source.path(), Options::default());
    let entries: Vec<_> = fs::read_dir(served.path("crowd")).unwrap().collect();
    let (errors, good): (Vec<_>, Vec<_>) = entries.iter().partition(|entry| entry.is_err());
    assert_eq!(good.len(), CROWD);
    assert_eq!(errors.len(), 1);
    assert_eq!(Errno::from_io_error(errors[0].as_ref().unwrap_err()), Some(Errno::IO));
}

#[test]
fn files_are_read_in_pieces_of_any_size() {
    if !can_mount() {
        return;
    }
    let source = source();
    let served = Served::start(source.path(), Options::default());
    let (file, content) = (File::open(served.path("file-3000001")).unwrap(), text(3_000_001));
    for (offset, bytes) in [(0, 1), (4095, 2), (1_000_003, 70_001), (2_999_990, 100), (3_000_001, 10), (1 << 40, 10)] {
        let mut piece = vec![0; bytes];
        let read = file.read_at(&mut piece, offset as u64).unwrap();
        let expected = content.get(offset..content.len().min(offset + bytes)).unwrap_or_default();
        assert_eq!(&piece[..read], expected, "{bytes} at {offset}");
    }
    assert!(fs::read(served.path("file-3000001")).unwrap() == content);
    let largest = served.seen.largest_read.load(Ordering::SeqCst);
    assert!((128 << 10..=1 << 20).contains(&largest), "{largest}");
    let device = fs::metadata(&served.point).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let readahead = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).unwrap();
    assert_eq!(readahead.trim(), "1024");

    let holes = File::open(served.path("holes")).unwrap();
    let seek = |position| rustix::fs::seek(&holes, position);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), Ok(8192));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(8192)), Ok(16_384));
    assert_eq!(seek(rustix::fs::SeekFrom::Data(20_000)), Err(Errno::NXIO));
    drop((file, holes));
}

#[test]
fn errors_are_those_that_programs_expect() {
    if !can_mount() {
        return;
    }
    let source = source();
    let served = Served::start(source.path(), Options::default());
    let path = |name: &str| served.path(name);
    let number = |error: io::Error| Errno::from_io_error(&error).unwrap();
    assert_eq!(fs::read(path("damaged")).map_err(number), Err(Errno::IO));
    assert_eq!(fs::read(path("panics")).map_err(number), Err(Errno::IO), "and the server goes on:");
    assert_eq!(fs::read(path("file-1")).unwrap(), text(1));
    assert_eq!(fs::read(path("absent")).map_err(number), Err(Errno::NOENT));
    assert_eq!(fs::read(path("file-1/x")).map_err(number), Err(Errno::NOTDIR));
    assert_eq!(fs::read(path("deep")).map_err(number), Err(Errno::ISDIR));
    assert_eq!(fs::read(path(&"n".repeat(256))).map_err(number), Err(Errno::NAMETOOLONG));
    assert_eq!(fs::read_link(path("file-1")).map_err(number).map(drop), Err(Errno::INVAL));
    let lookups = served.seen.lookups.load(Ordering::SeqCst);
    assert_eq!(fs::read(path("absent")).map_err(number), Err(Errno::NOENT));
    assert_eq!(served.seen.lookups.load(Ordering::SeqCst), lookups, "the kernel keeps that there is nothing");

    let xattr = |name: &str, room: usize| {
        let mut value = vec![0; room];
        rustix::fs::getxattr(path("file-4096"), name, &mut value[..]).map(|bytes| value[..bytes].to_vec())
    };
    assert_eq!(xattr("user.small", 5), Ok(b"value".to_vec()));
    assert_eq!(xattr("user.small", 4), Err(Errno::RANGE));
    assert_eq!(xattr("user.empty", 4), Ok(Vec::new()));
    assert_eq!(xattr("user.absent", 100), Err(Errno::NODATA));
    assert_eq!(rustix::fs::getxattr_query(path("file-4096"), "user.large"), Ok(1500));
    let mut names = [0; 20];
    assert_eq!(rustix::fs::listxattr(path("file-4096"), &mut names[..]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::listxattr_query(path("file-1")), Ok(0));

    let size = rustix::fs::statvfs(&served.point).unwrap();
    assert_eq!((size.f_bsize, size.f_blocks, size.f_bfree, size.f_bavail), (4096, 1000, 300, 200));
    assert_eq!((size.f_files, size.f_ffree, size.f_namemax), (70, 7, 255));
}

#[test]
fn nothing_can_be_changed() {
    if !can_mount() {
        return;
    }
    let source = source();
    let served = Served::start(source.path(), Options::default());
    let path = |name: &str| served.path(name);
    let file = path("file-5000");
    let results = [
        ("write", OpenOptions::new().write(true).open(&file).map(drop)),
        ("create", File::create(path("new")).map(drop)),
        ("make", fs::create_dir(path("new"))),
        ("remove", fs::remove_file(&file)),
        ("remove a directory", fs::remove_dir(path("deep/er"))),
        ("rename", fs::rename(&file, path("new"))),
        ("link", fs::hard_link(&file, path("new"))),
        ("symlink", symlink("x", path("new"))),
        ("mode", fs::set_permissions(&file, fs::Permissions::from_mode(0o777))),
        ("owner", std::os::unix::fs::chown(&file, Some(1), None)),
        ("times", File::open(&file).unwrap().set_modified(std::time::SystemTime::now())),
        ("attribute", setxattr(&file, "user.x", b"x", XattrFlags::empty()).map_err(io::Error::from)),
        ("no attribute", rustix::fs::removexattr(path("file-4096"), "user.small").map_err(io::Error::from)),
    ];
    for (what, result) in results {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem, "{what}");
    }
}

#[test]
fn concurrent_reads_do_not_wait_for_a_slow_one() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut served = Served::start(source.path(), Options::default());
    let slow = served.path("slow");
    let waiting = thread::spawn(move || fs::read(slow));
    while served.seen.reads.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let path = served.path("file-3000001");
            thread::spawn(move || assert!(fs::read(path).unwrap() == text(3_000_001)))
        })
        .collect();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(!waiting.is_finished());
    served.gates.drain(..).for_each(|gate| gate.send(()).unwrap());
    assert_eq!(waiting.join().unwrap().unwrap(), b"slow slow");
    while served.seen.open_files.load(Ordering::SeqCst) != 0 {
        // The kernel releases files a little after they were closed.
        thread::yield_now();
    }
}

#[test]
fn no_more_calls_are_open_than_chosen() {
    if !can_mount() {
        return;
    }
    let source = source();
    for calls in [1, 3] {
        let served = Served::start(source.path(), Options { calls, ..Options::default() });
        let readers: Vec<_> = (0..6)
            .map(|number| {
                let path = served.path("file-3000001");
                thread::spawn(move || {
                    let file = File::open(path).unwrap();
                    let mut piece = vec![0; 100_000];
                    (0..20).for_each(|step| file.read_exact_at(&mut piece, (number * 20 + step) * 10_007).unwrap());
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let most = served.seen.most_reads.load(Ordering::SeqCst);
        assert!((1..=calls as u64).contains(&most), "{most} of {calls}");
    }
}

#[test]
fn other_users_need_the_option_and_permissions() {
    if !can_mount() {
        return;
    }
    let source = source();
    let has_lists = [("of-another", 1234), ("of-nobody", 65_534)].into_iter().all(|(name, user)| {
        let path = source.path().join(name);
        fs::write(&path, b"by list").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        setxattr(path, "system.posix_acl_access", &acl(user, 1234), XattrFlags::empty()).is_ok()
    });
    if !has_lists {
        skip("folders for temporary files have no access control lists");
    }
    let reads = |served: &Served, name: &str| {
        let mut cat = Command::new("cat");
        cat.uid(65_534).gid(65_534);
        let status = cat.arg(served.path(name)).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.unwrap().success()
    };
    let served = Served::start(source.path(), Options::default());
    assert!(!reads(&served, "file-5000"));
    let served = Served::start(source.path(), Options { allow_other: true, ..Options::default() });
    assert!(reads(&served, "file-5000"));
    assert!(!reads(&served, "private"));
    assert_eq!((reads(&served, "of-another"), reads(&served, "of-nobody")), (false, has_lists));
}

#[test]
fn nothing_is_mounted_without_a_folder_and_dropping_a_session_unmounts() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let absent = Session::mount(&folder.path().join("absent"), 256, &Options::default());
    assert!(absent.err().unwrap().to_string().contains("absent: No such file"));
    fs::write(folder.path().join("below"), b"x").unwrap();
    let session = Session::mount(folder.path(), 256, &Options::default()).unwrap();
    assert_eq!(session.point(), folder.path().canonicalize().unwrap());
    drop(session);
    assert_eq!(fs::read(folder.path().join("below")).unwrap(), b"x");
    // A covered mount stays and refuses everything; dropping its session does not wait.
    let session = Session::mount(folder.path(), 256, &Options::default()).unwrap();
    rustix::mount::mount("none", folder.path(), "tmpfs", MountFlags::empty(), None).unwrap();
    drop(session);
    rustix::mount::unmount(folder.path(), UnmountFlags::DETACH).unwrap();
    let refused = fs::read(folder.path().join("below")).unwrap_err();
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::IO));
    rustix::mount::unmount(folder.path(), UnmountFlags::DETACH).unwrap();
    assert_eq!(fs::read(folder.path().join("below")).unwrap(), b"x");
}
