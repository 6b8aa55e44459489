//! Words that were looked at: what a command says of a device, a mirror or a server is what it found there.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use crate::common::server::Server;
use crate::common::{BLOCK, Place, filled, noise, until};

#[test]
fn a_mirror_is_not_optimal_while_the_file_of_a_replica_is_gone_or_cut_off() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b");
    let asked = || place.run("mirror status mirror:a,b");
    asked().succeeds().says(&["optimal"]);
    fs::rename(place.path("b"), place.path("hidden")).unwrap();
    until(|| asked().status == 4);
    let told = asked();
    told.says(&["degraded", "b was deleted or renamed while in use"]);
    assert!(!told.text().contains("optimal"), "{}", told.text());
    let pid = server.pid();
    place.run(&format!("status {pid}")).ends_with(4).says(&["mirror:a,b is degraded: the file of b is gone"]);
    let json = place.run("mirror status mirror:a,b --json").ends_with(4).json();
    assert_eq!((&json["state"], &json["replicas"][0]["file_errors"]), (&"degraded".into(), &serde_json::json!([])));
    assert_eq!(json["replicas"][1]["file_errors"][0]["error"], "gone");
    fs::rename(place.path("hidden"), place.path("b")).unwrap();
    until(|| asked().status == 0);
    let length = place.len("b");
    place.set_len("b", length - 4096);
    until(|| asked().text().contains("b: out of sync: up to 256 KiB, offline"));
    asked().ends_with(4).says(&["degraded", "it was cut off"]);
    place.set_len("b", length);
    until(|| asked().status == 0);
    // A replica that comes later is looked at, too.
    place.run(&format!("create c --size {}", 64 * BLOCK)).succeeds();
    place.run("mirror add mirror:a,b c").succeeds();
    fs::rename(place.path("c"), place.path("hidden")).unwrap();
    until(|| asked().status == 4);
    asked().says(&["c was deleted or renamed"]);
    place.run(&format!("status {pid}")).ends_with(4).says(&["the file of c is gone"]);
    fs::rename(place.path("hidden"), place.path("c")).unwrap();
    server.stop().is_clean();
}

/// Where it was cut off it reads as zeroes once its length is back, and nothing in it shows that these are not its data.
#[test]
fn a_replica_without_tags_that_was_cut_off_is_not_read_when_its_length_is_back() {
    let place = Place::with_runtime("syscalls");
    place.run(&format!("create a --size {} --block-size 512 --guard none", 64 * BLOCK)).succeeds();
    place.write("r", b"");
    place.set_len("r", 64 * BLOCK as u64);
    let bytes = noise(3, 64 * BLOCK);
    place.write("data", &bytes);
    let mut server = Server::start(&place, "mirror:a,raw:r");
    place.run(&format!("copy data {}", server.target("mirror"))).succeeds();
    let asked = || place.run("mirror status mirror:a,raw:r");
    asked().succeeds().says(&["optimal"]);
    place.set_len("r", 20 * BLOCK as u64);
    until(|| asked().text().contains("raw:r: out of sync: up to 256 KiB, offline"));
    place.set_len("r", 64 * BLOCK as u64);
    let refused = "raw:r: out of sync: up to 256 KiB, offline: its content is not that of a";
    until(|| asked().text().contains(refused));
    for is_restarted in [false, true] {
        place.run(&format!("copy {} out{is_restarted}", server.target("mirror"))).succeeds();
        assert!(place.read(&format!("out{is_restarted}")) == bytes, "restarted: {is_restarted}");
        asked().ends_with(4);
        if !is_restarted {
            server.stop().is_clean();
            server = Server::start(&place, "mirror:a,raw:r");
        }
    }
    server.stop().is_clean();
    place.run("mirror replace mirror:a,raw:r raw:r raw:r --force").succeeds();
    assert!(place.read("r") == bytes);
}

#[test]
fn after_a_crash_no_replica_is_called_in_sync_where_none_was_compared() {
    let place = Place::new();
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b");
    place.run(&format!("copy data {}", server.target("mirror"))).ends_with(0);
    server.kill();
    let told = place.run("mirror status mirror:a,b").ends_with(4).text();
    let replicas: Vec<&str> = told.lines().filter(|line| line.starts_with("replica")).collect();
    assert_eq!(replicas.len(), 2, "{told}");
    for replica in replicas {
        assert!(replica.ends_with(" not compared yet, the rest in sync"), "{told}");
    }
    assert!(told.contains("not compared "), "{told}");
    // The next opening for writing compares them.
    place.run("verify mirror:a,b --repair").succeeds();
    let told = place.run("mirror status mirror:a,b").succeeds().text();
    assert!(told.contains("a: in sync") && told.contains("b: in sync"), "{told}");
}

