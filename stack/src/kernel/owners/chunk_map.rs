//! Where the bytes of a btrfs's device are in its logical addresses.
//!
//! A chunk lies on stripes of devices by its profile (`BTRFS_BLOCK_GROUP_*` of `linux/btrfs_tree.h`): all of it on each stripe (single, DUP, RAID1
//! and its kin), or element by element in turns (RAID0, RAID10). RAID5 and RAID6 rotate and have parity; of them nothing is said.

use sealblock_runtime_ioctl::btrfs::Chunk;

const DATA: u64 = 1;
const RAID0: u64 = 1 << 3;
const RAID10: u64 = 1 << 6;
const PARITY: u64 = 1 << 7 | 1 << 8;

/// What a byte of a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    /// Data of this logical address.
    Data(u64),
    /// Metadata, or in no chunk: no file has it.
    NoFile,
    /// In a chunk whose layout is not known here.
    Unknown,
}

/// What a byte of a device means.
pub(super) fn meaning(chunks: &[Chunk], device: u64, byte: u64) -> Meaning {
    let each = chunks.iter().flat_map(|chunk| chunk.stripes.iter().enumerate().map(move |stripe| (chunk, stripe)));
    for (chunk, (number, (on, start))) in each {
        let Some(within) = byte.checked_sub(*start).filter(|within| *on == device && *within < device_bytes(chunk))
        else {
            continue;
        };
        return match (chunk.profile & PARITY != 0, chunk.profile & DATA != 0) {
            (true, _) => Meaning::Unknown,
            (false, false) => Meaning::NoFile,
            (false, true) => logical(chunk, number as u64, within).map_or(Meaning::Unknown, Meaning::Data),
        };
    }
    Meaning::NoFile
}

/// How many stripes have different data, and which one has the data of stripe `number`.
fn turns(chunk: &Chunk, number: u64) -> (u64, u64) {
    let stripes = chunk.stripes.len() as u64;
    let copies = if chunk.profile & RAID10 != 0 { u64::from(chunk.sub_stripes).max(1) } else { 1 };
    match chunk.profile & (RAID0 | RAID10) {
        0 => (1, 0),
        _ => ((stripes / copies).max(1), number / copies),
    }
}

/// Bytes that a chunk takes of each device; all of it for what is not known.
fn device_bytes(chunk: &Chunk) -> u64 {
    if chunk.profile & PARITY != 0 { chunk.length_bytes } else { chunk.length_bytes / turns(chunk, 0).0 }
}

fn logical(chunk: &Chunk, number: u64, within: u64) -> Option<u64> {
    let (width, turn) = turns(chunk, number);
    let (row, rest) = (within / chunk.stripe_bytes, within % chunk.stripe_bytes);
    let offset = match width {
        1 => within,
        _ => row.checked_mul(width)?.checked_add(turn)?.checked_mul(chunk.stripe_bytes)?.checked_add(rest)?,
    };
    (offset < chunk.length_bytes).then(|| chunk.logical_bytes + offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STRIPE: u64 = 64 << 10;

    fn chunk(logical_bytes: u64, length_bytes: u64, profile: u64, sub_stripes: u16, stripes: &[(u64, u64)]) -> Chunk {
        Chunk { logical_bytes, length_bytes, stripe_bytes: STRIPE, profile, sub_stripes, stripes: stripes.to_vec() }
    }

    #[test]
    fn copies_have_the_same_address_and_metadata_and_free_space_have_no_file() {
        let chunks = [
            chunk(1 << 30, 1 << 20, DATA | 1 << 4, 1, &[(1, 4096), (2, 8192)]),
            chunk(2 << 30, 1 << 20, 1 << 2 | 1 << 5, 1, &[(1, 8 << 20), (1, 16 << 20)]),
        ];
        assert_eq!(meaning(&chunks, 1, 4096 + 100), Meaning::Data((1 << 30) + 100));
        assert_eq!(meaning(&chunks, 2, 8192 + 100), Meaning::Data((1 << 30) + 100));
        assert_eq!(meaning(&chunks, 2, 4096), Meaning::NoFile);
        assert_eq!(meaning(&chunks, 1, (16 << 20) + 5), Meaning::NoFile);
        assert_eq!(meaning(&chunks, 1, 4096 + (1 << 20)), Meaning::NoFile);
    }

    #[test]
    fn stripes_take_turns_and_parity_is_unknown() {
        let raid0 = [chunk(0, 4 * STRIPE, DATA | RAID0, 1, &[(1, 0), (2, 0)])];
        assert_eq!(meaning(&raid0, 2, 5), Meaning::Data(STRIPE + 5));
        assert_eq!(meaning(&raid0, 1, STRIPE + 5), Meaning::Data(2 * STRIPE + 5));
        assert_eq!(meaning(&raid0, 1, 2 * STRIPE), Meaning::NoFile);
        let raid10 = [chunk(0, 4 * STRIPE, DATA | RAID10, 2, &[(1, 0), (2, 0), (3, 0), (4, 0)])];
        for device in [3, 4] {
            assert_eq!(meaning(&raid10, device, STRIPE + 7), Meaning::Data(3 * STRIPE + 7));
        }
        let raid5 = [chunk(0, 4 * STRIPE, DATA | 1 << 7, 1, &[(1, 0), (2, 0), (3, 0)])];
        assert_eq!(meaning(&raid5, 1, 0), Meaning::Unknown);
    }

    proptest! {
        #[test]
        fn no_two_bytes_of_different_stripes_are_one_logical_byte(width in 1..5_u64, rows in 1..5_u64, a in 0..20 * STRIPE, b in 0..20 * STRIPE) {
            let stripes: Vec<(u64, u64)> = (1..=width).map(|device| (device, 0)).collect();
            let chunks = [chunk(1 << 40, width * rows * STRIPE, DATA | RAID0, 1, &stripes)];
            let (of_a, of_b) = (meaning(&chunks, 1, a), meaning(&chunks, width, b));
            if let (Meaning::Data(of_a), Meaning::Data(of_b)) = (of_a, of_b) {
                prop_assert!(of_a != of_b || (width == 1 && a == b));
                prop_assert!((1 << 40..(1 << 40) + width * rows * STRIPE).contains(&of_a));
            }
        }

        #[test]
        fn no_chunk_is_a_reason_to_panic(length in 1..u64::MAX, stripe in 1..u64::MAX, profile in any::<u64>(), sub in any::<u16>(), byte in any::<u64>()) {
            let odd = Chunk { stripe_bytes: stripe, ..chunk(u64::MAX - length, length, profile, sub, &[(1, 0), (1, 5)]) };
            let _ = meaning(&[odd], 1, byte);
        }
    }
}
