//! NBD over Unix sockets: the server's, and targets that are exports there.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use crate::common::server::Server;
use crate::common::{Place, answer, answer_of, has, noise, skipped};
use serde_json::{Value, json};

/// The export of this name at the socket of this name.
fn at(place: &Place, socket: &str, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", place.path(socket).display())
}

fn is_socket_alone(place: &Place, name: &str) -> bool {
    fs::symlink_metadata(place.path(name)).is_ok_and(|there| there.permissions().mode() & 0o777 == 0o600)
}

#[test]
fn an_export_is_served_and_used_over_a_unix_socket() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    let server = Server::start(&place, "v --nbd-socket s --nbd 127.0.0.1:0");
    assert!(is_socket_alone(&place, "s"), "nobody else may open it");
    let nbd = &server.ready["nbd"];
    let path = fs::canonicalize(place.path("s")).unwrap().display().to_string();
    assert_eq!((&nbd["sockets"], &nbd["default_export"]), (&json!([path]), &json!("v")));

    let v = at(&place, "s", "v");
    assert!(place.blocks(&v, 0, 255) == data);
    place.write("piece", &noise(2, 64 << 10));
    place.run(&format!("copy piece offset:16..31,{v}")).succeeds();
    // From here on, of the default export, and over several connections.
    assert!(place.blocks("nbd+unix:///?socket=s&connections=2", 16, 31) == place.read("piece"));
    place.run(&format!("compare {v} nbd://{}/v", nbd["listeners"][0].as_str().unwrap())).succeeds();
    let info = place.run(&format!("info {v} --json")).succeeds().json();
    assert_eq!((&info["kind"], &info["target"]), (&json!("NBD export"), &json!(v)));
    assert_eq!(place.run("discover nbd+unix:///?socket=s").succeeds().text(), "v\n");
    let found = place.run("discover nbd+unix:///?socket=s --json").succeeds().json();
    assert_eq!((&found["target"], &found["exports"][0]["name"]), (&json!("nbd+unix:///?socket=s"), &json!("v")));

    let reader = place.start(&format!("verify {v} --rate 256KiB/s"));
    let pid = reader.id();
    std::thread::sleep(std::time::Duration::from_millis(700));
    let status = place.run(&format!("status {} --json", server.pid())).succeeds().json()["servers"][0].take();
    assert_eq!((&status["nbd_sockets"], status["clients"].as_array().unwrap().len()), (&json!([path]), 1));
    let from = status["clients"][0]["from"].as_str().unwrap();
    assert!(from.starts_with(&format!("process {pid} of user ")), "{from}");
    let text = place.run(&format!("status {}", server.pid())).succeeds().text();
    assert!(text.contains(&format!("listening {path} for NBD\n")), "{text}");
    answer_of(reader).succeeds();
    server.stop().is_clean();
    assert!(!place.path("s").exists(), "it goes with its server");
    place.run(&format!("info {v}")).fails(3, &["no such file", "the path of its socket"]);
    place.run("verify v").succeeds();
}

#[test]
fn what_is_printed_can_be_typed() {
    let place = Place::with_runtime("syscalls");
    place.run("create v --size 1MiB").succeeds();
    let socket = place.path("a b.sock");
    let mut command = place.command("serve --listen 127.0.0.1:0 v --nbd-socket");
    let mut child = command.arg(&socket).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let said: Vec<String> = lines.take_while(|line| line != "ready").collect();
    let path = fs::canonicalize(&socket).unwrap().display().to_string();
    let uri = format!("nbd+unix:///v?socket={}", path.replace(' ', "%20"));
    for line in [
        format!("listening for NBD on {path}"),
        format!("  nbdinfo '{uri}'"),
        format!("  nbd-client -unix '{path}' -N v -b 4096 /dev/nbd0"),
    ] {
        assert!(said.contains(&line), "'{line}' is not in {said:#?}");
    }
    place.run(&format!("info {uri}")).succeeds();
    let exports =
        place.run(&format!("status {} --json", child.id())).succeeds().json()["servers"][0]["devices"][0]["exports"]
            .take();
    assert_eq!(exports[1]["uri"], uri);
    match has("qemu-img") {
        true => {
            let told = answer(Command::new("qemu-img").args(["info", "-f", "raw", "--output=json", &uri]));
            assert_eq!(told.succeeds().text().parse::<Value>().unwrap()["virtual-size"], 1 << 20);
        }
        false => skipped("qemu-img is not there to read the URI"),
    }
    // The one that ends in the middle of its work leaves its socket, which the next one replaces.
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(socket.exists() && UnixStream::connect(&socket).is_err());
    let mut command = place.command("serve --json --listen 127.0.0.1:0 v --nbd-socket");
    command.arg(&socket);
    let server = Server::spawn(command);
    place.run(&format!("info {uri}")).succeeds();
    server.stop().is_clean();
    assert!(!socket.exists());
}

