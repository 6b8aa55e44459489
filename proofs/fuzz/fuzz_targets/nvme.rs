//! NVMe structures: commands that a target reads, pages that a host reads; what is read writes and reads as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::nvme::try_structures(input));
