//! What `fs verify` says: lines for people, and the object of `--json`, whose contract is in `docs/formats/json.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use indicatif::HumanBytes;
use sealblock_btrfs::verify::{BadData, DataFault, FileUse, Finding, Report, Unattested, Uses, Verdict, WhyUnchecked};
use sealblock_btrfs::{BadCopy, CopyFault, Place};
use sealblock_btrfs_format::refusal::Rule;
use serde::Serialize;

use super::place::{WhyFilesOlder, printable};
use super::reseal::{RepairReport, ResealReport};
use crate::exit::Exit;
use crate::interrupt;

/// Ranges of unattested data that are printed; JSON lists more.
const MAX_UNATTESTED_LINES: usize = 20;

/// The outcome of a verification.
pub(super) struct Outcome {
    /// What was checked, as it was named.
    pub target: String,
    /// What was found.
    pub report: Report,
    /// Why all of it may be older than what was written, which no checksum shows.
    pub older: Option<WhyFilesOlder>,
    /// The targets of the devices, by their numbers.
    pub names: BTreeMap<u64, String>,
    /// How long it took.
    pub elapsed: Duration,
    /// What was written anew before that, if that was asked.
    pub repaired: Option<RepairReport>,
    /// What became of data without tags before that, if they were to get some.
    pub resealed: Option<ResealReport>,
}

#[derive(Serialize)]
pub(super) struct JsonReport<'a> {
    target: String,
    nodes_verified: u64,
    bytes_verified: u64,
    bytes_transferred: u64,
    offloaded: bool,
    elapsed_s: f64,
    verdict: &'static str,
    errors: Vec<JsonError>,
    errors_unlisted: u64,
    unchecked: Vec<JsonUnchecked>,
    unattested: Vec<JsonUnattested>,
    unattested_unlisted: bool,
    may_be_older: Option<&'static str>,
    repaired: Option<&'a RepairReport>,
    resealed: Option<&'a ResealReport>,
    interrupted: bool,
}

#[derive(Serialize)]
struct JsonUnchecked {
    reason: &'static str,
    bytes: u64,
    why: String,
}

/// Data that no tag shows to be those that were written last.
#[derive(Serialize)]
struct JsonUnattested {
    logical: u64,
    bytes: u64,
    files: Vec<JsonFile>,
    files_unlisted: u64,
}

#[derive(Serialize, Default)]
struct JsonError {
    kind: &'static str,
    logical: Option<u64>,
    bytes: Option<u64>,
    trees: Vec<u64>,
    level: Option<u8>,
    from: Option<String>,
    before: Option<String>,
    copies: Vec<JsonCopy>,
    lost: Option<bool>,
    why: String,
    files: Vec<JsonFile>,
    files_unlisted: u64,
}

#[derive(Serialize)]
struct JsonCopy {
    copy: Option<usize>,
    device: u64,
    target: Option<String>,
    offset: u64,
    expected: Option<String>,
    actual: Option<String>,
    why: String,
}

#[derive(Serialize)]
struct JsonFile {
    subvolume: u64,
    subvolume_path: Option<String>,
    ino: u64,
    offset: u64,
    bytes: u64,
    paths: Vec<String>,
}

impl Outcome {
    /// The exit status: damage counts more than what was not checked, and a signal more than both.
    pub fn exit(&self) -> Exit {
        match self.report.verdict() {
            _ if interrupt::came() && self.report.unchecked.contains_key(&WhyUnchecked::Stopped) => Exit::Interrupted,
            Verdict::Clean => Exit::Clean.unless_older(self.older.is_some()),
            Verdict::Incomplete => Exit::Incomplete,
            Verdict::Damaged => Exit::DamageFound,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.report.verdict() {
            Verdict::Clean if self.older.is_none() => "clean",
            Verdict::Clean => "incomplete",
            Verdict::Incomplete => "incomplete",
            Verdict::Damaged => "damaged",
        }
    }

    /// The object of `--json`.
    pub fn to_json(&self) -> JsonReport<'_> {
        let report = &self.report;
        let unchecked = report.unchecked.iter().map(|(why, bytes)| JsonUnchecked {
            reason: why.as_str(),
            bytes: *bytes,
            why: why.to_string(),
        });
        // Every copy was checked against its checksum, and none is known to be the last that was written.
        let older =
            self.older.iter().map(|older| JsonUnchecked { reason: "may_be_older", bytes: 0, why: older.text.clone() });
        JsonReport {
            target: self.target.clone(),
            nodes_verified: report.nodes_verified,
            bytes_verified: report.bytes_verified,
            bytes_transferred: report.bytes_transferred,
            offloaded: report.is_offloaded,
            elapsed_s: self.elapsed.as_secs_f64(),
            verdict: self.verdict(),
            errors: report.findings.iter().map(|finding| self.error(finding)).collect(),
            errors_unlisted: report.damage_count - report.findings.len() as u64,
            unchecked: unchecked.chain(older).collect(),
            unattested: report.unattested.iter().map(unattested).collect(),
            unattested_unlisted: report.has_more_unattested,
            may_be_older: self.older.as_ref().map(|older| older.name),
            repaired: self.repaired.as_ref(),
            resealed: self.resealed.as_ref(),
            interrupted: report.unchecked.contains_key(&WhyUnchecked::Stopped),
        }
    }

