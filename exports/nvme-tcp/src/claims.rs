//! Claims on blocks: how a fused Compare and Write keeps other writes away.
//!
//! Invariants: while an exclusive claim is held, no write of overlapping blocks is under way; claims that overlap are granted
//! in the order they were made, so nobody starves; a write costs two atomic additions on a counter of its thread as long as
//! nobody claims exclusively.
//!
//! Shape: fused commands are rare and writes are not, so writes are only counted. Who wants blocks for itself first makes
//! its wish known, which sends new writes to the list of claims, and then waits until those that were only counted are
//! gone. The order of the two steps on either side (count, then look for wishes; wish, then look at the counts) is what
//! makes it safe, and it needs sequential consistency.

use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Blocks that are claimed: addresses from the first to the last.
pub(crate) type Blocks = RangeInclusive<u64>;

/// Counters of writes, so that threads do not fight over one.
const SHARDS: usize = 8;

#[derive(Default)]
#[repr(align(64))]
struct Shard(AtomicUsize);

/// The claims on the blocks of one namespace.
#[derive(Default)]
pub(crate) struct Claims {
    /// Writes under way that are only counted.
    counted: [Shard; SHARDS],
    /// Exclusive claims that are held or waited for.
    exclusive: AtomicUsize,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    next: u64,
    /// In the order they were made.
    claims: Vec<Listed>,
    waiting: Vec<Waker>,
}

struct Listed {
    id: u64,
    blocks: Blocks,
    exclusive: bool,
}

/// A claim; given up when it is dropped.
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    kind: Kind,
}

