//! Measures the cost of crossing cores: requests for one block of memory on the owner core, and across cores by this
//! layer; and reads across cores by one call per read. The device completes requests at once, or waits for one turn as
//! a file does.
//!
//! Prints the time per request and the CPU time of both cores; on a busy machine only the latter is meaningful.
//!
//! `crossing [SECONDS] [SPIN_US]` runs depths of 1, 8 and 32, without a spin and, if one is given, with it.

use std::error::Error;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use sealblock_block::{Abilities, Device, Durability, DynDevice, Expectations, Geometry, Outcome, Request};
use sealblock_integrity::{Sealed, Tags};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_reactor::{Config, CoreGone, CoreHandle, Cores, Placement, pool, yield_now};
use sealblock_units::{BlockSize, Extent, Lba};

/// Does not complete at once.
struct Waiting(MemoryDevice);

impl Device for Waiting {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        yield_now().await;
        self.0.execute(request).await
    }
}

fn read() -> Request {
    Request::read(Extent::one(Lba::ZERO), Expectations::NONE)
}

fn write() -> Request {
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
    let data = Sealed::seal(pool().take(4096).freeze(), BlockSize::B4096, None, &tags);
    Request::write(Extent::one(Lba::ZERO), data, Durability::Volatile)
}

/// Sends requests at this depth until the time is up; returns their number.
async fn run(device: &impl Device, request: fn() -> Request, depth: usize, time: Duration) -> u64 {
    let end = Instant::now() + time;
    let counts = join_all((0..depth).map(|_| async {
        let mut count = 0;
        while Instant::now() < end {
            assert!(device.execute(request()).await.is_ok());
            count += 1;
        }
        count
    }));
    counts.await.iter().sum()
}

async fn by_calls(owner: &CoreHandle, shared: &SharedDevice, depth: usize, time: Duration) -> u64 {
    let end = Instant::now() + time;
    let counts = join_all((0..depth).map(|_| async {
        let mut count = 0;
        while Instant::now() < end {
            let shared = shared.clone();
            let outcome = owner.call(move || async move { shared.attach().execute(read()).await }).await;
            assert!(outcome.is_ok_and(|outcome| outcome.is_ok()));
            count += 1;
        }
        count
    }));
    counts.await.iter().sum()
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split_whitespace().next().and_then(|number| number.parse().ok());
    nanoseconds.map_or(Duration::ZERO, Duration::from_nanos)
}

/// CPU time of both cores.
fn cpu_times(cores: [&CoreHandle; 2]) -> Result<Duration, Box<dyn Error>> {
    Ok(run_on(cores[0], || async { cpu_time() })? + run_on(cores[1], || async { cpu_time() })?)
}

fn show(what: &str, depth: usize, count: u64, time: Duration, cpu: Duration) {
    let each_ns = |time: Duration| time.as_nanos() / u128::from(count.max(1));
    let (wall_ns, cpu_ns) = (each_ns(time), each_ns(cpu));
    println!("  {what:<16} depth {depth:>2}: {wall_ns:>6} ns each, {cpu_ns:>6} ns of CPU");
}

fn measure(time: Duration, spin_us: u32) -> Result<(), Box<dyn Error>> {
    let cores = Cores::start(Placement::Count(2), Config { spin_us, ..Config::default() })?;
    let (owner, remote) = (cores.handle(0).ok_or(CoreGone::Stopped)?, cores.handle(1).ok_or(CoreGone::Stopped)?);
    println!("{:?}, spin {spin_us} us", cores.backend(0).map(ToString::to_string));
    let publish = |waits: bool| async move {
        let memory = MemoryDevice::new(BlockSize::B4096, 8, None);
        let device = if waits { DynDevice::new("waits", Waiting(memory)) } else { DynDevice::new("mem", memory) };
        SharedDevice::publish(device)
    };
    for waits in [false, true] {
        let shared = run_on(&owner, move || publish(waits))?;
        println!(" {}", if waits { "waits" } else { "in place" });
        for depth in [1, 8, 32] {
            let requests: [(_, fn() -> Request); 2] = [("read", read), ("write", write)];
            for (kind, request) in requests {
                for (place, core) in [("at home", &owner), ("across", &remote)] {
                    let shared = shared.clone();
                    let before = cpu_times([&owner, &remote])?;
                    let work = move || async move { run(&shared.attach(), request, depth, time).await };
                    let count = run_on(core, work)?;
                    show(&format!("{kind} {place}"), depth, count, time, cpu_times([&owner, &remote])? - before);
                }
            }
            let (shared, core, before) = (shared.clone(), owner.clone(), cpu_times([&owner, &remote])?);
            let count = run_on(&remote, move || async move { by_calls(&core, &shared, depth, time).await })?;
            show("read by calls", depth, count, time, cpu_times([&owner, &remote])? - before);
        }
    }
    Ok(())
}

/// Runs work on a core and waits for it on this thread.
fn run_on<F, T>(core: &CoreHandle, work: impl FnOnce() -> F + Send + 'static) -> Result<T, Box<dyn Error>>
where
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let (send, receive) = std::sync::mpsc::channel();
    core.address().send(move || {
        drop(sealblock_runtime_reactor::spawn(async move {
            // The receiver lives as long as this task.
            let _ = send.send(work().await);
        }));
    })?;
    Ok(receive.recv()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().map_or(Ok(1.0), |text| text.parse())?;
    let spin_us: u32 = arguments.next().map_or(Ok(0), |text| text.parse())?;
    let time = Duration::try_from_secs_f64(seconds)?;
    measure(time, 0)?;
    if spin_us > 0 {
        measure(time, spin_us)?;
    }
    Ok(())
}
