//! The single task of a serving connection, which receives and executes requests and sends replies in between.
//!
//! Shape: replies are sent in batches. With a single send for all requests of a deep queue, client and server would
//! take turns instead of working at the same time. Batches that are too small would cost more in system calls than they
//! save.

use std::cell::{Cell, Ref, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use sealblock_runtime_reactor::Notify;
use sealblock_runtime_reactor::net::Stream;

/// The bytes of one receive: the requests of a deep queue, with short data.
pub const STAGING_BYTES: usize = 256 << 10;
/// The socket buffer size for each direction, in bytes: the data of a deep queue of reads, so that a send does not stop
/// halfway and wait for the peer. Automatic tuning enlarges socket buffers only after they were too small.
const SOCKET_BYTES: usize = 2 << 20;
/// How long the server waits for a peer to close the connection after the last bytes were sent.
const LINGERING_CLOSE: Duration = Duration::from_secs(1);
/// The maximum number of bytes that are received and discarded at once during this time.
const LINGERING_CLOSE_BYTES: usize = 4096;
/// The smallest limit of requests in a batch, and its limit of bytes read. Replies are sent when a batch reaches a
/// limit.
const BATCH_REQUESTS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;

/// Configures a socket for sends in batches, and for a peer that receives nothing for up to the time `receive`.
pub fn configure_socket(stream: &Stream, receive: Duration) {
    // If the system refuses, its default buffers are used, which costs more system calls. Unix sockets have no such
    // timeout.
    let _ = stream.set_user_timeout(receive);
    let _ = stream.set_send_buffer_bytes(SOCKET_BYTES);
    let _ = stream.set_recv_buffer_bytes(SOCKET_BYTES);
    stream.set_prompt(true);
}

/// Waits for the peer to close the connection, so that it can read the last bytes: a socket that is closed with unread
/// bytes sends RST, which discards them. If the peer does not close in time, the connection is reset.
pub async fn lingering_close(stream: &Stream) {
    let _ = stream.lingering_close(LINGERING_CLOSE, LINGERING_CLOSE_BYTES).await;
}

/// Completes when the task is polled next.
pub async fn next_poll() {
    let mut has_waited = false;
    poll_fn(|_| if std::mem::replace(&mut has_waited, true) { Poll::Ready(()) } else { Poll::Pending }).await
}

/// Runs the two halves of a connection in its one task: one receives and executes, the other (the sender) sends.
pub struct SendScheduler {
    /// The connection's task.
    task: RefCell<Waker>,
    /// Notified when there is something to send, or sending must end.
    output: Notify,
    /// True while the task is polled; then it need not be woken.
    is_polling: Cell<bool>,
    /// True if replies must be sent before more is received.
    sends_first: Cell<bool>,
    /// True if no output follows the remaining output.
    is_finishing: Cell<bool>,
}

/// The sending half of a connection.
pub struct Sender<'a, F> {
    future: Pin<&'a mut F>,
    is_over: bool,
}

impl<'a, F: Future<Output = ()>> Sender<'a, F> {
    /// A sender that runs `future`, which completes once [`SendScheduler::output`] has returned `false`.
    pub fn new(future: Pin<&'a mut F>) -> Sender<'a, F> {
        Sender { future, is_over: false }
    }

    /// Polls the sender; true once it has ended.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        self.is_over = self.is_over || self.future.as_mut().poll(cx).is_ready();
        self.is_over
    }
}

impl Default for SendScheduler {
    fn default() -> SendScheduler {
        SendScheduler {
            task: RefCell::new(Waker::noop().clone()),
            output: Notify::default(),
            is_polling: Cell::new(false),
            sends_first: Cell::new(false),
            is_finishing: Cell::new(false),
        }
    }
}

impl SendScheduler {
    /// Polls `work`, then the sender, and both again if `work` requested that the sender run first; returns when `work`
    /// is done.
    pub async fn run<T, F: Future<Output = ()>>(&self, sender: &mut Sender<'_, F>, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let mut is_known = false;
        poll_fn(|cx| {
            if !std::mem::replace(&mut is_known, true) {
                // The waker of a task does not change.
                *self.task.borrow_mut() = cx.waker().clone();
            }
            self.is_polling.set(true);
            let polled = loop {
                let polled = work.as_mut().poll(cx);
                sender.poll(cx);
                if polled.is_ready() || !self.sends_first.take() {
                    break polled;
                }
            };
            self.is_polling.set(false);
            polled
        })
        .await
    }

    /// Sends the remaining output, and ends the sender.
    pub async fn finish<F: Future<Output = ()>>(&self, sender: &mut Sender<'_, F>) {
        self.is_finishing.set(true);
        self.output.notify_self();
        poll_fn(|cx| if sender.poll(cx) { Poll::Ready(()) } else { Poll::Pending }).await
    }

    /// The waker of the connection's task; does nothing before its first poll.
    pub fn task(&self) -> Ref<'_, Waker> {
        self.task.borrow()
    }

    /// Wakes the connection's task to send, or to check its state.
    pub fn wake(&self) {
        self.output.notify_self();
        if !self.is_polling.get() {
            self.task.borrow().wake_by_ref();
        }
    }

    /// Makes the task poll both halves once more before it sleeps.
    pub fn run_again(&self) {
        self.sends_first.set(true);
    }

    /// Lets the sender run first.
    pub async fn send_first(&self) {
        self.output.notify_self();
        self.sends_first.set(true);
        next_poll().await
    }

    /// Waits, in the sender, until there may be more output; `false` if there will be none.
    pub async fn output(&self) -> bool {
        if self.is_finishing.get() {
            return false;
        }
        self.output.wait().await;
        true
    }
}

/// Requests that were received together; determines when their replies are sent.
pub struct ReplyBatch {
    max_requests: usize,
    requests: usize,
    read_bytes: u64,
    total: usize,
}

impl ReplyBatch {
    /// A batch of `received_bytes` bytes; a request without data has `request_bytes`.
    pub fn new(received_bytes: usize, request_bytes: usize) -> ReplyBatch {
        // Requests without data are divided into at least two parts.
        let max_requests = (received_bytes / request_bytes / 2).max(BATCH_REQUESTS);
        ReplyBatch { max_requests, requests: 0, read_bytes: 0, total: 0 }
    }

    /// Counts a request that reads `read_bytes`. True if replies must be sent before the next request.
    pub fn add(&mut self, read_bytes: u64) -> bool {
        self.total += 1;
        self.requests += 1;
        self.read_bytes += read_bytes;
        let is_full = self.requests >= self.max_requests || self.read_bytes >= BATCH_BYTES;
        if is_full {
            (self.requests, self.read_bytes) = (0, 0);
        }
        is_full
    }

    /// True if there was only one request. A peer with queue depth 1 sends its next one as soon as it has the reply.
    pub fn was_single(&self) -> bool {
        self.total == 1
    }
}
