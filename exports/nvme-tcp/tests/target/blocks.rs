//! I/O commands over loopback sockets, with and without protection information and digests.

use crate::common::*;
use sealblock_integrity::{Interleave, Tags, seal_interleaved};
use sealblock_media_memory::Corruption;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::identify::Namespace;
use sealblock_protocols_nvme::nvm::{BlockCommand, DatasetManagement, DsmRange, IoCommand, Prchk, WriteZeroes};
use sealblock_units::{BlockSize, Extent, Lba};

/// The type of a C2HData PDU.
const C2H_DATA: u8 = 7;

fn with_checks(mut blocks: BlockCommand, pract: bool) -> BlockCommand {
    let start = blocks.extent.start().get();
    blocks.protection = blocks.protection.with_tags(format(), 0, start);
    (blocks.protection.pract, blocks.protection.prchk) = (pract, Prchk::GUARD | Prchk::REFERENCE_TAG);
    blocks
}

/// Two blocks with host-made tags, as extended blocks.
fn extended(start: u64) -> Vec<u8> {
    let layout = Interleave::tuple_only(format(), BlockSize::from_bytes(4096).unwrap());
    let mut bytes = pattern(2 * layout.stride_bytes(), 5);
    seal_interleaved(layout, &mut bytes, &Tags { app_tag: 7, storage_tag: 0, initial_ref_tag: start });
    bytes
}

#[test]
fn plain_blocks_come_back_and_their_commands_work() {
    for digests in [false, true] {
        run(|| async move {
            let served = serve(short());
            let (_admin, mut io) = Queue::pair(served.address, digests).await;
            for (nsid, size) in [(PLAIN, 4096), (BARE, 512)] {
                // Below and above what fits in a capsule, so without and with R2T.
                for count in [1, 64] {
                    let (range, data) = (blocks(3, count), pattern(count as usize * size, 1));
                    io.io(nsid, IoCommand::Write(range), Data::Write(data.clone())).await.ok();
                    let read = io.io(nsid, IoCommand::Read(range), Data::Read(data.len())).await.ok();
                    assert!(read.data == data);
                    io.io(nsid, IoCommand::Compare(range), Data::Write(data.clone())).await.ok();
                    let mut other = data.clone();
                    other[data.len() - 1] ^= 1;
                    assert_eq!(io.io(nsid, IoCommand::Compare(range), Data::Write(other)).await.status(), 0x285);
                    io.io(nsid, IoCommand::Verify(range), Data::None).await.ok();
                }
                io.io(nsid, IoCommand::Flush, Data::None).await.ok();
            }
            io.io(u32::MAX, IoCommand::Flush, Data::None).await.ok();
        });
    }
}

#[test]
fn zeroes_and_deallocated_blocks_read_as_zeroes() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for deallocate in [false, true] {
            let range = blocks(8, 4);
            io.io(PLAIN, IoCommand::Write(range), Data::Write(pattern(16384, 1))).await.ok();
            let zeroes = WriteZeroes { blocks: range, deallocate, whole_namespace: false };
            io.io(PLAIN, IoCommand::WriteZeroes(zeroes), Data::None).await.ok();
            let read = io.io(PLAIN, IoCommand::Read(range), Data::Read(16384)).await.ok();
            assert!(read.data == vec![0; 16384]);
        }
        let held = served.plain.allocated_bytes();
        io.io(PLAIN, IoCommand::Write(blocks(256, 64)), Data::Write(pattern(262_144, 2))).await.ok();
        assert!(served.plain.allocated_bytes() > held);
        every_block_counts_as_used(&mut admin).await;
        // As Linux does: a list of 4096 bytes for any NR.
        let range = DsmRange::new(Extent::from_raw(256, 64).unwrap());
        let mut list = vec![0; 4096];
        list[4..8].copy_from_slice(&range.length_blocks.get().to_le_bytes());
        list[8..16].copy_from_slice(&range.slba.get().to_le_bytes());
        let dsm = IoCommand::DatasetManagement(DatasetManagement::deallocate(1).unwrap());
        io.io(PLAIN, dsm, Data::Write(list.clone())).await.ok();
        assert!(served.plain.allocated_bytes() <= held, "the space is given back");
        every_block_counts_as_used(&mut admin).await;
        list[8..16].copy_from_slice(&BLOCKS.to_le_bytes());
        assert_eq!(io.io(PLAIN, dsm, Data::Write(list)).await.status(), 0x080);
    });
}

