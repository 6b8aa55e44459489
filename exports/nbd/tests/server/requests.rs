//! Every command, over a socket, with compact and with extended headers.

use crate::common::*;
use sealblock_exports_nbd::Limits;
use sealblock_protocols_nbd::wire::{chunk, command as c, flag, transmission};

#[test]
fn what_is_written_is_read_from_any_connection() {
    let served = serve(Limits::default());
    for (is_extended, export) in [(false, "protected"), (true, "protected"), (false, "bare"), (true, "")] {
        let (mut one, mut two) =
            (Client::open(served.address, export, is_extended), Client::open(served.address, export, !is_extended));
        assert_eq!(one.sizes[0], 1);
        assert_ne!(one.flags & transmission::CAN_MULTI_CONN, 0);
        let data = pattern(1 << 20, one.size);
        one.write(1 << 16, &data);
        assert_eq!(one.errno(0, c::FLUSH, 0, 0, &[]), 0);
        assert_eq!(two.read(1 << 16, 1 << 20), data);
        let again = pattern(8192, 99);
        assert_eq!(two.errno(flag::FUA, c::WRITE, 1 << 17, 8192, &again), 0);
        assert_eq!(one.read(1 << 17, 8192), again);
        assert_eq!(one.errno(0, c::CACHE, 0, 1 << 21, &[]), 0);
    }
}

#[test]
fn zeroes_and_trims_change_what_they_are_about_and_nothing_else() {
    let served = serve(Limits::default());
    for is_extended in [false, true] {
        let mut client = Client::open(served.address, "protected", is_extended);
        let data = pattern(16 * BLOCK, 3);
        for flags in [0, flag::NO_HOLE, flag::FAST_ZERO, flag::FUA] {
            client.write(0, &data);
            assert_eq!(client.errno(flags, c::WRITE_ZEROES, 4 * BLOCK, 8 * BLOCK, &[]), 0);
            let read = client.read(0, 16 * BLOCK);
            let (from, to) = (4 * BLOCK as usize, 12 * BLOCK as usize);
            assert!(read[from..to].iter().all(|byte| *byte == 0), "flags {flags}");
            assert_eq!((&read[..from], &read[to..]), (&data[..from], &data[to..]));
        }
        client.write(0, &data);
        let unhappy = client.errno(flag::FAST_ZERO | flag::NO_HOLE, c::WRITE_ZEROES, 0, BLOCK, &[]);
        assert_eq!(unhappy, 95, "space that is kept is not zeroed faster than it is written");
        assert_eq!(client.read(0, 16 * BLOCK), data, "and nothing has changed");
        assert_eq!(client.errno(flag::FUA, c::TRIM, 4 * BLOCK, 8 * BLOCK, &[]), 0);
        assert_eq!(client.read(0, 4 * BLOCK), data[..4 * BLOCK as usize]);
        let whole = client.size;
        assert_eq!(client.errno(0, c::WRITE_ZEROES, 0, whole, &[]), 0, "longer than a payload may be");
    }
}

