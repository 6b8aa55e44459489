//! A Btrfs filesystem changed by the engine in this process, and through FUSE, compared with the kernel's mount of the
//! same loop device.
//!
//! Thresholds: random writes of 4 KiB through the library are at least as fast as the kernel's, and writes with
//! fdatasync to blocks that are already written in a NODATACOW file are at least 4.9 times as fast as those to blocks
//! that are only allocated.
//!
//! Each turn begins with a new filesystem, made by `mkfs.btrfs` with the same options for every contender, and with
//! files that were written and are durable. Its rate counts what is durable: after requests that do not wait for it,
//! the time of a commit (`syncfs`) is a part of the turn. The contenders take turns in a new order each round. The
//! device is a loop device with direct I/O on an image in `--dir`. Needs root, loop devices, `btrfs-progs` and `fio`.

mod library;
mod loads;
mod mounted;
pub mod sums;

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use fastrand::Rng;

use self::library::Setting;
use self::loads::{LOADS, Load, UNWRITTEN, WRITTEN, Work};
use super::options::BtrfsWriteOptions;
use super::rounds::verdict;
use crate::meter::Turn;
use crate::mounts::Server;
use crate::programs::{Loop, turn as run_command, words};
use crate::report::{Spread, number, shuffled};
use crate::setup::Scratch;

/// The least ratio of writes in place to those to allocated blocks, both with fdatasync.
const WRITTEN_TO_UNWRITTEN: f64 = 4.9;

/// Whoever has a turn.
#[derive(Clone, Copy)]
enum Contender<'a> {
    Mounted(Server<'a>),
    Library,
}

impl Contender<'_> {
    fn name(&self) -> &'static str {
        match self {
            Contender::Mounted(Server::Kernel) => "kernel",
            Contender::Mounted(Server::Fuse(_)) => "FUSE",
            Contender::Library => "library",
        }
    }
}

/// Turns of one load: for each round those of all contenders, the kernel first.
type Rounds = Vec<Vec<Turn>>;

/// Measures all and prints it.
pub fn run(options: &BtrfsWriteOptions) -> anyhow::Result<()> {
    let Some((device, _image)) = device(options)? else { return Ok(()) };
    let point = options.dir.join("sealblock-perf-btrfs-write-mount");
    fs::create_dir_all(&point).with_context(|| format!("making {}", point.display()))?;
    let measured = compare(options, &device.0, &point);
    // If it is still mounted, the folder is left for the user to remove.
    let _ = fs::remove_dir(&point);
    measured
}

/// A loop device on a new image.
fn device(options: &BtrfsWriteOptions) -> anyhow::Result<Option<(Loop, Scratch)>> {
    let image = Scratch(options.dir.join("sealblock-perf-btrfs-write"));
    File::create(&image.0)?.set_len(options.image.get())?;
    let device = Loop::new(&image.0);
    if device.is_none() {
        println!("btrfs-write: skipped: losetup makes no loop device here");
    }
    Ok(device.map(|device| (device, image)))
}

/// A new filesystem.
fn make(device: &str, options: &[&str]) -> anyhow::Result<()> {
    run_command(&words("mkfs.btrfs", &[&["-q", "-f"], options, &[device]].concat())).map(drop)
}

