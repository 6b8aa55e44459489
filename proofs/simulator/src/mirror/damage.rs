//! Damage to the replicas of a mirror that was closed properly.

use std::collections::BTreeMap;

use sealblock_block::{Device, Request};
use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::label::assemble::AssembleError;
use sealblock_units::{Extent, Lba};

use super::machine::RunningMirror;
use super::quiesced::{holds, quiesce, quiesce_and_compare};
use super::replica::Replica;
use super::trial::{MachinePlan, Trial};
use crate::checker::{Checker, Content};
use crate::client::Stop;
use crate::damage::Damage;
use crate::system::label_copies;

impl Trial {
    /// Damages a block on one replica or on all, or corrupts any sector of one replica.
    pub fn damage(&mut self) -> Result<(), String> {
        let replicas: Vec<usize> = (0..self.replicas.len()).filter(|at| self.replicas[*at].is_in_use()).collect();
        if self.profile.protection.is_none() || !self.is_durable || !self.random.chance(60) {
            return Ok(());
        }
        self.replicas.iter_mut().for_each(Replica::allow_all);
        match self.random.below(6) {
            0 => self.damage_one(*self.random.pick(&replicas)),
            1 => self.damage_all(&replicas),
            2 => self.damage_beside(&replicas, *self.random.pick(&replicas)),
            3 | 4 => self.label_of_another(&replicas, *self.random.pick(&replicas)),
            _ => self.bit_rot(*self.random.pick(&replicas)),
        }
    }

    fn inflict(&mut self, replica: usize, candidates: &[Lba]) -> Option<Damage> {
        let image = self.replicas[replica].image.as_mut()?;
        Damage::inflict(image, &self.checker.borrow(), candidates, &self.random)
    }

    fn damage_one(&mut self, replica: usize) -> Result<(), String> {
        let touched = self.checker.borrow().touched();
        let Some(damage) = self.inflict(replica, &touched) else { return Ok(()) };
        self.log_lines.push(format!("block {} of replica {replica} is damaged", damage.lba));
        let plan =
            MachinePlan { is_damaged: true, ..self.plan("a machine with damage on one replica", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            let _ = check_repair(&running, damage.lba).await;
        })?;
        self.report.damages_found += 1;
        result.refused.map_or(Ok(()), |error| Err(format!("with a damaged block: {error}")))
    }

    fn damage_all(&mut self, replicas: &[usize]) -> Result<(), String> {
        let touched = self.checker.borrow().touched();
        let Some(damage) = self.inflict(replicas[0], &touched) else { return Ok(()) };
        let lba = damage.lba;
        for replica in &replicas[1..] {
            if self.inflict(*replica, &[lba]).is_none() {
                return Ok(());
            }
        }
        self.log_lines.push(format!("block {lba} is damaged on all replicas"));
        let plan = MachinePlan { is_damaged: true, ..self.plan("a machine with a lost block", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            for piece in running.client.pieces(&running.random) {
                if running.client.expect_loss(piece, lba).await.is_err() {
                    return;
                }
            }
            let extent = Extent::one(lba);
            if running.client.write(extent, true, &running.random).await.is_ok()
                && running.client.read(extent).await.is_ok()
            {
                let _ = quiesce_and_compare(&running).await;
            }
        })?;
        self.report.damages_found += 1;
        result.refused.map_or(Ok(()), |error| Err(format!("with a lost block: {error}")))
    }

    /// Damages a block on all replicas but one, which was offline while hosts wrote this block or another one, so that
    /// the resync meets the damage.
    fn damage_beside(&mut self, replicas: &[usize], away: usize) -> Result<(), String> {
        let mut present = self.all_present();
        present[away] = false;
        if !self.has_everything(&present) {
            return Ok(());
        }
        let before = ContentBefore::of(&self.checker.borrow());
        let plan = self.plan("a machine without one replica", present);
        let result = self.machine(plan, |running| async move { write_some(&running).await })?;
        let touched = self.checker.borrow().touched();
        let mut others = replicas.iter().copied().filter(|replica| *replica != away);
        let (None, true, Some(first)) = (result.refused, self.is_durable, others.next()) else { return Ok(()) };
        let Some(Damage { lba, .. }) = self.inflict(first, &touched) else { return Ok(()) };
        for replica in others {
            if self.inflict(replica, &[lba]).is_none() {
                return Ok(());
            }
        }
        let loss = LostBlock {
            lba,
            away,
            has_copy: before.is_readable(lba),
            is_proven: before.content.get(&lba).copied() == self.checker.borrow().certain(lba)
                && self.profile.protection.is_some_and(|format| format.guard().bits() >= 32),
        };
        self.log_lines.push(format!("block {lba} is damaged on all replicas but replica {away}: {loss:?}"));
        self.replicas.iter_mut().for_each(Replica::allow_all);
        let plan =
            MachinePlan { is_damaged: true, ..self.plan("a machine with damage beside a resync", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            let _ = beside(&running, &loss).await;
        })?;
        self.report.damages_found += 1;
        result.refused.map_or(Ok(()), |error| Err(format!("with damage beside a resync: {error}")))
    }

