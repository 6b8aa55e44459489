//! How long a small request waits among many large ones, and a large one among many small ones.

use std::cell::Cell;

use futures_util::future::{join, join_all};
use sealblock_block::{Device, Durability, Request};
use sealblock_integrity::{GuardKind, ProtectionType, Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

use super::setup::{Harness, pattern, protection};

const SIZE: BlockSize = BlockSize::B4096;
/// A volume of 64 MiB has 16 MiB of spare physical blocks: 16 of the large requests.
const BLOCKS: u64 = 16 << 10;
const LARGE_BLOCKS: u64 = 256;
const CLIENTS: u64 = 64;
const SMALL_WRITES: u64 = 20;

fn write(harness: &Harness, start: u64, data: &Slice) -> Request {
    let extent = Extent::from_raw(start, (data.len() >> SIZE.shift()) as u64).unwrap();
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: start };
    let data = Sealed::seal(data.clone(), SIZE, harness.gate.geometry().protection, &tags);
    Request::write(extent, data, Durability::Volatile)
}

/// The maximum number of large requests that completed while one small write waited.
fn overtaken(large: impl Fn(&Harness, u64) -> Request) -> u64 {
    let harness = Harness::new(SIZE, BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.medium.turns.set(3);
    let (answered, over, worst) = (Cell::new(0_u64), Cell::new(false), Cell::new(0));
    let client = |number: u64| {
        let (harness, answered, over, large) = (&harness, &answered, &over, &large);
        async move {
            let mut at = number;
            while !over.get() {
                at = (at * 5 + 1) % (BLOCKS / LARGE_BLOCKS);
                harness.gate.execute(large(harness, at * LARGE_BLOCKS)).await.unwrap();
                answered.set(answered.get() + 1);
            }
        }
    };
    let small = async {
        let data = Slice::copy_from(&pattern(7, SIZE.bytes()));
        for at in 0..SMALL_WRITES {
            let before = answered.get();
            harness.gate.execute(write(&harness, at * 700, &data)).await.unwrap();
            worst.set(worst.get().max(answered.get() - before));
        }
        over.set(true);
    };
    harness.run(join(join_all((0..CLIENTS).map(client)), small));
    worst.get()
}

#[test]
fn a_small_write_is_served_in_its_turn_beside_large_ones() {
    let data = Slice::copy_from(&pattern(1, LARGE_BLOCKS as usize * SIZE.bytes()));
    let overtaken = overtaken(|harness, start| write(harness, start, &data));
    // Those that had started when it arrived, and as many that got physical blocks before it joined the queue.
    assert!(overtaken <= 16, "{overtaken} large writes were answered first");
}

#[test]
fn a_small_write_is_served_in_its_turn_beside_zeroes_that_keep_their_space() {
    let overtaken = overtaken(|_, start| {
        Request::write_zeroes(Extent::from_raw(start, LARGE_BLOCKS).unwrap(), false, Durability::Volatile)
    });
    assert!(overtaken <= 16, "{overtaken} large requests were answered first");
}

/// A volume with as many spare physical blocks as a large write takes: all of them must be free at once.
const TIGHT_BLOCKS: u64 = LARGE_BLOCKS;
/// Without a queue, the large write would wait as long as there are small ones.
const MOST_SMALL: u64 = 20_000;

#[test]
fn a_large_write_is_served_in_its_turn_beside_small_ones() {
    let harness = Harness::new(SIZE, TIGHT_BLOCKS, protection(GuardKind::Crc32c, ProtectionType::Type1));
    harness.medium.turns.set(3);
    let (answered, over) = (Cell::new(0_u64), Cell::new(false));
    let small = Slice::copy_from(&pattern(7, SIZE.bytes()));
    let client = |number: u64| {
        let (harness, answered, over, small) = (&harness, &answered, &over, &small);
        async move {
            let mut at = number;
            while !over.get() && answered.get() < MOST_SMALL {
                at = (at * 5 + 1) % TIGHT_BLOCKS;
                harness.gate.execute(write(harness, at, small)).await.unwrap();
                answered.set(answered.get() + 1);
            }
        }
    };
    let large = async {
        let data = Slice::copy_from(&pattern(1, LARGE_BLOCKS as usize * SIZE.bytes()));
        let mut worst = 0;
        for _ in 0..5 {
            let before = answered.get();
            harness.gate.execute(write(&harness, 0, &data)).await.unwrap();
            worst = worst.max(answered.get() - before);
        }
        over.set(true);
        worst
    };
    let (_, overtaken) = harness.run(join(join_all((0..CLIENTS).map(client)), large));
    // Those that had physical blocks when it arrived, and as many that get some before it is the first of its queue.
    assert!(overtaken <= 4 * CLIENTS, "{overtaken} small writes were answered first");
}
