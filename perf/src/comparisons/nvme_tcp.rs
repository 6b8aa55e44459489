//! Our target and our host over loopback, each on one core, and other targets in the same rounds.
//!
//! Thresholds: tags made by the target reduce the requests per second by at most 10 %; at any queue depth, our target
//! completes as many requests as any other, with the same latency. CPU time is that of the host's thread and of the
//! target's thread. An end that polls before it sleeps spends CPU time on polling, so when there is spare time these
//! figures mean little (`--spin-us 0` shows the cost of the work alone). Header and data digests are used together or
//! not at all.

use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use sealblock_block::Gate;
use sealblock_runtime_reactor::{Config, Reactor, sleep};

use super::options::RemoteOptions;
use super::rounds::verdict;
use super::server::process_cpu;
use crate::contender::{Contender, Measured};
use crate::latency::Summary;
use crate::load::{Load, Sample, Until};
use crate::remote::{self, NQN, Served, Serving, Store, View};
use crate::report::{Spread, interleaved};
use crate::setup::{self, Prepared, Protection, Scratch, Turn};

/// The threshold: the fraction of the requests per second that remains with tags made by the target.
const MADE: f64 = 0.9;
/// Time that a peer gets to wake up before its turn.
const WAKE: Duration = Duration::from_millis(20);

const fn small(name: &'static str, write: bool, depth: u64) -> Load {
    Load { name, write, blocks: 1, random: true, depth, flush_every: 0 }
}

const fn large(name: &'static str, write: bool, depth: u64) -> Load {
    Load { name, write, blocks: 32, random: false, depth, flush_every: 0 }
}

const WARM_UP: Load = large("read all", false, 8);

const LOADS: &[Load] = &[
    small("read 4 KiB, random, QD 1", false, 1),
    small("read 4 KiB, random, QD 32", false, 32),
    small("read 4 KiB, random, QD 128", false, 128),
    small("write 4 KiB, random, QD 1", true, 1),
    small("write 4 KiB, random, QD 32", true, 32),
    small("write 4 KiB, random, QD 128", true, 128),
    large("read 128 KiB, sequential, QD 8", false, 8),
    large("read 128 KiB, sequential, QD 32", false, 32),
    large("write 128 KiB, sequential, QD 8", true, 8),
    large("write 128 KiB, sequential, QD 32", true, 32),
];

/// One side of a comparison. A peer's process is stopped outside its turns.
struct Side {
    contender: Contender,
    peer: Option<Peer>,
}

/// Another target.
struct Peer {
    process: Option<Stopped>,
}

impl Side {
    fn ours(contender: Contender) -> Side {
        Side { contender, peer: None }
    }

    /// The process of a peer, if it is stopped between its turns.
    fn process(&self) -> Option<&Stopped> {
        self.peer.as_ref()?.process.as_ref()
    }

    /// One turn.
    async fn turn(&self, load: Load, until: Until, seed: u64) -> anyhow::Result<Measured> {
        let Some(process) = self.process() else {
            return self.contender.turn(load, until, seed).await;
        };
        process.signal(Signal::CONT)?;
        sleep(WAKE).await;
        let before = process.cpu();
        let measured = self.contender.turn(load, until, seed).await?;
        let target_cpu = Some(process.cpu() - before);
        process.signal(Signal::STOP)?;
        Ok(Measured { target_cpu, ..measured })
    }
}

/// A stopped process; it continues on request, or at the latest when this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill_process(self.0, signal).context("stopping and waking the peer")
    }

    /// Seconds that its threads have spent on CPUs.
    fn cpu(&self) -> f64 {
        process_cpu(self.0.as_raw_nonzero().get().unsigned_abs())
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.signal(Signal::CONT);
    }
}

/// Measures everything and prints it.
pub fn run(options: RemoteOptions) -> anyhow::Result<()> {
    for device in options.devices.clone() {
        let (served, _scratch) = served(&options, &device)?;
        let (_target, serving) = remote::start_on(options.target_cpu, options.spin_us, &served)?;
        if let Some(seconds) = options.serve {
            announce(&serving, &served, seconds)?;
            continue;
        }
        let (_cores, host) = remote::core(options.host_cpu, options.spin_us)?;
        for digests in switches(&options.digests)? {
            println!("{device}, digests {}", if digests { "on" } else { "off" });
            let (options, serving) = (options.clone(), serving.clone());
            let bench = host.call(move || bench(options, serving, digests));
            remote::wait(bench)?.context("the host's core is gone")??;
        }
    }
    Ok(())
}

