//! The possible contents of one block: every write that no other write has overtaken for good.
//!
//! The order of writes follows from what hosts know: a write that ended before another was issued comes before it. A
//! write also comes before another one if it had ended when a read was issued that returned the other one. Other pairs
//! may have any order until a read shows it.

use super::content::Content;

/// A moment in the order of all host events, which are starts and ends of requests.
pub type Moment = u64;

/// One write to a block.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Its request.
    pub(super) request_id: u64,
    pub(super) content: Content,
    issued: Moment,
    /// When it completed or failed, or when its machine stopped. It cannot take effect after that.
    ended: Option<Moment>,
    /// True if it completed on this machine, or was found after a crash: it has certainly taken effect.
    done: bool,
    /// True if no crash can undo it.
    durable: bool,
    /// True for a Discard: the earlier content remains permitted.
    optional: bool,
    /// Requests that are known to come after it, although they overlapped it in time.
    overtaken_by: Vec<u64>,
}

impl Candidate {
    fn comes_before(&self, other: WriteOrder) -> bool {
        self.ended.is_some_and(|ended| ended < other.issued) || self.overtaken_by.contains(&other.request_id)
    }

    fn order(&self) -> WriteOrder {
        WriteOrder { request_id: self.request_id, issued: self.issued }
    }

    fn is_overtaken_by_one_of(&self, others: &[WriteOrder]) -> bool {
        others.iter().any(|other| self.comes_before(*other))
    }
}

/// The position of a write in the order of writes.
#[derive(Clone, Copy)]
struct WriteOrder {
    request_id: u64,
    issued: Moment,
}

/// The writes that are possible for one block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    candidates: Vec<Candidate>,
    /// Contents that were issued since the machine started, or that came back after a loss; for reads that were in
    /// flight then.
    issued: Vec<(Moment, Content)>,
    /// When its newest durable content became durable.
    durable_at: Moment,
}

/// The contents that a read issued at some moment may return, apart from those issued while the read is in flight.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    permitted: Vec<Content>,
}

impl Block {
    /// A block that was never written.
    pub(super) fn unwritten() -> Block {
        let mut block = Block { candidates: Vec::new(), issued: Vec::new(), durable_at: 0 };
        block.set_durable(Content::Zero, 0);
        block
    }

    /// A block with this content, which is durable.
    pub(super) fn holding(content: Content) -> Block {
        let mut block = Block::unwritten();
        block.set_durable(content, 0);
        block
    }

    pub(super) fn issue(&mut self, request_id: u64, content: Content, now: Moment, optional: bool) {
        let overtaken_by = Vec::new();
        let (ended, done, durable) = (None, false, false);
        self.issued.push((now, content));
        let candidate = Candidate { request_id, content, issued: now, ended, done, durable, optional, overtaken_by };
        self.candidates.push(candidate);
    }

    pub(super) fn end(&mut self, request_id: u64, now: Moment, done: bool, durable: bool) {
        if let Some(candidate) = self.candidates.iter_mut().find(|candidate| candidate.request_id == request_id) {
            candidate.ended = Some(now);
            candidate.done = done;
            candidate.durable = durable && !candidate.optional;
        }
        if durable {
            self.durable_at = now;
        }
        self.prune();
    }

    pub(super) fn make_durable(&mut self, request_id: u64, now: Moment) {
        self.durable_at = now;
        if let Some(candidate) = self.candidates.iter_mut().find(|candidate| candidate.request_id == request_id) {
            candidate.durable = candidate.done && !candidate.optional;
        }
        self.prune();
    }

    /// Drops writes that come before a durable one: no crash can restore them.
    fn prune(&mut self) {
        let durable: Vec<WriteOrder> = self.candidates.iter().filter(|one| one.durable).map(Candidate::order).collect();
        self.candidates.retain(|one| !one.is_overtaken_by_one_of(&durable));
    }

    /// The writes that a read issued now may return: those that no finished write has overtaken.
    fn current_candidates(&self) -> impl Iterator<Item = &Candidate> {
        let done = self.candidates.iter().filter(|one| one.done && !one.optional);
        let done: Vec<WriteOrder> = done.map(Candidate::order).collect();
        self.candidates.iter().filter(move |one| !one.is_overtaken_by_one_of(&done))
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot { permitted: self.current_candidates().map(|candidate| candidate.content).collect() }
    }

