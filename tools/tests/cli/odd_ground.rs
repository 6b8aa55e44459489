//! Disks with large sectors, what lies on a device before, starts that are disturbed, and limits of the system. Loop devices need root; without
//! it these tests are skipped visibly.

use std::fs::{self, File};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::devices::{Loop, system};
use crate::common::server::Server;
use crate::common::{Place, has, noise, skipped};

/// A loop device over a file of this name, with sectors of 4096 bytes.
fn large_sectors(place: &Place, name: &str) -> Option<Loop> {
    Loop::new(&place.path(name), &["--sector-size", "4096"])
}

#[test]
fn a_volume_of_small_sectors_is_read_on_a_disk_of_large_ones_and_converted() {
    for options in ["", "--block-size 512 --guard crc16", "--guard none"] {
        let place = Place::new();
        let data = noise(1, 1 << 20);
        place.volume(&format!("--size 1MiB {options}"), &data);
        let Some(device) = large_sectors(&place, "v") else { return };
        let disk = &device.0;
        place.run(&format!("info {disk}")).succeeds();
        place.run(&format!("verify {disk}")).succeeds();
        place.run(&format!("copy {disk} out")).succeeds();
        assert!(place.read("out") == data, "{options}");
        place.run(&format!("compare {disk} out")).succeeds();
        place.run(&format!("rescue {disk} rescued")).succeeds();
        assert!(place.read("rescued") == data, "{options}");
        let before = place.read("v");
        for command in ["zero D --yes", "copy out D", "serve D --listen 127.0.0.1:0 --control none"] {
            let refused = place.run(&command.replace('D', disk));
            refused.fails(3, &["sectors of 512 bytes", "sectors of 4096", "can be read there", "sealblock create NEW"]);
        }
        assert!(place.read("v") == before, "nothing is written");
        let server = Server::start(&place, &format!("--control none --read-only {disk}"));
        server.stop();
        // As the message says.
        place.write("new", &[]);
        place.set_len("new", 64 << 20);
        let Some(new) = large_sectors(&place, "new") else { return };
        let block_size = if options.contains("512") { "" } else { options };
        place.run(&format!("create {} --size 1MiB {block_size}", new.0)).succeeds();
        place.run(&format!("copy {disk} {}", new.0)).succeeds();
        place.run(&format!("compare {disk} {}", new.0)).succeeds();
        place.run(&format!("zero {} --range 0", new.0)).succeeds();
    }
}

#[test]
fn a_block_device_that_is_read_only_is_read_and_not_served_for_writing() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.write("plain", &data);
    let read_only = |file: &str| Loop::new(&place.path(file), &["--read-only"]);
    let (Some(volume), Some(plain)) = (read_only("v"), read_only("plain")) else { return };
    let refuses = |command: &str| {
        place.run(command).fails(3, &["read-only block device", "blockdev --setrw", "serve --read-only"]);
    };
    for target in [volume.0.clone(), format!("raw:{}", plain.0)] {
        for command in ["copy data D", "zero D --yes", "serve D --listen 127.0.0.1:0 --control none"] {
            refuses(&command.replace('D', &target));
        }
        Server::start(&place, &format!("--control none --read-only {target}")).stop().is_clean();
        place.run(&format!("verify {target}")).succeeds();
        place.run(&format!("copy {target} out")).succeeds();
        assert!(place.read("out") == data);
    }
    refuses(&format!("create {} --size 1MiB --force", plain.0));
    refuses(&format!("corrupt {} --lba 1 --kind data", volume.0));
    assert!(place.read("plain") == data);
    drop(volume);
    let Some(writable) = Loop::new(&place.path("v"), &[]) else { return };
    place.run(&format!("zero {} --range 0", writable.0)).succeeds();
}

/// What makes a disk of 64 MiB something, and how that is called.
const MAKERS: [(&str, &[&str], &str); 5] = [
    ("mkfs.ext4", &["-q", "-F"], "an ext4 file system"),
    ("mkfs.btrfs", &["-q", "-f", "-M"], "a Btrfs file system"),
    ("mkfs.vfat", &[], "a FAT file system"),
    ("mkswap", &[], "swap space"),
    ("pvcreate", &["-q", "-y"], "an LVM physical volume"),
];

#[test]
fn what_lies_on_a_device_is_named_and_overwritten_only_with_force() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(2, 1 << 20));
    place.write("data", &noise(1, 1 << 20));
    for (program, arguments, name) in MAKERS {
        if !has(program) {
            continue;
        }
        place.write("disk", &[]);
        place.set_len("disk", 160 << 20);
        let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
        let disk = device.0.as_str();
        let made = Command::new(program).args(arguments).arg(disk).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !made.is_ok_and(|status| status.success()) {
            skipped(&format!("{program} makes nothing here"));
            continue;
        }
        let before = place.read("disk");
        for command in ["copy data D", "copy data raw:D", "rescue v D", "create D --size 1MiB"] {
            place.run(&command.replace('D', disk)).fails(3, &[disk, name, "--force"]);
        }
        assert!(place.read("disk") == before, "{name}: nothing is written");
        place.run(&format!("copy data {disk} --force")).succeeds();
        assert!(place.read("disk")[..1 << 20] == noise(1, 1 << 20));
        place.run(&format!("create {disk} --size 1MiB --force")).succeeds();
        // A volume is a device of its own, whatever is written to it.
        place.run(&format!("copy data {disk}")).succeeds();
        place.run(&format!("copy data {disk}")).succeeds();
    }
}

