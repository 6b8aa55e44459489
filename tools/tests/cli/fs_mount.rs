//! `fs mount -o rw`: what programs write is there, for Linux too, whatever ends the mount.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::common::serving::{Serving, can_mount};
use crate::common::{Place, has, noise, skipped};

pub(super) const MIB: u64 = 1 << 20;
/// Times that the process is killed; ten times as many with `SEALBLOCK_ENGINE=all`.
const KILLS: u64 = 10;
/// The flag of open(2) for writes that are durable when they return.
const O_DSYNC: i32 = 0o10_000;
const SECTOR: usize = 4096;
const NODE: usize = 16 << 10;

/// A place with a new filesystem in `disk`, and a directory `point`.
pub(super) fn new(bytes: u64) -> Place {
    let place = Place::in_memory();
    place.write("disk", b"");
    place.set_len("disk", bytes);
    place.run("fs format disk").succeeds();
    fs::create_dir(place.path("point")).unwrap();
    place
}

/// Our own check finds nothing, and neither does that of btrfs-progs, where it is installed.
#[track_caller]
pub(super) fn is_clean(place: &Place) {
    place.run("fs check disk").succeeds().says(&["clean; "]);
    place.run("fs verify disk").succeeds().says(&["clean; "]);
    if run("btrfs", ["--version"]).is_ok() {
        let disk = place.path("disk");
        run("btrfs", ["check".as_ref(), "--readonly".as_ref(), disk.as_os_str()]).unwrap();
    }
}

/// Makes a bit of everything in a directory.
fn fill(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder.join("a/b"))?;
    for (number, bytes) in [(1, 1), (2, 2000), (3, 5000), (4, 300_000), (5, 3 << 20)] {
        fs::write(folder.join(format!("a/file{number}")), noise(number, bytes))?;
    }
    let sparse = File::create(folder.join("a/sparse"))?;
    sparse.write_all_at(b"in the middle", 10 * MIB + 100)?;
    sparse.set_len(20 * MIB)?;
    fs::hard_link(folder.join("a/file3"), folder.join("a/b/another name"))?;
    fs::rename(folder.join("a/file2"), folder.join("a/b/moved"))?;
    fs::write(folder.join("a/gone"), b"gone")?;
    fs::remove_file(folder.join("a/gone"))?;
    symlink("../a/file1", folder.join("a/link"))?;
    fs::set_permissions(folder.join("a/file4"), fs::Permissions::from_mode(0o4751))?;
    std::os::unix::fs::chown(folder.join("a/b"), Some(7), Some(8))?;
    let cut = OpenOptions::new().write(true).open(folder.join("a/file5"))?;
    cut.set_len(1_234_567)?;
    cut.write_all_at(b"behind the old end", 2 * MIB)?;
    Ok(())
}

/// What a program does on the mount, which notes what it synced.
type Task = fn(&Path, &Log, u64) -> io::Result<()>;

#[test]
fn what_programs_write_is_there_for_linux() {
    if !can_mount() {
        return;
    }
    let place = new(400 * MIB);
    let serving = Serving::new(&place, "-o rw disk point");
    let point = place.path("point");
    fill(&point).unwrap();
    // The process holds its targets.
    place.run("fs mkdir disk/x").fails(3, &["disk", "in use"]);
    place.run("fs mount -o rw disk point").fails(3, &["disk", "in use"]);
    let written = Manifest::scan(&point).unwrap();
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
    let serving = Serving::new(&place, "-o rw,writethrough disk point");
    let found = Manifest::scan(&point).unwrap();
    assert_eq!(written.difference(&found), [""; 0]);
    assert_eq!(serving.end(), 0);
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let mount = Mount::new(&[place.path("disk")], "noatime").unwrap();
    let found = Manifest::scan(&mount.path("")).unwrap();
    assert_eq!(written.difference(&found), [""; 0]);
    fs::write(mount.path("from Linux"), b"here").unwrap();
    run("btrfs", ["scrub".as_ref(), "start".as_ref(), "-B".as_ref(), mount.path("").as_os_str()]).unwrap();
    mount.unmount().unwrap();
    let serving = Serving::new(&place, "-o rw disk point");
    assert_eq!(place.read("point/from Linux"), b"here");
    assert_eq!(serving.end(), 0);
    is_clean(&place);
}

