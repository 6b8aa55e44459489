//! A thread that serves a mount in a folder of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use futures_channel::oneshot;
use rustix::mount::UnmountFlags;
use sealblock_fuse::{Ended, MountError};

/// A mount that is served.
pub struct Serving {
    /// The mount point.
    pub point: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<Ended, MountError>>>,
    _folder: tempfile::TempDir,
}

impl Serving {
    /// Runs a server on a thread. It gets the mount point, says when it has mounted, and must stop when told to.
    pub fn start<S>(server: S) -> Serving
    where
        S: FnOnce(&Path, mpsc::Sender<()>, oneshot::Receiver<()>) -> Result<Ended, MountError> + Send + 'static,
    {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let point = folder.path().join("a mount\\point");
        fs::create_dir(&point).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ready, mounted) = mpsc::channel();
        let on = point.clone();
        let thread = thread::spawn(move || server(&on, ready, stopped));
        mounted.recv().expect("it is mounted");
        Serving { point, stop: Some(stop), thread: Some(thread), _folder: folder }
    }

    /// The path of an entry.
    pub fn path(&self, name: &str) -> PathBuf {
        self.point.join(name)
    }

    /// Tells the server to stop.
    pub fn tell_to_stop(&mut self) {
        drop(self.stop.take());
    }

    /// True if serving has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Tells the server to stop, and waits for it.
    pub fn stop(&mut self) -> Ended {
        self.tell_to_stop();
        self.wait()
    }

    /// Waits until serving has ended.
    pub fn wait(&mut self) -> Ended {
        self.result().unwrap()
    }

    /// As [`Serving::wait`], with the error.
    pub fn result(&mut self) -> Result<Ended, MountError> {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.tell_to_stop();
        if thread::panicking() {
            // A failed test may have left it running.
            let _ = rustix::mount::unmount(&self.point, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(thread::panicking() || ended.is_ok_and(|ended| ended.is_ok()));
        }
    }
}
