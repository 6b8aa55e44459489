//! UUIDs of namespaces whose device has none: hosts recognise namespaces by UUID.
//!
//! Made from this machine's identity and the target's name, so that it is the same at every start and another one on every
//! machine: Linux refuses a namespace whose identity another subsystem has shown it.

use std::fs;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_stack::identity::uuid_of;
use sealblock_stack::target::TargetName;

/// The room for a serial number (Base, Identify Controller, field SN).
const SERIAL_BYTES: usize = 20;

/// The identity of a target without one of its own. `subsystem` distinguishes targets without a path, such as memory.
pub fn derived(target: &TargetName, subsystem: &str) -> [u8; 16] {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let place = match target.path() {
        Some(path) => path.canonicalize().unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned(),
        None => format!("{subsystem} {target}"),
    };
    uuid_of(&[machine.trim(), &place])
}

/// The serial number of a subsystem that was given none: the same as long as it has its name, whatever namespaces come and go,
/// and on every machine that offers it.
pub fn serial_of(nqn: &Nqn) -> String {
    uuid_of(&[nqn.as_str()]).iter().take(SERIAL_BYTES / 2).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_apart_by_its_subsystem() {
        let memory: TargetName = "mem:1MiB".parse().unwrap();
        assert_ne!(derived(&memory, "a"), derived(&memory, "b"));
        let file: TargetName = "/nowhere/v".parse().unwrap();
        assert_eq!(derived(&file, "a"), derived(&file, "b"));
    }

    #[test]
    fn a_serial_fills_its_field_and_goes_by_the_name() {
        let serial = |name: &str| serial_of(&format!("nqn.2026-11.org.example:{name}").parse().unwrap());
        assert!(serial("a").len() == SERIAL_BYTES && serial("a").bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(serial("a"), serial("a"));
        assert_ne!(serial("a"), serial("b"));
    }
}
