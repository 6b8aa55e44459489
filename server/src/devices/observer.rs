//! Logs failed client requests: each bad block once, and media that fail. It also tracks which kinds of requests fail
//! at present, because the last one of that kind failed for a reason in the device.
//!
//! Invariant: while nothing fails, a request that succeeds costs one relaxed load.
//!
//! Not logged here are the findings of a scrub, which logs them itself, and errors of the client, such as a wrong tag
//! in its request.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sealblock_block::{BadBlock, Error, ErrorKind, RequestKind};
use sealblock_exports_nvme_tcp::{DamageHandle, NamespaceState};
use sealblock_layers_cross_core::{Observer, RequestInfo};
use sealblock_runtime_reactor::now;
use sealblock_stack::TargetLabel;
use sealblock_units::Extent;

use crate::dates::unix_s;
use crate::devices::bad_runs::{bad_runs, blocks_text};
use crate::status::server::FailingStatus;

/// After a block was logged for a client, it is not logged again for this time, because hosts repeat failed requests in
/// smaller pieces.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// The number of logged blocks that are remembered. If there are more, all are forgotten, and some may be logged again.
const MAX_REPORTED: usize = 16_384;

/// The maximum number of characters of a reason that are kept.
const MAX_CHARACTERS: usize = 300;

/// Receives the results of a device's requests.
pub struct RequestObserver {
    target: TargetLabel,
    told: Mutex<HashMap<(u64, u64), Instant>>,
    reporters: ReportTargets,
}

/// Where failures are reported.
#[derive(Clone)]
pub struct ReportTargets {
    /// The namespace, for its damage list. Weak, because the end of a device waits for its owners.
    pub state: Weak<NamespaceState>,
    /// Used for good blocks, without an owner count that cores would share.
    pub damage: DamageHandle,
    /// The kinds of requests that fail at present.
    pub failing: Arc<Failing>,
}

impl ReportTargets {
    /// The targets for a device.
    pub fn to(state: &Arc<NamespaceState>) -> ReportTargets {
        ReportTargets { state: Arc::downgrade(state), damage: state.damage(), failing: Arc::default() }
    }
}

impl RequestObserver {
    /// The observer of a device.
    pub fn new(target: TargetLabel, reporters: ReportTargets) -> RequestObserver {
        RequestObserver { target, told: Mutex::default(), reporters }
    }

    /// Adds bad blocks that a client found to the damage list of the namespace; the NVMe export adds those of hosts
    /// itself.
    fn report(&self, client: &str, faults: &[BadBlock]) {
        if let Some(state) = self.reporters.state.upgrade().filter(|_| !is_nvme(client)) {
            state.report_damage(faults);
        }
    }

    fn log_damage(&self, client: &str, request: RequestInfo, faults: &[BadBlock]) {
        let runs = bad_runs(&self.unreported(client, faults), Some(&self.reporters.damage));
        for run in runs.iter().filter(|run| !run.is_made) {
            let (target, by) = (self.target.to_string(), by(client));
            let (blocks, field, during) =
                (blocks_text(run.first, run.last), run.fault.cause.as_str(), request.kind.name());
            tracing::warn!(target, blocks, field, by, during, "damage found");
        }
    }

    /// The bad blocks that were not recently logged for this client.
    fn unreported(&self, client: &str, faults: &[BadBlock]) -> Vec<BadBlock> {
        let mut hasher = DefaultHasher::new();
        client.hash(&mut hasher);
        let (client, now) = (hasher.finish(), now());
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() + faults.len() > MAX_REPORTED {
            told.clear();
        }
        let mut is_news = |fault: &&BadBlock| {
            let before = told.insert((client, fault.lba.get()), now);
            before.is_none_or(|before| now.saturating_duration_since(before) >= REPEAT_INTERVAL)
        };
        faults.iter().filter(|fault| is_news(fault)).copied().collect()
    }
}

impl Observer for RequestObserver {
    fn succeeded(&self, client: &str, request: RequestInfo) {
        if let Some(extent) = request.extent.filter(|_| !is_nvme(client)) {
            self.reporters.damage.succeeded(request.kind, extent);
        }
        self.reporters.failing.succeeded(request.kind);
    }

