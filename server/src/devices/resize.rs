//! Resizes a served volume.
//!
//! The volume is closed, resized and reopened on its own core while requests of hosts wait. So there is only one way to
//! change a size, that of a closed volume, and an open volume never changes its geometry.
//! `docs/decisions/0016-resizing-what-is-served.md` explains this, and lists other parts that know a size.
//!
//! Invariants: the file stays open and locked from the first step to the last, so no other process can open it in
//! between. Requests wait and do not fail. Completed writes are durable before the size changes, or the next flush of
//! their client fails. If the volume cannot be reopened, every request fails with the reason.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use sealblock_block::{Device, Request, ReservedArea, Response};
use sealblock_layers_cross_core::{Quiesced, SharedDevice};
use sealblock_media_file::FileMedium;
use sealblock_media_volume::ResizeError;
use sealblock_runtime_reactor::{now, sleep, timeout};
use sealblock_stack::target::TargetName;
use sealblock_stack::{
    Access, Cause, CloseLimit, Closer, FileVolume, OpenMirror, OpenTarget, StackError, TargetInfo, Usage,
    bars_resizing, device_error, open_again, resize_error, resize_volume, shards_keep_their_size,
};
use sealblock_units::{BlockSize, ByteCount};

use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind, RESIZING, ResizeReport};
use crate::devices::inspect::InspectedDevice;
use crate::devices::mirrors::answer;
use crate::devices::scrub::ScrubTask;
use crate::plan::NamespacePlan;
use crate::status::mirror::MirrorStatus;
use crate::status::server::DeviceSnapshot;

/// How long requests in flight may take to complete. No request starts meanwhile, so this is shorter than a host's I/O
/// timeout of 30 s or more.
const DRAIN: Duration = Duration::from_secs(10);
/// How long free physical blocks are deallocated beforehand, while requests continue; the rest is deallocated later.
const GIVING_BACK: Duration = Duration::from_secs(5);
/// How long a closed volume may take to release its file.
const LETTING_GO: Duration = Duration::from_secs(5);
/// How often that is checked.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A device on its own core, as long as it is served.
pub struct LocalDevice {
    target: TargetName,
    access: Access,
    usage: Usage,
    /// `None` if reopening failed.
    closer: RefCell<Option<Closer>>,
    /// Its scrub, which starts only after it has settings.
    pub scrub_task: Rc<ScrubTask>,
    /// The mirror, if it is one.
    pub mirror: Option<Rc<OpenMirror>>,
    /// Its state, except for what may be lost.
    inspected: InspectedDevice,
}

/// The result of a resize.
pub struct ResizeResult {
    /// The device with its new size, if it was reopened.
    pub device: Option<SharedDevice>,
    /// What was done, or the error if the resize failed.
    pub result: Result<ResizeReport, StackError>,
}

/// A volume that may be resized.
struct ResizableVolume {
    volume: Rc<FileVolume>,
    capacity_blocks: u64,
}

impl LocalDevice {
    /// A device that was opened for this plan and with this access, its parts, and its scrub.
    pub fn new(
        plan: &NamespacePlan,
        access: Access,
        info: &TargetInfo,
        closer: Closer,
        scrub_task: Rc<ScrubTask>,
    ) -> LocalDevice {
        LocalDevice {
            target: plan.target.clone(),
            access,
            usage: plan.usage,
            closer: RefCell::new(Some(closer)),
            inspected: InspectedDevice::new(&scrub_task, info),
            scrub_task,
            mirror: info.mirror.clone(),
        }
    }

