//! A controller: the association of one host with a subsystem. Connect on an admin queue creates it, and the end of
//! that queue ends it.
//!
//! Its queues may be on several cores. I/O commands only read flags; locks are for admin commands, and for queues that
//! connect or disconnect.
//!
//! Invariant: a queue is added under the lock of `io_queues` while the controller is ready and has not ended. A task
//! that changes either of these states takes the lock afterwards, so it misses no queue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use sealblock_block::{Device, FlushCursor, Request};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nvme::fabrics::ConnectData;
use sealblock_protocols_nvme::features::TemperatureThreshold;
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog, LogPage};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_protocols_nvme::registers::{Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus};
use sealblock_protocols_nvme::{Command, Invalid, Status, StatusCode};
use sealblock_runtime_reactor::{now, spawn};
use sealblock_transport::{ControlSignal, Signals, poll_until};
use sealblock_units::Lba;

use crate::model::async_events::AsyncEvents;
use crate::model::command_error::CommandError;
use crate::model::damage_pages::DamagePage;
use crate::model::handover::Successor;
use crate::model::namespace::{Namespace, inactive};
use crate::model::subsystem::Subsystem;
use crate::model::sync::{Flag, Locked};

/// Entries of the Error Information log (ELPE).
pub(crate) const ERROR_ENTRIES: u16 = 64;
/// KAS: keep alive timeouts are multiples of 100 ms.
pub(crate) const KAS: u16 = 1;
/// I/O queues of a controller whose host has requested none.
const INITIAL_QUEUES: u32 = 1;
/// Bytes of feature Host Behavior Support.
const BEHAVIOR_BYTES: usize = 512;
/// CC.CSS value 110b, which CAP.CSS bit 6 permits: all supported I/O command sets. There is only one.
const ALL_COMMAND_SETS: u8 = 6;

/// Rounds a keep alive timeout up to the granularity (Base, "Keep Alive Timer feature").
pub(crate) fn round_keep_alive(ms: u32) -> u32 {
    let granularity_ms = u32::from(KAS) * 100;
    ms.checked_next_multiple_of(granularity_ms).unwrap_or(ms / granularity_ms * granularity_ms)
}

pub(crate) struct Controller {
    pub(crate) id: u16,
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) is_discovery: bool,
    /// The host's NQN, if Connect carried one.
    pub(crate) host: Option<Nqn>,
    pub(crate) hostid: [u8; 16],
    /// The address of its admin queue.
    pub(crate) from: String,
    pub(crate) connected_at: Instant,
    pub(crate) keep_alive_ms: Locked<u32>,
    /// The value that Connect set, which a reset restores.
    initial_keep_alive_ms: u32,
    pub(crate) queues_granted: Locked<u32>,
    pub(crate) async_events: Arc<AsyncEvents>,
    pub(crate) feature_values: FeatureValues,
    pub(crate) write_cache: Flag,
    pub(crate) timestamp: Locked<(u64, Instant)>,
    pub(crate) behavior: Locked<Vec<u8>>,
    pub(crate) errors: Locked<ErrorLog>,
    /// The page of a damage log that the host reads.
    pub(crate) damage_page: Locked<Weak<DamagePage>>,
    pub(crate) io_queues: Locked<BTreeMap<u16, Weak<ControlSignal>>>,
    /// The flush cursors of this controller, one for each device. All its queues share it.
    flush_cursors: Locked<Vec<Arc<FlushCursor>>>,
    /// The numbers of removed namespaces to which the host may still send commands: since then, it has read no list of
    /// active namespaces without them.
    unnoticed_removals: Locked<BTreeSet<u32>>,
    state: Locked<ControllerState>,
    /// CSTS.RDY as commands see it; cleared as soon as a reset begins.
    is_ready: Flag,
    /// True if the admin queue has ended.
    has_ended: Flag,
    last_alive: Locked<Instant>,
    admin: Weak<ControlSignal>,
    /// References by I/O queues that are connected or have commands in flight, and by admin commands that change a
    /// device.
    queue_refs: AtomicUsize,
    /// Woken when `queue_refs` becomes zero.
    drain_waker: Locked<Option<Waker>>,
}

