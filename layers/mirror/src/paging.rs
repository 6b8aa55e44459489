//! The bitmap pages of the replicas, and the labels that refer to them.
//!
//! Invariant: whatever label a crash leaves on a replica, the pages that it refers to hold at least the set that it
//! had. So pages are written before labels refer to them, with the union of the sets of the last labels and of the
//! next; regions that left a set leave the pages one write later. Pages are written in place. A torn page counts as
//! all of its regions, and so does one that was written while the device was attached before: its epoch differs.

use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Clock, Error, Request};
use sealblock_runtime_memory::Slice;

use crate::label::{MAX_SETS, max_set_bytes};
use crate::mirror::Mirror;
use crate::regions::Regions;
use crate::replica::Replica;
use crate::sets::{PageId, encode_paged, encode_plain, pages_of_set, pages_with};

/// Pages that are written to a replica at once.
const PAGES_AT_ONCE: usize = 16;

/// What the pages of the replicas hold.
#[derive(Default)]
pub(crate) struct PagedSets {
    /// By set number; `None` if the label has room for the set.
    sets: [Option<PagedSet>; MAX_SETS],
    write_count: u64,
}

/// A set that has pages.
struct PagedSet {
    /// The regions in the pages.
    content: Regions,
    /// The set in the labels that were last written, on any replica.
    labelled: Regions,
    /// Number of the last write of the pages, and of the write before; 0 for none.
    write_number: u64,
    previous_write: u64,
}

/// What the pages of one replica's device hold.
#[derive(Default)]
pub(crate) struct ReplicaPages {
    /// Tells pages that were written since the device was attached from older ones.
    epoch: u64,
    /// Number of the write of each set that it has; 0 for none.
    written: [u64; MAX_SETS],
}

impl PagedSets {
    /// Records that labels with these sets were written. If a replica failed meanwhile, others may still have the
    /// labels before.
    pub fn labels_written(&mut self, sets: &[Regions], has_lost: bool) {
        for (paged, set) in self.sets.iter_mut().zip(sets) {
            match paged {
                Some(paged) if has_lost => paged.labelled.add(set),
                Some(paged) => paged.labelled = set.clone(),
                None => {}
            }
        }
    }

    /// Decides which sets have pages, and what these hold, so that the rest fits the labels. Returns the pages that
    /// change, by set.
    fn plan(&mut self, sets: &[Regions]) -> [Vec<u32>; MAX_SETS] {
        let max_bytes = max_set_bytes(sets.len() - 1);
        let mut changed = [const { Vec::new() }; MAX_SETS];
        for (number, set) in sets.iter().enumerate() {
            let Some(paged) = &mut self.sets[number] else {
                if encode_plain(set, max_bytes).is_none() {
                    self.write_count += 1;
                    let (content, said, writing) = (set.clone(), set.clone(), self.write_count);
                    self.sets[number] =
                        Some(PagedSet { content, labelled: said, write_number: writing, previous_write: 0 });
                }
                continue;
            };
            // Half of the room, so that a set does not get and lose pages in turn.
            if encode_plain(set, max_bytes / 2).is_some() {
                self.sets[number] = None;
                continue;
            }
            let mut content = paged.labelled.clone();
            content.add(set);
            let has_room = encode_paged(set, &paged.content, 0, max_bytes).is_some();
            let is_smaller = content.count() <= paged.content.count() - paged.content.count() / 8;
            if content != paged.content && (!has_room || is_smaller) {
                self.write_count += 1;
                let mut differs = content.without(&paged.content);
                differs.add(&paged.content.without(&content));
                changed[number] = pages_with(&differs).collect();
                paged.content = content;
                paged.previous_write = std::mem::replace(&mut paged.write_number, self.write_count);
            }
        }
        changed
    }
}

impl<C: Clock> Mirror<C> {
    /// The sets in labels: dirty regions, and the out-of-sync regions of each replica.
    pub(crate) fn sets(&self) -> Vec<Regions> {
        let out_of_sync = |replica: &Rc<Replica>| replica.record().out_of_sync;
        [self.write_intent.dirty.borrow().clone()]
            .into_iter()
            .chain(self.replicas.borrow().iter().map(out_of_sync))
            .collect()
    }

