//! Socket operations of the system call backend: tried at once, and again each time epoll reports the socket ready.
//!
//! Invariants: operations on one socket and direction are executed in the order of their start. A waiting operation was tried
//! after the last event of its socket, so a further event will come (`EPOLLET` reports changes only).
//!
//! Shape: sockets are registered once, for both directions, so that waiting costs no system call of its own. What is
//! finished is reported in the next turn, as with a ring, so that a task whose socket is always ready starves no other.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::cross_core::ReactorShared;
use crate::op_table::Key;
use crate::operation::{Direction, ErasedOp, Interest};
use crate::ring::Finished;

/// Events taken with one system call; more wait for the next turn.
const EVENTS_PER_TURN: usize = 256;
/// Marks the event descriptor of the reactor among the sockets.
const EVENT: u64 = u64::MAX;
/// How often an operation that signals interrupt is retried before it fails.
const INTERRUPTION_LIMIT: u32 = 64;

/// The epoll instance; sockets take themselves out of it when they are closed.
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    fn control(&self, operation: i32, fd: RawFd, events: i32, mark: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: mark };
        // SAFETY: the call reads the event, and both descriptors are open.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    pub(crate) fn remove(&self, fd: RawFd) {
        // A failure would only cause events that no operation waits for.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Waits until there are events, or time is up; `None` is for ever. An interruption counts as no events.
    fn wait(&self, events: &mut [libc::epoll_event], timeout: Option<Duration>) -> io::Result<usize> {
        let timespec = timeout.map(|left| libc::timespec {
            tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let (fd, room) = (self.0.as_raw_fd(), events.len() as i32);
        let limit = timespec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let no_mask = std::ptr::null::<libc::sigset_t>();
        // SAFETY: the events have the given room, the timeout is null or lives in this frame, and there is no mask.
        let mut count =
            unsafe { libc::syscall(libc::SYS_epoll_pwait2, fd, events.as_mut_ptr(), room, limit, no_mask, 0usize) };
        if count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
            // Linux before 5.11 counts milliseconds, rounded up here, because no timer may end early.
            let timeout_ms =
                timeout.map_or(-1, |left| i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
            // SAFETY: as above.
            count = unsafe { libc::epoll_wait(fd, events.as_mut_ptr(), room, timeout_ms) }.into();
        }
        match usize::try_from(count) {
            Ok(count) => Ok(count),
            Err(_negative) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(0),
                error => Err(error),
            },
        }
    }
}

struct QueuedOp {
    key: Key,
    op: Box<dyn ErasedOp>,
}

/// The operations that wait on one socket.
#[derive(Default)]
struct SocketQueues {
    readable: VecDeque<QueuedOp>,
    writable: VecDeque<QueuedOp>,
}

impl SocketQueues {
    fn of(&mut self, direction: Direction) -> &mut VecDeque<QueuedOp> {
        match direction {
            Direction::Readable => &mut self.readable,
            Direction::Writable => &mut self.writable,
        }
    }
}

pub(crate) struct Sockets {
    epoll: Arc<Epoll>,
    /// Sockets with waiting operations, now or before.
    waiting: HashMap<RawFd, SocketQueues>,
    done: Vec<Finished>,
    events: Vec<libc::epoll_event>,
    shared: Arc<ReactorShared>,
}

/// Executes an operation unless it would have to wait.
fn attempt(work: &mut dyn ErasedOp) -> Option<i32> {
    for _ in 0..INTERRUPTION_LIMIT {
        match work.run() {
            result if result == -libc::EINTR => {}
            result => return (result != -libc::EAGAIN).then_some(result),
        }
    }
    Some(-libc::EINTR)
}

