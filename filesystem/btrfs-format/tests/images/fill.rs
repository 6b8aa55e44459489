//! Makes images: mkfs fills some from a folder, the kernel fills others through a mount.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use sealblock_btrfs_format::names::name_hash;

/// The text that all compressed files begin with; a longer one begins with a shorter one.
pub fn text(bytes: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes + 32);
    let mut number = 0_u64;
    while text.len() < bytes {
        text.extend_from_slice(format!("line {number} of a text.\n").as_bytes());
        number += 1;
    }
    text.truncate(bytes);
    text
}

/// Runs a program; what it says goes into the error.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = S>) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    let said = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(format!("{program}: {}", String::from_utf8_lossy(&said).trim())) }
}

/// Makes a filesystem in a sparse file.
pub fn mkfs(image: &Path, mebibytes: u64, options: &[&str]) -> Result<(), String> {
    File::create(image).unwrap().set_len(mebibytes << 20).unwrap();
    let image = image.to_str().unwrap();
    run("mkfs.btrfs", ["-q", "-f", "-L", "a label"].iter().chain(options).chain(&[image]))
}

/// What any filesystem can hold: small and large files, holes, links, attributes, special names.
pub fn fill_folder(folder: &Path) {
    for bytes in [0, 1, 100, 2048, 2049, 4096, 70_000, 1 << 20] {
        fs::write(folder.join(format!("file-{bytes}")), text(bytes)).unwrap();
    }
    fs::create_dir_all(folder.join("deep/er/still")).unwrap();
    fs::write(folder.join("deep/er/still/file"), b"deep").unwrap();
    fs::write(folder.join("n".repeat(255)), b"long name").unwrap();
    symlink("deep/er", folder.join("link")).unwrap();
    fs::hard_link(folder.join("file-100"), folder.join("deep/file-100")).unwrap();
    let mut sparse = File::create(folder.join("sparse")).unwrap();
    sparse.seek(SeekFrom::Start(1 << 20)).unwrap();
    sparse.write_all(b"behind a hole").unwrap();
    for (name, value) in [("user.small", &b"value"[..]), ("user.large", &[b'v'; 3000])] {
        // Folders for temporary files may not take attributes.
        let _ = rustix::fs::setxattr(folder.join("file-100"), name, value, rustix::fs::XattrFlags::empty());
    }
}

/// A mounted image, unmounted when dropped.
pub struct Mount {
    point: PathBuf,
    is_mounted: bool,
}

impl Mount {
    /// Mounts an image on a folder that is made for it.
    pub fn new(image: &Path, options: &str) -> Result<Mount, String> {
        let point = image.with_extension("mount");
        fs::create_dir_all(&point).unwrap();
        let options = format!("loop,{options}");
        run("mount", ["-t".as_ref(), "btrfs".as_ref(), "-o".as_ref(), options.as_ref(), image, &*point])?;
        Ok(Mount { point, is_mounted: true })
    }

    /// Where it is mounted.
    pub fn path(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    /// Unmounts it, which writes everything.
    pub fn unmount(mut self) {
        self.is_mounted = false;
        run("umount", [&self.point]).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = run("umount", [&self.point]);
        }
    }
}