    /// The bytes of a replica's label, which refer to pages that [`Mirror::write_pages`] wrote.
    pub(crate) fn label_bytes(&self, replica: &Replica) -> Vec<u8> {
        let (label, paging) = (self.label(replica), self.write_intent.paged_sets.borrow());
        let epoch = replica.pages.borrow().epoch;
        let sets = label.sets().zip(&paging.sets).map(|(set, paged)| match paged {
            None => encode_plain(set, usize::MAX).expect("any set can be written without pages"),
            Some(paged) => {
                encode_paged(set, &paged.content, epoch, usize::MAX).expect("runs of any length can be written")
            }
        });
        label.encode_with(&sets.collect::<Vec<_>>())
    }

    /// Writes the pages that the next labels refer to, on every replica that gets a label. A replica that fails a
    /// page is marked out of sync.
    pub(crate) async fn write_pages(&self) {
        if pages_of_set(self.map.count()) == 0 {
            return;
        }
        loop {
            let changed = self.write_intent.paged_sets.borrow_mut().plan(&self.sets());
            let replicas: Vec<_> = self
                .replicas
                .borrow()
                .iter()
                .filter(|replica| replica.takes_labels() && replica.has_room)
                .cloned()
                .collect();
            let mut is_done = true;
            let mut writes = Vec::new();
            for replica in &replicas {
                let due = self.due_pages(replica, &changed);
                is_done &= due.is_empty();
                if !due.is_empty() {
                    writes.push(self.write_replica_pages(replica, due));
                }
            }
            if is_done {
                return;
            }
            join_all(writes).await;
        }
    }

    /// The pages that a replica must get before its label refers to them. Until they are written it counts as having
    /// none of these sets, also if the caller is dropped.
    fn due_pages(&self, replica: &Replica, changed: &[Vec<u32>; MAX_SETS]) -> Vec<(PageId, u64)> {
        let (paging, mut pages, mut due) =
            (self.write_intent.paged_sets.borrow(), replica.pages.borrow_mut(), Vec::new());
        for (number, paged) in paging.sets.iter().enumerate() {
            let Some(paged) = paged else {
                pages.written[number] = 0;
                continue;
            };
            if pages.written[number] == paged.write_number {
                continue;
            }
            let id = |page| (PageId { set: number as u8, page }, paged.write_number);
            // A replica with the write before lacks only the pages that changed since; any other lacks all of them.
            match pages.written[number] != 0
                && pages.written[number] == paged.previous_write
                && !changed[number].is_empty()
            {
                true => due.extend(changed[number].iter().copied().map(id)),
                false => due.extend(pages_with(&paged.content).map(id)),
            }
            pages.written[number] = 0;
        }
        if pages.epoch == 0 && !due.is_empty() {
            pages.epoch = self.write_intent.events.get();
        }
        due
    }

    async fn write_replica_pages(&self, replica: &Rc<Replica>, due: Vec<(PageId, u64)>) {
        let attach_count = replica.attach_count();
        for pages in due.chunks(PAGES_AT_ONCE) {
            let write = |(id, _): &(PageId, u64)| {
                let (epoch, paging) = (replica.pages.borrow().epoch, self.write_intent.paged_sets.borrow());
                let content = paging.sets[usize::from(id.set)].as_ref().map(|paged| &paged.content);
                let bytes = content.map(|content| Slice::copy_from(&id.encode(&self.uuid, epoch, content)));
                let slot = id.area(self.map.count());
                async move {
                    let Some(bytes) = bytes else { return Ok(()) };
                    replica.execute(self.geometry.protection, Request::write_reserved(slot, bytes)).await.map(drop)
                }
            };
            let written: Result<Vec<()>, Error> = join_all(pages.iter().map(write)).await.into_iter().collect();
            // The device that is attached now gets its pages with its label.
            if replica.attach_count() != attach_count {
                return;
            }
            if let Err(error) = written {
                self.fail_replica(replica, &format!("cannot write its bitmap pages: {error}"));
                return;
            }
        }
        let mut pages = replica.pages.borrow_mut();
        for (id, writing) in due {
            pages.written[usize::from(id.set)] = writing;
        }
    }
}
