//! The ways in which serving ends: by unmounting, by a request to stop, by SIGTERM, by SIGKILL; with open files and
//! with reads in flight.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use sealblock_fuse::{Ended, Options, ReadFs, Session};
use sealblock_proofs_btrfs_images::content::noise;
use sealblock_runtime_reactor::{Config, Reactor, shutdown_signal};

use crate::disk::{Asked, Disk, writable};
use crate::memory::{Memory, Served};
use crate::{can_mount, source};

/// The variable for a child process of this program, which serves the content of one directory on the other; it has the
/// mount point.
const POINT: &str = "SEALBLOCK_TEST_MOUNT_POINT";
const SOURCE: &str = "SEALBLOCK_TEST_MOUNT_SOURCE";
/// Instead of a source: a folder that gets, in the end, the content of an empty filesystem that can be changed.
const RESULT: &str = "SEALBLOCK_TEST_MOUNT_RESULT";

/// Unmounts the filesystem. The kernel closes files and removes mounts a little after it reports success, so this
/// retries.
pub fn unmount_when_idle(point: &Path) {
    loop {
        match rustix::mount::unmount(point, UnmountFlags::empty()) {
            Err(Errno::BUSY) => thread::yield_now(),
            ended => return ended.unwrap(),
        }
    }
}

#[test]
fn unmounting_waits_for_open_files_and_ends_serving() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut served = Served::start(source.path(), Options::default());
    let file = File::open(served.path("file-5000")).unwrap();
    let unmount = || rustix::mount::unmount(&served.point, UnmountFlags::empty());
    assert_eq!(unmount(), Err(Errno::BUSY));
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4999).unwrap();
    drop(file);
    unmount_when_idle(&served.point);
    assert_eq!(served.wait(), Ended::Unmounted);
}

#[test]
fn stopping_ends_open_files_and_reads_in_flight() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut served = Served::start(source.path(), Options::default());
    let open = File::open(served.path("file-3000001")).unwrap();
    let slow = served.path("slow");
    let waiting = thread::spawn(move || fs::read(slow));
    while served.seen.reads.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    assert_eq!(served.stop(), Ended::Stopped);
    let error = waiting.join().unwrap().unwrap_err();
    assert!([ErrorKind::ConnectionAborted, ErrorKind::NotConnected].contains(&error.kind()), "{error}");
    let mut byte = [0];
    assert_eq!(open.read_at(&mut byte, 2_000_000).unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(fs::read_dir(&served.point).unwrap().count(), 0, "nothing is mounted any more");
}

#[test]
fn stopping_ends_waiting_calls() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut served = Served::start(source.path(), Options { calls: 1, ..Options::default() });
    let read = |name: &str| {
        let file = File::open(served.path(name)).unwrap();
        thread::spawn(move || file.read_at(&mut [0; 10], 0))
    };
    let waiting = read("slow");
    while served.seen.reads.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    // The only permit is in use, so no other request is answered.
    let names = ["crowd", "deep", "link", "holes"].map(|name| served.path(name));
    let others = names.map(|path| thread::spawn(move || fs::symlink_metadata(path).map(drop)));
    thread::sleep(Duration::from_millis(50));
    assert!(others.iter().all(|other| !other.is_finished()));
    assert_eq!(served.stop(), Ended::Stopped);
    waiting.join().unwrap().unwrap_err();
    for other in others {
        other.join().unwrap().unwrap_err();
    }
}

#[test]
fn other_mounts_on_the_folder_stay() {
    if !can_mount() {
        return;
    }
    let source = source();
    let mut first = Served::start(source.path(), Options::default());
    let over = Session::mount(&first.point, 256, &Options::default()).unwrap();
    rustix::mount::unmount(over.point(), UnmountFlags::DETACH).unwrap();
    drop(over);
    assert_eq!(fs::read(first.path("file-1")).unwrap().len(), 1, "dropping the upper one has not unmounted the lower");
    // A covered mount cannot be unmounted, but it ends.
    let over = Session::mount(&first.point, 256, &Options::default()).unwrap();
    // Other tests mount and unmount meanwhile, so only mounts below this folder count.
    let folder = format!(" {}/", first.point.parent().unwrap().canonicalize().unwrap().to_str().unwrap());
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap().matches(&folder).count();
    assert_eq!(mounts(), 2);
    assert_eq!(first.stop(), Ended::Stopped);
    assert_eq!(mounts(), 2, "neither is unmounted");
    drop(over);
    fs::read(first.path("file-1")).unwrap_err();
    unmount_when_idle(&first.point);
}

