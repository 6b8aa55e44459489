//! The verify of one target, from the opening to the report.

use std::cell::RefCell;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use sealblock_block::{Abilities, BadBlockCause, DamageSource, Device, Request, RequestKind, ReservedArea, has_block};
use sealblock_server::status::health::Checked;
use sealblock_stack::quantity::count;
use sealblock_stack::range::BlockSpan;
use sealblock_stack::target::TargetName;
use sealblock_stack::{
    Access, Cause, OpenTarget, StackError, Usage, is_lost_list, lost_lists_text, on_reactor, open_for, shell_word,
};

use crate::cli::Verify;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::Show;
use crate::report::{BlockError, VerifyReport, note, note_lost_answers, print_json, say};
use crate::tally::Tally;

use super::job::{Findings, VerifyJob, VerifyRequest};
use super::resume::ResumeFile;
use super::session::{self, Session, part_text};
use super::text::not_checked;
use super::{catch_up, files, workers};

/// Checks the target.
pub(super) fn run(order: VerifyRequest<'_>) -> Result<Exit, StackError> {
    let arguments = order.arguments;
    let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
    let file = session::lock(arguments.resume.as_deref())?;
    let (report, repairs, session) = on_reactor(async {
        let verified = verify(order, file, show).await?;
        look_again(order, verified).await
    })?;
    print(&report, order, session.as_ref())?;
    if arguments.repair {
        report_repairs(&report, repairs);
    }
    if report.resume.is_some() {
        return Ok(Exit::Interrupted);
    }
    session.map_or(Ok(()), Session::finish)?;
    Ok(report.exit())
}

/// The findings of a verify, where repairs happen, and the resume file.
type Verified = (VerifyReport, Repairs, Option<Session>);

/// Opens the target, checks it and closes it.
async fn verify(order: VerifyRequest<'_>, file: Option<ResumeFile>, show: Show) -> Result<Verified, StackError> {
    let VerifyRequest { arguments, target } = order;
    let access = if arguments.repair { Access::Write } else { Access::ReadOlder };
    // Repairs need another copy: a member opened by itself has none.
    let opened = open_for(target, access, Usage::Unchanged).await?;
    note_lost_answers(&opened);
    let lost = report_opening(arguments, &opened);
    let repairs = Repairs::of(opened.device.abilities());
    let work = async |opened: &OpenTarget| {
        let span = opened.span(arguments.range)?;
        let session = file.map(|file| Session::begin(file, order, opened, span)).transpose()?;
        let lost_lists = RefCell::default();
        let report = async {
            prepare(arguments, opened, show).await?;
            // What servers know of blocks that hosts made unreadable: a read only shows that they are.
            opened.learn_damage().await;
            // Before the check, after which a list may be whole again.
            lost_lists.replace(report_lost(arguments, lost_list_texts(opened)));
            check(order, opened, span, session.as_ref(), show).await
        };
        let report = report.await;
        read_reserved(opened).await;
        // The checks read other copies of metadata, too.
        let copies = report_lost(arguments, opened.info.lost_metadata().copies());
        let lost_metadata = [lost, lost_lists.take(), copies].concat();
        let report = VerifyReport { lost_metadata, ..report? };
        let block_bytes = opened.device.geometry().block_size.bytes() as u64;
        let report = match &session {
            Some(session) => session.merge(report, block_bytes),
            None => report,
        };
        note_made(&report, opened);
        let report = files::with_files(report, opened, arguments.quiet || arguments.json);
        Ok((report, repairs, session))
    };
    opened.close_after(work).await
}

