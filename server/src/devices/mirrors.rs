//! Served mirrors: executes commands for their replicas, and watches their state, which is logged and reported to
//! hosts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Weak;

use sealblock_exports_nvme_tcp::NamespaceState;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{MirrorInfo, MirrorState, ReplicaInfo};
use sealblock_runtime_reactor::spawn;
use sealblock_stack::target::TargetName;
use sealblock_stack::{CHANGING, Cause, OpenMirror, StackError, TargetInfo};

use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind};
use crate::status::mirror::{MirrorStatus, state_text};

/// Executes a request on the control socket; returns the state of the mirror after it.
///
/// # Errors
/// If it failed; the error has the reason.
pub async fn answer(mirror: &OpenMirror, command: &ControlCommand) -> Result<MirrorStatus, ControlError> {
    execute(mirror, command)
        .await
        .map_err(|failure| ControlError { why: failure.reason(CHANGING), ..control_error(&failure) })?;
    Ok(MirrorStatus::of(mirror))
}

/// Executes a command for the replicas of a mirror; does nothing for other commands.
///
/// # Errors
/// If the command failed; the error has the reason.
pub async fn execute(mirror: &OpenMirror, command: &ControlCommand) -> Result<(), StackError> {
    let target =
        |replica: &str| replica.parse::<TargetName>().map_err(|error| StackError::new(Cause::Usage, CHANGING, error));
    match command {
        ControlCommand::MirrorAdd { replica, force } => mirror.add(&target(replica)?, *force).await,
        ControlCommand::MirrorReplace { old, new, force } => mirror.replace(&target(old)?, &target(new)?, *force).await,
        ControlCommand::MirrorRemove { replica, force } => mirror.remove(&target(replica)?, *force).await,
        ControlCommand::MirrorAcceptStale { replica } => mirror.accept_stale(&target(replica)?).await,
        ControlCommand::Status
        | ControlCommand::Log { .. }
        | ControlCommand::Find
        | ControlCommand::MirrorStatus
        | ControlCommand::ScrubStatus
        | ControlCommand::ScrubStart { .. }
        | ControlCommand::ScrubPause
        | ControlCommand::ScrubStop
        | ControlCommand::Resize { .. } => Ok(()),
    }
}

/// A failure as a response on the control socket.
pub fn control_error(failure: &StackError) -> ControlError {
    let kind = match failure.cause() {
        Cause::Usage => ControlErrorKind::Usage,
        Cause::Io | Cause::Full | Cause::Damaged | Cause::Older | Cause::Unread => ControlErrorKind::Failed,
        Cause::Unsuitable | Cause::Absent | Cause::Unreachable | Cause::Refused => ControlErrorKind::Refused,
    };
    ControlError::new(kind, failure)
}

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
    // The state when it was opened has not been logged yet.
    let mut is_new = mirror.describe().state != known;
    while let Some(state) = mirror.other_state(known).await {
        match state {
            // As long as nothing is a mirror yet, nothing is missing.
            MirrorState::Optimal | MirrorState::Unlabelled => degraded.borrow_mut().remove(&number),
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
        (_, MirrorState::Optimal | MirrorState::Degraded | MirrorState::Unlabelled) => false,
    }
}

fn report(mirror: &OpenMirror, state: MirrorState) {
    let target = mirror.target();
    let members = degraded_members(&mirror.describe());
    match (state, members.is_empty()) {
        (MirrorState::Optimal, _) => tracing::warn!("{target} is optimal again: all members are in sync"),
        (MirrorState::Unlabelled, _) => tracing::warn!("{target} is not a mirror: no member has a label of it"),
        (state, true) => tracing::warn!("{target} is {}: a crash may have left its members different", state.as_str()),
        (state, false) => tracing::warn!("{target} is {}: {}", state.as_str(), members.join(", ")),
    }
}

/// The replicas that are offline or not in sync, as text.
fn degraded_members(mirror: &MirrorInfo) -> Vec<String> {
    let is_ailing = |replica: &&ReplicaInfo| {
        replica.state != ReplicaState::Removed && !(replica.state == ReplicaState::InSync && replica.is_online)
    };
    mirror
        .replicas
        .iter()
        .filter(is_ailing)
        .map(|replica| format!("{} is {}", replica.name, state_text(replica.state.as_str())))
        .collect()
}
