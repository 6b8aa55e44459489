//! Remote devices that are one, whatever they are called: an address has many names, and only what the servers say of a
//! namespace or export tells whether two of them lead to the same one. A server lists the identity that it has drawn for its open device,
//! and those of all remote devices that this one lies on; for NVMe/TCP there is one that stays, too.
//!
//! Danger: copies of one volume that two servers serve under one name, without a `serial` or `uuid` of their own, look like one. They
//! are refused as well, as `multipath:` takes them for one. A server of another make does not say what is behind it, and of its exports
//! over NBD only the name counts.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use sealblock_media_nbd::ConnectionInfo as NbdConnectionInfo;
use sealblock_media_nvme_tcp::{ConnectionInfo, ListedIdentities, MAX_IDENTITIES};

use crate::error::{Cause, StackError};
use crate::identity::{namespace_identity, namespace_text};
use crate::range::BlockRange;
use crate::target::{GroupKind, TargetName};

/// The devices at other servers that a target lies on, at any time, on every core.
#[derive(Clone, Debug, Default)]
pub struct RemoteDevices {
    /// Those that do not change while it is open.
    opened: Vec<RemoteDevice>,
    /// Those of the replicas of its mirrors.
    mirrors: Vec<ReplicaDevices>,
    /// The blocks that it is of the only one.
    blocks: Option<BlockRange>,
}

/// Those of each replica of a mirror, by its name.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplicaDevices(Arc<Mutex<Vec<(String, RemoteDevices)>>>);

/// A namespace over NVMe/TCP, or an export over NBD.
#[derive(Clone, Debug)]
struct RemoteDevice {
    /// What it is, in words.
    text: String,
    /// Its UUID, if it has one.
    uuid: Option<[u8; 16]>,
    /// The number of its content, if its server gives one beside the UUID.
    content: Option<u64>,
    /// What identifies it at all times, if anything does.
    lasting: Option<[u8; 16]>,
    /// What its server lists.
    listed: ListedIdentities,
}

impl RemoteDevice {
    fn namespace(of: &ConnectionInfo) -> RemoteDevice {
        let (text, lasting) = (namespace_text(of), Some(namespace_identity(of)));
        RemoteDevice { text, uuid: of.uuid, content: of.content, lasting, listed: of.identities.clone() }
    }

    fn export(of: &NbdConnectionInfo) -> RemoteDevice {
        let text = format!("export {:?}", of.export);
        RemoteDevice { text, uuid: of.uuid, content: None, lasting: None, listed: of.identities.clone() }
    }

    /// The device whose blocks have the same numbers.
    fn own(&self) -> Option<[u8; 16]> {
        self.lasting.or_else(|| self.listed.get().first().copied())
    }

    /// That one, and all that it lies on.
    fn identities(&self) -> BTreeSet<[u8; 16]> {
        self.listed.get().into_iter().chain(self.lasting).collect()
    }

    fn shares(&self, other: &RemoteDevice) -> bool {
        !self.identities().is_disjoint(&other.identities())
    }
}

impl RemoteDevices {
    /// None yet, of a target of this name.
    pub(crate) fn none_of(target: &TargetName) -> RemoteDevices {
        RemoteDevices { blocks: blocks_of(target), ..RemoteDevices::default() }
    }

    pub(crate) fn add_namespace(&mut self, namespace: &ConnectionInfo) {
        self.opened.push(RemoteDevice::namespace(namespace));
    }

    pub(crate) fn add_export(&mut self, export: &NbdConnectionInfo) {
        self.opened.push(RemoteDevice::export(export));
    }

    pub(crate) fn add_mirror(&mut self, replicas: ReplicaDevices) {
        self.mirrors.push(replicas);
    }

    fn all(&self) -> Vec<RemoteDevice> {
        let replicas = self.mirrors.iter().flat_map(ReplicaDevices::all);
        self.opened.iter().cloned().chain(replicas.flat_map(|(_, of)| of.all())).collect()
    }

    /// The identity of each, and of each that is below one of them.
    pub fn identities(&self) -> BTreeSet<[u8; 16]> {
        self.all().iter().flat_map(RemoteDevice::identities).collect()
    }

    /// True if one of them has this UUID.
    pub(crate) fn has_uuid(&self, uuid: [u8; 16]) -> bool {
        self.all().iter().any(|device| device.uuid == Some(uuid))
    }

