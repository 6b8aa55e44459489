//! Bytes in RAM.

use std::cell::RefCell;
use std::sync::Arc;

use sealblock_block::{Medium, MediumError, MediumErrorKind, NoteKeeping};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::chunk::Shape;
use crate::spares::Spares;
use crate::store::Chunks;

/// Chunks of 64 KiB: small enough that memory can be freed, large enough that there are few. A block is a byte.
const SHAPE: Shape = Shape { block_shift: 0, chunk_shift: 16, tuple_bytes: 0 };

/// A medium in RAM. Clones are the same bytes, so that a test can open them again after "losing" the first handle.
///
/// Like a disk it refuses offsets and lengths that are not multiples of its sector. Only the end of the process loses
/// anything, so `sync` does nothing.
pub struct MemoryMedium {
    chunks: Arc<Chunks>,
    /// Those of this handle.
    spares: RefCell<Spares>,
    length_bytes: u64,
    sector_bytes: u32,
    read_only: bool,
}

impl MemoryMedium {
    /// `length_bytes` bytes of zeroes, rounded down to whole sectors of `sector_bytes` bytes, a power of two from 512
    /// on.
    ///
    /// # Panics
    /// If `sector_bytes` is not such a power of two: a bug of the caller, not an error of its input.
    pub fn new(length_bytes: u64, sector_bytes: u32) -> MemoryMedium {
        assert!(sector_bytes.is_power_of_two() && sector_bytes >= 512, "{sector_bytes} bytes are no sector");
        let length_bytes = length_bytes - length_bytes % u64::from(sector_bytes);
        let chunks = Arc::new(Chunks::new(SHAPE, length_bytes));
        MemoryMedium { spares: RefCell::new(chunks.spares()), chunks, length_bytes, sector_bytes, read_only: false }
    }

    /// A handle on the same bytes that accepts no writes.
    pub fn as_read_only(&self) -> MemoryMedium {
        MemoryMedium { read_only: true, ..self.clone() }
    }

    /// Bytes of memory used.
    pub fn allocated_bytes(&self) -> u64 {
        self.chunks.stored_bytes()
    }

    /// Copies bytes at any offset, for tests and tools. Bytes after the end are zeroes.
    pub fn peek(&self, offset_bytes: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let there = self.length_bytes.saturating_sub(offset_bytes).min(length as u64) as usize;
        self.copy_out(offset_bytes, &mut bytes[..there]);
        bytes
    }

    /// Changes bytes at any offset, without checks, for tests and tools. Bytes after the end are left out.
    pub fn poke(&self, offset_bytes: u64, bytes: &[u8]) {
        let there = self.length_bytes.saturating_sub(offset_bytes).min(bytes.len() as u64) as usize;
        self.copy_in(offset_bytes, &bytes[..there]);
    }

    fn copy_out(&self, offset_bytes: u64, into: &mut [u8]) {
        for part in SHAPE.parts(offset_bytes, into.len() as u64) {
            let into = &mut into[part.of_whole];
            match self.chunks.lock(part.chunk) {
                Some(chunk) => chunk.read(SHAPE, &part.within, into, &mut []),
                None => into.fill(0),
            }
        }
    }

    fn copy_in(&self, offset_bytes: u64, from: &[u8]) {
        let spares = &mut self.spares.borrow_mut();
        for part in SHAPE.parts(offset_bytes, from.len() as u64) {
            self.chunks.change(&part, spares, |bytes, _| {
                bytes.data[part.within.clone()].copy_from_slice(&from[part.of_whole.clone()]);
            });
        }
    }

    fn clear(&self, offset_bytes: u64, length_bytes: u64) {
        let spares = &mut self.spares.borrow_mut();
        SHAPE.parts(offset_bytes, length_bytes).for_each(|part| self.chunks.clear(&part, spares));
    }

    /// Refuses ranges that are not within the length or not in whole sectors.
    fn check(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        let refuse = |kind, reason: &str| Err(MediumError { kind, doing, offset_bytes, reason: reason.to_owned() });
        let sector = u64::from(self.sector_bytes);
        if !offset_bytes.is_multiple_of(sector) || !length_bytes.is_multiple_of(sector) {
            return refuse(MediumErrorKind::Failed, "offset or length is not a multiple of the sector size");
        }
        if offset_bytes.checked_add(length_bytes).is_none_or(|end| end > self.length_bytes) {
            return refuse(MediumErrorKind::PastEnd, "past the end of the medium");
        }
        Ok(())
    }

    /// As [`MemoryMedium::check`], and refuses changes to a handle for reading.
    fn check_change(&self, doing: &'static str, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        if self.read_only {
            let reason = "opened for reading only".to_owned();
            return Err(MediumError { kind: MediumErrorKind::ReadOnly, doing, offset_bytes, reason });
        }
        self.check(doing, offset_bytes, length_bytes)
    }
}