/// The devices, and their files: one device without tags, and one for each guard unless it is a raw file.
fn served(options: &RemoteOptions, device: &str) -> anyhow::Result<(Vec<Served>, Vec<Scratch>)> {
    let (dir, blocks) = (&options.dir, options.blocks());
    let (mut served, mut files) = (Vec::new(), Vec::new());
    let guards = if device == "file" { &[] } else { &options.guards[..] };
    for protection in [Protection(None)].into_iter().chain(guards.iter().copied()) {
        let store = match device {
            "file" => {
                let filled = setup::filled_file(dir, "target file", blocks);
                files.push(Reactor::new(Config::default())?.block_on(filled)?);
                Store::File(files[files.len() - 1].0.clone())
            }
            "volume" => {
                let name = format!("target volume {}", protection.name());
                let filled = setup::filled_volume(dir, &name, blocks, protection, Prepared::Written);
                files.push(Reactor::new(Config::default())?.block_on(filled)?.0);
                Store::Volume(files[files.len() - 1].0.clone(), Turn::default())
            }
            "null" => Store::Null,
            "memory" => Store::Memory,
            other => bail!("'{other}' is no device here"),
        };
        served.push(Served { store, protection, blocks });
    }
    Ok((served, files))
}

fn announce(serving: &Serving, served: &[Served], seconds: u64) -> anyhow::Result<()> {
    for (index, device) in served.iter().enumerate() {
        let tagged = device.protection.0.map(|_| remote::nsid(index, View::Tagged));
        let name = device.protection.name();
        println!(
            "{name}: {}/{NQN} namespace {}, with tags {tagged:?}",
            serving.address,
            remote::nsid(index, View::Plain)
        );
    }
    remote::wait(async move { sleep(Duration::from_secs(seconds)).await })
}

/// The values of a list of `off` and `on`.
fn switches(names: &[String]) -> anyhow::Result<Vec<bool>> {
    let switch = |name: &String| match name.as_str() {
        "off" => Ok(false),
        "on" => Ok(true),
        other => bail!("'{other}' is neither off nor on"),
    };
    names.iter().map(switch).collect()
}

/// All of our own contenders; the one without tags comes first.
async fn ours(options: &RemoteOptions, serving: &Serving, digests: bool) -> anyhow::Result<Vec<Side>> {
    let mut contenders = Vec::new();
    let wants = |tags: &str| options.tags.iter().any(|wanted| wanted == tags);
    if wants("none") {
        contenders.push(Side::ours(Contender::ours("none".to_owned(), serving, (0, View::Plain), digests).await?));
    }
    for (tags, view) in [("made", View::Plain), ("host", View::Tagged)] {
        // A raw file has no tags.
        let guards = options.guards.iter().take(serving.turns.len().saturating_sub(1));
        for (index, guard) in guards.enumerate().filter(|_| wants(tags)) {
            let name = format!("{tags} {}", guard.name());
            contenders.push(Side::ours(Contender::ours(name, serving, (index + 1, view), digests).await?));
        }
    }
    Ok(contenders)
}

async fn peers(options: &RemoteOptions, digests: bool) -> anyhow::Result<Vec<Side>> {
    let mut contenders = Vec::new();
    for (index, peer) in options.peer.iter().enumerate() {
        let name = options.peer_name.get(index).cloned().unwrap_or_else(|| format!("peer {index}"));
        let process = match options.peer_pid.get(index) {
            None => None,
            Some(&pid) => Some(Stopped(Pid::from_raw(pid).with_context(|| format!("{pid} is no process"))?)),
        };
        if let Some(process) = &process {
            process.signal(Signal::CONT)?;
        }
        let device = remote::connect(peer.address, &peer.nqn, None, digests).await?;
        if let Some(process) = &process {
            process.signal(Signal::STOP)?;
        }
        let gate = Rc::new(Gate::new("peer", device));
        let contender = Contender { name, gate, target: None, on_turn: Turn::default(), host: None };
        contenders.push(Side { contender, peer: Some(Peer { process }) });
    }
    Ok(contenders)
}

