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
    place.run("verify v").fails(3, &[&words, "try: try again when the other process has closed it"]);
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
