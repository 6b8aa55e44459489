//! One namespace on several cores, compared with the same on one core.
//!
//! Goals: eight cores complete seven times as many requests of 4 KiB as one core on a null device, 6.6 times as many in
//! memory, and four times as many on a volume; other numbers of cores lie on the line through one core and that. No
//! request crosses from the core of its connection to another one, unless its device is a volume or a file in the page
//! cache, and of several namespaces at most 5 % do. A ratio is compared with its goal only if every core of the target and of the host has a
//! CPU of its own. Elsewhere, what counts is the CPU time of the target and the crossings for each request.
//!
//! The target has a thread for each core, on the first CPUs, and a device is opened on one of them, as by a server.
//! Each I/O queue is a session of its own. CPU time of the target is that of this process without the threads of the
//! host. So it contains polling while a core is idle (`--spin-us 0` shows the cost of the work alone).

mod contender;
mod target;

use anyhow::{Context, ensure};
use sealblock_runtime_reactor::{CoreHandle, Cores};

use super::options::{DeviceKind, ScaleOptions};
use super::rounds::verdict;
use crate::cpu::allowed_cpus;
use crate::load::{Load, Until};
use crate::remote;
use crate::report::{Spread, interleaved};
use crate::setup::FILL;
use contender::{Contender, Measured};

/// The most crossings for each request with several namespaces.
const CROSSINGS_OF_SEVERAL: f64 = 0.05;

const fn load(name: &'static str, write: bool, blocks: u64, depth: u64) -> Load {
    Load { name, write, blocks, random: true, depth, flush_every: 0 }
}

/// The depths are those of each queue.
const LOADS: &[Load] = &[
    load("read 4 KiB, random, QD 32", false, 1, 32),
    load("write 4 KiB, random, QD 32", true, 1, 32),
    load("read 128 KiB, random, QD 8", false, 32, 8),
    load("write 128 KiB, random, QD 8", true, 32, 8),
];

/// The threads of a run, which all contenders use in turn.
struct Threads {
    /// Numbers of cores of the target.
    counts: Vec<usize>,
    target: Cores,
    /// One core for each CPU; none without a network.
    host: Option<Cores>,
    host_limit: usize,
    cpus: usize,
}

impl Threads {
    fn start(options: &ScaleOptions) -> anyhow::Result<Threads> {
        let cpus = allowed_cpus();
        let counts = match options.cores.is_empty() {
            true => powers_of_two(cpus.len()),
            false => options.cores.iter().map(|count| count.get()).collect(),
        };
        let most = counts.iter().copied().max().context("there is a number of cores")?;
        let on = cpus.iter().copied().cycle().take(most).collect();
        let host = match options.in_process {
            true => None,
            false => Some(remote::cores(cpus.clone(), options.spin_us)?),
        };
        let left = cpus.len().saturating_sub(most);
        let host_limit = options.host_cores.map_or(if left == 0 { cpus.len() } else { left }, Into::into);
        let target = remote::cores(on, options.spin_us)?;
        Ok(Threads { counts, target, host, host_limit, cpus: cpus.len() })
    }

    /// The cores of the host beside this many of the target: the last ones.
    fn hosts(&self, count: usize) -> Vec<CoreHandle> {
        let all = self.host.as_ref().map_or(Vec::new(), Cores::handles);
        let first = if count < all.len() { count.max(all.len().saturating_sub(self.host_limit)) } else { 0 };
        let mut hosts: Vec<CoreHandle> = all.into_iter().skip(first).collect();
        hosts.truncate(self.host_limit);
        hosts
    }

    /// True if each core has a CPU of its own.
    fn are_apart(&self, count: usize) -> bool {
        count + self.host.as_ref().map_or(0, |_| self.hosts(count).len()) <= self.cpus
    }

    async fn contenders(&self, kind: DeviceKind, options: &ScaleOptions) -> anyhow::Result<Vec<Contender>> {
        let (mut contenders, cores) = (Vec::new(), self.target.handles());
        for &count in &self.counts {
            let contender = Contender::start(kind, &cores[..count], &self.hosts(count), options).await;
            contenders.push(contender.with_context(|| format!("{} on {count} cores", kind.name()))?);
        }
        Ok(contenders)
    }
}

/// 1, 2, 4 and so on, up to half of the CPUs, and at least up to 2.
fn powers_of_two(cpus: usize) -> Vec<usize> {
    let most = (cpus / 2).max(2);
    std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count <= most).collect()
}

/// Measures everything and prints it.
pub fn run(options: &ScaleOptions) -> anyhow::Result<()> {
    let threads = Threads::start(options)?;
    let host = if options.in_process { "no host" } else { "the host on the last" };
    println!("{} CPUs, the target on the first, {host}", threads.cpus);
    for &kind in &options.devices {
        let rounds = remote::wait(measure(options, &threads, kind))??;
        let (count, size) = (options.namespaces.get(), options.size);
        println!("\n{}, {count} {}, {size} in all", kind.name(), if count == 1 { "namespace" } else { "namespaces" });
        for (load, rounds) in rounds {
            print(load, kind, options, (&threads, &rounds));
        }
    }
    Ok(())
}

/// The turns of all numbers of cores under each load: one list for each round.
async fn measure(
    options: &ScaleOptions,
    threads: &Threads,
    kind: DeviceKind,
) -> anyhow::Result<Vec<(Load, Vec<Vec<Measured>>)>> {
    ensure!(options.blocks() >= FILL.blocks, "a namespace has at least {} blocks of 4 KiB", FILL.blocks);
    let (contenders, mut measured) = (threads.contenders(kind, options).await?, Vec::new());
    for &load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let turn = async |index: usize, round: u32| {
            contenders[index].turn(load, Until::Passed(options.turn()), u64::from(round)).await
        };
        measured.push((load, interleaved(options.rounds, contenders.len(), |_| Ok(()), turn).await?));
    }
    for contender in contenders {
        contender.close().await?;
    }
    Ok(measured)
}

