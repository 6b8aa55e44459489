//! How the two verdicts must agree, and which differences are permitted; the differences follow from the documentation
//! of the kernel's scrub.
//!
//! - The scrub's counts for each device are right: bad sectors of data and of nodes, bad superblocks, and how many of
//!   these can be restored.
//! - Every place in the kernel's log is reported by `verify`.
//! - A file can be read by this project exactly where the kernel can read it, and its content is right.
//! - The damaged data without a good copy, with all their files and names, are exactly what the kernel fails to read.
//!
//! Permitted differences, each a fact about Linux 6.18:
//! - A scrub ends early if a node that it needs is lost: one of the extent, checksum or device tree. Its counts are
//!   then incomplete.
//! - With parity, a scrub ends early at a row with more bad pieces than parity can restore.
//! - A scrub checks a node's checksum, address, UUIDs and generation. It does not compare copies with each other. No
//!   checksum covers the bytes of the checksum field that a short checksum does not use; `verify` reports copies that
//!   differ there.
//! - A read-only scrub neither checks parity nor counts its faults.
//! - The kernel does not mount a filesystem if the first superblock, or a node that mounting needs, is lost.
//! - The kernel does not open a subvolume whose last leaf is lost, because it looks up the highest inode number there;
//!   this project reads the other leaves.
//! - The kernel's messages name the 64 KiB stripe of a bad sector, not the sector; with parity, the first piece of the
//!   row, whichever piece is bad.

use std::collections::{BTreeMap, BTreeSet};

use sealblock_btrfs::verify::{DataFault, Finding, Report, Verdict};
use sealblock_btrfs::{BadCopy, CopyFault, Place};
use sealblock_btrfs_format::items::chunk::STRIPE_BYTES;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::scrub::Counts;

use crate::subject::{SECTOR, Subject, is_summed};
use crate::verdicts::{Files, Ours, Outcome, Seen};
use crate::wounds::Damage;

/// Differences between the verdicts that are not permitted, as lines of text.
pub fn differences(subject: &Subject, damage: &Damage, ours: &Ours, kernel: &Result<Seen, String>) -> Vec<String> {
    let mut lines = Vec::new();
    check_bytes("read here", &ours.files, &mut lines);
    let report = match (&ours.report, kernel) {
        (Ok(report), _) => report,
        (Err(why), Ok(_)) => {
            lines.push(format!("the kernel mounts what is not opened here: {why}"));
            return lines;
        }
        // If the filesystem cannot be opened, the error has the reason.
        (Err(why), Err(_)) => {
            if damage.expected.is_empty() {
                lines.push(format!("nothing was damaged on purpose, and not opened: {why}"));
            }
            return lines;
        }
    };
    check_expected(damage, report, &mut lines);
    match kernel {
        Ok(seen) => {
            check_bytes("read by the kernel", &seen.files, &mut lines);
            check_counts(subject, report, seen, &mut lines);
            check_stripes(subject, report, seen, &mut lines);
            check_files(subject, report, ours, seen, &mut lines);
            check_lost(subject, report, seen, &mut lines);
        }
        Err(why) if report.verdict() != Verdict::Damaged => {
            lines.push(format!("the kernel refuses it, and it is called {:?}: {why}", report.verdict()));
        }
        Err(_) => {}
    }
    lines
}

/// Checks that every sector has the content that was written.
fn check_bytes(what: &str, files: &Files, lines: &mut Vec<String>) {
    for (path, outcome) in files.iter().filter(|(path, _)| is_summed(path)) {
        if let Outcome::Read { wrong, .. } = outcome
            && !wrong.is_empty()
        {
            lines.push(format!("{what}: {}: wrong bytes at {wrong:?}", String::from_utf8_lossy(path)));
        }
    }
}

/// The copies that a report lists as bad, with their length in bytes.
fn bad_copies(subject: &Subject, report: &Report) -> Vec<(BadCopy, u64)> {
    let node = subject.node_bytes;
    let of = |finding: &Finding| match finding {
        Finding::Superblock(copy) => vec![(copy.clone(), SECTOR)],
        Finding::Node { copy, .. } => vec![(copy.clone(), node)],
        Finding::LostNode(lost) => lost.lost.copies.iter().map(|copy| (copy.clone(), node)).collect(),
        Finding::Data(data) => match &data.fault {
            DataFault::Copy { copy, .. } => vec![(copy.clone(), data.bytes)],
            // A scrub does not compare copies.
            DataFault::NoSum | DataFault::SumsLost | DataFault::Unmapped(_) | DataFault::CopiesDiffer(_) => Vec::new(),
        },
        Finding::ShortDevice(_) | Finding::Tree { .. } | Finding::Parity { .. } => Vec::new(),
    };
    report.findings.iter().flat_map(of).collect()
}

