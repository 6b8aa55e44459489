//! Random 4 KiB writes over NVMe/TCP, to a mirror and to two volumes at once, both served by programs of any version.
//!
//! The thresholds are those of [`crate::mirror_size`]; in addition, a later program must reach the rates of an earlier
//! one. Each turn has its own server, on one core, which ends before the next one starts, so that no contender uses
//! another's time. So in each turn a mirror begins without dirty regions and a volume must load its map; the first part
//! of a turn is therefore printed separately. Bytes are those that the kernel counts for the server's process, which
//! are none if the files are in memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use futures_util::future::try_join_all;
use rustix::process::Signal;
use sealblock_block::Gate;
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::{BlockSize, ByteCount};

use super::mirror_size::RATE_BAR;
use super::options::MirrorSizeOptions;
use super::rounds::verdict;
use super::server::Server;
use crate::load::{Load, Sample, Stopwatch, Until, drive};
use crate::remote::{self, SPIN_US, connect};
use crate::report::{Spread, number, shuffled};
use crate::setup::{Scratch, new_path};

const VOLUMES: usize = 0;
const MIRROR: usize = 1;
/// The first part of a turn.
const FIRST: Duration = Duration::from_secs(1);
/// The threshold: the smallest fraction of an earlier program's rate.
const OLD_BAR: f64 = 0.95;

/// One turn.
struct Turn {
    first: Sample,
    rest: Sample,
    /// Bytes that the server wrote for each write to a volume or replica, in the rest.
    bytes_a_write: f64,
}

/// The files of one program: two volumes, the two replicas of a mirror, and the targets.
struct Files {
    program: PathBuf,
    paths: Vec<Scratch>,
    configurations: [Scratch; 2],
}

/// Measures everything and prints it.
pub fn run(options: &MirrorSizeOptions) -> Result<()> {
    for &size in &options.sizes {
        for &depth in &options.depths {
            measure(options, size, depth)?;
        }
    }
    Ok(())
}

fn measure(options: &MirrorSizeOptions, size: ByteCount, depth: u64) -> Result<()> {
    let make = |(index, program): (usize, &PathBuf)| Files::new(options, index, program, size);
    let files = options.server.iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
    let load = Load { name: "random 4 KiB writes", write: true, blocks: 1, random: true, depth, flush_every: 0 };
    let (mut rounds, mut rng) = (Vec::new(), Rng::with_seed(0));
    for number in 0..u64::from(options.rounds) {
        // Contenders are the volumes and the mirror of the first program, then those of the second, and so on.
        let mut turns: Vec<Option<Turn>> = (0..2 * files.len()).map(|_| None).collect();
        for next in shuffled(turns.len(), &mut rng) {
            // After the last turn the server is killed, because closing a large volume takes longer than all turns.
            let end = if number + 1 == u64::from(options.rounds) { Signal::KILL } else { Signal::TERM };
            turns[next] = Some(files[next / 2].turn(next % 2, (load, options.turn()), 2 * number, end)?);
        }
        rounds.push(turns.into_iter().flatten().collect::<Vec<Turn>>());
    }
    println!("\n{size}, served over NVMe/TCP, {}, {}, QD {depth}", options.guard.name(), load.name);
    for (index, files) in files.iter().enumerate() {
        println!("  {}", files.program.display());
        print(&rounds, 2 * index);
    }
    if let last @ 1.. = files.len() - 1 {
        for (name, of) in [("volumes", VOLUMES), ("mirror", MIRROR)] {
            let part = |round: &Vec<Turn>| round[2 * last + of].rest.rate() / round[of].rest.rate();
            let ratio = Spread::of(rounds.iter().map(part));
            println!("  {name}, the last program against the first: {ratio}{}", verdict(ratio.median, Some(OLD_BAR)));
        }
    }
    Ok(())
}

fn print(rounds: &[Vec<Turn>], at: usize) {
    let rate = |of: usize, part: fn(&Turn) -> &Sample| {
        Spread::of(rounds.iter().map(|round| part(&round[at + of]).rate())).median
    };
    for (name, part) in [("first second", (|turn| &turn.first) as fn(&Turn) -> &Sample), ("rest", |turn| &turn.rest)] {
        let ratio = Spread::of(rounds.iter().map(|round| {
            let [volumes, mirror] = [VOLUMES, MIRROR].map(|of| part(&round[at + of]).rate());
            mirror / volumes
        }));
        println!(
            "    {name:13} each of two volumes {:>8} /s, mirror {:>8} /s   {ratio}{}",
            number(rate(VOLUMES, part)),
            number(rate(MIRROR, part)),
            verdict(ratio.median, Some(RATE_BAR)),
        );
    }
    let bytes = |of: usize| Spread::of(rounds.iter().map(|round| round[at + of].bytes_a_write)).median;
    let (volume, replica) = (bytes(VOLUMES), bytes(MIRROR));
    if volume > 0.0 {
        let more = (replica / volume - 1.0) * 100.0;
        println!("    bytes a write: volume {volume:.0}, replica {replica:.0}, {more:+.1} %");
    }
}

