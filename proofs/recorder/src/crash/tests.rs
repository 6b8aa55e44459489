use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::recorder::{Options, Recorder};
use futures_executor::block_on;
use futures_util::future::join_all;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const SIZE: BlockSize = BlockSize::B4096;
const BLOCKS: u64 = 6;

/// A write of one block, whose every sector has the number of the write.
fn write(block: u64, number: u32, durability: Durability) -> Request {
    let bytes: Vec<u8> = number.to_le_bytes().repeat(1024);
    let data = Sealed::seal(Slice::copy_from(&bytes), SIZE, None, &Tags::default());
    Request::write(Extent::from_raw(block, 1).unwrap(), data, durability)
}

/// The numbers in the sectors of a block.
fn numbers(image: &Image, block: u64) -> [u32; 8] {
    std::array::from_fn(|sector| {
        let mut number = [0; 4];
        image.read(block * 4096 + sector as u64 * 512, &mut number);
        u32::from_le_bytes(number)
    })
}

/// Random batches of concurrent writes and flushes; the number of a write is that of its request, from 1.
fn random_log(seed: u64, devices: usize) -> Log {
    let images = vec![Image::blank(SIZE, BLOCKS); devices];
    let recorder = Recorder::new(images, Options { seed, ..Options::default() });
    let devices = recorder.devices();
    let mut rng = fastrand::Rng::with_seed(seed);
    block_on(async {
        for _ in 0..6 {
            let mut number = recorder.log().requests().len() as u32;
            let batch: Vec<(usize, Request)> = (0..rng.usize(1..6))
                .map(|_| {
                    number += 1;
                    let durability = if rng.u8(..4) == 0 { Durability::ForceUnitAccess } else { Durability::Volatile };
                    let request = match rng.u8(..4) {
                        0 => Request::flush(),
                        _ => write(rng.u64(..BLOCKS), number, durability),
                    };
                    (rng.usize(..devices.len()), request)
                })
                .collect();
            // The gate passes requests on in the order in which they are polled first, so the numbers are right.
            join_all(batch.into_iter().map(|(device, request)| devices[device].execute(request))).await;
        }
    });
    recorder.log()
}

/// The numbers that a block may hold after a power cut, by the rules, block by block.
fn allowed(log: &Log, point: usize, device: usize, block: u64) -> BTreeSet<u32> {
    let durable_at = log.durable_at();
    let of_block = log.requests().iter().zip(&durable_at).enumerate().filter(|(_, (request, _))| {
        let is_here = request.pieces.first().is_some_and(|piece| piece.offset == block * 4096);
        is_here && request.device == device && request.started < point
    });
    let (durable, volatile): (Vec<_>, Vec<_>) = of_block
        .map(|(id, (request, at))| (id as u32 + 1, request, at.is_some_and(|at| at < point)))
        .partition(|(_, _, is_durable)| *is_durable);
    let last = durable.iter().max_by_key(|(_, request, _)| request.landed);
    let mut allowed = BTreeSet::from([last.map_or(0, |(number, ..)| *number)]);
    let last_landed = last.and_then(|(_, request, _)| request.landed);
    for (number, request, _) in volatile {
        // One in flight may have landed late; one that ended did so then.
        if request.landed.filter(|landed| *landed < point).unwrap_or(point) >= last_landed.unwrap_or(0) {
            allowed.insert(number);
        }
    }
    allowed
}

#[test]
fn states_have_what_the_rules_allow_and_all_of_it() {
    for seed in 0..30 {
        let log = random_log(seed, 2);
        let options = CrashOptions { seed, random_per_point: 4, exhaustive: 6, ..CrashOptions::default() };
        let states = CrashStates::new(log.clone(), &options);
        let mut found: BTreeMap<(usize, usize, u64), BTreeSet<u32>> = BTreeMap::new();
        for state in states.iter() {
            for (device, image) in state.images.iter().enumerate() {
                for block in 0..BLOCKS {
                    let allowed = allowed(&log, state.point(), device, block);
                    let numbers = numbers(image, block);
                    assert!(numbers.iter().all(|number| allowed.contains(number)), "{state}: {numbers:?}");
                    found.entry((state.point(), device, block)).or_default().extend(numbers);
                }
            }
        }
        let largest = |point: usize| {
            states.plan.iter().any(|planned| {
                planned.point == point && matches!(planned.choice, Survivors::Subset(_) | Survivors::All)
            })
        };
        for ((point, device, block), found) in found.into_iter().filter(|((point, ..), _)| largest(*point)) {
            assert_eq!(found, allowed(&log, point, device, block), "seed {seed}, point {point}");
        }
    }
}

