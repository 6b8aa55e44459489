//! Claims: which blocks of a shared device are being changed, and who excludes such changes.
//!
//! A plain change (a write) claims its blocks beside all others. An exclusion (compare and write, a copy, the fence of
//! a session) waits until nothing that overlaps it is in flight, and holds its blocks against every change that begins
//! later. Each core has a [`Lane`] for its changes, so that cores do not share what a change writes.
//!
//! Invariants:
//! - While an exclusion is held, no claim and no other exclusion overlaps it.
//! - What overlaps is granted in the order in which it was requested, except that changes do not wait for each other.
//!   An exclusion has its place in that order from its first poll on, although it may still wait. So nothing starves.
//! - Dropping a future or a guard at any point frees its blocks, and wakes whoever waited for them.
//!
//! Shape: a change writes its blocks into a place of its lane, and then reads whether an exclusion of them is
//! announced. An exclusion announces its blocks, and then reads the places of all lanes. Both write before they read,
//! with sequential consistency, so at least one of them sees the other. If the change sees the exclusion, it leaves its
//! place and queues: it takes a ticket, as every exclusion does. If only the exclusion sees the change, it waits until
//! the change leaves. Changes back off and exclusions do not, so the two never wait for each other.
//!
//! Tickets are in one list behind a mutex. An exclusion waits for earlier tickets that overlap it; a change waits only
//! for earlier exclusions. A change that was granted takes its place before it drops its ticket, so a later exclusion
//! finds either the one or the other.
//!
//! No wake-up is lost: an exclusion looks at the places and leaves its waker in one critical section of the list. A
//! change frees its place, and then reads the announcements. So either the exclusion sees the place free, or the change
//! sees the announcement, locks the list after that critical section, and finds the waker.
//!
//! Costs: a change has two read-modify-write operations on cache lines of its own core, and two reads of one line that
//! changes only when an exclusion begins or ends. It allocates nothing and takes no lock, unless an announced exclusion
//! overlaps it. An exclusion takes the lock three times, and reads one line of each lane for every eight changes that
//! were ever in flight together there, at most 33. If it has to wait, it reads
//! them again each time when a change that overlaps it ends.
//!
//! `tests/claims` runs this file under many interleavings, with the lock and the atomics of a model checker.

use std::cell::Cell;
use std::future::poll_fn;
use std::ops::RangeInclusive;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use crate::primitives::{AtomicU64, EXCLUSION_PLACES, LANE_PLACES, Mutex, MutexGuard, Ordering};

/// Blocks in 64 bits, so that one atomic operation writes or reads them: the first one, their number, and the unit of
/// both. Zero is no blocks. What has no exact form is rounded outwards, so two ranges that overlap always do so in this
/// form, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PackedRange(u64);

impl PackedRange {
    const NONE: PackedRange = PackedRange(0);
    pub(crate) const ALL: PackedRange = PackedRange(u64::MAX);
    const COUNT_BITS: u32 = 24;
    const FIRST_BITS: u32 = 39;
    /// The larger unit is 2^16 blocks, for addresses from 2^39 on and for 2^24 blocks or more.
    const LARGE_UNIT_SHIFT: u32 = 16;

    pub(crate) fn new(blocks: &RangeInclusive<u64>) -> PackedRange {
        for (is_large, shift) in [(0, 0), (1, Self::LARGE_UNIT_SHIFT)] {
            let (first, last) = (blocks.start() >> shift, blocks.end() >> shift);
            let Some(beyond_first) = last.checked_sub(first) else { break };
            if first >> Self::FIRST_BITS == 0 && beyond_first < (1 << Self::COUNT_BITS) - 1 {
                return PackedRange(first << (Self::COUNT_BITS + 1) | (beyond_first + 1) << 1 | is_large);
            }
        }
        // Also for addresses that no device has, since a request is claimed before its gate refuses it.
        PackedRange::ALL
    }

    fn first_and_last(self) -> (u64, u64) {
        if self == PackedRange::ALL {
            return (0, u64::MAX);
        }
        let shift = if self.0 & 1 == 0 { 0 } else { Self::LARGE_UNIT_SHIFT };
        let (first, count) = (self.0 >> (Self::COUNT_BITS + 1), (self.0 >> 1) & ((1 << Self::COUNT_BITS) - 1));
        (first << shift, ((first + count) << shift) - 1)
    }

    pub(crate) fn overlaps(self, other: PackedRange) -> bool {
        if self == PackedRange::NONE || other == PackedRange::NONE {
            return false;
        }
        let ((first, last), (other_first, other_last)) = (self.first_and_last(), other.first_and_last());
        first <= other_last && other_first <= last
    }
}

