//! A packaged kernel: its image, and the modules that a host needs, in load order.
//!
//! The dependencies of a module are read from the module itself, because unpacked packages have no index of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::cpio::Archive;
use super::packages::Suite;
use super::parts;

/// Modules for checksums, loaded before the others in every guest whose kernel has them as modules. File systems and
/// digests look these up by algorithm, not by module.
const SUMS: [&str; 7] = [
    "crc32c_generic",
    "crc32c_intel",
    "crct10dif_pclmul",
    "crc64_rocksoft_generic",
    "xxhash_generic",
    "sha256_generic",
    "blake2b_generic",
];
/// Loaded in every guest.
const MODULES: [&str; 8] = ["virtio_pci", "virtio_console", "virtio_net", "nvme", "nvme-tcp", "nbd", "ext4", "btrfs"];

/// Loaded in guests whose kernels have them.
const OPTIONAL: [&str; 4] = ["ublk_drv", "xfs", "sd_mod", "sg"];
/// Not loaded at boot: available in guests as `/later/NAME.ko`, for tests that load them with their own options.
const LATER: [&str; 6] = ["scsi_debug", "dm_mod", "md_mod", "raid1", "target_core_mod", "tcm_loop"];
/// The end of a signed module: its signature, 8 bytes, the length of the signature (4 bytes, big-endian), and this
/// text.
const SIGNED: &[u8] = b"~Module signature appended~\n";

/// A kernel that guests can run.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its release, for example `6.1.0-50-amd64`.
    pub release: String,
    /// Processors of the shared guest.
    pub processors: u32,
    /// The image that QEMU boots.
    pub image: PathBuf,
    /// An archive with the modules and a list of them.
    pub modules: PathBuf,
}

impl Kernel {
    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        let mut numbers = self.release.split(['.', '-', '+']).map(|word| word.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }

    /// True if its release begins with this version; 6.1 does not match 6.12.
    pub fn is_called(&self, name: &str) -> bool {
        let rest = self.release.strip_prefix(name);
        rest.is_some_and(|rest| name.is_empty() || !rest.starts_with(|next: char| next.is_ascii_digit()))
    }

    /// The newest kernel of a suite, fetched if it is not cached.
    ///
    /// # Errors
    /// [`super::packages::Unavailable`] if it cannot be fetched.
    pub fn of(suite: &'static str, processors: u32, home: &Path, programs: &Path) -> Result<Kernel> {
        let part = parts::part(
            home,
            &format!("kernel-{suite}"),
            &[&SUMS[..], &MODULES, &OPTIONAL, &LATER].concat(),
            |folder| {
                let suite = Suite::open(suite, home)?;
                let root = folder.join("root");
                suite.unpack(&packages(&suite)?, &root)?;
                build(&root, folder, programs)?;
                fs::remove_dir_all(&root).context("removing the unpacked kernel")
            },
        )?;
        let release = fs::read_to_string(part.join("release")).context("reading the kernel's name")?;
        Ok(Kernel { release, processors, image: part.join("image"), modules: part.join("modules.cpio") })
    }
}

/// The packages of the newest kernel: one with everything, or (since 2026) a small one that depends on others for image
/// and modules.
fn packages(suite: &Suite) -> Result<Vec<String>> {
    let names = |depends: String| -> Vec<String> {
        depends.split([',', '|']).filter_map(|word| word.split_whitespace().next()).map(str::to_owned).collect()
    };
    let newest = names(suite.field("linux-image-amd64", "Depends")?);
    let image = newest.into_iter().find(|name| name.starts_with("linux-image-")).context("the kernel has no image")?;
    let parts = names(suite.field(&image, "Depends")?);
    let parts = parts
        .into_iter()
        .filter(|name| ["linux-base-", "linux-binary-", "linux-modules-"].iter().any(|p| name.starts_with(p)));
    Ok(parts.chain([image.clone()]).collect())
}

