//! Mounting, serving and unmounting.
//!
//! Invariants: threads of the session receive the kernel's requests, the filesystem is only used on the core that
//! serves, and only [`Call`]s and [`Forget`]s move between them, through mailboxes of the reactor. When serving ends
//! for any reason, open requests are refused, or finished if they may be changes, the mount is removed, and the threads
//! have ended.
//!
//! Unmounting here does not wait until files are closed: using them fails then (ENOTCONN), because a stop must end the
//! program; but what was written before is written. To let programs finish, use `umount`, which waits until no file is
//! open; after that serving ends by itself. A mount that is covered by another one cannot be unmounted, and its
//! connection cannot be ended, so serving continues until it is uncovered and unmounted.

use std::io::ErrorKind;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fuser::{Config, MountOption, SessionACL, SessionUnmounter};
use rustix::process::{configure_io_flusher_behavior, is_io_flusher};
use sealblock_runtime_ioctl::apart::can_open_fuse_inodes;
use sealblock_runtime_reactor::Mailbox;

use crate::call::{Call, Forget, Permits};
use crate::changes::WriteFs;
use crate::error::MountError;
use crate::home::{ReadOnly, Served, Writable};
use crate::interface::{MAX_READ_BYTES, ReadFs};
use crate::kernel::{Agreed, KernelSide};
use crate::mounted::{Mounted, Over, Stopped};
use crate::mounts::{self, Allowed, set_readahead, set_writeback_share};
use crate::notices::Notifier;
use crate::work::Work;

/// The default maximum number of calls in flight. It limits the data in memory to 64 MiB.
pub const DEFAULT_CALLS: usize = 64;
/// The upper limit of that maximum.
pub const MAX_CALLS: usize = 4096;
/// Threads that receive requests; they only pass them on.
const THREADS: usize = 2;
/// The upper limit of readahead and asynchronous requests at once.
const MAX_BACKGROUND: usize = 64;
/// Which part of the memory for unwritten pages one mount may fill, in percent.
const WRITEBACK_SHARE: u32 = 50;

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
    /// How the mount can be changed; `None` for a read-only mount.
    pub write: Option<WriteOptions>,
}

/// Options of a mount that can be changed.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    /// The kernel collects writes in its page cache, and sends them later and in larger pieces. Without it, each write
    /// of a program reaches the filesystem before it returns. Not without CAP_DAC_READ_SEARCH: it takes that to wait for
    /// pages on their way.
    pub writeback_cache: bool,
    /// Programs with the set-user-ID bit run with the rights of their owner. Only for root.
    pub allow_set_id: bool,
    /// Device nodes can be opened. Only for root.
    pub allow_devices: bool,
    /// How long a stop waits for the next write while what programs wrote reaches the filesystem and becomes durable, and
    /// then for requests in flight.
    pub patience: Duration,
    /// What the filesystem did for that so far: as long as it grows, there is progress between two writes.
    pub progress: Arc<AtomicU64>,
}

/// Why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was unmounted.
    Unmounted,
    /// The server was told to stop.
    Stopped,
}

/// A mounted filesystem. Dropping it unmounts. If it is dropped without being served until the end, what programs wrote
/// and the kernel has not yet sent is lost.
pub struct Session {
    mounted: Arc<Mounted>,
    calls: Arc<Mailbox<Call>>,
    forgets: Arc<Mailbox<Forget>>,
    permits: Arc<Permits>,
    /// How it can be changed.
    write: Option<WriteOptions>,
    notifier: Notifier,
    /// The thread that runs the session; `None` once it has been joined.
    thread: Option<JoinHandle<std::io::Result<()>>>,
    /// The thread that gives notices to the kernel.
    notices: Option<JoinHandle<()>>,
}

/// Notifies the filesystem's core that no more calls will come, also after a panic.
struct FinishGuard(Arc<Mailbox<Call>>, Arc<Over>);

impl Drop for FinishGuard {
    fn drop(&mut self) {
        self.0.finish();
        self.1.set();
    }
}