/// A copy of a node that was found damaged is told at the end, and the point of a mount is a directory.
#[test]
fn a_damaged_copy_is_told_at_the_end() {
    if !can_mount() {
        return;
    }
    let place = new(300 * MIB);
    place.run("fs mount -o rw disk disk").fails(3, &["not a directory"]);
    place.run("fs mkdir disk/here-is-the-name").succeeds();
    let serving = Serving::new(&place, "-o rw disk point");
    assert_eq!(serving.unmount(), 0);
    place.run("fs check disk").succeeds().says(&["clean; "]);
    let mut image = place.read("disk");
    let name = b"here-is-the-name";
    let is_node = |node: &&mut [u8]| **node != [0; NODE] && node.windows(name.len()).any(|bytes| bytes == name);
    let mut nodes: Vec<&mut [u8]> = image.chunks_exact_mut(NODE).filter(is_node).collect();
    // Older nodes are still there, too. The first copies of all come before the second ones.
    let copies = nodes.len() / 2;
    nodes.iter_mut().take(copies).for_each(|node| node[NODE / 2] ^= 1);
    place.write("disk", &image);
    let serving = Serving::new(&place, "-o rw disk point");
    assert!(place.path("point/here-is-the-name").is_dir());
    assert_eq!(serving.unmount(), 1);
    let serving = Serving::new(&place, "-o rw disk point");
    assert!(place.path("point/here-is-the-name").is_dir());
    assert_eq!(serving.unmount(), 0, "the copy was restored");
    is_clean(&place);
}

#[test]
fn a_signal_loses_nothing_of_what_was_written() {
    if !can_mount() {
        return;
    }
    let place = new(300 * MIB);
    for round in 0..3 {
        let serving = Serving::new(&place, "-o rw,commit=300 disk point");
        // Nothing of it was synced, and the file is open.
        let name = format!("point/dirty{round}");
        let mut file = File::create(place.path(&name)).unwrap();
        file.write_all(&noise(round, 5_000_000)).unwrap();
        fs::create_dir(place.path(format!("point/dir{round}"))).unwrap();
        // The last one is that of a terminal that is closed.
        assert_eq!(serving.end_by(["-TERM", "-INT", "-HUP"][round as usize]), 0);
        drop(file);
        is_clean(&place);
        assert!(place.run(&format!("fs cat disk/dirty{round}")).succeeds().stdout == noise(round, 5_000_000));
        place.run(&format!("fs ls disk/dir{round}")).succeeds();
    }
}