    /// Executes a command for the replicas of a mirror; returns the new state of the mirror.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub async fn execute_mirror(&self, command: &ControlCommand) -> Result<MirrorStatus, ControlError> {
        match &self.mirror {
            Some(mirror) => answer(mirror, command).await,
            None => Err(ControlError::new(ControlErrorKind::Usage, format!("{} is not a mirror", self.target))),
        }
    }

    /// Its state.
    pub fn snapshot(&self) -> DeviceSnapshot {
        let seen = self.inspected.snapshot();
        let unflushed_lost = self.closer.borrow().as_ref().map_or_else(Vec::new, Closer::lost_answers);
        DeviceSnapshot { unflushed_lost, ..seen }
    }

    /// Makes sure that no later server tells its clients that unflushed data may be lost.
    ///
    /// # Errors
    /// If a medium fails.
    pub async fn forget_lost(&self) -> Result<(), StackError> {
        let forgetting = self.closer.borrow().as_ref().map(Closer::forget_lost);
        match forgetting {
            Some(forgetting) => forgetting.await,
            None => Ok(()),
        }
    }

    /// Ends the scrub, saves its state, and closes the device cleanly.
    ///
    /// # Errors
    /// As for [`Closer::close`].
    pub async fn close(&self, limit: CloseLimit) -> Result<(), StackError> {
        if limit.part(self.scrub_task.close()).await.is_none() {
            tracing::warn!("scrub of {}: it did not end in time, and its state was not saved", self.target);
        }
        if limit.part(self.scrub_task.shared().close_elsewhere()).await.is_none() {
            tracing::warn!("{}: requests on other cores did not end in time", self.target);
        }
        let closer = self.closer.take();
        match closer {
            Some(closer) => closer.close(limit).await,
            // The failure to reopen was reported, and it has been closed since then.
            None => Ok(()),
        }
    }

    /// Resizes the volume. `shared` is the device that hosts use.
    pub async fn resize(&self, shared: &SharedDevice, size: ByteCount) -> ResizeResult {
        let refused = |failure: StackError| ResizeResult { device: None, result: Err(failure.on(&self.target)) };
        let chosen = match self.choose(size) {
            Ok(chosen) => chosen,
            Err(failure) => return refused(failure),
        };
        let before = shared.geometry().capacity_bytes();
        if before == size.get() {
            return ResizeResult { device: None, result: Ok(self.report(before, before, Duration::ZERO)) };
        }
        if let Err(failure) = check_label(shared).await {
            return refused(failure);
        }
        let deadline = now() + GIVING_BACK;
        chosen.volume.give_space_back(|| now() < deadline).await;
        // The scrub saves its state in the device's reserved area, so it ends first.
        self.scrub_task.leave().await;
        let (quiesced, since) = match drained(shared).await {
            Ok(drained) => drained,
            Err(failure) => {
                self.resume(shared);
                return refused(failure);
            }
        };
        self.exchange(chosen, quiesced, (before, since)).await
    }

    /// The volume, if `size` is valid for it.
    fn choose(&self, size: ByteCount) -> Result<ResizableVolume, StackError> {
        let refuse = |cause, why: &str| StackError::new(cause, RESIZING, why);
        let closer = self.closer.borrow();
        let Some(closer) = &*closer else {
            return Err(
                refuse(Cause::Unreachable, "it could not be reopened after the resize").advise("restart the server")
            );
        };
        if closer.is_lone_volume_in_shards() {
            return Err(shards_keep_their_size(RESIZING));
        }
        let Some(volume) = closer.lone_volume() else {
            let why = "only a protected volume that is served directly can be resized while served";
            return Err(refuse(Cause::Unsuitable, why)
                .advise("for a mirror or stripe, create a new one of that size and use `sealblock copy`"));
        };
        if !self.access.writes() {
            return Err(refuse(Cause::Refused, "it is served read-only"));
        }
        if self.usage != Usage::Alone {
            return Err(refuse(
                Cause::Refused,
                "it is served as a member of a mirror or stripe, and would not match the other members",
            ));
        }
        let capacity_blocks = blocks_of(size.get(), volume.geometry().block_size)?;
        Ok(ResizableVolume { volume: Rc::clone(volume), capacity_blocks })
    }

    /// Closes, resizes and reopens the volume. The caller holds back all requests.
    async fn exchange(
        &self,
        chosen: ResizableVolume,
        quiesced: Quiesced,
        (before, since): (u64, Instant),
    ) -> ResizeResult {
        let ResizableVolume { volume, capacity_blocks } = chosen;
        // Requests get this reason only after an unexpected failure between here and the end.
        quiesced.set_unavailable("it was being resized".to_owned());
        self.scrub_task.release();
        if let Some(closer) = self.closer.take() {
            closer.save_damage().await;
        }
        let medium = Rc::clone(volume.medium().below());
        let closed = volume.close_for_a_moment().await.inspect_err(|error| quiesced.record_lost_writes(error));
        let let_go = let_go(volume).await;
        tracing::debug!("{}: closed {:?} after requests began to wait", self.target, now() - since);
        let done = match (closed.map_err(|error| device_error("closing it", &error)), let_go) {
            (Ok(()), Ok(())) => change(&medium, capacity_blocks).await,
            (Err(failure), Ok(())) => Err(failure),
            (_, Err(why)) => return self.lost(&quiesced, why),
        };
        tracing::debug!("{}: resized {:?} after requests began to wait", self.target, now() - since);
        let opened = match open_again(&self.target, medium, self.access).await {
            Ok(opened) => opened,
            Err(failure) => return self.lost(&quiesced, failure.to_string()),
        };
        let device = self.go_on(opened, quiesced);
        let (after, pause) = (device.geometry().capacity_bytes(), now().saturating_duration_since(since));
        let outcome = done.map(|()| self.report(before, after, pause)).map_err(|failure| failure.on(&self.target));
        ResizeResult { device: Some(device), result: outcome }
    }

    /// Resumes requests and the scrub with the reopened volume.
    fn go_on(&self, opened: OpenTarget, quiesced: Quiesced) -> SharedDevice {
        let (gate, info, closer) = opened.share();
        self.closer.replace(Some(closer));
        self.scrub_task.set_damage(info.damage);
        let device = quiesced.replace(gate.clone());
        drop(quiesced);
        self.scrub_task.reopen(gate);
        device
    }

    /// Makes every request fail with `why`, because the volume could not be reopened.
    fn lost(&self, quiesced: &Quiesced, why: String) -> ResizeResult {
        let why = format!("it could not be reopened after a failed resize: {why}");
        tracing::error!("{}: {why}", self.target);
        quiesced.set_unavailable(why.clone());
        self.scrub_task.lose();
        let failure = StackError::new(Cause::Io, RESIZING, why).on(&self.target).advise("restart the server");
        ResizeResult { device: None, result: Err(failure) }
    }

    /// Resumes the scrub with the unchanged device.
    fn resume(&self, shared: &SharedDevice) {
        match shared.gate() {
            Some(gate) => self.scrub_task.reopen(gate),
            None => self.scrub_task.lose(),
        }
    }

    fn report(&self, before_bytes: u64, size_bytes: u64, pause: Duration) -> ResizeReport {
        let pause_us = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
        ResizeReport { target: self.target.to_string(), before_bytes, size_bytes, pause_us: Some(pause_us) }
    }
}

