//! Copy, over loopback sockets.

use crate::common::requests::*;
use crate::common::*;
use sealblock_block::{
    Abilities, Ability, Device, DynDevice, ErrorKind, Geometry, Outcome, Request, RequestKind, Response,
};
use sealblock_exports_nvme_tcp::{Namespace, PiVisibility, Subsystem};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_protocols_nvme::Count8;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::identify::{Namespace as NamespacePage, NvmNamespace, Pic};
use sealblock_protocols_nvme::nvm::{
    BlockCommand, CopyCommand, CopyDescriptorFormat, CopyRange, IoCommand, Prchk, ProtectionInfo,
};
use sealblock_units::{BlockSize, Lba};
use std::cell::Cell;
use std::rc::Rc;

const TYPE3: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type3);

/// A Copy of these source ranges, and its list; `protection` applies to both sides.
fn copy(to: u64, from: &[(u64, u64)], protection: ProtectionInfo) -> (IoCommand, Data) {
    let copy = CopyCommand {
        destination: Lba::new(to),
        ranges: Count8::new(from.len() as u16).unwrap(),
        format: CopyDescriptorFormat::Format0,
        read: protection,
        write: protection.with_tags(format(), 0, to),
        force_unit_access: false,
        limited_retry: false,
    };
    let range = |(start, blocks): &(u64, u64)| CopyRange {
        extent: extent(*start, *blocks),
        protection: protection.with_tags(format(), 0, *start),
    };
    let ranges: Vec<_> = from.iter().map(range).collect();
    (IoCommand::Copy(copy), Data::Write(copy.encode_ranges(&ranges).unwrap()))
}

#[test]
fn copies_are_resealed_for_their_destination() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, true).await;
        for nsid in [PLAIN, PROTECTED, BARE] {
            for pract in [false, true] {
                let (a, b) = (write(&mut io, nsid, 0, 3, 1).await, write(&mut io, nsid, 100, 250, 2).await);
                let (command, list) = copy(1000, &[(0, 3), (100, 250)], checked(pract));
                io.io(nsid, command, list).await.ok();
                let copied = read(&mut io, nsid, 1000, 200).await.ok().data;
                assert!(copied[..a.len()] == a && copied[a.len()..] == b[..copied.len() - a.len()]);
                io.io(nsid, IoCommand::Verify(blocks(1000, 253)), Data::None).await.ok();
            }
        }
        // All tags except the reference tag are copied.
        let mut tagged = with_checks(blocks(50, 1));
        tagged.protection.lbat = 0x1234;
        io.io(PROTECTED, IoCommand::Write(tagged), Data::Write(pattern(4096, 3))).await.ok();
        let (command, list) = copy(60, &[(50, 1)], checked(false));
        io.io(PROTECTED, command, list).await.ok();
        let mut raw = with_checks(blocks(60, 1));
        raw.protection.pract = false;
        let stored = io.io(PROTECTED, IoCommand::Read(raw), Data::Read(4104)).await.ok().data;
        assert_eq!(stored[4098..], [0x12, 0x34, 0, 0, 0, 60]);
    });
}

/// Namespaces with other guards and types, with visible tags.
#[test]
fn copies_keep_their_guard_in_every_format() {
    for (guard, bits) in [(GuardKind::Crc16, 8), (GuardKind::Crc32c, 16), (GuardKind::Crc64, 8)] {
        for kind in ProtectionType::ALL {
            let format = PiFormat::new(guard, kind, bits).unwrap();
            run(|| copy_within(format));
        }
    }
}

/// The protection fields of a command for this format.
#[derive(Clone, Copy)]
struct Host(PiFormat);

impl Host {
    fn protection(self, start: u64, storage: u64, pract: bool) -> ProtectionInfo {
        // In Type 1 reference tags begin with the address, in Type 2 with the value of the command.
        let first = if self.0.protection() == ProtectionType::Type2 { start + 1000 } else { start };
        let counts = self.0.protection() != ProtectionType::Type3;
        ProtectionInfo {
            pract,
            stc: true,
            prchk: if counts { Prchk::GUARD | Prchk::REFERENCE_TAG } else { Prchk::GUARD },
            ..ProtectionInfo::NONE.with_tags(self.0, storage, first)
        }
    }

