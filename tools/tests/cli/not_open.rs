//! Targets that do not open keep no others from being served.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::common::server::{Nbd, Server};
use crate::common::{Place, filled, noise};
use serde_json::{Value, json};

/// What `status --json` says of the server, with this exit status.
#[track_caller]
fn status(place: &Place, server: &Server, exit: i32) -> Value {
    place.run(&format!("status {} --json", server.pid())).ends_with(exit).json()["servers"][0].take()
}

/// Has a file come into being at once, as a disk that is plugged in does.
fn volume_comes(place: &Place, name: &str) {
    place.run("create draft --size 1MiB").succeeds();
    std::fs::rename(place.path("draft"), place.path(name)).unwrap();
}

fn nbd_address(server: &Server) -> String {
    server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned()
}

/// What an operator sees of a server of `gone` and `v`.
#[track_caller]
fn status_has_it(place: &Place, server: &Server) {
    let answer = place.run(&format!("status {}", server.pid()));
    let text = answer.ends_with(4).text();
    for line in [
        "health    incomplete: of 2 devices 1 is incomplete",
        "device    gone",
        "health    incomplete: not open since ",
        ": cannot open 'gone': no such file; tried ",
        "try       check the path; `sealblock create` creates a volume",
        "kept for  nqn.2026-11.io.sealblock:gone/1",
        "kept for  gone",
        "health    healthy: no damage is known",
    ] {
        assert!(text.contains(line), "'{line}' is not in:\n{text}");
    }
    // By what it would be served as, too.
    for name in ["gone", "nqn.2026-11.io.sealblock:gone"] {
        place.run(&format!("status {name}")).ends_with(4).says(&["device    gone\n"]);
    }
    place.run("status nosuch").fails(3, &["serves it"]);
    let told = status(place, server, 4);
    assert_eq!((&told["health"], &told["devices"][0]["opening"]), (&json!("incomplete"), &json!(null)));
    let device = &told["devices"][1];
    assert_eq!((&device["target"], &device["health"]), (&json!("gone"), &json!("incomplete")));
    assert_eq!((&device["opening"]["retried"], &device["exports"][0]["nsid"]), (&json!(true), &json!(1)));
    assert_eq!((&device["exports"][1]["name"], &device["exports"][1]["uri"]), (&json!("gone"), &json!(null)));
}

#[test]
fn the_others_are_served_and_it_is_when_it_comes() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let mut server = Server::start(&place, "gone v --nbd 127.0.0.1:0");
    let (gone, v) = (&server.ready["subsystems"][0], &server.ready["subsystems"][1]);
    assert_eq!((&gone["namespaces"], &v["not_open"]), (&json!([]), &json!([])));
    let not_open = &gone["not_open"][0];
    assert_eq!(
        (&not_open["nsid"], &not_open["target"], &not_open["retried"]),
        (&json!(1), &json!("gone"), &json!(true))
    );
    assert!(not_open["reason"].as_str().unwrap().contains("no such file"), "{not_open}");
    place.run(&format!("verify {}", server.target("v"))).succeeds();
    // Nothing else takes its place.
    place.run(&format!("verify {}", server.target("gone"))).fails(3, &["namespace"]);
    let nbd = nbd_address(&server);
    assert_eq!(Nbd::open(&nbd, "v").unwrap().size, 1 << 20);
    assert!(Nbd::open(&nbd, "").is_none(), "the export for who names none is the first target's");

    status_has_it(&place, &server);
    volume_comes(&place, "gone");
    let event = server.event();
    assert_eq!((&event["event"], &event["nsid"], &event["nbd"]), (&json!("opened"), &json!(1), &json!("gone")));
    assert_eq!((&event["target"], &event["nqn"]), (&json!("gone"), &json!("nqn.2026-11.io.sealblock:gone")));
    assert!(event["tries"].as_u64().unwrap() >= 2, "{event}");
    place.run(&format!("verify {}", server.target("gone"))).succeeds();
    assert!(Nbd::open(&nbd, "").is_some());
    status(&place, &server, 0);
    let ended = server.stop();
    ended.is_clean();
    let line = "cannot open 'gone': no such file; retrying at least every 60 s; serving the other \
                targets";
    let of_gone = ended.told().into_iter().filter(|line| line["message"].to_string().contains("gone")).count();
    assert_eq!((ended.told_of(line).len(), of_gone), (1, 1), "{}", ended.stderr);
    assert_eq!(place.run("info gone --json").succeeds().json()["volume"]["clean"], true);
}

#[test]
fn what_somebody_else_has_and_a_server_that_is_away_are_waited_for() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let m = "[[subsystems]]\nname = \"m\"\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n";
    place.write("m.toml", m.as_bytes());
    let first = Server::start(&place, "v");
    let mut second = Server::start(&place, "v nbd+unix:///m?socket=s mem:1MiB");
    let told = |at: usize| second.ready["subsystems"][at]["not_open"][0].clone();
    for (at, why) in [(0, format!("in use by another process, {}", first.pid())), (1, "cannot connect to s".to_owned())]
    {
        assert!(told(at)["reason"].as_str().unwrap().contains(&why), "{}", told(at));
        assert_eq!(told(at)["retried"], true);
    }
    place.run(&format!("info {}", second.target("mem"))).succeeds();
    first.stop().is_clean();
    let away = Server::start(&place, "--nbd-socket s --config m.toml");
    let mut targets: Vec<_> = (0..2).map(|_| second.event()["target"].as_str().unwrap().to_owned()).collect();
    targets.sort();
    assert_eq!(targets, ["nbd+unix:///m?socket=s", "v"]);
    for name in ["v", "m"] {
        place.run(&format!("verify {}", second.target(name))).succeeds();
    }
    status(&place, &second, 0);
    second.stop().is_clean();
    away.stop().is_clean();
}

