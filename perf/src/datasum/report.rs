//! The result: figures of every mode, with their spread over the rounds, and ratios within rounds.

use std::collections::BTreeMap;

use sealblock_btrfs_format::items::chunk::Profile;
use serde::Serialize;

use super::counting::{Transferred, tree_name};
use super::modes::{BLOCK_BYTES, Batch, Mode, Options, Point};
use crate::bench::machine::Machine;
use crate::meter::Turn;
use crate::report::Spread;

/// The version of the JSON format. While it stays the same, fields are only added.
pub const VERSION: u32 = 1;

/// A figure over the rounds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Figure {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub most: f64,
}

impl Figure {
    fn of(values: impl Iterator<Item = f64>) -> Figure {
        let Spread { median, least, most } = Spread::of(values);
        Figure { median, least, most }
    }
}

/// What a mode did in one turn.
#[derive(Clone, PartialEq, Debug)]
pub struct TurnResult {
    /// Requests completed.
    pub requests: u64,
    /// Until all were durable.
    pub seconds: f64,
    /// CPU time of all that works for it.
    pub cpu_seconds: f64,
    /// Bytes written at the device.
    pub written_bytes: u64,
    /// Bytes read there.
    pub read_bytes: u64,
    /// What the bytes were, where that is known.
    pub parts: Option<Transferred>,
    /// Commits, where they are counted: more than were asked for if memory was short.
    pub commits: Option<u64>,
}

impl TurnResult {
    /// A turn on a loop device.
    pub fn of_loop(turn: &Turn) -> TurnResult {
        let Turn { requests, seconds, cpu_seconds, device } = *turn;
        let (written_bytes, read_bytes) = (device.written_bytes, device.read_bytes);
        TurnResult { requests, seconds, cpu_seconds, written_bytes, read_bytes, parts: None, commits: None }
    }

    /// A turn whose bytes were counted here.
    pub fn counted(turn: &Turn, parts: Transferred, commits: u64) -> TurnResult {
        let Turn { requests, seconds, cpu_seconds, .. } = *turn;
        let written_bytes = parts.data + parts.superblocks + parts.nodes() + parts.tags;
        let read_bytes = parts.read;
        let (parts, commits) = (Some(parts), Some(commits));
        TurnResult { requests, seconds, cpu_seconds, written_bytes, read_bytes, parts, commits }
    }

    fn iops(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    fn cpu_us(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.requests as f64
    }

    /// For each byte that the user wrote.
    fn per_byte(&self, bytes: u64) -> f64 {
        bytes as f64 / (self.requests * BLOCK_BYTES) as f64
    }

    fn amplification(&self) -> f64 {
        self.per_byte(self.written_bytes)
    }
}

/// A run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The version of this format.
    pub version: u32,
    /// The machine.
    pub machine: Machine,
    /// The start, in seconds since 1970.
    pub started_unix_s: u64,
    /// The duration, in seconds.
    pub elapsed_s: f64,
    /// True if a signal ended it: what was not measured in any round is left out.
    pub interrupted: bool,
    /// The folder of the devices; `None` for devices in memory.
    pub dir: Option<String>,
    /// True if requests were collected until the commit.
    pub buffered: bool,
    /// Requests in flight.
    pub queue_depth: u64,
    /// Commits asked for in a turn.
    pub commits: u32,
    /// Bytes of changed nodes after which a commit comes by itself.
    pub dirty_memory_bytes: u64,
    /// The filesystems and loads.
    pub points: Vec<PointReport>,
}

/// A filesystem, a load, and all modes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PointReport {
    /// Bytes of the file.
    pub size_bytes: u64,
    /// Copies of a node.
    pub metadata_copies: u32,
    /// Requests between two commits; `None` for a time.
    pub commit_writes: Option<u64>,
    /// Seconds between two commits; `None` for a number of requests.
    pub commit_interval_s: Option<f64>,
    /// Rounds that were measured.
    pub rounds: usize,
    /// Bytes written for each byte by the model, of direct requests.
    pub model_amplification: Option<f64>,
    /// The modes.
    pub modes: Vec<ModeReport>,
}

