//! Changes of a superblock: the roots of a transaction, backup roots, and the system chunk array.
//!
//! A new filesystem begins with [`Superblock::create`]. A transaction makes one superblock with [`Superblock::set_commit`], and a copy of it for each device and place with
//! [`Superblock::copy_for`]. Everything else is kept: labels, features, unknown bits, reserved bytes and padding.

use zerocopy::{FromZeros, IntoBytes};

use crate::checksum::ChecksumType;
use crate::error::{DecodeError, TooLong};
use crate::features::Features;
use crate::items::chunk::Chunk;
use crate::items::device::DevItem;
use crate::items::root::RootNode;
use crate::key::{DiskKey, Key, objectid};
use crate::superblock::{BackupRoot, MAGIC, Superblock, flags};

/// What a superblock says of its filesystem from the beginning on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Creation<'a> {
    /// The UUID, which is public and in nodes.
    pub fsid: [u8; 16],
    /// A name, without zero bytes.
    pub label: &'a [u8],
    /// Bytes of a sector.
    pub sector_bytes: u32,
    /// Bytes of a node.
    pub node_bytes: u32,
    /// How checksums are computed.
    pub checksum: ChecksumType,
    /// Features.
    pub features: Features,
}

/// The root nodes of the trees that a backup root has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TreeRoots {
    /// The root tree.
    pub tree: RootNode,
    /// The chunk tree.
    pub chunk: RootNode,
    /// The extent tree.
    pub extent: RootNode,
    /// The first subvolume.
    pub fs: RootNode,
    /// The device tree.
    pub dev: RootNode,
    /// The checksum tree.
    pub csum: RootNode,
}

/// What a transaction changes in the superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Commit {
    /// The transaction.
    pub generation: u64,
    /// Its root nodes.
    pub roots: TreeRoots,
    /// Bytes of all devices.
    pub total_bytes: u64,
    /// Bytes of all nodes and data extents.
    pub bytes_used: u64,
    /// Devices.
    pub num_devices: u64,
}

/// Why the system chunk array cannot be changed. It is then unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SysChunkError {
    /// The array is damaged.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// There is no room.
    #[error(transparent)]
    Full(#[from] TooLong),
    /// The array has a chunk with this key.
    #[error("the array has a chunk {0}")]
    Exists(Key),
}

impl BackupRoot {
    /// The backup root of a transaction.
    pub fn new(commit: &Commit) -> BackupRoot {
        let TreeRoots { tree, chunk, extent, fs, dev, csum } = commit.roots;
        BackupRoot {
            tree_root: tree.bytenr.into(),
            tree_root_generation: tree.generation.into(),
            chunk_root: chunk.bytenr.into(),
            chunk_root_generation: chunk.generation.into(),
            extent_root: extent.bytenr.into(),
            extent_root_generation: extent.generation.into(),
            fs_root: fs.bytenr.into(),
            fs_root_generation: fs.generation.into(),
            dev_root: dev.bytenr.into(),
            dev_root_generation: dev.generation.into(),
            csum_root: csum.bytenr.into(),
            csum_root_generation: csum.generation.into(),
            total_bytes: commit.total_bytes.into(),
            bytes_used: commit.bytes_used.into(),
            num_devices: commit.num_devices.into(),
            tree_root_level: tree.level,
            chunk_root_level: chunk.level,
            extent_root_level: extent.level,
            fs_root_level: fs.level,
            dev_root_level: dev.level,
            csum_root_level: csum.level,
            ..BackupRoot::new_zeroed()
        }
    }
}

impl Superblock {
    /// A superblock before the first transaction: no roots, no system chunks, no device. [`Superblock::set_commit`],
    /// [`Superblock::push_sys_chunk`] and [`Superblock::copy_for`] set these. The space cache of version 1 is not used.
    ///
    /// # Errors
    /// If the label leaves no room for its zero byte.
    pub fn create(creation: &Creation) -> Result<Superblock, TooLong> {
        let mut superblock = Superblock::new_zeroed();
        let Creation { label, sector_bytes, node_bytes, features, .. } = *creation;
        let most = superblock.label.len() - 1;
        let room = superblock.label[..most].get_mut(..label.len());
        room.ok_or(TooLong { what: "label", length: label.len(), most })?.copy_from_slice(label);
        (superblock.fsid, superblock.magic) = (creation.fsid, MAGIC);
        superblock.root_dir_objectid = objectid::ROOT_TREE_DIR.into();
        (superblock.sector_bytes, superblock.stripe_bytes) = (sector_bytes.into(), sector_bytes.into());
        (superblock.node_bytes, superblock.leaf_bytes) = (node_bytes.into(), node_bytes.into());
        superblock.csum_type = creation.checksum.number().into();
        superblock.compat = features.compat.bits().into();
        superblock.compat_ro = features.compat_ro.bits().into();
        superblock.incompat = features.incompat.bits().into();
        Ok(superblock)
    }

