//! Namespaces of the plan whose targets cannot be opened.
//!
//! Their NSIDs and export names stay reserved: the subsystem is served without them, and a client that connects to one
//! is refused and never gets another namespace. If the reason may be temporary, the target is retried with increasing
//! delays; if only the operator can remove it, it is retried at a reload.

use std::fmt;
use std::time::{Duration, Instant};

use futures_util::future::{Either, LocalBoxFuture, pending, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::{now, sleep_until, timeout};
use sealblock_stack::quantity::count;
use sealblock_stack::{Cause, StackError};

use crate::dates::{date, unix_s};
use crate::devices::{DeviceTable, ServedDevice};
use crate::events::{NotOpenInfo, OpenedInfo};
use crate::plan::NamespacePlan;
use crate::status::health::Health;
use crate::status::server::{DeviceSnapshot, DeviceStatus, ExportStatus, OpeningStatus};

/// The delay from the first failure to the next attempt.
const FIRST: Duration = Duration::from_secs(1);
/// The maximum delay between two attempts.
const LONGEST: Duration = Duration::from_secs(60);
/// How long the end of the server waits for targets that are being opened.
const SHUTDOWN_OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// A namespace whose target is not open.
pub struct Waiting {
    /// The subsystem.
    pub nqn: Nqn,
    /// The namespace of the plan.
    pub plan: NamespacePlan,
    failure: StackError,
    since_unix_s: u64,
    tries: u64,
    /// The next delay.
    delay: Duration,
    next: Next,
}

/// When it is retried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    At(Instant),
    /// An attempt is in progress.
    InProgress,
    /// At the next reload.
    Never,
}

/// The result of an attempt.
pub struct OpenAttempt {
    /// The subsystem.
    pub nqn: Nqn,
    /// The identifier of the namespace in it.
    pub nsid: u32,
    /// The device, or why it did not open.
    pub device: Result<ServedDevice, StackError>,
}

/// True if a retry can succeed without the operator: files and servers may appear, and another process may release a
/// file. A file of the wrong kind, or a damaged one, stays so.
fn may_pass(failure: &StackError) -> bool {
    let passes = matches!(failure.cause(), Cause::Unreachable | Cause::Refused | Cause::Io | Cause::Full);
    passes && !failure.is_lasting()
}

impl Waiting {
    /// A namespace that did not open. `before` is its state if it was not open before either.
    pub fn new(nqn: &Nqn, plan: &NamespacePlan, failure: StackError, before: Option<&Waiting>) -> Waiting {
        let mut waiting = Waiting {
            nqn: nqn.clone(),
            plan: plan.clone(),
            since_unix_s: before.map_or_else(unix_s, |before| before.since_unix_s),
            tries: before.map_or(0, |before| before.tries),
            delay: FIRST,
            next: Next::Never,
            failure,
        };
        waiting.wait();
        waiting
    }

    fn wait(&mut self) {
        self.tries += 1;
        // A file that has just appeared may still be incomplete.
        let goes_on = self.next == Next::InProgress && !self.failure.is_lasting();
        let again = may_pass(&self.failure) || goes_on;
        self.next = if again { Next::At(now() + self.delay) } else { Next::Never };
        self.delay = (self.delay * 2).min(LONGEST);
    }

    /// Why it is not open.
    pub fn failure(&self) -> &StackError {
        &self.failure
    }

    /// Logs that it is not open.
    pub fn report(&self) {
        tracing::warn!("{self}; serving the other targets");
    }

    /// An attempt failed. This is logged if the reason is new.
    pub fn failed(&mut self, failure: StackError) {
        let is_news = failure.in_short() != self.failure.in_short();
        self.failure = failure;
        self.wait();
        match is_news {
            true => self.report(),
            false => tracing::debug!("{self}; still serving only the other targets"),
        }
    }

    /// When it is to be retried, unless an attempt is in progress.
    pub fn due(&self) -> Option<Instant> {
        match self.next {
            Next::At(at) => Some(at),
            Next::InProgress | Next::Never => None,
        }
    }

