//! How `fs mount -o rw` ends, and what it goes on without: a mount at several places, a second signal, a device that
//! cannot make anything durable.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use sealblock_proofs_btrfs_images::programs::run;

use crate::common::noise;
use crate::common::serving::{Serving, can_mount};
use crate::fs_mount::{MIB, is_clean, new};

/// Where the mount is no longer where it was made, everything works, and a signal still ends it.
#[test]
fn a_mount_at_another_place_works_and_ends() {
    if !can_mount() {
        return;
    }
    for how in ["bound", "bound twice", "covered"] {
        let place = new(300 * MIB);
        let serving = Serving::new(&place, "-o rw,commit=300 fault:[delay=1ms],raw:disk point");
        let (point, other) = (place.path("point"), place.path("other"));
        let root = File::open(&point).unwrap();
        fs::create_dir(&other).unwrap();
        let run = |program: &str, arguments: &[&OsStr]| run(program, arguments.iter().copied()).unwrap();
        let at = if how == "covered" {
            run("mount", &["-t".as_ref(), "tmpfs".as_ref(), "none".as_ref(), point.as_ref()]);
            PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()))
        } else {
            run("mount", &["--bind".as_ref(), point.as_ref(), other.as_ref()]);
            other.clone()
        };
        if how == "bound" {
            drop(root);
            run("umount", &[point.as_ref()]);
        }
        let data = noise(1, 5 << 20);
        let file = File::create(at.join("new")).unwrap();
        file.write_all_at(&data, 0).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)), Ok(0), "{how}");
        fs::write(at.join("old"), b"old").unwrap();
        fs::rename(at.join("new"), at.join("old")).unwrap();
        fs::write(at.join("last"), b"last").unwrap();
        assert_eq!(serving.end(), 0, "{how}");
        drop(file);
        let place_to_leave = if how == "covered" { &point } else { &other };
        run("umount", &["-l".as_ref(), place_to_leave.as_ref()]);
        assert!(place.run("fs cat disk/old").succeeds().stdout == data, "{how}");
        assert_eq!(place.run("fs cat disk/last").succeeds().stdout, b"last", "{how}");
        is_clean(&place);
    }
}

/// What programs wrote is durable before the mount waits for its other place, so that a second signal, which ends it at
/// once, loses nothing.
#[test]
fn a_second_signal_loses_nothing() {
    if !can_mount() {
        return;
    }
    let place = new(300 * MIB);
    let serving = Serving::new(&place, "-o rw,commit=300 disk point");
    let (point, other) = (place.path("point"), place.path("other"));
    fs::create_dir(&other).unwrap();
    run("mount", ["--bind".as_ref(), point.as_os_str(), other.as_os_str()]).unwrap();
    let data = noise(2, 3 << 20);
    fs::write(other.join("file"), &data).unwrap();
    serving.signal("-TERM");
    thread::sleep(Duration::from_millis(1500));
    serving.kill();
    run("umount", ["-l".as_ref(), other.as_os_str()]).unwrap();
    assert!(place.run("fs cat disk/file").succeeds().stdout == data);
    place.run("fs mkdir disk/x").succeeds();
    is_clean(&place);
}

/// A device that cannot make durable what it was sent is left behind: the other one has all.
#[test]
fn a_device_that_cannot_be_flushed_is_left_behind() {
    if !can_mount() {
        return;
    }
    for rule in ["flush-error", "flush-error%30"] {
        let place = new(300 * MIB);
        for name in ["a", "b"] {
            place.write(name, b"");
            place.set_len(name, 300 * MIB);
        }
        place.run("fs format --data raid1 --metadata raid1 a b").succeeds();
        let serving =
            Serving::new(&place, &format!("-o rw,commit=1 [fault:[seed=1],raw:a]+[fault:[{rule}],raw:b] point"));
        let data = noise(4, 3 << 20);
        for step in 0..12 {
            let file = File::create(place.path(format!("point/file{step}"))).unwrap();
            file.write_all_at(&data, 0).unwrap();
            file.sync_all().unwrap();
        }
        assert_eq!(serving.end(), 4, "{rule}");
        for step in 0..12 {
            assert!(place.run(&format!("fs cat a+b/file{step}")).succeeds().stdout == data, "{rule}: {step}");
        }
    }
}