enum Kind {
    Counted(usize),
    Listed { id: u64, exclusive: bool },
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the blocks may be written, among other writes.
    pub(crate) async fn write(&self, blocks: Blocks) -> Claim<'_> {
        match self.try_write() {
            Some(claim) => claim,
            None => self.listed(blocks, false).await,
        }
    }

    /// The right to write any blocks, among other writes, while nobody claims exclusively.
    pub(crate) fn try_write(&self) -> Option<Claim<'_>> {
        let shard = shard();
        self.counted[shard].0.fetch_add(1, Ordering::SeqCst);
        let claim = Claim { claims: self, kind: Kind::Counted(shard) };
        (self.exclusive.load(Ordering::SeqCst) == 0).then_some(claim)
    }

    /// Waits until the blocks belong to the caller alone, as far as writes are concerned.
    pub(crate) async fn exclusive(&self, blocks: Blocks) -> Claim<'_> {
        self.exclusive.fetch_add(1, Ordering::SeqCst);
        self.listed(blocks, true).await
    }

    async fn listed(&self, blocks: Blocks, exclusive: bool) -> Claim<'_> {
        let id = {
            let mut list = self.lock();
            list.next += 1;
            let id = list.next;
            list.claims.push(Listed { id, blocks: blocks.clone(), exclusive });
            id
        };
        // Made before the wait, so that a claim that is no longer waited for is given up too.
        let claim = Claim { claims: self, kind: Kind::Listed { id, exclusive } };
        poll_fn(|cx| {
            let mut list = self.lock();
            if list.may_go_on(id, &blocks, exclusive) && (!exclusive || self.none_counted()) {
                return Poll::Ready(());
            }
            list.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        claim
    }

    fn none_counted(&self) -> bool {
        self.counted.iter().all(|shard| shard.0.load(Ordering::SeqCst) == 0)
    }

    /// Lets everybody who waits look again.
    fn wake(&self) {
        let waiting = std::mem::take(&mut self.lock().waiting);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl List {
    /// Whether no earlier claim is in the way of this one.
    fn may_go_on(&self, id: u64, blocks: &Blocks, exclusive: bool) -> bool {
        let earlier = self.claims.iter().take_while(|other| other.id < id);
        !earlier.into_iter().any(|other| (exclusive || other.exclusive) && overlap(&other.blocks, blocks))
    }
}

fn overlap(one: &Blocks, other: &Blocks) -> bool {
    one.start() <= other.end() && other.start() <= one.end()
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        match self.kind {
            Kind::Counted(shard) => {
                self.claims.counted[shard].0.fetch_sub(1, Ordering::SeqCst);
                if self.claims.exclusive.load(Ordering::SeqCst) == 0 {
                    return;
                }
            }
            Kind::Listed { id, exclusive } => {
                self.claims.lock().claims.retain(|claim| claim.id != id);
                if exclusive {
                    self.claims.exclusive.fetch_sub(1, Ordering::SeqCst);
                }
            }
        }
        self.claims.wake();
    }
}

/// The counter of this thread.
fn shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|shard| *shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::Context;

    fn extent(start: u64, blocks: u64) -> Blocks {
        start..=start + blocks - 1
    }

    fn poll<'a, F: Future<Output = Claim<'a>>>(future: Pin<&mut F>) -> Option<Claim<'a>> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(claim) => Some(claim),
            Poll::Pending => None,
        }
    }

    #[test]
    fn writes_do_not_wait_for_writes_and_an_exclusive_claim_waits_for_all_of_them() {
        let claims = Claims::default();
        let (first, second) = (poll(pin!(claims.write(extent(0, 8)))), poll(pin!(claims.write(extent(4, 8)))));
        assert!(first.is_some() && second.is_some());
        let mut alone = pin!(claims.exclusive(extent(100, 1)));
        assert!(poll(alone.as_mut()).is_none(), "nobody knows where the counted writes go");
        drop(first);
        assert!(poll(alone.as_mut()).is_none());
        drop(second);
        assert!(poll(alone.as_mut()).is_some());
    }

    #[test]
    fn only_overlapping_writes_wait_for_an_exclusive_claim() {
        let claims = Claims::default();
        let alone = poll(pin!(claims.exclusive(extent(10, 2)))).expect("nothing is in the way");
        let (mut over, mut beside) = (pin!(claims.write(extent(11, 4))), pin!(claims.write(extent(12, 4))));
        assert!(poll(over.as_mut()).is_none());
        assert!(poll(beside.as_mut()).is_some());
        drop(alone);
        assert!(poll(over.as_mut()).is_some());
        assert_eq!((claims.exclusive.load(Ordering::SeqCst), claims.lock().claims.len()), (0, 0));
    }

    #[test]
    fn overlapping_claims_are_granted_in_their_order_and_those_given_up_are_not_in_the_way() {
        let claims = Claims::default();
        let held = poll(pin!(claims.exclusive(extent(0, 4)))).expect("nothing is in the way");
        let mut second = Box::pin(claims.exclusive(extent(0, 4)));
        assert!(poll(second.as_mut()).is_none());
        let mut third = pin!(claims.write(extent(3, 1)));
        assert!(poll(third.as_mut()).is_none());
        drop(held);
        assert!(poll(third.as_mut()).is_none(), "the second was first");
        drop(second);
        assert!(poll(third.as_mut()).is_some());
        assert!(poll(pin!(claims.write(extent(0, 9)))).is_some_and(|claim| matches!(claim.kind, Kind::Counted(_))));
    }

    #[test]
    fn a_counter_that_must_not_be_torn_is_not() {
        let claims = Claims::default();
        let torn = Mutex::new(0_u32);
        let block = |future: Pin<&mut dyn Future<Output = ()>>| {
            let mut future = future;
            while future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                std::thread::yield_now();
            }
        };
        let change = || {
            let before = *torn.lock().unwrap();
            std::thread::yield_now();
            *torn.lock().unwrap() = before + 1;
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        block(pin!(async {
                            let _claim = claims.exclusive(extent(0, 2)).await;
                            change();
                        }));
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..200 {
                    block(pin!(async {
                        let _claim = claims.write(extent(1, 2)).await;
                        change();
                    }));
                }
            });
        });
        assert_eq!(*torn.lock().unwrap(), 600);
    }
}
