//! `compare` over two servers: digests tell what is equal, and only what is left is read.

use crate::common::server::Server;
use crate::common::{Place, noise};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// The report of a comparison that ends with this status.
fn compared(place: &Place, arguments: &str, status: i32) -> Value {
    place.run(&format!("compare {arguments} --json")).ends_with(status).json()
}

fn moved(report: &Value) -> u64 {
    assert_eq!(report["offloaded"], true);
    report["bytes_transferred"].as_u64().unwrap()
}

/// Two equal volumes of 16 MiB, with guards of different kinds, and a server for each.
fn pair(place: &Place) -> (Server, Server) {
    place.write("data", &noise(11, 16 << 20));
    place.run("create a --size 16MiB --guard crc32c").succeeds();
    place.run("create b --size 16MiB --guard crc16 --block-size 512").succeeds();
    place.run("copy data a").succeeds();
    place.run("copy data b").succeeds();
    (Server::start(place, "a"), Server::start(place, "b"))
}

#[test]
fn equal_volumes_on_two_servers_are_compared_without_moving_data() {
    let place = Place::new();
    let (one, two) = pair(&place);
    for options in ["", "?pract=1", "?hdgst&ddgst"] {
        let both = format!("{}{options} {}{options}", one.target("a"), two.target("b"));
        let report = compared(&place, &both, 0);
        assert_eq!((moved(&report), &report["bytes_compared"]), (0, &(16 * MIB).into()), "{options}");
    }
    // Local checksums are computed here, by the device or after reading.
    let report = compared(&place, &format!("data {}", one.target("a")), 0);
    assert_eq!((moved(&report), &report["equal"]), (0, &true.into()));
    let here = compared(&place, "data data", 0);
    assert_eq!((&here["offloaded"], &here["bytes_transferred"]), (&false.into(), &(32 * MIB).into()));
    one.stop().is_clean();
    two.stop().is_clean();
}

#[test]
fn single_blocks_are_found_by_digests_alone_and_many_are_read() {
    let place = Place::new();
    let (one, two) = pair(&place);
    let (a, b) = (one.target("a"), two.target("b"));
    let both = format!("{a} {b}");
    for lba in [0, 1000, 4095] {
        place.run(&format!("zero {a} --range {lba}..{lba}")).succeeds();
    }
    let report = compared(&place, &both, 1);
    let wanted = r#"[{"blocks":1,"lba":0},{"blocks":1,"lba":1000},{"blocks":1,"lba":4095}]"#;
    assert_eq!((report["differences"].to_string().as_str(), moved(&report)), (wanted, 0));
    // A long run: what surrounds it is not read.
    place.run(&format!("zero {a} --range 1100..1999")).succeeds();
    let report = compared(&place, &both, 1);
    let wanted = r#"[{"blocks":1,"lba":0},{"blocks":1,"lba":1000},{"blocks":900,"lba":1100},{"blocks":1,"lba":4095}]"#;
    assert_eq!((report["differences"].to_string().as_str(), &report["blocks_different"]), (wanted, &903.into()));
    assert!((1..=2 * 5 * MIB).contains(&moved(&report)), "{} bytes", moved(&report));
    // The same by reading, of the files behind the servers' volumes.
    one.stop().is_clean();
    two.stop().is_clean();
    let here = compared(&place, "a b", 1);
    assert_eq!((&here["differences"], &here["offloaded"]), (&report["differences"], &false.into()));
}

#[test]
fn zeroes_are_compared_by_digests() {
    let place = Place::new();
    place.run("create v --size 9MiB").succeeds();
    let server = Server::start(&place, "v");
    let v = server.target("v");
    let report = compared(&place, &format!("--zero {v}"), 0);
    assert_eq!((moved(&report), &report["bytes_compared"]), (0, &(9 * MIB).into()));
    place.write("one", &noise(3, 4096));
    place.run(&format!("copy one offset:2303..2303,{v}")).succeeds();
    let report = compared(&place, &format!("--zero {v}"), 1);
    assert_eq!((report["differences"].to_string().as_str(), moved(&report)), (r#"[{"blocks":1,"lba":2303}]"#, 0));
    server.stop().is_clean();
}

#[test]
fn damage_on_a_server_is_named_and_no_difference() {
    let place = Place::new();
    place.volume("--size 4MiB", &noise(5, 4 << 20));
    place.write("same", &noise(5, 4 << 20));
    place.run("corrupt v --lba 77 --kind data").succeeds();
    let server = Server::start(&place, "v");
    let target = server.target("v");
    let report = compared(&place, &format!("same {target}"), 1);
    assert_eq!(
        (&report["equal"], &report["blocks_different"], &report["offloaded"]),
        (&false.into(), &0.into(), &true.into())
    );
    let unreadable = serde_json::json!([{"lba": 77, "blocks": 1, "target": target, "why": "guard"}]);
    assert_eq!(report["unreadable"], unreadable);
    place.run(&format!("zero {target} --range 76")).succeeds();
    let report = compared(&place, &format!("same {target}"), 1);
    assert_eq!(
        (&report["differences"], &report["unreadable"]),
        (&serde_json::json!([{"lba": 76, "blocks": 1}]), &unreadable)
    );
    server.stop().is_clean();
}

#[test]
fn a_range_is_compared_for_itself() {
    let place = Place::new();
    let mut data = noise(3, 1 << 20);
    place.volume("--size 1MiB", &data);
    data[10 * 4096] ^= 1;
    data[200 * 4096] ^= 1;
    // Blocks 0 to 243 whole, and a part of block 244.
    data.truncate(244 * 4096 + 512);
    place.write("other", &data);
    let of = |range: &str, status| {
        let report = compared(&place, &format!("v other --range {range}"), status);
        let lbas: Vec<_> = report["differences"].as_array().unwrap().iter().map(|run| run["lba"].clone()).collect();
        (lbas, report["bytes_compared"].as_u64().unwrap())
    };
    assert_eq!(of("11..199", 0), (vec![], 189 * 4096));
    assert_eq!(of("..10", 1), (vec![10.into()], 11 * 4096));
    assert_eq!(of("244", 0), (vec![], 512));
    assert_eq!(of("150..244", 1), (vec![200.into()], 94 * 4096 + 512));
    // To the end of both, which are not at the same place.
    assert_eq!(of("201..", 1), (vec![], 43 * 4096 + 512));
    place.run("compare v other --range 201..").ends_with(1).says(&["the sizes differ", "different"]);
    place.run("compare v other --range 201..244").succeeds().says(&["equal (0 of 44 blocks differ)"]);
    place.run("compare v other --range 245").fails(2, &["v and other", "block 245 is past the end", "245 blocks"]);
    place.run("compare --zero v --range 0..3").ends_with(1).says(&["blocks 0..3 differ"]);
}

#[test]
fn a_range_is_compared_by_digests() {
    let place = Place::new();
    let (one, two) = pair(&place);
    let both = format!("{} {}", one.target("a"), two.target("b"));
    place.run(&format!("zero {} --range 3000", one.target("a"))).succeeds();
    let report = compared(&place, &format!("{both} --range 5..2999"), 0);
    assert_eq!((moved(&report), &report["bytes_compared"]), (0, &(2995 * 4096).into()));
    let report = compared(&place, &format!("{both} --range 3000.."), 1);
    assert_eq!((moved(&report), report["differences"].to_string().as_str()), (0, r#"[{"blocks":1,"lba":3000}]"#));
    one.stop().is_clean();
    two.stop().is_clean();
}
