//! Compresses data for extents and for inline extents.
//!
//! A stream is used only if it is shorter than a limit: an extent must save at least one sector, an inline extent must
//! be below the size that is allowed in an item. Otherwise the data are stored as they are.
//!
//! Every stream is decompressed again before it is returned. A checksum protects what was stored, but not what was
//! meant, so a fault of an encoder would lose data without a trace until they are read.

use flate2::{Compress, FlushCompress, Status};
use lzokay::compress::{Dict, compress_no_alloc};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::{LZO_LENGTH_BYTES, MAX_EXTENT_BYTES, Sizes, decompress};
use crate::items::file_extent::Compression;

/// The level of zlib that Linux uses by default.
pub const DEFAULT_ZLIB_LEVEL: u32 = 3;
/// The highest level of zlib.
pub const MAX_ZLIB_LEVEL: u32 = 9;

/// How data are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// Deflate, with a level from 1 to [`MAX_ZLIB_LEVEL`]; other levels are rounded to these.
    Zlib {
        /// The level.
        level: u32,
    },
    /// LZO1X.
    Lzo,
    /// Zstandard. There is only one level.
    Zstd,
}

impl Method {
    /// The number that the extent records.
    pub fn compression(self) -> Compression {
        match self {
            Method::Zlib { .. } => Compression::Zlib,
            Method::Lzo => Compression::Lzo,
            Method::Zstd => Compression::Zstd,
        }
    }
}

/// The longest stream that is worth an extent of its own: it saves at least one sector. 0 if none is.
pub fn extent_limit(plain_bytes: usize, sector_bytes: usize) -> usize {
    plain_bytes.checked_next_multiple_of(sector_bytes).unwrap_or(0).saturating_sub(sector_bytes)
}

/// The longest stream that is worth an inline extent, if uncompressed or not `most` bytes may be in an item.
pub fn inline_limit(plain_bytes: usize, most: usize) -> usize {
    most.min(plain_bytes.saturating_sub(1))
}

/// Compresses data to at most `limit` bytes. Returns `None` if that is not possible, or if the data are not from 1 to
/// [`MAX_EXTENT_BYTES`] bytes. An extent consists of whole sectors, so the caller adds zeroes up to the next one.
pub fn compress(method: Method, plain: &[u8], sector_bytes: usize, limit: usize) -> Option<Vec<u8>> {
    if !(1..=MAX_EXTENT_BYTES).contains(&plain.len()) || sector_bytes == 0 || limit == 0 {
        return None;
    }
    let stored = match method {
        Method::Zlib { level } => deflate(plain, level, limit)?,
        Method::Lzo => pack_lzo(plain, sector_bytes, limit)?,
        Method::Zstd => compress_to_vec(plain, CompressionLevel::Fastest),
    };
    let is_short = stored.len() <= limit;
    let sizes = Sizes { plain_bytes: plain.len(), sector_bytes };
    let comes_back = || decompress(method.compression(), &stored, sizes).is_ok_and(|again| again == plain);
    (is_short && comes_back()).then_some(stored)
}

pub(super) fn deflate(plain: &[u8], level: u32, limit: usize) -> Option<Vec<u8>> {
    let level = flate2::Compression::new(level.clamp(1, MAX_ZLIB_LEVEL));
    let (mut stream, mut stored) = (Compress::new(level, true), vec![0; limit]);
    match stream.compress(plain, &mut stored, FlushCompress::Finish) {
        Ok(Status::StreamEnd) => {}
        // It does not fit.
        Ok(_) | Err(_) => return None,
    }
    stored.truncate(usize::try_from(stream.total_out()).ok()?);
    Some(stored)
}

/// For the format see the decoder.
pub(super) fn pack_lzo(plain: &[u8], sector_bytes: usize, limit: usize) -> Option<Vec<u8>> {
    let (mut dictionary, mut segment) = (Dict::new(), vec![0; worst_lzo_bytes(sector_bytes)]);
    let mut stored = vec![0; LZO_LENGTH_BYTES];
    for sector in plain.chunks(sector_bytes) {
        let length = compress_no_alloc(sector, &mut segment, &mut dictionary).ok()?;
        let left = sector_bytes - stored.len() % sector_bytes;
        if left < LZO_LENGTH_BYTES {
            stored.resize(stored.len() + left, 0);
        }
        stored.extend_from_slice(&u32::try_from(length).ok()?.to_le_bytes());
        stored.extend_from_slice(segment.get(..length)?);
        if stored.len() > limit {
            return None;
        }
    }
    let total = u32::try_from(stored.len()).ok()?;
    stored[..LZO_LENGTH_BYTES].copy_from_slice(&total.to_le_bytes());
    Some(stored)
}

