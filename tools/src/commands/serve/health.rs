//! What is to be said of a device in one sentence, and what to do about it.

use crate::commands::scrub::show::date;
use crate::control::legs::{LegStatus, MirrorStatus};
use crate::control::server::{DamageStatus, Health, Seen};
use crate::control::status::{RunStatus, ScrubStatus};
use crate::report::Checked;
use sealblock_layers_mirror::State;
use sealblock_units::ByteCount;

/// Runs of bad blocks that the sentence names.
const MOST_RUNS: usize = 4;

/// How well a device is.
pub struct Verdict {
    /// In a word.
    pub health: Health,
    /// In a sentence.
    pub summary: String,
    /// What to do about the worst.
    pub advice: Option<String>,
}

/// One thing that is wrong.
struct Finding {
    health: Health,
    words: String,
    advice: String,
}

/// Judges a device, by the name that commands have for it, of a server that was started then.
pub fn judge(name: &str, seen: &Seen, started_unix_s: u64) -> Verdict {
    let mut findings = Vec::new();
    findings.extend(damage(name, seen, started_unix_s));
    findings.extend(seen.mirrors.iter().flat_map(|mirror| of_mirror(name, &mirror.target, &mirror.status)));
    findings.extend(paths(seen));
    findings.extend(failing(seen));
    findings.extend(unchecked(name, seen));
    // Stable: what was found first is told first of what is as bad.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.health));
    let Some(worst) = findings.first() else {
        return Verdict { health: Health::Healthy, summary: good_words(seen), advice: None };
    };
    let words: Vec<&str> = findings.iter().map(|finding| finding.words.as_str()).collect();
    Verdict { health: worst.health, summary: words.join("; "), advice: Some(worst.advice.clone()) }
}

fn good_words(seen: &Seen) -> String {
    let Some(scrub) = &seen.scrub else { return "no damage is known".to_owned() };
    let seals = match scrub.checked {
        Checked::Seals => "",
        Checked::Readability => ", and its blocks have no seals to be checked against",
    };
    match scrub.completed_unix_s {
        Some(at) => format!("no damage is known{seals}; a scrub checked all blocks {}", date(at)),
        None => format!("no damage is known{seals}; no scrub has checked all blocks yet"),
    }
}

fn damage(name: &str, seen: &Seen, started_unix_s: u64) -> Option<Finding> {
    let finding = |words: String, advice: String| Some(Finding { health: Health::Damaged, words, advice });
    if seen.damage.blocks > 0 || !seen.damage.complete && seen.silent.is_none() {
        let advice =
            format!("write these blocks anew from another copy; `sealblock scrub start {name}` checks all of it");
        return finding(damage_words(&seen.damage), advice);
    }
    // What was met in this server's time and is not known any more was written anew since; of what was met before only the
    // number is left.
    let run = seen.scrub.as_ref().and_then(last_run).filter(|run| run.started_unix_s <= started_unix_s)?;
    if run.lost == 0 {
        return None;
    }
    let (blocks, when) = (counted(run.lost, "bad block"), date(run.started_unix_s));
    let words = format!("the scrub that began {when} met {blocks} that could not be repaired");
    finding(words, format!("`sealblock scrub start {name}` finds out where"))
}

fn damage_words(damage: &DamageStatus) -> String {
    let mut runs: Vec<String> = damage.runs.iter().take(MOST_RUNS).map(|run| blocks(run.first, run.last)).collect();
    if damage.runs.len() > MOST_RUNS || damage.unlisted > 0 {
        runs.push("and more".to_owned());
    }
    let least = if damage.complete { "" } else { "at least " };
    let are = if damage.blocks == 1 { "is" } else { "are" };
    format!("{least}{} {are} bad ({})", counted(damage.blocks, "block"), runs.join(", "))
}

fn of_mirror(name: &str, target: &str, mirror: &MirrorStatus) -> Vec<Finding> {
    let finding = |health, words, advice| Finding { health, words, advice };
    let older = mirror.legs.iter().filter(|leg| leg.stale_blocks > 0).map(|leg| {
        let words = format!("of {} only an older copy is left, on {}", counted(leg.stale_blocks, "block"), leg.leg);
        finding(
            Health::Damaged,
            words,
            format!("`sealblock mirror accept-stale {target} {}`, or write them anew", leg.leg),
        )
    });
    let mut findings: Vec<Finding> = older.collect();
    if mirror.state == State::Optimal.as_str() {
        return findings;
    }
    let ailing: Vec<&LegStatus> = mirror.legs.iter().filter(|leg| !(leg.standing == "current" && leg.here)).collect();
    let words = match (mirror.state.as_str(), ailing.is_empty()) {
        (_, true) => format!("{target} is {}: a crash may have left its members different", mirror.state),
        (state, false) => {
            let legs: Vec<String> = ailing.iter().map(|leg| leg_words(leg)).collect();
            format!("{target} is {state}: {}", legs.join(", "))
        }
    };
    let advice = match ailing.iter().find(|leg| leg.standing == "missing" || !leg.here) {
        Some(leg) => format!("`sealblock mirror replace {name} {} NEW`, if it does not come back", leg.leg),
        None => format!("wait; `sealblock mirror status {name}` tells how far it is"),
    };
    findings.push(finding(Health::Degraded, words, advice));
    findings
}

