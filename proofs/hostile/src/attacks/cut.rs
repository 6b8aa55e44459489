//! Hosts that are cut off in the middle of a write: each block stays wholly old or becomes wholly new, under its own tags.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_units::{BlockSize, Extent};

use super::TestContext;
use crate::formats::{self, FORMATS_NQN, Kind};
use crate::wire::{Data, HANG, Peer, RESPONSE, connect};
use crate::writes::{Cut, Way, answered, read, verify};

/// Where the blocks are that are written.
pub const START: u64 = 8;
/// How many there are at most.
pub const BLOCKS: u64 = 5;

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// FIN: the target is told that nothing more will come.
    Close,
    /// RST.
    Reset,
}

pub(super) fn cut(scene: &TestContext) -> Result<()> {
    let kinds = [
        formats::of(GuardKind::Crc16, ProtectionType::Type1, BlockSize::B4096),
        formats::of(GuardKind::Crc32c, ProtectionType::Type1, BlockSize::B512),
        formats::of(GuardKind::Crc64, ProtectionType::Type3, BlockSize::B4096),
    ];
    for (turn, kind) in kinds.into_iter().enumerate() {
        let mut place = Place::new(scene, kind)?;
        for &digests in scene.digests() {
            for way in Way::all(kind) {
                // Every cut with either end once, and for the other kinds either end in turns.
                place
                    .all_cuts(way, digests, turn == 0 || scene.effort > 1)
                    .context(format!("{way:?}, digests {digests}"))?;
            }
        }
    }
    Ok(())
}

/// A controller whose I/O queue is cut off again and again, and a second one that looks.
struct Place<'a> {
    scene: &'a TestContext,
    admin: Peer,
    cntlid: u16,
    watcher: Watcher,
}

