//! The claim `write-zeroes`: zeroing by a command of the device, compared with writing zeroes.
//!
//! A whole device is zeroed in several ways: by writes of zeroes, eight of 1 MiB in flight, which is the baseline and
//! has two turns in a round; by `dd`, if it is installed and the device is a file; by Write Zeroes that keeps the
//! space; and by Write Zeroes that may unmap, as `sealblock zero` does. Each turn ends with a flush. All blocks are
//! written before Write Zeroes, outside its turn. For a file, each kind of Write Zeroes has a verdict. If the disk
//! discards during zeroing that may unmap, the time that the kernel counts for it is reported beside the figures.
//!
//! [`beside`] measures how zeroing affects other load, and [`overwrite`] how the state of extents affects overwrites.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::rc::Rc;

use anyhow::{Context, bail, ensure};
use sealblock_block::{Device, Durability, DynDevice, Gate, Request};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::ByteCount;

use super::machine::{Discards, Mount, mount_of};
use super::outcome::{
    Axis, Cell, Claim, Defaults, Drawing, Outcome, Plot, Progress, Published, Scale, Series, Table, ThresholdLine,
};
use super::verdict::{Round, Threshold, Verdict};
use super::{beside, overwrite};
use crate::cpu::two_cpus;
use crate::load::{Sample, Stopwatch, in_pieces, payload, write_all, zeroes};
use crate::remote::{self, NQN, SPIN_US, Served, Store, View};
use crate::report::{Spread, number};
use crate::setup::{self, Prepared, Protection, Turn};

/// The claimed speed-up over writing zeroes, on devices of this machine.
const FASTER: f64 = 10.0;
/// Blocks of one Write Zeroes, and their number in flight, as in `sealblock zero`.
const ZERO_BLOCKS: u64 = 1 << 16;
const ZERO_DEPTH: usize = 4;
const GIB: f64 = (1_u64 << 30) as f64;

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "write-zeroes",
    sentence: "Zeroing by a device command is at least 10 times as fast as writing zeroes, and hardly slows other I/O.",
    published: &[
        Published {
            figure: "1 GiB zeroed in 0.17 s, by dd in 0.5 s; 10 GiB in 1.7 s, by dd in 5.0 s; in the background for less than 0.1 % of the bandwidth",
            source: "cover letter of the patches that brought FALLOC_FL_WRITE_ZEROES to Linux 6.17",
        },
        Published {
            figure: "overwrites with O_DSYNC: 20.1 k IOPS of unwritten extents, 42.9 k with fast commit, 98.8 k of written ones",
            source: "the same cover letter, on ext4",
        },
    ],
    defaults: Defaults { size: ByteCount::new(512 << 20), seconds: 0.4, rounds: 7 },
    makes_files: true,
    measure,
};

/// The ways to zero blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Written,
    Dd,
    KeepingSpace,
    Unmapping,
}

const WAYS: [(Way, &str); 5] = [
    (Way::Written, "written zeroes"),
    (Way::Written, "written zeroes, again"),
    (Way::KeepingSpace, "zero --no-unmap"),
    (Way::Unmapping, "zero"),
    (Way::Dd, "dd oflag=direct"),
];
/// The index in [`WAYS`] of zeroing that may unmap; the claim covers it on all devices of this machine.
const UNMAPPING: usize = 3;
/// The index in [`WAYS`] of zeroing that keeps the space; the claim covers it for files only, because a volume writes
/// such zeroes like other blocks.
const KEEPING_SPACE: usize = 2;

/// Two devices: one that is only written, and one that is zeroed by commands.
struct Pair {
    written: Rc<DynDevice>,
    zeroed: Rc<DynDevice>,
    /// The file of `written`, if the file contains nothing but the device.
    file: Option<PathBuf>,
    /// The mount of the file of `zeroed`, if the file contains nothing but the device.
    mount: Option<Mount>,
    /// Discards of the disk during zeroing that may unmap, and their seconds.
    discards: RefCell<Vec<(Discards, f64)>>,
}

