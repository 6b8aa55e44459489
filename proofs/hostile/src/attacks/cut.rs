//! Hosts whose connection is cut in the middle of a write: each block stays completely old or becomes completely new,
//! with matching tags.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{AdminOpcode, Command};
use sealblock_units::{BlockSize, Extent};

use super::context::TestContext;
use crate::formats::{self, FORMATS_NQN, FormattedNamespace};
use crate::wire::{Data, HANG_TIMEOUT, Peer, RESPONSE, connect};
use crate::writes::{CutPoint, WriteMode, answered, read, verify};

/// The first written block.
pub const START: u64 = 8;
/// The maximum number of written blocks.
pub const BLOCKS: u64 = 5;

/// How a connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    /// FIN: the target sees the end of the stream.
    Close,
    /// RST.
    Reset,
}

pub(super) fn cut(context: &TestContext) -> Result<()> {
    let kinds = [
        formats::of(GuardKind::Crc16, ProtectionType::Type1, BlockSize::B4096),
        formats::of(GuardKind::Crc32c, ProtectionType::Type1, BlockSize::B512),
        formats::of(GuardKind::Crc64, ProtectionType::Type3, BlockSize::B4096),
    ];
    for (turn, kind) in kinds.into_iter().enumerate() {
        let mut place = CutTest::new(context, kind)?;
        for &digests in context.digests() {
            for mode in WriteMode::all(kind) {
                // Every cut point with both ends once; for the other kinds the ends alternate.
                place
                    .test_cuts(mode, digests, turn == 0 || context.effort > 1)
                    .context(format!("{mode:?}, digests {digests}"))?;
            }
        }
    }
    Ok(())
}

/// A controller whose I/O queue is cut off repeatedly, and a second controller that checks the blocks.
struct CutTest<'a> {
    context: &'a TestContext,
    admin: Peer,
    cntlid: u16,
    checker: BlockChecker,
}

impl CutTest<'_> {
    fn new(context: &TestContext, kind: FormattedNamespace) -> Result<CutTest<'_>> {
        let (admin, cntlid) = Peer::admin(context.address, FORMATS_NQN, 0)?;
        let checker = BlockChecker::new(context, kind)?;
        Ok(CutTest { context, admin, cntlid, checker })
    }

    /// Connects the queue that will be cut off. The queue identifier is free once the target has seen the end of the
    /// previous connection.
    fn queue(&mut self, digests: u8) -> Result<Peer> {
        let start = Instant::now();
        loop {
            let ask = connect(FORMATS_NQN, 1, 32, self.cntlid, 0);
            let (peer, answer) = Peer::connecting(self.context.address, digests, ask)?;
            if answer.status == 0 {
                return Ok(peer);
            }
            ensure!(start.elapsed() < HANG_TIMEOUT, "the queue that was cut off is there still: {answer:?}");
            sleep(Duration::from_micros(200));
        }
    }

    /// Waits until all commands of the cut queues have completed; a reset does not complete earlier (NVM Express Base,
    /// "Controller Level Reset").
    fn reset(&mut self) -> Result<()> {
        for (cc, ready) in [(0x0046_0000, 0), (0x0046_0001, 1)] {
            self.admin.property(0x14, 4, cc)?;
            let start = Instant::now();
            while self.admin.property_get(0x1C, 4)?.result & 1 != ready {
                ensure!(start.elapsed() < HANG_TIMEOUT, "CSTS.RDY does not become {ready}");
                sleep(Duration::from_micros(200));
            }
        }
        Ok(())
    }

    fn test_cuts(&mut self, mode: WriteMode, digests: u8, both: bool) -> Result<()> {
        self.test_whole(mode, digests)?;
        let extent = mode.extent(START, BLOCKS);
        let cuts = mode.cuts(&self.queue(digests)?, extent)?;
        for (turn, cut) in cuts.iter().enumerate() {
            let is_complete = turn + 1 == cuts.len();
            for end in [End::Close, End::Reset] {
                if both || is_complete || (end == End::Close) == (turn + usize::from(digests)).is_multiple_of(2) {
                    self.test_cut(mode, digests, *cut, end, is_complete).context(format!("{cut:?}, {end:?}"))?;
                }
            }
        }
        let alive = self.admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None)?;
        ensure!(alive.status == 0, "the controller goes on: {alive:?}");
        Ok(())
    }

    /// The counterpart: a write that is not cut off is stored.
    fn test_whole(&mut self, mode: WriteMode, digests: u8) -> Result<()> {
        let extent = mode.extent(START, BLOCKS);
        let version = self.checker.next_version();
        let mut peer = self.queue(digests)?;
        let data = mode.kind.sent(version, extent, mode.maker);
        let status = mode.write(&mut peer, mode.kind.command(version, extent, mode.maker), &data)?;
        ensure!(status == 0, "a write that is whole: {status:#x}");
        self.checker.check_new(extent, version)
    }

    fn test_cut(&mut self, mode: WriteMode, digests: u8, cut: CutPoint, end: End, is_complete: bool) -> Result<()> {
        let extent = mode.extent(START, BLOCKS);
        let version = self.checker.next_version();
        let mut peer = self.queue(digests)?;
        let data = mode.kind.sent(version, extent, mode.maker);
        let early = mode.send(&mut peer, mode.kind.command(version, extent, mode.maker), &data, Some(cut))?;
        ensure!(early.is_none(), "answered without its data: {early:?}");
        let mut is_answered = false;
        match end {
            End::Reset => peer.reset(),
            End::Close => {
                peer.half_close();
                for pdu in peer.read_to_end()?.iter().filter(|pdu| pdu.kind == RESPONSE) {
                    ensure!(is_complete && answered(pdu)? == 0, "half of a write is answered by {pdu:?}");
                    is_answered = true;
                }
            }
        }
        self.reset()?;
        match (is_complete, is_answered) {
            (false, _) => self.checker.check_old(),
            (true, true) => self.checker.check_new(extent, version),
            (true, false) => self.checker.check_whole(extent, version),
        }
    }
}

