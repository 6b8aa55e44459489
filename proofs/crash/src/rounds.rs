//! The process that kills: starts a worker, ends it at a drawn moment, and looks at what it left.
//!
//! Rounds take turns over volumes of different shape and over both runtimes, and each volume goes from crash to crash without ever
//! being closed. What a round finds is exactly what the next one starts from: opening a volume must not change a block.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use sealblock::cli::Cli;
use sealblock::exit::Exit;
use sealblock::stack::{Access, data_of, on_reactor, open};
use sealblock::target::TargetName;
use sealblock_block::Device;
use sealblock_media_volume::Mutation;
use sealblock_units::Lba;

use crate::draw::Draw;
use crate::history::History;
use crate::pattern::{Content, recognise};
use crate::report::Event;

/// The volumes that rounds take turns over.
const SHAPES: [&str; 4] = [
    "--guard crc16 --block-size 512",
    "--guard crc64 --block-size 4096",
    "--guard crc16 --block-size 4096",
    "--guard crc64 --block-size 512",
];
const VOLUME_BYTES: u64 = 1 << 20;
/// Longest life of a worker after its volume is open, and of one that is killed while it opens it.
const LIFE_US: u64 = 40_000;
const OPENING_US: u64 = 20_000;
/// Once in so many rounds the worker is not waited for until its volume is open.
const EARLY_ONCE_IN: u64 = 6;

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program that is started as `PROGRAM worker VOLUME SEED ROUND MUTATION`, and runs [`crate::worker::run`].
    pub program: PathBuf,
    /// Where the volumes are made.
    pub folder: PathBuf,
    /// How often a worker is killed.
    pub rounds: u64,
    /// What everything is drawn from.
    pub seed: u64,
    /// A fault put into the volume's work on purpose, to see that it is noticed.
    pub mutation: Mutation,
}

/// What was seen, to show that there was something to see.
#[derive(Clone, Copy, Default, Debug)]
pub struct Seen {
    /// Changes that workers began.
    pub changes: usize,
    /// Of them, those that had to be there afterwards, or something newer.
    pub settled: usize,
    /// Workers that were killed before they had opened their volume.
    pub early: u64,
    /// Blocks that were read and judged.
    pub blocks: u64,
}

/// A volume and what it held when it was last looked at.
struct Subject {
    path: PathBuf,
    content: Vec<Content>,
}

/// The faults and their names on the command line.
const MUTATIONS: [(&str, Mutation); 5] = [
    ("none", Mutation::None),
    ("skip-sync", Mutation::SkipSync),
    ("late-tags", Mutation::LateTags),
    ("reuse-early", Mutation::ReuseEarly),
    ("trust-log", Mutation::TrustLog),
];

/// The fault of this name.
///
/// # Errors
/// When there is none.
pub fn mutation(name: &str) -> Result<Mutation> {
    let known = MUTATIONS.iter().find(|known| known.0 == name);
    known.map(|known| known.1).with_context(|| format!("'{name}' is no mutation"))
}

fn name_of(mutation: Mutation) -> &'static str {
    MUTATIONS.iter().find(|known| known.1 == mutation).map_or("none", |known| known.0)
}

/// Carries the plan out.
///
/// # Errors
/// The first round after which anything was not as it must be.
pub fn run(plan: &Plan) -> Result<Seen> {
    let mut subjects = SHAPES.iter().enumerate().map(|(i, shape)| make(plan, i, shape)).collect::<Result<Vec<_>>>()?;
    let mut seen = Seen::default();
    for round in 1..=plan.rounds {
        let turn = (round % subjects.len() as u64) as usize;
        one_round(plan, round, &mut subjects[turn], &mut seen)
            .with_context(|| format!("round {round} of seed {} on {}", plan.seed, subjects[turn].path.display()))?;
    }
    Ok(seen)
}

fn make(plan: &Plan, index: usize, shape: &str) -> Result<Subject> {
    let path = plan.folder.join(format!("volume-{index}"));
    sealblock(&format!("create VOLUME --size {VOLUME_BYTES} {shape}"), &path)?;
    let content = contents(&path)?;
    ensure!(content.iter().all(|content| *content == Content::Zeroes), "a new volume holds something");
    Ok(Subject { path, content })
}

