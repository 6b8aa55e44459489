//! Compares parts of this project with baselines and with other builds: the program `sealblock-perf`.

mod against;
mod amplification;
mod btrfs;
mod btrfs_write;
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
mod scale;
mod server;
mod stripe;
mod verify;
mod verify_linux;
mod volume;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use options::{
    AmplificationOptions, BtrfsOptions, BtrfsWriteOptions, FileOptions, MirrorSizeOptions, NbdOptions, RemoteOptions,
    RestartOptions, ScaleOptions, VerifyLinuxOptions,
};

/// Compares a claim of the project with a baseline measured in the same run.
#[derive(Parser)]
#[command(name = "sealblock-perf")]
pub struct Command {
    /// The claim.
    #[command(subcommand)]
    pub claim: Claim,
}

/// The claims.
#[derive(Subcommand)]
pub enum Claim {
    /// Checksums, compared with crc-fast and memory.
    Guards,
    /// A protected volume, compared with the same file without tags.
    Volume(FileOptions),
    /// Bytes written to the medium per byte of application data.
    Amplification(AmplificationOptions),
    /// Writes that are noted before they complete, so that they survive the process, compared with writes kept only in
    /// memory.
    Notes(FileOptions),
    /// The latency of one client while others flood the same volume.
    Fairness(FileOptions),
    /// The time until a volume is served again after a crash, and the memory of the server.
    Restart(RestartOptions),
    /// Verify of a cached volume, compared with plain reading and with memory.
    Verify(FileOptions),
    /// Verify of a plain file and of a loop device, compared with dd and badblocks.
    VerifyLinux(VerifyLinuxOptions),
    /// A Btrfs filesystem read in this process, compared with the kernel's mount of it.
    Btrfs(BtrfsOptions),
    /// A Btrfs filesystem changed in this process, and through FUSE, compared with the kernel's mount.
    BtrfsWrite(BtrfsWriteOptions),
    /// Data written to Btrfs whose checksums are computed while they are being written, compared with before that.
    BtrfsSums(BtrfsWriteOptions),
    /// A stripe of two members, compared with both members alone.
    Stripe(FileOptions),
    /// A mirror of two replicas, compared with the same devices without a mirror, written at the same time.
    Mirror(FileOptions),
    /// Random writes to mirrors of different sizes, compared with two volumes of that size without a mirror, written at
    /// the same time.
    MirrorSize(MirrorSizeOptions),
    /// Our target and our host over loopback, each on one core, with and without protection and digests.
    NvmeTcp(RemoteOptions),
    /// One namespace on several cores, compared with the same on one core: requests, CPU time of the target, crossings.
    Scale(ScaleOptions),
    /// Our NBD server with a device in memory, compared with nbdkit and qemu-nbd.
    Nbd(NbdOptions),
    /// Another build of this program, alternating with this one, for one of the claims above.
    Against {
        /// The other program.
        other: PathBuf,
        /// How often each is run.
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
        Claim::BtrfsWrite(options) => btrfs_write::run(&options)?,
        Claim::BtrfsSums(options) => btrfs_write::sums::run(&options)?,
        Claim::Stripe(options) => stripe::run(&options)?,
        Claim::Mirror(options) => mirror::run(&options)?,
        Claim::MirrorSize(options) if !options.server.is_empty() => mirror_served::run(&options)?,
        Claim::MirrorSize(options) => mirror_size::run(&options)?,
        Claim::NvmeTcp(options) => nvme_tcp::run(options)?,
        Claim::Scale(options) => scale::run(&options)?,
        Claim::Nbd(options) => nbd::run(&options)?,
        Claim::Restart(options) => restart::run(&options)?,
        Claim::Against { other, turns, words } => against::run(&other, turns, &words)?,
    }
    Ok(())
}
