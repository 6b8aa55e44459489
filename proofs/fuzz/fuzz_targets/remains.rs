//! Whole volumes with forged metadata and no superblock: their layout is found or not, never a panic or a hang.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::image::try_remains(input));
