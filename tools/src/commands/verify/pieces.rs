//! Puts the finished pieces of a verify into the order of the blocks.
//!
//! Workers finish their pieces in any order. Lines are printed, and an interrupted verify resumes, by the first unchecked block:
//! every block before it was checked.

use std::collections::BTreeMap;

use sealblock_block::BadBlock;
use sealblock_units::{Extent, Lba};

/// The finished pieces.
pub(super) struct PieceTracker {
    /// The first unchecked block.
    next: u64,
    /// Finished pieces beyond it: first block, end, and bad blocks. At most one for each worker.
    beyond: BTreeMap<u64, (u64, Vec<BadBlock>)>,
    checked: u64,
}

impl PieceTracker {
    /// No block from `first` on was checked.
    pub(super) fn new(first: Lba) -> PieceTracker {
        PieceTracker { next: first.get(), beyond: BTreeMap::new(), checked: 0 }
    }

    /// Adds a finished piece. Returns the bad blocks of all pieces that now have no gap before them, in order.
    pub(super) fn done(&mut self, extent: Extent, mut faults: Vec<BadBlock>) -> Vec<BadBlock> {
        faults.sort_by_key(|fault| fault.lba);
        let (first, blocks) = (extent.start().get(), extent.len());
        self.checked += blocks;
        self.beyond.insert(first, (first.saturating_add(blocks), faults));
        let mut in_order = Vec::new();
        while let Some((end, faults)) = self.beyond.remove(&self.next) {
            self.next = end;
            in_order.extend(faults);
        }
        in_order
    }

    /// Takes the bad blocks of pieces behind a gap, which stays if the verify ended early.
    pub(super) fn take_rest(&mut self) -> Vec<BadBlock> {
        std::mem::take(&mut self.beyond).into_values().flat_map(|(_, faults)| faults).collect()
    }

    /// The first unchecked block.
    pub(super) fn next(&self) -> Lba {
        Lba::new(self.next)
    }

    /// Blocks that were checked, also behind a gap.
    pub(super) fn checked(&self) -> u64 {
        self.checked
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::BadBlockCause;

    use super::*;

    fn faults(lbas: &[u64]) -> Vec<BadBlock> {
        lbas.iter().map(|lba| BadBlock::new(Lba::new(*lba), BadBlockCause::Media, None, None)).collect()
    }

    fn lbas(faults: &[BadBlock]) -> Vec<u64> {
        faults.iter().map(|fault| fault.lba.get()).collect()
    }

    #[test]
    fn faults_come_in_the_order_of_blocks_whichever_piece_ends_first() {
        let piece = |first| Extent::from_raw(first, 10).unwrap();
        let mut ledger = PieceTracker::new(Lba::new(100));
        assert!(ledger.done(piece(120), faults(&[121])).is_empty());
        assert_eq!(lbas(&ledger.done(piece(100), faults(&[109, 100]))), [100, 109]);
        assert_eq!((ledger.next().get(), ledger.checked()), (110, 20));
        assert!(ledger.done(piece(140), faults(&[149])).is_empty());
        assert_eq!(lbas(&ledger.done(piece(110), faults(&[115]))), [115, 121]);
        assert_eq!((ledger.next().get(), ledger.checked()), (130, 40));
        assert_eq!(lbas(&ledger.take_rest()), [149]);
        assert_eq!(ledger.next().get(), 130, "what is behind a gap is not where to go on");
    }

    #[test]
    fn the_last_address_of_all_is_an_end_too() {
        let mut ledger = PieceTracker::new(Lba::new(u64::MAX - 1));
        ledger.done(Extent::from_raw(u64::MAX - 1, 1).unwrap(), Vec::new());
        assert_eq!(ledger.next(), Lba::new(u64::MAX));
    }
}
