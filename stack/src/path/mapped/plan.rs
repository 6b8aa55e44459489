//! Which blocks of drives hold the blocks of a device that is made of them.
//!
//! Pure: no device and no sysfs. Invariants: every block of the device is in some span, once for each copy in sync; a span lies in one
//! piece on its drive; [`Span::up`] names the very block of the device that went down there.

use sealblock_block::{Coverage, Error, ErrorKind, Unchecked, WhyUnchecked};
use sealblock_units::{Extent, Lba};

use crate::kernel::DeviceNumber;
use crate::kernel::below::{Arrangement, DeviceNode, Map, NodeKind, Place, SECTOR_BYTES, Sectors};

/// Max. drives of a device that is verified on its drives.
pub(crate) const MAX_DRIVES: usize = 64;
/// Max. pieces of one request: of 64 MiB in chunks of 4 KiB, on four copies.
const MAX_PIECES: usize = 1 << 16;

/// A device that is mapped to drives, block by block.
#[derive(Debug)]
pub(crate) struct Plan {
    node: DeviceNode,
    block_sectors: u64,
    drives: Vec<DeviceNumber>,
}

/// A run of blocks of a drive, and which blocks of the device they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    /// Which drive.
    pub(crate) drive: usize,
    /// Its blocks.
    pub(crate) extent: Extent,
    /// Runs of the device in it: the first block on the drive, and on the device. In the order of the drive's blocks.
    runs: Vec<(u64, u64)>,
}

impl Span {
    /// The block of the device that lies in a block of the drive.
    pub(crate) fn up(&self, lba: Lba) -> Option<Lba> {
        let is_in = (self.extent.start()..=self.extent.last()).contains(&lba);
        let run = self.runs.partition_point(|(on_drive, _)| *on_drive <= lba.get()).checked_sub(1)?;
        let (on_drive, on_device) = *self.runs.get(run).filter(|_| is_in)?;
        Some(Lba::new(on_device + (lba.get() - on_drive)))
    }
}

/// Sectors of a drive that hold some of a device.
struct Piece {
    drive: usize,
    on_drive: u64,
    on_device: u64,
    count: u64,
}

impl Plan {
    /// The plan of a device with blocks of this many bytes.
    ///
    /// # Errors
    /// In words, why it cannot be verified on its drives.
    pub(crate) fn new(node: DeviceNode, block_bytes: u64) -> Result<Plan, String> {
        let mut plan = Plan { node, block_sectors: (block_bytes / SECTOR_BYTES).max(1), drives: Vec::new() };
        let mut drives = Vec::new();
        plan.check(&plan.node, &mut drives)?;
        if drives.len() > MAX_DRIVES {
            return Err(format!("it is on {} drives, more than {MAX_DRIVES}", drives.len()));
        }
        plan.drives = drives;
        Ok(plan)
    }

    /// The devices and their mappings.
    pub(crate) fn node(&self) -> &DeviceNode {
        &self.node
    }

    /// The drives, by the numbers that spans have.
    pub(crate) fn drives(&self) -> &[DeviceNumber] {
        &self.drives
    }

    fn check(&self, node: &DeviceNode, drives: &mut Vec<DeviceNumber>) -> Result<(), String> {
        let name = &node.name;
        let map = match (&node.kind, &node.map) {
            (NodeKind::Disk, _) => {
                if !drives.contains(&node.number) {
                    drives.push(node.number);
                }
                return Ok(());
            }
            (NodeKind::Loop { .. }, _) => return Err(format!("{name} is a loop device")),
            (_, None) => {
                let why = node.unknown.as_deref().unwrap_or("nothing is known about it");
                return Err(format!("the blocks of {name} cannot be mapped: {why}"));
            }
            (_, Some(map)) => map,
        };
        if map.sectors() < node.sectors {
            return Err(format!("the table of {name} is shorter than the device"));
        }
        self.check_segments(name, map)?;
        // Members that no segment names hold nothing of it, as those of an array that are not in sync.
        let is_named = |member: &usize| map.segments().iter().any(|segment| names(&segment.how, *member));
        let named = (0..node.members.len()).filter(is_named);
        named.into_iter().try_for_each(|member| self.check(&node.members[member], drives))
    }

