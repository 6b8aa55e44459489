//! Requests that several test files make.

use sealblock_protocols_nvme::Fuse;
use sealblock_protocols_nvme::admin::GetLogPage;
use sealblock_protocols_nvme::logs::DamageLog;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand, Prchk, ProtectionInfo};
use sealblock_units::Extent;

use super::*;

pub fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

pub fn checked(pract: bool) -> ProtectionInfo {
    ProtectionInfo { pract, prchk: Prchk::GUARD | Prchk::REFERENCE_TAG, ..ProtectionInfo::NONE }
}

pub fn with_checks(mut blocks: BlockCommand) -> BlockCommand {
    blocks.protection = checked(true).with_tags(format(), 0, blocks.extent.start().get());
    blocks
}

pub async fn write(io: &mut Queue, nsid: u32, start: u64, count: u64, seed: u8) -> Vec<u8> {
    let size = if nsid == BARE { 512 } else { 4096 };
    let range = if nsid == PROTECTED { with_checks(blocks(start, count)) } else { blocks(start, count) };
    let data = pattern(count as usize * size, seed);
    io.io(nsid, IoCommand::Write(range), Data::Write(data.clone())).await.ok();
    data
}

pub async fn read(io: &mut Queue, nsid: u32, start: u64, count: u64) -> Done {
    let size = if nsid == BARE { 512 } else { 4096 };
    let range = if nsid == PROTECTED { with_checks(blocks(start, count)) } else { blocks(start, count) };
    io.io(nsid, IoCommand::Read(range), Data::Read(count as usize * size)).await
}

pub async fn damage_log(admin: &mut Queue, nsid: u32) -> DamageLog {
    let ask = GetLogPage { nsid, ..GetLogPage::new(0xC0, 4096) };
    DamageLog::decode(&admin.call(ask.encode(), Data::Read(4096)).await.ok().data).unwrap()
}

pub async fn write_and_read_as_ever(io: &mut Queue) {
    let data = write(io, PLAIN, 9, 4, 7).await;
    assert!(read(io, PLAIN, 9, 4).await.ok().data == data);
}

pub fn fused(command: IoCommand, nsid: u32, fuse: Fuse) -> Command {
    command.encode(nsid).unwrap().with_fuse(fuse)
}

/// Sends a fused pair; returns both statuses.
pub async fn compare_and_write_in(
    io: &mut Queue,
    nsid: u32,
    range: BlockCommand,
    old: Vec<u8>,
    new: Vec<u8>,
) -> (u16, u16) {
    let first = io.submit(fused(IoCommand::Compare(range), nsid, Fuse::First), Data::Write(old)).await;
    let second = io.submit(fused(IoCommand::Write(range), nsid, Fuse::Second), Data::Write(new)).await;
    (io.done(first).await.status(), io.done(second).await.status())
}

/// The number at the start of block 0 of a plain namespace.
pub async fn count(io: &mut Queue, nsid: u32) -> u64 {
    u64::from_le_bytes(read(io, nsid, 0, 1).await.ok().data[..8].try_into().unwrap())
}

/// Increments it with Compare and Write, as clusters do, until this many increments have succeeded.
pub async fn count_up(mut io: Queue, nsid: u32, steps: usize) {
    let mut done = 0;
    while done < steps {
        let old = read(&mut io, nsid, 0, 1).await.ok().data;
        let mut new = old.clone();
        let value = u64::from_le_bytes(old[..8].try_into().unwrap()) + 1;
        new[..8].copy_from_slice(&value.to_le_bytes());
        match compare_and_write_in(&mut io, nsid, blocks(0, 1), old, new).await {
            (0, 0) => done += 1,
            (0x285, 0x009) => {}
            other => panic!("{other:x?}"),
        }
    }
}
