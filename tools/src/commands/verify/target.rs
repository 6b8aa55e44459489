//! The verify of one target, from the opening to the report.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sealblock_block::{Abilities, Ability, Device, Unchecked};
use sealblock_server::status::health::Checked;
use sealblock_stack::quantity::count;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, Cause, OpenTarget, StackError, Usage, on_reactor, open_for};

use crate::cli::Verify;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::Show;
use crate::report::{NotChecked, VerifyReport, print_json, say};
use crate::tally::Tally;

use super::job::{Findings, Order, VerifyJob};
use super::text::block_error;
use super::{catch_up, workers};

/// Checks the target.
pub(super) fn run(order: Order<'_>) -> Result<Exit, StackError> {
    let Order { arguments, target } = order;
    let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
    let (report, repairs) = on_reactor(async {
        let access = if arguments.repair { Access::Write } else { Access::Read };
        // Repairs need another copy: a member opened by itself has none.
        let opened = open_for(target, access, Usage::Unchanged).await?;
        let lost = report_opening(arguments, &opened);
        // An open for writing has rewritten them.
        let repairs = Repairs::of(opened.device.abilities());
        let work = async |opened: &OpenTarget| {
            let report = async {
                prepare(arguments, opened, show).await?;
                check(order, opened, show).await
            };
            let report = report.await;
            // The checks read other copies of metadata, too.
            let lost = [lost, report_lost(arguments, opened.info.lost_copies())].concat();
            // An open for writing has rewritten them, or rewrites them at the close.
            let lost_metadata = if arguments.repair { Vec::new() } else { lost };
            Ok((VerifyReport { lost_metadata, ..report? }, repairs))
        };
        opened.close_after(work).await
    })?;
    print(&report, order)?;
    if arguments.repair {
        report_repairs(&report, repairs);
    }
    Ok(if report.resume.is_some() { Exit::Interrupted } else { report.exit() })
}

/// Prints what the open found; returns the lost copies of superblocks.
fn report_opening(arguments: &Verify, opened: &OpenTarget) -> Vec<String> {
    let left_out = opened.info.left_out();
    if left_out > 0 && !arguments.quiet {
        // No damage: such blocks have their old content. The application that wrote them without a flush may need to know.
        let (writes, verb) = (count(left_out, "write"), if left_out == 1 { "was" } else { "were" });
        eprintln!("sealblock: {writes} under way at a crash had not arrived and {verb} left out");
    }
    report_lost(arguments, opened.info.lost_superblocks())
}

/// Prints which copies of metadata are lost.
fn report_lost(arguments: &Verify, lost: Vec<String>) -> Vec<String> {
    for lost in &lost {
        let then = if arguments.repair { "it was written anew" } else { "--repair writes it anew" };
        eprintln!("sealblock: {lost}; {then}");
    }
    lost
}

/// Waits for resyncs before a repair, and accepts older copies if `--accept-stale` is given.
async fn prepare(arguments: &Verify, opened: &OpenTarget, show: Show) -> Result<(), StackError> {
    if arguments.repair {
        catch_up::wait(opened, show).await?;
    }
    match &arguments.accept_stale {
        Some(replica) => accept_stale(opened, replica).await,
        None => Ok(()),
    }
}

/// Accepts the older copies on a replica, before the checks.
async fn accept_stale(opened: &OpenTarget, replica: &TargetName) -> Result<(), StackError> {
    let Some(mirror) = &opened.info.mirror else {
        let why = StackError::new(Cause::Usage, "taking older copies", "it is no mirror that is open here");
        return Err(why.on(opened.target()).advise("mirror:A,B, or `sealblock mirror accept-stale` if it is served"));
    };
    mirror.accept_stale(replica).await
}

/// Who repairs bad blocks.
#[derive(Clone, Copy)]
enum Repairs {
    /// This process, which has the replicas open.
    Here,
    /// The server that has the replicas open.
    ByServer,
    /// Not possible: there are no copies.
    Nowhere,
}

impl Repairs {
    fn of(abilities: Abilities) -> Repairs {
        match (abilities.repair == Ability::Native, abilities.copies && abilities.offloads) {
            (true, _) => Repairs::Here,
            (false, true) => Repairs::ByServer,
            (false, false) => Repairs::Nowhere,
        }
    }
}

