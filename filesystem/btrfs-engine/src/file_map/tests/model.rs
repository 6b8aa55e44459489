//! Random changes of several files, compared with a model that has what is in each sector.

use std::collections::{BTreeMap, HashMap};

use super::*;
use sealblock_btrfs_format::checker_items::{Context, check_item};
use sealblock_btrfs_format::extent_refs::ExtentRef;
use sealblock_btrfs_format::items::file_extent::FileExtent;

/// Sectors of a file.
const SECTORS: usize = 48;

/// What is in a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cell {
    extent: DiskExtent,
    /// In sectors, in the uncompressed extent.
    offset: u64,
    generation: u64,
    is_prealloc: bool,
    /// Sectors of one item that follow each other have the same number.
    item: u64,
}

/// A file as it should be.
struct Model {
    file: File,
    tree: usize,
    size: u64,
    nbytes: u64,
    cells: Vec<Option<Cell>>,
    inline: Option<u64>,
}

/// A part of an extent that is to be inserted.
struct NewPart {
    generation: u64,
    bytenr: u64,
    /// Bytes of the extent before the part and behind it.
    before: u64,
    behind: u64,
    is_prealloc: bool,
    /// How, and the percentage that is left.
    compression: Option<(Compression, u64)>,
}

struct Proof {
    random: fastrand::Rng,
    trees: [Tree; 2],
    files: Vec<Model>,
    refs: HashMap<(u64, ExtentRef), i64>,
    /// The last transaction, the last extent and the last item.
    numbers: [u64; 3],
    done: BTreeMap<&'static str, u32>,
}

fn sectors(range: &Range<usize>) -> Range<u64> {
    range.start as u64 * S..range.end as u64 * S
}

impl Proof {
    fn new(seed: u64, has_hole_items: bool) -> Proof {
        let file = |(root, ino, tree)| Model {
            file: File { root, ino, has_hole_items, ..file() },
            tree,
            size: 0,
            nbytes: 0,
            cells: vec![None; SECTORS],
            inline: None,
        };
        Proof {
            random: fastrand::Rng::with_seed(seed),
            trees: Default::default(),
            files: [(5, 257, 0), (5, 258, 0), (5, 300, 0), (256, 257, 1)].map(file).into(),
            refs: HashMap::new(),
            numbers: [10, 0, 0],
            done: BTreeMap::new(),
        }
    }

    fn next(&mut self, what: usize) -> u64 {
        self.numbers[what] += 1;
        self.numbers[what]
    }

    fn range(&mut self) -> Range<usize> {
        let (start, most) = (self.random.usize(..SECTORS), if self.random.bool() { 4 } else { SECTORS });
        start..SECTORS.min(start + self.random.usize(1..=most))
    }

    fn limit(&mut self) -> NonZeroUsize {
        let limit = if self.random.bool() { 1000 } else { self.random.usize(1..4) };
        NonZeroUsize::new(limit).unwrap()
    }

    fn order(&mut self) -> Order {
        if self.random.bool() { Order::FromStart } else { Order::FromEnd }
    }

    /// Applies a plan, and compares everything.
    fn apply(&mut self, at: usize, changes: FileChanges) {
        let model = &mut self.files[at];
        let file = model.file;
        let tree = &mut self.trees[model.tree];
        apply_items(tree, changes.items);
        for (bytenr, what, net) in changes.refs.iter() {
            assert!(
                matches!(what, ExtentRef::Data { root, objectid, .. } if (root, objectid) == (file.root, file.ino))
            );
            *self.refs.entry((bytenr, what)).or_default() += net;
        }
        self.refs.retain(|_, count| *count != 0);
        model.nbytes = (model.nbytes + changes.added_bytes).checked_sub(changes.removed_bytes).unwrap();
        self.check(at);
    }

