//! An open target: its device, what it is made of, and its clean close.

pub(crate) mod closing;
pub(crate) mod connections;
pub(crate) mod damage_view;
pub(crate) mod held;
pub(crate) mod info;
pub(crate) mod lost_metadata;
pub(crate) mod out_of_sync;
pub(crate) mod own_label;
pub(crate) mod recorded;
pub(crate) mod same_remote;
pub(crate) mod shards;
pub(crate) mod target_identity;

use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Device, DynDevice, Error, Expectations, MemberPath, Outcome, Request, Response, WhyOlder};
use sealblock_units::Extent;

use crate::error::{CLOSE, Cause, StackError};
use crate::failures::device_error;
use crate::opened::closing::CloseLimit;
use crate::opened::damage_view::DamageView;
use crate::opened::held::{
    Access, CloseHandle, Usage, close_all, forget_lost, lost_answers, received_bytes, save_damage,
};
use crate::opened::info::{DriveInfo, TargetInfo};
use crate::opened::recorded::Recorded;
use crate::opened::shards::{FileVolume, ShardedVolume};
use crate::range::{BlockRange, BlockSpan};
use crate::target::TargetName;

/// Opens a target for a certain use: what groups open and reopen their members by.
pub(crate) type Opener = fn(&TargetName, Access, Usage) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>>;

/// An open target.
pub struct OpenTarget {
    /// The device.
    pub device: DynDevice,
    /// What it is made of.
    pub info: TargetInfo,
    pub(crate) held: Vec<CloseHandle>,
    pub(crate) target: TargetName,
    /// True if the device has only some blocks of the one below it.
    pub(crate) is_part: bool,
}

impl OpenTarget {
    pub(crate) fn new(
        target: &TargetName,
        device: impl Device + 'static,
        info: TargetInfo,
        held: Vec<CloseHandle>,
    ) -> OpenTarget {
        OpenTarget::of(target, DynDevice::new(target.to_string(), device), info, held)
    }

    /// The same for a device that is behind its gate already.
    pub(crate) fn of(target: &TargetName, device: DynDevice, info: TargetInfo, held: Vec<CloseHandle>) -> OpenTarget {
        OpenTarget { device, info, held, target: target.clone(), is_part: false }
    }

    /// A device at the bottom of a stack, whose list of bad blocks is in memory only, and why.
    pub(crate) fn leaf(
        target: &TargetName,
        device: impl Device + 'static,
        info: TargetInfo,
        held: Vec<CloseHandle>,
        not_saved: &'static str,
    ) -> OpenTarget {
        let device = Recorded::in_memory(device);
        let damage = DamageView::leaf(&target.to_string(), device.record(), Some(not_saved));
        OpenTarget::new(target, device, TargetInfo { damage, ..info }, held)
    }

