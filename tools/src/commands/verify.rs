//! `sealblock verify`: check every block, name those that are damaged.

mod catch_up;
mod job;
mod lanes;

use std::sync::Arc;
use std::time::Instant;

use sealblock_block::{Abilities, Ability, Device, Fault, FaultField, Unchecked};
use sealblock_integrity::{Field as TagField, PiFormat};

use crate::cli::Verify;
use crate::control::protocol::Order;
use crate::exit::{Cause, Exit, Failure};
use crate::progress::Show;
use crate::report::{BlockError, Checked, Field, Hex, NotChecked, VerifyReport, print_json, say};
use crate::stack::{Access, Opened, Usage, on_reactor, open_for};
use crate::target::Target;

pub use job::{Findings, Job};

/// Checks the target.
pub fn run(arguments: &Verify) -> Result<Exit, Failure> {
    let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
    let (report, repairs) = on_reactor(async {
        let access = if arguments.repair { Access::Write } else { Access::Read };
        // Repairs come from other copies, so a member by itself has none.
        let opened = open_for(&arguments.target, access, Usage::Unchanged).await?;
        let lost = tell_of_opening(arguments, &opened);
        // An opening for writing has written them anew.
        let repairs = Repairs::of(opened.gate.abilities());
        let verified = match prepare(arguments, &opened, show).await {
            Ok(()) => check(arguments, &opened, show).await,
            Err(failure) => Err(failure),
        };
        // What was checked has met other copies of metadata, too.
        let lost = [lost, tell_of_lost(arguments, opened.facts.lost_copies())].concat();
        // An opening for writing has written them anew, or does when it is closed.
        let lost_metadata = if arguments.repair { Vec::new() } else { lost };
        opened.close(verified.map(|report| (VerifyReport { lost_metadata, ..report }, repairs))).await
    })?;
    if arguments.json {
        print_json(&report)?;
    } else {
        print_text(&report, arguments.quiet)?;
    }
    if arguments.repair {
        tell_of_repairs(&report, repairs);
    }
    Ok(report.exit())
}

/// Says what the opening has found beside blocks; the copies of superblocks that are lost.
fn tell_of_opening(arguments: &Verify, opened: &Opened) -> Vec<String> {
    let left_out = opened.facts.left_out();
    if left_out > 0 && !arguments.quiet {
        // Clean all the same: such blocks are as they were before. Whoever had not flushed them may want to know.
        eprintln!("sealblock: {left_out} writes that were under way at a crash had not arrived and were left out");
    }
    tell_of_lost(arguments, opened.facts.lost_superblocks())
}

/// Says which copies of metadata are lost.
fn tell_of_lost(arguments: &Verify, lost: Vec<String>) -> Vec<String> {
    for lost in &lost {
        let then = if arguments.repair { "it was written anew" } else { "--repair writes it anew" };
        eprintln!("sealblock: {lost}; {then}");
    }
    lost
}

/// Brings members up to date before a repair, and takes older copies where that was asked for.
async fn prepare(arguments: &Verify, opened: &Opened, show: Show) -> Result<(), Failure> {
    if arguments.repair {
        catch_up::wait(opened, show).await?;
    }
    match &arguments.accept_stale {
        Some(leg) => accept_stale(opened, leg).await,
        None => Ok(()),
    }
}

/// Takes the older copies that a leg keeps for the content of their blocks, before anything is checked.
async fn accept_stale(opened: &Opened, leg: &Target) -> Result<(), Failure> {
    let Some(mirror) = &opened.facts.mirror else {
        let why = Failure::new(Cause::Usage, "taking older copies", "it is no mirror that is open here");
        return Err(why.on(opened.target()).advise("mirror:A,B, or `sealblock mirror accept-stale` if it is served"));
    };
    mirror.order(&Order::MirrorAcceptStale { leg: leg.to_string() }).await
}

