//! The control socket: who finds whom, what is left of servers that are gone, and what strangers can do.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use crate::common::server::Server;
use crate::common::{Place, RUNTIME_FOLDER};
use serde_json::Value;

fn sockets(place: &Place) -> Vec<PathBuf> {
    let folder = place.path(RUNTIME_FOLDER).join("sealblock");
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

fn mode(path: &std::path::Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

fn connect(path: &std::path::Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

/// What the server answers to a line.
fn ask(stream: &mut UnixStream, line: &str) -> Value {
    writeln!(stream, "{line}").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{line}: {error}: '{answer}'"))
}

#[test]
fn a_target_is_found_by_every_name_it_has() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.run("create w --size 1MiB").succeeds();
    let server = Server::start(&place, "v mem:1MiB mem:1MiB null:2MiB");
    let other = Server::start(&place, "w");
    let path = place.path("v");
    let names = [
        "v".to_owned(),
        "./v".to_owned(),
        path.display().to_string(),
        format!("file:{}/../{}/v", place.path("").display(), place.path("").file_name().unwrap().display()),
        "nqn.2026-11.io.sealblock:v".to_owned(),
        "nqn.2026-11.io.sealblock:v/1".to_owned(),
        server.target("v"),
        server.target("v").replace("127.0.0.1", "localhost"),
    ];
    for name in names {
        let status = place.run(&format!("scrub status {name} --json")).succeeds().json();
        assert_eq!(
            (&status["target"], status["server_pid"].as_u64()),
            (&"v".into(), Some(server.pid().into())),
            "{name}"
        );
    }
    let of_other = place.run("scrub status w --json").succeeds().json();
    assert_eq!(of_other["server_pid"], other.pid());
    place.run("scrub status null:2MiB").succeeds();
    place.run("scrub status mem:1MiB").fails(2, &["several namespaces", "NQN/NSID"]);
    place.run("scrub status nqn.2026-11.io.sealblock:mem-2").succeeds();
    for name in ["mem:3MiB", "nqn.2026-11.io.sealblock:v/2", "nqn.2026-11.io.sealblock:x"] {
        place.run(&format!("scrub status {name}")).fails(3, &["no server of this user", "try:", "sealblock serve"]);
    }
    let elsewhere = server.target("v").replace(server.address(), other.address());
    place.run(&format!("scrub status {elsewhere}")).fails(3, &["no server"]);
    place.run("scrub status nvme+tcp://192.0.2.7/nqn.2026-11.io.sealblock:v").fails(3, &["another machine"]);
    other.stop().is_clean();
    server.stop().is_clean();
    assert_eq!(sockets(&place), [] as [PathBuf; 0]);
}

#[test]
fn the_socket_is_its_users_alone_and_a_dead_one_is_cleaned_up() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    let [socket] = <[PathBuf; 1]>::try_from(sockets(&place)).unwrap();
    assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
    server.kill();
    assert!(socket.exists(), "a server that was killed cleans nothing");
    place.run("scrub status v").succeeds();
    for command in ["start", "pause", "stop"] {
        place
            .run(&format!("scrub {command} v"))
            .fails(3, &["the scrub of 'v'", "no server of this user", "sealblock serve v"]);
    }
    let server = Server::start(&place, "mem:1MiB");
    let now = sockets(&place);
    assert!(now.len() == 1 && now[0] != socket, "{now:?}");
    server.stop().is_clean();
}

#[test]
fn a_socket_may_be_elsewhere_or_nowhere() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB --control none");
    assert_eq!(sockets(&place), [] as [PathBuf; 0]);
    place.run("scrub status mem:1MiB").fails(3, &["no server"]);
    server.stop().is_clean();

    let server = Server::start(&place, "mem:1MiB --control here");
    assert_eq!((sockets(&place).len(), mode(&place.path("here"))), (0, 0o600));
    place.run("scrub status mem:1MiB --control here").succeeds();
    place.run("scrub status mem:1MiB").fails(3, &["no server"]);
    place.run("scrub status mem:1MiB --control there").fails(3, &["there", "a running server"]);
    place.run("serve mem:1MiB --listen 127.0.0.1:0 --control here").fails(3, &["here", "another server", "--control"]);
    server.stop().is_clean();
    assert!(!place.path("here").exists());
    place.write("diary", b"dear");
    place.run("serve mem:1MiB --listen 127.0.0.1:0 --control diary").fails(3, &["diary", "something else"]);
    assert_eq!(place.read("diary"), b"dear");
    drop(UnixListener::bind(place.path("here")).unwrap());
    Server::start(&place, "mem:1MiB --control here").stop().is_clean();
}

#[test]
fn garbage_is_refused_and_disturbs_no_other_client() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB");
    let socket = sockets(&place).remove(0);
    let mut stream = connect(&socket);
    for (line, kind) in [
        ("", "bad_request"),
        ("hello", "bad_request"),
        ("\u{0}\u{1}", "bad_request"),
        (r#"{"version":2,"command":"reboot","target":{"text":"mem:1MiB"}}"#, "bad_request"),
        (r#"{"version":9}"#, "version"),
        (r#"{"version":2,"command":"scrub_status","target":{"text":"mem:9MiB"}}"#, "unknown_target"),
        (r#"{"version":2,"command":"scrub_start","target":{"text":"mem:1MiB"},"from":99999}"#, "usage"),
        (r#"{"version":2,"command":"scrub_pause","target":{"text":"mem:1MiB"}}"#, "refused"),
    ] {
        let answer = ask(&mut stream, line);
        assert_eq!((&answer["error"]["kind"], &answer["version"]), (&kind.into(), &2.into()), "{line}: {answer}");
    }
    // The same connection is good for a good request.
    let good = r#"{"version":2,"command":"scrub_status","target":{"text":"mem:1MiB"}}"#;
    assert_eq!(ask(&mut stream, good)["scrub"]["state"], "idle");

    let mut endless = connect(&socket);
    let _ = endless.write_all(&vec![b'x'; 1 << 20]);
    let mut said = Vec::new();
    let _ = endless.read_to_end(&mut said);
    assert!(said.len() < 1000, "it is cut off");
    // Half a request, and as many more connections as there may be.
    let mut held: Vec<_> = (0..15).map(|_| connect(&socket)).collect();
    held[0].write_all(b"{\"version\":").unwrap();
    let answer = place.run("scrub status mem:1MiB");
    assert!(answer.status == 0 || answer.status == 3, "{}", answer.stderr);
    drop(held);
    drop(stream);
    let tries = (0..1000).find(|_| place.run("scrub status mem:1MiB").status == 0);
    assert!(tries.is_some(), "who goes makes room");
    place.run(&format!("verify {}", server.target("mem"))).succeeds();
    server.stop().is_clean();
}

#[test]
fn a_server_that_cannot_answer_is_named_where_it_may_be_the_one_that_is_meant() {
    let place = Place::new();
    let server = Server::start(&place, "mem:1MiB");
    let socket = sockets(&place).remove(0);
    // As many as it takes, and more.
    let held: Vec<_> = (0..40).map(|_| connect(&socket)).collect();
    let name = socket.display().to_string();
    let words = ["no server of this user has this process ID, and the server at ", &name, " did not respond: "];
    place.run(&format!("status {}", server.pid())).fails(3, &words);
    drop(held);
    let tries = (0..1000).find(|_| place.run(&format!("status {}", server.pid())).status == 0);
    assert!(tries.is_some());
    place.run("status 1").fails(3, &["no server of this user has this process ID\n"]);
    server.stop().is_clean();
}
