//! Compares parts of this project with baselines and with other builds: the program `sealblock-perf`.

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

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use options::{
    AmplificationOptions, BtrfsOptions, FileOptions, MirrorSizeOptions, NbdOptions, RemoteOptions, RestartOptions,
    VerifyLinuxOptions,
};

/// Compares one claim of the project with a baseline measured in the same run.
#[derive(Parser)]
#[command(name = "sealblock-perf")]
pub struct Command {
    /// What is claimed.
    #[command(subcommand)]
    pub claim: Claim,
}

/// The claims.
#[derive(Subcommand)]
pub enum Claim {
    /// Checksums against crc-fast and memory.
    Guards,
    /// A protected volume against the same file without tags.
    Volume(FileOptions),
    /// Bytes written to the medium per byte of application data.
    Amplification(AmplificationOptions),
    /// Writes that are noted before they complete, so that they survive the process, against writes in memory alone.
    Notes(FileOptions),
    /// The latency of one client beside floods of others, on a volume.
    Fairness(FileOptions),
    /// Time until a volume is served again after a crash, and the memory of the server.
    Restart(RestartOptions),
    /// Verify of a cached volume against plain reading and memory.
    Verify(FileOptions),
    /// Verify of a plain file and a loop device against dd and badblocks.
    VerifyLinux(VerifyLinuxOptions),
    /// A Btrfs filesystem read in this process against the kernel's mount of it.
    Btrfs(BtrfsOptions),
    /// A stripe of two members against both members by themselves.
    Stripe(FileOptions),
    /// A mirror of two replicas against the same devices by themselves, both at once.
    Mirror(FileOptions),
    /// Random writes to mirrors of different sizes, against two volumes of that size by themselves, both at once.
    MirrorSize(MirrorSizeOptions),
    /// Our target and our host over loopback, each on one core; with and without protection and digests.
    NvmeTcp(RemoteOptions),
    /// Our NBD server over memory, against nbdkit and qemu-nbd.
    Nbd(NbdOptions),
    /// Another build of this program against this one, alternating, for one of the claims above.
    Against {
        /// The other program.
        other: PathBuf,
        /// How often both are run.
        #[arg(long, default_value_t = 5)]
        turns: u32,
        /// The arguments of both; options of the claim follow its name.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// Runs the command line of `sealblock-perf`, and prints the results.
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