/// An admin command that changes something on a device. While it exists, a reset does not complete and the host's next
/// controller does not become ready, because this command must not overwrite what that controller writes.
pub(crate) struct DeviceChangeGuard(Arc<Controller>);

impl Drop for DeviceChangeGuard {
    fn drop(&mut self) {
        self.0.release_queue_ref();
    }
}

#[derive(Default)]
struct ControllerState {
    cc: u32,
    status: ControllerStatus,
    /// True if a reset completes when `queue_refs` becomes zero.
    is_resetting: bool,
    /// True if it is enabled and becomes ready when the commands of the host's ended controllers have completed.
    is_awaiting_handover: bool,
    /// Number of resets.
    resets: u64,
    /// Number of shutdowns that the host has requested.
    shutdowns: u64,
    /// True if a task flushes for a shutdown. There is at most one.
    is_flushing: bool,
}

impl Controller {
    pub(crate) fn new(
        id: u16,
        subsystem: Arc<Subsystem>,
        data: &ConnectData,
        keep_alive_ms: u32,
        (admin, from): (&Arc<ControlSignal>, String),
    ) -> Controller {
        Controller {
            id,
            is_discovery: data.subnqn.is_discovery(),
            subsystem,
            host: data.hostnqn.clone(),
            hostid: data.hostid,
            from,
            connected_at: now(),
            keep_alive_ms: Locked::new(round_keep_alive(keep_alive_ms)),
            initial_keep_alive_ms: round_keep_alive(keep_alive_ms),
            queues_granted: Locked::new(INITIAL_QUEUES),
            async_events: Arc::default(),
            feature_values: FeatureValues::default(),
            write_cache: Flag::new(true),
            timestamp: Locked::new((0, now())),
            behavior: Locked::new(vec![0; BEHAVIOR_BYTES]),
            errors: Locked::new(ErrorLog::new(usize::from(ERROR_ENTRIES))),
            damage_page: Locked::default(),
            io_queues: Locked::default(),
            flush_cursors: Locked::default(),
            unnoticed_removals: Locked::default(),
            state: Locked::default(),
            is_ready: Flag::new(false),
            has_ended: Flag::new(false),
            last_alive: Locked::new(now()),
            admin: Arc::downgrade(admin),
            queue_refs: AtomicUsize::new(0),
            drain_waker: Locked::default(),
        }
    }

    /// True if this controller belongs to the same host and subsystem.
    pub(crate) fn is_of_host(&self, other: &Controller) -> bool {
        Arc::ptr_eq(&self.subsystem, &other.subsystem) && self.host() == other.host()
    }