/// A part of the measurement, and its result.
struct Part {
    name: &'static str,
    /// The indices in [`WAYS`] that the claim covers.
    claimed: &'static [usize],
    rounds: Vec<Vec<Sample>>,
    /// Discards of the disk during zeroing that may unmap, and their seconds.
    discards: Vec<(Discards, f64)>,
}

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    ensure!(
        setup::has_direct_io(&scale.dir)?,
        "{} has no direct I/O, and the page cache is no medium: name a folder on a disk by --dir",
        scale.dir.display()
    );
    let mut outcome = Outcome::default();
    let mount = mount_of(&scale.dir);
    let place = mount.as_ref().map_or("a file system that is unknown".to_owned(), Mount::to_string);
    outcome.notes.push(format!("Files are on {place}."));
    let has_dd = Command::new("dd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !has_dd {
        outcome.notes.push("dd is not installed; written zeroes are plain writes of our own.".to_owned());
    }
    let local = |raw| Reactor::new(Config::default())?.block_on(local(scale, progress, raw, has_dd, mount.clone()));
    let parts = [local(true)?, local(false)?, remote(scale, progress)?];
    outcome.tables.extend(parts.iter().map(|part| table(part, scale)));
    outcome.verdicts.extend(parts.iter().flat_map(verdicts));
    outcome.notes.extend(parts.iter().filter_map(|part| discards_note(part, mount.as_ref()?)));
    outcome.plots.push(plot(&parts, scale));
    outcome.notes.push(
        "Where blocks of a volume are unmapped, their space goes back to the file system after the flush, in the background; that is in no time above."
            .to_owned(),
    );
    beside::measure(scale, progress, &mut outcome)?;
    overwrite::measure(scale, progress, &mut outcome)?;
    Ok(outcome)
}

async fn local(
    scale: &Scale,
    progress: &Progress,
    is_raw: bool,
    has_dd: bool,
    mount: Option<Mount>,
) -> anyhow::Result<Part> {
    let (dir, blocks) = (scale.dir.as_path(), scale.blocks());
    if is_raw {
        let (written, file) = setup::raw_device(dir, "written", blocks).await?;
        let (zeroed, _file) = setup::raw_device(dir, "zeroed", blocks).await?;
        let file = has_dd.then(|| file.0.clone());
        let pair = Pair { written, zeroed, file, mount, discards: RefCell::default() };
        let rounds = pair.rounds("file", scale, progress).await?;
        return Ok(Part { name: "file", claimed: &[UNMAPPING, KEEPING_SPACE], rounds, discards: pair.discards.take() });
    }
    let (written, _file) = setup::volume_device(dir, "written volume", blocks).await?;
    let (zeroed, _other_file) = setup::volume_device(dir, "zeroed volume", blocks).await?;
    let pair = Pair::new(Rc::new(written.stack()), Rc::new(zeroed.stack()));
    let rounds = pair.rounds("volume in a file", scale, progress).await?;
    drop(pair);
    written.close().await?;
    zeroed.close().await?;
    Ok(Part { name: "volume in a file", claimed: &[UNMAPPING], rounds, discards: Vec::new() })
}

