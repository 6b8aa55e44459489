//! Tells the kernel that something has changed of which it does not know, so that it drops what it cached.
//!
//! Invariant: a thread of the session tells the kernel, never the core that answers requests. The kernel waits for
//! pages and directories that are in use, and so for answers of that core. Notices that are the same are one, so no
//! more wait than there are inodes and names.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ffi::OsStr;
use std::future::poll_fn;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fuser::INodeNo;
use rustix::io::Errno;
use sealblock_runtime_reactor::Mailbox;

use crate::error::FsError;
use crate::mounted::{Mounted, WriteBackError};

/// The number of requests that may wait at once until the kernel has written pages.
const MOST_WAITING: usize = 16;
/// How long the kernel may be told of pages that a file got after it did.
const GROWN_INTERVAL: Duration = Duration::from_secs(1);

/// Tells the kernel of changes that were not made by its requests for them: by ioctl, or by the filesystem itself.
///
/// The methods return at once, and can be called from anywhere. The kernel drops what it has a little later, or never,
/// if the mount has ended.
#[derive(Clone)]
pub struct Notifier {
    root: u64,
    queue: Arc<Queue>,
    mounted: Arc<Mounted>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    kernel: OnceLock<fuser::Notifier>,
    writes: Writes,
}

/// The writes that have ended.
#[derive(Default)]
struct Writes {
    succeeded: AtomicU64,
    /// Those that the kernel was told have failed, or that were not answered.
    failed: AtomicU64,
}

/// A write that is counted as failed when this is dropped, unless it succeeded.
pub(crate) struct BegunWrite<'n> {
    writes: &'n Writes,
    has_succeeded: bool,
}

impl BegunWrite<'_> {
    /// The write succeeded.
    pub fn succeed(mut self) {
        self.has_succeeded = true;
    }
}

