//! A mount while it lasts, and how it ends.
//!
//! Unmounting by force makes the kernel drop what programs wrote into its page cache and what it has not yet sent. So a
//! mount that can be changed ends in steps: while the session still answers, the kernel writes back; then it unmounts,
//! and by force only if files are open. None of this may be done by the core that answers.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use std::{io, iter};

use fuser::SessionUnmounter;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use sealblock_runtime_ioctl::apart::{open_fuse_inode, run_apart, write_pages};

use crate::mounts::{self, MountEntry, mount_on};

/// The file by which a process answers the kernel.
const CONNECTION: &str = "/dev/fuse";
/// How long the end of the session is awaited once it is unmounted, and once the connection was aborted.
const BRIEFLY: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(4);

/// A mount.
pub struct Mounted {
    point: PathBuf,
    /// The mount in the kernel's table, if it can be read.
    entry: Option<MountEntry>,
    /// The helper program with which a user who is not root has mounted, and which is needed to unmount.
    helper: Mutex<Option<SessionUnmounter>>,
    over: Arc<Over>,
}

/// How a mount ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stopped {
    /// The filesystem did not answer in time, so what is still open must be given up.
    pub is_late: bool,
    /// Why what programs wrote last may be lost, if it may.
    pub lost: Option<String>,
    /// Requests can still come: it is mounted at another place, too, or programs use it, and nothing here ends the
    /// connection but the end of the process.
    pub lasts: bool,
}

/// Why the kernel has not written pages.
#[derive(Debug)]
pub enum WriteBackError {
    /// It cannot be asked by a path of the mount: there is none, another mount covers it, or this process may not.
    Unreachable(io::Error),
    /// It cannot write them.
    Failed(io::Error),
}

/// Whether the session with the kernel has ended.
#[derive(Default)]
pub struct Over(Mutex<bool>, Condvar);

