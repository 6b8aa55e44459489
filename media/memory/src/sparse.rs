//! A range of bytes of which only the written parts use memory.
//!
//! Invariants: a missing chunk has the fill byte everywhere. Clearing looks for chunks that contain nothing else and
//! frees them, so that many small clears free as much as one large one. Bytes that were returned as a slice never
//! change: if a slice of a chunk still exists, a change replaces the chunk with a copy.
//!
//! Chunks that were replaced while they were shared are kept until their last slice is gone, and are then reused or
//! freed, a few with each change. While there are many of them, nothing more is shared. So a reader that keeps slices
//! can make this use, beyond what is stored, as much again as was stored when it got them, and [`HELD_BYTES`].

use std::collections::VecDeque;

use sealblock_runtime_memory::{Buffer, Slice};

use crate::table::Table;

/// If replaced chunks have this many bytes, nothing more is shared.
const HELD_BYTES: usize = 16 << 20;
/// How many replaced chunks a change looks at: more than it can add, so that the number of unused ones falls.
const LOOKS: usize = 2;

/// Bytes at offsets, in chunks of one length.
pub(crate) struct Sparse {
    chunk_bytes: usize,
    fill: u8,
    chunks: Table,
    /// Chunks that were shared when they were replaced.
    held: VecDeque<Slice>,
    /// Fill bytes to share, as many as were needed so far.
    blank: Slice,
}

impl Sparse {
    /// Bytes that are all `fill`, stored in chunks of `chunk_bytes`, which is not zero.
    pub(crate) fn new(chunk_bytes: usize, fill: u8) -> Sparse {
        let chunk_bytes = chunk_bytes.max(1);
        Sparse { chunk_bytes, fill, chunks: Table::default(), held: VecDeque::new(), blank: Slice::empty() }
    }

    /// Copies the bytes at `offset`.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        for (chunk, within, part) in self.parts(offset, into.len() as u64) {
            let from = part.start..part.end;
            match self.chunks.get(chunk) {
                Some(bytes) => into[from].copy_from_slice(&bytes[within]),
                None => into[from].fill(self.fill),
            }
        }
    }

    /// The bytes at `offset` without copying, if they are in one chunk or in none, and replaced chunks do not use too
    /// much already.
    pub(crate) fn share(&mut self, offset: u64, length: usize) -> Option<Slice> {
        self.look();
        if self.held.len() * self.chunk_bytes >= HELD_BYTES {
            return None;
        }
        let within = (offset % self.chunk_bytes as u64) as usize;
        if within + length <= self.chunk_bytes
            && let Some(chunk) = self.chunks.get(offset / self.chunk_bytes as u64)
        {
            return Some(chunk.slice(within..within + length));
        }
        let is_blank = self.parts(offset, length as u64).all(|(chunk, ..)| self.chunks.get(chunk).is_none());
        is_blank.then(|| self.blank(length))
    }

    /// Copies `from` to `offset`.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) {
        for (chunk, within, part) in self.parts(offset, from.len() as u64) {
            self.change(chunk, |bytes| bytes[within].copy_from_slice(&from[part]));
        }
    }

    /// Sets the range to the fill byte.
    pub(crate) fn clear(&mut self, offset: u64, length_bytes: u64) {
        if self.chunks.live() == 0 {
            return;
        }
        let fill = self.fill;
        for (chunk, within, _) in self.parts(offset, length_bytes) {
            let Some(bytes) = self.chunks.get(chunk) else { continue };
            let blank = |bytes: &[u8]| bytes.iter().all(|&byte| byte == fill);
            if blank(&bytes[..within.start]) && blank(&bytes[within.end..]) {
                let gone = self.chunks.remove(chunk);
                self.held.extend(gone.and_then(|gone| gone.try_unfreeze().err()));
                self.look();
            } else {
                self.change(chunk, |bytes| bytes[within].fill(fill));
            }
        }
    }

    /// The stored range itself, if it is within one existing chunk.
    pub(crate) fn peek(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let within = (offset % self.chunk_bytes as u64) as usize;
        self.chunks.get(offset / self.chunk_bytes as u64)?.get(within..within.checked_add(length)?)
    }

    /// Changes one byte in place; returns whether its chunk exists.
    pub(crate) fn flip(&mut self, offset: u64, mask: u8) -> bool {
        let (chunk, within) = (offset / self.chunk_bytes as u64, (offset % self.chunk_bytes as u64) as usize);
        let is_there = self.chunks.get(chunk).is_some();
        if is_there {
            self.change(chunk, |bytes| bytes[within] ^= mask);
        }
        is_there
    }

    /// Bytes of memory used by stored data, and by chunks that were replaced while they were shared, as far as is
    /// known.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        (self.chunks.live() + self.held.len() as u64) * self.chunk_bytes as u64
    }

    /// Changes a chunk, which is created if it is missing, and copied if it is shared.
    fn change(&mut self, chunk: u64, change: impl FnOnce(&mut [u8])) {
        let Sparse { chunk_bytes, fill, chunks, held, .. } = self;
        chunks.replace(chunk, |old| {
            let mut bytes = match old.map(Slice::try_unfreeze) {
                Some(Ok(bytes)) => bytes,
                Some(Err(shared)) => {
                    let mut copy = free(held).unwrap_or_else(|| Buffer::zeroed(*chunk_bytes));
                    copy.copy_from_slice(&shared);
                    held.push_back(shared);
                    copy
                }
                None => {
                    let mut bytes = Buffer::zeroed(*chunk_bytes);
                    if *fill != 0 {
                        bytes.fill(*fill);
                    }
                    bytes
                }
            };
            change(&mut bytes);
            bytes.freeze()
        });
    }

    /// Frees one replaced chunk that no response shares any more, if there is one among the first few.
    fn look(&mut self) {
        if !self.held.is_empty() {
            drop(free(&mut self.held));
        }
    }

    /// `length` fill bytes, from a shared buffer that grows when it is too short.
    fn blank(&mut self, length: usize) -> Slice {
        if self.blank.len() < length {
            let mut buffer = Buffer::zeroed(length.next_power_of_two());
            buffer.fill(self.fill);
            self.blank = buffer.freeze();
        }
        self.blank.slice(..length)
    }

    /// The range split at the edges of chunks: the chunk, the range within it, and the range within the whole.
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

