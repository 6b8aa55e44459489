//! The way from one core to a device on another, seen from the caller.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use sealblock_block::{Error, ErrorKind, Outcome, Request};
use sealblock_runtime_reactor::{CoreAddress, JoinHandle, spawn};

use crate::call_table::{CallTable, Wait, deliver};
use crate::mailbox::Mailbox;
use crate::owner;
use crate::shared::SharedDevice;

/// A request and where its answer belongs.
pub(crate) struct CrossCoreRequest {
    pub(crate) slot: u32,
    pub(crate) operation: Request,
    /// Whoever asks has locked the blocks that it changes.
    pub(crate) is_locked: bool,
}

/// The outcome of the request in this slot.
pub(crate) struct CrossCoreReply {
    pub(crate) slot: u32,
    pub(crate) outcome: Outcome,
}

/// Both directions.
pub(crate) struct Channels {
    pub(crate) requests: Mailbox<CrossCoreRequest>,
    pub(crate) answers: Mailbox<CrossCoreReply>,
}

/// A way that is open as long as somebody on this core is attached.
pub(crate) struct Link {
    pub(crate) device: SharedDevice,
    /// The core of the callers.
    pub(crate) here: CoreAddress,
    ways: Arc<Channels>,
    slots: Rc<RefCell<CallTable>>,
    reader: JoinHandle<()>,
}

impl Link {
    pub(crate) fn open(device: &SharedDevice) -> Link {
        let ways = Arc::new(Channels { requests: Mailbox::new(), answers: Mailbox::new() });
        let slots = Rc::new(RefCell::new(CallTable::default()));
        owner::open(device, &ways);
        let reader = spawn(read(Arc::clone(&ways), Rc::clone(&slots)));
        Link { device: device.clone(), here: CoreAddress::here(), ways, slots, reader }
    }

    pub(crate) async fn call(&self, operation: Request, is_locked: bool) -> Outcome {
        let slot = self.slots.borrow_mut().take();
        let answer = Wait::new(&self.slots, slot);
        if self.ways.requests.push(CrossCoreRequest { slot, operation, is_locked }).is_err() {
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
async fn read(ways: Arc<Channels>, slots: Rc<RefCell<CallTable>>) {
    let mut batch = Vec::new();
    poll_fn(|cx| match ways.answers.poll_take(cx, &mut batch) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(false) => Poll::Ready(()),
        Poll::Ready(true) => {
            for CrossCoreReply { slot, outcome } in batch.drain(..) {
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
    Error::from(ErrorKind::Unreachable { reason }).with_device(device)
}
