//! What the devices of this crate have in common, and the one that does not log.

use std::cell::RefCell;

use sealblock_block::{
    Abilities, Ability, Device, DynDevice, ErrorKind, Geometry, Limits, Operation, Outcome, Request, RequestKind,
    Response,
};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, Extent};

use crate::image::{Content, Image, Piece};

/// Bytes of data in one transfer; the gate splits larger requests.
const TRANSFER_BYTES: usize = 4 << 20;
/// Blocks of one WriteZeroes, and of one extent of a Discard: few enough that their bytes fit into 64 bits.
const ZERO_BLOCKS: u32 = 1 << 30;

/// What the devices execute themselves; the gate emulates what it can of the rest.
pub(crate) const ABILITIES: Abilities = Abilities { unmap_zeroes: true, ..Abilities::BASIC }
    .with([RequestKind::Write, RequestKind::WriteZeroes, RequestKind::Discard], Ability::Native);

/// The geometry of a device with this content. It has no protection information.
pub(crate) fn geometry(image: &Image) -> Geometry {
    let block_size = image.block_size();
    let limits = Limits::new(block_size, TRANSFER_BYTES, ZERO_BLOCKS);
    Geometry { block_size, capacity_blocks: image.blocks(), protection: None, limits }
}

/// The stored content of these blocks.
pub(crate) fn read(image: &Image, extent: Extent) -> Outcome {
    let size = image.block_size();
    let mut data = Buffer::zeroed(extent.bytes(size) as usize);
    image.read(extent.start().get() << size.shift(), &mut data);
    Ok(Response::Data(Sealed::seal(data.freeze(), size, None, &Tags::default())))
}

/// What the request changes if it is executed; `discarded` is the content of discarded blocks, `None` if they keep
/// theirs. Nothing for a Flush.
///
/// # Errors
/// [`ErrorKind::Absent`] for what these devices do not support.
pub(crate) fn changes(request: &Request, size: BlockSize, discarded: Option<Content>) -> Result<Vec<Piece>, ErrorKind> {
    let piece = |extent: &Extent, content| Piece {
        offset: extent.start().get() << size.shift(),
        len: extent.bytes(size),
        content,
    };
    match &request.operation {
        // The data are copied: a log must not hold buffers of a pool, and lent ones may change later.
        Operation::Write(data) => Ok(vec![piece(&request.extents.one(), Content::Bytes(joined(data.slices())))]),
        Operation::WriteZeroes { .. } => Ok(vec![piece(&request.extents.one(), Content::Zeroes)]),
        Operation::Discard => {
            let of_all = discarded
                .into_iter()
                .flat_map(|content| request.extents.iter().map(move |extent| (extent, content.clone())));
            Ok(of_all.map(|(extent, content)| piece(extent, content)).collect())
        }
        Operation::Flush => Ok(Vec::new()),
        _ => Err(ErrorKind::Absent(request.kind())),
    }
}

fn joined<'a>(slices: impl Iterator<Item = &'a Slice>) -> Slice {
    let mut bytes = Vec::new();
    slices.for_each(|slice| bytes.extend_from_slice(slice));
    Slice::copy_from(&bytes)
}

impl Image {
    /// A device with this content, behind its gate. Its changes stay its own and are not logged.
    pub fn device(&self, name: &str) -> DynDevice {
        DynDevice::new(name, ImageDevice::new(self.clone()))
    }
}

/// A device with the content of an image. Discarded blocks keep their content.
struct ImageDevice {
    geometry: Geometry,
    image: RefCell<Image>,
}

impl ImageDevice {
    fn new(image: Image) -> ImageDevice {
        ImageDevice { geometry: geometry(&image), image: RefCell::new(image) }
    }
}

impl Device for ImageDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        ABILITIES
    }

    async fn execute(&self, request: Request) -> Outcome {
        let mut image = self.image.borrow_mut();
        if let Operation::Read(_) = request.operation {
            return read(&image, request.extents.one());
        }
        for piece in changes(&request, self.geometry.block_size, None)? {
            image.apply(&piece);
        }
        Ok(Response::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use sealblock_block::{Durability, Expectations, ReservedArea};

    #[test]
    fn a_device_of_an_image_has_its_content_and_changes_only_its_own() {
        let mut image = Image::blank(BlockSize::B4096, 16);
        image.write(8192, &[5; 4096]);
        let (one, other) = (image.device("one"), image.device("other"));
        let extent = Extent::from_raw(2, 2).unwrap();
        let data =
            |device: &DynDevice| match block_on(device.execute(Request::read(extent, Expectations::NONE))).unwrap() {
                Response::Data(data) => [data.joined_data()[0], data.joined_data()[4096]],
                other => panic!("{other:?}"),
            };
        assert_eq!([data(&one), data(&other)], [[5, 0]; 2]);
        let sealed = Sealed::seal(Slice::copy_from(&[9; 8192]), BlockSize::B4096, None, &Tags::default());
        block_on(one.execute(Request::write(extent, sealed, Durability::Volatile))).unwrap();
        block_on(one.execute(Request::flush())).unwrap();
        block_on(one.execute(Request::discard([extent]))).unwrap();
        assert_eq!([data(&one), data(&other)], [[9, 9], [5, 0]]);
        block_on(one.execute(Request::write_zeroes(extent, true, Durability::Volatile))).unwrap();
        assert_eq!(data(&one), [0, 0]);
    }

    #[test]
    fn what_is_absent_is_refused() {
        let device = ImageDevice::new(Image::blank(BlockSize::B4096, 16));
        let error = block_on(device.execute(Request::read_reserved(ReservedArea::GroupLabel))).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Absent(RequestKind::ReadReserved));
    }
}
