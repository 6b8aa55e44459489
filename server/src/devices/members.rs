//! Compares a configuration with the open devices, by what targets are and not by their names: a file has many names, and
//! a name may mean another file now. `sealblock mirror` changes the replicas of a served mirror, so these are compared,
//! and not what it was opened with.

use std::fs;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_media_file::open_files;
use sealblock_stack::target::{GroupKind, TargetName};
use sealblock_stack::{Cause, Sameness, StackError, TargetIdentity, TargetLabel};

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
    let is_it = is_target(&device.target, &plan.target);
    let by_itself = if is_it { PlanMatch::Same } else { PlanMatch::No };
    let Some(named) = members_of(&plan.target).filter(|_| device.is_mirror) else { return by_itself };
    match device.handle.execute_mirror(ControlCommand::MirrorStatus).await {
        Ok(status) => {
            let replicas = status.replicas.into_iter().filter(|replica| !replica.is(ReplicaState::Removed));
            let known = device.target.members();
            let members = replicas.map(|replica| (identity_of(&replica.name, &known), replica.name)).collect();
            let is_old_name = TargetIdentity::of(&device.target.now()).compare(&TargetIdentity::of(&plan.target));
            of_members(members, named, is_old_name == Sameness::Same)
        }
        // A mirror that is being closed does not report replicas, so only what it was opened with is known.
        Err(_) => by_itself,
    }
}

/// Tells the open files of a device that it is known by this name, too, so that their old names may go.
pub fn note_names(named: &TargetName) {
    for path in named.paths() {
        if let Ok(there) = fs::metadata(path) {
            open_files().iter().for_each(|open| open.known_at(path, &there));
        }
    }
}

/// True if an open device is what this name means now, used in the same way.
pub fn is_target(open: &TargetLabel, named: &TargetName) -> bool {
    has_form_of(&open.now(), named) && open.compare(&TargetIdentity::of(named)) == Sameness::Same
}

/// True if both names differ in paths only: the bytes of a file are another device than the volume in it.
fn has_form_of(a: &TargetName, b: &TargetName) -> bool {
    use TargetName::{Fault, File, Group, Linux, Offset, Raw};
    match (a, b) {
        (File(_), File(_)) | (Raw(_), Raw(_)) => true,
        (Linux { drive_makes_tags, .. }, Linux { drive_makes_tags: other, .. }) => drive_makes_tags == other,
        (Group { kind, members }, Group { kind: other, members: others }) => {
            let has_one = |member| others.iter().any(|other| has_form_of(member, other));
            kind == other && members.len() == others.len() && members.iter().all(has_one)
        }
        (Offset { range, target }, Offset { range: other, target: of }) => range == other && has_form_of(target, of),
        (Fault { rules, target }, Fault { rules: other, target: of }) => rules == other && has_form_of(target, of),
        _ => a == b,
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

/// `is_old_name` is true if the mirror was opened by this name, or by others of the same members.
fn of_members(members: Vec<(TargetIdentity, String)>, named: &[TargetName], is_old_name: bool) -> PlanMatch {
    let wanted: Vec<TargetIdentity> = named.iter().map(TargetIdentity::of).collect();
    let is_wanted = |(member, _): &(TargetIdentity, String)| wanted.iter().any(|other| is_member(member, other));
    let kept = members.iter().filter(|member| is_wanted(member)).count();
    let are_all = members.len() == wanted.len() && kept == wanted.len();
    let names = members.into_iter().map(|(_, name)| name).collect();
    match (are_all, is_old_name, kept) {
        (true, ..) => PlanMatch::Same,
        (_, true, _) => PlanMatch::Outdated(names),
        (.., 0) => PlanMatch::No,
        _ => PlanMatch::Other(names),
    }
}

/// Another file in the place of a member is for the mirror to judge, by its label.
fn is_member(member: &TargetIdentity, named: &TargetIdentity) -> bool {
    matches!(member.compare(named), Sameness::Same | Sameness::Replaced)
}

/// What the member that a mirror calls so is.
fn identity_of(name: &str, known: &[(String, TargetIdentity)]) -> TargetIdentity {
    let of_name = || name.parse().map(|target: TargetName| TargetIdentity::of(&target));
    let unnamed = || TargetIdentity::Device { name: name.to_owned(), place: None, leaves: Vec::new() };
    let known = known.iter().find(|(member, _)| member == name).map(|(_, identity)| identity.clone());
    known.unwrap_or_else(|| of_name().unwrap_or_else(|_| unnamed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_compared_as_a_set_and_by_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let at = |name: &str| folder.path().join(name).display().to_string();
        std::fs::hard_link(at("b"), at("link to b")).unwrap();
        let names = || vec![at("a"), at("link to b")];
        let members = || names().into_iter().map(|name| (identity_of(&name, &[]), name)).collect::<Vec<_>>();
        let named = |names: &[&str]| names.iter().map(|name| at(name).parse().unwrap()).collect::<Vec<TargetName>>();
        assert_eq!(of_members(members(), &named(&["b", "a"]), false), PlanMatch::Same);
        assert_eq!(of_members(members(), &named(&["a", "b"]), true), PlanMatch::Same);
        assert_eq!(of_members(members(), &named(&["a", "c"]), true), PlanMatch::Outdated(names()));
        assert_eq!(of_members(members(), &named(&["a", "c"]), false), PlanMatch::Other(names()));
        assert_eq!(of_members(members(), &named(&["c"]), false), PlanMatch::No);
        assert_eq!(of_members(members(), &named(&["a", "b", "c"]), false), PlanMatch::Other(names()));
    }

    /// A file is one device by every name, and a name that means another file is another device.
    #[test]
    fn a_target_is_compared_by_what_it_is_and_by_how_it_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let named = |form: &str, name: &str| -> TargetName { format!("{form}{}", at(name).display()).parse().unwrap() };
        for name in ["a", "b"] {
            std::fs::write(at(name), name).unwrap();
        }
        std::fs::hard_link(at("a"), at("hard")).unwrap();
        std::os::unix::fs::symlink(at("a"), at("soft")).unwrap();
        for served in ["a", "hard", "soft"] {
            let open = TargetLabel::of(&named("", served));
            for (form, name) in [("", "a"), ("", "./a"), ("file:", "a"), ("", "hard"), ("", "soft")] {
                assert!(is_target(&open, &named(form, name)), "{served} and {form}{name}");
            }
            for (form, name) in [("", "b"), ("raw:", "a"), ("fault:[read fail],", "a"), ("offset:0..9,", "a")] {
                assert!(!is_target(&open, &named(form, name)), "{served} and {form}{name}");
            }
        }
        let open = TargetLabel::of(&named("", "soft"));
        std::fs::remove_file(at("soft")).unwrap();
        assert!(is_target(&open, &named("", "soft")), "nothing else is there");
        std::os::unix::fs::symlink(at("b"), at("soft")).unwrap();
        assert!(!is_target(&open, &named("", "soft")) && is_target(&open, &named("", "a")));
    }
}