/// A mode.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ModeReport {
    /// Its name.
    pub mode: &'static str,
    /// What it is.
    pub description: &'static str,
    /// Requests of a turn.
    pub requests: Figure,
    /// Requests in a second.
    pub iops: Figure,
    /// Microseconds of CPU time for a request.
    pub cpu_us: Figure,
    /// Bytes written at the device for each byte that was requested.
    pub amplification: Figure,
    /// The parts of this, where they are known.
    pub written: Option<WrittenReport>,
    /// Bytes read at the device for each byte that was requested.
    pub read: Figure,
    /// Commits of a turn, where they are counted.
    pub commits: Option<Figure>,
    /// The mode that the ratios compare with, if it was measured.
    pub baseline: Option<&'static str>,
    /// Ratios to it in the same round.
    pub ratios: Option<Ratios>,
    /// Ratios to the same mode of the kernel in the same round, if it was measured.
    pub kernel_ratios: Option<Ratios>,
}

/// Parts of the bytes written, for each byte that was requested.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct WrittenReport {
    /// Data.
    pub data: Figure,
    /// Nodes of all trees.
    pub metadata: Figure,
    /// Superblocks.
    pub superblocks: Figure,
    /// What the device writes for protection information.
    pub protection: Figure,
    /// Nodes of each tree.
    pub trees: BTreeMap<&'static str, Figure>,
}

/// Ratios within rounds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Ratios {
    /// Of requests in a second.
    pub iops: Figure,
    /// Of CPU time.
    pub cpu: Figure,
    /// Of bytes written.
    pub amplification: Figure,
}

/// The turns of a point: for each round those of all modes.
pub type Rounds = [Vec<TurnResult>];

impl PointReport {
    /// Of at least one round.
    pub fn new(point: &Point, options: &Options, rounds: &Rounds) -> PointReport {
        let interval = if let Batch::Seconds(seconds) = point.batch { Some(seconds) } else { None };
        PointReport {
            size_bytes: point.size.get(),
            metadata_copies: point.copies(),
            commit_writes: point.writes(),
            commit_interval_s: interval,
            rounds: rounds.len(),
            model_amplification: point.model().filter(|_| !options.is_buffered),
            modes: (0..options.modes.len()).map(|index| ModeReport::new(index, &options.modes, rounds)).collect(),
        }
    }

    /// The name of a profile of nodes.
    pub fn metadata_name(&self) -> &'static str {
        sealblock_btrfs::space::profile_name(if self.metadata_copies == 2 { Profile::Dup } else { Profile::Single })
    }
}

impl ModeReport {
    fn new(index: usize, modes: &[Mode], rounds: &Rounds) -> ModeReport {
        let mode = modes[index];
        let of = |value: fn(&TurnResult) -> f64| Figure::of(rounds.iter().map(|round| value(&round[index])));
        let measured = |wanted: Mode| modes.iter().position(|mode| *mode == wanted).filter(|other| *other != index);
        let baseline = measured(mode.baseline());
        let (name, description) = mode.names();
        let commits: Option<Vec<f64>> =
            rounds.iter().map(|round| round[index].commits.map(|commits| commits as f64)).collect();
        ModeReport {
            mode: name,
            description,
            requests: of(|turn| turn.requests as f64),
            iops: of(TurnResult::iops),
            cpu_us: of(TurnResult::cpu_us),
            amplification: of(TurnResult::amplification),
            written: WrittenReport::new(index, rounds),
            read: of(|turn| turn.per_byte(turn.read_bytes)),
            commits: commits.map(|commits| Figure::of(commits.into_iter())),
            baseline: baseline.map(|other| modes[other].name()),
            ratios: baseline.map(|other| Ratios::new(index, other, rounds)),
            kernel_ratios: mode.of_kernel().and_then(measured).map(|other| Ratios::new(index, other, rounds)),
        }
    }
}

