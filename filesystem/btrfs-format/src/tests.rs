//! Properties of all structures: any bytes are refused or encode to the same bytes, and items from the kernel decode to
//! their known values.

use proptest::prelude::*;

use crate::compress::{MAX_EXTENT_BYTES, Sizes, decompress};
use crate::items::Item;
use crate::items::file_extent::Compression;
use crate::key::{DiskKey, ItemType, Key, objectid};
use crate::node::Node;
use crate::superblock::{SUPERBLOCK_BYTES, Superblock};

/// Every type with a name, and one without.
fn types() -> impl Strategy<Value = ItemType> {
    let named: Vec<ItemType> = (0..=u8::MAX).map(ItemType).filter(|one| one.name().is_some()).collect();
    prop_oneof![9 => proptest::sample::select(named), 1 => Just(ItemType(99))]
}

/// Keys of these types, often of an object that changes the meaning of the type.
fn keys() -> impl Strategy<Value = Key> {
    let special = proptest::sample::select(vec![0, 5, 257, objectid::BALANCE, objectid::FREE_SPACE]);
    let object = prop_oneof![3 => special, 1 => any::<u64>()];
    (object, types(), prop_oneof![Just(0), any::<u64>()]).prop_map(|(objectid, item_type, offset)| Key {
        objectid,
        item_type,
        offset,
    })
}

/// Bytes in which small numbers are frequent, so that lengths fit and types are known.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![6 => Just(0_u8), 3 => 0..9_u8, 1 => any::<u8>()];
    let sizes = prop_oneof![
        proptest::sample::select(vec![0, 4, 8, 24, 28, 32, 40, 41, 48, 53, 72, 80, 98, 112, 160, 239, 439, 448]),
        0..500_usize
    ];
    sizes.prop_flat_map(move |size| proptest::collection::vec(byte.clone(), size))
}

fn assert_round_trip(key: Key, bytes: &[u8]) {
    if let Ok(item) = Item::decode(key, bytes) {
        assert_eq!(item.encode().unwrap(), bytes, "{key}");
        assert!(!format!("{item:?}").is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_refused_as_an_item_or_come_back(key in keys(), bytes in bytes()) {
        assert_round_trip(key, &bytes);
    }

    #[test]
    fn any_bytes_are_refused_as_a_node_or_every_part_lies_within(bytes in bytes(), level in 0..3_u8, count in 0..20_u32) {
        let mut bytes = [&[0; 101][..], &bytes].concat();
        bytes[96..100].copy_from_slice(&count.to_le_bytes());
        bytes[100] = level;
        if let Ok(node) = Node::decode(&bytes) {
            let all: usize = node.entries().map(|(_, data)| data.len()).max().unwrap_or(0);
            prop_assert!(all <= bytes.len());
            prop_assert_eq!(node.items().len() + node.pointers().len(), count as usize);
        }
    }

    #[test]
    fn any_superblock_is_read_and_its_chunks_end(bytes in proptest::collection::vec(any::<u8>(), SUPERBLOCK_BYTES)) {
        let superblock = Superblock::decode(&bytes).unwrap();
        prop_assert!(superblock.check(65_536).is_err());
        prop_assert!(superblock.sys_chunks().count() <= 2048 / 97 + 1);
        prop_assert!(superblock.newest_backup() < 4);
    }

    #[test]
    fn any_stream_is_refused_or_fills_the_extent(
        bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 1..4_u8, plain_bytes in 0..=MAX_EXTENT_BYTES + 1
    ) {
        let kind = Compression::from_number(kind).unwrap();
        let magic: &[u8] = match kind {
            Compression::Zlib => &[0x78, 0x5e],
            Compression::Zstd => &[0x28, 0xb5, 0x2f, 0xfd],
            _ => &[40, 0, 0, 0, 20, 0, 0, 0],
        };
        for stored in [bytes.clone(), [magic, &bytes].concat()] {
            if let Ok(plain) = decompress(kind, &stored, Sizes { plain_bytes, sector_bytes: 4096 }) {
                prop_assert_eq!(plain.len(), plain_bytes);
            }
        }
    }

    #[test]
    fn keys_come_back(objectid: u64, item_type: u8, offset: u64) {
        let key = Key::new(objectid, ItemType(item_type), offset);
        prop_assert_eq!(DiskKey::from(key).get(), key);
        prop_assert!(key.next().is_none_or(|next| next > key));
    }
}
