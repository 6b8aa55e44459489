//! `sealblock serve` as a process: what it opens, says, refuses and leaves behind.

use crate::common::server::Server;
use crate::common::{Place, noise};

#[test]
fn without_arguments_a_default_volume_is_made_once_and_served() {
    let place = Place::new();
    let server = Server::start_at(&place, "--listen 127.0.0.1:0");
    let namespace = &server.ready["subsystems"][0]["namespaces"][0];
    assert_eq!(server.ready["subsystems"][0]["nqn"], "nqn.2026-11.io.sealblock:default");
    assert_eq!((&namespace["blocks"], &namespace["block_size"]), (&(1 << 18).into(), &4096.into()));
    assert_eq!(namespace["protection"], "guard crc32c, Type 1");
    let uuid = namespace["uuid"].clone();
    server.stop().is_clean();
    assert!(place.allocated_bytes("sealblock-data/default.volume") < 64 << 20, "the volume is sparse");
    let info = place.run("info sealblock-data/default.volume --json").succeeds().json();
    assert_eq!((&info["volume"]["uuid"], &info["volume"]["clean"]), (&uuid, &true.into()));

    let again = Server::start_at(&place, "--listen 127.0.0.1:0");
    assert_eq!(again.ready["subsystems"][0]["namespaces"][0]["uuid"], uuid, "the same volume");
    again.stop().is_clean();
}

#[test]
fn what_has_the_default_volumes_name_is_left_alone() {
    let place = Place::new();
    std::fs::create_dir(place.path("sealblock-data")).unwrap();
    for content in [&b""[..], b"somebody's diary"] {
        place.write("sealblock-data/default.volume", content);
        place.run("serve --listen 127.0.0.1:0").fails(3, &["default.volume", "not a volume", "try:"]);
        assert_eq!(place.read("sealblock-data/default.volume"), content);
    }
}

#[test]
fn people_are_told_what_a_host_types() {
    let place = Place::new();
    let mut child = place.start("serve --strict mem:1MiB v.img mem:1MiB --listen 127.0.0.1:0 --listen [::1]:0");
    let failed = child.wait().unwrap();
    assert_eq!(failed.code(), Some(3), "v.img is not there");
    place.run("create v.img --size 1MiB").succeeds();
    let mut child = place.start("serve mem:1MiB v.img mem:1MiB --listen 127.0.0.1:0 --listen [::1]:0");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut text = Vec::new();
    while text.last().is_none_or(|line| line != "ready") {
        text.push(lines.next().expect("it gets ready").unwrap());
    }
    let text = text.join("\n");
    child.kill().unwrap();
    child.wait().unwrap();
    let port = text.split("listening on 127.0.0.1:").nth(1).unwrap().lines().next().unwrap().to_owned();
    for words in [
        "subsystem nqn.2026-11.io.sealblock:mem\n",
        "subsystem nqn.2026-11.io.sealblock:mem-2\n",
        "namespace 1: v.img, 1 MiB in blocks of 4096 bytes, guard crc32c, Type 1",
        "listening on [::1]:",
        &format!("nvme discover -t tcp -a 127.0.0.1 -s {port}\n"),
        &format!("nvme connect -t tcp -a 127.0.0.1 -s {port} -n nqn.2026-11.io.sealblock:v\n"),
        &format!("sealblock verify nvme+tcp://127.0.0.1:{port}/nqn.2026-11.io.sealblock:v\n"),
    ] {
        assert!(text.contains(words), "'{words}' is missing in:\n{text}");
    }
}

#[test]
fn what_cannot_be_served_is_refused_and_nothing_is_served() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    place.write("bad.toml", b"[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\ntarget = \"v\"\nnsid = -1\n");
    place.write("good.toml", b"[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n");
    let here = "--listen 127.0.0.1:0";
    for (arguments, status, words) in [
        ("nosuch", 3, &["nosuch", "no such file"][..]),
        ("v nosuch --strict", 3, &["nosuch", "no such file"]),
        ("v ./v", 2, &["./v", "given twice"]),
        ("mirror:v,w", 3, &["replica 1 is offline", "no such file"]),
        ("mem:1MiB --protection shown", 3, &["mem:1MiB", "no protection information", "--protection plain"]),
        ("v --nbd localhost", 2, &["127.0.0.1:10809"]),
        ("v --nbd 192.0.2.1:10809", 3, &["192.0.2.1:10809", "cannot listen"]),
        ("v --nbd 127.0.0.1:0 --allow-host nqn.2014-08.org.example:a", 2, &["NBD", "cannot identify themselves"]),
        ("v --listen localhost", 2, &["127.0.0.1:4420"]),
        ("v --allow-host me", 2, &["nqn.yyyy-mm"]),
        ("--config nosuch.toml", 3, &["nosuch.toml", "no such file"]),
        ("--config bad.toml", 2, &["bad.toml", "line 5", "nsid"]),
        ("v --config good.toml", 2, &["cannot be used with"]),
        ("--config good.toml --read-only", 2, &["good.toml", "--read-only applies to targets"]),
    ] {
        place.run(&format!("serve {here} {arguments}")).fails(status, words);
    }
    place.run("verify v").succeeds();
    assert_eq!(place.run("info v --json").json()["volume"]["clean"], true);
    let server = Server::start(&place, "mem:1MiB");
    let taken = format!("serve mem:1MiB --listen {}", server.address());
    place.run(&taken).fails(3, &[server.address(), "in use", "port 0"]);
    server.stop().is_clean();
}

