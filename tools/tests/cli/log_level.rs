//! `sealblock log`: another log level while the server runs.

use crate::common::server::Server;
use crate::common::{Place, RUNTIME_FOLDER};
use serde_json::json;

#[test]
fn the_level_changes_while_it_serves() {
    let place = Place::with_runtime("syscalls");
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    let pid = server.pid();
    let host = "nqn.2026-01.org.example:host";
    let visit = || {
        place.run(&format!("info {}?hostnqn={host}", server.target("v"))).succeeds();
    };
    visit();
    let level_warn = format!("process {pid} logs at level warn");
    // Where the tests run as root, there may be servers of others besides, and then one has to be named.
    let alone = place.run("log");
    match alone.status {
        0 => assert_eq!(alone.text().trim_end(), level_warn),
        _ => _ = alone.fails(2, &["several servers are running", &pid.to_string()]),
    }
    let control = place.path(RUNTIME_FOLDER).join(format!("sealblock/{pid}.sock"));
    let said = place.run(&format!("log --control {}", control.display())).succeeds().text();
    assert_eq!(said.trim_end(), level_warn);
    let said = place.run(&format!("log info {pid}")).succeeds().text();
    assert_eq!(said.trim_end(), format!("process {pid} now logs at level info; before, at warn"));
    visit();
    let report = place.run(&format!("log warn {pid} --json")).succeeds().json();
    assert_eq!(report, json!({"pid": pid, "before": "info", "level": "warn"}));
    visit();
    let said = place.run(&format!("log warn {}", server.address())).succeeds().text();
    assert_eq!(said.trim_end(), format!("process {pid} logs at level warn, as before"));
    place.run("log off v").succeeds();
    place.run("log loud").fails(2, &["loud", "debug"]);
    let ended = server.stop();
    ended.is_clean();
    let comes: Vec<_> = ended.told().into_iter().filter(|line| line["message"] == "host connected").collect();
    assert_eq!(comes.len(), 1, "only what came while the level was info: {}", ended.stderr);
    let changed = ended.told_of("the log level was changed");
    assert_eq!(changed.len(), 2, "{}", ended.stderr);
    assert_eq!((&changed[1]["before"], &changed[1]["level"]), (&json!("info"), &json!("warn")));
}

#[test]
fn debug_tells_of_commands_that_fail_and_the_socket_chooses_the_server() {
    let place = Place::with_runtime("syscalls");
    let one = Server::start(&place, "mem:1MiB --control c1");
    let two = Server::start(&place, "mem:1MiB");
    let three = Server::start(&place, "mem:1MiB");
    let (second, third) = (two.pid().to_string(), three.pid().to_string());
    place.run("log debug").fails(2, &["several servers are running", &second, &third, "`sealblock log LEVEL SERVER`"]);
    let said = place.run("log debug --control c1 --json").succeeds().json();
    assert_eq!(said, json!({"pid": one.pid(), "before": "warn", "level": "debug"}));
    for server in [&one, &two] {
        place.run(&format!("info {}-none", server.target("mem"))).fails(3, &["no such subsystem"]);
    }
    place.run("log debug --control nowhere").fails(3, &["nowhere", "give the socket of a running server"]);
    three.stop().is_clean();
    let debugs = |server: Server| {
        let ended = server.stop();
        ended.told().iter().filter(|line| line["level"] == "debug").count()
    };
    assert!(debugs(one) > 0, "a Connect that was refused leaves a trace");
    assert_eq!(debugs(two), 0);
}
