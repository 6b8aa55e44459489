//! A folder that serves as the root of another system, with its own package database.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

/// Such a folder; it is removed on drop.
pub struct Root(PathBuf);

/// True if this process may own files as root.
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

impl Root {
    /// An empty one. It is not below the target folder, whose path may be too long for socket names.
    pub fn new() -> Result<Root> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("sealblock-package-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let root = Root(env::temp_dir().join(name));
        for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "tmp"] {
            fs::create_dir_all(root.0.join(folder)).with_context(|| format!("making {}", root.0.display()))?;
        }
        fs::write(root.0.join("var/lib/dpkg/status"), "").context("writing the list of installed packages")?;
        Ok(root)
    }

    /// The path on this machine for a path of the other system.
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// All files there except dpkg's own, by their paths in the other system.
    pub fn files(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let mut folders = vec![self.0.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))? {
                let path = entry.context("listing files")?.path();
                match path.symlink_metadata().is_ok_and(|there| there.is_dir()) {
                    true => folders.push(path),
                    false => found.push(self.name(&path)),
                }
            }
        }
        found.retain(|name| !name.starts_with("/var/lib/dpkg/") && !name.starts_with("/var/log/"));
        found.sort();
        Ok(found)
    }

    fn name(&self, path: &Path) -> String {
        format!("/{}", path.strip_prefix(&self.0).unwrap_or(path).display())
    }

    /// Lets dpkg do something to the other system, and only to that.
    pub fn dpkg(&self, action: &str, what: &Path) -> Result<String> {
        let mut command = if is_root() { Command::new("dpkg") } else { Command::new("fakeroot") };
        if !is_root() {
            command.arg("dpkg");
        }
        command.arg("--root").arg(&self.0);
        // The libraries that it depends on are those of this machine. Scripts run here and work below `DPKG_ROOT`.
        command.args(["--force-depends", "--force-not-root", "--force-bad-path", "--force-script-chrootless"]);
        let output = command.arg("--log=/dev/null").arg(action).arg(what).stdin(Stdio::null()).output();
        let output = output.context("starting dpkg")?;
        let printed = [output.stdout, output.stderr].concat();
        let printed = String::from_utf8_lossy(&printed).into_owned();
        if !output.status.success() {
            bail!("dpkg {action} {} failed ({}):\n{printed}", what.display(), output.status);
        }
        Ok(printed)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // What cannot be removed stays until the system cleans its folder of temporary files.
        fs::remove_dir_all(&self.0).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_the_other_system_has_them() {
        let root = Root::new().unwrap();
        assert_eq!(root.files().unwrap(), Vec::<String>::new());
        fs::create_dir_all(root.path("/etc/a")).unwrap();
        fs::write(root.path("/etc/a/b"), "").unwrap();
        assert_eq!(root.files().unwrap(), ["/etc/a/b"]);
        let folder = root.0.clone();
        drop(root);
        assert!(!folder.exists());
    }
}
