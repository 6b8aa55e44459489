//! A mount while it lasts, and how it ends.
//!
//! Unmounting by force makes the kernel drop what programs wrote into its page cache and what it has not yet sent. So a
//! mount that can be changed ends in steps: while the session still answers, the kernel writes back; then it unmounts,
//! and by force only if files are open. None of this may be done by the core that answers.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use fuser::SessionUnmounter;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use sealblock_runtime_ioctl::apart::{open_fuse_inode, run_apart, write_pages};

use crate::mounts::{self, MountEntry, mount_on};

/// The file by which a process answers the kernel.
const CONNECTION: &str = "/dev/fuse";

/// A mount.
pub struct Mounted {
    point: PathBuf,
    /// The mount in the kernel's table, if it can be read.
    entry: Option<MountEntry>,
    /// The helper program with which a user who is not root has mounted, and which is needed to unmount.
    helper: Mutex<Option<SessionUnmounter>>,
}

/// How far the end of a mount got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// No more requests can come.
    Over,
    /// Requests can still come: it is covered by another mount, or a helper has unmounted it while files are open.
    Lasts,
    /// The filesystem did not answer in time, so what is still open must be given up.
    TimedOut,
}

impl Mounted {
    /// What has just been mounted on this directory, an absolute path without links.
    pub fn new(point: PathBuf, helper: Option<SessionUnmounter>) -> Mounted {
        Mounted { entry: mount_on(&point), point, helper: Mutex::new(helper) }
    }

    /// The mount point.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Its entry in the kernel's table.
    pub fn entry(&self) -> Option<&MountEntry> {
        self.entry.as_ref()
    }

    /// True if the uppermost mount on the directory is this one, as far as that is known.
    fn is_uppermost(&self) -> bool {
        self.entry.is_none() || mount_on(&self.point) == self.entry
    }

    /// Ends the connection with the kernel and unmounts, even if files are open.
    pub fn unmount(&self) -> Stop {
        if !self.is_uppermost() {
            // The mount has ended already, or another mount covers it, so the kernel has no path to it.
            tracing::debug!(point = %self.point.display(), "what is mounted there is not this");
            return Stop::Lasts;
        }
        let (unmounted, is_over) = match &mut *self.helper.lock().unwrap_or_else(PoisonError::into_inner) {
            None => (mounts::unmount(&self.point), true),
            // The helper does not close open files, so serving continues until they are closed.
            Some(helper) => (helper.unmount(), false),
        };
        if let Err(error) = &unmounted {
            tracing::warn!(point = %self.point.display(), %error, "cannot unmount");
        }
        if is_over && unmounted.is_ok() { Stop::Over } else { Stop::Lasts }
    }

    /// Ends a mount that can be changed: the kernel writes what it has, by `write_back`, and it is unmounted. Waits for
    /// answers of the session, so it must run on another thread than these; no longer than the limit.
    pub fn stop(
        self: &Arc<Self>,
        write_back: impl FnOnce() -> io::Result<()> + Send + 'static,
        limit: Duration,
    ) -> Stop {
        let (point, (done, written)) = (self.point.display(), mpsc::channel());
        let mounted = Arc::clone(self);
        let write = move || drop(done.send(mounted.write_back_and_unmount(write_back)));
        let spawned = thread::Builder::new().name("fuse-sync".to_owned()).spawn(write);
        let is_late = match spawned.map(|_| written.recv_timeout(limit)) {
            Ok(Ok(Ok(true))) => return Stop::Over,
            Ok(Ok(Ok(false))) => false,
            Ok(Ok(Err(error))) | Err(error) => {
                tracing::error!(%point, %error, "what programs wrote last may be lost: the kernel cannot write it");
                false
            }
            Ok(Err(_)) => {
                tracing::error!(%point, ?limit, "what programs wrote last may be lost: it was not written in time");
                true
            }
        };
        let stopped = self.unmount();
        if is_late { Stop::TimedOut } else { stopped }
    }