#[test]
fn a_volume_has_one_server() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    place.run("serve v --listen 127.0.0.1:0").fails(3, &["v", "in use by another process"]);
    place.run("verify v").fails(3, &["in use by another process"]);
    server.stop().is_clean();
    place.run("verify v").succeeds();
}

#[test]
fn a_file_says_what_is_served_and_the_usual_one_is_found() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let config = "[[listeners]]\naddress = \"127.0.0.1:0\"\n[[subsystems]]\nname = \"a\"\nserial = \"S1\"\n\
                  [[subsystems.namespaces]]\ntarget = \"v\"\nread_only = true\nprotection = \"shown\"\n\
                  [[subsystems.namespaces]]\nnsid = 9\ntarget = \"mem:1MiB\"\n";
    place.write("sealblock.toml", config.as_bytes());
    place.write("other.toml", config.replace("\"a\"", "\"b\"").as_bytes());
    for (arguments, name) in
        [("", "a"), ("--config other.toml", "b"), ("--config other.toml --listen 127.0.0.1:0", "b")]
    {
        let server = Server::start_at(&place, arguments);
        let subsystem = &server.ready["subsystems"][0];
        assert_eq!(subsystem["nqn"], format!("nqn.2026-11.io.sealblock:{name}"));
        assert_eq!(subsystem["serial"], "S1");
        let namespaces = subsystem["namespaces"].as_array().unwrap();
        assert_eq!((&namespaces[0]["nsid"], &namespaces[1]["nsid"]), (&1.into(), &9.into()));
        assert_eq!((&namespaces[0]["read_only"], &namespaces[0]["protection_shown"]), (&true.into(), &true.into()));
        server.stop().is_clean();
    }
    // Targets on the command line are meant as they stand.
    let server = Server::start(&place, "mem:1MiB");
    assert_eq!(server.ready["subsystems"][0]["nqn"], "nqn.2026-11.io.sealblock:mem");
}

#[test]
fn strangers_are_warned_of_once_unless_hosts_are_named() {
    let place = Place::new();
    let host = "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
    for (arguments, warned) in [
        ("--listen 0.0.0.0:0 --listen [::]:0".to_owned(), 1),
        ("--listen 127.0.0.1:0 --listen [::1]:0".to_owned(), 0),
        (format!("--listen 0.0.0.0:0 --allow-host {host}"), 0),
    ] {
        let ended = Server::start_at(&place, &format!("{arguments} mem:1MiB")).stop();
        ended.is_clean();
        assert_eq!(ended.stderr.matches("--allow-host").count(), warned, "{arguments}: {}", ended.stderr);
    }
}

#[test]
fn servers_do_without_rings() {
    let place = Place::with_runtime("syscalls");
    place.volume("--size 1MiB", &noise(1, 4096));
    Server::start(&place, "v").stop().is_clean();
    place.run("verify v").succeeds();
}

#[test]
fn warnings_go_to_standard_error_unless_they_are_not_wanted() {
    let place = Place::new();
    place.write(
        "sealblock.toml",
        b"[limits]\nconnections = 1\n[[subsystems]]\nname = \"m\"\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n",
    );
    for (option, is_told) in [("", true), ("--log off", false), ("--log error", false), ("--log debug", true)] {
        let server = Server::start(&place, option);
        // The one connection that may be there, and more than that.
        let held = std::net::TcpStream::connect(server.address()).unwrap();
        for _ in 0..20 {
            let mut above = std::net::TcpStream::connect(server.address()).unwrap();
            // Closed at once.
            assert!(!matches!(std::io::Read::read(&mut above, &mut [0; 16]), Ok(1..)));
        }
        drop(held);
        let ended = server.stop();
        ended.is_clean();
        let told = ended.stderr.lines().filter(|line| line.contains("connection limit reached")).count();
        assert_eq!(told, usize::from(is_told), "{option}: {}", ended.stderr);
    }
    let mut command = place.command("serve --listen 127.0.0.1:0");
    crate::common::answer(command.env("SEALBLOCK_LOG", "loud")).fails(2, &["SEALBLOCK_LOG=loud", "warn"]);
}