/// What exclusions announce to changes: one cache line, which is written when an exclusion begins and ends.
#[repr(align(128))]
pub(crate) struct Announcements {
    /// The number of announced ranges; in the upper half, of those that found no place and count as all blocks.
    count: AtomicU64,
    places: [AtomicU64; EXCLUSION_PLACES],
}

/// Where a range is announced; `None` if it found no place.
type Place = Option<usize>;

impl Announcements {
    const ONE: u64 = 1;
    const ONE_WITHOUT_PLACE: u64 = 1 << 32 | Self::ONE;

    fn new() -> Announcements {
        Announcements { count: AtomicU64::new(0), places: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// True if an exclusion of any of these blocks is announced, and possibly if none is.
    pub(crate) fn stop(&self, range: PackedRange) -> bool {
        let count = self.count.load(Ordering::SeqCst);
        count != 0 && (count >= Self::ONE_WITHOUT_PLACE || self.is_in_a_place(range))
    }

    pub(crate) fn is_in_a_place(&self, range: PackedRange) -> bool {
        self.places.iter().any(|place| PackedRange(place.load(Ordering::SeqCst)).overlaps(range))
    }

    /// Only under the lock of the list.
    fn announce(&self, range: PackedRange) -> Place {
        let place = self.places.iter().position(|place| place.load(Ordering::SeqCst) == 0);
        if let Some(place) = place {
            self.places[place].store(range.0, Ordering::SeqCst);
        }
        self.count.fetch_add(Self::weight(place), Ordering::SeqCst);
        place
    }

    /// Only under the lock of the list.
    fn withdraw(&self, place: Place) {
        if let Some(place) = place {
            self.places[place].store(0, Ordering::SeqCst);
        }
        self.count.fetch_sub(Self::weight(place), Ordering::SeqCst);
    }

    const fn weight(place: Place) -> u64 {
        if place.is_some() { Self::ONE } else { Self::ONE_WITHOUT_PLACE }
    }
}

/// The claims of one lane. Only its own core writes them.
#[repr(align(128))]
pub(crate) struct LaneClaims {
    places: [AtomicU64; LANE_PLACES],
    /// The number of places that were ever used, always the lowest ones.
    used: AtomicU64,
    /// Changes that found no place, and count as all blocks.
    without_place: AtomicU64,
}

impl LaneClaims {
    fn new() -> LaneClaims {
        let places = std::array::from_fn(|_| AtomicU64::new(0));
        LaneClaims { places, used: AtomicU64::new(0), without_place: AtomicU64::new(0) }
    }

    fn overlap(&self, ranges: &[PackedRange; 2]) -> bool {
        // A place that is not counted yet is one of a change that will see the announcement.
        let used = self.used.load(Ordering::SeqCst) as usize;
        self.without_place.load(Ordering::SeqCst) != 0
            || self.places[..used].iter().any(|place| {
                let claimed = PackedRange(place.load(Ordering::SeqCst));
                ranges.iter().any(|range| range.overlaps(claimed))
            })
    }
}

/// Those who queue, in the order of their requests, and the exclusions that are held.
struct List {
    next_id: u64,
    tickets: Vec<ListedTicket>,
    lanes: Vec<Arc<LaneClaims>>,
}

struct ListedTicket {
    id: u64,
    ranges: [PackedRange; 2],
    role: Role,
    waker: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Change,
    /// Where each of its ranges is announced.
    Exclusion([Place; 2]),
}

/// Taken out under the lock of the list and woken after it, since waking runs foreign code.
type Wakers = SmallVec<[Waker; 4]>;

impl ListedTicket {
    fn excludes(&self) -> bool {
        self.role != Role::Change
    }

    fn overlaps(&self, range: PackedRange) -> bool {
        self.ranges.iter().any(|own| own.overlaps(range))
    }

    /// True if the later one of these two waits for the other.
    fn conflicts(&self, other: &ListedTicket) -> bool {
        (self.excludes() || other.excludes()) && other.ranges.iter().any(|range| self.overlaps(*range))
    }
}

impl List {
    fn position(&self, id: u64) -> usize {
        // Ids only grow, and a ticket is in the list until its guard removes it.
        self.tickets.binary_search_by_key(&id, |ticket| ticket.id).expect("a ticket is listed until it is dropped")
    }

    fn is_granted(&self, position: usize) -> bool {
        let ticket = &self.tickets[position];
        let is_first = !self.tickets[..position].iter().any(|earlier| earlier.conflicts(ticket));
        let mut lanes = self.lanes.iter();
        is_first && (ticket.role == Role::Change || !lanes.any(|lane| lane.overlap(&ticket.ranges)))
    }

    fn wakers_of(&mut self, waits: impl Fn(&ListedTicket) -> bool) -> Wakers {
        self.tickets.iter_mut().filter(|ticket| waits(ticket)).filter_map(|ticket| ticket.waker.take()).collect()
    }
}

pub(crate) struct ClaimsState {
    pub(crate) announced: Announcements,
    list: Mutex<List>,
}

impl ClaimsState {
    fn list(&self) -> MutexGuard<'_, List> {
        // Nothing under the lock panics half-way through a change of the list.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the exclusions that may have waited for a claim of these blocks, which has just ended.
    fn wake_exclusions(&self, range: PackedRange) {
        let woken = self.list().wakers_of(|ticket| ticket.excludes() && ticket.overlaps(range));
        woken.into_iter().for_each(Waker::wake);
    }

    fn queue(&self, ranges: [PackedRange; 2], excludes: bool) -> Ticket<'_> {
        let mut list = self.list();
        let id = list.next_id;
        list.next_id += 1;
        let announce = |range: PackedRange| (range != PackedRange::NONE).then(|| self.announced.announce(range));
        // Announced before anything is waited for. Otherwise a change that overlaps only this exclusion would begin
        // while it waits for an earlier one, and overtake the changes that a fence is there for.
        let role = if excludes { Role::Exclusion(ranges.map(|range| announce(range).flatten())) } else { Role::Change };
        list.tickets.push(ListedTicket { id, ranges, role, waker: None });
        Ticket { claims: self, id }
    }
}

/// A place in the order of those who queue, until it is dropped.
struct Ticket<'a> {
    claims: &'a ClaimsState,
    id: u64,
}

