//! What the cores that a mirror does not live on may do by themselves. Without I/O.
//!
//! The state of a mirror belongs to its home core. While nothing is wrong with the mirror it *delegates*: other cores
//! execute requests on replicas that they have opened for themselves, so data stay on the core of the connection. A
//! read needs no message: the core looks at what is shared here. For a change it gets a permit of the home core, which
//! locks the blocks and has their regions in the labels first; the core executes it on all replicas and returns what
//! they said. All else, and everything while the mirror does not delegate, is executed on the home core.
//!
//! Invariants:
//! - The generation is even only while every replica is in sync and online, and the copies of every block are equal or
//!   locked. The home core makes it odd before anything completes that ends this ([`Delegation::revoke`]). Whoever
//!   executes a request by himself looks at it again after it, and does not complete it by himself if it changed. So no
//!   read that a failed replica answered completes after a change that this replica missed.
//! - Blocks that are locked at home count in their zones until they are unlocked. So while a change is on some replicas
//!   only, a read that begins waits for it at home.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_channel::{mpsc, oneshot};
use sealblock_block::{DeviceSource, Error, Freshness, Outcome, RangeGuard, Request};
use sealblock_units::Extent;
use smallvec::SmallVec;

/// Zones in which locked blocks are counted, and base-2 logarithm of the blocks of one: so many that a few hundred
/// changes in flight leave most reads alone.
const ZONES: u64 = 8192;
const ZONE_SHIFT: u32 = 5;

/// What each replica said to a change, in the order of the [`Terms`].
pub(crate) type ChangeOutcomes = SmallVec<[Result<(), Error>; 2]>;

/// A request of another core to the home core. Dropping the sender of its answer refuses it.
pub(crate) enum Call {
    /// To be executed there.
    Execute { request: Request, answer: oneshot::Sender<Outcome> },
    /// For a permit to change these blocks, on the replicas of this generation.
    Change { extent: Extent, generation: u64, answer: oneshot::Sender<Permit> },
    /// A channel is gone.
    Gone,
}

/// Permits a core to execute one change on all replicas. Dropping it leaves the blocks nosync.
pub(crate) struct Permit {
    /// Gets what the replicas said.
    pub outcomes: oneshot::Sender<ChangeOutcomes>,
    /// How the change ended, for a core that may not complete it by itself.
    pub ended: oneshot::Receiver<Outcome>,
}

/// What requests of other cores are executed on.
pub(crate) struct Terms {
    pub generation: u64,
    /// The replicas, in the order of their records.
    pub sources: Vec<Arc<dyn DeviceSource>>,
}

/// A core is to close its replicas of earlier generations than this one, and answers once it uses none of them.
pub(crate) struct Recall {
    pub before: u64,
    pub answer: oneshot::Sender<()>,
}

/// The part of a mirror that all cores share.
pub(crate) struct Delegation {
    /// Odd while the mirror does not delegate.
    generation: AtomicU64,
    zones: Box<[AtomicU32]>,
    /// What the mirror's background work has found of its freshness, as bits.
    freshness: AtomicU8,
    terms: Mutex<Option<Arc<Terms>>>,
    calls: mpsc::UnboundedSender<Call>,
    channels: Mutex<Vec<mpsc::UnboundedSender<Recall>>>,
    /// How many channels there are.
    open_channels: AtomicUsize,
}

impl Delegation {
    /// Of a mirror that does not delegate yet; and the calls of other cores, for its worker.
    pub fn new() -> (Arc<Delegation>, mpsc::UnboundedReceiver<Call>) {
        let (calls, received) = mpsc::unbounded();
        let delegation = Delegation {
            generation: AtomicU64::new(1),
            zones: (0..ZONES).map(|_| AtomicU32::default()).collect(),
            freshness: AtomicU8::new(Freshness::Current.bits()),
            terms: Mutex::default(),
            calls,
            channels: Mutex::default(),
            open_channels: AtomicUsize::default(),
        };
        (Arc::new(delegation), received)
    }

    /// The generation, if the mirror delegates.
    pub fn generation(&self) -> Option<u64> {
        Some(self.generation.load(Ordering::SeqCst)).filter(|generation| generation % 2 == 0)
    }

