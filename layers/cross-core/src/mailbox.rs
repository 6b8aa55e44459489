//! Where one core leaves things for another.
//!
//! Invariant: a reader that finds nothing leaves its waker, and whoever comes next takes it, so nothing stays unnoticed and
//! a busy reader is not woken.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

pub(crate) struct Mailbox<T>(Mutex<State<T>>);

struct State<T> {
    items: Vec<T>,
    reader: Option<Waker>,
    is_closed: bool,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Mailbox<T> {
        Mailbox(Mutex::new(State { items: Vec::new(), reader: None, is_closed: false }))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Only moves happen under the lock, so a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves an item, or gives it back when the mailbox is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(item);
        }
        state.items.push(item);
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        Ok(())
    }

    /// Exchanges what is there for `into`, which is empty. `false` when the mailbox is closed and nothing is left.
    pub(crate) fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<T>) -> Poll<bool> {
        debug_assert!(into.is_empty(), "what was taken before is done");
        let mut state = self.lock();
        if !state.items.is_empty() {
            std::mem::swap(&mut state.items, into);
            return Poll::Ready(true);
        }
        if state.is_closed {
            return Poll::Ready(false);
        }
        let previous = state.reader.replace(cx.waker().clone());
        drop(state);
        drop(previous);
        Poll::Pending
    }

    /// Takes nothing more; what is there stays for the reader.
    pub(crate) fn finish(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Takes nothing more, and gives what is there.
    pub(crate) fn close(&self) -> Vec<T> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

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
}