#[test]
fn block_status_distinguishes_holes_from_data() {
    let served = serve(Limits::default());
    let mut compact = Client::open(served.address, "bare", false);
    let narrow = |runs: &[(u32, u32)]| {
        let runs: Vec<u8> =
            runs.iter().flat_map(|(length, status)| [*length, *status].map(u32::to_be_bytes).concat()).collect();
        vec![(chunk::BLOCK_STATUS, [&1u32.to_be_bytes()[..], &runs].concat())]
    };
    assert_eq!(compact.ask(flag::REQ_ONE, c::BLOCK_STATUS, 512, 8192, &[]), narrow(&[(8192, 3)]));
    // Memory comes in chunks of 128 KiB.
    const CHUNK: u32 = 128 << 10;
    compact.write(u64::from(2 * CHUNK) + 512, &pattern(512, 1));
    compact.write(u64::from(5 * CHUNK), &pattern(512, 1));
    let told = compact.ask(0, c::BLOCK_STATUS, 512, 1 << 20, &[]);
    let rest = (1 << 20) + 512 - 6 * CHUNK;
    assert_eq!(told, narrow(&[(2 * CHUNK - 512, 3), (CHUNK, 0), (2 * CHUNK, 3), (CHUNK, 0), (rest, 3)]));
    let told = compact.ask(flag::REQ_ONE, c::BLOCK_STATUS, 0, 1 << 20, &[]);
    assert_eq!(told, narrow(&[(2 * CHUNK, 3)]));
    let told = compact.ask(flag::REQ_ONE, c::BLOCK_STATUS, u64::from(2 * CHUNK) + 1024, 1024, &[]);
    assert_eq!(told, narrow(&[(1024, 0)]), "no longer than what was asked about");
    let mut extended = Client::open(served.address, "bare", true);
    let wide = |runs: &[(u64, u64)]| {
        let count = [1u32, runs.len() as u32].map(u32::to_be_bytes).concat();
        let runs: Vec<u8> =
            runs.iter().flat_map(|(length, status)| [*length, *status].map(u64::to_be_bytes).concat()).collect();
        vec![(chunk::BLOCK_STATUS_EXT, [count, runs].concat())]
    };
    let chunk = u64::from(CHUNK);
    let told = extended.ask(0, c::BLOCK_STATUS, 2 * chunk, 2 * chunk, &[]);
    assert_eq!(told, wide(&[(chunk, 0), (chunk, 3)]));
    assert_eq!(extended.errno(0, c::TRIM, 2 * chunk, chunk, &[]), 0);
    assert_eq!(
        extended.ask(0, c::BLOCK_STATUS, 0, 4 * chunk, &[]),
        wide(&[(4 * chunk, 3)]),
        "what was trimmed is a hole"
    );
}

#[test]
fn invalid_ranges_fail() {
    let served = serve(Limits::default());
    let mut client = Client::open(served.address, "protected", true);
    let block = pattern(BLOCK, 0);
    assert_eq!(client.errno(0, c::WRITE, client.size, BLOCK, &block), 28, "past the end");
    assert_eq!(client.errno(0, c::READ, client.size, BLOCK, &[]), 22);
    assert_eq!(client.errno(0, c::WRITE, client.size - 1, 2, &block[..2]), 28, "one byte too many");
    assert_eq!(client.errno(0, c::READ, client.size - 1, 2, &[]), 22);
    let mut fixed = Client::open(served.address, "fixed", true);
    assert_ne!(fixed.flags & transmission::READ_ONLY, 0);
    assert_eq!(fixed.errno(0, c::WRITE, 0, BLOCK, &block), 1, "to be read only");
    assert_eq!(fixed.errno(0, c::TRIM, 0, BLOCK, &[]), 1);
    assert_eq!(fixed.read(0, BLOCK), vec![0; BLOCK as usize]);
}

#[test]
fn many_requests_in_flight_get_one_reply_each() {
    let mut limits = Limits::default();
    (limits.connection.commands, limits.connection.bytes_in_flight) = (8, 64 << 10);
    let served = serve(limits);
    let mut client = Client::open(served.address, "protected", false);
    let data = |i: u64| pattern(4 * BLOCK, i);
    let mut waiting: Vec<(u64, u64)> =
        (0..64).map(|i| (client.send(0, c::WRITE, i * 4 * BLOCK, 4 * BLOCK, &data(i)), i)).collect();
    for _ in 0..64 {
        let (cookie, chunks) = client.receive();
        assert_eq!(chunks, [(chunk::NONE, vec![])]);
        waiting.remove(waiting.iter().position(|sent| sent.0 == cookie).expect("it got no reply before"));
    }
    let mut waiting: Vec<(u64, u64)> =
        (0..64).map(|i| (client.send(flag::DF, c::READ, i * 4 * BLOCK, 4 * BLOCK, &[]), i)).collect();
    for _ in 0..64 {
        let (cookie, chunks) = client.receive();
        let sent = waiting.remove(waiting.iter().position(|sent| sent.0 == cookie).expect("it got no reply before"));
        let [(chunk::OFFSET_DATA, payload)] = &chunks[..] else { panic!("{chunks:?}") };
        assert_eq!(payload[8..], data(sent.1));
    }
}