/// Bytes that begin with what makes them an ext2 file system.
fn ext2(length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
    bytes
}

#[test]
fn what_lies_behind_layers_and_protocols_is_found_before_it_is_overwritten() {
    const LENGTH: u64 = 2 << 20;
    let place = Place::new();
    place.volume("--size 1MiB", &noise(2, 1 << 20));
    place.write("data", &noise(1, 1 << 20));
    place.write("small", &noise(3, 64 << 10));
    place.write("a", &ext2(LENGTH));
    place.write("b", &ext2(LENGTH));
    place.write("blank", &vec![0; LENGTH as usize]);
    let server = Server::start(&place, "--control none --nbd 127.0.0.1:0 raw:b");
    let export = format!("nbd://{}/b", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    let there = "an ext2 file system (byte 1080)";
    let targets = [
        ("offset:0..,raw:a", "a"),
        ("fault:[read-error%0],raw:a", "a"),
        ("fault:[read-error],raw:a", "raw:a"),
        ("stripe-nolabel:raw:a,raw:blank", "raw:a"),
        ("stripe-nolabel:raw:blank,raw:a", "raw:a"),
        (&export, &export),
    ];
    for (target, named) in targets {
        for command in ["copy v", "copy data", "rescue v"] {
            place.run(&format!("{command} {target}")).fails(3, &[named, there, "--force"]);
        }
        assert!(place.read("a") == ext2(LENGTH) && place.read("b") == ext2(LENGTH), "{target}: nothing is written");
    }
    // What is written beside the signature belongs to the same file system.
    for target in ["offset:8..,raw:a", "offset:256..,stripe-nolabel:raw:blank,raw:a"] {
        place.run(&format!("copy data {target}")).fails(3, &["raw:a", there, "--force"]);
    }
    assert!(place.read("a") == ext2(LENGTH));
    // A part of which nothing is written is free.
    place.run("copy small offset:0..127,stripe-nolabel:raw:blank,raw:a").succeeds();
    assert!(place.read("a") == ext2(LENGTH));
    place.run("copy data offset:0..,raw:a --force").succeeds();
    place.run(&format!("copy data {export} --force")).succeeds();
    server.stop();
    // A volume with a file system is no other device than an export that is one.
    place.run("create w --size 1MiB").succeeds();
    place.write("system", &ext2(1 << 20));
    place.run("copy system w").succeeds();
    place.run("copy data w").fails(3, &["'w': it has", there, "--force"]);
    place.run("compare system w").succeeds();
}

#[test]
fn devices_below_layers_are_looked_at_as_if_they_were_named_alone() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(2, 1 << 20));
    place.write("a", &ext2(4 << 20));
    place.write("b", &ext2(4 << 20));
    let (Some(a), Some(b)) = (Loop::new(&place.path("a"), &[]), Loop::new(&place.path("b"), &[])) else { return };
    let (a, b) = (a.0.as_str(), b.0.as_str());
    for target in ["offset:0..,A", "offset:0..,raw:A", "fault:[read-error%0],A", "stripe-nolabel:A,B", "stripe:A,B"] {
        let target = target.replace('A', a).replace('B', b);
        place.run(&format!("copy v {target}")).fails(3, &[a, "an ext2 file system", "--force"]);
        assert!(place.read("a") == ext2(4 << 20) && place.read("b") == ext2(4 << 20), "{target}");
    }
    place.run(&format!("copy v stripe-nolabel:{a},{b} --force")).succeeds();
}

#[test]
fn what_others_left_at_the_end_of_a_device_is_gone_when_it_is_a_volume() {
    let place = Place::new();
    place.write("disk", &[]);
    place.set_len("disk", 64 << 20);
    place.poke("disk", (64 << 20) - 512, b"EFI PART");
    let Some(device) = Loop::new(&place.path("disk"), &[]) else { return };
    place.run(&format!("create {} --size 1MiB", device.0)).fails(3, &["a GPT partition table", "--force"]);
    place.run(&format!("create {} --size 1MiB --force", device.0)).succeeds();
    assert!(place.read("disk")[(63 << 20)..].iter().all(|byte| *byte == 0));
    if has("wipefs") {
        let found = Command::new("wipefs").arg(&device.0).output().unwrap();
        assert_eq!(String::from_utf8(found.stdout).unwrap(), "", "nobody else takes it for theirs");
    }
}