#[test]
fn a_full_filesystem_is_an_error_of_the_write_and_nothing_more() {
    if !can_mount() {
        return;
    }
    let place = new(120 * MIB);
    let serving = Serving::new(&place, "-o rw,writethrough disk point");
    let mut file = File::create(place.path("point/large")).unwrap();
    let data = noise(1, 1 << 20);
    let error = (0..200).find_map(|_| file.write_all(&data).err()).expect("it is full");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    fs::remove_file(place.path("point/large")).unwrap();
    drop(file);
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while fs::write(place.path("point/small"), &data[..500_000]).is_err() {
        assert!(std::time::Instant::now() < deadline, "the space of a deleted file is free again");
        thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
    assert!(place.run("fs cat disk/small").succeeds().stdout == data[..500_000]);
}

/// What a command changes behind the kernel's pages, a program sees at once, and what it writes next does not bring back
/// what was there.
#[test]
fn what_a_command_changes_stays_changed() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    for options in ["rw", "rw,writethrough"] {
        let place = new(1024 * MIB);
        let serving = Serving::new(&place, &format!("-o {options} disk point"));
        let script = "\
import fcntl, os, struct, sys
root = os.open(sys.argv[1], os.O_RDONLY)
def new(name):
    return os.open(name, os.O_RDWR | os.O_CREAT, 0o644, dir_fd=root)
for step in range(150):
    is_synced, is_clone = step % 2, step % 4 < 2
    file = new(f'file{step}')
    if not is_clone:
        flags = bytearray(8)
        fcntl.ioctl(file, 0x80086601, flags)
        fcntl.ioctl(file, 0x40086602, struct.pack('=Q', struct.unpack('=Q', flags)[0] | 0x800000))
    os.pwrite(file, b'a' * 8192, 0)
    if is_clone:
        other = new('other')
        os.pwrite(other, bytes([66 + step % 20]) * 8192, 0)
        if is_synced:
            os.fsync(other)
    if is_synced:
        os.fsync(file)
    if is_clone:
        fcntl.ioctl(file, 0x4020b701, struct.pack('=QQQQ', os.fstat(other).st_ino, 0, 0, 0))
        expected = bytearray(bytes([66 + step % 20]) * 8192)
    else:
        fcntl.ioctl(file, 0x4010b705, struct.pack('=QQ', 0, 8192))
        expected = bytearray(8192)
    os.pwrite(file, b'x', 100)
    expected[100:101] = b'x'
    os.fsync(file)
    assert os.pread(file, 8192, 0) == expected, step
    assert not os.access(f'{sys.argv[1]}/snapshot{step}', os.F_OK)
    fcntl.ioctl(root, 0xc118b704, bytearray(struct.pack('=Q256sQQ', 0, f'snapshot{step}'.encode(), os.fstat(root).st_ino, 1)))
    os.stat(f'snapshot{step}', dir_fd=root)
    assert open(f'{sys.argv[1]}/snapshot{step}/file{step}', 'rb').read() == expected, step
    if step > 2:
        fcntl.ioctl(root, 0x4108b703, struct.pack('=Q256s', 0, f'snapshot{step}'.encode()))
        assert not os.access(f'{sys.argv[1]}/snapshot{step}', os.F_OK), step
";
        run("python3", ["-c".as_ref(), script.as_ref(), place.path("point").as_os_str()]).unwrap();
        assert_eq!(serving.unmount(), 0);
        place.run("fs check disk").succeeds().says(&["clean; "]);
    }
}

/// A file is written anew again and again, with a snapshot of each content, which is deleted at once. Long before the next
/// commit, all this would be more than there is space for.
#[test]
fn space_of_deleted_snapshots_is_there_when_it_is_needed() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    let place = new(200 * MIB);
    let serving = Serving::new(&place, "-o rw,commit=300 disk point");
    let script = "\
import fcntl, os, struct, sys
root = os.open(sys.argv[1], os.O_RDONLY)
number = os.fstat(root).st_ino
for step in range(30):
    file = os.open('file', os.O_RDWR | os.O_CREAT | os.O_TRUNC, dir_fd=root)
    data = bytes([65 + step]) * (20 << 20)
    assert os.write(file, data) == len(data)
    os.fsync(file)
    os.close(file)
    fcntl.ioctl(root, 0xc118b704, bytearray(struct.pack('=Q256sQQ', 0, b'snapshot', number, 1)))
    fcntl.ioctl(root, 0x4108b703, struct.pack('=Q256s', 0, b'snapshot'))
";
    run("python3", ["-c".as_ref(), script.as_ref(), place.path("point").as_os_str()]).unwrap();
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
    assert!(place.run("fs cat disk/file").succeeds().stdout == [65 + 29; 20 << 20]);
}

/// Space is allocated in advance that only a file had which is deleted, long before the next commit.
#[test]
fn space_of_deleted_files_can_be_allocated_at_once() {
    if !can_mount() {
        return;
    }
    let place = new(200 * MIB);
    let serving = Serving::new(&place, "-o rw,commit=300 disk point");
    for _ in 0..5 {
        let path = place.path("point/file");
        run("fallocate", ["-l", "100M", path.to_str().unwrap()]).unwrap();
        assert!(fs::metadata(&path).unwrap().blocks() >= (100 << 20) / 512);
        fs::remove_file(&path).unwrap();
    }
    assert!(run("fallocate", ["-l", "300M", place.path("point/other").to_str().unwrap()]).is_err());
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
}

