//! The claim `one-pass`: the tags and the data digest of a transfer in one pass over the data, compared with one pass
//! for each.
//!
//! A transfer of 128 KiB gets its tags and its digest, or both are checked. In two passes the digest is computed over
//! the whole transfer, and the guards over each block. In one pass, the CRC-32C of each block is its guard, and the
//! digest of the transfer is combined from these CRCs. Only this work is measured, which is the integrity part of a
//! write or read, and only its CPU time, so that other tasks of the machine hardly matter. The data are in the cache,
//! as after receiving them, or come from memory; then loading them is part of each pass.

use std::hint::black_box;
use std::time::Duration;

use anyhow::Context;
use sealblock_integrity::combine::InterleavedCrc;
use sealblock_integrity::{Checks, GuardKind, PiFormat, ProtectionType, Sealed, Tags, Unverified, guard};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, ByteCount, Lba};

use super::outcome::{
    Axis, Cell, Claim, Defaults, Drawing, Outcome, Plot, Progress, Scale, Series, Table, ThresholdLine,
};
use super::verdict::{Round, Threshold, Verdict};
use crate::cpu::{Memory, Pass, cpu_seconds};
use crate::remote;
use crate::report::Spread;

/// Bytes of a transfer, which has one digest.
const TRANSFER_BYTES: usize = 128 << 10;
/// The claimed fraction of the CPU time of separate passes.
const AT_MOST: f64 = 0.6;
const GIB: f64 = (1_u64 << 30) as f64;

/// The claim.
pub const CLAIM: Claim = Claim {
    name: "one-pass",
    sentence: "Tags (32-bit guard) and the NVMe/TCP data digest, computed in one pass, take at most 60 % of the CPU time of two passes.",
    published: &[],
    defaults: Defaults { size: ByteCount::new(256 << 20), seconds: 0.1, rounds: 11 },
    makes_files: false,
    measure,
};

/// A comparison: its name, the index of the two passes in [`passes`], and the index of the one pass counted from the
/// end.
const WORK: [(&str, usize, usize); 2] = [("seal", 0, 2), ("verify", 1, 1)];
/// The contenders of each comparison: two passes, the same again, one pass, and two passes with the other guards.
const CONTENDERS: [&str; 5] = ["two passes", "two passes, again", "one pass", "two passes, crc16", "two passes, crc64"];

/// The times of one kind of work: CPU seconds for 1 GiB, by round and contender.
struct Measured {
    name: String,
    /// Its label in a picture.
    short_name: String,
    has_threshold: bool,
    turns: Vec<Vec<f64>>,
}

fn measure(scale: &Scale, progress: &Progress) -> anyhow::Result<Outcome> {
    let bytes = usize::try_from(scale.size.get()).context("more than this machine can address")?;
    let memory = Memory::new(bytes).context("preparing the working set")?;
    let mut measured = Vec::new();
    for (set_bytes, warmth) in [(TRANSFER_BYTES.min(bytes), "cache"), (bytes, "memory")] {
        let slices = transfers(&memory.bytes()[..set_bytes]);
        for size in [BlockSize::B512, BlockSize::B4096] {
            let mut passes = passes(&slices, size);
            for (work, separate, from_end) in WORK {
                let one = passes.len() - from_end;
                let contenders = [separate, separate, one, separate + 2, separate + 4];
                let where_from = if warmth == "cache" { "in the cache" } else { "in memory" };
                let name = format!("{work}, blocks of {} bytes, {where_from}", size.bytes());
                let short_name = format!("{work} {}, {warmth}", size.bytes());
                let turn = async |contender: usize, _| {
                    let pass = &mut passes[contenders[contender]].1;
                    Ok(cpu_seconds(pass, Duration::from_secs_f64(scale.seconds)) * GIB / set_bytes as f64)
                };
                let turns = remote::wait(progress.rounds(&name, scale.rounds, CONTENDERS.len(), turn))??;
                measured.push(Measured { name, short_name, has_threshold: size == BlockSize::B4096, turns });
            }
        }
    }
    Ok(outcome(&measured))
}

const fn format(kind: GuardKind) -> PiFormat {
    PiFormat::with_default_storage_tag(kind, ProtectionType::Type1)
}

/// The data of transfers.
fn transfers(set: &[u8]) -> Vec<Slice> {
    set.chunks_exact(TRANSFER_BYTES).map(Slice::copy_from).collect()
}