fn compare(options: &BtrfsWriteOptions, device: &str, point: &Path) -> anyhow::Result<()> {
    let mut contenders = vec![Contender::Mounted(Server::Kernel), Contender::Library];
    contenders.extend(options.fuse.as_deref().map(|program| Contender::Mounted(Server::Fuse(program))));
    println!(
        "image of {} in {}, files of {}, {} s a turn, {} rounds",
        options.image,
        options.dir.display(),
        options.size,
        options.seconds,
        options.rounds
    );
    let loads: Vec<&Load> = LOADS.iter().filter(|load| load.name.contains(&options.only)).collect();
    let mut measured: Vec<Vec<Rounds>> = vec![Vec::new(); loads.len()];
    let mut rng = Rng::with_seed(1);
    for round in 0..options.rounds {
        for (load, rounds) in loads.iter().zip(&mut measured) {
            let mut turns: Vec<Vec<Turn>> = vec![Vec::new(); contenders.len()];
            for index in shuffled(contenders.len(), &mut rng) {
                make(device, &["--csum", &options.csum])?;
                let setting = Setting {
                    device,
                    bytes: options.size.get(),
                    time: Duration::from_secs_f64(options.seconds),
                    names: options.files,
                    seed: u64::from(round),
                };
                turns[index] = match contenders[index] {
                    Contender::Mounted(server) => mounted::turn(server, &setting, point, &load.work)?,
                    Contender::Library => library::turn(&setting, &load.work)?,
                };
            }
            add(rounds, turns);
        }
    }
    for (load, rounds) in loads.iter().zip(&measured) {
        let names = if matches!(load.work, Work::Names) { &["creates", "stats", "deletes"][..] } else { &[load.name] };
        for (name, rounds) in names.iter().zip(rounds) {
            print(name, &contenders, rounds, load.threshold);
        }
    }
    let of = |name| loads.iter().position(|load| load.name == name).and_then(|index| measured[index].first());
    if let (Some(written), Some(unwritten)) = (of(WRITTEN), of(UNWRITTEN)) {
        print_ratio(&contenders, written, unwritten);
    }
    Ok(())
}

/// Adds a round: the parts of a turn are measured apart from each other.
fn add(rounds: &mut Vec<Rounds>, turns: Vec<Vec<Turn>>) {
    let parts = turns.iter().map(Vec::len).min().unwrap_or(0);
    rounds.resize_with(parts, Vec::new);
    for (part, rounds) in rounds.iter_mut().enumerate() {
        rounds.push(turns.iter().map(|turns| turns[part]).collect());
    }
}

fn spread(rounds: &Rounds, value: impl Fn(&[Turn]) -> f64) -> Spread {
    Spread::of(rounds.iter().map(|round| value(round)))
}

fn print(what: &str, contenders: &[Contender<'_>], rounds: &Rounds, threshold: Option<f64>) {
    println!("{what}");
    for (index, contender) in contenders.iter().enumerate() {
        let rate = spread(rounds, |round| round[index].rate());
        let per_request = |value: fn(&Turn) -> f64| {
            spread(rounds, |round| value(&round[index]) / round[index].requests as f64).median
        };
        let cpu = per_request(|turn| turn.cpu_seconds * 1e6);
        let written = per_request(|turn| turn.device.written_bytes as f64);
        let (writes, flushes) =
            (per_request(|turn| turn.device.writes as f64), per_request(|turn| turn.device.flushes as f64));
        print!(
            "  {:8} {:>9} /s [{} .. {}] {:>7} us CPU; at the device {} bytes in {} writes, {} flushes",
            contender.name(),
            number(rate.median),
            number(rate.least),
            number(rate.most),
            number(cpu),
            number(written),
            number(writes),
            number(flushes)
        );
        let ratio = spread(rounds, |round| round[index].rate() / round[0].rate());
        match contender {
            Contender::Mounted(Server::Kernel) => println!("   (baseline)"),
            Contender::Library => println!("   {ratio}{}", verdict(ratio.median, threshold)),
            Contender::Mounted(Server::Fuse(_)) => println!("   {ratio}"),
        }
    }
}

/// Writes in place against those to blocks that are only allocated.
fn print_ratio(contenders: &[Contender<'_>], written: &Rounds, unwritten: &Rounds) {
    println!("4 KiB random write and fdatasync, NODATACOW, written to not written");
    for (index, contender) in contenders.iter().enumerate() {
        let ratios = written.iter().zip(unwritten).map(|(one, other)| one[index].rate() / other[index].rate());
        let ratio = Spread::of(ratios);
        let is_ours = !matches!(contender, Contender::Mounted(Server::Kernel));
        let threshold = is_ours.then_some(WRITTEN_TO_UNWRITTEN);
        println!("  {:8} {ratio}{}", contender.name(), verdict(ratio.median, threshold));
    }
}
