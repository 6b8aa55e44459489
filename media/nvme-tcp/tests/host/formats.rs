//! Every format, every method of making tags, with and without digests.

use crate::common::*;
use sealblock_block::{
    Ability, BadBlockCause, Device, Durability, ErrorKind, Expectations, Gate, Request, RequestKind, Response,
    VerifyStats,
};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_integrity::{Field, GuardKind, PiFormat, ProtectionType, Sealed};
use sealblock_media_memory::Corruption;
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, PiSource};
use sealblock_units::{BlockSize, Extent, Lba};

const NVME_GUARDS: [GuardKind; 3] = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64];

/// Every operation on one namespace.
async fn exercise(size: BlockSize, format: Option<PiFormat>, options: Options) {
    let memory = memory(size, format);
    let shows = if format.is_some() { PiVisibility::Protected } else { PiVisibility::Plain };
    let served = serve(&[(memory, shows)]);
    let device = open(&served, 1, options.clone()).await;
    let what = format!("{size} {format:?} {:?} {}", options.protection, options.data_digest);
    let is_host_made = options.protection != PiSource::Target;
    assert_eq!(device.geometry().protection, format.filter(|_| is_host_made), "{what}");
    for (start, blocks) in [(0, 1), (5, 3), (64, 300)] {
        let extent = extent(start, blocks);
        write(&device, extent, start as u8).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let back = read(&device, extent).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let wrote = sealed(&device, extent, start as u8);
        assert_eq!(back.joined_data()[..], wrote.joined_data()[..], "{what}");
        assert_eq!(back.joined_tags()[..], wrote.joined_tags()[..], "{what}");
        let verified = verify(&device, extent).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(matches!(verified, Response::Verified(VerifyStats { bytes_transferred: 0, .. })), "{what}");
        let same = Request::compare(extent, wrote.clone());
        device.execute(same).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut other = wrote.joined_data().to_vec();
        let at = (blocks - 1) as usize * size.bytes() + 9;
        other[at] ^= 1;
        let tags = sealblock_integrity::Tags { initial_ref_tag: start, ..Default::default() };
        let other = Sealed::seal(sealblock_runtime_memory::Slice::copy_from(&other), size, wrote.format(), &tags);
        let error = device.execute(Request::compare(extent, other)).await.unwrap_err();
        let lba = Lba::new(start + blocks - 1);
        assert_eq!(*error.kind(), ErrorKind::Miscompare { lba }, "{what}");
    }
    zeroes(&device, &what).await;
    device.execute(Request::flush()).await.unwrap();
    device.device().close().await;
    served.target.stop();
}