    fn check(&self, at: usize) {
        let model = &self.files[at];
        check_items(model, &self.trees[model.tree]);
        let mut refs: HashMap<(u64, ExtentRef), i64> = HashMap::new();
        for model in &self.files {
            for (key, data) in self.trees[model.tree].range(model.file.key(0)..=model.file.key(u64::MAX)) {
                if let Some(location) = FileExtent::decode(data).unwrap().location().filter(|one| !one.is_hole()) {
                    let offset = key.offset.wrapping_sub(location.offset.get());
                    let what = ExtentRef::Data { root: model.file.root, objectid: key.objectid, offset };
                    *refs.entry((location.disk_bytenr.get(), what)).or_default() += 1;
                }
            }
        }
        assert_eq!(refs, self.refs);
    }

    fn count(&mut self, what: &'static str) {
        *self.done.entry(what).or_default() += 1;
    }

    /// Drops a range in the model.
    fn forget(&mut self, at: usize, done: &Range<u64>) {
        let model = &mut self.files[at];
        let range = (done.start / S) as usize..((done.end / S) as usize).min(SECTORS);
        let behind = model.cells.get(range.end).copied().flatten();
        // What is behind becomes an item of its own.
        if let Some(cell) = behind.filter(|_| !range.is_empty()) {
            let is_split = range.start > 0 && model.cells[range.end - 1].is_some_and(|last| last.item == cell.item);
            if is_split {
                self.numbers[2] += 1;
                for other in model.cells[range.end..].iter_mut() {
                    match other {
                        Some(other) if other.item == cell.item => other.item = self.numbers[2],
                        _ => break,
                    }
                }
            }
        }
        if range.start == 0 && !range.is_empty() {
            model.inline = None;
        }
        model.cells[range].fill(None);
    }

    fn step(&mut self, at: usize) {
        match self.random.u8(..20) {
            0..4 => self.write(at),
            4..7 => self.preallocate(at),
            7..11 => (0..4).for_each(|_| self.mark(at)),
            11..13 => self.punch(at),
            13 => {
                let size = self.random.u64(..=self.files[at].size);
                self.truncate(at, size);
            }
            14 => self.extend(at),
            15..17 => self.share(at),
            17..19 => {
                if self.random.u8(..4) == 0 {
                    self.truncate(at, 0);
                }
                self.write_inline(at);
            }
            _ => self.plan_zero(at),
        }
    }

    /// Inserts a part of a new extent into a range, and tries to do so twice.
    fn insert(&self, edit: &mut FileEdit<Tree>, range: &Range<usize>, extent: NewPart) -> ExtentPart {
        let NewPart { generation, bytenr, before, behind, is_prealloc, compression } = extent;
        let (start, bytes) = (range.start as u64 * S, range.len() as u64 * S);
        let all = before + bytes + behind;
        let extent = match compression {
            Some((compression, percent)) if all <= 128 << 10 => {
                let bytes = (all / S * percent / 100).max(1) * S;
                DiskExtent { bytenr, bytes, plain_bytes: all, compression }
            }
            _ => DiskExtent::plain(bytenr, all),
        };
        let part = ExtentPart { start, bytes, generation, is_prealloc, extent, offset: before };
        edit.insert(part).unwrap();
        assert!(matches!(edit.insert(part), Err(FileMapError::Occupied { .. })));
        part
    }

    fn new_part(&mut self, is_prealloc: bool) -> NewPart {
        let is_plain = is_prealloc || self.random.bool();
        let kind = (Compression::ALL[self.random.usize(1..4)], self.random.u64(1..=100));
        NewPart {
            generation: self.next(0),
            bytenr: self.next(1) << 24,
            before: self.random.u64(..3) * S,
            behind: self.random.u64(..3) * S,
            is_prealloc,
            compression: (!is_plain).then_some(kind),
        }
    }

    /// Puts a new part into the model.
    fn remember(&mut self, at: usize, part: ExtentPart) {
        let (item, ExtentPart { extent, generation, is_prealloc, .. }) = (self.next(2), part);
        for index in 0..part.bytes / S {
            let cell = Cell { extent, offset: part.offset / S + index, generation, is_prealloc, item };
            self.files[at].cells[(part.start / S + index) as usize] = Some(cell);
        }
    }