    /// An attempt is in progress.
    pub fn begin(&mut self) {
        self.next = Next::InProgress;
    }

    /// True if it is this namespace.
    pub fn is(&self, nqn: &Nqn, nsid: u32) -> bool {
        self.nqn == *nqn && self.plan.nsid == nsid
    }

    /// True if it is this namespace, opened in the same way.
    pub fn is_for(&self, nqn: &Nqn, plan: &NamespacePlan) -> bool {
        let is_same = self.plan.access() == plan.access() && self.plan.usage == plan.usage;
        self.is(nqn, plan.nsid) && self.plan.target == plan.target && is_same
    }

    /// For the `ready` event.
    pub fn not_open_info(&self) -> NotOpenInfo {
        NotOpenInfo {
            nsid: self.plan.nsid,
            target: self.plan.target.to_string(),
            reason: self.failure.in_short(),
            retried: self.next != Next::Never,
        }
    }

    /// For the `opened` event.
    pub fn opened_info(&self, nbd: Option<String>) -> OpenedInfo {
        let target = self.plan.target.to_string();
        OpenedInfo { nqn: self.nqn.to_string(), nsid: self.plan.nsid, target, nbd, tries: self.tries + 1 }
    }

    /// For `status`.
    pub fn status(&self, exports: Vec<ExportStatus>) -> DeviceStatus {
        let retried = self.next != Next::Never;
        let then = if retried { "retrying" } else { "no automatic retry" };
        let summary = format!(
            "not open since {}: {}; tried {}, {then}",
            date(self.since_unix_s),
            self.failure.in_short(),
            count(self.tries, "time")
        );
        let usual = "check the target; SIGHUP makes the server retry at once";
        DeviceStatus {
            target: self.plan.target.to_string(),
            health: Health::Incomplete,
            summary,
            advice: Some(self.failure.advice().unwrap_or(usual).to_owned()),
            exports,
            opening: Some(OpeningStatus {
                reason: self.failure.in_short(),
                since_unix_s: self.since_unix_s,
                tries: self.tries,
                retried,
            }),
            seen: DeviceSnapshot { unresponsive: Some("not open".to_owned()), ..DeviceSnapshot::default() },
        }
    }
}

/// Namespaces of the plan whose targets are not open, and the attempts to open them.
pub struct Openings {
    waiting: Vec<Waiting>,
    tries: FuturesUnordered<LocalBoxFuture<'static, OpenAttempt>>,
    /// True before the first plan.
    is_new: bool,
}

impl Openings {
    /// The attempts of a server without a plan.
    pub fn new() -> Openings {
        Openings { waiting: Vec::new(), tries: FuturesUnordered::new(), is_new: true }
    }

    /// True before the first plan.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The namespaces that are not open.
    pub fn waiting(&self) -> &[Waiting] {
        &self.waiting
    }

    /// The namespace that an attempt was for, unless it is no longer in the plan.
    pub fn find(&mut self, nqn: &Nqn, nsid: u32) -> Option<&mut Waiting> {
        self.waiting.iter_mut().find(|waiting| waiting.is(nqn, nsid))
    }

