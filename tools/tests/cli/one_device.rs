//! Whatever is the same bytes is one device, by every name and in both orders: who opens it second for writing is refused by name. Loop devices,
//! mounts and mappings need root; without it these tests are skipped visibly.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::common::devices::{Loop, Mount, system};
use crate::common::server::Server;
use crate::common::{Place, filled, noise, skipped};

/// A place with a volume `v`, and a loop device over it.
fn looped() -> Option<(Place, Loop)> {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let device = Loop::new(&place.path("v"), &[])?;
    Some((place, device))
}

/// A write to a target that is in use is refused and changes nothing. A server does not ask others what they serve, since one of them
/// could be itself.
fn is_refused(place: &Place, target: &str, words: &[&str]) {
    place.run(&format!("zero {target} --range 0..1")).fails(3, words);
    let found: Vec<&str> = words.iter().copied().filter(|word| !word.starts_with("which serves")).collect();
    place.run(&format!("serve {target} --listen 127.0.0.1:0")).fails(3, &found);
}

/// Nothing is said of a target that another process writes at the same time: what was read of it is of no one moment.
fn is_not_read(place: &Place, target: &str, words: &[&str]) {
    for command in [format!("verify {target}"), format!("info {target}"), format!("copy {target} copied")] {
        place.run(&command).fails(3, words);
    }
    assert!(!place.path("copied").exists());
}

#[test]
fn what_a_server_only_reads_is_written_by_no_other_name() {
    let Some((place, device)) = looped() else { return };
    let words = |server: &Server| format!("in use by another process, {}", server.pid());
    for (served, other) in [("v", device.0.as_str()), (device.0.as_str(), "v")] {
        let server = Server::start(&place, &format!("{served} --read-only"));
        is_refused(&place, other, &[&words(&server)]);
        // Readers are many.
        place.run(&format!("copy {other} copied --force")).succeeds();
        fs::remove_file(place.path("copied")).unwrap();
        server.stop().is_clean();
        place.run(&format!("zero {other} --range 0..1")).succeeds();
    }
}

#[test]
fn a_file_and_the_loop_device_over_it_are_one_device_file_first() {
    let Some((place, device)) = looped() else { return };
    let server = Server::start(&place, "v");
    let (pid, file) = (server.pid(), place.path("v"));
    let words = format!("it shares its data with {}, which is in use by another process, {pid}", file.display());
    is_refused(&place, &device.0, &[&device.0, &words, "which serves v as nvme+tcp://"]);
    is_not_read(&place, &device.0, &[&device.0, &words, "which serves v as nvme+tcp://"]);
    server.stop().is_clean();
    place.run("verify v").succeeds().says(&["256 blocks"]);
    place.run(&format!("verify {}", device.0)).succeeds().says(&["256 blocks"]);
    place.run(&format!("zero {} --range 0..1", device.0)).succeeds();
}

#[test]
fn a_file_and_the_loop_device_over_it_are_one_device_loop_device_first() {
    let Some((place, device)) = looped() else { return };
    let Some(second) = Loop::new(&place.path("v"), &[]) else { return };
    fs::hard_link(place.path("v"), place.path("hard")).unwrap();
    let server = Server::start(&place, &device.0);
    let pid = server.pid();
    let by = format!("in use by another process, {pid} (sealblock)");
    // By every name of the file, and through another loop device.
    let open = File::open(place.path("v")).unwrap();
    let by_descriptor = format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd());
    for name in ["v", "hard", &by_descriptor] {
        is_refused(&place, name, &[&by]);
    }
    is_refused(&place, &second.0, &["it shares its data with", &by]);
    is_not_read(&place, &second.0, &["it shares its data with", &by]);
    if let Some(mount) = Mount::new(place.path("bound"), &["--bind", place.path(".").to_str().unwrap()]) {
        is_refused(&place, &format!("{}/v", mount.path()), &[&by]);
    }
    place.run("create v --size 1MiB --force").fails(3, &[&by]);
    server.stop().is_clean();
    place.run("verify v").succeeds().says(&["256 blocks"]);
    place.run("zero v --range 0..1").succeeds();
}