/// Tracks the version of every block, and checks the blocks through its own connection.
pub struct BlockChecker {
    kind: FormattedNamespace,
    _admin: Peer,
    io: Peer,
    /// The version of each block from [`START`] on; 0 before the first write.
    versions: Vec<u64>,
    version: u64,
}

impl BlockChecker {
    /// Writes the first version of all blocks.
    pub fn new(context: &TestContext, kind: FormattedNamespace) -> Result<BlockChecker> {
        let (admin, cntlid) = Peer::admin(context.address, FORMATS_NQN, 0)?;
        let io = Peer::io(context.address, FORMATS_NQN, 1, cntlid)?;
        let mut checker = BlockChecker { kind, _admin: admin, io, versions: vec![0; BLOCKS as usize], version: 0 };
        let mode = WriteMode::all(kind)[1];
        let (extent, version) = (mode.extent(START, BLOCKS), checker.next_version());
        let data = kind.sent(version, extent, mode.maker);
        let status = mode.write(&mut checker.io, kind.command(version, extent, mode.maker), &data)?;
        ensure!(status == 0, "the first write: {status:#x}");
        checker.check_new(extent, version)?;
        Ok(checker)
    }

    /// Returns the same checker, connected to a restarted target.
    pub fn reconnect(self, context: &TestContext) -> Result<BlockChecker> {
        let (admin, cntlid) = Peer::admin(context.address, FORMATS_NQN, 0)?;
        let io = Peer::io(context.address, FORMATS_NQN, 1, cntlid)?;
        Ok(BlockChecker { _admin: admin, io, ..self })
    }

    /// Flushes what was written.
    pub fn flush(&mut self) -> Result<()> {
        let answer = self.io.call(IoCommand::Flush.encode(self.kind.nsid)?, Data::None)?;
        ensure!(answer.status == 0, "Flush: {:#x}", answer.status);
        Ok(())
    }

    /// Returns a version that was not written yet.
    pub fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    /// Checks that no block has changed.
    pub fn check_old(&mut self) -> Result<()> {
        let before = self.versions.clone();
        self.check_versions(&[])?;
        ensure!(self.versions == before, "part of a write appears that was not whole: {before:?}, {:?}", self.versions);
        Ok(())
    }

    /// Checks that these blocks have this version.
    pub fn check_new(&mut self, extent: Extent, version: u64) -> Result<()> {
        self.check_whole(extent, version)?;
        let blocks = &self.versions[..extent.len() as usize];
        ensure!(blocks.iter().all(|held| *held == version), "an answered write is missing: {blocks:?}");
        Ok(())
    }

    /// Checks that each of these blocks has this version or the one before.
    pub fn check_whole(&mut self, extent: Extent, version: u64) -> Result<()> {
        debug_assert_eq!(extent.start().get(), START);
        let (before, len) = (self.versions.clone(), extent.len() as usize);
        self.check_versions(&[version])?;
        ensure!(
            self.versions[len..] == before[len..],
            "a block changed behind the write: {before:?}, {:?}",
            self.versions
        );
        Ok(())
    }

    /// Verifies every block and determines its version: the previous one, or one of these.
    pub fn check_versions(&mut self, versions: &[u64]) -> Result<()> {
        verify(&mut self.io, &self.kind)?;
        let all = Extent::from_raw(START, BLOCKS)?;
        let found = read(&mut self.io, &self.kind, all)?;
        for (index, unit) in found.chunks(self.kind.unit_bytes()).enumerate() {
            let held = &mut self.versions[index];
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
