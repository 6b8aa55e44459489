//! The claim `dix-guard`: a cheap guard between host and boundary instead of the CRC of the wire, what it saves, and
//! which faults it does not detect.
//!
//! Cost: our host and target over NVMe/TCP, each on one core, with a namespace in memory with CRC-64 tags. The host
//! makes and checks tags with its own guard. At the boundary, one pass checks them and makes the tags of the wire. In
//! the published claim a network adapter or a target does this; here the host's core does, and its time is reported
//! separately. Each guard is also measured alone, because the rest of a request takes ten times as long.
//!
//! Detection ([`crate::detection`]): the same seeded faults are injected for all guards, in proportion to the seconds
//! of a turn (one second gives a complete run), and the undetected rate is compared with theory.

use std::time::Duration;

use anyhow::Context;
use sealblock_integrity::{Checks, GuardKind, PiFormat, ProtectionType, Tags, seal, verify};
use sealblock_units::{BlockSize, ByteCount, Lba};

use super::outcome::{Axis, Cell, Claim, Defaults, Drawing, Outcome, Plot, Progress, Published, Scale, Series, Table};
use super::verdict::{Round, Threshold, Verdict};
use crate::contender::{Contender, Measured};
use crate::cpu::{Memory, Pass, cpu_seconds, two_cpus};
use crate::load::{Load, Until};
use crate::remote::{self, SPIN_US, Served, Serving, Store};
use crate::report::Spread;
use crate::setup::Protection;

const GIB: f64 = (1_u64 << 30) as f64;
/// Size of the requests for measuring guards alone.
const REQUEST_BYTES: usize = 256 << 10;
/// The name of a request of [`REQUEST_BYTES`] in the names of loads.
const LARGE: &str = "256 KiB";

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "dix-guard",
    sentence: "The Internet checksum is the cheapest guard for a host that makes PI itself (DIX) and has it converted behind it.",
    published: &[
        Published {
            figure: "Internet checksum against CRC, 256 KiB: CPU 2.5 against 3.2 % for reads, 3.3 against 4.6 % for writes",
            source: "patches for DIX in nvme-rdma",
        },
        Published {
            figure: "8 and 256 KiB, 1 and 32 requests at a time: up to 1.4 times the IOPS",
            source: "patches for DIX in nvme-rdma",
        },
    ],
    defaults: Defaults { size: ByteCount::new(128 << 20), seconds: 0.1, rounds: 9 },
    makes_files: false,
    measure,
};

/// The guards of the host; the first one is also the namespace's.
const HOSTS: [GuardKind; 4] = [GuardKind::Crc64, GuardKind::IpChecksum, GuardKind::Crc16, GuardKind::Crc32c];

const fn load(name: &'static str, write: bool, blocks: u64, depth: u64) -> Load {
    Load { name, write, blocks, random: false, depth, flush_every: 0 }
}

/// Reads and writes of 8 and 256 KiB, one and 32 at a time.
const LOADS: [Load; 8] = [
    load("read 8 KiB, QD 1", false, 2, 1),
    load("read 8 KiB, QD 32", false, 2, 32),
    load("read 256 KiB, QD 1", false, 64, 1),
    load("read 256 KiB, QD 32", false, 64, 32),
    load("write 8 KiB, QD 1", true, 2, 1),
    load("write 8 KiB, QD 32", true, 2, 32),
    load("write 256 KiB, QD 1", true, 64, 1),
    load("write 256 KiB, QD 32", true, 64, 32),
];

/// The tag format with a guard of this kind, as used in this file.
const fn format(guard: GuardKind) -> PiFormat {
    PiFormat::with_default_storage_tag(guard, ProtectionType::Type1)
}

/// The host uses the guard of the wire, twice, and then each of the others.
const CONTENDERS: [GuardKind; 5] = [HOSTS[0], HOSTS[0], HOSTS[1], HOSTS[2], HOSTS[3]];
/// The indices of the Internet checksum and of the CRCs.
const INTERNET: usize = 2;
const CRCS: [usize; 3] = [0, 3, 4];