    /// Drops a range and inserts a new extent there; the gap before it is filled.
    fn write(&mut self, at: usize) {
        let (mut range, limit, new) = (self.range(), self.limit(), self.new_part(false));
        // A file that is inline is rewritten before something is written behind it.
        let is_inline = self.files[at].inline.is_some();
        if is_inline {
            range = 0..if range.start > 0 { 1 } else { range.end };
        }
        let (file, old, wanted) = (self.files[at].file, self.files[at].size, sectors(&range));
        let mut edit = FileEdit::new(file, &self.trees[self.files[at].tree]);
        let gap = file.sectors_end(old)..wanted.start.max(file.sectors_end(old));
        assert!(edit.fill_holes(gap, self.numbers[0], MANY).unwrap().is_empty());
        let rest = edit.drop_range(wanted.clone(), Order::FromStart, limit).unwrap();
        let done = FileEdit::<Tree>::done(&wanted, &rest);
        let part = self.insert(&mut edit, &((done.start / S) as usize..(done.end / S) as usize), new);
        let changes = edit.finish();
        self.forget(at, &done);
        self.remember(at, part);
        self.files[at].size = old.max(done.end);
        self.apply(at, changes);
        self.count(if is_inline { "inline to regular" } else { "write" });
    }

    /// Allocates space in advance where nothing is.
    fn preallocate(&mut self, at: usize) {
        let (range, new, grows) = (self.range(), self.new_part(true), self.random.bool());
        let model = &self.files[at];
        let Some(first) = range.clone().find(|sector| model.cells[*sector].is_none()) else { return };
        if model.inline.is_some() {
            return;
        }
        let end = (first..range.end).find(|sector| model.cells[*sector].is_some()).unwrap_or(range.end);
        let (file, size, wanted) = (model.file, model.size, sectors(&(first..end)));
        let mut edit = FileEdit::new(file, &self.trees[model.tree]);
        assert!(edit.drop_range(wanted.clone(), Order::FromEnd, MANY).unwrap().is_empty());
        let grows = grows && size < wanted.end;
        if grows {
            let gap = file.sectors_end(size)..wanted.start.max(file.sectors_end(size));
            assert!(edit.fill_holes(gap, new.generation, MANY).unwrap().is_empty());
        }
        let part = self.insert(&mut edit, &(first..end), new);
        let changes = edit.finish();
        self.remember(at, part);
        self.files[at].size = if grows { wanted.end } else { size };
        self.apply(at, changes);
        self.count(if !grows && size < wanted.start { "prealloc behind the end" } else { "prealloc" });
    }

    fn mark(&mut self, at: usize) {
        let (mut range, limit, new) = (self.range(), self.limit(), self.random.bool());
        range.end = range.end.min(range.start + 8);
        let cells = &self.files[at].cells;
        let is_prealloc = |sector: &usize| cells[*sector].is_some_and(|cell| cell.is_prealloc);
        if self.random.u8(..8) > 0 {
            let Some(first) = range.clone().find(is_prealloc) else { return };
            let end = (first..range.end).find(|sector| !is_prealloc(sector)).unwrap_or(range.end);
            range = first..end;
        }
        let may = range.clone().all(|sector| is_prealloc(&sector)) && self.files[at].inline.is_none();
        let generation = self.next(0);
        let mark = if new { Mark::New(generation) } else { Mark::Keep };
        let mut edit = FileEdit::new(self.files[at].file, &self.trees[self.files[at].tree]);
        let rest = edit.mark_written(sectors(&range), mark, if may { limit } else { NonZeroUsize::MAX });
        let Some(rest) = rest.as_ref().ok().filter(|_| may) else {
            assert!(matches!(rest, Err(FileMapError::Range { .. })), "{rest:?}");
            return self.count("not prealloc");
        };
        let changes = edit.finish();
        let end = if rest.is_empty() { range.end } else { (rest.start / S) as usize };
        let mut sector = range.start;
        while sector < end {
            let item = self.files[at].cells[sector].unwrap().item;
            let of_item = |cells: &[Option<Cell>], sector: usize| cells[sector].is_some_and(|cell| cell.item == item);
            let last = (sector..end).find(|sector| !of_item(&self.files[at].cells, *sector)).unwrap_or(end);
            self.mark_item(at, sector..last, mark);
            sector = last;
        }
        self.apply(at, changes);
        self.count("mark");
    }

