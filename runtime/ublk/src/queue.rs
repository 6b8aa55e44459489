//! The character device of a block device, and its queues, through which requests arrive and their data and tags are
//! copied.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use sealblock_runtime_reactor::File;

use crate::abi::{
    COMMIT_AND_FETCH, DESCRIPTOR_BYTES, Descriptor, FETCH, MAX_DEPTH, data_position, io_payload, tags_position,
};

/// The open character device. The driver lets one process open it, once; clones are the same device.
#[derive(Clone, Debug)]
pub struct CharacterDevice(Arc<OwnedFd>);

impl CharacterDevice {
    /// Opens `/dev/ublkcN`.
    ///
    /// # Errors
    /// `EBUSY` while another process has it open.
    pub fn open(number: u32) -> io::Result<CharacterDevice> {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(format!("/dev/ublkc{number}"))?;
        Ok(CharacterDevice(Arc::new(file.into())))
    }

    /// A queue, to be used only on this core: the driver requires that all commands of a queue come from one thread.
    ///
    /// # Errors
    /// When the descriptors of its requests cannot be mapped.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn queue(&self, number: u16, depth: u16) -> io::Result<Queue> {
        let descriptors = Descriptors::map(&self.0, number, depth)?;
        let file = File::from_fd(self.0.try_clone()?);
        Ok(Queue { file, fd: Arc::clone(&self.0), descriptors, number })
    }
}

/// The descriptors of a queue's requests, in memory that the driver writes and this process reads.
struct Descriptors {
    start: NonNull<u8>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(fd: &OwnedFd, queue: u16, depth: u16) -> io::Result<Descriptors> {
        let bytes = (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(rustix::param::page_size());
        let offset = u64::from(queue) * u64::from(MAX_DEPTH) * DESCRIPTOR_BYTES as u64;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses where, so nothing that is there is replaced.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, fd, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptors { start, bytes, depth })
    }

    /// The descriptor of a request that the driver has handed out.
    fn get(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES] {
        assert!(tag < self.depth, "a tag is below the depth of its queue");
        let at = usize::from(tag) * DESCRIPTOR_BYTES;
        // SAFETY: the mapping has `depth` descriptors and lives as long as this value; 24 bytes at a multiple of 8 are
        // aligned. The driver wrote it before it completed the command that handed the request out, and does not write
        // it again before the request completes; a driver that did could change a number, which is checked in the
        // copy.
        let words: [u64; DESCRIPTOR_BYTES / 8] = unsafe { self.start.add(at).cast().read_volatile() };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (word, bytes) in words.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = word.to_ne_bytes();
        }
        bytes
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and nothing refers to it any more. If unmapping fails, it is only
        // leaked.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A queue of requests.
pub struct Queue {
    file: File,
    fd: Arc<OwnedFd>,
    descriptors: Descriptors,
    number: u16,
}

impl Queue {
    /// Waits for the first request of a tag.
    ///
    /// # Errors
    /// `ENODEV` when the device stops; other errors of the driver.
    pub async fn fetch(&self, tag: u16) -> io::Result<()> {
        self.command(FETCH, tag, 0).await
    }

    /// Answers the request of a tag, with its number of bytes or a negative error number, and waits for the next one.
    ///
    /// # Errors
    /// As [`Queue::fetch`].
    pub async fn commit_and_fetch(&self, tag: u16, result: i32) -> io::Result<()> {
        self.command(COMMIT_AND_FETCH, tag, result).await
    }

    async fn command(&self, operation: u32, tag: u16, result: i32) -> io::Result<()> {
        // SAFETY: the payload names no memory.
        let fetched = unsafe { self.file.uring_command(operation, io_payload(self.number, tag, result)) }.await;
        fetched.map(drop)
    }

    /// The request of a tag, for which the last command waited; `None` if its operation is unknown.
    ///
    /// # Panics
    /// With a tag that the queue does not have.
    pub fn descriptor(&self, tag: u16) -> Option<Descriptor> {
        Descriptor::from_bytes(&self.descriptors.get(tag))
    }

    /// Copies the data of a write. A copy from memory to memory, so a short call.
    ///
    /// # Errors
    /// The driver's, and `UnexpectedEof` if there are fewer bytes.
    pub fn read_data(&self, tag: u16, data: &mut [u8]) -> io::Result<()> {
        self.read(data, |offset| data_position(self.number, tag, offset))
    }

    /// Copies the protection information of a write, which may be done before or after its data.
    ///
    /// # Errors
    /// As [`Queue::read_data`].
    pub fn read_tags(&self, tag: u16, tags: &mut [u8]) -> io::Result<()> {
        self.read(tags, |offset| tags_position(self.number, tag, offset))
    }

    /// Copies data of a read, `offset` bytes into it.
    ///
    /// # Errors
    /// The driver's, and `WriteZero` if there is room for fewer bytes.
    pub fn write_data(&self, tag: u16, offset: u32, data: &[u8]) -> io::Result<()> {
        self.write(data, |done| data_position(self.number, tag, offset.saturating_add(done)))
    }

    /// Copies protection information of a read, `offset` bytes into it.
    ///
    /// # Errors
    /// As [`Queue::write_data`].
    pub fn write_tags(&self, tag: u16, offset: u32, tags: &[u8]) -> io::Result<()> {
        self.write(tags, |done| tags_position(self.number, tag, offset.saturating_add(done)))
    }

    fn read(&self, mut into: &mut [u8], position: impl Fn(u32) -> u64) -> io::Result<()> {
        let mut done = 0;
        while !into.is_empty() {
            match rustix::io::pread(self.fd.as_fd(), &mut *into, position(done))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => {
                    done += count as u32;
                    into = &mut into[count..];
                }
            }
        }
        Ok(())
    }

    fn write(&self, mut from: &[u8], position: impl Fn(u32) -> u64) -> io::Result<()> {
        let mut done = 0;
        while !from.is_empty() {
            match rustix::io::pwrite(self.fd.as_fd(), from, position(done))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => {
                    done += count as u32;
                    from = &from[count..];
                }
            }
        }
        Ok(())
    }
}