impl Sockets {
    pub(crate) fn start(remote: &Arc<ReactorShared>) -> io::Result<Sockets> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so it has no other owner.
        let epoll = Arc::new(Epoll(unsafe { OwnedFd::from_raw_fd(fd) }));
        epoll.control(libc::EPOLL_CTL_ADD, remote.event_fd(), libc::EPOLLIN, EVENT)?;
        let events = vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_TURN];
        let remote = Arc::clone(remote);
        Ok(Sockets { epoll, waiting: HashMap::new(), done: Vec::new(), events, shared: remote })
    }

    /// Registers a socket, which must not block. It stays registered until [`Epoll::remove`].
    pub(crate) fn watch(&self, fd: RawFd) -> io::Result<Arc<Epoll>> {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.epoll.control(libc::EPOLL_CTL_ADD, fd, events, fd as u64)?;
        Ok(Arc::clone(&self.epoll))
    }

    pub(crate) fn push(&mut self, key: Key, mut work: Box<dyn ErasedOp>, interest: Interest) {
        let queue = self.waiting.get_mut(&interest.fd).map(|queues| queues.of(interest.direction));
        if queue.is_none_or(|queue| queue.is_empty())
            && let Some(result) = attempt(&mut *work)
        {
            return self.done.push(Finished { key, result, returned: Some(work) });
        }
        self.waiting.entry(interest.fd).or_default().of(interest.direction).push_back(QueuedOp { key, op: work });
    }

    /// Cancels an operation that still waits.
    pub(crate) fn cancel(&mut self, key: Key, interest: Interest) {
        let Some(queues) = self.waiting.get_mut(&interest.fd) else { return };
        let queue = queues.of(interest.direction);
        let Some(place) = queue.iter().position(|job| job.key == key) else { return };
        let QueuedOp { key, op: work } = queue.remove(place).expect("the place was just found");
        self.done.push(Finished { key, result: -libc::ECANCELED, returned: Some(work) });
        self.forget_if_empty(interest.fd);
    }

    pub(crate) fn cancel_all(&mut self) {
        for (_, mut queues) in self.waiting.drain() {
            let jobs = queues.readable.drain(..).chain(queues.writable.drain(..));
            let ended = |QueuedOp { key, op: work }| Finished { key, result: -libc::ECANCELED, returned: Some(work) };
            self.done.extend(jobs.map(ended));
        }
    }

    fn forget_if_empty(&mut self, fd: RawFd) {
        if self.waiting.get(&fd).is_some_and(|queues| queues.readable.is_empty() && queues.writable.is_empty()) {
            self.waiting.remove(&fd);
        }
    }

    /// True if an operation waits for a peer.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// True if an operation has finished and was not reported.
    pub(crate) fn is_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Appends the finished operations.
    pub(crate) fn report(&mut self, finished: &mut Vec<Finished>) {
        finished.append(&mut self.done);
    }

    /// Waits for events and retries the operations on ready sockets. True if the reactor's own event was among them.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let count = self.epoll.wait(&mut self.events, timeout)?;
        let mut kicked = false;
        for place in 0..count {
            let libc::epoll_event { events, u64: mark } = self.events[place];
            if mark == EVENT {
                self.shared.clear_event();
                kicked = true;
                continue;
            }
            let fd = mark as RawFd;
            let ended = (libc::EPOLLHUP | libc::EPOLLERR) as u32;
            if events & ((libc::EPOLLIN | libc::EPOLLRDHUP) as u32 | ended) != 0 {
                self.run_ready(fd, Direction::Readable);
            }
            if events & (libc::EPOLLOUT as u32 | ended) != 0 {
                self.run_ready(fd, Direction::Writable);
            }
        }
        Ok(kicked)
    }

    fn run_ready(&mut self, fd: RawFd, direction: Direction) {
        let Some(queues) = self.waiting.get_mut(&fd) else { return };
        let queue = queues.of(direction);
        while let Some(job) = queue.front_mut()
            && let Some(result) = attempt(&mut *job.op)
        {
            let QueuedOp { key, op: work } = queue.pop_front().expect("the job that was carried out is in front");
            self.done.push(Finished { key, result, returned: Some(work) });
        }
        self.forget_if_empty(fd);
    }
}
