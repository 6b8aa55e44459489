//! Whole volumes with forged metadata: opened or refused, never a panic or a hang.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::image::try_image(input));
