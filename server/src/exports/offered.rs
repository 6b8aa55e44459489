//! What is served over NVMe/TCP: subsystems with their namespaces, and the identities by which hosts recognise them.
//!
//! A namespace whose content has no UUID gets one made from this machine's identity and the target's name. So it is the
//! same at every start, but differs between machines: Linux refuses a namespace whose identity it has already seen in
//! another subsystem.

use std::collections::BTreeMap;
use std::fs;
use std::rc::Rc;
use std::sync::Arc;

use sealblock_exports_nvme_tcp::{Namespace, SetupError, Subsystem};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::identity::{hex, uuid_of};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::devices::ServedDevice;
use crate::plan::{NamespacePlan, SubsystemPlan};

/// The length of the serial number field (Base, Identify Controller, field SN).
const SERIAL_BYTES: usize = 20;

/// The UUIDs of namespaces, and their targets.
pub type Identities = BTreeMap<[u8; 16], TargetName>;

/// A subsystem that is offered.
pub struct Offered {
    /// Its plan.
    pub plan: SubsystemPlan,
    /// Its serial number.
    pub serial: String,
    /// Its namespaces whose targets are open.
    pub spaces: BTreeMap<u32, OfferedNamespace>,
}

/// A namespace that is offered.
#[derive(Clone)]
pub struct OfferedNamespace {
    /// Its plan.
    pub plan: NamespacePlan,
    /// Its identity.
    pub uuid: [u8; 16],
    /// Its device.
    pub device: Rc<ServedDevice>,
}

impl OfferedNamespace {
    /// A namespace, or the error if it cannot be served.
    pub fn new(
        nqn: &Nqn,
        plan: &NamespacePlan,
        device: Rc<ServedDevice>,
        taken: &mut Identities,
    ) -> Result<OfferedNamespace, StackError> {
        let place = format!("{nqn} {}", plan.nsid);
        let uuid = plan.uuid.or(device.content_uuid).unwrap_or_else(|| derived_identity(&plan.target, &place));
        // Hosts treat two namespaces with one UUID as two paths to one namespace.
        if let Some(other) = taken.get(&uuid) {
            return Err(StackError::new(Cause::Unsuitable, "serve", format!("it has the identity of {other}"))
                .on(&plan.target)
                .advise("set another uuid in the configuration"));
        }
        let space = OfferedNamespace { plan: plan.clone(), uuid, device };
        // It is created again when it is offered; this only detects errors early.
        space.namespace()?;
        taken.insert(uuid, plan.target.clone());
        Ok(space)
    }

    /// True if hosts see no difference between the two.
    pub fn is_same(&self, other: &OfferedNamespace) -> bool {
        let shows = |space: &OfferedNamespace| space.plan.protection;
        Rc::ptr_eq(&self.device, &other.device) && self.uuid == other.uuid && shows(self) == shows(other)
    }

    /// Gives the device the name that it has in the plan.
    pub fn rename(&self) {
        self.device.target.set(&self.plan.target);
    }

    /// The namespace for the export; an error if its tags are to be visible but it has none.
    pub fn namespace(&self) -> Result<Namespace, StackError> {
        let namespace = Namespace::new(self.device.shared(), self.uuid).with_state(Arc::clone(&self.device.state));
        let namespace = namespace.with_identities(self.device.origin, self.device.identities());
        let namespace = namespace.with_content(self.device.content);
        namespace.with_visibility(self.plan.protection).map_err(|error| setup_error(&error).on(&self.plan.target))
    }
}

impl Offered {
    /// The subsystem for the export.
    pub fn subsystem(&self) -> Result<Subsystem, StackError> {
        let mut subsystem =
            Subsystem::new(self.plan.nqn.clone(), self.serial.clone()).with_hosts(self.plan.hosts.clone());
        if let Some(model) = &self.plan.model {
            subsystem = subsystem.with_model(model.clone());
        }
        for (nsid, space) in &self.spaces {
            let made = subsystem.with_namespace(*nsid, space.namespace()?);
            subsystem = made.map_err(|error| setup_error(&error).on(&self.plan.nqn))?;
        }
        Ok(subsystem)
    }
}

/// The identity of a target that has none of its own. `subsystem` distinguishes targets without a path, such as memory.
pub(crate) fn derived_identity(target: &TargetName, subsystem: &str) -> [u8; 16] {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let place = match target.path() {
        Some(path) => path.canonicalize().unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned(),
        None => format!("{subsystem} {target}"),
    };
    uuid_of(&[machine.trim(), &place])
}

/// The serial number of a subsystem without a configured one. It stays the same as long as the name does, whatever its
/// namespaces are, and on every machine that serves it.
pub fn serial_of(nqn: &Nqn) -> String {
    hex(&uuid_of(&[nqn.as_str()])[..SERIAL_BYTES / 2])
}

/// The error for a subsystem or namespace that the export refuses.
pub fn setup_error(error: &SetupError) -> StackError {
    let failure = |cause| StackError::new(cause, "serve", error);
    match error {
        SetupError::NotProtected => failure(Cause::Unsuitable).advise("use --protection plain, or a protected volume"),
        SetupError::Nsid(_)
        | SetupError::DuplicateNsid(_)
        | SetupError::Reserved(_)
        | SetupError::DuplicateNqn(_)
        | SetupError::UnknownNqn(_)
        | SetupError::UnknownNsid(_) => failure(Cause::Usage),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_apart_by_its_subsystem() {
        let memory: TargetName = "mem:1MiB".parse().unwrap();
        assert_ne!(derived_identity(&memory, "a"), derived_identity(&memory, "b"));
        let file: TargetName = "/nowhere/v".parse().unwrap();
        assert_eq!(derived_identity(&file, "a"), derived_identity(&file, "b"));
    }

    #[test]
    fn a_serial_fills_its_field_and_goes_by_the_name() {
        let serial = |name: &str| serial_of(&format!("nqn.2026-11.org.example:{name}").parse().unwrap());
        assert!(serial("a").len() == SERIAL_BYTES && serial("a").bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(serial("a"), serial("a"));
        assert_ne!(serial("a"), serial("b"));
    }
}