/// NUSE follows no deallocation, so thin provisioning (NSFEAT bit 0) is not claimed, and NUSE is NCAP.
async fn every_block_counts_as_used(admin: &mut Queue) {
    for nsid in [PLAIN, PROTECTED] {
        let page = Namespace::decode(&admin.identify(Cns::Namespace, nsid).await.ok().data).unwrap();
        assert_eq!((page.nsze, page.ncap, page.nuse, page.nsfeat & 1), (BLOCKS, BLOCKS, BLOCKS, 0));
    }
}

#[test]
fn a_read_of_the_largest_size_comes_in_one_pdu() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        for (nsid, bytes) in [(PLAIN, 1 << 20), (PROTECTED, 256 * (4096 + 8))] {
            let read = IoCommand::Read(blocks(0, 256)).encode(nsid).unwrap();
            let cid = io.submit(read, Data::Read(bytes)).await;
            assert_eq!(io.receive_header().await, (C2H_DATA, 24 + bytes));
            io.done(cid).await.ok();
        }
    });
}

#[test]
fn a_damaged_block_has_its_status_and_its_address_in_the_error_log() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, true).await;
        let (all, good) = (blocks(0, 8), blocks(0, 5));
        io.io(PLAIN, IoCommand::Write(all), Data::Write(pattern(32768, 3))).await.ok();
        for (damage, status) in
            [(Corruption::Data { at: 9, mask: 1 }, 0x282), (Corruption::Tag { at: 7, mask: 1 }, 0x284)]
        {
            assert!(served.plain.damage(Lba::new(5), damage));
            for (ask, data) in [(IoCommand::Verify(all), Data::None), (IoCommand::Read(all), Data::Read(32768))] {
                let done = io.io(PLAIN, ask, data).await;
                assert_eq!((done.status(), done.completion.status().more()), (status, true));
                let entry = admin.newest_error().await;
                assert_eq!((entry.lba, entry.nsid, entry.sqid), (5, PLAIN, 1));
                assert_eq!(entry.status().code().get(), status);
            }
            io.io(PLAIN, IoCommand::Verify(good), Data::None).await.ok();
            assert!(served.plain.damage(Lba::new(5), damage), "the same again undoes it");
        }
        io.io(PLAIN, IoCommand::Read(all), Data::Read(32768)).await.ok();
    });
}

#[test]
fn the_target_makes_and_strips_tags_on_request() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, true).await;
        let (range, data) = (with_checks(blocks(6, 2), true), pattern(8192, 4));
        io.io(PROTECTED, IoCommand::Write(range), Data::Write(data.clone())).await.ok();
        let read = io.io(PROTECTED, IoCommand::Read(range), Data::Read(8192)).await.ok();
        assert!(read.data == data);
        let tags = with_checks(blocks(6, 2), false);
        let read = io.io(PROTECTED, IoCommand::Read(tags), Data::Read(2 * 4104)).await.ok();
        assert!(read.data[..4096] == data[..4096] && read.data[4104..8200] == data[4096..]);
        io.io(PROTECTED, IoCommand::Verify(tags), Data::None).await.ok();
        // Hosts that set PRACT on every command send data without tags.
        io.io(PROTECTED, IoCommand::Verify(range), Data::None).await.ok();
        io.io(PROTECTED, IoCommand::Compare(range), Data::Write(data.clone())).await.ok();
        let mut other = data.clone();
        other[4096] ^= 1;
        assert_eq!(io.io(PROTECTED, IoCommand::Compare(range), Data::Write(other)).await.status(), 0x285);
        served.protected.damage(Lba::new(7), Corruption::Data { at: 0, mask: 8 });
        assert_eq!(io.io(PROTECTED, IoCommand::Read(range), Data::Read(8192)).await.status(), 0x282);
        // No host can disable the target's own check.
        let unchecked = BlockCommand { protection: blocks(6, 2).protection, ..tags };
        let read = io.io(PROTECTED, IoCommand::Read(unchecked), Data::Read(2 * 4104)).await;
        assert_eq!(read.status(), 0x282);
    });
}

