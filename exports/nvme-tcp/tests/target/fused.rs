//! Fused Compare and Write, over loopback sockets.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::common::requests::*;
use crate::common::*;
use sealblock_block::{Abilities, Device, Durability, DynDevice, ErrorKind, Geometry, Operation, Outcome, Request};
use sealblock_exports_nvme_tcp::Namespace;
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_protocols_nvme::Fuse;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::identify::{Controller, Fuses};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{sleep, spawn};
use sealblock_units::{BlockSize, Extent, Lba};

async fn compare_and_write(io: &mut Queue, start: u64, count: u64, old: Vec<u8>, new: Vec<u8>) -> (u16, u16) {
    compare_and_write_in(io, PLAIN, blocks(start, count), old, new).await
}

#[test]
fn a_fused_write_is_done_only_if_the_compare_finds_its_blocks() {
    run(|| async {
        let served = serve(short());
        let (mut admin, mut io) = Queue::pair(served.address, true).await;
        let page = Controller::decode(&admin.identify(Cns::Controller, 0).await.ok().data).unwrap();
        assert_eq!((page.fuses, page.acwu, page.awun, page.awupf), (Fuses::COMPARE_AND_WRITE, 0, 0, 0));
        let (old, new) = (write(&mut io, PLAIN, 3, 1, 1).await, pattern(4096, 2));
        assert_eq!(compare_and_write(&mut io, 3, 1, new.clone(), new.clone()).await, (0x285, 0x009));
        assert!(read(&mut io, PLAIN, 3, 1).await.ok().data == old, "nothing was written");
        assert_eq!(compare_and_write(&mut io, 3, 1, old.clone(), new.clone()).await, (0, 0));
        assert!(read(&mut io, PLAIN, 3, 1).await.ok().data == new);
        let two = pattern(8192, 2);
        assert_eq!(compare_and_write(&mut io, 3, 2, two.clone(), two).await, (0x014, 0x014), "more than ACWU");
        assert_eq!(compare_and_write(&mut io, BLOCKS, 1, old.clone(), new.clone()).await, (0x080, 0x080));
        // If the first half fails, the second fails too, and the other way round.
        served.plain.damage(Lba::new(3), Corruption::Data { at: 0, mask: 1 });
        assert_eq!(compare_and_write(&mut io, 3, 1, new.clone(), old.clone()).await, (0x282, 0x009));
        let compare = fused(IoCommand::Compare(blocks(4, 1)), PLAIN, Fuse::First);
        let first = io.submit(compare, Data::Write(old.clone())).await;
        let beyond = fused(IoCommand::Write(blocks(BLOCKS, 1)), PLAIN, Fuse::Second);
        let second = io.submit(beyond, Data::Write(old.clone())).await;
        assert_eq!((io.done(first).await.status(), io.done(second).await.status()), (0x009, 0x080));
        let first = io.submit(compare, Data::Write(old.clone())).await;
        let elsewhere = fused(IoCommand::Write(blocks(5, 1)), PLAIN, Fuse::Second);
        let second = io.submit(elsewhere, Data::Write(old.clone())).await;
        assert_eq!((io.done(first).await.status(), io.done(second).await.status()), (0x002, 0x002));
    });
}

