//! A device at the bottom of a stack with the list of its bad blocks, which a volume keeps in its reserved area.
//!
//! The list and the state of the scrub are one record and saved together, so that no scrub has finished
//! before what it found is kept. Without a scrub the list is saved within a second of a change, and at the close. No request
//! waits for it: a crash loses what was found in the last second, which is found again, or brings back what was
//! rewritten since, until a check finds it good.
//!
//! A list that was lost must not look like one that never had a block: it is saved as a lost one, until every block has
//! been checked since.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{
    Abilities, AsyncMutex, Condition, DamageRecord, Device, Geometry, Operation, Outcome, Request, ReservedArea,
    Response, WatchedRequest,
};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{CoreLocal, sleep};
use sealblock_scrub::{FormatError, SavedState};

/// How long after a change the list is saved.
const SAVE_AFTER: Duration = Duration::from_secs(1);

/// A device, and what is known of its blocks.
pub(crate) struct Recorded<D> {
    device: D,
    record: Arc<DamageRecord>,
    /// True if the device holds copies, of which a read sees one.
    copies: bool,
    /// What keeps the list; `None` in memory only.
    keeper: Option<Keeper>,
    /// Wakes the core that keeps the list, if that is another one.
    saver: Option<SaveWake>,
}

/// Wakes the core that keeps a list, from any core.
#[derive(Clone)]
pub(crate) struct SaveWake(CoreLocal<Condition>);

impl SaveWake {
    fn wake(&self) {
        let changed = self.0.clone();
        // A core that has stopped saved the list when it closed the device.
        let _ = self.0.home().send(move || {
            if let Some(changed) = changed.get() {
                changed.notify();
            }
        });
    }
}

/// The list in the reserved area of a volume.
struct Keeper {
    /// What warnings call the volume.
    name: String,
    /// Identity of the volume.
    leaf: [u8; 16],
    /// What was read or saved last, for the part that belongs to the scrub.
    state: RefCell<SavedState>,
    /// Generation of the list that was saved last.
    saved: Cell<u64>,
    /// True if it is not saved: what is there is of a later version, or cannot be read or written.
    is_given_up: Cell<bool>,
    /// Saves come one after the other: each has what was there before it.
    turn: AsyncMutex,
    /// Notified of changes, and of the end.
    changed: Rc<Condition>,
}