impl Ticket<'_> {
    async fn granted(&self) {
        poll_fn(|cx| self.poll_granted(cx)).await;
    }

    fn poll_granted(&self, cx: &Context<'_>) -> Poll<()> {
        let mut list = self.claims.list();
        let position = list.position(self.id);
        if list.is_granted(position) {
            return Poll::Ready(());
        }
        let waker = &mut list.tickets[position].waker;
        if waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        let previous = waker.replace(cx.waker().clone());
        drop(list);
        drop(previous);
        Poll::Pending
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut list = self.claims.list();
        let position = list.position(self.id);
        let ticket = list.tickets.remove(position);
        if let Role::Exclusion(places) = ticket.role {
            let announced = ticket.ranges.iter().zip(places).filter(|(range, _)| **range != PackedRange::NONE);
            announced.for_each(|(_, place)| self.claims.announced.withdraw(place));
        }
        let woken = list.wakers_of(|other| other.id > ticket.id && ticket.conflicts(other));
        drop(list);
        drop(ticket);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// The claims of one shared device, for all cores. Clones are of the same device. Ranges are block addresses, from the
/// first to the last.
#[derive(Clone)]
pub struct Claims(pub(crate) Arc<ClaimsState>);

impl Default for Claims {
    fn default() -> Claims {
        let list = Mutex::new(List { next_id: 0, tickets: Vec::new(), lanes: Vec::new() });
        Claims(Arc::new(ClaimsState { announced: Announcements::new(), list }))
    }
}

impl Claims {
    /// A lane for the changes of the calling core. It ends when it is dropped.
    pub fn lane(&self) -> Lane {
        let lane = Lane::new(self);
        lane.join();
        lane
    }

    /// Excludes changes of the blocks, once none is in flight. Any thread may call this. Later changes of them, and
    /// later exclusions, wait from the first poll on.
    pub async fn exclude(&self, blocks: RangeInclusive<u64>) -> Exclusion<'_> {
        self.exclude_ranges([PackedRange::new(&blocks), PackedRange::NONE]).await
    }

    /// Excludes changes of the blocks of both ranges. They have one place in the order, so two such exclusions cannot
    /// wait for each other.
    pub async fn exclude_both(&self, one: RangeInclusive<u64>, other: RangeInclusive<u64>) -> Exclusion<'_> {
        self.exclude_ranges([PackedRange::new(&one), PackedRange::new(&other)]).await
    }

    async fn exclude_ranges(&self, ranges: [PackedRange; 2]) -> Exclusion<'_> {
        // Made before the wait, so that dropping the future withdraws it.
        let ticket = self.0.queue(ranges, true);
        ticket.granted().await;
        Exclusion { _ticket: ticket }
    }
}

/// Blocks that nobody else changes until this is dropped.
#[must_use = "the exclusion ends when this is dropped"]
pub struct Exclusion<'a> {
    _ticket: Ticket<'a>,
}

/// The changes of one core. It belongs to that core's thread.
pub struct Lane {
    claims: Arc<ClaimsState>,
    own: Arc<LaneClaims>,
    /// A bit for each place that is free.
    free: [Cell<u64>; FREE_WORDS],
}

