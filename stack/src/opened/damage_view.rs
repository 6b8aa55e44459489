//! The bad blocks of an open target: the lists of all devices at the bottom of its stack, in its own addresses. Nothing is kept here.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use sealblock_block::{DamageCount, DamageRecord, DamageRun, DamageSource, merged};

/// A run of a member of a stripe that has more chunks than this is one coarse run of the stripe.
const MAX_CHUNKS: u64 = 4_096;

/// The bad blocks of a target. Clones are the same lists, on every core.
#[derive(Clone)]
pub struct DamageView(Arc<View>);

/// The replicas of a mirror.
#[derive(Default)]
struct Replicas {
    /// The view of each by its name, as far as it was open.
    views: Vec<(String, DamageView)>,
    /// Changes and additions of those that were replaced: what the mirror counts never falls, and never is what it was before.
    generation: u64,
    additions: u64,
}

enum View {
    /// A device at the bottom.
    Leaf { name: String, record: Arc<DamageRecord>, not_saved: Option<&'static str>, elsewhere: Option<Elsewhere> },
    /// Devices with the same addresses, such as paths.
    All(Vec<DamageView>),
    /// The replicas of a mirror, which commands change.
    Replicas(Mutex<Replicas>),
    /// Some blocks of a device.
    Slice { below: DamageView, first: u64, blocks: u64 },
    /// Chunks of each member in turn.
    Stripe { members: Vec<DamageView>, chunk_blocks: u64 },
}

/// How the text of a lost list ends.
const LIST_LOST: &str = "bad blocks that were known are not known any more";

/// What it means that the lists of these devices were lost; `None` without any.
pub fn lost_lists_text(devices: &[String]) -> Option<String> {
    let (lists, were) = if devices.len() == 1 { ("list", "was") } else { ("lists", "were") };
    let names = devices.join(", ");
    (!devices.is_empty()).then(|| {
        format!("the {lists} of bad blocks of {names} {were} lost or put back to an earlier state: {LIST_LOST}")
    })
}

/// True if this is the text of a lost list.
pub fn is_lost_list(text: &str) -> bool {
    text.ends_with(LIST_LOST)
}

/// Reported by a device at the bottom: its name, its list, why it is in memory only, and what a server knows of it.
type SayOfLeaf<'a, T> = dyn Fn(&str, &DamageRecord, Option<&'static str>, Option<&Elsewhere>) -> Option<T> + 'a;

/// What a server on another host knows of a device at the bottom.
struct Elsewhere {
    /// Why that is not known here, until it was asked for.
    why_not: &'static str,
    /// Set once it was taken over: whether that is all of it.
    is_all: OnceLock<bool>,
    /// Set if that list was lost.
    is_lost: OnceLock<()>,
}

impl Replicas {
    fn generation(&self) -> u64 {
        self.generation + self.views.iter().map(|(_, view)| view.generation()).sum::<u64>()
    }

    fn additions(&self) -> u64 {
        self.additions + self.views.iter().map(|(_, view)| view.additions()).sum::<u64>()
    }
}

impl DamageView {
    fn new(view: View) -> DamageView {
        DamageView(Arc::new(view))
    }

    /// A device at the bottom, and why its list is in memory only, if it is.
    pub(crate) fn leaf(name: &str, record: &Arc<DamageRecord>, not_saved: Option<&'static str>) -> DamageView {
        DamageView::new(View::Leaf { name: name.to_owned(), record: Arc::clone(record), not_saved, elsewhere: None })
    }

    /// A device at the bottom on another host, whose server may know more: why that is not known here.
    pub(crate) fn remote(
        name: &str,
        record: &Arc<DamageRecord>,
        not_saved: &'static str,
        why_not: &'static str,
    ) -> DamageView {
        let elsewhere = Some(Elsewhere { why_not, is_all: OnceLock::new(), is_lost: OnceLock::new() });
        DamageView::new(View::Leaf {
            name: name.to_owned(),
            record: Arc::clone(record),
            not_saved: Some(not_saved),
            elsewhere,
        })
    }

