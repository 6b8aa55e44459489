//! Files with all forms of storage: inline and in extents, compressed, partly overwritten, shared, allocated and not
//! written, with holes, without checksums.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, IFlags, XattrFlags, copy_file_range, fallocate, ioctl_getflags, ioctl_setflags};

use crate::content::{noise, text};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The unit of extents on the machines that run this.
const SECTOR: u64 = 4 * KIB;

/// Makes all of them in a folder.
///
/// # Errors
/// If something cannot be made.
pub fn fill(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    inline(&folder.join("inline"))?;
    for algorithm in ["zlib", "lzo", "zstd"] {
        compressed(&folder.join(format!("by-{algorithm}")), algorithm)?;
    }
    preallocated(&folder.join("preallocated"))?;
    holes(&folder.join("holes"))?;
    without_cow(&folder.join("nodatacow"))?;
    bookends(&folder.join("bookends"))?;
    shared(&folder.join("shared"))
}

/// A file with this content, open for further changes.
fn create(path: &Path, content: &[u8]) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    file.write_all_at(content, 0)?;
    Ok(file)
}

/// Makes a folder; returns its path.
fn folder(path: &Path) -> io::Result<impl Fn(&str) -> PathBuf> {
    fs::create_dir(path)?;
    let path = path.to_owned();
    Ok(move |name: &str| path.join(name))
}

/// Overwrites part of a file that is already committed, so that the rest of the earlier extent stays in use.
fn overwrite(file: &File, content: &[u8], offset: u64) -> io::Result<()> {
    file.sync_data()?;
    file.write_all_at(content, offset)
}

/// Sizes around the limit for inline files, and inline files that grew or shrank.
fn inline(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    for bytes in [0, 1, 100, 2047, 2048, 2049, 3900, 4095, 4096, 4097] {
        create(&path(&format!("size-{bytes}")), &text(bytes))?;
    }
    let grown = create(&path("grown-by-writing"), &text(500))?;
    overwrite(&grown, &noise(10_000, 1), 500)?;
    let far = create(&path("grown-behind-a-hole"), &text(500))?;
    overwrite(&far, b"far", 3 * MIB)?;
    let longer = create(&path("longer"), &text(500))?;
    longer.sync_data()?;
    longer.set_len(2 * MIB)?;
    let shorter = create(&path("shorter"), &text(100_000))?;
    shorter.sync_data()?;
    shorter.set_len(77)?;
    let inside = create(&path("overwritten"), &text(1000))?;
    overwrite(&inside, b"inside", 400)
}

fn set_compression(path: &Path, algorithm: &str) -> io::Result<()> {
    Ok(rustix::fs::setxattr(path, "btrfs.compression", algorithm.as_bytes(), XattrFlags::empty())?)
}

/// Compressed files: inline and not, with one extent and many, with incompressible parts, overwritten, truncated, with
/// holes.
fn compressed(path: &Path, algorithm: &str) -> io::Result<()> {
    let folder_path = path.to_owned();
    let path = folder(path)?;
    set_compression(&folder_path, algorithm)?;
    // Sizes up to the limit for compressed inline data, up to the limit of one extent, and beyond.
    for bytes in [300, 3000, 4096, 5000, 131_072, 131_073, 700_001] {
        create(&path(&format!("size-{bytes}")), &text(bytes))?;
    }
    create(&path("zeroes"), &vec![0; 300_000])?;
    create(&path("mixed"), &[text(200_000), noise(200_000, 2), text(100_000)].concat())?;
    let middle = create(&path("overwritten"), &text(400_000))?;
    overwrite(&middle, &noise(9000, 3), 130_000)?;
    overwrite(&middle, &text(5000), 262_144)?;
    overwrite(&middle, b"one byte more", 399_999)?;
    let cut = create(&path("cut"), &text(300_000))?;
    cut.sync_data()?;
    cut.set_len(150_001)?;
    let punched = create(&path("punched"), &text(300_000))?;
    punched.sync_data()?;
    fallocate(&punched, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 40_000, 100_000)?;
    let inline = create(&path("inline-then-grown"), &text(3000))?;
    overwrite(&inline, &text(20_000), 8192)?;
    inline.sync_data()?;
    // Parts of compressed extents, from the middle and across the boundary between two.
    let source = create(&path("source"), &text(400_000))?;
    source.sync_data()?;
    let slices = create(&path("slices"), &[])?;
    for (from, to, sectors) in [(10, 0, 5), (30, 7, 4), (3, 20, 60), (10, 90, 1)] {
        clone_range(&source, from * SECTOR, &slices, to * SECTOR, sectors * SECTOR)?;
    }
    overwrite(&slices, &noise(100, 4), 2 * SECTOR + 5)
}

/// Space that is allocated but not written: whole files, beyond the end, partly written, truncated.
fn preallocated(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    let allocate = |name: &str, flags, offset, bytes| -> io::Result<File> {
        let file = create(&path(name), &[])?;
        fallocate(&file, flags, offset, bytes)?;
        Ok(file)
    };
    allocate("untouched", FallocateFlags::empty(), 0, MIB)?;
    let behind = allocate("behind-the-end", FallocateFlags::KEEP_SIZE, 0, MIB)?;
    behind.write_all_at(&text(10_000), 0)?;
    let pieces = allocate("written-in-pieces", FallocateFlags::empty(), 0, MIB)?;
    for (seed, offset) in [(5, 100), (6, 64 * KIB), (7, 300_000), (8, MIB - 5000)] {
        overwrite(&pieces, &noise(9000.min((MIB - offset) as usize), seed), offset)?;
    }
    let half = allocate("half-written", FallocateFlags::empty(), 0, 512 * KIB)?;
    half.write_all_at(&noise(256 << 10, 9), 0)?;
    let later = create(&path("behind-data"), &text(50_000))?;
    overwrite(&later, b"end", 60_000)?;
    fallocate(&later, FallocateFlags::empty(), 200_000, 100_000)?;
    let cut = allocate("cut", FallocateFlags::empty(), 0, MIB)?;
    cut.sync_data()?;
    cut.set_len(100_001)?;
    let zeroed = create(&path("zeroed"), &noise(200_000, 10))?;
    zeroed.sync_data()?;
    fallocate(&zeroed, FallocateFlags::ZERO_RANGE, 50_000, 100_000)?;
    Ok(())
}