    fn failed(&self, client: &str, request: RequestInfo, error: &Error) {
        let (target, by, during) = (self.target.to_string(), by(client), request.kind.name());
        let blocks = request.extent.map(to_text);
        match error.kind() {
            ErrorKind::Integrity(faults) => {
                self.report(client, faults.as_slice());
                self.log_damage(client, request, faults.as_slice());
            }
            ErrorKind::Media { reason } => {
                match request.extent.filter(|extent| request.kind == RequestKind::Read && extent.len() == 1) {
                    // The request has only one block, so this is the bad one.
                    Some(one) => self.report(client, &[BadBlock::media(one.start())]),
                    None => self.reporters.failing.failed(request.kind, &by, reason),
                }
                tracing::error!(target, blocks, by, during, reason, "the medium failed");
            }
            ErrorKind::NoSpace { reason } => {
                self.reporters.failing.failed(request.kind, &by, reason);
                tracing::error!(target, blocks, by, during, reason, "no space left on the medium");
            }
            ErrorKind::Unreachable { reason } => {
                self.reporters.failing.failed(request.kind, &by, reason);
                tracing::error!(target, blocks, by, during, reason, "the device is unreachable");
            }
            ErrorKind::MayBeOlder(why) => {
                self.reporters.failing.failed(request.kind, &by, &error.kind().to_string());
                tracing::error!(target, blocks, by, during, %why, "blocks may be older than what was written");
            }
            // Results such as a miscompare or an unexpected tag, and errors of the client: the client gets the status,
            // and they are logged at the debug level.
            ErrorKind::Expectation { .. }
            | ErrorKind::Miscompare { .. }
            | ErrorKind::ReadOnly
            | ErrorKind::Range { .. }
            | ErrorKind::Limit { .. }
            | ErrorKind::Absent(_) => {}
        }
    }
}

/// What fails at present on one device.
#[derive(Default)]
pub struct Failing {
    any: AtomicBool,
    by_kind: Mutex<[Option<FailingStatus>; 3]>,
}

/// Kinds of requests that fail and succeed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FailingKind {
    Reads,
    Writes,
    Flushes,
}

impl FailingKind {
    fn of(kind: RequestKind) -> FailingKind {
        match kind {
            RequestKind::Flush => FailingKind::Flushes,
            kind if kind.changes_blocks() || kind == RequestKind::WriteReserved => FailingKind::Writes,
            _ => FailingKind::Reads,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            FailingKind::Reads => "reads",
            FailingKind::Writes => "writes",
            FailingKind::Flushes => "flushes",
        }
    }
}

impl Failing {
    /// A request of this kind failed.
    pub fn failed(&self, kind: RequestKind, by: &str, reason: &str) {
        let (kind, now) = (FailingKind::of(kind), unix_s());
        let reason = reason.chars().take(MAX_CHARACTERS).collect();
        let mut by_kind = self.lock();
        let place = &mut by_kind[kind as usize];
        let (since_unix_s, times) = place.as_ref().map_or((now, 0), |before| (before.since_unix_s, before.times));
        *place = Some(FailingStatus {
            requests: kind.name().to_owned(),
            reason,
            by: by.to_owned(),
            since_unix_s,
            last_unix_s: now,
            times: times + 1,
        });
        self.any.store(true, Ordering::Relaxed);
    }

    /// A request of this kind succeeded.
    pub fn succeeded(&self, kind: RequestKind) {
        if self.any.load(Ordering::Relaxed) {
            let mut by_kind = self.lock();
            by_kind[FailingKind::of(kind) as usize] = None;
            self.any.store(by_kind.iter().any(Option::is_some), Ordering::Relaxed);
        }
    }

