//! Whether the copies of what is served are all there and in sync: told to the operator when that changes, and to hosts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Weak;

use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_mirror::State;
use sealblock_layers_mirror::label::Standing;
use sealblock_runtime_reactor::spawn;

use crate::stack::{Facts, OpenMirror};

/// The mirrors of one device, by number, whose copies are not all in sync.
type Degraded = Rc<RefCell<BTreeSet<usize>>>;

/// Watches the mirrors that a device is made of, at any depth, until they are closed.
pub fn watch(facts: &Facts, state: &Weak<NamespaceState>) {
    let degraded = Degraded::default();
    let mirrors = facts.all().into_iter().filter_map(|facts| facts.mirror.clone());
    for (number, mirror) in mirrors.enumerate() {
        drop(spawn(watch_one(mirror, number, Rc::clone(&degraded), state.clone())));
    }
}

async fn watch_one(mirror: Rc<OpenMirror>, number: usize, degraded: Degraded, namespace: Weak<NamespaceState>) {
    let mut known = State::Optimal;
    while let Some(state) = mirror.other_state(known).await {
        match state {
            State::Optimal => degraded.borrow_mut().remove(&number),
            State::Degraded | State::Failed => degraded.borrow_mut().insert(number),
        };
        if let Some(namespace) = namespace.upgrade() {
            namespace.report_degraded(!degraded.borrow().is_empty());
        }
        tell(&mirror, state);
        known = state;
    }
}

fn tell(mirror: &OpenMirror, state: State) {
    let target = mirror.target();
    let described = mirror.describe();
    let ailing = described
        .legs
        .iter()
        .filter(|leg| leg.standing != Standing::Removed && !(leg.standing == Standing::Current && leg.is_here));
    let members: Vec<String> = ailing.map(|leg| format!("{} is {}", leg.name, leg.standing.as_str())).collect();
    match (state, members.is_empty()) {
        (State::Optimal, _) => tracing::warn!("{target} is optimal again: all members are in sync"),
        (state, true) => tracing::warn!("{target} is {}: a crash may have left its members different", state.as_str()),
        (state, false) => tracing::warn!("{target} is {}: {}", state.as_str(), members.join(", ")),
    }
}
