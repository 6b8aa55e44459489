//! Checksums of data that are computed while the data are being written, compared with those that are computed before.
//!
//! Turns write one file from its begin to its end, again and again, with one request in flight and with four: without
//! checksums, with checksums before the write, and with checksums while it is in flight. The model has three times for
//! a request: that of this core for all but the checksums, that of the checksums, and the rest, in which this core
//! waits for the device (its kernel threads). Before the write they add up. In flight, the longer one of the checksums'
//! and the device's counts. They are taken from the turns without checksums and with checksums before the write.

use std::time::{Duration, Instant};

use fastrand::Rng;
use sealblock_btrfs_engine::engine::EngineOptions;
use sealblock_btrfs_format::items::inode::InodeFlags;

use super::library::{requests, with_engine};
use super::loads::Data;
use super::{device, make};
use crate::comparisons::options::BtrfsWriteOptions;
use crate::cpu::thread_cpu;
use crate::engine_files::{create, engine_options, fill, forbid_sums};
use crate::load::payload;
use crate::report::{Spread, number, shuffled};

const CHECKSUMS: [&str; 4] = ["crc32c", "xxhash", "sha256", "blake2"];
const SIZES: [u64; 2] = [128 << 10, 1 << 20];
const DEPTHS: [usize; 2] = [1, 4];
/// Contenders.
const NAMES: [&str; 3] = ["none", "before", "in flight"];

/// Seconds for a MiB.
#[derive(Clone, Copy, Default)]
struct Times {
    all: f64,
    /// This core's.
    core: f64,
    sums: f64,
    /// The part of `sums` while the data were in flight.
    hidden: f64,
}

/// Measures all and prints it.
pub fn run(options: &BtrfsWriteOptions) -> anyhow::Result<()> {
    let Some((device, _image)) = device(options)? else { return Ok(()) };
    println!(
        "image of {} in {}, {} s a turn, {} rounds",
        options.image,
        options.dir.display(),
        options.seconds,
        options.rounds
    );
    for checksum in CHECKSUMS.into_iter().filter(|name| name.contains(&options.only)) {
        for (bytes, depth) in SIZES.into_iter().flat_map(|bytes| DEPTHS.map(|depth| (bytes, depth))) {
            let (mut rounds, mut random) = (Vec::new(), Rng::with_seed(1));
            for _ in 0..options.rounds {
                let mut times = [Times::default(); NAMES.len()];
                for contender in shuffled(NAMES.len(), &mut random) {
                    make(&device.0, &["--csum", checksum])?;
                    times[contender] = turn(options, &device.0, contender, (bytes, depth))?;
                }
                rounds.push(times);
            }
            print(checksum, (bytes, depth), &rounds);
        }
    }
    Ok(())
}

fn turn(
    options: &BtrfsWriteOptions,
    device: &str,
    contender: usize,
    (bytes, depth): (u64, usize),
) -> anyhow::Result<Times> {
    let engine_options = EngineOptions { sync_csum: contender == 1, ..engine_options() };
    let data = Data { is_write: true, is_random: false, bytes, jobs: 1, depth, is_direct: true };
    with_engine(device, engine_options, async |engine| {
        let payload = payload();
        let ino = create(&engine, "file", InodeFlags::empty()).await?;
        if contender == 0 {
            forbid_sums(&engine, ino).await?;
        }
        fill(&engine, ino, options.size.get(), &payload).await?;
        engine.commit().await?;
        let before = engine.data_counters();
        let (begin, cpu) = (Instant::now(), thread_cpu());
        let end = begin + Duration::from_secs_f64(options.seconds);
        let done = requests(&engine, &[ino], &data, options.size.get(), (end, 0), &payload).await?;
        let (all, core, after) = (begin.elapsed().as_secs_f64(), thread_cpu() - cpu, engine.data_counters());
        let mebibytes = done as f64 * bytes as f64 / f64::from(1 << 20);
        let of = |seconds: f64| seconds / mebibytes;
        Ok(Times {
            all: of(all),
            core: of(core),
            sums: of((after.sum_time - before.sum_time).as_secs_f64()),
            hidden: of((after.hidden_sum_time - before.hidden_sum_time).as_secs_f64()),
        })
    })
}

fn print(checksum: &str, (bytes, depth): (u64, usize), rounds: &[[Times; NAMES.len()]]) {
    let of = |value: &dyn Fn(&[Times; NAMES.len()]) -> f64| Spread::of(rounds.iter().map(value));
    println!("{checksum}, {} KiB, QD {depth}", bytes >> 10);
    for (index, name) in NAMES.into_iter().enumerate() {
        let rate = of(&|round| 1.0 / round[index].all);
        let (core, sums, hidden) = (
            of(&|round| round[index].core * 1e6),
            of(&|round| round[index].sums * 1e6),
            of(&|round| round[index].hidden / round[index].sums.max(f64::MIN_POSITIVE)),
        );
        let (rate, core, sums) = (number(rate.median), number(core.median), number(sums.median));
        println!(
            "  {name:10} {rate:>7} MiB/s; us a MiB: core {core:>6}, of it sums {sums:>6}; hidden {:5.1} %",
            hidden.median * 100.0
        );
    }
    let gain = of(&|round| round[1].all / round[2].all - 1.0);
    let model = of(&|round| {
        let [none, before, _] = round;
        let (own, sums, device) = (none.core, before.sums, (none.all - none.core).max(0.0));
        (own + sums + device) / (own + sums.max(device)) - 1.0
    });
    println!("  gain {gain}; model {model}");
}