/// The number of blocks of a size.
///
/// # Errors
/// If it is not a multiple of the block size, or is zero.
pub fn blocks_of(size_bytes: u64, block_size: BlockSize) -> Result<u64, StackError> {
    let blocks = size_bytes >> block_size.shift();
    if blocks == 0 || blocks << block_size.shift() != size_bytes {
        let why = format!("{size_bytes} bytes are not a multiple of the block size, {} bytes", block_size.bytes());
        return Err(StackError::new(Cause::Usage, RESIZING, why).advise("use a multiple of the block size"));
    }
    Ok(blocks)
}

/// Refuses a member of a group, because a host may have written a label since it was opened.
async fn check_label(shared: &SharedDevice) -> Result<(), StackError> {
    let label = shared.attach().execute(Request::read_reserved(ReservedArea::GroupLabel)).await;
    let label = label.map_err(|error| device_error("read the label", &error))?;
    if let Response::Reserved(label) = label
        && let Some(why) = Some(label).filter(|label| !label.is_empty()).and_then(|label| bars_resizing(&label))
    {
        return Err(resize_error(RESIZING, &ResizeError::Member(why)));
    }
    Ok(())
}

/// Holds back new requests and waits for those in flight. Returns also the time since which requests wait.
async fn drained(shared: &SharedDevice) -> Result<(Quiesced, Instant), StackError> {
    // A flush before the quiesce shortens the flush during which requests wait. It belongs to no client: an earlier
    // loss is no reason not to resize, and clients learn of it from their own flushes.
    let flushed = shared.attach().execute(Request::flush()).await;
    flushed.map_err(|error| device_error("flush before the resize", &error))?;
    let since = now();
    let busy = || StackError::new(Cause::Refused, RESIZING, "another resize is in progress");
    let quiesced = shared.quiesce().ok_or_else(busy)?;
    if timeout(DRAIN, quiesced.drained()).await.is_err() {
        let why = format!("{} requests in flight did not end within {} s", quiesced.in_flight(), DRAIN.as_secs());
        return Err(StackError::new(Cause::Io, RESIZING, why).advise("repeat it when the volume is less busy"));
    }
    Ok((quiesced, since))
}

/// Waits until the closed volume has no other owner, which means that its background work has ended.
async fn let_go(volume: Rc<FileVolume>) -> Result<(), String> {
    let since = now();
    while Rc::strong_count(&volume) > 1 {
        if now().saturating_duration_since(since) >= LETTING_GO {
            return Err("the closed volume still holds its file".to_owned());
        }
        sleep(DRAIN_POLL_INTERVAL).await;
    }
    Ok(())
}

/// Resizes the volume on a medium on which no volume is open.
async fn change(medium: &Rc<FileMedium>, capacity_blocks: u64) -> Result<(), StackError> {
    resize_volume(RESIZING, medium, capacity_blocks).await.map(drop)
}
