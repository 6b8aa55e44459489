//! Concatenating runs of blocks.

use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use super::noise;
use crate::{ChecksumKind, GuardKind, PiFormat, ProtectionType, Sealed, Tags};

const SIZE: BlockSize = BlockSize::B512;
const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

fn blocks(format: Option<PiFormat>, count: usize) -> Sealed {
    Sealed::seal(Slice::copy_from(&noise(9, count * SIZE.bytes())), SIZE, format, &Tags::default())
}

#[test]
fn what_was_cut_is_joined_without_a_copy() {
    for format in [None, Some(TYPE1)] {
        let whole = blocks(format, 40);
        let joined = Sealed::join([whole.slice(0, 1), whole.slice(1, 16), whole.slice(17, 23)]);
        assert_eq!((joined.blocks(), joined.segments().len()), (40, 3));
        assert_eq!(joined.segments()[2].data.as_ptr(), whole.joined_data()[17 * SIZE.bytes()..].as_ptr());
        assert_eq!((joined.size(), joined.format(), joined.has_verified_guards()), (SIZE, format, true));
        assert_same(&joined, &whole);
        assert_same(&Sealed::join([joined.slice(0, 9), joined.slice(9, 31)]), &whole);
    }
}

/// All functions that read blocks return the same for one segment and for several.
fn assert_same(joined: &Sealed, whole: &Sealed) {
    assert!(joined.joined_data()[..] == whole.joined_data()[..] && joined.joined_tags()[..] == whole.joined_tags()[..]);
    assert!(joined.iter().eq(whole.iter()) && joined.tuples().eq(whole.tuples()));
    assert_eq!(joined.first_difference(whole, true), None);
    for kind in ChecksumKind::ALL {
        assert_eq!(joined.checksum(kind), kind.compute(&whole.joined_data()));
        assert_eq!(whole.checksum(kind), joined.checksum(kind));
    }
    assert!(joined.block_crcs().map(Iterator::collect::<Vec<_>>) == whole.block_crcs().map(Iterator::collect));
    let bytes = |sealed: &Sealed| sealed.interleaved().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
    assert_eq!(bytes(joined), bytes(whole));
    for (first, count) in [(0, 1), (0, 17), (1, 16), (16, 2), (3, 37), (39, 1), (20, 0)] {
        let (part, same) = (joined.slice(first, count), whole.slice(first, count));
        assert!(part.iter().eq(same.iter()) && part.blocks() == count, "{count} from {first}");
    }
    let deltas = (0..40).map(|block| block * block);
    let (moved, same) =
        (joined.clone().with_ref_tags_shifted(deltas.clone()), whole.clone().with_ref_tags_shifted(deltas));
    assert!(moved.tuples().eq(same.tuples()));
}

#[test]
fn the_first_block_that_differs_is_found_in_any_segment() {
    let whole = blocks(Some(TYPE1), 9);
    for block in 0..9 {
        let mut data = whole.joined_data().to_vec();
        data[block * SIZE.bytes() + 77] ^= 1;
        let other = Sealed::seal(Slice::copy_from(&data), SIZE, Some(TYPE1), &Tags::default());
        let joined = Sealed::join([other.slice(0, 4), other.slice(4, 5)]);
        assert_eq!([joined.first_difference(&whole, false), other.first_difference(&whole, false)], [Some(block); 2]);
        let moved = whole.clone().with_ref_tags_shifted((0..9).map(|at| u64::from(at == block)));
        assert_eq!([moved.first_difference(&whole, false), moved.first_difference(&whole, true)], [None, Some(block)]);
    }
}

#[test]
#[should_panic(expected = "beyond the data")]
fn a_run_beyond_the_segments_is_refused() {
    Sealed::join([blocks(None, 2), blocks(None, 3)]).slice(4, 2);
}

#[test]
#[should_panic(expected = "parts of one size and format")]
fn parts_of_different_formats_are_refused() {
    Sealed::join([blocks(None, 1), blocks(Some(TYPE1), 1)]);
}
