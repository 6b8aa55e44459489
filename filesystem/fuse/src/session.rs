//! Mounting, serving and unmounting.
//!
//! Invariants: threads of the session receive the kernel's requests, the filesystem is only used on the core that
//! serves, and only [`Call`]s move between them, through the reactor's mailbox. When serving ends for any reason, open
//! requests are refused, the mount is removed, and the threads have ended.
//!
//! Unmounting here does not wait until files are closed: reading them fails then (ENOTCONN), because a stop must end
//! the program. To let programs finish reading, use `umount`, which waits until no file is open; after that serving
//! ends by itself. A mount that is covered by another one cannot be unmounted, and its connection cannot be ended, so
//! serving continues until it is uncovered and unmounted.

use std::io::ErrorKind;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};

use fuser::{Config, MountOption, SessionACL, SessionUnmounter};
use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_runtime_reactor::Mailbox;

use crate::call::{Call, Permits};
use crate::error::MountError;
use crate::home::answer;
use crate::interface::{MAX_READ_BYTES, ReadFs};
use crate::kernel::KernelSide;
use crate::mounts::{self, MountEntry, mount_on, set_readahead};

/// The default maximum number of calls in flight. It limits the data in memory to 64 MiB.
pub const DEFAULT_CALLS: usize = 64;
/// The upper limit of that maximum.
pub const MAX_CALLS: usize = 4096;
/// Threads that receive requests; they only pass them on.
const THREADS: usize = 2;

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The source in the mount table.
    pub source: String,
    /// True if other users may use the mount as well, as far as permissions allow. Otherwise only its owner may,
    /// whatever the permissions are.
    pub allow_other: bool,
    /// The maximum number of calls in flight, from 1 to [`MAX_CALLS`]; other values are clamped.
    pub calls: usize,
}

/// Why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted.
    Unmounted,
    /// The server was told to stop.
    Stopped,
}

/// A mounted filesystem. Dropping it unmounts.
pub struct Session {
    point: PathBuf,
    /// The mount in the kernel's table, if it can be read.
    mount: Option<MountEntry>,
    /// The helper program with which a user who is not root has mounted, and which is needed to unmount.
    helper: Option<SessionUnmounter>,
    calls: Arc<Mailbox<Call>>,
    permits: Arc<Permits>,
    /// The thread that runs the session; `None` once it has been joined.
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// Notifies the filesystem's core that no more calls will come, also after a panic.
struct FinishGuard(Arc<Mailbox<Call>>);

impl Drop for FinishGuard {
    fn drop(&mut self) {
        self.0.finish();
    }
}

impl Session {
    /// Mounts read-only on a directory. Programs that use the mount wait until [`Session::serve`] runs. `root` is the
    /// inode number of the filesystem's root directory.
    ///
    /// # Errors
    /// [`MountError::Mount`] if the mount fails.
    pub fn mount(point: &Path, root: u64, options: &Options) -> Result<Session, MountError> {
        let failed = |source| MountError::Mount { point: point.display().to_string(), source };
        let canonical = point.canonicalize().map_err(failed)?;
        let (calls, permits) = (Arc::<Mailbox<Call>>::default(), Permits::new(options.calls.min(MAX_CALLS)));
        let side = KernelSide { root, calls: Arc::clone(&calls), permits: Arc::clone(&permits) };
        let (session, helper) = begin(&canonical, side, options).map_err(failed)?;
        let finish = FinishGuard(Arc::clone(&calls));
        let run = move || {
            let _finish = finish;
            session.run()
        };
        let thread = thread::Builder::new().name("fuse".to_owned()).spawn(run).or_else(|error| {
            // A session that did not start does not unmount.
            if helper.is_none() { mounts::unmount(&canonical).and(Err(error)) } else { Err(error) }
        });
        let thread = thread.map_err(failed)?;
        let mount = mount_on(&canonical);
        let session = Session { point: canonical, mount, helper, calls, permits, thread: Some(thread) };
        if let Some(mount) = &session.mount
            && let Err(error) = set_readahead(mount, MAX_READ_BYTES / 1024)
        {
            tracing::debug!(%error, "the kernel reads ahead as much as it does by itself");
        }
        Ok(session)
    }

    /// Its mount point, as an absolute path without links.
    pub fn point(&self) -> &Path {
        &self.point
    }

