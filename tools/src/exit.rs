//! The exit status of the program. Damage that a command found is no failure but a result: [`Exit::DamageFound`].

use std::process::ExitCode;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_server::status::health::Health;
use sealblock_stack::{Cause, OpenTarget, note};

/// A command that did its work.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Exit {
    /// Exit status 0: nothing is wrong.
    Clean,
    /// Exit status 1: it found damage or a difference.
    DamageFound,
    /// Exit status 4: it found nothing bad, and could not check everything, or a copy is missing or out of sync, or what it read may
    /// be older than what was written, or a replica lacks what it wrote.
    Incomplete,
    /// Exit status 130, or what a shell shows for the signal: it ended early and has printed how far it came.
    Interrupted,
}

impl Exit {
    /// The same of what may be older than what was written, where `is_older`: nothing bad that was found is not all there is.
    #[must_use]
    pub fn unless_older(self, is_older: bool) -> Exit {
        if is_older && self == Exit::Clean { Exit::Incomplete } else { self }
    }

    /// The same of changes to a target where `lacks` says that a replica did not get them.
    #[must_use]
    pub fn unless_lacking(self, lacks: bool) -> Exit {
        if lacks && self == Exit::Clean { Exit::Incomplete } else { self }
    }
}

/// Whether a replica of a mirror in this target lacks changes that were made to it, and says which one. A replica that is being resynchronised
/// gets them.
pub fn note_lacking(changed: &OpenTarget) -> bool {
    let mirrors = changed.info.all().into_iter().filter_map(|info| info.mirror.as_ref());
    let mut lacks = false;
    for replica in mirrors.flat_map(|mirror| mirror.describe().replicas) {
        let is_away = !replica.is_online && replica.state != ReplicaState::Removed;
        if is_away || replica.state == ReplicaState::OutOfSync {
            note(format_args!("{} lacks these changes: the mirror is degraded", replica.name));
            lacks = true;
        }
    }
    lacks
}

impl From<Health> for Exit {
    fn from(health: Health) -> Exit {
        match health {
            Health::Healthy => Exit::Clean,
            Health::Damaged => Exit::DamageFound,
            Health::Incomplete | Health::Degraded | Health::Other => Exit::Incomplete,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Clean => 0,
            Exit::DamageFound => 1,
            Exit::Incomplete => 4,
            Exit::Interrupted => 130,
        })
    }
}

/// The exit status of a command that failed: 2 for bad usage, 3 for everything else.
pub const fn status(cause: Cause) -> u8 {
    match cause {
        Cause::Usage => 2,
        Cause::Unsuitable
        | Cause::Absent
        | Cause::Unreachable
        | Cause::Refused
        | Cause::Full
        | Cause::Damaged
        | Cause::Older
        | Cause::Io
        | Cause::Unread => 3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_to_be_good_is_not_clean() {
        let exits = [Health::Healthy, Health::Incomplete, Health::Degraded, Health::Other].map(Exit::from);
        assert_eq!(exits, [Exit::Clean, Exit::Incomplete, Exit::Incomplete, Exit::Incomplete]);
        assert_eq!(Exit::from(Health::Damaged), Exit::DamageFound);
        let all = [Exit::Clean, Exit::DamageFound, Exit::Incomplete, Exit::Interrupted];
        let older = [Exit::Incomplete, Exit::DamageFound, Exit::Incomplete, Exit::Interrupted];
        assert_eq!(all.map(|exit| exit.unless_older(true)), older);
        assert_eq!(all.map(|exit| exit.unless_older(false)), all);
    }

    #[test]
    fn changes_that_a_replica_lacks_are_not_clean() {
        let all = [Exit::Clean, Exit::DamageFound, Exit::Incomplete, Exit::Interrupted];
        let lacking = [Exit::Incomplete, Exit::DamageFound, Exit::Incomplete, Exit::Interrupted];
        assert_eq!(all.map(|exit| exit.unless_lacking(true)), lacking);
        assert_eq!(all.map(|exit| exit.unless_lacking(false)), all);
    }

    #[test]
    fn only_bad_usage_has_exit_status_2() {
        assert_eq!(status(Cause::Usage), 2);
        for cause in [Cause::Unsuitable, Cause::Absent, Cause::Unreachable, Cause::Refused] {
            assert_eq!(status(cause), 3, "{cause:?}");
        }
        for cause in [Cause::Full, Cause::Damaged, Cause::Older, Cause::Io, Cause::Unread] {
            assert_eq!(status(cause), 3, "{cause:?}");
        }
    }
}
