//! Putting runs of blocks behind one another.

use sealblock_runtime_memory::{Buffer, Pool, Slice};
use sealblock_units::BlockSize;

use super::noise;
use crate::{GuardKind, PiFormat, ProtectionType, Sealed, Tags};

const SIZE: BlockSize = BlockSize::B512;
const TYPE1: PiFormat = PiFormat::with_default_storage_tag(GuardKind::Crc32c, ProtectionType::Type1);

fn blocks(format: Option<PiFormat>, count: usize) -> Sealed {
    Sealed::seal(Slice::copy_from(&noise(9, count * SIZE.bytes())), SIZE, format, &Tags::default())
}

#[test]
fn what_was_cut_is_joined_in_fresh_and_in_used_memory() {
    let pool = Pool::new(0, usize::MAX);
    for format in [None, Some(TYPE1)] {
        let whole = blocks(format, 40);
        let parts = [whole.slice(0, 1), whole.slice(1, 16), whole.slice(17, 23)];
        for bytes in [40 * 512, 40 * 16] {
            pool.take(bytes).fill(0xEE);
        }
        for joined in [Sealed::join(&parts), Sealed::join_in(&parts, |len| pool.take(len))] {
            assert!(joined.data()[..] == whole.data()[..] && joined.tags()[..] == whole.tags()[..]);
            assert_eq!((joined.size(), joined.format(), joined.has_verified_guards()), (SIZE, format, true));
        }
    }
    assert!(pool.counters().spare_bytes > 0, "what was used is kept");
}

#[test]
#[should_panic(expected = "parts of one size and format")]
fn parts_of_different_formats_are_refused() {
    Sealed::join(&[blocks(None, 1), blocks(Some(TYPE1), 1)]);
}

#[test]
#[should_panic(expected = "memory of the requested length")]
fn memory_that_is_too_long_is_refused() {
    let parts = [blocks(None, 1), blocks(None, 1)];
    Sealed::join_in(&parts, |len| Buffer::zeroed(len + 1));
}