#[test]
fn half_a_pair_is_aborted() {
    run(|| async {
        let served = serve(short());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let data = vec![0; 4096];
        let compare = fused(IoCommand::Compare(blocks(0, 1)), PLAIN, Fuse::First);
        let write = fused(IoCommand::Write(blocks(0, 1)), PLAIN, Fuse::Second);
        assert_eq!(io.call(write, Data::Write(data.clone())).await.status(), 0x00A, "no first");
        let first = io.submit(compare, Data::Write(data.clone())).await;
        io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
        assert_eq!(io.done(first).await.status(), 0x00A, "another command came in between");
        let first = io.submit(compare, Data::Write(data.clone())).await;
        let again = io.submit(compare, Data::Write(data.clone())).await;
        let second = io.submit(write, Data::Write(data.clone())).await;
        assert_eq!(io.done(first).await.status(), 0x00A);
        assert_eq!((io.done(again).await.status(), io.done(second).await.status()), (0, 0));
        let large = fused(IoCommand::Compare(blocks(0, 64)), PLAIN, Fuse::First);
        let first = io.submit(large, Data::Write(vec![0; 64 * 4096])).await;
        io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
        assert_eq!(io.done(first).await.status(), 0x00A, "while its data was fetched");
        for (command, fuse) in
            [(IoCommand::Write(blocks(0, 1)), Fuse::First), (IoCommand::Compare(blocks(0, 1)), Fuse::Reserved)]
        {
            let first = io.submit(fused(command, PLAIN, fuse), Data::Write(data.clone())).await;
            io.io(PLAIN, IoCommand::Flush, Data::None).await.ok();
            let expected = if fuse == Fuse::First { 0x00A } else { 0x002 };
            assert_eq!(io.done(first).await.status(), expected);
        }
        write_and_read_as_ever(&mut io).await;
    });
}

/// A memory device whose reads wait, and which remembers the first byte of every write.
struct Held {
    memory: MemoryDevice,
    is_held: Cell<bool>,
    reads: Cell<usize>,
    written: RefCell<Vec<u8>>,
}

impl Device for Held {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.memory.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        match &request.operation {
            Operation::Write(data) => self.written.borrow_mut().push(data.slices().next().unwrap()[0]),
            Operation::Read(_) | Operation::Compare(_) => {
                self.reads.set(self.reads.get() + 1);
                while self.is_held.get() {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            _ => {}
        }
        self.memory.execute(request).await
    }
}

/// Other users of the device, such as another protocol or a repair, also wait for the pair.
#[test]
fn no_other_write_executes_between_a_compare_and_its_write() {
    run(|| async {
        let held = Rc::new(Held {
            memory: MemoryDevice::new(BlockSize::B4096, BLOCKS, None),
            is_held: Cell::new(true),
            reads: Cell::new(0),
            written: RefCell::default(),
        });
        let shared = SharedDevice::publish(DynDevice::new("held", Rc::clone(&held)));
        let namespace = Namespace::new(shared.clone(), [7; 16]);
        let served = serve_with(short(), |subsystem| subsystem.with_namespace(7, namespace).unwrap());
        let (_admin, mut io) = Queue::pair(served.address, false).await;
        let pair =
            spawn(async move { compare_and_write_in(&mut io, 7, blocks(3, 1), vec![0; 4096], vec![1; 4096]).await });
        while held.reads.get() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let write = |at: u64, byte: u8| {
            let device = shared.attach();
            let data = Sealed::seal(Slice::copy_from(&[byte; 4096]), BlockSize::B4096, None, &Tags::default());
            let extent = Extent::from_raw(at, 1).unwrap();
            spawn(async move {
                device.execute(Request::write(extent, data, Durability::Volatile)).await.unwrap();
            })
        };
        let (over, beside) = (write(3, 2), write(4, 3));
        beside.await.unwrap();
        assert_eq!((over.is_finished(), &held.written.borrow()[..]), (false, &[3][..]));
        held.is_held.set(false);
        assert_eq!(pair.await.unwrap(), (0, 0));
        over.await.unwrap();
        assert_eq!(held.written.borrow()[..], [3, 1, 2], "the write of the pair was first");
    });
}

/// A memory device that compares and writes itself, ends that as it is told, and counts all other requests for blocks.
struct Swaps {
    memory: MemoryDevice,
    ends: RefCell<Option<ErrorKind>>,
    swaps: Cell<u32>,
    others: Cell<u32>,
}

impl Device for Swaps {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { compare_and_write_blocks: 1, ..self.memory.abilities() }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let Operation::CompareAndWrite(data) = request.operation else {
            self.others.set(self.others.get() + 1);
            return self.memory.execute(request).await;
        };
        self.swaps.set(self.swaps.get() + 1);
        if let Some(end) = self.ends.borrow().clone() {
            return Err(end.into());
        }
        let extent = request.extents.one();
        self.memory.execute(Request::compare(extent, data.expected)).await?;
        self.memory.execute(Request::write(extent, data.new, request.durability)).await
    }
}

