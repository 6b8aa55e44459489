//! Abort: aborts Asynchronous Event Requests. Commands of I/O queues complete in their own time.

use sealblock_protocols_nvme::admin::Abort;

use crate::controller::Controller;

/// Executes Abort; bit 0 of the result is 0 if a command was aborted. I/O queues may be on other cores, and by the time
/// that those were reached the command has mostly completed.
pub(crate) fn abort(controller: &Controller, args: &Abort) -> u64 {
    u64::from(args.queue != 0 || !controller.async_events.abort(args.cid))
}
