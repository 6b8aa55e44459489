//! A subsystem: a name, namespaces, and who may see them.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use sealblock_block::{Ability, Device, OperationKind};
use sealblock_protocols_nvme::nqn::Nqn;

use crate::namespace::Namespace;

/// Which hosts may connect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Hosts {
    /// Every host.
    #[default]
    Any,
    /// These, by name. A name is a claim: without authentication it keeps out mistakes, not attackers.
    Only(Vec<Nqn>),
}

/// What cannot be set up.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetupError {
    /// The identifier is 0 or one that means all namespaces.
    #[error("{0:#x} is no namespace identifier")]
    Nsid(u32),
    /// The identifier is taken.
    #[error("there are two namespaces {0}")]
    DuplicateNsid(u32),
    /// The device has no protection information that could be shown.
    #[error("the device has no protection information in an NVMe format")]
    NotProtected,
    /// The name is that of the discovery subsystem, which every target has by itself.
    #[error("{0} is the name of the discovery subsystem")]
    Reserved(Nqn),
    /// The name is taken.
    #[error("there are two subsystems {0}")]
    DuplicateNqn(Nqn),
}

/// A subsystem with namespaces.
pub struct Subsystem {
    pub(crate) nqn: Nqn,
    pub(crate) serial: String,
    pub(crate) model: String,
    pub(crate) namespaces: BTreeMap<u32, Rc<Namespace>>,
    hosts: Hosts,
    pub(crate) traffic: Traffic,
}

/// What went through a subsystem since it was made, for SMART / Health Information.
#[derive(Default)]
pub(crate) struct Traffic {
    pub(crate) read_bytes: Cell<u64>,
    pub(crate) written_bytes: Cell<u64>,
    pub(crate) reads: Cell<u64>,
    pub(crate) writes: Cell<u64>,
    pub(crate) media_errors: Cell<u64>,
}

/// Adds to a counter.
pub(crate) fn add(counter: &Cell<u64>, amount: u64) {
    counter.set(counter.get().saturating_add(amount));
}

impl Subsystem {
    /// A subsystem without namespaces, for any host. `serial` is cut to 20 ASCII characters on the wire.
    pub fn new(nqn: Nqn, serial: impl Into<String>) -> Subsystem {
        Subsystem {
            nqn,
            serial: serial.into(),
            model: "sealblock".to_owned(),
            namespaces: BTreeMap::new(),
            hosts: Hosts::Any,
            traffic: Traffic::default(),
        }
    }

    /// The same with this model number, cut to 40 ASCII characters on the wire.
    pub fn with_model(mut self, model: impl Into<String>) -> Subsystem {
        self.model = model.into();
        self
    }

    /// The same for these hosts.
    pub fn with_hosts(mut self, hosts: Hosts) -> Subsystem {
        self.hosts = hosts;
        self
    }

    /// The same with this namespace.
    ///
    /// # Errors
    /// [`SetupError::Nsid`] and [`SetupError::DuplicateNsid`].
    pub fn with_namespace(mut self, nsid: u32, namespace: Namespace) -> Result<Subsystem, SetupError> {
        if nsid == 0 || nsid >= 0xFFFF_FFFE {
            return Err(SetupError::Nsid(nsid));
        }
        match self.namespaces.insert(nsid, Rc::new(namespace)) {
            None => Ok(self),
            Some(_) => Err(SetupError::DuplicateNsid(nsid)),
        }
    }

    /// The subsystem's name.
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    /// Whether this host may connect.
    pub(crate) fn allows(&self, host: &Nqn) -> bool {
        match &self.hosts {
            Hosts::Any => true,
            Hosts::Only(hosts) => hosts.contains(host),
        }
    }

    /// Whether any namespace has blocks that can be made unreadable.
    pub(crate) fn can_write_uncorrectable(&self) -> bool {
        let can = |namespace: &Rc<Namespace>| namespace.device.abilities().of(OperationKind::WriteUncorrectable);
        self.namespaces.values().any(|namespace| can(namespace) != Ability::Absent)
    }

    /// NN: the largest namespace identifier; 0 without namespaces.
    pub(crate) fn largest_nsid(&self) -> u32 {
        self.namespaces.last_key_value().map_or(0, |(nsid, _)| *nsid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{Gate, Stack};
    use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
    use sealblock_media_memory::MemoryDevice;
    use sealblock_units::BlockSize;

    use crate::Shows;

    fn namespace(format: Option<PiFormat>) -> Namespace {
        let device = MemoryDevice::new(BlockSize::from_bytes(512).unwrap(), 8, format);
        Namespace::new(Rc::new(Gate::new("mem", Stack::new(device))), [1; 16])
    }

    fn subsystem() -> Subsystem {
        Subsystem::new("nqn.2026-11.org.example:a".parse().unwrap(), "1")
    }

    #[test]
    fn identifiers_are_legal_and_unique() {
        let one = subsystem().with_namespace(1, namespace(None)).unwrap();
        assert_eq!(one.largest_nsid(), 1);
        assert_eq!(one.with_namespace(1, namespace(None)).err(), Some(SetupError::DuplicateNsid(1)));
        for nsid in [0, 0xFFFF_FFFE, 0xFFFF_FFFF] {
            assert_eq!(subsystem().with_namespace(nsid, namespace(None)).err(), Some(SetupError::Nsid(nsid)));
        }
    }

    #[test]
    fn only_protection_that_nvme_knows_is_shown() {
        let of = |guard| Some(PiFormat::with_default_storage_tag(guard, ProtectionType::Type1));
        assert!(namespace(of(GuardKind::Crc16)).showing(Shows::Protected).is_ok());
        for format in [None, of(GuardKind::IpChecksum)] {
            assert_eq!(namespace(format).showing(Shows::Protected).err(), Some(SetupError::NotProtected));
            assert!(namespace(format).showing(Shows::Plain).is_ok());
        }
    }

    #[test]
    fn hosts_that_are_not_named_are_kept_out() {
        let host: Nqn = "nqn.2026-11.org.example:host".parse().unwrap();
        assert!(subsystem().allows(&host));
        assert!(subsystem().with_hosts(Hosts::Only(vec![host.clone()])).allows(&host));
        assert!(!subsystem().with_hosts(Hosts::Only(vec![])).allows(&host));
    }
}
