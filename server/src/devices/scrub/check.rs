//! Finds the bad blocks of a piece, and logs them.

use sealblock_block::{
    Ability, BadBlock, Device, DynDevice, Error, ErrorKind, Expectations, Outcome, Request, RequestKind, Response,
    Tally,
};
use sealblock_units::{Extent, Lba};

use crate::devices::bad_runs::{BadRun, blocks_text};

/// The bad blocks of the extent, repaired if the device can do that. A failing medium may not report which blocks fail,
/// so the extent is halved repeatedly, down to single blocks.
pub async fn check(gate: &DynDevice, extent: Extent, ask: impl AsyncFn(Request) -> Outcome) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    let mut parts = vec![extent];
    while let Some(part) = parts.pop() {
        let error = match ask(operation(gate, part)).await {
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
    tally.bad_blocks.sort_by_key(|bad| bad.lba);
    Ok(tally)
}

fn operation(gate: &DynDevice, extent: Extent) -> Request {
    match gate.abilities().of(RequestKind::Repair) {
        Ability::Native => Request::repair(extent),
        Ability::Emulated | Ability::Absent => Request::verify(extent, Expectations::NONE),
    }
}

/// Bad blocks, and whether they were repaired.
pub fn to_text(run: &BadRun) -> String {
    let fate = if run.repaired { "repaired" } else { "not repaired" };
    if run.is_made {
        return format!("{}: made unreadable by a host", blocks_text(run.first, run.last));
    }
    if run.first == run.last {
        let fault = BadBlock { repaired: false, lba: Lba::new(run.first), ..run.fault };
        return format!("{fault}, {fate}");
    }
    format!("blocks {} to {}: {}, {fate}", run.first, run.last, run.fault.cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::bad_runs::bad_runs;
    use sealblock_block::BadBlockCause;
    use sealblock_integrity::Field;

    fn fault(lba: u64, repaired: bool) -> BadBlock {
        BadBlock { repaired, ..BadBlock::new(Lba::new(lba), BadBlockCause::Tag(Field::Guard), Some(1), Some(2)) }
    }

    #[test]
    fn damage_is_told_with_its_blocks_and_what_became_of_them() {
        let told: Vec<_> =
            bad_runs(&[fault(3, false), fault(4, false), fault(9, true)], None).iter().map(to_text).collect();
        assert_eq!(told[0], "blocks 3 to 4: guard, not repaired");
        assert!(told[1].starts_with("block 9: guard") && told[1].ends_with("found 0x0002, repaired"), "{}", told[1]);
        let unreadable = bad_runs(&[BadBlock::media(Lba::new(1))], None)[0];
        assert!(to_text(&unreadable).ends_with("unreadable, not repaired"));
        assert!(to_text(&BadRun { is_made: true, ..unreadable }).ends_with("1: made unreadable by a host"));
    }
}
