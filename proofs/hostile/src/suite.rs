//! One attack after the other, each with a neighbour beside it, and what is looked at before and after.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::attacks::{Attack, Scene};
use crate::neighbour::Neighbour;
use crate::process::{Process, device_bytes, most_bytes};
use crate::wire::{Peer, SUBNQN};

/// How one attack went; it did not succeed.
pub struct Report {
    name: &'static str,
    time: Duration,
    quiet_rate: f64,
    attacked_rate: f64,
    grown_bytes: u64,
    allowed_bytes: u64,
    resident_bytes: u64,
    descriptors: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ratio = self.attacked_rate / self.quiet_rate.max(1.0);
        write!(
            f,
            "{:<12} {:>7.2} s   neighbour {:>7.0}/s of {:>7.0}/s ({:.2})   memory +{:.1} of {:.1} MiB, {:.1} resident   {} descriptors",
            self.name,
            self.time.as_secs_f64(),
            self.attacked_rate,
            self.quiet_rate,
            ratio,
            self.grown_bytes as f64 / f64::from(1 << 20),
            self.allowed_bytes as f64 / f64::from(1 << 20),
            self.resident_bytes as f64 / f64::from(1 << 20),
            self.descriptors,
        )
    }
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

/// Runs an attack, and fails if it does, or if the target has ended, holds more than its limits allow, or has done its
/// neighbour wrong.
pub fn run(process: &mut Process, attack: &Attack, scene: &Scene, quiet: Duration) -> Result<Report> {
    let most_descriptors = settled(process)?;
    let neighbour = Neighbour::start(process.address).context("the neighbour connects")?;
    let rate_before = neighbour.rate(quiet);
    process.forget_peak()?;
    let (before, operations, start) = (process.look()?, neighbour.operations(), Instant::now());
    let mut outcome = (attack.run)(scene);
    // Again while it takes less time than can be measured.
    while outcome.is_ok() && start.elapsed() < quiet {
        outcome = (attack.run)(scene);
    }
    let (time, done) = (start.elapsed(), neighbour.operations() - operations);
    process.is_alive()?;
    outcome?;
    // Other work on the machine comes and goes, so what is quiet is asked before and after.
    let quiet_rate = (rate_before + neighbour.rate(quiet)) / 2.0;
    neighbour.finish(operations)?;
    let after = process.look()?;
    let grown_bytes = after.peak_bytes.saturating_sub(before.resident_bytes);
    let allowed_bytes = most_bytes(attack.connections);
    ensure!(grown_bytes <= allowed_bytes, "memory grew by {grown_bytes} bytes, and the limits say {allowed_bytes}");
    process.settles(most_descriptors).context("descriptors are given back")?;
    let attacked_rate = done as f64 / time.as_secs_f64().max(1e-6);
    let (descriptors, resident_bytes) = (process.look()?.descriptors, after.resident_bytes);
    Ok(Report {
        name: attack.name,
        time,
        quiet_rate,
        attacked_rate,
        grown_bytes,
        allowed_bytes,
        resident_bytes,
        descriptors,
    })
}
