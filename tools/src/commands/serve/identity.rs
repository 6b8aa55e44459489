//! Who a namespace is, where its device does not say: hosts tell namespaces apart, and recognise them, by UUID.
//!
//! Made from this machine's identity and the target's name, so that it is the same at every start and another one on every
//! machine: Linux refuses a namespace whose identity another subsystem has shown it.

use std::fs;

use crate::identity::uuid_of;
use crate::target::Target;

/// The identity of a target without one of its own. `subsystem` tells apart targets that have no place, such as memory.
pub fn derived(target: &Target, subsystem: &str) -> [u8; 16] {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let place = match target.path() {
        Some(path) => path.canonicalize().unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned(),
        None => format!("{subsystem} {target}"),
    };
    uuid_of(&[machine.trim(), &place])
}

/// A serial number from an identity: as many of its digits as the field has room for.
pub fn serial_of(uuid: &[u8; 16]) -> String {
    uuid.iter().take(10).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_apart_by_its_subsystem() {
        let memory: Target = "mem:1MiB".parse().unwrap();
        assert_ne!(derived(&memory, "a"), derived(&memory, "b"));
        let file: Target = "/nowhere/v".parse().unwrap();
        assert_eq!(derived(&file, "a"), derived(&file, "b"));
    }

    #[test]
    fn a_serial_fills_its_field() {
        assert_eq!(serial_of(&[0xab; 16]), "ab".repeat(10));
    }
}