/// Looks again at copies of metadata that a repair found lost: an opening for writing, the check or the close has written them, or has
/// not.
async fn look_again(order: VerifyRequest<'_>, (report, repairs, session): Verified) -> Result<Verified, StackError> {
    if !order.arguments.repair || report.lost_metadata.is_empty() {
        return Ok((report, repairs, session));
    }
    let look = async {
        let opened = open_for(order.target, Access::ReadOlder, Usage::Unchanged).await?;
        read_reserved(&opened).await;
        opened.learn_damage().await;
        let lost = opened.info.lost_metadata();
        let still = [lost.superblocks(), lost_list_texts(&opened), lost.copies()].concat();
        opened.close(Ok(still)).await
    };
    let still = match look.await {
        Ok(still) => still,
        Err(failure) => {
            for lost in &report.lost_metadata {
                note(&format_args!("{lost}; unknown whether it was rewritten: {}", failure.in_short()));
            }
            return Ok((report, repairs, session));
        }
    };
    for lost in report.lost_metadata.iter().filter(|lost| !still.contains(lost)) {
        let fate = if is_lost_list(lost) {
            "every block was checked, and the list is whole again"
        } else {
            "it was rewritten"
        };
        note(&format_args!("{lost}; {fate}"));
    }
    for lost in &still {
        let fate = if is_lost_list(lost) { "not every block was checked since" } else { "it was not rewritten" };
        note(&format_args!("{lost}; {fate}"));
    }
    Ok((VerifyReport { lost_metadata: still, ..report }, repairs, session))
}

/// The devices whose lists of bad blocks were lost, as texts.
fn lost_list_texts(opened: &OpenTarget) -> Vec<String> {
    let lists = opened.info.damage.lost_lists();
    lists.iter().filter_map(|device| lost_lists_text(std::slice::from_ref(device))).collect()
}

/// Reads the reserved areas of volumes, so that lost copies of them are found. Missing or unreadable areas are reported by the code that
/// needs them.
async fn read_reserved(opened: &OpenTarget) {
    for area in ReservedArea::ALL {
        let _ = opened.device.execute(Request::read_reserved(area)).await;
    }
}

/// Prints what the open found; returns the lost copies of superblocks.
fn report_opening(arguments: &Verify, opened: &OpenTarget) -> Vec<String> {
    let left_out = opened.info.left_out();
    if left_out > 0 && !arguments.quiet {
        // No damage: such blocks have their old content. The application that wrote them without a flush may need to know.
        let (writes, verb) = (count(left_out, "write"), if left_out == 1 { "was" } else { "were" });
        note(&format_args!("{writes} in flight at a crash did not complete and {verb} discarded"));
    }
    report_lost(arguments, opened.info.lost_metadata().superblocks())
}

/// Says which of the bad blocks hosts have made unreadable: these are no damage, and no other copy has their data.
fn note_made(report: &VerifyReport, opened: &OpenTarget) {
    let is_unreadable = |error: &&BlockError| error.field == BadBlockCause::Media;
    if !report.errors.iter().any(|error| is_unreadable(&error)) {
        return;
    }
    for (device, why) in opened.info.damage.not_asked() {
        note(&format_args!("{device}: unknown whether hosts made unreadable blocks so (Write Uncorrectable): {why}"));
    }
    let (mut runs, _) = opened.info.damage.summary();
    runs.retain(|run| run.is_made);
    let is_made = |error: &&BlockError| is_unreadable(error) && has_block(&runs, error.lba);
    let made = report.errors.iter().filter(is_made).count();
    if made > 0 {
        note(&format_args!(
            "{} of {} made unreadable by hosts (Write Uncorrectable)",
            made,
            count(report.errors.len() as u64, "bad block")
        ));
    }
}

/// Prints which copies of metadata are lost. A repair prints what became of them.
fn report_lost(arguments: &Verify, lost: Vec<String>) -> Vec<String> {
    for lost in lost.iter().filter(|_| !arguments.repair) {
        let advice = if is_lost_list(lost) {
            "a scrub of all blocks, or --repair, makes it whole"
        } else {
            "--repair rewrites it"
        };
        note(&format_args!("{lost}; {advice}"));
    }
    lost
}

