//! Checks one piece, repairs it if the device can, and reports bad blocks.

use sealblock_block::{
    Ability, BadBlock, Coverage, Device, DynDevice, Error, ErrorKind, Gate, Request, RequestKind, Response, Tally,
};
use sealblock_integrity::Checks;
use sealblock_scrub::CheckResult;
use sealblock_units::{Extent, Lba};

use super::ScrubTask;
use crate::commands::serve::bad_runs::{BadRun, bad_runs};

/// Lines of damage that are logged in one run.
const MAX_LINES: u32 = 16;

impl ScrubTask {
    /// Checks a piece and reports to the scrub, the namespaces and the log.
    pub(super) async fn check(&self, extent: Extent) {
        let Some(gate) = self.gate.borrow().clone() else { return };
        let Tally { bad_blocks: mut faults, coverage } = match self.check_piece(&gate, extent).await {
            Ok(found) => found,
            Err(error) => return self.cannot_go_on(&error),
        };
        faults.sort_by_key(|fault| fault.lba);
        if let Some(trouble) = self.trouble.take() {
            tracing::warn!("scrub of {}: it goes on after {trouble}", self.target);
        }
        let harmed = bad_runs(&faults);
        let blocks = |of: &dyn Fn(&BadRun) -> bool| -> u64 {
            harmed.iter().filter(|run| of(run)).map(|run| run.last - run.first + 1).sum()
        };
        let found = CheckResult {
            bad_blocks: blocks(&|_| true),
            repaired: blocks(&|run| run.repaired),
            unchecked: coverage.blocks(),
        };
        if let Some(state) = self.state.upgrade() {
            // The damage list gets new bad blocks and drops those that are good again.
            state.report_check(gate.geometry(), extent, &faults, coverage.is_complete());
        }
        self.report_damage(&harmed);
        self.report_unchecked(&coverage);
        self.scrub.borrow_mut().checked(self.moment(), extent, found);
    }

    fn cannot_go_on(&self, error: &Error) {
        self.scrub.borrow_mut().failed(self.moment());
        if self.trouble.replace(Some(error.to_string())).is_none() {
            tracing::warn!("scrub of {}: suspended, tries again: {error}", self.target);
        }
    }

    /// The bad blocks of the extent. A failing medium may not name blocks, so halves are tried, down to single blocks.
    async fn check_piece(&self, gate: &Gate<DynDevice>, extent: Extent) -> Result<Tally, Error> {
        let mut tally = Tally::default();
        let mut parts = vec![extent];
        while let Some(part) = parts.pop() {
            let error = match self.ask(operation(gate, part)).await {
                Ok(Response::Verified(verified)) => {
                    tally.coverage.merge(verified.coverage);
                    continue;
                }
                Ok(_) => continue,
                Err(error) => error,
            };
            match (error.kind(), part.len()) {
                (ErrorKind::Integrity(_), _) => tally.take(error)?,
                (ErrorKind::Media { .. }, 1) => tally.bad_blocks.push(BadBlock::media(part.start())),
                (ErrorKind::Media { .. }, blocks) => {
                    let half = blocks / 2;
                    let halves = [(part.start().get(), half), (part.start().get() + half, blocks - half)];
                    parts.extend(halves.into_iter().rev().filter_map(|(at, len)| Extent::from_raw(at, len).ok()));
                }
                _ => return Err(error),
            }
        }
        Ok(tally)
    }

    /// Logs once in a run that not every copy can be checked, and why.
    fn report_unchecked(&self, coverage: &Coverage) {
        if let Some(first) = coverage.unchecked().first()
            && !self.told_unchecked.replace(true)
        {
            let (target, why) = (&self.target, first.why.to_text());
            tracing::warn!("scrub of {target}: it is incomplete, from block {} on: {why}", first.first);
        }
    }

    fn report_damage(&self, harmed: &[BadRun]) {
        for run in harmed {
            let told = self.told.get();
            self.told.set(told.saturating_add(1));
            let target = &self.target;
            match told {
                ..MAX_LINES => tracing::warn!("scrub of {target}: {}", to_text(run)),
                MAX_LINES => tracing::warn!(
                    "scrub of {target}: more blocks are bad; `sealblock scrub status` counts them, `sealblock verify` names them"
                ),
                _ => return,
            }
        }
    }
}

fn operation(gate: &Gate<DynDevice>, extent: Extent) -> Request {
    let format = gate.geometry().protection;
    let checks = format.map_or(Checks::NONE, |format| Checks::full(format, extent.start()));
    match gate.abilities().of(RequestKind::Repair) {
        Ability::Native => Request::repair(extent, checks),
        Ability::Emulated | Ability::Absent => Request::verify(extent, checks),
    }
}

fn to_text(run: &BadRun) -> String {
    let fate = if run.repaired { "repaired" } else { "not repaired" };
    if run.first == run.last {
        let fault = BadBlock { repaired: false, lba: Lba::new(run.first), ..run.fault };
        return format!("{fault}, {fate}");
    }
    format!("blocks {} to {}: {}, {fate}", run.first, run.last, run.fault.cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::BadBlockCause;
    use sealblock_integrity::Field;

    fn fault(lba: u64, repaired: bool) -> BadBlock {
        BadBlock { repaired, ..BadBlock::new(Lba::new(lba), BadBlockCause::Tag(Field::Guard), Some(1), Some(2)) }
    }

    #[test]
    fn damage_is_told_with_its_blocks_and_what_became_of_them() {
        let told: Vec<_> = bad_runs(&[fault(3, false), fault(4, false), fault(9, true)]).iter().map(to_text).collect();
        assert_eq!(told[0], "blocks 3 to 4: guard, not repaired");
        assert!(told[1].starts_with("block 9: guard") && told[1].ends_with("found 0x0002, repaired"), "{}", told[1]);
        assert!(to_text(&bad_runs(&[BadBlock::media(Lba::new(1))])[0]).ends_with("unreadable, not repaired"));
    }
}
