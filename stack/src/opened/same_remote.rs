//! Remote namespaces that are one, whatever they are called: an address has many names, and only what the servers say of a
//! namespace tells whether two of them lead to the same one.
//!
//! Danger: copies of one volume that two servers export under one name, without a `serial` or `uuid` of their own, look like one. They
//! are refused as well, as `multipath:` takes them for one. An NBD export says nothing of itself: there, only the name counts.

use crate::error::{Cause, StackError};
use crate::identity::namespace_text;
use crate::opened::info::TargetInfo;
use crate::range::BlockRange;
use crate::target::TargetName;

/// The first namespace over NVMe/TCP that both lie on, in words; `None` if there is none.
pub fn shared_namespace(a: &TargetInfo, b: &TargetInfo) -> Option<String> {
    let of = |info: &TargetInfo| -> Vec<String> {
        info.all().into_iter().filter_map(|info| info.remote.as_ref()).map(namespace_text).collect()
    };
    let others = of(b);
    of(a).into_iter().find(|namespace| others.contains(namespace))
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
            let are_apart = || part_of(target).zip(part_of(other)).is_some_and(|(a, b)| !overlap(a, b));
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

/// The blocks of the device below that a target names.
fn part_of(target: &TargetName) -> Option<BlockRange> {
    match target {
        TargetName::Offset { range, .. } => Some(*range),
        TargetName::Fault { target, .. } => part_of(target),
        _ => None,
    }
}

fn overlap(a: BlockRange, b: BlockRange) -> bool {
    let ends_before = |a: BlockRange, b: BlockRange| a.last().is_some_and(|last| last < b.first());
    !ends_before(a, b) && !ends_before(b, a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_where_they_have_a_block_in_common() {
        let range = |text: &str| text.parse::<BlockRange>().unwrap();
        for (a, b, expected) in [
            ("0..9", "10..19", false),
            ("10..19", "0..9", false),
            ("0..10", "10..19", true),
            ("0..", "1000..1000", true),
            ("5..", "0..4", false),
            ("0..99", "10..19", true),
        ] {
            assert_eq!(overlap(range(a), range(b)), expected, "{a} {b}");
        }
    }

    #[test]
    fn a_part_is_known_through_faults_and_not_through_groups() {
        let part = |text: &str| part_of(&text.parse::<TargetName>().unwrap()).map(|range| range.first().get());
        assert_eq!(part("offset:3..9,v"), Some(3));
        assert_eq!(part("fault:[read=0.1],offset:3..9,v"), Some(3));
        assert_eq!(part("mirror:[offset:3..9,v],w"), None);
    }
}
