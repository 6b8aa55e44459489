//! What the first write of a block of a memory device costs against later ones, and what a read and a write cost.
//!
//! ```text
//! cargo run --release -p sealblock-media-memory --example first_write -- [MIB [PAUSE_US]]
//! ```
//!
//! Every block of a new device of MIB mebibytes (1024) is written twice, 4 KiB at a time in a scattered order, with
//! PAUSE_US microseconds (10) between writes, as a client with one request in flight has over a network. Then follow
//! reads and writes without pauses, of a device without and one with protection information: the fastest of nine
//! rounds, since other programs only add to the time.

use std::time::{Duration, Instant};

use sealblock_block::{Device, Durability, Expectations, Request};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const SIZE: BlockSize = BlockSize::B4096;
const FORMAT: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);
const ROUNDS: usize = 9;

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).expect("within the device")
}

fn write_request(data: &Slice, at: Extent, format: Option<PiFormat>) -> Request {
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: at.start().get() };
    let sealed = Sealed::seal(data.slice(..at.bytes(SIZE) as usize), SIZE, format, &tags);
    Request::write(at, sealed, Durability::Volatile)
}

fn execute(device: &MemoryDevice, request: &Request) {
    let outcome = device.try_execute(request).expect("memory does not wait");
    drop(outcome.expect("memory does not fail"));
}

/// The durations of one write of each block, sorted.
fn write_all(device: &MemoryDevice, blocks: u64, pause: Duration) -> Vec<Duration> {
    let data = Slice::copy_from(&[7; 4096]);
    let mut durations = Vec::with_capacity(blocks as usize);
    for number in 0..blocks {
        // Odd, so that every block of a power of two of them has its turn.
        let request = write_request(&data, extent(number.wrapping_mul(0x9E37_79B9) % blocks, 1), None);
        let begin = Instant::now();
        execute(device, &request);
        durations.push(begin.elapsed());
        let resume = Instant::now() + pause;
        while Instant::now() < resume {
            std::hint::spin_loop();
        }
    }
    durations.sort_unstable();
    durations
}

fn show(name: &str, sorted: &[Duration]) {
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize].as_nanos() as f64 / 1e3;
    println!(
        "{name}: p50 {:.2} us, p99 {:.2} us, p99.9 {:.2} us, max. {:.0} us",
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
}

/// Nanoseconds of each of these requests, one after the other.
fn cost(device: &MemoryDevice, requests: &[Request]) -> f64 {
    let round = |_| {
        let begin = Instant::now();
        requests.iter().for_each(|request| execute(device, request));
        begin.elapsed().as_nanos() as f64 / requests.len() as f64
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("a number"));
    let (mib, pause_us) = (numbers.next().unwrap_or(1024).next_power_of_two(), numbers.next().unwrap_or(10));
    let (blocks, pause) = (mib << 8, Duration::from_micros(pause_us));
    let device = MemoryDevice::new(SIZE, blocks, None);
    let first = write_all(&device, blocks, pause);
    let second = write_all(&device, blocks, pause);
    show("first writes ", &first);
    show("second writes", &second);
    let p99 = |sorted: &[Duration]| sorted[(sorted.len() - 1) * 99 / 100].as_secs_f64();
    println!("p99 of first writes: {:.1} times that of second writes", p99(&first) / p99(&second));
    drop(device);
    let data = Slice::copy_from(&vec![7; 128 << 10]);
    for (name, format) in [("without tags", None), ("with tags", Some(FORMAT))] {
        let device = MemoryDevice::new(SIZE, 1 << 14, format);
        for length in [1, 32] {
            let places: Vec<Extent> = (0..8192).map(|n| extent(n * 8111 % (16384 / length) * length, length)).collect();
            let writes: Vec<Request> = places.iter().map(|at| write_request(&data, *at, format)).collect();
            let reads: Vec<Request> = places.iter().map(|at| Request::read(*at, Expectations::NONE)).collect();
            let (write, read) = (cost(&device, &writes), cost(&device, &reads));
            println!("{name}, {} KiB: write {write:.0} ns, read {read:.0} ns", length * 4);
        }
    }
}