/// The goal of a number of cores, as a multiple of one core.
fn goal(kind: DeviceKind, cores: usize) -> Option<f64> {
    let of_eight = kind.goal_of_eight_cores()?;
    Some(1.0 + (cores as f64 - 1.0) * (of_eight - 1.0) / 7.0)
}

/// The most crossings for each request.
fn crossings_goal(kind: DeviceKind, options: &ScaleOptions) -> Option<f64> {
    match options.namespaces.get() {
        1 => kind.is_on_every_core().then_some(0.0),
        _ => Some(CROSSINGS_OF_SEVERAL),
    }
}

fn print(load: Load, kind: DeviceKind, options: &ScaleOptions, (threads, rounds): (&Threads, &[Vec<Measured>])) {
    println!("{}", load.name);
    for (index, &count) in threads.counts.iter().enumerate() {
        let spread = |of: &dyn Fn(&Measured) -> f64| Spread::of(rounds.iter().map(|round| of(&round[index])));
        let per_request = |cpu: f64, measured: &Measured| cpu * 1e6 / measured.turn.requests as f64;
        let crossings = spread(&Measured::crossings_per_request).median;
        print!(
            "  {count:2} {} {:9.0} /s  target {:6.2} us CPU, busiest core {:3.0} %  host {:6.2} us CPU",
            if count == 1 { "core " } else { "cores" },
            spread(&|measured| measured.turn.rate()).median,
            spread(&|measured| per_request(measured.target_cpu, measured)).median,
            spread(&|measured| measured.busiest * 100.0).median,
            spread(&|measured| per_request(measured.host_cpu, measured)).median,
        );
        let goal_text = crossings_goal(kind, options).map_or(String::new(), |most| match crossings <= most {
            true => format!(" (goal {most}: kept)"),
            false => format!(" (goal {most}: MISSED)"),
        });
        print!("  {crossings:5.3} crossings{goal_text}");
        if index == 0 {
            println!("  (baseline)");
            continue;
        }
        let ratio = Spread::of(rounds.iter().map(|round| round[index].turn.rate() / round[0].turn.rate()));
        // Goals are multiples of one core, for small requests to one namespace.
        let is_comparable = threads.counts[0] == 1 && load.blocks == 1 && options.namespaces.get() == 1;
        let goal = goal(kind, count).filter(|_| is_comparable);
        let text = match goal {
            Some(goal) if !threads.are_apart(count) => format!("  goal {:.0} %, with more CPUs", goal * 100.0),
            goal => verdict(ratio.median, goal),
        };
        println!("  {ratio}{text}");
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::comparisons::{Claim, Command};

    /// The most queues of a test, each of which flushes after its writes.
    const QUEUES: u64 = 6;

    fn options(more: &[&str]) -> ScaleOptions {
        let words =
            ["sealblock-perf", "scale", "--cores", "1,2", "--seconds", "0.05", "--rounds", "1", "--size", "8MiB"];
        let command = Command::try_parse_from(words.iter().chain(more)).expect("the options are known");
        let Claim::Scale(options) = command.claim else { panic!("it is this claim") };
        options
    }

    /// The requests and crossings of each turn of a device.
    fn turns(kind: DeviceKind, options: &ScaleOptions) -> Vec<(u64, u64)> {
        let threads = Threads::start(options).expect("cores start");
        let measured = remote::wait(measure(options, &threads, kind)).expect("the main thread waits");
        let measured = measured.expect("nothing fails");
        assert_eq!(measured.len(), LOADS.len());
        let turns = measured.iter().flat_map(|(_, rounds)| rounds.iter().flatten());
        turns.map(|measured| (measured.turn.requests, measured.crossings)).collect()
    }

    #[test]
    fn every_load_runs_on_one_and_two_cores_with_and_without_a_network() {
        for more in [&[][..], &["--in-process"], &["--namespaces", "3", "--queues", "4"]] {
            let options = options(more);
            for kind in [DeviceKind::Null, DeviceKind::Memory] {
                let turns = turns(kind, &options);
                assert_eq!(turns.len(), 2 * LOADS.len());
                assert!(turns.iter().all(|(requests, crossings)| *crossings <= requests + QUEUES), "{turns:?}");
                // On a busy machine a short turn may end before its first request begins.
                assert!(turns.iter().any(|(requests, _)| *requests > 0), "{turns:?}");
                if kind == DeviceKind::Null {
                    assert!(turns.iter().all(|(_, crossings)| *crossings == 0), "{turns:?}");
                }
            }
        }
    }

    #[test]
    fn goals_lie_on_a_line_and_defaults_leave_cpus_to_the_host() {
        assert_eq!((goal(DeviceKind::Null, 1), goal(DeviceKind::Null, 8)), (Some(1.0), Some(7.0)));
        assert_eq!(goal(DeviceKind::File, 8), None);
        assert_eq!((powers_of_two(1), powers_of_two(2), powers_of_two(16)), (vec![1, 2], vec![1, 2], vec![1, 2, 4, 8]));
        let (one, several) = (options(&[]), options(&["--namespaces", "8"]));
        let goals = |options| [DeviceKind::Memory, DeviceKind::Volume].map(|kind| crossings_goal(kind, options));
        assert_eq!((goals(&one), goals(&several)), ([Some(0.0), None], [Some(0.05), Some(0.05)]));
    }
}
