//! The process that kills: starts a worker, kills it at a random moment, and checks every block.
//!
//! Rounds alternate between volumes of different formats and between both runtimes. Each volume crashes again and
//! again, and is never closed. The content that one round finds is the starting point of the next one, because opening
//! a volume must not change a block.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use fastrand::Rng;
use sealblock::cli::Cli;
use sealblock::exit::Exit;
use sealblock_block::Device;
use sealblock_media_volume::Mutation;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, data_of, on_reactor, open};
use sealblock_units::Lba;

use crate::history::History;
use crate::pattern::{Content, recognise, rng};
use crate::report::Event;

/// The volumes that rounds alternate between; the small ones have no room for notes and make changes durable before
/// they complete.
const VOLUME_OPTIONS: [&str; 4] = [
    "--size 4MiB --guard crc16 --block-size 512",
    "--size 4MiB --guard crc64 --block-size 4096",
    "--size 1MiB --guard crc16 --block-size 4096",
    "--size 4MiB --guard crc64 --block-size 512",
];
/// The maximum time that a worker lives after its volume is open, or, if it is killed while it opens the volume, after
/// its start.
const LIFE_US: u64 = 40_000;
const OPENING_US: u64 = 20_000;
/// One in this many workers is killed without waiting until its volume is open.
const EARLY_ONCE_IN: u64 = 6;

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program that is started as `PROGRAM worker VOLUME SEED ROUND MUTATION`, and runs [`crate::worker::run`].
    pub program: PathBuf,
    /// The folder of the volumes.
    pub folder: PathBuf,
    /// The number of kills.
    pub rounds: u64,
    /// The seed of every draw.
    pub seed: u64,
    /// A defect injected into the volume, to show that the proof detects it.
    pub mutation: Mutation,
}

/// Totals of a run, which show that it did test something.
#[derive(Clone, Copy, Default, Debug)]
pub struct Totals {
    /// Changes that workers started.
    pub changes: usize,
    /// How many of them were durable.
    pub durable: usize,
    /// Workers killed before they had opened their volume.
    pub early: u64,
    /// Blocks that were checked.
    pub blocks: u64,
}

/// A volume and its content when it was last checked.
struct TestVolume {
    path: PathBuf,
    content: Vec<Content>,
}

/// The mutations and their names on the command line.
const MUTATIONS: [(&str, Mutation); 6] = [
    ("none", Mutation::None),
    ("skip-sync", Mutation::SkipSync),
    ("late-tags", Mutation::LateTags),
    ("note-late", Mutation::NoteLate),
    ("reuse-early", Mutation::ReuseEarly),
    ("trust-log", Mutation::TrustLog),
];

/// Returns the mutation of this name.
///
/// # Errors
/// If there is none.
pub fn mutation(name: &str) -> Result<Mutation> {
    let known = MUTATIONS.iter().find(|known| known.0 == name);
    known.map(|known| known.1).with_context(|| format!("'{name}' is no mutation"))
}

fn name_of(mutation: Mutation) -> &'static str {
    MUTATIONS.iter().find(|known| known.1 == mutation).map_or("none", |known| known.0)
}

/// Runs all rounds.
///
/// # Errors
/// If the check of a round fails; the first such round.
pub fn run(plan: &Plan) -> Result<Totals> {
    let mut volumes =
        VOLUME_OPTIONS.iter().enumerate().map(|(i, options)| make(plan, i, options)).collect::<Result<Vec<_>>>()?;
    let mut totals = Totals::default();
    for round in 1..=plan.rounds {
        let turn = (round % volumes.len() as u64) as usize;
        one_round(plan, round, &mut volumes[turn], &mut totals)
            .with_context(|| format!("round {round} of seed {} on {}", plan.seed, volumes[turn].path.display()))?;
    }
    Ok(totals)
}

fn make(plan: &Plan, index: usize, options: &str) -> Result<TestVolume> {
    let path = plan.folder.join(format!("volume-{index}"));
    run_command(&format!("create VOLUME {options}"), &path)?;
    let content = contents(&path)?;
    ensure!(content.iter().all(|content| *content == Content::Zeroes), "a new volume holds something");
    Ok(TestVolume { path, content })
}

/// Runs a `sealblock` command in this process.
fn run_command(arguments: &str, path: &Path) -> Result<Exit> {
    let path = path.to_str().context("the folder's name is text")?;
    let words = arguments.split(' ').map(|word| if word == "VOLUME" { path } else { word });
    let cli = Cli::try_parse_from(std::iter::once("sealblock").chain(words))?;
    sealblock::commands::run(&cli.command).map_err(|failure| anyhow!("{failure}"))
}

