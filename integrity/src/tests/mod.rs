//! Properties that hold for every format, unchanged bytes, and test vectors of other implementations.

mod joining;
mod properties;
mod rebasing;
mod shifting;
mod stability;
mod vectors;

use proptest::prelude::*;
use sealblock_units::BlockSize;

use crate::{Checks, GuardKind, Masked, Mismatch, PiFormat, ProtectionType, Tags, seal, verify};

/// Any legal format.
fn formats() -> impl Strategy<Value = PiFormat> {
    let guard = prop::sample::select(&GuardKind::ALL[..]);
    let protection = prop::sample::select(&ProtectionType::ALL[..]);
    (guard, protection).prop_flat_map(|(guard, protection)| {
        let (least, most) = guard.storage_tag_limits();
        (least..=most).prop_map(move |bits| PiFormat::new(guard, protection, bits).unwrap())
    })
}

/// A block size.
fn sizes() -> impl Strategy<Value = BlockSize> {
    prop::sample::select(&[BlockSize::B512, BlockSize::B4096][..])
}

/// Any tags that do not escape.
fn tags() -> impl Strategy<Value = Tags> {
    (0..u16::MAX, any::<u64>(), any::<u64>()).prop_map(|(app_tag, storage_tag, first_ref)| Tags {
        app_tag,
        storage_tag,
        initial_ref_tag: first_ref,
    })
}

/// Pseudorandom bytes from a seed.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        // xorshift64*, implemented here so that the stability tests depend on no other crate.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Checks of everything that `tags` sets.
fn all_checks(tags: &Tags) -> Checks {
    Checks {
        guard: true,
        app_tag: Some(Masked { expected: tags.app_tag, mask: u16::MAX }),
        storage_tag: Some(Masked { expected: tags.storage_tag, mask: u64::MAX }),
        initial_ref_tag: Some(tags.initial_ref_tag),
        ..Checks::NONE
    }
}

fn sealed(format: PiFormat, size: BlockSize, data: &[u8], tags: &Tags) -> Vec<u8> {
    let mut tuples = vec![0; data.len() / size.bytes() * format.tuple_bytes()];
    seal(format, size, data, &mut tuples, tags);
    tuples
}

fn mismatches(format: PiFormat, size: BlockSize, data: &[u8], tuples: &[u8], checks: &Checks) -> Vec<Mismatch> {
    let mut found = Vec::new();
    let bad = verify(format, size, data, tuples, checks, &mut |mismatch| found.push(mismatch));
    assert_eq!(bad, found.len());
    found
}