    /// Takes out a namespace that is open now.
    pub fn remove(&mut self, nqn: &Nqn, nsid: u32) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| waiting.is(nqn, nsid))?;
        Some(self.waiting.remove(at))
    }

    /// A namespace that is served without its target, if this is allowed: at the start, or if it was not open before
    /// either. A reload adds all new namespaces or none.
    pub fn go_without(
        &self,
        strict: bool,
        nqn: &Nqn,
        plan: &NamespacePlan,
        failure: StackError,
    ) -> Result<Waiting, StackError> {
        let before = self.waiting.iter().find(|waiting| waiting.is_for(nqn, plan));
        // A usage error requires a change of the configuration.
        let may_be = !strict && failure.cause() != Cause::Usage && (self.is_new || before.is_some());
        if may_be { Ok(Waiting::new(nqn, plan, failure, before)) } else { Err(failure) }
    }

    /// Sets the namespaces without an open target, and logs those that are new.
    pub fn replace(&mut self, waiting: Vec<Waiting>) {
        for new in waiting.iter().filter(|new| !self.waiting.iter().any(|old| old.is_for(&new.nqn, &new.plan))) {
            new.report();
        }
        (self.waiting, self.is_new) = (waiting, false);
    }

    /// Waits for the next finished attempt to open a target; its result is for `Server::admit`. Cancel safe.
    pub async fn next_tried(&mut self, devices: &DeviceTable) -> OpenAttempt {
        loop {
            self.begin_due(devices);
            let due = self.waiting.iter().filter_map(Waiting::due).min();
            let timer = async {
                match due {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            let tried = async {
                match self.tries.next().await {
                    Some(tried) => tried,
                    None => pending().await,
                }
            };
            if let Either::Left((tried, _)) = select(std::pin::pin!(tried), std::pin::pin!(timer)).await {
                return tried;
            }
        }
    }

    fn begin_due(&mut self, devices: &DeviceTable) {
        let now = now();
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.due().is_some_and(|due| due <= now)) {
            waiting.begin();
            let (nqn, nsid, opening) = (waiting.nqn.clone(), waiting.plan.nsid, devices.open(&waiting.plan));
            self.tries.push(Box::pin(async move { OpenAttempt { nqn, nsid, device: opening.await } }));
        }
    }

    /// Cancels all attempts, before a change of the plan. Targets that were opened meanwhile are opened again according
    /// to the plan.
    pub async fn end_tries(&mut self, devices: &DeviceTable) {
        while let Some(OpenAttempt { device, .. }) = self.tries.next().await {
            devices.close(device, DeviceTable::idle_limit()).await.ok();
        }
    }

    /// The same at the end of the server, with a time limit.
    pub async fn end_tries_soon(&mut self, devices: &DeviceTable) {
        if timeout(SHUTDOWN_OPEN_TIMEOUT, self.end_tries(devices)).await.is_err() {
            tracing::debug!("a target was still being opened when the server exited");
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = self.failure.in_short();
        match self.next {
            Next::Never => write!(f, "{why}; retried on reload (SIGHUP)"),
            Next::At(_) | Next::InProgress => {
                write!(f, "{why}; retrying at least every {} s", LONGEST.as_secs())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::parse;

    fn waiting(failure: StackError) -> Waiting {
        let text = "[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\ntarget = \"v\"\n";
        let subsystem = parse(text).unwrap().subsystems.remove(0);
        Waiting::new(&subsystem.nqn, &subsystem.namespaces[0], failure, None)
    }

    #[test]
    fn waits_double_up_to_a_minute() {
        let gone = || StackError::new(Cause::Unreachable, "open", "gone");
        let mut waiting = waiting(gone());
        let mut waits = Vec::new();
        for _ in 0..8 {
            waits.push(waiting.due().unwrap().saturating_duration_since(now()).as_secs_f64().round() as u64);
            waiting.begin();
            assert_eq!(waiting.due(), None, "one try at a time");
            waiting.failed(gone());
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(waiting.status(Vec::new()).opening.unwrap().tries, 9);
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let of = |cause| waiting(StackError::new(cause, "open", "no"));
        for cause in [Cause::Unreachable, Cause::Refused, Cause::Io, Cause::Full] {
            assert!(of(cause).due().is_some(), "{cause:?}");
        }
        for cause in [Cause::Unsuitable, Cause::Damaged, Cause::Absent] {
            let waiting = of(cause);
            assert_eq!((waiting.due(), waiting.not_open_info().retried), (None, false), "{cause:?}");
            assert!(waiting.to_string().ends_with("retried on reload (SIGHUP)"), "{waiting}");
        }
        let mut came = of(Cause::Unreachable);
        came.begin();
        came.failed(StackError::new(Cause::Unsuitable, "open", "a plain file as yet"));
        assert!(came.due().is_some(), "it may be being written");
        let policy = waiting(StackError::new(Cause::Refused, "open", "a member").lasting());
        assert_eq!(policy.due(), None);
    }
}
