//! The client's side of NBD against bytes: no panic, no limit exceeded, and the same whatever the pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_protocols_nbd::fuzz::client::run(input));