    /// Serves the kernel until it unmounts or `stop` is ready; then open requests are refused, and the mount is
    /// removed. Runs on any reactor. While another task on that core blocks, no request is answered; a task that uses
    /// the mount itself would block forever.
    ///
    /// # Errors
    /// [`MountError::Session`]: the session with the kernel failed. Nothing stays mounted then, either.
    pub async fn serve<F: ReadFs>(mut self, fs: &F, stop: impl Future<Output = ()>) -> Result<Ended, MountError> {
        let mut stop = pin!(stop);
        let (mut answers, mut batch) = (FuturesUnordered::new(), Vec::new());
        let (mut is_open, mut ended) = (true, Ended::Unmounted);
        std::future::poll_fn(|cx| {
            if is_open && ended == Ended::Unmounted && stop.as_mut().poll(cx).is_ready() {
                ended = Ended::Stopped;
                // A thread that waits for a permit would not notice that the connection has ended.
                if self.unmount() {
                    self.permits.close();
                }
            }
            if is_open {
                is_open = self.take_calls(cx, &mut batch);
                // A panic ends only this request; dropping its reply sends an error.
                answers.extend(batch.drain(..).map(|call| AssertUnwindSafe(answer(fs, call)).catch_unwind()));
            }
            while let Poll::Ready(Some(_)) = answers.poll_next_unpin(cx) {}
            // Without the session, nobody waits for the open requests.
            if is_open { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        drop(answers);
        let session = self.join();
        if session.is_err() {
            // The session ended for a reason other than an unmount.
            self.unmount();
        }
        session.map_err(|source| MountError::Session { point: self.point.display().to_string(), source })?;
        Ok(ended)
    }

    /// Starts the calls that have arrived. Returns false if no more will come.
    fn take_calls(&self, cx: &mut Context<'_>, batch: &mut Vec<Call>) -> bool {
        match self.calls.poll_take(cx, batch) {
            Poll::Ready(true) => {
                // Lets other tasks of this core run between batches.
                cx.waker().wake_by_ref();
                true
            }
            Poll::Ready(false) => false,
            Poll::Pending => true,
        }
    }

    /// True if the uppermost mount on the directory is this session's.
    fn is_mounted(&self) -> bool {
        match &self.mount {
            Some(mount) => mount_on(&self.point).as_ref() == Some(mount),
            None => self.thread.as_ref().is_some_and(|thread| !thread.is_finished()),
        }
    }

    /// Ends the connection with the kernel and unmounts. Returns true if no more requests can come.
    fn unmount(&mut self) -> bool {
        if !self.is_mounted() {
            // The mount has ended already, or another mount covers it, so the kernel has no path to it.
            tracing::debug!(point = %self.point.display(), "what is mounted there is not this");
            return false;
        }
        let (unmounted, is_over) = match &mut self.helper {
            None => (mounts::unmount(&self.point), true),
            // The helper does not close open files, so serving continues until they are closed.
            Some(helper) => (helper.unmount(), false),
        };
        if let Err(error) = &unmounted {
            tracing::warn!(point = %self.point.display(), %error, "cannot unmount");
        }
        is_over && unmounted.is_ok()
    }

    /// Waits for the threads, which have ended or are about to.
    fn join(&mut self) -> std::io::Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(ended)) => ended,
            Some(Err(_panic)) => Err(std::io::Error::other("a thread of the session panicked")),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Threads that wait for a permit would never end; the requests that they have read are refused like the waiting
        // ones.
        self.permits.close();
        drop(self.calls.close());
        let Some(thread) = &self.thread else { return };
        if !thread.is_finished() && !self.unmount() {
            // Waiting for the thread could take forever. The mount refuses every request until it is unmounted or the
            // process ends.
            tracing::warn!(point = %self.point.display(), "still mounted");
            return;
        }
        if let Err(error) = self.join() {
            tracing::debug!(point = %self.point.display(), %error, "the session failed");
            self.unmount();
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options { source: "sealblock".to_owned(), allow_other: false, calls: DEFAULT_CALLS }
    }
}

/// Mounts, and negotiates with the kernel.
fn begin(
    point: &Path,
    side: KernelSide,
    options: &Options,
) -> std::io::Result<(fuser::Session<KernelSide>, Option<SessionUnmounter>)> {
    let mut config = Config::default();
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    let allow_other = if options.allow_other { ",allow_other" } else { "" };
    let of_fuse = format!("default_permissions,max_read={MAX_READ_BYTES}{allow_other}");
    match mounts::mount(point, &options.source, &of_fuse) {
        Ok(device) => {
            let session = fuser::Session::from_fd(side, device, config.acl, config);
            if session.is_err() {
                // The request would never be answered.
                mounts::unmount(point)?;
            }
            Ok((session?, None))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            config.mount_options = vec![
                MountOption::RO,
                MountOption::NoDev,
                MountOption::NoSuid,
                MountOption::NoAtime,
                MountOption::DefaultPermissions,
                MountOption::FSName(options.source.clone()),
                MountOption::Subtype("sealblock".to_owned()),
                MountOption::CUSTOM(format!("max_read={MAX_READ_BYTES}")),
            ];
            let mut session = fuser::Session::new(side, point, &config)?;
            let helper = session.unmount_callable();
            Ok((session, Some(helper)))
        }
        Err(error) => Err(error),
    }
}
