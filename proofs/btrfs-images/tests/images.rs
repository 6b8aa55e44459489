//! Checks that every filesystem of the chosen set can be made, has its intended content, and gives the same manifest
//! when it is scanned again, and when the manifest is written and parsed. A change in one of them is detected.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these the tests print what is missing and are
//! skipped.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use sealblock_proofs_btrfs_images::changes::is_balance_paused;
use sealblock_proofs_btrfs_images::manifest::{Kind, Manifest};
use sealblock_proofs_btrfs_images::programs::{Mount, run};
use sealblock_proofs_btrfs_images::sets::{self, Fill, Made, Recipe};
use sealblock_proofs_btrfs_images::{has_mounts, skip};

/// The program's dump of all trees of a filesystem, as far as one of its devices allows it.
fn dump(image: &Path) -> String {
    let arguments = ["inspect-internal".as_ref(), "dump-tree".as_ref(), image.as_os_str()];
    run("btrfs", arguments).unwrap()
}

/// The program's dump of the superblock.
fn superblock(image: &Path) -> String {
    run("btrfs", ["inspect-internal".as_ref(), "dump-super".as_ref(), image.as_os_str()]).unwrap()
}

/// Words that the dump must contain, one for each kind of content, in a filesystem with everything.
const EVERYTHING: [&str; 16] = [
    "compression 1 (zlib)",
    "compression 2 (lzo)",
    "compression 3 (zstd)",
    "inline extent data size",
    "type 0 (inline)",
    "type 1 (regular)",
    "type 2 (prealloc)",
    "INODE_EXTREF",
    "NODATASUM",
    "NODATACOW",
    "PREALLOC",
    "XATTR_ITEM",
    "SYMLINK",
    "ROOT_BACKREF",
    "EXTENT_DATA_REF",
    "UUID_KEY_SUBVOL",
];

fn entry<'m>(manifest: &'m Manifest, path: &str) -> &'m sealblock_proofs_btrfs_images::manifest::Entry {
    manifest.entries.get(path.as_bytes()).unwrap_or_else(|| panic!("{path} is there"))
}

fn holds_everything(made: &Made) {
    let manifest = &made.manifest;
    let kinds: BTreeSet<_> = manifest.entries.values().map(|entry| format!("{:?}", entry.kind)).collect();
    assert_eq!(kinds.len(), 7, "{kinds:?}");
    let entry = |path: &str| entry(manifest, path);
    assert_eq!(entry("files/holes/20-gibibytes").size, 20 << 30);
    assert_eq!(entry("inodes/links/linked").nlink, 401);
    assert_eq!(entry("inodes/times/file-0").mtime.seconds, -1);
    assert_eq!(entry("inodes/modes/file-7777").mode, 0o7777);
    assert!(entry("inodes/attributes/acl").xattrs.contains_key(&b"system.posix_acl_access"[..]));
    assert!(entry("inodes/attributes/dir/inherits").xattrs.contains_key(&b"system.posix_acl_access"[..]));
    assert!(entry("inodes/types/long-link").target.as_ref().is_some_and(|target| target.len() >= 3900));
    assert_eq!(entry("inodes/types/highest-device").device, (4095, 0xf_ffff));
    assert!(manifest.entries.keys().any(|path| std::str::from_utf8(path).is_err()));
    // An empty folder, in place of a subvolume that existed when the snapshot was taken.
    assert_eq!(entry("subvolumes/snapshot/inner").mtime, Default::default());
    assert_eq!(entry("subvolumes/outer/inner/dir/innermost/file").size, 9);
    assert_ne!(entry("subvolumes/outer/file").content, entry("subvolumes/snapshot/file").content);
    assert_eq!(entry("subvolumes/read-only/file").content, entry("subvolumes/snapshot/file").content);
}