    /// True if a read that was issued at `since` may return `content`.
    pub(super) fn permits(&self, content: Content, snapshot: &Snapshot, since: Moment) -> bool {
        snapshot.permitted.contains(&content)
            || self.issued.iter().any(|(at, issued)| *at > since && *issued == content)
    }

    /// Adds the order that a read issued at `since` proves: writes that had ended by then but were not returned come
    /// before the returned one.
    pub(super) fn observe(&mut self, content: Content, since: Moment) {
        let mut matching = self.candidates.iter().filter(|candidate| candidate.content == content);
        let (Some(seen), None) = (matching.next(), matching.next()) else { return };
        let seen = seen.order();
        for other in &mut self.candidates {
            let certain = other.done && other.ended.is_some_and(|ended| ended < since);
            if certain && other.request_id != seen.request_id && !other.comes_before(seen) {
                other.overtaken_by.push(seen.request_id);
            }
        }
        self.prune();
    }

    /// The machine stopped: unflushed writes may be there or not, and nothing is in flight any more.
    pub(super) fn crash(&mut self, now: Moment) {
        for candidate in &mut self.candidates {
            candidate.ended.get_or_insert(now);
            candidate.done = candidate.durable;
        }
        self.issued.clear();
    }

    /// Nothing is in flight any more; completed writes stay.
    pub(super) fn kill(&mut self, now: Moment) {
        for candidate in &mut self.candidates {
            candidate.ended.get_or_insert(now);
        }
        self.issued.clear();
    }

    /// From now on unflushed writes may be there or not, while requests continue. A read in flight may return a content
    /// that comes back, even if it is overwritten meanwhile.
    pub(super) fn lose(&mut self, now: Moment) {
        for candidate in &mut self.candidates {
            candidate.done = candidate.durable;
        }
        let back: Vec<Content> = self.current_candidates().map(|candidate| candidate.content).collect();
        self.issued.extend(back.into_iter().map(|content| (now, content)));
    }

    /// After a kill, `content` was found: it is the current content, but may be lost later unless it is flushed.
    /// Returns the request that a Flush would make durable.
    pub(super) fn find(&mut self, content: Content) -> Option<u64> {
        let found = self.current_candidates().filter(|candidate| candidate.content == content).last()?.request_id;
        for candidate in &mut self.candidates {
            if candidate.request_id == found {
                candidate.done = true;
            } else if !candidate.overtaken_by.contains(&found) {
                candidate.overtaken_by.push(found);
            }
        }
        self.prune();
        Some(found)
    }

    /// After a power cut, `content` was found: the medium has nothing else.
    pub(super) fn set_durable(&mut self, content: Content, now: Moment) {
        self.durable_at = now;
        let request_id = self.candidates.iter().find(|one| one.content == content).map_or(0, |one| one.request_id);
        let (issued, ended) = (0, Some(0));
        let (done, durable, optional) = (true, true, false);
        let overtaken_by = Vec::new();
        self.candidates.clear();
        self.candidates.push(Candidate { request_id, content, issued, ended, done, durable, optional, overtaken_by });
    }

    /// The content that the block must have now and after any crash, if only one is possible.
    pub(super) fn certain(&self) -> Option<Content> {
        match self.candidates.as_slice() {
            [one] if one.durable => Some(one.content),
            _ => None,
        }
    }

    /// True if a possible write made it unreadable, or one issued since the machine started.
    pub(super) fn was_made_unreadable(&self) -> bool {
        self.candidates.iter().any(|one| one.content == Content::Unreadable)
            || self.issued.iter().any(|(_, content)| *content == Content::Unreadable)
    }

    /// True if its content was durable before `moment`.
    pub(super) fn was_durable_before(&self, moment: Moment) -> bool {
        self.durable_at < moment
    }

    /// The permitted contents, for reports.
    pub(super) fn permitted(&self) -> Vec<Content> {
        self.current_candidates().map(|candidate| candidate.content).collect()
    }
}
