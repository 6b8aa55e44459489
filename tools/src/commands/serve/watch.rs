//! Watches whether all replicas of served mirrors are online and in sync: a change is logged and reported to hosts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Weak;

use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{MirrorInfo, MirrorState, ReplicaInfo};
use sealblock_runtime_reactor::spawn;

use crate::control::mirror_status::state_text;
use crate::stack::{OpenMirror, TargetInfo};

/// The mirrors of one device, by number, that are not optimal.
type Degraded = Rc<RefCell<BTreeSet<usize>>>;

/// Watches the mirrors in a device, at any depth, until they are closed.
pub fn watch(info: &TargetInfo, state: &Weak<NamespaceState>) {
    let degraded = Degraded::default();
    let mirrors = info.all().into_iter().filter_map(|info| info.mirror.clone());
    for (number, mirror) in mirrors.enumerate() {
        drop(spawn(watch_one(mirror, number, Rc::clone(&degraded), state.clone())));
    }
}

async fn watch_one(mirror: Rc<OpenMirror>, number: usize, degraded: Degraded, namespace: Weak<NamespaceState>) {
    let mut known = MirrorState::Optimal;
    // The state at the open was not logged yet.
    let mut is_new = mirror.describe().state != known;
    while let Some(state) = mirror.other_state(known).await {
        match state {
            MirrorState::Optimal => degraded.borrow_mut().remove(&number),
            MirrorState::Degraded | MirrorState::Failed => degraded.borrow_mut().insert(number),
        };
        if let Some(namespace) = namespace.upgrade() {
            namespace.report_degraded(!degraded.borrow().is_empty());
        }
        if is_new || !is_reported(known, state, &mirror) {
            report(&mirror, state);
        }
        (known, is_new) = (state, false);
    }
}

/// True if the mirror itself has logged the change, with the replica and the reason.
fn is_reported(before: MirrorState, now: MirrorState, mirror: &OpenMirror) -> bool {
    match (before, now) {
        (_, MirrorState::Failed) => true,
        (MirrorState::Optimal, MirrorState::Degraded) => !degraded_members(&mirror.describe()).is_empty(),
        (_, MirrorState::Optimal | MirrorState::Degraded) => false,
    }
}

fn report(mirror: &OpenMirror, state: MirrorState) {
    let target = mirror.target();
    let members = degraded_members(&mirror.describe());
    match (state, members.is_empty()) {
        (MirrorState::Optimal, _) => tracing::warn!("{target} is optimal again: all members are in sync"),
        (state, true) => tracing::warn!("{target} is {}: a crash may have left its members different", state.as_str()),
        (state, false) => tracing::warn!("{target} is {}: {}", state.as_str(), members.join(", ")),
    }
}

/// The replicas that are offline or not in sync, as text.
fn degraded_members(mirror: &MirrorInfo) -> Vec<String> {
    let is_ailing = |leg: &&ReplicaInfo| {
        leg.state != ReplicaState::Removed && !(leg.state == ReplicaState::InSync && leg.is_online)
    };
    mirror
        .replicas
        .iter()
        .filter(is_ailing)
        .map(|leg| format!("{} is {}", leg.name, state_text(leg.state.as_str())))
        .collect()
}
