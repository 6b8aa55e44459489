//! Whole volumes of several segments with forged metadata: as `image`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sealblock_fuzz::image::try_resized(input));
