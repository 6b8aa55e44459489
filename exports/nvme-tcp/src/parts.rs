//! How much of what was received is carried out before it is answered.
//!
//! Shape: were a deep queue answered with one send, target and host would take turns rather than work at the same time. Smaller
//! parts cost more system calls than they gain.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use sealblock_runtime_reactor::net::Stream;

use crate::connection::Connection;
use crate::limits::Limits;

/// The minimum number of commands, and the maximum of bytes that they read, before their completions are sent.
const BATCH_COMMANDS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;
/// Bytes of a received command without data.
const CAPSULE_BYTES: usize = 72;

/// Socket buffer size each way, in bytes: the data of a deep queue of reads, so that a send does not stop half way and
/// wait for the peer. Automatic tuning grows socket buffers only after they were too small.
const SOCKET_BYTES: usize = 2 << 20;

/// Configures a socket for sends in batches, and for a host that receives nothing.
pub(crate) fn configure_socket(stream: &Stream, limits: &Limits) {
    // Where the system refuses, its default buffers and timeouts apply, at the cost of more system calls.
    let _ = stream.set_patience(limits.receive);
    let _ = stream.set_send_buffer_bytes(SOCKET_BYTES);
    let _ = stream.set_recv_buffer_bytes(SOCKET_BYTES);
    stream.set_prompt(true);
}

impl Connection {
    /// Executes what was received, and sends completions in batches, at least two for reads. Completions without data
    /// are short, so that those of writes, whose commands are longer, are sent together.
    pub(crate) async fn process_batch(self: &Rc<Self>, received_bytes: usize) {
        let part = (received_bytes / CAPSULE_BYTES / 2).max(BATCH_COMMANDS);
        let (mut commands, mut from_bytes) = (0, self.read_bytes.get());
        let mut events = 0;
        while let Some(event) = self.next_event() {
            self.on_event(event);
            commands += 1;
            events += 1;
            if commands >= part || self.read_bytes.get().saturating_sub(from_bytes) >= BATCH_BYTES {
                self.send_first().await;
                (commands, from_bytes) = (0, self.read_bytes.get());
            }
        }
        // A host with queue depth 1 sends its next command as soon as it has this completion.
        self.stream.set_lingering(events == 1);
        self.send_first().await;
    }

    /// Lets the sender run first.
    async fn send_first(self: &Rc<Self>) {
        self.output.note();
        self.stop_receiving_if_drained();
        let mut has_waited = false;
        poll_fn(|_| {
            if std::mem::replace(&mut has_waited, true) {
                return Poll::Ready(());
            }
            self.sends_first.set(true);
            Poll::Pending
        })
        .await
    }
}