    fn error(&self, finding: &Finding) -> JsonError {
        let why = finding.to_string();
        match finding {
            Finding::Superblock(copy) => {
                JsonError { kind: "superblock", copies: vec![self.copy(copy)], why, ..JsonError::default() }
            }
            Finding::ShortDevice(device) => {
                let place = Place { devid: device.devid, offset: device.bytes };
                let (bytes, copies) =
                    (device.wanted_bytes - device.bytes, vec![self.json_copy(None, place, None, &why)]);
                JsonError { kind: "short_device", bytes: Some(bytes), copies, why, ..JsonError::default() }
            }
            Finding::Node { tree, level, copy, .. } => JsonError {
                kind: "node",
                logical: copy.logical,
                trees: vec![*tree],
                level: *level,
                copies: vec![self.copy(copy)],
                lost: Some(false),
                why,
                ..JsonError::default()
            },
            Finding::LostNode(node) => JsonError {
                kind: "node",
                logical: Some(node.lost.logical),
                bytes: Some(node.lost.bytes),
                trees: node.trees.clone(),
                level: Some(node.level),
                from: node.from.map(|key| key.to_string()),
                before: node.before.map(|key| key.to_string()),
                copies: node.lost.copies.iter().map(|copy| self.copy(copy)).collect(),
                lost: Some(true),
                why,
                ..JsonError::default()
            },
            Finding::Tree { tree, .. } => JsonError { kind: "tree", trees: vec![*tree], why, ..JsonError::default() },
            Finding::Data(data) => self.data_error(data, why),
            Finding::Parity { logical, place, bytes, .. } => JsonError {
                kind: "parity",
                logical: Some(*logical),
                bytes: Some(*bytes),
                copies: vec![self.json_copy(None, *place, None, &why)],
                why,
                ..JsonError::default()
            },
        }
    }

    fn data_error(&self, data: &BadData, why: String) -> JsonError {
        let (kind, copies, lost) = match &data.fault {
            DataFault::Copy { copy, is_lost, .. } => ("data", vec![self.copy(copy)], Some(*is_lost)),
            DataFault::NoSum => ("no_checksum", Vec::new(), None),
            DataFault::SumsLost => ("checksums_lost", Vec::new(), Some(true)),
            DataFault::Unmapped(_) => ("unmapped", Vec::new(), Some(true)),
            DataFault::CopiesDiffer(copies) => {
                let one =
                    |(copy, place): &(usize, Place)| self.json_copy(Some(*copy), *place, None, "the copies differ");
                ("copies_differ", copies.iter().map(one).collect(), None)
            }
        };
        JsonError {
            kind,
            logical: Some(data.logical),
            bytes: Some(data.bytes),
            copies,
            lost,
            why,
            files: data.uses.files.iter().map(json_file).collect(),
            files_unlisted: data.uses.more,
            ..JsonError::default()
        }
    }

    fn copy(&self, copy: &BadCopy) -> JsonCopy {
        self.json_copy(Some(copy.mirror), copy.place, Some(&copy.fault), &copy.fault.to_string())
    }

    fn json_copy(&self, copy: Option<usize>, place: Place, fault: Option<&CopyFault>, why: &str) -> JsonCopy {
        let (expected, actual) = fault.and_then(values).unzip();
        let Place { devid: device, offset } = place;
        JsonCopy {
            copy,
            device,
            target: self.names.get(&device).cloned(),
            offset,
            expected,
            actual,
            why: why.to_owned(),
        }
    }

    /// Where a copy is, for people.
    fn place(&self, place: Place) -> String {
        let name = self.names.get(&place.devid).map_or(String::new(), |name| format!(" ({name})"));
        format!("device {}{name} at byte {}", place.devid, place.offset)
    }
}

/// The checksum that is stored, and the one of what was read, or the tag that is demanded, and the one that was read, where
/// that is what is wrong.
fn values(fault: &CopyFault) -> Option<(String, String)> {
    let mismatch = match fault {
        CopyFault::Checksum(mismatch) => mismatch,
        CopyFault::Tag(mismatch) => return Some(mismatch.values()),
        CopyFault::Node(refusal) => match &refusal.rule {
            Rule::Checksum(mismatch) => mismatch,
            _ => return None,
        },
        _ => return None,
    };
    Some((format!("{:?}", mismatch.stored), format!("{:?}", mismatch.computed)))
}