/// Runs a command of the command line, in this process.
fn sealblock(arguments: &str, path: &Path) -> Result<Exit> {
    let path = path.to_str().context("the folder's name is text")?;
    let words = arguments.split(' ').map(|word| if word == "VOLUME" { path } else { word });
    let cli = Cli::try_parse_from(std::iter::once("sealblock").chain(words))?;
    sealblock::commands::run(&cli.command).map_err(|failure| anyhow!("{failure}"))
}

fn one_round(plan: &Plan, round: u64, subject: &mut Subject, seen: &mut Seen) -> Result<()> {
    let mut draw = Draw::new(plan.seed, round << 32);
    let history = live_and_die(plan, round, &subject.path, &mut draw, seen)?;
    let content = contents(&subject.path).context("after the kill")?;
    for (index, (before, found)) in subject.content.iter().zip(&content).enumerate() {
        history.judge(Lba::new(index as u64), *before, *found).map_err(|complaint| anyhow!("{complaint}"))?;
    }
    ensure!(sealblock("verify VOLUME --quiet", &subject.path)? == Exit::Clean, "verify found damage");
    let (changes, settled) = history.counts();
    seen.changes += changes;
    seen.settled += settled;
    seen.blocks += content.len() as u64;
    subject.content = content;
    Ok(())
}

/// One worker's life: what it told until it was killed.
fn live_and_die(plan: &Plan, round: u64, path: &Path, draw: &mut Draw, seen: &mut Seen) -> Result<History> {
    let runtime = if draw.once_in(3) { "syscalls" } else { "auto" };
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
    let (ready, listener) = listen(output);
    let early = draw.once_in(EARLY_ONCE_IN);
    if early {
        thread::sleep(Duration::from_micros(draw.below(OPENING_US)));
    } else if ready.recv().is_ok() {
        thread::sleep(Duration::from_micros(draw.below(LIFE_US)));
    }
    let gone = end(&mut worker)?;
    let history = listener.join().map_err(|_| anyhow!("listening to the worker panicked"))?;
    ensure!(!gone, "the worker ended before it was killed; what it said is on standard error");
    seen.early += u64::from(history.now() == 0);
    Ok(history)
}

/// Takes down what the worker tells, so that its pipe never fills; says when its volume is open.
fn listen(output: ChildStdout) -> (Receiver<()>, thread::JoinHandle<History>) {
    let (sender, ready) = channel();
    let listener = thread::spawn(move || {
        let mut history = History::default();
        let mut lines = BufReader::new(output).lines();
        while let Some(Ok(line)) = lines.next() {
            let Some(event) = Event::parse(&line) else { break };
            if event == Event::Ready {
                // Nobody waits for it in an early round.
                let _ = sender.send(());
            }
            history.note(event);
        }
        history
    });
    (ready, listener)
}

/// Kills the worker; tells whether it had ended before.
fn end(worker: &mut Child) -> Result<bool> {
    let gone = worker.try_wait()?.is_some();
    if !gone {
        worker.kill()?;
    }
    worker.wait()?;
    Ok(gone)
}

/// What every block holds, read and checked as any reader would, without changing anything.
fn contents(path: &Path) -> Result<Vec<Content>> {
    let target = TargetName::File(path.to_owned());
    let contents = on_reactor(async {
        let opened = open(&target, Access::Read).await?;
        let geometry = opened.gate.geometry().clone();
        let mut contents = Vec::new();
        for extent in geometry.whole(geometry.limits.max_transfer_blocks) {
            let read = opened.read(extent).await;
            let data = match read {
                Ok(answer) => data_of(answer),
                Err(error) => {
                    return opened.close(Err(sealblock::stack::of_block(format!("reading {extent}"), &error))).await;
                }
            };
            contents
                .extend(data.chunks(geometry.block_size.bytes()).zip(extent.iter()).map(|(b, lba)| recognise(b, lba)));
        }
        opened.close(Ok(contents)).await
    });
    let contents = contents.map_err(|failure| anyhow!("{failure}"))?;
    if let Some(lba) = contents.iter().position(|content| *content == Content::Foreign) {
        bail!("block {lba} holds parts of several writes under a seal that fits");
    }
    Ok(contents)
}
