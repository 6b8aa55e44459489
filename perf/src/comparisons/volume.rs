//! A protected volume, compared with a raw file.
//!
//! Thresholds: sequential reads and writes of 1 MiB reach 90 % of the raw file's throughput, random reads of 4 KiB
//! reach 85 %, and random writes 75 %. Both use the same reactor, gate and file medium, with direct I/O, on files of
//! the same file system in the same state: every byte was written before (`steady`), or space is only reserved
//! (`first`). The volume's time includes making the tags of writes and checking those of reads; for both, it includes a
//! flush at the end of a turn of writes. A second raw file is measured like a contender and shows the noise of the
//! ratios; the reader of a third one loads the data, as every user of data does.

use std::time::Duration;

use fastrand::Rng;
use sealblock_runtime_reactor::{Config, Reactor};

use super::contender::Contender;
use super::options::FileOptions;
use super::rounds::Rounds;
use crate::load::{Load, Sample, Until};
use crate::report::{Spread, shuffled};
use crate::setup::{FILL, Prepared};

const SEQUENTIAL: f64 = 0.90;
const RANDOM_WRITE: f64 = 0.75;
const RANDOM_READ: f64 = 0.85;
const SCATTERED_AT_ONCE: f64 = 0.60;
const SCATTERED_AFTER: f64 = 0.85;

const fn small(name: &'static str, write: bool, depth: u64, flush_every: u64) -> Load {
    Load { name, write, blocks: 1, random: true, depth, flush_every }
}

const fn large(name: &'static str, write: bool) -> Load {
    Load { name, write, blocks: 256, random: false, depth: 8, flush_every: 0 }
}

/// Loads on written files, with their thresholds.
const STEADY: &[(Load, f64)] = &[
    (large("read 1 MiB, sequential, QD 8", false), SEQUENTIAL),
    (large("write 1 MiB, sequential, QD 8", true), SEQUENTIAL),
    (Load { flush_every: 32, ..large("write 1 MiB, sequential, QD 8, flush every 32", true) }, SEQUENTIAL),
    (small("read 4 KiB, random, QD 32", false, 32, 0), RANDOM_READ),
    (small("read 4 KiB, random, QD 1", false, 1, 0), RANDOM_READ),
    (small("write 4 KiB, random, QD 32, no flush", true, 32, 0), RANDOM_WRITE),
    (small("write 4 KiB, random, QD 32, flush every 1024", true, 32, 1024), RANDOM_WRITE),
    (small("write 4 KiB, random, QD 32, flush every 32", true, 32, 32), RANDOM_WRITE),
    (small("write 4 KiB, random, QD 32, flush every 1", true, 32, 1), RANDOM_WRITE),
];

/// Random overwrites that scatter the blocks of a volume: as many as it has blocks.
const SCATTER: Load = small("overwrite", true, 32, 0);

/// Loads on files that were randomly overwritten just before, with their thresholds immediately afterwards and after
/// idle time.
const SCATTERED: &[([Load; 2], f64, f64)] = &[
    (
        [
            small("read 4 KiB, random, QD 32, after overwrites", false, 32, 0),
            small("read 4 KiB, random, QD 32, after overwrites and idle time", false, 32, 0),
        ],
        RANDOM_READ,
        RANDOM_READ,
    ),
    (
        [
            large("read 1 MiB, sequential, QD 8, after overwrites", false),
            large("read 1 MiB, sequential, QD 8, after overwrites and idle time", false),
        ],
        SCATTERED_AT_ONCE,
        SCATTERED_AFTER,
    ),
    (
        [
            large("write 1 MiB, sequential, QD 8, after overwrites", true),
            large("write 1 MiB, sequential, QD 8, after overwrites and idle time", true),
        ],
        SCATTERED_AT_ONCE,
        SCATTERED_AFTER,
    ),
];

/// Measures everything and prints it.
pub fn run(options: &FileOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    reactor.block_on(async {
        steady(options).await?;
        first(options).await
    })
}

async fn contenders(options: &FileOptions, prepared: Prepared) -> anyhow::Result<Vec<Contender>> {
    let mut contenders = Vec::new();
    for name in ["raw", "raw again"] {
        contenders.push(Contender::raw(name, options, prepared).await?);
    }
    contenders.push(Contender::touched(options, prepared).await?);
    for &guard in &options.guards {
        contenders.push(Contender::volume(options, guard, prepared).await?);
    }
    Ok(contenders)
}

fn names(contenders: &[Contender]) -> Vec<String> {
    contenders.iter().map(|contender| contender.name.clone()).collect()
}

