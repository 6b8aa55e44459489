//! Benchmarks, one per claim. See `docs/performance.md` for what came out.
//!
//! Two programs are made of it. `sealblock bench` measures what others have published, for users: [`mod@bench`]. `sealblock-perf` compares parts of this
//! project with baselines and with other builds of itself, for those who work on it: [`run`].

pub mod bench;

mod against;
mod amplification;
mod async_seal;
mod btrfs;
mod counted;
mod detection;
mod devices;
mod dix;
mod fairness;
mod guards;
mod host_guard;
mod latency;
mod layouts;
mod load;
mod mirror;
mod mirror_served;
mod mirror_size;
mod nbd;
mod notes;
mod nvme_tcp;
mod one_pass;
mod options;
mod remote;
mod remote_verify;
mod report;
mod restart;
mod server;
mod setup;
mod stripe;
mod verify;
mod verify_linux;
mod volume;

pub use options::Command;

use options::Claim;

/// Does what the command line of `sealblock-perf` asks, and prints what came out.
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
