//! Property Get and Property Set: CAP, VS, CC, CSTS, CRTO.

use std::sync::Arc;

use sealblock_protocols_nvme::Invalid;
use sealblock_protocols_nvme::fabrics::{PropertyGet, PropertySet};
use sealblock_protocols_nvme::registers::{Capabilities, Property, Version};

use crate::model::controller::Controller;
use crate::model::limits::Limits;

/// The longest wait for CSTS.RDY, in units of 500 ms. Enabling takes no time; a reset waits for commands in flight.
const READY_500MS: u8 = 20;

pub(crate) fn get(controller: &Controller, limits: &Limits, get: &PropertyGet) -> Result<u64, Invalid> {
    let property = Property::from_code(get.offset).filter(|property| property.bytes() == get.bytes);
    match property.ok_or(Invalid::field("OFST", 11, 0))? {
        Property::Capabilities => Ok(capabilities(controller, limits).bits()),
        Property::Version => Ok(u64::from(Version::V2_1.bits())),
        Property::Configuration => Ok(u64::from(controller.configuration())),
        Property::Status => Ok(u64::from(controller.status().bits())),
        Property::ReadyTimeouts => Ok(u64::from(READY_500MS)),
        Property::SubsystemReset => Err(Invalid::field("OFST", 11, 0)),
    }
}

pub(crate) fn set(controller: &Arc<Controller>, set: &PropertySet) -> Result<u64, Invalid> {
    match Property::from_code(set.offset) {
        Some(Property::Configuration) if set.bytes == 4 => controller.configure(set.value as u32),
        _ => return Err(Invalid::field("OFST", 11, 0)),
    }
    Ok(0)
}

/// CAP.CSS has bit 6 although only the NVM command set exists, because hosts read formats with 32- and 64-bit guards
/// only from controllers with Identify pages of command sets.
fn capabilities(controller: &Controller, limits: &Limits) -> Capabilities {
    let by_command_set = if controller.is_discovery { 0 } else { Capabilities::SEVERAL_COMMAND_SETS };
    Capabilities {
        max_queue_entries: u32::from(limits.commands),
        contiguous_queues: true,
        timeout_500ms: READY_500MS,
        subsystem_reset: false,
        command_sets: Capabilities::NVM_COMMAND_SET | by_command_set,
        mpsmin: 0,
        mpsmax: 0,
        ready_modes: 1,
    }
}
