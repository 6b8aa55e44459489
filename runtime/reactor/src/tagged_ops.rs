//! Reads and writes of block devices with protection information in a separate buffer (`IORING_RW_ATTR_FLAG_PI`).
//!
//! Layouts and numbers are those of the kernel's `linux/io_uring.h`. The kernel copies the structure that an entry
//! names when it takes the entry, and uses the buffer that the structure names until the completion.
//!
//! A kernel that does not know the attribute (before 6.14) ignores it: it fills no buffer, and makes its own tags for a
//! write. [`File::refuses_unknown_attributes`] shows whether this kernel knows it, and must be called before any result
//! is trusted.

use std::io;
use std::sync::Arc;

use io_uring::{opcode, squeue};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::descriptor::{Descriptor, Tables};
use crate::file::File;
use crate::operation::{IoOp, TRANSFER_LIMIT_BYTES, entry_for};

/// `IORING_RW_ATTR_FLAG_PI`.
const ATTRIBUTE_PI: u64 = 1 << 0;
/// Offsets of `attr_ptr` and `attr_type_mask` in `struct io_uring_sqe`, and its size.
const ATTRIBUTE_AT: usize = 48;
const MASK_AT: usize = 56;
const ENTRY_BYTES: usize = 64;

/// What the kernel makes the device check (`IO_INTEGRITY_CHK_*`), if the device checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceChecks {
    /// The guard of every block.
    pub guard: bool,
    /// The reference tag of every block.
    pub ref_tag: bool,
}

impl DeviceChecks {
    /// No checks.
    pub const NONE: DeviceChecks = DeviceChecks { guard: false, ref_tag: false };

    const fn flags(self) -> u16 {
        self.guard as u16 | (self.ref_tag as u16) << 1
    }
}

/// `struct io_uring_attr_pi`.
#[repr(C)]
#[derive(Debug, Default)]
struct AttrPi {
    flags: u16,
    app_tag: u16,
    len: u32,
    addr: u64,
    seed: u64,
    rsvd: u64,
}

const _: () = assert!(size_of::<AttrPi>() == 32, "the size that the kernel copies");
const _: () = assert!(size_of::<squeue::Entry>() == ENTRY_BYTES, "the size of an entry");

/// An entry with the attribute.
fn with_attribute(entry: &squeue::Entry, attribute: &AttrPi) -> squeue::Entry {
    // SAFETY: an entry is the kernel's structure of 64 bytes (`repr(C)`, its size is asserted above) of integers and
    // unions of integers without padding, all of which the builders of entries set, beginning with zeroes.
    let mut bytes: [u8; ENTRY_BYTES] = unsafe { std::mem::transmute_copy(entry) };
    let address = (&raw const *attribute).expose_provenance() as u64;
    bytes[ATTRIBUTE_AT..ATTRIBUTE_AT + 8].copy_from_slice(&address.to_ne_bytes());
    bytes[MASK_AT..MASK_AT + 8].copy_from_slice(&ATTRIBUTE_PI.to_ne_bytes());
    // SAFETY: as above, any 64 bytes are such a structure.
    unsafe { std::mem::transmute_copy(&bytes) }
}

/// The position of the tags of a transfer, and the checks of them; the structure stays in place while the operation
/// moves.
fn attribute(tags: &mut Buffer, seed: u64, checks: DeviceChecks) -> io::Result<Box<AttrPi>> {
    let len = u32::try_from(tags.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let addr = tags.as_mut_ptr().expose_provenance() as u64;
    Ok(Box::new(AttrPi { flags: checks.flags(), app_tag: 0, len, addr, seed, rsvd: 0 }))
}

/// One read of data and tags.
struct ReadTagged {
    descriptor: Arc<Descriptor>,
    data: Buffer,
    tags: Buffer,
    attribute: Box<AttrPi>,
    offset_bytes: u64,
}

// SAFETY: the entry names the descriptor, which the `Arc` keeps open, the structure in its box, and through it the
// memory of both buffers: none of that moves with the value or has another handle, and none of it is freed when the
// value is leaked.
unsafe impl IoOp for ReadTagged {
    type Output = (io::Result<usize>, Buffer, Buffer);

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let registered = self.data.registration().and_then(|registration| tables.buffer(registration));
        let (start, len) = (self.data.as_mut_ptr(), self.data.len().min(TRANSFER_LIMIT_BYTES) as u32);
        let offset = self.offset_bytes;
        let entry = entry_for!(tables.target(&self.descriptor), |fd| match registered {
            Some(index) => opcode::ReadFixed::new(fd, start, len, index).offset(offset).build(),
            None => opcode::Read::new(fd, start, len).offset(offset).build(),
        });
        entry.map(|entry| with_attribute(&entry, &self.attribute))
    }

    /// No system call transfers tags.
    fn call(&mut self) -> io::Result<u32> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|count| count as usize), self.data, self.tags)
    }
}

/// One write of data and tags.
struct WriteTagged {
    descriptor: Arc<Descriptor>,
    data: Slice,
    /// Not shared, because the kernel changes reference tags in it on their way to a device that is stacked on another.
    tags: Buffer,
    attribute: Box<AttrPi>,
    offset_bytes: u64,
}

// SAFETY: as for `ReadTagged`; the slice's memory is not written while it lives, and the buffer of the tags has no
// other handle, so that the kernel may change it.
unsafe impl IoOp for WriteTagged {
    type Output = (io::Result<usize>, Buffer);