    /// Replaces copies of a replica's label by those of another replica's volume, of an earlier state, or of a blank
    /// volume. They must never decide content: every read is right, or the mirror is refused with a reason.
    fn label_of_another(&mut self, replicas: &[usize], replica: usize) -> Result<(), String> {
        let other = *self.random.pick(replicas);
        let (from, whose) = match self.random.below(3) {
            0 if other != replica => (self.replicas[other].image.clone(), format!("of replica {other}")),
            1 => (self.replicas[replica].older.clone(), "of an earlier time".to_owned()),
            _ => (Some(self.replicas[replica].blank().clone()), "of a blank volume".to_owned()),
        };
        let profile = self.replicas[replica].profile;
        let (Some(from), Some(image)) = (from, self.replicas[replica].image.as_mut()) else { return Ok(()) };
        let copies = label_copies(&profile, image);
        if copies != label_copies(&profile, &from) {
            // The volume was resized since, so its label is in another place.
            return Ok(());
        }
        let count = *self.random.pick(&[1, 2, 3, 4, 4]);
        let first = self.random.below(4) as usize;
        let chosen: Vec<_> = copies.into_iter().cycle().skip(first).take(count).collect();
        Damage::transplant(image, &chosen, &from);
        self.log_lines.push(format!("{count} copies of the label of replica {replica} are {whose}"));
        let plan =
            MachinePlan { is_damaged: true, ..self.plan("a machine with labels of another", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            for piece in running.client.pieces(&running.random) {
                if running.client.read(piece).await.is_err() {
                    return;
                }
            }
        })?;
        self.report.decays += 1;
        match result.refused {
            None | Some(MirrorError::Label { .. } | MirrorError::Replica { .. } | MirrorError::Assemble { .. }) => {
                Ok(())
            }
            Some(error) => Err(format!("with labels of another: {error}")),
        }
    }

    fn bit_rot(&mut self, replica: usize) -> Result<(), String> {
        let earlier = self.earlier(replica);
        let Some(image) = self.replicas[replica].image.as_mut() else { return Ok(()) };
        let Some(what) = Damage::bit_rot(image, &earlier, &self.random) else { return Ok(()) };
        self.log_lines.push(format!("on replica {replica}, {what}"));
        let plan =
            MachinePlan { is_damaged: true, ..self.plan("a machine with a decayed replica", self.all_present()) };
        let result = self.machine(plan, move |running| async move {
            for piece in running.client.pieces(&running.random) {
                if running.client.read(piece).await.is_err() {
                    return;
                }
            }
        })?;
        self.report.decays += 1;
        match result.refused {
            // The label is missing or unreadable.
            None | Some(MirrorError::Label { .. } | MirrorError::Replica { .. }) => Ok(()),
            Some(MirrorError::Assemble { error: AssembleError::NotAReplica { replica: at }, .. }) if at <= replica => {
                Ok(())
            }
            Some(error) => Err(format!("with a decayed replica: {error}")),
        }
    }
}

/// The certain contents of blocks before a replica went offline.
struct ContentBefore {
    content: BTreeMap<Lba, Content>,
}

impl ContentBefore {
    fn of(checker: &Checker) -> ContentBefore {
        let of = |lba: Lba| checker.certain(lba).map(|content| (lba, content));
        ContentBefore { content: checker.touched().into_iter().filter_map(of).collect() }
    }

    /// True if a block could certainly be read. That includes a block that was never written.
    fn is_readable(&self, lba: Lba) -> bool {
        self.content.get(&lba).is_some_and(|content| *content != Content::Unreadable)
    }
}

/// A block that all replicas have lost except one that was offline.
#[derive(Clone, Copy, Debug)]
struct LostBlock {
    lba: Lba,
    away: usize,
    /// True if the offline replica can read its copy, however old.
    has_copy: bool,
    /// True if that copy is current and the stored guards of the others prove it.
    is_proven: bool,
}

/// Changes some blocks and closes the mirror.
async fn write_some(running: &RunningMirror) {
    for _ in 0..running.random.between(1, 6) {
        let blocks = running.random.between(1, running.client.capacity_blocks().min(8));
        let first = running.random.below(running.client.capacity_blocks() - blocks + 1);
        let Ok(extent) = Extent::from_raw(first, blocks) else { return };
        if running.client.write(extent, running.random.chance(20), &running.random).await.is_err() {
            return;
        }
    }
    running.close().await;
}

/// Reads of the lost block return the right content or fail, at any time. Where reads fail, the replica that was
/// offline keeps its copy. A write of the block ends that.
async fn beside(running: &RunningMirror, loss: &LostBlock) -> Result<(), Stop> {
    let pieces = running.client.pieces(&running.random);
    let replaced_count = || running.harness.envs.borrow()[loss.away].replaced_count.get();
    let before = replaced_count();
    if running.random.chance(50) {
        for piece in &pieces {
            running.client.read_or_lose(*piece, loss.lba).await?;
        }
    }
    quiesce(running).await?;
    // Whoever makes the replica a new one gives its copy up.
    let is_kept = replaced_count() == before;
    for piece in pieces {
        match loss.is_proven && is_kept {
            true => running.client.read(piece).await?,
            false => {
                running.client.read_or_lose(piece, loss.lba).await?;
            }
        }
    }
    let one = Extent::one(loss.lba);
    if loss.has_copy && is_kept && !holds(running, loss.away, one).await {
        running
            .harness
            .find(format!("the last readable copy of block {}, on replica {}, is gone", loss.lba, loss.away));
        return Err(Stop);
    }
    running.client.write(one, true, &running.random).await?;
    quiesce_and_compare(running).await
}

/// Every read is as before. A repair reports the block and repairs it, unless a read already has.
async fn check_repair(running: &RunningMirror, lba: Lba) -> Result<(), Stop> {
    if running.random.chance(50) {
        for piece in running.client.pieces(&running.random) {
            running.client.read(piece).await?;
        }
    }
    let stack = running.client.stack();
    let extent = Extent::one(lba);
    if let Err(error) = stack.execute(Request::repair(extent)).await {
        let faults = error.bad_blocks().map_or_else(Vec::new, |faults| faults.as_slice().to_vec());
        if faults.len() != 1 || faults[0].lba != lba || !faults[0].repaired {
            running.harness.find(format!("the repair of damaged block {lba} said: {error}"));
            return Err(Stop);
        }
    }
    quiesce_and_compare(running).await
}