async fn check(order: Order<'_>, opened: &OpenTarget, show: Show) -> Result<VerifyReport, StackError> {
    let arguments = order.arguments;
    let span = opened.span(arguments.range)?;
    // Not before: until here there is no result to print, so a signal may end the process at once.
    interrupt::watch();
    let started = Instant::now();
    let job = Arc::new(VerifyJob::new(order, opened, span, show)?);
    let check = Check { order, opened, started, received_before: opened.received_bytes(), offloaded: job.offloads() };
    // A device that does not respond must not suppress what was found before.
    let last_words = || {
        if let Some(Ok(findings)) = job.findings_now() {
            print(&check.report(findings), order).ok();
        }
    };
    let worked = interrupt::or_end(workers::run(&job, opened), last_words).await;
    let findings = job.findings()?;
    worked.map_err(|failure| match findings.resume {
        Some(resume) if failure.advice().is_none() && findings.blocks > 0 => {
            failure.advise(format!("--range {resume}, to go on there"))
        }
        _ => failure,
    })?;
    Ok(check.report(findings))
}

/// A verify in progress, for its report.
struct Check<'a> {
    order: Order<'a>,
    opened: &'a OpenTarget,
    started: Instant,
    received_before: Option<u64>,
    offloaded: bool,
}

impl Check<'_> {
    /// The report of these findings.
    fn report(&self, findings: Findings) -> VerifyReport {
        let Check { order: Order { target, .. }, opened, .. } = self;
        // Bytes from another host are counted on arrival, whatever request they are for.
        let received = opened.received_bytes().zip(self.received_before).map(|(now, before)| now - before);
        let geometry = opened.device.geometry();
        let error = |fault| block_error(fault, geometry.protection, target);
        let not_checked = |run| not_checked(run, target);
        VerifyReport {
            target: target.to_string(),
            blocks_verified: findings.blocks,
            bytes_verified: findings.blocks << geometry.block_size.shift(),
            bytes_transferred: received.unwrap_or(findings.bytes_transferred),
            offloaded: self.offloaded,
            elapsed_s: self.started.elapsed().as_secs_f64(),
            checked: Checked::of(findings.coverage.is_sealed()),
            errors: findings.faults.iter().map(error).collect(),
            errors_unlisted: findings.unlisted,
            lost_metadata: Vec::new(),
            unchecked: findings.coverage.unchecked().iter().map(not_checked).collect(),
            resume: findings.resume,
            untold: findings.untold,
        }
    }
}

fn not_checked(run: &Unchecked, target: &TargetName) -> NotChecked {
    let member = target.member(run.member).map(TargetName::to_string);
    NotChecked { member, first: run.first.get(), last: run.last.get(), why: run.why.to_text() }
}

/// Prints how many bad blocks were repaired.
fn report_repairs(report: &VerifyReport, repairs: Repairs) {
    let lasting = report.errors.iter().filter(|error| !error.repaired).count();
    if lasting == 0 {
        return;
    }
    let target = &report.target;
    match repairs {
        Repairs::Here => {
            eprintln!("sealblock: {lasting} of {} could not be repaired: no good copy is left", report.errors.len());
        }
        Repairs::ByServer => eprintln!(
            "sealblock: nothing was repaired from here: the copies are its server's\ntry: sealblock scrub start {target}, on that machine"
        ),
        Repairs::Nowhere => eprintln!("sealblock: nothing was repaired: {target} has no other copy of its blocks"),
    }
}

/// Prints the report.
fn print(report: &VerifyReport, order: Order<'_>) -> Result<(), StackError> {
    if order.arguments.json {
        print_json(report)?;
    } else {
        print_text(report, order)?;
    }
    if let Some(resume) = report.resume {
        interrupt::report_rest(format_args!("verifying {}", report.target), resume);
    }
    Ok(())
}

/// Prints what follows the lines of damaged blocks.
fn print_text(report: &VerifyReport, order: Order<'_>) -> Result<(), StackError> {
    let prefix = order.prefix();
    if report.untold > 0 {
        say(&format!("{prefix}and {} more", count(report.untold, "damaged block")))?;
    }
    for run in &report.unchecked {
        let member = run.member.as_ref().map_or(String::new(), |member| format!(" on {member}"));
        say(&format!("{prefix}blocks {} to {}{member}: not checked: {}", run.first, run.last, run.why))?;
    }
    if order.arguments.quiet && report.exit() == Exit::Clean && report.resume.is_none() {
        return Ok(());
    }
    let elapsed = Duration::from_secs_f64(report.elapsed_s);
    let tally = Tally { read: report.bytes_transferred, written: 0, elapsed }.to_text();
    let verdict = match (report.resume, report.exit()) {
        (None, _) => report.verdict(),
        // Readability alone is not called clean.
        (Some(_), Exit::Clean) => "interrupted, nothing bad until then".to_owned(),
        (Some(_), _) => format!("interrupted, {} until then", report.verdict()),
    };
    let blocks = count(report.blocks_verified, "block");
    say(&format!("{}: {blocks} verified {tally}: {verdict}", report.target))
}
