//! A whole NVMe/TCP target on a socket, and the commands of a malicious host: each completes once, or the connection ends.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::controller::try_controller(input));