/// Names that have one hash, with this in front of them.
fn colliding(prefix: &str) -> [String; 2] {
    let name = |number: u64| format!("{prefix}{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut seen = HashMap::new();
    let pair = (1..).find_map(|number| {
        let earlier = seen.insert(name_hash(name(number).as_bytes()), number)?;
        Some([name(earlier), name(number)])
    });
    pair.unwrap()
}

/// Fills what is mounted with everything that makes other items. An inode without a name stays while what is returned is open, and
/// what was written last is in a log.
pub fn fill_mount(mount: &Mount) -> File {
    fill_folder(&mount.path(""));
    let btrfs = |arguments: &[&str]| run("btrfs", arguments).unwrap();
    let name = |path: &str| mount.path(path).to_str().unwrap().to_owned();
    for compression in ["zlib", "lzo", "zstd"] {
        let folder = name(&format!("by-{compression}"));
        fs::create_dir(&folder).unwrap();
        btrfs(&["property", "set", &folder, "compression", compression]);
        // The first is small enough to be stored inline, compressed.
        for bytes in [3000, 50_000, 400_001] {
            fs::write(Path::new(&folder).join(format!("file-{bytes}")), text(bytes)).unwrap();
        }
    }
    let prealloc = File::create(mount.path("prealloc")).unwrap();
    rustix::fs::fallocate(&prealloc, rustix::fs::FallocateFlags::empty(), 0, 1 << 20).unwrap();
    prealloc.write_all_at(&text(8192), 64 << 10).unwrap();

    fs::write(mount.path("linked"), text(5000)).unwrap();
    for number in 0..300 {
        fs::hard_link(mount.path("linked"), mount.path(&format!("{number:0>200}"))).unwrap();
    }
    // Large enough for a block group of which the first version of the space cache is kept.
    fs::write(mount.path("large"), vec![7; 12 << 20]).unwrap();
    // Every second of many small extents goes, so that free space is in pieces.
    fs::create_dir(mount.path("pieces")).unwrap();
    (0..400).for_each(|number| fs::write(mount.path(&format!("pieces/{number}")), text(4096)).unwrap());
    run("sync", ["-f", &name("")]).unwrap();
    (0..400).step_by(2).for_each(|number| fs::remove_file(mount.path(&format!("pieces/{number}"))).unwrap());

    btrfs(&["subvolume", "create", &name("sub")]);
    fill_folder(&mount.path("sub"));
    btrfs(&["subvolume", "snapshot", &name("sub"), &name("snapshot")]);
    btrfs(&["subvolume", "snapshot", "-r", &name("sub"), &name("readonly")]);
    fs::write(mount.path("sub/file-2049"), b"another content than the snapshots have").unwrap();
    let file = OpenOptions::new().write(true).open(mount.path("sub/file-1048576")).unwrap();
    file.write_all_at(b"in the middle", 500_000).unwrap();
    for number in 0..30 {
        btrfs(&["subvolume", "snapshot", &name("sub"), &name(&format!("snapshot-{number}"))]);
    }
    btrfs(&["subvolume", "delete", "--commit-after", &name("snapshot-7")]);
    reflinks(mount);
    let received = format!("btrfs send -q {0}/readonly | btrfs receive -q {0}/deep", name(""));
    run("sh", ["-c", &received]).unwrap();
    for colliding in colliding("") {
        fs::write(mount.path(&colliding), colliding.as_bytes()).unwrap();
    }
    for colliding in colliding("user.") {
        rustix::fs::setxattr(mount.path("linked"), colliding, b"value", rustix::fs::XattrFlags::empty()).unwrap();
    }
    fs::write(mount.path("nameless"), text(10_000)).unwrap();
    let nameless = File::open(mount.path("nameless")).unwrap();
    fs::remove_file(mount.path("nameless")).unwrap();
    run("sync", ["-f", &name("")]).unwrap();
    fs::write(mount.path("synced"), text(9000)).unwrap();
    File::open(mount.path("synced")).unwrap().sync_all().unwrap();
    File::open(mount.path("")).unwrap().sync_all().unwrap();
    nameless
}

/// One extent with more references than there is room for behind its item.
fn reflinks(mount: &Mount) {
    fs::write(mount.path("source"), text(16_384)).unwrap();
    for number in 0..150 {
        let copy = mount.path(&format!("copy-{number}"));
        run("cp", ["--reflink=always".as_ref(), mount.path("source").as_os_str(), copy.as_os_str()]).unwrap();
    }
    run("btrfs", ["subvolume", "snapshot", mount.path("").to_str().unwrap(), mount.path("all").to_str().unwrap()])
        .unwrap();
}
