//! Several targets as one device: one function for each kind.

mod mirror;
mod multipath;
mod stripe;

use std::time::Duration;

use super::{Access, OpenTarget, Usage};
use crate::exit::CliError;
use crate::target::{GroupKind, TargetName};

pub use mirror::{OpenMirror, create as create_mirror};
pub(super) use multipath::Paths;

/// The default request timeout and keep-alive timeout of a path or member over NVMe/TCP. Short, since there is another
/// one.
const SHORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens a group.
pub(super) async fn open(
    target: &TargetName,
    kind: GroupKind,
    members: &[TargetName],
    access: Access,
    usage: Usage,
) -> Result<OpenTarget, CliError> {
    match kind {
        GroupKind::Mirror => mirror::open(target, members, access).await,
        GroupKind::Stripe { chunk, labelled } => stripe::open(target, chunk, labelled, members, (access, usage)).await,
        GroupKind::Multipath => multipath::open(target, members, access, usage).await,
    }
}

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