#[test]
fn a_socket_that_is_in_use_and_what_is_none_are_left_alone() {
    let place = Place::with_runtime("syscalls");
    let first = Server::start(&place, "mem:1MiB --nbd-socket s");
    let pid = first.pid();
    let listens = format!("process {pid} (sealblock) listens there");
    place
        .run("serve --listen 127.0.0.1:0 mem:2MiB --nbd-socket s")
        .fails(3, &[&listens, "on 's':", "--nbd-socket PATH"]);
    place.run(&format!("info {}", at(&place, "s", "mem"))).succeeds();
    // Another program's.
    let foreign = UnixListener::bind(place.path("foreign")).unwrap();
    let listens = format!("process {} ", std::process::id());
    place.run("serve --listen 127.0.0.1:0 mem:2MiB --nbd-socket foreign").fails(3, &[&listens]);
    drop(foreign);
    assert!(place.path("foreign").exists());
    place.write("diary", b"dear");
    place.run("serve --listen 127.0.0.1:0 mem:2MiB --nbd-socket diary").fails(3, &["something else is there"]);
    assert_eq!(place.read("diary"), b"dear");
    place.run("serve --listen 127.0.0.1:0 mem:2MiB --nbd-socket no/such").fails(3, &["no such file"]);
    first.stop().is_clean();
}

#[test]
fn a_configuration_has_sockets_and_a_reload_changes_them() {
    let place = Place::with_runtime("syscalls");
    fs::create_dir(place.path("etc")).unwrap();
    let with = |nbd: &str| {
        let text = format!("{nbd}[[subsystems]]\nname = \"m\"\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n");
        place.write("etc/c.toml", text.as_bytes());
    };
    with("[[nbd]]\nsocket = \"one\"\n");
    let mut server = Server::start(&place, "--config etc/c.toml");
    // Relative to the configuration.
    place.run(&format!("info {}", at(&place, "etc/one", "m"))).succeeds();
    let reload = |server: &mut Server, nbd: &str| -> Value {
        with(nbd);
        server.signal("HUP");
        server.event()
    };
    let event = reload(&mut server, "[[nbd]]\nsocket = \"two\"\n[[nbd]]\naddress = \"127.0.0.1:0\"\n");
    assert_eq!((&event["event"], event["nbd"]["listeners"].as_array().unwrap().len()), (&json!("reloaded"), 1));
    assert!(!place.path("etc/one").exists() && is_socket_alone(&place, "etc/two"));
    place.run(&format!("info {}", at(&place, "etc/two", "m"))).succeeds();
    for bad in ["[[nbd]]\n", "\n[[nbd]]\nsocket = \"two\"\naddress = \"127.0.0.1:0\"\n"] {
        let event = reload(&mut server, bad);
        assert_eq!(event["event"], "reload_failed");
        assert!(event["reason"].as_str().unwrap().contains("[[nbd]] needs either an address or a socket"), "{event}");
    }
    place.run(&format!("info {}", at(&place, "etc/two", "m"))).succeeds();
    assert_eq!(reload(&mut server, "")["nbd"], json!(null));
    assert!(!place.path("etc/two").exists());
    server.stop().is_clean();
}

#[test]
fn a_client_connects_again_when_its_server_is_back() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let serve = || Server::start(&place, "v --nbd-socket s");
    let server = serve();
    let member = at(&place, "s", "v");
    let mut slow = place.start(&format!("verify {member} --rate 256KiB/s --json"));
    std::thread::sleep(std::time::Duration::from_millis(500));
    server.kill();
    let server = serve();
    assert!(slow.try_wait().unwrap().is_none());
    // It reconnects to the process that listens there now.
    let verified = answer_of(slow);
    assert_eq!(verified.succeeds().json()["blocks_verified"], 256);
    server.stop().is_clean();
}
