//! Fused Compare and Write, over loopback sockets.

mod common;

use common::requests::*;
use common::*;
use sealblock_media_memory::Damage;
use sealblock_protocols_nvme::Fuse;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::identify::{Controller, Fuses};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_reactor::spawn;
use sealblock_units::Lba;

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
        // A first half that fails takes the second along, and the other way round.
        served.plain.damage(Lba::new(3), Damage::Data { at: 0, mask: 1 });
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

/// Two hosts count in one block with Compare and Write, as clusters do; no step may be lost.
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