#[test]
fn people_are_told_in_one_line() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let mut child = place
        .command("serve --listen 127.0.0.1:0 gone v")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = move || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line
    };
    let mut text = String::new();
    while !text.ends_with("ready\n") {
        let line = lines();
        assert!(!line.is_empty(), "it ended:\n{text}");
        text.push_str(&line);
    }
    let expected = "\
subsystem nqn.2026-11.io.sealblock:gone
  namespace 1: gone is not open: cannot open 'gone': no such file; retrying
subsystem nqn.2026-11.io.sealblock:v
  namespace 1: v, 1 MiB in blocks of 4096 bytes, guard crc32c, Type 1
";
    assert!(text.starts_with(expected), "{text}");
    volume_comes(&place, "gone");
    let line = lines();
    let said = "gone is now served: namespace 1 of nqn.2026-11.io.sealblock:gone (opened after ";
    assert!(line.starts_with(said), "{line}");
    child.kill().unwrap();
    let errors = child.wait_with_output().unwrap().stderr;
    let errors = String::from_utf8(errors).unwrap();
    let of_gone: Vec<_> = errors.lines().filter(|line| line.contains("gone")).collect();
    assert_eq!(of_gone.len(), 1, "{errors}");
    assert!(of_gone[0].contains(" WARN cannot open 'gone': "), "{errors}");
}

#[test]
fn numbers_and_names_do_not_move_up() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let space = |target: &str| format!("[[subsystems.namespaces]]\ntarget = \"{target}\"\n");
    let text = format!("[[subsystems]]\nname = \"s\"\n{}{}", space("gone"), space("v"));
    place.write("sealblock.toml", text.as_bytes());
    let mut server = Server::start_at(&place, "--listen 127.0.0.1:0 --nbd 127.0.0.1:0");
    let of = &server.ready["subsystems"][0]["namespaces"];
    assert_eq!((&of[0]["nsid"], &of[0]["nbd"], of.as_array().unwrap().len()), (&json!(2), &json!("s/2"), 1));
    place.run(&format!("verify {}/2", server.target("s"))).succeeds();
    place.run(&format!("verify {}/1", server.target("s"))).fails(3, &["namespace"]);
    let uri = status(&place, &server, 4)["devices"][0]["exports"][0]["uri"].as_str().unwrap().to_owned();
    assert!(uri.ends_with(":s/2"), "what is printed names the namespace also when another one comes: {uri}");
    // A reload goes on without what was gone without before, and takes nothing new that does not open.
    server.signal("HUP");
    let event = server.event();
    assert_eq!((&event["event"], &event["subsystems"][0]["not_open"][0]["nsid"]), (&json!("reloaded"), &json!(1)));
    place.write("sealblock.toml", format!("{text}{}", space("nosuch")).as_bytes());
    server.signal("HUP");
    let event = server.event();
    assert_eq!(event["event"], "reload_failed");
    assert!(event["reason"].as_str().unwrap().contains("nosuch"), "{event}");
    volume_comes(&place, "gone");
    let event = server.event();
    assert_eq!((&event["event"], &event["nsid"], &event["nbd"]), (&json!("opened"), &json!(1), &json!("s")));
    place.run(&format!("verify {}/1", server.target("s"))).succeeds();
    server.stop().is_clean();
}

#[test]
fn what_trying_again_cannot_help_waits_for_a_reload() {
    let place = Place::with_runtime("syscalls");
    place.run("create v --size 1MiB").succeeds();
    place.write("plain", &[7; 8192]);
    filled(&place, 16);
    let mut server = Server::start(&place, "v plain a");
    let not_open = |event: &Value, at: usize| event["subsystems"][at]["not_open"][0].clone();
    for (at, why) in [(1, "plain file"), (2, "it is member 1 of 2 of mirror")] {
        let told = not_open(&server.ready, at);
        assert!(told["reason"].as_str().unwrap().contains(why), "{told}");
        assert_eq!(told["retried"], false);
    }
    place.run(&format!("verify {}", server.target("v"))).succeeds();
    assert_eq!(status(&place, &server, 4)["devices"][1]["opening"]["tries"], 1);
    volume_comes(&place, "plain");
    server.signal("HUP");
    let event = server.event();
    assert_eq!((&event["event"], not_open(&event, 1)), (&json!("reloaded"), Value::Null));
    place.run(&format!("verify {}", server.target("plain"))).succeeds();
    server.stop().is_clean();
}

#[test]
fn what_is_to_be_refused_is_refused() {
    let place = Place::with_runtime("syscalls");
    place.run("create v --size 1MiB").succeeds();
    // Who asks for all or nothing gets that; so does who has nothing else, or wrote what cannot be meant.
    place.run("serve --listen 127.0.0.1:0 --strict gone v").fails(3, &["cannot open 'gone': no such file"]);
    place.write("c.toml", b"strict = true\n[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\ntarget = \"gone\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n");
    place.run("serve --listen 127.0.0.1:0 --config c.toml").fails(3, &["cannot open 'gone': no such file"]);
    place.run("serve --listen 127.0.0.1:0 gone").fails(3, &["cannot open 'gone': no such file"]);
    place
        .run("serve --listen 127.0.0.1:0 gone nosuch")
        .fails(3, &["cannot open 'gone': no such", "cannot open 'nosuch': no such"]);
    place.run("serve --listen 127.0.0.1:0 v mem:1000").fails(2, &["is not a multiple of the block size"]);
    place.run("serve --listen 127.0.0.1:0 v ./v").fails(2, &["given twice"]);
    place.run("verify v").succeeds();
}
