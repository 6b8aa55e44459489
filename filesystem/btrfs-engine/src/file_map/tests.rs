//! Cases with known results; random ones are in `model`.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use super::*;
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
use sealblock_btrfs_format::item_changes::{ItemChange, ItemChanges};
use sealblock_btrfs_format::superblock::Geometry;

mod model;

/// Bytes of a sector.
const S: u64 = 4096;
const MANY: NonZeroUsize = NonZeroUsize::new(1000).unwrap();

type Tree = BTreeMap<Key, Vec<u8>>;

fn file() -> File {
    File { root: 5, ino: 257, sector_bytes: 4096, node_bytes: 16_384, has_hole_items: false, has_sums: true }
}

fn geometry() -> Geometry {
    Geometry {
        sector_bytes: 4096,
        node_bytes: 16_384,
        checksum: ChecksumType::Crc32c,
        features: Features { compat: Compat::empty(), compat_ro: CompatRo::empty(), incompat: Incompat::empty() },
        node_uuid: [0; 16],
        generation: 1 << 40,
    }
}

fn apply_items(tree: &mut Tree, changes: ItemChanges) {
    for (key, change) in changes {
        match change {
            ItemChange::Insert(data) => assert!(tree.insert(key, data).is_none(), "{key}"),
            ItemChange::Replace(data) => assert!(tree.insert(key, data).is_some(), "{key}"),
            ItemChange::Delete => assert!(tree.remove(&key).is_some(), "{key}"),
        }
    }
}

fn inline(bytes: u64, generation: u64) -> InlinePart {
    InlinePart { generation, compression: Compression::None, plain_bytes: bytes, stored: vec![7; bytes as usize] }
}
