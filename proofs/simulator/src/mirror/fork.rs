//! What happens when only legs are there that were left behind.
//!
//! Those that know it are refused. One that cannot know is let go on alone; then each side was written without the other,
//! and both together must be refused. A fork is an excursion: the trial goes on with the disks as they were before it.

use std::cell::RefCell;
use std::rc::Rc;

use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::judge::Refusal;
use sealblock_layers_mirror::label::Standing;

use super::legs::Leg;
use super::machine::Up;
use super::trial::{Plan, Trial};
use crate::checker::Checker;
use crate::disk::Image;
use crate::workload::{self, Workload};

impl Trial {
    /// A machine without any leg that has everything.
    pub fn fork(&mut self, present: Vec<bool>) -> Result<(), String> {
        if !self.legs.iter().all(Leg::is_settled) {
            return Ok(());
        }
        let images: Vec<Option<Image>> = self.legs.iter().map(|leg| leg.image.clone()).collect();
        let kept: Vec<_> = self.legs.iter().map(Leg::standing).collect();
        let settled = self.settled;
        let done = self.excursion(present);
        for ((leg, image), kept) in self.legs.iter_mut().zip(images).zip(kept) {
            leg.image = image;
            leg.restore(kept);
        }
        self.settled = settled;
        done
    }

    fn excursion(&mut self, present: Vec<bool>) -> Result<(), String> {
        let is_noted = |leg: &Leg| {
            leg.went_without && !leg.is_old && leg.is_noted_as(&self.legs, |standing| standing != Standing::Current)
        };
        let must_split =
            self.legs.iter().zip(&present).all(|(leg, present)| !present || !leg.is_in_use() || is_noted(leg));
        self.legs.iter_mut().for_each(|leg| leg.allowed = (0..1 << 12).collect());
        let (patterns, requests) = (self.checker.borrow().patterns(), self.checker.borrow().requests());
        let blank = || Rc::new(RefCell::new(Checker::after(patterns, requests)));
        let plan = Plan { checker: blank(), ..self.plan("a machine without what is current", present) };
        let came = self.machine(plan, move |up| async move { go_on_alone(&up).await })?;
        match came.refused {
            // They may not know of a leg that was added since.
            Some(MirrorError::Refused {
                refusal: Refusal::OnlyStale | Refusal::Stranger { .. } | Refusal::TakenOut { .. },
                ..
            }) => return Ok(()),
            Some(error) => return Err(format!("legs that were left behind: {error}")),
            None if came.answered_changes == 0 => return Ok(()),
            None => {}
        }
        let plan = Plan { checker: blank(), ..self.plan("a machine with both sides", self.everybody()) };
        let came = self.machine(plan, |_| async {})?;
        match came.refused {
            // One side may not know of a leg that the other has added, or that it was left behind by one that lacks something.
            Some(MirrorError::Refused {
                refusal:
                    Refusal::SplitBrain { .. } | Refusal::Stranger { .. } | Refusal::TakenOut { .. } | Refusal::OnlyStale,
                ..
            }) => Ok(()),
            Some(error) => Err(format!("two sides that were written alone: {error}")),
            None if must_split => Err("legs that were each written without the other were not refused".to_owned()),
            None => Ok(()),
        }
    }
}

/// Learns what is there, which must be content, and changes it.
async fn go_on_alone(up: &Up) {
    for piece in up.client.pieces(&up.random) {
        if up.client.learn(piece).await.is_err() {
            return;
        }
    }
    workload::drive(Workload::Hot, &up.client, &up.executor, &up.random).await;
    if up.random.chance(50) {
        up.close().await;
    }
}