/// Who mends what is bad.
#[derive(Clone, Copy)]
enum Repairs {
    /// This process, which has the copies open.
    Here,
    /// The server that has them.
    ByServer,
    /// Nobody: there are no copies.
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

async fn check(arguments: &Verify, opened: &Opened, show: Show) -> Result<VerifyReport, Failure> {
    let span = opened.span(arguments.range)?;
    let started = Instant::now();
    let job = Arc::new(Job::new(arguments, opened, span, show)?);
    let received_before = opened.received_bytes();
    let findings = lanes::run(&job, opened).await?;
    // Another host's bytes are counted where they arrive, whoever asked for them.
    let received = opened.received_bytes().zip(received_before).map(|(now, before)| now - before);
    let format = opened.gate.geometry().protection;
    Ok(VerifyReport {
        target: arguments.target.to_string(),
        blocks_verified: span.blocks(),
        bytes_verified: span.blocks() << opened.gate.geometry().block_size.shift(),
        bytes_transferred: received.unwrap_or(findings.bytes_transferred),
        offloaded: job.offloads(),
        elapsed_s: started.elapsed().as_secs_f64(),
        checked: Checked::of(findings.coverage.is_sealed()),
        errors: findings.faults.iter().map(|fault| block_error(fault, format, &arguments.target)).collect(),
        errors_unlisted: findings.unlisted,
        lost_metadata: Vec::new(),
        unchecked: findings.coverage.unchecked().iter().map(|run| not_checked(run, &arguments.target)).collect(),
    })
}

fn not_checked(run: &Unchecked, target: &Target) -> NotChecked {
    let member = target.leg(run.leg).map(Target::to_string);
    NotChecked { member, first: run.first.get(), last: run.last.get(), why: run.why.words() }
}

/// Says what became of what was found.
fn tell_of_repairs(report: &VerifyReport, repairs: Repairs) {
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

fn block_error(fault: &Fault, format: Option<PiFormat>, target: &Target) -> BlockError {
    let bits = match (fault.field, format) {
        (FaultField::Tag(TagField::Guard), Some(format)) => format.guard().bits(),
        (FaultField::Tag(TagField::RefTag), Some(format)) => u32::from(format.reference_tag_bits()),
        (FaultField::Tag(TagField::Guard | TagField::RefTag), None) => fitting_bits(fault),
        _ => 16,
    };
    let hex = |value: Option<u64>| value.map(|value| Hex::new(u128::from(value), bits));
    let field = match fault.field {
        FaultField::Tag(TagField::Guard) => Field::Guard,
        FaultField::Tag(TagField::AppTag) => Field::AppTag,
        FaultField::Tag(TagField::RefTag) => Field::RefTag,
        FaultField::Tag(TagField::StorageTag) => Field::StorageTag,
        FaultField::Media => Field::Media,
        FaultField::Conflict => Field::Conflict,
        FaultField::Stale => Field::Stale,
    };
    BlockError {
        lba: fault.lba.get(),
        field,
        expected: hex(fault.expected),
        actual: hex(fault.actual),
        member: target.leg(fault.leg).map(Target::to_string),
        repaired: fault.repaired,
    }
}

/// The width of a field whose format only another host's device knows: the least of those there are that holds its values.
fn fitting_bits(fault: &Fault) -> u32 {
    let used = u64::BITS - (fault.expected.unwrap_or(0) | fault.actual.unwrap_or(0)).leading_zeros();
    let least = if fault.field == FaultField::Tag(TagField::RefTag) { 32 } else { 16 };
    [16, 32, 48].into_iter().find(|bits| *bits >= used.max(least)).unwrap_or(64)
}

fn print_text(report: &VerifyReport, quiet: bool) -> Result<(), Failure> {
    for error in &report.errors {
        let what = match (error.expected, error.actual) {
            (Some(expected), Some(actual)) => format!("expected {expected}, found {actual}"),
            // Another host's device says which field it is, and not always what it holds.
            _ if !matches!(error.field, Field::Media | Field::Conflict | Field::Stale) => "does not fit".to_owned(),
            _ if error.field == Field::Conflict => "good copies differ".to_owned(),
            _ if error.field == Field::Stale => "an older copy is kept here; --accept-stale takes it".to_owned(),
            _ => "cannot be read".to_owned(),
        };
        let member = error.member.as_ref().map_or(String::new(), |member| format!(" on {member}"));
        let repaired = if error.repaired { ", repaired" } else { "" };
        say(&format!("block {}{member}: {}: {what}{repaired}", error.lba, error.field.words()))?;
    }
    if report.errors_unlisted > 0 {
        say(&format!("and {} more damaged blocks", report.errors_unlisted))?;
    }
    for run in &report.unchecked {
        let member = run.member.as_ref().map_or(String::new(), |member| format!(" on {member}"));
        say(&format!("blocks {} to {}{member}: not checked: {}", run.first, run.last, run.why))?;
    }
    if quiet && report.exit() == Exit::Clean {
        return Ok(());
    }
    let rate = report.bytes_verified as f64 / report.elapsed_s.max(1e-9) / 1e6;
    say(&format!(
        "{}: {} blocks verified in {:.2} s ({rate:.0} MB/s): {}",
        report.target,
        report.blocks_verified,
        report.elapsed_s,
        report.verdict()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use sealblock_block::{Durability, Operation};
    use sealblock_integrity::{Sealed, Tags};
    use sealblock_runtime_memory::Slice;
    use sealblock_units::{Extent, Lba};

    use crate::cli::{Cli, Command};
    use crate::stack::open;

    fn verified(path: &str) -> Exit {
        let cli = Cli::try_parse_from(["sealblock", "verify", path, "--quiet"]).unwrap();
        let Command::Verify(arguments) = cli.command else { panic!("it is a verify") };
        run(&arguments).unwrap()
    }

    #[test]
    fn reference_tags_that_a_host_chose_are_clean_and_one_that_was_spoilt_is_damage() {
        for kind in ["1", "2", "3"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("v").to_str().unwrap().to_owned();
            let run_of = |line: &str| {
                let cli = Cli::try_parse_from(line.split(' ')).unwrap();
                match cli.command {
                    Command::Create(create) => crate::commands::create::run(&create),
                    Command::Corrupt(corrupt) => crate::commands::corrupt::run(&corrupt),
                    _ => panic!("{line}"),
                }
                .unwrap()
            };
            run_of(&format!("sealblock create {path} --size 1MiB --type {kind}"));
            on_reactor(async {
                let opened = open(&path.parse().unwrap(), Access::Write).await?;
                let (size, format) = (opened.gate.geometry().block_size, opened.gate.geometry().protection);
                let extent = Extent::from_raw(8, 4).unwrap();
                // As an ILBRT of the host's own; Type 1 has none but the address.
                let tags = Tags { first_ref: if kind == "1" { 8 } else { 0x7777 }, ..Tags::default() };
                let data = Sealed::seal(Slice::copy_from(&[7; 4 * 4096]), size, format, &tags);
                let durability = Durability::ForceUnitAccess;
                opened.gate.execute(Operation::Write { extent, data, durability }).await.unwrap();
                opened.close(Ok(())).await
            })
            .unwrap();
            assert_eq!(verified(&path), Exit::Clean, "Type {kind}");
            run_of(&format!("sealblock corrupt {path} --lba 9 --kind ref-tag"));
            assert_eq!(verified(&path), Exit::Found, "Type {kind}");
        }
    }

    #[test]
    fn values_of_an_unknown_format_have_one_width_that_fits_both() {
        let of = |field, expected, actual| {
            let fault = Fault::new(Lba::ZERO, field, Some(expected), Some(actual));
            fitting_bits(&fault)
        };
        let (guard, tag) = (FaultField::Tag(TagField::Guard), FaultField::Tag(TagField::RefTag));
        assert_eq!((of(guard, 1, 0xffff), of(guard, 0x1_0000, 2), of(guard, 1 << 48, 2)), (16, 32, 64));
        assert_eq!((of(tag, 1, 2), of(tag, 1 << 32, 2), of(guard, 0, 0)), (32, 48, 16));
    }
}