    fn entry(&mut self, tables: &Tables) -> Option<squeue::Entry> {
        let registered = self.data.registration().and_then(|registration| tables.buffer(registration));
        let (start, len) = (self.data.as_ptr(), self.data.len().min(TRANSFER_LIMIT_BYTES) as u32);
        let offset = self.offset_bytes;
        let entry = entry_for!(tables.target(&self.descriptor), |fd| match registered {
            Some(index) => opcode::WriteFixed::new(fd, start, len, index).offset(offset).build(),
            None => opcode::Write::new(fd, start, len).offset(offset).build(),
        });
        entry.map(|entry| with_attribute(&entry, &self.attribute))
    }

    fn call(&mut self) -> io::Result<u32> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    fn finish(self, result: io::Result<u32>) -> Self::Output {
        (result.map(|count| count as usize), self.tags)
    }

    fn discard(self, _: io::Result<u32>) {
        self.descriptor.late().ended();
    }
}

impl File {
    /// Reads blocks of a block device that was opened for direct I/O, and their tags. `seed` is the expected reference
    /// tag of the first block, in protection intervals. If the kernel converts reference tags, those that match the
    /// underlying device are returned as if counted from `seed`. Returns the number of bytes of data read, and both
    /// buffers.
    ///
    /// # Errors
    /// Those of `pread(2)`: `EILSEQ` when the device or its driver has found tags that do not match, `EINVAL` for a
    /// device without protection information and for less room than its tags need, `EOPNOTSUPP` on a reactor without
    /// io_uring.
    pub async fn read_tagged_at(
        &self,
        data: Buffer,
        mut tags: Buffer,
        offset_bytes: u64,
        seed: u64,
        checks: DeviceChecks,
    ) -> (io::Result<usize>, Buffer, Buffer) {
        let attribute = match attribute(&mut tags, seed, checks).and_then(|made| fits(offset_bytes).map(|()| made)) {
            Ok(attribute) => attribute,
            Err(error) => return (Err(error), data, tags),
        };
        let descriptor = Arc::clone(self.descriptor());
        self.operation(ReadTagged { descriptor, data, tags, attribute, offset_bytes }).await
    }

    /// Writes blocks and their tags, in the format of [`File::read_tagged_at`]. The content of the returned buffer is
    /// arbitrary.
    ///
    /// # Errors
    /// As [`File::read_tagged_at`], with `pwrite(2)`.
    pub async fn write_tagged_at(
        &self,
        data: Slice,
        mut tags: Buffer,
        offset_bytes: u64,
        seed: u64,
        checks: DeviceChecks,
    ) -> (io::Result<usize>, Buffer) {
        let attribute = match attribute(&mut tags, seed, checks).and_then(|made| fits(offset_bytes).map(|()| made)) {
            Ok(attribute) => attribute,
            Err(error) => return (Err(error), tags),
        };
        let descriptor = Arc::clone(self.descriptor());
        self.change(WriteTagged { descriptor, data, tags, attribute, offset_bytes }).await
    }

    /// True if the kernel refuses a read with a reserved field of the attribute that is not 0, as kernels do that know
    /// the attribute. Others ignore the attribute.
    ///
    /// # Errors
    /// Any other error than `EINVAL`, such as `EOPNOTSUPP` on a reactor without io_uring.
    pub async fn refuses_unknown_attributes(&self, data: Buffer, mut tags: Buffer) -> io::Result<bool> {
        let mut attribute = attribute(&mut tags, 0, DeviceChecks::NONE)?;
        attribute.rsvd = 1;
        let descriptor = Arc::clone(self.descriptor());
        let (result, ..) = self.operation(ReadTagged { descriptor, data, tags, attribute, offset_bytes: 0 }).await;
        match result {
            Ok(_) => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// Refuses values that do not fit an `off_t`: to a ring, the offset -1 would mean the file position.
fn fits(offset_bytes: u64) -> io::Result<()> {
    i64::try_from(offset_bytes).map(drop).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::types::Fd;

    #[test]
    fn the_attribute_is_where_the_kernel_looks_for_it_and_the_rest_stays() {
        let mut tags = Buffer::zeroed(16);
        let checks = DeviceChecks { guard: true, ref_tag: true };
        let made = attribute(&mut tags, 77, checks).unwrap();
        assert_eq!((made.flags, made.app_tag, made.len, made.seed, made.rsvd), (3, 0, 16, 77, 0));
        let mut data = Buffer::zeroed(512);
        let plain = opcode::Read::new(Fd(3), data.as_mut_ptr(), 512).offset(4096).build().user_data(9);
        let entry = with_attribute(&plain, &made);
        // SAFETY: see `with_attribute`.
        let (before, after): ([u8; 64], [u8; 64]) =
            unsafe { (std::mem::transmute_copy(&plain), std::mem::transmute_copy(&entry)) };
        assert_eq!(before[..48], after[..48]);
        assert_eq!(after[48..56], ((&raw const *made).addr() as u64).to_ne_bytes());
        assert_eq!(after[56..], 1_u64.to_ne_bytes());
        assert_eq!((entry.get_opcode(), entry.get_user_data()), (u32::from(opcode::Read::CODE), 9));
    }

    #[test]
    fn flags_are_the_kernels() {
        let flags = |guard, ref_tag| DeviceChecks { guard, ref_tag }.flags();
        assert_eq!((flags(false, false), flags(true, false), flags(false, true)), (0, 1, 2));
        let offsets = [
            (std::mem::offset_of!(AttrPi, app_tag), 2),
            (std::mem::offset_of!(AttrPi, len), 4),
            (std::mem::offset_of!(AttrPi, addr), 8),
            (std::mem::offset_of!(AttrPi, seed), 16),
            (std::mem::offset_of!(AttrPi, rsvd), 24),
        ];
        assert!(offsets.iter().all(|(here, there)| here == there), "{offsets:?}");
    }
}
