//! The future of one command.

use std::pin::Pin;
use std::task::{Context, Poll};

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme_tcp::host::HostData;

use crate::error::ConnectionLost;
use crate::in_flight::CommandProgress;
use crate::queue::{CommandResult, Queue};

enum CommandStage {
    New(Command, HostData),
    Waiting(u64, Command, HostData),
    InFlight(usize),
    Ended,
}

/// A command on its way through a queue. Dropping it leaves a command in flight to the target.
pub(crate) struct CommandFuture<'q> {
    queue: &'q Queue,
    stage: CommandStage,
    has_no_timeout: bool,
}

impl<'q> CommandFuture<'q> {
    pub(crate) fn new(queue: &'q Queue, command: Command, data: HostData, is_patient: bool) -> CommandFuture<'q> {
        CommandFuture { queue, stage: CommandStage::New(command, data), has_no_timeout: is_patient }
    }

    fn submit(&mut self, command: Command, data: HostData) -> Result<(), ConnectionLost> {
        self.stage = CommandStage::Ended;
        let entry = self.queue.try_submit(command, data, self.has_no_timeout)?;
        self.stage = CommandStage::InFlight(entry);
        Ok(())
    }

    /// Submits as soon as it is this command's turn; answers whether it is in flight.
    fn advance(&mut self, cx: &mut Context<'_>) -> Result<bool, ConnectionLost> {
        match std::mem::replace(&mut self.stage, CommandStage::Ended) {
            CommandStage::New(command, data) => {
                if let Some(lost) = self.queue.lost() {
                    return Err(lost);
                }
                if self.queue.waiters().borrow().len() == 0 && self.queue.has_room() {
                    self.submit(command, data)?;
                    return Ok(true);
                }
                let ticket = self.queue.waiters().borrow_mut().join(cx.waker().clone());
                self.stage = CommandStage::Waiting(ticket, command, data);
                Ok(false)
            }
            CommandStage::Waiting(ticket, command, data) => {
                let lost = self.queue.lost();
                let is_turn = self.queue.waiters().borrow().is_first(ticket) && self.queue.has_room();
                if lost.is_none() && !is_turn {
                    let before = self.queue.waiters().borrow_mut().keep_waker(ticket, cx.waker());
                    drop(before);
                    self.stage = CommandStage::Waiting(ticket, command, data);
                    return Ok(false);
                }
                let waker = self.queue.waiters().borrow_mut().leave(ticket);
                drop(waker);
                if let Some(lost) = lost {
                    return Err(lost);
                }
                self.submit(command, data)?;
                self.queue.wake_next();
                Ok(true)
            }
            stage @ (CommandStage::InFlight(_) | CommandStage::Ended) => {
                self.stage = stage;
                Ok(true)
            }
        }
    }
}

impl Future for CommandFuture<'_> {
    type Output = Result<CommandResult, ConnectionLost>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        match this.advance(cx) {
            Err(lost) => return Poll::Ready(Err(lost)),
            Ok(false) => return Poll::Pending,
            Ok(true) => {}
        }
        let CommandStage::InFlight(entry) = this.stage else { return Poll::Pending };
        let fetched = this.queue.in_flight().borrow_mut().poll(entry, cx.waker());
        match fetched {
            CommandProgress::InFlight => Poll::Pending,
            CommandProgress::Done(finished) => {
                this.stage = CommandStage::Ended;
                Poll::Ready(Ok(finished))
            }
            CommandProgress::Lost => {
                this.stage = CommandStage::Ended;
                Poll::Ready(Err(this.queue.lost().unwrap_or_else(|| ConnectionLost("the connection ended".into()))))
            }
        }
    }
}

impl Drop for CommandFuture<'_> {
    fn drop(&mut self) {
        match self.stage {
            CommandStage::Waiting(ticket, ..) => {
                let waker = self.queue.waiters().borrow_mut().leave(ticket);
                drop(waker);
                self.queue.wake_next();
            }
            CommandStage::InFlight(entry) => {
                let was = self.queue.in_flight().borrow_mut().abandon(entry);
                drop(was);
            }
            CommandStage::New(..) | CommandStage::Ended => {}
        }
    }
}