#[test]
fn the_space_of_an_open_file_is_shown() {
    if !can_mount() {
        return;
    }
    let place = new(200 * MIB);
    let serving = Serving::new(&place, "-o rw disk point");
    let mut file = File::create(place.path("point/file")).unwrap();
    let is_shown = |file: &File, bytes: u64| {
        let shown = || file.metadata().unwrap().blocks() * 512 == bytes;
        (0..40).any(|_| {
            shown() || {
                thread::sleep(Duration::from_millis(100));
                false
            }
        })
    };
    for step in 1..4 {
        file.write_all(&vec![step as u8; 300 << 10]).unwrap();
        file.sync_all().unwrap();
        assert!(is_shown(&file, (300 << 10) * step), "{step}");
    }
    drop(file);
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
}

#[test]
fn an_open_file_without_a_name_keeps_its_data() {
    if !can_mount() {
        return;
    }
    let place = new(300 * MIB);
    let serving = Serving::new(&place, "-o rw,commit=1 disk point");
    let data = noise(3, 2_000_000);
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(place.path("point/file"));
    let mut file = file.unwrap();
    file.write_all(&data).unwrap();
    fs::remove_file(place.path("point/file")).unwrap();
    thread::sleep(Duration::from_millis(2500));
    file.sync_all().unwrap();
    let mut found = vec![0; data.len()];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(found == data);
    file.write_all_at(b"still here", 10).unwrap();
    assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().len()), (0, 2_000_000));
    drop(file);
    assert_eq!(serving.unmount(), 0);
    is_clean(&place);
}

#[test]
fn commands_make_subvolumes_and_snapshots() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    let place = new(1024 * MIB);
    let serving = Serving::new(&place, "-o rw disk point");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/fs_mount.py");
    let output = Command::new("python3").arg(script).arg(place.path("point")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(serving.unmount(), 0);
    // A file of it has no checksums.
    place.run("fs check disk").succeeds().says(&["clean; "]);
    // What was deleted goes at the latest while it is mounted again.
    let serving = Serving::new(&place, "-o rw,commit=1 disk point");
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(serving.unmount(), 0);
    let listed = place.run("fs subvolume list disk --json").succeeds().json();
    let mut paths: Vec<_> =
        listed["subvolumes"].as_array().unwrap().iter().map(|one| one["path"].to_string()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["\"/\"", "\"/empty\"", "\"/snapshot\""]);
}

/// What programs wrote is durable after a command, though they have not synced it.
#[test]
fn a_command_makes_everything_durable() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    let place = new(300 * MIB);
    for round in 0..3 {
        let serving = Serving::new(&place, "-o rw,commit=300 disk point");
        let data = noise(round, 20 << 20);
        let mut file = File::create(place.path("point/file")).unwrap();
        file.write_all(&data).unwrap();
        let ioctl = "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0xb700)";
        run("python3", ["-c".as_ref(), ioctl.as_ref(), place.path("point").as_os_str()]).unwrap();
        serving.kill();
        assert!(place.run("fs cat disk/file").succeeds().stdout == data);
    }
    place.run("fs mkdir disk/x").succeeds();
    is_clean(&place);
}

/// What programs wrote before a signal is there, also if they go on, and the device is slow.
#[test]
fn a_signal_waits_for_pages_on_their_way() {
    if !can_mount() {
        return;
    }
    let place = new(900 * MIB);
    for round in 0..3 {
        let serving = Serving::new(&place, "-o rw,commit=300 fault:[delay=1ms],raw:disk point");
        let stops = Arc::new(AtomicBool::new(false));
        let (told, written) = std::sync::mpsc::channel();
        let writers = [0_usize, 1, 2].map(|number| {
            let (file, stops) = (File::create(place.path(format!("point/file{number}"))).unwrap(), Arc::clone(&stops));
            let told = told.clone();
            thread::spawn(move || {
                let record = noise(number as u64, 20_000);
                for count in 0_u64..2000 {
                    let written = file.write_all_at(&record, count * 20_000);
                    if stops.load(Ordering::Relaxed) || written.is_err() || told.send((number, count)).is_err() {
                        return;
                    }
                }
            })
        });
        thread::sleep(Duration::from_millis(300));
        let mut counts = [0; 3];
        written.try_iter().for_each(|(number, count)| counts[number] = count + 1);
        assert_eq!(serving.end(), 0);
        stops.store(true, Ordering::Relaxed);
        drop(written);
        writers.into_iter().for_each(|writer| drop(writer.join()));
        for (number, count) in counts.into_iter().enumerate() {
            let found = place.run(&format!("fs cat disk/file{number}")).succeeds().stdout.clone();
            let record = noise(number as u64, 20_000);
            assert!(found.len() as u64 >= count * 20_000, "{round}: {} of {count} records", found.len() / 20_000);
            assert!(found.chunks(20_000).take(count as usize).all(|one| one == record), "{round}");
        }
    }
    place.run("fs mkdir disk/x").succeeds();
    is_clean(&place);
}

