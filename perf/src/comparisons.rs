//! Parts of this project compared with baselines and with other builds of themselves: the program `sealblock-perf`.

mod against;
mod amplification;
mod btrfs;
mod contender;
mod fairness;
mod guards;
mod mirror;
mod mirror_served;
mod mirror_size;
mod nbd;
mod notes;
mod nvme_tcp;
mod options;
mod restart;
mod rounds;
mod server;
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
        Claim::Notes(options) => notes::run(&options)?,
        Claim::Fairness(options) => fairness::run(&options)?,
        Claim::Verify(options) => verify::run(&options)?,
        Claim::VerifyLinux(options) => verify_linux::run(&options)?,
        Claim::Btrfs(options) => btrfs::run(&options)?,
        Claim::Stripe(options) => stripe::run(&options)?,
        Claim::Mirror(options) => mirror::run(&options)?,
        Claim::MirrorSize(options) if !options.server.is_empty() => mirror_served::run(&options)?,
        Claim::MirrorSize(options) => mirror_size::run(&options)?,
        Claim::NvmeTcp(options) => nvme_tcp::run(options)?,
        Claim::Nbd(options) => nbd::run(&options)?,
        Claim::Restart(options) => restart::run(&options)?,
        Claim::Against { other, turns, words } => against::run(&other, turns, &words)?,
    }
    Ok(())
}