#[test]
fn a_device_that_compares_and_writes_by_itself_does_both_halves_of_a_pair() {
    run(|| async {
        let device = Rc::new(Swaps {
            memory: MemoryDevice::new(BlockSize::B4096, BLOCKS, Some(format())),
            ends: RefCell::default(),
            swaps: Cell::new(0),
            others: Cell::new(0),
        });
        let shared = SharedDevice::publish(DynDevice::new("swaps", Rc::clone(&device)));
        let (plain, shown) = (Namespace::new(shared.clone(), [7; 16]), Namespace::new(shared, [8; 16]));
        let shown = shown.with_visibility(sealblock_exports_nvme_tcp::PiVisibility::Protected).unwrap();
        let served = serve_with(short(), |subsystem| {
            subsystem.with_namespace(7, plain).unwrap().with_namespace(8, shown).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        let (old, new) = (pattern(4096, 1), pattern(4096, 2));
        io.io(7, IoCommand::Write(blocks(3, 1)), Data::Write(old.clone())).await.ok();
        device.others.set(0);
        assert_eq!(compare_and_write_in(&mut io, 7, blocks(3, 1), new.clone(), old.clone()).await, (0x285, 0x009));
        assert_eq!(compare_and_write_in(&mut io, 7, blocks(3, 1), old.clone(), new.clone()).await, (0, 0));
        assert_eq!((device.swaps.get(), device.others.get()), (2, 0), "nothing else reaches the device");
        let read = io.io(7, IoCommand::Read(blocks(3, 1)), Data::Read(4096)).await.ok().data;
        assert!(read == new);
        // A bad block fails the Compare. If the request may have been executed, the Write fails, and must not be sent
        // again.
        assert!(device.memory.damage(Lba::new(3), Corruption::Data { at: 0, mask: 1 }));
        assert_eq!(compare_and_write_in(&mut io, 7, blocks(3, 1), new.clone(), old.clone()).await, (0x282, 0x009));
        assert_eq!(damage_log(&mut admin, 7).await.entries.len(), 1);
        device.ends.replace(Some(ErrorKind::Unreachable { reason: "it may have been executed".to_owned() }));
        let compare = fused(IoCommand::Compare(blocks(3, 1)), 7, Fuse::First);
        let first = io.submit(compare, Data::Write(new.clone())).await;
        let write = fused(IoCommand::Write(blocks(3, 1)), 7, Fuse::Second);
        let second = io.submit(write, Data::Write(new.clone())).await;
        assert_eq!(io.done(first).await.status(), 0x009);
        let status = io.done(second).await.completion.status();
        assert_eq!((status.code().get(), status.do_not_retry()), (0x006, true));
        device.ends.replace(Some(ErrorKind::Media { reason: "full of dust".to_owned() }));
        assert_eq!(compare_and_write_in(&mut io, 7, blocks(3, 1), new.clone(), old.clone()).await, (0x009, 0x280));
        device.ends.replace(None);
        // If tags are visible they are compared too, so the pair is two requests.
        let before = device.swaps.get();
        let raw = [pattern(4096, 9), vec![0; 8]].concat();
        let halves = compare_and_write_in(&mut io, 8, blocks(5, 1), raw.clone(), raw).await;
        assert_eq!((halves.0, device.swaps.get()), (0x285, before));
    });
}

/// Two hosts increment one block with Compare and Write, as clusters do; no increment may be lost.
#[test]
fn counting_with_compare_and_write_loses_nothing() {
    run(|| async {
        let served = serve(short());
        let (_a, one) = Queue::pair(served.address, false).await;
        let (_b, two) = Queue::pair(served.address, false).await;
        let (one, two) = (spawn(count_up(one, PLAIN, 40)), spawn(count_up(two, PLAIN, 40)));
        one.await.unwrap();
        two.await.unwrap();
        let (_c, mut io) = Queue::pair(served.address, false).await;
        assert_eq!(read(&mut io, PLAIN, 0, 1).await.ok().data[..8], 80_u64.to_le_bytes());
    });
}
