//! A small log-structured store on one or two devices, and defects of it: in no state after a power cut does the store
//! lose a promise, and for each defect there is a state in which it does.

use futures_executor::block_on;
use futures_util::future::{join, join_all};
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_recorder::{CrashOptions, CrashStates, Image, Options, Recorder};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const SIZE: BlockSize = BlockSize::B4096;
const COMMITS: u64 = 6;
const RECORDS: u64 = 3;
/// The blocks of the two superblocks, which commits write in turn.
const SUPERBLOCKS: [u64; 2] = [0, 1];
const FIRST_RECORD: u64 = 2;

/// What the store does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Defect {
    None,
    /// The superblock is written without a flush of the records.
    NoFlush,
    /// The flush is started before the records are written.
    EarlyFlush,
    /// The superblock has no force unit access, and nothing flushes it.
    VolatileSuperblock,
    /// Only the first device is flushed.
    OneDevice,
    /// The promise is given before the superblock is written.
    EarlyPromise,
    /// Both commits use one superblock, so that a torn write destroys the only copy.
    OneSuperblock,
}

fn block(content: &[u64]) -> Vec<u8> {
    let words = content.iter().flat_map(|word| word.to_le_bytes());
    // Each sector repeats the content, so that a torn block differs from itself.
    words.collect::<Vec<u8>>().repeat(4096 / (8 * content.len()))
}

fn request(at: u64, content: &[u64], durability: Durability) -> Request {
    let sealed = Sealed::seal(Slice::copy_from(&block(content)), SIZE, None, &Tags::default());
    Request::write(Extent::from_raw(at, 1).unwrap(), sealed, durability)
}

async fn commit(devices: &[DynDevice], recorder: &Recorder, number: u64, defect: Defect) {
    let records = (number - 1) * RECORDS..number * RECORDS;
    let of_all = devices.iter().flat_map(|device| {
        records
            .clone()
            .map(move |record| device.execute(request(FIRST_RECORD + record, &[record, !record], Durability::Volatile)))
    });
    let flushed = if defect == Defect::OneDevice { &devices[..1] } else { devices };
    let flush = join_all(flushed.iter().map(|device| device.execute(Request::flush())));
    match defect {
        Defect::NoFlush => drop(join_all(of_all).await),
        Defect::EarlyFlush => drop(join(join_all(of_all), flush).await),
        _ => {
            join_all(of_all).await;
            flush.await;
        }
    }
    if defect == Defect::EarlyPromise {
        recorder.mark(number.to_string());
    }
    let at = if defect == Defect::OneSuperblock { 0 } else { SUPERBLOCKS[(number % 2) as usize] };
    let durability =
        if defect == Defect::VolatileSuperblock { Durability::Volatile } else { Durability::ForceUnitAccess };
    join_all(devices.iter().map(|device| device.execute(request(at, &[number, !number], durability)))).await;
    recorder.mark(number.to_string());
}

/// A block with a number and its complement everywhere, or nothing.
fn number(image: &Image, at: u64) -> Option<u64> {
    let mut bytes = vec![0; 4096];
    image.read(at * 4096, &mut bytes);
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (bytes == block(&[number, !number])).then_some(number)
}

/// The number of commits that a device has whole; the newest superblock says which records there are.
fn recover(image: &Image) -> Result<u64, String> {
    let commits = SUPERBLOCKS.iter().filter_map(|at| number(image, *at)).max().unwrap_or(0);
    match (0..commits * RECORDS).find(|record| number(image, FIRST_RECORD + record) != Some(*record)) {
        Some(lost) => Err(format!("commit {commits} is there, and record {lost} is lost")),
        None => Ok(commits),
    }
}

/// The first state in which something is lost that was promised.
fn first_loss(devices: usize, defect: Defect, seed: u64, options: &CrashOptions) -> Option<String> {
    let blocks = FIRST_RECORD + COMMITS * RECORDS;
    let recorder = Recorder::new(vec![Image::blank(SIZE, blocks); devices], Options { seed, ..Options::default() });
    let all = recorder.devices();
    block_on(async {
        for number in 1..=COMMITS {
            commit(&all, &recorder, number, defect).await;
        }
    });
    let states = CrashStates::new(recorder.log(), &CrashOptions { seed, ..options.clone() });
    assert!(states.len() > 200, "{} states", states.len());
    states.iter().find_map(|state| {
        let promised = state.marks().last().map_or(0, |mark| mark.parse().unwrap());
        let loss = state.images.iter().map(recover).find_map(|recovered| match recovered {
            Ok(commits) if commits >= promised => None,
            Ok(commits) => Some(format!("commit {commits} of {promised}")),
            Err(loss) => Some(loss),
        });
        loss.map(|loss| format!("{state}: {loss}"))
    })
}

#[test]
fn a_store_that_flushes_loses_nothing_in_any_state() {
    for (devices, seed) in (1..=3).flat_map(|devices| (0..4).map(move |seed| (devices, seed))) {
        assert_eq!(first_loss(devices, Defect::None, seed, &CrashOptions::default()), None);
    }
}

#[test]
fn each_defect_loses_something_in_some_state() {
    use Defect::{EarlyFlush, EarlyPromise, NoFlush, OneDevice, OneSuperblock, VolatileSuperblock};
    for defect in [NoFlush, EarlyFlush, VolatileSuperblock, OneDevice, EarlyPromise, OneSuperblock] {
        for seed in 0..4 {
            let loss = first_loss(2, defect, seed, &CrashOptions::default());
            assert!(loss.is_some(), "{defect:?} is not found with seed {seed}");
        }
    }
}

#[test]
fn one_superblock_is_enough_only_if_writes_of_it_are_atomic() {
    for (atomic_superblocks, is_safe) in [(true, true), (false, false)] {
        let options = CrashOptions { superblocks: vec![0, 4096], atomic_superblocks, ..CrashOptions::default() };
        let loss = first_loss(1, Defect::OneSuperblock, 1, &options);
        assert_eq!(loss.is_none(), is_safe, "{loss:?}");
    }
}

/// A power cut, a second life on what it left, and a second power cut.
#[test]
fn a_second_life_begins_with_what_the_first_power_cut_left() {
    let lives = |image: Image, numbers: std::ops::RangeInclusive<u64>| {
        let recorder = Recorder::new(vec![image], Options::default());
        let all = recorder.devices();
        block_on(async {
            for number in numbers {
                commit(&all, &recorder, number, Defect::None).await;
            }
        });
        CrashStates::new(recorder.log(), &CrashOptions { limit: 60, ..CrashOptions::default() })
    };
    let first = lives(Image::blank(SIZE, FIRST_RECORD + COMMITS * RECORDS), 1..=2);
    for state in first.iter() {
        let recovered = recover(&state.images[0]).unwrap();
        let second = lives(state.images[0].clone(), recovered + 1..=recovered + 2);
        assert!(second.iter().all(|state| recover(&state.images[0]).is_ok_and(|commits| commits >= recovered)));
    }
}
