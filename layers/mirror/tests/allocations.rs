//! In the long run a mirror's reads and writes allocate nothing, whether its replicas execute them in place or wait.

use std::future::pending;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_block::{
    Abilities, Clock, Device, Durability, DynDevice, Expectations, Geometry, Outcome, Request, Response, yield_once,
};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_layers_mirror::{OpenOptions, ReplicaSource, open};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_memory::counting::{Counting, allocations};
use sealblock_units::{BlockSize, Extent};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

struct StoppedClock;

impl Clock for StoppedClock {
    async fn sleep(&self, _: Duration) {
        pending().await
    }
}

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

/// Allocations of the second hundred rounds of a write and three reads, of which one is in place where that is possible.
fn allocations_of(replicas: [DynDevice; 2]) -> u64 {
    let source = |device| ReplicaSource::new("", Ok(device), None);
    let options = OpenOptions { is_read_only: false, accepts_lost_label: false, random: [7; 16] };
    let mirror =
        run(open(replicas.map(source).into(), StoppedClock, options)).expect("blank replicas make a mirror").mirror;
    let mirror = DynDevice::new("mirror", Rc::clone(&mirror));
    let data = Slice::copy_from(&[5; 4096]);
    let mut before = 0;
    for round in 0..200 {
        if round == 100 {
            before = allocations();
        }
        let extent = Extent::from_raw(round % 8, 1).expect("a block");
        let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: extent.start().get() };
        let sealed = Sealed::seal(data.clone(), BlockSize::B4096, Some(FORMAT), &tags);
        run(mirror.execute(Request::write(extent, sealed, Durability::Volatile))).expect("both replicas are there");
        let read = Request::read(extent, Expectations::NONE);
        let in_place = mirror.try_execute(&read);
        let outcomes =
            [run(mirror.execute(read.clone())), run(mirror.execute(read)), in_place.unwrap_or(Ok(Response::Done))];
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
    allocations() - before
}

#[test]
fn reads_and_writes_allocate_nothing_in_the_long_run() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations(), before + 1, "the premise: allocations are counted");
    let memory = || MemoryDevice::new(BlockSize::B4096, 1024, Some(FORMAT));
    let in_place = || DynDevice::new("memory", memory());
    let waiting = || DynDevice::new("waiting", Waiting(memory()));
    assert_eq!(allocations_of([in_place(), in_place()]), 0);
    assert_eq!(allocations_of([waiting(), waiting()]), 0);
    assert_eq!(allocations_of([in_place(), waiting()]), 0);
}
