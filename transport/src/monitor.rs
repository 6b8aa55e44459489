//! Whether a client's connection is lost, for reports that send nothing.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::SystemTime;

/// A connection that was lost and has not been set up again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LostConnection {
    /// When it was lost.
    pub since: SystemTime,
    /// Why it was lost, or why it cannot be set up again.
    pub reason: String,
    /// True if the device tries to set it up again.
    pub is_reconnecting: bool,
}

/// Reports the state of a device's connection, on the reactor of the device. It does not keep the device open.
#[derive(Clone, Default, Debug)]
pub struct ConnectionMonitor(Rc<RefCell<Option<LostConnection>>>);

impl ConnectionMonitor {
    /// The loss of the connection; `None` while it is connected, and once the device was closed.
    pub fn lost(&self) -> Option<LostConnection> {
        self.0.borrow().clone()
    }

    pub(crate) fn set_lost(&self, reason: &str) {
        let lost = LostConnection { since: SystemTime::now(), reason: reason.to_owned(), is_reconnecting: true };
        self.0.replace(Some(lost));
    }

    /// The device does not set the connection up again, for this reason.
    pub(crate) fn set_failed(&self, reason: &str) {
        let since = self.lost().map_or_else(SystemTime::now, |lost| lost.since);
        self.0.replace(Some(LostConnection { since, reason: reason.to_owned(), is_reconnecting: false }));
    }

    pub(crate) fn set_connected(&self) {
        self.0.replace(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_is_reported_until_the_connection_is_back() {
        let monitor = ConnectionMonitor::default();
        let seen = || monitor.clone().lost().map(|lost| (lost.reason, lost.is_reconnecting));
        assert_eq!(seen(), None);
        monitor.set_lost("closed");
        let since = monitor.lost().unwrap().since;
        assert_eq!(seen(), Some(("closed".to_owned(), true)));
        monitor.set_failed("given up");
        assert_eq!((seen(), monitor.lost().unwrap().since), (Some(("given up".to_owned(), false)), since));
        monitor.set_connected();
        assert_eq!(seen(), None);
        monitor.set_failed("another namespace");
        assert_eq!(seen(), Some(("another namespace".to_owned(), false)));
    }
}