    fn at(self, start: u64, storage: u64) -> BlockCommand {
        BlockCommand { protection: self.protection(start, storage, true), ..blocks(start, 3) }
    }

    /// Copies three blocks from 4 to 40; this storage tag is expected of the source and written to the destination.
    fn copy(self, source: u64, pract: bool, storage: u64) -> (CopyCommand, CopyRange) {
        let range = CopyRange { extent: extent(4, 3), protection: self.protection(4, source, false) };
        let copy = CopyCommand {
            destination: Lba::new(40),
            ranges: Count8::new(1).unwrap(),
            format: CopyDescriptorFormat::of(Some(self.0)),
            read: ProtectionInfo { pract, ..self.protection(4, source, false) },
            write: self.protection(40, storage, pract),
            force_unit_access: true,
            limited_retry: false,
        };
        (copy, range)
    }
}

async fn send(io: &mut Queue, (copy, range): (CopyCommand, CopyRange)) -> Done {
    let list = copy.encode_ranges(&[range]).unwrap();
    io.io(1, IoCommand::Copy(copy), Data::Write(list)).await
}

async fn copy_within(format: PiFormat) {
    let device = Rc::new(MemoryDevice::new(BlockSize::B4096, 64, Some(format)));
    let stack = DynDevice::new("mem", Rc::clone(&device));
    let served = serve_with(short(), |_| {
        let namespace =
            Namespace::new(SharedDevice::publish(stack), [7; 16]).with_visibility(PiVisibility::Protected).unwrap();
        Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
    });
    let (mut admin, mut io) = Queue::pair(served.address, false).await;
    let nvm = NvmNamespace::decode(&admin.identify(Cns::CommandSetNamespace, 1).await.ok().data).unwrap();
    assert!(nvm.pic.contains(Pic::STORAGE_TAG_CHECK_READ));
    let (host, data) = (Host(format), pattern(3 * 4096, 7));
    io.io(1, IoCommand::Write(host.at(4, 9)), Data::Write(data.clone())).await.ok();
    for (pract, storage) in [(false, 9), (true, 5)] {
        send(&mut io, host.copy(9, pract, storage)).await.ok();
        let read = io.io(1, IoCommand::Read(host.at(40, storage)), Data::Read(3 * 4096)).await.ok();
        assert!(read.data == data, "{format:?}");
    }
    assert_eq!(send(&mut io, host.copy(8, false, 9)).await.status(), 0x288, "another storage tag");
    assert!(damage_log(&mut admin, 1).await.entries.is_empty(), "it was expected, and is not stored: no damage");
    // A guard that its host wrote wrong, unchecked, is copied as it is.
    let one = BlockCommand { protection: ProtectionInfo::NONE, ..blocks(5, 1) };
    let stride = 4096 + format.tuple_bytes();
    let mut extended = io.io(1, IoCommand::Read(one), Data::Read(stride)).await.ok().data;
    extended[3] ^= 4;
    io.io(1, IoCommand::Write(one), Data::Write(extended.to_vec())).await.ok();
    let (copy, range) = host.copy(9, false, 9);
    let blind = || {
        let copy = CopyCommand { read: ProtectionInfo::NONE, write: ProtectionInfo::NONE, ..copy };
        (copy, CopyRange { protection: ProtectionInfo::NONE, ..range })
    };
    send(&mut io, blind()).await.ok();
    let verify = |prchk| {
        let protection = ProtectionInfo { prchk, ..ProtectionInfo::NONE };
        IoCommand::Verify(BlockCommand { protection, ..blocks(40, 3) })
    };
    io.io(1, verify(Prchk::NONE), Data::None).await.ok();
    assert_eq!(io.io(1, verify(Prchk::GUARD), Data::None).await.status(), 0x282, "{format:?}");
    assert_eq!(admin.newest_error().await.lba, 41);
    assert!(damage_log(&mut admin, 1).await.entries.is_empty(), "the block is as it was written");
    // Damaged data are not copied, whatever the command requests.
    assert!(device.damage(Lba::new(6), Corruption::Data { at: 3, mask: 4 }));
    assert_eq!(send(&mut io, blind()).await.status(), 0x282, "{format:?}");
    assert_eq!(damage_log(&mut admin, 1).await.entries[0].lba.get(), 6);
}