fn one_round(plan: &Plan, round: u64, volume: &mut TestVolume, totals: &mut Totals) -> Result<()> {
    let mut rng = rng(plan.seed, round << 32);
    let history = run_worker(plan, round, &volume.path, &mut rng, totals)?;
    let content = contents(&volume.path).context("after the kill")?;
    for (index, (before, found)) in volume.content.iter().zip(&content).enumerate() {
        history.check(Lba::new(index as u64), *before, *found).map_err(|report| anyhow!("{report}"))?;
    }
    ensure!(run_command("verify VOLUME --quiet", &volume.path)? == Exit::Clean, "verify found damage");
    let (changes, durable) = history.counts();
    totals.changes += changes;
    totals.durable += durable;
    totals.blocks += content.len() as u64;
    volume.content = content;
    Ok(())
}

/// Runs a worker and kills it; returns what it reported.
fn run_worker(plan: &Plan, round: u64, path: &Path, rng: &mut Rng, totals: &mut Totals) -> Result<History> {
    let runtime = if rng.u64(..3) == 0 { "syscalls" } else { "auto" };
    let mut worker = Command::new(&plan.program)
        .arg("worker")
        .arg(path)
        .args([plan.seed.to_string(), round.to_string(), name_of(plan.mutation).to_owned()])
        .env("SEALBLOCK_RUNTIME", runtime)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", plan.program.display()))?;
    let output = worker.stdout.take().context("the worker has standard output")?;
    let (ready, reader) = read_events(output);
    let is_early = rng.u64(..EARLY_ONCE_IN) == 0;
    if is_early {
        thread::sleep(Duration::from_micros(rng.u64(..OPENING_US)));
    } else if ready.recv().is_ok() {
        thread::sleep(Duration::from_micros(rng.u64(..LIFE_US)));
    }
    let has_ended = kill_worker(&mut worker)?;
    let history = reader.join().map_err(|_| anyhow!("the reader of the worker's report panicked"))?;
    ensure!(!has_ended, "the worker ended before it was killed; see its standard error");
    totals.early += u64::from(history.now() == 0);
    Ok(history)
}

/// Reads the worker's report continuously, so that the pipe never fills; the receiver gets a message when the volume is
/// open.
fn read_events(output: ChildStdout) -> (Receiver<()>, thread::JoinHandle<History>) {
    let (sender, ready) = channel();
    let reader = thread::spawn(move || {
        let mut history = History::default();
        let mut lines = BufReader::new(output).lines();
        while let Some(Ok(line)) = lines.next() {
            let Some(event) = Event::parse(&line) else { break };
            if event == Event::Ready {
                // In an early round nobody uses the receiver.
                let _ = sender.send(());
            }
            history.record(event);
        }
        history
    });
    (ready, reader)
}

/// Kills the worker; returns true if it had already ended.
fn kill_worker(worker: &mut Child) -> Result<bool> {
    let has_ended = worker.try_wait()?.is_some();
    if !has_ended {
        worker.kill()?;
    }
    worker.wait()?;
    Ok(has_ended)
}

/// Reads and verifies every block, without changing any.
fn contents(path: &Path) -> Result<Vec<Content>> {
    let target = TargetName::File(path.to_owned());
    let contents = on_reactor(async {
        let open_volume = open(&target, Access::Read).await?;
        let geometry = open_volume.device.geometry().clone();
        let mut contents = Vec::new();
        for extent in geometry.whole(geometry.limits.max_transfer_blocks) {
            let read = open_volume.read(extent).await;
            let data = match read {
                Ok(response) => data_of(response),
                Err(error) => {
                    return open_volume
                        .close(Err(sealblock_stack::device_error(format!("reading {extent}"), &error)))
                        .await;
                }
            };
            contents
                .extend(data.chunks(geometry.block_size.bytes()).zip(extent.iter()).map(|(b, lba)| recognise(b, lba)));
        }
        open_volume.close(Ok(contents)).await
    });
    let contents = contents.map_err(|failure| anyhow!("{failure}"))?;
    if let Some(lba) = contents.iter().position(|content| *content == Content::Foreign) {
        bail!("block {lba} holds parts of several writes under a seal that fits");
    }
    Ok(contents)
}
