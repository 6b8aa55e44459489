//! Several targets as one device: mirrors, stripes and paths; and what members are opened with that are on other hosts.

pub(crate) mod mirror;
pub(crate) mod multipath;
pub(crate) mod replicas;
pub(crate) mod stripe;

use std::time::Duration;

use crate::target::{RemoteOptions, TargetName};

/// The default request timeout and keep-alive timeout of a path or member over NVMe/TCP. Short, since there is another
/// one.
const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The same target, with short timeouts where it names none.
fn with_short_timeouts(target: &TargetName) -> TargetName {
    let mut target = target.clone();
    hasten(&mut target);
    target
}

fn hasten(target: &mut TargetName) {
    match target {
        TargetName::NvmeTcp { options, .. } => {
            options.timeout.get_or_insert(SHORT_TIMEOUT);
            options.keep_alive.get_or_insert(SHORT_TIMEOUT);
            options.reconnect.get_or_insert(Duration::ZERO);
        }
        TargetName::Group { members, .. } => members.iter_mut().for_each(hasten),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => hasten(target),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux(_)
        | TargetName::Memory(_)
        | TargetName::Null(_)
        | TargetName::Nbd { .. } => {}
    }
}

/// The options of all namespaces over NVMe/TCP in a target.
fn remotes(target: &TargetName) -> Vec<&RemoteOptions> {
    match target {
        TargetName::NvmeTcp { options, .. } => vec![options],
        TargetName::Group { members, .. } => members.iter().flat_map(remotes).collect(),
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => remotes(target),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux(_)
        | TargetName::Memory(_)
        | TargetName::Null(_)
        | TargetName::Nbd { .. } => Vec::new(),
    }
}

/// True if any part of it is on another host.
fn is_remote(target: &TargetName) -> bool {
    !remotes(target).is_empty()
}
