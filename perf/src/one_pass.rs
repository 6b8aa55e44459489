//! What it costs to have protection and data digests, by separate passes over the data and by one.
//!
//! Claim: with the 32-bit guard a digest costs no pass of its own. First in memory: a transfer of 128 KiB gets its tags and its
//! digest, or has both checked. Then through the socket, where a guard of another kind stands for separate passes, and the
//! bytes that the host summed are counted. CPU time of both ends is printed for each GiB of data; neither end spins.

use std::hint::black_box;

use anyhow::Context;
use sealblock_integrity::combine::InterleavedCrc;
use sealblock_integrity::{Checks, GuardKind, PiFormat, ProtectionType, Sealed, Tags, Unverified, guard};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Lba};

use crate::guards::{self, Memory, Pass};
use crate::load::Load;
use crate::nvme_tcp;
use crate::options::RemoteOptions;
use crate::remote::{self, Serving};
use crate::report::Spread;

/// Bytes of a transfer, which has one digest.
pub const TRANSFER_BYTES: usize = 128 << 10;
const WARM_BYTES: usize = TRANSFER_BYTES;
const COLD_BYTES: usize = 256 << 20;
const GIB: f64 = (1_u64 << 30) as f64;

const LOADS: &[Load] = &[
    Load { name: "read 128 KiB, sequential, QD 8", write: false, blocks: 32, random: false, depth: 8, flush_every: 0 },
    Load { name: "write 128 KiB, sequential, QD 8", write: true, blocks: 32, random: false, depth: 8, flush_every: 0 },
];

/// Measures everything and prints it.
pub fn run(options: RemoteOptions) -> anyhow::Result<()> {
    let memory = Memory::new(COLD_BYTES).context("preparing the working set")?;
    for set_bytes in [WARM_BYTES, COLD_BYTES] {
        for size in [BlockSize::B512, BlockSize::B4096] {
            in_memory(&memory.bytes()[..set_bytes], size);
        }
    }
    for device in options.devices.clone() {
        let (served, _scratch) = nvme_tcp::served(&options, &device)?;
        let (_target, serving) = remote::start(&options, 0, &served)?;
        let (_cores, host) = remote::core(options.host_cpu, 0)?;
        for digests in remote::switches(&options.digests)? {
            println!("{device}, through the socket, digests {}", if digests { "on" } else { "off" });
            let (options, serving) = (options.clone(), serving.clone());
            let bench = remote::wait(host.call(move || bench(options, serving, digests)))?;
            bench.context("the host's core is gone")??;
        }
    }
    Ok(())
}

const fn format(kind: GuardKind) -> PiFormat {
    PiFormat::with_default_storage_tag(kind, ProtectionType::Type1)
}

/// The data of transfers.
pub fn transfers(set: &[u8]) -> Vec<Slice> {
    set.chunks_exact(TRANSFER_BYTES).map(Slice::copy_from).collect()
}

/// Plain data that gets tags and a digest, or has both checked, by every way there is. Sealing and verifying take turns; crc32c apart comes first, and
/// crc32c in one pass last.
pub fn passes(slices: &[Slice], size: BlockSize) -> Vec<(&'static str, Pass<'_>)> {
    let digest = InterleavedCrc::new(size, 0);
    let mut contenders: Vec<(&'static str, Pass<'_>)> = Vec::new();
    for kind in [GuardKind::Crc32c, GuardKind::Crc16, GuardKind::Crc64] {
        let (seal, verify) = match kind {
            GuardKind::Crc32c => ("seal crc32c, then digest", "digest, then verify crc32c"),
            GuardKind::Crc16 => ("seal crc16, then digest", "digest, then verify crc16"),
            _ => ("seal crc64, then digest", "digest, then verify crc64"),
        };
        contenders.push((seal, Box::new(each(slices, move |data| separate_seal(data, size, format(kind))))));
        contenders.push((verify, Box::new(each_sealed(slices, size, kind, separate_verify))));
    }
    let (one, other) = (digest.clone(), digest);
    let seal = each(slices, move |data| one_seal(data, size, &one));
    contenders.push(("seal crc32c and digest, one pass", Box::new(seal)));
    let verify = each_sealed(slices, size, GuardKind::Crc32c, move |data, tags, format, size| {
        one_verify(data, tags, format, size, &other)
    });
    contenders.push(("digest and verify crc32c, one pass", Box::new(verify)));
    contenders
}

