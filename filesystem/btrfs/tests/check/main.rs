//! The consistency check: a filesystem that the kernel filled is clean, and for each rule a change that breaks it is
//! found for the right reason. `btrfs check` finds the same changes, apart from those of which a case says otherwise.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these the tests print what is missing and are
//! skipped.

mod cases;
mod image;
mod leaves;

use std::collections::BTreeSet;

use sealblock_btrfs::check::{Report, Rule, Verdict};

use cases::{CASES, HOLES, Program};
use image::Image;

fn rules(report: &Report) -> BTreeSet<Rule> {
    report.findings.iter().map(|finding| finding.rule).collect()
}

fn list(report: &Report) -> String {
    report.findings.iter().map(|finding| format!("\n    {}: {finding}", finding.rule)).collect()
}

/// Applies each case to a filesystem, which is clean before and afterwards.
fn try_cases(image: &Image, cases: &[cases::Case]) {
    let assert_clean = |what: &str| {
        let report = image.check();
        assert_eq!(report.verdict(), Verdict::Clean, "{what}: {:?}{}", report.not_checked, list(&report));
    };
    assert_clean("before");
    assert_eq!(image.program_finds(), [false, false]);
    let mut wrong = Vec::new();
    for case in cases {
        (case.change)(image);
        let report = image.check();
        let expected: BTreeSet<Rule> = case.rules.iter().copied().collect();
        if rules(&report) != expected {
            wrong.push(format!("{}: expected {expected:?}, found:{}", case.name, list(&report)));
        }
        let finds = image.program_finds();
        let agreed = match case.program {
            Program::Both => [true, true],
            Program::Original => [true, false],
            Program::LowMemory => [false, true],
            Program::Neither => [false, false],
        };
        if finds != agreed {
            wrong.push(format!("{}: btrfs check finds it in its modes: {finds:?}", case.name));
        }
        image.restore();
    }
    assert_clean("afterwards");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_broken_rule_is_found_for_its_reason() {
    if let Some(image) = Image::make(&[]) {
        try_cases(&image, CASES);
    }
}

#[test]
fn holes_without_items_are_found_where_they_need_items() {
    if let Some(image) = Image::make(&["-O", "^no-holes"]) {
        try_cases(&image, HOLES);
    }
}

#[test]
fn every_rule_has_a_case() {
    let tested = CASES.iter().chain(HOLES).flat_map(|case| case.rules).chain(leaves::RULES).copied();
    let tested: BTreeSet<Rule> = tested.collect();
    let missing: Vec<Rule> = Rule::ALL.iter().copied().filter(|rule| !tested.contains(rule)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
