//! A controller: what one host's association with a subsystem knows. Made by Connect on an admin queue, gone with it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sealblock_block::{Device, Operation};
use sealblock_protocols_nvme::fabrics::ConnectData;
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog, LogPage};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::registers::{Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus};
use sealblock_protocols_nvme::{Command, Status, StatusCode};
use sealblock_runtime_reactor::{now, spawn};
use sealblock_units::Lba;

use crate::connection::Connection;
use crate::features::FeatureValues;
use crate::namespace::Namespace;
use crate::notices::Notices;
use crate::refusal::Refusal;
use crate::subsystem::Subsystem;

/// Entries of the Error Information log (ELPE).
pub(crate) const ERROR_ENTRIES: u16 = 64;

pub(crate) struct Controller {
    pub(crate) id: u16,
    pub(crate) subsystem: Rc<Subsystem>,
    pub(crate) is_discovery: bool,
    pub(crate) host: Nqn,
    pub(crate) hostid: [u8; 16],
    pub(crate) cc: Cell<u32>,
    pub(crate) status: Cell<ControllerStatus>,
    pub(crate) keep_alive_ms: Cell<u32>,
    pub(crate) seen: Cell<Instant>,
    pub(crate) queues_granted: Cell<u32>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) values: FeatureValues,
    pub(crate) write_cache: Cell<bool>,
    pub(crate) timestamp: Cell<(u64, Instant)>,
    pub(crate) behavior: RefCell<Vec<u8>>,
    pub(crate) errors: RefCell<ErrorLog>,
    pub(crate) io_queues: RefCell<BTreeMap<u16, Weak<Connection>>>,
}

impl Controller {
    pub(crate) fn new(id: u16, subsystem: Rc<Subsystem>, data: &ConnectData, keep_alive_ms: u32) -> Controller {
        let status = ControllerStatus {
            ready: false,
            fatal: false,
            shutdown: ShutdownStatus::Normal,
            subsystem_reset_occurred: false,
            processing_paused: false,
        };
        let notices = Arc::<Notices>::default();
        for (nsid, namespace) in &subsystem.namespaces {
            namespace.state.watch(*nsid, &notices);
        }
        Controller {
            id,
            is_discovery: data.subnqn.is_discovery(),
            subsystem,
            host: data.hostnqn.clone(),
            hostid: data.hostid,
            cc: Cell::new(0),
            status: Cell::new(status),
            keep_alive_ms: Cell::new(keep_alive_ms),
            seen: Cell::new(now()),
            queues_granted: Cell::new(1),
            notices,
            values: FeatureValues::default(),
            write_cache: Cell::new(true),
            timestamp: Cell::new((0, now())),
            behavior: RefCell::new(vec![0; 512]),
            errors: RefCell::new(ErrorLog::new(usize::from(ERROR_ENTRIES))),
            io_queues: RefCell::default(),
        }
    }

    /// Whether it processes commands (CSTS.RDY).
    pub(crate) fn is_ready(&self) -> bool {
        self.status.get().ready
    }

    /// The namespace of this identifier, which is one namespace's.
    pub(crate) fn namespace(&self, nsid: u32) -> Result<Rc<Namespace>, StatusCode> {
        self.subsystem.namespaces.get(&nsid).cloned().ok_or(StatusCode::INVALID_NAMESPACE)
    }

    /// When the host is given up, unless it is heard of before.
    pub(crate) fn deadline(&self, idle: Duration) -> Instant {
        let patience = match self.keep_alive_ms.get() {
            0 => idle,
            ms => Duration::from_millis(u64::from(ms)),
        };
        self.seen.get() + patience
    }

    /// Puts a failed command into the error log; the status then says that there is more to know.
    pub(crate) fn log(&self, queue: u16, command: &Command, refusal: &Refusal) -> Status {
        let status = refusal.status.with_more(true);
        let lba = refusal.lba.unwrap_or(Lba::ZERO);
        let entry = ErrorEntry::at_block(queue, command.cid.get(), status, command.nsid.get(), lba);
        let entry = entry.with_location(refusal.location);
        // The damage log says more about blocks that are known to be bad.
        let is_known = |lba| self.namespace(command.nsid.get()).is_ok_and(|namespace| namespace.state.known.has(lba));
        let is_listed = queue != 0 && refusal.lba.is_some_and(is_known);
        let vendor_information = if is_listed { LogPage::Damage.code() } else { 0 };
        self.errors.borrow_mut().push(ErrorEntry { vendor_information, ..entry });
        status
    }

    /// Property Set of CC.
    pub(crate) fn configure(self: &Rc<Self>, bits: u32) {
        let (before, cc) = (Configuration::from_bits(self.cc.replace(bits)), Configuration::from_bits(bits));
        let mut status = self.status.get();
        if cc.enable && !before.enable {
            let legal = cc.mps == 0 && cc.ams == 0 && matches!(cc.command_set, 0 | 6 | 7);
            let legal = legal && (self.is_discovery || cc.iosqes == 6 && cc.iocqes == 4);
            (status.ready, status.fatal, status.shutdown) = (legal, !legal, ShutdownStatus::Normal);
        } else if !cc.enable && before.enable {
            // A reset deletes the I/O queues.
            (status.ready, status.fatal, status.shutdown) = (false, false, ShutdownStatus::Normal);
            self.close_io_queues();
            self.notices.reset();
            self.values.reset();
        }
        let leaves = matches!(cc.shutdown, ShutdownNotification::Normal | ShutdownNotification::Abrupt);
        if leaves && status.shutdown == ShutdownStatus::Normal {
            status.shutdown = ShutdownStatus::InProgress;
            spawn(Rc::clone(self).shut_down());
        }
        self.status.set(status);
    }

    /// What is in volatile caches goes to the media before the shutdown is said to be complete.
    async fn shut_down(self: Rc<Self>) {
        for namespace in self.subsystem.namespaces.values() {
            if let Err(error) = namespace.device.execute(Operation::Flush).await {
                tracing::warn!(%error, "flush on shutdown failed");
            }
        }
        let status = self.status.get();
        if status.shutdown == ShutdownStatus::InProgress {
            self.status.set(ControllerStatus { shutdown: ShutdownStatus::Complete, ..status });
        }
    }

    pub(crate) fn close_io_queues(&self) {
        let queues = std::mem::take(&mut *self.io_queues.borrow_mut());
        for connection in queues.values().filter_map(Weak::upgrade) {
            connection.kill();
        }
    }
}
