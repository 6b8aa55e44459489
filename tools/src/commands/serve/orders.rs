//! Orders that only the server as a whole can carry out, from whoever gives them to whoever does: one after the other, and never
//! beside a reload or the end, since one task does all of these.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::rc::Rc;

use sealblock_block::Condition;
use sealblock_runtime_reactor::Notify;

use crate::control::protocol::{ControlError, ProblemKind};
use crate::control::resized::ResizeReport;

/// What comes of an order.
pub type Resized = Result<ResizeReport, ControlError>;

/// Orders that wait. Their number is bounded by that of connections, each of which waits for its answer.
#[derive(Default)]
pub struct Orders {
    waiting: RefCell<VecDeque<Resize>>,
    bell: Notify,
}

/// Give a namespace another size.
pub struct Resize {
    /// The NQN of its subsystem.
    pub nqn: String,
    /// Which namespace of it.
    pub nsid: u32,
    /// Bytes of data that it is to hold.
    pub size: NonZeroU64,
    reply: Rc<Reply>,
}

/// Where the answer to an order comes.
#[derive(Default)]
struct Reply {
    answer: RefCell<Option<Resized>>,
    came: Condition,
}

impl Orders {
    /// Gives an order, and waits for what comes of it.
    pub async fn resize(&self, nqn: String, nsid: u32, size: NonZeroU64) -> Resized {
        let reply = Rc::new(Reply::default());
        self.waiting.borrow_mut().push_back(Resize { nqn, nsid, size, reply: Rc::clone(&reply) });
        self.bell.ring();
        reply.came.wait_until(|| reply.answer.borrow().is_some()).await;
        reply.answer.take().unwrap_or_else(|| Err(gone()))
    }

    /// The next order, once there is one.
    pub async fn next(&self) -> Resize {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            match next {
                Some(order) => return order,
                None => self.bell.wait().await,
            }
        }
    }

    /// Refuses what waits, when the server ends.
    pub fn refuse(&self) {
        let waiting = self.waiting.take();
        waiting.into_iter().for_each(|order| order.answer(Err(gone())));
    }
}

impl Resize {
    /// Says what came of it.
    pub fn answer(self, answer: Resized) {
        self.reply.answer.replace(Some(answer));
        self.reply.came.notify();
    }
}

fn gone() -> ControlError {
    ControlError::new(ProblemKind::Refused, "the server is ending")
}