#[test]
fn a_copy_of_damage_or_beyond_its_limits_is_refused() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let page = NamespacePage::decode(&admin.identify(Cns::Namespace, PLAIN).await.ok().data).unwrap();
        assert_eq!((page.mssrl, page.mcl, page.msrc.get()), (16_384, 16_384, 128));
        write(&mut io, PLAIN, 0, 8, 1).await;
        write(&mut io, PLAIN, 200, 8, 9).await;
        served.plain.damage(Lba::new(5), Corruption::Data { at: 0, mask: 1 });
        let (command, list) = copy(200, &[(0, 4), (4, 4)], ProtectionInfo::NONE);
        let done = io.io(PLAIN, command, list).await;
        assert_eq!((done.status(), done.completion.dword0()), (0x282, 1), "the second source range");
        assert_eq!(admin.newest_error().await.lba, 5);
        assert!(
            read(&mut io, PLAIN, 204, 4).await.ok().data == pattern(32768, 9)[16384..],
            "nothing of it was written"
        );
        for (to, from, status) in [
            (2, [(0, 4)].as_slice(), 0x187),
            (BLOCKS - 1, &[(0, 4)], 0x080),
            (100, &[(BLOCKS - 1, 2)], 0x080),
            (100, &[(0, 1); 129], 0x183),
        ] {
            let (command, list) = copy(to, from, ProtectionInfo::NONE);
            assert_eq!(io.io(PLAIN, command, list).await.status(), status, "to {to}");
        }
        let (command, _) = copy(100, &[(0, 1), (1, 1)], ProtectionInfo::NONE);
        assert_eq!(io.io(PLAIN, command, Data::Write(vec![0; 32])).await.status(), 0x00F);
        // A source for which the command expects another reference tag than its address.
        write(&mut io, PROTECTED, 0, 1, 1).await;
        let IoCommand::Copy(mut ask) = copy(100, &[(0, 1)], checked(true)).0 else { unreachable!() };
        let range = CopyRange { extent: extent(0, 1), protection: checked(true).with_tags(format(), 0, 7) };
        let list = ask.encode_ranges(&[range]).unwrap();
        assert_eq!(io.io(PROTECTED, IoCommand::Copy(ask), Data::Write(list)).await.status(), 0x181);
        ask.format = CopyDescriptorFormat::Format1;
        let list = ask.encode_ranges(&[range]).unwrap();
        assert_eq!(io.io(PROTECTED, IoCommand::Copy(ask), Data::Write(list)).await.status(), 0x00B);
    });
}

/// A device that copies by itself, or refuses to, and counts its Copies.
struct Copies {
    memory: Rc<MemoryDevice>,
    refuses: Cell<bool>,
    copies: Cell<u32>,
}

impl Device for Copies {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.memory.abilities().with([RequestKind::Copy], Ability::Native)
    }

    async fn execute(&self, request: Request) -> Outcome {
        let Some(source) = request.source() else { return self.memory.execute(request).await };
        if self.refuses.get() {
            return Err(ErrorKind::Absent(request.kind()).into());
        }
        self.copies.set(self.copies.get() + 1);
        let Response::Data(data) = self.memory.execute(Request::read(source, request.expectations())).await? else {
            panic!("a Read is answered with data");
        };
        self.memory.execute(Request::write(request.extents.one(), data, request.durability)).await
    }
}

fn serve_copies(format: Option<PiFormat>, shows: PiVisibility) -> (Rc<Copies>, Served) {
    let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, 64, format));
    let device = Rc::new(Copies { memory, refuses: Cell::new(false), copies: Cell::new(0) });
    let stack = DynDevice::new("copies", Rc::clone(&device));
    let served = serve_with(short(), |_| {
        let namespace = Namespace::new(SharedDevice::publish(stack), [7; 16]).with_visibility(shows).unwrap();
        Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap()
    });
    (device, served)
}