#[test]
fn a_plain_file_of_another_format_is_not_overwritten_by_the_way() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    for (content, name) in [
        ("Dear diary,\n".as_bytes(), "it has plain text"),
        (b"#!/bin/sh\nexit\n", "a script"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "a gzip archive"),
        (b"\x7fELF\x02\x01\x01\0\0", "a program"),
    ] {
        for command in ["copy v out", "copy v raw:out", "rescue v out"] {
            place.write("out", content);
            place.run(command).fails(3, &["out", name, "--force"]);
            assert!(place.read("out") == content, "{command}");
            place.run(&format!("{command} --force")).succeeds();
            assert!(place.read("out") == data, "{command}");
            // An image of a disk is what such a command writes.
            place.run(command).succeeds();
        }
        place.write("new", content);
        place.run("create new --size 1MiB").fails(3, &["new", name, "--force"]);
    }
    // Of the same format it is what was copied there before.
    place.write("notes", b"Dear diary, again\n");
    place.write("out", b"Dear diary,\n");
    place.run("copy notes out").succeeds();
    place.write("out", b"");
    place.run("copy v out").succeeds();
}

#[test]
fn nothing_is_made_where_only_devices_are() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let missing = format!("/dev/sealblock-missing-{}", std::process::id());
    for command in ["create NODE --size 1MiB", "copy v NODE", "rescue v NODE", "create NODE --size 1MiB --force"] {
        place.run(&command.replace("NODE", &missing)).fails(3, &[&missing, "no such device"]);
        assert!(!Path::new(&missing).exists(), "{command}");
    }
}

#[test]
fn a_hangup_while_it_starts_does_not_end_a_server() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    // A target that is in use holds up the start.
    let held = File::open(place.path("v")).unwrap();
    held.lock().unwrap();
    let mut command = place.command("serve v --json --listen 127.0.0.1:0");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let has_changed_hangups = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        // Blocked does not count: all signals are while a thread is being made, and what came meanwhile counts afterwards.
        let masks = status.lines().filter(|line| ["SigIgn:", "SigCgt:"].iter().any(|mask| line.starts_with(mask)));
        masks.filter_map(|line| u64::from_str_radix(line.split_whitespace().last()?, 16).ok()).any(|mask| mask & 1 != 0)
    };
    while !has_changed_hangups() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be hung up");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(system("kill", &["-s", "HUP", &pid.to_string()]));
    drop(held);
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
    assert!(line.contains("\"event\":\"ready\""), "{line}");
    assert!(system("kill", &["-s", "TERM", &pid.to_string()]));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_server_out_of_descriptors_says_so_once_and_goes_on() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let serve = place.command("serve v --json --listen 127.0.0.1:0 --control none");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg("ulimit -n 64 && exec \"$0\" \"$@\"").arg(serve.get_program()).args(serve.get_args());
    shell.current_dir(place.path("")).stderr(File::create(place.path("log")).unwrap());
    let server = Server::spawn_without_errors(shell);
    let log = || String::from_utf8(place.read("log")).unwrap();
    // The kernel completes connections that wait to be accepted.
    let connections: Vec<TcpStream> = (0..90).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    while !log().contains("connections wait") {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(connections);
    place.run(&format!("discover {}", server.address())).succeeds();
    server.stop();
    assert_eq!(log().matches("connections wait").count(), 1, "{}", log());
    assert!(log().contains("LimitNOFILE"), "{}", log());
}

#[test]
fn a_server_whose_output_nobody_reads_serves_reloads_and_ends() {
    /// More than a pipe holds, in lines of at least 100 bytes.
    const LINES: usize = 1200;
    let place = Place::new();
    let configure = |count: usize| {
        let subsystem = |number| {
            format!(
                "[[subsystems]]\nnqn = \"nqn.2026-11.org.example:number-{number}\"\n\
                 [[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n"
            )
        };
        let all: String = (0..count).map(subsystem).collect();
        fs::write(place.path("c.toml"), format!("[[listeners]]\naddress = \"127.0.0.1:0\"\n{all}")).unwrap();
    };
    configure(200);
    let server = Server::spawn(place.command("serve --config c.toml --json --log debug"));
    let listed = || {
        place
            .run(&format!("discover {}", server.address()))
            .succeeds()
            .stdout
            .iter()
            .filter(|byte| **byte == b'\n')
            .count()
    };
    // Standard error: each of these connections is logged.
    for _ in 0..LINES {
        let mut connection = TcpStream::connect(server.address()).unwrap();
        std::io::Write::write_all(&mut connection, &[0xff; 16]).unwrap();
        drop(connection);
    }
    assert_eq!(listed(), 200);
    // Standard output: each reload lists all subsystems.
    for count in [199, 200, 199, 200, 199, 200] {
        configure(count);
        server.signal("HUP");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while listed() != count {
            assert!(std::time::Instant::now() < deadline, "the reload to {count} subsystems");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    let begun = std::time::Instant::now();
    let pid = server.pid();
    server.signal("TERM");
    while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    server.wait();
}
