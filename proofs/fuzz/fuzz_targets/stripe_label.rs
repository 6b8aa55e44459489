//! Labels of stripes: any bytes are refused, are no label, or mean what writing them again would mean.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_fuzz::{Pieces, forge_stripe_label};
use sealblock_layers_stripe::label::{Label, MAX_MEMBERS};
use sealblock_units::{BlockSize, ByteCount};

fuzz_target!(|input: &[u8]| {
    check(input);
    // A good label with some bytes changed, its checksum right.
    let mut pieces = Pieces::new(input);
    let members = usize::from(pieces.byte()) % MAX_MEMBERS + 1;
    let label = Label {
        uuid: [7; 16],
        members,
        own_index: usize::from(pieces.byte()) % members,
        chunk: ByteCount::new(4096 << (pieces.byte() % 20)),
        capacity_blocks: pieces.word(),
        block_size: BlockSize::B4096,
        group_label: vec![1; usize::from(pieces.byte())],
    };
    let mut bytes = label.encode();
    assert_eq!(Label::decode(&bytes), Ok(Some(label)));
    while !pieces.is_empty() {
        let at = usize::from(pieces.short()) % bytes.len();
        bytes[at] = pieces.byte();
    }
    forge_stripe_label(&mut bytes);
    check(&bytes);
});

fn check(bytes: &[u8]) {
    if let Ok(Some(label)) = Label::decode(bytes) {
        assert!(label.own_index < label.members && label.members <= MAX_MEMBERS);
        assert_eq!(Label::decode(&label.encode()), Ok(Some(label)));
    }
}
