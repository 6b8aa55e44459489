use super::*;
use sealblock_integrity::{Field, GuardKind, ProtectionType, Tags};
use sealblock_units::Lba;

fn codec(pi_mode: PiMode, size: BlockSize) -> BlockCodec {
    BlockCodec { size, pi_mode, crc_layout: None }
}

fn format(guard: GuardKind, kind: ProtectionType) -> PiFormat {
    PiFormat::with_default_storage_tag(guard, kind)
}

fn extent(start: u64, blocks: u64) -> Extent {
    Extent::from_raw(start, blocks).unwrap()
}

fn sealed(size: BlockSize, format: PiFormat, start: u64, blocks: usize) -> Sealed {
    let bytes: Vec<u8> = (0..blocks * size.bytes()).map(|i| (i / 5) as u8).collect();
    let tags = Tags { app_tag: 5, storage_tag: 0, initial_ref_tag: start };
    Sealed::seal(Slice::copy_from(&bytes), size, Some(format), &tags)
}

/// Blocks are received as they were sent, whether copied together or gathered.
#[test]
fn blocks_travel_interleaved_and_are_taken_apart() {
    let pool = Pool::new(0, usize::MAX);
    for size in [BlockSize::B512, BlockSize::B4096] {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            for blocks in [1, 2, 9] {
                let format = format(guard, ProtectionType::Type1);
                let codec = codec(PiMode::Host(format), size);
                let data = sealed(size, format, 7, blocks);
                let bytes: Vec<u8> =
                    codec.payload(&data, &pool).slices().iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(bytes.len(), codec.read_bytes(extent(7, blocks as u64)));
                let checksummed = Cell::new(0);
                let arrived = |bytes: &[u8]| {
                    let read = ReadData { buffer: Buffer::copy_from(bytes), crcs: None, is_damaged: false };
                    codec.check_read(read, &Checks::full(format, Lba::new(7)), &pool, &checksummed)
                };
                let back = arrived(&bytes).unwrap();
                assert_eq!(
                    (
                        back.joined_data()[..] == data.joined_data()[..],
                        back.joined_tags()[..] == data.joined_tags()[..]
                    ),
                    (true, true)
                );
                let mut wrong = bytes.clone();
                let last = wrong.len() - size.bytes() / 2;
                wrong[last] ^= 4;
                let mismatches = arrived(&wrong).unwrap_err();
                assert_eq!((mismatches.len(), mismatches[0].block, mismatches[0].field), (1, blocks - 1, Field::Guard));
            }
        }
    }
}

/// The digest of data with unverified guards is recomputed.
#[test]
fn only_verified_guards_yield_a_digest() {
    let pool = Pool::new(0, usize::MAX);
    let format = format(GuardKind::Crc32c, ProtectionType::Type1);
    let layout = BlockLayout::new(4096, 16);
    let codec = BlockCodec { crc_layout: layout, ..codec(PiMode::Host(format), BlockSize::B4096) };
    let data = sealed(BlockSize::B4096, format, 0, 1);
    assert!(data.has_verified_guards());
    assert!(format!("{:?}", codec.payload(&data, &pool)).contains("crcs: Some"));
    let raw = Unverified::new(data.joined_data(), data.joined_tags(), BlockSize::B4096, Some(format)).unwrap();
    let raw = raw.verify(&Checks::NONE).unwrap();
    assert!(format!("{:?}", codec.payload(&raw, &pool)).contains("crcs: None"));
}