/// A host with this guard. If this is the namespace's own guard, there is no boundary.
async fn host(guard: GuardKind, serving: &Serving) -> anyhow::Result<Contender> {
    let own = (guard != HOSTS[0]).then(|| format(guard));
    Contender::tagged(guard.to_string(), serving, own).await
}

fn name(contender: usize) -> String {
    match contender {
        0 => format!("{} (that of the wire)", CONTENDERS[0]),
        1 => format!("{} again", CONTENDERS[1]),
        _ => CONTENDERS[contender].to_string(),
    }
}

/// The turns of a load, by round and contender.
struct Cost {
    load: &'static str,
    rounds: Vec<Vec<Measured>>,
}

/// CPU seconds that a guard alone takes for 1 GiB, by round and contender.
struct Alone {
    work: &'static str,
    rounds: Vec<Vec<f64>>,
}

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    let alone = guards_alone(scale, progress)?;
    outcome.tables.push(alone_table(&alone));
    outcome.verdicts.extend(alone.iter().map(alone_verdict));
    let costs = costs(scale, progress, &mut outcome.notes)?;
    outcome.tables.extend(cost_tables(&costs));
    outcome.verdicts.extend(costs.iter().filter(|cost| cost.load.contains(LARGE)).map(cost_verdict));
    outcome.plots.push(cost_plot(&costs));
    outcome.notes.push(
        "CPU of the boundary is that in which tags are checked and converted: hardware, a target or an attached device does it elsewhere. On the host's own core it only adds. Its pass is the first to load the data that were read, so guards behind it find them in the cache, and the guard of the wire does not."
            .to_owned(),
    );
    super::dix_detection::measure(scale, progress, &mut outcome)?;
    Ok(outcome)
}

/// Makes and verifies the tags of requests whose data are in the cache.
fn guards_alone(scale: &Scale, progress: &Progress) -> anyhow::Result<Vec<Alone>> {
    let memory = Memory::new(REQUEST_BYTES).context("preparing a request")?;
    let (data, size, seconds) = (memory.bytes(), BlockSize::B4096, Duration::from_secs_f64(scale.seconds));
    let mut all = Vec::new();
    for work in ["seal", "verify"] {
        let mut passes: Vec<Pass<'_>> = CONTENDERS.iter().map(|kind| pass(work, *kind, data, size)).collect();
        let turn = async |index: usize, _| Ok(cpu_seconds(&mut passes[index], seconds) * GIB / REQUEST_BYTES as f64);
        let part = format!("guards by themselves, {work}");
        let rounds = remote::wait(progress.rounds(&part, scale.rounds, CONTENDERS.len(), turn))??;
        all.push(Alone { work, rounds });
    }
    Ok(all)
}

fn pass<'a>(work: &str, kind: GuardKind, data: &'a [u8], size: BlockSize) -> Pass<'a> {
    let format = format(kind);
    let mut tags = vec![0; data.len() / size.bytes() * format.tuple_bytes()];
    seal(format, size, data, &mut tags, &Tags::default());
    if work == "seal" {
        return Box::new(move || {
            seal(format, size, data, &mut tags, &Tags::default());
            u64::from(tags[0])
        });
    }
    let checks = Checks::full(format, Lba::ZERO);
    Box::new(move || verify(format, size, data, &tags, &checks, &mut |_| ()) as u64)
}

fn costs(scale: &Scale, progress: &Progress, notes: &mut Vec<String>) -> anyhow::Result<Vec<Cost>> {
    let (host_cpu, target_cpu) = two_cpus();
    if host_cpu == target_cpu {
        notes.push("Host and target share one CPU: this process may use no other.".to_owned());
    }
    let blocks = scale.blocks();
    // The protected namespace is the second one.
    let served = [
        Served { store: Store::Null, protection: Protection(None), blocks },
        Served { store: Store::Memory, protection: Protection(Some(format(HOSTS[0]))), blocks },
    ];
    let (_target, serving) = remote::start_on(target_cpu, SPIN_US, &served)?;
    let (_cores, core) = remote::core(host_cpu, SPIN_US)?;
    let (scale, progress) = (scale.clone(), progress.clone());
    let costs = core.call(move || rounds(scale, progress, serving));
    remote::wait(costs)?.context("the host's core is gone")?
}