/// Two volumes in files, served from another core.
fn remote(scale: &Scale, progress: &Progress) -> anyhow::Result<Part> {
    let name = "volume over NVMe/TCP";
    let (mut served, mut files) = (Vec::new(), Vec::new());
    for file in ["written remote", "zeroed remote"] {
        let filled = setup::filled_volume(&scale.dir, file, scale.blocks(), Protection::CRC32C, Prepared::Reserved);
        let (file, _) = Reactor::new(Config::default())?.block_on(filled)?;
        let store = Store::Volume(file.0.clone(), Turn::endless());
        served.push(Served { store, protection: Protection::CRC32C, blocks: scale.blocks() });
        files.push(file);
    }
    let (host_cpu, target_cpu) = two_cpus();
    let (_target, serving) = remote::start_on(target_cpu, SPIN_US, &served)?;
    let (_cores, host) = remote::core(host_cpu, SPIN_US)?;
    let (scale, progress) = (scale.clone(), progress.clone());
    let rounds = remote::wait(host.call(move || async move {
        let connect = async |index| {
            let nsid = remote::nsid(index, View::Plain);
            let device = remote::connect(serving.address, NQN, Some(nsid), false).await?;
            anyhow::Ok((Rc::new(DynDevice::from(Gate::new("remote", device.clone()))), device))
        };
        let ((written, one), (zeroed, other)) = (connect(0).await?, connect(1).await?);
        let rounds = Pair::new(written, zeroed).rounds(name, &scale, &progress).await;
        one.close().await;
        other.close().await;
        rounds
    }))?;
    Ok(Part { name, claimed: &[], rounds: rounds.context("the host's core is gone")??, discards: Vec::new() })
}

impl Pair {
    /// Devices other than single files.
    fn new(written: Rc<DynDevice>, zeroed: Rc<DynDevice>) -> Pair {
        Pair { written, zeroed, file: None, mount: None, discards: RefCell::default() }
    }

