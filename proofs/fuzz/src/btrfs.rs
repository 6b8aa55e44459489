//! Structures of Btrfs: superblocks, nodes, items and compressed extents.
//!
//! Checksums are forged, so that the code after the check is tested too; nodes are also built from the input, so that
//! items are reached.

use sealblock_btrfs_format::checker::{Expected, check_node};
use sealblock_btrfs_format::checker_items::{Context, check_chunk, check_item};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::compress::{MAX_EXTENT_BYTES, Sizes, decompress};
use sealblock_btrfs_format::features::{Compat, CompatRo, Features, Incompat};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::key::{DiskKey, ItemType, Key, objectid};
use sealblock_btrfs_format::node::{HEADER_BYTES, Header, KeyPointer, Node, flags, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, Geometry, MAGIC, SUPERBLOCK_BYTES, Superblock};
use zerocopy::{FromBytes, IntoBytes};

use crate::Pieces;

const NODE_BYTES: u32 = 4096;
const BYTENR: u64 = 1 << 20;

fn geometry(incompat: u64) -> Geometry {
    Geometry {
        sector_bytes: 4096,
        node_bytes: NODE_BYTES,
        checksum: ChecksumType::Crc32c,
        features: Features {
            compat: Compat::empty(),
            compat_ro: CompatRo::empty(),
            incompat: Incompat::from_bits_retain(incompat),
        },
        node_uuid: [0; 16],
        generation: 1 << 40,
    }
}

/// Superblocks.
pub fn try_superblock(input: &[u8]) {
    let mut superblock = Superblock::read_from_bytes(&[0; SUPERBLOCK_BYTES]).expect("a superblock has as many bytes");
    let length = input.len().min(SUPERBLOCK_BYTES);
    superblock.as_mut_bytes()[..length].copy_from_slice(&input[..length]);
    let _ = superblock.check(COPY_OFFSETS[0]);
    superblock.magic = MAGIC;
    superblock.bytenr = COPY_OFFSETS[0].into();
    superblock.csum_type = (superblock.csum_type.get() % 4).into();
    superblock.seal();
    let chunks = superblock.sys_chunks().filter(Result::is_ok).count();
    assert!(chunks * 97 <= superblock.sys_chunk_array.len() && superblock.label().len() <= 256);
    let Ok(geometry) = superblock.check(COPY_OFFSETS[0]) else { return };
    let _ = (geometry.features.check_reading(), geometry.features.check_writing());
    for (key, chunk) in superblock.sys_chunks().map_while(Result::ok) {
        let _ = check_chunk(&geometry, key, &chunk);
    }
    let bytes = superblock.as_bytes();
    assert_eq!(Superblock::decode(bytes).expect("it has its size").as_bytes(), bytes);
}

/// A key, mostly of a type that there is.
pub(crate) fn key(pieces: &mut Pieces) -> Key {
    let named: Vec<ItemType> = (0..=u8::MAX).map(ItemType).filter(|one| one.name().is_some()).collect();
    let byte = pieces.byte();
    let item_type = named.get(usize::from(byte)).copied().unwrap_or(ItemType(byte));
    let objectid = match pieces.byte() {
        0 => objectid::EXTENT_CSUM,
        1 => objectid::FREE_SPACE,
        2 => objectid::BALANCE,
        3 => u64::from(pieces.short()) << 12,
        4..8 => pieces.word(),
        other => u64::from(other) + 248,
    };
    let offset = match pieces.byte() {
        0 => pieces.word(),
        1 => u64::from(pieces.short()) << 12,
        other => u64::from(other) - 2,
    };
    Key::new(objectid, item_type, offset)
}

