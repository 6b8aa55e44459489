//! Qualified names: what is read writes and reads as the same, as text, on the wire and within a URI.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::nvme::try_name(input));