    /// True if it is unmounted; false if it is written but files are open.
    fn write_back_and_unmount(&self, write_back: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        if !self.is_uppermost() {
            return Ok(false);
        }
        write_back()?;
        // Unmounting without force writes what was changed meanwhile, and fails if anything is open.
        let is_helped = self.helper.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        Ok(!is_helped && self.is_uppermost() && self.unmount_unused().is_ok())
    }

    /// Lets the kernel write all pages that programs have changed, and waits for the answers, those of these files, too. So
    /// it must run on another thread than the session's. No request must wait for it during which the kernel locks one of
    /// the files.
    pub fn write_back(&self, files: Vec<u64>) -> io::Result<()> {
        self.apart(move |root, tell| tell(write_pages_of(&root, &files)))
    }

    /// As [`Mounted::write_back`], for one file, which the kernel may have locked. Linux before 6.16 only sends the pages
    /// then, and does not wait.
    pub fn write_back_locked(&self, file: u64) -> io::Result<()> {
        self.apart(move |root, tell| match open_if_known(&root, file) {
            Ok(None) => tell(Ok(())),
            // Closing it may need the lock.
            Ok(Some(file)) => tell(write_pages(&file)),
            Err(error) => tell(Err(error)),
        })
    }

    /// As [`Mounted::write_back`], for these files alone.
    pub fn write_back_of(&self, files: Vec<u64>) -> io::Result<()> {
        self.apart(move |root, tell| tell(files.iter().try_for_each(|file| write_pages_of_file(&root, *file))))
    }

    /// Unmounts, unless a file is open. What was changed is written first.
    fn unmount_unused(&self) -> io::Result<()> {
        let point = self.point.clone();
        run_apart(Path::new(CONNECTION), move |tell| {
            tell(rustix::mount::unmount(&point, UnmountFlags::NOFOLLOW).map_err(io::Error::from));
        })?
    }

    /// Runs what waits for the kernel, with the root of the mount, unless another one covers it. If this process is killed
    /// meanwhile, nobody answers any more, so the thread must not keep the connection.
    fn apart(&self, work: impl FnOnce(File, &dyn Fn(io::Result<()>)) + Send + 'static) -> io::Result<()> {
        let (point, device) = (self.point.clone(), self.entry.as_ref().map(|entry| entry.device.clone()));
        run_apart(Path::new(CONNECTION), move |tell| match root_of(&point, device.as_deref()) {
            Ok(root) => work(root, tell),
            Err(error) => tell(Err(error)),
        })?
    }
}

/// The root of a mount with this device, if that is known.
fn root_of(point: &Path, device: Option<&str>) -> io::Result<File> {
    let root = File::open(point)?;
    let number = root.metadata()?.dev();
    let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    match device.is_some_and(|device| device != number) {
        true => Err(io::Error::other("another filesystem is mounted over it")),
        false => Ok(root),
    }
}

fn write_pages_of(root: &File, files: &[u64]) -> io::Result<()> {
    // It sends all pages, but some kernels do not wait for the answers. All do when a file is closed.
    rustix::fs::syncfs(root)?;
    files.iter().try_for_each(|file| open_if_known(root, *file).map(drop))
}

fn write_pages_of_file(root: &File, file: u64) -> io::Result<()> {
    let Some(file) = open_if_known(root, file)? else { return Ok(()) };
    // That tells of errors; some kernels wait for the answers only when it is closed.
    write_pages(&file)
}

/// Opens an inode. One that the kernel has just forgotten is closed already; or its subvolume was deleted.
fn open_if_known(root: &File, file: u64) -> io::Result<Option<File>> {
    match open_fuse_inode(root.as_fd(), file) {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::STALE | Errno::NOENT)) => Ok(None),
        // Then the kernel collects no writes, so that at most stores through mmap are on their way.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => Ok(None),
        opened => opened.map(Some),
    }
}