/// While this exists, the kernel lets this thread have memory without writing pages back for it, and does not slow it
/// down because others have changed many pages: it may be the one that these must go through.
struct Flusher {
    was_one: bool,
}

impl Flusher {
    /// From now on, if this process may (CAP_SYS_RESOURCE).
    fn begin() -> Flusher {
        let was_one = is_io_flusher().unwrap_or(true);
        if !was_one && let Err(error) = configure_io_flusher_behavior(true) {
            tracing::debug!(%error, "this thread is like any other for the kernel");
        }
        Flusher { was_one }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        if !self.was_one
            && let Err(error) = configure_io_flusher_behavior(false)
        {
            tracing::debug!(%error, "this thread stays privileged");
        }
    }
}

impl Session {
    /// Mounts on a directory, read-only unless the options say otherwise. Programs that use the mount wait until
    /// [`Session::serve`] or [`Session::serve_writable`] runs. `root` is the inode number of the filesystem's root
    /// directory.
    ///
    /// # Errors
    /// [`MountError::Mount`] if the mount fails.
    pub fn mount(point: &Path, root: u64, options: &Options) -> Result<Session, MountError> {
        let failed = |source| MountError::Mount { point: point.display().to_string(), source };
        let canonical = point.canonicalize().map_err(failed)?;
        // Linux mounts on a file, too, but nothing that is below the root could then be reached.
        if !canonical.is_dir() {
            return Err(failed(ErrorKind::NotADirectory.into()));
        }
        let limit = options.calls.clamp(1, MAX_CALLS);
        let (calls, permits) = (Arc::<Mailbox<Call>>::default(), Permits::new(limit));
        let forgets = Arc::<Mailbox<Forget>>::default();
        let writes = options.write.as_ref().map(|write| Agreed {
            writeback_cache: write.writeback_cache && can_open_fuse_inodes(),
            ..Agreed::default()
        });
        let side = KernelSide {
            root,
            calls: Arc::clone(&calls),
            permits: Arc::clone(&permits),
            forgets: Arc::clone(&forgets),
            most_in_background: (limit * 3 / 4).clamp(1, MAX_BACKGROUND) as u16,
            writes,
        };
        let (session, helper) = begin(&canonical, side, options).map_err(failed)?;
        let over = Arc::<Over>::default();
        let finish = FinishGuard(Arc::clone(&calls), Arc::clone(&over));
        let kernel = session.notifier();
        let is_writable = options.write.is_some();
        let run = move || {
            let _finish = finish;
            // Its threads are started by this one, and are like it.
            let _flusher = is_writable.then(Flusher::begin);
            session.run()
        };
        let thread = thread::Builder::new().name("fuse".to_owned()).spawn(run).or_else(|error| {
            // A session that did not start does not unmount.
            if helper.is_none() { mounts::unmount(&canonical).and(Err(error)) } else { Err(error) }
        });
        let thread = Some(thread.map_err(failed)?);
        let (mounted, write) = (Arc::new(Mounted::new(canonical, helper, over)), options.write.clone());
        let notifier = Notifier::new(root, Arc::clone(&mounted));
        // From here on, dropping the session unmounts.
        let mut session = Session { mounted, calls, forgets, permits, write, notifier, thread, notices: None };
        session.notices = Some(session.notifier.start(kernel).map_err(failed)?);
        session.adapt_caches();
        Ok(session)
    }

    /// Adapts how much the kernel reads ahead and collects, as far as that is allowed.
    fn adapt_caches(&self) {
        let Some(entry) = self.mounted.entry() else { return };
        if let Err(error) = set_readahead(entry, MAX_READ_BYTES / 1024) {
            tracing::debug!(%error, "the kernel reads ahead as much as it does by itself");
        }
        if self.write.is_some()
            && let Err(error) = set_writeback_share(entry, WRITEBACK_SHARE)
        {
            tracing::debug!(%error, "the kernel collects as little as it does by itself");
        }
    }

    /// Its mount point, as an absolute path without links.
    pub fn point(&self) -> &Path {
        self.mounted.point()
    }

    /// Tells the kernel of changes that were not made by its requests.
    pub fn notifier(&self) -> Notifier {
        self.notifier.clone()
    }

