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

/// How many commands are carried out at least, and how many bytes they read at most, before what there is of answers is sent.
const BATCH_COMMANDS: usize = 16;
const BATCH_BYTES: u64 = 256 << 10;
/// What a command without data takes of what is received.
const CAPSULE_BYTES: usize = 72;

/// What a socket may hold each way: the answers to a deep queue of reads, so that a send does not stop half-way and wait for
/// the peer. Sockets grow their buffers by themselves, but only after they were found too small.
const SOCKET_BYTES: usize = 2 << 20;

/// Sets a socket up for answers in parts, and for a host that takes none.
pub(crate) fn configure_socket(stream: &Stream, limits: &Limits) {
    // Where the system refuses, its own idea of a buffer serves, only with more turns, and its own idea of patience.
    let _ = stream.set_patience(limits.receive);
    let _ = stream.set_send_buffer_bytes(SOCKET_BYTES);
    let _ = stream.set_recv_buffer_bytes(SOCKET_BYTES);
    stream.set_prompt(true);
}

impl Connection {
    /// Carries out what was received, and answers it part by part: reads in two halves. Answers without data are short, so
    /// that writes, whose commands bring more bytes, are answered together.
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
        // A host that waits for each answer asks again soon, and then waits for this one.
        self.stream.set_lingering(events == 1);
        self.send_first().await;
    }

    /// Lets the sender go first.
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
