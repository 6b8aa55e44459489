//! Namespaces of read-only devices: Identify reports that, and every change of a block fails with its own status.

use crate::common::fixed::Fixed;
use crate::common::requests::*;
use crate::common::*;
use sealblock_block::DynDevice;
use sealblock_exports_nvme_tcp::Namespace;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::admin::Cns;
use sealblock_protocols_nvme::nvm::{DatasetManagement, DsmRange, IoCommand, WriteZeroes};
use zerocopy::IntoBytes;

const FIXED: u32 = 6;
const WRITE_PROTECTED: u16 = 0x020;

#[test]
fn read_only_namespaces_are_reported_and_fail_writes() {
    run(|| async {
        let served = serve_with(short(), |subsystem| {
            let device = Fixed::new();
            let shared = SharedDevice::publish(DynDevice::new("fixed", device));
            subsystem.with_namespace(FIXED, Namespace::new(shared, [6; 16])).unwrap()
        });
        let (mut admin, mut io) = Queue::pair(served.address, false).await;
        for (nsid, protected, status) in [(FIXED, 1, WRITE_PROTECTED), (PLAIN, 0, 0)] {
            // NSATTR bit 0, where Linux looks for it, and where others do.
            assert_eq!(admin.identify(Cns::Namespace, nsid).await.ok().data[99] & 1, protected);
            assert_eq!(admin.identify(Cns::IndependentNamespace, nsid).await.ok().data[8] & 1, protected);
            let zeroes = |deallocate| WriteZeroes { blocks: blocks(1, 1), deallocate, whole_namespace: false };
            let list = DsmRange::new(extent(4, 1)).as_bytes().to_vec();
            for (command, data) in [
                (IoCommand::Write(blocks(0, 1)), Data::Write(vec![1; 4096])),
                (IoCommand::WriteZeroes(zeroes(false)), Data::None),
                (IoCommand::WriteZeroes(zeroes(true)), Data::None),
                (IoCommand::DatasetManagement(DatasetManagement::deallocate(1).unwrap()), Data::Write(list)),
                (IoCommand::WriteUncorrectable(extent(7, 1)), Data::None),
            ] {
                let what = format!("{command:?}");
                assert_eq!(io.io(nsid, command, data).await.status(), status, "{what}");
            }
            let same = vec![0; 4096];
            let outcome = compare_and_write_in(&mut io, nsid, blocks(20, 1), same.clone(), same.clone()).await;
            assert_eq!(outcome, (0, status));
            assert!(io.io(nsid, IoCommand::Read(blocks(20, 1)), Data::Read(4096)).await.ok().data == same);
            io.io(nsid, IoCommand::Flush, Data::None).await.ok();
        }
    });
}
