//! Which target and which server a command means: what the target is, whatever it is called, and servers that can be trusted.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use serde_json::Value;

use crate::common::devices::{Loop, system};
use crate::common::server::Server;
use crate::common::{Answer, Place, RUNTIME_FOLDER, answer, is_root, skipped};

/// A user without anything.
const NOBODY: u32 = 65534;
const FOLDERS: [&str; 2] = ["x1", "x2"];

/// Two folders with devices of equal names, in each a volume `v` and a mirror of `zla` and `zlb`.
fn two_folders() -> Place {
    let place = Place::new();
    for folder in FOLDERS {
        fs::create_dir(place.path(folder)).unwrap();
        for name in ["v", "zla", "zlb", "zlc"] {
            run_in(&place, folder, &format!("create {name} --size 1MiB")).succeeds();
        }
        run_in(&place, folder, "mirror create zla zlb").succeeds();
    }
    place
}

#[track_caller]
fn run_in(place: &Place, folder: &str, arguments: &str) -> Answer {
    answer(place.command(arguments).current_dir(place.path(folder)))
}

fn serve_in(place: &Place, folder: &str, arguments: &str) -> Server {
    let mut command = place.command(&format!("serve --json --listen 127.0.0.1:0 {arguments}"));
    command.current_dir(place.path(folder));
    Server::spawn(command)
}

fn replicas(status: &Value) -> Vec<&str> {
    let replicas = status["replicas"].as_array().unwrap().iter().filter(|replica| replica["state"] != "removed");
    replicas.map(|replica| replica["name"].as_str().unwrap()).collect()
}

fn socket_of(place: &Place, server: &Server) -> PathBuf {
    place.path(RUNTIME_FOLDER).join(format!("sealblock/{}.sock", server.pid()))
}

#[test]
fn equal_names_in_two_folders_reach_two_servers_with_every_command() {
    let place = two_folders();
    let servers = FOLDERS.map(|folder| serve_in(&place, folder, "v mirror:zla,zlb"));
    for (folder, server) in FOLDERS.iter().zip(&servers) {
        let run = |arguments: &str| run_in(&place, folder, arguments);
        for target in ["v", "mirror:zla,zlb", "mirror:./zlb,zla"] {
            assert_eq!(run(&format!("scrub status {target} --json")).succeeds().json()["server_pid"], server.pid());
            assert_eq!(run(&format!("status {target} --json")).json()["servers"][0]["pid"], server.pid(), "{target}");
            assert_eq!(run(&format!("log {} {target} --json", "warn")).succeeds().json()["pid"], server.pid());
        }
        run("scrub start v --rate 4KiB/s").succeeds();
        run("scrub pause v").succeeds();
        run("scrub stop v").succeeds();
        run("verify v").fails(3, &["in use by another process", &server.pid().to_string()]);
        run("resize v --size 2MiB").succeeds();
        run("mirror remove mirror:zla,zlb zlb").succeeds();
        run("mirror add mirror:zla,zlb zlb --force").succeeds();
        run("mirror replace mirror:zla,zlb zlb zlc").succeeds();
        // Both names are understood now, and each by the devices that it has.
        for target in ["mirror:zla,zlb", "mirror:zla,zlc"] {
            let status = run(&format!("mirror status {target} --json")).succeeds().json();
            assert_eq!(replicas(&status), ["zla", "zlc"], "{folder} {target}");
        }
    }
    // Each has done to its own what it was asked, and nothing was done to the other one twice.
    let [first, second] = servers;
    first.stop().is_clean();
    assert_eq!(run_in(&place, "x2", "scrub status v --json").json()["server_pid"], second.pid());
    second.stop().is_clean();
    for folder in FOLDERS {
        assert_eq!(run_in(&place, folder, "info v --json").json()["bytes"], 2 << 20);
    }
}

#[test]
fn nothing_is_done_to_the_devices_of_equal_names_that_a_server_elsewhere_has() {
    let place = two_folders();
    for (served, other) in [("x1", "x2"), ("x2", "x1")] {
        let server = serve_in(&place, served, "v mirror:zla,zlb");
        let control = socket_of(&place, &server);
        let run = |arguments: &str| run_in(&place, other, arguments);
        for command in ["scrub start v", "scrub pause v", "scrub stop v", "status v", "log warn v"] {
            run(command).fails(3, &["no server of this user"]);
        }
        run(&format!("mirror status mirror:zla,zlb --control {}", control.display())).fails(3, &["does not serve it"]);
        run(&format!("resize v --size 3MiB --control {}", control.display())).fails(3, &["no server"]);
        // They are done here, where the devices are that are meant.
        run("mirror remove mirror:zla,zlb zlb").succeeds();
        run("resize v --size 3MiB").succeeds();
        run("verify v").succeeds();
        run("mirror status mirror:zla,zlb").fails(3, &["removed"]);
        let there = run_in(&place, served, "mirror status mirror:zla,zlb --json").succeeds().json();
        assert_eq!(replicas(&there), ["zla", "zlb"], "the other folder's mirror lost a replica");
        server.stop().is_clean();
        run("create zlb --size 1MiB --force").succeeds();
        run("mirror create zla zlb --from zla --force").succeeds();
    }
}