    fn check_segments(&self, name: &str, map: &Map) -> Result<(), String> {
        let is_whole = |sectors: u64| sectors.is_multiple_of(self.block_sectors);
        for segment in map.segments() {
            let chunk = match &segment.how {
                Arrangement::Linear(_) | Arrangement::Copies(_) => 0,
                Arrangement::Striped { chunk, .. } => *chunk,
                Arrangement::Nowhere | Arrangement::Unknown => {
                    return Err(format!("blocks of {name} are on no drive"));
                }
            };
            let starts = segment.how.ons().iter().map(|on| on.sector);
            if !starts.chain([chunk, segment.sectors.start]).all(is_whole) {
                return Err(format!("blocks of {name} are not aligned to those of a drive"));
            }
        }
        Ok(())
    }

    /// The spans of these blocks of the device, and what of their copies is on no drive.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn spans(&self, extent: Extent) -> Result<(Vec<Span>, Coverage), Error> {
        let wanted = Sectors::new(extent.start().get() * self.block_sectors, extent.len() * self.block_sectors);
        if wanted.end() > self.node.sectors {
            return Err(self.unplanned(wanted));
        }
        let (mut pieces, mut coverage) = (Vec::new(), Coverage::of(true));
        self.down(&self.node, wanted, wanted.start, &mut pieces, &mut coverage)?;
        pieces.sort_by_key(|piece| (piece.drive, piece.on_drive, piece.on_device));
        let mut spans: Vec<Span> = Vec::new();
        for piece in pieces {
            let block = |sector: u64| sector / self.block_sectors;
            let (start, blocks) = (block(piece.on_drive), block(piece.count));
            let run = (start, block(piece.on_device));
            let last = spans
                .last_mut()
                .filter(|last| (last.drive, last.extent.last().get().saturating_add(1)) == (piece.drive, start));
            match last.map(|last| (Extent::from_raw(last.extent.start().get(), last.extent.len() + blocks), last)) {
                Some((Ok(joined), last)) => {
                    last.extent = joined;
                    last.runs.push(run);
                }
                _ => {
                    let extent = Extent::from_raw(start, blocks).map_err(|_| self.unplanned(wanted))?;
                    spans.push(Span { drive: piece.drive, extent, runs: vec![run] });
                }
            }
        }
        Ok((spans, coverage))
    }

    /// Takes sectors of a node, which are those of the device from `on_device` on, down to the drives.
    fn down(
        &self,
        node: &DeviceNode,
        wanted: Sectors,
        on_device: u64,
        pieces: &mut Vec<Piece>,
        coverage: &mut Coverage,
    ) -> Result<(), Error> {
        if let Some(drive) = self.drives.iter().position(|drive| *drive == node.number) {
            if pieces.len() >= MAX_PIECES {
                let (limit, actual) = (MAX_PIECES as u64, pieces.len() as u64 + 1);
                return Err(ErrorKind::Limit { what: "pieces of blocks on drives", limit, actual }.into());
            }
            pieces.push(Piece { drive, on_drive: wanted.start, on_device, count: wanted.count });
            return Ok(());
        }
        let Some(map) = node.map.as_ref().filter(|map| wanted.end() <= map.sectors()) else {
            return Err(self.unplanned(wanted));
        };
        self.add_missing(node, (on_device, wanted.count), coverage);
        for piece in map.down(wanted) {
            let Place::On(on) = piece.place else { return Err(self.unplanned(wanted)) };
            let below = Sectors::new(on.sector, piece.sectors.count);
            let at = on_device + (piece.sectors.start - wanted.start);
            self.down(&node.members[on.member], below, at, pieces, coverage)?;
        }
        Ok(())
    }

    /// Sectors that no drive would check. [`Plan::new`] refuses devices that have any: left out, they would pass for verified.
    fn unplanned(&self, wanted: Sectors) -> Error {
        let name = &self.node.name;
        let reason = format!("{} sectors from {} on, below {name}, are on no drive", wanted.count, wanted.start);
        ErrorKind::Media { reason }.into()
    }

    /// Lists the copies of an array that are missing or out of sync.
    fn add_missing(&self, node: &DeviceNode, (start, count): (u64, u64), coverage: &mut Coverage) {
        let NodeKind::Md { absent, .. } = node.kind else { return };
        let Ok(extent) = Extent::from_raw(start / self.block_sectors, count / self.block_sectors) else { return };
        if absent > 0 {
            coverage.add(Unchecked::new(extent, WhyUnchecked::Absent));
        }
        let segments = node.map.iter().flat_map(Map::segments);
        let is_behind = |member: usize| !segments.clone().any(|segment| names(&segment.how, member));
        if (0..node.members.len()).any(is_behind) {
            coverage.add(Unchecked::new(extent, WhyUnchecked::OutOfSync));
        }
    }
}

/// True if a segment lies on this member.
fn names(how: &Arrangement, member: usize) -> bool {
    how.ons().iter().any(|on| on.member == member)
}
