//! How bytes go out: short ones gathered, data as the slices that it came in.

use sealblock_runtime_memory::Slice;

#[derive(Default)]
pub(crate) struct Output {
    slices: Vec<Slice>,
    /// Short bytes that are not among the slices yet.
    open: Vec<u8>,
    bytes: usize,
    replies: usize,
    data_bytes: usize,
}

impl Output {
    /// Appends big-endian fields or other short bytes.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.open.extend_from_slice(bytes);
        self.bytes += bytes.len();
    }

    /// Appends data.
    pub(crate) fn data(&mut self, slices: impl IntoIterator<Item = Slice>) {
        for slice in slices.into_iter().filter(|slice| !slice.is_empty()) {
            self.end_open();
            self.bytes += slice.len();
            self.data_bytes += slice.len();
            self.slices.push(slice);
        }
    }

    /// Notes that a reply is complete.
    pub(crate) fn end_reply(&mut self) {
        self.replies += 1;
    }

    /// Replies that were not taken for sending.
    pub(crate) fn replies(&self) -> usize {
        self.replies
    }

    /// Their data.
    pub(crate) fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Moves everything to the end of `out`, and says how many bytes it was.
    pub(crate) fn take(&mut self, out: &mut Vec<Slice>) -> usize {
        self.end_open();
        out.append(&mut self.slices);
        (self.replies, self.data_bytes) = (0, 0);
        std::mem::take(&mut self.bytes)
    }

    fn end_open(&mut self) {
        if !self.open.is_empty() {
            self.slices.push(Slice::copy_from(&self.open));
            self.open.clear();
        }
    }
}