#[test]
fn a_device_that_copies_does_so_and_one_that_refuses_is_read_and_written() {
    run(|| async {
        for format in [None, Some(TYPE3)] {
            let (device, served) = serve_copies(format, PiVisibility::Plain);
            let (mut admin, mut io) = Queue::pair(served.address, false).await;
            let data = pattern(8 * 4096, 3);
            io.io(1, IoCommand::Write(blocks(0, 8)), Data::Write(data.clone())).await.ok();
            for (refuses, to) in [(false, 30), (true, 40)] {
                device.refuses.set(refuses);
                let (command, list) = copy(to, &[(0, 4), (4, 4)], ProtectionInfo::NONE);
                io.io(1, command, list).await.ok();
                let copied = io.io(1, IoCommand::Read(blocks(to, 8)), Data::Read(8 * 4096)).await.ok().data;
                assert!(copied == data && device.copies.get() == 2);
            }
            device.refuses.set(false);
            if format.is_none() {
                continue;
            }
            // The second range is damaged: the completion names it, it is listed, and its destination stays unchanged;
            // a copy over it repairs it.
            assert!(device.memory.damage(Lba::new(5), Corruption::Data { at: 3, mask: 4 }));
            let (command, list) = copy(50, &[(0, 4), (4, 4)], ProtectionInfo::NONE);
            let done = io.io(1, command, list).await;
            assert_eq!((done.status(), done.completion.dword0()), (0x282, 1));
            assert_eq!(admin.newest_error().await.lba, 5);
            let listed: Vec<u64> =
                damage_log(&mut admin, 1).await.entries.iter().map(|entry| entry.lba.get()).collect();
            assert_eq!(listed, [5]);
            let (command, list) = copy(5, &[(31, 1)], ProtectionInfo::NONE);
            io.io(1, command, list).await.ok();
            assert!(damage_log(&mut admin, 1).await.entries.is_empty());
            io.io(1, IoCommand::Verify(blocks(0, 8)), Data::None).await.ok();
        }
    });
}

/// What a host requires of the written tags is checked here, unless the device's check of the source already covers it.
#[test]
fn a_device_copies_for_hosts_that_see_tags_if_nothing_that_they_demand_is_lost() {
    run(|| async {
        let (device, served) = serve_copies(Some(TYPE3), PiVisibility::Protected);
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let guard = ProtectionInfo { prchk: Prchk::GUARD, ..ProtectionInfo::NONE };
        let tag = |lbat| ProtectionInfo { prchk: Prchk::GUARD | Prchk::APPLICATION_TAG, lbat, lbatm: 0xFFFF, ..guard };
        let made = ProtectionInfo { pract: true, ..tag(7) };
        let write = IoCommand::Write(BlockCommand { protection: made, ..blocks(0, 8) });
        io.io(1, write, Data::Write(pattern(8 * 4096, 3))).await.ok();
        let none = ProtectionInfo::NONE;
        // PRINFOR, PRINFOW, whether the device copies, and the status.
        for (read, write, by_device, status) in [
            (none, none, true, 0),
            (guard, none, true, 0),
            (guard, guard, true, 0),
            (tag(7), tag(7), true, 0),
            (tag(8), none, true, 0x283),
            (none, guard, false, 0),
            (guard, tag(7), false, 0),
            (guard, tag(8), false, 0x283),
            (guard, made, false, 0),
        ] {
            let before = device.copies.get();
            let range = CopyRange { extent: extent(0, 4), protection: read };
            let command = CopyCommand {
                destination: Lba::new(40),
                ranges: Count8::new(1).unwrap(),
                format: CopyDescriptorFormat::Format0,
                read,
                write,
                force_unit_access: false,
                limited_retry: false,
            };
            assert_eq!(send(&mut io, (command, range)).await.status(), status, "{read:?} {write:?}");
            assert_eq!(device.copies.get() > before, by_device, "{read:?} {write:?}");
        }
    });
}