/// One round: every contender has a turn, in a new order each time.
async fn round(contenders: &[Contender], load: Load, until: Until, number: u32) -> anyhow::Result<Vec<Sample>> {
    let mut turns = vec![Sample::default(); contenders.len()];
    let mut rng = Rng::with_seed(u64::from(number));
    for next in shuffled(contenders.len(), &mut rng) {
        turns[next] = contenders[next].turn(load, until, u64::from(number) + 1).await?;
    }
    Ok(turns)
}

async fn steady(options: &FileOptions) -> anyhow::Result<()> {
    println!("\nsteady: every byte of every file was written before; {} a file", options.size);
    let contenders = contenders(options, Prepared::Written).await?;
    for counts in contenders.iter().filter_map(Contender::counts) {
        // The cost of filling is part of no load.
        counts.take_sync_ms();
        counts.take_data_write_seconds();
    }
    for &(load, threshold) in STEADY.iter().filter(|(load, _)| load.name.contains(&options.only)) {
        let mut rounds = Rounds::default();
        for number in 0..options.rounds {
            rounds.0.push(round(&contenders, load, Until::Passed(options.turn()), number).await?);
        }
        rounds.print(load.name, &names(&contenders), Some(threshold));
        print_media(&contenders, &rounds);
    }
    scattered(options, &contenders).await?;
    for contender in contenders {
        contender.close().await?;
    }
    Ok(())
}

/// In each round, the volumes are randomly overwritten before each of these loads; before the second load of a pair
/// they are then idle for a while.
async fn scattered(options: &FileOptions, contenders: &[Contender]) -> anyhow::Result<()> {
    let idle = Duration::from_secs_f64(options.idle);
    for ([at_once, after], first_threshold, second_threshold) in SCATTERED {
        for (load, threshold, idle) in [(*at_once, *first_threshold, Duration::ZERO), (*after, *second_threshold, idle)]
        {
            if !load.name.contains(&options.only) {
                continue;
            }
            let mut rounds = Rounds::default();
            for number in 0..options.rounds {
                if number == 0 || load.write {
                    scatter(options, contenders, number, idle).await?;
                }
                rounds.0.push(round(contenders, load, Until::Passed(options.turn()), number).await?);
            }
            rounds.print(load.name, &names(contenders), Some(threshold));
            print_media(contenders, &rounds);
        }
    }
    Ok(())
}

/// Overwrites the volumes at random, which changes nothing for raw files. Then leaves the volumes idle.
async fn scatter(options: &FileOptions, contenders: &[Contender], number: u32, idle: Duration) -> anyhow::Result<()> {
    for contender in contenders.iter().filter(|contender| contender.counts().is_some()) {
        contender.turn(SCATTER, Until::Asked(options.blocks()), u64::from(number) + 1000).await?;
        contender.sleep(idle).await;
    }
    // This cost is part of no load.
    for counts in contenders.iter().filter_map(Contender::counts) {
        counts.take_sync_ms();
        counts.take_data_write_seconds();
    }
    Ok(())
}

/// The counters of the volumes' media during a load: syncs, their duration, and the number of concurrent data writes.
fn print_media(contenders: &[Contender], rounds: &Rounds) {
    for (index, contender) in contenders.iter().enumerate() {
        let Some(counts) = contender.counts() else { continue };
        let (syncs, write_seconds) = (counts.take_sync_ms(), counts.take_data_write_seconds());
        if !syncs.is_empty() {
            let (count, seconds) = (syncs.len(), rounds.0.iter().map(|round| round[index].seconds).sum::<f64>());
            let ms = Spread::of(syncs.into_iter());
            let (name, there) = (&contender.name, write_seconds / seconds);
            println!(
                "  {name:16} {count} syncs of {:.2} ms, at most {:.1}; {there:.1} data writes at once",
                ms.median, ms.most
            );
        }
    }
}

/// First writes, in each round on new files.
async fn first(options: &FileOptions) -> anyhow::Result<()> {
    let fill = Load { name: "first write 1 MiB, sequential, QD 8", ..FILL };
    let scattered = small("first write 4 KiB, random, QD 32, no flush", true, 32, 0);
    for (load, until, threshold) in [
        (fill, Until::Asked(options.blocks() / fill.blocks), SEQUENTIAL),
        (scattered, Until::Passed(options.turn()), RANDOM_WRITE),
    ] {
        if !load.name.contains(&options.only) {
            continue;
        }
        let (mut rounds, mut columns) = (Rounds::default(), Vec::new());
        for number in 0..options.rounds.min(5) {
            let contenders = contenders(options, Prepared::Reserved).await?;
            rounds.0.push(round(&contenders, load, until, number).await?);
            columns = names(&contenders);
            for contender in contenders {
                contender.close().await?;
            }
        }
        println!("\nfirst writes: space was reserved with fallocate and never written");
        rounds.print(load.name, &columns, Some(threshold));
    }
    Ok(())
}
