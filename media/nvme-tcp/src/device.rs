//! The device: where operations become commands.

use std::rc::Rc;

use sealblock_block::{Abilities, Device, Failure, Geometry, Operation, Outcome};
use sealblock_protocols_nvme::logs::DiscoveryEntry;
use sealblock_protocols_nvme::nqn::Nqn;

use crate::{Address, ConnectError, Counters, Facts, Options};

/// A namespace over NVMe/TCP. Clones share it.
#[derive(Clone)]
pub struct NvmeTcpDevice(Rc<Inner>);

struct Inner {
    geometry: Geometry,
    facts: Facts,
}

impl NvmeTcpDevice {
    /// Opens a namespace.
    ///
    /// # Errors
    /// As [`ConnectError`] says.
    pub async fn connect(
        address: Address,
        subsystem: Nqn,
        namespace: Option<u32>,
        options: Options,
    ) -> Result<NvmeTcpDevice, ConnectError> {
        let _ = (address, subsystem, options);
        Err(ConnectError::Unsupported { nsid: namespace.unwrap_or(0), why: "this is a skeleton".to_owned() })
    }

    /// Shuts the controller down and closes.
    pub async fn close(&self) {}

    /// What is known.
    pub fn facts(&self) -> Facts {
        self.0.facts.clone()
    }

    /// What went through.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }
}

impl Device for NvmeTcpDevice {
    fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    fn abilities(&self) -> Abilities {
        Abilities::BASIC
    }

    async fn execute(&self, _operation: Operation) -> Outcome {
        Err(Failure::Unreachable { reason: "this is a skeleton".to_owned() }.into())
    }
}

/// The subsystems that a discovery controller names.
///
/// # Errors
/// As [`ConnectError`] says.
pub async fn discover(address: Address, options: Options) -> Result<Vec<DiscoveryEntry>, ConnectError> {
    let _ = (address, options);
    Err(ConnectError::Unsupported { nsid: 0, why: "this is a skeleton".to_owned() })
}