fn unattested(data: &Unattested) -> JsonUnattested {
    let files = data.uses.files.iter().map(json_file).collect();
    JsonUnattested { logical: data.logical, bytes: data.bytes, files, files_unlisted: data.uses.more }
}

fn json_file(file: &FileUse) -> JsonFile {
    JsonFile {
        subvolume: file.subvolume,
        subvolume_path: file.subvolume_path.as_deref().map(printable),
        ino: file.ino,
        offset: file.offset,
        bytes: file.bytes,
        paths: file.paths.iter().map(|path| printable(path)).collect(),
    }
}

/// A line for each thing that is damaged, and for the first ranges of data that are unattested.
pub(super) fn lines(outcome: &Outcome) -> impl Iterator<Item = String> + use<'_> {
    let damage = outcome.report.findings.iter().map(|finding| match finding {
        Finding::Data(data) => data_line(outcome, data),
        other => other.to_string(),
    });
    let report = &outcome.report;
    let named = report.unattested.iter().filter(|data| !data.uses.files.is_empty());
    let unattested = named.take(MAX_UNATTESTED_LINES).map(|data| format!("unattested: {}", files(&data.uses)));
    let is_cut = report.has_more_unattested || report.unattested.len() > MAX_UNATTESTED_LINES;
    damage.chain(unattested).chain(is_cut.then(|| "unattested: more, which --json lists".to_owned()))
}

fn data_line(outcome: &Outcome, data: &BadData) -> String {
    let what = match &data.fault {
        DataFault::Copy { copy, is_lost, .. } => {
            let end = if *is_lost { "; it is lost" } else { "; it is still readable" };
            format!("copy {} on {}: {}{end}", copy.mirror, outcome.place(copy.place), copy.fault)
        }
        DataFault::NoSum => format!("no checksum at the logical address {}", data.logical),
        DataFault::SumsLost => format!("the checksums of the logical address {} are lost", data.logical),
        DataFault::Unmapped(why) => why.to_string(),
        DataFault::CopiesDiffer(copies) => {
            let one = |(mirror, place): &(usize, Place)| format!("copy {mirror} on {}", outcome.place(*place));
            let copies: Vec<String> = copies.iter().map(one).collect();
            format!("no checksum, and the copies differ: {}", copies.join(", "))
        }
    };
    let who = files(&data.uses);
    match who.is_empty() {
        true => format!("{} bytes used by no file, at the logical address {}: {what}", data.bytes, data.logical),
        false => format!("{who}: {what}"),
    }
}

/// The files, each with the bytes of it that are concerned.
fn files(uses: &Uses) -> String {
    let one = |file: &FileUse| {
        let end = file.offset.saturating_add(file.bytes).saturating_sub(1);
        let subvolume = file.subvolume_path.as_deref().map(printable);
        let subvolume = subvolume.unwrap_or_else(|| format!("subvolume {}: ", file.subvolume));
        let paths: Vec<String> = file.paths.iter().map(|path| format!("{subvolume}{}", printable(path))).collect();
        let name = if paths.is_empty() { format!("{subvolume} inode {}", file.ino) } else { paths.join(" = ") };
        format!("{name} bytes {}..{end}", file.offset)
    };
    let mut all: Vec<String> = uses.files.iter().map(one).collect();
    all.extend((uses.more > 0).then(|| format!("{} more", uses.more)));
    all.join(", ")
}

/// The last line or lines.
pub(super) fn summary(outcome: &Outcome) -> String {
    let report = &outcome.report;
    let mut text = String::new();
    for (why, bytes) in &report.unchecked {
        let bytes = if *bytes > 0 { format!(" ({})", HumanBytes(*bytes)) } else { String::new() };
        text += &format!("not checked{bytes}: {why}\n");
    }
    if outcome.older.is_some() {
        text += "not checked: whether this is what was written last\n";
    }
    let verdict = match report.damage_count {
        0 => outcome.verdict().to_owned(),
        count => format!("{count} damaged"),
    };
    let unlisted = report.damage_count - report.findings.len() as u64;
    let unlisted = if unlisted > 0 { format!(", {unlisted} of them not listed") } else { String::new() };
    let who = if report.is_offloaded { ", data by the devices" } else { "" };
    text + &format!(
        "{}: {verdict}{unlisted}; {} nodes and {} in all copies checked{who}, {} transferred, in {:.1} s",
        outcome.target,
        report.nodes_verified,
        HumanBytes(report.bytes_verified),
        HumanBytes(report.bytes_transferred),
        outcome.elapsed.as_secs_f64(),
    )
}