    async fn rounds(&self, name: &str, scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Vec<Sample>>> {
        let ways = if self.file.is_some() { WAYS.len() } else { WAYS.len() - 1 };
        let (data, zeroes) = (payload(), zeroes());
        progress
            .rounds(name, scale.rounds, ways, async |way, round| match WAYS[way].0 {
                Way::Written => self.write(&zeroes).await,
                Way::KeepingSpace => self.zero(false, &data).await,
                Way::Unmapping => self.zero(true, &data).await,
                Way::Dd => match self.dd() {
                    Ok(turn) => Ok(turn),
                    // A signal to a terminal's process group also ends the other process.
                    Err(error) => progress.step(name, round, scale.rounds).map_err(Into::into).and(Err(error)),
                },
            })
            .await
    }

    async fn write(&self, zeroes: &Slice) -> anyhow::Result<Sample> {
        let geometry = self.written.geometry();
        let watch = Stopwatch::start();
        write_all(&self.written, 0, geometry.capacity_blocks, zeroes).await?;
        Ok(watch.stop(1, geometry.capacity_bytes()))
    }

    async fn zero(&self, may_unmap: bool, data: &Slice) -> anyhow::Result<Sample> {
        let geometry = self.zeroed.geometry();
        write_all(&self.zeroed, 0, geometry.capacity_blocks, data).await?;
        let discards = || self.mount.as_ref().filter(|_| may_unmap)?.discards_so_far();
        let before = discards();
        let watch = Stopwatch::start();
        in_pieces(geometry.capacity_blocks, ZERO_BLOCKS, ZERO_DEPTH, async |extent| {
            self.zeroed.execute(Request::write_zeroes(extent, may_unmap, Durability::Volatile)).await?;
            Ok(())
        })
        .await?;
        self.zeroed.execute(Request::flush()).await?;
        let turn = watch.stop(1, geometry.capacity_bytes());
        if let (Some(before), Some(after)) = (before, discards()) {
            self.discards.borrow_mut().push((after.since(before), turn.seconds));
        }
        Ok(turn)
    }

    /// CPU time of another process is not measured here, so it stays empty.
    fn dd(&self) -> anyhow::Result<Sample> {
        let bytes = self.written.geometry().capacity_bytes();
        let path = self.file.as_ref().context("dd takes a file")?;
        let mut command = Command::new("dd");
        command.args(["if=/dev/zero", "bs=1M", "oflag=direct", "conv=notrunc,fsync"]);
        command.arg(format!("count={}", bytes >> 20)).arg(format!("of={}", path.display()));
        let watch = Stopwatch::start();
        let output = command.stdin(Stdio::null()).output().context("starting dd")?;
        if !output.status.success() {
            bail!("dd ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Sample { cpu_seconds: f64::NAN, ..watch.stop(1, bytes) })
    }
}

impl Part {
    fn spread(&self, way: usize, of: impl Fn(&[Sample]) -> f64) -> Spread {
        Spread::of(self.rounds.iter().filter(|round| round.len() > way).map(|round| of(round)))
    }
}

fn table(part: &Part, scale: &Scale) -> Table {
    let title = format!("Zeroing all of a device of {}: {}", scale.size, part.name);
    let columns =
        [("time of a GiB", "ms"), ("speed", "GB/s"), ("CPU of a GiB", "ms"), ("times as fast as written zeroes", "")];
    let mut table = Table::new(title, "way", &columns);
    for (way, (_, name)) in WAYS.iter().enumerate().take(part.rounds.first().map_or(0, Vec::len)) {
        let of_a_gib = |turn: &Sample, seconds: f64| seconds * 1e3 * GIB / turn.bytes as f64;
        let cpu = part.spread(way, |round| of_a_gib(&round[way], round[way].cpu_seconds));
        let cells = vec![
            Cell::measured(part.spread(way, |round| of_a_gib(&round[way], round[way].seconds))),
            Cell::measured(part.spread(way, |round| round[way].bytes as f64 / round[way].seconds / 1e9)),
            if cpu.median.is_nan() { Cell::words("another process") } else { Cell::measured(cpu) },
            match way {
                0 => Cell::words("baseline"),
                _ => Cell::measured(part.spread(way, |round| round[0].seconds / round[way].seconds)),
            },
        ];
        table.push(*name, cells);
    }
    table
}

/// One verdict for each claimed way of zeroing.
fn verdicts(part: &Part) -> impl Iterator<Item = Verdict> {
    part.claimed.iter().map(move |&way| {
        let speed = |turn: &Sample| 1.0 / turn.seconds;
        let ratios = part.rounds.iter().map(|round| Round::of(speed(&round[0]), speed(&round[1]), speed(&round[way])));
        let what = format!("{}: {}, times as fast as written zeroes", part.name, WAYS[way].1);
        Verdict::timed(what, Threshold::AtLeast(FASTER), &ratios.collect::<Vec<_>>())
    })
}

/// The disk's discards during zeroing that may unmap, if there were any.
fn discards_note(part: &Part, mount: &Mount) -> Option<String> {
    if part.discards.iter().all(|(discards, _)| discards.requests == 0) {
        return None;
    }
    let of = |what: &dyn Fn(&(Discards, f64)) -> f64| {
        let Spread { median, least, most } = Spread::of(part.discards.iter().map(what));
        let [median, least, most] = [median, least, most].map(number);
        format!("{median} [{least} .. {most}]")
    };
    let share = of(&|(discards, seconds)| discards.milliseconds as f64 / (seconds * 10.0));
    let requests = of(&|(discards, _)| discards.requests as f64);
    Some(format!(
        "{}: in the time of {} the disk carried out {requests} discards, which took {share} % of it, by {}, where the kernel counts those of all who use \
         the disk. Zeroing that keeps the space asks for none.",
        part.name,
        WAYS[UNMAPPING].1,
        mount.statistics(),
    ))
}

fn plot(parts: &[Part], scale: &Scale) -> Plot {
    let of =
        |part: &Part, way: usize| part.spread(way, |round| round[way].seconds * 1e3 * GIB / round[way].bytes as f64);
    let series = [0, 4, 2, 3].map(|way| Series::measured(WAYS[way].1, parts.iter().map(|part| of(part, way))));
    Plot {
        name: "write-zeroes-time".to_owned(),
        title: format!("Time to zero 1 GiB of a device of {}", scale.size),
        x: Axis::linear("what is zeroed", ""),
        y: Axis::logarithmic("time", "ms"),
        drawing: Drawing::Bars {
            groups: parts.iter().map(|part| part.name.to_owned()).collect(),
            series: series.into(),
            threshold: Some(ThresholdLine {
                name: format!("claim: {FASTER} times as fast as {}", WAYS[0].1),
                values: parts.iter().map(|part| Some(of(part, 0).median / FASTER)).collect(),
            }),
        },
    }
}