    /// Marks sectors of one item in the model.
    fn mark_item(&mut self, at: usize, range: Range<usize>, mark: Mark) {
        let (written, behind) = (self.next(2), self.next(2));
        let cells = &mut self.files[at].cells;
        let item = cells[range.start].unwrap().item;
        for cell in cells[range.clone()].iter_mut().flatten() {
            (cell.is_prealloc, cell.item) = (false, written);
            if let Mark::New(generation) = mark {
                cell.generation = generation;
            }
        }
        for cell in cells[range.end..].iter_mut().flatten().take_while(|cell| cell.item == item) {
            cell.item = behind;
        }
        let generation = cells[range.start].unwrap().generation;
        let joins = |a: Option<Cell>, b: Option<Cell>| match (a, b) {
            (Some(a), Some(b)) => {
                let is_next = a.extent == b.extent && a.offset + 1 == b.offset && !a.is_prealloc && !b.is_prealloc;
                is_next && (mark != Mark::Keep || a.generation == b.generation)
            }
            _ => false,
        };
        let mut joined = Vec::new();
        if range.start > 0 && joins(cells[range.start - 1], cells[range.start]) {
            joined.push(cells[range.start - 1].unwrap().item);
        }
        if range.end < SECTORS && joins(cells[range.end - 1], cells[range.end]) {
            joined.push(cells[range.end].unwrap().item);
        }
        for cell in cells.iter_mut().flatten().filter(|cell| joined.contains(&cell.item)) {
            (cell.item, cell.generation) = (written, generation);
        }
        (0..joined.len()).for_each(|_| *self.done.entry("joined").or_default() += 1);
    }

    fn punch(&mut self, at: usize) {
        let (mut rest, order) = (sectors(&self.range()), self.order());
        if self.files[at].inline.is_some() && rest.start > 0 {
            return;
        }
        while !rest.is_empty() {
            let (limit, generation) = (self.limit(), self.next(0));
            let model = &self.files[at];
            let mut edit = FileEdit::new(model.file, &self.trees[model.tree]);
            let left = edit.punch(rest.clone(), (model.size, generation), order, limit).unwrap();
            let changes = edit.finish();
            self.forget(at, &FileEdit::<Tree>::done(&rest, &left));
            self.apply(at, changes);
            self.count("punch");
            rest = left;
        }
    }

    fn truncate(&mut self, at: usize, size: u64) {
        loop {
            let limit = self.limit();
            let model = &self.files[at];
            let mut edit = FileEdit::new(model.file, &self.trees[model.tree]);
            let Truncated { size: now, rest } = edit.truncate(size, model.size, limit).unwrap();
            let changes = edit.finish();
            let most = SECTORS as u64 * S;
            // Nothing that is below the new size is gone, and below the old one nothing that is behind the new one is left.
            let from = if rest.is_empty() { model.file.sectors_end(size) } else { rest.end };
            assert!((size..=model.size).contains(&now) && now <= from && (now == model.size || from - now < S));
            self.forget(at, &(from.min(most)..most));
            let model = &mut self.files[at];
            model.size = now;
            model.inline = model.inline.filter(|_| size > 0).map(|bytes| bytes.min(size));
            self.apply(at, changes);
            self.count("truncate");
            if rest.is_empty() {
                return assert_eq!(now, size);
            }
        }
    }

    fn extend(&mut self, at: usize) {
        let size = self.random.u64(self.files[at].size..=SECTORS as u64 * S);
        if self.files[at].inline.is_some() {
            return;
        }
        let mut rest = self.files[at].file.sectors_end(self.files[at].size)..self.files[at].file.sectors_end(size);
        loop {
            let (limit, generation) = (self.limit(), self.next(0));
            let model = &self.files[at];
            let mut edit = FileEdit::new(model.file, &self.trees[model.tree]);
            let left = edit.fill_holes(rest.clone(), generation, limit).unwrap();
            let changes = edit.finish();
            self.files[at].size = if left.is_empty() { size } else { self.files[at].size.max(left.start) };
            self.apply(at, changes);
            self.count("extend");
            if left.is_empty() {
                return;
            }
            rest = left;
        }
    }

