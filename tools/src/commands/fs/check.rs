//! `sealblock fs check`: whether the trees of a filesystem agree with each other.
//!
//! The work is that of [`sealblock_btrfs::check`]; here it gets its progress and its end by a signal, and its report is printed.

use std::cell::{Cell, OnceCell};
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs::check::{CheckOptions, Finding, Report, Verdict, WhyNotChecked, check};
use sealblock_btrfs::verify::{Progress as Reached, Watch};
use sealblock_stack::StackError;
use sealblock_stack::filesystem::OpenFilesystem;
use sealblock_units::ByteCount;
use serde::Serialize;

use super::place::{WhyFilesOlder, printable, why_older, with_filesystem};
use crate::cli::FsCheck;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{note, print_json, say};

/// Checks it.
pub fn run(arguments: &FsCheck) -> Result<Exit, StackError> {
    interrupt::watch();
    if arguments.filesystem.has_place {
        note(&"`fs check` takes a whole filesystem, not a path in it");
    }
    with_filesystem(&arguments.filesystem, async |open| {
        let outcome = interrupt::or_end(work(arguments, open), || {
            note(&format_args!("checking {}: interrupted while a request was in flight", arguments.filesystem));
        });
        let outcome = outcome.await;
        tell(arguments, &outcome)?;
        Ok(outcome.exit())
    })
}

async fn work(arguments: &FsCheck, open: &OpenFilesystem) -> Outcome {
    let started = Instant::now();
    let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
    let watch = Watcher { show, progress: OnceCell::new(), reached: Cell::default() };
    let report = check(&open.filesystem, CheckOptions::default(), &watch).await;
    let target = arguments.filesystem.to_string();
    Outcome { target, report, older: why_older(open), elapsed: started.elapsed() }
}

/// Prints the outcome.
fn tell(arguments: &FsCheck, outcome: &Outcome) -> Result<(), StackError> {
    if arguments.json {
        return print_json(&outcome.to_json());
    }
    outcome.report.findings.iter().try_for_each(|finding| say(&finding.to_string()))?;
    if arguments.quiet && outcome.exit() == Exit::Clean {
        return Ok(());
    }
    say(&outcome.summary())
}

/// Shows how far it is, and stops at a signal.
struct Watcher {
    show: Show,
    /// From the first call on, which knows the total.
    progress: OnceCell<Progress>,
    reached: Cell<Reached>,
}

impl Watch for Watcher {
    fn go_on(&self, reached: Reached) -> LocalBoxFuture<'_, bool> {
        let before = self.reached.replace(reached);
        let total = ByteCount::new(reached.expected_bytes);
        let progress = self.progress.get_or_init(|| Progress::new("checking", Some(total), self.show));
        progress.advance(reached.bytes.saturating_sub(before.bytes));
        if reached.damage_count > before.damage_count {
            progress.bad(reached.damage_count - before.damage_count);
        }
        Box::pin(std::future::ready(!interrupt::came()))
    }
}

/// The outcome of a check.
struct Outcome {
    /// What was checked, as it was named.
    target: String,
    report: Report,
    /// Why all of it may be older than what was written, which no check shows.
    older: Option<WhyFilesOlder>,
    elapsed: Duration,
}

#[derive(Serialize)]
struct JsonReport {
    target: String,
    nodes: u64,
    extents: u64,
    references: u64,
    inodes: u64,
    elapsed_s: f64,
    verdict: &'static str,
    findings: Vec<JsonFinding>,
    findings_unlisted: u64,
    notes: Vec<String>,
    not_checked: Vec<JsonNotChecked>,
    may_be_older: Option<&'static str>,
    interrupted: bool,
}

#[derive(Serialize)]
struct JsonFinding {
    rule: &'static str,
    tree: Option<u64>,
    ino: Option<u64>,
    paths: Vec<String>,
    key: Option<String>,
    logical: Option<u64>,
    why: String,
}

#[derive(Serialize)]
struct JsonNotChecked {
    reason: &'static str,
    why: String,
}

impl Outcome {
    fn is_stopped(&self) -> bool {
        self.report.not_checked.contains(&WhyNotChecked::Stopped)
    }

    /// The exit status: findings count more than what was not checked, and a signal more than both.
    fn exit(&self) -> Exit {
        match self.report.verdict() {
            _ if interrupt::came() && self.is_stopped() => Exit::Interrupted,
            Verdict::Clean => Exit::Clean.unless_older(self.older.is_some()),
            Verdict::Incomplete => Exit::Incomplete,
            Verdict::Inconsistent => Exit::DamageFound,
        }
    }

    fn verdict(&self) -> &'static str {
        match self.report.verdict() {
            Verdict::Clean if self.older.is_none() => "clean",
            Verdict::Clean | Verdict::Incomplete => "incomplete",
            Verdict::Inconsistent => "inconsistent",
        }
    }

    /// The last line or lines.
    fn summary(&self) -> String {
        let report = &self.report;
        let mut text = String::new();
        for note in &report.notes {
            text += &format!("note: {note}\n");
        }
        for why in &report.not_checked {
            text += &format!("not checked: {why}\n");
        }
        if self.older.is_some() {
            text += "not checked: whether this is what was written last\n";
        }
        let verdict = match report.finding_count {
            0 => self.verdict().to_owned(),
            1 => "1 inconsistency".to_owned(),
            count => format!("{count} inconsistencies"),
        };
        let unlisted = report.finding_count - report.findings.len() as u64;
        let unlisted = if unlisted > 0 { format!(", {unlisted} of them not listed") } else { String::new() };
        text + &format!(
            "{}: {verdict}{unlisted}; {} nodes, {} extents, {} references and {} inodes checked in {:.1} s",
            self.target,
            report.nodes,
            report.extents,
            report.references,
            report.inodes,
            self.elapsed.as_secs_f64(),
        )
    }

    /// The object of `--json`.
    fn to_json(&self) -> JsonReport {
        let report = &self.report;
        let not_checked =
            report.not_checked.iter().map(|why| JsonNotChecked { reason: why.as_str(), why: why.to_string() });
        let older = self.older.iter().map(|older| JsonNotChecked { reason: "may_be_older", why: older.text.clone() });
        JsonReport {
            target: self.target.clone(),
            nodes: report.nodes,
            extents: report.extents,
            references: report.references,
            inodes: report.inodes,
            elapsed_s: self.elapsed.as_secs_f64(),
            verdict: self.verdict(),
            findings: report.findings.iter().map(json_finding).collect(),
            findings_unlisted: report.finding_count - report.findings.len() as u64,
            notes: report.notes.clone(),
            not_checked: not_checked.chain(older).collect(),
            may_be_older: self.older.as_ref().map(|older| older.name),
            interrupted: self.is_stopped(),
        }
    }
}

fn json_finding(finding: &Finding) -> JsonFinding {
    let place = finding.place;
    JsonFinding {
        rule: finding.rule.as_str(),
        tree: place.tree,
        ino: place.ino,
        paths: finding.paths.iter().map(|path| printable(path)).collect(),
        key: place.key.map(|key| key.to_string()),
        logical: place.logical,
        why: finding.why.clone(),
    }
}
