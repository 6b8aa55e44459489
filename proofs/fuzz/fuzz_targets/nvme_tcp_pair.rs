//! Both sides of NVMe/TCP over a wire that the input cuts and corrupts: what is intact works, and what is corrupt ends the connection.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_protocols_nvme_tcp::fuzz::pair(input));
