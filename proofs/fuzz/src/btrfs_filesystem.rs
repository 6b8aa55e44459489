//! Whole filesystems of Btrfs, built by hand and then changed by the input: items, keys, the superblocks, and bytes of
//! the device. A device with two superblocks may have one of them from another filesystem, so that reading must choose. Nodes have valid checksums, so that readers see the content of items.
//!
//! Whatever was changed, opening and reading must end without a panic.

use std::sync::LazyLock;

use futures_executor::block_on;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::inode::{FileKind, Inode};
use sealblock_btrfs::walk::{Met, Walk};
use sealblock_btrfs::{Candidate, Cursor, Filesystem, OpenOptions};
use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::superblock::{COPY_OFFSETS, SUPERBLOCK_BYTES, Superblock};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::handmade::{DEVICE_BYTES, Handmade, Identity, Pieces as DevicePieces, Storage};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};
use zerocopy::{FromBytes, IntoBytes};

use crate::Pieces;

/// The maximum number of changes of one input.
const MAX_CHANGES: usize = 32;
/// The number of reads of one file, and of runs that are searched.
const MAX_STEPS: usize = 16;

/// Bytes of a device with two superblocks.
const TWO_COPIES_BYTES: u64 = DEVICE_BYTES + (1 << 20);

static SAMPLE: LazyLock<Handmade> = LazyLock::new(|| sample(Identity::default()));
static WITH_TWO_COPIES: LazyLock<Handmade> =
    LazyLock::new(|| sample(Identity { device_bytes: TWO_COPIES_BYTES, ..Identity::default() }));
static OTHER: LazyLock<DevicePieces> = LazyLock::new(|| {
    let fsid = *b"another one.....";
    sample(Identity { fsid, device_bytes: TWO_COPIES_BYTES, shift_bytes: 512 << 10, ..Identity::default() }).build()
});

fn sample(identity: Identity) -> Handmade {
    let mut made = Handmade::of(identity, 4096, ChecksumType::Crc32c);
    let top = objectid::FIRST_FREE;
    made.file(top, b"inline", &[1; 100], Storage::Inline);
    made.file(top, b"summed", &[2; 9000], Storage::Summed);
    made.file(top, b"unsummed", &[3; 5000], Storage::Unsummed);
    let folder = made.directory(top, b"folder");
    let inner = made.directory(folder, b"inner");
    for number in 0..10_u8 {
        made.file(inner, &[b'a' + number], &[number; 20], Storage::Inline);
    }
    made
}

/// Opens and reads a changed filesystem.
pub fn try_filesystem(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let mut made = SAMPLE.clone();
    let (mut pokes, mut superblock, mut foreign) = (Vec::new(), Vec::new(), None);
    let mut changes = 0;
    while !pieces.is_empty() && changes < MAX_CHANGES {
        changes += 1;
        match pieces.byte() % 8 {
            0 => pokes.push((pieces.short(), pieces.short(), pieces.byte())),
            1 => superblock.push((pieces.short(), pieces.byte())),
            7 if foreign.is_none() => {
                // Items that were changed before are as they were.
                made = WITH_TWO_COPIES.clone();
                foreign = Some(COPY_OFFSETS[usize::from(pieces.byte()) % 2]);
            }
            kind => change_item(&mut made, kind, &mut pieces),
        }
    }
    let mut built = made.build();
    if let Some(offset) = foreign {
        let at = |(at, _): &&(u64, Vec<u8>)| *at == offset;
        let (_, other) = OTHER.0.iter().find(at).expect("it has two superblocks");
        let (_, own) = built.0.iter_mut().find(|(at, _)| *at == offset).expect("it has two superblocks");
        own.clone_from(other);
    }
    for (at, byte) in superblock {
        change_superblock(&mut built, usize::from(at), byte);
    }
    for (piece, at, byte) in pokes {
        let count = built.0.len();
        let bytes = &mut built.0[usize::from(piece) % count].1;
        if let Some(place) = bytes.get_mut(usize::from(at)) {
            *place ^= byte;
        }
    }
    let bytes = if foreign.is_some() { TWO_COPIES_BYTES } else { DEVICE_BYTES };
    let candidate = Candidate { name: "memory".into(), device: device(&built, bytes) };
    if let Ok(filesystem) = block_on(Filesystem::open(vec![candidate], OpenOptions::default())) {
        block_on(read_all(&filesystem));
    }
}

