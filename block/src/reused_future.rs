//! A boxed future that is reused for many pieces of work, so that none of them needs an allocation in the long run.
//!
//! It takes its input from a handoff, works, leaves the output there, and waits for the next input. Between two pieces
//! of work its owner can keep it in a pool. Dropping it while it works cancels the work, as with any future; an owner
//! that must not cancel keeps it until it is ready.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// A future that is used repeatedly: `I` is its input, `O` its output.
pub struct ReusedFuture<I, O> {
    handoff: Rc<Handoff<I, O>>,
    future: Pin<Box<dyn Future<Output = ()>>>,
}

/// Where the input and the output are exchanged.
struct Handoff<I, O> {
    input: Cell<Option<I>>,
    output: Cell<Option<O>>,
}

async fn serve<I, O>(work: impl AsyncFn(I) -> O, handoff: Rc<Handoff<I, O>>) {
    loop {
        let input = poll_fn(|_| handoff.input.take().map_or(Poll::Pending, Poll::Ready)).await;
        let output = work(input).await;
        handoff.output.set(Some(output));
    }
}

impl<I: 'static, O: 'static> ReusedFuture<I, O> {
    /// A future that does `work`, and has no input yet.
    pub fn new(work: impl AsyncFn(I) -> O + 'static) -> ReusedFuture<I, O> {
        let handoff = Rc::new(Handoff { input: Cell::new(None), output: Cell::new(None) });
        let future = Box::pin(serve(work, Rc::clone(&handoff)));
        ReusedFuture { handoff, future }
    }

    /// Gives it an input, on which it works from the next poll on. Its last work must be done.
    pub fn begin(&self, input: I) {
        self.handoff.input.set(Some(input));
    }

    /// Polls the work; ready once it is done.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<O> {
        // `serve` never returns.
        let _ = self.future.as_mut().poll(cx);
        self.handoff.output.take().map_or(Poll::Pending, Poll::Ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yield_once;
    use std::task::Waker;

    #[test]
    fn one_work_after_the_other_is_done_and_none_twice() {
        let done = Rc::new(Cell::new(0));
        let count = Rc::clone(&done);
        let mut future = ReusedFuture::new(async move |add: u32| {
            if add.is_multiple_of(2) {
                yield_once().await;
            }
            count.set(count.get() + add);
            count.get()
        });
        let poll = |future: &mut ReusedFuture<u32, u32>| future.poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll(&mut future).is_pending(), "there is nothing to do");
        future.begin(1);
        assert_eq!(poll(&mut future), Poll::Ready(1));
        assert!(poll(&mut future).is_pending(), "it is told once");
        future.begin(2);
        assert!(poll(&mut future).is_pending() && done.get() == 1);
        assert_eq!(poll(&mut future), Poll::Ready(3));
        future.begin(4);
        assert!(poll(&mut future).is_pending());
        drop(future);
        assert_eq!(done.get(), 3, "work that is dropped does not go on");
    }
}
