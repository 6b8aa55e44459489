//! Encoded damage logs of a device, for hosts that read the page in parts.
//!
//! Invariants: a read that begins at byte 0 gets the state of now, encoded once for as long as the list does not change. A read that
//! goes on gets parts of the state that it began with, whatever is added in between, until [`LIFE`] has passed since that state was
//! encoded or [`MAX_PAGES`] later ones were. From then on it gets parts of the state of now, which the generation in the head shows.
//! At most [`MAX_PAGES`] pages exist for a device, of at most 768 KiB each, however many hosts read; one that is too old goes with
//! the next read.
//!
//! Shape: the pages belong to the device, and a controller has a weak reference to the one that its host reads: a host that reads a
//! head and never returns holds nothing.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use sealblock_protocols_nvme::logs::DamageLog;

use crate::model::sync::Locked;

/// How long a read may go on in the state that it began with.
const LIFE: Duration = Duration::from_secs(60);
/// States of a device that are kept for reads that go on.
const MAX_PAGES: usize = 4;

/// One state of the damage log of a namespace.
#[derive(Debug)]
pub(crate) struct DamagePage {
    nsid: u32,
    generation: u64,
    made: Instant,
    bytes: Vec<u8>,
}

/// The states of a device's damage log that hosts read.
#[derive(Default)]
pub(crate) struct DamagePages(Locked<VecDeque<Arc<DamagePage>>>);

impl DamagePage {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.made) < LIFE
    }
}

impl DamagePages {
    /// The page for a read that begins while the list has this generation; `log` makes it if there is none.
    pub(crate) fn begin(
        &self,
        nsid: u32,
        generation: u64,
        now: Instant,
        log: impl FnOnce() -> DamageLog,
    ) -> Arc<DamagePage> {
        let known = {
            let mut pages = self.0.lock();
            pages.retain(|page| page.is_fresh(now));
            pages.iter().find(|page| page.nsid == nsid && page.generation == generation).cloned()
        };
        known.unwrap_or_else(|| {
            let log = log();
            let page = Arc::new(DamagePage { nsid, generation: log.generation, made: now, bytes: log.encode() });
            let mut pages = self.0.lock();
            pages.push_back(Arc::clone(&page));
            while pages.len() > MAX_PAGES {
                pages.pop_front();
            }
            page
        })
    }

    /// The page with which a read began, if it is still there.
    pub(crate) fn go_on(&self, nsid: u32, begun: &Weak<DamagePage>, now: Instant) -> Option<Arc<DamagePage>> {
        let mut pages = self.0.lock();
        pages.retain(|page| page.is_fresh(now));
        pages.iter().find(|page| page.nsid == nsid && Arc::as_ptr(page) == begun.as_ptr()).cloned()
    }

    /// Forgets all, where the list is another one.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use sealblock_protocols_nvme::logs::DamageEntry;
    use sealblock_units::Lba;

    use super::*;

    /// The log of a device with so many bad blocks, which has the same generation.
    fn log(nsid: u32, blocks: u64) -> DamageLog {
        let entry = |lba| DamageEntry { lba: Lba::new(lba), field: None, values: None, write_uncorrectable: false };
        DamageLog {
            nsid,
            generation: blocks,
            overflowed: false,
            is_list_lost: false,
            entries: (0..blocks).map(entry).collect(),
            runs: None,
        }
    }

    fn entries(page: &DamagePage) -> usize {
        DamageLog::decode(page.bytes()).unwrap().entries.len()
    }

    #[test]
    fn a_state_is_encoded_once_and_a_read_goes_on_in_the_one_that_it_began_with() {
        let (pages, now, encoded) = (DamagePages::default(), Instant::now(), Cell::new(0));
        let begin = |nsid, blocks| {
            pages.begin(nsid, blocks, now, || {
                encoded.set(encoded.get() + 1);
                log(nsid, blocks)
            })
        };
        let first = Arc::downgrade(&begin(1, 5));
        for _ in 0..10 {
            assert_eq!(begin(1, 5).bytes(), pages.go_on(1, &first, now).unwrap().bytes());
        }
        assert_eq!(encoded.get(), 1);
        assert_eq!(entries(&begin(1, 6)), 6, "a new read has the new state");
        assert_eq!((entries(&pages.go_on(1, &first, now).unwrap()), encoded.get()), (5, 2));
        assert_eq!(DamageLog::decode(begin(2, 6).bytes()).unwrap().nsid, 2, "the page names its namespace");
        assert!(pages.go_on(2, &first, now).is_none());
        pages.clear();
        assert!(pages.go_on(1, &first, now).is_none());
    }

    #[test]
    fn few_states_are_kept_and_none_for_long() {
        let (pages, now) = (DamagePages::default(), Instant::now());
        let first = Arc::downgrade(&pages.begin(1, 0, now, || log(1, 0)));
        let late = now + LIFE - Duration::from_nanos(1);
        assert!(pages.go_on(1, &first, late).is_some());
        assert!(pages.go_on(1, &first, now + LIFE).is_none());
        assert!(first.upgrade().is_none(), "nothing holds it");
        let begun: Vec<_> = (0..10).map(|of| Arc::downgrade(&pages.begin(1, of, now, || log(1, of)))).collect();
        let left: Vec<_> =
            begun.iter().filter_map(|page| pages.go_on(1, page, now)).map(|page| entries(&page)).collect();
        assert_eq!(left, [6, 7, 8, 9]);
        assert_eq!(begun.iter().filter(|page| page.upgrade().is_some()).count(), MAX_PAGES);
    }

    #[test]
    fn a_log_that_changed_while_it_was_made_is_made_again() {
        let (pages, now) = (DamagePages::default(), Instant::now());
        // The list went from generation 3 to 4 before the log was made.
        assert_eq!(entries(&pages.begin(1, 3, now, || log(1, 4))), 4);
        assert_eq!(entries(&pages.begin(1, 4, now, || panic!("it is there"))), 4);
        assert_eq!(entries(&pages.begin(1, 5, now, || log(1, 5))), 5);
    }
}