    /// Takes over what the server of such a device knows, whether that is all of it, and whether its list was lost.
    pub(crate) fn take_over(&self, runs: &[DamageRun], is_all: bool, is_lost: bool) {
        match &*self.0 {
            View::Leaf { record, elsewhere: Some(elsewhere), .. } => {
                record.restore(runs);
                let _ = elsewhere.is_all.set(is_all);
                if is_lost {
                    let _ = elsewhere.is_lost.set(());
                }
            }
            View::All(of) => of.iter().for_each(|view| view.take_over(runs, is_all, is_lost)),
            View::Leaf { .. } | View::Replicas(_) | View::Slice { .. } | View::Stripe { .. } => {}
        }
    }

    /// Devices on other hosts of which nothing is known here but what was met here, and why.
    pub fn not_asked(&self) -> Vec<(String, &'static str)> {
        self.of_leaves(&|name, _, _, elsewhere| {
            let elsewhere = elsewhere.filter(|elsewhere| elsewhere.is_all.get().is_none())?;
            Some((name.to_owned(), elsewhere.why_not))
        })
    }

    /// True if no server withheld a part of its list.
    pub fn is_complete(&self) -> bool {
        let partial = self.of_leaves(&|_, _, _, elsewhere| {
            elsewhere.filter(|elsewhere| elsewhere.is_all.get() == Some(&false)).map(|_| ())
        });
        partial.is_empty()
    }

    /// Devices with the same addresses; nothing is known without any.
    pub(crate) fn all(of: Vec<DamageView>) -> DamageView {
        DamageView::new(View::All(of))
    }

    /// The replicas of a mirror, of which there is none yet.
    pub(crate) fn mirror() -> DamageView {
        DamageView::new(View::Replicas(Mutex::default()))
    }

    /// Some blocks of a device.
    pub(crate) fn slice(below: &DamageView, first: u64, blocks: u64) -> DamageView {
        DamageView::new(View::Slice { below: below.clone(), first, blocks })
    }

    /// Members that are striped.
    pub(crate) fn stripe(members: Vec<DamageView>, chunk_blocks: u64) -> DamageView {
        DamageView::new(View::Stripe { members, chunk_blocks })
    }

    /// Sets the view of a replica of a mirror, in place of an earlier one of that name.
    pub(crate) fn set_replica(&self, name: &str, view: Option<DamageView>) {
        if let View::Replicas(replicas) = &*self.0 {
            let mut replicas = lock(replicas);
            let (generation, additions) = (replicas.generation(), replicas.additions());
            replicas.views.retain(|(known, _)| known != name);
            replicas.views.extend(view.map(|view| (name.to_owned(), view)));
            replicas.generation += generation.saturating_sub(replicas.generation()) + 1;
            replicas.additions += additions.saturating_sub(replicas.additions());
        }
    }

    /// The view of each replica of a mirror, by its name.
    pub fn replicas(&self) -> Vec<(String, DamageView)> {
        match &*self.0 {
            View::Replicas(replicas) => lock(replicas).views.clone(),
            _ => Vec::new(),
        }
    }

    /// The bad blocks as runs that do not overlap, and how many they are.
    pub fn summary(&self) -> (Vec<DamageRun>, DamageCount) {
        let runs = merged(self, 0, u64::MAX);
        let mut count = DamageCount::default();
        runs.iter().for_each(|run| count.add(run));
        (runs, count)
    }