    /// The same, of a device that every core can open: `open` opens it there.
    pub(crate) fn leaf_on_every_core<D: Device + 'static>(
        target: &TargetName,
        device: D,
        open: impl Fn() -> Result<D, Error> + Send + Sync + 'static,
        info: TargetInfo,
        not_saved: &'static str,
    ) -> OpenTarget {
        let device = Recorded::in_memory(device);
        let (name, record) = (target.to_string(), Arc::clone(device.record()));
        let damage = DamageView::leaf(&name, &record, Some(not_saved));
        let device = DynDevice::new(&*name, device).on_every_core(move || {
            let device = Recorded::sharing(open()?, Arc::clone(&record));
            Ok(DynDevice::new(&*name, device))
        });
        OpenTarget::of(target, device, TargetInfo { damage, ..info }, Vec::new())
    }

    /// A device of another host, whose server keeps the list, and why it does not say what is on it.
    pub(crate) fn remote(
        target: &TargetName,
        device: impl Device + 'static,
        info: TargetInfo,
        held: Vec<CloseHandle>,
        why_not: &'static str,
    ) -> OpenTarget {
        const AT_SERVER: &str = "its server keeps one";
        let device = Recorded::in_memory(device);
        let damage = DamageView::remote(&target.to_string(), device.record(), AT_SERVER, why_not);
        OpenTarget::new(target, device, TargetInfo { damage, ..info }, held)
    }

    /// Queries the servers of remote devices for known bad blocks, without reading data. For commands that show the current state: this
    /// host gets no notice of later repairs there.
    pub fn learn_damage(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            for info in self.info.all() {
                let Some(namespace) = &info.namespace else { continue };
                if let Some(known) = namespace.known_damage().await {
                    info.damage.take_over(&known.runs, known.is_complete, known.is_list_lost);
                }
            }
        })
    }

    /// A volume, whose list of bad blocks is kept on it.
    pub(crate) async fn volume(target: &TargetName, volume: Rc<FileVolume>, info: TargetInfo) -> OpenTarget {
        let uuid = info.volume.as_ref().map_or([0; 16], |volume| volume.uuid);
        let name = target.to_string();
        let is_lost = || info.volume.as_ref().is_some_and(|volume| volume.lost_copies.is_scrub_state_lost());
        let device = Recorded::kept(Rc::clone(&volume), &name, uuid, &is_lost).await;
        let not_saved = if device.is_kept() { None } else { Some("its content cannot be read") };
        let damage = DamageView::leaf(&name, device.record(), not_saved);
        let held = vec![CloseHandle::Damage(device.clone()), CloseHandle::Volume(volume)];
        OpenTarget::new(target, device, TargetInfo { damage, ..info }, held)
    }

    /// A volume in shards, whose list of bad blocks is kept on it. `open` opens it on other cores.
    pub(crate) async fn shards<D: Device + 'static>(
        target: &TargetName,
        device: D,
        open: Option<Arc<dyn Fn() -> Result<D, Error> + Send + Sync>>,
        volume: Rc<ShardedVolume>,
        info: TargetInfo,
    ) -> OpenTarget {
        let uuid = info.volume.as_ref().map_or([0; 16], |volume| volume.uuid);
        let name = target.to_string();
        let is_lost = || info.volume.as_ref().is_some_and(|volume| volume.lost_copies.is_scrub_state_lost());
        let recorded = Recorded::kept(device, &name, uuid, &is_lost).await;
        let not_saved = if recorded.is_kept() { None } else { Some("its content cannot be read") };
        let damage = DamageView::leaf(&name, recorded.record(), not_saved);
        let held = vec![CloseHandle::Damage(recorded.clone()), CloseHandle::Shards(volume)];
        let (record, wake) = (Arc::clone(recorded.record()), recorded.save_wake());
        let device = DynDevice::new(&*name, recorded);
        let device = match open {
            None => device,
            Some(open) => device.on_every_core(move || {
                let device = Recorded::saved_elsewhere(open()?, Arc::clone(&record), wake.clone());
                Ok(DynDevice::new(&*name, device))
            }),
        };
        OpenTarget::of(target, device, TargetInfo { damage, ..info }, held)
    }

    /// Splits it into its device, its parts, and what closes it cleanly.
    pub fn share(self) -> (DynDevice, TargetInfo, Closer) {
        (self.device, self.info, Closer { held: self.held, target: self.target })
    }

    /// Bytes of payload received from other hosts until now; `None` for a local target.
    pub fn received_bytes(&self) -> Option<u64> {
        received_bytes(&self.held)
    }

    /// True if it is a part of a device. A slice from the first block to the last one is none.
    pub fn is_part(&self) -> bool {
        self.is_part
    }

    /// The name it was opened by.
    pub fn target(&self) -> &TargetName {
        &self.target
    }

    /// Why blocks of it may be older than what was written, if they may.
    pub fn why_older(&self) -> Option<WhyOlder> {
        self.device.abilities().freshness.why_older()
    }

    /// The same as text, which a command that accepts it must print.
    pub fn older_text(&self) -> Option<String> {
        let why = self.why_older()?;
        Some(format!("{}: blocks may be older than what was written: {why}", self.target))
    }

    /// Of which volumes changes that were answered and not flushed may be lost, of which their hosts have not been told yet, and why, as
    /// text.
    pub fn lost_answers(&self) -> Vec<String> {
        lost_answers(&self.held)
    }

    /// Has nothing say that any more: hosts are not told.
    ///
    /// # Errors
    /// When a medium fails. Then it may be said again.
    pub async fn forget_lost(&self) -> Result<(), StackError> {
        forget_lost(&self.held).await.map_err(|error| device_error("clear lost writes", &error).on(&self.target))
    }

    /// What its members are called.
    pub fn member_names(&self) -> MemberNames {
        let of_drives = |info: &&TargetInfo| matches!(info.drive, Some(DriveInfo::Mapped { .. }));
        let mapped = self.info.all().into_iter().find(of_drives).filter(|_| !self.info.is_group());
        let drives = match mapped.and_then(|info| info.drive.as_ref()) {
            Some(DriveInfo::Mapped { drives }) => drives.clone(),
            _ => Vec::new(),
        };
        MemberNames { target: self.target.clone(), drives }
    }

    /// Closes volumes cleanly; returns `result`, or the failure to close after a success.
    pub async fn close<T>(self, result: Result<T, StackError>) -> Result<T, StackError> {
        let closed = Closer { held: self.held, target: self.target }.close(CloseLimit::OF_PROGRAM).await;
        let value = result?;
        closed?;
        Ok(value)
    }

    /// Works with the target, then closes it as [`OpenTarget::close`] does.
    pub async fn close_after<T>(
        self,
        work: impl AsyncFnOnce(&OpenTarget) -> Result<T, StackError>,
    ) -> Result<T, StackError> {
        let result = work(&self).await;
        self.close(result).await
    }

    /// Refuses a target of less than one block.
    pub fn check_blocks(&self, doing: &str) -> Result<(), StackError> {
        let geometry = self.device.geometry();
        if geometry.capacity_blocks > 0 {
            return Ok(());
        }
        let why = format!("it is smaller than one block of {} bytes", geometry.block_size);
        Err(StackError::new(Cause::Unsuitable, doing, why).on(&self.target))
    }

    /// The blocks of a range; all of them without one.
    pub fn span(&self, range: Option<BlockRange>) -> Result<BlockSpan, StackError> {
        const ACTION: &str = "use the range on";
        self.check_blocks(ACTION)?;
        let span = range.unwrap_or(BlockRange::ALL).resolve(self.device.geometry().capacity_blocks);
        span.map_err(|why| StackError::new(Cause::Usage, ACTION, why).on(&self.target))
    }

    /// Reads blocks.
    pub async fn read(&self, extent: Extent) -> Outcome {
        self.device.execute(Request::read(extent, Expectations::NONE)).await
    }

    /// Makes all completed writes durable.
    pub async fn flush(&self) -> Result<(), StackError> {
        self.device.execute(Request::flush()).await.map(drop).map_err(|error| device_error("flush", &error))
    }
}

