//! Permissions of what is made, and what happens to the set-user-ID and set-group-ID bits.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, setxattr};
use sealblock_fuse::Options;
use sealblock_proofs_btrfs_images::inodes::acl;
use sealblock_proofs_btrfs_images::skip;

use crate::can_mount;
use crate::disk::{ServedDisk, writable, write_through};

const NOBODY: u32 = 65_534;

/// Runs a shell command in a folder, as this user. True if it succeeds.
fn shell(folder: &Path, user: u32, command: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(folder).uid(user).gid(user).stdin(Stdio::null());
    shell.status().unwrap().success()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn the_umask_applies_unless_the_directory_has_a_default_list() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(writable());
    assert!(shell(&served.point, 0, "umask 027; mkdir d; touch f; mkfifo p; umask 777; ln -s x l"));
    let modes = ["d", "f", "p"].map(|name| mode(&served.path(name)));
    assert_eq!(modes, [0o750, 0o640, 0o640]);
    assert_eq!(fs::symlink_metadata(served.path("l")).unwrap().mode() & 0o777, 0o777);
    setxattr(served.path("d"), "system.posix_acl_default", &acl(1234, 1234), XattrFlags::empty()).unwrap();
    assert!(shell(&served.path("d"), 0, "umask 027; mkdir d; touch f"));
    let modes = ["d/d", "d/f"].map(|name| mode(&served.path(name)));
    assert_eq!(modes, [0o777, 0o666], "the filesystem decides");
}

#[test]
fn new_inodes_belong_to_who_makes_them() {
    if !can_mount() {
        return;
    }
    let served = ServedDisk::start(Options { allow_other: true, ..writable() });
    assert!(shell(&served.point, NOBODY, "mkdir d && echo x > d/f && mkfifo d/p && ln -s x d/l"));
    for name in ["d", "d/f", "d/p", "d/l"] {
        let metadata = fs::symlink_metadata(served.path(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (NOBODY, NOBODY), "{name}");
    }
    fs::create_dir(served.path("private")).unwrap();
    set_mode(&served.path("private"), 0o700);
    assert!(!shell(&served.point, NOBODY, "echo x > private/f 2> /dev/null"));
    // Only the owner of a file may remove it from here.
    fs::create_dir(served.path("sticky")).unwrap();
    set_mode(&served.path("sticky"), 0o1777);
    fs::write(served.path("sticky/f"), b"x").unwrap();
    assert!(!shell(&served.path("sticky"), NOBODY, "rm -f f 2> /dev/null"));
    assert!(shell(&served.path("sticky"), NOBODY, "echo x > g && mv g h && rm h"));
}

/// Everything that changes content, but not by root.
#[test]
fn who_changes_a_file_removes_its_set_id_bits() {
    if !can_mount() {
        return;
    }
    for options in [writable(), write_through()] {
        let served = ServedDisk::start(Options { allow_other: true, ..options });
        let (folder, file) = (&served.point, served.path("file"));
        fs::write(served.path("source"), vec![7; 8192]).unwrap();
        for command in [
            "printf x >> file",
            ": > file",
            "truncate -s 3 file",
            "fallocate -l 100000 file",
            "fallocate -p -l 4096 file",
            "cat source > file",
            "dd if=source of=file bs=4096 oflag=direct conv=notrunc status=none",
            "cp source file",
        ] {
            fs::write(&file, vec![1; 8192]).unwrap();
            set_mode(&file, 0o6777);
            assert!(shell(folder, 0, command), "{command}");
            assert_eq!(mode(&file), 0o6777, "root keeps them: {command}");
            assert!(shell(folder, NOBODY, command), "{command}");
            // The kernel is told a little later.
            let start = Instant::now();
            while mode(&file) != 0o777 {
                assert!(start.elapsed() < Duration::from_secs(5), "{command}: {:o}", mode(&file));
            }
        }
        // Without the permission of the group to execute, it is a bit for locks.
        set_mode(&file, 0o6767);
        assert!(shell(folder, NOBODY, "printf x >> file"));
        let start = Instant::now();
        while mode(&file) != 0o2767 {
            assert!(start.elapsed() < Duration::from_secs(5), "{:o}", mode(&file));
        }
    }
}

#[test]
fn a_list_from_who_is_not_in_the_group_removes_the_set_group_id_bit() {
    if !can_mount() {
        return;
    }
    if Command::new("setfacl").arg("--version").stdout(Stdio::null()).status().is_err() {
        return skip("setfacl");
    }
    let served = ServedDisk::start(Options { allow_other: true, ..writable() });
    let file = served.path("file");
    fs::write(&file, b"x").unwrap();
    let left = |group: u32, user: u32| {
        chown(&file, Some(NOBODY), Some(group)).unwrap();
        set_mode(&file, 0o2755);
        assert!(shell(&served.point, user, "setfacl -m u:1234:r file"));
        mode(&file)
    };
    assert_eq!(left(0, NOBODY), 0o755);
    assert_eq!(left(NOBODY, NOBODY), 0o2755);
    assert_eq!(left(7, 0), 0o2755, "root may");
}