const FREE_WORDS: usize = LANE_PLACES.div_ceil(64);

impl Lane {
    /// A lane that exclusions do not know yet.
    pub(crate) fn new(claims: &Claims) -> Lane {
        let bits_of = |word: usize| u64::MAX >> (64 - (LANE_PLACES - word * 64).min(64));
        let free = std::array::from_fn(|word| Cell::new(bits_of(word)));
        Lane { claims: Arc::clone(&claims.0), own: Arc::new(LaneClaims::new()), free }
    }

    /// An exclusion that does not see the lane in the list yet has announced itself before the lane's first claim.
    pub(crate) fn join(&self) {
        self.claims.list().lanes.push(Arc::clone(&self.own));
    }

    /// Claims the blocks for a change if that needs no waiting. `None` if an exclusion of them is held or waited for,
    /// and possibly if many exclusions or changes are in flight; [`Lane::enter`] then finds out.
    pub fn try_enter(&self, blocks: RangeInclusive<u64>) -> Option<Claim<'_>> {
        let claim = self.claim(PackedRange::new(&blocks))?;
        // If the claim is dropped here, an exclusion that has seen it meanwhile is woken.
        (!self.claims.announced.stop(claim.range)).then_some(claim)
    }

    /// Claims the blocks for a change, concurrently with other changes. Waits for earlier exclusions that overlap them.
    pub async fn enter(&self, blocks: RangeInclusive<u64>) -> Claim<'_> {
        match self.try_enter(blocks.clone()) {
            Some(claim) => claim,
            None => self.enter_queued(PackedRange::new(&blocks)).await,
        }
    }

    pub(crate) async fn enter_queued(&self, range: PackedRange) -> Claim<'_> {
        let ticket = self.claims.queue([range, PackedRange::NONE], false);
        ticket.granted().await;
        // It need not look again: a later exclusion waits for the ticket, which is dropped only when it has a place.
        // Without a place it keeps the ticket until its end.
        match self.claim_place(range) {
            Some(claim) => claim,
            None => Claim { lane: self, range, place: ClaimPlace::Ticket { _ticket: ticket } },
        }
    }

    /// Claims blocks without looking whether they are excluded.
    pub(crate) fn claim(&self, range: PackedRange) -> Option<Claim<'_>> {
        if let Some(claim) = self.claim_place(range) {
            return Some(claim);
        }
        // An exclusion waits for every change without a place. So none begins while any exclusion is announced;
        // otherwise it might wait forever.
        if self.claims.announced.stop(PackedRange::ALL) {
            return None;
        }
        self.own.without_place.fetch_add(1, Ordering::SeqCst);
        Some(Claim { lane: self, range: PackedRange::ALL, place: ClaimPlace::None })
    }

    fn claim_place(&self, range: PackedRange) -> Option<Claim<'_>> {
        let (word, free) = self.free.iter().enumerate().find(|(_, free)| free.get() != 0)?;
        let place = word * 64 + free.get().trailing_zeros() as usize;
        free.set(free.get() & (free.get() - 1));
        if place as u64 >= self.own.used.load(Ordering::Relaxed) {
            self.own.used.store(place as u64 + 1, Ordering::SeqCst);
        }
        self.own.places[place].swap(range.0, Ordering::SeqCst);
        Some(Claim { lane: self, range, place: ClaimPlace::Place(place) })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Its claims borrow it, so there are none, except those that were leaked: exclusions that wait for these end.
        let woken = {
            let mut list = self.claims.list();
            list.lanes.retain(|lane| !Arc::ptr_eq(lane, &self.own));
            list.wakers_of(ListedTicket::excludes)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

/// Blocks that are being changed, until this is dropped.
#[must_use = "the claim ends when this is dropped"]
pub struct Claim<'a> {
    lane: &'a Lane,
    /// What exclusions see.
    range: PackedRange,
    place: ClaimPlace<'a>,
}

enum ClaimPlace<'a> {
    Place(usize),
    /// It is only counted.
    None,
    /// It is in the list, where later exclusions wait for it.
    Ticket {
        _ticket: Ticket<'a>,
    },
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Lane { claims, own, free } = self.lane;
        match self.place {
            ClaimPlace::Place(place) => {
                own.places[place].swap(0, Ordering::SeqCst);
                let free = &free[place / 64];
                free.set(free.get() | 1 << (place % 64));
            }
            ClaimPlace::None => {
                own.without_place.fetch_sub(1, Ordering::SeqCst);
            }
            ClaimPlace::Ticket { .. } => return,
        }
        if claims.announced.stop(self.range) {
            claims.wake_exclusions(self.range);
        }
    }
}
