//! The claim `async-seal`: a volume that makes the tags of a write while it is in flight, compared with one that makes
//! them before it submits the write.
//!
//! Sequential writes of 1 MiB, one at a time, go to a protected volume in memory with an added delay for each write,
//! which makes it a device of known speed. The time of a write is the lower quartile of the writes in a turn, because
//! other load on the machine can only make writes longer. The gain that is possible is known as well. A write takes m +
//! c + d if tags are made first, and m + max(c, d) if that runs concurrently. Here d is the time of the device, c the
//! time for making tags and m the time of everything else, mostly memory. So there is no gain on a device without a
//! delay, little on one that is much slower than making tags, and most if both take equally long. All three are
//! measured in the same rounds as the volumes: d is the additional time of a device with a delay compared with memory,
//! c is making tags alone, and m is the time of a volume without tags minus d ([`Model`]).

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use sealblock_block::{
    Abilities, Ability, Device, DynDevice, Gate, Geometry, Medium, Outcome as BlockOutcome, Request, RequestKind,
};
use sealblock_integrity::{PiFormat, Sealed, Tags};
use sealblock_layers_fault::{FaultMedium, Rules};
use sealblock_media_memory::MemoryMedium;
use sealblock_media_volume::{CreateOptions, OpenOptions, create, format::Layout, open};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{Config, JoinHandle, Reactor, spawn};
use sealblock_units::{BlockSize, ByteCount, Extent};

use super::outcome::{Axis, Cell, Claim, Curve, Defaults, Drawing, Outcome, Plot, Progress, Published, Scale, Table};
use super::verdict::{Round, Threshold, Verdict};
use crate::counted::Counted;
use crate::load::{self, PAYLOAD_BYTES, Until};
use crate::medium::{AnyMedium, PacedMemory};
use crate::report::Spread;
use crate::setup::{FILL, PerfVolume, Protection, TurnClock};

/// The claimed fraction of the model's gain.
const OF_MODEL: f64 = 0.9;
/// The delay of the device for each write, in addition to the time of its memory. The last device is memory without a
/// delay.
const DELAYS_US: [u32; 6] = [2000, 1000, 500, 250, 125, 0];

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "async-seal",
    sentence: "Computing checksums while the write is in flight gains at least 90 % of what a model of memory, CPU and device allows.",
    published: &[
        Published {
            figure: "10.6 % more bandwidth measured",
            source: "patches for asynchronous checksums of data in Btrfs",
        },
        Published {
            figure: "15.3 % by the model, with 50, 45 and 8 GB/s: 1/(1/50 + 1/45 + 1/8) against 1/(1/50 + max(1/45, 1/8))",
            source: "patches for asynchronous checksums of data in Btrfs",
        },
    ],
    defaults: Defaults { size: ByteCount::new(256 << 20), seconds: 0.15, rounds: 13 },
    makes_files: false,
    measure,
};

const SECTOR_BYTES: u32 = 512;
const UUID: [u8; 16] = *b"sealed in flight";
/// Blocks of a write of 1 MiB.
const WRITE_BLOCKS: u64 = (PAYLOAD_BYTES / BlockSize::B4096.bytes()) as u64;

/// The contenders of each round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Before,
    BeforeAgain,
    InFlight,
    WithoutTags,
    Device,
    Memory,
    Sealing,
}

const TURNS: [Turn; 7] =
    [Turn::Before, Turn::BeforeAgain, Turn::InFlight, Turn::WithoutTags, Turn::Device, Turn::Memory, Turn::Sealing];

/// Seconds of a write of 1 MiB, by its parts.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Model {
    /// Everything except making tags and the device: copies, map entries, system calls.
    memory: f64,
    /// Making tags.
    sealing: f64,
    /// The device.
    device: f64,
}

impl Model {
    /// Computes it from the times of one round: a volume without tags, a device with a delay, the same without the
    /// delay, and making tags.
    fn fitted(without_tags: f64, device: f64, memory: f64, sealing: f64) -> Model {
        let device = (device - memory).max(0.0);
        Model { memory: (without_tags - device).max(0.0), sealing, device }
    }

