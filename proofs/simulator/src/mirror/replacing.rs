//! Replacement of a replica by another device, with stops at any start or end of an I/O.
//!
//! Labels may list the replacement or not. An open that names the new device succeeds; one that names the old device
//! succeeds or is refused. Reads return the right content.

use sealblock_layers_mirror::label::ReplicaState;

use super::events::replace;
use super::making::quiesce_and_close;
use super::quiesced::quiesce_and_compare;
use super::replica::Replica;
use super::trial::{MachinePlan, Trial, audit};
use crate::workload::{self, Workload};

/// The usual number of starts and ends of I/Os during a replacement.
const LIKELY_BOUNDARIES: u64 = 400;

impl Trial {
    /// Runs a machine in which a replica is replaced, if there is a spare device.
    pub fn replace(&mut self) -> Result<(), String> {
        let Some(new) = self.replicas.iter().position(|replica| replica.is_spare) else { return Ok(()) };
        let old = self.random.below(self.replicas.len() as u64) as usize;
        let mut present = self.all_present();
        present[old] = false;
        if self.replicas.iter().any(|replica| replica.has_no_label)
            || !self.replicas[old].is_in_use()
            || !self.has_everything(&present)
        {
            return Ok(());
        }
        present[old] = self.random.chance(50);
        let cut = self.draw_cut(LIKELY_BOUNDARIES);
        let (is_durable, is_all, is_ordered) = (self.is_durable, present[old], self.config.crash_at.is_some());
        let plan = MachinePlan { cut, ..self.plan("a machine in which a replica is replaced", present) };
        let result = self.machine(plan, move |running| async move {
            let env = running.harness.envs.borrow()[old].clone();
            if !is_ordered && running.random.chance(30) && audit(&running, is_durable).await.is_err() {
                return;
            }
            replace(&running, &env).await;
            if is_ordered {
                return quiesce_and_close(&running).await.unwrap_or(());
            }
            if running.random.chance(30) {
                workload::drive(Workload::Hot, &running.client, &running.executor, &running.random).await;
            }
            if running.random.chance(50) && quiesce_and_compare(&running).await.is_ok() && running.random.chance(60) {
                running.close().await;
            }
        })?;
        self.record_cut(cut, result.left, result.is_stopped);
        if let Some(error) =
            result.refused.filter(|error| !self.is_in_doubt(error) && (is_all || !Trial::is_none_in_sync(error)))
        {
            return Err(format!("the mirror could not be opened: {error}"));
        }
        if result.is_stopped { self.name_both(old, new) } else { Ok(()) }
    }

    /// After a stop, tries opens that name the old device and opens that name the new one.
    fn name_both(&mut self, old: usize, new: usize) -> Result<(), String> {
        self.check_open("a machine with the new device", self.all_present(), true)?;
        if !self.replicas[old].is_removed || !self.replicas[new].is_member {
            return Ok(());
        }
        let flip = |replicas: &mut [Replica], is_old: bool| {
            (replicas[old].is_removed, replicas[new].is_member) = (!is_old, !is_old);
        };
        flip(&mut self.replicas, true);
        let done = self.probe_as_named(new);
        flip(&mut self.replicas, false);
        done
    }

    fn probe_as_named(&mut self, unnamed: usize) -> Result<(), String> {
        // An open must not change a device that it does not name.
        let image = self.replicas[unnamed].image.clone();
        let done = self.check_open("a machine with the old device", self.all_present(), false);
        self.replicas[unnamed].image = image;
        done
    }

    /// A replacement was in progress when the machine stopped, so the labels decide which device is a replica.
    pub fn decide_replacement(&mut self, new: usize, old: usize) {
        let others =
            self.replicas.iter().enumerate().filter(|(at, replica)| *at != new && *at != old && replica.is_in_use());
        let labels: Vec<_> = others.filter(|(_, replica)| replica.calls_itself_current()).collect();
        let labels: Vec<_> = labels.into_iter().filter_map(|(_, replica)| replica.own_label()).collect();
        let is_labelled = self.replicas[new].own_label().is_some();
        let is_out = self.replicas[old].own_label().map_or(is_labelled, |own| {
            let id = own.replicas[own.own_index].id;
            labels.iter().any(|label| !label.replicas.iter().any(|member| member.id == id))
        });
        // The mirror no longer had the old device's name, so it was not opened.
        let is_left = self.replicas[old].is_recorded_as(&self.replicas, |state| state != ReplicaState::InSync);
        self.replicas[old].is_removed |= is_out;
        self.replicas[old].is_current &= !is_out && !is_left;
        if is_out || is_labelled {
            // It may be named, whether or not it has a label.
            self.replicas[new].is_member = true;
            self.replicas[new].allow_all();
        } else {
            self.replicas[new].make_spare();
        }
    }
}
