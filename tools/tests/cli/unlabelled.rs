//! Replicas without room for a label, which are known by their name: another file under that name.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, has, skipped};

const SIZE: usize = 1 << 20;

/// A volume and a plain file with the same content, and another file with other content.
fn files(block_size: usize) -> Place {
    let place = Place::new();
    place.run(&format!("create a --size 1MiB --guard none --block-size {block_size}")).succeeds();
    place.write("b", &vec![1; SIZE]);
    place.write("c", &vec![2; SIZE]);
    place.run("copy b a --force").succeeds();
    place
}

fn swap(place: &Place) {
    for (from, to) in [("b", "old"), ("c", "b"), ("old", "c")] {
        std::fs::rename(place.path(from), place.path(to)).unwrap();
    }
}

#[test]
fn another_file_under_the_name_of_a_replica_is_named_and_neither_read_nor_written() {
    let place = files(512);
    place.run("mirror create a raw:b --from a --force").succeeds();
    place.run("verify mirror:a,raw:b").succeeds();
    place.run("mirror status mirror:a,raw:b").succeeds();
    swap(&place);
    let seen = place.run("mirror status mirror:a,raw:b");
    seen.fails(4, &["runs without raw:b: its content is not that of a"]);
    place.run("copy mirror:a,raw:b out");
    assert!(place.read("out") == vec![1; SIZE]);
    place.write("data", &vec![3; SIZE / 2]);
    place.run("copy data mirror:a,raw:b --force").fails(4, &["raw:b"]);
    assert!(place.read("b") == vec![2; SIZE], "another's file was written");
    swap(&place);
    place.run("verify --repair mirror:a,raw:b").succeeds();
    assert!(place.read("b") == [vec![3; SIZE / 2], vec![1; SIZE / 2]].concat());
}

/// A replica that failed is opened again every few seconds.
fn eventually(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it does not come");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// qemu-nbd on the file `b`, at a socket of this place.
struct Qemu(Child);

impl Qemu {
    fn start(place: &Place) -> Qemu {
        let socket = place.path("socket");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-nbd");
        command.args(["-t", "-e", "0", "-f", "raw", "-x", "b", "-k"]).arg(&socket).arg(place.path("b"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let begun = Instant::now();
        while !socket.exists() {
            assert!(begun.elapsed() < Duration::from_secs(30), "qemu-nbd does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Qemu(child)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server that does not say what it exports: after a lost connection, another file may be there.
#[test]
fn another_file_behind_a_foreign_server_is_not_used_after_a_lost_connection() {
    if !has("qemu-nbd") {
        return skipped("there is no qemu-nbd here");
    }
    let place = files(4096);
    let qemu = Qemu::start(&place);
    let export = format!("nbd+unix:///b?socket={}", place.path("socket").display());
    place.run(&format!("mirror create a {export} --from a --force")).succeeds();
    place.run(&format!("verify mirror:a,{export}")).succeeds();
    let server = Server::start(&place, &format!("mirror:a,{export}"));
    let nqn = server.ready["subsystems"][0]["nqn"].as_str().unwrap();
    let served = format!("nvme+tcp://{}/{nqn}?timeout=10s", server.address());
    place.run(&format!("copy {served} out")).succeeds();
    drop(qemu);
    swap(&place);
    let qemu = Qemu::start(&place);
    for _ in 0..8 {
        place.run(&format!("copy {served} out --force"));
        assert!(place.read("out") == vec![1; SIZE], "another file was read");
    }
    place.write("data", &vec![3; SIZE / 2]);
    place.run(&format!("copy data {served} --force"));
    assert!(place.read("b") == vec![2; SIZE], "another's file was written");
    let is_told = || {
        let status = place.run(&format!("mirror status mirror:a,{export}"));
        assert_eq!(status.status, 4, "{}", status.text());
        status.text().contains("its content is not that of a")
    };
    eventually(is_told);
    drop(qemu);
    swap(&place);
    let _qemu = Qemu::start(&place);
    eventually(|| place.run(&format!("mirror status mirror:a,{export}")).status == 0);
    assert!(place.read("b") == [vec![3; SIZE / 2], vec![1; SIZE / 2]].concat());
    server.stop().is_clean();
}
