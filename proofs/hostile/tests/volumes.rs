//! `sealblock serve` with volumes in files: connections cut during writes, wrong tags, and the server killed in the
//! middle of writes.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sealblock_block::{Device, Durability, Request};
use sealblock_hostile::attacks::cut::{BLOCKS, BlockChecker, START};
use sealblock_hostile::attacks::{ATTACKS, TestContext};
use sealblock_hostile::formats::{self, FORMATS_NQN, FormattedNamespace};
use sealblock_hostile::process::Process;
use sealblock_hostile::restart::{RestartConfig, is_version, read, run, sealed};
use sealblock_hostile::served::Program;
use sealblock_hostile::suite;
use sealblock_hostile::wire::{HANG_TIMEOUT, Peer};
use sealblock_hostile::writes::{CutPoint, WriteMode};
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_media_nvme_tcp::NvmeTcpDevice;
use sealblock_runtime_reactor::{Config, Reactor};
use sealblock_units::{BlockSize, Extent};

/// How long the bystander is measured without an attack.
const QUIET: Duration = Duration::from_millis(50);

fn program() -> Program {
    Program::hostile(env!("CARGO_BIN_EXE_sealblock-hostile"))
}

fn context(server: &Process) -> TestContext {
    TestContext { address: server.address, seed: 1, effort: 1, time: HANG_TIMEOUT }
}

fn kind(guard: GuardKind, size: BlockSize) -> FormattedNamespace {
    formats::of(guard, ProtectionType::Type1, size)
}

