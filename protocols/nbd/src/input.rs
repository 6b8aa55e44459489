//! Receives bytes into a staging buffer, or directly into the memory of a write (server) or read (client).
//!
//! Invariants: at most one buffer is lent; unread bytes never exceed the staging buffer.

use sealblock_runtime_memory::{Buffer, Pool};

/// Result of one step of a side: an event, or what it waits for.
pub(crate) enum Step<E> {
    Event(E),
    Again,
    /// More input is needed; at a server, or room within the limits.
    Wait,
}

enum LentBuffer {
    Nothing,
    Staging,
    Direct,
}

/// The memory of a payload, and how much of it has arrived. `buffer` is as long as the payload.
#[derive(Debug)]
pub(crate) struct Fill {
    buffer: Buffer,
    filled: usize,
}

impl Fill {
    pub(crate) fn new(buffer: Buffer) -> Fill {
        Fill { buffer, filled: 0 }
    }

    pub(crate) fn missing(&self) -> usize {
        self.buffer.len() - self.filled
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    pub(crate) fn finish(self) -> Buffer {
        self.buffer
    }
}

pub(crate) struct Input {
    /// Unread bytes are `start..end`; while a part is lent, `staging` is the part before `end`.
    staging: Buffer,
    start: usize,
    end: usize,
    len: usize,
    lent: LentBuffer,
}

impl Input {
    pub(crate) fn new(pool: &Pool, len: usize) -> Input {
        Input { staging: pool.take(len), start: 0, end: 0, len, lent: LentBuffer::Nothing }
    }

    /// Received bytes that were not read.
    pub(crate) fn unread(&self) -> usize {
        self.end - self.start
    }

    /// The next `len` bytes if they have arrived. They stay unread.
    pub(crate) fn peek(&self, len: usize) -> Option<&[u8]> {
        (self.unread() >= len).then(|| &self.staging[self.start..self.start + len])
    }

    /// Reads at most `max_bytes` bytes.
    pub(crate) fn take(&mut self, max_bytes: usize) -> &[u8] {
        let from = self.start;
        self.start += max_bytes.min(self.unread());
        &self.staging[from..self.start]
    }

    /// Lends the rest of the staging buffer; `None` while a buffer is lent, or without a rest.
    pub(crate) fn lend(&mut self) -> Option<Buffer> {
        if !matches!(self.lent, LentBuffer::Nothing) {
            return None;
        }
        if self.start > 0 {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.len {
            return None;
        }
        self.lent = LentBuffer::Staging;
        Some(self.staging.split_off(self.end))
    }

    /// Lends the missing part of a payload; `None` while a buffer is lent, or while received bytes are unread.
    pub(crate) fn lend_direct(&mut self, fill: &mut Fill) -> Option<Buffer> {
        if !matches!(self.lent, LentBuffer::Nothing) || self.unread() > 0 {
            return None;
        }
        self.lent = LentBuffer::Direct;
        Some(fill.buffer.split_off(fill.filled))
    }

    /// Takes a lent buffer back, whose first `len` bytes are new. `fill` is the payload that is being received, if any.
    ///
    /// # Panics
    /// If no buffer is lent, if it is another buffer, or if it is shorter than `len`.
    pub(crate) fn take_back(&mut self, buffer: Buffer, len: usize, fill: Option<&mut Fill>) {
        const SAME: &str = "the buffer that was lent comes back";
        assert!(len <= buffer.len(), "{len} bytes received in a buffer of {}", buffer.len());
        match (std::mem::replace(&mut self.lent, LentBuffer::Nothing), fill) {
            (LentBuffer::Nothing, _) => panic!("no receive buffer is out"),
            (LentBuffer::Staging, _) => {
                self.staging = std::mem::take(&mut self.staging).try_join(buffer).expect(SAME);
                self.end += len;
            }
            (LentBuffer::Direct, Some(fill)) => {
                fill.buffer = std::mem::take(&mut fill.buffer).try_join(buffer).expect(SAME);
                fill.filled += len;
            }
            // The connection was closed meanwhile, and the write was dropped.
            (LentBuffer::Direct, None) => {}
        }
    }
}