/// A process that is killed while it waits for the kernel's pages ends, and so do programs that wait for it.
#[test]
fn a_kill_while_pages_are_awaited_ends_everything() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    let place = new(300 * MIB);
    for pause in [2, 5, 10, 20] {
        let serving = Serving::new(&place, "-o rw,commit=300 fault:[delay=5ms],raw:disk point");
        let file = File::create(place.path("point/file")).unwrap();
        file.write_all_at(&noise(1, 60 << 20), 0).unwrap();
        let ioctl = "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0xb700)";
        let mut asking = Command::new("python3").args(["-c", ioctl]).arg(place.path("point")).spawn().unwrap();
        thread::sleep(Duration::from_millis(40 + pause));
        serving.kill();
        assert!(!asking.wait().unwrap().success());
        drop(file);
    }
    place.run("fs mkdir disk/x").succeeds();
    is_clean(&place);
}

/// What is on its way from the kernel is no hole, and is in a file that replaces another one.
#[test]
fn pages_on_their_way_are_waited_for() {
    if !can_mount() {
        return;
    }
    let place = new(300 * MIB);
    let arguments = "-o rw,commit=300 fault:[delay=1ms],raw:disk point";
    for round in 0..4 {
        let serving = match round {
            // It cannot wait for pages; so the kernel must have none.
            3 if has("setpriv") => Serving::without_search(&place, arguments),
            _ => Serving::new(&place, arguments),
        };
        let (data, [old, new]) = (noise(round, 5 << 20), ["point/old", "point/new"].map(|name| place.path(name)));
        for _ in 0..5 {
            let file = File::create(&new).unwrap();
            file.write_all_at(&data, 0).unwrap();
            // The kernel begins to write them.
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)), Ok(0));
            assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)), Ok(data.len() as u64));
        }
        let file = File::create(&new).unwrap();
        file.write_all_at(&data, 0).unwrap();
        fs::write(&old, b"old").unwrap();
        fs::rename(&new, &old).unwrap();
        // It commits the names.
        File::open(place.path("point")).unwrap().sync_all().unwrap();
        serving.kill();
        drop(file);
        assert!(place.run("fs cat disk/old").succeeds().stdout == data, "{round}");
    }
    place.run("fs mkdir disk/x").succeeds();
    is_clean(&place);
}

/// A snapshot has what was stored through mmap before, also what is on its way from the kernel.
#[test]
fn a_snapshot_has_pages_on_their_way() {
    if !can_mount() {
        return;
    }
    if !has("python3") {
        return skipped("ioctl needs python3");
    }
    for options in ["rw", "rw,writethrough"] {
        let place = new(300 * MIB);
        let serving = Serving::new(&place, &format!("-o {options} fault:[delay=2ms],raw:disk point"));
        let script = "\
import fcntl, mmap, os, struct, sys
os.chdir(sys.argv[1])
root = os.open('.', os.O_RDONLY)
number = os.fstat(root).st_ino
file = os.open('file', os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 1 << 18)
pages = mmap.mmap(file, 1 << 18)
for step in range(20):
    pages[:] = bytes([65 + step]) * (1 << 18)
    if step % 2:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    fcntl.ioctl(root, 0xc118b704, bytearray(struct.pack('=Q256sQQ', 0, b'snapshot', number, 0)))
    assert open('snapshot/file', 'rb').read() == bytes([65 + step]) * (1 << 18), step
    fcntl.ioctl(root, 0x4108b703, struct.pack('=Q256s', 0, b'snapshot'))
";
        run("python3", ["-c".as_ref(), script.as_ref(), place.path("point").as_os_str()]).unwrap();
        assert_eq!(serving.unmount(), 0);
        is_clean(&place);
    }
}

