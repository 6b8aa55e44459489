//! What peers can make a target hold in memory, and how long it waits for them.

use std::time::Duration;

use sealblock_runtime_reactor::Budget;

/// The limits of one [`crate::Target`], over all of its cores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent connections; further ones are closed as soon as they are accepted.
    pub connections: usize,
    /// I/O queues of one controller, at most 65,535.
    pub io_queues: u16,
    /// Entries of a queue (CAP.MQES); a host has at most one command fewer in flight. At least 32, which hosts request
    /// for the admin queue.
    pub commands: u16,
    /// The maximum bytes of write data, and separately of read data, in flight on one connection. Commands that exceed
    /// it wait. Raised to twice `transfer_bytes` if it is less.
    pub bytes_in_flight: usize,
    /// The maximum bytes of write and read data together over all connections. Each connection has a reserve for one
    /// transfer of the largest size; commands beyond that wait. Raised to the reserve for `connections` if it is less.
    /// In addition, an eighth of this is for what commands hold while they execute: the pieces of a Copy, the blocks
    /// that a Compare reads, the pieces of Verify and zeroes.
    pub total_bytes_in_flight: usize,
    /// The largest data transfer (MDTS) in bytes, not counting metadata; rounded down to a power of two, from 8192 to 1
    /// GiB.
    pub transfer_bytes: u32,
    /// Time from accepting a connection until its Connect command completes. This also limits slow senders.
    pub connect: Duration,
    /// How long a controller without a keep alive timeout may get no command.
    pub idle: Duration,
    /// How long a host may receive nothing of what was sent to it, in whole milliseconds. Then its connection ends.
    pub receive: Duration,
    /// Time that commands in flight get when the target stops, and that a host gets to receive the last bytes.
    pub drain: Duration,
}

impl Default for Limits {
    /// 240 connections, 64 I/O queues of 256 entries, 8 MiB in flight each way and 256 MiB over all, transfers of 1
    /// MiB, 10 s to connect, 2 min idle, 1 min without receiving, 5 s to drain.
    fn default() -> Limits {
        Limits {
            connections: 240,
            io_queues: 64,
            commands: 256,
            bytes_in_flight: 8 << 20,
            total_bytes_in_flight: 256 << 20,
            transfer_bytes: 1 << 20,
            connect: Duration::from_secs(10),
            idle: Duration::from_secs(120),
            receive: Duration::from_secs(60),
            drain: Duration::from_secs(5),
        }
    }
}

/// WZSL: 32 MiB, the maximum of the 16-bit block count with the smallest blocks.
pub(crate) const WRITE_ZEROES_BYTES: u64 = 4096 << WZSL;
pub(crate) const WZSL: u8 = 13;

/// Data that a capsule on any queue may carry, in bytes: the minimum for admin queues.
pub(crate) const IN_CAPSULE_BYTES: u32 = sealblock_protocols_nvme_tcp::config::ADMIN_IN_CAPSULE_BYTES;

/// DMRL, DMRSL, DMSL: the ranges, blocks of a range and blocks of a Dataset Management command that a host should not
/// exceed. Longer ones are executed too, in parts.
pub(crate) const DISCARD_RANGES: u8 = 32;
pub(crate) const DISCARD_RANGE_BLOCKS: u32 = 1 << 16;
pub(crate) const DISCARD_BLOCKS: u64 = 1 << 18;

/// The longest data of a C2HData PDU without tags, in bytes: a millisecond of a fast network.
const READ_PDU_BYTES: u32 = 4 << 20;

impl Limits {
    /// Returns the limits, adjusted to values that the protocol can express.
    pub(crate) fn clamped(mut self) -> Limits {
        self.io_queues = self.io_queues.max(1);
        self.commands = self.commands.max(32);
        self.transfer_bytes = 1 << self.transfer_bytes.clamp(8192, 1 << 30).ilog2();
        self.bytes_in_flight = self.bytes_in_flight.max(2 * self.transfer_bytes as usize);
        let aside = self.connections.saturating_mul(self.transfer_with_tags());
        self.total_bytes_in_flight = self.total_bytes_in_flight.max(self.bytes_in_flight).max(aside);
        self
    }

    /// The largest transfer with its tags, in bytes, rounded up to the unit of the budget: the reserve for each
    /// connection.
    pub(crate) fn transfer_with_tags(&self) -> usize {
        Budget::round_up(self.transfer_bytes as usize / 32 * 33)
    }

    /// The maximum data of one C2HData PDU in bytes: a whole read with tags, but limited so that other commands are not
    /// delayed. Some hosts fail when the data of a read comes in several PDUs.
    pub(crate) fn read_pdu_bytes(&self) -> u32 {
        self.transfer_bytes.min(READ_PDU_BYTES) / 32 * 33
    }

    /// MDTS: the largest transfer as a power of two of pages of 4096 bytes; never 0, which means no limit.
    pub(crate) fn mdts(&self) -> u8 {
        (self.transfer_bytes.ilog2() - 12) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_become_what_the_protocol_can_say() {
        let odd = Limits { commands: 1, transfer_bytes: 3_000_000, bytes_in_flight: 0, ..Limits::default() }.clamped();
        assert_eq!((odd.commands, odd.transfer_bytes, odd.bytes_in_flight), (32, 1 << 21, 1 << 22));
        assert_eq!((odd.mdts(), Limits::default().mdts()), (9, 8));
        assert_eq!(Limits::default().clamped(), Limits::default());
        let many = Limits { connections: 1000, ..Limits::default() }.clamped();
        assert_eq!(many.total_bytes_in_flight, 1000 * ((1 << 20) + (64 << 10)), "a transfer for each");
    }
}
