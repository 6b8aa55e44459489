//! Requests that begin or end within a block, which clients send unless they know the block size.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use sealblock_exports_nbd::Limits;
use sealblock_protocols_nbd::wire::{chunk, command as c, flag};

/// Ranges that begin or end within a block, or both, in one block and in many.
const RANGES: [(u64, u64); 8] =
    [(0, 1), (4095, 1), (4, 511), (100, 4096), (4096, 4097), (8191, 2), (1, 40_000), (12_288, 12_800)];

/// The bytes of both exports that these tests change.
const BYTES: u64 = 16 * BLOCK;

#[test]
fn bytes_of_any_offset_and_length_are_written_and_read_and_no_others_change() {
    let served = serve(Limits::default());
    for (is_extended, export) in [(false, "protected"), (true, "protected"), (false, "bare"), (true, "bare")] {
        let mut client = Client::open(served.address, export, is_extended);
        assert_eq!((client.sizes[0], client.sizes[1]), (1, 4096));
        let mut wanted = pattern(BYTES, 5);
        client.write(0, &wanted);
        for (seed, (offset, length)) in (0..).zip(RANGES) {
            let data = pattern(length, seed);
            let flags = if seed % 2 == 0 { 0 } else { flag::FUA };
            assert_eq!(client.errno(flags, c::WRITE, offset, length, &data), 0, "{export} {offset} {length}");
            wanted[offset as usize..(offset + length) as usize].copy_from_slice(&data);
            assert!(client.read(0, BYTES) == wanted, "{export} {offset} {length}");
            assert_eq!(client.read(offset, length), data);
            assert_eq!(client.errno(0, c::CACHE, offset, length, &[]), 0);
        }
        for (at, (offset, length)) in (0..).zip(RANGES) {
            let flags = [0, flag::NO_HOLE, flag::FUA, flag::FUA | flag::NO_HOLE][at % 4];
            client.write(0, &wanted);
            assert_eq!(client.errno(flags, c::WRITE_ZEROES, offset, length, &[]), 0, "{export} {offset} {length}");
            let mut zeroed = wanted.clone();
            zeroed[offset as usize..(offset + length) as usize].fill(0);
            assert!(client.read(0, BYTES) == zeroed, "{export} {offset} {length}");
            let fast = client.errno(flag::FAST_ZERO, c::WRITE_ZEROES, 1, length, &[]);
            assert_eq!((fast, client.read(1, length)), (95, zeroed[1..1 + length as usize].to_vec()));
        }
        client.write(0, &wanted);
        assert_eq!(client.errno(flag::FUA, c::TRIM, 1, 2 * BLOCK, &[]), 0);
        let trimmed = client.read(0, BYTES);
        let (from, to) =
            if export == "bare" { (512, 2 * BLOCK as usize) } else { (BLOCK as usize, 2 * BLOCK as usize) };
        assert!(trimmed[..from] == wanted[..from] && trimmed[to..] == wanted[to..], "only whole blocks are discarded");
        assert_eq!(client.errno(0, c::TRIM, 1, 100, &[]), 0, "and may be none");
    }
}

#[test]
fn zeroes_in_a_block_that_was_never_written_leave_it_so() {
    let served = serve(Limits::default());
    let mut client = Client::open(served.address, "protected", false);
    let hole = [&1u32.to_be_bytes()[..], &(BLOCK as u32).to_be_bytes(), &3u32.to_be_bytes()].concat();
    for flags in [0, flag::FUA] {
        assert_eq!(client.errno(flags, c::WRITE_ZEROES, 10, 100, &[]), 0);
        assert_eq!(client.ask(flag::REQ_ONE, c::BLOCK_STATUS, 0, BLOCK, &[]), [(chunk::BLOCK_STATUS, hole.clone())]);
    }
}

#[test]
fn status_begins_where_it_was_asked_for() {
    let served = serve(Limits::default());
    let mut client = Client::open(served.address, "bare", false);
    let runs = |runs: &[u32]| vec![(chunk::BLOCK_STATUS, runs.iter().flat_map(|word| word.to_be_bytes()).collect())];
    // Memory comes in chunks of 128 KiB.
    const CHUNK: u32 = 128 << 10;
    client.write(u64::from(CHUNK), &pattern(512, 1));
    let told = client.ask(0, c::BLOCK_STATUS, u64::from(CHUNK) - 700, 1000, &[]);
    assert_eq!(told, runs(&[1, 700, 3, 512, 0]), "up to the end of a block");
    let told = client.ask(flag::REQ_ONE, c::BLOCK_STATUS, u64::from(CHUNK) + 1, 10, &[]);
    assert_eq!(told, runs(&[1, 10, 0]));
}

