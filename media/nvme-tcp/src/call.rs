//! The future of one command.

use std::pin::Pin;
use std::task::{Context, Poll};

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme_tcp::host::HostData;

use crate::error::Lost;
use crate::in_flight::Fetched;
use crate::queue::{Finished, Queue};

enum Stage {
    New(Command, HostData),
    InLine(u64, Command, HostData),
    InFlight(usize),
    Over,
}

/// A command on its way through a queue. Dropping it leaves a command in flight to the target.
pub(crate) struct CommandFuture<'q> {
    queue: &'q Queue,
    stage: Stage,
    has_no_timeout: bool,
}

impl<'q> CommandFuture<'q> {
    pub(crate) fn new(queue: &'q Queue, command: Command, data: HostData, is_patient: bool) -> CommandFuture<'q> {
        CommandFuture { queue, stage: Stage::New(command, data), has_no_timeout: is_patient }
    }

    fn submit(&mut self, command: Command, data: HostData) -> Result<(), Lost> {
        self.stage = Stage::Over;
        let entry = self.queue.try_submit(command, data, self.has_no_timeout)?;
        self.stage = Stage::InFlight(entry);
        Ok(())
    }

    /// Submits as soon as it is this command's turn; answers whether it is in flight.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<bool, Lost> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::New(command, data) => {
                if let Some(lost) = self.queue.lost() {
                    return Err(lost);
                }
                if self.queue.line().borrow().len() == 0 && self.queue.has_room() {
                    self.submit(command, data)?;
                    return Ok(true);
                }
                let ticket = self.queue.line().borrow_mut().join(cx.waker().clone());
                self.stage = Stage::InLine(ticket, command, data);
                Ok(false)
            }
            Stage::InLine(ticket, command, data) => {
                let lost = self.queue.lost();
                let is_turn = self.queue.line().borrow().is_first(ticket) && self.queue.has_room();
                if lost.is_none() && !is_turn {
                    let before = self.queue.line().borrow_mut().keep_waker(ticket, cx.waker());
                    drop(before);
                    self.stage = Stage::InLine(ticket, command, data);
                    return Ok(false);
                }
                let waker = self.queue.line().borrow_mut().leave(ticket);
                drop(waker);
                if let Some(lost) = lost {
                    return Err(lost);
                }
                self.submit(command, data)?;
                self.queue.call_next();
                Ok(true)
            }
            stage @ (Stage::InFlight(_) | Stage::Over) => {
                self.stage = stage;
                Ok(true)
            }
        }
    }
}

impl Future for CommandFuture<'_> {
    type Output = Result<Finished, Lost>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match this.advance(cx) {
            Err(lost) => return Poll::Ready(Err(lost)),
            Ok(false) => return Poll::Pending,
            Ok(true) => {}
        }
        let Stage::InFlight(entry) = this.stage else { return Poll::Pending };
        let fetched = this.queue.waiters().borrow_mut().fetch(entry, cx.waker());
        match fetched {
            Fetched::NotYet => Poll::Pending,
            Fetched::Done(finished) => {
                this.stage = Stage::Over;
                Poll::Ready(Ok(finished))
            }
            Fetched::Lost => {
                this.stage = Stage::Over;
                Poll::Ready(Err(this.queue.lost().unwrap_or_else(|| Lost("the connection ended".into()))))
            }
        }
    }
}

impl Drop for CommandFuture<'_> {
    fn drop(&mut self) {
        match self.stage {
            Stage::InLine(ticket, ..) => {
                let waker = self.queue.line().borrow_mut().leave(ticket);
                drop(waker);
                self.queue.call_next();
            }
            Stage::InFlight(entry) => {
                let was = self.queue.waiters().borrow_mut().abandon(entry);
                drop(was);
            }
            Stage::New(..) | Stage::Over => {}
        }
    }
}
