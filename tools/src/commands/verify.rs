//! `sealblock verify`: check every block, name those that are damaged.

mod job;
mod lanes;

use std::sync::Arc;
use std::time::Instant;

use sealblock_block::{Ability, Device, Fault, FaultField};
use sealblock_integrity::{Field as TagField, PiFormat};

use crate::cli::Verify;
use crate::exit::{Exit, Failure};
use crate::progress::Show;
use crate::report::{BlockError, Field, Hex, VerifyReport, print_json, say};
use crate::stack::{Access, Opened, on_reactor, open};
use crate::target::Target;

pub use job::{Findings, Job};

/// Checks the target.
pub fn run(arguments: &Verify) -> Result<Exit, Failure> {
    let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
    let (report, unlisted, can_repair) = on_reactor(async {
        let access = if arguments.repair { Access::Write } else { Access::Read };
        let opened = open(&arguments.target, access).await?;
        let left_out = opened.facts.left_out();
        if left_out > 0 && !arguments.quiet {
            // Clean all the same: such blocks are as they were before. Whoever had not flushed them may want to know.
            eprintln!("sealblock: {left_out} writes that were under way at a crash had not arrived and were left out");
        }
        let can_repair = opened.gate.abilities().repair == Ability::Native;
        let verified = check(arguments, &opened, show).await;
        opened.close(verified.map(|(report, unlisted)| (report, unlisted, can_repair))).await
    })?;
    if arguments.json {
        print_json(&report)?;
    } else {
        print_text(&report, unlisted, arguments.quiet)?;
    }
    if arguments.repair {
        tell_of_repairs(&report, can_repair);
    }
    Ok(if report.errors.is_empty() { Exit::Clean } else { Exit::Found })
}

/// The report, and how many damaged blocks it does not list.
async fn check(arguments: &Verify, opened: &Opened, show: Show) -> Result<(VerifyReport, u64), Failure> {
    let span = opened.span(arguments.range)?;
    let started = Instant::now();
    let job = Arc::new(Job::new(arguments, opened, span, show)?);
    let received_before = opened.received_bytes();
    let findings = lanes::run(&job, opened).await?;
    // Another host's bytes are counted where they arrive, whoever asked for them.
    let received = opened.received_bytes().zip(received_before).map(|(now, before)| now - before);
    let format = opened.gate.geometry().protection;
    let report = VerifyReport {
        target: arguments.target.to_string(),
        blocks_verified: span.blocks(),
        bytes_verified: span.blocks() << opened.gate.geometry().block_size.shift(),
        bytes_transferred: received.unwrap_or(findings.bytes_transferred),
        offloaded: job.offloads(),
        elapsed_s: started.elapsed().as_secs_f64(),
        errors: findings.faults.iter().map(|fault| block_error(fault, format, &arguments.target)).collect(),
    };
    Ok((report, findings.unlisted))
}

/// Says what became of what was found.
fn tell_of_repairs(report: &VerifyReport, can_repair: bool) {
    let lasting = report.errors.iter().filter(|error| !error.repaired).count();
    if lasting == 0 {
        return;
    }
    if can_repair {
        eprintln!("sealblock: {lasting} of {} could not be repaired: no good copy is left", report.errors.len());
    } else {
        eprintln!("sealblock: nothing was repaired: {} has no other copy of its blocks", report.target);
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
        leg: target.leg(fault.leg).map(Target::to_string),
        repaired: fault.repaired,
    }
}

/// The width of a field whose format only another host's device knows: the least of those there are that holds its values.
fn fitting_bits(fault: &Fault) -> u32 {
    let used = u64::BITS - (fault.expected.unwrap_or(0) | fault.actual.unwrap_or(0)).leading_zeros();
    let least = if fault.field == FaultField::Tag(TagField::RefTag) { 32 } else { 16 };
    [16, 32, 48].into_iter().find(|bits| *bits >= used.max(least)).unwrap_or(64)
}

fn print_text(report: &VerifyReport, unlisted: u64, quiet: bool) -> Result<(), Failure> {
    for error in &report.errors {
        let what = match (error.expected, error.actual) {
            (Some(expected), Some(actual)) => format!("expected {expected}, found {actual}"),
            // Another host's device says which field it is, and not always what it holds.
            _ if !matches!(error.field, Field::Media | Field::Conflict | Field::Stale) => "does not fit".to_owned(),
            _ if error.field == Field::Conflict => "good copies differ".to_owned(),
            _ if error.field == Field::Stale => "an older copy is kept here; --accept-stale takes it".to_owned(),
            _ => "cannot be read".to_owned(),
        };
        let leg = error.leg.as_ref().map_or(String::new(), |leg| format!(" on {leg}"));
        let repaired = if error.repaired { ", repaired" } else { "" };
        say(&format!("block {}{leg}: {}: {what}{repaired}", error.lba, error.field.words()))?;
    }
    if unlisted > 0 {
        say(&format!("and {unlisted} more damaged blocks"))?;
    }
    let bad = report.errors.len() as u64 + unlisted;
    if quiet && bad == 0 {
        return Ok(());
    }
    let rate = report.bytes_verified as f64 / report.elapsed_s.max(1e-9) / 1e6;
    let repaired = report.errors.iter().filter(|error| error.repaired).count();
    let state = match (bad, repaired) {
        (0, _) => "clean".to_owned(),
        (bad, 0) => format!("{bad} damaged"),
        (bad, repaired) => format!("{bad} damaged, {repaired} repaired"),
    };
    say(&format!(
        "{}: {} blocks verified in {:.2} s ({rate:.0} MB/s): {state}",
        report.target, report.blocks_verified, report.elapsed_s
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_units::Lba;

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
