//! Filesystems from mkfs and from the kernel: every node of every tree passes the checker and encodes to the bytes from
//! which it was decoded, item by item and as a whole.
//!
//! Needs `mkfs.btrfs`; images from the kernel need root, loop devices and the filesystem. Without these the tests print
//! what is missing and are skipped.

mod walker;

use std::path::{Path, PathBuf};

use sealblock_btrfs_format::key::ItemType;
use sealblock_proofs_btrfs_images::items::{fill_folder, fill_mount};
use sealblock_proofs_btrfs_images::programs::{Mount, copy_images, mkfs};
use sealblock_proofs_btrfs_images::{has_mkfs, skip};

use walker::{Seen, walk};

/// Options of mkfs that change the layout; if the program does not know one, the test prints it.
const FORMATS: [&[&str]; 13] = [
    &[],
    &["--csum", "xxhash"],
    &["--csum", "sha256"],
    &["--csum", "blake2"],
    &["-n", "4096"],
    &["-n", "65536"],
    &["--mixed"],
    &["-m", "single", "-d", "single"],
    &["-d", "dup"],
    &["-O", "^no-holes,^skinny-metadata"],
    &["-R", "^free-space-tree"],
    &["-O", "block-group-tree"],
    &["-R", "quota"],
];

fn check_all(seen: &Seen, wanted: &[ItemType]) {
    let missing: Vec<_> = wanted.iter().filter(|item| !seen.items.contains_key(item)).collect();
    assert!(missing.is_empty(), "items that no image had: {missing:?}, of {:?}", seen.items);
}

#[test]
fn images_of_mkfs_pass_and_encode_to_the_same_bytes() {
    if !has_mkfs() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (root, image) = (folder.path().join("root"), folder.path().join("image"));
    std::fs::create_dir(&root).unwrap();
    fill_folder(&root).unwrap();
    let mut all = Seen::default();
    for format in FORMATS {
        let options = [format, &["--rootdir", root.to_str().unwrap()]].concat();
        match mkfs(std::slice::from_ref(&image), 192, &options) {
            Ok(()) => all.add(walk(&image)),
            Err(why) => skip(&format!("{format:?}: {why}")),
        }
    }
    println!("{all:?}");
    let wanted = [
        ItemType::INODE_ITEM,
        ItemType::INODE_REF,
        ItemType::DIR_ITEM,
        ItemType::DIR_INDEX,
        ItemType::EXTENT_DATA,
        ItemType::EXTENT_CSUM,
        ItemType::ROOT_ITEM,
        ItemType::EXTENT_ITEM,
        ItemType::METADATA_ITEM,
        ItemType::BLOCK_GROUP_ITEM,
        ItemType::DEV_ITEM,
        ItemType::DEV_EXTENT,
        ItemType::CHUNK_ITEM,
    ];
    check_all(&all, &wanted);
}

/// Size in mebibytes, options of mkfs, and of the mount.
const MOUNTED: [(u64, &[&str], &str); 7] = [
    (256, &[], "noatime"),
    (256, &["--csum", "xxhash", "-n", "4096"], "noatime"),
    (256, &["--csum", "sha256", "-O", "^no-holes"], "autodefrag"),
    (2048, &["--csum", "blake2", "-R", "^free-space-tree"], "space_cache=v1"),
    (256, &["-O", "^skinny-metadata", "-R", "quota"], "discard"),
    (256, &["--mixed"], "flushoncommit"),
    (256, &["-n", "65536", "-O", "block-group-tree"], "commit=1"),
];

/// A filesystem that the kernel has used: the image after the unmount, and a copy from before it that still has the
/// log.
fn of_kernel(image: &Path, mebibytes: u64, format: &[&str], options: &str) -> Result<Seen, String> {
    let images: [PathBuf; 1] = [image.to_owned()];
    mkfs(&images, mebibytes, format)?;
    let mount = Mount::new(&images, options)?;
    let nameless = fill_mount(&mount).unwrap();
    let copy = copy_images(&images, "crashed").unwrap();
    drop(nameless);
    mount.unmount().unwrap();
    let mut seen = walk(image);
    seen.add(walk(&copy[0]));
    Ok(seen)
}

#[test]
fn images_of_the_kernel_pass_and_encode_to_the_same_bytes() {
    if !has_mkfs() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut all, mut images) = (Seen::default(), 0);
    for (index, (mebibytes, format, options)) in MOUNTED.into_iter().enumerate() {
        match of_kernel(&folder.path().join(format!("image-{index}")), mebibytes, format, options) {
            Ok(seen) => {
                all.add(seen);
                images += 2;
            }
            Err(why) => skip(&format!("{format:?}: {why}")),
        }
    }
    println!("{images} images: {all:?}");
    if images == 0 {
        return skip("no image could be mounted");
    }
    let wanted = [
        ItemType::INODE_EXTREF,
        ItemType::XATTR_ITEM,
        ItemType::ORPHAN_ITEM,
        ItemType::ROOT_REF,
        ItemType::ROOT_BACKREF,
        ItemType::EXTENT_DATA_REF,
        ItemType::TREE_BLOCK_REF,
        ItemType::SHARED_DATA_REF,
        ItemType::FREE_SPACE_INFO,
        ItemType::FREE_SPACE_EXTENT,
        ItemType::FREE_SPACE_BITMAP,
        ItemType::QGROUP_STATUS,
        ItemType::QGROUP_INFO,
        ItemType::QGROUP_LIMIT,
        ItemType::UUID_SUBVOL,
        ItemType::UUID_RECEIVED_SUBVOL,
        ItemType::PERSISTENT_ITEM,
        ItemType::DIR_LOG_INDEX,
        ItemType::UNTYPED,
    ];
    check_all(&all, &wanted);
    assert_eq!(all.most_entries, 2, "names of one hash");
    assert_eq!(all.extent_kinds.len(), 3, "inline, regular and not written");
    assert_eq!(all.decompressed.len(), 3, "zlib, LZO and Zstandard: {:?}", all.decompressed);
}
