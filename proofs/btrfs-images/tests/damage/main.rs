//! Randomly damaged filesystems: compares this project's verdict with the kernel's (its scrub of every copy, its log,
//! and its reads of all files). Neither may change a byte of the images.
//!
//! Needs root, loop devices, `btrfs-progs`, and Linux 6.18 or later with the filesystem. Without these the tests print
//! what is missing and are skipped.

mod rules;
mod subject;
mod verdicts;
mod wounds;

use std::time::{Duration, Instant};

use sealblock_proofs_btrfs_images::scrub::{KernelLog, has_known_scrub};
use sealblock_proofs_btrfs_images::{has_mounts, skip};

use rules::differences;
use subject::{SETUPS, Subject};
use verdicts::{Seen, kernel, ours};
use wounds::Damage;

/// The variable with the number of damages.
const COUNT: &str = "SEALBLOCK_BTRFS_DAMAGES";
/// The variable with the seed of the first damage, or of the only one if no number is set.
const SEED: &str = "SEALBLOCK_BTRFS_DAMAGE_SEED";
/// The default number of damages.
const FEW: u64 = 26;
/// The maximum number of failures in a report.
const MOST_TOLD: usize = 20;
/// The maximum number of differences of each failure in a report.
const MOST_LINES: usize = 6;

/// A number from the environment.
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: not a number")))
}

/// The seeds that the environment selects.
fn seeds() -> std::ops::Range<u64> {
    match (number(SEED), number(COUNT)) {
        (Some(seed), None) => seed..seed + 1,
        (first, count) => first.unwrap_or(0)..first.unwrap_or(0) + count.unwrap_or(FEW),
    }
}

/// The counters of a run.
#[derive(Default, Debug)]
struct Tally {
    damages: u64,
    refused: u64,
    scrubs_that_ended_early: u64,
    bad_sectors: u64,
    lost_sectors: u64,
    bad_superblocks: u64,
    messages: usize,
    without_damage: u64,
    ours: Duration,
    elapsed: Duration,
    failures: Vec<String>,
}

impl Tally {
    fn count(&mut self, kernel: &Result<Seen, String>) {
        self.damages += 1;
        let Ok(seen) = kernel else {
            self.refused += 1;
            return;
        };
        self.scrubs_that_ended_early += u64::from(!seen.scrub.is_finished);
        self.messages += seen.stripes.len();
        let mut all = 0;
        for counts in seen.scrub.devices.values() {
            self.bad_sectors += counts.csum + counts.verify;
            self.lost_sectors += counts.uncorrectable;
            self.bad_superblocks += counts.superblocks;
            all += counts.csum + counts.verify + counts.superblocks;
        }
        self.without_damage += u64::from(all == 0);
    }
}

/// A report with any finding removed must differ from the kernel's.
#[test]
fn a_report_that_leaves_something_out_differs() {
    if let Err(why) = has_mounts().and_then(|()| has_known_scrub()) {
        return skip(&why);
    }
    let (Ok(subject), Ok(mut log)) = (Subject::make(&SETUPS[1]), KernelLog::from_now_on()) else {
        return skip("a filesystem with copies of nodes, or the kernel's log");
    };
    let mut tried = 0;
    for seed in 0..20 {
        let damage = Damage::new(&subject, seed).unwrap();
        let (mut ours, kernel) = (ours(&subject), kernel(&subject, &mut log).unwrap());
        let is_finished = kernel.as_ref().is_ok_and(|seen| seen.scrub.is_finished);
        assert_eq!(differences(&subject, &damage, &ours, &kernel), Vec::<String>::new(), "seed {seed}");
        let report = ours.report.as_mut().unwrap();
        if is_finished && let Some(left_out) = report.findings.pop() {
            tried += 1;
            let lines = differences(&subject, &damage, &ours, &kernel);
            assert!(lines.iter().any(|line| line.contains("the scrub counts")), "seed {seed}: {left_out}: {lines:?}");
        }
    }
    assert!(tried > 5, "{tried} of the filesystems were scrubbed to their end");
}

/// Damages one filesystem by a seed, and compares both verdicts.
fn try_seed(subject: &Subject, seed: u64, log: &mut KernelLog, tally: &mut Tally) {
    let start = Instant::now();
    let damage = Damage::new(subject, seed).unwrap();
    let ours = ours(subject);
    tally.ours += start.elapsed();
    let kernel = kernel(subject, log).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    let lines = differences(subject, &damage, &ours, &kernel);
    if !lines.is_empty() {
        let (name, more) = (subject.setup.name, lines.len().saturating_sub(MOST_LINES));
        let mut lines: Vec<String> = lines.into_iter().take(MOST_LINES).collect();
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        tally.failures.push(format!("{SEED}={seed} ({name}): {}\n    {}", damage.text, lines.join("\n    ")));
    }
    tally.count(&kernel);
    tally.elapsed += start.elapsed();
}

#[test]
fn damage_reports_match_the_kernels() {
    if let Err(why) = has_mounts().and_then(|()| has_known_scrub()) {
        return skip(&why);
    }
    let mut log = match KernelLog::from_now_on() {
        Ok(log) => log,
        Err(why) => return skip(&why),
    };
    let mut tally = Tally::default();
    let count = SETUPS.len() as u64;
    for (setup, number) in SETUPS.iter().zip(0..) {
        let of_setup: Vec<u64> = seeds().filter(|seed| seed % count == number).collect();
        if of_setup.is_empty() {
            continue;
        }
        let start = Instant::now();
        let subject = match Subject::make(setup) {
            Ok(subject) => subject,
            Err(why) => {
                skip(&format!("{}: {why}", setup.name));
                continue;
            }
        };
        println!("{}: {:?}", setup.name, start.elapsed());
        of_setup.iter().for_each(|seed| try_seed(&subject, *seed, &mut log, &mut tally));
        // After the damage is undone, neither verdict has any.
        let (ours, kernel) = (ours(&subject), kernel(&subject, &mut log).unwrap());
        let seen = kernel.unwrap_or_else(|why| panic!("{}: {why}", setup.name));
        let found = ours.report.unwrap_or_else(|why| panic!("{}: {why}", setup.name)).damage_count;
        assert_eq!(found, 0, "{}", setup.name);
        assert!(seen.scrub.devices.values().all(|counts| *counts == Default::default()), "{:?}", seen.scrub);
    }
    let failures = std::mem::take(&mut tally.failures);
    println!("{tally:#?}");
    let told = failures.iter().take(MOST_TOLD).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} damages differ:\n{told}", failures.len(), tally.damages);
    assert!(tally.damages > 0, "this machine mounts filesystems, and none was damaged");
}
