//! Resize requests, from the control connections to the main task: it executes one after the other, and never beside a reload
//! or the end of the server, since one task does all of these.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::rc::Rc;

use sealblock_block::Condition;
use sealblock_runtime_reactor::Notify;

use crate::control::protocol::{ControlError, ControlErrorKind, ResizeReport};

/// The result of a resize request.
pub type Resized = Result<ResizeReport, ControlError>;

/// Waiting requests. Their number is bounded by that of connections, each of which waits for its response.
#[derive(Default)]
pub struct ResizeQueue {
    waiting: RefCell<VecDeque<ResizeRequest>>,
    notify: Notify,
}

/// A request to resize a namespace.
pub struct ResizeRequest {
    /// The NQN of its subsystem.
    pub nqn: String,
    /// Which namespace of it.
    pub nsid: u32,
    /// Bytes of data that it is to hold.
    pub size: NonZeroU64,
    reply: Rc<ResizeReply>,
}

/// Where the response is left.
#[derive(Default)]
struct ResizeReply {
    answer: RefCell<Option<Resized>>,
    came: Condition,
}

impl ResizeQueue {
    /// Sends a request and waits for its result.
    pub async fn resize(&self, nqn: String, nsid: u32, size: NonZeroU64) -> Resized {
        let reply = Rc::new(ResizeReply::default());
        self.waiting.borrow_mut().push_back(ResizeRequest { nqn, nsid, size, reply: Rc::clone(&reply) });
        self.notify.notify();
        reply.came.wait_until(|| reply.answer.borrow().is_some()).await;
        reply.answer.take().unwrap_or_else(|| Err(gone()))
    }

    /// The next request, once there is one.
    pub async fn next(&self) -> ResizeRequest {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            match next {
                Some(request) => return request,
                None => self.notify.wait().await,
            }
        }
    }

    /// Refuses all waiting requests when the server ends.
    pub fn refuse_all(&self) {
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(|request| request.complete(Err(gone())));
    }
}

impl ResizeRequest {
    /// Completes the request.
    pub fn complete(self, answer: Resized) {
        self.reply.answer.replace(Some(answer));
        self.reply.came.notify();
    }
}

fn gone() -> ControlError {
    ControlError::new(ControlErrorKind::Refused, "the server is ending")
}