#[test]
fn changes_that_a_replica_lacks_end_with_4_and_name_it() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    place.write("piece", &noise(5, 4 * BLOCK));
    place.run(&format!("create v --size {}", 64 * BLOCK)).succeeds();
    let commands = ["copy piece T", "rescue v T", "zero T --range 9", "discard T --range 9", "zero T --yes --json"];
    fs::rename(place.path("b"), place.path("hidden")).unwrap();
    for command in commands {
        for target in ["mirror:a,b", "offset:0..,mirror:a,b"] {
            let told = place.run(&command.replace('T', target));
            told.ends_with(4);
            assert!(
                told.stderr.contains("b lacks these changes: the mirror is degraded"),
                "{command}: {}",
                told.stderr
            );
        }
    }
    fs::rename(place.path("hidden"), place.path("b")).unwrap();
    place.run("verify mirror:a,b --repair").succeeds();
    for command in commands {
        place.run(&command.replace('T', "mirror:a,b")).succeeds();
    }
}

#[test]
fn what_is_said_to_be_offloaded_is() {
    let place = Place::with_runtime("syscalls");
    filled(&place, 64);
    // Of a mirror no copy is checked elsewhere, and repairs are made by this process.
    for target in ["a", "mirror:a,b", "mirror:a,b --repair", "stripe-nolabel:a,b"] {
        let refused = place.run(&format!("verify {target} --mode offload"));
        refused.fails(3, &["cannot verify", "this process checks some of its blocks", "--mode auto"]);
        assert!(refused.stdout.is_empty(), "{}", refused.text());
    }
    place.run("verify mirror:a,b --repair --mode emulate").fails(3, &["every copy", "--repair"]);
    place.run("verify mirror:a,b --repair").succeeds();
    let server = Server::start(&place, "--protection shown --read-only a");
    let remote = server.target("a");
    assert_eq!(place.run(&format!("verify {remote} --mode offload --json")).succeeds().json()["offloaded"], true);
}

#[test]
fn info_says_of_discard_what_a_discard_does() {
    let place = Place::with_runtime("syscalls");
    place.write("raw", &noise(1, 1 << 20));
    let before = place.read("raw");
    let info = place.run("info raw:raw --json").succeeds().json();
    assert!(place.read("raw") == before, "asking changes nothing");
    let works = place.run("discard raw:raw --range 0..127 --yes").status == 0;
    let said = info["abilities"]["discard"].as_str().unwrap();
    assert!(said == "unknown" || said == if works { "native" } else { "absent" }, "{said}, and it works: {works}");
    assert_eq!(info["unmap_zeroes"], said == "native");
    place.run("info raw:raw").succeeds().says(&[if works { "native" } else { "absent" }]);
}

/// An NBD server that lists exports of these names to one client, and serves none.
fn nbd_server(names: &'static [&'static str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || list_exports(listener.accept()?.0, names));
    address
}

fn list_exports(mut client: TcpStream, names: &[&str]) -> std::io::Result<()> {
    let reply = |option: [u8; 4], kind: u32, data: &[u8]| {
        let (magic, length) = (0x0003_e889_0455_65a9_u64.to_be_bytes(), (data.len() as u32).to_be_bytes());
        [&magic[..], &option, &kind.to_be_bytes(), &length, data].concat()
    };
    client.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let option: [u8; 4] = head[8..12].try_into().unwrap();
        let length = u32::from_be_bytes(head[12..].try_into().unwrap());
        client.read_exact(&mut vec![0; length as usize])?;
        match u32::from_be_bytes(option) {
            3 => {
                for name in names {
                    let data = [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat();
                    client.write_all(&reply(option, 2, &data))?;
                }
                client.write_all(&reply(option, 1, &[]))?;
            }
            2 => return client.write_all(&reply(option, 1, &[])),
            _ => client.write_all(&reply(option, 0x8000_0001, &[]))?,
        }
    }
}

#[test]
fn discovery_shows_the_default_export_and_that_there_is_none() {
    let place = Place::with_runtime("syscalls");
    let ask = |names, options: &str| place.run(&format!("discover nbd://{}{options}", nbd_server(names)));
    assert_eq!(ask(&["", "disk"], "").succeeds().text(), "\"\" (the default export)\ndisk\n");
    assert_eq!(ask(&[""], " --json").succeeds().json()["exports"][0]["name"], "");
    let none = ask(&[], "");
    assert!(none.succeeds().stdout.is_empty() && none.stderr.contains("has no exports"), "{}", none.stderr);
}