    /// The blocks that every one of `others` may have lost, by what is known of them, and that are not known to be lost here: the first
    /// and the last of each run.
    pub(crate) fn only_good_here(&self, others: &[DamageView]) -> Vec<(u64, u64)> {
        let runs = |view: &DamageView, counts: fn(&DamageRun) -> bool| -> Vec<(u64, u64)> {
            let runs = view.summary().0.into_iter().filter(|run| !run.is_made && counts(run));
            runs.map(|run| (run.first, run.last)).collect()
        };
        // Of a coarse run some blocks are good, and nothing says which.
        let lost = others.iter().map(|view| runs(view, |_| true)).reduce(|all, next| common(&all, &next));
        without(lost.unwrap_or_default(), &runs(self, |run| !run.is_coarse()))
    }

    /// Devices whose lists end with this process, and why.
    pub fn not_saved(&self) -> Vec<(String, &'static str)> {
        self.of_leaves(&|name, _, not_saved, _| not_saved.map(|why| (name.to_owned(), why)))
    }

    /// The reports of devices at the bottom.
    fn of_leaves<T>(&self, say: &SayOfLeaf<'_, T>) -> Vec<T> {
        match &*self.0 {
            View::Leaf { name, record, not_saved, elsewhere } => {
                say(name, record, *not_saved, elsewhere.as_ref()).into_iter().collect()
            }
            View::All(of) | View::Stripe { members: of, .. } => {
                of.iter().flat_map(|view| view.of_leaves(say)).collect()
            }
            View::Replicas(replicas) => lock(replicas).views.iter().flat_map(|(_, view)| view.of_leaves(say)).collect(),
            View::Slice { below, .. } => below.of_leaves(say),
        }
    }

    /// The sum over all that this view is made of: of devices, and of mirrors, which count those that they have no more, too.
    fn sum(&self, of_device: fn(&DamageRecord) -> u64, of_mirror: fn(&Replicas) -> u64) -> u64 {
        match &*self.0 {
            View::Leaf { record, .. } => of_device(record),
            View::All(views) | View::Stripe { members: views, .. } => {
                views.iter().map(|view| view.sum(of_device, of_mirror)).sum()
            }
            View::Replicas(replicas) => of_mirror(&lock(replicas)),
            View::Slice { below, .. } => below.sum(of_device, of_mirror),
        }
    }
}

impl DamageSource for DamageView {
    fn visit(&self, first: u64, last: u64, see: &mut dyn FnMut(&str, DamageRun)) {
        match &*self.0 {
            View::Leaf { name, record, .. } => record.visit(first, last, |run| see(name, run)),
            View::All(of) => of.iter().for_each(|view| view.visit(first, last, see)),
            View::Replicas(replicas) => {
                let replicas = lock(replicas).views.clone();
                replicas.iter().for_each(|(_, view)| view.visit(first, last, see));
            }
            View::Slice { below, first: from, blocks } => {
                let last = last.min(blocks - 1);
                if first <= last {
                    let up = |run: DamageRun| DamageRun { first: run.first - from, last: run.last - from, ..run };
                    below.visit(first + from, last + from, &mut |name, run| see(name, up(run)));
                }
            }
            View::Stripe { members, chunk_blocks } => {
                let row_blocks = chunk_blocks * members.len() as u64;
                let (from, to) = (first / row_blocks * chunk_blocks, (last / row_blocks).saturating_add(1));
                let to = to.saturating_mul(*chunk_blocks) - 1;
                for (number, member) in members.iter().enumerate() {
                    member.visit(from, to, &mut |name, run| {
                        striped(run, number as u64, *chunk_blocks, row_blocks, &mut |run| {
                            if run.last >= first && run.first <= last {
                                see(name, run.part(run.first.max(first), run.last.min(last)));
                            }
                        });
                    });
                }
            }
        }
    }

    fn generation(&self) -> u64 {
        self.sum(DamageRecord::generation, Replicas::generation)
    }

    fn additions(&self) -> u64 {
        self.sum(DamageRecord::additions, Replicas::additions)
    }

