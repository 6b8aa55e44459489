//! Random 4 KiB writes to mirrors of different sizes, compared with two volumes of that size without a mirror, written
//! at the same time.
//!
//! Thresholds: up to 64 GiB, a mirror of any size reaches at least 70 % of the rate of each of two volumes that are
//! written side by side on the same disk, with at most 5 % more bytes for each write; and after a crash it compares no
//! more than its label lists. A mirror waits for a label write when it writes to a region for the first time, so its
//! first turn, which begins without dirty regions, is printed separately.
//!
//! Volumes are sparse files of the same size. The clock of a contender is stopped outside its turns. To simulate a
//! crash, the mirror is dropped and reopened on the same volumes, and nothing else is done until all dirty regions are
//! reconciled. Bytes are counted at the files, except for volumes of a target on another core.

use std::rc::Rc;
use std::time::Instant;

use fastrand::Rng;
use futures_util::future::try_join;
use sealblock_block::{DynDevice, Gate};
use sealblock_layers_mirror::{Mirror, OpenOptions, ReplicaSource};
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, sleep, spawn};
use sealblock_units::{BlockSize, ByteCount};

use super::options::MirrorSizeOptions;
use super::rounds::verdict;
use crate::cpu::two_cpus;
use crate::load::{Load, Sample, Stopwatch, Until, drive};
use crate::remote::{self, Served, Store, View, connect, nsid};
use crate::report::{Spread, number, shuffled};
use crate::setup::{OpenVolume, Protection, Scratch, Turn, TurnClock, new_path, open_volume, sparse_volume};

/// The threshold: the smallest fraction of the rate of each of two volumes.
pub const RATE_BAR: f64 = 0.70;
const IDENTITY: [u8; 16] = *b"a mirror in perf";
const VOLUMES: usize = 0;
const MIRROR: usize = 1;
/// How long the cores of target and host poll before they sleep.
const SPIN_US: u32 = 50;

/// Measures everything and prints it.
pub fn run(options: &MirrorSizeOptions) -> anyhow::Result<()> {
    let reactor = Reactor::new(Config::default())?;
    println!("{}", reactor.backend());
    for &size in &options.sizes {
        for &depth in &options.depths {
            reactor.block_on(measure(options, size, depth, Setup::local(options, size)?))?;
            if options.remote {
                let (_target, setup) = Setup::remote(options, size)?;
                reactor.block_on(measure(options, size, depth, setup))?;
            }
        }
    }
    Ok(())
}

/// Where the four volumes are: two without a mirror, and two replicas.
struct Setup {
    scratch: Vec<Scratch>,
    place: Place,
}

enum Place {
    Here,
    /// At this target.
    There(remote::Serving),
}

impl Setup {
    fn local(options: &MirrorSizeOptions, size: ByteCount) -> anyhow::Result<Setup> {
        let blocks = size.get() >> BlockSize::B4096.shift();
        let names = ["volume a", "volume b", "replica a", "replica b"];
        let scratch = names.iter().map(|name| new_path(&options.dir, name)).collect::<anyhow::Result<Vec<_>>>()?;
        remote::wait(async {
            for path in &scratch {
                sparse_volume(&path.0, blocks, options.guard).await?;
            }
            anyhow::Ok(())
        })??;
        Ok(Setup { scratch, place: Place::Here })
    }

    fn remote(
        options: &MirrorSizeOptions,
        size: ByteCount,
    ) -> anyhow::Result<(sealblock_runtime_reactor::Cores, Setup)> {
        let setup = Setup::local(options, size)?;
        let blocks = size.get() >> BlockSize::B4096.shift();
        let served = |path: &Scratch| Served {
            store: Store::Volume(path.0.clone(), Turn::endless()),
            protection: options.guard,
            blocks,
        };
        let devices: Vec<Served> = setup.scratch.iter().map(served).collect();
        let (_, cpu) = two_cpus();
        let (target, serving) = remote::start_on(cpu, SPIN_US, &devices)?;
        Ok((target, Setup { place: Place::There(serving), ..setup }))
    }
}

/// The contenders: two volumes, and a mirror of two others.
struct Contenders {
    volumes: [DynDevice; 2],
    replicas: [DynDevice; 2],
    open: Vec<OpenVolume>,
    turns: [Turn; 2],
}

impl Contenders {
    async fn open(setup: &Setup, guard: Protection) -> anyhow::Result<Contenders> {
        let (mut devices, mut open, turns) = (Vec::new(), Vec::new(), [Turn::default(), Turn::default()]);
        for (index, path) in setup.scratch.iter().enumerate() {
            devices.push(match &setup.place {
                Place::Here => {
                    let volume = open_volume(&path.0, turns[index / 2].clone()).await?;
                    let device = volume.stack();
                    open.push(volume);
                    device
                }
                Place::There(serving) => {
                    let view = if guard.0.is_some() { View::Tagged } else { View::Plain };
                    let device = connect(serving.address, remote::NQN, Some(nsid(index, view)), false).await?;
                    DynDevice::new("remote", device)
                }
            });
        }
        let [a, b, c, d] = <[DynDevice; 4]>::try_from(devices).ok().expect("four volumes");
        Ok(Contenders { volumes: [a, b], replicas: [c, d], open, turns })
    }

    /// Bytes that were written to the files of the volumes, or of the replicas, and read from them.
    fn bytes(&self, contender: usize) -> (u64, u64) {
        let of = self.open.iter().skip(contender * 2).take(2).map(|open| &open.counts);
        of.fold((0, 0), |(written, read), counts| (written + counts.written_in_all(), read + counts.read()))
    }
}

