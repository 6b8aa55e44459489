//! Our NBD server with a device in memory on one CPU, a small client on another, and nbdkit and qemu-nbd in the same
//! rounds.
//!
//! Threshold: for every load, our server completes at least as many requests as each of the others. All three have the
//! same client (`nbd/client.rs`): one thread, one connection, simple replies. nbdkit serves its memory plugin, and
//! qemu-nbd a raw file on `/dev/shm`; all of them are completely written first. An idle server sleeps, so servers do
//! not disturb each other.
//!
//! The CPU time that other processes use on the servers' CPU is printed as well: beside a process that always runs, a
//! server with more threads gets a larger share of the CPU. Then the CPU time per request shows which server is
//! cheaper, and the rates do not.

pub mod client;
mod servers;

use std::time::Duration;

use anyhow::{Context, Result};
use fastrand::Rng;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::options::NbdOptions;
use super::rounds::verdict;
use crate::load::Until;
use crate::report::{Spread, shuffled};
use client::{Client, Load};
use servers::Served;

/// The threshold: our rate relative to each other server's.
const THRESHOLD: f64 = 1.0;

const fn small(name: &'static str, write: bool, depth: u32) -> Load {
    Load { name, write, bytes: 4096, is_random: true, depth }
}

const fn large(name: &'static str, write: bool, depth: u32) -> Load {
    Load { name, write, bytes: 128 << 10, is_random: false, depth }
}

const LOADS: &[Load] = &[
    small("read 4 KiB, random, QD 1", false, 1),
    small("read 4 KiB, random, QD 32", false, 32),
    small("write 4 KiB, random, QD 1", true, 1),
    small("write 4 KiB, random, QD 32", true, 32),
    large("read 128 KiB, sequential, QD 1", false, 1),
    large("read 128 KiB, sequential, QD 8", false, 8),
    large("write 128 KiB, sequential, QD 1", true, 1),
    large("write 128 KiB, sequential, QD 8", true, 8),
];

/// One turn of one server.
#[derive(Clone, Copy)]
struct Sample {
    rate: f64,
    /// Microseconds of the server's CPU time per request.
    server_us: f64,
    /// The fraction of the servers' CPU that other processes used.
    others: f64,
}

/// Measures everything and prints it.
pub fn run(options: &NbdOptions) -> Result<()> {
    let servers = servers::start(options)?;
    // All threads that this thread starts from now on also run on the client's CPU.
    let mut cpus = CpuSet::new();
    cpus.set(options.client_cpu);
    sched_setaffinity(None, &cpus).context("staying on the client's CPU")?;
    let mut contenders = Vec::new();
    for served in &servers {
        let mut client = Client::connect(served.address, &served.export).with_context(|| served.name.clone())?;
        client.fill()?;
        contenders.push((served, client));
    }
    let mut rng = Rng::with_seed(0);
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let mut rounds: Vec<Vec<Sample>> = Vec::new();
        for _ in 0..options.rounds {
            let mut turns = vec![None; contenders.len()];
            for index in shuffled(contenders.len(), &mut rng) {
                let (served, client) = &mut contenders[index];
                let seed = rng.u64(..);
                turns[index] = Some(turn(served, client, *load, options, seed)?);
            }
            rounds.push(turns.into_iter().flatten().collect());
        }
        print(load.name, &servers, &rounds);
    }
    Ok(())
}

fn turn(served: &Served, client: &mut Client, load: Load, options: &NbdOptions, seed: u64) -> Result<Sample> {
    let (before, busy) = (served.cpu_seconds()?, servers::busy_seconds(options.server_cpu)?);
    let (requests, elapsed) = client
        .drive(load, Until::Passed(Duration::from_secs_f64(options.seconds)), seed)
        .with_context(|| served.name.clone())?;
    let cpu = served.cpu_seconds()? - before;
    let others_s = (servers::busy_seconds(options.server_cpu)? - busy - cpu).max(0.0);
    let seconds = elapsed.as_secs_f64();
    Ok(Sample { rate: requests as f64 / seconds, server_us: cpu * 1e6 / requests as f64, others: others_s / seconds })
}

/// Prints rates, and ours relative to each other server's.
fn print(load: &str, servers: &[Served], rounds: &[Vec<Sample>]) {
    println!("{load}");
    for (index, served) in servers.iter().enumerate() {
        let of = |figure: fn(&Sample) -> f64| Spread::of(rounds.iter().map(|round| figure(&round[index]))).median;
        let (rate, cpu, others) = (of(|turn| turn.rate), of(|turn| turn.server_us), of(|turn| turn.others) * 100.0);
        print!("  {:10} {rate:9.0} /s  CPU {cpu:6.1} us  others {others:2.0} %", served.name);
        if index == 0 {
            println!();
            continue;
        }
        let ratio = Spread::of(rounds.iter().map(|round| round[0].rate / round[index].rate));
        println!(
            "   ours: {:5.1} % of it [{:5.1} .. {:5.1}]{}",
            ratio.median * 100.0,
            ratio.least * 100.0,
            ratio.most * 100.0,
            verdict(ratio.median, Some(THRESHOLD))
        );
    }
}
