//! Runs the attacks in sequence, each with a bystander, and checks the target before and after.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::attacks::{Attack, TestContext};
use crate::bystander::Bystander;
use crate::process::{Process, device_bytes, max_resident_bytes};
use crate::wire::{Peer, SUBNQN};

/// The report on an attack that the target withstood.
pub struct Report {
    name: &'static str,
    time: Duration,
    pace: Pace,
    /// The longest wait of the bystander for one operation.
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
            "{:<12} {:>7.2} s   bystander {}, {:.0} ms at most   memory +{:.1} of {:.1} MiB, {:.1} resident before and {:.1} after   {} descriptors",
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

/// The bystander's operations per second, alternately without and with the attack, ending without it.
#[derive(Default)]
struct Pace {
    quiet: Vec<f64>,
    attacked: Vec<f64>,
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The load of the machine varies, so an attack is compared with the quiet periods just before and after it.
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

/// The number of descriptors of an idle target that has served a connection.
pub fn settled(process: &mut Process) -> Result<usize> {
    let idle = process.usage()?.descriptors;
    drop(Peer::admin(process.address, SUBNQN, 0)?);
    // The first connection opens some descriptors that stay open.
    process.wait_descriptors(idle + 2)?;
    Ok(process.usage()?.descriptors)
}

/// Fails if an idle target uses more memory than its full devices and one connection need.
///
/// # Errors
/// If it does.
pub fn check_memory(process: &Process) -> Result<()> {
    let (resident_bytes, allowed_bytes) =
        (process.usage()?.resident_bytes, process.start_bytes + device_bytes() + max_resident_bytes(1));
    ensure!(resident_bytes <= allowed_bytes, "{resident_bytes} bytes are resident, and {allowed_bytes} may be");
    Ok(())
}

/// Runs an attack `turns` times. Fails if the attack does, or if the target has ended, uses more memory than its limits
/// allow, or has delayed or corrupted I/O of the bystander. The bystander is measured for `quiet` before and after each
/// turn.
pub fn run(
    process: &mut Process,
    attack: &Attack,
    context: &TestContext,
    quiet: Duration,
    turns: usize,
) -> Result<Report> {
    let most_descriptors = settled(process)?;
    let bystander = Bystander::start(process.address).context("the bystander connects")?;
    let (mut pace, mut time) = (Pace { quiet: vec![bystander.rate(quiet)], ..Pace::default() }, Duration::ZERO);
    process.reset_peak()?;
    let (before, first) = (process.usage()?, bystander.operations());
    for _ in 0..turns.max(1) {
        let (operations, start) = (bystander.operations(), Instant::now());
        let mut outcome = (attack.run)(context);
        // Repeats an attack that is too short to measure.
        while outcome.is_ok() && start.elapsed() < quiet {
            outcome = (attack.run)(context);
        }
        let (lasted, completed) = (start.elapsed(), bystander.operations() - operations);
        process.check_alive()?;
        outcome?;
        time += lasted;
        pace.attacked.push(completed as f64 / lasted.as_secs_f64().max(1e-6));
        pace.quiet.push(bystander.rate(quiet));
    }
    let longest = bystander.finish(first)?;
    let after = process.usage()?;
    let grown_bytes = after.peak_bytes.saturating_sub(before.resident_bytes);
    let allowed_bytes = max_resident_bytes(attack.connections);
    ensure!(grown_bytes <= allowed_bytes, "memory grew by {grown_bytes} bytes, and the limits say {allowed_bytes}");
    process.wait_descriptors(most_descriptors).context("descriptors are given back")?;
    let (descriptors, resident_bytes) = (process.usage()?.descriptors, after.resident_bytes);
    let before_bytes = before.resident_bytes;
    let name = attack.name;
    Ok(Report { name, time, pace, longest, grown_bytes, allowed_bytes, before_bytes, resident_bytes, descriptors })
}
