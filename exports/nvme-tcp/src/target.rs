//! The target: subsystems, controllers, and the connections of every listener it serves.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{now, sleep, spawn, stopping};

use crate::bell::Bell;
use crate::budget::Budget;
use crate::connection::Connection;
use crate::controller::Controller;
use crate::limits::Limits;
use crate::subsystem::{SetupError, Subsystem};

/// The largest controller identifier that is not reserved.
const MOST_CONTROLLERS: u16 = 0xFFEF;
/// Rest after the system had no descriptor or memory for a connection.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// An NVMe/TCP target of one reactor. Clones are the same target.
#[derive(Clone)]
pub struct Target(Rc<Shared>);

pub(crate) struct Shared {
    pub(crate) subsystems: Vec<Rc<Subsystem>>,
    discovery: Rc<Subsystem>,
    pub(crate) limits: Limits,
    /// Bytes in flight over all connections.
    pub(crate) budget: Arc<Budget>,
    controllers: RefCell<BTreeMap<u16, Rc<Controller>>>,
    last_controller: Cell<u16>,
    connections: RefCell<BTreeMap<u64, Weak<Connection>>>,
    accepted: Cell<u64>,
    is_stopped: Cell<bool>,
    listeners: RefCell<Vec<Rc<Bell>>>,
}

/// A place among the connections; given back when the last task of the connection has ended.
pub(crate) struct Permit(Rc<Shared>, u64);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.connections.borrow_mut().remove(&self.1);
    }
}

impl Target {
    /// A target for these subsystems, and the discovery subsystem that names them.
    ///
    /// # Errors
    /// [`SetupError::DuplicateNqn`] and [`SetupError::Reserved`].
    pub fn new(subsystems: impl IntoIterator<Item = Subsystem>, limits: Limits) -> Result<Target, SetupError> {
        let subsystems: Vec<Rc<Subsystem>> = subsystems.into_iter().map(Rc::new).collect();
        for (i, subsystem) in subsystems.iter().enumerate() {
            if subsystem.nqn.is_discovery() {
                return Err(SetupError::Reserved(subsystem.nqn.clone()));
            }
            if subsystems[..i].iter().any(|other| other.nqn == subsystem.nqn) {
                return Err(SetupError::DuplicateNqn(subsystem.nqn.clone()));
            }
        }
        let limits = limits.legal();
        Ok(Target(Rc::new(Shared {
            subsystems,
            discovery: Rc::new(Subsystem::new(Nqn::discovery(), "discovery")),
            budget: Budget::new(limits.total_bytes_in_flight),
            limits,
            controllers: RefCell::default(),
            last_controller: Cell::new(0),
            connections: RefCell::default(),
            accepted: Cell::new(0),
            is_stopped: Cell::new(false),
            listeners: RefCell::default(),
        })))
    }

    /// Serves the connections of a listener until [`Target::stop`] or until the reactor's core is told to stop, then lets
    /// commands in flight end, for [`Limits::drain`], and closes. May run for several listeners at once.
    ///
    /// # Errors
    /// When the listener fails for good.
    pub async fn serve(&self, listener: Listener) -> io::Result<()> {
        let bell = Rc::new(Bell::default());
        self.0.listeners.borrow_mut().push(Rc::clone(&bell));
        let outcome = self.accept(&listener, &bell).await;
        drop(listener);
        self.stop();
        self.drained().await;
        outcome
    }

    async fn accept(&self, listener: &Listener, bell: &Bell) -> io::Result<()> {
        let mut stopping = stopping();
        loop {
            let mut next = pin!(listener.accept());
            let mut stop = pin!(bell.wait());
            let accepted = poll_fn(|cx| {
                let is_over = self.0.is_stopped.get() || stop.as_mut().poll(cx).is_ready();
                if is_over || pin!(&mut stopping).poll(cx).is_ready() {
                    return Poll::Ready(None);
                }
                next.as_mut().poll(cx).map(Some)
            });
            match accepted.await {
                None => return Ok(()),
                Some(Ok((stream, _peer))) => self.admit(stream),
                Some(Err(error)) if is_shortage(&error) => sleep(ACCEPT_REST).await,
                Some(Err(error)) => return Err(error),
            }
        }
    }

    fn admit(&self, stream: Stream) {
        if self.connections() >= self.0.limits.connections {
            tracing::warn!(limit = self.0.limits.connections, "a connection above the limit was closed");
            return;
        }
        // Without it small answers wait for acknowledgements; a socket that refuses is on its way out.
        let _ = stream.set_nodelay(true);
        let id = self.0.accepted.get() + 1;
        self.0.accepted.set(id);
        let connection = Connection::new(&self.0, stream, Permit(Rc::clone(&self.0), id));
        self.0.connections.borrow_mut().insert(id, Rc::downgrade(&connection));
        spawn(connection.run());
    }

    /// Takes no more connections and commands; what [`Target::serve`] returns tells when it is over.
    pub fn stop(&self) {
        self.0.is_stopped.set(true);
        for bell in self.0.listeners.borrow().iter() {
            bell.ring();
        }
        for connection in self.0.alive() {
            connection.stop();
        }
    }

    /// Connections that are served now, or whose last commands are being carried out.
    pub fn connections(&self) -> usize {
        self.0.connections.borrow().len()
    }

    /// Waits until every connection is gone; those that take too long are cut off.
    async fn drained(&self) {
        let rest = Duration::from_millis(2);
        let deadline = now() + self.0.limits.drain * 2;
        while self.connections() > 0 && now() < deadline {
            sleep(rest).await;
        }
        for connection in self.0.alive() {
            connection.kill();
        }
    }
}

/// Whether accepting failed for want of descriptors or memory, which passes (`accept(2)`: EMFILE, ENFILE, ENOBUFS, ENOMEM).
fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(12 | 23 | 24 | 105))
}

impl Shared {
    fn alive(&self) -> Vec<Rc<Connection>> {
        self.connections.borrow().values().filter_map(Weak::upgrade).collect()
    }

    /// The subsystem of this name, the discovery subsystem among them.
    pub(crate) fn subsystem(&self, nqn: &Nqn) -> Option<Rc<Subsystem>> {
        let all = self.subsystems.iter().chain([&self.discovery]);
        all.into_iter().find(|subsystem| subsystem.nqn == *nqn).cloned()
    }

    pub(crate) fn controller(&self, id: u16) -> Option<Rc<Controller>> {
        self.controllers.borrow().get(&id).cloned()
    }

    /// Makes a controller with an identifier that was not used for as long as possible; `None` if all are in use.
    pub(crate) fn new_controller(&self, make: impl FnOnce(u16) -> Controller) -> Option<Rc<Controller>> {
        let mut controllers = self.controllers.borrow_mut();
        let last = self.last_controller.get();
        let id = (last + 1..=MOST_CONTROLLERS).chain(1..=last).find(|id| !controllers.contains_key(id))?;
        self.last_controller.set(id);
        let controller = Rc::new(make(id));
        controllers.insert(id, Rc::clone(&controller));
        Some(controller)
    }

    pub(crate) fn remove_controller(&self, id: u16) {
        let controller = self.controllers.borrow_mut().remove(&id);
        drop(controller);
    }
}