/// The longest segment that a sector can become. Linux refuses longer ones.
fn worst_lzo_bytes(sector_bytes: usize) -> usize {
    sector_bytes + sector_bytes / 16 + 64 + 3
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    const METHODS: [Method; 5] = [
        Method::Zlib { level: 1 },
        Method::Zlib { level: DEFAULT_ZLIB_LEVEL },
        Method::Zlib { level: 99 },
        Method::Lzo,
        Method::Zstd,
    ];

    /// Data of several kinds: from noise to a single byte.
    fn sample(random: &mut fastrand::Rng, bytes: usize) -> Vec<u8> {
        let (kind, mut out) = (random.u8(..6), Vec::with_capacity(bytes));
        let words: Vec<Vec<u8>> =
            (0..random.usize(1..60)).map(|_| (0..random.usize(1..12)).map(|_| random.u8(..)).collect()).collect();
        while out.len() < bytes {
            match kind {
                0 => out.push(random.u8(..)),
                1 => out.push(7),
                2 => out.extend_from_slice(&words[random.usize(..words.len())]),
                3 => out.extend(std::iter::repeat_n(random.u8(..3), random.usize(1..300))),
                // Old bytes again, after some noise.
                4 if out.len() > 100 && random.u8(..4) > 0 => {
                    let from = random.usize(..out.len() - 10);
                    let to = out.len().min(from + random.usize(5..4000));
                    out.extend_from_within(from..to);
                }
                4 => out.extend((0..random.usize(1..50)).map(|_| random.u8(..))),
                _ => out.extend_from_slice(format!("line {} of a text. ", out.len()).as_bytes()),
            }
        }
        out.truncate(bytes);
        out
    }

    #[test]
    fn what_is_compressed_comes_back_and_saves_what_it_must() {
        let (mut random, mut done) = (fastrand::Rng::with_seed(7), [[0_u32; 2]; 5]);
        let sizes = [1, 2, 4, 5, 100, 4095, 4096, 4097, 8191, 8192, 8193, 65_536, 131_071, MAX_EXTENT_BYTES];
        for round in 0..100 {
            let bytes =
                if round % 2 == 0 { sizes[round / 2 % sizes.len()] } else { random.usize(1..=MAX_EXTENT_BYTES) };
            let (plain, sector) = (sample(&mut random, bytes), [4096, 16_384, 65_536][random.usize(..3)]);
            for (index, method) in METHODS.into_iter().enumerate() {
                let limit = extent_limit(bytes, sector);
                let stored = compress(method, &plain, sector, limit);
                done[index][usize::from(stored.is_some())] += 1;
                let Some(mut stored) = stored else { continue };
                assert!(stored.len() <= limit, "{method:?} {bytes}");
                stored.resize(stored.len().next_multiple_of(sector), 0);
                assert!(stored.len() + sector <= bytes.next_multiple_of(sector));
                let sizes = Sizes { plain_bytes: bytes, sector_bytes: sector };
                assert!(decompress(method.compression(), &stored, sizes).unwrap() == plain);
            }
        }
        println!("refused and compressed: {done:?}");
        assert!(done.iter().flatten().all(|count| *count > 10));
    }

    #[test]
    fn noise_is_never_compressed_and_a_limit_is_kept_to_the_byte() {
        let mut random = fastrand::Rng::with_seed(3);
        let noise: Vec<u8> = (0..MAX_EXTENT_BYTES).map(|_| random.u8(..)).collect();
        let text = b"the same words again, ".repeat(400);
        for method in METHODS {
            assert_eq!(compress(method, &noise, 4096, extent_limit(noise.len(), 4096)), None, "{method:?}");
            let stored = compress(method, &text, 4096, extent_limit(text.len(), 4096)).unwrap();
            assert_eq!(compress(method, &text, 4096, stored.len()).as_ref(), Some(&stored), "{method:?}");
            assert_eq!(compress(method, &text, 4096, stored.len() - 1), None, "{method:?}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_not_compressed() {
        let plain = vec![0; MAX_EXTENT_BYTES + 1];
        for method in METHODS {
            assert!(compress(method, &plain[..MAX_EXTENT_BYTES], 4096, 8192).is_some());
            assert_eq!(compress(method, &plain, 4096, 8192), None);
            assert_eq!(compress(method, &[], 4096, 8192), None);
            assert_eq!(compress(method, &plain[..9000], 0, 8192), None);
            assert_eq!(compress(method, &plain[..9000], 4096, 0), None);
        }
        assert_eq!([1, 4096, 4097, 8192].map(|bytes| extent_limit(bytes, 4096)), [0, 0, 4096, 4096]);
        assert_eq!([0, 1, 100, 4095].map(|bytes| inline_limit(bytes, 2048)), [0, 0, 99, 2048]);
    }

    #[test]
    fn a_small_file_may_be_compressed_within_its_item() {
        let plain = b"0123456789".repeat(400);
        for method in METHODS {
            let stored = compress(method, &plain, 4096, inline_limit(plain.len(), 2048)).unwrap();
            let sizes = Sizes { plain_bytes: plain.len(), sector_bytes: 4096 };
            assert!(stored.len() <= 2048);
            assert_eq!(decompress(method.compression(), &stored, sizes).unwrap(), plain);
        }
    }

    #[test]
    fn no_length_of_lzo_crosses_a_sector() {
        // Segments of all lengths, so that some length fields would begin in the last bytes of a sector.
        let (mut random, mut gaps) = (fastrand::Rng::with_seed(11), 0);
        for _ in 0..150 {
            let plain: Vec<u8> = (0..16)
                .flat_map(|_| {
                    let noise: Vec<u8> = (0..random.usize(1000..3500)).map(|_| random.u8(..)).collect();
                    let zeroes = 4096 - noise.len();
                    noise.into_iter().chain(std::iter::repeat_n(0, zeroes))
                })
                .collect();
            let stored = pack_lzo(&plain, 4096, MAX_EXTENT_BYTES).unwrap();
            let (mut at, mut segments) = (LZO_LENGTH_BYTES, 0);
            while at < stored.len() {
                if 4096 - at % 4096 < LZO_LENGTH_BYTES {
                    gaps += 1;
                    at = at.next_multiple_of(4096);
                }
                assert!(at % 4096 <= 4092);
                let length = u32::from_le_bytes(stored[at..at + 4].try_into().unwrap());
                assert!(length as usize <= worst_lzo_bytes(4096));
                at += 4 + length as usize;
                segments += 1;
            }
            assert_eq!((at, segments), (stored.len(), 16));
            let sizes = Sizes { plain_bytes: plain.len(), sector_bytes: 4096 };
            assert!(decompress(Compression::Lzo, &stored, sizes).unwrap() == plain);
        }
        assert!(gaps > 0, "some lengths must have been moved to the next sector");
    }

    /// What another program makes of a stream; `None` if the program is not there.
    fn foreign(program: &[&str], input: &[u8]) -> Option<Vec<u8>> {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let mut stdin = child.stdin.take()?;
        let input = input.to_vec();
        let feeder = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().ok()?;
        let _ = feeder.join();
        output.status.success().then_some(output.stdout)
    }

    #[test]
    fn other_programs_decompress_it() {
        let inflate = "import sys,zlib;sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))";
        let programs: [(Method, &[&str]); 2] = [
            (Method::Zlib { level: DEFAULT_ZLIB_LEVEL }, &["python3", "-c", inflate]),
            (Method::Zstd, &["zstd", "-d", "-c", "--memory=128KiB"]),
        ];
        for (method, program) in programs {
            let probe = compress(method, &[1; 9000], 4096, 4096).unwrap();
            if foreign(program, &probe).is_none() {
                println!("skipped: no {}", program[0]);
                continue;
            }
            let (mut random, mut compared) = (fastrand::Rng::with_seed(5), 0);
            for round in 0..30 {
                let bytes = if round % 3 == 0 { MAX_EXTENT_BYTES } else { random.usize(1..=MAX_EXTENT_BYTES) };
                let plain = sample(&mut random, bytes);
                let Some(stored) = compress(method, &plain, 4096, extent_limit(bytes, 4096)) else { continue };
                assert!(foreign(program, &stored).is_some_and(|found| found == plain), "{method:?} {round}");
                compared += 1;
            }
            assert!(compared > 12);
        }
    }
}
