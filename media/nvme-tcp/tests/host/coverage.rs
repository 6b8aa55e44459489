//! Coverage of a Verify over the network: as sealblock's target reports it, and as assumed of a target that reports
//! none.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::{fake, *};
use sealblock_block::{
    Abilities, Checksum, Coverage, Device, DynDevice, Error, Expectations, Gate, Geometry, Outcome, Request, Response,
    Unchecked, VerifyStats, WhyUnchecked,
};
use sealblock_exports_nvme_tcp::{Namespace, PiVisibility, Subsystem, Target};
use sealblock_integrity::ChecksumKind;
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::{Corruption, MemoryDevice};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, PiSource};
use sealblock_runtime_reactor::net::Listener;
use sealblock_runtime_reactor::spawn;
use sealblock_units::{BlockSize, Extent, Lba};

/// A device that claims to have two copies, one of which is missing while the test says so.
struct Copies {
    memory: Rc<MemoryDevice>,
    is_away: Cell<bool>,
}

impl Copies {
    fn reach(&self, extent: Extent, mut coverage: Coverage) -> Coverage {
        if self.is_away.get() {
            coverage.add(Unchecked::new(extent, WhyUnchecked::Absent));
            coverage.add(Unchecked::new(extent, WhyUnchecked::Unsettled));
        }
        coverage
    }
}

impl Device for Copies {
    fn geometry(&self) -> &Geometry {
        self.memory.geometry()
    }

    fn abilities(&self) -> Abilities {
        Abilities { copies: true, ..self.memory.abilities() }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        let Some(extent) = operation.extent() else { return self.memory.execute(operation).await };
        match self.memory.execute(operation).await {
            Ok(Response::Verified(of)) => {
                Ok(Response::Verified(VerifyStats { coverage: self.reach(extent, of.coverage), ..of }))
            }
            Ok(Response::Checksum(of)) => {
                Ok(Response::Checksum(Checksum { coverage: self.reach(extent, of.coverage), ..of }))
            }
            Ok(other) => Ok(other),
            Err(error) => {
                let (bad_blocks, coverage) = error.into_damage()?;
                let bad_blocks = sealblock_block::BadBlocks::new(bad_blocks).unwrap();
                Err(bad_blocks.with_coverage(self.reach(extent, coverage)).into())
            }
        }
    }
}

/// The coverage of Verify and Digest, whatever they find.
async fn reach(device: &impl Device, extent: Extent) -> Coverage {
    let mut coverages = Vec::new();
    let checksum = Request::checksum(extent, ChecksumKind::Crc32c, Expectations::NONE);
    for operation in [Request::verify(extent, Expectations::NONE), checksum] {
        coverages.push(match device.execute(operation).await.map_err(Error::into_damage) {
            Ok(Response::Verified(of)) => of.coverage,
            Ok(Response::Checksum(of)) => of.coverage,
            Ok(other) => panic!("no check but {other:?}"),
            Err(Ok((_, coverage))) => coverage,
            Err(Err(error)) => panic!("{error}"),
        });
    }
    assert_eq!(coverages[0].bits(), coverages[1].bits(), "a digest goes as far as a verify");
    coverages.swap_remove(0)
}

#[test]
fn a_copy_that_is_away_at_the_target_is_told_with_its_blocks() {
    run(|| async {
        for shows in [PiVisibility::Plain, PiVisibility::Protected] {
            let memory = memory(BlockSize::B4096, Some(crc16()));
            let device = Rc::new(Copies { memory: Rc::clone(&memory), is_away: Cell::new(false) });
            let gate = DynDevice::new("copies", Rc::clone(&device));
            let namespace = Namespace::new(SharedDevice::publish(gate), [1; 16]).with_visibility(shows).unwrap();
            let subsystem = Subsystem::new(SUBNQN.parse().unwrap(), "SN1").with_namespace(1, namespace).unwrap();
            let target = Target::new([subsystem], limits()).unwrap();
            let listener = Listener::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
            let (address, server) = (listener.local_addr().unwrap(), target.clone());
            let serving = spawn(async move { server.serve(listener).await });
            let served = Served { target, address, serving };
            let far = open(&served, 1, options()).await;
            assert!(far.abilities().copies && far.abilities().seals);
            write(&far, extent(0, 600), 1).await.unwrap();
            assert_eq!(reach(&far, extent(0, 600)).await, Coverage::default());
            device.is_away.set(true);
            let told = reach(&far, extent(0, 600)).await;
            assert_eq!((told.blocks(), told.is_sealed()), (600, true));
            let why: Vec<_> = told.unchecked().iter().map(|run| run.why).collect();
            assert_eq!(why, [WhyUnchecked::Absent, WhyUnchecked::Unsettled]);
            // Next to damage, too.
            assert!(memory.damage(Lba::new(9), Corruption::Data { at: 1, mask: 1 }));
            assert_eq!(reach(&far, extent(0, 600)).await.blocks(), 600);
            // Reading checks one copy.
            let read = far.verify_by_reading(extent(20, 4), Expectations::NONE).await;
            let Ok(Response::Verified(read)) = read else { panic!("good blocks are read") };
            assert_eq!(read.coverage.unchecked()[0].why, WhyUnchecked::OneCopy);
            served.target.stop();
        }
    });
}

#[test]
fn a_namespace_has_seals_if_its_target_says_so_or_shows_them() {
    run(|| async {
        let devices = [
            (memory(BlockSize::B4096, Some(crc16())), PiVisibility::Plain),
            (memory(BlockSize::B4096, Some(crc16())), PiVisibility::Protected),
            (memory(BlockSize::B4096, None), PiVisibility::Plain),
        ];
        let served = serve(&devices);
        for (nsid, is_sealed) in [(1, true), (2, true), (3, false)] {
            for protection in [PiSource::Auto, PiSource::Target] {
                let protection = if nsid == 2 { protection } else { PiSource::Auto };
                let far = open(&served, nsid, Options { protection, ..options() }).await;
                assert_eq!(far.abilities().seals, is_sealed, "namespace {nsid}");
                let told = reach(&far, extent(0, 100)).await;
                assert_eq!((told.is_sealed(), told.is_complete()), (is_sealed, true), "namespace {nsid}");
            }
        }
        served.target.stop();
    });
}

#[test]
fn a_target_that_tells_nothing_is_taken_to_have_no_seals_but_those_it_shows() {
    run(|| async {
        let fake = fake::serve(fake::good(), |_| None);
        let device = NvmeTcpDevice::connect(fake.address.into(), SUBNQN.parse().unwrap(), None, options()).await;
        let far = Gate::new("fake", device.unwrap());
        assert!(!far.abilities().seals && !far.abilities().copies);
        let Ok(Response::Verified(told)) = verify(&far, extent(0, 8)).await else { panic!("it says that all is well") };
        assert_eq!((told.coverage.is_sealed(), told.coverage.is_complete()), (false, true));
    });
}
