//! Blocks that do not match their tags.

use crate::common::*;
use sealblock_exports_nbd::Limits;
use sealblock_protocols_nbd::wire::{chunk, command as c, flag};

/// The errno and the offset of an error chunk.
fn error(chunk: &Chunk) -> (u32, u64) {
    let (kind, payload) = chunk;
    assert_eq!(*kind, chunk::ERROR_OFFSET);
    let offset = payload.last_chunk().map(|bytes| u64::from_be_bytes(*bytes));
    (u32::from_be_bytes(payload[..4].try_into().unwrap()), offset.unwrap())
}

#[test]
fn a_damaged_block_is_an_error_at_its_offset_after_the_data_before() {
    let served = serve(Limits::default());
    let data = pattern(16 * BLOCK, 5);
    Client::open(served.address, "protected", false).write(0, &data);
    served.damage(9);
    served.damage(11);
    for is_extended in [false, true] {
        for flags in [0, flag::DF] {
            let mut client = Client::open(served.address, "protected", is_extended);
            let chunks = client.ask(flags, c::READ, 2 * BLOCK, 12 * BLOCK, &[]);
            assert_eq!((chunks.len(), error(&chunks[1])), (2, (5, 9 * BLOCK)));
            let before = [&(2 * BLOCK).to_be_bytes()[..], &data[2 * BLOCK as usize..9 * BLOCK as usize]].concat();
            assert_eq!(chunks[0], (chunk::OFFSET_DATA, before));
            let first = client.ask(flags, c::READ, 9 * BLOCK, BLOCK, &[]);
            assert_eq!((first.len(), error(&first[0])), (1, (5, 9 * BLOCK)), "nothing lies before it");
            let behind = client.ask(flags, c::READ, 10 * BLOCK, 6 * BLOCK, &[]);
            assert_eq!(error(&behind[1]), (5, 11 * BLOCK));
            assert_eq!(client.read(10 * BLOCK, BLOCK), data[10 * BLOCK as usize..11 * BLOCK as usize]);
            assert_eq!(error(&client.ask(0, c::CACHE, 8 * BLOCK, 4 * BLOCK, &[])[0]), (5, 9 * BLOCK));
        }
    }
    let mut client = Client::open(served.address, "protected", true);
    client.write(9 * BLOCK, &data[..BLOCK as usize]);
    assert_eq!(client.read(9 * BLOCK, BLOCK), data[..BLOCK as usize], "what is written anew is good");
}
