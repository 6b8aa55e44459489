//! Older images of legs: put back, and going on alone before all come together again.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::assemble::AssembleError;

use super::legs::Leg;
use super::machine::Up;
use super::quiesced::settle;
use super::split_brain::go_on_alone;
use super::trial::{Plan, Trial, audit};

/// A leg with another image than it has.
struct Older {
    at: usize,
    before: u64,
    after: u64,
    image: crate::disk::Image,
}

impl Trial {
    /// A leg of which there is an older image, since which at least two labels were written, while another one has everything
    /// and says so.
    fn draw_older(&mut self) -> Option<Older> {
        let at = self.random.below(self.legs.len() as u64) as usize;
        let is_last = !self.legs.iter().enumerate().any(|(other, leg)| other != at && leg.speaks());
        let leg = &self.legs[at];
        if is_last || !leg.is_in_use() || leg.bare || !leg.is_settled() {
            return None;
        }
        let (image, now) = (leg.older.clone()?, leg.image.as_ref()?);
        let generation = |image| leg.label(image, &self.random).map_or(0, |label| label.events);
        let (before, after) = (generation(&image), generation(now));
        (before > 0 && before + 2 <= after).then_some(Older { at, before, after, image })
    }

    fn put_back(&mut self, Older { at, before, after, image }: Older) {
        self.story.push(format!("leg {at} is put back to what it was at label {before}; it had label {after}"));
        let leg = &mut self.legs[at];
        (leg.is_current, leg.is_old, leg.image) = (false, true, Some(image));
        leg.older = None;
        leg.allow_all();
    }

    /// Puts an older image in the place of a leg, where at least two labels were written since.
    pub fn swap_old(&mut self) {
        if self.random.chance(30)
            && let Some(older) = self.draw_older()
        {
            self.put_back(older);
        }
    }

    /// An older image of a leg is used alone, and then all come together. What only the one or the others have is never given up
    /// without a word: they are refused, and the others have what they had.
    pub fn go_on_from_old(&mut self) -> Result<(), String> {
        if self.legs.iter().any(|leg| leg.bare) {
            return Ok(());
        }
        let Some(older) = self.draw_older() else { return Ok(()) };
        self.aside(|trial| {
            let (at, is_apart) = (older.at, trial.changes > trial.legs[older.at].older_at);
            trial.put_back(older);
            trial.legs.iter_mut().for_each(Leg::allow_all);
            if trial.random.chance(30) { trial.look_alone(at) } else { trial.go_on_from(at, is_apart) }
        })
    }

    fn alone(&self, at: usize) -> Vec<bool> {
        (0..self.legs.len()).map(|leg| leg == at).collect()
    }

    /// The image is only opened: that leaves nothing that speaks against it or the others.
    fn look_alone(&mut self, at: usize) -> Result<(), String> {
        // Who has everything may not have been told so before the image was put back, and then nobody can tell.
        let somebody_speaks = self.legs.iter().enumerate().any(|(leg, of)| leg != at && of.speaks());
        let plan =
            Plan { checker: self.blank_checker(), ..self.plan("a machine with an older image alone", self.alone(at)) };
        let came = self.machine(plan, |up| async move {
            up.executor.delay(std::time::Duration::from_millis(up.random.below(30))).await;
            if up.random.chance(50) {
                up.close().await;
            }
        })?;
        if came.refused.is_some() {
            return Ok(());
        }
        let (settled, checker) = (self.settled, Rc::new(RefCell::new(self.checker.borrow().clone())));
        let plan = Plan { checker, ..self.plan("a machine with all after one was looked at", self.everybody()) };
        let came = self.machine(plan, move |up| async move {
            if audit(&up, settled).await.is_ok() {
                let _ = settle(&up).await;
            }
        })?;
        match came.refused.filter(|error| !self.is_in_doubt(error)) {
            None => Ok(()),
            Some(MirrorError::Assemble { error: AssembleError::NoneInSync, .. }) if !somebody_speaks => Ok(()),
            Some(error) => Err(format!("with an older image that was only looked at: {error}")),
        }
    }

    /// The image is written alone. `is_apart` is whether something was answered since it was taken.
    fn go_on_from(&mut self, at: usize, is_apart: bool) -> Result<(), String> {
        let others: Vec<bool> = self.legs.iter().enumerate().map(|(leg, of)| leg != at && of.speaks()).collect();
        let stops = self.random.chance(40);
        let plan = Plan {
            stops,
            checker: self.blank_checker(),
            ..self.plan("a machine with an older image alone", self.alone(at))
        };
        let came = self.machine(plan, |up| async move { go_on_from_image(&up).await })?;
        match came.refused {
            Some(MirrorError::Assemble {
                error: AssembleError::NoneInSync | AssembleError::NotAReplica { .. } | AssembleError::Removed { .. },
                ..
            }) => return Ok(()),
            Some(error) => return Err(format!("an older image alone: {error}")),
            None => {}
        }
        if !is_apart {
            // The others may have been taken back, and have what is there now.
            return Ok(());
        }
        if came.answered_changes > 0
            && !self.are_refused("a machine with an older image that went on, and all others")?
        {
            return Err("an older image that went on alone and the others were not refused".to_owned());
        }
        self.probe("a machine with those who have everything", others, true)
    }
}

/// Uses an older image, and perhaps has the others come back meanwhile.
async fn go_on_from_image(up: &Up) {
    if up.random.chance(40) {
        let sites = up.in_use();
        let (executor, delay) = (up.executor.clone(), up.random.below(20_000));
        drop(up.executor.spawn("release", async move {
            executor.delay(std::time::Duration::from_micros(delay)).await;
            sites.iter().for_each(|site| site.held.set(false));
        }));
    }
    go_on_alone(up).await;
}
