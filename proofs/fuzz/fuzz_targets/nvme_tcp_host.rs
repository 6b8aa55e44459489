//! The host's side of NVMe/TCP against bytes: the same.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_protocols_nvme_tcp::fuzz::host(input));
