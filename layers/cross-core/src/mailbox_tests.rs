//! The mailbox by itself; `tests/mailbox.rs` runs it under many interleavings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::mailbox::Mailbox;

#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_reader_is_woken_once_and_takes_all() {
    let (mailbox, count) = (Mailbox::new(), Arc::new(Count::default()));
    let waker = Waker::from(Arc::clone(&count));
    let (mut cx, mut got) = (Context::from_waker(&waker), Vec::new());
    assert!(mailbox.poll_take(&mut cx, &mut got).is_pending());
    for number in 0..3 {
        mailbox.push(number).unwrap();
    }
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert_eq!((mailbox.poll_take(&mut cx, &mut got), &got[..]), (Poll::Ready(true), &[0, 1, 2][..]));
    mailbox.push(3).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 1, "a busy reader looks again by itself");
}

#[test]
fn a_finished_mailbox_is_read_to_its_end_and_a_closed_one_emptied() {
    let (mailbox, mut cx, mut got) = (Mailbox::new(), Context::from_waker(Waker::noop()), Vec::new());
    mailbox.push(1).unwrap();
    mailbox.finish();
    assert_eq!(mailbox.push(2), Err(2));
    assert_eq!(mailbox.poll_take(&mut cx, &mut got), Poll::Ready(true));
    got.clear();
    assert_eq!(mailbox.poll_take(&mut cx, &mut got), Poll::Ready(false));
    let mailbox = Mailbox::new();
    mailbox.push(1).unwrap();
    assert_eq!((mailbox.close(), mailbox.push(2)), (vec![1], Err(2)));
}