/// A replaced chunk that no response shares any more, if there is one among the first few; the others go to the back.
fn free(held: &mut VecDeque<Slice>) -> Option<Buffer> {
    for _ in 0..LOOKS.min(held.len()) {
        match held.pop_front()?.try_unfreeze() {
            Ok(buffer) => return Some(buffer),
            Err(shared) => held.push_back(shared),
        }
    }
    None
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

    #[test]
    fn what_was_shared_keeps_its_bytes_whatever_is_changed() {
        let mut sparse = Sparse::new(16, 0);
        let changes: [fn(&mut Sparse); 4] = [
            |sparse| sparse.write(2, &[9; 4]),
            |sparse| sparse.clear(0, 8),
            |sparse| sparse.clear(0, 16),
            |sparse| assert!(sparse.flip(3, 0xFF)),
        ];
        for change in changes {
            sparse.write(0, &[7; 16]);
            let shared = sparse.share(1, 10).expect("one chunk");
            change(&mut sparse);
            assert_eq!(&shared[..], [7; 10]);
            let mut now = [0; 16];
            sparse.read(0, &mut now);
            assert_ne!(now[1..11], [7; 10], "the change was made");
        }
    }

    #[test]
    fn an_unshared_chunk_is_changed_in_place() {
        let mut sparse = Sparse::new(16, 0);
        sparse.write(0, &[1; 16]);
        let before = sparse.peek(0, 1).unwrap().as_ptr();
        drop(sparse.share(0, 16));
        sparse.write(4, &[2; 4]);
        assert_eq!(sparse.peek(0, 1).unwrap().as_ptr(), before);
        let shared = sparse.share(0, 1).unwrap();
        sparse.write(4, &[3; 4]);
        assert_ne!(sparse.peek(0, 1).unwrap().as_ptr(), before);
        assert_eq!(shared.as_ptr(), before);
    }

    #[test]
    fn replaced_chunks_come_back_when_their_last_slice_is_gone() {
        let mut sparse = Sparse::new(16, 0);
        sparse.write(0, &[1; 32]);
        let slices: Vec<Slice> = (0..2).map(|chunk| sparse.share(chunk * 16, 1).unwrap()).collect();
        sparse.write(0, &[2; 32]);
        assert_eq!(sparse.allocated_bytes(), 64, "two chunks, and two that others hold");
        // No response shares the copies, so they are not copied again.
        sparse.write(0, &[3; 32]);
        assert_eq!(sparse.allocated_bytes(), 64);
        drop(slices);
        let _ = (sparse.share(0, 1), sparse.share(0, 1));
        assert_eq!(sparse.allocated_bytes(), 32);
        sparse.clear(0, 32);
        assert_eq!(sparse.allocated_bytes(), 0);
    }

    #[test]
    fn nothing_is_shared_while_too_much_is_held() {
        let (chunk, mut sparse) = (1 << 20, Sparse::new(1 << 20, 0));
        let mut slices = Vec::new();
        for round in 0..HELD_BYTES / chunk {
            sparse.write(0, &[round as u8]);
            slices.push(sparse.share(0, 1).expect("not too much yet"));
        }
        sparse.write(0, &[0xFF]);
        assert!(sparse.share(0, 1).is_none() && sparse.share(1 << 40, 1).is_none());
        assert!(slices.iter().enumerate().all(|(round, slice)| slice[0] == round as u8));
        slices.truncate(1);
        sparse.write(0, &[0xFE]);
        assert!((0..LOOKS).any(|_| sparse.share(0, 1).is_some()), "most of them are gone");
    }

    #[test]
    fn only_what_is_in_one_chunk_or_in_none_is_shared() {
        let mut sparse = Sparse::new(16, 0xFF);
        sparse.write(16, &[1; 16]);
        assert!(sparse.share(8, 16).is_none() && sparse.share(24, 16).is_none());
        assert_eq!(sparse.share(16, 16).as_deref(), Some(&[1; 16][..]));
        assert_eq!(sparse.share(32, 40).as_deref(), Some(&[0xFF; 40][..]));
        assert_eq!(sparse.share(u64::MAX - 100, 40).as_deref(), Some(&[0xFF; 40][..]));
        assert_eq!(sparse.share(5, 0).as_deref(), Some(&[][..]));
        assert_eq!(sparse.allocated_bytes(), 16);
    }
}
