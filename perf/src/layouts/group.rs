//! Work that several requests share: one of them does it for all that wait.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Gathers items until one request takes all of them. See the module's header.
#[derive(Default)]
pub struct Group<T> {
    items: RefCell<Vec<T>>,
    begun: Cell<u64>,
    ended: Cell<u64>,
    busy: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl<T> Group<T> {
    /// Adds an item and returns once `work` was done on a batch with it in, by this request or another.
    pub async fn share<F: Future<Output = anyhow::Result<()>>>(
        &self,
        item: Option<T>,
        work: impl Fn(Vec<T>) -> F,
    ) -> anyhow::Result<()> {
        self.items.borrow_mut().extend(item);
        let batch = self.begun.get() + 1;
        loop {
            if self.ended.get() >= batch {
                return Ok(());
            }
            if self.busy.replace(true) {
                self.wait(batch).await;
                continue;
            }
            let items = self.items.take();
            self.begun.set(self.begun.get() + 1);
            let done = work(items).await;
            self.ended.set(self.begun.get());
            self.busy.set(false);
            self.waiting.take().into_iter().for_each(Waker::wake);
            done?;
        }
    }

    async fn wait(&self, batch: u64) {
        poll_fn(|context| {
            if self.ended.get() >= batch || !self.busy.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
