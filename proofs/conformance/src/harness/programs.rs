//! The programs of guests: a shell, nvme-cli, nbd-client, fio, cmp, and tools that make file systems. All are from one
//! suite and use its C library, so that a guest does not depend on the machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use super::packages::Suite;
use super::parts;

const SUITE: &str = "sid";
const PACKAGES: [&str; 10] = [
    "busybox-static",
    "nvme-cli",
    "nbd-client",
    "fio",
    "e2fsprogs",
    "btrfs-progs",
    "xfsprogs",
    "dmsetup",
    "mdadm",
    "diffutils",
];
const PROGRAMS: [&str; 12] = [
    "usr/sbin/nvme",
    "usr/sbin/nbd-client",
    "usr/bin/fio",
    "usr/sbin/mke2fs",
    "usr/sbin/e2fsck",
    "usr/sbin/mkfs.btrfs",
    "usr/sbin/mkfs.xfs",
    "usr/sbin/xfs_repair",
    "usr/bin/btrfs",
    "usr/sbin/dmsetup",
    "usr/sbin/mdadm",
    // The `cmp` of busybox compares byte by byte.
    "usr/bin/cmp",
];
/// Libraries that Rust programs of this machine need in addition.
const LIBRARIES: [&str; 3] = ["libc.so.6", "libgcc_s.so.1", "libm.so.6"];

/// The programs that every guest has.
#[derive(Clone, Debug)]
pub struct Programs {
    /// An archive of them.
    pub archive: PathBuf,
    /// The folder with `busybox`, which also runs on this machine.
    pub folder: PathBuf,
}

impl Programs {
    /// Makes the archive if it does not exist.
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
    let home = &library_folders(root)[0];
    let always: Vec<PathBuf> = LIBRARIES.iter().map(|name| home.join(name)).collect();
    let mut libraries = BTreeMap::new();
    for program in programs.iter().chain(&always) {
        libraries.extend(needs(program, root)?);
    }
    libraries.extend(LIBRARIES.iter().zip(always).map(|(name, path)| (format!("lib/{name}"), path)));
    for (name, path) in libraries {
        let content = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        archive.file(&name, 0o755, &content)?;
    }
    archive.finish()?;
    Ok(())
}

/// The library folders of packages for this architecture, and the private ones of some packages.
fn library_folders(root: &Path) -> Vec<PathBuf> {
    let home = root.join("usr/lib/x86_64-linux-gnu");
    let below = ["ceph", "systemd", "pulseaudio"].map(|name| home.join(name));
    let others = ["usr/lib64", "lib64", "lib/x86_64-linux-gnu"].map(|name| root.join(name));
    [vec![home.clone()], below.to_vec(), others.to_vec()].concat()
}

/// A command that runs a program from an unpacked suite with that suite's libraries, through its own loader.
pub(super) fn loader(root: &Path) -> Command {
    let paths =
        ["usr/lib64", "lib64", "lib/x86_64-linux-gnu"].map(|folder| root.join(folder).join("ld-linux-x86-64.so.2"));
    let mut command = Command::new(paths.iter().find(|path| path.is_file()).unwrap_or(&paths[0]));
    command.arg("--library-path").arg(std::env::join_paths(library_folders(root)).unwrap_or_default());
    command
}

/// All libraries that a program needs, directly or not, by their paths in the guest, relative to its root.
fn needs(program: &Path, root: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let output = loader(root).arg("--list").arg(program).output().context("starting the loader")?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "the loader lists no libraries of {}: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    listed_libraries(&listed, root).with_context(|| format!("what {} needs", program.display()))
}

/// Parses the output of a loader: `NAME => PATH (ADDRESS)`; a library without a path is provided by the kernel. The
/// loader would also search this machine, whose libraries do not belong to the suite.
fn listed_libraries(listed: &str, root: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for (name, path) in listed.lines().filter_map(|line| line.trim().split_once(" => ")) {
        let path = Path::new(path.rsplit_once(" (").map_or(path, |(path, _)| path));
        if !path.starts_with(root) {
            bail!("{name} is in no package that was fetched");
        }
        let in_guest = name.strip_prefix('/').map_or_else(|| format!("lib/{name}"), str::to_owned);
        found.insert(in_guest, path.to_owned());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_of_the_suite_by_their_names_in_the_guest() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /r/usr/lib/libc.so.6 (0x00007f87)\n\
                      \t/lib64/ld-linux-x86-64.so.2 => /r/lib64/ld-linux-x86-64.so.2 (0x00007f88)\n";
        let found = listed_libraries(listed, Path::new("/r")).unwrap();
        let expected = [
            ("lib/libc.so.6", "/r/usr/lib/libc.so.6"),
            ("lib64/ld-linux-x86-64.so.2", "/r/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(found, expected.map(|(name, path)| (name.to_owned(), PathBuf::from(path))).into());
        assert!(listed_libraries("\tstatically linked\n", Path::new("/r")).unwrap().is_empty());
    }

    #[test]
    fn a_library_that_is_nowhere_or_of_this_machine_is_named() {
        for listed in ["\tliba.so.1 => not found\n", "\tliba.so.1 => /lib/liba.so.1 (0x00007f87)\n"] {
            let error = listed_libraries(listed, Path::new("/r")).unwrap_err().to_string();
            assert!(error.starts_with("liba.so.1 is in no package"), "{error}");
        }
    }
}
