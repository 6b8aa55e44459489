//! What a host's new controller waits for: the commands of those that it lost.
//!
//! A host that lost its connections repeats on new ones what was not answered. Commands of the old ones may still be with
//! a device, and would undo what the new ones have written since. So while there are such commands, a new controller of the
//! same host is not ready (CSTS.RDY).
//!
//! Invariant: who waits is in the list before it is looked whether there is something to wait for, and the list is looked
//! through after each controller's last command; so nobody waits for nothing.

use std::sync::{Arc, Weak};

use crate::controller::Controller;
use crate::kept::Locked;

/// The controllers of one subsystem that have ended, and those that wait for their last commands.
#[derive(Default)]
pub(crate) struct ControllerHandover(Locked<HandoverLists>);

#[derive(Default)]
struct HandoverLists {
    ended: Vec<Weak<Controller>>,
    waiting: Vec<Weak<Controller>>,
}

impl ControllerHandover {
    /// A controller has ended, and takes no more members.
    pub(crate) fn controller_ended(&self, controller: &Arc<Controller>) {
        if controller.has_queue_refs() {
            let mut lists = self.0.lock();
            lists.ended.retain(is_busy);
            lists.ended.push(Arc::downgrade(controller));
        }
    }

    /// Whether commands of the same host's ended controllers are still under way. If so, the controller is told when one
    /// of those has carried out its last.
    pub(crate) fn must_wait(&self, controller: &Arc<Controller>) -> bool {
        let mut lists = self.0.lock();
        lists
            .waiting
            .retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(controller)));
        lists.waiting.push(Arc::downgrade(controller));
        let is_same = |other: Arc<Controller>| other.hostid == controller.hostid && other.host == controller.host;
        lists.ended.iter().any(|other| other.upgrade().is_some_and(|other| other.has_queue_refs() && is_same(other)))
    }

    /// A controller that has ended has carried out its last command.
    pub(crate) fn commands_ended(&self) {
        let waiting = {
            let mut lists = self.0.lock();
            lists.ended.retain(is_busy);
            std::mem::take(&mut lists.waiting)
        };
        waiting.iter().filter_map(Weak::upgrade).for_each(|controller| controller.on_handover());
    }
}

fn is_busy(controller: &Weak<Controller>) -> bool {
    controller.upgrade().is_some_and(|controller| controller.has_queue_refs())
}
