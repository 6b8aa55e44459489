//! The bitmap pages of the legs, and the labels that refer to them.
//!
//! Invariant: whatever label a crash leaves on a leg, the pages that it counts hold at least what it said. So before labels
//! refer to pages these are written, with what the labels before said and what the next ones are to say; what left the set
//! leaves the pages one writing later. Pages are written in place. One that was cut short counts as all of its regions, and
//! so does one that another stay of the leg wrote: the epoch tells.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, Request};
use sealblock_runtime_memory::Slice;

use crate::label::most_set_bytes;
use crate::mirror::Mirror;
use crate::regions::Regions;
use crate::replica::Replica;
use crate::sets::{MOST_SETS, PageId, encode_paged, encode_plain, pages_of_set, pages_with};

/// Pages that are written to a leg at once.
const PAGES_AT_ONCE: usize = 16;

/// What is in the pages of the legs.
#[derive(Default)]
pub(crate) struct Paging {
    /// By their numbers; nothing where the label is enough.
    sets: [Option<Paged>; MOST_SETS],
    writings: u64,
}

/// A set that has pages.
struct Paged {
    /// What the pages hold.
    content: Regions,
    /// What the set was when labels were last written, on any leg.
    said: Regions,
    /// Which writing of the pages this is, and which one the last was; 0 for none.
    writing: u64,
    before: u64,
}

/// What is in the pages of one leg's device.
#[derive(Default)]
pub(crate) struct ReplicaPages {
    /// What tells pages that were written since the device came from others.
    epoch: u64,
    /// Which writing of each set it has; 0 for none.
    has: [u64; MOST_SETS],
}

impl Paging {
    /// Labels were written that say these sets. Where a leg was lost meanwhile, others may still have the labels before.
    pub fn said(&mut self, sets: &[Regions], has_lost: bool) {
        for (paged, set) in self.sets.iter_mut().zip(sets) {
            match paged {
                Some(paged) if has_lost => paged.said.add(set),
                Some(paged) => paged.said = set.clone(),
                None => {}
            }
        }
    }

    /// Decides which sets have pages and what these are to hold, so that the labels of a mirror with so many members have
    /// room for the rest. Also which pages that changes, by set.
    fn plan(&mut self, sets: &[Regions]) -> [Vec<u32>; MOST_SETS] {
        let most_bytes = most_set_bytes(sets.len() - 1);
        let mut changed = [const { Vec::new() }; MOST_SETS];
        for (number, set) in sets.iter().enumerate() {
            let Some(paged) = &mut self.sets[number] else {
                if encode_plain(set, most_bytes).is_none() {
                    self.writings += 1;
                    let (content, said, writing) = (set.clone(), set.clone(), self.writings);
                    self.sets[number] = Some(Paged { content, said, writing, before: 0 });
                }
                continue;
            };
            // Half as long as it might be, so that it does not come and go.
            if encode_plain(set, most_bytes / 2).is_some() {
                self.sets[number] = None;
                continue;
            }
            let mut content = paged.said.clone();
            content.add(set);
            let has_room = encode_paged(set, &paged.content, 0, most_bytes).is_some();
            let is_smaller = content.count() <= paged.content.count() - paged.content.count() / 8;
            if content != paged.content && (!has_room || is_smaller) {
                self.writings += 1;
                let mut differs = content.without(&paged.content);
                differs.add(&paged.content.without(&content));
                changed[number] = pages_with(&differs).collect();
                paged.content = content;
                paged.before = std::mem::replace(&mut paged.writing, self.writings);
            }
        }
        changed
    }
}

impl<C: Clock> Mirror<C> {
    /// The sets that labels say: what is dirty, and what each member has missed.
    pub(crate) fn sets(&self) -> Vec<Regions> {
        let missed = |leg: &Rc<Replica>| leg.member().out_of_sync;
        [self.write_intent.dirty.borrow().clone()].into_iter().chain(self.legs.borrow().iter().map(missed)).collect()
    }