#[test]
fn a_member_of_a_group_and_the_loop_device_over_it_are_one_device() {
    let place = Place::new();
    filled(&place, 64);
    let Some(device) = Loop::new(&place.path("b"), &[]) else { return };
    place.run(&format!("zero mirror:a,b,{} --range 0..1", device.0)).fails(3, &["same device or file"]);
    let server = Server::start(&place, "mirror:a,b");
    let words = format!("which is in use by another process, {}", server.pid());
    is_refused(&place, &device.0, &[&words, "which serves mirror:a,b"]);
    place.run(&format!("mirror add mirror:a,b {} --force", device.0)).fails(3, &["in use by this server already"]);
    server.stop().is_clean();
}

#[test]
fn parts_of_a_file_are_devices_of_their_own_and_overlap_with_all_of_it() {
    let place = Place::new();
    place.write("disk", b"");
    place.set_len("disk", 8 << 20);
    let half = (4 << 20).to_string();
    let part = |offset: &str| Loop::new(&place.path("disk"), &["--offset", offset, "--sizelimit", &half]);
    let (Some(first), Some(second)) = (part("0"), part(&half)) else { return };
    let Some(across) = part("1048576") else { return };
    place.run(&format!("create {} --size 1MiB", first.0)).succeeds();
    place.run(&format!("create {} --size 1MiB", second.0)).succeeds();
    let servers = [Server::start(&place, &first.0), Server::start(&place, &second.0)];
    place.run(&format!("create {} --size 1MiB --force", across.0)).fails(3, &["it shares its data with", "disk"]);
    place.run("zero raw:disk --range 0..1").fails(3, &["in use by another process"]);
    servers.into_iter().for_each(|server| _ = server.stop().is_clean());
    place.run(&format!("verify {}", first.0)).succeeds();
}