/// Changes, adds or removes an item of a tree.
fn change_item(made: &mut Handmade, kind: u8, pieces: &mut Pieces) {
    let count = made.trees.len();
    let tree = *made.trees.keys().nth(usize::from(pieces.byte()) % count).expect("there are trees");
    let items = made.trees.get_mut(&tree).expect("it is one of them");
    let chosen = usize::from(pieces.byte()) % items.len().max(1);
    let Some(key) = items.keys().nth(chosen).copied() else { return };
    match kind {
        2 => {
            items.remove(&key);
        }
        3 => {
            // Adds the same item at another key.
            let bytes = items.get(&key).cloned().unwrap_or_default();
            let other = Key::new(key.objectid, key.item_type, key.offset.wrapping_add(u64::from(pieces.short()) << 12));
            items.insert(other, bytes);
        }
        4 => {
            let other = Key::new(u64::from(pieces.byte()) + 250, ItemType(pieces.byte()), pieces.word());
            let length = usize::from(pieces.byte());
            items.insert(other, pieces.bytes(length).to_vec());
        }
        _ => {
            let (at, change) = (usize::from(pieces.byte()), pieces.byte());
            if let Some(byte) = items.get_mut(&key).and_then(|bytes| bytes.get_mut(at)) {
                *byte = change;
            }
        }
    }
}

fn change_superblock(built: &mut DevicePieces, at: usize, byte: u8) {
    let Some((_, bytes)) = built.0.iter_mut().find(|(offset, _)| *offset == COPY_OFFSETS[0]) else { return };
    let mut superblock = Superblock::read_from_bytes(&bytes[..SUPERBLOCK_BYTES]).expect("it has its size");
    superblock.as_mut_bytes()[at % SUPERBLOCK_BYTES] = byte;
    superblock.seal();
    bytes.copy_from_slice(superblock.as_bytes());
}

fn device(built: &DevicePieces, bytes: u64) -> DynDevice {
    const BLOCK: usize = 4096;
    let device = DynDevice::new("memory", MemoryDevice::new(BlockSize::B4096, bytes / BLOCK as u64, None));
    for (offset, bytes) in &built.0 {
        let mut bytes = bytes.clone();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        let extent =
            Extent::from_raw(offset / BLOCK as u64, (bytes.len() / BLOCK) as u64).expect("it lies on the device");
        let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
        block_on(device.execute(Request::write(extent, data, Durability::Volatile))).expect("memory takes writes");
    }
    device
}

async fn read_all(filesystem: &Filesystem) {
    let (trees, _) = filesystem.trees().await;
    for tree in trees {
        let (mut cursor, mut last) = (Cursor::all(filesystem.nodes(), tree), None);
        loop {
            match cursor.next().await {
                Ok(None) => break,
                Ok(Some((key, _))) => assert!(last.replace(key) < Some(key), "keys ascend"),
                Err(_) => {}
            }
        }
    }
    let _ = (filesystem.space().await, filesystem.default_subvolume().await);
    let (subvolumes, _) = filesystem.subvolumes().await;
    for (id, subvolume) in subvolumes {
        let _ = filesystem.path_of_subvolume(id).await;
        let Ok(top) = filesystem.top(&subvolume).await else { continue };
        let mut walk = Walk::new(filesystem, top, true);
        while let Some(visit) = walk.next().await {
            if let Met::Inode(inode) = visit.met {
                read_inode(filesystem, &inode).await;
            }
        }
    }
}

async fn read_inode(filesystem: &Filesystem, inode: &Inode) {
    let _ = (
        filesystem.xattrs(inode).await,
        filesystem.paths(inode.tree, inode.ino).await,
        filesystem.read_link(inode).await,
    );
    if inode.kind != FileKind::Regular {
        return;
    }
    let mut at = 0;
    for _ in 0..MAX_STEPS {
        let Ok(Some((data, end))) = filesystem.next_data(inode, at, 1 << 20).await else { break };
        assert!(data >= at && end > data, "{at}: {data} to {end}");
        if let Ok(read) = filesystem.read(inode, data, 64 << 10).await {
            assert!(data + read.len() as u64 <= inode.size().max(data));
        }
        at = end;
    }
    let _ = filesystem.read(inode, inode.size().saturating_sub(100), 1000).await;
}
