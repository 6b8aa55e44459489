//! The part of this program that runs inside a guest: the agent that runs scripts, and operations that the guest's
//! other programs do not have, or not for single blocks.

mod agent;
mod blocks;
mod counting;
mod files;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Subcommand;
use sealblock_exports_ublk::{HostGuard, Tampering};
use sealblock_server::plan::BlockDevicePlan;
use sealblock_server::run::attach::{AttachEvent, AttachPlan};
use sealblock_stack::Usage;
use sealblock_stack::target::TargetName;

/// Commands inside a guest.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Run scripts that come through a port, until the guest ends.
    Agent {
        /// The port.
        port: PathBuf,
    },
    /// Read every block separately, bypassing all caches, and print the unreadable ones with the error number.
    Scan {
        /// The device.
        device: PathBuf,
        /// Bytes in a block.
        block_bytes: usize,
    },
    /// Fill a device with a pattern in which every block is different.
    Fill {
        /// The device.
        device: PathBuf,
        /// The seed of the pattern.
        seed: u64,
    },
    /// Read the pattern back, and print the blocks of 4096 bytes with other content.
    Check {
        /// The device.
        device: PathBuf,
        /// The seed of the pattern.
        seed: u64,
    },
    /// Print random bytes, different each time.
    Random {
        /// How many.
        bytes: u64,
    },
    /// Attach a target as `sealblock attach --pi GUARD` does, and change a bit of each request between the kernel and
    /// the checks.
    Tamper {
        /// The target.
        target: TargetName,
        /// ip, crc16 or crc64.
        #[arg(value_parser = guard)]
        guard: HostGuard,
        /// reads or writes.
        #[arg(value_parser = way)]
        way: Tampering,
    },
    /// Increment the number at the start of a block with Compare and Write.
    CountUp {
        /// The target.
        target: TargetName,
        /// The block.
        lba: u64,
        /// How many times.
        times: u64,
    },
    /// Write files with fsync, and check them on request, until CONTROL.ask contains `end`.
    WriteFiles {
        /// The folder, on the file system under test.
        folder: PathBuf,
        /// The prefix of the files for requests and answers, on another file system.
        control: PathBuf,
        /// The seed of the random choices.
        seed: u64,
    },
    /// Check the files that `write-files` wrote.
    CheckFiles {
        /// Their folder.
        folder: PathBuf,
        /// CONTROL.list of `write-files`.
        list: PathBuf,
    },
    /// Call `fallocate(2)`.
    Fallocate {
        /// The device.
        device: PathBuf,
        /// The operation: punch-hole, zero-range, write-zeroes.
        #[arg(value_parser = blocks::mode)]
        mode: rustix::fs::FallocateFlags,
        /// Offset in bytes.
        offset_bytes: u64,
        /// Length in bytes.
        length_bytes: u64,
    },
}

/// Runs the command.
///
/// # Errors
/// The error of the command.
pub fn run(command: &GuestCommand) -> Result<()> {
    match command {
        GuestCommand::Agent { port } => agent::run(port),
        GuestCommand::Scan { device, block_bytes } => blocks::scan(device, *block_bytes),
        GuestCommand::Fill { device, seed } => blocks::fill(device, *seed),
        GuestCommand::Check { device, seed } => blocks::check(device, *seed),
        GuestCommand::Random { bytes } => blocks::random(&mut std::io::stdout().lock(), *bytes),
        GuestCommand::Tamper { target, guard, way } => tamper(target, *guard, *way),
        GuestCommand::CountUp { target, lba, times } => counting::count_up(target, *lba, *times),
        GuestCommand::WriteFiles { folder, control, seed } => files::write(folder, control, *seed),
        GuestCommand::CheckFiles { folder, list } => files::check(folder, list),
        GuestCommand::Fallocate { device, mode, offset_bytes, length_bytes } => {
            blocks::fallocate(device, *mode, *offset_bytes, *length_bytes)
        }
    }
}

/// Parses a guard's name.
fn guard(text: &str) -> Result<HostGuard, String> {
    let named = HostGuard::ALL.into_iter().find(|guard| guard.as_str() == text);
    named.ok_or_else(|| format!("no guard {text}"))
}

/// Parses the direction to corrupt.
fn way(text: &str) -> Result<Tampering, String> {
    match text {
        "reads" => Ok(Tampering::Reads),
        "writes" => Ok(Tampering::Writes),
        _ => Err(format!("neither reads nor writes: {text}")),
    }
}

/// A server for a block device that corrupts requests, to test that the checks detect it. It stays attached until a
/// signal, and prints the path of the block device as `sealblock attach --json` does.
fn tamper(target: &TargetName, guard: HostGuard, way: Tampering) -> Result<()> {
    let plan = AttachPlan {
        target: target.clone(),
        usage: Usage::Alone,
        block_device: BlockDevicePlan {
            number: None,
            queues: 1,
            depth: 16,
            guard: Some(guard),
            read_only: false,
            tampering: Some(way),
        },
    };
    let report = |event: &AttachEvent| {
        if let AttachEvent::Attached(info) = event {
            println!("{}", serde_json::json!({ "path": info.path }));
        }
    };
    match sealblock_server::run::attach::run(&plan, report) {
        Ok(()) => Ok(()),
        Err(failure) => bail!("{failure}"),
    }
}