/// Ranges without data: at the start, in the middle and at the end, punched, and one of 20 GiB.
fn holes(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    create(&path("nothing-else"), &[])?.set_len(10 * MIB + 1)?;
    create(&path("at-the-front"), &[])?.write_all_at(&text(5000), MIB + 17)?;
    let between = create(&path("between"), &noise(10_000, 11))?;
    for number in 1..20 {
        between.write_all_at(&noise(3000, number), number * 40 * KIB + number)?;
    }
    create(&path("at-the-end"), &text(10_000))?.set_len(5 * MIB)?;
    let punched = create(&path("punched"), &noise(MIB as usize, 12))?;
    punched.sync_data()?;
    for (offset, bytes) in [(0, 4096), (100_000, 1), (200_000, 50_000), (MIB - 8192, 8192)] {
        fallocate(&punched, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, bytes)?;
    }
    let filled = create(&path("filled-again"), &[])?;
    filled.set_len(MIB)?;
    overwrite(&filled, &noise(20_000, 13), 500_000)?;
    let huge = create(&path("20-gibibytes"), b"front")?;
    huge.set_len(20 << 30)?;
    for gibibytes in [1, 5, 13, 19] {
        huge.write_all_at(&noise(5000, gibibytes), (gibibytes << 30) + 123)?;
    }
    Ok(())
}

/// Files without copy on write, and so without checksums and compression.
fn without_cow(path: &Path) -> io::Result<()> {
    let folder_path = path.to_owned();
    let path = folder(path)?;
    let single = create(&path("single"), &[])?;
    ioctl_setflags(&single, ioctl_getflags(&single)? | IFlags::NOCOW)?;
    single.write_all_at(&text(300_000), 0)?;
    overwrite(&single, &noise(10_000, 14), 77_777)?;
    let directory = File::open(folder_path)?;
    ioctl_setflags(&directory, ioctl_getflags(&directory)? | IFlags::NOCOW)?;
    let inherits = create(&path("inherits"), &[])?;
    fallocate(&inherits, FallocateFlags::empty(), 0, 400_000)?;
    overwrite(&inherits, &noise(10_000, 15), 100_000)?;
    create(&path("inline"), &text(700))?;
    Ok(())
}

/// Extents of which only parts are still used.
fn bookends(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    let ends = create(&path("both-ends"), &noise(MIB as usize, 16))?;
    overwrite(&ends, &noise((MIB - 2 * SECTOR) as usize, 17), SECTOR)?;
    let sector = create(&path("one-sector"), &noise(MIB as usize, 18))?;
    overwrite(&sector, &noise(400_000 / 4096 * 4096, 19), 0)?;
    overwrite(
        &sector,
        &noise((MIB - 400_000 / SECTOR * SECTOR - SECTOR) as usize, 20),
        400_000 / SECTOR * SECTOR + SECTOR,
    )?;
    let comb = create(&path("comb"), &noise(MIB as usize, 21))?;
    comb.sync_data()?;
    for number in 0..60_u64 {
        comb.write_all_at(&noise(4096, 100 + number), number * 4 * SECTOR)?;
    }
    comb.sync_data()
}

/// Shares a range of a file's extents with another file. Offsets and lengths are multiples of a sector.
fn clone_range(from: &File, mut from_offset: u64, to: &File, mut to_offset: u64, bytes: u64) -> io::Result<()> {
    let mut left = bytes as usize;
    while left > 0 {
        // On Btrfs this shares whole sectors and copies nothing.
        let copied = copy_file_range(from, Some(&mut from_offset), to, Some(&mut to_offset), left)?;
        if copied == 0 {
            return Err(io::Error::other("the source ends before the range"));
        }
        left -= copied;
    }
    Ok(())
}

/// Extents that several files use, or one file several times.
fn shared(path: &Path) -> io::Result<()> {
    let path = folder(path)?;
    let source = create(&path("source"), &noise(300_000, 22))?;
    source.sync_data()?;
    // More references than fit in the extent item.
    for number in 0..150 {
        rustix::fs::ioctl_ficlone(File::create(path(&format!("copy-{number}")))?, &source)?;
    }
    let slices = create(&path("slices"), &[])?;
    for (from, to, sectors) in [(3, 0, 2), (0, 9, 20), (50, 2, 3), (3, 40, 2), (60, 70, 10)] {
        clone_range(&source, from * SECTOR, &slices, to * SECTOR, sectors * SECTOR)?;
    }
    let itself = create(&path("within-itself"), &noise(100_000, 23))?;
    itself.sync_data()?;
    clone_range(&itself, 4 * SECTOR, &itself, 30 * SECTOR, 8 * SECTOR)?;
    let changed = OpenOptions::new().write(true).open(path("copy-7"))?;
    overwrite(&changed, &noise(5000, 24), 123_456)
}