impl Place<'_> {
    fn new(scene: &TestContext, kind: Kind) -> Result<Place<'_>> {
        let (admin, cntlid) = Peer::admin(scene.address, FORMATS_NQN, 0)?;
        let watcher = Watcher::new(scene, kind)?;
        Ok(Place { scene, admin, cntlid, watcher })
    }

    /// The queue that is cut off. Its number is free once the target has seen the end of the one before it.
    fn queue(&mut self, digests: u8) -> Result<Peer> {
        let start = Instant::now();
        loop {
            let ask = connect(FORMATS_NQN, 1, 32, self.cntlid, 0);
            let (peer, answer) = Peer::connecting(self.scene.address, digests, ask)?;
            if answer.status == 0 {
                return Ok(peer);
            }
            ensure!(start.elapsed() < HANG, "the queue that was cut off is there still: {answer:?}");
            sleep(Duration::from_micros(200));
        }
    }

    /// Waits until nothing of the queues that were cut off is carried out any more: a controller is not done with its reset
    /// before (NVM Express Base, "Controller Level Reset").
    fn reset(&mut self) -> Result<()> {
        for (cc, ready) in [(0x0046_0000, 0), (0x0046_0001, 1)] {
            self.admin.property(0x14, 4, cc)?;
            let start = Instant::now();
            while self.admin.property_get(0x1C, 4)?.result & 1 != ready {
                ensure!(start.elapsed() < HANG, "CSTS.RDY does not become {ready}");
                sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    fn all_cuts(&mut self, way: Way, digests: u8, both: bool) -> Result<()> {
        self.whole(way, digests)?;
        let extent = way.extent(START, BLOCKS);
        let cuts = way.cuts(&self.queue(digests)?, extent)?;
        for (turn, cut) in cuts.iter().enumerate() {
            let is_complete = turn + 1 == cuts.len();
            for end in [End::Close, End::Reset] {
                if both || is_complete || (end == End::Close) == (turn + usize::from(digests)).is_multiple_of(2) {
                    self.one(way, digests, *cut, end, is_complete).context(format!("{cut:?}, {end:?}"))?;
                }
            }
        }
        let alive = self.admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None)?;
        ensure!(alive.status == 0, "the controller goes on: {alive:?}");
        Ok(())
    }

    /// The twin: what is not cut off is there.
    fn whole(&mut self, way: Way, digests: u8) -> Result<()> {
        let extent = way.extent(START, BLOCKS);
        let version = self.watcher.next_version();
        let mut peer = self.queue(digests)?;
        let data = way.kind.sent(version, extent, way.maker);
        let status = way.write(&mut peer, way.kind.command(version, extent, way.maker), &data)?;
        ensure!(status == 0, "a write that is whole: {status:#x}");
        self.watcher.is_new(extent, version)
    }

    fn one(&mut self, way: Way, digests: u8, cut: Cut, end: End, is_complete: bool) -> Result<()> {
        let extent = way.extent(START, BLOCKS);
        let version = self.watcher.next_version();
        let mut peer = self.queue(digests)?;
        let data = way.kind.sent(version, extent, way.maker);
        let early = way.send(&mut peer, way.kind.command(version, extent, way.maker), &data, Some(cut))?;
        ensure!(early.is_none(), "answered without its data: {early:?}");
        let mut is_answered = false;
        match end {
            End::Reset => peer.reset(),
            End::Close => {
                peer.half_close();
                for pdu in peer.finished()?.iter().filter(|pdu| pdu.kind == RESPONSE) {
                    ensure!(is_complete && answered(pdu)? == 0, "half of a write is answered by {pdu:?}");
                    is_answered = true;
                }
            }
        }
        self.reset()?;
        match (is_complete, is_answered) {
            (false, _) => self.watcher.is_old(),
            (true, true) => self.watcher.is_new(extent, version),
            (true, false) => self.watcher.is_whole(extent, version),
        }
    }
}

/// Knows what every block holds, and looks whether it does, on a connection of its own.
pub struct Watcher {
    kind: Kind,
    _admin: Peer,
    io: Peer,
    /// The version of each block from [`START`] on; 0 before the first write.
    held: Vec<u64>,
    version: u64,
}

impl Watcher {
    /// Writes the first version of all blocks.
    pub fn new(scene: &TestContext, kind: Kind) -> Result<Watcher> {
        let (admin, cntlid) = Peer::admin(scene.address, FORMATS_NQN, 0)?;
        let io = Peer::io(scene.address, FORMATS_NQN, 1, cntlid)?;
        let mut watcher = Watcher { kind, _admin: admin, io, held: vec![0; BLOCKS as usize], version: 0 };
        let way = Way::all(kind)[1];
        let (extent, version) = (way.extent(START, BLOCKS), watcher.next_version());
        let data = kind.sent(version, extent, way.maker);
        let status = way.write(&mut watcher.io, kind.command(version, extent, way.maker), &data)?;
        ensure!(status == 0, "the first write: {status:#x}");
        watcher.is_new(extent, version)?;
        Ok(watcher)
    }

    /// The same watcher at a target that was started anew.
    pub fn again(self, scene: &TestContext) -> Result<Watcher> {
        let (admin, cntlid) = Peer::admin(scene.address, FORMATS_NQN, 0)?;
        let io = Peer::io(scene.address, FORMATS_NQN, 1, cntlid)?;
        Ok(Watcher { _admin: admin, io, ..self })
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) -> Result<()> {
        let answer = self.io.call(IoCommand::Flush.encode(self.kind.nsid)?, Data::None)?;
        ensure!(answer.status == 0, "Flush: {:#x}", answer.status);
        Ok(())
    }

    /// A version that was not written yet.
    pub fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    /// Nothing was written since the last look.
    pub fn is_old(&mut self) -> Result<()> {
        let before = self.held.clone();
        self.look(&[])?;
        ensure!(self.held == before, "part of a write appears that was not whole: {before:?}, {:?}", self.held);
        Ok(())
    }

    /// These blocks have this version.
    pub fn is_new(&mut self, extent: Extent, version: u64) -> Result<()> {
        self.is_whole(extent, version)?;
        let blocks = &self.held[..extent.len() as usize];
        ensure!(blocks.iter().all(|held| *held == version), "an answered write is missing: {blocks:?}");
        Ok(())
    }

    /// Each of these blocks has this version or the one before.
    pub fn is_whole(&mut self, extent: Extent, version: u64) -> Result<()> {
        debug_assert_eq!(extent.start().get(), START);
        let (before, len) = (self.held.clone(), extent.len() as usize);
        self.look(&[version])?;
        ensure!(self.held[len..] == before[len..], "a block changed behind the write: {before:?}, {:?}", self.held);
        Ok(())
    }

    /// Has every block checked, and finds out which version each has: the one before, or one of these.
    pub fn look(&mut self, versions: &[u64]) -> Result<()> {
        verify(&mut self.io, &self.kind)?;
        let all = Extent::from_raw(START, BLOCKS)?;
        let found = read(&mut self.io, &self.kind, all)?;
        for (index, unit) in found.chunks(self.kind.unit_bytes()).enumerate() {
            let held = &mut self.held[index];
            let allowed = std::iter::once(*held).chain(versions.iter().copied());
            let is_it = |version: &u64| self.kind.unit(*version, START, index as u64) == unit;
            let Some(version) = allowed.into_iter().find(is_it) else {
                bail!("block {index} is neither version {held} nor one of {versions:?}");
            };
            *held = version;
        }
        Ok(())
    }
}
