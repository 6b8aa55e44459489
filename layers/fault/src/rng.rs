//! Draws faults by the rules, with a pseudo-random generator, and counts them.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use fastrand::Rng;
use sealblock_block::Clock;

use crate::rules::{Chance, Fault, Rules, Span};

pub(crate) struct FaultRng {
    rules: Rules,
    rng: RefCell<Rng>,
    pub(crate) counts: Counts,
}

impl FaultRng {
    pub(crate) fn new(rules: Rules) -> FaultRng {
        let rng = Rng::with_seed(rules.seed).into();
        FaultRng { rules, rng, counts: Counts::default() }
    }

    /// A number below `bound`, which is not zero.
    pub(crate) fn below(&self, bound: u64) -> u64 {
        self.rng.borrow_mut().u64(..bound)
    }

    fn holds(&self, chance: Chance) -> bool {
        chance == Chance::ALWAYS || self.below(u64::from(Chance::PARTS)) < u64::from(chance.parts())
    }

    /// True if any rule injects this kind of fault.
    pub(crate) fn has_rule(&self, fault: Fault) -> bool {
        self.rules.rules.iter().any(|rule| rule.fault.index() == fault.index())
    }

    /// True if any rule changes or fails what is read or stored.
    pub(crate) fn has_block_faults(&self) -> bool {
        self.rules.rules.iter().any(|rule| rule.fault.is_of_blocks())
    }

    /// Draws the units of `span` that get this fault now, in ascending order, each once. Does not count them.
    pub(crate) fn hits(&self, fault: Fault, span: Span) -> Vec<u64> {
        let mut hits = Vec::new();
        for rule in self.rules.rules.iter().filter(|rule| rule.fault == fault) {
            let Some(meet) = rule.span.meet(span) else { continue };
            hits.extend((meet.first..=meet.last).filter(|_| self.holds(rule.chance)));
        }
        hits.sort_unstable();
        hits.dedup();
        hits
    }

    /// Draws and counts the first unit of `span` that gets this fault now. Draws nothing for later units.
    pub(crate) fn first_hit(&self, fault: Fault, span: Span) -> Option<u64> {
        let rules = self.rules.rules.iter().filter(|rule| rule.fault == fault);
        let meets = rules.filter_map(|rule| Some((rule.chance, rule.span.meet(span)?)));
        let hit = meets.filter_map(|(chance, meet)| (meet.first..=meet.last).find(|_| self.holds(chance))).min();
        self.counts.add(fault, u64::from(hit.is_some()));
        hit
    }

    /// The same as [`FaultRng::hits`], and counts them.
    pub(crate) fn counted_hits(&self, fault: Fault, span: Span) -> Vec<u64> {
        let hits = self.hits(fault, span);
        self.counts.add(fault, hits.len() as u64);
        hits
    }

    /// Draws and counts whether a flush gets this fault now.
    pub(crate) fn hits_flush(&self, fault: Fault) -> bool {
        let mut rules = self.rules.rules.iter();
        let hit = rules.any(|rule| rule.fault == fault && self.holds(rule.chance));
        self.counts.add(fault, u64::from(hit));
        hit
    }

    /// Draws and counts whether a request for these spans, at least one, gets this fault now: once for all of its
    /// units.
    pub(crate) fn hits_request(&self, fault: Fault, spans: &[Span]) -> bool {
        let mut rules = self.rules.rules.iter().filter(|rule| rule.fault == fault);
        let hit = rules.any(|rule| spans.iter().any(|span| rule.span.meet(*span).is_some()) && self.holds(rule.chance));
        self.counts.add(fault, u64::from(hit));
        hit
    }

    /// Draws how long a request for `span` waits. A flush has no span, and waits by the rules for all units.
    pub(crate) fn delay(&self, span: Option<Span>) -> Duration {
        let mut sum = Duration::ZERO;
        for rule in &self.rules.rules {
            let Fault::Delay(delay) = rule.fault else { continue };
            let meets = match span {
                Some(span) => rule.span.meet(span).is_some(),
                None => rule.span == Span::ALL,
            };
            if meets && self.holds(rule.chance) {
                self.counts.add(rule.fault, 1);
                sum += delay;
            }
        }
        sum
    }

    /// Waits for a delay by the rules.
    pub(crate) async fn wait(&self, clock: &impl Clock, span: Option<Span>) {
        match self.delay(span) {
            Duration::ZERO => {}
            delay => clock.sleep(delay).await,
        }
    }

    /// A number below `bound`, which is not zero. It is always the same for the same unit.
    pub(crate) fn always_below(&self, unit: u64, bound: u64) -> u64 {
        Rng::with_seed(Rng::with_seed(self.rules.seed).u64(..) ^ unit).u64(..bound)
    }

    /// Inverts the bad bit of `unit`, always the same one.
    pub(crate) fn flip(&self, unit: u64, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let bit = self.always_below(unit, bytes.len() as u64 * 8);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }

    /// Another unit than `unit`, below `count`; the same one if there is no other.
    pub(crate) fn elsewhere(&self, unit: u64, count: u64) -> u64 {
        match count {
            0 | 1 => unit,
            _ => (unit + 1 + self.below(count - 1)) % count,
        }
    }
}

