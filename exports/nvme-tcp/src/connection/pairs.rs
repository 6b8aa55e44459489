//! Fused pairs on a connection: collects the halves, executes the pairs and completes both commands.

use std::rc::Rc;

use sealblock_protocols_nvme::{Command, FABRICS_OPCODE, Fuse, StatusCode};
use sealblock_protocols_nvme_tcp::target::Token;
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::spawn;

use crate::command::fused::{FusedHalf, FusedPair, HalfProgress, execute_pair};
use crate::command::io::IoRequest;
use crate::connection::task::{Connection, Role};
use crate::model::command_error::CommandError;

impl Connection {
    /// Takes each command in order. Fails a second half without its first, and returns `false`.
    pub(crate) fn fuse(self: &Rc<Self>, token: Token, command: &Command) -> bool {
        let is_half = self.is_half(command);
        if !is_half && self.pairs.is_empty() {
            return true;
        }
        let fuse = if is_half { command.fuse() } else { Fuse::Normal };
        let is_accepted = self.pairs.add(token, command, fuse);
        self.complete_pairs();
        if !is_accepted {
            self.complete(token, command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
        }
        is_accepted
    }

    /// Records that a half failed.
    pub(crate) fn fail_half(self: &Rc<Self>, token: Token, error: CommandError) {
        self.set_half_progress(token, HalfProgress::Failed(error));
    }

    /// Records that a half has its data.
    pub(crate) fn half_ready(self: &Rc<Self>, token: Token, request: IoRequest, data: Buffer) {
        self.set_half_progress(token, HalfProgress::Ready(Box::new(request), data));
    }

    fn set_half_progress(self: &Rc<Self>, token: Token, progress: HalfProgress) {
        if self.pairs.set_progress(token, progress) {
            self.complete_pairs();
        }
    }

    /// Executes or fails the pairs whose halves are both known.
    fn complete_pairs(self: &Rc<Self>) {
        loop {
            match self.pairs.take_known() {
                None => return,
                Some(FusedPair { first, second: Some(second), .. }) => self.run_pair(first, second),
                Some(FusedPair { first, second: None, .. }) => {
                    self.cancel_fetch(first.token);
                    self.complete(first.token, &first.command, Err(StatusCode::ABORTED_MISSING_FUSED.into()));
                }
            }
        }
    }

    /// True if the command is half of a pair on this queue.
    pub(crate) fn is_half(&self, command: &Command) -> bool {
        matches!(command.fuse(), Fuse::First | Fuse::Second)
            && command.opcode != FABRICS_OPCODE
            && matches!(&*self.role.borrow(), Role::Io(..))
    }

    /// Stops waiting for its data.
    fn cancel_fetch(&self, token: Token) {
        self.take_fetching(token);
        self.waiting.borrow_mut().retain(|waiting| waiting.token() != token);
    }

    fn pair_completed(&self) {
        // A completion counts as traffic for Keep Alive, as for other commands.
        self.registration.signal.note_traffic();
        self.command_ended();
    }

    fn run_pair(self: &Rc<Self>, first: FusedHalf, second: FusedHalf) {
        let failed_pair = || Err(StatusCode::ABORTED_FAILED_FUSED.into());
        match (first.progress, second.progress) {
            (HalfProgress::Ready(compare, old), HalfProgress::Ready(write, new)) => {
                let connection = Rc::clone(self);
                let (one, two) = ((first.token, first.command), (second.token, second.command));
                self.command_started();
                spawn(async move {
                    let (compared, written) = execute_pair(*compare, old, *write, new).await;
                    connection.complete(one.0, &one.1, compared);
                    connection.complete(two.0, &two.1, written.unwrap_or_else(failed_pair));
                    connection.pair_completed();
                });
            }
            (HalfProgress::Failed(error), second_progress) => {
                self.complete(first.token, &first.command, Err(error));
                let outcome = match second_progress {
                    HalfProgress::Failed(error) => Err(error),
                    HalfProgress::Fetching | HalfProgress::Ready(..) => failed_pair(),
                };
                self.complete(second.token, &second.command, outcome);
            }
            (_, HalfProgress::Failed(error)) => {
                self.complete(first.token, &first.command, failed_pair());
                self.complete(second.token, &second.command, Err(error));
            }
            (HalfProgress::Fetching, _) | (_, HalfProgress::Fetching) => {
                self.complete(first.token, &first.command, failed_pair());
                self.complete(second.token, &second.command, failed_pair());
            }
        }
    }
}