/// Waits for resyncs before a repair, and accepts what is asked for: older copies, or that writes may be lost.
async fn prepare(arguments: &Verify, opened: &OpenTarget, show: Show) -> Result<(), StackError> {
    if arguments.repair {
        catch_up::wait(opened, show).await?;
    }
    if arguments.accept_lost {
        accept_lost(opened).await?;
    }
    match &arguments.accept_stale {
        Some(replica) => accept_stale(opened, replica).await,
        None => Ok(()),
    }
}

/// Forgets that writes may be lost, before the checks, and says so.
async fn accept_lost(opened: &OpenTarget) -> Result<(), StackError> {
    let lost = opened.lost_answers();
    opened.forget_lost().await?;
    let are_left = opened.lost_answers();
    for reason in lost.iter().filter(|reason| !are_left.contains(reason)) {
        note(&format_args!("no server tells its hosts any more that writes may be lost: {reason}"));
    }
    Ok(())
}

/// Accepts the older copies on a replica, before the checks.
async fn accept_stale(opened: &OpenTarget, replica: &TargetName) -> Result<(), StackError> {
    let Some(mirror) = &opened.info.mirror else {
        let why = StackError::new(Cause::Usage, "accept stale copies on", "it is not a mirror that is open here");
        return Err(why
            .on(opened.target())
            .advise("give mirror:A,B, or use `sealblock mirror accept-stale` if it is served"));
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
        match (abilities.is_native(RequestKind::Repair), abilities.copies && abilities.offloads) {
            (true, _) => Repairs::Here,
            (false, true) => Repairs::ByServer,
            (false, false) => Repairs::Nowhere,
        }
    }
}

async fn check(
    order: VerifyRequest<'_>,
    opened: &OpenTarget,
    span: BlockSpan,
    session: Option<&Session>,
    show: Show,
) -> Result<VerifyReport, StackError> {
    // Not before: until here there is no result to print, so a signal may end the process at once.
    interrupt::watch();
    let check = Check { order, opened, started: Instant::now(), received_before: opened.received_bytes() };
    // An earlier run may have verified all and reported nothing.
    let Some(span) = session.map_or(Some(span), Session::rest) else {
        return Ok(check.report(Findings::default(), false));
    };
    let job = Arc::new(VerifyJob::new(order, opened, span, session.map(Session::earlier), show)?);
    let save = || session.inspect(|session| session.save(&job, opened));
    // A device that does not respond must not suppress what was found before.
    let last_words = || {
        save();
        if let Some(Ok(findings)) = job.findings_now() {
            let report = check.report(findings, job.offloads());
            let block_bytes = opened.device.geometry().block_size.bytes() as u64;
            let report = session.map_or(report.clone(), |session| session.merge(report, block_bytes));
            print(&report, order, session).ok();
        }
    };
    let worked = interrupt::or_end(with_saves(workers::run(&job, opened), session, &job, opened), last_words).await;
    save();
    let findings = job.findings()?;
    worked.map_err(|failure| match (session, findings.resume) {
        (Some(session), _) if failure.advice().is_none() && session.resumes() => {
            failure.advise("repeat the command to resume")
        }
        (_, Some(resume)) if failure.advice().is_none() && findings.blocks > 0 => {
            failure.advise(format!("--range {resume} resumes the command"))
        }
        _ => failure,
    })?;
    Ok(check.report(findings, job.offloads()))
}

/// Does the work, and saves it meanwhile.
async fn with_saves<T>(
    work: impl Future<Output = T>,
    session: Option<&Session>,
    job: &VerifyJob,
    opened: &OpenTarget,
) -> T {
    let Some(session) = session else { return work.await };
    match select(pin!(work), pin!(session.save_regularly(job, opened))).await {
        Either::Left((done, _)) => done,
        Either::Right(((), work)) => work.await,
    }
}