/// Data that get tags and a digest, or whose tags and digest are checked, in all ways. Making and verifying alternate;
/// crc32c in two passes comes first, and crc32c in one pass last.
fn passes(slices: &[Slice], size: BlockSize) -> Vec<(&'static str, Pass<'_>)> {
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

/// The CRCs of the blocks, and the digest combined from them. Each CRC is combined while the next one is computed,
/// because combining mostly waits for the previous one.
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

fn outcome(measured: &[Measured]) -> Outcome {
    let mut table = Table::new(
        "CPU time for the tags and digests of 1 GiB, transfers of 128 KiB, guard crc32c where nothing else is said",
        "work",
        &[
            (CONTENDERS[0], "ms"),
            (CONTENDERS[2], "ms"),
            ("one pass as a part of two", "%"),
            (CONTENDERS[3], "ms"),
            (CONTENDERS[4], "ms"),
        ],
    );
    for work in measured {
        let ms = |contender: usize| Cell::measured(Spread::of(work.turns.iter().map(|round| round[contender] * 1e3)));
        let part = Spread::of(work.turns.iter().map(|round| round[2] / round[0] * 100.0));
        table.push(&work.name, vec![ms(0), ms(2), Cell::measured(part), ms(3), ms(4)]);
    }
    let verdicts = measured.iter().filter(|work| work.has_threshold).map(|work| {
        let rounds: Vec<Round> = work.turns.iter().map(|round| Round::of(round[0], round[1], round[2])).collect();
        Verdict::timed(
            format!("{}: CPU time of one pass to that of two", work.name),
            Threshold::AtMost(AT_MOST),
            &rounds,
        )
    });
    let note =
        "In memory each pass also waits for the data, so a pass that is saved saves less than a pass of the CPU does.";
    Outcome {
        verdicts: verdicts.collect(),
        tables: vec![table],
        plots: vec![plot(measured)],
        notes: vec![note.to_owned()],
    }
}

fn plot(measured: &[Measured]) -> Plot {
    let milliseconds =
        |work: &Measured, contender: usize| Spread::of(work.turns.iter().map(|round| round[contender] * 1e3));
    let series = [0, 2].map(|contender| {
        Series::measured(CONTENDERS[contender], measured.iter().map(|work| milliseconds(work, contender)))
    });
    let claimed = |work: &Measured| work.has_threshold.then(|| milliseconds(work, 0).median * AT_MOST);
    Plot {
        name: "one-pass".to_owned(),
        title: "CPU time for the tags and digests of 1 GiB".to_owned(),
        x: Axis::linear("work", ""),
        y: Axis::linear("CPU time", "ms"),
        drawing: Drawing::Bars {
            groups: measured.iter().map(|work| work.short_name.clone()).collect(),
            series: series.into(),
            threshold: Some(ThresholdLine {
                name: format!("claim: at most {:.0} % of {}", AT_MOST * 100.0, CONTENDERS[0]),
                values: measured.iter().map(claimed).collect(),
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::verdict::Ruling;

    fn work(has_threshold: bool, one: f64) -> Measured {
        let round = |noise: f64| vec![0.040, 0.040 * noise, 0.040 * one, 0.050, 0.045];
        Measured {
            name: "seal".to_owned(),
            short_name: "seal".to_owned(),
            has_threshold,
            turns: [0.99, 1.0, 1.01].map(round).to_vec(),
        }
    }

    #[test]
    fn the_bar_is_on_the_part_of_two_passes() {
        let ruled = |one| outcome(&[work(true, one)]).verdicts[0].ruling;
        assert_eq!((ruled(0.55), ruled(0.65), ruled(0.6)), (Ruling::Holds, Ruling::DoesNotHold, Ruling::TooNoisy));
        assert!(outcome(&[work(false, 0.9)]).verdicts.is_empty());
    }

    #[test]
    fn the_table_has_milliseconds_and_parts_of_a_hundred() {
        let row = &outcome(&[work(true, 0.5)]).tables[0].rows[0];
        let medians: Vec<f64> = row.cells.iter().map(|cell| cell.median.unwrap().round()).collect();
        assert_eq!(medians, [40.0, 20.0, 50.0, 50.0, 45.0]);
    }

    #[test]
    fn a_tiny_run_measures_all_work() {
        let progress = Progress::new("one-pass", std::sync::Arc::new(|_| std::ops::ControlFlow::Continue(())));
        let scale = Scale { size: ByteCount::new(1 << 20), seconds: 0.001, rounds: 3, dir: std::env::temp_dir() };
        let outcome = super::measure(&scale, &progress).unwrap();
        assert_eq!((outcome.tables[0].rows.len(), outcome.verdicts.len()), (8, 4));
        let cells = outcome.tables[0].rows.iter().flat_map(|row| &row.cells);
        assert!(cells.clone().all(|cell| cell.median.unwrap() > 0.0), "{:?}", outcome.tables);
    }

    #[test]
    fn passes_are_those_that_the_names_say() {
        let slices = transfers(&[7; TRANSFER_BYTES]);
        let passes = passes(&slices, BlockSize::B4096);
        for (work, separate, from_end) in WORK {
            let name = |index: usize| passes[index].0;
            assert!(name(separate).contains(work) && name(separate).contains("crc32c"), "{}", name(separate));
            assert!(name(separate + 2).contains("crc16") && name(separate + 4).contains("crc64"));
            let one = name(passes.len() - from_end);
            assert!(one.contains(work) && one.contains("one pass"), "{one}");
        }
    }
}