    /// True if it is known to lie on other content than before, whatever the server's name for it is.
    pub(crate) fn is_other_than(&self, before: &RemoteDevices) -> bool {
        let uuids = |of: &RemoteDevices| {
            of.all().iter().map(|device| Some((device.uuid?, device.content))).collect::<Option<BTreeSet<_>>>()
        };
        uuids(self).zip(uuids(before)).is_some_and(|(now, then)| now != then && !then.is_empty())
    }

    /// The first device that both lie on, in words; `None` if there is none, or if they are different blocks of it.
    pub fn shared_with(&self, other: &RemoteDevices) -> Option<String> {
        let are_apart = self.blocks.zip(other.blocks).is_some_and(|(a, b)| !a.overlaps(b));
        // Where only what lies below is the same, its blocks have other numbers.
        let are_apart = |a: &RemoteDevice, b: &RemoteDevice| are_apart && a.own().is_some() && a.own() == b.own();
        let (devices, others) = (self.all(), other.all());
        let is_shared =
            |device: &&RemoteDevice| others.iter().any(|other| device.shares(other) && !are_apart(device, other));
        devices.iter().find(is_shared).map(|device| device.text.clone())
    }
}

impl ReplicaDevices {
    fn all(&self) -> Vec<(String, RemoteDevices)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets what a replica lies on, in place of what it was before.
    pub fn set(&self, name: &str, of: Option<RemoteDevices>) {
        let mut replicas = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        replicas.retain(|(known, _)| known != name);
        replicas.extend(of.map(|of| (name.to_owned(), of)));
    }

    /// Refuses a replica that lies on the same device as another one; `replaced` is none any more.
    ///
    /// # Errors
    /// Names the two replicas, and the device.
    pub fn refuse_shared(
        &self,
        doing: &str,
        new: (&str, &RemoteDevices),
        replaced: Option<&str>,
    ) -> Result<(), StackError> {
        let others = self.all();
        let others = others.iter().filter(|(name, _)| name != new.0 && Some(&**name) != replaced);
        others.into_iter().try_for_each(|(name, of)| refuse_shared_by(doing, new, (name, of)))
    }
}

/// True if it has all blocks of one namespace over NVMe/TCP, with their numbers, whatever is in between.
pub(crate) fn is_whole_namespace(target: &TargetName) -> bool {
    match target {
        TargetName::NvmeTcp { .. } => true,
        TargetName::Fault { target, .. } => is_whole_namespace(target),
        TargetName::Group { kind: GroupKind::Multipath, members } => members.iter().all(is_whole_namespace),
        _ => false,
    }
}

/// Refuses members of a group of which two lie on the same blocks of a remote device: the group would have one copy where it
/// counts two, or write two of its blocks to one place. Each member has its name for messages.
///
/// # Errors
/// Names the two members, and the device; more devices than a gateway can list.
pub(crate) fn refuse_shared(
    doing: &str,
    group: &TargetName,
    members: &[(String, RemoteDevices)],
) -> Result<(), StackError> {
    for (number, (name, of)) in members.iter().enumerate() {
        for (other, of_other) in &members[..number] {
            refuse_shared_by(doing, (name, of), (other, of_other)).map_err(|refused| refused.on(group))?;
        }
    }
    let devices: BTreeSet<_> = members.iter().flat_map(|(_, of)| of.identities()).collect();
    if devices.len() >= MAX_IDENTITIES as usize {
        let why = format!(
            "it lies on {} remote devices, with those below them; {} are the most",
            devices.len(),
            MAX_IDENTITIES - 1
        );
        return Err(StackError::new(Cause::Unsuitable, doing, why).on(group));
    }
    Ok(())
}

fn refuse_shared_by(
    doing: &str,
    (name, of): (&str, &RemoteDevices),
    (other, of_other): (&str, &RemoteDevices),
) -> Result<(), StackError> {
    let Some(device) = of.shared_with(of_other) else { return Ok(()) };
    let why = format!("{other} and {name} are the same device: {device}");
    Err(StackError::new(Cause::Refused, doing, why).advise(
        "give different devices; copies of one volume at two servers need a `uuid` or `serial` of their own there",
    ))
}

/// The blocks of a remote device that a target names. Blocks of anything else, such as a group or a part, are numbered differently, and tell
/// nothing of the device below.
fn blocks_of(target: &TargetName) -> Option<BlockRange> {
    match target {
        TargetName::Offset { range, target } if is_remote_device(target) => Some(*range),
        TargetName::Fault { target, .. } => blocks_of(target),
        _ => None,
    }
}

fn is_remote_device(target: &TargetName) -> bool {
    match target {
        TargetName::NvmeTcp { .. } | TargetName::Nbd { .. } => true,
        TargetName::Fault { target, .. } => is_remote_device(target),
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
