//! The environment of a replica in one machine: its disk, the volume on it, and the state of its link.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use sealblock_block::{Condition, DynDevice};

use crate::disk::{Behaviour, Image, SimDisk, Survival};
use crate::executor::Executor;
use crate::random::{Random, Trace};
use crate::system::{BoxedWork, VolumeProfile};

/// The state of the link to a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReplicaLink {
    /// Requests are executed.
    Up,
    /// Reads are executed, and changes fail.
    Full,
    /// Requests get no response and no error.
    Hung,
    /// The same for changes of blocks; everything else is executed.
    Stuck,
    /// Every request fails at once, including those in flight.
    Gone,
}

/// A replica in one machine.
pub(super) struct ReplicaEnv {
    pub name: String,
    pub number: usize,
    pub profile: VolumeProfile,
    pub has_no_label: bool,
    pub executor: Executor,
    pub random: Random,
    pub trace: Trace,
    pub disk: RefCell<Option<SimDisk>>,
    pub image: RefCell<Option<Image>>,
    /// The behaviour of its first disk in this machine.
    pub behaviour: RefCell<Behaviour>,
    pub link: Cell<ReplicaLink>,
    /// True if it cannot be opened again yet.
    pub held: Cell<bool>,
    pub is_opening: Cell<bool>,
    /// True while it is open in order to become a replica.
    pub is_lent: Cell<bool>,
    /// How often it was made a replica, which gives up what it had.
    pub replaced_count: Cell<u32>,
    /// Counts opens and breaks of the link.
    pub epoch: Cell<u64>,
    /// Counts all events of the link.
    pub breaks: Cell<u64>,
    pub changed: Condition,
    /// The volume itself, behind its own gate.
    pub volume: RefCell<Option<DynDevice>>,
    pub close: RefCell<Option<BoxedWork<()>>>,
    /// Regions that the mirror may write to it.
    pub allowed: RefCell<BTreeSet<u64>>,
    /// True if it is not a replica but can become one.
    pub is_spare: Cell<bool>,
    pub is_member: Cell<bool>,
    pub is_removed: Cell<bool>,
    /// True if it is being removed.
    pub is_leaving: Cell<bool>,
    /// The replica that it replaces.
    pub replaces: Cell<Option<usize>>,
}

impl ReplicaEnv {
    /// The kind of survival when the machine stops.
    pub fn take_image(&self, survival: Survival) -> Image {
        match self.disk.borrow_mut().take() {
            Some(disk) => disk.power_off(survival, &self.random.fork("survival")),
            None => self.image.borrow_mut().take().expect("a replica has an image or a disk"),
        }
    }
}