    /// True if the mirror has delegated since this generation began.
    pub fn is_valid(&self, generation: u64) -> bool {
        self.generation.load(Ordering::SeqCst) == generation
    }

    /// Begins a generation, on the home core.
    pub fn delegate(&self, sources: Vec<Arc<dyn DeviceSource>>) {
        let generation = self.generation.load(Ordering::SeqCst) | 1;
        *lock(&self.terms) = Some(Arc::new(Terms { generation: generation + 1, sources }));
        self.generation.store(generation + 1, Ordering::SeqCst);
    }

    /// Ends the generation, on the home core.
    pub fn revoke(&self) {
        if let Some(generation) = self.generation() {
            self.generation.store(generation + 1, Ordering::SeqCst);
            // Replicas that are closed must not be kept open by what opens them.
            lock(&self.terms).take();
        }
    }

    /// What requests of this generation are executed on; `None` once it has ended.
    pub fn terms(&self, generation: u64) -> Option<Arc<Terms>> {
        lock(&self.terms).clone().filter(|terms| terms.generation == generation)
    }

    /// Counts blocks that the home core has locked.
    pub fn locked<'a>(&'a self, extent: Extent, lock: RangeGuard<'a>) -> LockedBlocks<'a> {
        for zone in self.zones_of(extent) {
            // Only the home core writes it.
            zone.store(zone.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
        }
        LockedBlocks { delegation: self, extent, _lock: lock }
    }

    /// True if no block around these is locked.
    pub fn is_unlocked(&self, extent: Extent) -> bool {
        self.zones_of(extent).all(|zone| zone.load(Ordering::SeqCst) == 0)
    }

    fn zones_of(&self, extent: Extent) -> impl Iterator<Item = &AtomicU32> {
        let (first, last) = (extent.start().get() >> ZONE_SHIFT, extent.last().get() >> ZONE_SHIFT);
        let last = last.min(first + (ZONES - 1));
        (first..=last).map(|zone| &self.zones[(zone % ZONES) as usize])
    }

    /// Publishes what was found of the mirror's freshness.
    pub fn set_freshness(&self, freshness: Freshness) {
        self.freshness.store(freshness.bits(), Ordering::SeqCst);
    }

    /// What was found of it last.
    pub fn freshness(&self) -> Freshness {
        Freshness::from_bits(self.freshness.load(Ordering::SeqCst))
    }

    /// Sends a call to the home core; false if the mirror is closed.
    pub fn call(&self, call: Call) -> bool {
        self.calls.unbounded_send(call).is_ok()
    }

    /// A channel for another core; what it gets has it close its replicas.
    pub fn add_channel(&self) -> mpsc::UnboundedReceiver<Recall> {
        let (recalls, received) = mpsc::unbounded();
        self.open_channels.fetch_add(1, Ordering::SeqCst);
        lock(&self.channels).push(recalls);
        received
    }

    /// The counterpart of [`Delegation::add_channel`].
    pub fn channel_gone(&self) {
        self.open_channels.fetch_sub(1, Ordering::SeqCst);
        self.call(Call::Gone);
    }

    /// True if another core may still call.
    pub fn has_channels(&self) -> bool {
        self.open_channels.load(Ordering::SeqCst) > 0
    }

    /// Has all other cores close their replicas; returns their answers to come. A core that has ended owes none.
    pub fn recall(&self) -> Vec<oneshot::Receiver<()>> {
        let (mut answers, before) = (Vec::new(), self.generation.load(Ordering::SeqCst));
        lock(&self.channels).retain(|channel| {
            let (answer, answered) = oneshot::channel();
            let is_there = channel.unbounded_send(Recall { before, answer }).is_ok();
            answers.extend(is_there.then_some(answered));
            is_there
        });
        answers
    }
}

/// Blocks that the home core has locked, until this is dropped.
pub(crate) struct LockedBlocks<'a> {
    delegation: &'a Delegation,
    extent: Extent,
    _lock: RangeGuard<'a>,
}

impl Drop for LockedBlocks<'_> {
    fn drop(&mut self) {
        for zone in self.delegation.zones_of(self.extent) {
            zone.store(zone.load(Ordering::Relaxed) - 1, Ordering::SeqCst);
        }
    }
}

/// No code under these locks leaves something half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
