//! The way from one core to a device on another, seen from the caller.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use sealblock_block::{Error, Failure, Operation, Outcome};
use sealblock_runtime_reactor::{JoinHandle, Post, spawn};

use crate::home;
use crate::mailbox::Mailbox;
use crate::shared::SharedDevice;
use crate::slots::{Slots, Wait, deliver};

/// A request and where its answer belongs.
pub(crate) struct Request {
    pub(crate) slot: u32,
    pub(crate) operation: Operation,
    /// Whoever asks has locked the blocks that it changes.
    pub(crate) is_locked: bool,
}

/// The outcome of the request in this slot.
pub(crate) struct Answer {
    pub(crate) slot: u32,
    pub(crate) outcome: Outcome,
}

/// Both directions.
pub(crate) struct Ways {
    pub(crate) requests: Mailbox<Request>,
    pub(crate) answers: Mailbox<Answer>,
}

/// A way that is open as long as somebody on this core is attached.
pub(crate) struct Link {
    pub(crate) device: SharedDevice,
    /// The core of the callers.
    pub(crate) here: Post,
    ways: Arc<Ways>,
    slots: Rc<RefCell<Slots>>,
    reader: JoinHandle<()>,
}

impl Link {
    pub(crate) fn open(device: &SharedDevice) -> Link {
        let ways = Arc::new(Ways { requests: Mailbox::new(), answers: Mailbox::new() });
        let slots = Rc::new(RefCell::new(Slots::default()));
        home::open(device, &ways);
        let reader = spawn(read(Arc::clone(&ways), Rc::clone(&slots)));
        Link { device: device.clone(), here: Post::here(), ways, slots, reader }
    }

    pub(crate) async fn call(&self, operation: Operation, is_locked: bool) -> Outcome {
        let slot = self.slots.borrow_mut().take();
        let answer = Wait::new(&self.slots, slot);
        if self.ways.requests.push(Request { slot, operation, is_locked }).is_err() {
            deliver(&self.slots, slot, Err(unreachable(self.device.name())));
        }
        answer.await
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // What was handed over is carried out at home; nobody here waits for it any more.
        self.ways.requests.finish();
        let late = self.ways.answers.close();
        self.reader.abort();
        drop(late);
    }
}

/// Hands out answers. After each batch the others on this core have their turn.
async fn read(ways: Arc<Ways>, slots: Rc<RefCell<Slots>>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match ways.answers.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            for Answer { slot, outcome } in batch.drain(..) {
                deliver(&slots, slot, outcome);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// What a request meets when the device's core does not answer.
pub(crate) fn unreachable(device: &str) -> Error {
    let reason = "its core has stopped, or its work panicked".to_owned();
    Error::from(Failure::Unreachable { reason }).at(device)
}
