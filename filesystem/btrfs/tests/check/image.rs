//! A filesystem that the kernel filled, whose items can be changed and restored: in an image, for `btrfs check`, and in
//! memory, for the code under test.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use futures_util::FutureExt;
use sealblock_block::{Device, Durability, DynDevice, Request};
use sealblock_btrfs::check::{CheckOptions, Report, check};
use sealblock_btrfs::verify::Unwatched;
use sealblock_btrfs::{Candidate, Filesystem, OpenOptions};
use sealblock_btrfs_format::items::Item;
use sealblock_btrfs_format::key::{ItemType, Key, objectid};
use sealblock_btrfs_format::names::name_hash;
use sealblock_btrfs_format::node::{Header, KeyPointer, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::{SUPERBLOCK_BYTES, Superblock, copy_offsets};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_memory::MemoryDevice;
use sealblock_proofs_btrfs_images::programs::{Mount, mkfs, run};
use sealblock_proofs_btrfs_images::{has_mounts, skip};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};
use zerocopy::{FromBytes, IntoBytes};

const IMAGE_BYTES: u64 = 256 << 20;
const BLOCK: u64 = 4096;

/// The future's output; devices in memory never wait.
fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("devices in memory answer at once")
}

/// The filesystem.
pub struct Image {
    _folder: tempfile::TempDir,
    path: PathBuf,
    file: File,
    memory: Rc<MemoryDevice>,
    /// What was there before each change.
    undo: RefCell<Vec<(u64, Vec<u8>)>>,
}

