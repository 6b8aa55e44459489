//! Compares a configuration with the open devices. `sealblock mirror` changes the replicas of a served mirror, so these
//! are compared, and not the name by which it was opened.

use std::collections::BTreeSet;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_stack::target::{GroupKind, TargetName};
use sealblock_stack::{Cause, StackError};

use crate::control::protocol::ControlCommand;
use crate::devices::ServedDevice;
use crate::plan::NamespacePlan;

/// How a device matches a plan.
#[derive(PartialEq, Eq, Debug)]
pub enum PlanMatch {
    /// It is the device of the plan.
    Same,
    /// It was the device of the plan before its replicas were changed to these.
    Outdated(Vec<String>),
    /// It is a mirror of these replicas, some of which the plan uses in another one.
    Other(Vec<String>),
    /// It is another device.
    No,
}

/// Compares a device with a plan.
pub async fn fit(device: &ServedDevice, plan: &NamespacePlan) -> PlanMatch {
    if device.access != plan.access() || device.usage != plan.usage {
        return PlanMatch::No;
    }
    let is_its_name = device.target.is(&plan.target);
    let by_name = if is_its_name { PlanMatch::Same } else { PlanMatch::No };
    let Some(named) = members_of(&plan.target).filter(|_| device.is_mirror) else { return by_name };
    match device.handle.execute_mirror(ControlCommand::MirrorStatus).await {
        Ok(status) => {
            let replicas = status.replicas.into_iter().filter(|replica| !replica.is(ReplicaState::Removed));
            of_members(replicas.map(|replica| replica.name).collect(), named, is_its_name)
        }
        // A mirror that is being closed does not report replicas, so only its name is known.
        Err(_) => by_name,
    }
}

/// The error for a plan that names other replicas than a served mirror has.
pub fn other_members_error(target: &TargetName, members: &[String]) -> StackError {
    let why = format!("the served mirror has the members {}", members.join(" and "));
    StackError::new(Cause::Refused, "change", why)
        .on(target)
        .advise("change them with `sealblock mirror add`, `remove` or `replace`, then use the new members in the name")
}

fn members_of(target: &TargetName) -> Option<&[TargetName]> {
    match target {
        TargetName::Group { kind: GroupKind::Mirror, members: replicas } => Some(replicas),
        _ => None,
    }
}

/// `is_old_name` is true if the mirror was opened by this name.
fn of_members(members: Vec<String>, named: &[TargetName], is_old_name: bool) -> PlanMatch {
    let here: BTreeSet<String> = members.iter().map(|member| canonical_name(member)).collect();
    let wanted: BTreeSet<String> = named.iter().map(|replica| canonical_name(&replica.to_string())).collect();
    if here == wanted {
        PlanMatch::Same
    } else if is_old_name {
        PlanMatch::Outdated(members)
    } else if here.is_disjoint(&wanted) {
        PlanMatch::No
    } else {
        PlanMatch::Other(members)
    }
}

/// The canonical name of a member, for comparison, because one path can have many names.
fn canonical_name(name: &str) -> String {
    let target: Option<TargetName> = name.parse().ok();
    let path = target.as_ref().and_then(TargetName::path).and_then(|path| path.canonicalize().ok());
    path.map_or_else(|| name.to_owned(), |path| path.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_compared_as_a_set_and_by_where_they_are() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let at = |name: &str| folder.path().join(name).display().to_string();
        let roundabout = format!("{}/./b", folder.path().display());
        let members = || vec![at("a"), roundabout.clone()];
        let named = |names: &[&str]| names.iter().map(|name| at(name).parse().unwrap()).collect::<Vec<TargetName>>();
        assert_eq!(of_members(members(), &named(&["b", "a"]), false), PlanMatch::Same);
        assert_eq!(of_members(members(), &named(&["a", "b"]), true), PlanMatch::Same);
        assert_eq!(of_members(members(), &named(&["a", "c"]), true), PlanMatch::Outdated(members()));
        assert_eq!(of_members(members(), &named(&["a", "c"]), false), PlanMatch::Other(members()));
        assert_eq!(of_members(members(), &named(&["c"]), false), PlanMatch::No);
        assert_eq!(of_members(members(), &named(&["a", "b", "c"]), false), PlanMatch::Other(members()));
    }
}