    /// Makes this the superblock of a transaction. There is no log then, and the backup root after the newest one is
    /// that of the transaction; a second superblock of the same transaction has the same one. The UUID tree stays valid
    /// if it was, because whoever writes keeps it so. The space cache of version 1 is not kept: its generation stays,
    /// so that Linux sees that it is older.
    pub fn set_commit(&mut self, commit: &Commit) {
        let newest = self.newest_backup();
        let is_same = self.backup_roots[newest].tree_root_generation == commit.generation;
        let slot = if is_same { newest } else { (newest + 1) % self.backup_roots.len() };
        self.backup_roots[slot] = BackupRoot::new(commit);
        if self.uuid_tree_generation == self.generation {
            self.uuid_tree_generation = commit.generation.into();
        }
        let TreeRoots { tree, chunk, .. } = commit.roots;
        self.generation = commit.generation.into();
        (self.root, self.root_level) = (tree.bytenr.into(), tree.level);
        (self.chunk_root, self.chunk_root_level) = (chunk.bytenr.into(), chunk.level);
        self.chunk_root_generation = chunk.generation.into();
        (self.log_root, self.log_root_level) = (0.into(), 0);
        self.total_bytes = commit.total_bytes.into();
        self.bytes_used = commit.bytes_used.into();
        self.num_devices = commit.num_devices.into();
        self.flags = (self.flags.get() | flags::WRITTEN).into();
    }

    /// The copy at an offset of a device, with its checksum.
    pub fn copy_for(&self, device: &DevItem, offset: u64) -> Superblock {
        let mut copy = Superblock { bytenr: offset.into(), dev_item: *device, ..*self };
        copy.seal();
        copy
    }

    /// Adds a chunk behind the others of the system chunk array. Every chunk of the chunk tree must be in it before the
    /// superblock is written.
    ///
    /// # Errors
    /// If there is no room, the key is there already, or the array is damaged.
    pub fn push_sys_chunk(&mut self, key: Key, chunk: &Chunk) -> Result<(), SysChunkError> {
        for one in self.sys_chunks() {
            if one?.0 == key {
                return Err(SysChunkError::Exists(key));
            }
        }
        let mut new = DiskKey::from(key).as_bytes().to_vec();
        chunk.write(&mut new)?;
        let (used, most) = (self.sys_chunk_array_bytes.get() as usize, self.sys_chunk_array.len());
        let length = used.saturating_add(new.len());
        let room = self.sys_chunk_array.get_mut(used..length).ok_or(TooLong { what: "system chunks", length, most })?;
        room.copy_from_slice(&new);
        self.sys_chunk_array_bytes = (length as u32).into();
        Ok(())
    }

