//! Older images of replicas: they are restored, used alone, and then combined with the others.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::assemble::AssembleError;

use super::machine::RunningMirror;
use super::quiesced::quiesce_and_compare;
use super::replica::Replica;
use super::split_brain::go_on_alone;
use super::trial::{MachinePlan, Trial, audit};

/// A replica with an older image.
struct OlderImage {
    at: usize,
    before: u64,
    after: u64,
    image: crate::disk::Image,
}

impl Trial {
    /// Chooses an older image of a replica, since which at least two labels were written, while another replica has all
    /// data and a label that shows it.
    fn draw_older(&mut self) -> Option<OlderImage> {
        let at = self.random.below(self.replicas.len() as u64) as usize;
        let is_last = !self.replicas.iter().enumerate().any(|(other, replica)| other != at && replica.knows_in_sync());
        let replica = &self.replicas[at];
        if is_last || !replica.is_in_use() || replica.has_no_label || !replica.has_only_durable() {
            return None;
        }
        let (image, now) = (replica.older.clone()?, replica.image.as_ref()?);
        let events = |image| replica.label(image, &self.random).map_or(0, |label| label.events);
        let (before, after) = (events(&image), events(now));
        (before > 0 && before + 2 <= after).then_some(OlderImage { at, before, after, image })
    }

    fn put_back(&mut self, OlderImage { at, before, after, image }: OlderImage) {
        self.log_lines.push(format!("replica {at} is put back to what it was at label {before}; it had label {after}"));
        let replica = &mut self.replicas[at];
        (replica.is_current, replica.is_old, replica.image) = (false, true, Some(image));
        replica.older = None;
        replica.allow_all();
    }

    /// Restores an older image of a replica that is at least two labels old.
    pub fn swap_old(&mut self) {
        if self.random.chance(30)
            && let Some(older) = self.draw_older()
        {
            self.put_back(older);
        }
    }

    /// Uses an older image of a replica alone, and then combines it with the others. Content that only one side has is
    /// never dropped silently: both sides together are refused, and the others keep their content.
    pub fn go_on_from_old(&mut self) -> Result<(), String> {
        if self.replicas.iter().any(|replica| replica.has_no_label) {
            return Ok(());
        }
        let Some(older) = self.draw_older() else { return Ok(()) };
        self.isolated(|trial| {
            let (at, is_apart) = (older.at, trial.changes > trial.replicas[older.at].older_at);
            trial.put_back(older);
            trial.replicas.iter_mut().for_each(Replica::allow_all);
            if trial.random.chance(30) { trial.look_alone(at) } else { trial.go_on_from(at, is_apart) }
        })
    }

    fn alone(&self, at: usize) -> Vec<bool> {
        (0..self.replicas.len()).map(|replica| replica == at).collect()
    }

    /// Only opens the image. That changes no label in a way that excludes this replica or the others.
    fn look_alone(&mut self, at: usize) -> Result<(), String> {
        // The label of the in-sync replica, from before the image was restored, may not show that it is in sync; then
        // no label does.
        let is_known_in_sync =
            self.replicas.iter().enumerate().any(|(replica, of)| replica != at && of.knows_in_sync());
        let plan = MachinePlan {
            checker: self.blank_checker(),
            ..self.plan("a machine with an older image alone", self.alone(at))
        };
        let result = self.machine(plan, |running| async move {
            running.executor.delay(std::time::Duration::from_millis(running.random.below(30))).await;
            if running.random.chance(50) {
                running.close().await;
            }
        })?;
        if result.refused.is_some() {
            return Ok(());
        }
        let (is_durable, checker) = (self.is_durable, Rc::new(RefCell::new(self.checker.borrow().clone())));
        let plan =
            MachinePlan { checker, ..self.plan("a machine with all after one was looked at", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            if audit(&running, is_durable).await.is_ok() {
                let _ = quiesce_and_compare(&running).await;
            }
        })?;
        match result.refused.filter(|error| !self.is_in_doubt(error)) {
            None => Ok(()),
            Some(MirrorError::Assemble { error: AssembleError::NoneInSync, .. }) if !is_known_in_sync => Ok(()),
            Some(error) => Err(format!("with an older image that was only looked at: {error}")),
        }
    }

    /// Writes to the image alone. `is_apart` is whether a change completed since the image was taken.
    fn go_on_from(&mut self, at: usize, is_apart: bool) -> Result<(), String> {
        let others: Vec<bool> =
            self.replicas.iter().enumerate().map(|(replica, of)| replica != at && of.knows_in_sync()).collect();
        let stops = self.random.chance(40);
        let plan = MachinePlan {
            stops,
            checker: self.blank_checker(),
            ..self.plan("a machine with an older image alone", self.alone(at))
        };
        let result = self.machine(plan, |running| async move { go_on_from_image(&running).await })?;
        match result.refused {
            Some(MirrorError::Assemble {
                error: AssembleError::NoneInSync | AssembleError::NotAReplica { .. } | AssembleError::Removed { .. },
                ..
            }) => return Ok(()),
            Some(error) => return Err(format!("an older image alone: {error}")),
            None => {}
        }
        if !is_apart {
            // The others may have been reattached, and then have the current content.
            return Ok(());
        }
        if result.completed_changes > 0
            && !self.are_refused("a machine with an older image that went on, and all others")?
        {
            return Err("an older image that went on alone and the others were not refused".to_owned());
        }
        self.check_open("a machine with those who have everything", others, true)
    }
}

/// Uses an older image; sometimes the others return meanwhile.
async fn go_on_from_image(running: &RunningMirror) {
    if running.random.chance(40) {
        let envs = running.in_use();
        let (executor, delay) = (running.executor.clone(), running.random.below(20_000));
        drop(running.executor.spawn("release", async move {
            executor.delay(std::time::Duration::from_micros(delay)).await;
            envs.iter().for_each(|env| env.held.set(false));
        }));
    }
    go_on_alone(running).await;
}