fn build(root: &Path, folder: &Path, programs: &Path) -> Result<()> {
    let homes = [root.join("lib/modules"), root.join("usr/lib/modules")];
    let home = homes.iter().filter_map(|home| fs::read_dir(home).ok()).flatten().flatten().next();
    let home = home.context("the packages have no modules")?.path();
    let release = home.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let images = [root.join(format!("boot/vmlinuz-{release}")), home.join("vmlinuz")];
    let image = images.iter().find(|path| path.is_file()).context("the packages have no image")?;
    fs::copy(image, folder.join("image")).context("copying the image")?;
    let mut tree = Tree { paths: BTreeMap::new(), busybox: programs.join("busybox") };
    tree.index(&home.join("kernel"))?;
    let builtin = fs::read_to_string(home.join("modules.builtin")).unwrap_or_default();
    let builtin: BTreeSet<String> = builtin.lines().map(module_name).collect();
    let mut loads = Loads::default();
    let names = SUMS.map(|name| (name, false)).into_iter().chain(MODULES.map(|name| (name, true)));
    let names = names.chain(OPTIONAL.map(|name| (name, false))).chain(LATER.map(|name| (name, true)));
    for (name, is_needed) in names {
        tree.add(name, is_needed, &mut loads, &builtin).with_context(|| format!("kernel {release}"))?;
    }
    let mut archive = Archive::new(fs::File::create(folder.join("modules.cpio")).context("making the archive")?);
    for (name, content) in &loads.modules {
        let folder = if LATER.contains(&name.as_str()) { "later" } else { "modules" };
        archive.file(&format!("{folder}/{name}.ko"), 0o644, content)?;
    }
    let is_now = |name: &String| !LATER.contains(&name.as_str());
    let order: String =
        loads.modules.iter().filter(|(name, _)| is_now(name)).map(|(name, _)| format!("{name}\n")).collect();
    archive.file("modules/order", 0o644, order.as_bytes())?;
    archive.finish()?;
    fs::write(folder.join("release"), release).context("writing the kernel's name")
}

/// Modules in load order, with their contents.
#[derive(Default)]
struct Loads {
    modules: Vec<(String, Vec<u8>)>,
    seen: BTreeSet<String>,
}

struct Tree {
    paths: BTreeMap<String, PathBuf>,
    busybox: PathBuf,
}

impl Tree {
    fn index(&mut self, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
            let path = entry.context("listing modules")?.path();
            if path.is_dir() {
                self.index(&path)?;
            } else {
                self.paths.insert(module_name(&path.to_string_lossy()), path);
            }
        }
        Ok(())
    }

    /// Adds a module after its dependencies. A dependency may be absent if only this module, which is optional, uses
    /// it.
    fn add(&self, name: &str, is_needed: bool, loads: &mut Loads, builtin: &BTreeSet<String>) -> Result<()> {
        let name = module_name(name);
        if builtin.contains(&name) || !loads.seen.insert(name.clone()) {
            return Ok(());
        }
        let Some(path) = self.paths.get(&name) else {
            if is_needed {
                bail!("there is no module {name}");
            }
            return Ok(());
        };
        let content = without_signature(self.content(path)?);
        for (field, is_needed) in [("depends", true), ("softdep", false)] {
            for text in modinfo(&content, field) {
                let names = text.split([',', ' ']).filter(|word| !word.is_empty() && !word.ends_with(':'));
                for other in names {
                    self.add(other, is_needed, loads, builtin)?;
                }
            }
        }
        loads.modules.push((name, content));
        Ok(())
    }

    fn content(&self, path: &Path) -> Result<Vec<u8>> {
        let unpack = match path.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => "unxz",
            Some("gz") => "gunzip",
            _ => return fs::read(path).with_context(|| format!("reading {}", path.display())),
        };
        let file = fs::File::open(path).with_context(|| format!("opening {}", path.display()))?;
        let output = Command::new(&self.busybox).args([unpack, "-c"]).stdin(Stdio::from(file)).output();
        let output = output.with_context(|| format!("unpacking {}", path.display()))?;
        if !output.status.success() {
            bail!("unpacking {} failed: {}", path.display(), String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.stdout)
    }
}

