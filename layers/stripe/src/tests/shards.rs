//! Shards of one volume.

use super::*;

fn layer(shards: usize, blocks: u64, capacity_blocks: u64) -> Result<ShardLayer<MemoryDevice>, StripeError> {
    let shards = (0..shards).map(|_| MemoryDevice::new(BlockSize::B4096, blocks, None)).collect();
    ShardLayer::new(shards, ByteCount::new(4 * 4096), capacity_blocks)
}

#[test]
fn the_device_ends_within_the_last_row() {
    assert_eq!(layer(2, 16, 30).unwrap().geometry().capacity_blocks, 30);
    assert_eq!(layer(2, 16, 32).unwrap().geometry().capacity_blocks, 32);
    assert!(matches!(layer(2, 16, 33), Err(StripeError::Short { actual: 32, due: 33 })));
}

#[test]
fn data_are_sealed_by_the_shards_or_before_they_cross_to_them() {
    let way = |layer: &ShardLayer<MemoryDevice>| layer.abilities().get(RequestKind::Write);
    let here = layer(2, 16, 30).unwrap();
    assert_eq!(way(&here), here.shards()[0].abilities().get(RequestKind::Write));
    assert_eq!(way(&here.sealed_before()), Ability::Emulated);
}