    /// True if its host has requested a shutdown since it was enabled.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.state.lock().status.shutdown != ShutdownStatus::Normal
    }

    /// True if it processes commands.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_ready.get()
    }

    /// CC.
    pub(crate) fn configuration(&self) -> u32 {
        self.state.lock().cc
    }

    /// True if the host has set the entry sizes of I/O queues.
    pub(crate) fn has_entry_sizes(&self) -> bool {
        let cc = Configuration::from_bits(self.configuration());
        (cc.iosqes, cc.iocqes) == (6, 4)
    }

    /// True if I/O queues are connected.
    pub(crate) fn has_io_queues(&self) -> bool {
        !self.io_queue_signals().is_empty()
    }

    /// CSTS.
    pub(crate) fn status(&self) -> ControllerStatus {
        self.state.lock().status
    }

    /// Restarts the keep alive timer, because the host sent a command on the admin queue.
    pub(crate) fn mark_alive(&self) {
        self.last_alive.set(now());
    }

    /// Returns the namespace with this identifier.
    pub(crate) fn namespace(&self, nsid: u32) -> Result<Arc<Namespace>, StatusCode> {
        self.subsystem.namespaces().get(&nsid).cloned().ok_or_else(|| inactive(nsid))
    }

    /// Returns the flush cursor of this controller at a device. The controllers of one host are one client: the host
    /// may flush on one what it wrote on another. A controller that replaces a lost one reports the failed writes of
    /// the lost one.
    pub(crate) fn flush_cursor(&self, device: &SharedDevice) -> Arc<FlushCursor> {
        let mut flush_cursors = self.flush_cursors.lock();
        if let Some(existing) = flush_cursors.iter().find(|flush_cursor| device.has_cursor(flush_cursor)) {
            return Arc::clone(existing);
        }
        // Drops cursors of removed namespaces.
        flush_cursors.retain(|flush_cursor| Arc::strong_count(flush_cursor) > 1);
        let hostid = u128::from_be_bytes(self.hostid);
        let host = self.host.as_ref().map_or("", Nqn::as_str);
        let flush_cursor = Arc::new(device.flush_cursor(&format!("nvme {host} {hostid:032x}")));
        flush_cursors.push(Arc::clone(&flush_cursor));
        flush_cursor
    }

    /// When the controller ends, unless the host sends a command before.
    pub(crate) fn deadline(&self, idle: Duration) -> Instant {
        let timeout = match self.keep_alive_ms.get() {
            0 => idle,
            ms => Duration::from_millis(u64::from(ms)),
        };
        self.last_alive.get() + timeout
    }

    /// True if the keep alive time has passed without a command. Commands on I/O queues since the time last passed
    /// restart it (Traffic Based Keep Alive).
    pub(crate) fn is_silent(&self, idle: Duration) -> bool {
        if self.deadline(idle) > now() {
            return false;
        }
        let signals = self.io_queue_signals();
        // All queues are visited, to clear each traffic flag.
        let had_traffic = signals.iter().filter(|signal| signal.take_traffic()).count() > 0;
        if had_traffic {
            self.mark_alive();
        }
        !had_traffic
    }

    /// Adds a failed command to the Error Information log, and returns its status with the More bit.
    pub(crate) fn log_error(&self, queue: u16, command: &Command, error: &CommandError) -> Status {
        let status = error.status.with_more(true);
        let lba = error.lba.unwrap_or(Lba::ZERO);
        let entry = ErrorEntry::at_block(queue, command.cid.get(), status, command.nsid.get(), lba);
        let entry = entry.with_location(error.location);
        // The damage log has details of a known bad block.
        let is_known =
            |lba| self.namespace(command.nsid.get()).is_ok_and(|namespace| namespace.state.damage_list.has(lba));
        let is_listed = queue != 0 && error.lba.is_some_and(is_known);
        let vendor_information = if is_listed { LogPage::Damage.code() } else { 0 };
        self.errors.lock().push(ErrorEntry { vendor_information, ..entry });
        status
    }

    /// True if the host may enable the controller with this configuration. Some hosts without I/O queues leave the
    /// entry sizes 0; Connect refuses an I/O queue of such a host.
    fn is_valid_configuration(&self, cc: &Configuration) -> bool {
        let offers_set = cc.command_set == 0 || cc.command_set == ALL_COMMAND_SETS && !self.is_discovery;
        let has_entries = matches!((cc.iosqes, cc.iocqes), (0 | 6, 0 | 4));
        cc.mps == 0 && cc.ams == 0 && offers_set && (self.is_discovery || has_entries)
    }

    /// Executes Property Set of CC, on the admin queue's core.
    pub(crate) fn configure(self: &Arc<Self>, bits: u32) {
        let mut state = self.state.lock();
        let (before, cc) = (Configuration::from_bits(state.cc), Configuration::from_bits(bits));
        state.cc = bits;
        let mut status = state.status;
        let is_reset = !cc.enable && before.enable;
        if cc.enable && !before.enable {
            let is_valid = self.is_valid_configuration(&cc);
            state.is_awaiting_handover = is_valid && self.subsystem.handover.must_wait(&self.as_successor());
            let ready = is_valid && !state.is_awaiting_handover;
            (status.ready, status.fatal, status.shutdown) = (ready, !is_valid, ShutdownStatus::Normal);
            state.is_resetting = false;
            self.is_ready.set(ready);
        } else if is_reset {
            self.is_ready.set(false);
            state.is_awaiting_handover = false;
            // The host may write the same blocks again once RDY is clear, so no older write may still be in flight
            // then.
            state.is_resetting = self.queue_refs.load(Ordering::SeqCst) > 0;
            (status.ready, status.fatal, status.shutdown) =
                (state.is_resetting && status.ready, false, ShutdownStatus::Normal);
            state.resets += 1;
            self.reset_features();
        }
        let is_shutdown = matches!(cc.shutdown, ShutdownNotification::Normal | ShutdownNotification::Abrupt);
        if is_shutdown && status.shutdown == ShutdownStatus::Normal {
            status.shutdown = ShutdownStatus::InProgress;
            state.shutdowns += 1;
            if !std::mem::replace(&mut state.is_flushing, true) {
                spawn(Arc::clone(self).shut_down());
            }
        }
        state.status = status;
        drop(state);
        if is_reset {
            // A reset deletes the I/O queues (Base, "Controller Level Reset").
            self.signal_io_queues(Signals::ABORT);
            self.signal_admin(Signals::TIMER);
        }
    }

    /// Gives every feature its value from when the host connected, and drops events. The host identifier stays, because
    /// Connect set it.
    fn reset_features(&self) {
        self.async_events.reset();
        self.feature_values.reset();
        self.write_cache.set(true);
        self.queues_granted.set(INITIAL_QUEUES);
        self.keep_alive_ms.set(self.initial_keep_alive_ms);
        self.timestamp.set((0, now()));
        self.behavior.set(vec![0; BEHAVIOR_BYTES]);
    }

    /// Number of resets. Admin commands from before a reset are dropped without completions.
    pub(crate) fn resets(&self) -> u64 {
        self.state.lock().resets
    }

    /// Waits until nothing that the I/O queues have in flight can be executed after newer commands of other hosts; ends
    /// early if the host gives the shutdown up. Their connections end, as with a reset.
    async fn drain_io_queues(&self) {
        poll_until(|| {
            let is_waited_for = self.has_io_queues() && self.status().shutdown == ShutdownStatus::InProgress;
            if is_waited_for {
                // Again each time, in case a queue was being connected.
                self.signal_io_queues(Signals::DRAIN);
            }
            !is_waited_for
        })
        .await;
    }

    /// Completes what is in flight, flushes all namespaces, and then reports the shutdown as complete. If the host
    /// requests a shutdown meanwhile, another flush follows.
    async fn shut_down(self: Arc<Self>) {
        loop {
            let flushed_for = self.state.lock().shutdowns;
            self.drain_io_queues().await;
            let (_, namespaces) = self.subsystem.snapshot();
            for namespace in namespaces.values() {
                // The flush has no cursor: its result reaches no host, so the host's next Flush must still report a
                // failure.
                if let Err(error) = namespace.device.attach().execute(Request::flush()).await {
                    tracing::warn!(%error, "flush on shutdown failed");
                }
            }
            let mut state = self.state.lock();
            let is_waited_for = state.status.shutdown == ShutdownStatus::InProgress;
            if !is_waited_for || state.shutdowns == flushed_for {
                if is_waited_for {
                    state.status.shutdown = ShutdownStatus::Complete;
                }
                state.is_flushing = false;
                return;
            }
        }
    }

    /// Adds an I/O queue; false if its identifier is in use, or the controller accepts no queues. On success the caller
    /// must make the [`QueueContext`](crate::command::queue_context::QueueContext) that releases the reference.
    pub(crate) fn add_io_queue(&self, queue: u16, signal: &Arc<ControlSignal>) -> bool {
        if self.is_shut_down() {
            return false;
        }
        let mut queues = self.io_queues.lock();
        let is_taken = queues.get(&queue).is_some_and(|other| other.strong_count() > 0);
        if is_taken || !self.is_ready() || self.has_ended.get() {
            return false;
        }
        queues.insert(queue, Arc::downgrade(signal));
        self.queue_refs.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Removes an I/O queue, unless a newer queue has its identifier, as after a reset.
    pub(crate) fn remove_io_queue(&self, queue: u16, signal: &Arc<ControlSignal>) {
        let mut queues = self.io_queues.lock();
        if queues.get(&queue).is_some_and(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(signal))) {
            queues.remove(&queue);
        }
    }

    /// Releases the reference of a queue or of a device change.
    pub(crate) fn release_queue_ref(&self) {
        if self.queue_refs.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        let mut state = self.state.lock();
        if std::mem::take(&mut state.is_resetting) {
            state.status.ready = false;
        }
        drop(state);
        let waiting = self.drain_waker.lock().take();
        if let Some(waker) = waiting {
            waker.wake();
        }
        if self.has_ended.get() {
            self.subsystem.handover.commands_ended();
        }
    }

    /// Begins an admin command that changes a device; `None` if the controller accepts none any more.
    pub(crate) fn begin_device_change(self: &Arc<Self>) -> Option<DeviceChangeGuard> {
        let _queues = self.io_queues.lock();
        if !self.is_ready() || self.has_ended.get() {
            return None;
        }
        self.queue_refs.fetch_add(1, Ordering::SeqCst);
        Some(DeviceChangeGuard(Arc::clone(self)))
    }

    fn as_successor(self: &Arc<Self>) -> Arc<dyn Successor> {
        Arc::<Controller>::clone(self)
    }

    /// Ready when `queue_refs` is zero. Only the admin queue's task waits.
    pub(crate) fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        let before = self.drain_waker.lock().replace(cx.waker().clone());
        drop(before);
        if self.queue_refs.load(Ordering::SeqCst) == 0 { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Ends the controller and its I/O queues, because the admin queue has ended.
    pub(crate) fn end(self: &Arc<Self>) {
        self.has_ended.set(true);
        self.is_ready.set(false);
        self.signal_io_queues(Signals::ABORT);
        self.subsystem.handover.controller_ended(&self.as_successor());
    }

    /// Ends the controller because its host reports that it has lost it. Nothing more is read from its connections.
    pub(crate) fn end_for_host(&self) {
        self.has_ended.set(true);
        self.is_ready.set(false);
        self.signal_io_queues(Signals::ABORT);
        self.signal_admin(Signals::ABORT);
    }

    /// Ends the controller once commands in flight have completed. Its host may connect again if the subsystem still
    /// allows it.
    pub(crate) fn drain(&self) {
        self.signal_io_queues(Signals::DRAIN);
        self.signal_admin(Signals::DRAIN);
    }

    pub(crate) fn signal_admin(&self, signals: Signals) {
        if let Some(signal) = self.admin.upgrade() {
            signal.send(signals);
        }
    }

    fn io_queue_signals(&self) -> Vec<Arc<ControlSignal>> {
        self.io_queues.lock().values().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn signal_io_queues(&self, signals: Signals) {
        for signal in self.io_queue_signals() {
            signal.send(signals);
        }
    }
}

impl Controller {
    /// Subscribes to the events of every namespace. Called after the controller is registered, so that a concurrent
    /// removal of a namespace is noticed either there or here, and the subscription to it is cancelled.
    pub(crate) fn subscribe_to_namespaces(&self) {
        let mut watched = self.subsystem.snapshot();
        loop {
            for (nsid, namespace) in watched.1.iter() {
                namespace.state.subscribe(*nsid, &self.async_events);
            }
            let now = self.subsystem.snapshot();
            if now.0 == watched.0 {
                return;
            }
            for (nsid, namespace) in watched.1.iter() {
                namespace.state.unsubscribe(*nsid, &self.async_events);
            }
            watched = now;
        }
    }

    /// Cancels the subscription to a removed namespace, lets each I/O queue release it on its own core, and reports the
    /// change. May be called on any core.
    pub(crate) fn namespace_removed(&self, nsid: u32, namespace: &Arc<Namespace>) {
        namespace.state.unsubscribe(nsid, &self.async_events);
        self.unnoticed_removals.lock().insert(nsid);
        self.signal_io_queues(Signals::CHANGED);
        self.async_events.namespace_changed(nsid);
    }

    /// The host gets a list of the active namespaces above a number.
    pub(crate) fn active_list_read(&self, active: &BTreeMap<u32, Arc<Namespace>>, above: u32) {
        self.unnoticed_removals.lock().retain(|nsid| *nsid <= above || active.contains_key(nsid));
    }

    /// True if the host may send commands to a namespace that has, or had, this number.
    pub(crate) fn may_use(&self, nsid: u32) -> bool {
        self.namespace(nsid).is_ok() || self.unnoticed_removals.lock().contains(&nsid)
    }

    /// Lets each I/O queue release the resized namespace on its own core, and reports the change. May be called on any
    /// core.
    pub(crate) fn namespace_resized(&self, nsid: u32) {
        self.signal_io_queues(Signals::CHANGED);
        self.namespaces_changed(nsid);
    }

    /// Subscribes to an added or changed namespace, and reports the change. May be called on any core.
    pub(crate) fn namespaces_changed(&self, nsid: u32) {
        if let Ok(namespace) = self.namespace(nsid) {
            namespace.state.subscribe(nsid, &self.async_events);
        }
        self.async_events.namespace_changed(nsid);
    }

    /// Reports a change of the discovery log page. May be called on any core.
    pub(crate) fn discovery_changed(&self) {
        self.async_events.discovery_changed();
    }
}

/// Values that hosts can set and that have no effect.
pub(crate) struct FeatureValues {
    /// Thresholds of the composite temperature, over and under, in kelvins. No sensor can exceed them.
    pub(crate) thresholds_kelvins: [AtomicU32; 2],
    /// DN (Disable Normal): the host does not need atomicity across AWUN, but gets it nevertheless.
    pub(crate) atomicity: AtomicU32,
}

/// Default thresholds, over and under: the highest and the lowest value, which no temperature exceeds.
pub(crate) const THRESHOLDS_KELVINS: [u32; 2] = [0xFFFF, 0];

impl Default for FeatureValues {
    fn default() -> FeatureValues {
        FeatureValues { thresholds_kelvins: THRESHOLDS_KELVINS.map(AtomicU32::new), atomicity: AtomicU32::new(0) }
    }
}

impl FeatureValues {
    /// Restores the default values, as a controller reset does.
    pub(crate) fn reset(&self) {
        for (value, default) in self.thresholds_kelvins.iter().zip(THRESHOLDS_KELVINS) {
            value.store(default, Ordering::Relaxed);
        }
        self.atomicity.store(0, Ordering::Relaxed);
    }

    /// Returns the threshold that dword 11 selects. Only the composite temperature has one.
    pub(crate) fn threshold(&self, dword: u32, all_sensors: bool) -> Result<&AtomicU32, CommandError> {
        let requested = TemperatureThreshold::from_bits(dword)?;
        match requested.sensor {
            0 => Ok(&self.thresholds_kelvins[usize::from(requested.under)]),
            0xF if all_sensors => Ok(&self.thresholds_kelvins[usize::from(requested.under)]),
            _ => Err(Invalid::field("TMPSEL", 11, 16).into()),
        }
    }
}

impl Successor for Controller {
    fn host(&self) -> (Option<&Nqn>, [u8; 16]) {
        (self.host.as_ref(), self.hostid)
    }

    fn has_queue_refs(&self) -> bool {
        self.queue_refs.load(Ordering::SeqCst) > 0
    }

    fn on_handover(self: Arc<Self>) {
        let mut state = self.state.lock();
        if state.is_awaiting_handover && !self.subsystem.handover.must_wait(&self.as_successor()) {
            state.is_awaiting_handover = false;
            state.status.ready = true;
            self.is_ready.set(!self.has_ended.get());
        }
    }
}
