//! The commands of floods: every opcode of a queue, at its maximum length.

use sealblock_integrity::ChecksumKind;
use sealblock_protocols_nvme::admin::{Cns, GetLogPage, Identify, SetFeatures};
use sealblock_protocols_nvme::extensions::ReservedArea;
use sealblock_protocols_nvme::fabrics::{FabricsCommand, PropertyGet};
use sealblock_protocols_nvme::features::FeatureId;
use sealblock_protocols_nvme::nvm::{
    BlockCommand, Checksum, CopyCommand, CopyDescriptorFormat, CopyRange, DatasetManagement, DsmAttributes, DsmRange,
    GetLbaStatus, IoCommand, LbaStatusAction, ProtectionInfo, WriteZeroes,
};
use sealblock_protocols_nvme::{AdminOpcode, Command, Count8};
use sealblock_units::{Extent, Lba};
use zerocopy::IntoBytes;

use crate::wire::{capsule, in_capsule, transport};

/// Bytes that floods read and write; the size of a device in memory.
pub const AREA_BYTES: u64 = 256 << 20;
/// The same in blocks.
const AREA_BLOCKS: u64 = AREA_BYTES / 4096;
/// The maximum number of blocks of one command or range.
const MOST_BLOCKS: u64 = 1 << 16;
/// Blocks of the longest Write Zeroes.
const ZERO_BLOCKS: u64 = 8192;
/// Room for the longest log page.
const PAGE_BYTES: usize = 1 << 20;

/// A kind of namespaces of the flooded server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A device in memory with visible protection information of 16 bits.
    Memory,
    /// A protected volume.
    Volume,
    /// A raw file.
    Raw,
}

impl Kind {
    /// All of them, in the order of their namespaces.
    pub const ALL: [Kind; 3] = [Kind::Memory, Kind::Volume, Kind::Raw];

    /// The namespace that is flooded.
    pub fn nsid(self) -> u32 {
        1 + self as u32
    }

    /// The other namespace of this kind on the same server.
    pub fn other_nsid(self) -> u32 {
        self.nsid() + Self::ALL.len() as u32
    }

    /// Bytes of a block of it.
    pub(crate) fn block_bytes(self) -> u64 {
        match self {
            Kind::Memory | Kind::Volume => 4096,
            Kind::Raw => 512,
        }
    }

    /// The memory in bytes that data written by floods may need.
    pub fn stored_bytes(self) -> u64 {
        if self == Kind::Memory { AREA_BYTES + AREA_BYTES / 8 } else { 0 }
    }

    /// Its name in tables, and that of its NBD export.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Memory => "memory",
            Kind::Volume => "volume",
            Kind::Raw => "raw",
        }
    }
}

/// The queue that a command is sent to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Set {
    /// The admin queue, for admin and Fabrics commands.
    Admin,
    /// An I/O queue.
    Io,
}

/// A command of a flood.
pub enum Made {
    /// With data in its capsule, or without data.
    Carries(Command, Vec<u8>),
    /// With data of this length that the transport transfers.
    Moves(Command, usize),
}

/// A flood of one command.
pub struct Flood {
    /// Its name.
    pub name: &'static str,
    /// Its queue.
    pub set: Set,
    /// Makes the command with this number, for a namespace, with transfers of at most this many bytes.
    make: fn(Kind, u64, u64) -> Made,
    /// True if every command has the same identifier.
    repeats_cid: bool,
}

impl Flood {
    /// True if the flood is meaningful on this kind of device.
    pub fn runs_on(&self, kind: Kind) -> bool {
        match self.set {
            Set::Admin => kind == Kind::Volume,
            Set::Io => true,
        }
    }

    /// The PDU of one command.
    pub(super) fn pdu(&self, kind: Kind, turn: u64, transfer_bytes: u32, cid: u16) -> Vec<u8> {
        let cid = if self.repeats_cid { 1 } else { cid };
        match (self.make)(kind, turn, u64::from(transfer_bytes)) {
            Made::Carries(command, data) if data.is_empty() => capsule(&transport(command.with_cid(cid), 0), &[]),
            Made::Carries(command, data) => capsule(&in_capsule(command.with_cid(cid), &data), &data),
            Made::Moves(command, bytes) => capsule(&transport(command.with_cid(cid), bytes), &[]),
        }
    }