#[test]
fn a_part_of_a_damaged_block_is_not_changed_and_its_error_lies_within_the_request() {
    let served = serve(Limits::default());
    let data = pattern(BYTES, 5);
    Client::open(served.address, "protected", false).write(0, &data);
    served.damage(3);
    let error = |chunk: &Chunk| {
        assert_eq!(chunk.0, chunk::ERROR_OFFSET);
        let offset = chunk.1.last_chunk().map(|bytes| u64::from_be_bytes(*bytes)).unwrap();
        (u32::from_be_bytes(chunk.1[..4].try_into().unwrap()), offset)
    };
    let (bad, end) = (3 * BLOCK, 4 * BLOCK);
    let mut client = Client::open(served.address, "protected", true);
    for flags in [0, flag::FUA] {
        for (offset, length, at) in
            [(bad + 8, 8, bad + 8), (bad - 100, 200, bad), (end - 1, 2, end - 1), (bad + 1, 3 * BLOCK, bad + 1)]
        {
            let told = client.ask(flags, c::WRITE, offset, length, &vec![1; length as usize]);
            assert_eq!(told.iter().map(error).collect::<Vec<_>>(), [(5, at)], "{offset} {length}");
            let told = client.ask(flags, c::WRITE_ZEROES, offset, length, &[]);
            assert_eq!(told.iter().map(error).collect::<Vec<_>>(), [(5, at)], "{offset} {length}");
            let told = client.ask(0, c::READ, offset, length, &[]);
            assert_eq!(told.last().map(error), Some((5, at)), "{offset} {length}");
            let told = client.ask(0, c::CACHE, offset, length, &[]);
            assert_eq!(told.last().map(error), Some((5, at)), "{offset} {length}");
        }
        assert_eq!(client.errno(0, c::READ, bad, BLOCK, &[]), 5, "nobody has sealed it anew");
    }
    let told = client.ask(0, c::READ, bad - 100, 200, &[]);
    // The bytes before it have been overwritten by then.
    assert_eq!((told[0].0, told[0].1.len()), (chunk::OFFSET_DATA, 8 + 100));
    client.write(bad, &data[..BLOCK as usize]);
    client.write(bad + 8, &[9; 8]);
    assert_eq!(
        client.read(bad + 7, 10),
        [&data[7..8], &[9; 8], &data[16..17]].concat(),
        "written as a whole it is good"
    );
}

#[test]
fn writers_of_one_block_lose_nothing_of_one_another() {
    let served = serve(Limits::default());
    let address = served.address;
    let stop = Arc::new(AtomicBool::new(false));
    // Meanwhile another client writes the next block as a whole.
    let whole = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut client = Client::open(address, "protected", true);
            let mut seed = 0;
            while !stop.load(Ordering::Relaxed) {
                client.write(BLOCK, &pattern(BLOCK, seed));
                seed += 1;
            }
        }
    });
    const WRITERS: u64 = 4;
    let writers: Vec<_> = (0..WRITERS)
        .map(|number| {
            std::thread::spawn(move || {
                let mut client = Client::open(address, "protected", number % 2 == 0);
                for round in 0..100 {
                    let sent = (0..8).map(|at| {
                        let offset = (at * WRITERS + number) * 100;
                        client.send(0, c::WRITE, offset, 100, &[(round + 1) as u8; 100])
                    });
                    let sent: Vec<u64> = sent.collect();
                    sent.iter().for_each(|_| assert_eq!(client.receive().1, [(chunk::NONE, vec![])]));
                    for at in 0..8 {
                        let offset = (at * WRITERS + number) * 100;
                        assert_eq!(client.read(offset, 100), [(round + 1) as u8; 100], "round {round} of {number}");
                    }
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    stop.store(true, Ordering::Relaxed);
    whole.join().unwrap();
    let mut client = Client::open(address, "protected", false);
    assert_eq!(client.read(0, 3200), [100; 3200]);
    assert_eq!(client.errno(0, c::CACHE, 0, 2 * BLOCK, &[]), 0);
}

#[test]
fn requests_about_no_byte_succeed() {
    let served = serve(Limits::default());
    for is_extended in [false, true] {
        let mut client = Client::open(served.address, "protected", is_extended);
        for kind in [c::READ, c::WRITE, c::TRIM, c::WRITE_ZEROES, c::CACHE] {
            for offset in [0, 5, client.size] {
                assert_eq!(client.errno(0, kind, offset, 0, &[]), 0, "{kind} at {offset}");
            }
        }
        assert_eq!(client.errno(0, c::READ, client.size + 1, 0, &[]), 22);
        assert_eq!(client.read(0, BLOCK), vec![0; BLOCK as usize]);
    }
}