    /// If tags are made before the device's work.
    fn before(self) -> f64 {
        self.memory + self.sealing + self.device
    }

    /// If both are concurrent.
    fn in_flight(self) -> f64 {
        self.memory + self.sealing.max(self.device)
    }

    /// The gain in throughput, as a fraction.
    fn gain(self) -> f64 {
        self.before() / self.in_flight() - 1.0
    }
}

/// The times on a device of one speed: seconds for 1 MiB, by round and turn.
struct Measured {
    delay_us: u32,
    turns: Vec<Vec<f64>>,
}

impl Measured {
    fn spread(&self, of: impl Fn(&[f64]) -> f64) -> Spread {
        Spread::of(self.turns.iter().map(|round| of(round)))
    }

    /// The model of one round. Memory without a delay counts as no device.
    fn model(&self, round: &[f64]) -> Model {
        let of = |turn: Turn| round[turn as usize];
        let device = if self.delay_us == 0 { Turn::Memory } else { Turn::Device };
        Model::fitted(of(Turn::WithoutTags), of(device), of(Turn::Memory), of(Turn::Sealing))
    }

    fn gain(round: &[f64]) -> f64 {
        round[Turn::Before as usize] / round[Turn::InFlight as usize] - 1.0
    }

    fn device_gb_s(&self) -> f64 {
        PAYLOAD_BYTES as f64 / self.spread(|round| self.model(round).device).median / 1e9
    }
}

/// Memory of this size, with this delay for each write.
fn paced(bytes: u64, delay_us: u32) -> anyhow::Result<PacedMemory> {
    let memory = Rc::new(MemoryMedium::new(bytes, SECTOR_BYTES));
    let rules: Rules = format!("delay={delay_us}us").parse().context("the rule of the delay")?;
    Ok(FaultMedium::new(memory, rules, TurnClock::REAL))
}

/// Memory with an empty volume, with this delay for each write.
async fn memory(capacity_blocks: u64, guard: Protection, delay_us: u32) -> anyhow::Result<AnyMedium> {
    let layout = Layout::new(BlockSize::B4096, SECTOR_BYTES, capacity_blocks)?;
    let medium = AnyMedium::Paced(paced(layout.medium_bytes(), delay_us)?);
    let protection = guard.0;
    let shape =
        CreateOptions { block_size: BlockSize::B4096, capacity_blocks, protection, uuid: UUID, preallocate: false };
    create(&medium, &shape).await?;
    Ok(medium)
}

/// A device that does not make tags itself, so that its gate makes them before a write.
struct SealedBefore<D>(D);

impl<D: Device> Device for SealedBefore<D> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities().with([RequestKind::Write], Ability::Absent)
    }

    async fn execute(&self, request: Request) -> BlockOutcome {
        self.0.execute(request).await
    }
}

/// A volume that is open, with its worker.
struct Opened {
    volume: Rc<PerfVolume>,
    worker: JoinHandle<()>,
    /// Makes the tags while the data are in flight.
    in_flight: DynDevice,
    /// Its gate makes the tags before the data are submitted.
    before: DynDevice,
}

impl Opened {
    /// Opens the volume on this medium and writes all blocks.
    async fn filled(medium: AnyMedium) -> anyhow::Result<Opened> {
        let opened = open(Counted::not(medium), TurnClock::REAL, &OpenOptions::default()).await?;
        let worker = spawn(opened.worker.run());
        let gate = Rc::new(Gate::new("volume", Rc::clone(&opened.volume)));
        let before = DynDevice::new("sealed before", SealedBefore(Rc::clone(&gate)));
        let blocks = gate.geometry().capacity_blocks;
        let in_flight = DynDevice::from(gate);
        load::drive(in_flight.clone(), FILL, Until::Asked(blocks / FILL.blocks), 1).await?;
        Ok(Opened { volume: opened.volume, worker, in_flight, before })
    }

