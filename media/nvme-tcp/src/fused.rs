//! Compare and Write by a fused pair of commands (Base, "Fused Operations"; NVM, "Compare and Write").
//!
//! Invariants: the two commands are neighbours on their queue: both join its waiting line in one poll, and the line
//! keeps its order. A pair that may have been executed is not sent again: it would miscompare with its own write. Pairs
//! are sent only on a session whose controller supports them.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use sealblock_block::{
    BadBlock, BadBlocks, CompareAndWrite, Durability, Error, ErrorKind, Outcome, RequestKind, Response, WriteSet,
};
use sealblock_media_nvme::{CompletedCommand as _, Namespace, bad_block_cause, may_be_sent_again};
use sealblock_protocols_nvme::identify::Fuses;
use sealblock_protocols_nvme::nvm::{BlockCommand, IoCommand};
use sealblock_protocols_nvme::{Fuse, Status, StatusCode};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_transport::{Attempt, AttemptError, RequestError, Sending, SentChange};
use sealblock_units::Extent;

use crate::commands::{CompletedCommand, Io, retry_pause};
use crate::options::add;
use crate::queue::CommandResult;
use crate::session::Session;

const KIND: RequestKind = RequestKind::CompareAndWrite;

impl Io {
    /// Compares and writes one block.
    pub(crate) async fn compare_and_write(
        &self,
        extent: Extent,
        data: &CompareAndWrite,
        durability: Durability,
    ) -> Outcome {
        let mut retries = 0;
        let attempt = async |session: Rc<Session>, Sending { epoch, change }| {
            if !session.pages.controller.fuses.contains(Fuses::COMPARE_AND_WRITE) {
                return Err(AttemptError::Failed(ErrorKind::Absent(KIND).into()));
            }
            let (compared, written) = self.send_pair(&session, (epoch, change), extent, data, durability).await?;
            let status = compared.status();
            // Nothing is written if the Compare fails, so this changes nothing.
            let is_unwritten = status.code() != StatusCode::ABORTED_FAILED_FUSED;
            if is_unwritten && may_be_sent_again(status) && retries < self.session.config.options.retries {
                retries += 1;
                add(&self.session.counters.retries, 1);
                return Ok(Attempt::Again(retry_pause(&session, status)));
            }
            Ok(Attempt::Done((compared, written)))
        };
        let (compared, written) = self.session.execute(WriteSet::of_extents([extent]), attempt).await?;
        self.outcome(extent, durability, &compared, &written)
    }

    /// Sends both commands, once.
    async fn send_pair(
        &self,
        session: &Rc<Session>,
        (epoch, change): (u64, Option<SentChange>),
        extent: Extent,
        data: &CompareAndWrite,
        durability: Durability,
    ) -> Result<(CompletedCommand, CompletedCommand), AttemptError> {
        let force_unit_access = durability == Durability::ForceUnitAccess;
        let blocks = BlockCommand::new(extent);
        let compare = self.encode(IoCommand::Compare(blocks))?.with_fuse(Fuse::First);
        let write = self.encode(IoCommand::Write(BlockCommand { force_unit_access, ..blocks }))?;
        let (old, new) =
            (self.codec.comparand(&data.expected, session.pool()), self.codec.payload(&data.new, session.pool()));
        let queue = session.pick();
        if let Some(lost) = queue.lost() {
            return Err(AttemptError::Lost(lost));
        }
        let id = queue.core().id;
        let mut first = pin!(queue.execute((compare, HostData::Write(old))));
        let mut second = pin!(queue.execute_change((write.with_fuse(Fuse::Second), HostData::Write(new)), change));
        let mut results: [Option<Result<CommandResult, RequestError>>; 2] = [None, None];
        let both = poll_fn(|cx| {
            // In this order: the Compare joins the queue's waiting line first, and no other command joins it in
            // between.
            let [compared, written] = &mut results;
            if compared.is_none()
                && let Poll::Ready(result) = first.as_mut().poll(cx)
            {
                *compared = Some(result);
            }
            if written.is_none()
                && let Poll::Ready(result) = second.as_mut().poll(cx)
            {
                *written = Some(result);
            }
            match (compared.is_some(), written.is_some()) {
                (true, true) => Poll::Ready(()),
                _ => Poll::Pending,
            }
        });
        both.await;
        let completed = |result| CompletedCommand { session: Rc::clone(session), epoch, queue: id, result };
        match results {
            [Some(Ok(compared)), Some(Ok(written))] => Ok((completed(compared), completed(written))),
            [Some(Err(error)), _] | [_, Some(Err(error))] => Err(self.lost_pair(session, error)),
            [None, _] | [_, None] => unreachable!("both have ended"),
        }
    }

    /// The error of a pair that has no completion.
    fn lost_pair(&self, session: &Rc<Session>, error: RequestError) -> AttemptError {
        match error {
            RequestError::NotSent(reason) => AttemptError::Failed(ErrorKind::Media { reason }.into()),
            RequestError::Lost(lost) => {
                self.session.session_lost(session, &lost);
                AttemptError::Failed(unknown(&lost.to_string()))
            }
        }
    }

    fn outcome(
        &self,
        extent: Extent,
        durability: Durability,
        compared: &CompletedCommand,
        written: &CompletedCommand,
    ) -> Outcome {
        let (compare, write) = (compared.status(), written.status());
        if compare.is_success() && write.is_success() {
            if durability == Durability::Volatile {
                self.write_completed(written);
            }
            return Ok(Response::Done);
        }
        let failed_half = |status: Status| !status.is_success() && status.code() != StatusCode::ABORTED_FAILED_FUSED;
        Err(match (compare.code(), bad_block_cause(compare)) {
            (StatusCode::COMPARE_FAILURE, _) => ErrorKind::Miscompare { lba: extent.start() }.into(),
            (_, Some(cause)) => {
                let bad = BadBlock::new(extent.start(), cause, None, None);
                BadBlocks::new(vec![bad]).expect("one block is bad").into()
            }
            _ if failed_half(compare) => self.failed(KIND, Some(extent), compared),
            // Our own target reports with this status that its device does not know either; with other targets it means
            // nothing more certain.
            _ if write.code() == StatusCode::INTERNAL_ERROR => {
                unknown(&self.failed(KIND, Some(extent), written).to_string())
            }
            _ => self.failed(KIND, Some(extent), written),
        })
    }
}

/// The error of a pair without a response.
fn unknown(why: &str) -> Error {
    ErrorKind::Unreachable { reason: format!("{why}; the compare and write may have been executed") }.into()
}
