//! The turns of the work in the background, and waiting for what they free.

use std::cell::Cell;

use sealblock_block::Condition;

/// What the work in the background does now, and what others want of it.
pub(super) struct Background {
    /// True if a subvolume was deleted whose nodes are still to be dropped, as far as is known.
    pub has_dead: Cell<bool>,
    /// True if an earlier mount may have left inodes without names in any subvolume.
    pub has_orphans: Cell<bool>,
    /// True if somebody waits for space, so that the next turn begins at once.
    pub is_wanted: Cell<bool>,
    /// True if the work is to end.
    pub is_ended: Cell<bool>,
    /// True if nobody works, or will again.
    pub is_idle: Cell<bool>,
    /// The turns that have begun, and those that are done.
    pub turns: Cell<(u64, u64)>,
    /// Inodes without names that are being deleted.
    pub deletions: Cell<usize>,
    /// Something of this changed.
    pub changed: Condition,
}

impl Background {
    /// Nothing is done yet. Something deleted may be left of an earlier mount.
    pub fn new() -> Background {
        let no = || Cell::new(false);
        Background {
            has_dead: Cell::new(true),
            has_orphans: Cell::new(true),
            is_wanted: no(),
            is_ended: no(),
            is_idle: Cell::new(true),
            turns: Cell::new((0, 0)),
            deletions: Cell::new(0),
            changed: Condition::default(),
        }
    }

    /// Waits until what is deleted already has given back its space, but for what programs still use. Returns false if
    /// there was nothing to wait for.
    pub async fn free_deleted(&self) -> bool {
        let ((begun, done), has_dead) = (self.turns.get(), self.has_dead.get());
        let is_work = has_dead || begun > done;
        if self.is_idle.get() || !is_work && self.deletions.get() == 0 {
            return false;
        }
        // A turn that has begun may have passed what was deleted since.
        let until = if has_dead { begun + 1 } else { begun };
        if has_dead {
            self.is_wanted.set(true);
            self.changed.notify();
        }
        let is_free = || self.turns.get().1 >= until && self.deletions.get() == 0;
        self.changed.wait_until(|| self.is_idle.get() || is_free()).await;
        true
    }
}

/// Work that has begun, and ends when this is dropped.
pub(super) struct Begun<'b>(pub &'b Background, pub fn(&Background));

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let Begun(background, end) = self;
        end(background);
        background.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn nobody_waits_where_nothing_is_deleted_or_nobody_works() {
        let background = Background::new();
        assert_eq!(background.free_deleted().now_or_never(), Some(false), "nobody works");
        background.is_idle.set(false);
        background.has_dead.set(false);
        assert_eq!(background.free_deleted().now_or_never(), Some(false), "nothing is deleted");
    }

    #[test]
    fn a_turn_that_began_before_is_not_enough() {
        let background = Background::new();
        background.is_idle.set(false);
        background.turns.set((1, 0));
        let mut waits = pin!(background.free_deleted());
        assert_eq!((waits.as_mut().now_or_never(), background.is_wanted.get()), (None, true));
        let turn = || drop(Begun(&background, |own| own.turns.update(|(begun, done)| (begun, done + 1))));
        turn();
        assert_eq!(waits.as_mut().now_or_never(), None);
        background.turns.update(|(begun, done)| (begun + 1, done));
        turn();
        assert_eq!(waits.as_mut().now_or_never(), Some(true));
    }

    #[test]
    fn inodes_that_are_being_deleted_are_waited_for_and_an_end_ends_it() {
        let background = Background::new();
        background.is_idle.set(false);
        background.has_dead.set(false);
        background.deletions.set(2);
        let mut waits = pin!(background.free_deleted());
        assert_eq!(waits.as_mut().now_or_never(), None);
        drop(Begun(&background, |own| own.deletions.update(|count| count - 1)));
        assert_eq!(waits.as_mut().now_or_never(), None);
        drop(Begun(&background, |own| own.is_idle.set(true)));
        assert_eq!(waits.as_mut().now_or_never(), Some(true));
    }
}