    /// Closes it.
    async fn close(self) -> anyhow::Result<()> {
        self.volume.close().await?;
        self.worker.await?;
        Ok(())
    }
}

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    ensure!(
        scale.size.get() >= 64 << 20,
        "volumes of less than 64 MiB have too few blocks for writes of 1 MiB; use --size 64MiB or more"
    );
    let measured = Reactor::new(Config::default())?.block_on(async {
        let mut measured = Vec::new();
        for delay_us in DELAYS_US {
            measured.push(of_speed(delay_us, scale, progress).await?);
        }
        anyhow::Ok(measured)
    })?;
    Ok(outcome(&measured))
}

async fn of_speed(delay_us: u32, scale: &Scale, progress: &Progress) -> anyhow::Result<Measured> {
    let protection = Protection::CRC32C;
    let tagged = Opened::filled(memory(scale.blocks(), protection, delay_us).await?).await?;
    let plain = Opened::filled(memory(scale.blocks(), Protection(None), delay_us).await?).await?;
    let device = paced(scale.size.get(), delay_us)?;
    let unpaced = paced(scale.size.get(), 0)?;
    let payload = load::payload();
    for medium in [&device, &unpaced] {
        for offset in
            (0..scale.size.get()).step_by(PAYLOAD_BYTES).filter(|at| at + PAYLOAD_BYTES as u64 <= scale.size.get())
        {
            medium.write(offset, payload.clone()).await?;
        }
    }
    let time = Duration::from_secs_f64(scale.seconds);
    let name = format!("device of {delay_us} us for 1 MiB");
    let turn = async |index: usize, _| match TURNS[index] {
        Turn::Before | Turn::BeforeAgain => written(&tagged.before, &payload, time).await,
        Turn::InFlight => written(&tagged.in_flight, &payload, time).await,
        Turn::WithoutTags => written(&plain.in_flight, &payload, time).await,
        Turn::Device => direct(&device, &payload, time).await,
        Turn::Memory => direct(&unpaced, &payload, time).await,
        Turn::Sealing => sealed(protection.0, &payload, time).await,
    };
    let turns = progress.rounds(&name, scale.rounds, TURNS.len(), turn).await;
    tagged.close().await?;
    plain.close().await?;
    Ok(Measured { delay_us, turns: turns? })
}

/// Seconds of a write of the payload to a volume, one at a time.
async fn written(volume: &DynDevice, payload: &Slice, time: Duration) -> anyhow::Result<f64> {
    let geometry = volume.geometry();
    let places = geometry.capacity_blocks / WRITE_BLOCKS;
    typical(time, async |number| {
        let extent = Extent::from_raw(number % places * WRITE_BLOCKS, WRITE_BLOCKS)?;
        volume.execute(load::write_of(geometry, extent, payload)).await?;
        Ok(())
    })
    .await
}

/// Seconds of a write of the payload to a medium, without a volume.
async fn direct(medium: &PacedMemory, payload: &Slice, time: Duration) -> anyhow::Result<f64> {
    let places = medium.len_bytes() / PAYLOAD_BYTES as u64;
    typical(time, async |number| Ok(medium.write(number % places * PAYLOAD_BYTES as u64, payload.clone()).await?)).await
}

/// Seconds for making the tags of the payload.
async fn sealed(format: Option<PiFormat>, payload: &Slice, time: Duration) -> anyhow::Result<f64> {
    typical(time, async |_| {
        std::hint::black_box(Sealed::seal(payload.clone(), BlockSize::B4096, format, &Tags::default()));
        Ok(())
    })
    .await
}

/// Repeats work for one turn; returns the lower quartile of the durations in seconds.
async fn typical(time: Duration, what: impl AsyncFn(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let (start, mut seconds) = (Instant::now(), Vec::new());
    while seconds.is_empty() || start.elapsed() < time {
        let begun = Instant::now();
        what(seconds.len() as u64).await?;
        seconds.push(begun.elapsed().as_secs_f64());
    }
    Ok(lower_quartile(seconds))
}

/// The lower quartile of the values; NaN if there are none.
fn lower_quartile(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 4).copied().unwrap_or(f64::NAN)
}