async fn bench(options: RemoteOptions, serving: Serving, digests: bool) -> anyhow::Result<()> {
    let mut contenders = ours(&options, &serving, digests).await?;
    for contender in &contenders {
        // Loads the tables of volumes.
        contender.turn(WARM_UP, Until::Asked(options.blocks() / WARM_UP.blocks), 1).await?;
    }
    contenders.extend(peers(&options, digests).await?);
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let rounds = rounds(&options, &contenders, *load).await?;
        print(load.name, &contenders, &rounds);
        if options.latency {
            print_latency(&contenders, &rounds);
        }
    }
    for contender in &contenders {
        if let Some(process) = contender.process() {
            process.signal(Signal::CONT)?;
        }
        contender.contender.gate.device().close().await;
    }
    Ok(())
}

/// Gives every contender its turn in each round, in a new order each time.
async fn rounds(options: &RemoteOptions, contenders: &[Side], load: Load) -> anyhow::Result<Vec<Vec<Measured>>> {
    interleaved(
        options.rounds,
        contenders.len(),
        |_| Ok(()),
        async |index, round| {
            let contender = &contenders[index];
            let turn = contender.turn(load, Until::Passed(options.turn()), u64::from(round)).await;
            turn.with_context(|| contender.contender.name.clone())
        },
    )
    .await
}

/// The median of a value over the rounds.
fn median(rounds: &[Vec<Measured>], index: usize, of: impl Fn(&Measured) -> f64) -> f64 {
    Spread::of(rounds.iter().map(|round| of(&round[index]))).median
}

fn print(load: &str, contenders: &[Side], rounds: &[Vec<Measured>]) {
    println!("{load}");
    let ratio_to = |index: usize, other: usize| {
        Spread::of(rounds.iter().map(|round| round[index].turn.rate() / round[other].turn.rate()))
    };
    for (index, side) in contenders.iter().enumerate() {
        let name = &side.contender.name;
        let per_request = |cpu: f64, turn: &Sample| cpu * 1e6 / turn.requests as f64;
        let host = median(rounds, index, |m| per_request(m.host_cpu, &m.turn));
        let target = median(rounds, index, |m| m.target_cpu.map_or(f64::NAN, |cpu| per_request(cpu, &m.turn)));
        let rate = Spread::of(rounds.iter().map(|round| round[index].turn.rate()));
        let latency = |of: fn(&Summary) -> f64| median(rounds, index, |m| of(&m.turn.latency));
        print!(
            "  {name:14} {:8.0} /s (best {:8.0})  latency {:7.1} us, median {:6.1}, p99 {:7.1}  CPU {host:5.1} + {target:5.1} us, host summed {:4.2} bytes a byte",
            rate.median,
            rate.most,
            latency(|latency| latency.mean_us),
            latency(|latency| latency.median_us),
            latency(|latency| latency.p99_us),
            median(rounds, index, |m| m.host_summed),
        );
        match index {
            0 => print!("   (baseline)"),
            _ => {
                let ratio = ratio_to(index, 0);
                print!("   {ratio}{}", verdict(ratio.median, Some(MADE).filter(|_| name.starts_with("made"))));
            }
        }
        let peers = contenders.iter().enumerate().filter(|(_, other)| other.peer.is_some() && side.peer.is_none());
        peers.for_each(|(other, peer)| print!("   of {} {}", peer.contender.name, ratio_to(index, other)));
        println!();
    }
}

fn print_latency(contenders: &[Side], rounds: &[Vec<Measured>]) {
    for (index, side) in contenders.iter().enumerate() {
        let latency = |of: fn(&Summary) -> f64| median(rounds, index, |m| of(&m.turn.latency));
        let max = Spread::of(rounds.iter().map(|round| round[index].turn.latency.max_us)).most;
        println!(
            "  {:14} p50 {:.1} us, p90 {:.1}, p99 {:.1}, p99.9 {:.1}, max {max:.1}",
            side.contender.name,
            latency(|latency| latency.median_us),
            latency(|latency| latency.p90_us),
            latency(|latency| latency.p99_us),
            latency(|latency| latency.p99_9_us),
        );
    }
}
