//! Who waits for room on a connection: first come, first served.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use sealblock_runtime_reactor::Notify;

/// Those who wait, the first in front.
#[derive(Default)]
pub(crate) struct FifoWaiters(RefCell<VecDeque<Rc<Notify>>>);

/// A place in the line, given up when it is dropped.
pub(crate) struct FifoPlace<'a> {
    waiters: &'a FifoWaiters,
    notify: Rc<Notify>,
}

impl FifoWaiters {
    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.0.borrow().len()
    }

    /// Joins at the end.
    pub(crate) fn join(&self) -> FifoPlace<'_> {
        let bell = Rc::new(Notify::default());
        self.0.borrow_mut().push_back(Rc::clone(&bell));
        FifoPlace { waiters: self, notify: bell }
    }

    /// Calls the first.
    pub(crate) fn notify_first(&self) {
        let first = self.0.borrow().front().cloned();
        if let Some(first) = first {
            first.ring();
        }
    }

    /// Calls everybody.
    pub(crate) fn notify_all(&self) {
        let all: Vec<Rc<Notify>> = self.0.borrow().iter().cloned().collect();
        all.iter().for_each(|bell| bell.ring());
    }
}

impl FifoPlace<'_> {
    /// Whether it is the first.
    pub(crate) fn is_first(&self) -> bool {
        self.waiters.0.borrow().front().is_some_and(|first| Rc::ptr_eq(first, &self.notify))
    }

    /// Waits to be called.
    pub(crate) async fn wait(&self) {
        self.notify.wait().await;
    }
}

impl Drop for FifoPlace<'_> {
    fn drop(&mut self) {
        let was_first = self.is_first();
        self.waiters.0.borrow_mut().retain(|bell| !Rc::ptr_eq(bell, &self.notify));
        if was_first {
            // Whoever is first now finds out by itself whether there is room.
            self.waiters.notify_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_to_come_is_the_first_and_who_leaves_makes_room() {
        let line = FifoWaiters::default();
        let (a, b, c) = (line.join(), line.join(), line.join());
        assert!(a.is_first() && !b.is_first());
        drop(b);
        drop(a);
        assert!(c.is_first());
        assert_eq!(line.len(), 1);
    }
}