#[test]
fn tags_of_the_host_are_checked_before_anything_is_written() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let range = with_checks(blocks(20, 2), false);
        let good = extended(20);
        io.io(PROTECTED, IoCommand::Write(range), Data::Write(good.clone())).await.ok();
        for (at, status) in [(4104 + 3, 0x282), (4104 + 4096 + 7, 0x284)] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(io.io(PROTECTED, IoCommand::Write(range), Data::Write(bad)).await.status(), status);
            assert_eq!(admin.newest_error().await.lba, 21);
            let read = io.io(PROTECTED, IoCommand::Read(range), Data::Read(2 * 4104)).await.ok();
            assert!(read.data == good, "nothing was written");
        }
        io.io(PROTECTED, IoCommand::Compare(range), Data::Write(good.clone())).await.ok();
        let mut other_tag = good.clone();
        other_tag[4104 + 4096 + 2] ^= 1;
        assert_eq!(io.io(PROTECTED, IoCommand::Compare(range), Data::Write(other_tag)).await.status(), 0x285);
        assert_eq!(admin.newest_error().await.lba, 21);
        // Plain data where extended blocks are required.
        let short = io.io(PROTECTED, IoCommand::Write(range), Data::Write(pattern(8192, 1))).await;
        assert_eq!(short.status(), 0x00F);
    });
}

#[test]
fn invalid_commands_fail_before_data_is_fetched() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let last = io.io(PLAIN, IoCommand::Read(blocks(BLOCKS - 1, 1)), Data::Read(4096)).await;
        last.ok();
        assert_eq!(io.io(PLAIN, IoCommand::Read(blocks(BLOCKS, 1)), Data::Read(4096)).await.status(), 0x080);
        assert_eq!(io.io(3, IoCommand::Read(blocks(0, 1)), Data::Read(4096)).await.status(), 0x002);
        assert_eq!(io.io(0, IoCommand::Flush, Data::None).await.status(), 0x00B);
        let wide = io.io(PLAIN, IoCommand::Write(blocks(0, 257)), Data::Write(vec![0; 257 << 12])).await;
        assert_eq!(wide.status(), 0x002, "more than MDTS");
        let uncorrectable = IoCommand::WriteUncorrectable(Extent::one(Lba::new(BLOCKS)));
        assert_eq!(io.io(PLAIN, uncorrectable, Data::None).await.status(), 0x080);
        assert_eq!(io.call(sealblock_protocols_nvme::Command::new(0x0D, 1), Data::None).await.status(), 0x001);
        // fio sets PRACT on every command, and lengths on commands without data; without protection information neither
        // has an effect.
        let mut pract = blocks(0, 1);
        pract.protection.pract = true;
        io.io(BARE, IoCommand::Verify(pract), Data::Read(4096)).await.ok();
        io.io(BARE, IoCommand::Compare(pract), Data::Write(vec![0; 512])).await.ok();
    });
}

#[test]
fn commands_beyond_the_bytes_in_flight_wait_and_then_start() {
    run(|| async {
        let limits = sealblock_exports_nvme_tcp::Limits { transfer_bytes: 1 << 20, bytes_in_flight: 0, ..short() };
        let served = serve(limits);
        let (_admin, mut io) = Queue::pair(served.address, true).await;
        let data = pattern(1 << 20, 6);
        let mut cids = Vec::new();
        for i in 0..8 {
            let write = IoCommand::Write(blocks(i * 256, 256)).encode(PLAIN).unwrap();
            cids.push(io.submit(write, Data::Write(data.clone())).await);
        }
        for cid in cids.drain(..) {
            io.done(cid).await.ok();
        }
        for i in 0..8 {
            let read = IoCommand::Read(blocks(i * 256, 256)).encode(PLAIN).unwrap();
            cids.push(io.submit(read, Data::Read(1 << 20)).await);
        }
        for cid in cids {
            assert!(io.done(cid).await.ok().data == data);
        }
    });
}