    /// Serves the kernel until it unmounts or `stop` is ready; then open requests are refused, and the mount is
    /// removed. Changes are refused, even if the mount is not read-only. Runs on any reactor. While another task on
    /// that core blocks, no request is answered; a task that uses the mount itself would block forever.
    ///
    /// # Errors
    /// [`MountError::Session`]: the session with the kernel failed. Nothing stays mounted then, either.
    pub async fn serve<F: ReadFs>(self, fs: &F, stop: impl Future<Output = ()>) -> Result<Ended, MountError> {
        self.serve_as(&ReadOnly(fs), stop).await
    }

    /// Like [`Session::serve`], with changes. When `stop` is ready, first the kernel sends what programs wrote, then
    /// the mount is removed; programs that have files open get errors from then on. Requests in flight are finished. At
    /// the end the filesystem is told that everything is forgotten, also what is open.
    ///
    /// It does not make anything durable by itself: when this returns, the filesystem can commit what is left.
    ///
    /// # Errors
    /// Like [`Session::serve`]; [`MountError::Lost`] if what programs wrote last may be lost.
    pub async fn serve_writable<F: WriteFs>(self, fs: &F, stop: impl Future<Output = ()>) -> Result<Ended, MountError> {
        let patience = self.write.as_ref().map_or(Duration::ZERO, |write| write.patience);
        let _flusher = Flusher::begin();
        let served = Writable::new(fs, self.notifier(), patience);
        self.serve_as(&served, stop).await
    }

