//! Socket operations of the system call backend: attempted at once, and again each time that epoll reports the socket
//! as ready.
//!
//! Invariants: operations on one socket and direction are executed in the order of their start. A waiting operation was
//! attempted after the last event of its socket, so another event will come (`EPOLLET` reports only changes).
//!
//! Shape: sockets are registered once, for both directions, so that waiting costs no extra system call. Finished
//! operations are reported in the next turn, as with a ring, so that a task whose socket is always ready does not
//! starve others.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::inbox::ReactorShared;
use crate::op_table::{Finished, Key};
use crate::operation::{Direction, ErasedOp, Interest};

/// Events taken with one system call; more are taken in the next turn.
const EVENTS_PER_TURN: usize = 256;
/// Marks the event descriptor of the reactor among the sockets.
const EVENT: u64 = u64::MAX;
/// How often an operation that is interrupted by signals is retried before it fails.
const INTERRUPTION_LIMIT: u32 = 64;

/// Waits until there are events, or the time is up; `None` waits forever. An interruption counts as no events.
fn wait_for_events(poll: &OwnedFd, events: &mut Vec<epoll::Event>, timeout: Option<Duration>) -> io::Result<()> {
    // A time beyond the clock's range means forever.
    let limit = timeout.and_then(|left| Timespec::try_from(left).ok());
    events.clear();
    match epoll::wait(poll, spare_capacity(events), limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        // Linux before 5.11 counts milliseconds, rounded up here, because no timer may end early.
        Err(Errno::NOSYS) => {
            let ms = timeout.map_or(0, |left| left.as_nanos().div_ceil(1_000_000));
            let rounded = Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX).min(i32::MAX as u64));
            match epoll::wait(poll, spare_capacity(events), Timespec::try_from(rounded).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
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
    /// Sockets remove themselves from it when they are closed.
    epoll: Arc<OwnedFd>,
    /// Sockets with waiting operations, now or before.
    waiting: HashMap<RawFd, SocketQueues>,
    done: Vec<Finished>,
    events: Vec<epoll::Event>,
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
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        epoll::add(&*epoll, remote.event_fd(), EventData::new_u64(EVENT), EventFlags::IN)?;
        let events = Vec::with_capacity(EVENTS_PER_TURN);
        let remote = Arc::clone(remote);
        Ok(Sockets { epoll, waiting: HashMap::new(), done: Vec::new(), events, shared: remote })
    }

    /// Registers a socket, which must not block. It stays registered until its descriptor removes it.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<Arc<OwnedFd>> {
        let events = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&*self.epoll, fd, EventData::new_u64(fd.as_raw_fd() as u64), events)?;
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

    /// True if an operation has finished but was not reported.
    pub(crate) fn is_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Appends the finished operations.
    pub(crate) fn report(&mut self, finished: &mut Vec<Finished>) {
        finished.append(&mut self.done);
    }

    /// Waits for events and retries the operations on ready sockets. True if the reactor's own event was among them.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        wait_for_events(&self.epoll, &mut self.events, timeout)?;
        let mut kicked = false;
        for place in 0..self.events.len() {
            let epoll::Event { flags, data } = self.events[place];
            if data.u64() == EVENT {
                self.shared.clear_event();
                kicked = true;
                continue;
            }
            let fd = data.u64() as RawFd;
            let ended = EventFlags::HUP | EventFlags::ERR;
            if flags.intersects(EventFlags::IN | EventFlags::RDHUP | ended) {
                self.run_ready(fd, Direction::Readable);
            }
            if flags.intersects(EventFlags::OUT | ended) {
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
