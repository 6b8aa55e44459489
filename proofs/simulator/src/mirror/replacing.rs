//! Another device in the place of a leg, and what a stop at any start or end of an I/O leaves of that.
//!
//! Labels say both or neither: whoever names the new device in the place of the old one opens the mirror, and whoever names
//! the old one opens it or is refused. What is read is right.

use sealblock_layers_mirror::label::ReplicaState;

use super::events::replace;
use super::legs::Leg;
use super::making::settle_and_close;
use super::quiesced::settle;
use super::trial::{Plan, Trial, audit};
use crate::workload::{self, Workload};

/// Starts and ends of I/Os that a replacement is likely to take.
const LIKELY_BOUNDARIES: u64 = 400;

impl Trial {
    /// A machine in which a leg is replaced, if there is something to replace it with.
    pub fn replace(&mut self) -> Result<(), String> {
        let Some(new) = self.legs.iter().position(|leg| leg.is_spare) else { return Ok(()) };
        let old = self.random.below(self.legs.len() as u64) as usize;
        let mut present = self.everybody();
        present[old] = false;
        if self.legs.iter().any(|leg| leg.bare) || !self.legs[old].is_in_use() || !self.has_everything(&present) {
            return Ok(());
        }
        present[old] = self.random.chance(50);
        let cut = self.draw_cut(LIKELY_BOUNDARIES);
        let (settled, is_all, is_ordered) = (self.settled, present[old], self.order.crash_at.is_some());
        let plan = Plan { cut, ..self.plan("a machine in which a leg is replaced", present) };
        let came = self.machine(plan, move |up| async move {
            let site = up.world.sites.borrow()[old].clone();
            if !is_ordered && up.random.chance(30) && audit(&up, settled).await.is_err() {
                return;
            }
            replace(&up, &site).await;
            if is_ordered {
                return settle_and_close(&up).await.unwrap_or(());
            }
            if up.random.chance(30) {
                workload::drive(Workload::Hot, &up.client, &up.executor, &up.random).await;
            }
            if up.random.chance(50) && settle(&up).await.is_ok() && up.random.chance(60) {
                up.close().await;
            }
        })?;
        self.spend(cut, came.left, came.is_stopped);
        if let Some(error) = came.refused.filter(|error| !self.is_in_doubt(error) && (is_all || !Trial::is_left(error)))
        {
            return Err(format!("the mirror could not be opened: {error}"));
        }
        if came.is_stopped { self.name_both(old, new) } else { Ok(()) }
    }

    /// After a stop, somebody names the one and somebody the other.
    fn name_both(&mut self, old: usize, new: usize) -> Result<(), String> {
        self.probe("a machine with the new device", self.everybody(), true)?;
        if !self.legs[old].is_removed || !self.legs[new].is_member {
            return Ok(());
        }
        let flip = |legs: &mut [Leg], is_old: bool| {
            (legs[old].is_removed, legs[new].is_member) = (!is_old, !is_old);
        };
        flip(&mut self.legs, true);
        let done = self.probe_as_named(new);
        flip(&mut self.legs, false);
        done
    }

    fn probe_as_named(&mut self, unnamed: usize) -> Result<(), String> {
        // A device that is not named is left alone.
        let image = self.legs[unnamed].image.clone();
        let done = self.probe("a machine with the old device", self.everybody(), false);
        self.legs[unnamed].image = image;
        done
    }

    /// A device was being put in the place of a leg when the machine stopped: which of them is a leg depends on what was noted.
    pub fn decide_replacement(&mut self, new: usize, old: usize) {
        let others = self.legs.iter().enumerate().filter(|(at, leg)| *at != new && *at != old && leg.is_in_use());
        let labels: Vec<_> = others.filter(|(_, leg)| leg.calls_itself_current()).collect();
        let labels: Vec<_> = labels.into_iter().filter_map(|(_, leg)| leg.own_label()).collect();
        let is_labelled = self.legs[new].own_label().is_some();
        let is_out = self.legs[old].own_label().map_or(is_labelled, |own| {
            let id = own.replicas[own.own_index].id;
            labels.iter().any(|label| !label.replicas.iter().any(|member| member.id == id))
        });
        // The mirror did not know it by its name any more, so it was not asked.
        let is_left = self.legs[old].is_noted_as(&self.legs, |standing| standing != ReplicaState::InSync);
        self.legs[old].is_removed |= is_out;
        self.legs[old].is_current &= !is_out && !is_left;
        if is_out || is_labelled {
            // It may be named, with a label or without.
            self.legs[new].is_member = true;
            self.legs[new].allow_all();
        } else {
            self.legs[new].make_spare();
        }
    }
}