fn has_lost_node(report: &Report) -> bool {
    report.findings.iter().any(|finding| matches!(finding, Finding::LostNode(_)))
}

/// Checks that deliberate damage is found, except below a lost node.
fn check_expected(damage: &Damage, report: &Report, lines: &mut Vec<String>) {
    let found: BTreeSet<(u64, u64)> = report
        .findings
        .iter()
        .flat_map(|finding| match finding {
            Finding::Superblock(copy) | Finding::Node { copy, .. } => vec![copy.place],
            Finding::LostNode(lost) => lost.lost.copies.iter().map(|copy| copy.place).collect(),
            Finding::Data(data) => match &data.fault {
                DataFault::Copy { copy, .. } => vec![copy.place],
                DataFault::CopiesDiffer(copies) => copies.iter().map(|(_, place)| *place).collect(),
                DataFault::NoSum | DataFault::SumsLost | DataFault::Unmapped(_) => Vec::new(),
            },
            Finding::ShortDevice(_) | Finding::Tree { .. } | Finding::Parity { .. } => Vec::new(),
        })
        .map(|place| (place.devid, place.offset))
        .collect();
    let missed: Vec<_> = damage.expected.difference(&found).collect();
    if !missed.is_empty() && !has_lost_node(report) {
        lines.push(format!("not found, by device and byte: {missed:?}"));
    }
}

/// The counts that the scrub should have for a report.
fn expected_counts(subject: &Subject, report: &Report) -> BTreeMap<u64, Counts> {
    let devids = 1..=subject.images.len() as u64;
    let mut devices: BTreeMap<u64, Counts> = devids.map(|devid| (devid, Counts::default())).collect();
    for finding in &report.findings {
        let mut add = |copy: &BadCopy, put: &dyn Fn(&mut Counts)| {
            // The kernel does not see valid copies that differ.
            if !matches!(copy.fault, CopyFault::Differs(_))
                && let Some(counts) = devices.get_mut(&copy.place.devid)
            {
                put(counts);
            }
        };
        let sectors = subject.node_bytes / SECTOR;
        match finding {
            Finding::Superblock(copy) => add(copy, &|counts| counts.superblocks += 1),
            Finding::Node { copy, .. } => add(copy, &|counts| {
                counts.verify += sectors;
                counts.corrected += sectors;
            }),
            Finding::LostNode(lost) => lost.lost.copies.iter().for_each(|copy| {
                add(copy, &|counts| {
                    counts.verify += sectors;
                    counts.uncorrectable += sectors;
                });
            }),
            Finding::Data(data) => {
                let DataFault::Copy { copy, is_lost, .. } = &data.fault else { continue };
                add(copy, &|counts| {
                    let sectors = data.bytes / SECTOR;
                    counts.csum += sectors;
                    *if *is_lost { &mut counts.uncorrectable } else { &mut counts.corrected } += sectors;
                });
            }
            Finding::ShortDevice(_) | Finding::Tree { .. } | Finding::Parity { .. } => {}
        }
    }
    devices
}

fn check_counts(subject: &Subject, report: &Report, seen: &Seen, lines: &mut Vec<String>) {
    let expected = expected_counts(subject, report);
    if seen.scrub.is_finished && seen.scrub.devices != expected {
        lines.push(format!("the scrub counts {:?}, and found here is {expected:?}", seen.scrub.devices));
    }
    if !seen.scrub.is_finished {
        let is_lost = |counts: &Counts| counts.uncorrectable > 0;
        let has_lost_row = !subject.first_of_row.is_empty() && expected.values().any(is_lost);
        if !has_lost_node(report) && !has_lost_row {
            lines.push("the scrub ended early, and no node and no row is lost".to_owned());
        }
        for (devid, counts) in &seen.scrub.devices {
            let ours = expected.get(devid).copied().unwrap_or_default();
            let fields = |of: &Counts| [of.csum, of.verify, of.superblocks, of.corrected + of.uncorrectable];
            if fields(counts).iter().zip(fields(&ours)).any(|(theirs, ours)| *theirs > ours) {
                lines.push(format!(
                    "device {devid}: a scrub that ended early counts {counts:?}, and found here is {ours:?}"
                ));
            }
        }
    }
}