#[test]
fn a_partition_and_a_mapping_are_the_file_below_them() {
    let place = Place::new();
    // A master boot record with one partition of Linux: a byte for its type, first sector and number of sectors.
    let mut table = vec![0; 512];
    table[450] = 0x83;
    table[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    table[458..462].copy_from_slice(&8192_u32.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    place.write("disk", &table);
    place.set_len("disk", 8 << 20);
    let Some(device) = Loop::new(&place.path("disk"), &["--partscan"]) else { return };
    let partition = format!("{}p1", device.0);
    if Path::new(&partition).exists() {
        look_below(&place, &partition);
    } else {
        skipped("loop devices have no partitions here");
    }
    let name = format!("sealblock-test-{}", std::process::id());
    let map = format!("0 8192 linear {} 4096", device.0);
    if system("dmsetup", &["create", &name, "--table", &map]) {
        look_below(&place, &format!("/dev/mapper/{name}"));
        assert!(system("dmsetup", &["remove", "--retry", &name]));
    } else {
        skipped("there is no device-mapper here");
    }
}

fn look_below(place: &Place, device: &str) {
    place.run(&format!("create {device} --size 1MiB --force")).succeeds();
    let server = Server::start(place, device);
    is_refused(place, "raw:disk", &["in use by another process"]);
    server.stop().is_clean();
    // As a writer of the file has it.
    let held = File::open(place.path("disk")).unwrap();
    held.lock().unwrap();
    is_refused(place, device, &["it shares its data with", "which is in use by another process"]);
}

#[test]
fn a_file_under_a_mounted_loop_device_is_in_use() {
    let place = Place::new();
    place.write("disk", b"");
    place.set_len("disk", 8 << 20);
    let disk = place.path("disk");
    if !system("mkfs.ext4", &["-q", disk.to_str().unwrap()]) {
        return skipped("there is no mkfs.ext4 here");
    }
    let Some(mount) = Mount::new(place.path("mnt"), &["-o", "loop", disk.to_str().unwrap()]) else { return };
    let words = format!("which is mounted at {}", mount.path());
    is_refused(&place, "raw:disk", &["it shares its data with", &words]);
    if let Some(other) = Loop::new(&disk, &[]) {
        is_refused(&place, &other.0, &[&words]);
    }
    place.run("create disk --size 1MiB --force").fails(3, &[&words]);
    // What lies on the file system is a file of its own.
    place.run("create mnt/v --size 1MiB").succeeds();
    place.run("zero mnt/v --range 0..1").succeeds();
    drop(mount);
    place.run("zero raw:disk --range 0..1").succeeds();
}

#[test]
fn what_is_read_is_not_what_is_written_by_any_name() {
    let place = Place::new();
    let bytes = noise(4, 1_000_000);
    place.write("f", &bytes);
    let device = Loop::new(&place.path("f"), &[]);
    let window = Loop::new(&place.path("f"), &["-o", "4096", "--sizelimit", "409600"]);
    for device in [device, window].into_iter().flatten() {
        for from in [device.0.clone(), format!("raw:{}", device.0), format!("offset:0..7,{}", device.0)] {
            place.run(&format!("copy {from} f")).fails(3, &[&device.0, "are the same device or file"]);
        }
        assert!(place.read("f") == bytes, "it is as it was");
    }
    let Some((place, device)) = looped() else { return };
    let before = place.read("v");
    for command in [format!("copy {} v", device.0), format!("rescue {} v", device.0), format!("rescue v {}", device.0)]
    {
        place.run(&command).fails(3, &["are the same device or file"]);
    }
    assert!(place.read("v") == before);
}

#[test]
fn standard_input_and_output_are_what_a_shell_has_opened() {
    let place = Place::new();
    let bytes = noise(4, 1_000_000);
    place.write("f", &bytes);
    let run = |command: &str| {
        let program = env!("CARGO_BIN_EXE_sealblock");
        let mut shell = std::process::Command::new("sh");
        let output = shell.args(["-c", &format!("{program} {command}")]).current_dir(place.path(".")).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (command, name) in [("copy - f < f", "standard input"), ("copy f - >> f", "standard output")] {
        let (status, said) = run(command);
        assert!(
            status == Some(3) && said.contains(name) && said.contains("are the same device or file"),
            "{command}: {said}"
        );
        assert!(place.read("f") == bytes, "{command}: it is as it was");
    }
    assert_eq!(run("copy - g < f").0, Some(0));
    assert_eq!(run("copy f - > h").0, Some(0));
    assert!(place.read("g") == bytes && place.read("h") == bytes);
}

#[test]
fn a_group_has_each_device_once_also_for_readers() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    fs::hard_link(place.path("v"), place.path("hard")).unwrap();
    for target in ["mirror:v,v", "mirror:v,hard", "stripe-nolabel:v,v", "mirror:v,[fault:[delay=1ms],hard]"] {
        for command in ["verify", "info", "mirror status"] {
            place.run(&format!("{command} {target}")).fails(3, &["are the same device or file"]);
        }
    }
}

/// Runs a command of this program in a shell, which opens what the command is to write to.
fn in_shell(place: &Place, command: &str) -> (Option<i32>, String, String) {
    let program = env!("CARGO_BIN_EXE_sealblock");
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", &format!("{program} {command}")]).current_dir(place.path(".")).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn no_output_of_a_command_overwrites_its_target() {
    const SAME: &str = "are the same device or file";
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.run("create w --size 1MiB").succeeds();
    fs::hard_link(place.path("v"), place.path("hard")).unwrap();
    place.write(
        "sealblock.toml",
        b"[[subsystems]]\nnqn = \"nqn.2026-11.io.sealblock:v\"\n[[subsystems.namespaces]]\nnsid = 1\ntarget = \"v\"\n",
    );
    let before = place.read("v");
    for command in [
        "verify v --json",
        "verify hard",
        "verify w v --json",
        "info v --json",
        "compare w v",
        "zero v --range 0..1 --json",
        "discard offset:0..1,v --yes --json",
        "copy w v --json",
        "rescue v out",
        "resize v --size 2MiB --json",
        "scrub status v --json",
        "mirror status mirror:v,w --json",
        "mirror create v w",
        "fs info v",
        "fs cat v/file",
        "serve v --listen 127.0.0.1:0",
        "serve --config sealblock.toml --listen 127.0.0.1:0",
        "create v --size 1MiB --force --json",
    ] {
        let (status, _, said) = in_shell(&place, &format!("{command} 1<>v"));
        assert!(status == Some(3) && said.contains("standard output and") && said.contains(SAME), "{command}: {said}");
        assert!(place.read("v") == before, "{command} 1<>v");
        // Nothing can be said where it would be written to the target.
        let (status, said, _) = in_shell(&place, &format!("{command} 2<>v"));
        assert!(status == Some(3) && said.contains("standard error and") && said.contains(SAME), "{command}: {said}");
        assert!(place.read("v") == before, "{command} 2<>v");
    }
    let (status, ..) = in_shell(&place, "verify v 1<>v 2>&1");
    assert!(status == Some(3) && place.read("v") == before);
    place.run("verify v --resume v").fails(3, &["v and v", SAME]);
    place.run("verify v --resume hard").fails(3, &["hard and v", SAME]);
    place.run("fs get v/file hard").fails(3, &["hard and v", SAME]);
    assert!(place.read("v") == before);
    // Twins: another file, a pipe, and a copy that writes nothing to standard output.
    assert_eq!(in_shell(&place, "verify v --json > report 2> errors").0, Some(0));
    assert!(String::from_utf8(place.read("report")).unwrap().contains("blocks_verified"));
    assert_eq!(in_shell(&place, "verify v --json | cat").0, Some(0));
    assert_eq!(in_shell(&place, "copy v /dev/stdout > data").0, Some(0));
    assert_eq!(place.len("data"), 1 << 20);
}

#[test]
fn a_remote_namespace_is_one_device_by_every_name_of_its_server() {
    let place = Place::new();
    for volume in ["a", "b"] {
        place.run(&format!("create {volume} --size 1MiB")).succeeds();
    }
    place.write("data", &noise(3, 1 << 20));
    let server = Server::start(&place, "a b --protection shown --nbd 127.0.0.1:0");
    let (a, b) = (server.target("a"), server.target("b"));
    let other = a.replace("127.0.0.1", "localhost");
    let same = format!("{a} and {other} are the same device: namespace ");
    for group in ["mirror", "stripe", "stripe-nolabel"] {
        for command in ["copy data", "verify"] {
            place.run(&format!("{command} {group}:{a},{other}")).fails(3, &[&same]);
        }
    }
    place.run(&format!("mirror create {a} {other}")).fails(3, &[&same]);
    place.run(&format!("mirror create {a} {other} --from {a} --force")).fails(3, &[&same]);
    // Through a gateway, under its own name and under another one, and through a gateway of that one.
    let gateway = Server::start(&place, &format!("{a} --protection shown"));
    place.write(
        "sealblock.toml",
        format!(
            "[[subsystems]]\nname = \"other\"\nnamespaces = [{{ target = \"{}\", protection = \"shown\" }}]\n",
            gateway.target("a")
        )
        .as_bytes(),
    );
    let further = Server::start_at(&place, "--config sealblock.toml --listen 127.0.0.1:0");
    for behind in [gateway.target("a"), further.target("other")] {
        place.run(&format!("mirror create {a} {behind}")).fails(3, &[" are the same device: namespace "]);
        place.run(&format!("copy data stripe:{behind},{a}")).fails(3, &[" are the same device: namespace "]);
        let overlapping = format!("copy offset:0..99,{a} offset:50..149,{behind}");
        place.run(&overlapping).fails(3, &["are the same device or file: namespace "]);
        place.run(&format!("verify stripe-nolabel:{behind},{b}")).succeeds();
    }
    place
        .run(&format!("verify stripe-nolabel:{},{}", gateway.target("a"), further.target("other")))
        .fails(3, &["are the same device"]);
    further.stop().is_clean();
    gateway.stop().is_clean();
    // Nothing was written: no data, no label.
    place.run(&format!("compare --zero {a}")).succeeds();
    // Parts of it are apart, unless they overlap.
    place.run(&format!("verify stripe-nolabel:[offset:0..127,{a}],[offset:128..255,{other}]")).succeeds();
    let overlapping = format!("verify stripe-nolabel:[offset:0..127,{a}],[offset:127..254,{other}]");
    place.run(&overlapping).fails(3, &["are the same device: namespace "]);
    // Blocks of a part are numbered from its first one: these are 100 to 149 and 120 to 169 of the namespace.
    let nested = format!("verify stripe-nolabel:[offset:0..49,offset:100..199,{a}],[offset:120..169,{other}]");
    place.run(&nested).fails(3, &["are the same device: namespace "]);
    // A copy reads what it has written, and is wrong from there on.
    let nbd = format!("nbd://{}/a", server.ready["nbd"]["listeners"][0].as_str().unwrap());
    let nbd_elsewhere = nbd.replace("127.0.0.1", "localhost");
    for (from, to) in [(&a, &a), (&a, &other), (&nbd, &nbd), (&nbd, &nbd_elsewhere), (&nbd, &a), (&other, &nbd)] {
        for (from, to) in [(from.clone(), to.clone()), (format!("offset:0..99,{from}"), format!("offset:50..149,{to}"))]
        {
            place.run(&format!("copy {from} {to}")).fails(3, &["are the same device or file"]);
        }
    }
    place.run(&format!("copy data {a}")).succeeds();
    place.run(&format!("copy {a} {b}")).succeeds();
    place.run(&format!("copy {b} out")).succeeds();
    assert!(place.read("out") == noise(3, 1 << 20));
    server.stop().is_clean();
}

#[test]
fn a_gateway_of_a_part_or_a_group_is_on_the_namespaces_below_it() {
    let place = Place::new();
    for volume in ["a", "b", "c", "d", "e"] {
        place.run(&format!("create {volume} --size 1MiB")).succeeds();
    }
    place.write("data", &noise(3, 1 << 20));
    let server = Server::start(&place, "a b c d e --protection shown");
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|name| server.target(name));
    place.run(&format!("copy data {b}")).succeeds();
    let part = format!("offset:0..127,{a}");
    let (stripe, mirror) = (format!("stripe-nolabel:{b},{c}"), format!("mirror:{d},{e}"));
    place.run(&format!("mirror create {d} {e}")).succeeds();
    let name = |subsystem, target| {
        format!(
            "[[subsystems]]\nname = \"{subsystem}\"\nnamespaces = [{{ target = \"{target}\", protection = \"shown\" }}]\n"
        )
    };
    let config = [name("part", &part), name("stripe", &stripe), name("mirror", &mirror)].concat();
    place.write("gateway.toml", config.as_bytes());
    let gateway = Server::start_at(&place, "--config gateway.toml --listen 127.0.0.1:0 --nbd 127.0.0.1:0");
    let through = ["part", "stripe", "mirror"].map(|name| gateway.target(name));
    let over_nbd = format!("nbd://{}/stripe", gateway.ready["nbd"]["listeners"][0].as_str().unwrap());
    place.write("further.toml", [name("p", &through[0]), name("s", &through[1])].concat().as_bytes());
    let further = Server::start_at(&place, "--config further.toml --listen 127.0.0.1:0");
    for (of, below) in [(&through[0], [&a, &a]), (&through[1], [&b, &c]), (&through[2], [&d, &e])] {
        for below in below {
            for (one, two) in [(of, below), (below, of)] {
                if of == &through[2] && two == below {
                    // A replica alone is not written at all.
                    continue;
                }
                place.run(&format!("copy {one} {two}")).fails(3, &["are the same device or file: namespace "]);
                let parts = format!("copy offset:0..9,{one} offset:20..29,{two}");
                place.run(&parts).fails(3, &["are the same device or file: namespace "]);
                let group = format!("verify stripe-nolabel:{one},[offset:0..63,{two}]");
                place.run(&group).fails(3, &["are the same device: namespace "]);
            }
        }
    }
    let (part, stripe) = (further.target("p"), further.target("s"));
    for (one, two) in [(&part, &a), (&stripe, &c), (&over_nbd, &b), (&c, &over_nbd), (&stripe, &over_nbd)] {
        place.run(&format!("copy {one} {two}")).fails(3, &["are the same device or file: "]);
    }
    place.run(&format!("copy {part} {}", through[0])).fails(3, &["are the same device or file"]);
    // What lies on other namespaces is apart.
    place.run(&format!("verify stripe-nolabel:{},{b},{part}", through[0])).fails(3, &[&*through[0]]);
    place.run(&format!("verify stripe-nolabel:{},{b}", through[0])).succeeds();
    // A mirror's replicas are looked at as they are now, and a new one must be none of what it has.
    place.run(&format!("mirror remove {mirror} {e} --force")).succeeds();
    place.run(&format!("copy {e} {}", through[2])).succeeds();
    place.run(&format!("mirror add {mirror} {} --force", c.replace("127.0.0.1", "localhost"))).succeeds();
    place.run(&format!("copy {c} {}", through[2])).fails(3, &["are the same device or file: namespace "]);
    for same in [&d, &c] {
        let other = same.replace("127.0.0.1", "localhost");
        let add = format!("mirror add {mirror} {}", if same == &d { &other } else { &c });
        place.run(&add).fails(3, &["are the same device: namespace "]);
    }
    further.stop().is_clean();
    gateway.stop().is_clean();
    place.run(&format!("copy {b} out")).succeeds();
    assert!(place.read("out") == noise(3, 1 << 20));
    server.stop().is_clean();
}