fn outcome(measured: &[Measured]) -> Outcome {
    let columns = [
        ("device", "us"),
        ("sealing", "us"),
        ("all else", "us"),
        ("sealed before", "GB/s"),
        ("sealed in flight", "GB/s"),
        ("gain", "%"),
        ("gain by the model", "%"),
        ("baseline again", "%"),
    ];
    let title = "Sequential writes of 1 MiB, one at a time, to a volume in paced memory, guard crc32c";
    let mut table = Table::new(title, "pace", &columns);
    for speed in measured {
        let us = |of: fn(Model) -> f64| Cell::measured(speed.spread(|round| of(speed.model(round)) * 1e6));
        let rate = |turn: Turn| Cell::measured(speed.spread(|round| PAYLOAD_BYTES as f64 / round[turn as usize] / 1e9));
        let again =
            speed.spread(|round| (round[Turn::Before as usize] / round[Turn::BeforeAgain as usize] - 1.0) * 100.0);
        let cells = vec![
            us(|model| model.device),
            us(|model| model.sealing),
            us(|model| model.memory),
            rate(Turn::Before),
            rate(Turn::InFlight),
            Cell::measured(speed.spread(|round| Measured::gain(round) * 100.0)),
            Cell::measured(speed.spread(|round| speed.model(round).gain() * 100.0)),
            Cell::measured(again),
        ];
        let name = match speed.delay_us {
            0 => "memory as it is".to_owned(),
            delay_us => format!("{delay_us} us ({:.1} GB/s)", PAYLOAD_BYTES as f64 / f64::from(delay_us) / 1e3),
        };
        table.push(name, cells);
    }
    let note = "A gain of a few per cent is decided only where the baseline differs from itself by less. With more writes in flight the next ones hide the \
                time of sealing, and there is nothing to gain.";
    Outcome {
        verdicts: verdicts(measured),
        tables: vec![table],
        plots: vec![plot(measured)],
        notes: vec![note.to_owned()],
    }
}

/// The speed with tags made in flight, relative to the speed with 90 % of the model's gain. Memory without a delay has
/// no time in flight, so the model does not apply to it.
fn verdicts(measured: &[Measured]) -> Vec<Verdict> {
    let paced = measured.iter().filter(|speed| speed.delay_us > 0);
    let verdict = |speed: &Measured| {
        let round = |round: &Vec<f64>| Round {
            claim: (1.0 + Measured::gain(round)) / (1.0 + OF_MODEL * speed.model(round).gain()),
            again: round[Turn::Before as usize] / round[Turn::BeforeAgain as usize],
        };
        let rounds: Vec<Round> = speed.turns.iter().map(round).collect();
        let what = format!("device of {} us for 1 MiB: speed to that with 90 % of the model's gain", speed.delay_us);
        Verdict::timed(what, Threshold::AtLeast(1.0), &rounds)
    };
    paced.map(verdict).collect()
}

