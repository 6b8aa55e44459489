//! The target's side of NVMe/TCP against bytes: no panic, no limit exceeded, and what is closed stays closed.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_protocols_nvme_tcp::fuzz::target(input));
