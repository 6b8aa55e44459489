//! Damage to the legs of a mirror that was closed in good order.

use sealblock_block::{Device, Operation};
use sealblock_integrity::Checks;
use sealblock_layers_mirror::MirrorError;
use sealblock_layers_mirror::judge::Refusal;
use sealblock_units::{Extent, Lba};

use super::machine::Up;
use super::rest::settle;
use super::trial::{Plan, Trial};
use crate::client::Stop;
use crate::damage::Damage;

impl Trial {
    /// A block damaged on one leg or on all, or any sector of one leg spoilt.
    pub fn damage(&mut self) -> Result<(), String> {
        let legs: Vec<usize> = (0..self.legs.len()).filter(|at| self.legs[*at].is_in_use()).collect();
        if self.shape.protection.is_none() || !self.settled || !self.random.chance(60) {
            return Ok(());
        }
        self.legs.iter_mut().for_each(|leg| leg.allowed = (0..1 << 12).collect());
        match self.random.below(3) {
            0 => self.damage_one(*self.random.pick(&legs)),
            1 => self.damage_all(&legs),
            _ => self.decay(*self.random.pick(&legs)),
        }
    }

    fn inflict(&mut self, leg: usize, candidates: &[Lba]) -> Option<Damage> {
        let image = self.legs[leg].image.as_mut()?;
        Damage::inflict(image, &self.checker.borrow(), candidates, &self.random)
    }

    fn damage_one(&mut self, leg: usize) -> Result<(), String> {
        let touched = self.checker.borrow().touched();
        let Some(damage) = self.inflict(leg, &touched) else { return Ok(()) };
        self.story.push(format!("block {} of leg {leg} is damaged", damage.lba));
        let plan = Plan { is_damaged: true, ..self.plan("a machine with damage on one leg", self.everybody()) };
        let came = self.machine(plan, move |up| async move {
            let _ = heal(&up, damage.lba).await;
        })?;
        self.report.damages_found += 1;
        came.refused.map_or(Ok(()), |error| Err(format!("with a damaged block: {error}")))
    }

    fn damage_all(&mut self, legs: &[usize]) -> Result<(), String> {
        let touched = self.checker.borrow().touched();
        let Some(damage) = self.inflict(legs[0], &touched) else { return Ok(()) };
        let lba = damage.lba;
        for leg in &legs[1..] {
            if self.inflict(*leg, &[lba]).is_none() {
                return Ok(());
            }
        }
        self.story.push(format!("block {lba} is damaged on all legs"));
        let plan = Plan { is_damaged: true, ..self.plan("a machine with a lost block", self.everybody()) };
        let came = self.machine(plan, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.expect_loss(piece, lba).await.is_err() {
                    return;
                }
            }
            let extent = Extent::one(lba);
            if up.client.write(extent, true, &up.random).await.is_ok() && up.client.read(extent).await.is_ok() {
                let _ = settle(&up).await;
            }
        })?;
        self.report.damages_found += 1;
        came.refused.map_or(Ok(()), |error| Err(format!("with a lost block: {error}")))
    }

    fn decay(&mut self, leg: usize) -> Result<(), String> {
        let earlier = self.earlier(leg);
        let Some(image) = self.legs[leg].image.as_mut() else { return Ok(()) };
        let Some(what) = Damage::decay(image, &earlier, &self.random) else { return Ok(()) };
        self.story.push(format!("on leg {leg}, {what}"));
        let plan = Plan { is_damaged: true, ..self.plan("a machine with a decayed leg", self.everybody()) };
        let came = self.machine(plan, move |up| async move {
            for piece in up.client.pieces(&up.random) {
                if up.client.read(piece).await.is_err() {
                    return;
                }
            }
        })?;
        self.report.decays += 1;
        match came.refused {
            // Its label is gone, or cannot be read.
            None | Some(MirrorError::Label { .. } | MirrorError::Leg { .. }) => Ok(()),
            Some(MirrorError::Refused { refusal: Refusal::Stranger { leg: at }, .. }) if at <= leg => Ok(()),
            Some(error) => Err(format!("with a decayed leg: {error}")),
        }
    }
}

/// Everything is read as it was; a repair names the block, and mends it unless a read has.
async fn heal(up: &Up, lba: Lba) -> Result<(), Stop> {
    if up.random.chance(50) {
        for piece in up.client.pieces(&up.random) {
            up.client.read(piece).await?;
        }
    }
    let stack = up.client.stack();
    let extent = Extent::one(lba);
    let checks = stack.geometry().protection.map_or(Checks::NONE, |format| Checks::full(format, lba));
    if let Err(error) = stack.execute(Operation::Repair { extent, checks }).await {
        let faults = error.faults().map_or_else(Vec::new, |faults| faults.as_slice().to_vec());
        if faults.len() != 1 || faults[0].lba != lba || !faults[0].repaired {
            up.world.find(format!("the repair of damaged block {lba} said: {error}"));
            return Err(Stop);
        }
    }
    settle(up).await
}