fn plot(measured: &[Measured]) -> Plot {
    let paced = || measured.iter().filter(|speed| speed.delay_us > 0);
    let curve = |name: &str, of: fn(&Measured, &[f64]) -> f64| Curve {
        name: name.to_owned(),
        points: paced()
            .map(|speed| (speed.device_gb_s(), speed.spread(|round| of(speed, round)).median * 100.0))
            .collect(),
    };
    Plot {
        name: "async-seal".to_owned(),
        title: "What sealing in flight gains, by the speed of the device".to_owned(),
        x: Axis::logarithmic("device", "GB/s"),
        y: Axis::linear("gain", "%"),
        drawing: Drawing::Curves(vec![
            curve("measured", |_, round| Measured::gain(round)),
            curve("allowed by the model", |speed, round| speed.model(round).gain()),
            curve("claim: 90 % of that", |speed, round| speed.model(round).gain() * OF_MODEL),
            curve("sealed before, against itself", |_, round| {
                round[Turn::Before as usize] / round[Turn::BeforeAgain as usize] - 1.0
            }),
        ]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::verdict::Ruling;

    fn is_near(value: f64, expected: f64) -> bool {
        (value - expected).abs() < 1e-3
    }

    #[test]
    fn the_model_gives_the_published_gain() {
        let published = Model { memory: 1.0 / 50.0, sealing: 1.0 / 45.0, device: 1.0 / 8.0 };
        assert!(is_near(published.gain(), 0.153), "{}", published.gain());
    }

    #[test]
    fn nothing_is_gained_at_either_end() {
        let gain = |device: f64| Model { memory: 100.0, sealing: 25.0, device }.gain();
        assert!(gain(0.0) == 0.0 && gain(25.0) > gain(5.0) && gain(25.0) > gain(250.0) && gain(25_000.0) < 0.002);
    }

    #[test]
    fn the_model_is_fitted_to_parts_that_were_measured_apart() {
        let model = Model::fitted(600.0, 560.0, 60.0, 25.0);
        assert_eq!(model, Model { memory: 100.0, sealing: 25.0, device: 500.0 });
        // Noise may make a device look faster than its memory, but no time is negative.
        assert_eq!(Model::fitted(90.0, 55.0, 60.0, 25.0).device, 0.0);
    }

    #[test]
    fn a_quarter_of_the_times_is_below_what_counts() {
        assert_eq!(lower_quartile(vec![9.0, 1.0, 2.0, 3.0, 900.0, 4.0, 5.0, 6.0]), 3.0);
        assert!(lower_quartile(vec![7.0]) == 7.0 && lower_quartile(Vec::new()).is_nan());
    }

    #[test]
    fn a_tiny_run_measures_every_speed() {
        let progress = Progress::new("async-seal", std::sync::Arc::new(|_| std::ops::ControlFlow::Continue(())));
        let scale = Scale { size: ByteCount::new(64 << 20), seconds: 0.002, rounds: 3, dir: std::env::temp_dir() };
        let outcome = super::measure(&scale, &progress).unwrap();
        assert_eq!((outcome.tables[0].rows.len(), outcome.verdicts.len()), (DELAYS_US.len(), DELAYS_US.len() - 1));
        let small = Scale { size: ByteCount::new(1 << 20), ..scale };
        let refused = super::measure(&small, &progress).unwrap_err().to_string();
        assert!(refused.contains("use --size 64MiB"), "{refused}");
    }

    /// Rounds in which making tags in flight gains this fraction of the model's gain.
    fn measured(part: f64, noise: f64) -> Measured {
        let round = |again: f64| {
            let (before, model) = (625.0, Model::fitted(600.0, 560.0, 60.0, 25.0));
            let in_flight = before / (1.0 + part * model.gain());
            vec![before, before * again, in_flight, 600.0, 560.0, 60.0, 25.0]
        };
        Measured { delay_us: 500, turns: [1.0, 1.0 + noise, 1.0, 1.0].map(round).to_vec() }
    }

    #[test]
    fn the_bar_is_nine_tenths_of_what_the_model_allows() {
        let ruled = |part, noise| verdicts(&[measured(part, noise)])[0].ruling;
        assert_eq!(ruled(1.0, 0.001), Ruling::Holds);
        assert_eq!(ruled(0.5, 0.001), Ruling::DoesNotHold);
        assert_eq!((ruled(1.0, 0.1), ruled(0.5, 0.1)), (Ruling::TooNoisy, Ruling::TooNoisy));
        let unpaced = Measured { delay_us: 0, ..measured(1.0, 0.0) };
        assert_eq!(unpaced.model(&unpaced.turns[0]).gain(), 0.0);
        assert!(verdicts(&[Measured { delay_us: 0, ..measured(1.0, 0.0) }]).is_empty());
    }

    #[test]
    fn the_table_has_the_gains_in_parts_of_a_hundred() {
        let row = &outcome(&[measured(1.0, 0.0)]).tables[0].rows[0];
        let gain = |cell: usize| row.cells[cell].median.unwrap();
        assert!(is_near(gain(5), gain(6)) && is_near(gain(6), 2500.0 / 600.0), "{row:?}");
    }
}
