//! Mirrors of two volumes, as tests begin with them.

use serde_json::Value;

use super::{Place, noise};

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// Two volumes of this many blocks that a mirror has filled.
pub fn filled(place: &Place, blocks: usize) -> Vec<u8> {
    let data = noise(11, blocks * BLOCK);
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size {}", blocks * BLOCK)).succeeds();
    }
    // Twice, so that each block has an older content that can come back.
    place.write("data", &noise(10, blocks * BLOCK));
    place.run("copy data mirror:a,b").succeeds();
    place.write("data", &data);
    place.run("copy data mirror:a,b").succeeds();
    data
}

/// What `verify` reports, with this exit status.
#[track_caller]
pub fn verify(place: &Place, target: &str, status: i32) -> Value {
    place.run(&format!("verify {target} --json")).ends_with(status).json()
}
