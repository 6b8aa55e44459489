//! Benchmarks, one per claim. See `docs/performance.md` for what came out.
//!
//! Two programs are made of it. `sealblock bench` measures what others have published, for users: [`mod@bench`]. `sealblock-perf` compares parts of this
//! project with baselines and with other builds of itself, for those who work on it: [`Command`]. The product does without it: it is compiled with the
//! feature `comparisons`, as it is by default, and `sealblock` asks for none.

// What only the second program calls.
#![cfg_attr(not(feature = "comparisons"), allow(dead_code))]

pub mod bench;

#[cfg(feature = "comparisons")]
mod against;
mod amplification;
mod async_seal;
#[cfg(feature = "comparisons")]
mod btrfs;
mod counted;
mod detection;
mod devices;
mod dix;
#[cfg(feature = "comparisons")]
mod fairness;
mod guards;
mod host_guard;
mod latency;
#[cfg(feature = "comparisons")]
mod layouts;
mod load;
mod medium;
#[cfg(feature = "comparisons")]
mod mirror;
#[cfg(feature = "comparisons")]
mod mirror_served;
#[cfg(feature = "comparisons")]
mod mirror_size;
#[cfg(feature = "comparisons")]
mod nbd;
#[cfg(feature = "comparisons")]
mod notes;
mod nvme_tcp;
mod one_pass;
mod options;
mod remote;
mod remote_verify;
mod report;
#[cfg(feature = "comparisons")]
mod restart;
#[cfg(feature = "comparisons")]
mod server;
mod setup;
#[cfg(feature = "comparisons")]
mod stripe;
#[cfg(feature = "comparisons")]
mod verify;
#[cfg(feature = "comparisons")]
mod verify_linux;
#[cfg(feature = "comparisons")]
mod volume;

#[cfg(feature = "comparisons")]
pub use options::Command;

#[cfg(feature = "comparisons")]
use options::Claim;

/// Does what the command line of `sealblock-perf` asks, and prints what came out.
#[cfg(feature = "comparisons")]
pub fn run(command: Command) -> anyhow::Result<()> {
    match command.claim {
        Claim::Guards => print!("{}", guards::run()?),
        Claim::Volume(options) => volume::run(&options)?,
        Claim::Amplification(options) => amplification::run(&options)?,
        Claim::AsyncSeal(options) => async_seal::run(&options)?,
        Claim::Notes(options) => notes::run(&options)?,
        Claim::Fairness(options) => fairness::run(&options)?,
        Claim::Verify(options) => verify::run(&options)?,
        Claim::VerifyLinux(options) => verify_linux::run(&options)?,
        Claim::Btrfs(options) => btrfs::run(&options)?,
        Claim::Layouts(options) => layouts::run(&options)?,
        Claim::Stripe(options) => stripe::run(&options)?,
        Claim::Mirror(options) => mirror::run(&options)?,
        Claim::MirrorSize(options) if !options.server.is_empty() => mirror_served::run(&options)?,
        Claim::MirrorSize(options) => mirror_size::run(&options)?,
        Claim::NvmeTcp(options) => nvme_tcp::run(options)?,
        Claim::Nbd(options) => nbd::run(&options)?,
        Claim::RemoteVerify(options) => remote_verify::run(options)?,
        Claim::Restart(options) => restart::run(&options)?,
        Claim::OnePass(options) => one_pass::run(options)?,
        Claim::Dix(options) => dix::run(options)?,
        Claim::Against { other, turns, words } => against::run(&other, turns, &words)?,
    }
    Ok(())
}