    /// The label of a leg as it is written, which refers to pages that [`Mirror::write_pages`] has written.
    pub(crate) fn label_bytes(&self, leg: &Replica) -> Vec<u8> {
        let (label, paging) = (self.label(leg), self.write_intent.paging.borrow());
        let epoch = leg.pages.borrow().epoch;
        let sets = label.sets().zip(&paging.sets).map(|(set, paged)| match paged {
            None => encode_plain(set, usize::MAX).expect("any set can be written without pages"),
            Some(paged) => {
                encode_paged(set, &paged.content, epoch, usize::MAX).expect("runs of any length can be written")
            }
        });
        label.encode_with(&sets.collect::<Vec<_>>())
    }

    /// Writes the pages that the next labels refer to, on every leg that gets a label. A leg that does not take them is left
    /// behind, as with its label.
    pub(crate) async fn write_pages(&self) {
        if pages_of_set(self.map.count()) == 0 {
            return;
        }
        loop {
            let changed = self.write_intent.paging.borrow_mut().plan(&self.sets());
            let legs: Vec<_> =
                self.legs.borrow().iter().filter(|leg| leg.takes_labels() && leg.has_room).cloned().collect();
            let mut is_done = true;
            let mut writes = Vec::new();
            for leg in &legs {
                let due = self.due_pages(leg, &changed);
                is_done &= due.is_empty();
                if !due.is_empty() {
                    writes.push(self.write_leg_pages(leg, due));
                }
            }
            if is_done {
                return;
            }
            join_all(writes).await;
        }
    }

    /// The pages that a leg is to get so that its label may refer to them. Until they are written it is taken to have none of
    /// these sets, also if whoever writes them is dropped.
    fn due_pages(&self, leg: &Replica, changed: &[Vec<u32>; MOST_SETS]) -> Vec<(PageId, u64)> {
        let (paging, mut pages, mut due) = (self.write_intent.paging.borrow(), leg.pages.borrow_mut(), Vec::new());
        for (number, paged) in paging.sets.iter().enumerate() {
            let Some(paged) = paged else {
                pages.has[number] = 0;
                continue;
            };
            if pages.has[number] == paged.writing {
                continue;
            }
            let id = |page| (PageId { set: number as u8, page }, paged.writing);
            // One that has the writing before lacks only what has changed since; any other has nothing to go by.
            match pages.has[number] != 0 && pages.has[number] == paged.before && !changed[number].is_empty() {
                true => due.extend(changed[number].iter().copied().map(id)),
                false => due.extend(pages_with(&paged.content).map(id)),
            }
            pages.has[number] = 0;
        }
        if pages.epoch == 0 && !due.is_empty() {
            pages.epoch = self.write_intent.events.get();
        }
        due
    }

    async fn write_leg_pages(&self, leg: &Rc<Replica>, due: Vec<(PageId, u64)>) {
        let stay = leg.attach_count();
        for pages in due.chunks(PAGES_AT_ONCE) {
            let write = |(id, _): &(PageId, u64)| {
                let (epoch, paging) = (leg.pages.borrow().epoch, self.write_intent.paging.borrow());
                let content = paging.sets[usize::from(id.set)].as_ref().map(|paged| &paged.content);
                let bytes = content.map(|content| Slice::copy_from(&id.encode(&self.uuid, epoch, content)));
                let slot = id.slot(self.map.count());
                async move {
                    let Some(bytes) = bytes else { return Ok(()) };
                    leg.ask(self.geometry.protection, Request::WriteReserved { slot, bytes }).await.map(drop)
                }
            };
            let written: Result<Vec<()>, Error> = join_all(pages.iter().map(write)).await.into_iter().collect();
            // The device that is there now gets its pages when it gets a label.
            if leg.attach_count() != stay {
                return;
            }
            if let Err(error) = written {
                self.fail_replica(leg, &format!("its bitmap pages could not be written: {error}"));
                return;
            }
        }
        let mut pages = leg.pages.borrow_mut();
        for (id, writing) in due {
            pages.has[usize::from(id.set)] = writing;
        }
    }
}
