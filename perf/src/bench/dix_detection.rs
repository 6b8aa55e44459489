//! The part of the claim `dix-guard` about faults that a cheap guard does not detect.
//!
//! For each block size, a table has for each guard the counted rate with its 95 % confidence interval, and the
//! theoretical rate. If none of N faults was undetected, the rate is shown as less than 3/N. Another table is about
//! whole blocks in the wrong place, which no guard detects but reference tags do. The verdict counts cells whose count
//! does not match the theory; the test rejects a right count once in a million cases.

use sealblock_integrity::GuardKind;
use sealblock_units::BlockSize;

use super::outcome::{Axis, Cell, Drawing, Outcome, Plot, Progress, Scale, Series, Table};
use super::verdict::{Threshold, Verdict};
use crate::detection::{Count, Detection, Displaced, Fault, Measured, Seen};
use crate::report::number;

/// Faults of each kind for each second of a turn; a turn of one second is enough for a complete run.
const TRIALS_A_SECOND: f64 = 1e8;
/// Fewer trials are not enough for a guard of 16 bits.
const MIN_TRIALS: u64 = 1_000_000;
/// Whole blocks, whose tags are actually made and verified.
const DISPLACED_TRIALS: u64 = 20_000;
/// The order of columns: weak guards first.
const GUARDS: [GuardKind; 4] = [GuardKind::IpChecksum, GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64];

/// A kind of fault, and how many of them each guard missed, in the order of [`GuardKind::ALL`].
struct Line {
    fault: Fault,
    measured: Vec<Measured>,
}

/// Injects faults, and adds tables, a plot and verdicts to the result.
pub fn measure(scale: &Scale, progress: &Progress, outcome: &mut Outcome) -> anyhow::Result<()> {
    let trials = ((scale.seconds * TRIALS_A_SECOND) as u64).max(MIN_TRIALS);
    let (mut cells, mut unfit) = (0, 0);
    for size in [BlockSize::B512, BlockSize::B4096] {
        let detection = Detection::new(size);
        let faults = detection.faults();
        let part = format!("faults of blocks of {} bytes", size.bytes());
        let mut lines = Vec::new();
        for (number, &fault) in (1..).zip(&faults) {
            progress.step(&part, number, faults.len() as u32 + 1)?;
            lines.push(Line { fault, measured: detection.inject(fault, trials) });
        }
        progress.step(&part, faults.len() as u32 + 1, faults.len() as u32 + 1)?;
        let displaced = Displaced::ALL.map(|displaced| (displaced, detection.displace(displaced, DISPLACED_TRIALS)));
        let all = lines.iter().flat_map(|line| &line.measured);
        cells += all.clone().count();
        unfit += all.filter(|measured| !measured.fits()).count();
        let seen = displaced.iter().flat_map(|(displaced, seen)| seen.iter().flat_map(|seen| fits(*displaced, seen)));
        cells += seen.clone().count();
        unfit += seen.filter(|fits| !fits).count();
        outcome.tables.push(table(size, &lines));
        outcome.tables.push(displaced_table(size, &displaced));
        if size == BlockSize::B4096 {
            outcome.plots.push(plot(&lines));
        }
    }
    let what = format!("rates of undetected faults, of {cells}, that do not fit the theory");
    outcome.verdicts.push(Verdict::counted(what, Threshold::AtMost(0.0), unfit as f64));
    outcome.notes.push(format!(
        "At least {} faults of each kind, the same ones in every run; --seconds 1 is the complete run with 100,000,000. Bursts are runs in the order in which \
         a guard takes bits in. A CRC of n bits sees every burst of up to n bits; the Internet checksum does not see words that change places, nor zeroes that \
         become FFFFh.",
        number(trials as f64)
    ));
    Ok(())
}

fn fits(displaced: Displaced, seen: &Seen) -> [bool; 2] {
    let (alone, with_ref_tag) = displaced.theory();
    [seen.guard.fits(alone), seen.with_ref_tag.fits(with_ref_tag)]
}

/// A count as a rate with its interval.
fn rate(count: Count) -> Cell {
    let (low, high) = count.interval();
    let text = match count.undetected {
        0 => format!("< {}", number(3.0 / count.trials as f64)),
        all if all == count.trials => "1 (all)".to_owned(),
        _ => format!("{} [{} .. {}]", number(count.rate()), number(low), number(high)),
    };
    Cell { text, median: Some(count.rate()), least: Some(low), most: Some(high) }
}

