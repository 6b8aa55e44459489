//! Abort: Asynchronous Event Requests are aborted; commands of I/O queues are answered in their own time.

use sealblock_protocols_nvme::admin::Abort;

use crate::controller::Controller;

/// Carries the command out; the answer's bit 0 is 0 if a command was aborted. I/O queues may be on other cores, which would
/// have to be asked for what has mostly ended by then.
pub(crate) fn abort(controller: &Controller, args: &Abort) -> u64 {
    u64::from(args.queue != 0 || !controller.async_events.abort(args.cid))
}