/// The name that the kernel uses for a module: `virtio_net` for `net/virtio-net.ko.xz`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// A module without its signature: checking it in a guest takes longer than loading the module.
fn without_signature(mut module: Vec<u8>) -> Vec<u8> {
    const LENGTHS: usize = 12;
    let signature = module.strip_suffix(SIGNED).and_then(|rest| rest.split_last_chunk::<LENGTHS>());
    let Some((rest, &[.., a, b, c, d])) = signature else { return module };
    let signature_bytes = u32::from_be_bytes([a, b, c, d]) as usize;
    let bytes = rest.len().checked_sub(signature_bytes);
    module.truncate(bytes.unwrap_or(module.len()));
    module
}

/// The values of a field in a module's own description, which consists of strings separated by zero bytes.
fn modinfo(module: &[u8], field: &str) -> Vec<String> {
    let prefix = format!("{field}=");
    let texts = module.split(|byte| *byte == 0);
    let values = texts.filter_map(|text| text.strip_prefix(prefix.as_bytes()));
    values.map(|value| String::from_utf8_lossy(value).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_modules_are_the_kernels() {
        assert_eq!(module_name("kernel/drivers/net/virtio-net.ko.xz"), "virtio_net");
        assert_eq!(module_name("nvme-tcp"), "nvme_tcp");
    }

    #[test]
    fn a_kernel_is_called_by_the_beginning_of_its_release() {
        let kernel = |release: &str| Kernel {
            release: release.to_owned(),
            processors: 1,
            image: PathBuf::new(),
            modules: PathBuf::new(),
        };
        for (release, name, is_it) in [
            ("6.1.0-50-amd64", "6.1", true),
            ("6.12.1+deb13-amd64", "6.1", false),
            ("6.12.1+deb13-amd64", "6.12", true),
            ("6.12.1+deb13-amd64", "6", true),
            ("6.12.1+deb13-amd64", "", true),
            ("7.2.1-amd64", "6", false),
        ] {
            assert_eq!(kernel(release).is_called(name), is_it, "{release} {name}");
        }
    }

    #[test]
    fn a_module_says_what_it_depends_on() {
        let module = b"\x7fELF\0license=GPL\0depends=nvme-core,nvme-fabrics\0softdep=pre: crc32c\0name=depends=x\0";
        assert_eq!(modinfo(module, "depends"), ["nvme-core,nvme-fabrics"]);
        assert_eq!(modinfo(module, "softdep"), ["pre: crc32c"]);
        assert!(modinfo(module, "alias").is_empty());
    }

    #[test]
    fn a_module_loses_its_signature_and_nothing_else() {
        let signed =
            [&b"\x7fELF code"[..], b"SIGNATURE", &[0, 0, 2, 0, 0, 0, 0, 0], &9_u32.to_be_bytes(), SIGNED].concat();
        assert_eq!(without_signature(signed.clone()), b"\x7fELF code");
        let too_long = [&b"\x7fELF code"[..], &[0; 8], &99_u32.to_be_bytes(), SIGNED].concat();
        for other in [&b""[..], b"\x7fELF code", SIGNED, &signed[..signed.len() - 1], &too_long] {
            assert_eq!(without_signature(other.to_vec()), other);
        }
    }

    #[test]
    fn modules_come_behind_those_they_need_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &[u8]| fs::write(folder.path().join(name), text).unwrap();
        write("a.ko", b"\0depends=b-b,c\0softdep=pre: absent\0");
        write("b-b.ko", b"\0depends=c,builtin\0");
        write("c.ko", b"\0depends=\0");
        write("d.ko", b"\0depends=nowhere\0");
        let mut tree = Tree { paths: BTreeMap::new(), busybox: PathBuf::new() };
        tree.index(folder.path()).unwrap();
        let builtin = BTreeSet::from(["builtin".to_owned()]);
        let mut loads = Loads::default();
        tree.add("a", true, &mut loads, &builtin).unwrap();
        let order: Vec<&str> = loads.modules.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(order, ["c", "b_b", "a"]);
        let error = tree.add("d", true, &mut loads, &builtin).unwrap_err().to_string();
        assert_eq!(error, "there is no module nowhere");
    }
}
