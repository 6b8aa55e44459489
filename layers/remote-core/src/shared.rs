//! Devices as handles that travel, and what they become on a core.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use sealblock_block::{Abilities, Device, Gate, Geometry, Operation, Outcome, Stack};
use sealblock_runtime_reactor::Homed;

use crate::link::Link;

thread_local! {
    /// The links of the reactors on this thread. Those that nobody uses any more are cleared when a new one is opened.
    static LINKS: RefCell<Vec<Weak<Link>>> = const { RefCell::new(Vec::new()) };
}

/// A device that lives on one core, as a handle for all of them. Clones are for the same device, which is given up on its core
/// when the last handle and the last attachment have gone, or when its core ends.
#[derive(Clone)]
pub struct SharedDevice(Arc<Inner>);

struct Inner {
    homed: Homed<Gate<Stack>>,
    name: Box<str>,
    geometry: Geometry,
    abilities: Abilities,
}

impl SharedDevice {
    /// Publishes a device of this core. Its geometry and abilities are taken now and are to stay.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn publish(device: Rc<Gate<Stack>>) -> SharedDevice {
        let (name, geometry, abilities) = (device.name().into(), device.geometry().clone(), device.abilities());
        SharedDevice(Arc::new(Inner { homed: Homed::new(device), name, geometry, abilities }))
    }

    /// The device as one of the current core: the device itself at home, a way there elsewhere. Never waits; a home
    /// that has stopped shows in the outcome of requests ([`sealblock_block::Failure::Unreachable`]).
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn attach(&self) -> Attached {
        match self.0.homed.get() {
            Some(device) => Attached(Way::Here(device)),
            None => Attached(Way::There(self.link())),
        }
    }

    /// The link from this core, shared with whoever is attached already.
    fn link(&self) -> Rc<Link> {
        let known = LINKS.with_borrow(|links| {
            let mut open = links.iter().filter_map(Weak::upgrade);
            open.find(|link| Arc::ptr_eq(&link.device.0, &self.0) && link.here.is_here())
        });
        known.unwrap_or_else(|| {
            let link = Rc::new(Link::open(self));
            LINKS.with_borrow_mut(|links| {
                links.retain(|link| link.strong_count() > 0);
                links.push(Rc::downgrade(&link));
            });
            link
        })
    }

    /// Its shape, as seen in front of its gate.
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// What it can do, as seen in front of its gate.
    pub fn abilities(&self) -> Abilities {
        self.0.abilities
    }

    /// The name of its gate.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn homed(&self) -> &Homed<Gate<Stack>> {
        &self.0.homed
    }
}

impl std::fmt::Debug for SharedDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDevice").field("name", &self.name()).field("homed", &self.0.homed).finish()
    }
}

/// A device as the current core uses it; see [`SharedDevice::attach`]. Requests of one core are begun in the order of their
/// first poll. A request whose future is dropped is carried out at home all the same, or, at home itself, ends as the
/// device has it.
#[derive(Clone)]
pub struct Attached(Way);

#[derive(Clone)]
enum Way {
    Here(Rc<Gate<Stack>>),
    There(Rc<Link>),
}

impl Attached {
    /// Whether the device lives on this core, so that requests cross nothing.
    pub fn is_home(&self) -> bool {
        matches!(self.0, Way::Here(_))
    }
}

impl Device for Attached {
    fn geometry(&self) -> &Geometry {
        match &self.0 {
            Way::Here(gate) => gate.geometry(),
            Way::There(link) => link.device.geometry(),
        }
    }

    fn abilities(&self) -> Abilities {
        match &self.0 {
            Way::Here(gate) => gate.abilities(),
            Way::There(link) => link.device.abilities(),
        }
    }

    async fn execute(&self, operation: Operation) -> Outcome {
        match &self.0 {
            Way::Here(gate) => gate.execute(operation).await,
            Way::There(link) => link.call(operation).await,
        }
    }

    fn at_once(&self, operation: &Operation) -> Option<Outcome> {
        match &self.0 {
            Way::Here(gate) => gate.at_once(operation),
            Way::There(_) => None,
        }
    }
}
