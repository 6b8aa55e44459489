//! Slices that are sent together, and the structures that describe them to the kernel.
//!
//! Invariant: `vectors` refers to the memory of `slices`, from the first one that is not sent yet; all of it stays in
//! place as long as the boxed `Gather` exists.
//!
//! Shape: one allocation serves for many sends. A reactor keeps unused ones, so that in the long run sending allocates
//! nothing.

use std::cell::RefCell;

use sealblock_runtime_memory::Slice;

/// Maximum slices of one send; more take several sends.
pub const GATHER_LIMIT: usize = 64;
/// Maximum unused gathers of a reactor.
const KEPT_LIMIT: usize = 256;

pub(crate) struct Gather {
    header: libc::msghdr,
    vectors: Vec<libc::iovec>,
    slices: Vec<Slice>,
    /// The number of vectors that are sent completely.
    sent: usize,
}

// SAFETY: the pointers in the header and the vectors lead to memory that the `Gather` itself owns through its fields,
// which may all change threads.
unsafe impl Send for Gather {}

impl Gather {
    fn new() -> Box<Gather> {
        // SAFETY: a message header is made of integers and pointers, for which zero is a value.
        let header = unsafe { std::mem::zeroed() };
        let (vectors, slices) = (Vec::with_capacity(GATHER_LIMIT), Vec::with_capacity(GATHER_LIMIT));
        Box::new(Gather { header, vectors, slices, sent: 0 })
    }

    /// Takes slices until there are no more or there is no room; skips empty ones.
    pub(crate) fn fill(&mut self, slices: &mut impl Iterator<Item = Slice>) {
        self.clear();
        while self.slices.len() < GATHER_LIMIT {
            let Some(slice) = slices.next() else { return };
            if !slice.is_empty() {
                self.vectors.push(libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: slice.len() });
                self.slices.push(slice);
            }
        }
    }

    fn clear(&mut self) {
        self.vectors.clear();
        self.slices.clear();
        self.sent = 0;
    }

    /// What remains to be sent.
    pub(crate) fn left(&self) -> &[libc::iovec] {
        &self.vectors[self.sent..]
    }

    /// Skips the next `count_bytes`, which were sent; at most what remains.
    pub(crate) fn advance(&mut self, mut count_bytes: usize) {
        while let Some(vector) = self.vectors.get_mut(self.sent) {
            if count_bytes < vector.iov_len {
                // SAFETY: the result lies within the slice that the vector is a part of.
                vector.iov_base = unsafe { vector.iov_base.cast::<u8>().add(count_bytes) }.cast();
                vector.iov_len -= count_bytes;
                return;
            }
            count_bytes -= vector.iov_len;
            self.sent += 1;
        }
    }

    /// A message with all that remains; valid until the next change.
    pub(crate) fn message(&mut self) -> *const libc::msghdr {
        let left = &mut self.vectors[self.sent..];
        (self.header.msg_iov, self.header.msg_iovlen) = (left.as_mut_ptr(), left.len() as _);
        &raw const self.header
    }
}

/// The unused gathers of a reactor.
#[derive(Default)]
pub(crate) struct Gathers {
    #[allow(clippy::vec_box, reason = "the kernel knows them by their address")]
    unused: RefCell<Vec<Box<Gather>>>,
}

impl Gathers {
    pub(crate) fn take(&self) -> Box<Gather> {
        let unused = self.unused.borrow_mut().pop();
        unused.unwrap_or_else(Gather::new)
    }

    /// Takes back a gather with nothing in flight.
    pub(crate) fn put_back(&self, mut gather: Box<Gather>) {
        gather.clear();
        let mut unused = self.unused.borrow_mut();
        if unused.len() < KEPT_LIMIT {
            unused.push(gather);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(gather: &Gather) -> Vec<u8> {
        let parts = gather.left().iter();
        // SAFETY: the vectors name memory of slices that the gather holds.
        parts
            .flat_map(|part| unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) }.to_vec())
            .collect()
    }

    #[test]
    fn a_partial_send_leaves_the_rest() {
        for sent in 0..=6 {
            let mut gather = Gather::new();
            let parts = ["abc", "", "d", "ef"].map(|part| Slice::copy_from(part.as_bytes()));
            gather.fill(&mut parts.into_iter());
            assert_eq!(gather.left().len(), 3, "the empty part is left out");
            gather.advance(sent);
            assert_eq!(left(&gather), &b"abcdef"[sent..]);
            assert!(gather.left().iter().all(|part| part.iov_len > 0));
        }
    }

    #[test]
    fn more_slices_than_fit_stay_with_the_caller() {
        let mut gather = Gather::new();
        let mut parts = (0..=GATHER_LIMIT as u8).map(|byte| Slice::copy_from(&[byte]));
        gather.fill(&mut parts);
        assert_eq!((gather.left().len(), parts.len()), (GATHER_LIMIT, 1));
        gather.fill(&mut parts);
        assert_eq!(left(&gather), [GATHER_LIMIT as u8]);
    }

    #[test]
    fn a_gather_that_is_put_back_is_empty_and_reused() {
        let gathers = Gathers::default();
        let mut gather = gathers.take();
        gather.fill(&mut [Slice::copy_from(b"x")].into_iter());
        let address = &raw const *gather;
        gathers.put_back(gather);
        let again = gathers.take();
        assert_eq!((&raw const *again, again.slices.len(), again.left().len()), (address, 0, 0));
    }
}