impl<D: Device + 'static> Recorded<D> {
    /// A device whose list is gone when it is closed.
    pub fn in_memory(device: D) -> Recorded<D> {
        let record = Arc::new(DamageRecord::new(device.geometry().capacity_blocks));
        Recorded::sharing(device, record)
    }

    /// A device that another core has open with the same list.
    pub fn sharing(device: D, record: Arc<DamageRecord>) -> Recorded<D> {
        Recorded::saved_elsewhere(device, record, None)
    }

    /// The same where that core keeps the list.
    pub fn saved_elsewhere(device: D, record: Arc<DamageRecord>, saver: Option<SaveWake>) -> Recorded<D> {
        Recorded { copies: device.abilities().copies, device, record, keeper: None, saver }
    }

    /// What wakes this core when another one has changed the list, if this one saves it.
    pub fn save_wake(&self) -> Option<SaveWake> {
        self.keeper.as_ref().map(|keeper| SaveWake(CoreLocal::new(Rc::clone(&keeper.changed))))
    }

    /// The volume of this name and identity with its list. Once its area was read, `is_lost` says whether there was a
    /// list that it does not have any more.
    pub async fn kept(device: D, name: &str, leaf: [u8; 16], is_lost: &dyn Fn() -> bool) -> Rc<Recorded<D>> {
        let record = Arc::new(DamageRecord::new(device.geometry().capacity_blocks));
        let lost = || SavedState { leaf, forgotten_from: Some(0), ..SavedState::default() };
        let (state, is_given_up) = match device.execute(Request::read_reserved(ReservedArea::ScrubState)).await {
            Ok(Response::Reserved(bytes)) if !bytes.is_empty() => match SavedState::decode(&bytes) {
                Ok(state) => (state, false),
                // It is left as it is.
                Err(FormatError::Version(_)) => (SavedState::default(), true),
                Err(error) => {
                    tracing::warn!("{name}: its list of bad blocks cannot be read and is replaced: {error}");
                    (lost(), false)
                }
            },
            Ok(_) if is_lost() => (lost(), false),
            Ok(_) => (SavedState::default(), false),
            Err(error) => {
                tracing::warn!("{name}: its list of bad blocks cannot be read: {error}");
                (lost(), true)
            }
        };
        let is_unsaved = state.forgotten_from.is_some() && state.capacity_blocks == 0;
        if state.leaf == leaf {
            record.restore(&state.damage);
            if let Some(first) = state.forgotten_from {
                record.forget_from(first);
            }
        }
        let changed = Rc::new(Condition::default());
        let keeper = Keeper {
            name: name.to_owned(),
            leaf,
            // What was found lost is saved as lost.
            saved: Cell::new(if is_unsaved { u64::MAX } else { record.generation() }),
            state: RefCell::new(SavedState { damage: Vec::new(), ..state }),
            is_given_up: Cell::new(is_given_up),
            turn: AsyncMutex::default(),
            changed: Rc::clone(&changed),
        };
        let Abilities { writable: is_writable, copies, .. } = device.abilities();
        let recorded = Rc::new(Recorded { device, record, copies, keeper: Some(keeper), saver: None });
        if is_writable {
            drop(sealblock_runtime_reactor::spawn(save_changes(Rc::downgrade(&recorded), changed)));
        }
        recorded
    }

    /// The list.
    pub fn record(&self) -> &Arc<DamageRecord> {
        &self.record
    }

    /// True if the list is saved on the device.
    pub fn is_kept(&self) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| !keeper.is_given_up.get())
    }

    fn is_unsaved(&self) -> bool {
        let is_changed = |keeper: &Keeper| keeper.saved.get() != self.record.generation() && !keeper.is_given_up.get();
        self.keeper.as_ref().is_some_and(is_changed) && self.device.abilities().writable
    }

    /// Saves a state of the scrub with the list as it is now; the last state where there is none.
    async fn write(&self, keeper: &Keeper, state: Option<SavedState>) -> Outcome {
        let _turn = keeper.turn.lock().await;
        let state = state.unwrap_or_else(|| keeper.state.borrow().clone());
        let generation = self.record.generation();
        let blocks = self.device.geometry().capacity_blocks;
        let capacity_blocks = if state.capacity_blocks == 0 { blocks } else { state.capacity_blocks };
        // Before the list: a block that leaves what is forgotten in between is in the list of a later save at the latest.
        let forgotten_from = self.record.forgotten_from();
        let (leaf, damage) = (keeper.leaf, self.record.runs());
        let state = SavedState { leaf, damage, forgotten_from, capacity_blocks, ..state };
        let bytes = Slice::copy_from(&state.encode());
        let written = self.device.execute(Request::write_reserved(ReservedArea::ScrubState, bytes)).await?;
        keeper.state.replace(SavedState { damage: Vec::new(), ..state });
        keeper.saved.set(generation);
        Ok(written)
    }

    /// Saves what a scrub wants to have saved, with the list. What is no state is saved as it is.
    async fn save_state(&self, keeper: &Keeper, bytes: Slice) -> Outcome {
        match SavedState::decode(&bytes) {
            Ok(state) if !keeper.is_given_up.get() => self.write(keeper, Some(state)).await,
            _ => self.device.execute(Request::write_reserved(ReservedArea::ScrubState, bytes)).await,
        }
    }

    fn observe(&self, request: &WatchedRequest, outcome: &Outcome) {
        let (was_empty, generation) = (self.record.is_empty(), self.record.generation());
        self.record.observe(request, outcome);
        if was_empty && self.record.is_empty() {
            return;
        }
        if let Some(saver) = self.saver.as_ref().filter(|_| self.record.generation() != generation) {
            saver.wake();
        }
        if let Some(keeper) = self.keeper.as_ref().filter(|_| self.is_unsaved()) {
            keeper.changed.notify();
        }
    }
}

impl<D: Device + 'static> Device for Recorded<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        match (&self.keeper, request.operation) {
            (Some(keeper), Operation::WriteReserved(ReservedArea::ScrubState, bytes)) => {
                self.save_state(keeper, bytes).await
            }
            (_, operation) => {
                let request = Request { operation, ..request };
                let watched = WatchedRequest::of(&request, self.copies);
                let outcome = self.device.execute(request).await;
                self.observe(&watched, &outcome);
                outcome
            }
        }
    }

    fn executes_in_place(&self) -> bool {
        self.device.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        if matches!(request.operation, Operation::WriteReserved(..)) {
            return None;
        }
        let outcome = self.device.try_execute(request)?;
        self.observe(&WatchedRequest::of(request, self.copies), &outcome);
        Some(outcome)
    }
}

/// What keeps a list, whatever the device is.
pub(crate) trait KeepDamage {
    /// Saves the list, if it has changed since and the device takes changes. A failure is logged: the blocks are as they are.
    fn save(&self) -> LocalBoxFuture<'_, ()>;
}

impl<D: Device + 'static> KeepDamage for Recorded<D> {
    fn save(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {
            let Some(keeper) = self.keeper.as_ref().filter(|_| self.is_unsaved()) else { return };
            if let Err(error) = self.write(keeper, None).await {
                // It would fail every second; what is known stays known until the end of the process.
                keeper.is_given_up.set(true);
                tracing::warn!("{}: its list of bad blocks cannot be saved: {error}", keeper.name);
            }
        })
    }
}

/// Saves the list a while after each change, until the device is dropped.
async fn save_changes<D: Device + 'static>(recorded: Weak<Recorded<D>>, changed: Rc<Condition>) {
    let is_due = || recorded.upgrade().is_none_or(|recorded| recorded.is_unsaved());
    loop {
        changed.wait_until(is_due).await;
        if recorded.upgrade().is_none() {
            return;
        }
        sleep(SAVE_AFTER).await;
        let Some(recorded) = recorded.upgrade() else { return };
        recorded.save().await;
    }
}

impl<D> Drop for Recorded<D> {
    fn drop(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.changed.notify();
        }
    }
}

#[cfg(test)]
mod tests;
