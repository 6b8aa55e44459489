//! The shapes of groups, and the machines on which they run.

use std::fmt;
use std::ops::Range;

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_volume::format::Layout;
use sealblock_simulator::executor::{Executor, RunEnd};
use sealblock_simulator::random::{Random, Trace};
use sealblock_units::{BlockSize, Extent};

use crate::look::LIMITS;

/// Blocks of a chunk of a stripe.
const CHUNK_BLOCKS: u64 = 8;

/// The structure of the group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// A mirror of two volumes.
    Mirror2,
    /// A mirror of three volumes.
    Mirror3,
    /// A mirror of a stripe of two volumes and of a third volume.
    MirrorOfStripe,
    /// A stripe of two volumes.
    Stripe2,
    /// A stripe of three volumes.
    Stripe3,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [Kind::Mirror2, Kind::Mirror3, Kind::MirrorOfStripe, Kind::Stripe2, Kind::Stripe3];

    /// The volumes of each replica, by number. A stripe is one replica.
    pub fn replicas(self) -> Vec<Range<usize>> {
        match self {
            Kind::Mirror2 => vec![0..1, 1..2],
            Kind::Mirror3 => vec![0..1, 1..2, 2..3],
            Kind::MirrorOfStripe => vec![0..2, 2..3],
            Kind::Stripe2 => std::iter::once(0..2).collect(),
            Kind::Stripe3 => std::iter::once(0..3).collect(),
        }
    }

    /// The number of volumes.
    pub fn volumes(self) -> usize {
        self.replicas().last().map_or(0, |replica| replica.end)
    }

    /// The replica of a volume.
    pub fn replica_of(self, volume: usize) -> usize {
        self.replicas().iter().position(|replica| replica.contains(&volume)).unwrap_or(0)
    }

    /// True if each replica has a copy of everything.
    pub fn is_mirror(self) -> bool {
        !matches!(self, Kind::Stripe2 | Kind::Stripe3)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Mirror2 => "mirror of two",
            Kind::Mirror3 => "mirror of three",
            Kind::MirrorOfStripe => "mirror with a stripe",
            Kind::Stripe2 => "stripe of two",
            Kind::Stripe3 => "stripe of three",
        })
    }
}

/// The shape of a group.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Its structure.
    pub kind: Kind,
    /// Size of a block.
    pub block_size: BlockSize,
    /// Bytes of a sector of each member.
    pub sector_bytes: u32,
    /// Blocks of each replica of a mirror, and of a whole stripe.
    pub capacity_blocks: u64,
    /// Format of the protection information.
    pub protection: PiFormat,
    /// Base-2 logarithm of the blocks of a region of a mirror.
    pub region_shift: u32,
}

impl Shape {
    /// Draws a shape with this structure.
    pub fn draw(kind: Kind, random: &Random) -> Shape {
        let shapes = [(BlockSize::B512, 512), (BlockSize::B4096, 512), (BlockSize::B4096, 4096)];
        let (block_size, sector_bytes) = *random.pick(&shapes);
        // A multiple of whole chunks for both two and three members.
        let capacity_blocks = random.between(4, 8) * 6 * CHUNK_BLOCKS;
        let guard = *random.pick(&[GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64]);
        let protection = PiFormat::with_default_storage_tag(guard, *random.pick(&ProtectionType::ALL));
        let region_shift = random.between(1, 5) as u32;
        Shape { kind, block_size, sector_bytes, capacity_blocks, protection, region_shift }
    }

    /// Bytes of a chunk of a stripe.
    pub fn chunk_bytes(&self) -> u64 {
        CHUNK_BLOCKS << self.block_size.shift()
    }

    /// The layout of a volume.
    pub fn layout(&self, volume: usize) -> Layout {
        let replica = self.kind.replicas()[self.kind.replica_of(volume)].len() as u64;
        Layout::new(self.block_size, self.sector_bytes, self.capacity_blocks / replica)
            .expect("drawn shapes are possible")
    }
}

/// What a machine needs to open a group.
#[derive(Clone)]
pub struct Machine {
    /// The processor and clock.
    pub executor: Executor,
    /// True if it opens read-only.
    pub read_only: bool,
    /// A value that differs from that of every other open.
    pub random: [u8; 16],
}

/// All blocks of a device, in pieces that one read can return.
pub fn pieces(blocks: u64) -> Vec<Extent> {
    const AT_ONCE: u64 = 64;
    let all = (0..blocks).step_by(AT_ONCE as usize);
    all.filter_map(|first| Extent::from_raw(first, AT_ONCE.min(blocks - first)).ok()).collect()
}

/// Runs the work of one machine until it ends. Tasks that are spawned and not awaited are dropped with it.
///
/// # Errors
/// If the work does not end, or fails.
pub fn on_machine<T: 'static, F: Future<Output = Result<T, String>> + 'static>(
    random: &Random,
    read_only: bool,
    work: impl FnOnce(Machine) -> F,
) -> Result<T, String> {
    let executor = Executor::new(random.fork("schedule"), Trace::default());
    let mut bytes = [0; 16];
    bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|part| *part = random.word().to_le_bytes());
    let machine = Machine { executor: executor.clone(), read_only, random: bytes };
    match executor.run(LIMITS, work(machine)) {
        RunEnd::Finished(result) => result,
        RunEnd::Halted => Err("halted".to_owned()),
        RunEnd::Stuck(stuck) => Err(format!("hangs: {stuck}")),
    }
}
