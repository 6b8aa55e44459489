//! What is in use: by whom, as what, and what to type instead.

use std::fs::{self, File};

use crate::common::server::Server;
use crate::common::{Place, filled, noise};
use serde_json::Value;

#[test]
fn a_server_is_named_with_its_uri_and_what_to_type_instead() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    let server = Server::start(&place, "v");
    let (pid, uri) = (server.pid(), server.target("v"));
    for command in ["verify v", "copy data v", "zero v --range 0..1", "compare v v"] {
        let answer = place.run(command);
        answer.fails(
            3,
            &[
                &format!("'v': in use by another process, {pid} (sealblock), which serves v as {uri}"),
                &format!("try: {uri} in its place while it is served (`sealblock scrub start v` checks it there)"),
                &format!("`sealblock status {pid}` shows more"),
            ],
        );
        place.run(&format!("verify {uri}")).succeeds().says(&["256 blocks"]);
    }
    // Making the file anew, and reading its records, are no use of what is exported.
    for command in ["create v --size 1MiB --force", "rescue v saved.img"] {
        let holder = format!("'v': in use by another process, {pid} (sealblock), which serves v as {uri}");
        let refused = place.run(command);
        refused.fails(3, &[&holder, "try: use another path, or stop the server first"]);
        assert!(!refused.stderr.contains("in its place"), "{}", refused.stderr);
    }
    // A second server says it, too, on its one line of JSON.
    let refused = place.run("serve v --listen 127.0.0.1:0 --json").ends_with(3).stderr.clone();
    let line: Value = serde_json::from_str(&refused).unwrap();
    assert!(
        line["message"].as_str().unwrap().ends_with(&format!("in use by another process, {pid} (sealblock)")),
        "{line}"
    );
    server.stop().is_clean();
    place.run("verify v").succeeds();
}

#[test]
fn a_member_of_what_is_served_leads_to_the_whole() {
    let place = Place::new();
    filled(&place, 64);
    let server = Server::start(&place, "mirror:a,b mem:1MiB");
    let (pid, uri) = (server.pid(), server.target("mirror"));
    place
        .run("verify b")
        .fails(3, &[&format!("'b': in use by another process, {pid} (sealblock), which serves mirror:a,b as {uri}")]);
    // In the server itself it is nobody else's.
    place.run("mirror add mirror:a,b a").fails(3, &["in use by this server already"]);
    server.stop().is_clean();
}

#[test]
fn another_process_is_named() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let file = File::open(place.path("v")).unwrap();
    file.lock().unwrap();
    let (pid, name) = (std::process::id(), fs::read_to_string("/proc/self/comm").unwrap());
    // The name of a process is that of its first thread.
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or(name);
    let words = format!("in use by another process, {pid} ({})\n", name.trim());
    place.run("verify v").fails(3, &[&words, "try: wait until the other process has closed it"]);
    file.unlock().unwrap();
    place.run("verify v").succeeds();
}

#[test]
fn naming_one_target_twice_is_nobody_elses_fault() {
    let place = Place::new();
    let data = noise(1, 1 << 20);
    place.volume("--size 1MiB", &data);
    place.run("create a --size 1MiB").succeeds();
    std::os::unix::fs::symlink("v", place.path("link")).unwrap();
    for command in
        ["copy v v", "copy data data", "copy v link", "zero mirror:a,a", "zero stripe:v,v", "mirror create a a"]
    {
        let answer = place.run(command);
        answer.fails(3, &["try: give two different targets"]);
        assert!(!answer.stderr.contains("another process"), "{}", answer.stderr);
    }
    // Readers go together, so nothing is wrong with these.
    place.run("compare v v").succeeds();
    place.run("compare v data").succeeds();
}

/// Runs two commands at once; one of them does what it is to do, and the other one finds that something is in use, or done already.
fn at_once(place: &Place, first: &str, second: &str) {
    let children = [first, second].map(|command| (command, place.start(command)));
    let ended = children.map(|(command, child)| (command, child.wait_with_output().unwrap()));
    let said = ended
        .iter()
        .map(|(command, output)| format!("{command}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)));
    let said = said.collect::<String>();
    assert_eq!(ended.iter().filter(|(_, output)| output.status.success()).count(), 1, "{said}");
    let words = ["in use", "already", "exists", "stripe:"];
    assert!(words.iter().any(|word| said.contains(word)), "{said}");
}

#[test]
fn of_two_commands_that_make_the_same_thing_at_once_one_makes_it() {
    for round in 0..8 {
        let place = Place::with_runtime("syscalls");
        at_once(&place, "create v --size 1MiB", "create v --size 2MiB");
        place.run("verify v").succeeds();
        for name in ["a", "b", "m", "n"] {
            place.run(&format!("create {name} --size 1MiB")).succeeds();
        }
        at_once(&place, "mirror create a b", "mirror create b a");
        place.run("verify mirror:a,b").succeeds();
        at_once(&place, "zero stripe:m,n --range 0", "zero stripe:n,m --range 0");
        let orders = ["verify stripe:m,n", "verify stripe:n,m"].map(|command| place.run(command).status);
        assert!(orders.contains(&0), "round {round}: {orders:?}");
    }
}
