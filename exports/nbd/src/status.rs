//! Block status: what a device reports as allocated, as runs of `base:allocation`.

use std::cell::Cell;

use sealblock_block::{BlockState, Request, Response};
use sealblock_protocols_nbd::{ErrorCode, StatusDescriptor};

use crate::translate::{FailedRequest, OpenExport, Reply};

/// Bytes of a device in one block status request.
const WINDOW_BYTES: u64 = 64 << 20;
/// The maximum number of such requests for one reply. Clients continue after its end.
const WINDOWS: usize = 64;
/// The maximum number of runs of one reply.
const RUNS: usize = 1024;
/// NBD_STATE_HOLE and NBD_STATE_ZERO. A hole of a device always reads as zeroes, and a device reports no other zeroes.
const HOLE: u32 = 3;

impl OpenExport {
    /// Returns the status of the bytes from `offset` on: of all that was requested, or of enough for one reply.
    pub(crate) async fn status(
        &self,
        offset: u64,
        length: u64,
        one: bool,
        is_gone: &Cell<bool>,
    ) -> Result<Reply, FailedRequest> {
        let max_runs = if one { 1 } else { RUNS };
        let (mut at, end) = (offset, offset + length);
        let mut runs: Vec<StatusDescriptor> = Vec::new();
        for _ in 0..WINDOWS {
            // One run more than the limit proves that the last one is complete.
            if at == end || runs.len() > max_runs || is_gone.get() {
                break;
            }
            let window = WINDOW_BYTES.min(end - at);
            self.window(at, window, &mut runs).await?;
            at += window;
        }
        runs.truncate(max_runs);
        if runs.is_empty() { Err(ErrorCode::Shutdown.into()) } else { Ok(Reply::Status(runs)) }
    }

    /// Appends the runs of a window.
    async fn window(&self, offset: u64, length: u64, runs: &mut Vec<StatusDescriptor>) -> Result<(), FailedRequest> {
        let extent = self.extent(offset, length)?;
        let Response::BlockStatus(found) = self.run_request(Request::BlockStatus { extent }).await? else {
            return Err(ErrorCode::Io.into());
        };
        let shift = self.block_shift();
        for run in found {
            let length = u64::from(run.blocks.get()) << shift;
            let status = match run.state {
                BlockState::Data => 0,
                BlockState::Hole => HOLE,
            };
            match runs.last_mut() {
                Some(last) if last.status == status => last.length += length,
                _ => runs.push(StatusDescriptor { length, status }),
            }
        }
        Ok(())
    }
}