#[test]
fn a_target_is_found_by_what_it_is_and_a_part_of_one_is_named() {
    let place = two_folders();
    let server = serve_in(&place, "x1", "v mirror:zla,zlb");
    let run = |arguments: &str| run_in(&place, "x1", arguments);
    fs::hard_link(place.path("x1/v"), place.path("x1/hard")).unwrap();
    symlink("../x1/v", place.path("x2/soft")).unwrap();
    for name in ["hard", "raw:v", "../x2/soft", "/proc/self/cwd/v"] {
        assert_eq!(run(&format!("scrub status {name} --json")).succeeds().json()["server_pid"], server.pid(), "{name}");
    }
    run("scrub status zla").fails(3, &["it is part of mirror:zla,zlb", &format!("process {}", server.pid())]);
    for command in ["scrub status mirror:zla,zlc", "mirror status mirror:zla,zlc", "mirror remove mirror:zla,zlc zlc"] {
        run(command).fails(3, &["it shares zla with mirror:zla,zlb, which is served"]);
    }
    // Another file takes the name; the one that is served keeps what it is.
    fs::rename(place.path("x1/v"), place.path("x1/moved")).unwrap();
    assert_eq!(run("scrub status moved --json").json()["server_pid"], server.pid());
    assert_eq!(run("scrub status v --json").json()["server_pid"], server.pid(), "nothing else has that name");
    run("create v --size 1MiB").succeeds();
    run("scrub start v").fails(3, &["another file that had this name"]);
    server.stop().is_clean();
}

#[test]
fn a_loop_device_is_the_file_below_it() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    let Some(device) = Loop::new(&place.path("v"), &["--read-only"]) else { return };
    assert_eq!(place.run(&format!("scrub status {} --json", device.0)).succeeds().json()["server_pid"], server.pid());
    drop(device);
    server.stop().is_clean();
}

#[test]
fn what_lies_in_the_folder_of_sockets_stops_no_command_and_controls_no_terminal() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    let folder = place.path(RUNTIME_FOLDER).join("sealblock");
    assert!(system("mkfifo", &[folder.join("6000001.sock").to_str().unwrap()]));
    symlink("/dev/zero", folder.join("6000002.sock")).unwrap();
    fs::write(folder.join("6000003.sock"), "a file").unwrap();
    // Above all numbers of processes (PID_MAX_LIMIT, 2^22): one of them may be the server's.
    let dead = |number: usize| folder.join(format!("{}.sock", 5_000_000 + number));
    (0..1000).for_each(|number| drop(UnixListener::bind(dead(number)).unwrap()));
    let silent = UnixListener::bind(folder.join("6000004.sock")).unwrap();
    let endless = UnixListener::bind(folder.join("6000005.sock")).unwrap();
    thread::spawn(move || {
        endless.incoming().flatten().for_each(|mut stream| while stream.write_all(&[b'['; 1 << 16]).is_ok() {});
    });
    let liar = UnixListener::bind(folder.join("6000006.sock")).unwrap();
    let found = r#"{"version":2,"found":{"target":"\u001b[2Jv","waiting":false}}"#;
    thread::spawn(move || {
        liar.incoming().flatten().for_each(|mut stream| {
            // An answer before the request would be lost where the request is still being sent.
            let _ = BufReader::new(&stream).read_line(&mut String::new());
            let _ = writeln!(stream, "{found}");
        });
    });
    let scrub = place.run("scrub status v --json");
    assert_eq!(scrub.succeeds().json()["server_pid"], server.pid());
    for word in ["6000004.sock did not respond", "6000005.sock did not respond", "6000006.sock, claims to serve v"] {
        assert!(scrub.stderr.contains(word), "{word}: {}", scrub.stderr);
    }
    let status = place.run("status --json").ends_with(4).json();
    // This machine may have other servers of root.
    let mut servers = status["servers"].as_array().unwrap().iter();
    assert!(servers.any(|found| found["pid"] == server.pid()), "{status}");
    let named = status["unresponsive"].as_array().unwrap().iter().map(|silent| silent["control"].as_str().unwrap());
    // Other servers of root, in other folders, may be silent as well.
    let own = folder.to_str().unwrap();
    let named: Vec<&str> = named.filter_map(|control| control.strip_prefix(own)?.strip_prefix('/')).collect();
    assert_eq!(named, ["6000004.sock", "6000005.sock", "6000006.sock"]);
    drop(silent);
    // The next server removes those of servers that are gone, and nothing else.
    Server::start(&place, "mem:1MiB").stop().is_clean();
    assert!(!dead(0).exists() && folder.join("6000003.sock").exists() && folder.join("6000001.sock").exists());
    server.stop().is_clean();
}

