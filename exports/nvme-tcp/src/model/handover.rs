//! Delays a host's new controller until the commands of its ended controllers have completed.
//!
//! A host that lost its connections repeats commands without a reply on new connections. Commands from the old
//! connections may still be in flight at a device, and would overwrite what the new ones have written. While there are
//! such commands, a new controller of the same host is not ready (CSTS.RDY).
//!
//! Invariant: a controller is queued before outstanding commands are checked, and the queue is processed after the last
//! command of each ended controller, so no wake-up is lost.

use std::sync::{Arc, Weak};

use crate::model::sync::Locked;
use sealblock_protocols_nvme::nqn::Nqn;

/// A controller, as seen by the other controllers of its host.
pub(crate) trait Successor: Send + Sync {
    /// The host, by HOSTNQN and HOSTID.
    fn host(&self) -> (Option<&Nqn>, [u8; 16]);
    /// True if I/O queues are connected or have commands in flight.
    fn has_queue_refs(&self) -> bool;
    /// Makes the controller ready if the host's ended controllers have no commands in flight.
    fn on_handover(self: Arc<Self>);
}

/// The controllers of one subsystem that have ended with commands in flight, and those waiting for them.
#[derive(Default)]
pub(crate) struct ControllerHandover(Locked<HandoverLists>);

#[derive(Default)]
struct HandoverLists {
    ended: Vec<Weak<dyn Successor>>,
    waiting: Vec<Weak<dyn Successor>>,
}

impl ControllerHandover {
    /// Registers a controller that has ended, if it still has commands in flight. It must accept no more queues.
    pub(crate) fn controller_ended(&self, controller: &Arc<dyn Successor>) {
        if controller.has_queue_refs() {
            let mut lists = self.0.lock();
            lists.ended.retain(is_busy);
            lists.ended.push(Arc::downgrade(controller));
        }
    }

    /// True if commands of the same host's ended controllers are still in flight. Then [`Successor::on_handover`] is
    /// called after the last of them.
    pub(crate) fn must_wait(&self, controller: &Arc<dyn Successor>) -> bool {
        let mut lists = self.0.lock();
        lists
            .waiting
            .retain(|other| other.strong_count() > 0 && !std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(controller)));
        lists.waiting.push(Arc::downgrade(controller));
        let is_same = |other: &dyn Successor| other.host() == controller.host();
        lists.ended.iter().any(|other| other.upgrade().is_some_and(|other| other.has_queue_refs() && is_same(&*other)))
    }

    /// The last command of an ended controller has completed.
    pub(crate) fn commands_ended(&self) {
        let waiting = {
            let mut lists = self.0.lock();
            lists.ended.retain(is_busy);
            std::mem::take(&mut lists.waiting)
        };
        waiting.iter().filter_map(Weak::upgrade).for_each(|controller| controller.on_handover());
    }
}

fn is_busy(controller: &Weak<dyn Successor>) -> bool {
    controller.upgrade().is_some_and(|controller| controller.has_queue_refs())
}
