//! How a served device is, for whoever asks: looked at on its own core, without a request to the device.

use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use sealblock_block::{DynDevice, Gate, RequestKind};
use sealblock_exports_nvme_tcp::DamageRun;
use sealblock_layers_multipath::{PathMonitor, PathStatus as PathFacts};
use sealblock_runtime_reactor::{CoreHandle, CoreLocal, timeout};

use super::backing::Files;
use super::scrub::ScrubTask;
use super::witness::Ties;
use crate::commands::scrub::canonical;
use crate::control::mirror_status::MirrorStatus;
use crate::control::server::{CountStatus, DamageStatus, IoStatus, NamedMirror, PathStatus, RunOfDamage, Seen};
use crate::stack::{Facts, OpenMirror};
use crate::tally::count;

/// How long a core may take to look.
const PATIENCE: Duration = Duration::from_secs(5);
/// Runs of bad blocks that are named.
const MOST_RUNS: usize = 64;

/// A device on its own core, as long as its scrub is there.
pub struct Watched {
    keeper: Rc<ScrubTask>,
    /// Not held: who closes a mirror waits for nobody who only looks.
    mirrors: Vec<Weak<OpenMirror>>,
    paths: Vec<PathMonitor>,
    files: Vec<String>,
    /// The same files, as long as they are open.
    backing: Files,
    /// What the opening found lost, which writing does not mend.
    lost_metadata: Vec<String>,
}

/// The files that a device lies in.
fn files(facts: &Facts) -> Vec<String> {
    let files = facts.all().into_iter().filter_map(|facts| facts.file.as_ref());
    files.filter_map(|file| canonical(&file.path)).collect()
}

/// A way to see how a device is, from any core.
#[derive(Clone)]
pub struct Insight {
    core: CoreHandle,
    watched: CoreLocal<Watched>,
    ties: Ties,
}

impl Watched {
    /// A device of this core.
    pub fn new(keeper: &Rc<ScrubTask>, facts: &Facts) -> Watched {
        let all = facts.all();
        Watched {
            keeper: Rc::clone(keeper),
            mirrors: all.iter().filter_map(|facts| facts.mirror.as_ref()).map(Rc::downgrade).collect(),
            paths: all.iter().filter_map(|facts| facts.paths.clone()).collect(),
            lost_metadata: lost_logs(facts),
            files: files(facts),
            backing: Files::of(facts),
        }
    }

    fn look(&self) -> Seen {
        let Some((scrub, gate)) = self.keeper.glance() else {
            return silent("it is closed, or is being changed");
        };
        let mirrors = self.mirrors.iter().filter_map(Weak::upgrade);
        Seen {
            files: self.files.clone(),
            file_trouble: self.backing.trouble(),
            mirrors: mirrors.map(|mirror| named(&mirror)).collect(),
            paths: self.paths.iter().flat_map(PathMonitor::paths).map(path).collect(),
            lost_metadata: self.lost_metadata.clone(),
            scrub: Some(scrub),
            io: io(&gate),
            ..Seen::default()
        }
    }
}

impl Insight {
    /// The way to a device of this core.
    pub fn new(core: CoreHandle, watched: CoreLocal<Watched>, ties: Ties) -> Insight {
        Insight { core, watched, ties }
    }

    /// Whether both are for one device.
    pub fn is_same(&self, other: &Insight) -> bool {
        Arc::ptr_eq(&self.ties.failing, &other.ties.failing)
    }

    /// How the device is now. One that does not tell in time says so.
    pub async fn look(&self) -> Seen {
        let watched = self.watched.clone();
        let looked = self.core.call(move || async move { watched.get().map(|watched| watched.look()) });
        let seen = match timeout(PATIENCE, looked).await {
            Ok(Ok(Some(seen))) => seen,
            Ok(Ok(None)) => silent("it is being closed"),
            Ok(Err(gone)) => silent(&gone.to_string()),
            Err(_) => silent("its core did not answer in time"),
        };
        Seen { damage: self.damage(), failing: self.ties.failing.now(), ..seen }
    }

    fn damage(&self) -> DamageStatus {
        let known = self.ties.damage.summary(MOST_RUNS);
        let run =
            |run: &DamageRun| RunOfDamage { first: run.first, last: run.last, field: run.cause.as_str().to_owned() };
        DamageStatus {
            blocks: known.blocks,
            complete: known.is_complete,
            runs: known.runs.iter().map(run).collect(),
            unlisted: known.unlisted,
            made_unreadable: known.made_unreadable,
        }
    }
}

fn silent(why: &str) -> Seen {
    Seen { silent: Some(why.to_owned()), ..Seen::default() }
}

/// Logs of which a part is lost, in words.
fn lost_logs(facts: &Facts) -> Vec<String> {
    let volumes = facts.all().into_iter().filter_map(|facts| facts.volume.as_ref());
    let lost = volumes.filter(|volume| volume.log_lost > 0);
    lost.map(|volume| format!("{} of a log: blocks written last may be older", count(volume.log_lost, "sector")))
        .collect()
}

fn named(mirror: &OpenMirror) -> NamedMirror {
    let mut status = MirrorStatus::of(&mirror.describe());
    // Those that were taken out concern nobody any more.
    status.replicas.retain(|replica| !replica.is_removed());
    NamedMirror { target: mirror.target().to_string(), status }
}

fn path(path: PathFacts) -> PathStatus {
    PathStatus {
        path: path.name,
        live: path.is_live,
        trouble: path.trouble.filter(|_| !path.is_live),
        failures: path.failures,
    }
}

fn io(gate: &Gate<DynDevice>) -> IoStatus {
    let counters = gate.counters();
    let count = |kind: RequestKind| CountStatus {
        requests: counters.requests(kind),
        bytes: counters.bytes(kind),
        errors: counters.errors(kind),
    };
    let operations: BTreeMap<_, _> = RequestKind::ALL.into_iter().map(|kind| (name(kind), count(kind))).collect();
    IoStatus { in_flight: counters.in_flight(), operations }
}

/// An operation as a field of JSON.
fn name(kind: RequestKind) -> String {
    match kind {
        RequestKind::ReadReserved => "read_annex".to_owned(),
        RequestKind::WriteReserved => "write_annex".to_owned(),
        other => other.name().replace(' ', "_"),
    }
}