impl Files {
    fn new(options: &MirrorSizeOptions, index: usize, program: &Path, size: ByteCount) -> Result<Files> {
        let path = |name: &str| new_path(&options.dir, &format!("served {index} {name}"));
        let paths = ["a", "b", "replica a", "replica b"].map(path).into_iter().collect::<Result<Vec<_>>>()?;
        let dir = fs::canonicalize(&options.dir).context("finding the folder")?;
        let names: Vec<String> = paths
            .iter()
            .map(|path| dir.join(path.0.file_name().unwrap_or_default()).to_string_lossy().into_owned())
            .collect();
        let (size, guard) = (size.get().to_string(), options.guard.name());
        for name in &names {
            command(program, &["create", name, "--size", &size, "--guard", guard])?;
        }
        command(program, &["mirror", "create", &names[2], &names[3]])?;
        let mirror = format!("mirror:{},{}", names[2], names[3]);
        let configurations = [path("volumes.toml")?, path("mirror.toml")?];
        for (configuration, targets) in configurations.iter().zip([&names[..2], &[mirror]]) {
            let mut text = format!("cores = 1\n[[subsystems]]\nnqn = \"{}\"\n", remote::NQN);
            for target in targets {
                text += &format!("[[subsystems.namespaces]]\ntarget = {target:?}\n");
            }
            fs::write(&configuration.0, text).context("writing a configuration")?;
        }
        Ok(Files { program: program.to_owned(), paths, configurations })
    }

    /// Serves a contender, writes to it, and ends the server by this signal.
    fn turn(&self, contender: usize, (load, time): (Load, Duration), seed: u64, end: Signal) -> Result<Turn> {
        debug_assert_eq!(self.paths.len(), 4, "they are there as long as this");
        let configuration = self.configurations[contender].0.to_str().context("the folder's name is no text")?;
        let mut server = Server::start(&self.program, &["--config", configuration])?;
        let reactor = Reactor::new(Config { spin_us: SPIN_US, ..Config::default() })?;
        let turn = reactor.block_on(drive_served(&server, contender, load, time, seed))?;
        server.kill(end)?;
        Ok(turn)
    }
}

async fn drive_served(server: &Server, contender: usize, load: Load, time: Duration, seed: u64) -> Result<Turn> {
    let (address, namespaces) = (server.nvme()?, if contender == MIRROR { 1 } else { 2 });
    let mut devices = Vec::new();
    for nsid in 1..=namespaces {
        devices.push(Rc::new(Gate::new("served", connect(address, remote::NQN, Some(nsid), false).await?)));
    }
    let (first, _) = drive_all(&devices, load, FIRST, seed).await?;
    let before = server.written_bytes()?;
    let (rest, requests) = drive_all(&devices, load, time, seed + 1).await?;
    // Each write to the mirror is one to each of two replicas.
    let writes = if contender == MIRROR { 2 * requests } else { requests };
    let bytes_a_write = (server.written_bytes()? - before) as f64 / writes as f64;
    for device in devices {
        device.device().close().await;
    }
    Ok(Turn { first, rest, bytes_a_write })
}

/// Writes to all devices at once. Returns the number of requests of the device with the fewest, and of all devices.
async fn drive_all(
    devices: &[Rc<Gate<NvmeTcpDevice>>],
    load: Load,
    time: Duration,
    seed: u64,
) -> Result<(Sample, u64)> {
    let watch = Stopwatch::start();
    let each = devices.iter().zip(0..).map(|(device, at)| {
        // The two volumes have separate requests.
        drive(Rc::clone(device), load, Until::Passed(time), seed + (at << 32))
    });
    let samples = try_join_all(each).await?;
    let fewest = samples.iter().map(|sample| sample.requests).min().unwrap_or(0);
    let sample = watch.stop(fewest, BlockSize::B4096.bytes() as u64);
    Ok((sample, samples.iter().map(|sample| sample.requests).sum()))
}

fn command(program: &Path, words: &[&str]) -> Result<()> {
    let output = Command::new(program).args(words).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