    fn share(&mut self, at: usize) {
        let (from, range, parts) = (self.random.usize(..4), self.range(), self.limit());
        let source = &self.files[from];
        let is_inline = source.inline.is_some() && range.start == 0;
        let found = FileMap::new(source.file, &self.trees[source.tree]).parts(sectors(&range), parts).unwrap();
        let range = range.start..(found.range().end / S) as usize;
        let to = self.random.usize(..=SECTORS - range.len());
        let target = to..to + range.len();
        let size = self.files[at].size.max(target.end as u64 * S);
        let (file, tree, generation, limit) = (self.files[at].file, self.files[at].tree, self.next(0), self.limit());
        let mut edit = FileEdit::new(file, &self.trees[tree]);
        let gap = file.sectors_end(self.files[at].size)..(to as u64 * S).max(file.sectors_end(self.files[at].size));
        if self.files[at].inline.is_some() && to > 0 {
            return;
        }
        edit.fill_holes(gap, generation, NonZeroUsize::MAX).unwrap();
        let result = edit.clone_range(&found, to as u64 * S, (size, generation), limit);
        let overlaps = from == at && range.start < target.end && target.start < range.end;
        if overlaps || is_inline {
            assert!(matches!(result, Err(FileMapError::Range { .. } | FileMapError::Inline(_))), "{result:?}");
            return self.count("not shared");
        }
        let changes = edit.finish();
        let done = FileEdit::<Tree>::done(&sectors(&target), &result.unwrap());
        let cells = self.files[from].cells.clone();
        self.forget(at, &done);
        let mut last = None;
        for sector in (done.start / S) as usize..(done.end / S) as usize {
            let cell = cells[range.start + (sector - to)];
            if cell.map(|cell| cell.item) != last {
                self.numbers[2] += 1;
                last = cell.map(|cell| cell.item);
            }
            self.files[at].cells[sector] = cell.map(|cell| Cell { item: self.numbers[2], ..cell });
        }
        self.files[at].size = self.files[at].size.max(done.end);
        self.apply(at, changes);
        self.count(if from == at { "share with itself" } else { "share" });
    }

    fn write_inline(&mut self, at: usize) {
        let (bytes, generation) = (self.random.u64(1..2200), self.next(0));
        let model = &self.files[at];
        let is_empty = model.cells.iter().all(Option::is_none) && model.size <= S;
        let mut edit = FileEdit::new(model.file, &self.trees[model.tree]);
        if is_empty {
            edit.drop_range(0..S, Order::FromEnd, NonZeroUsize::MIN).unwrap();
        }
        let inline = inline(bytes, generation);
        let may = is_empty && bytes <= MAX_INLINE_BYTES;
        let result = edit.insert_inline(&inline, bytes);
        assert_eq!(result.is_ok(), may || (bytes <= MAX_INLINE_BYTES && self.is_bare(at)), "{result:?}");
        if !may {
            return;
        }
        let changes = edit.finish();
        let model = &mut self.files[at];
        (model.inline, model.size) = (Some(bytes), bytes);
        self.apply(at, changes);
        self.count("inline");
    }

    /// True if a file has no item at all.
    fn is_bare(&self, at: usize) -> bool {
        let model = &self.files[at];
        self.trees[model.tree].range(model.file.key(0)..=model.file.key(u64::MAX)).next().is_none()
    }

