//! Memory that another part of the program lends: who keeps it alive, for how long, and what handles on it can do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sealblock_runtime_memory::{Buffer, Slice};

/// A region of a guest or of the kernel, whose owner is notified when it may be used again.
struct Region {
    bytes: [u8; 64],
    is_returned: Arc<AtomicBool>,
}

impl Region {
    fn new() -> (Region, Arc<AtomicBool>) {
        let is_returned = Arc::new(AtomicBool::new(false));
        (Region { bytes: std::array::from_fn(|at| at as u8), is_returned: Arc::clone(&is_returned) }, is_returned)
    }
}

impl AsMut<[u8]> for Region {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.is_returned.store(true, Ordering::Release);
    }
}

#[test]
fn bytes_are_the_lenders_and_not_a_copy() {
    let bytes = vec![1, 2, 3];
    let address = bytes.as_ptr();
    let mut buffer = Buffer::lent(bytes);
    assert_eq!((&buffer[..], buffer.as_ptr()), (&[1, 2, 3][..], address));
    buffer[1] = 9;
    assert_eq!(&buffer.freeze()[..], [1, 9, 3]);
}

#[test]
fn the_last_handle_returns_it_whatever_became_of_the_others() {
    let (region, is_returned) = Region::new();
    let mut head = Buffer::lent(region);
    let tail = head.split_off(16).freeze();
    let part = tail.slice(8..);
    drop(head);
    drop(tail);
    assert_eq!((part[0], part.len(), is_returned.load(Ordering::Acquire)), (24, 40, false));
    std::thread::spawn(move || assert_eq!(part[39], 63)).join().expect("the thread drops the last handle");
    assert!(is_returned.load(Ordering::Acquire));
}

#[test]
fn parts_join_again_and_those_of_two_lenders_do_not() {
    let mut head = Buffer::lent(Region::new().0);
    let tail = head.split_off(10);
    let whole = head.try_join(tail).expect("neighbours of one lender");
    assert_eq!(whole.len(), 64);
    assert!(whole.try_join(Buffer::lent(Region::new().0)).is_err());
}

#[test]
fn a_slice_becomes_a_buffer_when_it_is_alone() {
    let (region, is_returned) = Region::new();
    let slice = Buffer::lent(region).freeze();
    let other = slice.clone();
    let slice = slice.try_unfreeze().expect_err("another slice shares the bytes");
    drop(other);
    let mut buffer = slice.try_unfreeze().expect("it is alone");
    buffer.fill(7);
    assert!(!is_returned.load(Ordering::Acquire));
    drop(buffer);
    assert!(is_returned.load(Ordering::Acquire));
}

#[test]
fn lent_memory_lies_in_no_arena() {
    let slice: Slice = Buffer::lent(vec![0; 4096]).freeze();
    assert_eq!((slice.registration(), slice.arena_id()), (None, None));
}

#[test]
fn a_lender_of_nothing_is_kept_all_the_same() {
    let is_returned = Arc::new(AtomicBool::new(false));
    struct Nothing(Arc<AtomicBool>);
    impl AsMut<[u8]> for Nothing {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut []
        }
    }
    impl Drop for Nothing {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let buffer = Buffer::lent(Nothing(Arc::clone(&is_returned)));
    assert!(buffer.is_empty() && !is_returned.load(Ordering::Acquire));
    drop(buffer);
    assert!(is_returned.load(Ordering::Acquire));
}