#[test]
fn cut_off_hosts_and_wrong_tags_leave_no_torn_block_on_a_volume() {
    let folder = tempfile::tempdir().unwrap();
    let kinds: Vec<_> = formats::all().into_iter().filter(|kind| kind.is_for_volumes).collect();
    kinds.iter().for_each(|kind| program().create(folder.path(), kind).unwrap());
    let mut server = program().serve(folder.path(), &kinds, (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let context = context(&server);
    for attack in ATTACKS.iter().filter(|attack| ["cut", "tags"].contains(&attack.name)) {
        let report = suite::run(&mut server, attack, &context, QUIET, 1);
        println!("{}", report.unwrap_or_else(|error| panic!("{}: {error:#}", attack.name)));
    }
    server.stop().unwrap();
    // Checked without a server. In Type 2 the writer chooses reference tags, which the volume does not know.
    let knows = |kind: &&FormattedNamespace| kind.format.protection() != ProtectionType::Type2;
    kinds.iter().filter(knows).for_each(|kind| program().verify(folder.path(), kind).unwrap());
}

/// A server with one volume, which is killed and restarted.
struct Killed<'a> {
    folder: &'a Path,
    kind: FormattedNamespace,
    checker: BlockChecker,
}

impl Killed<'_> {
    /// Sends a write up to a cut point, kills and restarts the server, and checks the blocks.
    fn round(self, server: Process, mode: WriteMode, digests: u8, cut: CutPoint, is_complete: bool) -> (Self, Process) {
        let Killed { folder, kind, mut checker } = self;
        let what = format!("{mode:?}, digests {digests}, {cut:?}");
        let (extent, version) = (mode.extent(START, BLOCKS), checker.next_version());
        let (_admin, mut io) = queue(&server, digests);
        let data = kind.sent(version, extent, mode.maker);
        mode.send(&mut io, kind.command(version, extent, mode.maker), &data, Some(cut)).unwrap();
        server.kill().unwrap();
        program().verify(folder, &kind).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let server = program().serve(folder, &[kind], (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        checker = checker.reconnect(&context(&server)).unwrap();
        let seen = if is_complete { checker.check_whole(extent, version) } else { checker.check_old() };
        seen.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        // The next kill must preserve what was read now.
        checker.flush().unwrap();
        (Killed { folder, kind, checker }, server)
    }
}

fn queue(server: &Process, digests: u8) -> (Peer, Peer) {
    let (admin, cntlid) = Peer::admin(server.address, FORMATS_NQN, 0).unwrap();
    let ask = sealblock_hostile::wire::connect(FORMATS_NQN, 1, 32, cntlid, 0);
    let (io, answer) = Peer::connecting(server.address, digests, ask).unwrap();
    assert_eq!(answer.status, 0);
    (admin, io)
}

#[test]
fn a_server_killed_in_the_middle_of_a_write_leaves_old_blocks_or_new_ones() {
    for (digests, kind) in
        [(0, kind(GuardKind::Crc16, BlockSize::B4096)), (3, kind(GuardKind::Crc32c, BlockSize::B512))]
    {
        let folder = tempfile::tempdir().unwrap();
        program().create(folder.path(), &kind).unwrap();
        let mut server = program().serve(folder.path(), &[kind], (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let mut checker = BlockChecker::new(&context(&server), kind).unwrap();
        // The checker's write counts as old content only once it is durable.
        checker.flush().unwrap();
        let mut killed = Killed { folder: folder.path(), kind, checker };
        for mode in WriteMode::all(kind) {
            let (_admin, io) = queue(&server, digests);
            let cuts = mode.cuts(&io, mode.extent(START, BLOCKS)).unwrap();
            drop((_admin, io));
            // The last cut point is after the whole write. The others cover every kind of place.
            let last = cuts.len() - 1;
            for at in [3, last / 2, last * 3 / 4, last - 1, last, last] {
                (killed, server) = killed.round(server, mode, digests, cuts[at], at == last);
            }
        }
        server.stop().unwrap();
    }
}

fn config(folder: PathBuf, kind: FormattedNamespace, rounds: u64) -> RestartConfig {
    let seed = match std::env::var("SEALBLOCK_HOSTILE_SEED") {
        Ok(seed) => seed.parse().expect("the seed is a number"),
        Err(_) => u64::from(std::process::id()),
    };
    println!("SEALBLOCK_HOSTILE_SEED={seed}");
    RestartConfig { program: program(), folder, kind, forgets: false, rounds, seed }
}

#[test]
fn our_host_loses_nothing_that_was_flushed_when_the_server_is_killed() {
    for kind in [kind(GuardKind::Crc32c, BlockSize::B4096), kind(GuardKind::Crc16, BlockSize::B512)] {
        let folder = tempfile::tempdir().unwrap();
        let summary = run(&config(folder.path().into(), kind, 8)).unwrap_or_else(|error| panic!("{error:?}"));
        println!("{summary:?}");
        assert!(summary.writes > 50 && summary.flushes > 0 && summary.reads > 100, "{summary:?}");
    }
}

/// The counterpart: a server that loses flushed writes is detected.
#[test]
fn a_server_that_forgets_what_was_flushed_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        RestartConfig { forgets: true, ..config(folder.path().into(), kind(GuardKind::Crc32c, BlockSize::B4096), 20) };
    let error = run(&config).expect_err("flushed writes are gone");
    assert!(format!("{error:#}").contains("none of the versions"), "{error:#}");
}

async fn write(device: &NvmeTcpDevice, kind: &FormattedNamespace, lba: u64, version: u64, durability: Durability) {
    let extent = Extent::from_raw(lba, 1).unwrap();
    let data = sealed(device, kind, extent, version);
    device.execute(Request::write(extent, data, durability)).await.unwrap();
}

async fn has(device: &NvmeTcpDevice, kind: &FormattedNamespace, lba: u64, versions: &[u64]) -> bool {
    let found = read(device, Extent::from_raw(lba, 1).unwrap()).await.unwrap();
    versions.iter().any(|version| is_version(kind, &found, 0, lba, *version))
}

#[test]
fn a_flush_after_a_kill_fails_once_where_writes_were_not_flushed() {
    let folder = tempfile::tempdir().unwrap();
    let kind = kind(GuardKind::Crc64, BlockSize::B4096);
    let config = config(folder.path().into(), kind, 0);
    let reactor = Reactor::new(Config::default()).unwrap();
    let again = |server: Process| {
        let address = server.address;
        server.kill().unwrap();
        config.serve(address).unwrap()
    };
    reactor.block_on(async {
        let server = config.start().unwrap();
        let device = config.open(server.address).await.unwrap();
        let flush = async || device.execute(Request::flush()).await;
        // Good: flushed, or durable by itself (FUA).
        write(&device, &kind, 0, 1, Durability::Volatile).await;
        flush().await.unwrap();
        write(&device, &kind, 1, 1, Durability::ForceUnitAccess).await;
        let server = again(server);
        flush().await.expect("no write may be lost");
        assert!(has(&device, &kind, 0, &[1]).await && has(&device, &kind, 1, &[1]).await);
        // Completed but neither flushed nor durable: it may be stored or not, and the next Flush must fail, whichever
        // task sends it.
        write(&device, &kind, 0, 2, Durability::Volatile).await;
        let server = again(server);
        assert!(has(&device, &kind, 0, &[1, 2]).await);
        let error = flush().await.unwrap_err();
        assert!(error.to_string().contains("may be lost"), "{error}");
        flush().await.expect("it was said once");
        // Written again and flushed, it stays.
        write(&device, &kind, 0, 3, Durability::Volatile).await;
        flush().await.unwrap();
        let server = again(server);
        assert!(has(&device, &kind, 0, &[3]).await);
        flush().await.expect("no write may be lost");
        assert_eq!(device.counters().reconnects, 3);
        device.close().await;
        server.stop().unwrap();
    });
    program().verify(folder.path(), &kind).unwrap();
}