    /// True if every command has the same identifier, so that only one of them is outstanding.
    pub(super) fn repeats_cid(&self) -> bool {
        self.repeats_cid
    }
}

const fn admin(name: &'static str, make: fn(Kind, u64, u64) -> Made) -> Flood {
    Flood { name, set: Set::Admin, make, repeats_cid: false }
}

const fn io(name: &'static str, make: fn(Kind, u64, u64) -> Made) -> Flood {
    Flood { name, set: Set::Io, make, repeats_cid: false }
}

/// All floods.
pub static FLOODS: &[Flood] = &[
    Flood { name: "event-one-id", set: Set::Admin, make: event, repeats_cid: true },
    admin("event", event),
    admin("identify", |_, turn, _| {
        let cns =
            [Cns::Controller, Cns::ActiveNamespaces, Cns::CommandSetController, Cns::Namespace][turn as usize % 4];
        Made::Moves(Identify { cns, nsid: if cns == Cns::Namespace { 1 } else { 0 }, cntid: 0, csi: 0 }.encode(), 4096)
    }),
    admin("log", |_, turn, _| {
        let lid = [1, 2, 3, 5, 0x0E, 0x12, 0xC0, 0xC1][turn as usize % 8];
        Made::Moves(
            GetLogPage { nsid: if lid < 0xC0 { 0 } else { 2 }, ..GetLogPage::new(lid, PAGE_BYTES as u64) }.encode(),
            PAGE_BYTES,
        )
    }),
    admin("get-features", |_, _, _| {
        let mut command = Command::new(AdminOpcode::GetFeatures.code(), 0);
        command.cdw10 = u32::from(FeatureId::HostBehavior.code()).into();
        Made::Moves(command, 512)
    }),
    admin("set-features", |_, _, _| {
        let set = SetFeatures { fid: FeatureId::HostBehavior.code(), save: false, nsid: 0, cdw11: 0 };
        Made::Carries(set.encode(), vec![0; 512])
    }),
    admin("reserved-get", |_, _, _| {
        let mut command = Command::new(AdminOpcode::GetFeatures.code(), 2);
        command.cdw10 = u32::from(FeatureId::ReservedGroupLabel.code()).into();
        Made::Moves(command, ReservedArea::Group.frame_bytes())
    }),
    admin("reserved-set", |_, _, _| {
        let set = SetFeatures { fid: FeatureId::ReservedScrubState.code(), save: false, nsid: 2, cdw11: 0 };
        Made::Moves(set.encode(), ReservedArea::Scrub.frame_bytes())
    }),
    admin("abort", |_, _, _| Made::Carries(Command::new(AdminOpcode::Abort.code(), 0), Vec::new())),
    admin("keep-alive", |_, _, _| Made::Carries(Command::new(AdminOpcode::KeepAlive.code(), 0), Vec::new())),
    admin("lba-status", |_, _, _| {
        let (action, max_bytes) = (LbaStatusAction::ScanUntracked, 256 << 10);
        let command = GetLbaStatus { start: Lba::ZERO, max_bytes, action, range_blocks: 0 }.encode(2);
        Made::Moves(command, max_bytes as usize)
    }),
    admin("property-get", |_, _, _| {
        Made::Carries(FabricsCommand::PropertyGet(PropertyGet { offset: 0, bytes: 8 }).encode(), Vec::new())
    }),
    io("flush", |kind, _, _| carried(IoCommand::Flush, kind)),
    io("write-4k", |kind, turn, _| {
        moved(IoCommand::Write(some(turn, 4096 / kind.block_bytes())), kind, 4096 / kind.block_bytes())
    }),
    io("write", |kind, turn, most| {
        moved(IoCommand::Write(some(turn, most / kind.block_bytes())), kind, most / kind.block_bytes())
    }),
    io("read-4k", |kind, turn, _| {
        moved(IoCommand::Read(some(turn, 4096 / kind.block_bytes())), kind, 4096 / kind.block_bytes())
    }),
    io("read", |kind, turn, most| {
        moved(IoCommand::Read(some(turn, most / kind.block_bytes())), kind, most / kind.block_bytes())
    }),
    io("compare", |kind, turn, most| {
        moved(IoCommand::Compare(some(turn, most / kind.block_bytes())), kind, most / kind.block_bytes())
    }),
    io("zeroes-deac", |kind, turn, _| zeroes(kind, turn, true)),
    io("zeroes", |kind, turn, _| zeroes(kind, turn, false)),
    io("dsm-1", |kind, turn, _| dsm(kind, turn, 1)),
    io("dsm-256", |kind, turn, _| dsm(kind, turn, 256)),
    io("verify", |kind, turn, _| carried(IoCommand::Verify(some(turn, MOST_BLOCKS)), kind)),
    io("checksum", |kind, turn, _| {
        carried(IoCommand::Checksum(Checksum { blocks: some(turn, MOST_BLOCKS), kind: ChecksumKind::Crc64Nvme }), kind)
    }),
    io("uncorrectable", |kind, turn, _| carried(IoCommand::WriteUncorrectable(some(turn, MOST_BLOCKS).extent), kind)),
    io("copy", copy),
];