fn place(guard: GuardKind) -> usize {
    GuardKind::ALL.iter().position(|kind| *kind == guard).unwrap_or_default()
}

fn table(size: BlockSize, lines: &[Line]) -> Table {
    let names: Vec<[String; 2]> = GUARDS.map(|guard| [guard.to_string(), format!("{guard}, theory")]).to_vec();
    let columns: Vec<(&str, &str)> = names.iter().flatten().map(|name| (name.as_str(), "")).collect();
    let title = format!("Part of faults that guards do not see, blocks of {} bytes", size.bytes());
    let mut table = Table::new(title, "fault", &columns);
    for line in lines {
        let cells = GUARDS.iter().flat_map(|guard| {
            let Measured { count, theory } = line.measured[place(*guard)];
            [rate(count), Cell::counted(theory)]
        });
        table.push(line.fault.name(), cells.collect());
    }
    table
}

fn displaced_table(size: BlockSize, displaced: &[(Displaced, Vec<Seen>)]) -> Table {
    let names: Vec<[String; 2]> =
        GUARDS.map(|guard| [guard.to_string(), format!("{guard} and reference tag")]).to_vec();
    let columns: Vec<(&str, &str)> = names.iter().flatten().map(|name| (name.as_str(), "")).collect();
    let title = format!("Part of misplaced blocks that are not seen, blocks of {} bytes, Type 1", size.bytes());
    let mut table = Table::new(title, "fault", &columns);
    for (displaced, seen) in displaced {
        let cells = GUARDS.iter().flat_map(|guard| {
            let seen = seen[place(*guard)];
            [rate(seen.guard), rate(seen.with_ref_tag)]
        });
        table.push(displaced.name(), cells.collect());
    }
    table
}

fn plot(lines: &[Line]) -> Plot {
    let series = GUARDS.map(|guard| {
        let rates = lines.iter().map(|line| line.measured[place(guard)].count.rate());
        Series::counted(guard.to_string(), rates.collect())
    });
    Plot {
        name: "dix-guard-detection".to_owned(),
        title: "Part of faults that guards do not see, blocks of 4096 bytes; no dot where none was missed".to_owned(),
        x: Axis::linear("fault", ""),
        y: Axis::logarithmic("undetected, as a part of all", ""),
        drawing: Drawing::Bars {
            groups: lines.iter().map(|line| line.fault.short_name()).collect(),
            series: series.into(),
            threshold: None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(undetected: u64, trials: u64) -> Count {
        Count { undetected, trials }
    }

    #[test]
    fn rates_have_their_interval_and_none_of_many_is_a_bound() {
        assert_eq!(rate(count(0, 100_000_000)).text, "< 3.00e-8");
        assert_eq!(rate(count(1000, 1000)).text, "1 (all)");
        let cell = rate(count(1526, 100_000_000));
        assert_eq!(cell.text, "1.53e-5 [1.45e-5 .. 1.60e-5]");
        assert!(cell.least.unwrap() < cell.median.unwrap() && cell.median.unwrap() < cell.most.unwrap());
    }

    #[test]
    fn columns_are_in_the_order_of_their_guards() {
        let measured =
            |kind: GuardKind| Measured { count: count(place(kind) as u64 + 1, 10), theory: place(kind) as f64 };
        let line = Line { fault: Fault::Flips(1), measured: GuardKind::ALL.map(measured).to_vec() };
        let table = table(BlockSize::B512, &[line]);
        assert_eq!(table.columns[2].name, "crc16");
        let row: Vec<f64> = table.rows[0].cells.iter().map(|cell| cell.median.unwrap()).collect();
        let of = |kind| (place(kind) as f64 + 1.0) / 10.0;
        assert_eq!((row[0], row[2], row[4], row[6]), (of(GUARDS[0]), of(GUARDS[1]), of(GUARDS[2]), of(GUARDS[3])));
        assert_eq!(row[3], place(GuardKind::Crc16) as f64);
    }

    #[test]
    fn displaced_blocks_fit_their_theory_or_not() {
        let seen = |with_ref_tag| Seen { guard: count(10, 10), with_ref_tag: count(with_ref_tag, 10) };
        assert_eq!(fits(Displaced::Misdirected, &seen(0)), [true, true]);
        assert_eq!(fits(Displaced::Misdirected, &seen(1)), [true, false]);
        assert_eq!(
            (fits(Displaced::Stale, &seen(10)), fits(Displaced::Stale, &seen(9))),
            ([true, true], [true, false])
        );
    }
}