/// A verify in progress, for its report.
struct Check<'a> {
    order: VerifyRequest<'a>,
    opened: &'a OpenTarget,
    started: Instant,
    received_before: Option<u64>,
}

impl Check<'_> {
    /// The report of these findings.
    fn report(&self, findings: Findings, offloaded: bool) -> VerifyReport {
        let Check { order: VerifyRequest { target, .. }, opened, .. } = self;
        // Bytes from another host are counted on arrival, whatever request they are for.
        let received = opened.received_bytes().zip(self.received_before).map(|(now, before)| now - before);
        let geometry = opened.device.geometry();
        let members = opened.member_names();
        let not_checked = |run| not_checked(run, &members);
        VerifyReport {
            target: target.to_string(),
            blocks_verified: findings.blocks,
            bytes_verified: findings.blocks << geometry.block_size.shift(),
            bytes_transferred: received.unwrap_or(findings.bytes_transferred),
            offloaded,
            elapsed_s: self.started.elapsed().as_secs_f64(),
            checked: Checked::of(findings.coverage.is_sealed()),
            errors: findings.errors,
            errors_unlisted: findings.unlisted,
            lost_metadata: Vec::new(),
            unchecked: findings.coverage.unchecked().iter().map(not_checked).collect(),
            resume: findings.resume,
            parts: Vec::new(),
            verified_before: None,
            files_notes: Vec::new(),
            are_files_told: false,
            unprinted: findings.unprinted,
        }
    }
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
            note(&format_args!("{lasting} of {} could not be repaired: no good copy is left", report.errors.len()));
        }
        Repairs::ByServer => {
            let target = shell_word(target);
            note(&format_args!("cannot repair over the network\ntry: `sealblock scrub start {target}` on the server"))
        }
        Repairs::Nowhere => note(&format_args!("nothing was repaired: {target} has no other copy of its blocks")),
    }
}

/// Prints the report.
fn print(report: &VerifyReport, order: VerifyRequest<'_>, session: Option<&Session>) -> Result<(), StackError> {
    if order.arguments.json {
        print_json(report)?;
    } else {
        print_text(report, order)?;
    }
    if let Some(rest) = report.resume {
        let what = format_args!("verifying {}", report.target);
        match session.is_some_and(Session::resumes) {
            true => interrupt::report(what, format_args!("at block {}", rest.first()), "repeat the command to resume"),
            false => interrupt::report_rest(what, rest),
        }
    }
    Ok(())
}

/// Prints what follows the lines of damaged blocks.
fn print_text(report: &VerifyReport, order: VerifyRequest<'_>) -> Result<(), StackError> {
    let prefix = order.prefix();
    if report.unprinted > 0 {
        say(&format!("{prefix}and {} more", count(report.unprinted, "damaged block")))?;
    }
    files::lines(report, &prefix).iter().try_for_each(|line| say(line))?;
    for run in &report.unchecked {
        let member = run.member.as_ref().map_or(String::new(), |member| format!(" on {member}"));
        say(&format!("{prefix}blocks {} to {}{member}: not checked: {}", run.first, run.last, run.why))?;
    }
    if order.arguments.quiet && report.exit() == Exit::Clean && report.resume.is_none() {
        return Ok(());
    }
    for part in report.parts.iter().filter(|_| report.parts.len() > 1) {
        say(&format!("{prefix}{}", part_text(part)))?;
    }
    let elapsed = Duration::from_secs_f64(report.elapsed_s);
    let tally = Tally { read: report.bytes_transferred, written: 0, elapsed }.to_text();
    let verdict = match (report.resume, report.exit()) {
        (None, _) => report.verdict(),
        // Readability alone is not called clean.
        (Some(_), Exit::Clean) => "interrupted, no damage so far".to_owned(),
        (Some(_), _) => format!("interrupted, {} so far", report.verdict()),
    };
    let blocks = count(report.blocks_verified, "block");
    say(&format!("{}: {blocks} verified {tally}: {verdict}", report.target))
}