fn event(_: Kind, _: u64, _: u64) -> Made {
    Made::Carries(Command::new(AdminOpcode::AsynchronousEventRequest.code(), 0), Vec::new())
}

/// Blocks in the area that floods use, from a multiple of their number on.
fn some(turn: u64, blocks: u64) -> BlockCommand {
    let place = (turn ^ turn >> 32).wrapping_mul(0x9E37_79B9) % (AREA_BLOCKS / blocks).max(1);
    BlockCommand::new(Extent::from_raw(place * blocks, blocks).expect("the area is small"))
}

fn encoded(command: IoCommand, kind: Kind) -> Command {
    command.encode(kind.nsid()).expect("every length fits its field")
}

fn carried(command: IoCommand, kind: Kind) -> Made {
    Made::Carries(encoded(command, kind), Vec::new())
}

fn moved(command: IoCommand, kind: Kind, blocks: u64) -> Made {
    Made::Moves(encoded(command, kind), (blocks * kind.block_bytes()) as usize)
}

fn zeroes(kind: Kind, turn: u64, deallocate: bool) -> Made {
    carried(
        IoCommand::WriteZeroes(WriteZeroes { blocks: some(turn, ZERO_BLOCKS), deallocate, whole_namespace: false }),
        kind,
    )
}

/// This number of ranges of 65,536 blocks, one after the other.
fn dsm(kind: Kind, turn: u64, ranges: u64) -> Made {
    let command =
        DatasetManagement { ranges: Count8::saturating(ranges as u16), attributes: DsmAttributes::DEALLOCATE };
    let first = if ranges == 1 { turn % 256 } else { 0 };
    let range =
        |at| DsmRange::new(Extent::from_raw((first + at) * MOST_BLOCKS, MOST_BLOCKS).expect("in the namespace"));
    let list: Vec<u8> = (0..ranges).flat_map(|at| range(at).as_bytes().to_vec()).collect();
    Made::Carries(encoded(IoCommand::DatasetManagement(command), kind), list)
}

/// A Copy of 32 MiB.
fn copy(kind: Kind, turn: u64, _: u64) -> Made {
    const RANGE_BLOCKS: u64 = 8192;
    let half = AREA_BLOCKS / 2 / RANGE_BLOCKS;
    let blocks = Extent::from_raw(turn % half * RANGE_BLOCKS, RANGE_BLOCKS).expect("in the namespace");
    let command = CopyCommand {
        destination: Lba::new((half + turn % half) * RANGE_BLOCKS),
        ranges: Count8::saturating(1),
        format: CopyDescriptorFormat::Format0,
        read: ProtectionInfo::NONE,
        write: ProtectionInfo::NONE,
        force_unit_access: false,
        limited_retry: false,
    };
    let list = command.encode_ranges(&[CopyRange { extent: blocks, protection: ProtectionInfo::NONE }]);
    Made::Carries(encoded(IoCommand::Copy(command), kind), list.expect("one range"))
}
