//! A mounted Btrfs filesystem: that of the kernel, or ours through FUSE.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::fs::syncfs;

use crate::programs::{turn as run, words};

/// How long a daemon may need to mount, or to commit and end.
const DAEMON_TIME: Duration = Duration::from_secs(60);

/// Who serves the mount.
#[derive(Clone, Copy)]
pub enum Server<'a> {
    /// The kernel.
    Kernel,
    /// `sealblock fs mount` of this program.
    Fuse(&'a Path),
}

/// A mount, ended when dropped.
pub struct Mount {
    point: PathBuf,
    daemon: Option<Child>,
    is_mounted: bool,
}

impl Mount {
    /// Mounts a device at a folder. The kernel's mount has these options.
    pub fn new(server: Server<'_>, device: &str, point: &Path, options: &str) -> anyhow::Result<Mount> {
        let path = point.to_str().context("the path is text")?;
        let mut mount = Mount { point: point.to_owned(), daemon: None, is_mounted: true };
        match server {
            Server::Kernel => {
                run(&words("mount", &["-t", "btrfs", "-o", options, device, path]))?;
            }
            Server::Fuse(program) => {
                let arguments = ["fs", "mount", device, path, "-o", "rw"];
                let daemon = Command::new(program).args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
                mount.daemon = Some(daemon.with_context(|| format!("starting {}", program.display()))?);
                mount.wait_until_mounted()?;
            }
        }
        Ok(mount)
    }

    fn wait_until_mounted(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        let point = format!(" {} ", self.point.display());
        while !fs::read_to_string("/proc/self/mountinfo")?.contains(&point) {
            let ended = self.daemon.as_mut().and_then(|daemon| daemon.try_wait().ok().flatten());
            ensure!(ended.is_none() && begin.elapsed() < DAEMON_TIME, "it does not mount");
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Where it is.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// The process of a daemon.
    pub fn pid(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    /// Makes everything durable.
    pub fn sync(&self) -> anyhow::Result<()> {
        let directory = File::open(&self.point)?;
        syncfs(&directory).context("syncfs")?;
        // The kernel does not pass syncfs on to a daemon, which commits for this.
        directory.sync_all().context("fsync of a directory")
    }

    /// Ends it, after a last commit.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.is_mounted = false;
        run(&words("umount", &[self.point.to_str().context("the path is text")?]))?;
        // umount returns before the daemon's last commit.
        if let Some(daemon) = &mut self.daemon {
            ensure!(daemon.wait()?.success(), "the daemon failed");
        }
        Ok(())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = Command::new("umount").arg(&self.point).status();
            let _ = self.daemon.as_mut().map(Child::wait);
        }
    }
}