fn in_memory(set: &[u8], size: BlockSize) {
    let slices = transfers(set);
    let (names, mut passes): (Vec<&str>, Vec<Pass<'_>>) = passes(&slices, size).into_iter().unzip();
    let speeds = guards::race(set.len(), &mut passes);
    let warmth = if set.len() == COLD_BYTES { "cold" } else { "warm" };
    println!("in memory, blocks of {} bytes, {warmth} ({} KiB)", size.bytes(), set.len() >> 10);
    for (index, (name, gb_s)) in names.iter().zip(&speeds).enumerate() {
        let ratio = gb_s / speeds[index % 2];
        println!("  {name:36} {:7.1} ms CPU/GiB   {ratio:5.2} times as fast as crc32c apart", GIB / gb_s / 1e6);
    }
}

fn each<'a>(slices: &'a [Slice], what: impl Fn(&Slice) -> u64 + 'a) -> impl FnMut() -> u64 + 'a {
    move || black_box(slices).iter().fold(0, |all, data| all ^ what(data))
}

fn each_sealed<'a>(
    slices: &'a [Slice],
    size: BlockSize,
    kind: GuardKind,
    what: impl Fn(&Slice, &Slice, PiFormat, BlockSize) -> u64 + 'a,
) -> impl FnMut() -> u64 + 'a {
    let seal = |data: &Slice| Sealed::seal(data.clone(), size, Some(format(kind)), &Tags::default()).joined_tags();
    let tags: Vec<Slice> = slices.iter().map(seal).collect();
    move || black_box(slices).iter().zip(&tags).fold(0, |all, (data, tags)| all ^ what(data, tags, format(kind), size))
}

fn separate_seal(data: &Slice, size: BlockSize, format: PiFormat) -> u64 {
    let sealed = Sealed::seal(data.clone(), size, Some(format), &Tags::default());
    u64::from(guard::crc32c(data)) ^ u64::from(sealed.joined_tags()[0])
}

fn separate_verify(data: &Slice, tags: &Slice, format: PiFormat, size: BlockSize) -> u64 {
    let digest = guard::crc32c(data);
    let blocks = Unverified::new(data.clone(), tags.clone(), size, Some(format)).expect("what was sealed has a shape");
    let sealed = blocks.verify(&Checks::full(format, Lba::ZERO)).expect("what was sealed verifies");
    u64::from(digest) ^ sealed.blocks() as u64
}

/// The CRCs of the blocks, and the digest combined from them. Each is joined while the next one is made: a join takes its time in waiting for
/// the one before.
fn checksums(data: &[u8], size: BlockSize, digest: &InterleavedCrc) -> (Vec<u32>, u32) {
    let (mut crcs, mut joined) = (Vec::with_capacity(data.len() / size.bytes()), 0);
    for block in data.chunks_exact(size.bytes()) {
        let crc = guard::crc32c(block);
        crcs.push(crc);
        joined = digest.join(joined, crc, &[]);
    }
    (crcs, joined)
}

fn one_seal(data: &Slice, size: BlockSize, digest: &InterleavedCrc) -> u64 {
    let (crcs, joined) = checksums(data, size, digest);
    let sealed = Sealed::seal_with_crcs(data.clone(), size, format(GuardKind::Crc32c), &Tags::default(), &crcs);
    u64::from(joined) ^ u64::from(sealed.joined_tags()[0])
}

fn one_verify(data: &Slice, tags: &Slice, format: PiFormat, size: BlockSize, digest: &InterleavedCrc) -> u64 {
    let (crcs, joined) = checksums(data, size, digest);
    let blocks = Unverified::new(data.clone(), tags.clone(), size, Some(format)).expect("what was sealed has a shape");
    let sealed = blocks.verify_with_crcs(&Checks::full(format, Lba::ZERO), &crcs).expect("what was sealed verifies");
    u64::from(joined) ^ sealed.blocks() as u64
}

async fn bench(options: RemoteOptions, serving: Serving, digests: bool) -> anyhow::Result<()> {
    let contenders = nvme_tcp::ours(&options, &serving, digests).await?;
    for load in LOADS.iter().filter(|load| load.name.contains(&options.only)) {
        let rounds = nvme_tcp::rounds(&options, &contenders, *load).await?;
        println!("{}", load.name);
        for (index, contender) in contenders.iter().enumerate() {
            let per_gib = |cpu: f64, bytes: u64| cpu * 1e3 * GIB / bytes as f64;
            let host = nvme_tcp::median(&rounds, index, |m| per_gib(m.host_cpu, m.turn.bytes));
            let target = nvme_tcp::median(&rounds, index, |m| per_gib(m.target_cpu.unwrap_or(f64::NAN), m.turn.bytes));
            let all = |m: &nvme_tcp::Measured| (m.host_cpu + m.target_cpu.unwrap_or(f64::NAN)) / m.turn.bytes as f64;
            let ratio = Spread::of(rounds.iter().map(|round| all(&round[index]) / all(&round[0])));
            println!(
                "  {:14} CPU {host:6.1} + {target:6.1} ms/GiB   {:5.1} % [{:5.1} .. {:5.1}]   host summed {:5.3} bytes a byte",
                contender.name,
                ratio.median * 100.0,
                ratio.least * 100.0,
                ratio.most * 100.0,
                nvme_tcp::median(&rounds, index, |m| m.host_summed),
            );
        }
    }
    Ok(())
}