async fn zeroes(device: &impl Device, what: &str) {
    let cleared = extent(64, 20);
    let durability = Durability::ForceUnitAccess;
    for may_unmap in [false, true] {
        write(device, cleared, 7).await.unwrap();
        device.execute(Request::write_zeroes(cleared, may_unmap, durability)).await.unwrap();
        let back = read(device, cleared).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(back.joined_data().iter().all(|&byte| byte == 0), "{what}");
        verify(device, cleared).await.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    device.execute(Request::discard([extent(0, 3), extent(70, 9)])).await.unwrap();
}

fn formats(size: BlockSize) {
    run(|| async move {
        for digests in [false, true] {
            let options = Options { header_digest: digests, data_digest: digests, queues: 2, ..options() };
            exercise(size, None, options.clone()).await;
            for guard in NVME_GUARDS {
                for kind in ProtectionType::ALL {
                    let format = PiFormat::with_default_storage_tag(guard, kind);
                    for protection in [PiSource::Host, PiSource::Target] {
                        exercise(size, Some(format), Options { protection, ..options.clone() }).await;
                    }
                }
            }
            let storage = PiFormat::new(GuardKind::Crc64, ProtectionType::Type2, 16).unwrap();
            exercise(size, Some(storage), options).await;
        }
    });
}

#[test]
fn blocks_of_512_bytes() {
    formats(BlockSize::B512);
}

#[test]
fn blocks_of_4096_bytes() {
    formats(BlockSize::B4096);
}

#[test]
fn wrong_tags_are_refused_by_the_target_and_nothing_is_written() {
    run(|| async {
        for guard in NVME_GUARDS {
            let format = PiFormat::with_default_storage_tag(guard, ProtectionType::Type1);
            let memory = memory(BlockSize::B4096, Some(format));
            let served = serve(&[(memory, PiVisibility::Protected)]);
            let device = open(&served, 1, options()).await;
            let place = extent(8, 2);
            write(&device, place, 1).await.unwrap();
            // Tags for another address: a misdirected write.
            let data = sealed_with(&device, place, 2, Lba::new(80), 0);
            let misdirected = Request::write(place, data, Durability::Volatile);
            let error = device.execute(misdirected).await.unwrap_err();
            let due = ErrorKind::Expectation { lba: Lba::new(8), field: Field::RefTag, expected: 8, actual: 80 };
            assert_eq!(*error.kind(), due, "nothing that is stored is bad");
            let back = read(&device, place).await.unwrap();
            assert_eq!(back.joined_data()[..], sealed(&device, place, 1).joined_data()[..]);
            // The writer may use any application tag.
            let data = sealed_with(&device, place, 3, place.start(), 0x1234);
            let tagged = Request::write(place, data.clone(), Durability::Volatile);
            device.execute(tagged).await.unwrap();
            assert_eq!(read(&device, place).await.unwrap().joined_tags()[..], data.joined_tags()[..]);
            served.target.stop();
        }
    });
}

#[test]
fn every_damaged_block_is_named_by_a_verify_that_moves_no_data() {
    run(|| async {
        for protection in [PiSource::Host, PiSource::Target] {
            let memory = memory(BlockSize::B4096, Some(crc16()));
            let served = serve(&[(memory.clone(), PiVisibility::Protected)]);
            let device = open(&served, 1, Options { protection, ..options() }).await;
            let all = extent(0, 2000);
            for piece in all.split_aligned(sealblock_units::BlockCount::new(200).unwrap()) {
                write(&device, piece, 5).await.unwrap();
            }
            verify(&device, all).await.unwrap();
            let received = device.device().counters().received_bytes;
            let bad = [0, 1, 2, 700, 701, 1023, 1024, 1999];
            for lba in bad {
                let damage = match lba % 2 {
                    0 => Corruption::Data { at: 77, mask: 1 },
                    _ => Corruption::Tag { at: 7, mask: 1 },
                };
                assert!(memory.damage(Lba::new(lba), damage));
            }
            let error = verify(&device, all).await.unwrap_err();
            let bad_blocks = error.bad_blocks().unwrap_or_else(|| panic!("{error}")).as_slice();
            assert_eq!(bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect::<Vec<_>>(), bad);
            for bad_block in bad_blocks {
                let field = if bad_block.lba.get() % 2 == 0 { Field::Guard } else { Field::RefTag };
                assert_eq!(bad_block.cause, BadBlockCause::Tag(field), "{}", bad_block.lba);
            }
            assert_eq!(device.device().counters().received_bytes, received, "no payload came");
            let good = verify(&device, extent(3, 600)).await;
            assert!(good.is_ok(), "{good:?}");
            served.target.stop();
        }
    });
}

#[test]
fn a_read_names_every_damaged_block() {
    run(|| async {
        for shows in [PiVisibility::Plain, PiVisibility::Protected] {
            let memory = memory(BlockSize::B512, Some(crc16()));
            let served = serve(&[(memory.clone(), shows)]);
            let device = open(&served, 1, options()).await;
            let place = extent(100, 64);
            write(&device, place, 9).await.unwrap();
            for lba in [110, 111, 163] {
                assert!(memory.damage(Lba::new(lba), Corruption::Data { at: 1, mask: 0x10 }));
            }
            let error = read(&device, place).await.unwrap_err();
            let bad_blocks = error.bad_blocks().unwrap_or_else(|| panic!("{error}")).as_slice();
            assert_eq!(bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect::<Vec<_>>(), [110, 111, 163]);
            assert!(bad_blocks.iter().all(|bad_block| bad_block.cause == BadBlockCause::Tag(Field::Guard)));
            // If the tags are not sent here, the target's damage log has the values that differ.
            assert!(bad_blocks.iter().all(|bad_block| bad_block.expected.is_some()));
            assert!(read(&device, extent(112, 51)).await.is_ok());
            served.target.stop();
        }
    });
}

/// A copy transfers nothing between host and target, and keeps every tag except those that follow the address.
#[test]
fn a_copy_is_made_by_the_target_where_tags_stay_as_they_are() {
    let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type3);
    run(|| async {
        let devices = [
            (memory(BlockSize::B512, None), PiVisibility::Plain),
            (memory(BlockSize::B4096, Some(crc16())), PiVisibility::Plain),
            (memory(BlockSize::B4096, Some(crc16())), PiVisibility::Protected),
            (memory(BlockSize::B4096, Some(type3)), PiVisibility::Protected),
        ];
        let served = serve(&devices);
        let copy = |device: &Gate<NvmeTcpDevice>, from: Extent, to: u64| {
            let to = extent(to, from.len());
            let request = Request::copy(from, to, Expectations::NONE, Durability::Volatile);
            let device = device.device().clone();
            async move { device.execute(request).await }
        };
        for (nsid, protection, is_native) in [
            (1, PiSource::Auto, true),
            (2, PiSource::Auto, true),
            (3, PiSource::Host, false),
            (3, PiSource::Target, true),
            (4, PiSource::Host, true),
        ] {
            let device = open(&served, nsid, Options { protection, ..options() }).await;
            let way = if is_native { Ability::Native } else { Ability::Absent };
            assert_eq!(device.abilities().get(RequestKind::Copy), way, "namespace {nsid} {protection:?}");
            write(&device, extent(3, 500), nsid as u8).await.unwrap();
            write(&device, extent(2000, 500), 99).await.unwrap();
            if !is_native {
                let refused = copy(&device, extent(3, 500), 2000).await.unwrap_err();
                assert_eq!(*refused.kind(), ErrorKind::Absent(RequestKind::Copy));
                continue;
            }
            let before = device.device().counters();
            copy(&device, extent(3, 500), 2000).await.unwrap();
            let after = device.device().counters();
            assert_eq!(after.received_bytes, before.received_bytes, "nothing is read");
            let (source, copied) =
                (read(&device, extent(3, 500)).await.unwrap(), read(&device, extent(2000, 500)).await.unwrap());
            assert_eq!(source.first_difference(&copied, true), None);
            // A damaged block is named, and not copied.
            let memory = &devices[nsid as usize - 1].0;
            if memory.geometry().protection.is_some() {
                assert!(memory.damage(Lba::new(77), Corruption::Data { at: 1, mask: 0x10 }));
                let error = copy(&device, extent(70, 10), 3000).await.unwrap_err();
                let named: Vec<_> = error.bad_blocks().unwrap().as_slice().iter().map(|bad| bad.lba.get()).collect();
                assert_eq!(named, [77], "{error}");
                let read = read(&device, extent(3007, 1)).await;
                assert!(read.is_err() || read.unwrap().joined_data().iter().all(|byte| *byte == 0), "not written");
                assert!(memory.damage(Lba::new(77), Corruption::Data { at: 1, mask: 0x10 }));
            }
        }
        served.target.stop();
    });
}