    /// What fails at present.
    pub fn now(&self) -> Vec<FailingStatus> {
        self.lock().iter().flatten().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, [Option<FailingStatus>; 3]> {
        self.by_kind.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_nvme(client: &str) -> bool {
    client.starts_with("nvme ")
}

/// The client, as text for people. Exports name their clients by their protocol and more: `nvme NQN HOSTID`, `nbd EXPORT`,
/// `ublk N`.
fn by(client: &str) -> String {
    match client.split_once(' ') {
        Some(("nvme", host)) => match host.split_once(' ') {
            Some(("", id)) => format!("the host {id}"),
            Some((nqn, _)) => format!("the host {nqn}"),
            None => format!("the host {host}"),
        },
        Some(("nbd", export)) => format!("an NBD client of {export}"),
        Some(("ublk", number)) => format!("the block device ublkb{number}"),
        _ => client.to_owned(),
    }
}

fn to_text(extent: Extent) -> String {
    blocks_text(extent.start().get(), extent.last().get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_units::Lba;

    fn media(lba: u64) -> BadBlock {
        BadBlock::media(Lba::new(lba))
    }

    #[test]
    fn blocks_are_named_as_ranges() {
        assert_eq!((blocks_text(3, 5), blocks_text(6, 6)), ("3..5".to_owned(), "6".to_owned()));
    }

    #[test]
    fn a_client_is_told_of_a_block_once_and_another_client_too() {
        let witness =
            RequestObserver::new(TargetLabel::of(&"mem:1MiB".parse().unwrap()), ReportTargets::to(&Arc::default()));
        assert_eq!(witness.unreported("nbd a", &[media(3), media(4)]).len(), 2);
        assert_eq!(witness.unreported("nbd a", &[media(4), media(5)]), [media(5)]);
        assert_eq!(witness.unreported("nvme h 1", &[media(4)]), [media(4)]);
        let many: Vec<BadBlock> = (0..MAX_REPORTED as u64).map(media).collect();
        assert_eq!(witness.unreported("nbd a", &many).len(), MAX_REPORTED, "what is known is bounded");
    }

    /// The counterpart of a bad block: the client gets its status, but nothing is logged.
    #[test]
    fn a_tag_that_a_client_did_not_expect_is_neither_told_nor_counted() {
        let state = Arc::default();
        let witness = RequestObserver::new(TargetLabel::of(&"mem:1MiB".parse().unwrap()), ReportTargets::to(&state));
        let one = sealblock_units::Extent::one(Lba::new(3));
        let info = RequestInfo { kind: RequestKind::Read, extent: Some(one) };
        let field = sealblock_integrity::Field::AppTag;
        let unexpected = ErrorKind::Expectation { lba: Lba::new(3), field, expected: 1, actual: 2 };
        witness.failed("nbd a", info, &unexpected.into());
        assert_eq!((state.damage().runs().len(), witness.told.lock().unwrap().len()), (0, 0));
        assert!(witness.reporters.failing.now().is_empty());
        witness.failed("nbd a", info, &sealblock_block::BadBlocks::new(vec![media(3)]).unwrap().into());
        assert_eq!((state.damage().runs().len(), witness.told.lock().unwrap().len()), (1, 1));
    }

    #[test]
    fn what_clients_of_every_protocol_find_is_listed_and_what_nvme_hosts_find_by_their_export() {
        let one = sealblock_units::Extent::one(Lba::new(3));
        let info = RequestInfo { kind: RequestKind::Read, extent: Some(one) };
        for (client, listed) in [("nbd a", 1), ("ublk 0", 1), ("nvme h 1", 0)] {
            let state = Arc::default();
            let witness =
                RequestObserver::new(TargetLabel::of(&"mem:1MiB".parse().unwrap()), ReportTargets::to(&state));
            witness.failed(client, info, &sealblock_block::BadBlocks::new(vec![media(3)]).unwrap().into());
            assert_eq!(state.damage().runs().len(), listed, "{client}");
        }
    }

    #[test]
    fn clients_have_names_for_people() {
        assert_eq!(by("nvme nqn.2026-11.org.example:h 00ff"), "the host nqn.2026-11.org.example:h");
        assert_eq!(by("nvme  00ff"), "the host 00ff");
        assert_eq!(by("nbd photos"), "an NBD client of photos");
        assert_eq!(by("ublk 3"), "the block device ublkb3");
    }

    #[test]
    fn what_fails_is_counted_until_one_of_its_kind_succeeds() {
        let failing = Failing::default();
        failing.failed(RequestKind::Write, "a", "full");
        failing.failed(RequestKind::Discard, "b", &"x".repeat(10_000));
        failing.failed(RequestKind::Flush, "a", "gone");
        let now = failing.now();
        assert_eq!((now.len(), now[0].times, now[0].requests.as_str(), now[0].by.as_str()), (2, 2, "writes", "b"));
        assert_eq!(now[0].reason.len(), MAX_CHARACTERS);
        failing.succeeded(RequestKind::Read);
        assert_eq!(failing.now().len(), 2, "reads are another kind");
        failing.succeeded(RequestKind::WriteZeroes);
        assert_eq!(failing.now().iter().map(|one| one.requests.as_str()).collect::<Vec<_>>(), ["flushes"]);
        failing.succeeded(RequestKind::Flush);
        assert!(failing.now().is_empty() && !failing.any.load(Ordering::Relaxed));
    }
}
