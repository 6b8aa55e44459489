//! A stretch of bytes of which only the written parts take memory.
//!
//! Invariant: a chunk that is not there holds the fill byte everywhere. Clearing looks for chunks that hold nothing else
//! and gives them back, so that many small clears free as much as one large one.

use std::collections::HashMap;

/// Bytes at offsets, in chunks of one length.
pub(crate) struct Sparse {
    chunk_bytes: usize,
    fill: u8,
    chunks: HashMap<u64, Box<[u8]>>,
}

impl Sparse {
    /// Bytes that are all `fill`, kept in chunks of `chunk_bytes`, which is not zero.
    pub(crate) fn new(chunk_bytes: usize, fill: u8) -> Sparse {
        Sparse { chunk_bytes: chunk_bytes.max(1), fill, chunks: HashMap::new() }
    }

    /// Copies the bytes at `offset` out.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        for (chunk, within, part) in self.parts(offset, into.len() as u64) {
            let from = part.start..part.end;
            match self.chunks.get(&chunk) {
                Some(bytes) => into[from].copy_from_slice(&bytes[within]),
                None => into[from].fill(self.fill),
            }
        }
    }

    /// Copies `from` in at `offset`.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) {
        let (chunk_bytes, fill) = (self.chunk_bytes, self.fill);
        for (chunk, within, part) in self.parts(offset, from.len() as u64) {
            let bytes = self.chunks.entry(chunk).or_insert_with(|| vec![fill; chunk_bytes].into_boxed_slice());
            bytes[within].copy_from_slice(&from[part]);
        }
    }

    /// Puts the fill byte everywhere in the range.
    pub(crate) fn clear(&mut self, offset: u64, length_bytes: u64) {
        for (chunk, within, _) in self.parts(offset, length_bytes) {
            let Some(bytes) = self.chunks.get_mut(&chunk) else { continue };
            let whole = within.len() == bytes.len();
            bytes[within].fill(self.fill);
            if whole || bytes.iter().all(|&byte| byte == self.fill) {
                self.chunks.remove(&chunk);
            }
        }
    }

    /// The range where it lies, if it lies within one chunk that is there.
    pub(crate) fn peek(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let within = (offset % self.chunk_bytes as u64) as usize;
        self.chunks.get(&(offset / self.chunk_bytes as u64))?.get(within..within.checked_add(length)?)
    }

    /// Changes one byte where it lies; tells whether its chunk is there.
    pub(crate) fn flip(&mut self, offset: u64, mask: u8) -> bool {
        match self.chunks.get_mut(&(offset / self.chunk_bytes as u64)) {
            Some(bytes) => {
                bytes[(offset % self.chunk_bytes as u64) as usize] ^= mask;
                true
            }
            None => false,
        }
    }

    /// Bytes of memory taken.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.chunks.len() as u64 * self.chunk_bytes as u64
    }

    /// The range cut at the edges of chunks: the chunk, the range within it, and the range within the whole.
    fn parts(
        &self,
        offset: u64,
        length_bytes: u64,
    ) -> impl Iterator<Item = (u64, std::ops::Range<usize>, std::ops::Range<usize>)> + use<> {
        let chunk_bytes = self.chunk_bytes as u64;
        let mut done = 0;
        std::iter::from_fn(move || {
            if done == length_bytes {
                return None;
            }
            let (chunk, within) = ((offset + done) / chunk_bytes, (offset + done) % chunk_bytes);
            let len = (chunk_bytes - within).min(length_bytes - done);
            let part = done as usize..(done + len) as usize;
            done += len;
            Some((chunk, within as usize..(within + len) as usize, part))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwritten_bytes_are_the_fill_and_take_nothing() {
        let mut sparse = Sparse::new(16, 0xFF);
        let mut bytes = [0; 40];
        sparse.read(u64::MAX - 100, &mut bytes);
        assert_eq!((bytes, sparse.allocated_bytes()), ([0xFF; 40], 0));
        sparse.clear(0, 1000);
        assert_eq!(sparse.allocated_bytes(), 0);
    }

    #[test]
    fn what_is_written_across_chunks_is_read_back() {
        let mut sparse = Sparse::new(16, 0);
        let written: Vec<u8> = (1..=40).collect();
        sparse.write(10, &written);
        assert_eq!(sparse.allocated_bytes(), 64);
        let mut bytes = [9; 44];
        sparse.read(8, &mut bytes);
        assert_eq!(
            (bytes[..2].to_vec(), bytes[2..42].to_vec(), bytes[42..].to_vec()),
            (vec![0; 2], written, vec![0; 2])
        );
    }

    #[test]
    fn memory_comes_back_when_nothing_is_left_in_a_chunk() {
        let mut sparse = Sparse::new(16, 0);
        sparse.write(0, &[1; 32]);
        sparse.clear(0, 8);
        assert_eq!(sparse.allocated_bytes(), 32);
        sparse.clear(8, 8);
        assert_eq!(sparse.allocated_bytes(), 16, "two halves make a whole");
        sparse.clear(16, 16);
        assert_eq!(sparse.allocated_bytes(), 0);
    }

    #[test]
    fn bytes_are_changed_only_where_there_are_some() {
        let mut sparse = Sparse::new(16, 0);
        sparse.write(3, &[1]);
        assert!(sparse.flip(4, 2));
        assert!(!sparse.flip(16, 2));
        assert_eq!(sparse.peek(3, 2), Some(&[1, 2][..]));
        assert_eq!((sparse.peek(15, 2), sparse.peek(16, 1)), (None, None));
    }
}