impl Drop for BegunWrite<'_> {
    fn drop(&mut self) {
        let counter = if self.has_succeeded { &self.writes.succeeded } else { &self.writes.failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct State {
    notices: BTreeSet<Notice>,
    /// Files that got pages from the kernel, whose space the kernel does not know.
    grown: BTreeSet<u64>,
    /// When the kernel is told of these.
    due: Option<Instant>,
    /// How often each file is open for writing.
    written: BTreeMap<u64, u64>,
    /// The requests that wait until the kernel has written pages.
    waiting: usize,
    is_closed: bool,
}

/// What the kernel must drop. Inode numbers are the kernel's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Notice {
    /// The attributes.
    Attributes(u64),
    /// The attributes, and all content.
    Inode(u64),
    /// The entry of a directory.
    Entry(u64, Vec<u8>),
}

impl Notifier {
    /// For a filesystem with this root. Nobody is told until [`Notifier::start`].
    pub(crate) fn new(root: u64, mounted: Arc<Mounted>) -> Notifier {
        Notifier { root, queue: Arc::default(), mounted }
    }

    /// Lets a request wait for the kernel. It goes on, as the session answers others meanwhile; but it takes one of the
    /// calls that may be in flight, and some must be left for what the kernel asks.
    ///
    /// # Errors
    /// EBUSY if 16 requests wait already.
    pub fn wait(&self) -> Result<Waiting, FsError> {
        let counted = Counted::begin(self).map_err(not_written)?;
        Ok(Waiting(Arc::new(counted)))
    }

    /// As [`Waiting::write_back`], for one file, which the kernel has locked for the request that waits. It need not do
    /// anything if nobody has the file open for writing.
    pub(crate) async fn write_back_locked(&self, ino: u64) -> Result<(), FsError> {
        let node = self.node(ino);
        let write = move |notifier: &Notifier| notifier.finish(&[node], |mounted| mounted.write_back_locked(node));
        self.wait()?.run(write).await.map_err(not_written)
    }

    /// True if any file is open for writing.
    pub(crate) fn is_any_written(&self) -> bool {
        !self.queue.lock().written.is_empty()
    }

    /// True if a file is open for writing.
    pub(crate) fn is_written(&self, ino: u64) -> bool {
        self.queue.lock().written.contains_key(&self.node(ino))
    }

    /// As [`Waiting::write_back`], on this thread, which must not be one that answers.
    pub(crate) fn write_back_here(&self) -> io::Result<()> {
        // Pages of a file that is closed were written when it was.
        let written: Vec<u64> = self.queue.lock().written.keys().copied().collect();
        self.finish(&written, |mounted| mounted.write_back(written.clone()))
    }

    /// A write that begins. It counts as failed until it succeeded.
    pub(crate) fn begin_write(&self) -> BegunWrite<'_> {
        BegunWrite { writes: &self.queue.writes, has_succeeded: false }
    }

    /// The number of writes that succeeded.
    pub(crate) fn succeeded_writes(&self) -> u64 {
        self.queue.writes.succeeded.load(Ordering::Relaxed)
    }

    /// Writes back, and judges the result. The kernel tells of errors that are older, if nobody asked before: one counts
    /// only if a write failed meanwhile.
    ///
    /// If the mount could not be reached by a path, lets the kernel drop what it has of these files, which writes their
    /// pages first and waits for those on their way. A kill of the process meanwhile would leave this thread waiting with
    /// the connection, so it is only done then.
    fn finish(&self, nodes: &[u64], write_back: impl FnOnce(&Mounted) -> Result<(), WriteBackError>) -> io::Result<()> {
        let failed = || self.queue.writes.failed.load(Ordering::Relaxed);
        let before = failed();
        match (write_back(&self.mounted), self.queue.kernel.get()) {
            (Ok(()), _) => Ok(()),
            (Err(WriteBackError::Failed(error)), _) if failed() == before => {
                tracing::debug!(%error, "the kernel could not write something before");
                Ok(())
            }
            (Err(WriteBackError::Failed(error)), _) | (Err(WriteBackError::Unreachable(error)), None) => Err(error),
            (Err(WriteBackError::Unreachable(error)), Some(kernel)) => {
                tracing::debug!(%error, "the kernel is not asked by a path to write pages");
                let dropped = nodes.iter().map(|node| tell(kernel, &Notice::Inode(*node)));
                // What the kernel does not know has no pages. It does not tell whether it could write them.
                dropped
                    .filter(|told| told.as_ref().is_err_and(|error| !is_unknown(error)))
                    .collect::<io::Result<()>>()?;
                if failed() == before { Ok(()) } else { Err(Errno::IO.into()) }
            }
        }
    }

    /// A file is opened for writing. To be called before the kernel is told so.
    pub(crate) fn opened(&self, ino: u64) {
        *self.queue.lock().written.entry(self.node(ino)).or_default() += 1;
    }

    /// What was opened for writing is closed.
    pub(crate) fn closed(&self, ino: u64) {
        let mut state = self.queue.lock();
        if let btree_map::Entry::Occupied(mut entry) = state.written.entry(self.node(ino)) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    /// The attributes of an inode and its content, or a directory's entries, have changed. Pages that were written but
    /// are still in the kernel's cache are written first; so a file must have been synced before it is changed.
    ///
    /// With [`WriteOptions::writeback_cache`](crate::WriteOptions), the kernel keeps the size and the times of a
    /// regular file that it knows, whatever it is told. Only its own requests can change these.
    pub fn inode(&self, ino: u64) {
        self.notify(Notice::Inode(self.node(ino)));
    }

    /// The attributes of an inode have changed.
    pub fn attributes(&self, ino: u64) {
        self.notify(Notice::Attributes(self.node(ino)));
    }

    /// A file got pages that the kernel had cached. For a second all of them are one change: the kernel, which asks for
    /// all attributes again, has to be told of the space only.
    pub(crate) fn grown(&self, ino: u64) {
        let mut state = self.queue.lock();
        if state.is_closed || !state.grown.insert(self.node(ino)) {
            return;
        }
        if state.due.is_none() {
            state.due = Some(Instant::now() + GROWN_INTERVAL);
            self.queue.changed.notify_one();
        }
    }

    /// All pages that a file got are to be counted now.
    pub(crate) fn synced(&self, ino: u64) {
        let has_grown = self.queue.lock().grown.remove(&self.node(ino));
        if has_grown {
            self.attributes(ino);
        }
    }

    /// There is something else behind a name of a directory, or nothing any more, or something now.
    pub fn entry(&self, parent: u64, name: &[u8]) {
        self.notify(Notice::Entry(self.node(parent), name.to_vec()));
    }

    fn node(&self, ino: u64) -> u64 {
        if ino == self.root { INodeNo::ROOT.0 } else { ino }
    }

    fn notify(&self, notice: Notice) {
        let mut state = self.queue.lock();
        if !state.is_closed {
            state.notices.insert(notice);
            self.queue.changed.notify_one();
        }
    }

    /// Starts the thread that tells the kernel.
    pub(crate) fn start(&self, kernel: fuser::Notifier) -> io::Result<JoinHandle<()>> {
        let queue = Arc::clone(&self.queue);
        // It is started once.
        let _is_first = queue.kernel.set(kernel.clone()).is_ok();
        thread::Builder::new().name("fuse-notices".to_owned()).spawn(move || {
            while let Some(notice) = queue.take() {
                if let Err(error) = tell(&kernel, &notice) {
                    tracing::debug!(?notice, %error, "the kernel does not take a notice");
                }
            }
        })
    }

    /// Ends the thread; notices that it has not taken are dropped, as is everything that comes later.
    pub(crate) fn close(&self) {
        let mut state = self.queue.lock();
        state.is_closed = true;
        state.notices.clear();
        state.grown.clear();
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A set is consistent after each of its methods.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a notice; `None` once closed.
    fn take(&self) -> Option<Notice> {
        let mut state = self.lock();
        loop {
            let left = state.due.map(|due| due.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                state.due = None;
                let grown = std::mem::take(&mut state.grown);
                state.notices.extend(grown.into_iter().map(Notice::Attributes));
                continue;
            }
            if let Some(notice) = state.notices.pop_first() {
                return Some(notice);
            }
            if state.is_closed {
                return None;
            }
            state = match left {
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

/// A request that may wait for the kernel, as often as it wants. Dropping it does not end what was begun.
pub struct Waiting(Arc<Counted>);

impl Waiting {
    /// Lets the kernel write all pages that programs have changed until now, and waits until it has.
    ///
    /// # Errors
    /// If the kernel cannot write them, or the mount has ended.
    pub async fn write_back(&self) -> Result<(), FsError> {
        self.run(Notifier::write_back_here).await.map_err(not_written)
    }

    /// As [`Waiting::write_back`], for some files, which the kernel must not have locked.
    ///
    /// # Errors
    /// As for [`Waiting::write_back`].
    pub async fn write_back_of(&self, files: &[u64]) -> Result<(), FsError> {
        let Waiting(counted) = self;
        let is_written = |ino: &&u64| counted.0.is_written(**ino);
        let nodes: Vec<u64> = files.iter().filter(is_written).map(|ino| counted.0.node(*ino)).collect();
        if nodes.is_empty() {
            return Ok(());
        }
        let write = move |notifier: &Notifier| notifier.finish(&nodes, |mounted| mounted.write_back_of(nodes.clone()));
        self.run(write).await.map_err(not_written)
    }

    /// As [`Notifier::inode`], and [`Notifier::entry`] if a name is given; but waits until the kernel has dropped what it
    /// cached. A mount that has ended caches nothing.
    pub async fn changed(&self, ino: u64, name: Option<&[u8]>) {
        let node = self.0.0.node(ino);
        let entry = name.map(|name| Notice::Entry(node, name.to_vec()));
        let told = self.run(move |notifier| {
            let Some(kernel) = notifier.queue.kernel.get() else { return Ok(()) };
            // It need not know the one to forget the other.
            let results: Vec<_> =
                entry.into_iter().chain([Notice::Inode(node)]).map(|notice| tell(kernel, &notice)).collect();
            results.into_iter().collect()
        });
        if let Err(error) = told.await {
            tracing::debug!(ino, %error, "the kernel does not take a notice");
        }
    }

    /// Runs something that waits for the kernel, on a thread of its own.
    async fn run(&self, work: impl FnOnce(&Notifier) -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let done = Arc::<Mailbox<io::Result<()>>>::default();
        let (counted, into) = (Arc::clone(&self.0), Arc::clone(&done));
        let work = move || drop(into.push(work(&counted.0)));
        thread::Builder::new().name("fuse-sync".to_owned()).spawn(work)?;
        let mut results = Vec::new();
        poll_fn(|cx| {
            let taken = done.poll_take(cx, &mut results);
            match results.pop() {
                Some(result) => Poll::Ready(result),
                None if taken == Poll::Ready(false) => Poll::Ready(Err(io::Error::other("the thread ended"))),
                None => Poll::Pending,
            }
        })
        .await
    }
}

/// A request that counts among those that wait; no longer when dropped.
struct Counted(Notifier);

impl Counted {
    fn begin(notifier: &Notifier) -> io::Result<Counted> {
        let mut state = notifier.queue.lock();
        if state.waiting >= MOST_WAITING {
            return Err(Errno::BUSY.into());
        }
        state.waiting += 1;
        Ok(Counted(notifier.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.queue.lock().waiting -= 1;
    }
}

fn not_written(error: io::Error) -> FsError {
    let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
    FsError::Refused { errno, why: format!("the kernel does not write its pages: {error}") }
}

fn is_unknown(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::NOENT)
}

fn tell(kernel: &fuser::Notifier, notice: &Notice) -> io::Result<()> {
    match notice {
        // A negative offset stands for no content.
        Notice::Attributes(ino) => kernel.inval_inode(INodeNo(*ino), -1, 0),
        Notice::Inode(ino) => kernel.inval_inode(INodeNo(*ino), 0, 0),
        Notice::Entry(parent, name) => kernel.inval_entry(INodeNo(*parent), OsStr::from_bytes(name)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn notifier() -> Notifier {
        Notifier::new(256, Arc::new(Mounted::new(PathBuf::from("/nowhere"), None, Arc::default())))
    }

    #[test]
    fn the_same_notice_is_one_and_the_root_has_the_kernels_number() {
        let notifier = notifier();
        for _ in 0..3 {
            notifier.inode(300);
            notifier.attributes(256);
            notifier.entry(256, b"name");
        }
        let taken = [(); 3].map(|()| notifier.queue.take().unwrap());
        assert_eq!(taken, [Notice::Attributes(1), Notice::Inode(300), Notice::Entry(1, b"name".to_vec())]);
        assert!(notifier.queue.lock().notices.is_empty());
    }

    #[test]
    fn a_file_that_grows_is_told_of_once_in_a_while_and_when_it_is_synced() {
        let notifier = notifier();
        let begun = Instant::now();
        (0..3).for_each(|_| notifier.grown(300));
        notifier.grown(301);
        notifier.grown(302);
        notifier.synced(301);
        notifier.synced(305);
        let taken = [(); 3].map(|()| notifier.queue.take().unwrap());
        assert_eq!(taken, [301, 300, 302].map(Notice::Attributes));
        assert!(begun.elapsed() >= GROWN_INTERVAL && notifier.queue.lock().due.is_none());
        notifier.grown(303);
        notifier.close();
        notifier.grown(304);
        assert_eq!(notifier.queue.take(), None);
    }

    #[test]
    fn closing_ends_the_thread_and_drops_what_comes_later() {
        let notifier = notifier();
        notifier.inode(300);
        let (queue, closing) = (Arc::clone(&notifier.queue), notifier.clone());
        assert!(queue.take().is_some());
        let waiting = thread::spawn(move || queue.take());
        closing.close();
        assert_eq!(waiting.join().unwrap(), None);
        notifier.inode(301);
        assert_eq!(notifier.queue.take(), None);
    }

    #[test]
    fn a_file_is_written_until_each_opening_is_closed_and_few_wait() {
        let notifier = notifier();
        notifier.opened(300);
        notifier.opened(300);
        notifier.closed(300);
        assert!(notifier.is_written(300) && !notifier.is_written(301));
        notifier.closed(300);
        notifier.closed(300);
        assert!(!notifier.is_any_written());
        let waiting: Vec<_> = (0..MOST_WAITING).map(|_| Counted::begin(&notifier).ok().unwrap()).collect();
        assert_eq!(
            Counted::begin(&notifier).err().and_then(|error| error.raw_os_error()),
            Some(Errno::BUSY.raw_os_error())
        );
        drop(waiting);
        assert!(notifier.wait().is_ok());
    }
}
