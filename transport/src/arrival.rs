//! What a connection has received before it is known which devices it uses. If it then goes to another core, a new
//! protocol core there receives the same bytes again; so nothing of the old one has to be taken over, and none of its
//! buffers.

use std::cell::{Cell, RefCell};

use sealblock_runtime_memory::Buffer;

use crate::serving::Registration;
use crate::turns::STAGING_BYTES;

/// A connection that has received more is not moved. One receive buffer has room for these bytes.
const MOST_BYTES: usize = STAGING_BYTES;

/// The bytes that a connection has received, until its core is known.
pub struct Arrival {
    stage: Cell<Stage>,
    bytes: RefCell<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Leaving,
    Settled,
}

impl Arrival {
    /// A connection that was just accepted. It is settled if it has only one core to be on.
    pub fn new(registration: &Registration) -> Arrival {
        let stage = if registration.can_move() { Stage::Open } else { Stage::Settled };
        Arrival { stage: Cell::new(stage), bytes: RefCell::default() }
    }

    /// A connection that stays on its core.
    pub fn settled() -> Arrival {
        Arrival { stage: Cell::new(Stage::Settled), bytes: RefCell::default() }
    }

    /// True until it is decided whether the connection stays on its core.
    pub fn is_open(&self) -> bool {
        self.stage.get() == Stage::Open
    }

    /// True if the connection leaves its core.
    pub fn is_leaving(&self) -> bool {
        self.stage.get() == Stage::Leaving
    }

    /// Keeps received bytes while it is open. A connection that has received too many is settled.
    pub fn add(&self, received: &[u8]) {
        if !self.is_open() {
            return;
        }
        let mut bytes = self.bytes.borrow_mut();
        if bytes.len() + received.len() <= MOST_BYTES {
            return bytes.extend_from_slice(received);
        }
        drop(bytes);
        self.settle();
    }

    /// The connection stays on its core.
    pub fn settle(&self) {
        self.stage.set(Stage::Settled);
        drop(self.bytes.take());
    }

    /// The connection leaves its core.
    pub fn leave(&self) {
        self.stage.set(Stage::Leaving);
    }

    /// The bytes of a connection that leaves its core.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_inner()
    }
}

/// The next part of what was received, in a buffer of the new protocol core, and its length; `None` once nothing is left,
/// or if the core has no buffer.
pub fn next_part(left: &mut &[u8], buffer: impl FnOnce() -> Option<Buffer>) -> Option<(Buffer, usize)> {
    if left.is_empty() {
        return None;
    }
    let mut buffer = buffer()?;
    let (part, later) = left.split_at(left.len().min(buffer.len()));
    buffer[..part.len()].copy_from_slice(part);
    *left = later;
    Some((buffer, part.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Arrival {
        Arrival { stage: Cell::new(Stage::Open), ..Arrival::settled() }
    }

    #[test]
    fn bytes_are_kept_until_the_connection_settles_or_leaves() {
        let leaving = open();
        leaving.add(b"ab");
        leaving.add(b"c");
        leaving.leave();
        leaving.add(b"later");
        assert!(leaving.is_leaving() && !leaving.is_open());
        assert_eq!(leaving.into_bytes(), b"abc");
        let staying = open();
        staying.add(b"ab");
        staying.settle();
        staying.add(b"c");
        assert!(!staying.is_open() && !staying.is_leaving());
        assert_eq!(staying.into_bytes(), b"");
    }

    #[test]
    fn what_was_received_comes_again_in_parts_of_the_buffers_lengths() {
        let (mut left, mut parts) = (&b"abcde"[..], Vec::new());
        while let Some((buffer, length)) = next_part(&mut left, || Some(Buffer::zeroed(2))) {
            parts.push(buffer[..length].to_vec());
        }
        assert_eq!(parts, [&b"ab"[..], b"cd", b"e"]);
        let mut kept = &b"a"[..];
        assert!(next_part(&mut kept, || None).is_none() && kept == b"a", "the core is closed");
        assert!(next_part(&mut left, || panic!("nothing is left")).is_none());
    }

    #[test]
    fn a_connection_that_has_received_too_much_stays() {
        let (just, more) = (open(), open());
        just.add(&vec![0; MOST_BYTES]);
        more.add(&vec![0; MOST_BYTES]);
        more.add(&[0]);
        assert!(just.is_open() && !more.is_open());
        assert_eq!(more.into_bytes().capacity(), 0);
    }
}
