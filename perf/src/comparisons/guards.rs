//! The speed of making and checking guards, compared with the memory of the same machine in the same run.
//!
//! Thresholds: each CRC reaches at least 90 % of the speed of `crc-fast` alone; verifying blocks costs little more than
//! computing their checksums; the IP checksum reaches at least 50 GB/s over cached blocks of 4 KiB on a machine with
//! AVX-512. All contenders of a row alternate in short rounds, and the best round of each is used, so that a
//! disturbance affects all of them alike, and a slow period of the machine affects none. GB are 10^9 bytes of data;
//! tags are not counted. Seconds are CPU time, so that other tasks do not count.

use std::fmt;
use std::hint::black_box;
use std::time::Duration;

use anyhow::Context;
use crc_fast::CrcAlgorithm;
use sealblock_integrity::combine::{Combiner, Crc32c, Crc64, InterleavedCrc};
use sealblock_integrity::{
    Checks, GuardKind, Interleave, PiFormat, ProtectionType, RebaseTags, Tags, guard, rebase, seal, verify,
    verify_interleaved,
};
use sealblock_units::{BlockSize, Lba};

use crate::cpu::{Memory, Pass, thread_cpu};

/// Bytes of one checksum.
const SIZES: [usize; 3] = [512, 4096, 65536];
/// Bytes that fit in the first-level cache, unless one checksum alone covers more.
const WARM_BYTES: usize = 16 << 10;
/// Bytes that fit in no cache.
const COLD_BYTES: usize = 256 << 20;
/// Turns of each contender.
const ROUNDS: usize = 9;
/// The minimum CPU time of a turn.
const TURN: Duration = Duration::from_millis(4);

