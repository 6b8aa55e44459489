//! What a session has to do on the filesystem's core: calls, and what the kernel forgets.
//!
//! Invariants: a panic ends only the request that caused it, and dropping its reply sends an error. Forgetting needs no
//! permit and only as much room as there are inodes known, so it is never refused and never lost.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use sealblock_runtime_reactor::{Mailbox, timeout};

use crate::call::{Call, Forget};
use crate::home::Served;

/// How many inodes the filesystem is told to forget at the same time.
const FORGETTING: usize = 16;
/// How long requests are waited for after those before them took too long.
const BRIEFLY: Duration = Duration::from_secs(1);

/// What a task may leave behind.
type Outcome = Result<(), Box<dyn Any + Send>>;
type Task<'a> = Pin<Box<dyn Future<Output = Outcome> + 'a>>;

/// The work of a session.
pub struct Work<'a, S> {
    served: &'a S,
    answers: FuturesUnordered<Task<'a>>,
    forgetting: FuturesUnordered<Task<'a>>,
    /// Room for what is taken from the mailboxes.
    batch: (Vec<Call>, Vec<Forget>),
    /// Nothing is answered any more.
    gave_up: bool,
}

impl<'a, S: Served> Work<'a, S> {
    /// None yet.
    pub fn new(served: &'a S) -> Work<'a, S> {
        let (answers, forgetting) = (FuturesUnordered::new(), FuturesUnordered::new());
        Work { served, answers, forgetting, batch: Default::default(), gave_up: false }
    }

    /// Takes the calls that have arrived. Returns false if no more will come.
    pub fn take_calls(&mut self, cx: &mut Context<'_>, calls: &Mailbox<Call>) -> bool {
        let taken = calls.poll_take(cx, &mut self.batch.0);
        if taken == Poll::Ready(true) {
            // Lets other tasks of this core run between batches.
            cx.waker().wake_by_ref();
        }
        if self.gave_up {
            self.batch.0.clear();
        }
        let served = self.served;
        self.answers.extend(self.batch.0.drain(..).map(|Call { request, permit }| {
            let answer = async move {
                served.answer(request).await;
                drop(permit);
            };
            task(answer)
        }));
        taken != Poll::Ready(false)
    }

    /// Takes what the kernel has forgotten.
    pub fn take_forgets(&mut self, cx: &mut Context<'_>, forgets: &Mailbox<Forget>) {
        if forgets.poll_take(cx, &mut self.batch.1) == Poll::Ready(true) {
            cx.waker().wake_by_ref();
        }
        self.batch.1.drain(..).for_each(|forget| self.served.forget(forget));
    }

    /// Goes on with everything that can go on.
    pub fn go_on(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some(_)) = self.answers.poll_next_unpin(cx) {}
        loop {
            self.begin_to_forget();
            match self.forgetting.poll_next_unpin(cx) {
                Poll::Ready(Some(outcome)) => report(&outcome),
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
    }

    fn begin_to_forget(&mut self) {
        while self.forgetting.len() < FORGETTING
            && let Some(forgotten) = self.served.next_forgotten()
        {
            self.forgetting.push(task(forgotten));
        }
    }

    /// Drops the calls in flight and all that come, which answers them with an error.
    pub fn give_up(&mut self) {
        self.gave_up = true;
        self.answers.clear();
    }

    /// The kernel is gone: finishes what is in flight, if the filesystem wants that, and then forgets everything. Returns
    /// false if requests were not finished in time.
    pub async fn finish(mut self, forgets: &Mailbox<Forget>) -> bool {
        let Some(patience) = self.served.patience() else { return true };
        // What has just taken too long is not waited for again.
        let patience = if self.gave_up { patience.min(BRIEFLY) } else { patience };
        let answers = std::mem::take(&mut self.answers);
        let is_finished = timeout(patience, answers.for_each(|_| std::future::ready(()))).await.is_ok();
        for forget in forgets.close() {
            self.served.forget(forget);
        }
        self.served.forget_all();
        if timeout(patience, self.forget_rest()).await.is_err() {
            tracing::error!(?patience, "not all inodes were forgotten in time; those without names stay for now");
        }
        is_finished
    }

    async fn forget_rest(&mut self) {
        loop {
            self.begin_to_forget();
            match self.forgetting.next().await {
                Some(outcome) => report(&outcome),
                None => return,
            }
        }
    }
}

fn task<'a>(work: impl Future<Output = ()> + 'a) -> Task<'a> {
    Box::pin(AssertUnwindSafe(work).catch_unwind())
}

/// Reports a panic. For answers the reply that is dropped does that.
fn report(outcome: &Outcome) {
    if outcome.is_err() {
        tracing::error!("an inode was not forgotten: the filesystem panicked");
    }
}