/// Nodes: the rest of the input is taken as raw bytes, and as items or pointers.
pub fn try_node(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let (level, owner, is_raw) = (pieces.byte() % 9, u64::from(pieces.short()), pieces.byte() % 4 == 0);
    let geometry = geometry(pieces.word());
    let mut header = Header::read_from_bytes(&[0; HEADER_BYTES]).expect("a header has as many bytes");
    (header.bytenr, header.owner, header.level) = (BYTENR.into(), owner.into(), level);
    (header.generation, header.flags) = (9.into(), flags::WRITTEN.into());
    let bytes = if is_raw {
        let mut bytes = vec![0; NODE_BYTES as usize];
        header.nritems = u32::from(pieces.byte()).into();
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        let rest = pieces.rest();
        let length = rest.len().min(bytes.len() - HEADER_BYTES);
        bytes[HEADER_BYTES..][..length].copy_from_slice(&rest[..length]);
        geometry.checksum.seal(&mut bytes);
        bytes
    } else {
        let Some(bytes) = built(&header, pieces) else { return };
        bytes
    };
    let expected = Expected { bytenr: BYTENR, owner, level, generation: 9, first_key: None };
    let Ok(node) = check_node(&bytes, &geometry, &expected) else { return };
    assert_eq!(node.entries().count(), node.items().len());
    for (key, data) in node.entries() {
        let item = Item::decode(key, data).expect("what was checked can be read");
        assert_eq!(item.encode().expect("what was read can be written"), data);
    }
    assert!((0..node.pointers().len()).all(|slot| node.child(slot, owner).is_some()));
    if !is_raw {
        let again = match level {
            0 => write_leaf(node.header(), node.entries(), NODE_BYTES, geometry.checksum),
            _ => write_inner(node.header(), node.pointers(), NODE_BYTES, geometry.checksum),
        };
        assert_eq!(again.as_ref(), Ok(&bytes));
    }
}

fn built(header: &Header, mut pieces: Pieces) -> Option<Vec<u8>> {
    let (mut items, mut pointers) = (Vec::new(), Vec::new());
    while !pieces.is_empty() && items.len() + pointers.len() < 50 {
        let key = key(&mut pieces);
        if header.level == 0 {
            let length = usize::from(pieces.byte()) * if pieces.byte() & 1 == 0 { 1 } else { 4 };
            items.push((key, pieces.bytes(length)));
        } else {
            pointers.push(KeyPointer::new(key, u64::from(pieces.short()) << 12, u64::from(pieces.byte())));
        }
    }
    items.sort_by_key(|(key, _)| *key);
    pointers.sort_by_key(KeyPointer::key);
    match header.level {
        0 => write_leaf(header, items, NODE_BYTES, ChecksumType::Crc32c).ok(),
        _ => write_inner(header, &pointers, NODE_BYTES, ChecksumType::Crc32c).ok(),
    }
}

/// Items: a key, a split, and the data of one item or of two consecutive ones.
pub fn try_item(input: &[u8]) {
    let _ = Node::decode(input);
    let mut pieces = Pieces::new(input);
    let (key, other) = (key(&mut pieces), key(&mut pieces));
    let geometry = geometry(pieces.word());
    let length = usize::from(pieces.byte());
    let before = pieces.bytes(length);
    let data = pieces.rest();
    for (owner, previous) in [(5, None), (5, Some((Key { item_type: key.item_type, ..other }, before))), (2, None)] {
        let is_good = check_item(&Context { geometry: &geometry, owner, key, previous }, data).is_ok();
        match Item::decode(key, data) {
            Ok(item) => {
                assert_eq!(item.encode().expect("what was read can be written"), data);
                assert!(!format!("{item:?}").is_empty());
            }
            Err(_) => assert!(!is_good, "what has not its shape breaks a rule"),
        }
    }
    assert_eq!(DiskKey::from(key).get(), key);
}

/// Compressed extents.
pub fn try_compressed(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let (choice, plain_bytes) = (pieces.byte(), usize::from(pieces.short()) * 2 + 1);
    let kind = Compression::ALL[1 + usize::from(choice % 3)];
    let rest = pieces.rest();
    let total = (rest.len() as u32 + 8).to_le_bytes();
    let beginning = match kind {
        Compression::Zlib => vec![0x78, 0x5e],
        Compression::Zstd => vec![0x28, 0xb5, 0x2f, 0xfd],
        _ => [total, (rest.len() as u32).to_le_bytes()].concat(),
    };
    for stored in [rest.to_vec(), [&beginning, rest].concat()] {
        let sizes = Sizes { plain_bytes: plain_bytes.min(MAX_EXTENT_BYTES), sector_bytes: 4096 };
        if let Ok(plain) = decompress(kind, &stored, sizes) {
            assert_eq!(plain.len(), sizes.plain_bytes);
        }
    }
}
