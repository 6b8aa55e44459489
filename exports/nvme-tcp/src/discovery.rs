//! The discovery log page: the subsystems that this host may connect to, at the address that it connected to.

use std::net::SocketAddr;

use sealblock_protocols_nvme::logs::{DiscoveryEntry, DiscoveryLog, SubsystemType};
use sealblock_protocols_nvme::nqn::Nqn;

use crate::registry::TargetState;

/// Returns the discovery log page for this host. Its generation counts changes of subsystems and of their allowed
/// hosts.
pub(crate) fn log(target: &TargetState, host: Option<&Nqn>, at: SocketAddr) -> Vec<u8> {
    let entry = |kind, nqn: &Nqn| DiscoveryEntry::tcp(kind, 1, at.ip(), at.port(), nqn);
    let mut entries = vec![entry(SubsystemType::CurrentDiscovery, &Nqn::discovery())];
    let (generation, subsystems) = target.subsystems();
    let allowed = subsystems.iter().filter(|subsystem| subsystem.allows(host));
    entries.extend(allowed.map(|subsystem| entry(SubsystemType::Nvm, &subsystem.nqn)));
    DiscoveryLog { generation, entries }.encode()
}
