//! Operations on a block device that bypass the page cache.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{FallocateFlags, OFlags};

/// The alignment of memory and length for direct I/O on any device.
const PAGE_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 1 << 18;

/// Page-aligned memory.
pub(super) struct Pages {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Pages {
    pub(super) fn new(bytes: usize) -> Pages {
        let memory = vec![0; bytes + PAGE_BYTES];
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        Pages { memory, start, bytes }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.bytes]
    }
}

/// Opens a device for direct I/O; returns its length in bytes.
fn open(device: &Path, write: bool) -> Result<(File, u64)> {
    let direct = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(write).custom_flags(direct).open(device);
    let mut file = file.with_context(|| format!("opening {}", device.display()))?;
    let length = file.seek(SeekFrom::End(0)).context("asking for the length")?;
    Ok((file, length))
}

/// Prints `LBA ERRNO` for each unreadable block, and their count.
pub fn scan(device: &Path, block_bytes: usize) -> Result<()> {
    let (file, length) = open(device, false)?;
    let mut pages = Pages::new(block_bytes);
    let blocks = length / block_bytes as u64;
    for lba in 0..blocks {
        if let Err(error) = file.read_exact_at(pages.bytes(), lba * block_bytes as u64) {
            println!("{lba} {}", error.raw_os_error().unwrap_or(0));
        }
    }
    println!("blocks {blocks}");
    Ok(())
}

/// The pattern: every 8 bytes are a hash of their position and the seed.
fn pattern(bytes: &mut [u8], offset_bytes: u64, seed: u64) {
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        let position = offset_bytes / 8 + i as u64;
        let mixed = (position ^ seed.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        word.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
}

/// Writes random bytes, different at each call.
pub fn random(out: &mut impl Write, bytes: u64) -> Result<()> {
    let (mut generator, mut chunk) = (fastrand::Rng::new(), vec![0; CHUNK_BYTES]);
    for (_, bytes) in chunks(bytes) {
        generator.fill(&mut chunk[..bytes]);
        out.write_all(&chunk[..bytes]).context("writing random bytes")?;
    }
    out.flush().context("writing random bytes")
}

/// The chunks of a device: offset and length.
fn chunks(length: u64) -> impl Iterator<Item = (u64, usize)> {
    let step = CHUNK_BYTES as u64;
    (0..length.div_ceil(step)).map(move |i| (i * step, (length - i * step).min(step) as usize))
}

/// Writes the pattern and flushes it.
pub fn fill(device: &Path, seed: u64) -> Result<()> {
    let (file, length) = open(device, true)?;
    let mut pages = Pages::new(CHUNK_BYTES);
    for (offset, bytes) in chunks(length) {
        let chunk = &mut pages.bytes()[..bytes];
        pattern(chunk, offset, seed);
        file.write_all_at(chunk, offset).with_context(|| format!("writing at {offset}"))?;
    }
    file.sync_all().context("flushing")
}

/// Prints the `LBA` (of 4096 bytes) of each differing block, and their count.
pub fn check(device: &Path, seed: u64) -> Result<()> {
    let (file, length) = open(device, false)?;
    let (mut pages, mut wanted) = (Pages::new(CHUNK_BYTES), vec![0; CHUNK_BYTES]);
    let mut different = 0;
    for (offset, bytes) in chunks(length) {
        let chunk = &mut pages.bytes()[..bytes];
        file.read_exact_at(chunk, offset).with_context(|| format!("reading at {offset}"))?;
        pattern(&mut wanted[..bytes], offset, seed);
        for (i, (got, wanted)) in chunk.chunks(PAGE_BYTES).zip(wanted.chunks(PAGE_BYTES)).enumerate() {
            if got != wanted {
                println!("{}", offset / PAGE_BYTES as u64 + i as u64);
                different += 1;
            }
        }
    }
    if different > 0 {
        bail!("{different} blocks are different");
    }
    Ok(())
}

/// The flags of an operation by name.
pub fn mode(name: &str) -> Result<FallocateFlags, String> {
    /// FALLOC_FL_WRITE_ZEROES, which the library does not define yet.
    const WRITE_ZEROES: u32 = 0x80;
    match name {
        "punch-hole" => Ok(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
        "zero-range" => Ok(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
        "write-zeroes" => Ok(FallocateFlags::from_bits_retain(WRITE_ZEROES)),
        _ => Err("punch-hole, zero-range or write-zeroes".to_owned()),
    }
}

/// Calls `fallocate(2)`.
pub fn fallocate(device: &Path, mode: FallocateFlags, offset_bytes: u64, length_bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).open(device);
    let file = file.with_context(|| format!("opening {}", device.display()))?;
    let result = rustix::fs::fallocate(&file, mode, offset_bytes, length_bytes);
    result.map_err(io::Error::from).with_context(|| format!("fallocate with mode {:#x}", mode.bits()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_direct_reads_is_aligned() {
        let mut pages = Pages::new(512);
        assert_eq!(pages.bytes().len(), 512);
        assert_eq!(pages.bytes().as_ptr().align_offset(PAGE_BYTES), 0);
    }

    #[test]
    fn chunks_cover_a_device_once() {
        let length = 3 * CHUNK_BYTES as u64 + 512;
        let all: Vec<(u64, usize)> = chunks(length).collect();
        assert_eq!(all.len(), 4);
        assert_eq!(all[3], (3 * CHUNK_BYTES as u64, 512));
        assert_eq!(all.iter().map(|(_, bytes)| *bytes as u64).sum::<u64>(), length);
    }

    #[test]
    fn the_pattern_differs_by_place_and_seed_and_not_by_chunk() {
        let make = |offset, seed| {
            let mut bytes = vec![0; 8192];
            pattern(&mut bytes, offset, seed);
            bytes
        };
        assert_eq!(make(0, 1)[4096..], make(4096, 1)[..4096]);
        assert_ne!(make(0, 1)[..4096], make(4096, 1)[..4096]);
        assert_ne!(make(0, 1), make(0, 2));
    }

    #[test]
    fn random_bytes_are_as_many_as_were_asked_for_and_repeat_nowhere() {
        let make = || {
            let mut all = Vec::new();
            random(&mut all, 2 * CHUNK_BYTES as u64 + 13).unwrap();
            all
        };
        let (first, second) = (make(), make());
        assert_eq!((first.len(), second.len()), (2 * CHUNK_BYTES + 13, 2 * CHUNK_BYTES + 13));
        let words: std::collections::HashSet<&[u8]> = first.chunks(8).chain(second.chunks(8)).collect();
        assert_eq!(words.len(), 2 * first.len().div_ceil(8), "words of 8 bytes that are there twice");
    }

    #[test]
    fn modes_are_known_by_name() {
        assert_eq!(mode("punch-hole").unwrap().bits(), 3);
        assert_eq!(mode("zero-range").unwrap().bits(), 0x11);
        assert_eq!(mode("write-zeroes").unwrap().bits(), 0x80);
        assert!(mode("collapse").is_err());
    }
}
