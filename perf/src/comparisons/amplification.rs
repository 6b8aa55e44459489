//! Bytes written to the medium per byte of application data, for more loads and sizes than `sealblock bench
//! write-amplification`, and for Write Zeroes. [`crate::amplification`] describes the method.

use std::rc::Rc;

use sealblock_block::{Device, Durability, Request};
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::{BlockSize, ByteCount, Extent};

use super::options::AmplificationOptions;
use crate::amplification::{Amplified, SECTOR_BYTES, Setup, count, set_up, threshold};
use crate::counted::Part;
use crate::load::{self, Load, Until};

/// Queue depth, writes between flushes, random addresses.
const LOADS: [(u64, u64, bool); 6] =
    [(32, 0, true), (32, 1024, true), (32, 32, true), (32, 1, true), (1, 1, true), (32, 1024, false)];

/// Blocks of a long write, and the maximum bytes that are zeroed.
const LONG_BLOCKS: u64 = 256;
const MAX_ZEROED_BYTES: u64 = 1 << 30;

/// Counts everything and prints it.
pub fn run(options: &AmplificationOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!(
        "{} writes of 4 KiB a line, sectors of {SECTOR_BYTES} bytes; bytes written per byte of data",
        options.writes
    );
    println!(
        "{:>9} {:>4} {:>11} {:>7} {:>7} {:>7} {:>7} {:>8}",
        "volume", "QD", "flush every", "log", "tables", "in all", "half", "read"
    );
    for size in &options.sizes {
        for (number, load) in (1..).zip(LOADS) {
            if options.loads.is_empty() || options.loads.contains(&number) {
                reactor.block_on(one(options, size.get(), load))?;
            }
        }
        if options.loads.is_empty() {
            reactor.block_on(zeroes(options, size.get()))?;
        }
    }
    Ok(())
}

async fn one(options: &AmplificationOptions, bytes: u64, load: (u64, u64, bool)) -> anyhow::Result<()> {
    let Amplified { log, tables, whole, steady, read } =
        count(options.cache.map(ByteCount::get), bytes, options.writes, load).await?;
    let (depth, flush_every, random) = load;
    let threshold = threshold(bytes, depth);
    println!(
        "{:>6} MiB {depth:>4} {:>11} {log:7.4} {tables:7.4} {whole:7.4} {steady:7.4} {read:8.4}  {}{}",
        bytes >> 20,
        if flush_every == 0 { "never".to_owned() } else { flush_every.to_string() },
        if whole <= threshold {
            format!("{threshold:.2} kept")
        } else {
            format!("{threshold:.2} MISSED by {:.3}", whole - threshold)
        },
        if random { "" } else { " (sequential)" },
    );
    Ok(())
}

/// The cost of Write Zeroes with deallocation, over written blocks.
async fn zeroes(options: &AmplificationOptions, bytes: u64) -> anyhow::Result<()> {
    let Setup { gate, worker, counts } = set_up(options.cache.map(ByteCount::get), bytes).await?;
    let blocks = (bytes.min(MAX_ZEROED_BYTES)) >> BlockSize::B4096.shift();
    let fill = Load { name: "", write: true, blocks: LONG_BLOCKS, random: false, depth: 8, flush_every: 0 };
    load::drive(Rc::clone(&gate), fill, Until::Asked(blocks / LONG_BLOCKS), 1).await?;
    gate.execute(Request::flush()).await?;
    let (log, tables) = (counts.written(Part::Log), counts.written(Part::Tables));
    let extent = Extent::from_raw(0, blocks)?;
    gate.execute(Request::write_zeroes(extent, true, Durability::ForceUnitAccess)).await?;
    let log = counts.written(Part::Log) - log;
    gate.device().close().await?;
    worker.await?;
    println!(
        "{:>6} MiB  {} MiB of Write Zeroes: {:.1} KiB of log, {:.1} MiB of tables (those of what was written before too)",
        bytes >> 20,
        blocks >> 8,
        log as f64 / 1024.0,
        (counts.written(Part::Tables) - tables) as f64 / f64::from(1 << 20),
    );
    Ok(())
}
