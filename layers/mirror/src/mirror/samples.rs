//! Samples of a device without room for a label, compared with a replica that has one: whether it can be the replica
//! whose name it has.
//!
//! Blocks that no label marks are equal on the replica itself, unless they rot. Single differences are damage, which a
//! verify finds; many are another device, or an earlier state of this one. Blocks that are marked after a crash differ
//! where a change was in flight or not flushed, so of these most must differ. Where the replica is known to lack
//! something, each block may differ: these count only if hardly any other one can be compared, and then most must
//! differ, too. So a device that may be any is not overwritten, at the price that a replica which lacks nearly
//! everything is not taken either, until it is made a replica again. Equal samples prove nothing.

use std::collections::BTreeSet;

use futures_util::future::{join, join_all};
use sealblock_block::{Device, DynDevice, Expectations, Request, Response};
use sealblock_integrity::Sealed;
use sealblock_units::{Extent, Lba};

/// Sampled blocks at the start, where file systems and partition tables have what tells them apart.
const AT_START: u64 = 16;
/// The same at the end, where copies of these are.
const AT_END: u64 = 8;
/// Sampled blocks that are spread over the device.
const SPREAD: u64 = 40;
/// One in this many samples may differ as damage, and always one.
const DAMAGED: usize = 16;
/// The same of blocks that are marked after a crash, or that it may lack.
const IN_FLIGHT: usize = 2;
/// With so many compared blocks that must be equal, others that it may lack say nothing.
const ENOUGH: usize = 8;

/// What is known of a block of a device, before it is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// It has what the replica had.
    Same,
    /// A crash may have left it different.
    Marked,
    /// It may lack what was written there.
    Lacks,
    /// Nothing.
    Nothing,
}

/// The blocks of a device to compare, other ones for another `random`.
pub(crate) fn sample_blocks(capacity_blocks: u64, random: u64) -> Vec<Lba> {
    let ends = (0..AT_START.min(capacity_blocks)).chain(capacity_blocks.saturating_sub(AT_END)..capacity_blocks);
    let step = capacity_blocks.div_ceil(SPREAD).max(1);
    let spread = (random % step..capacity_blocks).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    ends.chain(spread).collect::<BTreeSet<u64>>().into_iter().map(Lba::new).collect()
}

/// True if these blocks, of which some differ on both devices, are of another device than the replica. Blocks that were not compared do
/// not count.
pub(crate) fn are_of_another(differs: &[(Known, Option<bool>)]) -> bool {
    let of = |known: &[Known]| {
        let compared = differs.iter().filter(|(of, _)| known.contains(of)).filter_map(|(_, differs)| *differs);
        compared.fold((0, 0), |(different, compared), differs| (different + usize::from(differs), compared + 1))
    };
    let are_too_many = |(different, compared): (usize, usize), one_in: usize| different > (compared / one_in).max(1);
    let same = of(&[Known::Same]);
    are_too_many(same, DAMAGED)
        || are_too_many(of(&[Known::Marked]), IN_FLIGHT)
        || (same.1 < ENOUGH && are_too_many(of(&[Known::Same, Known::Marked, Known::Lacks]), IN_FLIGHT))
}

/// Why a device is not used whose content is not that of this replica.
pub(crate) fn other_content(replica: &str) -> String {
    format!(
        "its content is not that of {replica}: it is another device, or lacks most of what was written, or one of them was put back to an \
         earlier state; `sealblock mirror replace` makes it a replica"
    )
}

/// Whether each of these blocks differs on both devices.
pub(crate) async fn differences(replica: &DynDevice, device: &DynDevice, blocks: &[Lba]) -> Vec<Option<bool>> {
    join_all(blocks.iter().map(|lba| differs(replica, device, *lba))).await
}

/// Whether a block differs on both devices; `None` if one of them cannot read it.
async fn differs(one: &DynDevice, other: &DynDevice, lba: Lba) -> Option<bool> {
    let (one, other) = join(read(one, lba), read(other, lba)).await;
    Some(one?.first_difference(&other?, true).is_some())
}

async fn read(device: &DynDevice, lba: Lba) -> Option<Sealed> {
    match device.execute(Request::read(Extent::one(lba), Expectations::NONE)).await {
        Ok(Response::Data(data)) => Some(data),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_within_the_device_and_at_both_ends_of_it() {
        for capacity in [1, 2, 7, 40, 64, 1000, 1 << 40] {
            for random in [0, 3, u64::MAX] {
                let blocks: Vec<u64> = sample_blocks(capacity, random).iter().map(|lba| lba.get()).collect();
                assert!(blocks.len() <= 64 && blocks.is_sorted() && *blocks.last().unwrap() == capacity - 1);
                assert_eq!(blocks[0], 0);
                assert!(capacity > 40 || blocks.len() as u64 == capacity, "all of a small one: {blocks:?}");
            }
        }
        assert_ne!(sample_blocks(1 << 30, 1), sample_blocks(1 << 30, 2));
    }

    #[test]
    fn single_differences_are_damage_and_many_are_another_device() {
        let of = |known: Known, different: usize, equal: usize, unknown: usize| {
            let all = [(different, Some(true)), (equal, Some(false)), (unknown, None)];
            all.into_iter().flat_map(|(count, differs)| vec![(known, differs); count]).collect::<Vec<_>>()
        };
        for (different, equal, unknown, expected) in [
            (0, 0, 64, false),
            (0, 64, 0, false),
            (1, 5, 0, false),
            (2, 4, 0, true),
            (4, 60, 0, false),
            (5, 59, 0, true),
        ] {
            let differs = of(Known::Same, different, equal, unknown);
            assert_eq!(are_of_another(&differs), expected, "{different} of {equal}");
        }
        for (different, equal, expected) in [(1, 0, false), (2, 0, true), (32, 32, false), (33, 31, true)] {
            for known in [Known::Marked, Known::Lacks] {
                assert_eq!(
                    are_of_another(&of(known, different, equal, 3)),
                    expected,
                    "{different} of {equal} {known:?}"
                );
            }
            assert!(!are_of_another(&of(Known::Nothing, different, equal, 3)));
            // What is equal where it must be tells more.
            let beside = [of(Known::Lacks, different, equal, 3), of(Known::Same, 0, ENOUGH, 0)].concat();
            assert!(!are_of_another(&beside), "{different} of {equal}");
        }
    }
}
