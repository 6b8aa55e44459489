//! Which bytes of an image something read. Whatever depends on these alone has the same result on every other image
//! that has the same bytes there: most states after a power cut differ only in what nothing reads.
//!
//! Invariant: a page belongs to the footprint if a part of it was read or kept that the reader had not written itself.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use sealblock_block::{Abilities, Device, DynDevice, Geometry, Operation, Outcome, Request, Response};
use sealblock_runtime_memory::Slice;

use crate::device;
use crate::image::{Image, PAGE_BYTES};

/// Pages of an image, with their content.
#[derive(Clone, Default)]
pub struct Footprint {
    pages: BTreeMap<u64, Option<Slice>>,
}

impl Footprint {
    /// True if an image has the same content there.
    pub fn is_same_in(&self, image: &Image) -> bool {
        self.pages.iter().all(|(page, content)| is_same(content.as_ref(), image.page(*page)))
    }

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// True if nothing was read.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

/// Pages are mostly shared, so the bytes are seldom compared.
fn is_same(one: Option<&Slice>, other: Option<&Slice>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.as_ptr() == other.as_ptr() || one[..] == other[..],
        (Some(page), None) | (None, Some(page)) => page.iter().all(|byte| *byte == 0),
        (None, None) => true,
    }
}

/// What was read of the device that [`Image::watched_device`] returned.
#[derive(Clone)]
pub struct Watched(Rc<State>);

struct State {
    before: Image,
    now: RefCell<Image>,
    read: RefCell<BTreeSet<u64>>,
    written: RefCell<BTreeSet<u64>>,
}

impl Watched {
    /// What was read so far.
    pub fn footprint(&self) -> Footprint {
        let pages = self.0.read.borrow();
        Footprint { pages: pages.iter().map(|page| (*page, self.0.before.page(*page).cloned())).collect() }
    }

    /// The content with what was written since.
    pub fn image(&self) -> Image {
        self.0.now.borrow().clone()
    }
}

impl State {
    fn note_read(&self, bytes: std::ops::Range<u64>) {
        let written = self.written.borrow();
        let pages = bytes.start / PAGE_BYTES as u64..bytes.end.div_ceil(PAGE_BYTES as u64);
        self.read.borrow_mut().extend(pages.filter(|page| !written.contains(page)));
    }

    fn note_written(&self, bytes: std::ops::Range<u64>) {
        // What is written in part keeps the rest.
        let page_bytes = PAGE_BYTES as u64;
        let whole = bytes.start.div_ceil(page_bytes)..bytes.end / page_bytes;
        let touched = bytes.start / page_bytes..bytes.end.div_ceil(page_bytes);
        for page in touched.filter(|page| !whole.contains(page)) {
            self.note_read(page * page_bytes..(page + 1) * page_bytes);
        }
        self.written.borrow_mut().extend(whole);
    }
}

impl Image {
    /// As [`Image::device`], and with what was read of it.
    pub fn watched_device(&self, name: &str) -> (DynDevice, Watched) {
        let state = Rc::new(State {
            before: self.clone(),
            now: RefCell::new(self.clone()),
            read: RefCell::default(),
            written: RefCell::default(),
        });
        let device = WatchedDevice { geometry: device::geometry(self), state: Rc::clone(&state) };
        (DynDevice::new(name, device), Watched(state))
    }
}

/// A device with the content of an image. Discarded blocks keep their content.
struct WatchedDevice {
    geometry: Geometry,
    state: Rc<State>,
}

impl Device for WatchedDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        device::ABILITIES
    }

    async fn execute(&self, request: Request) -> Outcome {
        if let Operation::Read(_) = request.operation {
            let extent = request.extents.one();
            let start = extent.start().get() << self.geometry.block_size.shift();
            self.state.note_read(start..start + extent.bytes(self.geometry.block_size));
            return device::read(&self.state.now.borrow(), extent);
        }
        for piece in device::changes(&request, self.geometry.block_size, None)? {
            self.state.note_written(piece.range());
            self.state.now.borrow_mut().apply(&piece);
        }
        Ok(Response::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use sealblock_block::{Durability, Expectations};
    use sealblock_integrity::{Sealed, Tags};
    use sealblock_units::{BlockSize, Extent};

    #[test]
    fn a_footprint_has_what_was_read_and_not_written_before() {
        let mut image = Image::blank(BlockSize::B512, 64);
        image.write(4096, &[5; 4096]);
        let (device, watched) = image.watched_device("watched");
        let read = |block, blocks| {
            let extent = Extent::from_raw(block, blocks).unwrap();
            block_on(device.execute(Request::read(extent, Expectations::NONE))).unwrap()
        };
        let write = |block, blocks: u64| {
            let data = Slice::copy_from(&vec![9; 512 * blocks as usize]);
            let sealed = Sealed::seal(data, BlockSize::B512, None, &Tags::default());
            let extent = Extent::from_raw(block, blocks).unwrap();
            block_on(device.execute(Request::write(extent, sealed, Durability::Volatile))).unwrap();
        };
        assert!(watched.footprint().is_empty());
        read(9, 1);
        // Page 2 is written before it is read, page 3 only in part.
        write(16, 8);
        write(24, 7);
        let Response::Data(data) = read(16, 16) else { panic!("a read returns data") };
        assert_eq!([data.joined_data()[0], data.joined_data()[8191]], [9, 0]);
        let footprint = watched.footprint();
        assert_eq!(footprint.len(), 2);
        assert!(footprint.is_same_in(&image) && !footprint.is_same_in(&watched.image()));
        for (page, is_same) in [(0, true), (1, false), (2, true), (3, false)] {
            let mut other = image.clone();
            other.write(page * 4096, &[1; 512]);
            assert_eq!(footprint.is_same_in(&other), is_same, "page {page}");
        }
        let mut copied = image.clone();
        copied.write(4096, &[5; 4096]);
        assert!(footprint.is_same_in(&copied), "other memory, the same bytes");
    }
}
