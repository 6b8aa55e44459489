//! What this program does inside a guest: the agent that runs scripts, and probes for what the guest's other programs cannot
//! do, or not block by block.

mod agent;
mod blocks;
mod tamper;

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

/// Work inside a guest.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Run scripts that come through a port, until the guest ends.
    Agent {
        /// The port.
        port: PathBuf,
    },
    /// Read every block by itself, past all caches, and print those that cannot be read, with the error's number.
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
        /// What the pattern is made from.
        seed: u64,
    },
    /// Read the pattern back; print blocks of 4096 bytes that hold anything else.
    Check {
        /// The device.
        device: PathBuf,
        /// What the pattern is made from.
        seed: u64,
    },
    /// Attach a target as `sealblock attach --pi GUARD` does, and change a bit of each request between the kernel and the checks.
    Tamper {
        /// The target.
        target: sealblock_stack::target::TargetName,
        /// ip, crc16 or crc64.
        #[arg(value_parser = tamper::guard)]
        guard: sealblock_exports_ublk::HostGuard,
        /// reads or writes.
        #[arg(value_parser = tamper::way)]
        way: sealblock_exports_ublk::Tampering,
    },
    /// Call `fallocate(2)`.
    Fallocate {
        /// The device.
        device: PathBuf,
        /// What to do: punch-hole, zero-range, write-zeroes.
        #[arg(value_parser = blocks::mode)]
        mode: rustix::fs::FallocateFlags,
        /// Where, in bytes.
        offset_bytes: u64,
        /// How much, in bytes.
        length_bytes: u64,
    },
}

/// Does it.
///
/// # Errors
/// Those of the command.
pub fn run(command: &GuestCommand) -> Result<()> {
    match command {
        GuestCommand::Agent { port } => agent::run(port),
        GuestCommand::Scan { device, block_bytes } => blocks::scan(device, *block_bytes),
        GuestCommand::Fill { device, seed } => blocks::fill(device, *seed),
        GuestCommand::Check { device, seed } => blocks::check(device, *seed),
        GuestCommand::Tamper { target, guard, way } => tamper::attach(target, *guard, *way),
        GuestCommand::Fallocate { device, mode, offset_bytes, length_bytes } => {
            blocks::fallocate(device, *mode, *offset_bytes, *length_bytes)
        }
    }
}