/// Serves, if this process was started for that; otherwise does nothing.
#[test]
fn a_process_that_serves() {
    let Some(point) = std::env::var_os(POINT) else { return };
    if let Some(result) = std::env::var_os(RESULT) {
        return serve_disk(Path::new(&point), Path::new(&result));
    }
    let Some(source) = std::env::var_os(SOURCE) else { return };
    let memory = Memory::copy(Path::new(&source), Arc::default(), Vec::new());
    let session = Session::mount(Path::new(&point), memory.root(), &Options::default()).unwrap();
    let reactor = Reactor::new(Config::default()).unwrap();
    println!("\nmounted");
    let ended = reactor.block_on(session.serve(&memory, async { drop(shutdown_signal().await) }));
    println!("\nended {:?}", ended.unwrap());
}

fn serve_disk(point: &Path, result: &Path) {
    let asked = Arc::<Asked>::default();
    let disk = Disk::new(Arc::clone(&asked));
    let session = Session::mount(point, disk.root(), &writable()).unwrap();
    *disk.notifier.borrow_mut() = Some(session.notifier());
    let reactor = Reactor::new(Config::default()).unwrap();
    println!("\nmounted");
    let ended = reactor.block_on(session.serve_writable(&disk, async { drop(shutdown_signal().await) }));
    for (path, content) in disk.all_content() {
        fs::write(result.join(path.trim_start_matches('/')), content).unwrap();
    }
    println!("\nended {:?}", ended.unwrap());
}

/// Starts that process, and waits until it has mounted.
fn start_with(point: &Path, variable: &str, value: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::a_process_that_serves", "--nocapture", "--test-threads=1"])
        .env(POINT, point)
        .env(variable, value)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    assert!(says(&mut output, "mounted"));
    // A request shows that it runs and has installed its signal handlers.
    fs::read_dir(point).unwrap().for_each(drop);
    (child, output)
}

/// The same with a copy of a folder.
fn start(point: &Path, source: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let started = start_with(point, SOURCE, source);
    assert_eq!(fs::read(point.join("file-1")).unwrap().len(), 1);
    started
}

/// Reads output until this line; false if the output ends before it.
fn says(output: &mut impl BufRead, wanted: &str) -> bool {
    output.lines().map_while(Result::ok).any(|line| line == wanted)
}

fn kill(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
}

#[test]
fn a_process_that_is_terminated_unmounts_also_with_files_open() {
    if !can_mount() {
        return;
    }
    let (source, point) = (source(), tempfile::tempdir().unwrap());
    let (mut child, mut output) = start(point.path(), source.path());
    let open = File::open(point.path().join("file-3000001")).unwrap();
    kill(&child, Signal::TERM);
    assert!(says(&mut output, "ended Stopped"));
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_dir(point.path()).unwrap().count(), 0, "nothing is mounted any more");
    drop(open);
}

#[test]
fn a_killed_process_leaves_no_waiting_readers() {
    if !can_mount() {
        return;
    }
    let (source, point) = (source(), tempfile::tempdir().unwrap());
    let (mut child, _output) = start(point.path(), source.path());
    // Without a gate, a read of `slow` fails at once. So this read waits in the kernel only if the process is dead.
    let open = File::open(point.path().join("file-3000001")).unwrap();
    kill(&child, Signal::KILL);
    child.wait().unwrap();
    let mut byte = [0];
    assert_eq!(open.read_at(&mut byte, 2_000_000).unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(fs::read_dir(point.path()).map(drop).unwrap_err().kind(), ErrorKind::NotConnected);
    rustix::mount::unmount(point.path(), UnmountFlags::DETACH).unwrap();
    assert_eq!(fs::read_dir(point.path()).unwrap().count(), 0);
}

/// What programs wrote is in the kernel's memory when the signal comes.
#[test]
fn a_process_that_is_terminated_gets_what_was_written_before() {
    if !can_mount() {
        return;
    }
    for keeps_open in [true, false] {
        let (result, point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut child, mut output) = start_with(point.path(), RESULT, result.path());
        let content = noise(10_000_001, 5);
        let mut file = File::create(point.path().join("file")).ok();
        file.as_ref().unwrap().write_all_at(&content, 0).unwrap();
        file.take_if(|_| !keeps_open);
        kill(&child, Signal::TERM);
        assert!(says(&mut output, "ended Stopped"));
        assert!(child.wait().unwrap().success());
        assert!(fs::read(result.path().join("file")).unwrap() == content);
        assert_eq!(fs::read_dir(point.path()).unwrap().count(), 0, "nothing is mounted any more");
    }
}

/// Nothing waits for a process that is gone, and a sync says that something is lost.
#[test]
fn a_killed_process_leaves_no_waiting_writers() {
    if !can_mount() {
        return;
    }
    let (result, point) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (mut child, _output) = start_with(point.path(), RESULT, result.path());
    let file = File::create(point.path().join("file")).unwrap();
    file.write_all_at(&noise(1_000_000, 5), 0).unwrap();
    kill(&child, Signal::KILL);
    child.wait().unwrap();
    file.sync_all().unwrap_err();
    assert_eq!(fs::metadata(point.path().join("other")).unwrap_err().kind(), ErrorKind::NotConnected);
    drop(file);
    rustix::mount::unmount(point.path(), UnmountFlags::DETACH).unwrap();
}
