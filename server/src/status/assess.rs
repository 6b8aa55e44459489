//! The health of a device: one word, one sentence, and advice.

use sealblock_block::WhyOlder;
use sealblock_layers_mirror::MirrorState;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_stack::quantity::count;
use sealblock_stack::shell_word;
use sealblock_units::ByteCount;

use super::connections::LostConnection;
use super::damage::DamageStatus;
use super::files::FileError;
use super::health::{Checked, Health};
use super::mirror::{MirrorStatus, ReplicaStatus};
use super::scrub::ScrubStatus;
use super::server::{DeviceSnapshot, FailingStatus};
use crate::dates::date;

/// What becomes of lost copies of metadata.
const REWRITTEN: &str = "a volume that is open for writing rewrites them a minute after they were found";

/// The health of a device.
pub struct Verdict {
    /// As one word.
    pub health: Health,
    /// As one sentence.
    pub summary: String,
    /// What to do about the worst finding.
    pub advice: Option<String>,
}

/// One finding.
struct Finding {
    health: Health,
    words: String,
    advice: String,
}

/// The health of the device `name` on a server that was started at `started_unix_s`.
pub fn assess(name: &str, seen: &DeviceSnapshot, started_unix_s: u64) -> Verdict {
    let mut findings = Vec::new();
    findings.extend(damage(name, seen, started_unix_s));
    findings.extend(seen.mirrors.iter().flat_map(|mirror| mirror_findings(name, &mirror.target, &mirror.status)));
    findings.extend(paths(seen));
    findings.extend(lost_connections(seen));
    findings.extend(seen.file_errors.iter().map(file_finding));
    findings.extend(failing(seen));
    findings.extend(unchecked(name, seen));
    // The sort is stable: among findings of one severity, the one found first comes first.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.health));
    let Some(worst) = findings.first() else {
        return Verdict { health: Health::Healthy, summary: healthy_text(seen), advice: None };
    };
    let words: Vec<&str> = findings.iter().map(|finding| finding.words.as_str()).collect();
    Verdict { health: worst.health, summary: words.join("; "), advice: Some(worst.advice.clone()) }
}