    fn lost_lists(&self) -> Vec<String> {
        self.of_leaves(&|name, record, _, elsewhere| {
            let is_lost = elsewhere.is_some_and(|elsewhere| elsewhere.is_lost.get().is_some());
            (is_lost || record.forgotten_from().is_some()).then(|| name.to_owned())
        })
    }
}

/// A run of a member of a stripe in the addresses of the stripe, chunk by chunk.
fn striped(run: DamageRun, number: u64, chunk_blocks: u64, row_blocks: u64, see: &mut dyn FnMut(DamageRun)) {
    let up = |lba: u64| lba / chunk_blocks * row_blocks + number * chunk_blocks + lba % chunk_blocks;
    let (first_chunk, last_chunk) = (run.first / chunk_blocks, run.last / chunk_blocks);
    let parts = (first_chunk..=last_chunk).map(|chunk| {
        let (first, last) = (run.first.max(chunk * chunk_blocks), run.last.min((chunk + 1) * chunk_blocks - 1));
        DamageRun { first: up(first), last: up(last), ..run.part(first, last) }
    });
    let is_one = last_chunk - first_chunk > MAX_CHUNKS
        // The parts of a coarse run have smaller minimums than the run: a stripe would have fewer bad blocks than its member.
        || run.is_coarse() && parts.clone().map(|part| part.bad_blocks).sum::<u64>() < run.bad_blocks;
    match is_one {
        true => see(DamageRun { first: up(run.first), last: up(run.last), ..run }),
        false => parts.for_each(see),
    }
}

/// What is in runs of both lists, each of which is in order.
fn common(a: &[(u64, u64)], b: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut both = Vec::new();
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        let (first, last) = (x.0.max(y.0), x.1.min(y.1));
        if first <= last {
            both.push((first, last));
        }
        if x.1 < y.1 {
            a.next()
        } else {
            b.next()
        };
    }
    both
}

/// What is left of runs without what is in others; both lists are in order.
fn without(runs: Vec<(u64, u64)>, others: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let (mut left, mut others) = (Vec::new(), others.iter().peekable());
    for (mut first, last) in runs {
        while others.next_if(|other| other.1 < first).is_some() {}
        while let Some(other) = others.peek().filter(|other| other.0 <= last) {
            if first < other.0 {
                left.push((first, other.0 - 1));
            }
            first = other.1.saturating_add(1);
            if other.1 >= last {
                break;
            }
            others.next();
        }
        if first <= last {
            left.push((first, last));
        }
    }
    left
}