/// Faults injected so far, by kind. Faults of single units count units. Faults of a whole request count requests: a
/// failed write, a failed read of a medium, a device's torn write, an aborted request, a delay, a flush.
#[derive(Default)]
pub struct Counts([Cell<u64>; Fault::KINDS]);

impl Counts {
    /// The number of injected faults of this kind, for delays of any length.
    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault.index()].get()
    }

    /// Every kind of fault and how often it was injected.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = Fault::WITHOUT_TIME.into_iter().map(|(_, name)| name).chain([Fault::DELAY]);
        names.zip(self.0.iter().map(Cell::get))
    }

    pub(crate) fn add(&self, fault: Fault, count: u64) {
        let cell = &self.0[fault.index()];
        cell.set(cell.get() + count);
    }
}

#[cfg(test)]
mod tests {
    use sealblock_block::RequestKind;

    use super::*;

    fn rng(text: &str) -> FaultRng {
        FaultRng::new(text.parse().unwrap())
    }

    #[test]
    fn hits_are_where_the_rules_say_and_nowhere_else() {
        let rng = rng("flip@5..7;flip@7..8;read-error@6");
        let all = Span { first: 0, last: 100 };
        assert_eq!(rng.hits(Fault::Flip, all), [5, 6, 7, 8]);
        assert_eq!(rng.hits(Fault::Flip, Span { first: 8, last: 9 }), [8]);
        assert_eq!(rng.hits(Fault::Flip, Span { first: 9, last: 9 }), []);
        assert_eq!(rng.hits(Fault::ReadError, all), [6]);
        assert_eq!(rng.hits(Fault::LostWrite, all), []);
        assert_eq!((rng.first_hit(Fault::Flip, all), rng.first_hit(Fault::LostWrite, all)), (Some(5), None));
        assert_eq!((rng.counts.of(Fault::Flip), rng.counts.of(Fault::LostWrite)), (1, 0));
        assert!(rng.has_rule(Fault::Flip) && !rng.has_rule(Fault::LostWrite));
    }

    #[test]
    fn the_last_unit_of_all_is_one_too() {
        let top = Span { first: u64::MAX - 1, last: u64::MAX };
        assert_eq!(rng("flip").hits(Fault::Flip, top), [u64::MAX - 1, u64::MAX]);
    }

    #[test]
    fn chance_is_kept_and_repeats_with_the_seed() {
        let draw = |text: &str| rng(text).hits(Fault::Flip, Span { first: 0, last: 99_999 });
        let (some, same, other) = (draw("seed=1;flip%10"), draw("seed=1;flip%10"), draw("seed=2;flip%10"));
        assert!((9_000..11_000).contains(&some.len()), "{} of 100000 at 10 %", some.len());
        assert!(some == same && some != other);
        assert_eq!((draw("flip%0").len(), draw("flip%100").len()), (0, 100_000));
    }

    #[test]
    fn what_is_aborted_is_drawn_once_for_a_request() {
        let verify = Fault::Abort(RequestKind::Verify);
        let all = Span { first: 0, last: u64::MAX - 1 };
        let one = rng("abort-verify@5..6");
        let at = |first, last| one.hits_request(verify, &[Span { first, last }]);
        assert_eq!([at(0, 4), at(4, 5), at(6, 9), at(7, 9)], [false, true, true, false]);
        assert!(one.hits_request(verify, &[Span { first: 9, last: 9 }, Span { first: 6, last: 6 }]));
        assert!(!one.hits_request(Fault::Abort(RequestKind::Compare), &[all]));
        assert_eq!(one.counts.of(verify), 3);
        let some = rng("seed=1;abort-verify%10");
        // If each unit were drawn, this would not end.
        let hits = (0..1000).filter(|_| some.hits_request(verify, &[all])).count();
        assert!((60..150).contains(&hits), "{hits} of 1000 at 10 %");
    }

    #[test]
    fn delays_add_up_and_flushes_wait_only_everywhere() {
        let rng = rng("delay=2ms@0..9;delay=3ms@5..20;delay=100us");
        let at = |first, last| rng.delay(Some(Span { first, last })).as_micros();
        assert_eq!((at(0, 4), at(0, 5), at(30, 30)), (2_100, 5_100, 100));
        assert_eq!(rng.delay(None).as_micros(), 100);
        assert_eq!(rng.counts.of(Fault::Delay(Duration::ZERO)), 2 + 3 + 1 + 1);
    }

    #[test]
    fn a_bad_bit_is_the_same_each_time() {
        let rng = rng("seed=3");
        let (mut once, mut other) = ([0; 512], [0; 512]);
        rng.flip(7, &mut once);
        assert_eq!(once.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        rng.flip(8, &mut other);
        assert_ne!(once, other);
        rng.flip(7, &mut once);
        assert_eq!(once, [0; 512]);
    }

    #[test]
    fn elsewhere_is_another_place() {
        let rng = rng("seed=3");
        assert!((0..1000).all(|_| {
            let place = rng.elsewhere(4, 10);
            place < 10 && place != 4
        }));
        assert_eq!((rng.elsewhere(0, 1), rng.elsewhere(0, 0)), (0, 0));
    }
}