fn check_stripes(subject: &Subject, report: &Report, seen: &Seen, lines: &mut Vec<String>) {
    let bad = bad_copies(subject, report);
    let is_ours = |stripe: &&Place| {
        let is_within = |place: &Place| {
            place.devid == stripe.devid && (stripe.offset..stripe.offset + STRIPE_BYTES).contains(&place.offset)
        };
        bad.iter().any(|(BadCopy { place, .. }, _)| {
            is_within(place) || subject.first_of_row.get(&(place.devid, place.offset)).is_some_and(is_within)
        })
    };
    let odd: Vec<&Place> = seen.stripes.iter().filter(|stripe| !is_ours(stripe)).collect();
    if !odd.is_empty() {
        lines.push(format!("the kernel's log has bad stripes in which nothing is found here: {odd:?}"));
    }
}

/// The subvolumes whose last leaf, or a node above it, is lost.
fn closed_subvolumes(report: &Report) -> BTreeSet<u64> {
    let of = |finding: &Finding| match finding {
        Finding::LostNode(lost) if lost.before.is_none() => lost.trees.clone(),
        _ => Vec::new(),
    };
    report.findings.iter().flat_map(of).collect()
}

/// Checks that both read the same sectors of all files, and fail for the same ones.
fn check_files(subject: &Subject, report: &Report, ours: &Ours, seen: &Seen, lines: &mut Vec<String>) {
    let closed = closed_subvolumes(report);
    for (path, theirs) in &seen.files {
        let name = String::from_utf8_lossy(path);
        let first = path.split(|byte| *byte == b'/').next().unwrap_or_default();
        let is_closed = subject.subvolumes.get(first).is_some_and(|id| closed.contains(id));
        match (theirs, &ours.files[path]) {
            (Outcome::Unreachable(_), Outcome::Unreachable(_)) => {}
            (Outcome::Unreachable(_), Outcome::Read { .. }) if is_closed => {}
            (Outcome::Read { failed: theirs, .. }, Outcome::Read { failed: ours, .. }) if theirs == ours => {}
            (theirs, ours) => lines.push(format!("{name}: the kernel says {theirs:?}, and read here is {ours:?}")),
        }
    }
}

/// The sectors of files whose data a report lists as lost.
fn lost_sectors(subject: &Subject, report: &Report) -> BTreeMap<Vec<u8>, BTreeSet<u64>> {
    let mut lost: BTreeMap<Vec<u8>, BTreeSet<u64>> = BTreeMap::new();
    for finding in &report.findings {
        let Finding::Data(data) = finding else { continue };
        if !matches!(data.fault, DataFault::Copy { is_lost: true, .. } | DataFault::SumsLost) {
            continue;
        }
        for file in &data.uses.files {
            let Some(subvolume) = &file.subvolume_path else { continue };
            for path in &file.paths {
                let path = [&subvolume[..], path].concat();
                let path = path.strip_prefix(b"/").unwrap_or(&path).to_vec();
                let Some(content) = subject.contents.get(&path) else { continue };
                let end = (file.offset + file.bytes).min(content.len() as u64);
                lost.entry(path).or_default().extend((file.offset..end).step_by(SECTOR as usize));
            }
        }
    }
    lost
}

/// Checks that the report lists exactly the files, with all their names, and the sectors that the kernel fails to read,
/// and also those below a lost node of the file trees, whose keys it knows.
fn check_lost(subject: &Subject, report: &Report, seen: &Seen, lines: &mut Vec<String>) {
    let lost = lost_sectors(subject, report);
    let none = BTreeSet::new();
    let is_of_files = |finding: &Finding| match finding {
        Finding::LostNode(lost) => lost.trees != [objectid::CSUM_TREE],
        _ => false,
    };
    let has_lost_files = report.findings.iter().any(is_of_files);
    for (path, outcome) in &seen.files {
        let named = lost.get(path).unwrap_or(&none);
        let is_right = match outcome {
            Outcome::Read { failed, .. } if has_lost_files => named.is_subset(failed),
            Outcome::Read { failed, .. } => named == failed,
            Outcome::Unreachable(_) => has_lost_files,
        };
        if !is_right {
            let name = String::from_utf8_lossy(path);
            lines.push(format!("{name}: the kernel says {outcome:?}, and the report names {named:?}"));
        }
    }
}
