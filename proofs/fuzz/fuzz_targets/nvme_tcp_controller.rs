//! A whole NVMe/TCP target on a socket, and commands of a host that has gone mad: each is answered once, or the connection ends.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::controller::try_controller(input));