fn leg_words(leg: &LegStatus) -> String {
    let missed = match leg.missed_bytes {
        0 => String::new(),
        bytes => format!(", {} at most to go", ByteCount::new(bytes)),
    };
    match (leg.standing.as_str(), leg.here) {
        ("rebuilding", _) => format!("{} is being brought up to date{missed}", leg.leg),
        ("missing", true) => format!("{} is out of sync{missed}", leg.leg),
        _ => format!("{} is missing", leg.leg),
    }
}

fn paths(seen: &Seen) -> Option<Finding> {
    let lost: Vec<String> = seen.paths.iter().filter(|path| !path.live).map(|path| path.path.clone()).collect();
    (!lost.is_empty()).then(|| Finding {
        health: Health::Degraded,
        words: format!("{} of {} is lost: {}", counted(lost.len() as u64, "path"), seen.paths.len(), lost.join(", ")),
        advice: "look at the network and the servers behind the paths; they come back by themselves".to_owned(),
    })
}

fn failing(seen: &Seen) -> Vec<Finding> {
    let finding = |one: &crate::control::server::FailingStatus| Finding {
        health: Health::Degraded,
        words: format!("{} fail since {}: {}", one.requests, date(one.since_unix_s), one.reason),
        advice: "look at the medium: its space, its cables, its kernel log".to_owned(),
    };
    seen.failing.iter().map(finding).collect()
}

fn unchecked(name: &str, seen: &Seen) -> Vec<Finding> {
    let finding = |words: String, advice: String| Finding { health: Health::Incomplete, words, advice };
    let mut findings = Vec::new();
    if let Some(why) = &seen.silent {
        findings.push(finding(format!("it tells nothing of itself: {why}"), "ask again in a moment".to_owned()));
    }
    let again = format!("`sealblock scrub start {name}`");
    if let Some(trouble) = seen.scrub.as_ref().and_then(|scrub| scrub.trouble.as_ref()) {
        findings.push(finding(format!("the scrub cannot go on: {trouble}"), "it tries again by itself".to_owned()));
    }
    if let Some(run) = seen.scrub.as_ref().and_then(last_run).filter(|run| run.unchecked > 0) {
        let blocks = counted(run.unchecked, "block");
        let words = format!("the scrub that began {} could not check every copy of {blocks}", date(run.started_unix_s));
        findings.push(finding(words, again));
    }
    if let Some(first) = seen.lost_metadata.first() {
        let more = match seen.lost_metadata.len() {
            1 => String::new(),
            all => format!(", and {} more", all - 1),
        };
        findings
            .push(finding(format!("copies of metadata are lost: {first}{more}"), format!("`sealblock info {name}`")));
    }
    findings
}

/// The run under way, or without one the last.
fn last_run(scrub: &ScrubStatus) -> Option<&RunStatus> {
    scrub.run.as_ref().or(scrub.runs.last())
}

/// How well a server is that has these devices, in a word and a sentence.
pub fn of_all(devices: &[Health]) -> (Health, String) {
    let worst = devices.iter().copied().max().unwrap_or_default();
    let words = match (devices.len(), worst) {
        (0, _) => "nothing is served".to_owned(),
        (1, Health::Healthy) => "the device is healthy".to_owned(),
        (all, Health::Healthy) => format!("all {all} devices are healthy"),
        (all, _) => {
            let of = |health: Health| devices.iter().filter(|device| **device == health).count();
            let ailing = [Health::Damaged, Health::Degraded, Health::Incomplete].map(|health| (of(health), health));
            let ailing = ailing.iter().filter(|(count, _)| *count > 0);
            let words: Vec<String> = ailing.map(|(count, health)| format!("{count} {}", health.as_str())).collect();
            format!("of {}: {}", counted(all as u64, "device"), words.join(", "))
        }
    };
    (worst, words)
}

/// A number of things.
fn counted(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn blocks(first: u64, last: u64) -> String {
    if first == last { first.to_string() } else { format!("{first}..{last}") }
}