    /// Removes a chunk from the system chunk array, and returns true if it was there. The bytes that become free are
    /// zero; bytes behind the last chunk are kept.
    ///
    /// # Errors
    /// If the array is damaged.
    pub fn remove_sys_chunk(&mut self, key: Key) -> Result<bool, DecodeError> {
        let (mut at, mut found) = (0, None);
        for one in self.sys_chunks() {
            let (this, chunk) = one?;
            let end = at + size_of::<DiskKey>() + size_of_val(chunk.head) + size_of_val(chunk.stripes);
            if this == key {
                found = Some(at..end);
            }
            at = end;
        }
        let Some(range) = found else { return Ok(false) };
        let left = at - range.len();
        self.sys_chunk_array.copy_within(range.end..at, range.start);
        self.sys_chunk_array[left..at].fill(0);
        self.sys_chunk_array_bytes = (left as u32).into();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes;

    use super::*;
    use crate::captured;
    use crate::items::chunk::{BlockGroupFlags, ChunkBuf, Stripe};
    use crate::key::{ItemType, objectid};
    use crate::superblock::COPY_OFFSETS;

    fn captured() -> Superblock {
        Superblock::read_from_bytes(&captured::superblock()).unwrap()
    }

    /// The transaction of a backup root.
    fn of_backup(backup: &BackupRoot) -> Commit {
        let root = |bytenr: zerocopy::little_endian::U64, generation: zerocopy::little_endian::U64, level| RootNode {
            bytenr: bytenr.get(),
            level,
            generation: generation.get(),
        };
        Commit {
            generation: backup.tree_root_generation.get(),
            roots: TreeRoots {
                tree: root(backup.tree_root, backup.tree_root_generation, backup.tree_root_level),
                chunk: root(backup.chunk_root, backup.chunk_root_generation, backup.chunk_root_level),
                extent: root(backup.extent_root, backup.extent_root_generation, backup.extent_root_level),
                fs: root(backup.fs_root, backup.fs_root_generation, backup.fs_root_level),
                dev: root(backup.dev_root, backup.dev_root_generation, backup.dev_root_level),
                csum: root(backup.csum_root, backup.csum_root_generation, backup.csum_root_level),
            },
            total_bytes: backup.total_bytes.get(),
            bytes_used: backup.bytes_used.get(),
            num_devices: backup.num_devices.get(),
        }
    }

    #[test]
    fn backup_roots_of_the_kernel_come_back() {
        let superblock = captured();
        let backups = superblock.backup_roots.iter();
        let generations: Vec<_> = backups.map(|backup| backup.tree_root_generation.get()).collect();
        assert_eq!(generations, [5, 6, 7, 4]);
        for backup in &superblock.backup_roots {
            assert_eq!(&BackupRoot::new(&of_backup(backup)), backup);
        }
    }

    #[test]
    fn the_last_transaction_of_the_kernel_gives_its_superblock() {
        let last = captured();
        let commit = of_backup(&last.backup_roots[2]);
        // The superblock before it: the backup root of two transactions ago is the newest.
        let mut before = last;
        before.set_commit(&of_backup(&last.backup_roots[1]));
        before.backup_roots = last.backup_roots;
        before.backup_roots[2] = BackupRoot::new_zeroed();
        assert_eq!((before.generation.get(), before.uuid_tree_generation.get()), (6, 6));
        (before.log_root, before.log_root_level) = (4096.into(), 1);
        before.set_commit(&commit);
        let device = last.dev_item;
        assert_eq!(before.copy_for(&device, COPY_OFFSETS[0]).as_bytes(), last.as_bytes());
        // Once more, as when a filesystem is unmounted.
        before.set_commit(&commit);
        assert_eq!(before.copy_for(&device, COPY_OFFSETS[0]).as_bytes(), last.as_bytes());

        let other = DevItem { devid: 2.into(), ..device };
        let mirror = before.copy_for(&other, COPY_OFFSETS[1]);
        assert_eq!(mirror.check(COPY_OFFSETS[1]).unwrap().generation, 7);
        assert_eq!(mirror.dev_item.devid.get(), 2);
    }

    #[test]
    fn a_superblock_from_nothing_becomes_that_of_the_kernel() {
        let last = captured();
        let creation = Creation {
            fsid: last.fsid,
            label: last.label(),
            sector_bytes: last.sector_bytes.get(),
            node_bytes: last.node_bytes.get(),
            checksum: ChecksumType::from_number(last.csum_type.get()).unwrap(),
            features: last.features(),
        };
        let mut new = Superblock::create(&creation).unwrap();
        for chunk in last.sys_chunks() {
            let (key, chunk) = chunk.unwrap();
            new.push_sys_chunk(key, &chunk).unwrap();
        }
        new.set_commit(&of_backup(&last.backup_roots[2]));
        assert_eq!(new.newest_backup(), 0);
        let new = new.copy_for(&last.dev_item, COPY_OFFSETS[0]);
        assert!(new.check(COPY_OFFSETS[0]).is_ok());
        // Linux keeps older backup roots, and bytes behind the system chunks.
        let Superblock { backup_roots, sys_chunk_array, .. } = last;
        let mut new = Superblock { backup_roots, sys_chunk_array, ..new };
        new.seal();
        assert_eq!(new.as_bytes(), last.as_bytes());
    }

    #[test]
    fn a_label_leaves_room_for_its_zero_byte() {
        let features = captured().features();
        let creation = |label| Creation {
            fsid: [1; 16],
            label,
            sector_bytes: 4096,
            node_bytes: 16_384,
            checksum: ChecksumType::Crc32c,
            features,
        };
        assert_eq!(Superblock::create(&creation(&[b'x'; 255])).unwrap().label(), [b'x'; 255]);
        assert_eq!(Superblock::create(&creation(&[b'x'; 256])).unwrap_err().length, 256);
    }

    #[test]
    fn a_uuid_tree_that_was_stale_stays_stale() {
        let mut superblock = captured();
        superblock.uuid_tree_generation = 3.into();
        superblock.set_commit(&Commit { generation: 8, ..of_backup(&superblock.backup_roots[2]) });
        assert_eq!((superblock.generation.get(), superblock.uuid_tree_generation.get()), (8, 3));
    }

    #[test]
    fn the_array_of_the_kernel_comes_back_chunk_by_chunk() {
        let mut superblock = captured();
        // Linux leaves old bytes behind the chunks.
        let used = superblock.sys_chunk_array_bytes.get() as usize;
        superblock.sys_chunk_array[used..].fill(0);
        let chunks: Vec<_> =
            superblock.sys_chunks().map(|one| one.map(|(key, chunk)| (key, ChunkBuf::from(chunk))).unwrap()).collect();
        let mut again = superblock;
        for (key, _) in &chunks {
            assert_eq!(again.remove_sys_chunk(*key), Ok(true));
        }
        assert!(again.sys_chunk_array_bytes == 0 && again.sys_chunk_array == [0; 2048]);
        for (key, chunk) in &chunks {
            again.push_sys_chunk(*key, &chunk.as_item()).unwrap();
            let exists = Err(SysChunkError::Exists(*key));
            assert_eq!(again.push_sys_chunk(*key, &chunk.as_item()), exists);
        }
        assert!(again == superblock);
    }

    #[test]
    fn the_array_is_filled_to_its_last_chunk_and_emptied_in_any_order() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut superblock, mut model) = (captured(), Vec::<(Key, ChunkBuf)>::new());
        (superblock.sys_chunk_array, superblock.sys_chunk_array_bytes) = ([0; 2048], 0.into());
        let mut fulls = 0;
        for number in 1..2000_u64 {
            if random.u8(..5) < 3 {
                let key = Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, number << 20);
                let stripes = vec![Stripe::new_zeroed(); random.usize(1..4)];
                let chunk = ChunkBuf::new(1 << 20, BlockGroupFlags::SYSTEM, 4096, stripes);
                match superblock.push_sys_chunk(key, &chunk.as_item()) {
                    Ok(()) => model.push((key, chunk)),
                    Err(error) => {
                        assert!(matches!(error, SysChunkError::Full(TooLong { length: 2049.., .. })), "{error}");
                        fulls += 1;
                    }
                }
            } else if !model.is_empty() {
                let (key, _) = model.remove(random.usize(..model.len()));
                assert_eq!(superblock.remove_sys_chunk(key), Ok(true));
                assert_eq!(superblock.remove_sys_chunk(key), Ok(false));
            }
            let found = superblock.sys_chunks().map(Result::unwrap);
            let found: Vec<_> = found.map(|(key, chunk)| (key, ChunkBuf::from(chunk))).collect();
            assert_eq!(found, model);
            let used = superblock.sys_chunk_array_bytes.get() as usize;
            assert!(superblock.sys_chunk_array[used..].iter().all(|byte| *byte == 0));
        }
        assert!(fulls > 10, "{fulls}");
    }

    #[test]
    fn a_damaged_array_is_not_changed() {
        let mut superblock = captured();
        superblock.sys_chunk_array[8] = 0;
        let key = Key::new(objectid::FIRST_CHUNK_TREE, ItemType::CHUNK_ITEM, 1 << 20);
        let chunk = ChunkBuf::new(1 << 20, BlockGroupFlags::SYSTEM, 4096, vec![Stripe::new_zeroed()]);
        let before = superblock;
        assert!(matches!(superblock.push_sys_chunk(key, &chunk.as_item()), Err(SysChunkError::Decode(_))));
        assert!(superblock.remove_sys_chunk(key).is_err());
        assert_eq!(superblock, before);
    }
}
