//! `fs mkdir`, `rm`, `rmdir`, `mv`, `ln`, `chmod`, `chown`, `snapshot` and `subvolume`: what they change, what they
//! refuse, and that the filesystem is consistent after each.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use sealblock_proofs_btrfs_images::has_mounts;
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use serde_json::{Value, json};

use crate::common::devices::{Loop, Mount as Mounted};
use crate::common::server::Server;
use crate::common::{Place, has, is_root, skipped};

const MIB: u64 = 1 << 20;

/// A place with a new filesystem in `disk`.
fn new(bytes: u64, options: &str) -> Place {
    let place = Place::in_memory();
    place.write("disk", b"");
    place.set_len("disk", bytes);
    place.run(&format!("fs format disk {options}")).succeeds();
    place
}

/// All data have good checksums, and the filesystem is consistent.
#[track_caller]
fn is_clean(place: &Place) {
    place.run("fs verify disk").succeeds().says(&["clean; "]);
    is_consistent(place);
}

/// Our own check finds nothing, and neither does that of btrfs-progs, where it is installed.
#[track_caller]
fn is_consistent(place: &Place) {
    place.run("fs check disk").succeeds().says(&["clean; "]);
    match run("btrfs", ["--version"]) {
        Err(why) => skipped(&format!("btrfs check: {why}")),
        Ok(_) => {
            let disk = place.path("disk");
            let checked = run("btrfs", ["check".as_ref(), "--readonly".as_ref(), disk.as_os_str()]);
            checked.unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// The paths below a directory, in order.
#[track_caller]
fn paths(place: &Place, name: &str) -> Vec<String> {
    let listed = place.run(&format!("fs ls -R {name} --json")).succeeds().json();
    let entries = listed["entries"].as_array().unwrap();
    let mut paths: Vec<String> = entries.iter().map(|entry| entry["path"].as_str().unwrap().to_owned()).collect();
    paths.sort_unstable();
    paths
}

/// What `fs ls` says of a file.
#[track_caller]
fn stat(place: &Place, name: &str) -> Value {
    place.run(&format!("fs ls {name} --json")).succeeds().json()["entries"][0].clone()
}

#[test]
fn directories_are_made() {
    let place = new(200 * MIB, "");
    let report = place.run("fs mkdir disk/a disk/b --mode 2750 --owner 7:8 --json").succeeds().json();
    assert_eq!((&report["target"], &report["interrupted"]), (&json!("disk"), &json!(false)));
    let names: Vec<&Value> = report["files"].as_array().unwrap().iter().map(|file| &file["name"]).collect();
    assert_eq!(names, ["disk/a", "disk/b"]);
    let info = place.run("fs info disk --json").succeeds().json();
    assert_eq!(info["generation"], report["transaction"]);
    let listed = place.run("fs ls disk --json").succeeds().json();
    let a = &listed["entries"][0];
    assert_eq!((&a["mode"], &a["uid"], &a["gid"]), (&json!(0o42750), &json!(7), &json!(8)));
    assert_eq!(place.run("fs mkdir disk/a/b").succeeds().text(), "");
    place.run("fs mkdir -p disk/a/b disk/c//d/./e/").succeeds();
    assert_eq!(paths(&place, "disk"), ["a", "a/b", "b", "c", "c/d", "c/d/e"]);
    for (command, status, words) in [
        ("fs mkdir disk/a", 3, "cannot create 'disk/a': it exists already"),
        ("fs mkdir disk/x/y", 3, "there is no \"x\""),
        ("fs mkdir disk/..", 2, "must end in a name"),
        ("fs mkdir disk", 2, "must end in a name"),
        ("fs mkdir disk:900/x", 3, "subvolume 900"),
        ("fs mkdir disk/n -m 9", 2, "octal"),
        ("fs mkdir disk/n --owner root", 2, "UID:GID"),
    ] {
        place.run(command).fails(status, &[words]);
    }
    place.run("fs mkdir -p disk/b/../f/g/../h/. disk/a/b/").succeeds();
    place.run("fs mkdir -p disk/b/k/l disk/b/k/l/").succeeds();
    assert_eq!(paths(&place, "disk"), ["a", "a/b", "b", "b/k", "b/k/l", "c", "c/d", "c/d/e", "f", "f/g", "f/h"]);
    place.run("fs ln -s nowhere disk/c/link").succeeds();
    place.run("fs mkdir -p disk/c/link/x").fails(3, &["cannot create 'disk/c/link': it exists already"]);
    place.run("fs mkdir -p disk/c/../../a/b").succeeds();
    place.run("fs rm disk/c/link").succeeds();
    let deep = "d/".repeat(1000);
    place.run(&format!("fs mkdir -p disk/deep/{deep}")).succeeds();
    place.run(&format!("fs mkdir -p disk/deep/{deep}e")).succeeds();
    place.run("fs rm -r disk/deep").succeeds();
    let long = "n".repeat(256);
    place.run(&format!("fs mkdir disk/{long}")).fails(2, &["a name of 256 bytes"]);
    // What came before a failure stays.
    place.run("fs mkdir disk/new disk/a disk/never").fails(3, &["disk/a"]);
    assert!(paths(&place, "disk").contains(&"new".to_owned()) && !paths(&place, "disk").contains(&"never".to_owned()));
    is_clean(&place);
}

#[test]
fn names_move_and_files_get_others() {
    let place = new(200 * MIB, "");
    place.run("fs mkdir -p disk/a/b disk/c").succeeds();
    place.run("fs ln -s ../c disk/a/link").succeeds();
    place.run("fs ln disk/a/link disk/a/again").succeeds();
    assert_eq!(stat(&place, "disk/a/again")["nlink"], 2);
    // Through a link, and into a directory.
    place.run("fs mkdir disk/a/link/d").succeeds();
    let report = place.run("fs mv disk/a/again disk/c --json").succeeds().json();
    assert_eq!((&report["to"], &report["replaced"]), (&json!("disk/c/again"), &json!(false)));
    place.run("fs mv disk/a/b disk/b2").succeeds();
    assert_eq!(paths(&place, "disk"), ["a", "a/link", "b2", "c", "c/again", "c/d"]);
    place.run("fs ln -s x disk/one").succeeds();
    place.run("fs ln -s y disk/two").succeeds();
    place.run("fs mv -n disk/one disk/two").fails(3, &["exists already"]);
    place.run("fs mv --exchange disk/one disk/two").succeeds();
    assert_eq!(stat(&place, "disk/one")["link"], "y");
    let report = place.run("fs mv disk/one disk/two --json").succeeds().json();
    assert_eq!(report["replaced"], true);
    assert_eq!(stat(&place, "disk/two")["link"], "y");
    // A link that leads nowhere is a name like others.
    for target in ["loop", "none", &"n".repeat(300)] {
        place.run(&format!("fs ln -s {target} disk/loop")).succeeds();
        place.run("fs mv -n disk/two disk/loop").fails(3, &["'disk/loop': it exists already"]);
        assert_eq!(place.run("fs mv disk/two disk/loop --json").succeeds().json()["replaced"], true);
        place.run("fs mv disk/loop disk/two").succeeds();
    }
    for (command, status, words) in [
        ("fs mv disk/none disk/x", 3, "it does not exist"),
        ("fs mv disk/c disk/c/d/e", 2, "below itself"),
        ("fs mv disk/two disk/a/none/x", 3, "there is no \"none\""),
        ("fs mv disk disk/x", 2, "must end in a name"),
        ("fs ln disk/c disk/x", 3, "a directory cannot have another name"),
        ("fs ln disk/none disk/x", 3, "it does not exist"),
        ("fs ln -s a disk/c", 3, "exists already"),
    ] {
        place.run(command).fails(status, &[words]);
    }
    // In two filesystems there is nothing to move.
    place.write("other", b"");
    place.set_len("other", 200 * MIB);
    place.run("fs format other").succeeds();
    place.run("fs mv disk/two other/two").fails(2, &["not in disk", "fs put"]);
    place.run("fs rm disk/two other/two").fails(2, &["not in disk"]);
    is_clean(&place);
}

#[test]
fn attributes_are_set() {
    let place = new(200 * MIB, "");
    place.run("fs mkdir disk/a").succeeds();
    place.run("fs ln -s a disk/link").succeeds();
    place.run("fs chmod 1700 disk/link").succeeds();
    place.run("fs chown 5:6 disk/a").succeeds();
    place.run("fs chown :9 disk/a").succeeds();
    let listed = place.run("fs ls disk --json").succeeds().json();
    let a = &listed["entries"][0];
    assert_eq!((&a["mode"], &a["uid"], &a["gid"]), (&json!(0o41700), &json!(5), &json!(9)));
    place.run("fs chmod 700 disk/none").fails(3, &["no \"none\""]);
    is_clean(&place);
}

#[test]
fn files_and_trees_are_removed() {
    let place = new(200 * MIB, "");
    place.run("fs mkdir -p disk/a/b/c disk/d disk/e").succeeds();
    for name in ["a/1", "a/b/2", "a/b/c/3", "4"] {
        place.run(&format!("fs ln -s target disk/{name}")).succeeds();
    }
    place.run("fs rm disk/4").succeeds();
    place.run("fs rm disk/4").fails(3, &["it does not exist"]);
    place.run("fs rm -f disk/4").succeeds();
    place.run("fs rm disk/a").fails(3, &["it is a directory", "fs rmdir"]);
    place.run("fs rmdir disk/a").fails(3, &["not empty"]);
    place.run("fs rmdir disk/a/1").fails(3, &["not a directory"]);
    place.run("fs rmdir disk/d disk/e").succeeds();
    let report = place.run("fs rm -r disk/a --json").succeeds().json();
    assert_eq!((&report["files"], &report["directories"]), (&json!(3), &json!(3)));
    assert_eq!(paths(&place, "disk"), [""; 0]);
    place.run("fs rm -r disk").fails(2, &["must end in a name"]);
    is_clean(&place);
}

#[test]
fn space_is_allocated_and_freed() {
    let place = new(200 * MIB, "");
    let used = || place.run("fs info disk --json").succeeds().json()["used_bytes"].as_u64().unwrap();
    let before = used();
    let report = place.run("fs fallocate --length 20MiB disk/f --json").succeeds().json();
    assert_eq!((&report["created"], &report["size"]), (&json!(true), &json!(20 * MIB)));
    assert!(used() >= before + 20 * MIB);
    place.run("fs fallocate --length 1MiB --offset 20MiB --keep-size disk/f").succeeds();
    assert_eq!(stat(&place, "disk/f")["size"], 20 * MIB);
    is_clean(&place);
    // An extent is freed when no part of it is used any more.
    let report = place.run("fs fallocate --punch-hole --length 32MiB disk/f --json").succeeds().json();
    assert_eq!((&report["created"], &report["size"]), (&json!(false), &json!(20 * MIB)));
    assert!(used() < before + 4 * MIB);
    let zeroes = place.run("fs cat disk/f").succeeds().stdout.clone();
    assert!(zeroes.len() as u64 == 20 * MIB && zeroes.iter().all(|byte| *byte == 0));
    place.run("fs mkdir disk/dir").succeeds();
    place.run("fs fallocate --length 1MiB disk/dir").fails(3, &["a directory"]);
    place.run("fs fallocate --punch-hole --length 1MiB disk/none").fails(3, &["no \"none\""]);
    place.run("fs fallocate --length 190MiB disk/g").fails(3, &["disk/g"]);
    is_clean(&place);
}

#[test]
fn zeroes_are_written_in_advance() {
    let place = new(200 * MIB, "");
    let info = place.run("fs info disk").succeeds().text();
    assert!(info.contains("made by the devices"), "{info}");
    let report = place.run("fs info disk --json").succeeds().json();
    assert_eq!(report["devices"][0]["write_zeroes"], "native");
    let before = place.allocated_bytes("disk");
    let report = place.run("fs fallocate --write-zeroes --length 60MiB disk/f --json").succeeds().json();
    assert_eq!((&report["created"], &report["size"]), (&json!(true), &json!(60 * MIB)));
    assert_eq!((&report["zeroed_bytes"], &report["slow_devices"]), (&json!(60 * MIB), &json!([])));
    assert!(place.allocated_bytes("disk") < before + 8 * MIB, "hardly anything was transferred");
    let zeroes = place.run("fs cat disk/f").succeeds().stdout.clone();
    assert!(zeroes.len() as u64 == 60 * MIB && zeroes.iter().all(|byte| *byte == 0));
    let report = place.run("fs fallocate -w --require-offload --offset 59MiB --length 2MiB disk/f --json");
    assert_eq!(report.succeeds().json()["size"], 61 * MIB);
    is_consistent(&place);
    // A file with checksums is copied on write.
    place.run("fs fallocate --length 1MiB disk/sums").succeeds();
    for (command, status, words) in [
        ("fs fallocate -w --length 1MiB disk/sums", 3, "only a file with NODATACOW"),
        ("fs fallocate -w --keep-size --length 1MiB disk/f", 2, "cannot be used with"),
        ("fs fallocate -w --punch-hole --length 1MiB disk/f", 2, "cannot be used with"),
        ("fs fallocate --require-offload --length 1MiB disk/f", 2, "--write-zeroes"),
        ("fs fallocate -w --length 1GiB disk/g", 3, "disk/g"),
    ] {
        place.run(command).fails(status, &[words]);
    }
    is_consistent(&place);
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let mount = Mount::new(&[place.path("disk")], "noatime").unwrap();
    let extents = run("filefrag", ["-v".as_ref(), mount.path("f").as_os_str()]).unwrap();
    assert!(!extents.contains("unwritten"), "{extents}");
    let flags = run("lsattr", [mount.path("f")]).unwrap();
    assert!(flags.split(' ').next().unwrap().contains('C'), "{flags}");
    mount.unmount().unwrap();
}

/// A device that cannot make zeroes is named before they are transferred to it, or refused.
#[test]
fn zeroes_are_transferred_to_a_device_that_cannot_make_them() {
    if !has("nbdkit") {
        return skipped("nbdkit is missing");
    }
    let place = new(200 * MIB, "");
    let (socket, disk) = (place.path("socket"), place.path("disk"));
    let mut server = Command::new("nbdkit");
    server.args(["-f", "-U"]).arg(&socket).args(["--filter=nozero", "file"]).arg(&disk);
    let mut server = server.spawn().unwrap();
    while !socket.exists() {
        assert!(server.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(5));
    }
    let target = format!("[nbd+unix:///?socket={}]", socket.display());
    let report = place.run(&format!("fs info {target} --json")).succeeds().json();
    assert_eq!(report["devices"][0]["write_zeroes"], "emulated");
    place.run(&format!("fs info {target}")).succeeds().says(&["transferred to device 1"]);
    let command = format!("fs fallocate -w --length 20MiB {target}/f");
    place.run(&format!("{command} --require-offload")).fails(3, &["cannot make zeroes", "--require-offload"]);
    let answer = place.run(&format!("{command} --json"));
    let told = "cannot make zeroes, so that 20 MiB of zeroes are transferred";
    assert!(answer.succeeds().stderr.contains(told), "{}", answer.stderr);
    assert_eq!(answer.json()["slow_devices"].as_array().unwrap().len(), 1);
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(place.allocated_bytes("disk") >= 20 * MIB);
    is_consistent(&place);
}

#[test]
fn subvolumes_are_made_shared_moved_and_deleted() {
    let place = new(200 * MIB, "");
    let made = place.run("fs subvolume create disk:home disk:home/inner --json").succeeds().json();
    assert_eq!(made["subvolumes"][0]["id"], 256);
    place.run("fs mkdir disk:home/alice").succeeds();
    let snapshot = place.run("fs snapshot -r disk:home disk:before --json").succeeds().json();
    assert_eq!((&snapshot["source"], &snapshot["read_only"]), (&json!(256), &json!(true)));
    let all = place.run("fs subvolume list disk --json").succeeds().json();
    let of = |id: u64| all["subvolumes"].as_array().unwrap().iter().find(|one| one["id"] == id).unwrap();
    assert_eq!((&of(258)["path"], &of(258)["read_only"]), (&json!("/before"), &json!(true)));
    assert_eq!(of(256)["uuid"], made["subvolumes"][0]["uuid"]);
    assert_eq!(of(258)["snapshot_of"], made["subvolumes"][0]["uuid"]);
    place.run("fs subvolume list disk").succeeds().says(&["257", "/home/inner", "read-only"]);

    place.run("fs mkdir disk:before/x").fails(3, &["subvolume 258 is read-only", "fs snapshot"]);
    place.run("fs snapshot disk:before disk:again").succeeds();
    place.run("fs rmdir disk:again/inner").succeeds();
    place.run("fs rmdir disk:again/alice").succeeds();
    place.run("fs mkdir disk:dir").succeeds();
    place.run("fs mv disk:again disk:dir").succeeds();
    place.run("fs mv disk:home/alice disk:dir").fails(3, &["different subvolumes", "fs put"]);
    place.run("fs ln disk:home/alice disk:x").fails(3, &["another subvolume", "-s"]);
    place
        .run("fs snapshot disk:dir disk:x")
        .fails(3, &["cannot make a snapshot of 'disk:/dir': it is not a subvolume"]);
    place.run("fs snapshot disk:256 disk:dir").fails(2, &["no name of its own"]);
    is_clean(&place);

    place.run("fs rm disk:home").fails(3, &["subvolume 256", "fs subvolume delete"]);
    place.run("fs rmdir disk:home").fails(3, &["not empty"]);
    place.run("fs subvolume create disk:empty").succeeds();
    let removed = place.run("fs rmdir disk:empty --json").succeeds().json();
    assert_eq!((&removed["subvolumes"], &removed["dropped"]), (&json!([260]), &json!([260])));
    assert_eq!((&removed["directories"], &removed["left"]), (&json!(0), &json!([])));
    place.run("fs rm -r disk:dir").fails(3, &["1 subvolume in it", "\"again\"", "--subvolumes"]);
    place.run("fs subvolume delete disk:home").fails(3, &["subvolume 257 is below it", "--recursive"]);
    place.run("fs subvolume delete disk:dir").fails(3, &["not a subvolume"]);
    place.run("fs subvolume delete disk:").fails(3, &["top-level"]);
    let removed = place.run("fs rm -r --subvolumes disk:dir --json").succeeds().json();
    assert_eq!((&removed["subvolumes"], &removed["dropped"]), (&json!([259]), &json!([259])));
    let deleted = place.run("fs subvolume delete -R disk:home disk:258 --json").succeeds().json();
    assert_eq!((&deleted["subvolumes"], &deleted["left"]), (&json!([257, 256, 258]), &json!([])));
    assert_eq!(deleted["dropped"], json!([256, 257, 258]));
    assert_eq!(paths(&place, "disk:"), [""; 0]);
    assert_eq!(place.run("fs subvolume delete disk").succeeds().text(), "");
    is_clean(&place);
}

#[test]
fn targets_of_every_kind_are_written() {
    let place = Place::in_memory();
    for name in ["a", "b", "c"] {
        place.write(name, b"");
        place.set_len(name, 150 * MIB);
    }
    place.run("fs format a b --data raid1").succeeds();
    place.run("fs mkdir b+a/dir").succeeds();
    place.run("fs check a+b").succeeds().says(&["clean; "]);
    place.run("fs mkdir a/x").fails(3, &["not written here: device 2 is missing"]);
    place.run("create v --size 150MiB").succeeds();
    place.run("create w --size 150MiB").succeeds();
    place.run("mirror create v w").succeeds();
    place.run("fs format mirror:v,w").succeeds();
    place.run("fs mkdir mirror:v,w/dir").succeeds();
    place.run("fs mkdir v/dir2").fails(3, &["member"]);
    place.run("fs check mirror:v,w").succeeds().says(&["clean; "]);
    place.run("verify mirror:v,w").succeeds();
    place.run("create u --size 150MiB").succeeds();
    place.run("fs format u").succeeds();
    let server = Server::start(&place, "u");
    place.run("fs mkdir u/dir").fails(3, &["in use by another process"]);
    let target = server.target("u");
    place.run(&format!("fs mkdir [{target}]/dir")).succeeds();
    assert_eq!(paths(&place, &format!("[{target}]")), ["dir"]);
    server.stop().is_clean();
    place.run("fs mkdir c/x").fails(3, &["no superblock"]);
}

#[test]
fn what_cannot_be_kept_up_to_date_is_not_written() {
    let place = new(200 * MIB, "--features ^skinny-metadata");
    place.run("fs mkdir disk/a").fails(3, &["cannot write to 'disk'", "skinny metadata", "btrfstune"]);
    let place = new(200 * MIB, "");
    let mut permissions = fs::metadata(place.path("disk")).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(place.path("disk"), permissions).unwrap();
    if !is_root() {
        place.run("fs mkdir disk/a").fails(3, &["disk"]);
    }
    let before = place.read("disk");
    place.run("fs ls disk").succeeds();
    assert!(place.read("disk") == before, "reading writes nothing");
}

#[test]
fn linux_uses_what_was_written_and_keeps_others_out() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let place = new(300 * MIB, "");
    place.run("fs subvolume create disk:home").succeeds();
    place.run("fs mkdir -p disk:home/alice/docs --owner 7:8").succeeds();
    place.run("fs ln -s docs disk:home/alice/link").succeeds();
    place.run("fs snapshot disk:home disk:copy").succeeds();
    place.run("fs mkdir disk:copy/new").succeeds();
    let images = [place.path("disk")];
    let mount = Mount::new(&images, "noatime").unwrap();
    assert!(mount.path("home/alice/docs").is_dir() && mount.path("copy/new").is_dir());
    assert!(!mount.path("home/new").exists());
    fs::write(mount.path("home/alice/link/file"), b"from Linux").unwrap();
    place.run("fs mkdir disk/x").fails(3, &["disk", "mounted"]);
    let (home, third) = (mount.path("home"), mount.path("third"));
    run("btrfs", ["subvolume".as_ref(), "snapshot".as_ref(), home.as_os_str(), third.as_os_str()]).unwrap();
    mount.unmount().unwrap();
    place.run("fs rm -r --subvolumes disk:home").succeeds();
    place.run("fs mv disk:third/alice/docs/file disk:third/file").succeeds();
    is_clean(&place);
    let mount = Mount::new(&images, "noatime").unwrap();
    assert_eq!(fs::read(mount.path("third/file")).unwrap(), b"from Linux");
    run("btrfs", ["scrub".as_ref(), "start".as_ref(), "-B".as_ref(), mount.path("").as_os_str()]).unwrap();
    mount.unmount().unwrap();
}

/// Of several subvolumes none is deleted if one cannot be.
#[test]
fn all_subvolumes_are_deleted_or_none() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let place = new(200 * MIB, "");
    place.run("fs subvolume create disk:home disk:home/one disk:home/one/two disk:home/other").succeeds();
    let linux = |change: &dyn Fn(&Mount)| {
        let mount = Mount::new(&[place.path("disk")], "noatime").unwrap();
        change(&mount);
        mount.unmount().unwrap();
    };
    let make_read_only = |mount: &Mount, value: &str| {
        let path = mount.path("home/one");
        run("btrfs", ["property".as_ref(), "set".as_ref(), path.as_os_str(), "ro".as_ref(), value.as_ref()]).unwrap();
    };
    let set_default = |mount: &Mount, path: &str| {
        let path = mount.path(path);
        run("btrfs", ["subvolume".as_ref(), "set-default".as_ref(), path.as_os_str()]).unwrap();
    };
    let refuses = |words: &[&str]| {
        let before = place.run("fs subvolume list disk: --json").succeeds().json();
        for command in ["fs subvolume delete -R disk:5/home", "fs rm -r --subvolumes disk:5/home"] {
            place.run(command).fails(3, words);
        }
        assert_eq!(place.run("fs subvolume list disk: --json").succeeds().json(), before);
        is_clean(&place);
    };
    linux(&|mount| make_read_only(mount, "true"));
    refuses(&["subvolume 258 is in subvolume 257, which is read-only"]);
    linux(&|mount| {
        make_read_only(mount, "false");
        set_default(mount, "home/one/two");
    });
    refuses(&["subvolume 258 is the default subvolume"]);
    linux(&|mount| {
        run("btrfs", ["subvolume".as_ref(), "set-default".as_ref(), "5".as_ref(), mount.path("").as_os_str()])
            .map(drop)
            .unwrap()
    });
    let deleted = place.run("fs subvolume delete -R disk:5/home --json").succeeds().json();
    assert_eq!(deleted["subvolumes"].as_array().unwrap().len(), 4);
    is_clean(&place);
}

#[test]
fn a_block_device_is_written_unless_it_is_mounted() {
    if let Err(why) = has_mounts() {
        return skipped(&why);
    }
    let place = new(200 * MIB, "");
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    place.run(&format!("fs mkdir {}/dir", device.0)).succeeds();
    let point = place.path("point");
    fs::create_dir(&point).unwrap();
    let Some(mount) = Mounted::new(point, &["-t", "btrfs", &device.0]) else { return };
    place.run(&format!("fs mkdir {}/other", device.0)).fails(3, &[&device.0, "mounted"]);
    drop((mount, device));
    assert_eq!(paths(&place, "disk"), ["dir"]);
    is_clean(&place);
}

/// The last transaction, in the superblock.
fn generation_of(place: &Place) -> u64 {
    let (mut number, disk) = ([0; 8], fs::File::open(place.path("disk")).unwrap());
    disk.read_exact_at(&mut number, 65536 + 72).unwrap();
    u64::from_le_bytes(number)
}

/// It stops soon, says how to go on, and the next command does.
#[test]
fn a_signal_ends_the_freeing_of_space() {
    let place = new(400 * MIB, "--node-size 4KiB");
    place.run("fs subvolume create disk:big").succeeds();
    fs::create_dir(place.path("many")).unwrap();
    (0..4000).for_each(|file| place.write(&format!("many/a file with the number {file}"), &[7; 900]));
    place.run("fs put -r many disk:big").succeeds();
    let used = || place.run("fs info disk --json").succeeds().json()["used_bytes"].as_u64().unwrap();
    let before = used();
    let generation = place.run("fs info disk --json").succeeds().json()["generation"].as_u64().unwrap();
    // Each node that is read takes a while, so that there is time for the signal.
    let mut child = place.start("fs subvolume delete [fault:[delay=20ms],raw:disk]:big");
    let start = Instant::now();
    // Opening commits a transaction 3 higher, and the deletion the one after that.
    while generation_of(&place) < generation + 4 {
        assert!(start.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(10));
    }
    sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it was done before the signal");
    let start = Instant::now();
    run("kill", ["-TERM", &child.id().to_string()]).unwrap();
    let ended = child.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.signal(), Some(15), "{words}");
    assert!(start.elapsed() < Duration::from_secs(5), "it stops soon");
    assert!(words.contains("freeing space: interrupted in subvolume 256"), "{words}");
    assert!(words.contains("try: `sealblock fs subvolume delete FILESYSTEM`"), "{words}");
    is_clean(&place);
    let listed = place.run("fs info disk --json").succeeds().json();
    let is_dying = |one: &Value| one["id"] == 256 && one["being_deleted"] == true;
    assert!(listed["subvolumes"].as_array().unwrap().iter().any(is_dying), "{listed}");
    let freed = place.run("fs subvolume delete disk --json").succeeds().json();
    assert_eq!((&freed["dropped"], &freed["left"]), (&json!([256]), &json!([])));
    assert!(used() < before - 4 * MIB);
    is_clean(&place);
}