#[test]
fn a_state_is_made_again_from_its_number_in_any_order() {
    let options = CrashOptions { seed: 5, ..CrashOptions::default() };
    let (one, other) = (CrashStates::new(random_log(3, 2), &options), CrashStates::new(random_log(3, 2), &options));
    let all: Vec<CrashState<'_>> = one.iter().collect();
    for index in (0..other.len()).rev() {
        let again = other.get(index);
        assert_eq!(again.to_string(), all[index].to_string());
        assert!(again.images.iter().zip(&all[index].images).all(|(one, other)| one.has_same_content(other)));
    }
}

#[test]
fn a_limit_keeps_a_sample_of_states_in_order() {
    let log = random_log(1, 2);
    let all = CrashStates::new(log.clone(), &CrashOptions::default());
    assert!(all.len() > 200);
    for limit in [0, 1, 50, 120] {
        let some = CrashStates::new(log.clone(), &CrashOptions { limit, ..CrashOptions::default() });
        assert_eq!((some.len(), some.is_empty()), (limit, limit == 0));
        let mut rest = all.plan.iter();
        assert!(some.plan.iter().all(|planned| rest.any(|other| other == planned)));
    }
}

/// Two devices: both get a superblock, with force unit access, at the same time.
fn superblocks(devices: usize) -> Log {
    let images = vec![Image::blank(SIZE, BLOCKS); devices];
    let recorder = Recorder::new(images, Options { seed: 9, ..Options::default() });
    let all: Vec<DynDevice> = recorder.devices();
    block_on(async {
        let each = all.iter().map(|device| device.execute(write(2, 7, Durability::ForceUnitAccess)));
        join_all(each).await.into_iter().for_each(|outcome| drop(outcome.unwrap()));
    });
    recorder.log()
}

#[test]
fn superblocks_are_on_every_strict_subset_of_devices_and_torn_unless_atomic() {
    for atomic_superblocks in [false, true] {
        let superblocks = vec![8192];
        let options = CrashOptions { superblocks, atomic_superblocks, exhaustive: 0, ..CrashOptions::default() };
        let states = CrashStates::new(self::superblocks(3), &options);
        let (mut subsets, mut is_torn) = (BTreeSet::new(), false);
        for state in states.iter() {
            let found: Vec<[u32; 8]> = state.images.iter().map(|image| numbers(image, 2)).collect();
            subsets.insert(found.iter().map(|numbers| numbers == &[7; 8]).collect::<Vec<bool>>());
            is_torn |= found.iter().any(|numbers| numbers.contains(&0) && numbers.contains(&7));
        }
        assert_eq!((subsets.len(), is_torn), (8, !atomic_superblocks));
    }
}

#[test]
fn subsets_of_many_devices_are_each_alone_and_all_but_each() {
    assert_eq!(strict_subsets([0, 2, 2].into_iter()), [0, 1, 4]);
    assert_eq!(strict_subsets(std::iter::empty()), []);
    let many = strict_subsets(0..8);
    assert!(many.len() == 17 && many.contains(&0x80) && many.contains(&0x7F) && !many.contains(&0xFF));
}

#[test]
fn promises_hold_from_their_mark_on() {
    let recorder = Recorder::new(vec![Image::blank(SIZE, BLOCKS)], Options::default());
    let device = recorder.device(0);
    block_on(async {
        device.execute(write(0, 1, Durability::ForceUnitAccess)).await.unwrap();
        recorder.mark("one");
        device.execute(write(0, 2, Durability::Volatile)).await.unwrap();
        recorder.mark("two");
    });
    let states = CrashStates::new(recorder.log(), &CrashOptions::default());
    let seen: BTreeSet<(bool, bool, u32)> = states
        .iter()
        .map(|state| (state.has_mark("one"), state.has_mark("two"), numbers(&state.images[0], 0)[0]))
        .collect();
    let is_there = |state: (bool, bool, u32)| seen.contains(&state);
    assert!(is_there((false, false, 0)) && is_there((false, false, 1)) && is_there((true, true, 2)));
    assert!(is_there((true, true, 1)), "two was promised too early, and there is a state that shows it");
    assert!(!is_there((true, false, 0)) && !is_there((true, true, 0)));
    assert!(states.get(states.len() - 1).to_string().contains("last promise: two"));
}