    /// Every sector below the end of which bytes become zeroes is dropped, rewritten, or reads as zeroes.
    fn plan_zero(&mut self, at: usize) {
        let model = &self.files[at];
        let most = SECTORS as u64 * S;
        let (a, b, size) = (self.random.u64(..most), self.random.u64(..=most), model.size);
        let bytes = if self.random.bool() { a.min(b)..a.max(b) } else { a..most.min(a + self.random.u64(..5000)) };
        let plan = FileMap::new(model.file, &self.trees[model.tree]).plan_zero(bytes.clone(), size).unwrap();
        let mut rewritten = HashMap::new();
        for one in &plan.rewrite {
            let (start, zero) = match one {
                Rewrite::Sector { start, zero } => (*start, zero),
                Rewrite::Inline { zero, .. } => (0, zero),
            };
            assert!(
                bytes.start <= zero.start && zero.end <= bytes.end && rewritten.insert(start, zero.clone()).is_none()
            );
        }
        for sector in (0..SECTORS).take_while(|sector| (*sector as u64) * S < size) {
            let (start, end) = (sector as u64 * S, (sector as u64 + 1) * S);
            let zero = bytes.start.max(start)..bytes.end.min(end);
            let cell = model.cells[sector];
            let has_data = cell.is_some_and(|cell| !cell.is_prealloc) || (sector == 0 && model.inline.is_some());
            let is_whole = plan.whole.contains(&start);
            if is_whole {
                assert!(zero.start == start && zero.end >= end.min(size) && !rewritten.contains_key(&start));
            } else if has_data && !zero.is_empty() && zero.start < size {
                assert_eq!(rewritten.remove(&start), Some(zero), "{bytes:?} {size} {plan:?}");
            }
        }
        let is_beyond = |zero: &Range<u64>| zero.start >= size;
        assert!(rewritten.values().all(is_beyond), "{bytes:?} {size} {plan:?}");
        self.count(if plan.rewrite.is_empty() { "zero, nothing to rewrite" } else { "zero" });
    }
}

fn check_items(model: &Model, tree: &Tree) {
    let (file, geometry, mut previous) = (&model.file, geometry(), None);
    let (mut cells, mut items, mut end, mut nbytes) = (vec![None; SECTORS], 0, 0, 0);
    for (key, data) in tree.range(file.key(0)..=file.key(u64::MAX)) {
        let context = Context { geometry: &geometry, owner: file.root, key: *key, previous };
        check_item(&context, data).unwrap_or_else(|rule| panic!("{key}: {rule}"));
        previous = Some((*key, &data[..]));
        if file.has_hole_items && end < model.size {
            assert_eq!(key.offset, end, "a hole without an item, in a file of {} bytes", model.size);
        }
        let mapping = Mapping::decode(file, *key, data).unwrap();
        end = mapping.range(4096).end;
        match mapping {
            Mapping::Hole(hole) => {
                assert!(file.has_hole_items && hole.start < model.size);
            }
            Mapping::Inline(inline) => {
                assert_eq!((model.inline, inline.plain_bytes), (Some(model.size), model.size));
                nbytes += inline.plain_bytes;
            }
            Mapping::Extent(part) => {
                let ExtentPart { extent, generation, is_prealloc, .. } = part;
                items += 1;
                nbytes += part.bytes;
                for index in 0..part.bytes / S {
                    let cell = Cell { extent, offset: part.offset / S + index, generation, is_prealloc, item: items };
                    assert_eq!(cells[(part.start / S + index) as usize].replace(cell), None);
                }
            }
        }
    }
    assert!(!file.has_hole_items || end >= model.size, "a hole at the end without an item");
    assert_eq!(nbytes, model.nbytes);
    // The numbers of items are counted anew, by their order.
    let (mut count, mut last) = (0, None);
    let expected: Vec<Option<Cell>> = (model.cells.iter())
        .map(|cell| {
            let item = cell.map(|cell| cell.item);
            count += u64::from(item.is_some() && item != last);
            last = item;
            cell.map(|cell| Cell { item: count, ..cell })
        })
        .collect();
    assert_eq!(cells, expected);
}

fn run(seed: u64, has_hole_items: bool, steps: usize) {
    let mut proof = Proof::new(seed, has_hole_items);
    for _ in 0..steps {
        let at = proof.random.usize(..4);
        proof.step(at);
    }
    println!("seed {seed}, hole items {has_hole_items}: {:?}", proof.done);
    let least = steps / 2000;
    let all =
        ["write", "mark", "joined", "punch", "truncate", "extend", "share", "share with itself", "inline", "zero"];
    assert!(all.iter().all(|what| proof.done.get(what).is_some_and(|count| *count as usize >= least)));
}

#[test]
fn random_changes_leave_what_the_model_has_with_no_holes() {
    (1..=3).for_each(|seed| run(seed, false, 50_000));
}

#[test]
fn random_changes_leave_what_the_model_has_with_items_of_holes() {
    (4..=6).for_each(|seed| run(seed, true, 50_000));
}
