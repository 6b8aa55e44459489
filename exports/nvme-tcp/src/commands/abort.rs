//! Abort: commands that wait are aborted, those that are being carried out are not.

use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::admin::Abort;

use crate::connection::Connection;
use crate::controller::Controller;

/// Carries the command out; the answer's bit 0 is 0 if a command was aborted.
pub(crate) fn abort(controller: &Controller, ask: &Abort) -> u64 {
    let is_aborted = match ask.queue {
        // Of the admin queue only Asynchronous Event Requests wait for long.
        0 => controller.notices.abort(ask.cid),
        queue => {
            let connection = controller.io_queues.borrow().get(&queue).and_then(std::rc::Weak::upgrade);
            connection.is_some_and(|connection| connection.abort(ask.cid))
        }
    };
    u64::from(!is_aborted)
}

impl Connection {
    /// Aborts a command that waits for room; tells whether there was one.
    fn abort(&self, cid: u16) -> bool {
        let waiting = {
            let mut waiting = self.waiting.borrow_mut();
            let place = waiting.iter().position(|waiting| waiting.task().command().cid.get() == cid);
            place.and_then(|place| waiting.remove(place))
        };
        let Some(waiting) = waiting else { return false };
        let command = *waiting.task().command();
        self.finish(waiting.token(), &command, Err(StatusCode::ABORT_REQUESTED.into()));
        true
    }
}
