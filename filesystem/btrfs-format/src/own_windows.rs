//! Which transactions this project's engine wrote, so that the tags of their data are known, and between which ones
//! another program may have written.
//!
//! Transactions are numbered upwards, and each is written by one program. The engine writes runs of them, its *windows*.
//! Whatever lies between two windows may be another program's, which gives data no tags, moves them, or writes over them
//! in place without giving them another number.
//!
//! Invariants: windows rise and do not touch each other. Of too many the oldest are forgotten, and their transactions
//! count as another program's: that can only make less of what is read proven.

use std::ops::RangeInclusive;

/// The windows that are kept.
pub const MAX_WINDOWS: usize = 15;

/// The windows of the engine, up to a transaction of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnWindows(Vec<RangeInclusive<u64>>);

impl OwnWindows {
    /// Windows that were stored; `None` if they are not in order, or too many. A transaction 0 is never written.
    pub fn stored(windows: impl IntoIterator<Item = (u64, u64)>) -> Option<OwnWindows> {
        let mut all = Vec::new();
        let mut behind = 0_u64;
        for (first, last) in windows {
            // At least one transaction must lie between two of them.
            let is_behind = first > behind.checked_add(u64::from(behind > 0))?;
            if !is_behind || last < first || all.len() == MAX_WINDOWS {
                return None;
            }
            behind = last;
            all.push(first..=last);
        }
        Some(OwnWindows(all))
    }

    /// The first and the last transactions of all windows.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|window| (*window.start(), *window.end()))
    }

    /// The last transaction of the last window.
    pub fn last(&self) -> Option<u64> {
        self.0.last().map(|window| *window.end())
    }

    /// A transaction that the engine is about to write. It belongs to the last window if the newest durable transaction,
    /// before it, is that window's last one: then nobody wrote in between, whatever numbers are left out. Otherwise, or if
    /// something else is not as it was (`is_same`), a window begins.
    #[must_use]
    pub fn with(&self, durable: u64, is_same: bool, generation: u64) -> OwnWindows {
        let mut all = self.0.clone();
        match all.last_mut() {
            Some(window) if is_same && *window.end() == durable => *window = *window.start()..=generation,
            _ => all.push(generation..=generation),
        }
        let forgotten = all.len().saturating_sub(MAX_WINDOWS);
        OwnWindows(all.split_off(forgotten))
    }

    /// True if the engine wrote a transaction.
    pub fn contains(&self, generation: u64) -> bool {
        self.0.iter().any(|window| window.contains(&generation))
    }

    /// True if another program may have written after a transaction, and until the newest one.
    pub fn has_other_after(&self, generation: u64, newest: u64) -> bool {
        self.last() != Some(newest) || !self.0.last().is_some_and(|window| window.contains(&generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_goes_on_as_long_as_nobody_else_wrote() {
        let none = OwnWindows::default();
        assert!(!none.contains(5) && none.has_other_after(5, 5));
        let first = none.with(5, true, 8);
        assert_eq!(first.iter().collect::<Vec<_>>(), [(8, 8)]);
        // The next transaction, and one after the filesystem was opened again, whose number is 3 above.
        let grown = first.with(8, true, 9).with(9, true, 12);
        assert_eq!(grown.iter().collect::<Vec<_>>(), [(8, 12)]);
        assert!(grown.contains(10) && !grown.contains(7) && !grown.contains(13));
        assert!(!grown.has_other_after(8, 12) && grown.has_other_after(8, 13) && grown.has_other_after(7, 12));
        // Linux wrote 13 and 14.
        let second = grown.with(14, true, 17);
        assert_eq!(second.iter().collect::<Vec<_>>(), [(8, 12), (17, 17)]);
        assert!(second.has_other_after(12, 17) && !second.has_other_after(17, 17));
        assert!(!second.contains(14) && second.contains(9));
        // A device was replaced, though no transaction shows it.
        let third = second.with(17, false, 20);
        assert_eq!(third.iter().collect::<Vec<_>>(), [(8, 12), (17, 17), (20, 20)]);
    }

    #[test]
    fn the_oldest_windows_are_forgotten() {
        let mut windows = OwnWindows::default();
        for number in 1..=20 {
            windows = windows.with(number * 10 - 5, true, number * 10);
        }
        assert_eq!(windows.iter().count(), MAX_WINDOWS);
        assert!(windows.contains(200) && windows.contains(60) && !windows.contains(50));
    }

    #[test]
    fn stored_windows_come_back_and_others_are_refused() {
        let windows = OwnWindows::default().with(1, true, 4).with(4, true, 9).with(12, true, 15);
        assert_eq!(OwnWindows::stored(windows.iter()), Some(windows));
        assert_eq!(OwnWindows::stored([]), Some(OwnWindows::default()));
        for bad in [
            &[(0, 3)][..],
            &[(5, 4)],
            &[(4, 9), (9, 12)],
            &[(4, 9), (10, 12)],
            &[(4, u64::MAX), (6, 7)],
            &[(7, 9), (4, 5)],
        ] {
            assert_eq!(OwnWindows::stored(bad.iter().copied()), None, "{bad:?}");
        }
        assert_eq!(OwnWindows::stored((1..=16).map(|number| (number * 2, number * 2))), None, "too many");
    }
}