/// The result for one working set, in GB/s.
pub struct Speed {
    /// The operation.
    pub name: String,
    /// Bytes of one checksum, copy or read.
    pub chunk_bytes: usize,
    /// Bytes of the working set.
    pub set_bytes: usize,
    /// 10^9 bytes per second of CPU time, in the best round.
    pub gb_s: f64,
    /// The same relative to the row's baseline, with its name.
    pub ratio: Option<(f64, &'static str)>,
}

/// All results of [`run`].
pub struct Report {
    /// Throughput, in the order of measurement.
    pub speeds: Vec<Speed>,
    /// Nanoseconds of one operation without a throughput.
    pub nanoseconds: Vec<(&'static str, f64)>,
}

/// Measures everything; this takes about fifteen seconds.
pub fn run() -> anyhow::Result<Report> {
    let memory = Memory::new(COLD_BYTES).context("preparing the working set")?;
    let mut report = Report { speeds: Vec::new(), nanoseconds: Vec::new() };
    for set_bytes in [WARM_BYTES, COLD_BYTES] {
        for chunk_bytes in SIZES {
            let set = &memory.bytes()[..set_bytes.max(chunk_bytes)];
            measure_memory(&mut report, set, chunk_bytes);
            for kind in GuardKind::ALL {
                measure_guard(&mut report, set, chunk_bytes, kind);
            }
        }
        measure_rebase(&mut report, &memory.bytes()[..set_bytes]);
    }
    measure_combine(&mut report);
    Ok(report)
}

/// Alternates the contenders over a set; returns the GB per second of CPU time of each.
pub fn race(set_bytes: usize, contenders: &mut [Pass<'_>]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; contenders.len()];
    for _ in 0..ROUNDS {
        for (contender, best) in contenders.iter_mut().zip(&mut best) {
            *best = best.min(turn(contender));
        }
    }
    best.iter().map(|seconds| set_bytes as f64 / seconds / 1e9).collect()
}

/// CPU seconds of one pass, averaged over a turn of CPU time. The clock is read so seldom that reading it does not
/// matter.
fn turn(pass: &mut Pass<'_>) -> f64 {
    let (start, mut passes) = (thread_cpu(), 0_u32);
    let mut batch = 1;
    loop {
        for _ in 0..batch {
            black_box(pass());
        }
        passes += batch;
        let taken = thread_cpu() - start;
        if taken >= TURN.as_secs_f64() {
            return taken / f64::from(passes);
        }
        batch = passes;
    }
}

/// Runs `checksum` over each chunk of the set.
fn chunks<'a>(set: &'a [u8], chunk_bytes: usize, checksum: impl Fn(&[u8]) -> u64 + 'a) -> Pass<'a> {
    Box::new(move || black_box(set).chunks_exact(chunk_bytes).fold(0, |all, chunk| all ^ checksum(chunk)))
}

/// Reads every word and does almost nothing with it.
fn read(bytes: &[u8]) -> u64 {
    let mut lanes = [0_u64; 16];
    for step in bytes.as_chunks::<128>().0 {
        for (lane, word) in lanes.iter_mut().zip(step.as_chunks::<8>().0) {
            *lane |= u64::from_le_bytes(*word);
        }
    }
    lanes.iter().fold(0, |all, lane| all ^ lane)
}

fn measure_memory(report: &mut Report, set: &[u8], chunk_bytes: usize) {
    let mut copy = vec![1_u8; set.len()];
    let mut contenders = [
        chunks(set, chunk_bytes, read),
        Box::new(|| {
            for (to, from) in copy.chunks_exact_mut(chunk_bytes).zip(black_box(set).chunks_exact(chunk_bytes)) {
                to.copy_from_slice(from);
            }
            u64::from(black_box(&copy)[0])
        }) as Pass<'_>,
    ];
    let speeds = race(set.len(), &mut contenders);
    for (name, gb_s) in ["memory read", "memcpy"].into_iter().zip(speeds) {
        report.push(name.to_owned(), set, chunk_bytes, gb_s, None);
    }
}

fn measure_guard(report: &mut Report, set: &[u8], chunk_bytes: usize, kind: GuardKind) {
    let mut contenders = vec![baseline(set, chunk_bytes, kind)];
    contenders.push(chunks(set, chunk_bytes, move |chunk| guard::compute(black_box(kind), chunk)));
    if let Some(size) = BlockSize::from_bytes(chunk_bytes as u64) {
        contenders.extend(whole_tuples(set, size, kind));
    }
    let speeds = race(set.len(), &mut contenders);
    let theirs = if kind == GuardKind::IpChecksum { "memory read" } else { "crc-fast" };
    for (name, gb_s) in [theirs, "guard", "verify", "seal", "verify interleaved"].into_iter().zip(&speeds) {
        let ratio = (name != theirs).then_some((gb_s / speeds[0], theirs));
        report.push(format!("{kind} {name}"), set, chunk_bytes, *gb_s, ratio);
    }
}

/// Verifies and makes the tags of a set, as a run of blocks.
fn whole_tuples(set: &[u8], size: BlockSize, kind: GuardKind) -> [Pass<'_>; 3] {
    let format = PiFormat::with_default_storage_tag(kind, ProtectionType::Type1);
    let mut tags = vec![0; set.len() / size.bytes() * format.tuple_bytes()];
    seal(format, size, set, &mut tags, &Tags::default());
    let mut sealed = tags.clone();
    let checks = Checks::full(format, Lba::ZERO);
    let layout = Interleave::tuple_only(format, size);
    let pairs = set.chunks_exact(size.bytes()).zip(tags.chunks_exact(format.tuple_bytes()));
    let mut woven = Vec::with_capacity(set.len() + tags.len());
    pairs.for_each(|(data, tuple)| {
        woven.extend_from_slice(data);
        woven.extend_from_slice(tuple);
    });
    [
        Box::new(move || {
            let bad = verify(format, size, black_box(set), &tags, &checks, &mut |_| ());
            assert_eq!(bad, 0, "what was sealed verifies");
            bad as u64
        }),
        Box::new(move || {
            seal(format, size, black_box(set), &mut sealed, &Tags::default());
            u64::from(sealed[0])
        }),
        Box::new(move || {
            let bad = verify_interleaved(layout, black_box(&woven), &checks, &mut |_| ());
            assert_eq!(bad, 0, "what was sealed verifies");
            bad as u64
        }),
    ]
}

/// The baseline of a guard: `crc-fast` itself, or plain reading if it has no such checksum.
fn baseline(set: &[u8], chunk_bytes: usize, kind: GuardKind) -> Pass<'_> {
    match kind {
        GuardKind::Crc16 => chunks(set, chunk_bytes, |c| crc_fast::checksum(CrcAlgorithm::Crc16T10Dif, c)),
        GuardKind::Crc32c => chunks(set, chunk_bytes, |c| u64::from(crc_fast::crc32_iscsi(c))),
        GuardKind::Crc64 => chunks(set, chunk_bytes, crc_fast::crc64_nvme),
        GuardKind::IpChecksum => chunks(set, chunk_bytes, read),
    }
}

/// One pass that checks and converts, compared with the two passes that it replaces.
fn measure_rebase(report: &mut Report, set: &[u8]) {
    let size = BlockSize::B4096;
    for (from, to) in [
        (GuardKind::IpChecksum, GuardKind::Crc32c),
        (GuardKind::Crc16, GuardKind::Crc32c),
        (GuardKind::Crc32c, GuardKind::Crc32c),
    ] {
        let from = PiFormat::with_default_storage_tag(from, ProtectionType::Type1);
        let to = PiFormat::with_default_storage_tag(to, ProtectionType::Type1);
        let blocks = set.len() / size.bytes();
        let mut old = vec![0; blocks * from.tuple_bytes()];
        seal(from, size, set, &mut old, &Tags::default());
        let (mut one, mut two) = (vec![0; blocks * to.tuple_bytes()], vec![0; blocks * to.tuple_bytes()]);
        let (checks, output) = (Checks::full(from, Lba::ZERO), RebaseTags::default());
        let mut contenders: [Pass<'_>; 2] = [
            Box::new(|| {
                let bad = verify(from, size, black_box(set), &old, &checks, &mut |_| ());
                seal(to, size, black_box(set), &mut two, &Tags::default());
                bad as u64
            }),
            Box::new(|| {
                let ignore = &mut |_| ();
                rebase(from, to, size, black_box(set), &old, &mut one, &checks, &output, ignore) as u64
            }),
        ];
        let speeds = race(set.len(), &mut contenders);
        let name = format!("{} to {}", from.guard(), to.guard());
        report.push(format!("{name}, verify and seal"), set, size.bytes(), speeds[0], None);
        let ratio = Some((speeds[1] / speeds[0], "verify and seal"));
        report.push(format!("{name}, rebase"), set, size.bytes(), speeds[1], ratio);
    }
}

/// Combinations that depend on each other, as in one digest.
fn measure_combine(report: &mut Report) {
    const JOINS: u32 = 1024;
    let crcs: Vec<u32> = (0..JOINS).map(|i| i.wrapping_mul(0x9E37_79B9)).collect();
    let size = BlockSize::B4096;
    let combiner = Combiner::<Crc32c>::new(size.bytes() as u64);
    let digest = InterleavedCrc::new(size, GuardKind::Crc32c.tuple_bytes());
    let tuple = [0x5A; GuardKind::Crc32c.tuple_bytes()];
    let wide: Vec<u64> = (0..u64::from(JOINS)).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let crc64 = Combiner::<Crc64>::new(size.bytes() as u64);
    let mut contenders: [Pass<'_>; 3] = [
        Box::new(|| u64::from(combiner.join_all(black_box(&crcs).iter().copied()))),
        Box::new(|| u64::from(black_box(&crcs).iter().fold(0, |crc, part| digest.join(crc, *part, black_box(&tuple))))),
        Box::new(|| crc64.join_all(black_box(&wide).iter().copied())),
    ];
    let speeds = race(JOINS as usize, &mut contenders);
    let names = [
        "join the CRC-32C of 4096 bytes",
        "join the CRC-32C of 4096 bytes and a 16-byte tuple",
        "join the CRC-64 of 4096 bytes",
    ];
    report.nanoseconds.extend(names.into_iter().zip(speeds.iter().map(|billions| 1.0 / billions)));
}

impl Report {
    fn push(&mut self, name: String, set: &[u8], chunk_bytes: usize, gb_s: f64, ratio: Option<(f64, &'static str)>) {
        self.speeds.push(Speed { name, chunk_bytes, set_bytes: set.len(), gb_s, ratio });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut group = (0, 0);
        for speed in &self.speeds {
            if group != (speed.set_bytes, speed.chunk_bytes) {
                group = (speed.set_bytes, speed.chunk_bytes);
                let warmth = if speed.set_bytes == COLD_BYTES { "cold" } else { "warm" };
                writeln!(f, "\n{} bytes at once, {warmth} ({} KiB)", speed.chunk_bytes, speed.set_bytes >> 10)?;
            }
            write!(f, "  {:32} {:7.1} GB/s", speed.name, speed.gb_s)?;
            match speed.ratio {
                Some((ratio, baseline)) => writeln!(f, "  {:5.1} % of {baseline}", ratio * 100.0)?,
                None => writeln!(f)?,
            }
        }
        writeln!(f)?;
        self.nanoseconds.iter().try_for_each(|(name, ns)| writeln!(f, "{name}: {ns:.1} ns"))
    }
}