fn lock(replicas: &Mutex<Replicas>) -> MutexGuard<'_, Replicas> {
    replicas.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for DamageView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DamageView").field(&self.summary().1).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::{BadBlock, BadBlockCause};
    use sealblock_units::Lba;

    fn leaf(name: &str, lbas: &[u64]) -> DamageView {
        let record = Arc::new(DamageRecord::new(1 << 40));
        record.add(&lbas.iter().map(|lba| BadBlock::media(Lba::new(*lba))).collect::<Vec<_>>());
        DamageView::leaf(name, &record, None)
    }

    fn seen(view: &DamageView, first: u64, last: u64) -> Vec<(String, u64, u64)> {
        let mut all = Vec::new();
        view.visit(first, last, &mut |name, run| all.push((name.to_owned(), run.first, run.last)));
        all
    }

    fn of(name: &str, first: u64, last: u64) -> (String, u64, u64) {
        (name.to_owned(), first, last)
    }

    #[test]
    fn a_mirror_has_the_bad_blocks_of_each_replica_and_counts_a_block_once() {
        let mirror = DamageView::mirror();
        mirror.set_replica("a", Some(leaf("a", &[3, 9])));
        mirror.set_replica("b", Some(leaf("b", &[9, 20])));
        assert_eq!(seen(&mirror, 0, 100), [of("a", 3, 3), of("a", 9, 9), of("b", 9, 9), of("b", 20, 20)]);
        assert_eq!(mirror.summary().1, DamageCount { least: 3, most: 3, made: 0 });
        mirror.set_replica("b", None);
        assert_eq!(mirror.summary().1.least, 2);
        mirror.set_replica("a", Some(leaf("a", &[])));
        assert_eq!((mirror.summary().1.least, mirror.replicas().len()), (0, 1));
    }

    #[test]
    fn a_group_names_the_members_whose_lists_were_lost() {
        let lost = |name: &str| {
            let record = Arc::new(DamageRecord::new(1 << 40));
            record.forget_from(0);
            DamageView::leaf(name, &record, None)
        };
        let mirror = DamageView::mirror();
        mirror.set_replica("a", Some(leaf("a", &[3])));
        mirror.set_replica("b", Some(lost("b")));
        let stripe = DamageView::stripe(vec![lost("c"), DamageView::slice(&mirror, 0, 9), leaf("d", &[])], 16);
        assert_eq!(stripe.lost_lists(), ["c", "b"]);
        let text = lost_lists_text(&stripe.lost_lists()).unwrap();
        assert!(text.starts_with("the lists of bad blocks of c, b were lost") && is_lost_list(&text), "{text}");
        mirror.set_replica("b", Some(leaf("b", &[])));
        assert_eq!((mirror.lost_lists(), lost_lists_text(&mirror.lost_lists())), (vec![], None));
        assert!(!is_lost_list("lost copies of metadata of b, of which the other copy is used: 1"));
    }

    #[test]
    fn what_a_mirror_counts_never_falls_and_never_is_what_it_was_before() {
        let mirror = DamageView::mirror();
        let mut seen = vec![mirror.generation()];
        let mut additions = 0;
        let views =
            [Some(leaf("a", &[3, 9])), Some(leaf("b", &[9])), None, Some(leaf("b", &[])), Some(leaf("b", &[7]))];
        for view in views {
            mirror.set_replica("b", view);
            assert!(mirror.additions() >= additions, "or news would be none");
            additions = mirror.additions();
            assert!(mirror.generation() > *seen.last().unwrap(), "{seen:?} and {}", mirror.generation());
            seen.push(mirror.generation());
        }
    }

    #[test]
    fn what_a_server_knows_is_taken_over_and_what_it_does_not_tell_is_named() {
        let record = Arc::new(DamageRecord::new(1 << 20));
        let far = DamageView::remote("far", &record, "its server keeps one", "no word for it");
        let both = DamageView::slice(&DamageView::all(vec![leaf("near", &[3]), far.clone()]), 0, 100);
        assert_eq!((both.not_asked(), both.is_complete()), (vec![("far".to_owned(), "no word for it")], true));
        far.take_over(&[DamageRun::exact(7, 8, BadBlockCause::Media)], false, false);
        assert_eq!(seen(&both, 0, 99), [of("near", 3, 3), of("far", 7, 8)]);
        assert!(both.not_asked().is_empty() && !both.is_complete());
        // What was met here stays, and so does what the server knows around it.
        let known = Arc::new(DamageRecord::new(1 << 20));
        known.add(&[BadBlock::media(Lba::new(12))]);
        let met = DamageView::remote("far", &known, "its server keeps one", "no word for it");
        met.take_over(&[DamageRun { bad_blocks: 5, ..DamageRun::exact(10, 19, BadBlockCause::Media) }], true, true);
        assert_eq!((both.lost_lists(), met.lost_lists()), (vec![], vec!["far".to_owned()]));
        assert_eq!(seen(&met, 0, 99), [of("far", 10, 11), of("far", 12, 12), of("far", 13, 19)]);
        assert_eq!(both.not_saved(), [("far".to_owned(), "its server keeps one")]);
    }

    #[test]
    fn what_only_one_replica_has_is_what_all_others_lost() {
        let (a, b, c) = (leaf("a", &[9]), leaf("b", &[3, 9, 20, 21, 22]), leaf("c", &[1, 3, 9, 21]));
        assert_eq!(a.only_good_here(std::slice::from_ref(&b)), [(3, 3), (20, 20), (21, 21), (22, 22)]);
        assert_eq!(a.only_good_here(&[b.clone(), c.clone()]), [(3, 3), (21, 21)]);
        assert!(b.only_good_here(&[a.clone(), c]).is_empty(), "what is lost everywhere is nobody's");
        assert!(a.only_good_here(&[leaf("d", &[])]).is_empty() && a.only_good_here(&[]).is_empty());
        assert_eq!(common(&[(0, 9), (20, 29)], &[(5, 22), (25, 25), (29, 40)]), [(5, 9), (20, 22), (25, 25), (29, 29)]);
        assert_eq!(without(vec![(0, 9), (20, 29)], &[(3, 4), (8, 21), (29, 40)]), [(0, 2), (5, 7), (22, 28)]);
        assert_eq!(without(vec![(5, 6), (8, 9)], &[(0, 6), (7, 7)]), [(8, 9)]);
    }

    #[test]
    fn blocks_of_members_have_the_addresses_of_the_group() {
        let stripe = DamageView::stripe(vec![leaf("a", &[0, 16, 17]), leaf("b", &[15, 16])], 16);
        // Chunks of 16 blocks: a has 0..15 and 32..47, b has 16..31 and 48..63.
        assert_eq!(
            seen(&stripe, 0, 100),
            [of("a", 0, 0), of("a", 32, 32), of("a", 33, 33), of("b", 31, 31), of("b", 48, 48)]
        );
        assert_eq!(seen(&stripe, 33, 47), [of("a", 33, 33)]);
        let slice = DamageView::slice(&stripe, 30, 10);
        assert_eq!(seen(&slice, 0, u64::MAX), [of("a", 2, 2), of("a", 3, 3), of("b", 1, 1)]);
        assert_eq!(seen(&slice, 2, 2), [of("a", 2, 2)]);
        assert!(seen(&slice, 10, 20).is_empty(), "behind its end");
    }

    #[test]
    fn a_long_run_of_a_member_is_a_run_of_the_stripe_with_good_blocks_in_it() {
        let mut all = Vec::new();
        striped(DamageRun::exact(8, 39, BadBlockCause::Media), 1, 16, 32, &mut |run| all.push((run.first, run.last)));
        assert_eq!(all, [(24, 31), (48, 63), (80, 87)]);
        let long = DamageRun::exact(0, 16 * (MAX_CHUNKS + 1), BadBlockCause::Media);
        let mut runs = Vec::new();
        striped(long, 0, 16, 32, &mut |run| runs.push(run));
        assert_eq!((runs.len(), runs[0].bad_blocks, runs[0].is_coarse()), (1, long.blocks(), true));
    }

    #[test]
    fn a_stripe_has_as_many_bad_blocks_as_its_members_at_least() {
        let coarse = |bad_blocks| DamageRun { bad_blocks, ..DamageRun::exact(8, 39, BadBlockCause::Media) };
        let of = |run: DamageRun| {
            let mut all = Vec::new();
            striped(run, 1, 16, 32, &mut |run| all.push((run.first, run.last, run.bad_blocks)));
            all
        };
        assert_eq!(of(coarse(3)), [(24, 87, 3)], "any chunk may have all of them");
        assert_eq!(of(coarse(0)), [(24, 31, 0), (48, 63, 0), (80, 87, 0)]);
        let record = Arc::new(DamageRecord::new(1 << 20));
        record.restore(&[coarse(3), DamageRun { bad_blocks: 2, ..DamageRun::exact(64, 70, BadBlockCause::Media) }]);
        let stripe = DamageView::stripe(vec![leaf("a", &[0]), DamageView::leaf("b", &record, None)], 16);
        assert_eq!(stripe.summary().1.least, 6);
    }
}
