//! Members of mirrors and stripes by themselves: read by anybody, written only on purpose.

use crate::common::server::Server;
use crate::common::{Place, noise};

/// A mirror of `a` and `b` with data in it, and a volume `v` beside it.
fn mirrored() -> (Place, Vec<u8>) {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b", "v"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let data = noise(1, 1 << 20);
    place.write("data", &data);
    place.run("copy data mirror:a,b").succeeds();
    (place, data)
}

#[test]
fn no_command_writes_a_member_of_a_mirror_by_itself() {
    let (place, data) = mirrored();
    for command in [
        "copy data a",
        "copy v a",
        "rescue v a",
        "zero a",
        "discard a",
        "zero a --range 3",
        "serve a --listen 127.0.0.1:0 --control none",
        "zero offset:0..1,a",
        "zero fault:[read-error@5],a --yes",
        "zero stripe-nolabel:v,a",
        "zero mirror:[offset:0..9,a],[offset:0..9,v]",
    ] {
        let answer = place.run(command);
        answer.fails(3, &["member 1 of 2 of mirror", "mirror:A,B"]);
        assert!(answer.stderr.contains("--force-member"), "{command}: {}", answer.stderr);
        assert!(place.blocks("a", 0, 255) == data, "{command}");
    }
    // Who only looks may.
    for command in
        ["info a", "verify a", "verify a --repair", "copy a out", "copy a -", "compare a b", "rescue a saved"]
    {
        place.run(command).succeeds();
    }
    assert!(place.blocks("mirror:a,b", 0, 255) == data);
    place.run("verify mirror:a,b").succeeds();
    // And a volume that is no member is written as usual.
    place.run("zero v --yes").succeeds();
}

#[test]
fn a_member_that_was_written_by_force_is_resynced_and_never_read_before() {
    for command in ["zero a --range 0 --force-member", "copy v a --force-member", "discard a --force-member --yes"] {
        let (place, data) = mirrored();
        let forced = place.run(command);
        forced.succeeds();
        assert!(forced.stderr.contains("written without its group"), "{}", forced.stderr);
        assert!(place.blocks("mirror:a,b", 0, 255) == data, "{command}");
        place.run("zero mirror:a,b --range 200").succeeds();
        let read = place.blocks("mirror:a,b", 0, 255);
        assert!(read[..200 << 12] == data[..200 << 12] && read[201 << 12..] == data[201 << 12..], "{command}");
    }
}

#[test]
fn a_removed_member_is_a_device_by_itself() {
    let (place, data) = mirrored();
    place.run("mirror remove mirror:a,b b").succeeds();
    place.run("zero b --yes").succeeds();
    place.run("compare --zero b").succeeds();
    place.run("zero a").fails(3, &["member"]);
    assert!(place.blocks("a", 0, 255) == data);
}

#[test]
fn no_command_writes_a_member_of_a_stripe_by_itself() {
    let place = Place::with_runtime("syscalls");
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let data = noise(2, 2 << 20);
    place.write("data", &data);
    place.run("copy data stripe:a,b").succeeds();
    for command in ["zero b", "copy data b", "serve b --listen 127.0.0.1:0 --control none", "zero stripe-nolabel:a,b"] {
        let answer = place.run(command);
        answer.ends_with(3);
        assert!(answer.stderr.contains("of stripe") || answer.stderr.contains("do not fit"), "{}", answer.stderr);
    }
    assert!(place.blocks("stripe:a,b", 0, 511) == data);
    place.run("verify b").succeeds();
    place.run("zero b --range 0 --force-member").succeeds();
    assert_eq!(place.blocks("stripe:a,b", 16, 16), [0; 4096]);
    // What makes it something else, or damages it on purpose, is not held back.
    place.run("corrupt b --lba 5 --kind data").succeeds();
    place.run("create b --size 1MiB --force").succeeds();
    place.run("zero b --yes").succeeds();
}

#[test]
fn a_served_member_is_written_only_by_its_mirror() {
    let place = Place::new();
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size 1MiB")).succeeds();
    }
    let data = noise(3, 1 << 20);
    place.write("data", &data);
    // Before it is a member it is a volume like any other, and goes on being served when it becomes one.
    let server = Server::start(&place, "b --protection shown");
    let b = server.target("b");
    place.run(&format!("copy data mirror:a,{b}")).succeeds();
    place.run(&format!("zero {b}")).fails(3, &["member 2 of 2 of mirror"]);
    server.stop().is_clean();
    place.run("serve b --listen 127.0.0.1:0 --control none").fails(3, &["member 2 of 2 of mirror", "--as-member"]);
    let server = Server::start(&place, "b --as-member --protection shown");
    let b = server.target("b");
    // A host that insists, and one that knows nothing of labels.
    place.run(&format!("zero {b} --no-unmap --range 0")).fails(3, &["member 2 of 2 of mirror"]);
    assert_eq!(place.run(&format!("verify mirror:a,{b}")).status, 0);
    place.run(&format!("zero mirror:a,{b} --range 7")).succeeds();
    place.run(&format!("compare a {b}")).succeeds();
    server.stop().is_clean();
    place.run("compare a b").succeeds();
    assert_eq!(place.blocks("b", 7, 7), [0; 4096]);
}

#[test]
fn a_served_member_refuses_hosts_that_know_no_labels() {
    let (place, data) = mirrored();
    let nbd = "b --as-member --nbd 127.0.0.1:0";
    let server = Server::start(&place, nbd);
    let address = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    place.run(&format!("zero nbd://{address}/b --range 0")).ends_with(3);
    place.run(&format!("copy nbd://{address}/b out")).succeeds();
    server.stop().is_clean();
    assert!(place.read("out") == data && place.blocks("b", 0, 255) == data);
}