#[test]
fn zeroes_of_programs_are_written_if_they_are_to_be() {
    if !can_mount() {
        return;
    }
    let (place, data) = (new(300 * MIB), noise(9, 3_000_000));
    for (option, is_written) in [("zero_range=written", true), ("zero_range=unwritten", false)] {
        let serving = Serving::new(&place, &format!("-o rw,{option} disk point"));
        for (name, flags) in [("plain", "-C"), ("nocow", "+C")] {
            let path = place.path(format!("point/{name}"));
            File::create(&path).unwrap();
            run("chattr", [flags.as_ref(), path.as_os_str()]).unwrap();
            fs::write(&path, &data).unwrap();
            let zero = |arguments: &[&str]| {
                let path = path.to_str().unwrap();
                run("fallocate", ["--zero-range"].iter().chain(arguments).chain([&path])).unwrap();
            };
            zero(&["-o", "1000000", "-l", "5000000"]);
            // Behind the end of the file, with the size as it is.
            zero(&["-n", "-o", "5500000", "-l", "2000000"]);
            let found = fs::read(&path).unwrap();
            assert_eq!(found.len(), 6_000_000, "{name}");
            assert!(found[..1_000_000] == data[..1_000_000] && found[1_000_000..].iter().all(|byte| *byte == 0));
        }
        assert_eq!(serving.unmount(), 0);
        place.run("fs check disk").succeeds().says(&["clean; "]);
        if let Err(why) = has_mounts() {
            return skipped(&why);
        }
        let mount = Mount::new(&[place.path("disk")], "noatime").unwrap();
        for (name, is_unwritten) in [("plain", true), ("nocow", !is_written)] {
            let extents = run("filefrag", ["-v".as_ref(), mount.path(name).as_os_str()]).unwrap();
            // Those behind the end are unwritten in any case.
            let within = extents.lines().filter(|line| line.contains("unwritten") && !line.contains("last"));
            assert_eq!(within.count() > 0, is_unwritten, "{option}, {name}: {extents}");
            fs::remove_file(mount.path(name)).unwrap();
        }
        mount.unmount().unwrap();
    }
}

/// What a file may have after a crash: the content that was synced, and those that were written later. `None` for a file
/// that need not be there.
type Expected = BTreeMap<PathBuf, Vec<Option<(u64, usize)>>>;

/// What the tasks wrote.
#[derive(Default)]
struct Log {
    files: Mutex<Expected>,
    stops: AtomicBool,
}

impl Log {
    /// A file gets another content.
    fn attempt(&self, path: &Path, content: (u64, usize)) {
        self.files.lock().unwrap().entry(path.to_owned()).or_insert_with(|| vec![None]).push(Some(content));
    }

    /// That content is durable.
    fn synced(&self, path: &Path, content: (u64, usize)) {
        self.files.lock().unwrap().insert(path.to_owned(), vec![Some(content)]);
    }
}

/// Replaces files by new ones, each of which is synced before it gets its name. Ends with the mount.
fn replace_files(folder: &Path, log: &Log, seed: u64) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for step in 0_u64.. {
        if log.stops.load(Ordering::Relaxed) {
            break;
        }
        let content = (seed ^ step << 20, [100, 3000, 20_000, 300_000][(step % 4) as usize] + step as usize);
        let (path, temporary) = (folder.join(format!("file{}", step % 7)), folder.join("temporary"));
        let mut file = File::create(&temporary)?;
        file.write_all(&noise(content.0, content.1))?;
        file.sync_all()?;
        log.attempt(&path, content);
        fs::rename(&temporary, &path)?;
        File::open(folder)?.sync_all()?;
        log.synced(&path, content);
    }
    Ok(())
}