fn fill(mount: &Mount) -> Result<(), String> {
    let path = |name: &str| mount.path(name);
    let noise: Vec<u8> = (0..100_000_u32).flat_map(|at| at.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let plain = |result: std::io::Result<()>| result.map_err(|error| error.to_string());
    plain(fs::write(path("plain"), &noise[..100_000]))?;
    plain(fs::hard_link(path("plain"), path("plain-too")))?;
    plain(fs::write(path("inline"), b"a few words"))?;
    plain(symlink("inline", path("link")))?;
    plain(fs::create_dir(path("folder")))?;
    plain(fs::write(path("folder/a"), &noise[..9000]))?;
    plain(fs::write(path("folder/b"), b""))?;
    let sparse = File::create(path("sparse")).unwrap();
    plain(sparse.write_all_at(&noise[..8192], 1 << 20))?;
    plain(fs::write(path("nosum"), b""))?;
    run("chattr", ["+C".as_ref(), path("nosum").as_os_str()])?;
    plain(fs::write(path("nosum"), &noise[..8192]))?;
    run("fallocate", ["-l".as_ref(), "65536".as_ref(), path("reserved").as_os_str()])?;
    let subvolume = |arguments: &[&str], paths: &[PathBuf]| {
        let paths = paths.iter().map(|path| path.as_os_str());
        run("btrfs", ["subvolume"].iter().chain(arguments).map(std::ffi::OsStr::new).chain(paths)).map(drop)
    };
    subvolume(&["create"], &[path("sub")])?;
    (0..40).try_for_each(|at| plain(fs::write(path(&format!("sub/{at}")), &noise[..20_000])))?;
    mount.sync()?;
    subvolume(&["snapshot"], &[path("sub"), path("snap")])?;
    plain(fs::write(path("snap/0"), b"changed"))?;
    // The leaves from before now belong to the snapshot alone, and have FULL_BACKREF.
    (0..40).try_for_each(|at| plain(fs::write(path(&format!("sub/{at}")), b"changed")))?;
    mount.sync()?;
    // It shares all leaves.
    subvolume(&["snapshot", "-r"], &[path("sub"), path("shared")])?;
    mount.sync()
}

impl Image {
    /// Makes it with these options of mkfs; prints what is missing if it cannot.
    pub fn make(options: &[&str]) -> Option<Image> {
        has_mounts().map_err(|why| skip(&why)).ok()?;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let images = [path.clone()];
        mkfs(&images, IMAGE_BYTES >> 20, options).map_err(|why| skip(&why)).ok()?;
        let mount = Mount::new(&images, "noatime").unwrap();
        fill(&mount).unwrap();
        mount.unmount().unwrap();
        Some(Image::load(folder, &path))
    }

    fn load(folder: tempfile::TempDir, path: &Path) -> Image {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let memory = Rc::new(MemoryDevice::new(BlockSize::B4096, IMAGE_BYTES / BLOCK, None));
        let image = Image { _folder: folder, path: path.to_owned(), file, memory, undo: RefCell::default() };
        let mut chunk = vec![0; 1 << 20];
        for at in (0..IMAGE_BYTES).step_by(chunk.len()) {
            image.file.read_exact_at(&mut chunk, at).unwrap();
            if chunk.iter().any(|byte| *byte != 0) {
                image.write_memory(at, &chunk);
            }
        }
        image
    }

    fn write_memory(&self, at: u64, bytes: &[u8]) {
        let extent = Extent::from_raw(at / BLOCK, bytes.len() as u64 / BLOCK).unwrap();
        let data = Sealed::seal(Slice::copy_from(bytes), BlockSize::B4096, None, &Tags::default());
        now(Device::execute(&self.memory, Request::write(extent, data, Durability::Volatile))).unwrap();
    }

    /// Writes whole blocks, and remembers what was there.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        let mut before = vec![0; bytes.len()];
        self.file.read_exact_at(&mut before, at).unwrap();
        self.undo.borrow_mut().push((at, before));
        self.file.write_all_at(bytes, at).unwrap();
        self.write_memory(at, bytes);
    }

    /// Undoes all changes.
    pub fn restore(&self) {
        for (at, bytes) in self.undo.take().into_iter().rev() {
            self.file.write_all_at(&bytes, at).unwrap();
            self.write_memory(at, &bytes);
        }
    }

    pub fn open(&self) -> Filesystem {
        let device = DynDevice::new("memory", Rc::clone(&self.memory));
        let candidates = vec![Candidate { name: "memory".into(), device }];
        now(Filesystem::open(candidates, OpenOptions::default())).unwrap()
    }

    pub fn check(&self) -> Report {
        now(check(&self.open(), CheckOptions::default(), &Unwatched))
    }

    /// True if `btrfs check` finds an error: in its usual mode, and in the one for little memory.
    pub fn program_finds(&self) -> [bool; 2] {
        ["original", "lowmem"].map(|mode| {
            let arguments = ["check", "--readonly", "--mode", mode].map(std::ffi::OsStr::new);
            run("btrfs", arguments.into_iter().chain([self.path.as_os_str()])).is_err()
        })
    }

    /// All items of a tree.
    pub fn items(&self, tree: u64) -> Vec<(Key, Vec<u8>)> {
        let fs = self.open();
        let root = now(fs.tree(tree)).unwrap().unwrap();
        let (mut cursor, mut all) = (fs.cursor(root, Key::MIN..=Key::MAX), Vec::new());
        while let Some((key, data)) = now(cursor.next()).unwrap() {
            all.push((key, data.to_vec()));
        }
        all
    }

    /// The only item, or the first, of this type in a tree for which `is_it` holds.
    pub fn find(&self, tree: u64, item_type: ItemType, is_it: impl Fn(Key, &[u8]) -> bool) -> Key {
        let items = self.items(tree);
        let found = items.iter().find(|(key, data)| key.item_type == item_type && is_it(*key, data));
        found.expect("the filesystem has such an item").0
    }

    /// The inode of a name in the top directory.
    pub fn ino(&self, name: &str) -> u64 {
        let key = Key::new(objectid::FIRST_FREE, ItemType::DIR_ITEM, name_hash(name.as_bytes()));
        let items = self.items(objectid::FS_TREE);
        let (_, data) = items.iter().find(|(other, _)| *other == key).expect("the name exists");
        let Ok(Item::DirItems(entries)) = Item::decode(key, data) else { panic!("{name}") };
        entries.iter().find(|entry| entry.name == name.as_bytes()).unwrap().location.objectid
    }

    /// Changes the items of the leaf of a tree in which a key is or would be.
    pub fn edit(&self, tree: u64, key: Key, change: impl FnOnce(&mut Vec<(Key, Vec<u8>)>)) {
        self.edit_leaf(tree, key, |_, items| change(items));
    }

    /// Changes the header of the last leaf of a tree.
    pub fn change_leaf(&self, tree: u64, change: impl FnOnce(&mut Header)) {
        self.edit_leaf(tree, Key::MAX, |header, _| change(header));
    }

    fn edit_leaf(&self, tree: u64, key: Key, change: impl FnOnce(&mut Header, &mut Vec<(Key, Vec<u8>)>)) {
        let fs = self.open();
        let mut expected = now(fs.tree(tree)).unwrap().unwrap().expected();
        let node = loop {
            let node = now(fs.nodes().load(&expected)).unwrap();
            if expected.level == 0 {
                break node;
            }
            let slot = node.view().pointers().partition_point(|pointer| pointer.key() <= key).saturating_sub(1);
            expected = node.child(slot, tree).unwrap();
        };
        let view = node.view();
        let mut items: Vec<(Key, Vec<u8>)> = view.entries().map(|(key, data)| (key, data.to_vec())).collect();
        let mut header = *view.header();
        change(&mut header, &mut items);
        items.sort_by_key(|(key, _)| *key);
        let geometry = fs.storage().geometry();
        let items = items.iter().map(|(key, data)| (*key, &data[..]));
        let leaf = write_leaf(&header, items, geometry.node_bytes, geometry.checksum).unwrap();
        for place in fs.storage().map.locate(expected.bytenr, 1).unwrap().copies {
            self.write(place.offset, &leaf);
        }
    }

    /// Changes the pointers in the root node of a tree.
    pub fn edit_pointers(&self, tree: u64, change: impl FnOnce(&mut Vec<KeyPointer>)) {
        let fs = self.open();
        let root = now(fs.tree(tree)).unwrap().unwrap();
        let node = now(fs.nodes().load(&root.expected())).unwrap();
        let mut pointers = node.view().pointers().to_vec();
        assert!(pointers.len() > 1, "the root node of tree {tree} has several children");
        change(&mut pointers);
        let geometry = fs.storage().geometry();
        let node = write_inner(node.view().header(), &pointers, geometry.node_bytes, geometry.checksum).unwrap();
        for place in fs.storage().map.locate(root.bytenr, 1).unwrap().copies {
            self.write(place.offset, &node);
        }
    }

    /// Changes the bytes of an item.
    pub fn patch(&self, tree: u64, key: Key, change: impl FnOnce(&mut Vec<u8>)) {
        self.edit(tree, key, |items| {
            let (_, data) = items.iter_mut().find(|(other, _)| *other == key).expect("the item exists");
            change(data);
        });
    }

    /// Removes an item.
    pub fn remove(&self, tree: u64, key: Key) {
        self.edit(tree, key, |items| {
            let before = items.len();
            items.retain(|(other, _)| *other != key);
            assert_eq!(items.len(), before - 1);
        });
    }

    /// Adds an item.
    pub fn add(&self, tree: u64, key: Key, data: &[u8]) {
        self.edit(tree, key, |items| items.push((key, data.to_vec())));
    }

    /// Changes all superblocks.
    pub fn superblock(&self, change: impl Fn(&mut Superblock)) {
        self.superblocks_from(0, change);
    }

    /// Changes all superblocks but the first ones.
    pub fn superblocks_from(&self, first: usize, change: impl Fn(&mut Superblock)) {
        for offset in copy_offsets(IMAGE_BYTES).skip(first) {
            let mut bytes = vec![0; SUPERBLOCK_BYTES];
            self.file.read_exact_at(&mut bytes, offset).unwrap();
            let mut superblock = Superblock::read_from_bytes(&bytes).unwrap();
            change(&mut superblock);
            superblock.seal();
            self.write(offset, superblock.as_bytes());
        }
    }

    /// Inverts a byte of this number of copies of a tree's root node.
    pub fn damage(&self, tree: u64, copies: usize) {
        let fs = self.open();
        let root = now(fs.tree(tree)).unwrap().unwrap();
        for place in fs.storage().map.locate(root.bytenr, 1).unwrap().copies.iter().take(copies) {
            let mut bytes = vec![0; BLOCK as usize];
            self.file.read_exact_at(&mut bytes, place.offset).unwrap();
            bytes[200] ^= 1;
            self.write(place.offset, &bytes);
        }
    }
}
