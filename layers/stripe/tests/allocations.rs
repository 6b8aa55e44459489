//! In the long run a stripe's reads and writes within a chunk allocate nothing, nor do writes of several chunks in
//! place. A read of several chunks allocates its list of segments.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use sealblock_block::{
    Abilities, Device, Durability, DynDevice, Expectations, Geometry, Outcome, Request, Response, yield_once,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_layers_stripe::{CHUNK, StripeLayer};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_units::{BlockSize, Extent};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

/// A device in memory that executes nothing in place.
struct Waiting(MemoryDevice);

impl Device for Waiting {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        yield_once().await;
        self.0.execute(request).await
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return done;
        }
    }
}

/// The allocations of the second hundred rounds of a write of this many blocks, and of two reads if they are within a
/// chunk, the second one in place if possible.
fn allocations_of(members: [DynDevice; 2], blocks: u64) -> u64 {
    let layer = StripeLayer::new(members.into(), CHUNK).expect("members of one shape");
    let stripe = DynDevice::new("stripe", layer);
    let data = Slice::copy_from(&vec![5; blocks as usize * 4096]);
    let mut counted = 0;
    for round in 0..200 {
        let extent = Extent::from_raw(round % 2 * blocks, blocks).expect("blocks");
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
        let sealed = Sealed::seal(data.clone(), BlockSize::B4096, Some(FORMAT), &tags);
        // Without the tags, which the caller makes.
        let before = allocations();
        run(stripe.execute(Request::write(extent, sealed, Durability::Volatile))).expect("both members are there");
        if extent.bytes(BlockSize::B4096) <= CHUNK.get() {
            let read = Request::read(extent, Expectations::NONE);
            let in_place = stripe.try_execute(&read).unwrap_or(Ok(Response::Done));
            let outcomes = [run(stripe.execute(read)), in_place];
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        }
        counted += if round < 100 { 0 } else { allocations() - before };
    }
    counted
}

#[test]
fn reads_and_writes_allocate_nothing_in_the_long_run() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1, "the premise: allocations are counted");
    let memory = || MemoryDevice::new(BlockSize::B4096, 1024, Some(FORMAT));
    let in_place = || DynDevice::new("memory", memory());
    let waiting = || DynDevice::new("waiting", Waiting(memory()));
    for blocks in [1, 16, 24, 256] {
        assert_eq!(allocations_of([in_place(), in_place()], blocks), 0, "{blocks} blocks");
    }
    for blocks in [1, 16] {
        assert_eq!(allocations_of([waiting(), waiting()], blocks), 0, "{blocks} blocks of one chunk");
    }
}