fn holds_what_it_is_for(recipe: &Recipe, made: &Made) {
    let (manifest, image) = (&made.manifest, &made.images[0]);
    match &recipe.fill {
        Fill::Everything => {
            holds_everything(made);
            let dump = dump(image);
            // The root tree has a file for each block group.
            assert_eq!(
                dump.contains("(FREE_SPACE UNTYPED "),
                recipe.mount.contains("space_cache=v1"),
                "{}",
                recipe.name
            );
            let missing: Vec<_> = EVERYTHING.iter().filter(|word| !dump.contains(**word)).collect();
            assert!(missing.is_empty(), "{}: {missing:?}", recipe.name);
        }
        Fill::Files => assert!(entry(manifest, "files/shared/copy-149").size == 300_000),
        Fill::Balance => assert!(is_balance_paused(image).unwrap()),
        Fill::NewUuid => {
            let superblock = superblock(image);
            let value = |field: &str| {
                let line = superblock.lines().find(|line| line.starts_with(field));
                line.unwrap_or_else(|| panic!("{field}: {superblock}")).split_whitespace().nth(1).unwrap().to_owned()
            };
            assert_ne!(value("fsid"), value("metadata_uuid"));
        }
        Fill::Seed => assert!(superblock(image).contains("SEEDING")),
        Fill::Devices => {
            assert!(superblock(image).lines().any(|line| line.split_whitespace().eq(["dev_item.devid", "2"])))
        }
        Fill::Converted => assert!(entry(manifest, "ext2_saved/image").size == 512 << 20),
        Fill::Stress(..) => assert!(manifest.entries.len() > 50, "{}", manifest.entries.len()),
        Fill::Subvolumes => {
            let mount = Mount::read_only(&made.images, None).unwrap();
            let default = Manifest::scan(&mount.path("")).unwrap();
            assert_eq!(manifest.below(&made.default_path).difference(&default), Vec::<String>::new());
            assert!(default.entries.contains_key(&b"dir/innermost/file"[..]));
        }
        Fill::Many(files) => {
            let regular = manifest.entries.values().filter(|entry| entry.kind == Kind::Regular).count();
            assert_eq!(regular, *files);
        }
        Fill::Crowd => assert_eq!(manifest.entries.len(), 10_000_usize.div_ceil(150) + 2),
        Fill::Activity(..) => assert!(manifest.entries.len() > 50, "{}", manifest.entries.len()),
        Fill::Log => {
            assert!(!manifest.entries.contains_key(&b"synced"[..]), "the last commit was before the log");
            let log = superblock(image).lines().any(|line| line.starts_with("log_root\t") && !line.ends_with("\t0"));
            assert!(log, "the image has a log");
        }
    }
}

/// The current manifest of the image.
fn read(images: &[PathBuf]) -> Manifest {
    Manifest::scan(&Mount::read_only(images, Some(5)).unwrap().path("")).unwrap()
}

#[test]
fn all_filesystems_have_their_content_and_scan_the_same_twice() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let mut made_count = 0;
    let recipes = sets::chosen();
    // Older programs do not support some formats.
    let expected = recipes.len().min(20);
    for recipe in recipes {
        let folder = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let made = match recipe.make(folder.path()) {
            Ok(made) => made,
            // Nothing else may differ between machines that have all programs.
            Err(why) if why.contains("mkfs.btrfs: ") => {
                skip(&why);
                continue;
            }
            Err(why) => panic!("{why}"),
        };
        println!("{}: {} paths in {:?}", recipe.name, made.manifest.entries.len(), start.elapsed());
        holds_what_it_is_for(&recipe, &made);
        assert_eq!(made.manifest.difference(&read(&made.images)), Vec::<String>::new(), "{}", recipe.name);
        let again = Manifest::from_text(&made.manifest.to_text()).unwrap();
        assert!(again == made.manifest, "{}: its text is read as it was written", recipe.name);
        made_count += 1;
    }
    assert!(made_count >= expected, "{made_count} filesystems were made");
}

#[test]
fn a_change_is_found() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let recipes = sets::standard();
    let recipe = recipes.iter().find(|recipe| matches!(recipe.fill, Fill::Many(_))).unwrap();
    let made = Recipe { fill: Fill::Many(100), ..recipe.clone() }.make(folder.path()).unwrap();
    let mount = Mount::new(&made.images, "noatime").unwrap();
    let file = OpenOptions::new().write(true).open(mount.path("many/0/file-1")).unwrap();
    file.write_all_at(b"!", 700).unwrap();
    fs::remove_file(mount.path("many/0/file-2")).unwrap();
    fs::hard_link(mount.path("many/0/file-3"), mount.path("many/link")).unwrap();
    drop(file);
    mount.unmount().unwrap();
    let lines = made.manifest.difference(&read(&made.images));
    for line in [
        "many/0/file%2d1: content: expected ",
        "many/0/file%2d1: mtime: expected ",
        "many/0/file%2d2: missing",
        "many/0/file%2d3: nlink: expected 1, found 2",
        "many/link: not expected",
    ] {
        assert!(lines.iter().any(|found| found.starts_with(line)), "{line}: {lines:?}");
    }
    assert!(!lines.iter().any(|line| line.starts_with("many/0/file%2d4: ")), "{lines:?}");
}