fn healthy_text(seen: &DeviceSnapshot) -> String {
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

fn damage(name: &str, seen: &DeviceSnapshot, started_unix_s: u64) -> Option<Finding> {
    let finding = |words: String, advice: String| Some(Finding { health: Health::Damaged, words, advice });
    if seen.damage.has_any() && (seen.unresponsive.is_none() || seen.damage.blocks > 0) {
        let advice = match seen.damage.is_only_lost() {
            true => format!("`sealblock scrub start {name}` checks all blocks"),
            false => format!(
                "restore these blocks from a backup, or `sealblock scrub start {name}`, which repairs from another replica where there is one"
            ),
        };
        return Some(Finding { health: seen.damage.health(), words: seen.damage.to_text(), advice });
    }
    // Bad blocks that are kept but no longer listed have been rewritten. If nothing is kept, only the number of bad
    // blocks is known of runs before the start of this server.
    if seen.damage.not_saved.is_empty() {
        return None;
    }
    let run = seen.scrub.as_ref().and_then(ScrubStatus::last_run).filter(|run| run.started_unix_s <= started_unix_s)?;
    if run.unrepaired == 0 {
        return None;
    }
    let (blocks, when) = (count(run.unrepaired, "bad block"), date(run.started_unix_s));
    let words = format!("the scrub started {when} found {blocks} that could not be repaired");
    finding(words, format!("`sealblock scrub start {name}` locates them"))
}

fn mirror_findings(name: &str, target: &str, mirror: &MirrorStatus) -> Vec<Finding> {
    let finding = |health, words, advice| Finding { health, words, advice };
    let older = mirror.replicas.iter().filter(|replica| replica.stale_blocks > 0).map(|replica| {
        let (blocks, name) = (count(replica.stale_blocks, "block"), &replica.name);
        let words = format!("{blocks} have only an older copy, on {name}");
        let advice =
            format!("`sealblock mirror accept-stale {} {}`, or rewrite them", shell_word(target), shell_word(name));
        finding(Health::Damaged, words, advice)
    });
    let mut findings: Vec<Finding> = older.collect();
    if mirror.state == MirrorState::Optimal.as_str() {
        return findings;
    }
    if mirror.state == MirrorState::Unlabelled.as_str() {
        let words = format!("{target} is not a mirror yet: no device has a mirror label");
        let advice = "`sealblock mirror create` creates it".to_owned();
        findings.push(finding(Health::Incomplete, words, advice));
        return findings;
    }
    let is_well = |replica: &ReplicaStatus| {
        let is_sound = replica.file_errors.is_empty() && !replica.has_damage() && replica.lost_metadata.is_empty();
        replica.is(ReplicaState::InSync) && replica.online && is_sound
    };
    let is_ailing = |replica: &&ReplicaStatus| !is_well(replica);
    let ailing: Vec<&ReplicaStatus> = mirror.replicas.iter().filter(is_ailing).collect();
    let words = match (mirror.state.as_str(), ailing.is_empty()) {
        (_, true) => format!("{target} is {}: a crash may have left its members different", mirror.state),
        (state, false) => {
            let replicas: Vec<String> = ailing.iter().map(|replica| replica_text(replica)).collect();
            format!("{target} is {state}: {}", replicas.join(", "))
        }
    };
    let is_lost = |replica: &&&ReplicaStatus| {
        replica.is(ReplicaState::OutOfSync) || !replica.online || !replica.file_errors.is_empty()
    };
    let advice = match ailing.iter().find(|replica| !replica.is(ReplicaState::Resyncing) && is_lost(replica)) {
        Some(replica) => {
            format!("if it stays offline, `sealblock mirror replace {name} {} NEW`", shell_word(&replica.name))
        }
        None if ailing.iter().filter_map(|replica| replica.damage.as_ref()).any(DamageStatus::is_only_lost) => {
            format!("`sealblock scrub start {name}` checks all blocks")
        }
        None if ailing.iter().any(|replica| replica.has_damage()) => {
            format!("`sealblock scrub start {name}` repairs them from another replica")
        }
        None if ailing.iter().any(|replica| !replica.lost_metadata.is_empty()) => REWRITTEN.to_owned(),
        // Only an opening for writing compares replicas.
        None if mirror.nosync_bytes > 0 => format!(
            "wait; `sealblock mirror status {name}` shows the progress. If it is served read-only, serve it for writing"
        ),
        None => format!("wait; `sealblock mirror status {name}` shows the progress"),
    };
    findings.push(finding(Health::Degraded, words, advice));
    findings
}

fn replica_text(replica: &ReplicaStatus) -> String {
    let name = &replica.name;
    let up_to = match replica.out_of_sync_bytes {
        0 => String::new(),
        bytes => format!(": up to {}", ByteCount::new(bytes)),
    };
    if let Some(file) = replica.file_errors.first().filter(|_| replica.online) {
        let what = match file.error.as_str() {
            "cut_off" => "was truncated",
            "replaced" => "was replaced",
            _ => "is gone",
        };
        format!("the file of {name} {what}")
    } else if let Some(damage) = replica.damage.as_ref().filter(|_| replica.online && replica.has_damage()) {
        match damage.is_only_lost() {
            true => damage.to_text(),
            false => format!("on {name} {}", damage.to_text()),
        }
    } else if let Some(lost) =
        replica.lost_metadata.first().filter(|_| replica.is(ReplicaState::InSync) && replica.online)
    {
        format!("of {name} {lost}")
    } else if replica.is(ReplicaState::Resyncing) {
        format!("{name} is resyncing{up_to}")
    } else if replica.is(ReplicaState::OutOfSync) && replica.online {
        format!("{name} is out of sync{up_to}")
    } else {
        format!("{name} is offline")
    }
}

fn paths(seen: &DeviceSnapshot) -> Option<Finding> {
    let lost: Vec<&str> = seen.paths.iter().filter(|path| !path.live).map(|path| path.path.as_str()).collect();
    let words = match (lost.len(), seen.paths.len()) {
        (0, _) => return None,
        (none, all) if none == all => {
            format!("none of its {} is live: requests wait until one is back", count(all as u64, "path"))
        }
        (1, all) => format!("1 path of {all} is lost: {}", lost[0]),
        (many, all) => format!("{many} paths of {all} are lost: {}", lost.join(", ")),
    };
    let advice = "check the network and the servers of the paths; paths reconnect automatically".to_owned();
    Some(Finding { health: Health::Degraded, words, advice })
}

fn lost_connections(seen: &DeviceSnapshot) -> Option<Finding> {
    let words: Vec<String> = seen.lost_connections.iter().map(LostConnection::to_text).collect();
    let advice = match seen.lost_connections.iter().all(|lost| lost.reconnecting) {
        true => "check the network and the other server; the connection is set up again automatically",
        false => "check the network and the other server, then restart this server",
    };
    let finding = || Finding { health: Health::Degraded, words: words.join("; "), advice: advice.to_owned() };
    (!words.is_empty()).then(finding)
}

fn file_finding(file: &FileError) -> Finding {
    let health = file.health();
    let advice = match health {
        Health::Damaged => "use another copy of the data, or `sealblock rescue` for the rest".to_owned(),
        _ => "copy the data elsewhere before the server exits".to_owned(),
    };
    Finding { health, words: file.to_text(), advice }
}

fn failing(seen: &DeviceSnapshot) -> Vec<Finding> {
    let finding = |one: &FailingStatus| Finding {
        health: Health::Degraded,
        words: format!("{} fail since {}: {}", one.requests, date(one.since_unix_s), one.reason),
        advice: "check free space, cabling and the kernel log".to_owned(),
    };
    seen.failing.iter().map(finding).collect()
}

fn unchecked(name: &str, seen: &DeviceSnapshot) -> Vec<Finding> {
    let finding = |words: String, advice: String| Finding { health: Health::Incomplete, words, advice };
    let mut findings = Vec::new();
    if let Some(why) = &seen.unresponsive {
        findings.push(finding(format!("it does not respond: {why}"), "ask again in a moment".to_owned()));
    }
    let again = format!("`sealblock scrub start {name}`");
    if let Some(error) = seen.scrub.as_ref().and_then(|scrub| scrub.error.as_ref()) {
        findings.push(finding(format!("the scrub is suspended: {error}"), "it retries automatically".to_owned()));
    }
    if let Some(run) = seen.scrub.as_ref().and_then(ScrubStatus::last_run).filter(|run| run.unchecked > 0) {
        let blocks = count(run.unchecked, "block");
        let words = format!("the scrub started {} could not check every copy of {blocks}", date(run.started_unix_s));
        findings.push(finding(words, again));
    }
    let first_of = |lost: &[String]| match lost {
        [] => None,
        [one] => Some(one.clone()),
        [first, others @ ..] => Some(format!("{first}, and {} more", others.len())),
    };
    let of_older = match seen.scrub.as_ref().and_then(ScrubStatus::why_older) {
        Some(WhyOlder::OutOfSync) => "use mirror:A,B with all replicas of its mirror, which resyncs it".to_owned(),
        _ => format!("`sealblock info {name}`"),
    };
    findings.extend(first_of(&seen.lost_metadata).map(|words| finding(words, of_older)));
    findings.extend(first_of(&seen.lost_copies).map(|words| finding(words, REWRITTEN.to_owned())));
    findings
}

/// The health of a server with these devices: as a word and as a sentence.
pub fn overall_health(devices: &[Health]) -> (Health, String) {
    let worst = devices.iter().copied().max().unwrap_or_default();
    let all = devices.len();
    let words = match (all, worst) {
        (0, _) => "nothing is served".to_owned(),
        (1, _) => format!("the device is {}", worst.as_str()),
        (_, Health::Healthy) => format!("all {all} devices are healthy"),
        _ => {
            let of = |health: Health| devices.iter().filter(|device| **device == health).count();
            let ailing = [Health::Damaged, Health::Degraded, Health::Incomplete].map(|health| (of(health), health));
            let words = |(count, health): &(usize, Health)| {
                format!("{count} {} {}", if *count == 1 { "is" } else { "are" }, health.as_str())
            };
            let words: Vec<String> = ailing.iter().filter(|(count, _)| *count > 0).map(words).collect();
            format!("of {all} devices {}", words.join(", "))
        }
    };
    (worst, words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::damage::RunOfDamage;
    use crate::status::server::{NamedMirror, PathStatus};

    const STARTED: u64 = 1_000_000;

    fn seen() -> DeviceSnapshot {
        DeviceSnapshot {
            damage: DamageStatus { complete: true, ..DamageStatus::default() },
            ..DeviceSnapshot::default()
        }
    }

    fn scrub(started_unix_s: u64, unrepaired: u64, unchecked: u64) -> ScrubStatus {
        let run = serde_json::json!({"started_unix_s": started_unix_s, "ended_unix_s": started_unix_s, "from": 0, "blocks": 9,
            "bad": unrepaired, "repaired": 0, "unrepaired": unrepaired, "unchecked": unchecked, "result": "finished"});
        let status = serde_json::json!({"target": "v", "server_pid": 1, "state": "idle", "yielding": false, "position": 0,
            "blocks": 9, "block_size": 512, "percent": 0.0, "rate": null, "speed": null, "left_s": null, "every_s": null,
            "next_unix_s": null, "completed_unix_s": started_unix_s, "checked": "seals", "run": null, "runs": [run],
            "saved": "on_disk", "saved_why": null, "error": null});
        serde_json::from_value(status).unwrap()
    }

    fn replica(name: &str, state: &str, online: bool, out_of_sync_bytes: u64) -> ReplicaStatus {
        ReplicaStatus {
            name: name.to_owned(),
            state: state.to_owned(),
            online,
            has_label_room: true,
            last_error: None,
            out_of_sync_bytes,
            resynced_bytes: 0,
            repaired_blocks: 0,
            stale_blocks: 0,
            failures: 0,
            lost_connections: Vec::new(),
            file_errors: Vec::new(),
            lost_metadata: Vec::new(),
            damage: None,
        }
    }

    fn mirror(state: &str, replicas: Vec<ReplicaStatus>) -> DeviceSnapshot {
        let status = MirrorStatus {
            uuid: None,
            name: None,
            state: state.to_owned(),
            region_bytes: 65536,
            dirty_bytes: 0,
            max_dirty_bytes: None,
            nosync_bytes: 0,
            may_be_older: None,
            lost_blocks: 0,
            replicas,
        };
        DeviceSnapshot { mirrors: vec![NamedMirror { target: "mirror:a,b".to_owned(), status }], ..seen() }
    }

    #[track_caller]
    fn is(seen: &DeviceSnapshot, health: Health, words: &str) {
        let verdict = assess("v", seen, STARTED);
        assert_eq!((verdict.health, verdict.summary.as_str()), (health, words));
        assert_eq!(verdict.advice.is_some(), health != Health::Healthy, "what is wrong has advice");
    }

    #[test]
    fn nothing_wrong_is_healthy() {
        is(&seen(), Health::Healthy, "no damage is known");
        let replicas = vec![replica("a", "in_sync", true, 0), replica("b", "in_sync", true, 0)];
        is(&mirror("optimal", replicas), Health::Healthy, "no damage is known");
    }

    #[test]
    fn bad_blocks_are_named_and_those_that_may_be_bad_are_no_damage() {
        let run = |first, last| RunOfDamage { first, last, field: "guard".to_owned() };
        let damage = |blocks, most, runs: &[RunOfDamage]| DeviceSnapshot {
            damage: DamageStatus {
                blocks,
                blocks_at_most: most,
                complete: blocks == most,
                runs: runs.to_vec(),
                ..DamageStatus::default()
            },
            ..seen()
        };
        is(&damage(1, 1, &[run(9, 9)]), Health::Damaged, "1 block is bad (9)");
        is(&damage(3, 3, &[run(5, 6), run(9, 9)]), Health::Damaged, "3 blocks are bad (5..6, 9)");
        is(&damage(2, 9, &[run(1, 9)]), Health::Damaged, "at least 2 blocks, at most 9, are bad (1..9)");
        is(&damage(0, 9, &[run(1, 9)]), Health::Incomplete, "up to 9 blocks may be bad (1..9)");
    }

    #[test]
    fn what_a_scrub_met_before_the_start_is_not_forgotten() {
        let kept = |started, bad, unchecked| DeviceSnapshot { scrub: Some(scrub(started, bad, unchecked)), ..seen() };
        assert_eq!(assess("v", &kept(STARTED - 10, 2, 0), STARTED).health, Health::Healthy, "its list says otherwise");
        let of = |started, bad, unchecked| {
            let seen = kept(started, bad, unchecked);
            DeviceSnapshot { damage: DamageStatus { not_saved: vec!["v".to_owned()], ..seen.damage.clone() }, ..seen }
        };
        let before = assess("v", &of(STARTED - 10, 2, 0), STARTED);
        assert_eq!(before.health, Health::Damaged);
        assert!(before.summary.ends_with("found 2 bad blocks that could not be repaired"), "{}", before.summary);
        // Bad blocks found by a run of this server are listed until they are rewritten.
        assert_eq!(assess("v", &of(STARTED + 10, 2, 0), STARTED).health, Health::Healthy);
        assert_eq!(assess("v", &of(STARTED + 10, 0, 3), STARTED).health, Health::Incomplete);
        assert_eq!(assess("v", &of(STARTED - 10, 0, 0), STARTED).health, Health::Healthy);
    }

    #[test]
    fn copies_and_paths_that_are_missing_degrade() {
        let in_sync = || replica("a", "in_sync", true, 0);
        let of = |other| mirror("degraded", vec![in_sync(), other]);
        is(&of(replica("b", "out_of_sync", false, 0)), Health::Degraded, "mirror:a,b is degraded: b is offline");
        let words = "mirror:a,b is degraded: b is resyncing: up to 1 MiB";
        is(&of(replica("b", "resyncing", true, 1 << 20)), Health::Degraded, words);
        let words = "mirror:a,b is degraded: b is out of sync: up to 64 KiB";
        is(&of(replica("b", "out_of_sync", true, 64 << 10)), Health::Degraded, words);
        let without = ReplicaStatus {
            lost_metadata: vec!["a superblock is lost".to_owned()],
            ..replica("b", "in_sync", true, 0)
        };
        is(&of(without), Health::Degraded, "mirror:a,b is degraded: of b a superblock is lost");
        is(
            &mirror("unlabelled", vec![replica("a", "unlabelled", true, 0)]),
            Health::Incomplete,
            "mirror:a,b is not a mirror yet: no device has a mirror label",
        );
        let words = "mirror:a,b is degraded: a crash may have left its members different";
        is(&mirror("degraded", vec![in_sync()]), Health::Degraded, words);
        let file =
            FileError { path: "/d/b".to_owned(), error: "gone".to_owned(), left_bytes: None, length_bytes: None };
        let lost = ReplicaStatus { file_errors: vec![file], ..replica("b", "in_sync", true, 0) };
        is(&of(lost), Health::Degraded, "mirror:a,b is degraded: the file of b is gone");
        let run = RunOfDamage { first: 7, last: 7, field: "guard".to_owned() };
        let known =
            DamageStatus { blocks: 1, blocks_at_most: 1, complete: true, runs: vec![run], ..Default::default() };
        let bad = ReplicaStatus { damage: Some(known), ..replica("b", "in_sync", true, 0) };
        is(&of(bad), Health::Degraded, "mirror:a,b is degraded: on b 1 block is bad (7)");
        let older = ReplicaStatus { stale_blocks: 2, ..in_sync() };
        is(&mirror("optimal", vec![older]), Health::Damaged, "2 blocks have only an older copy, on a");
        let path = |live| PathStatus { path: "p".to_owned(), live, error: None, failures: 0 };
        let of = |live: &[bool]| DeviceSnapshot { paths: live.iter().map(|live| path(*live)).collect(), ..seen() };
        is(&of(&[true, false]), Health::Degraded, "1 path of 2 is lost: p");
        is(&of(&[false, true, false]), Health::Degraded, "2 paths of 3 are lost: p, p");
        let words = "none of its 2 paths is live: requests wait until one is back";
        is(&of(&[false, false]), Health::Degraded, words);
    }

    #[test]
    fn a_lost_connection_degrades_until_it_is_back() {
        let of = |reconnecting| DeviceSnapshot {
            lost_connections: vec![LostConnection {
                target: "nbd://h/v".to_owned(),
                since_unix_s: 0,
                reason: "closed".to_owned(),
                reconnecting,
            }],
            ..seen()
        };
        for (reconnecting, state, advice) in
            [(true, ", reconnecting: closed", "automatically"), (false, ", no longer reconnecting: closed", "server")]
        {
            let verdict = assess("v", &of(reconnecting), STARTED);
            assert_eq!(verdict.health, Health::Degraded);
            let words = verdict.summary;
            assert!(words.starts_with("connection to nbd://h/v lost since ") && words.ends_with(state), "{words}");
            assert!(verdict.advice.unwrap().ends_with(advice));
        }
    }

    #[test]
    fn files_that_were_deleted_or_cut_off_are_told() {
        let of = |error: &str, lengths: Option<(u64, u64)>| {
            let (left_bytes, length_bytes) = lengths.unzip();
            let path = "/d/v".to_owned();
            DeviceSnapshot {
                file_errors: vec![FileError { path, error: error.to_owned(), left_bytes, length_bytes }],
                ..seen()
            }
        };
        is(&of("gone", None), Health::Degraded, "/d/v was deleted or renamed while in use");
        let words = "/d/v was replaced: the file in use has no other name";
        is(&of("replaced", None), Health::Degraded, words);
        let words = "/d/v was truncated to 64 KiB of 2 MiB";
        is(&of("cut_off", Some((64 << 10, 2 << 20))), Health::Damaged, words);
    }

    #[test]
    fn the_worst_comes_first_and_the_rest_is_said() {
        let failing = FailingStatus {
            requests: "writes".to_owned(),
            reason: "full".to_owned(),
            by: String::new(),
            since_unix_s: 0,
            last_unix_s: 0,
            times: 1,
        };
        let all = DeviceSnapshot {
            failing: vec![failing],
            damage: DamageStatus { blocks: 1, complete: true, ..DamageStatus::default() },
            lost_metadata: vec!["2 sectors".to_owned()],
            ..seen()
        };
        is(&DeviceSnapshot { lost_copies: vec!["a label".to_owned()], ..seen() }, Health::Incomplete, "a label");
        let two = vec!["a label".to_owned(), "a superblock".to_owned()];
        is(&DeviceSnapshot { lost_copies: two, ..seen() }, Health::Incomplete, "a label, and 1 more");
        let verdict = assess("v", &all, STARTED);
        assert_eq!(verdict.health, Health::Damaged);
        let parts: Vec<_> = verdict.summary.split("; ").collect();
        assert!(parts[0].starts_with("1 block is bad") && parts[1].starts_with("writes fail since"), "{parts:?}");
        assert_eq!(parts[2], "2 sectors");
        let unresponsive = DeviceSnapshot { unresponsive: Some("gone".to_owned()), ..DeviceSnapshot::default() };
        is(&unresponsive, Health::Incomplete, "it does not respond: gone");
    }

    #[test]
    fn a_server_is_as_well_as_its_worst_device() {
        use Health::{Damaged, Degraded, Healthy};
        for (devices, worst, words) in [
            (&[][..], Healthy, "nothing is served"),
            (&[Healthy], Healthy, "the device is healthy"),
            (&[Damaged], Damaged, "the device is damaged"),
            (&[Healthy, Healthy], Healthy, "all 2 devices are healthy"),
            (&[Healthy, Damaged, Degraded, Degraded], Damaged, "of 4 devices 1 is damaged, 2 are degraded"),
        ] {
            assert_eq!(overall_health(devices), (worst, words.to_owned()));
        }
    }
}
