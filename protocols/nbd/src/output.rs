//! Output as a gather list: headers are copied together, data is never copied.
//!
//! Headers that follow one another without data between them become one slice. They are written into a buffer that serves
//! until it is used up, so a typical reply allocates nothing.

use sealblock_runtime_memory::{Buffer, Pool, Slice};

/// Bytes of one buffer for headers.
const BLOCK_BYTES: usize = 16 << 10;

pub(crate) struct Output {
    pool: Pool,
    slices: Vec<Slice>,
    /// Buffer for headers; used bytes are split off its front.
    headers: Buffer,
    /// Bytes at the front of `headers` that are not in `slices` yet.
    open: usize,
    bytes: usize,
    /// Replies that were not taken yet, and those taken but not sent.
    replies: [usize; 2],
    /// Their data.
    data_bytes: [usize; 2],
}

impl Output {
    pub(crate) fn new(pool: &Pool) -> Output {
        Output {
            pool: pool.clone(),
            slices: Vec::new(),
            headers: Buffer::default(),
            open: 0,
            bytes: 0,
            replies: [0; 2],
            data_bytes: [0; 2],
        }
    }

    /// Appends big-endian fields or other short bytes.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let mut end = self.open + bytes.len();
        if end > self.headers.len() {
            self.end_open();
            self.headers = self.pool.take(BLOCK_BYTES.max(bytes.len()));
            end = bytes.len();
        }
        self.headers[self.open..end].copy_from_slice(bytes);
        self.open = end;
        self.bytes += bytes.len();
    }

    /// Appends data.
    pub(crate) fn data(&mut self, slices: impl IntoIterator<Item = Slice>) {
        for slice in slices.into_iter().filter(|slice| !slice.is_empty()) {
            self.end_open();
            self.bytes += slice.len();
            self.data_bytes[0] += slice.len();
            self.slices.push(slice);
        }
    }

    /// Counts a complete reply.
    pub(crate) fn end_reply(&mut self) {
        self.replies[0] += 1;
    }

    /// Unsent replies.
    pub(crate) fn replies(&self) -> usize {
        self.replies[0] + self.replies[1]
    }

    /// Data bytes of unsent replies.
    pub(crate) fn data_bytes(&self) -> usize {
        self.data_bytes[0] + self.data_bytes[1]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends all output to `out`; returns its bytes.
    pub(crate) fn take(&mut self, out: &mut Vec<Slice>) -> usize {
        self.end_open();
        out.append(&mut self.slices);
        for counts in [&mut self.replies, &mut self.data_bytes] {
            *counts = [0, counts[0] + counts[1]];
        }
        std::mem::take(&mut self.bytes)
    }

    /// Marks all taken output as sent.
    pub(crate) fn sent(&mut self) {
        (self.replies[1], self.data_bytes[1]) = (0, 0);
    }

    fn end_open(&mut self) {
        if self.open > 0 {
            self.slices.push(self.headers.split_to(self.open).freeze());
            self.open = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_bytes_are_gathered_around_data_whatever_their_length() {
        let pool = Pool::new(0, usize::MAX);
        let mut output = Output::new(&pool);
        let data = Slice::copy_from(&[7; 100]);
        let mut wanted = Vec::new();
        for i in 0..400u32 {
            output.put(&i.to_be_bytes());
            output.put(&[i as u8; 60]);
            wanted.extend(i.to_be_bytes());
            wanted.extend(vec![i as u8; 60]);
            if i % 100 == 99 {
                output.data([data.clone(), Slice::empty()]);
                wanted.extend_from_slice(&data);
            }
            output.end_reply();
        }
        output.put(&vec![9; 2 * BLOCK_BYTES]);
        wanted.extend(vec![9; 2 * BLOCK_BYTES]);
        let mut out = Vec::new();
        assert_eq!(output.take(&mut out), wanted.len());
        let all: Vec<u8> = out.iter().flat_map(|slice| slice.iter().copied()).collect();
        assert!(all == wanted, "every byte in its place");
        assert!(out.len() < 16, "{} slices", out.len());
    }

    #[test]
    fn what_is_being_sent_counts_until_it_is_sent() {
        let mut output = Output::new(&Pool::new(0, usize::MAX));
        output.data([Slice::copy_from(&[1; 10])]);
        output.end_reply();
        output.take(&mut Vec::new());
        assert_eq!((output.replies(), output.data_bytes(), output.is_empty()), (1, 10, true));
        output.data([Slice::copy_from(&[1; 5])]);
        output.end_reply();
        assert_eq!((output.replies(), output.data_bytes()), (2, 15));
        output.sent();
        assert_eq!((output.replies(), output.data_bytes()), (1, 5));
    }
}
