//! Configuration of each side, and the limits that bound its memory.
//!
//! A connection holds at most: one staging buffer, `max_commands` entries, `max_bytes_in_flight` and another staging
//! buffer's worth of write data (target only), the buffers of its caller, and an output entry for each command and R2T. None
//! of it grows with what a peer sends.

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;

use sealblock_protocols_nvme::Command;
use sealblock_runtime_memory::Pool;

use crate::crcs::BlockLayout;
use crate::pdu::{Direction, PduRules};

/// In-capsule data that every controller accepts for Fabrics and Admin commands, in bytes (NVMe/TCP 3.3.1).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// Returns the block layout of a command's in-capsule data, or `None` if its block CRCs are not wanted.
#[derive(Clone)]
pub struct LayoutOf(Arc<LayoutFn>);

type LayoutFn = dyn Fn(&Command) -> Option<BlockLayout> + Send + Sync;

impl LayoutOf {
    /// Asks `shape_of` for each command with in-capsule data, when data digests are on.
    pub fn new(layout_of: impl Fn(&Command) -> Option<BlockLayout> + Send + Sync + 'static) -> LayoutOf {
        LayoutOf(Arc::new(layout_of))
    }

    /// The layout of this command's data.
    pub(crate) fn of(&self, command: &Command) -> Option<BlockLayout> {
        (self.0)(command)
    }
}

impl fmt::Debug for LayoutOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShapeOf(..)")
    }
}

/// Configuration of a target's side of a connection.
#[derive(Clone, Debug)]
pub struct TargetConfig {
    /// The pool for staging, headers and in-capsule data.
    pub pool: Pool,
    /// Length of the staging buffer, in bytes.
    pub staging_bytes: usize,
    /// Payloads of which at least this many bytes are missing are received in place, not copied from staging.
    pub direct_bytes: usize,
    /// True to use header digests if the host requests them.
    pub header_digest: bool,
    /// True to use data digests if the host requests them.
    pub data_digest: bool,
    /// CPDA: alignment of data sent to the target, in dwords, 0's based, at most 31. Linux hosts refuse any but 0.
    pub cpda: u8,
    /// MAXH2CDATA, in bytes; rounded down to dwords, at least 4096.
    pub max_h2c_data_bytes: u32,
    /// Maximum bytes requested by one R2T; rounded down to dwords, at least 4.
    pub max_r2t_bytes: u32,
    /// Maximum R2Ts outstanding for a command, cut to the host's MAXR2T.
    pub max_r2ts: NonZeroU32,
    /// Maximum data bytes in a C2HData PDU; rounded down to dwords, at least 4. Longer data takes several, which
    /// alternate with those of other commands.
    pub max_c2h_data_bytes: u32,
    /// Maximum in-capsule data, in bytes: 8192, or as IOCCSZ allows.
    pub max_in_capsule_bytes: u32,
    /// Commands in flight, from the capsule's arrival until its response has been handed to `transmit`. Hosts have at
    /// most a queue's entries less one; a host with more violates the protocol.
    pub max_commands: NonZeroU16,
    /// Write data of commands in flight, in bytes, in capsules and fetched. Data in capsules may exceed it by one staging
    /// buffer; then no more is received until responses have left.
    pub max_bytes_in_flight: usize,
    /// Block layout of in-capsule data: the pass that checks the data digest then yields the block CRCs too.
    pub layout_of: Option<LayoutOf>,
}

impl TargetConfig {
    /// Digests allowed, no alignment, 128 commands, 32 MiB in flight, one R2T for each transfer.
    pub fn new(pool: Pool) -> TargetConfig {
        TargetConfig {
            pool,
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
            header_digest: true,
            data_digest: true,
            cpda: 0,
            max_h2c_data_bytes: 1 << 20,
            max_r2t_bytes: u32::MAX,
            max_r2ts: NonZeroU32::MIN,
            max_c2h_data_bytes: 256 << 10,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_commands: const { NonZeroU16::new(128).expect("128 is not 0") },
            max_bytes_in_flight: 32 << 20,
            layout_of: None,
        }
    }
}

/// Configuration of a host's side of a connection.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// The pool for staging and headers.
    pub pool: Pool,
    /// Length of the staging buffer, in bytes.
    pub staging_bytes: usize,
    /// Payloads of which at least this many bytes are missing are received in place, not copied from staging.
    pub direct_bytes: usize,
    /// True to request header digests.
    pub header_digest: bool,
    /// True to request data digests.
    pub data_digest: bool,
    /// HPDA: alignment of data sent to the host, in dwords, 0's based, at most 31.
    pub hpda: u8,
    /// R2Ts that a target may have outstanding for a command (MAXR2T plus 1).
    pub max_r2ts: NonZeroU32,
    /// Maximum data bytes sent in a capsule: 8192 on an admin queue; on an I/O queue as IOCCSZ says, 0 for none.
    pub max_in_capsule_bytes: u32,
    /// Maximum data bytes in an H2CData PDU, cut to MAXH2CDATA; rounded down to dwords, at least 4.
    pub max_h2c_data_bytes: u32,
    /// Commands in flight.
    pub max_commands: NonZeroU16,
}

impl HostConfig {
    /// No digests, no alignment, 128 commands, 8192 bytes in capsule, one R2T for a command.
    pub fn new(pool: Pool) -> HostConfig {
        HostConfig {
            pool,
            staging_bytes: 64 << 10,
            direct_bytes: 8 << 10,
            header_digest: false,
            data_digest: false,
            hpda: 0,
            max_r2ts: NonZeroU32::MIN,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_h2c_data_bytes: 1 << 20,
            max_commands: const { NonZeroU16::new(128).expect("128 is not 0") },
        }
    }
}

/// What both sides negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Negotiated {
    /// PDU headers carry digests.
    pub header_digest: bool,
    /// Data carries digests.
    pub data_digest: bool,
    /// Alignment of data sent to the host, in bytes.
    pub host_alignment_bytes: u8,
    /// Alignment of data sent to the controller, in bytes.
    pub controller_alignment_bytes: u8,
    /// MAXH2CDATA in bytes.
    pub max_h2c_data_bytes: u32,
    /// R2Ts that may be outstanding for a command: the host's maximum; at the target, cut to its own.
    pub max_r2ts: u32,
}

impl Negotiated {
    /// The rules for PDUs of a direction.
    pub(crate) fn rules(&self, direction: Direction) -> PduRules {
        let alignment_bytes = match direction {
            Direction::ToController => self.controller_alignment_bytes,
            Direction::ToHost => self.host_alignment_bytes,
        };
        let (header_digest, data_digest) = (self.header_digest, self.data_digest);
        PduRules { direction, header_digest, data_digest, alignment_bytes }
    }
}

/// Rounds down to dwords, but to no less than one.
pub(crate) const fn whole_dwords(bytes: u32) -> u32 {
    if bytes < 4 { 4 } else { bytes & !3 }
}
