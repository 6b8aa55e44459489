//! Remote namespaces that are one, whatever they are called: an address has many names, and only what the servers say of a
//! namespace tells whether two of them lead to the same one.
//!
//! Danger: copies of one volume that two servers export under one name, without a `serial` or `uuid` of their own, look like one. They
//! are refused as well, as `multipath:` takes them for one. An NBD export says nothing of itself: there, only the name counts. Nor
//! does a gateway of another make say what is behind it.

use crate::error::{Cause, StackError};
use crate::identity::{namespace_identity, namespace_text};
use crate::opened::info::TargetInfo;
use crate::range::BlockRange;
use crate::target::{GroupKind, TargetName};

/// The first namespace over NVMe/TCP that both lie on, in words; `None` if there is none.
pub fn shared_namespace(a: &TargetInfo, b: &TargetInfo) -> Option<String> {
    let remotes =
        |info: &'_ TargetInfo| info.all().into_iter().filter_map(|info| info.remote.clone()).collect::<Vec<_>>();
    let others: Vec<_> = remotes(b).iter().map(namespace_identity).collect();
    remotes(a).iter().find(|remote| others.contains(&namespace_identity(remote))).map(namespace_text)
}

/// The identity of the namespace over NVMe/TCP that this target is, block for block, whatever is in between.
pub fn namespace_behind(target: &TargetName, info: &TargetInfo) -> Option<[u8; 16]> {
    fn is_whole(target: &TargetName) -> bool {
        match target {
            TargetName::NvmeTcp { .. } => true,
            TargetName::Fault { target, .. } => is_whole(target),
            TargetName::Group { kind: GroupKind::Multipath, members } => members.iter().all(is_whole),
            _ => false,
        }
    }
    let remote = info.all().into_iter().find_map(|info| info.remote.as_ref()).filter(|_| is_whole(target));
    remote.map(namespace_identity)
}

/// Refuses members of a group of which two lie on the same blocks of a remote namespace: the group would have one copy where it
/// counts two, or write two of its blocks to one place. Each member has its name for messages.
///
/// # Errors
/// Names the two members, and the namespace.
pub(crate) fn refuse_shared(
    doing: &str,
    group: &TargetName,
    members: &[(String, &TargetName, &TargetInfo)],
) -> Result<(), StackError> {
    for (number, (name, target, info)) in members.iter().enumerate() {
        for (other_name, other, other_info) in &members[..number] {
            let are_apart = || blocks_of(target).zip(blocks_of(other)).is_some_and(|(a, b)| !a.overlaps(b));
            if let Some(namespace) = shared_namespace(info, other_info).filter(|_| !are_apart()) {
                let why = format!("{other_name} and {name} are the same device: {namespace}");
                return Err(StackError::new(Cause::Refused, doing, why).on(group).advise(
                    "give different devices; copies of one volume at two servers need a `uuid` or `serial` of their own there",
                ));
            }
        }
    }
    Ok(())
}

/// The blocks of a namespace that a target names. Blocks of anything else, such as a group or a part, are numbered differently, and tell
/// nothing of the namespace below.
fn blocks_of(target: &TargetName) -> Option<BlockRange> {
    match target {
        TargetName::Offset { range, target } if is_namespace(target) => Some(*range),
        TargetName::Fault { target, .. } => blocks_of(target),
        _ => None,
    }
}

fn is_namespace(target: &TargetName) -> bool {
    match target {
        TargetName::NvmeTcp { .. } => true,
        TargetName::Fault { target, .. } => is_namespace(target),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_those_of_a_namespace_and_of_nothing_between() {
        let first = |text: &str| blocks_of(&text.parse::<TargetName>().unwrap()).map(|range| range.first().get());
        let namespace = "nvme+tcp://host/nqn.2026-11.io.sealblock:v";
        assert_eq!(first(namespace), None);
        assert_eq!(first(&format!("offset:3..9,{namespace}")), Some(3));
        assert_eq!(first(&format!("fault:[read-error@0..0],offset:3..9,{namespace}")), Some(3));
        assert_eq!(first(&format!("offset:3..9,fault:[read-error@0..0],{namespace}")), Some(3));
        assert_eq!(first(&format!("offset:3..9,offset:100..199,{namespace}")), None, "blocks of a part");
        assert_eq!(first(&format!("offset:3..9,stripe:{namespace},w")), None, "blocks of a group");
        assert_eq!(first(&format!("mirror:[offset:3..9,{namespace}],w")), None);
    }
}