async fn rounds(scale: Scale, progress: Progress, serving: Serving) -> anyhow::Result<Vec<Cost>> {
    let mut contenders = Vec::new();
    for guard in CONTENDERS {
        contenders.push(host(guard, &serving).await?);
    }
    let mut costs = Vec::new();
    for load in LOADS {
        let time = Until::Passed(Duration::from_secs_f64(scale.seconds));
        let turn = async |index: usize, round| contenders[index].turn(load, time, u64::from(round)).await;
        let rounds = progress.rounds(load.name, scale.rounds, contenders.len(), turn).await?;
        costs.push(Cost { load: load.name, rounds });
    }
    Ok(costs)
}

/// CPU seconds of the host for each GiB, not counting the boundary.
fn own_cpu(measured: &Measured) -> f64 {
    (measured.host_cpu - measured.boundary_cpu) * GIB / measured.turn.bytes as f64
}

fn boundary_cpu(measured: &Measured) -> f64 {
    measured.boundary_cpu * GIB / measured.turn.bytes as f64
}

fn alone_table(alone: &[Alone]) -> Table {
    let names: Vec<String> = [0, INTERNET, 3, 4].map(name).to_vec();
    let columns: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "ms")).collect();
    let mut table =
        Table::new("CPU time of guards by themselves for 1 GiB in requests of 256 KiB, in the cache", "work", &columns);
    for Alone { work, rounds } in alone {
        let cell = |index: usize| Cell::measured(Spread::of(rounds.iter().map(|round| round[index] * 1e3)));
        table.push(*work, [0, INTERNET, 3, 4].map(cell).to_vec());
    }
    table
}

/// The Internet checksum compared, in each round, with the CRC that has the lowest median over all rounds. Because of
/// noise, the minimum of the three in each round would be lower than any of them.
fn against_cheapest(rounds: &[Vec<f64>]) -> Vec<Round> {
    let median = |index: usize| Spread::of(rounds.iter().map(|round| round[index])).median;
    let cheapest = CRCS.into_iter().min_by(|a, b| median(*a).total_cmp(&median(*b))).unwrap_or(0);
    let round = |round: &Vec<f64>| Round { claim: round[INTERNET] / round[cheapest], again: round[1] / round[0] };
    rounds.iter().map(round).collect()
}

fn alone_verdict(alone: &Alone) -> Verdict {
    let what = format!("{}: CPU time of the Internet checksum to that of the cheapest CRC", alone.work);
    Verdict::timed(what, Threshold::AtMost(1.0), &against_cheapest(&alone.rounds))
}

fn cost_verdict(cost: &Cost) -> Verdict {
    let rounds: Vec<Vec<f64>> = cost.rounds.iter().map(|round| round.iter().map(own_cpu).collect()).collect();
    let what = format!(
        "{}: CPU time of the host with the Internet checksum to that with the cheapest CRC, without the boundary",
        cost.load
    );
    Verdict::timed(what, Threshold::AtMost(1.0), &against_cheapest(&rounds))
}

fn cost_tables(costs: &[Cost]) -> Vec<Table> {
    let table = |cost: &Cost| {
        let columns = [
            ("requests", "/s"),
            ("requests, to the guard of the wire", "%"),
            ("CPU of the host", "ms/GiB"),
            ("to the guard of the wire", "%"),
            ("CPU of the boundary", "ms/GiB"),
        ];
        let title = format!("{}, a namespace in memory with CRC-64 tags over NVMe/TCP", cost.load);
        let mut table = Table::new(title, "guard of the host", &columns);
        for index in 0..CONTENDERS.len() {
            let spread =
                |of: &dyn Fn(&[Measured]) -> f64| Cell::measured(Spread::of(cost.rounds.iter().map(|round| of(round))));
            let cells = vec![
                spread(&|round| round[index].turn.rate()),
                spread(&|round| round[index].turn.rate() / round[0].turn.rate() * 100.0),
                spread(&|round| own_cpu(&round[index]) * 1e3),
                spread(&|round| own_cpu(&round[index]) / own_cpu(&round[0]) * 100.0),
                spread(&|round| boundary_cpu(&round[index]) * 1e3),
            ];
            table.push(name(index), cells);
        }
        table
    };
    costs.iter().map(table).collect()
}

