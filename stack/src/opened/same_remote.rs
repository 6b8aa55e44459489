//! Remote namespaces that are one, whatever they are called: an address has many names, and only what the servers say of a
//! namespace tells whether two of them lead to the same one. A gateway lists all that lie below what it serves.
//!
//! Danger: copies of one volume that two servers export under one name, without a `serial` or `uuid` of their own, look like one. They
//! are refused as well, as `multipath:` takes them for one. An NBD export says nothing of itself: there, only the name counts. Nor
//! does a gateway of another make say what is behind it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use sealblock_media_nvme_tcp::{ConnectionInfo, MAX_BELOW};

use crate::error::{Cause, StackError};
use crate::identity::{namespace_identities, namespace_identity, namespace_text};
use crate::opened::info::TargetInfo;
use crate::range::BlockRange;
use crate::target::{GroupKind, TargetName};

/// The namespaces over NVMe/TCP that a target lies on, at any time, on every core.
#[derive(Clone, Debug, Default)]
pub struct RemoteNamespaces {
    /// Those that do not change while it is open.
    opened: Vec<ConnectionInfo>,
    /// Those of the replicas of its mirrors.
    mirrors: Vec<ReplicaNamespaces>,
    /// The blocks that it is of the only one.
    blocks: Option<BlockRange>,
}

/// Those of each replica of a mirror, by its name.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplicaNamespaces(Arc<Mutex<Vec<(String, RemoteNamespaces)>>>);

impl RemoteNamespaces {
    /// Those of an open target.
    pub fn of(target: &TargetName, info: &TargetInfo) -> RemoteNamespaces {
        let mut found = RemoteNamespaces { blocks: blocks_of(target), ..RemoteNamespaces::default() };
        found.collect(info);
        found
    }

    fn collect(&mut self, info: &TargetInfo) {
        if let Some(mirror) = &info.mirror {
            return self.mirrors.push(mirror.namespaces());
        }
        self.opened.extend(info.remote.clone());
        info.inner.iter().for_each(|inner| self.collect(inner));
    }

    fn all(&self) -> Vec<ConnectionInfo> {
        let replicas = self.mirrors.iter().flat_map(|mirror| mirror.all());
        self.opened.iter().cloned().chain(replicas.flat_map(|(_, of)| of.all())).collect()
    }

    /// The identity of each, and of each that is below one of them.
    pub fn identities(&self) -> BTreeSet<[u8; 16]> {
        self.all().iter().flat_map(namespace_identities).collect()
    }

    /// True if one of them has this UUID.
    pub(crate) fn has_uuid(&self, uuid: [u8; 16]) -> bool {
        self.all().iter().any(|remote| remote.uuid == Some(uuid))
    }

    /// The first namespace that both lie on, in words; `None` if there is none, or if they are different blocks of it.
    pub fn shared_with(&self, other: &RemoteNamespaces) -> Option<String> {
        let are_apart = self.blocks.zip(other.blocks).is_some_and(|(a, b)| !a.overlaps(b));
        let others = other.all();
        let is_shared = |remote: &&ConnectionInfo| {
            let identities = namespace_identities(remote);
            others.iter().any(|other| {
                // Where only what lies below is the same, its blocks have other numbers.
                let is_one = namespace_identity(remote) == namespace_identity(other);
                !(is_one && are_apart) && namespace_identities(other).iter().any(|id| identities.contains(id))
            })
        };
        self.all().iter().find(is_shared).map(namespace_text)
    }
}

impl ReplicaNamespaces {
    fn all(&self) -> Vec<(String, RemoteNamespaces)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets what a replica lies on, in place of what it was before.
    pub fn set(&self, name: &str, of: Option<RemoteNamespaces>) {
        let mut replicas = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        replicas.retain(|(known, _)| known != name);
        replicas.extend(of.map(|of| (name.to_owned(), of)));
    }

    /// Refuses a replica that lies on the same namespace as another one; `replaced` is none any more.
    ///
    /// # Errors
    /// Names the two replicas, and the namespace.
    pub fn refuse_shared(
        &self,
        doing: &str,
        new: (&str, &RemoteNamespaces),
        replaced: Option<&str>,
    ) -> Result<(), StackError> {
        let others = self.all();
        let others = others.iter().filter(|(name, _)| name != new.0 && Some(&**name) != replaced);
        others.into_iter().try_for_each(|(name, of)| refuse_shared_by(doing, new, (name, of)))
    }
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
/// Names the two members, and the namespace; more namespaces than a gateway can list.
pub(crate) fn refuse_shared(
    doing: &str,
    group: &TargetName,
    members: &[(String, RemoteNamespaces)],
) -> Result<(), StackError> {
    for (number, (name, of)) in members.iter().enumerate() {
        for (other, of_other) in &members[..number] {
            refuse_shared_by(doing, (name, of), (other, of_other)).map_err(|refused| refused.on(group))?;
        }
    }
    let namespaces: BTreeSet<_> = members.iter().flat_map(|(_, of)| of.identities()).collect();
    if namespaces.len() > MAX_BELOW as usize {
        let why = format!("it lies on {} remote namespaces; {MAX_BELOW} are the most", namespaces.len());
        return Err(StackError::new(Cause::Unsuitable, doing, why).on(group));
    }
    Ok(())
}

fn refuse_shared_by(
    doing: &str,
    (name, of): (&str, &RemoteNamespaces),
    (other, of_other): (&str, &RemoteNamespaces),
) -> Result<(), StackError> {
    let Some(namespace) = of.shared_with(of_other) else { return Ok(()) };
    let why = format!("{other} and {name} are the same device: {namespace}");
    Err(StackError::new(Cause::Refused, doing, why).advise(
        "give different devices; copies of one volume at two servers need a `uuid` or `serial` of their own there",
    ))
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
