//! Resizes between two machines, done by a machine that does nothing else and that may be stopped in the middle.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_units::Extent;

use super::{Trial, audit};
use crate::disk::{Image, Survival};
use crate::machine::{MachineConfig, MachineEnd};
use crate::system::{Resizing, System, VolumeProfile};
use crate::workload::{GROUP_BLOCKS, Workload};

/// The maximum number of blocks that a resize adds.
const MOST_MORE: u64 = 2_000;
/// The approximate number of starts and ends of I/Os of a resize.
const LIKELY_BOUNDARIES: u64 = 160;
/// The minimum size of a device, in blocks.
const LEAST_BLOCKS: u64 = 4;

impl<S: System> Trial<'_, S> {
    /// Bytes of the disk: just enough, or with space left after the device.
    pub(super) fn disk_bytes(&self) -> u64 {
        let room = if self.keeps_length { MOST_MORE } else { 0 };
        let profile = VolumeProfile { capacity_blocks: self.profile.capacity_blocks + room, ..self.profile };
        self.system.disk_bytes(&self.profile).max(self.system.disk_bytes(&profile))
    }

    /// Resizes the device in some seeds, once or several times.
    pub(super) fn resize(&mut self, mut image: Image) -> Result<Image, String> {
        while self.system.resizes() && self.sizes.chance(50) {
            let from = self.system.capacity(&self.profile, &image);
            let to = self.draw_capacity(from);
            if to < from && self.sizes.chance(75) {
                image = self.vacate(image, to, from)?;
            }
            image = self.resize_once(image, from, to)?;
        }
        Ok(image)
    }

    fn draw_capacity(&self, from: u64) -> u64 {
        let sizes = &self.sizes;
        let is_long = from > self.profile.capacity_blocks * 2 + MOST_MORE;
        match sizes.below(7) {
            0 => from,
            1 | 2 if !is_long => from + sizes.between(1, 40),
            3 if !is_long => from + sizes.between(1, from.min(MOST_MORE)),
            _ if self.config.workload == Workload::Zones => sizes.between(GROUP_BLOCKS - 60, from.max(GROUP_BLOCKS)),
            // Often back to an earlier size: whole block groups disappear, and others get their numbers.
            4 | 5 => *sizes.pick(&self.capacities),
            _ => sizes.between(LEAST_BLOCKS.min(from), from),
        }
    }

    /// Discards the blocks from `to` on.
    fn vacate(&mut self, image: Image, to: u64, from: u64) -> Result<Image, String> {
        let (survival, is_durable) = (Survival::draw(&self.sizes), self.is_durable);
        let (machine, before) = (self.config(self.behaviour_by(&self.sizes, None), survival), self.sizes.fork("hosts"));
        let machine = MachineConfig { random: &before, ..machine };
        let result = machine.run_machine(image, false, move |up| async move {
            let Ok(extent) = Extent::from_raw(to, from - to) else { return };
            if audit(&up, is_durable).await.is_ok() && up.client.zeroes(extent, true, true).await.is_ok() {
                up.close().await;
            }
        });
        Ok(self.record_run(&format!("a machine that gives up blocks from {to} on"), survival, result)?.0)
    }

    fn resize_once(&mut self, image: Image, from: u64, to: u64) -> Result<Image, String> {
        let survival = Survival::draw(&self.sizes);
        let crash_at = self.sizes.chance(65).then(|| self.sizes.between(1, LIKELY_BOUNDARIES));
        let outcome = Rc::new(Cell::new(None));
        let draws = self.sizes.fork("resizing");
        let machine =
            MachineConfig { random: &draws, ..self.config(self.behaviour_by(&self.sizes, crash_at), survival) };
        let result = machine.resize(image, to, Rc::clone(&outcome));
        let mut undoable = std::mem::take(&mut self.undoable);
        let (image, end) =
            self.record_run(&format!("a change of size from {from} to {to} blocks"), survival, result)?;
        self.report.resizings += 1;
        self.capacities.push(to);
        let now = self.system.capacity(&self.profile, &image);
        let is_due = match outcome.get() {
            Some(Resizing::Done) => now == to,
            // Only blocks that were ever written can be in use.
            Some(Resizing::InUse) => {
                now == from && self.checker.borrow().touched().last().is_some_and(|last| last.get() >= to)
            }
            Some(Resizing::NoRoom) => now == from && to > from,
            None => end == MachineEnd::Crashed && (now == from || now == to || undoable.contains(&now)),
        };
        if !is_due {
            return Err(format!("a device of {now} blocks, resized from {from} to {to}: {:?}", outcome.get()));
        }
        // A completed resize has synced the content that it found and the content that it wrote.
        if !self.is_durable && outcome.get().is_none() {
            undoable.extend((now != from).then_some(from));
            self.undoable = undoable;
        }
        self.checker.borrow_mut().cut(now).map_err(|violation| violation.to_string())?;
        self.long_durable.retain(|lba| lba.get() < now);
        Ok(image)
    }
}