impl Over {
    /// It has.
    pub fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_all();
    }

    /// Waits for it, no longer than this.
    fn wait(&self, limit: Duration) -> bool {
        let over = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *self.1.wait_timeout_while(over, limit, |over| !*over).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Mounted {
    /// What has just been mounted on this directory, an absolute path without links, by a session that sets `over`.
    pub fn new(point: PathBuf, helper: Option<SessionUnmounter>, over: Arc<Over>) -> Mounted {
        Mounted { entry: mount_on(&point), point, helper: Mutex::new(helper), over }
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

    /// Unmounts, even if files are open. That ends the connection with the kernel, unless the mount is at another place,
    /// too, or has been moved, or a helper has unmounted it and files are open.
    pub fn unmount(&self) {
        if !self.is_uppermost() {
            // The mount has ended already, or another mount covers it, so the kernel has no path to it.
            return tracing::debug!(point = %self.point.display(), "what is mounted there is not this");
        }
        let unmounted = match &mut *self.helper.lock().unwrap_or_else(PoisonError::into_inner) {
            None => mounts::unmount(&self.point),
            Some(helper) => helper.unmount(),
        };
        if let Err(error) = &unmounted {
            tracing::warn!(point = %self.point.display(), %error, "cannot unmount");
        }
    }

    /// Unmounts and ends the connection with the kernel, wherever it is in use. `refuse` lets the session refuse all
    /// requests. Returns false if they can still come.
    pub fn end(&self, refuse: impl FnOnce()) -> bool {
        self.unmount();
        // A thread that waits to pass on a request would not notice that the connection has ended.
        refuse();
        if self.over.wait(BRIEFLY) {
            return true;
        }
        if let Some(Err(error)) = self.entry.as_ref().map(mounts::abort) {
            tracing::debug!(point = %self.point.display(), %error, "cannot abort the connection");
        }
        let is_over = self.over.wait(LONG);
        if !is_over {
            tracing::warn!(
                point = %self.point.display(),
                "it is mounted at another place, too, or in use; requests are refused there until it is unmounted"
            );
        }
        is_over
    }

    /// Ends a mount that can be changed: the kernel writes what it has, by `write_back`, the filesystem makes it durable,
    /// and it is unmounted. Waits for answers of the session, so it must run on another thread than these; as long as there
    /// is progress within the limit, and some seconds for the end. `refuse` is that of [`Mounted::end`].
    pub fn stop(
        self: &Arc<Self>,
        write_back: impl FnOnce() -> io::Result<()> + Send + 'static,
        (limit, progress): (Duration, impl Fn() -> u64),
        refuse: impl FnOnce(),
    ) -> Stopped {
        let (done, written) = mpsc::channel();
        let mounted = Arc::clone(self);
        let write = move || drop(done.send(mounted.write_back_and_unmount(write_back)));
        let spawned = thread::Builder::new().name("fuse-sync".to_owned()).spawn(write);
        let mut seen = progress();
        let mut wait = || loop {
            match written.recv_timeout(limit) {
                Err(RecvTimeoutError::Timeout) if progress() != seen => seen = progress(),
                result => return result,
            }
        };
        let (is_late, lost) = match spawned.map(|_| wait()) {
            Ok(Ok(Ok(()))) => (false, None),
            Ok(Ok(Err(error))) | Err(error) => (false, Some(format!("the kernel cannot write it: {error}"))),
            Ok(Err(_)) => (true, Some(format!("nothing could be written for {} s", limit.as_secs_f32()))),
        };
        Stopped { is_late, lost, lasts: !self.end(refuse) }
    }

    /// Unmounts only if no file is open.
    fn write_back_and_unmount(&self, write_back: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        write_back()?;
        // The end may take some seconds, and a second signal ends the process at once.
        if let Err(error) = self.sync_root() {
            tracing::debug!(?error, "it is made durable at the end only");
        }
        // Unmounting without force writes what was changed meanwhile, and fails if anything is open.
        let is_helped = self.helper.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if !is_helped && self.is_uppermost() {
            let unmounted = self.unmount_unused();
            tracing::debug!(point = %self.point.display(), ?unmounted, "unmounted if nothing is open");
        }
        Ok(())
    }

    /// Lets the kernel write all pages that programs have changed, and waits for the answers, those of these files, too. So
    /// it must run on another thread than the session's. No request must wait for it during which the kernel locks one of
    /// the files.
    pub fn write_back(&self, files: Vec<u64>) -> Result<(), WriteBackError> {
        self.apart(move |root, tell| tell(write_pages_of(&root, &files)))
    }

    /// As [`Mounted::write_back`], for one file, which the kernel may have locked. Linux before 6.16 only sends the pages
    /// then, and does not wait.
    pub fn write_back_locked(&self, file: u64) -> Result<(), WriteBackError> {
        self.apart(move |root, tell| match open_if_known(&root, file) {
            Ok(None) => tell(Ok(())),
            // Closing it may need the lock.
            Ok(Some(file)) => tell(write_pages(&file).map_err(WriteBackError::Failed)),
            Err(error) => tell(Err(error)),
        })
    }

    /// As [`Mounted::write_back`], for these files alone.
    pub fn write_back_of(&self, files: Vec<u64>) -> Result<(), WriteBackError> {
        self.apart(move |root, tell| tell(files.iter().try_for_each(|file| write_pages_of_file(&root, *file))))
    }

    /// Lets the filesystem make all that it has durable.
    fn sync_root(&self) -> Result<(), WriteBackError> {
        self.apart(|root, tell| tell(rustix::fs::fsync(&root).map_err(|error| WriteBackError::Failed(error.into()))))
    }

    /// Unmounts, unless a file is open. What was changed is written first.
    fn unmount_unused(&self) -> io::Result<()> {
        let point = self.point.clone();
        run_apart(Path::new(CONNECTION), move |tell| {
            tell(rustix::mount::unmount(&point, UnmountFlags::NOFOLLOW).map_err(io::Error::from));
        })?
    }

    /// Runs what waits for the kernel, with the root of the mount, at whatever place. If this process is killed meanwhile,
    /// nobody answers any more, so the thread must not keep the connection.
    fn apart(
        &self,
        work: impl FnOnce(File, &dyn Fn(Result<(), WriteBackError>)) + Send + 'static,
    ) -> Result<(), WriteBackError> {
        let (point, device) = (self.point.clone(), self.entry.as_ref().map(|entry| entry.device.clone()));
        let run = run_apart(Path::new(CONNECTION), move |tell| match root_of(point, device.as_deref()) {
            Ok(root) => work(root, tell),
            Err(error) => tell(Err(WriteBackError::Unreachable(error))),
        });
        run.unwrap_or_else(|error| Err(WriteBackError::Unreachable(error)))
    }
}

/// The root of a mount, or any directory of it. With this device, if that is known: it may be mounted at another place
/// meanwhile.
fn root_of(point: PathBuf, device: Option<&str>) -> io::Result<File> {
    let others = device.map(mounts::places_of).unwrap_or_default();
    let mut why = io::Error::other("it is not mounted in this namespace");
    for place in iter::once(point).chain(others) {
        let opened = File::open(&place).and_then(|root| {
            let number = root.metadata()?.dev();
            Ok((root, format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number))))
        });
        match opened {
            Ok((root, number)) if device.is_none_or(|device| device == number) => return Ok(root),
            Ok(_) => why = io::Error::other("another filesystem is mounted over it"),
            Err(error) => why = error,
        }
    }
    Err(why)
}

fn write_pages_of(root: &File, files: &[u64]) -> Result<(), WriteBackError> {
    // It sends all pages, but some kernels do not wait for the answers. All do when a file is closed.
    rustix::fs::syncfs(root).map_err(|error| WriteBackError::Failed(error.into()))?;
    files.iter().try_for_each(|file| open_if_known(root, *file).map(drop))
}

fn write_pages_of_file(root: &File, file: u64) -> Result<(), WriteBackError> {
    let Some(file) = open_if_known(root, file)? else { return Ok(()) };
    // That tells of errors; some kernels wait for the answers only when it is closed.
    write_pages(&file).map_err(WriteBackError::Failed)
}

/// Opens an inode. One that the kernel has just forgotten is closed already; or its subvolume was deleted.
fn open_if_known(root: &File, file: u64) -> Result<Option<File>, WriteBackError> {
    match open_fuse_inode(root.as_fd(), file) {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::STALE | Errno::NOENT)) => Ok(None),
        opened => opened.map(Some).map_err(WriteBackError::Unreachable),
    }
}