/// A mirror that can be dropped as in a crash.
struct OpenMirror {
    mirror: Rc<Gate<Rc<Mirror<TurnClock>>>>,
    worker: JoinHandle<()>,
}

impl OpenMirror {
    async fn open(contenders: &Contenders, opening: u8) -> anyhow::Result<OpenMirror> {
        let source = |replica: &DynDevice| ReplicaSource::new("replica", Ok(replica.clone()), None);
        let mut random = IDENTITY;
        random[15] = opening;
        let clock = TurnClock::new(contenders.turns[MIRROR].clone());
        let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random };
        let opened =
            sealblock_layers_mirror::open(contenders.replicas.iter().map(source).collect(), clock, options).await?;
        let worker = spawn(opened.worker.run());
        Ok(OpenMirror { mirror: Rc::new(Gate::new("mirror", opened.mirror)), worker })
    }
}

async fn measure(options: &MirrorSizeOptions, size: ByteCount, depth: u64, setup: Setup) -> anyhow::Result<()> {
    let contenders = Contenders::open(&setup, options.guard).await?;
    let mirror = OpenMirror::open(&contenders, 0).await?;
    let load = Load { name: "random 4 KiB writes", write: true, blocks: 1, random: true, depth, flush_every: 0 };
    let (mut rounds, mut rng): (Vec<[(Sample, u64); 2]>, _) = (Vec::new(), Rng::with_seed(0));
    for number in 0..options.rounds {
        let mut turns = [(Sample::default(), 0); 2];
        for next in shuffled(2, &mut rng) {
            let (until, seed) = (Until::Passed(options.turn()), 2 * u64::from(number) + 1);
            let before = contenders.bytes(next).0;
            contenders.turns[next].set(true);
            let sample = match next {
                VOLUMES => {
                    let watch = Stopwatch::start();
                    let [a, b] = [0, 1].map(|at| drive(contenders.volumes[at].clone(), load, until, seed + at as u64));
                    let (a, b) = try_join(a, b).await?;
                    watch.stop(a.requests.min(b.requests), BlockSize::B4096.bytes() as u64)
                }
                _ => drive(Rc::clone(&mirror.mirror), load, until, seed).await?,
            };
            contenders.turns[next].set(false);
            turns[next] = (sample, contenders.bytes(next).0 - before);
        }
        rounds.push(turns);
    }
    let place = if matches!(setup.place, Place::Here) { "here" } else { "over NVMe/TCP" };
    println!("\n{size}, {place}, {}, {}, QD {depth}", options.guard.name(), load.name);
    print(&rounds);
    crash(&contenders, mirror).await?;
    drop((contenders.volumes, contenders.replicas));
    contenders.turns.iter().for_each(|turn| turn.set(true));
    for volume in contenders.open {
        volume.close().await?;
    }
    Ok(())
}

fn print(rounds: &[[(Sample, u64); 2]]) {
    let rate = |of: usize, rounds: &[[(Sample, u64); 2]]| Spread::of(rounds.iter().map(|round| round[of].0.rate()));
    let ratio = |rounds: &[[(Sample, u64); 2]]| {
        Spread::of(rounds.iter().map(|round| round[MIRROR].0.rate() / round[VOLUMES].0.rate()))
    };
    let (first, rest) = rounds.split_at(1.min(rounds.len()));
    println!("  each of two volumes    {:>9} /s", number(rate(VOLUMES, rounds).median));
    for (name, rounds) in [("mirror, first turn", first), ("mirror, other turns", rest)] {
        if !rounds.is_empty() {
            let (rate, ratio) = (rate(MIRROR, rounds).median, ratio(rounds));
            println!("  {name:22} {:>9} /s   {ratio}{}", number(rate), verdict(ratio.median, Some(RATE_BAR)));
        }
    }
    let bytes = |of: usize| {
        let (requests, bytes) = rounds
            .iter()
            .fold((0, 0), |(requests, bytes), round| (requests + round[of].0.requests, bytes + round[of].1));
        bytes as f64 / (2 * requests) as f64
    };
    let [volume, replica] = [VOLUMES, MIRROR].map(bytes);
    if volume > 0.0 {
        let more = (replica / volume - 1.0) * 100.0;
        println!("  bytes a write: volume {volume:.0}, replica {replica:.0}, {more:+.1} %");
    }
}

/// Drops the mirror, reopens it, and waits until the replicas are identical.
async fn crash(contenders: &Contenders, open: OpenMirror) -> anyhow::Result<()> {
    let OpenMirror { mirror, worker } = open;
    worker.abort();
    drop(worker);
    let dirty = mirror.device().describe().dirty_bytes;
    drop(mirror);
    let (written, read) = contenders.bytes(MIRROR);
    let since = Instant::now();
    contenders.turns[MIRROR].set(true);
    let again = OpenMirror::open(contenders, 1).await?;
    while again.mirror.device().describe().nosync_bytes > 0 {
        sleep(std::time::Duration::from_millis(1)).await;
    }
    let (seconds, now) = (since.elapsed().as_secs_f64(), contenders.bytes(MIRROR));
    print!("  after a crash: {} compared in {seconds:.2} s", ByteCount::new(dirty));
    match contenders.open.is_empty() {
        true => println!(),
        false => println!(", {} read, {} written", ByteCount::new(now.1 - read), ByteCount::new(now.0 - written)),
    }
    again.mirror.device().close().await?;
    again.worker.await?;
    Ok(())
}