/// What members of an open target are called: those of a group by their targets, drives under a device by their paths.
#[derive(Clone, Debug)]
pub struct MemberNames {
    target: TargetName,
    drives: Vec<String>,
}

impl MemberNames {
    /// The name of a member, if there is such a one.
    pub fn of(&self, member: MemberPath) -> Option<String> {
        let drive = || self.drives.get(member.outermost()?.0).cloned();
        self.target.member(member).map(TargetName::to_string).or_else(drive)
    }
}

/// Closes an open target after its last use.
pub struct Closer {
    held: Vec<CloseHandle>,
    target: TargetName,
}

impl Closer {
    /// The volume, if the target is a single volume and has nothing else to close.
    pub fn lone_volume(&self) -> Option<&Rc<FileVolume>> {
        match (&self.target, &self.held[..]) {
            (TargetName::File(_) | TargetName::Linux { .. }, [CloseHandle::Damage(_), CloseHandle::Volume(volume)]) => {
                Some(volume)
            }
            _ => None,
        }
    }

    /// True if the target is a single volume in shards.
    pub fn is_lone_volume_in_shards(&self) -> bool {
        matches!(&self.held[..], [CloseHandle::Damage(_), CloseHandle::Shards(_)])
    }

    /// Saves what is known of bad blocks on the devices that they are on. A failure is logged.
    pub async fn save_damage(&self) {
        save_damage(&self.held).await;
    }

    /// As [`OpenTarget::lost_answers`].
    pub fn lost_answers(&self) -> Vec<String> {
        lost_answers(&self.held)
    }

    /// As [`OpenTarget::forget_lost`]. What was opened in its place meanwhile is not this one's.
    pub fn forget_lost(&self) -> LocalBoxFuture<'static, Result<(), StackError>> {
        let (held, target) = (self.held.clone(), self.target.clone());
        Box::pin(async move {
            let forgotten = forget_lost(&held).await;
            forgotten.map_err(|error| device_error("clear lost writes", &error).on(&target))
        })
    }

    /// Closes volumes cleanly. Later requests to the device fail.
    ///
    /// # Errors
    /// The first device that could not be closed, or not in time; the others are closed all the same.
    pub async fn close(&self, limit: CloseLimit) -> Result<(), StackError> {
        close_all(&self.held, limit).await.map_err(|error| device_error(CLOSE, &error).on(&self.target))
    }
}

/// The data of a read.
pub fn data_of(answer: Response) -> sealblock_runtime_memory::Slice {
    match answer {
        Response::Data(sealed) => sealed.joined_data(),
        _ => unreachable!("a gate completes a read with data"),
    }
}