#[test]
fn a_server_of_another_user_is_asked_only_when_it_is_named_and_every_line_says_whose_it_is() {
    if !is_root() {
        return skipped("only root can be another user");
    }
    let place = Place::new();
    // What another user can run, wherever the tests' own is.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("sealblock");
    fs::copy(env!("CARGO_BIN_EXE_sealblock"), &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["serve", "--json", "null:7MiB", "--listen", "127.0.0.1:0"]).current_dir(folder.path());
    command.uid(NOBODY).gid(NOBODY).env_remove("XDG_RUNTIME_DIR").env("SEALBLOCK_RUNTIME", "auto");
    let server = Server::spawn(command);
    let control = format!("/tmp/sealblock-{NOBODY}/{}.sock", server.pid());
    let named = [control.as_str(), "65534"];
    place.run("scrub status null:7MiB").fails(3, &["no server of this user", named[0], named[1]]);
    place.run("scrub stop null:7MiB").fails(3, &["no server of this user", named[0], named[1]]);
    place.run(&format!("status {}", server.pid())).fails(3, &["no server of this user", named[0], named[1]]);
    for command in ["status", "scrub status null:7MiB", "log warn"] {
        let answer = place.run(&format!("{command} --control {control}"));
        let text = answer.succeeds().text();
        let is_named = |line: &str| line.starts_with("[user ") && line.contains("65534");
        assert!(!text.is_empty() && text.lines().all(is_named), "{command}: {text}");
    }
    let status = place.run(&format!("status --json --control {control}")).succeeds().json();
    assert_eq!((&status["servers"][0]["uid"], &status["servers"][0]["pid"]), (&NOBODY.into(), &server.pid().into()));
    server.stop().is_clean();
    // Left behind only while another server of that user is there.
    fs::remove_dir(format!("/tmp/sealblock-{NOBODY}")).ok();
}

#[test]
fn a_socket_that_another_user_put_into_a_folder_of_ours_is_not_asked() {
    if !is_root() {
        return skipped("only root can be another user");
    }
    let place = Place::new();
    let server = Server::start(&place, "null:6MiB");
    let folder = place.path(RUNTIME_FOLDER).join("sealblock");
    // Whoever may write into the folder can put anything there: then nothing in it counts.
    for (mode, owner) in [(0o777, 0), (0o770, 0), (0o700, NOBODY)] {
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(&folder, Some(owner), None).unwrap();
        place.run("scrub status null:6MiB").fails(3, &["no server of this user"]);
    }
    std::os::unix::fs::chown(&folder, Some(0), None).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    place.run("scrub status null:6MiB").succeeds();
    server.stop().is_clean();
}

#[test]
fn servers_of_containers_with_one_process_number_share_a_folder() {
    let place = Place::new();
    let alone = ["--pid", "--fork", "--mount-proc", "--kill-child"];
    if !is_root() || !system("unshare", &[&alone[..], &["true"]].concat()) {
        return skipped("there are no namespaces of processes here");
    }
    let start = |target: &str| {
        let mut command = Command::new("unshare");
        command.args(alone).arg(env!("CARGO_BIN_EXE_sealblock")).args(["serve", "--json", target]);
        command.args(["--listen", "127.0.0.1:0"]).current_dir(place.path("")).env_remove("HOME");
        command.env("XDG_RUNTIME_DIR", place.path(RUNTIME_FOLDER));
        Server::spawn(command)
    };
    let servers = [start("null:5MiB"), start("null:9MiB")];
    let names = fs::read_dir(place.path(RUNTIME_FOLDER).join("sealblock")).unwrap();
    assert_eq!(names.count(), 2, "each has a socket");
    for target in ["null:5MiB", "null:9MiB"] {
        place.run(&format!("scrub status {target}")).succeeds();
    }
    servers.into_iter().for_each(Server::kill);
    // What they have left is in nobody's way.
    let server = start("null:5MiB");
    place.run("scrub status null:5MiB").succeeds();
    server.kill();
}