impl Clone for MemoryMedium {
    fn clone(&self) -> MemoryMedium {
        let spares = RefCell::new(self.chunks.spares());
        MemoryMedium { chunks: Arc::clone(&self.chunks), spares, ..*self }
    }
}

impl Medium for MemoryMedium {
    fn len_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn can_punch(&self) -> bool {
        true
    }

    async fn read(&self, offset_bytes: u64, mut into: Buffer) -> (Result<(), MediumError>, Buffer) {
        let checked = self.check("read", offset_bytes, into.len() as u64);
        if checked.is_ok() {
            self.copy_out(offset_bytes, &mut into);
        }
        (checked, into)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        self.check_change("write", offset_bytes, from.len() as u64)?;
        self.copy_in(offset_bytes, &from);
        Ok(())
    }

    fn note_keeping(&self) -> NoteKeeping {
        NoteKeeping::Needless
    }

    async fn sync(&self) -> Result<(), MediumError> {
        Ok(())
    }

    /// A write is complete before its future can be dropped.
    async fn drain(&self) {}

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        self.check_change("punch", offset_bytes, length_bytes)?;
        self.clear(offset_bytes, length_bytes);
        Ok(())
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        // RAM is not reserved: zeroes need no memory, so keeping the space means nothing here.
        self.check_change("write zeroes", offset_bytes, length_bytes)?;
        self.clear(offset_bytes, length_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn now<T>(future: impl Future<Output = T>) -> T {
        future.now_or_never().expect("RAM never waits")
    }

    fn kind<T>(result: Result<T, MediumError>) -> Option<MediumErrorKind> {
        result.err().map(|error| error.kind)
    }

    fn read(medium: &MemoryMedium, offset_bytes: u64, length: usize) -> Result<Vec<u8>, MediumError> {
        let (result, buffer) = now(medium.read(offset_bytes, Buffer::zeroed(length)));
        result.map(|()| buffer.to_vec())
    }

    #[test]
    fn what_is_written_is_read_through_every_handle() {
        let medium = MemoryMedium::new(1 << 20, 512);
        now(medium.write(65024, Slice::copy_from(&[7; 1024]))).unwrap();
        assert_eq!(read(&medium.clone(), 64512, 2048).unwrap(), [vec![0; 512], vec![7; 1024], vec![0; 512]].concat());
        assert_eq!(medium.allocated_bytes(), 128 << 10);
        now(medium.punch(0, 1 << 20)).unwrap();
        assert_eq!((medium.allocated_bytes(), read(&medium, 65024, 512).unwrap()), (0, vec![0; 512]));
    }

    #[test]
    fn the_end_is_the_end() {
        let medium = MemoryMedium::new(1 << 20, 512);
        assert!(now(medium.write((1 << 20) - 512, Slice::copy_from(&[1; 512]))).is_ok());
        let past = now(medium.write((1 << 20) - 512, Slice::copy_from(&[1; 1024])));
        assert_eq!(kind(past), Some(MediumErrorKind::PastEnd));
        assert_eq!(kind(read(&medium, 1 << 20, 512)), Some(MediumErrorKind::PastEnd));
        assert_eq!(kind(now(medium.punch(0, u64::MAX - 511))), Some(MediumErrorKind::PastEnd));
        assert_eq!(MemoryMedium::new(1000, 512).len_bytes(), 512);
    }

    #[test]
    fn sectors_are_the_unit() {
        let medium = MemoryMedium::new(1 << 20, 4096);
        assert!(read(&medium, 4096, 4096).is_ok());
        assert_eq!(kind(read(&medium, 512, 4096)), Some(MediumErrorKind::Failed));
        assert_eq!(kind(read(&medium, 0, 512)), Some(MediumErrorKind::Failed));
    }

    #[test]
    fn a_handle_for_reading_takes_no_changes() {
        let medium = MemoryMedium::new(1 << 20, 512);
        let reader = medium.as_read_only();
        now(medium.write(0, Slice::copy_from(&[5; 512]))).unwrap();
        assert_eq!(read(&reader, 0, 512).unwrap(), vec![5; 512]);
        for refused in
            [now(reader.write(0, Slice::copy_from(&[1; 512]))), now(reader.punch(0, 512)), now(reader.zero(0, 512))]
        {
            assert_eq!(kind(refused), Some(MediumErrorKind::ReadOnly));
        }
        assert!(reader.is_read_only() && !medium.is_read_only());
    }

    #[test]
    fn tests_reach_every_byte_but_none_past_the_end() {
        let medium = MemoryMedium::new(512, 512);
        medium.poke(510, &[1, 2, 3]);
        assert_eq!(medium.peek(509, 5), [0, 1, 2, 0, 0]);
        medium.poke(u64::MAX, &[1]);
        assert_eq!(medium.peek(u64::MAX, 1), [0]);
    }
}
