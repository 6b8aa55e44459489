//! The bytes of a list of bad blocks: what stands behind the runs of a saved state.
//!
//! Entries are in rising order: the blocks between the last run and this one, how many blocks it has beyond the first, the cause,
//! and, of a coarse run, how many of its blocks are bad at least. Numbers are in seven bits a byte, the lowest first, without
//! leading zeroes. A list that does not fit loses precision, and no bad block.

use sealblock_block::{BadBlockCause, DamageRun, coarsen};
use sealblock_integrity::Field;

/// Maximum bytes of a list.
pub(crate) const MAX_DAMAGE_BYTES: usize = 6_800;
/// The smallest entry.
const MIN_ENTRY_BYTES: usize = 3;

/// A host made the blocks unreadable.
const MADE: u8 = 1 << 6;
/// Some of the blocks may be good.
const COARSE: u8 = 1 << 7;

const CAUSES: [BadBlockCause; 7] = [
    BadBlockCause::Media,
    BadBlockCause::Tag(Field::Guard),
    BadBlockCause::Tag(Field::AppTag),
    BadBlockCause::Tag(Field::RefTag),
    BadBlockCause::Tag(Field::StorageTag),
    BadBlockCause::Conflict,
    BadBlockCause::Stale,
];

/// Encodes runs, which are in order, and says how many entries they are.
pub(crate) fn encode(runs: &[DamageRun]) -> (Vec<u8>, u16) {
    let (mut runs, mut most) = (runs.to_vec(), MAX_DAMAGE_BYTES / MIN_ENTRY_BYTES);
    loop {
        runs = coarsen(runs, most);
        let bytes = encode_all(&runs);
        if bytes.len() <= MAX_DAMAGE_BYTES {
            return (bytes, runs.len() as u16);
        }
        // In proportion, and at least one less.
        most = (runs.len() * MAX_DAMAGE_BYTES / bytes.len()).min(runs.len() - 1);
    }
}

fn encode_all(runs: &[DamageRun]) -> Vec<u8> {
    let (mut bytes, mut behind) = (Vec::new(), 0);
    for run in runs {
        put(&mut bytes, run.first - behind);
        put(&mut bytes, run.blocks() - 1);
        let cause = CAUSES.iter().position(|cause| *cause == run.cause).unwrap_or(0) as u8;
        let flags = if run.is_made { MADE } else { 0 } | if run.is_coarse() { COARSE } else { 0 };
        bytes.push(cause | flags);
        if run.is_coarse() {
            put(&mut bytes, run.bad_blocks);
        }
        behind = run.last + 1;
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Decodes so many entries, which take all the bytes; `None` if they do not.
pub(crate) fn decode(mut bytes: &[u8], count: u16) -> Option<Vec<DamageRun>> {
    if bytes.len() > MAX_DAMAGE_BYTES || usize::from(count) * MIN_ENTRY_BYTES > bytes.len() {
        return None;
    }
    let (mut runs, mut behind) = (Vec::with_capacity(count.into()), 0_u64);
    for _ in 0..count {
        let distance = take(&mut bytes)?;
        let more = take(&mut bytes)?;
        let (flags, rest) = bytes.split_first()?;
        bytes = rest;
        let cause = *CAUSES.get(usize::from(flags & !(MADE | COARSE)))?;
        let first = behind.checked_add(distance)?;
        // The last address has a successor, so that the next run has a place.
        let last = first.checked_add(more).filter(|last| *last < u64::MAX)?;
        let mut run = DamageRun { is_made: flags & MADE != 0, ..DamageRun::exact(first, last, cause) };
        if flags & COARSE != 0 {
            run.bad_blocks = take(&mut bytes).filter(|bad| *bad < run.blocks())?;
        }
        behind = last + 1;
        runs.push(run);
    }
    bytes.is_empty().then_some(runs)
}

/// The number at the front of the bytes, in as few of them as it needs.
fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if shift > 63 || part << shift >> shift != part || *byte == 0 && shift > 0 {
            return None;
        }
        number |= part << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUARD: BadBlockCause = BadBlockCause::Tag(Field::Guard);

    fn decoded(runs: &[DamageRun]) -> Vec<DamageRun> {
        let (bytes, count) = encode(runs);
        assert!(bytes.len() <= MAX_DAMAGE_BYTES);
        decode(&bytes, count).unwrap()
    }

    #[test]
    fn runs_come_back() {
        let made = DamageRun { is_made: true, ..DamageRun::exact(900, 900, BadBlockCause::Media) };
        let coarse = DamageRun { bad_blocks: 130, ..DamageRun::exact(1 << 40, (1 << 40) + 999, GUARD) };
        let runs = [DamageRun::exact(0, 0, GUARD), DamageRun::exact(1, 300, BadBlockCause::Stale), made, coarse];
        assert_eq!(decoded(&runs), runs);
        // Written down: other bytes would be another format.
        assert_eq!(encode(&runs[..3]).0, [0, 0, 1, 0, 0xab, 2, 6, 0xd7, 4, 0, 0x40]);
        assert_eq!(decoded(&[]), []);
    }

    #[test]
    fn a_list_that_does_not_fit_loses_precision_and_no_block() {
        let runs: Vec<_> = (0..20_000_u64).map(|n| DamageRun::exact(n * 5000, n * 5000, GUARD)).collect();
        let kept = decoded(&runs);
        assert!((1_000..2_000).contains(&kept.len()), "{}", kept.len());
        assert_eq!(kept.iter().map(|run| run.bad_blocks).sum::<u64>(), 20_000);
        assert!(runs.iter().all(|run| kept.iter().any(|kept| (kept.first..=kept.last).contains(&run.first))));
        let run_of_blocks = [DamageRun::exact(7, 1 << 50, GUARD)];
        assert_eq!(decoded(&run_of_blocks), run_of_blocks, "any number in a run");
    }

    #[test]
    fn bytes_that_no_list_has_are_refused() {
        for (bytes, count) in [
            (&[0, 0][..], 1),
            (&[0, 0, 7], 1),
            (&[0, 0, 1, 0], 1),
            (&[0, 0, 1], 2),
            (&[0x80, 0, 0, 1], 1),
            (&[0, 4, 0x81, 5], 1),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 1], 1),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 1], 1),
        ] {
            assert!(decode(bytes, count).is_none(), "{bytes:?}");
        }
        assert!(decode(&[0, 4, 0x81, 4], 1).is_some(), "4 of 5 blocks are bad");
    }
}
