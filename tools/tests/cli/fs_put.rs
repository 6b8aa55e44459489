//! `fs put`: files and directory trees of this machine in a filesystem, read again with `fs get`, `fs cat` and by
//! Linux.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use serde_json::json;

use crate::common::{Place, is_root, noise, skipped};

const MIB: u64 = 1 << 20;

fn new(bytes: u64, options: &str) -> Place {
    let place = Place::in_memory();
    place.write("disk", b"");
    place.set_len("disk", bytes);
    place.run(&format!("fs format disk {options}")).succeeds();
    place
}

#[track_caller]
fn is_clean(place: &Place) {
    place.run("fs check disk").succeeds().says(&["clean; "]);
    place.run("fs verify disk").succeeds().says(&["clean; "]);
    match run("btrfs", ["--version"]) {
        Err(why) => skipped(&format!("btrfs check: {why}")),
        Ok(_) => {
            let disk = place.path("disk");
            let checked = ["check", "--readonly", "--check-data-csum"].map(AsRef::as_ref);
            run("btrfs", checked.into_iter().chain([disk.as_os_str()])).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// A directory tree with files of all kinds.
fn tree(place: &Place) {
    fs::create_dir_all(place.path("tree/empty")).unwrap();
    fs::create_dir_all(place.path("tree/deep/er")).unwrap();
    place.write("tree/small", b"hello");
    place.write("tree/none", b"");
    place.write("tree/deep/sector", &noise(1, 4096));
    place.write("tree/deep/er/large", &noise(2, 5 * MIB as usize + 77));
    place.write("tree/sparse", b"");
    place.set_len("tree/sparse", 16 * MIB + 5);
    let sparse = File::options().write(true).open(place.path("tree/sparse")).unwrap();
    sparse.write_all_at(b"in the middle", 8 * MIB + 1).unwrap();
    symlink("../small", place.path("tree/deep/link")).unwrap();
    symlink("/nowhere", place.path("tree/dangling")).unwrap();
    fs::hard_link(place.path("tree/small"), place.path("tree/deep/same")).unwrap();
    fs::set_permissions(place.path("tree/small"), fs::Permissions::from_mode(0o4710)).unwrap();
    fs::set_permissions(place.path("tree/deep"), fs::Permissions::from_mode(0o1751)).unwrap();
    Command::new("mkfifo").arg(place.path("tree/fifo")).status().unwrap();
    for (name, seconds) in [("tree/small", 1_000_000_001), ("tree/deep", 5), ("tree", 7)] {
        let time = std::time::UNIX_EPOCH + Duration::new(seconds, 123_456_789);
        File::open(place.path(name)).unwrap().set_modified(time).unwrap();
    }
}

/// Two trees have the same files, with the same contents and attributes.
#[track_caller]
fn assert_same(a: &Path, b: &Path) {
    let (one, other) = (a.symlink_metadata().unwrap(), b.symlink_metadata().unwrap());
    let attributes = |about: &fs::Metadata| (about.mode(), about.uid(), about.gid(), about.mtime(), about.mtime_nsec());
    assert_eq!(attributes(&one), attributes(&other), "{} {}", a.display(), b.display());
    if one.is_dir() {
        let names = |path: &Path| {
            let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(a), names(b), "{}", a.display());
        names(a).iter().for_each(|name| assert_same(&a.join(name), &b.join(name)));
        return;
    }
    assert_eq!((one.nlink(), one.len()), (other.nlink(), other.len()), "{}", a.display());
    if one.is_file() {
        assert!(fs::read(a).unwrap() == fs::read(b).unwrap(), "{}", a.display());
    } else if one.is_symlink() {
        assert_eq!(fs::read_link(a).unwrap(), fs::read_link(b).unwrap());
    }
}

#[test]
fn a_tree_comes_back_as_it_was() {
    for options in ["", "--csum blake2b --node-size 4KiB --features ^no-holes", "--mixed"] {
        let place = new(200 * MIB, options);
        tree(&place);
        let report = place.run("fs put -r tree disk --json").succeeds().json();
        assert_eq!((&report["files"], &report["lost"], &report["not_set"]), (&json!(9), &json!([]), &json!(0)));
        place.run("fs get disk/tree back").succeeds();
        assert_same(&place.path("tree"), &place.path("back"));
        // The hole takes no space.
        let used = place.run("fs info disk --json").succeeds().json()["used_bytes"].as_u64().unwrap();
        assert!(used < 8 * MIB, "{used}");
        // Once more over what is there: everything is replaced, and directories are merged.
        place.run("fs mkdir disk/tree/more").succeeds();
        place.write("tree/small", b"other");
        place.run("fs put -r tree disk").succeeds();
        fs::create_dir(place.path("tree/more")).unwrap();
        place.run("fs rmdir disk/tree/more").succeeds();
        fs::remove_dir(place.path("tree/more")).unwrap();
        assert_eq!(place.run("fs cat disk/tree/deep/same").succeeds().stdout, b"other");
        is_clean(&place);
    }
}

#[test]
fn files_go_where_they_are_put() {
    let place = new(200 * MIB, "");
    for name in ["a", "b"] {
        place.write(name, name.as_bytes());
    }
    place.run("fs put a disk").succeeds();
    place.run("fs put a disk:renamed").succeeds();
    place.run("fs mkdir disk/dir").succeeds();
    place.run("fs ln -s dir disk/link").succeeds();
    place.run("fs put a b disk/link").succeeds();
    for (name, text) in [("a", "a"), ("renamed", "a"), ("dir/a", "a"), ("dir/b", "b")] {
        assert_eq!(place.run(&format!("fs cat disk/{name}")).succeeds().text(), text, "{name}");
    }
    // A symbolic link at the name is replaced, not followed.
    place.run("fs ln -s a disk/to-a").succeeds();
    place.run("fs put b disk/to-a").succeeds();
    assert_eq!(place.run("fs cat disk/a").succeeds().text(), "a");
    assert_eq!(place.run("fs cat disk/to-a").succeeds().text(), "b");
    place.run("fs subvolume create disk/sub").succeeds();
    place.run("fs snapshot -r disk/sub disk/fixed").succeeds();
    place.run("fs put a disk/sub").succeeds();
    fs::create_dir_all(place.path("folder/x")).unwrap();
    place.write("dir", b"a file");
    for (command, status, words) in [
        ("fs put folder disk", 2, "use -r"),
        ("fs put none disk", 3, "none"),
        ("fs put a b disk/new", 2, "not a directory"),
        ("fs put a disk/new/", 2, "fs mkdir"),
        ("fs put a disk/none/x", 3, "there is no \"none\""),
        ("fs put a disk/fixed", 3, "is read-only"),
    ] {
        place.run(command).fails(status, &[words]);
    }
    // A file is never replaced by a directory, nor a directory by a file.
    let report = place.run("fs put dir b disk --json").ends_with(1).json();
    assert_eq!((&report["files"], &report["lost"][0]["path"]), (&json!(1), &json!("dir")));
    let refused = place.run("fs put -r . disk/dir");
    assert!(
        refused.ends_with(1).stderr.contains("disk: skipped: the filesystem itself is in it"),
        "{}",
        refused.stderr
    );
    is_clean(&place);
}

#[test]
fn a_full_filesystem_keeps_what_was_copied() {
    let place = new(100 * MIB, "");
    place.write("small", b"small");
    place.write("huge", &noise(3, 90 * MIB as usize));
    place.run("fs put small huge disk").fails(3, &["disk/huge", "fs subvolume delete"]);
    assert_eq!(place.run("fs ls disk").succeeds().text().trim(), "small");
    is_clean(&place);
    // What of the file was written is free again.
    place.write("half", &noise(4, 10 * MIB as usize));
    place.run("fs put half disk").succeeds();
    is_clean(&place);
}

#[test]
fn a_signal_ends_it_with_whole_files() {
    let place = new(2048 * MIB, "");
    fs::create_dir(place.path("many")).unwrap();
    for file in 0..150 {
        place.write(&format!("many/{file:03}"), &noise(file, 4 * MIB as usize));
    }
    let mut child = place.start("fs put -r many disk");
    place.wait_for_bytes("disk", 60 * MIB, &mut child);
    run("kill", ["-TERM", &child.id().to_string()]).unwrap();
    let ended = child.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&ended.stderr).into_owned();
    if ended.status.success() {
        return skipped("it was done before the signal came");
    }
    assert_eq!(ended.status.signal(), Some(15), "{words}");
    assert!(words.contains("interrupted after"), "{words}");
    place.run("fs get disk/many got").succeeds();
    let copied = fs::read_dir(place.path("got")).unwrap().count();
    assert!(copied > 0, "{words}");
    for entry in fs::read_dir(place.path("got")).unwrap() {
        let path = entry.unwrap().path();
        assert!(fs::read(&path).unwrap() == fs::read(place.path("many").join(path.file_name().unwrap())).unwrap());
    }
    is_clean(&place);
}

/// Each commit makes durable what was copied before it; without one in between, all is lost.
#[test]
fn a_crash_leaves_what_was_committed_in_between() {
    for (interval, leaves_some) in [("20ms", true), ("1h", false)] {
        let place = new(2048 * MIB, "");
        fs::create_dir(place.path("many")).unwrap();
        for file in 0..150 {
            place.write(&format!("many/{file:03}"), &noise(file, 4 * MIB as usize));
        }
        let mut child = place.start(&format!("fs put -r many disk --commit-interval {interval}"));
        place.wait_for_bytes("disk", 100 * MIB, &mut child);
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            return skipped("it was done before it was killed");
        }
        is_clean(&place);
        if !leaves_some {
            place.run("fs ls disk/many").fails(3, &["many"]);
            continue;
        }
        place.run("fs get disk/many got").succeeds();
        let got: Vec<_> = fs::read_dir(place.path("got")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!got.is_empty() && got.len() < 150, "{}", got.len());
        for name in got {
            let read = |folder: &str| fs::read(place.path(folder).join(&name)).unwrap();
            assert!(read("got") == read("many"), "{name:?}");
        }
    }
}

#[test]
fn linux_reads_what_was_put() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let place = new(300 * MIB, "");
    tree(&place);
    if is_root() {
        let at = place.path("tree/deep/sector");
        std::os::unix::fs::chown(&at, Some(1234), Some(5678)).unwrap();
        run("mknod", [place.path("tree/node").as_os_str(), "c".as_ref(), "1".as_ref(), "300".as_ref()]).unwrap();
    }
    place.run("fs put -r tree disk").succeeds();
    let mount = Mount::new(&[place.path("disk")], "noatime").unwrap();
    assert_same(&place.path("tree"), &mount.path("tree"));
    fs::write(mount.path("tree/small"), b"changed by Linux").unwrap();
    run("btrfs", ["scrub".as_ref(), "start".as_ref(), "-B".as_ref(), mount.path("").as_os_str()]).unwrap();
    mount.unmount().unwrap();
    assert_eq!(place.run("fs cat disk/tree/deep/same").succeeds().text(), "changed by Linux");
    is_clean(&place);
}