    async fn serve_as<S: Served>(mut self, served: &S, stop: impl Future<Output = ()>) -> Result<Ended, MountError> {
        let mut stop = pin!(stop);
        let mut work = Work::new(served);
        let stopped = Arc::<Mailbox<Stopped>>::default();
        let (mut is_open, mut ended, mut end) = (true, Ended::Unmounted, None::<Stopped>);
        std::future::poll_fn(|cx| {
            if is_open && ended == Ended::Unmounted && stop.as_mut().poll(cx).is_ready() {
                ended = Ended::Stopped;
                self.begin_to_stop(&stopped);
            }
            if is_open
                && ended == Ended::Stopped
                && let Poll::Ready(stopped) = poll_stop(cx, &stopped)
            {
                if stopped.lasts {
                    self.leave();
                }
                if stopped.is_late {
                    work.give_up();
                }
                end = Some(stopped);
            }
            if is_open {
                is_open = work.take_calls(cx, &self.calls);
            }
            work.take_forgets(cx, &self.forgets);
            work.go_on(cx);
            if is_open { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        if ended == Ended::Stopped && end.is_none() {
            // The session has ended, and so has the thread that unmounts, or is about to.
            let stopped = std::future::poll_fn(|cx| poll_stop(cx, &stopped)).await;
            if stopped.is_late {
                work.give_up();
            }
            end = Some(stopped);
        }
        let mut lost = end.and_then(|stopped| stopped.lost);
        if !work.finish(&self.forgets).await {
            lost.get_or_insert_with(|| "requests were not finished in time".to_owned());
        }
        let session = self.join();
        if session.is_err() {
            // The session ended for a reason other than an unmount.
            self.mounted.unmount();
        }
        let failed = |source| MountError::Session { point: self.point().display().to_string(), source };
        session.map_err(failed)?;
        match lost {
            Some(why) => Err(MountError::Lost { point: self.point().display().to_string(), why }),
            None => Ok(ended),
        }
    }

    /// Begins to unmount. What comes of it arrives in the mailbox.
    fn begin_to_stop(&self, stopped: &Arc<Mailbox<Stopped>>) {
        let (mounted, permits, into) = (Arc::clone(&self.mounted), Arc::clone(&self.permits), Arc::clone(stopped));
        let notifier = self.notifier.clone();
        let patience = self.write.as_ref().map(|write| (write.patience, Arc::clone(&write.progress)));
        let end = move || {
            let refuse = || permits.close();
            let end = match patience {
                Some((patience, progress)) => {
                    let writes = notifier.clone();
                    let done = || writes.succeeded_writes().wrapping_add(progress.load(Ordering::Relaxed));
                    mounted.stop(move || notifier.write_back_here(), (patience, done), refuse)
                }
                None => Stopped { lasts: !mounted.end(refuse), ..Stopped::default() },
            };
            into.push(end).is_ok()
        };
        if let Err(error) = thread::Builder::new().name("fuse-stop".to_owned()).spawn(end) {
            self.mounted.unmount();
            self.permits.close();
            let _closed = stopped.push(Stopped { lost: Some(error.to_string()), ..Stopped::default() });
        }
    }

    /// Refuses every request from now on, though they can still come. The threads of the session end with the connection,
    /// at the latest with the process.
    fn leave(&mut self) {
        drop(self.calls.close());
        self.notifier.close();
        self.thread = None;
        self.notices = None;
    }

    /// Waits for the threads, which have ended or are about to.
    fn join(&mut self) -> std::io::Result<()> {
        let ended = match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            // So some kernels call the end of a connection whose last user goes while a request is read.
            Some(Ok(Err(error))) if error.kind() == ErrorKind::ConnectionAborted => Ok(()),
            Some(Ok(ended)) => ended,
            Some(Err(_panic)) => Err(std::io::Error::other("a thread of the session panicked")),
        };
        self.notifier.close();
        if let Some(notices) = self.notices.take() {
            drop(notices.join());
        }
        ended
    }
}

/// How the mount ended, once that is known.
fn poll_stop(cx: &mut Context<'_>, stopped: &Mailbox<Stopped>) -> Poll<Stopped> {
    let mut news = Vec::new();
    if stopped.poll_take(cx, &mut news).is_ready() {
        // Registers for what comes next, though nothing does.
        cx.waker().wake_by_ref();
    }
    news.pop().map_or(Poll::Pending, Poll::Ready)
}

impl Drop for Session {
    fn drop(&mut self) {
        // Threads that wait for a permit would never end; the requests that they have read are refused like the waiting
        // ones.
        self.permits.close();
        drop(self.calls.close());
        let Some(thread) = &self.thread else { return };
        if !thread.is_finished() && !self.mounted.end(|| ()) {
            // Waiting for the threads could take forever.
            return self.leave();
        }
        if let Err(error) = self.join() {
            tracing::debug!(point = %self.point().display(), %error, "the session failed");
            self.mounted.unmount();
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options { source: "sealblock".to_owned(), allow_other: false, calls: DEFAULT_CALLS, write: None }
    }
}

impl Default for WriteOptions {
    fn default() -> WriteOptions {
        let patience = Duration::from_secs(30);
        let progress = Arc::default();
        WriteOptions { writeback_cache: true, allow_set_id: false, allow_devices: false, patience, progress }
    }
}

/// Mounts, and negotiates with the kernel.
fn begin(
    point: &Path,
    mut side: KernelSide,
    options: &Options,
) -> std::io::Result<(fuser::Session<KernelSide>, Option<SessionUnmounter>)> {
    let mut config = Config::default();
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    let allow_other = if options.allow_other { ",allow_other" } else { "" };
    let of_fuse = format!("default_permissions,max_read={MAX_READ_BYTES}{allow_other}");
    let write = options.write.as_ref();
    let allowed = Allowed {
        writes: write.is_some(),
        set_id: write.is_some_and(|write| write.allow_set_id),
        devices: write.is_some_and(|write| write.allow_devices),
    };
    match mounts::mount(point, &options.source, allowed, &of_fuse) {
        Ok(device) => {
            // The kernel itself lets only those use the mount that may; some requests come from it, not from a user.
            let session = fuser::Session::from_fd(side, device, SessionACL::All, config);
            if session.is_err() {
                // The request would never be answered.
                mounts::unmount(point)?;
            }
            Ok((session?, None))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            if let Some(agreed) = &mut side.writes {
                // fuser refuses what the kernel's own threads ask, who then could not write times back.
                agreed.writeback_cache = false;
            }
            config.mount_options = vec![
                if allowed.writes { MountOption::RW } else { MountOption::RO },
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
