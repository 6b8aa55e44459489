//! One attack after the other, each with a neighbour beside it, and what is looked at before and after.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::attacks::{Attack, TestContext};
use crate::bystander::Neighbour;
use crate::process::{Process, device_bytes, most_bytes};
use crate::wire::{Peer, SUBNQN};

/// How one attack went; it did not succeed.
pub struct Report {
    name: &'static str,
    time: Duration,
    pace: Pace,
    /// The longest that the neighbour waited for one operation.
    longest: Duration,
    grown_bytes: u64,
    allowed_bytes: u64,
    before_bytes: u64,
    resident_bytes: u64,
    descriptors: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{:<12} {:>7.2} s   neighbour {}, {:.0} ms at most   memory +{:.1} of {:.1} MiB, {:.1} resident before and {:.1} after   {} descriptors",
            self.name,
            self.time.as_secs_f64(),
            self.pace,
            self.longest.as_secs_f64() * 1e3,
            mib(self.grown_bytes),
            mib(self.allowed_bytes),
            mib(self.before_bytes),
            mib(self.resident_bytes),
            self.descriptors,
        )
    }
}

/// The neighbour's operations a second in turns: quiet, attacked, quiet, attacked and so on, and quiet in the end.
#[derive(Default)]
struct Pace {
    quiet: Vec<f64>,
    attacked: Vec<f64>,
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Other work on the machine comes and goes, so an attack is compared with the quiet right before and after it.
        let around = self.quiet.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let ratios = sorted(around.zip(&self.attacked).map(|(quiet, attacked)| attacked / quiet.max(1.0)));
        let (quiet, attacked) = (sorted(self.quiet.iter().copied()), sorted(self.attacked.iter().copied()));
        let middle = |values: &[f64]| values.get(values.len() / 2).copied().unwrap_or_default();
        write!(f, "{:>6.0}/s of {:>6.0}/s, ratio {:.2}", middle(&attacked), middle(&quiet), middle(&ratios))?;
        match ratios.as_slice() {
            [least, .., most] => write!(f, " ({least:.2} to {most:.2})"),
            _ => Ok(()),
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The descriptors of a target that has served somebody, and serves nobody.
pub fn settled(process: &mut Process) -> Result<usize> {
    let idle = process.look()?.descriptors;
    drop(Peer::admin(process.address, SUBNQN, 0)?);
    // What a first connection opens for good is not given back, and need not be.
    process.settles(idle + 2)?;
    Ok(process.look()?.descriptors)
}

/// Fails if a target has kept more memory, after whatever it went through, than devices that are full and one connection need.
///
/// # Errors
/// When it has.
pub fn kept(process: &Process) -> Result<()> {
    let (resident_bytes, allowed_bytes) =
        (process.look()?.resident_bytes, process.start_bytes + device_bytes() + most_bytes(1));
    ensure!(resident_bytes <= allowed_bytes, "{resident_bytes} bytes are resident, and {allowed_bytes} may be");
    Ok(())
}

/// Runs an attack `turns` times, and fails if it does, or if the target has ended, holds more than its limits allow, or has
/// done its neighbour wrong. The neighbour is watched for `quiet` before and after each turn.
pub fn run(
    process: &mut Process,
    attack: &Attack,
    scene: &TestContext,
    quiet: Duration,
    turns: usize,
) -> Result<Report> {
    let most_descriptors = settled(process)?;
    let neighbour = Neighbour::start(process.address).context("the neighbour connects")?;
    let (mut pace, mut time) = (Pace { quiet: vec![neighbour.rate(quiet)], ..Pace::default() }, Duration::ZERO);
    process.forget_peak()?;
    let (before, first) = (process.look()?, neighbour.operations());
    for _ in 0..turns.max(1) {
        let (operations, start) = (neighbour.operations(), Instant::now());
        let mut outcome = (attack.run)(scene);
        // Again while it takes less time than can be measured.
        while outcome.is_ok() && start.elapsed() < quiet {
            outcome = (attack.run)(scene);
        }
        let (lasted, done) = (start.elapsed(), neighbour.operations() - operations);
        process.is_alive()?;
        outcome?;
        time += lasted;
        pace.attacked.push(done as f64 / lasted.as_secs_f64().max(1e-6));
        pace.quiet.push(neighbour.rate(quiet));
    }
    let longest = neighbour.finish(first)?;
    let after = process.look()?;
    let grown_bytes = after.peak_bytes.saturating_sub(before.resident_bytes);
    let allowed_bytes = most_bytes(attack.connections);
    ensure!(grown_bytes <= allowed_bytes, "memory grew by {grown_bytes} bytes, and the limits say {allowed_bytes}");
    process.settles(most_descriptors).context("descriptors are given back")?;
    let (descriptors, resident_bytes) = (process.look()?.descriptors, after.resident_bytes);
    let before_bytes = before.resident_bytes;
    let name = attack.name;
    Ok(Report { name, time, pace, longest, grown_bytes, allowed_bytes, before_bytes, resident_bytes, descriptors })
}