fn cost_plot(costs: &[Cost]) -> Plot {
    let milliseconds =
        |cost: &Cost, index: usize| Spread::of(cost.rounds.iter().map(|round| own_cpu(&round[index]) * 1e3));
    let series = [0, INTERNET, 3, 4]
        .map(|index| Series::measured(name(index), costs.iter().map(|cost| milliseconds(cost, index))));
    Plot {
        name: "dix-guard-cpu".to_owned(),
        title: "CPU time of the host by its guard, without the boundary".to_owned(),
        x: Axis::linear("load, with the requests in flight", ""),
        y: Axis::logarithmic("CPU time for each GiB", "ms"),
        drawing: Drawing::Bars {
            groups: costs.iter().map(|cost| cost.load.replace("QD ", "")).collect(),
            series: series.into(),
            threshold: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::verdict::Ruling;
    use crate::load::Sample;

    fn alone(internet: f64, again: f64) -> Alone {
        let round = |again: f64| vec![0.022, 0.022 * again, internet, 0.027, 0.023];
        Alone { work: "seal", rounds: [1.0, again, 1.0, 1.0].map(round).to_vec() }
    }

    #[test]
    fn the_internet_checksum_is_held_against_the_cheapest_crc() {
        assert_eq!(alone_verdict(&alone(0.012, 1.02)).ruling, Ruling::Holds);
        assert_eq!(alone_verdict(&alone(0.025, 1.02)).ruling, Ruling::DoesNotHold);
        assert_eq!(alone_verdict(&alone(0.0215, 1.05)).ruling, Ruling::TooNoisy);
        // A guard that is cheaper than one CRC and more expensive than another is not the cheapest.
        assert_eq!(against_cheapest(&[vec![0.03, 0.03, 0.02, 0.01, 0.03]])[0].claim, 2.0);
    }

    #[test]
    fn the_boundary_is_no_part_of_the_host() {
        let turn = Sample { bytes: 1 << 30, ..Sample::default() };
        let measured = Measured { turn, host_cpu: 0.5, boundary_cpu: 0.125, target_cpu: None, host_summed: 0.0 };
        assert_eq!((own_cpu(&measured), boundary_cpu(&measured)), (0.375, 0.125));
    }

    #[test]
    fn contenders_are_what_their_places_say() {
        assert_eq!(
            (CONTENDERS[0], CONTENDERS[1], CONTENDERS[INTERNET]),
            (GuardKind::Crc64, GuardKind::Crc64, GuardKind::IpChecksum)
        );
        assert!(CRCS.iter().all(|crc| CONTENDERS[*crc] != GuardKind::IpChecksum));
        assert!(
            LOADS
                .iter()
                .filter(|load| load.name.contains(LARGE))
                .all(|load| load.blocks * 4096 == REQUEST_BYTES as u64)
        );
    }

    #[test]
    fn a_tiny_run_has_all_tables_and_every_count_fits_the_theory() {
        let progress = Progress::new("dix-guard", std::sync::Arc::new(|_| std::ops::ControlFlow::Continue(())));
        let scale = Scale { size: ByteCount::new(4 << 20), seconds: 0.002, rounds: 3, dir: std::env::temp_dir() };
        let outcome = measure(&scale, &progress).unwrap();
        assert_eq!((outcome.tables.len(), outcome.plots.len()), (1 + LOADS.len() + 4, 2));
        let counted = outcome.verdicts.last().unwrap();
        assert_eq!((counted.rounds, counted.ruling), (0, Ruling::Holds), "{}", counted.sentence);
    }

    #[test]
    fn passes_seal_and_verify_what_they_are_given() {
        let data = [9; 8192];
        for kind in GuardKind::ALL {
            assert_eq!(pass("verify", kind, &data, BlockSize::B4096)(), 0);
            pass("seal", kind, &data, BlockSize::B4096)();
        }
    }
}