/// Overwrites sectors of a file in place, each of which is durable when the write returns.
fn overwrite_sectors(folder: &Path, log: &Log, seed: u64) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let file =
        OpenOptions::new().read(true).write(true).create(true).custom_flags(O_DSYNC).open(folder.join("sectors"))?;
    for step in 0_u64.. {
        if log.stops.load(Ordering::Relaxed) {
            break;
        }
        let (at, content) = (step % 16, (seed ^ step << 24, SECTOR));
        let path = folder.join(format!("sectors@{at}"));
        log.attempt(&path, content);
        file.write_all_at(&noise(content.0, content.1), at * SECTOR as u64)?;
        log.synced(&path, content);
    }
    Ok(())
}

/// Changes that are never synced.
fn make_noise(folder: &Path, log: &Log, seed: u64) -> io::Result<()> {
    for step in 0_u64.. {
        if log.stops.load(Ordering::Relaxed) {
            break;
        }
        let sub = folder.join(format!("noise{}", step % 5));
        match fs::remove_dir_all(&sub) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::create_dir_all(sub.join("deep"))?;
        for file in 0..10 {
            fs::write(sub.join(format!("deep/{file}")), noise(seed ^ step, (file * 3000) as usize))?;
        }
        fs::rename(sub.join("deep/3"), sub.join("moved"))?;
        File::options().write(true).open(sub.join("moved"))?.set_len(100)?;
    }
    Ok(())
}

/// Everything that was synced is there.
fn check_synced(point: &Path, log: &Log) {
    for (path, allowed) in &*log.files.lock().unwrap() {
        let shown = path.strip_prefix(point).unwrap();
        let found = match path.to_str().unwrap().rsplit_once('@') {
            None => fs::read(path).ok(),
            Some((file, at)) => {
                let mut sector = vec![0; SECTOR];
                let offset = at.parse::<u64>().unwrap() * SECTOR as u64;
                let read = File::open(file).and_then(|file| file.read_exact_at(&mut sector, offset));
                read.is_ok().then_some(sector)
            }
        };
        let is_allowed = |one: &Option<(u64, usize)>| match one {
            None => true,
            Some((seed, bytes)) => found.as_ref() == Some(&noise(*seed, *bytes)),
        };
        let bytes = found.as_ref().map(Vec::len);
        assert!(allowed.iter().any(is_allowed), "{}: {bytes:?} bytes, of {allowed:?}", shown.display());
    }
}

#[test]
fn what_was_synced_survives_the_death_of_the_process() {
    if !can_mount() {
        return;
    }
    let kills = if std::env::var_os("SEALBLOCK_ENGINE").is_some_and(|all| all == "all") { 10 * KILLS } else { KILLS };
    let place = new(600 * MIB);
    let (point, mut synced) = (place.path("point"), 0);
    for round in 0..kills {
        let serving = Serving::new(&place, "-o rw,commit=1 disk point");
        let log = Arc::new(Log::default());
        let tasks: [Task; 4] = [replace_files, overwrite_sectors, make_noise, replace_files];
        let tasks = (0_u64..).zip(tasks).map(|(number, task)| {
            let (folder, log) = (point.join(format!("task{number}")), Arc::clone(&log));
            thread::spawn(move || task(&folder, &log, round << 8 | number))
        });
        let tasks: Vec<_> = tasks.collect();
        thread::sleep(Duration::from_millis(400 + round * 397 % 1700));
        // They end by the errors that follow.
        serving.kill();
        log.stops.store(true, Ordering::Relaxed);
        for task in tasks {
            drop(task.join().unwrap());
        }
        synced += log.files.lock().unwrap().values().filter(|allowed| allowed[0].is_some()).count();
        if has_mounts().is_ok() && round % 2 == 0 {
            let mount = Mount::new(&[place.path("disk")], "ro").unwrap();
            run("mount", ["--bind".as_ref(), mount.path("").as_os_str(), point.as_os_str()]).unwrap();
            check_synced(&point, &log);
            run("umount", [point.as_os_str()]).unwrap();
            mount.unmount().unwrap();
        }
        let serving = Serving::new(&place, "-o rw disk point");
        check_synced(&point, &log);
        assert_eq!(serving.unmount(), 0);
        // Only now: the first superblock may be newer than its copies until the filesystem is opened again.
        place.run("fs check disk").succeeds().says(&["clean; "]);
    }
    is_clean(&place);
    println!("{kills} kills, {synced} synced contents");
    assert!(synced > kills as usize);
}
