//! The programs of guests: a shell, nvme-cli, nbd-client, fio, and what makes file systems, all of one suite with its own C
//! library, so that a guest is the same whatever the machine has installed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cpio::Archive;
use super::elf;
use super::packages::Suite;
use super::parts;

const SUITE: &str = "sid";
const PACKAGES: [&str; 6] = ["busybox-static", "nvme-cli", "nbd-client", "fio", "e2fsprogs", "btrfs-progs"];
const PROGRAMS: [&str; 7] = [
    "usr/sbin/nvme",
    "usr/sbin/nbd-client",
    "usr/bin/fio",
    "usr/sbin/mke2fs",
    "usr/sbin/e2fsck",
    "usr/sbin/mkfs.btrfs",
    "usr/bin/btrfs",
];
/// What Rust programs of this machine need besides.
const LIBRARIES: [&str; 3] = ["libc.so.6", "libgcc_s.so.1", "libm.so.6"];

/// The programs that every guest has.
#[derive(Clone, Debug)]
pub struct Programs {
    /// An archive of them.
    pub archive: PathBuf,
    /// Where `busybox` is, which runs on this machine, too.
    pub folder: PathBuf,
}

impl Programs {
    /// Makes the archive if it is not there.
    ///
    /// # Errors
    /// [`super::packages::Unavailable`] if packages cannot be fetched.
    pub fn prepare(home: &Path) -> Result<Programs> {
        let recipe = [&PACKAGES[..], &PROGRAMS[..]].concat();
        let folder = parts::part(home, "programs", &recipe, |folder| {
            let suite = Suite::open(SUITE, home)?;
            let root = folder.join("root");
            suite.unpack(&suite.with_libraries(&PACKAGES)?, &root)?;
            build(&root, folder)?;
            fs::remove_dir_all(&root).context("removing the unpacked programs")
        })?;
        Ok(Programs { archive: folder.join("programs.cpio"), folder })
    }
}

fn build(root: &Path, folder: &Path) -> Result<()> {
    let file = fs::File::create(folder.join("programs.cpio")).context("making the archive")?;
    let mut archive = Archive::new(std::io::BufWriter::new(file));
    for name in ["proc", "sys", "dev", "tmp", "run", "root", "mnt", "etc/nvme", "lib64", "var"] {
        archive.folder(name)?;
    }
    archive.character_device("dev/console", 5, 1)?;
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    archive.file("etc/group", 0o644, b"root:x:0:\n")?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n")?;
    archive.link("etc/mtab", "/proc/mounts")?;
    let features = fs::read(root.join("etc/mke2fs.conf")).context("reading the features of file systems")?;
    archive.file("etc/mke2fs.conf", 0o644, &features)?;
    let busybox = fs::read(root.join("usr/bin/busybox")).context("reading busybox")?;
    archive.file("bin/busybox", 0o755, &busybox)?;
    fs::copy(root.join("usr/bin/busybox"), folder.join("busybox")).context("copying busybox")?;
    let programs: Vec<PathBuf> = PROGRAMS.iter().map(|name| root.join(name)).collect();
    for program in &programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let content = fs::read(program).with_context(|| format!("reading {}", program.display()))?;
        archive.file(&format!("usr/bin/{name}"), 0o755, &content)?;
    }
    let folders = library_folders(root);
    let first = &folders[0];
    let always: Vec<PathBuf> = LIBRARIES.iter().map(|name| first.join(name)).collect();
    let mut libraries = elf::closure(&[programs, always.clone()].concat(), &folders)?;
    libraries.extend(LIBRARIES.iter().zip(always).map(|(name, path)| (format!("lib/{name}"), path)));
    for (name, path) in libraries {
        let content = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        archive.file(&name, 0o755, &content)?;
    }
    archive.finish()?;
    Ok(())
}

/// Where packages of this architecture keep libraries, and where some keep those of their own.
pub(super) fn library_folders(root: &Path) -> Vec<PathBuf> {
    let home = root.join("usr/lib/x86_64-linux-gnu");
    let below = ["ceph", "systemd", "pulseaudio"].map(|name| home.join(name));
    let others = ["usr/lib64", "lib64", "lib/x86_64-linux-gnu"].map(|name| root.join(name));
    [vec![home.clone()], below.to_vec(), others.to_vec()].concat()
}