impl WrittenReport {
    fn new(index: usize, rounds: &Rounds) -> Option<WrittenReport> {
        let parts: Option<Vec<(&TurnResult, &Transferred)>> =
            rounds.iter().map(|round| round[index].parts.as_ref().map(|parts| (&round[index], parts))).collect();
        let parts = parts?;
        let of = |bytes: &dyn Fn(&Transferred) -> u64| {
            Figure::of(parts.iter().map(|(turn, parts)| turn.per_byte(bytes(parts))))
        };
        let names = parts.iter().flat_map(|(_, parts)| parts.trees.keys().map(|id| tree_name(*id)));
        let of_tree = |name: &str, parts: &Transferred| {
            parts.trees.iter().filter(|(id, _)| tree_name(**id) == name).map(|(_, bytes)| bytes).sum()
        };
        Some(WrittenReport {
            data: of(&|parts| parts.data),
            metadata: of(&Transferred::nodes),
            superblocks: of(&|parts| parts.superblocks),
            protection: of(&|parts| parts.tags),
            trees: names.map(|name| (name, of(&|parts| of_tree(name, parts)))).collect(),
        })
    }
}

impl Ratios {
    fn new(index: usize, other: usize, rounds: &Rounds) -> Ratios {
        let of = |value: fn(&TurnResult) -> f64| {
            Figure::of(rounds.iter().map(|round| value(&round[index]) / value(&round[other])))
        };
        Ratios { iops: of(TurnResult::iops), cpu: of(TurnResult::cpu_us), amplification: of(TurnResult::amplification) }
    }
}

#[cfg(test)]
mod tests {
    use sealblock_units::ByteCount;

    use super::*;

    fn turn(requests: u64, seconds: f64, parts: Option<Transferred>, written_bytes: u64) -> TurnResult {
        let (cpu_seconds, read_bytes, commits) = (seconds / 2.0, 4096, parts.as_ref().map(|_| 2));
        TurnResult { requests, seconds, cpu_seconds, written_bytes, read_bytes, parts, commits }
    }

    #[test]
    fn ratios_compare_turns_of_the_same_round() {
        let data = |trees: &[(u64, u64)]| Transferred {
            data: 40_960,
            superblocks: 4096,
            trees: trees.iter().copied().collect(),
            tags: 160,
            read: 0,
        };
        let round = |speed: f64| {
            vec![
                turn(10, 2.0 * speed, Some(data(&[(7, 16_384), (256, 16_384), (5, 16_384)])), 3 * 40_960),
                turn(10, speed, Some(data(&[(5, 16_384)])), 2 * 40_960),
                turn(10, 4.0 * speed, None, 40_960),
            ]
        };
        let modes = vec![Mode::Csum, Mode::Device, Mode::KernelNodatasum];
        let options = Options {
            points: Vec::new(),
            modes,
            is_buffered: false,
            depth: 1,
            commits: 2,
            rounds: 3,
            dir: None,
            device_bytes: None,
            dirty_bytes: ByteCount::new(1),
        };
        let point = Point { size: ByteCount::new(1 << 20), metadata: Profile::Dup, batch: Batch::Writes(5) };
        let report = PointReport::new(&point, &options, &[round(1.0), round(10.0), round(3.0)]);
        let [csum, device, kernel] = &report.modes[..] else { panic!("three modes") };
        assert_eq!((csum.iops.median, csum.iops.least, csum.iops.most), (10.0 / 6.0, 0.5, 5.0));
        assert_eq!((csum.baseline, csum.ratios.is_none(), csum.kernel_ratios.is_none()), (None, true, true));
        let ratios = device.ratios.unwrap();
        assert_eq!((device.baseline, ratios.iops.least, ratios.iops.most), (Some("csum"), 2.0, 2.0));
        assert_eq!((ratios.cpu.median, ratios.amplification.median), (0.5, 2.0 / 3.0));
        assert_eq!(device.kernel_ratios.unwrap().iops.median, 4.0);
        assert_eq!((kernel.baseline, kernel.written.is_none(), kernel.commits), (None, true, None));
        let written = csum.written.as_ref().unwrap();
        assert_eq!(written.trees.keys().copied().collect::<Vec<_>>(), ["checksum", "subvolume"]);
        assert_eq!((written.trees["subvolume"].median, written.trees["checksum"].median), (0.8, 0.4));
        assert_eq!((report.metadata_copies, report.metadata_name()), (2, "DUP"));
    }
}
