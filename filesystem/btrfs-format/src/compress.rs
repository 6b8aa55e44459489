//! Compressed extents: zlib, LZO and Zstandard, decompressed into a buffer of known size. [`encode`] compresses them.
//!
//! The size that an extent records is not trusted: a stream is refused if it continues after that size, or ends a
//! sector or more before it. An extent has at most 128 KiB uncompressed, so no stream needs more memory. What follows
//! the stream in its last sector is ignored.

use std::io::Read;

use flate2::{Decompress, FlushDecompress, Status};
use ruzstd::decoding::StreamingDecoder;

use crate::items::file_extent::Compression;

pub mod encode;

/// The maximum bytes of a compressed extent, uncompressed and as stored.
pub const MAX_EXTENT_BYTES: usize = 128 << 10;
/// The largest window of a Zstandard stream.
const MAX_WINDOW_BYTES: u64 = 128 << 10;
/// Bytes of a length field in an LZO stream.
const LZO_LENGTH_BYTES: usize = 4;

/// The sizes that an extent records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Bytes of the whole extent, uncompressed.
    pub plain_bytes: usize,
    /// Bytes of a sector: how much may be missing at the end of the last part, and the size of an LZO segment.
    pub sector_bytes: usize,
}

/// Why a stream is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CompressError {
    /// The extent is not compressed.
    #[error("the extent is not compressed")]
    NotCompressed,
    /// The extent records a size that is too large or zero, or its sectors have no size.
    #[error("a compressed extent of {0} bytes: from 1 to 131072 there can be")]
    Extent(usize),
    /// The stream is damaged.
    #[error("{0:?}: the stream is damaged after {1} bytes")]
    Damaged(Compression, usize),
    /// The stream ends too early.
    #[error("{kind:?}: {found} bytes, where the extent has {expected}")]
    Short {
        /// The compression.
        kind: Compression,
        /// The size that the extent records.
        expected: usize,
        /// The bytes that were decompressed.
        found: usize,
    },
    /// The stream is longer than the extent.
    #[error("{0:?}: more than the {1} bytes that the extent has")]
    Long(Compression, usize),
    /// Lengths of LZO segments contradict each other.
    #[error("LZO: a segment at {at} of {length} bytes")]
    Segment {
        /// Where the segment begins.
        at: usize,
        /// The bytes that it records.
        length: usize,
    },
}

/// The uncompressed bytes of an extent: always `plain_bytes`, because a missing end of the last sector is filled with
/// zeroes.
///
/// # Errors
/// If the stream is damaged, or its size differs from what the extent records.
pub fn decompress(kind: Compression, stored: &[u8], sizes: Sizes) -> Result<Vec<u8>, CompressError> {
    let plain_bytes = sizes.plain_bytes;
    if !(1..=MAX_EXTENT_BYTES).contains(&plain_bytes) || sizes.sector_bytes == 0 {
        return Err(CompressError::Extent(plain_bytes));
    }
    // One byte more, to detect a longer stream.
    let mut plain = vec![0; plain_bytes + 1];
    let found = match kind {
        Compression::None => return Err(CompressError::NotCompressed),
        Compression::Zlib => inflate(stored, &mut plain)?,
        Compression::Lzo => unpack_lzo(stored, &mut plain, sizes)?,
        Compression::Zstd => unpack_zstd(stored, &mut plain)?,
    };
    if found > plain_bytes {
        return Err(CompressError::Long(kind, plain_bytes));
    }
    if plain_bytes - found >= sizes.sector_bytes || found == 0 {
        return Err(CompressError::Short { kind, expected: plain_bytes, found });
    }
    plain.truncate(plain_bytes);
    plain[found..].fill(0);
    Ok(plain)
}

/// Returns the number of bytes that were decompressed, at most the size of the output.
fn inflate(stored: &[u8], plain: &mut [u8]) -> Result<usize, CompressError> {
    let mut stream = Decompress::new(true);
    let status = stream.decompress(stored, plain, FlushDecompress::Finish);
    let found = stream.total_out() as usize;
    match status {
        Ok(Status::StreamEnd) => Ok(found),
        // The buffer is full, and the stream continues.
        Ok(_) if found == plain.len() => Ok(found),
        Ok(_) | Err(_) => Err(CompressError::Damaged(Compression::Zlib, found)),
    }
}

fn unpack_zstd(stored: &[u8], plain: &mut [u8]) -> Result<usize, CompressError> {
    let damaged = |found| CompressError::Damaged(Compression::Zstd, found);
    let mut stream = StreamingDecoder::new_with_max_window_size(stored, MAX_WINDOW_BYTES).map_err(|_| damaged(0))?;
    let mut found = 0;
    while found < plain.len() {
        match stream.read(&mut plain[found..]) {
            Ok(0) => break,
            Ok(read) => found += read,
            Err(_) => return Err(damaged(found)),
        }
    }
    Ok(found)
}

/// Format: a total length, then segments, each with a length and the compressed bytes of one sector. A length field
/// never crosses the boundary of a stored sector: if there is no room for it before the boundary, it is after it. The
/// total includes itself and these gaps.
fn unpack_lzo(stored: &[u8], plain: &mut [u8], sizes: Sizes) -> Result<usize, CompressError> {
    let total = length_at(stored, 0).filter(|total| (LZO_LENGTH_BYTES..=stored.len()).contains(total));
    let total = total.ok_or(CompressError::Damaged(Compression::Lzo, 0))?;
    let stored = &stored[..total];
    let (mut at, mut found) = (LZO_LENGTH_BYTES, 0);
    while at < total {
        if found >= sizes.plain_bytes {
            return Ok(plain.len());
        }
        let left = sizes.sector_bytes - at % sizes.sector_bytes;
        if left < LZO_LENGTH_BYTES {
            at += left;
            if at >= total {
                break;
            }
        }
        let length = length_at(stored, at).ok_or(CompressError::Segment { at, length: 0 })?;
        let start = at + LZO_LENGTH_BYTES;
        let wrong = CompressError::Segment { at, length };
        let segment = start.checked_add(length).and_then(|end| stored.get(start..end)).ok_or(wrong)?;
        let room = plain.len().min(found + sizes.sector_bytes);
        let unpacked = lzokay::decompress::decompress(segment, &mut plain[found..room]).map_err(|_| wrong)?;
        // Only the last segment may be shorter than a sector.
        if unpacked < sizes.sector_bytes && start + length < total {
            return Err(CompressError::Damaged(Compression::Lzo, found + unpacked));
        }
        (at, found) = (start + length, found + unpacked);
    }
    Ok(found)
}

fn length_at(stored: &[u8], at: usize) -> Option<usize> {
    let bytes = stored.get(at..)?.first_chunk::<LZO_LENGTH_BYTES>()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

#[cfg(test)]
mod tests {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    const SECTOR: usize = 4096;

    fn sizes(plain_bytes: usize) -> Sizes {
        Sizes { plain_bytes, sector_bytes: SECTOR }
    }

    /// Compressible text without repetition.
    fn text(bytes: usize) -> Vec<u8> {
        let mut text = Vec::new();
        (0..).take_while(|number: &u32| *number < bytes as u32).for_each(|number| {
            if text.len() < bytes {
                text.extend_from_slice(format!("line {number} of a text. ").as_bytes());
            }
        });
        text.truncate(bytes);
        text
    }

    fn lzo(plain: &[u8]) -> Vec<u8> {
        encode::pack_lzo(plain, SECTOR, usize::MAX).unwrap()
    }

    /// Of any size, unlike [`encode::compress`].
    fn compress(kind: Compression, plain: &[u8]) -> Vec<u8> {
        match kind {
            Compression::None => plain.to_vec(),
            Compression::Zlib => encode::deflate(plain, encode::DEFAULT_ZLIB_LEVEL, plain.len() + 100).unwrap(),
            Compression::Lzo => lzo(plain),
            Compression::Zstd => compress_to_vec(plain, CompressionLevel::Fastest),
        }
    }

    const KINDS: [Compression; 3] = [Compression::Zlib, Compression::Lzo, Compression::Zstd];

    #[test]
    fn every_compression_is_reversed_whatever_follows_the_stream() {
        for kind in KINDS {
            for bytes in [1, 4095, 4096, 4097, 70_000, MAX_EXTENT_BYTES] {
                let plain = text(bytes);
                let mut stored = compress(kind, &plain);
                assert_eq!(decompress(kind, &stored, sizes(bytes)).unwrap(), plain, "{kind:?} {bytes}");
                stored.resize(stored.len().next_multiple_of(SECTOR), 0x5a);
                assert_eq!(decompress(kind, &stored, sizes(bytes)).unwrap(), plain, "{kind:?} {bytes}");
            }
        }
    }

    #[test]
    fn the_last_sector_is_filled_with_zeroes() {
        for kind in KINDS {
            let plain = text(5000);
            let found = decompress(kind, &compress(kind, &plain), sizes(8192)).unwrap();
            assert_eq!((&found[..5000], found.len()), (&plain[..], 8192));
            assert!(found[5000..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_stream_of_another_size_than_the_extent_says_is_refused() {
        for kind in KINDS {
            let stored = compress(kind, &text(8192));
            for (said, is_right) in [(8192, true), (8191, false), (4096, false), (12_287, true), (12_288, false)] {
                let result = decompress(kind, &stored, sizes(said));
                assert_eq!(result.is_ok(), is_right, "{kind:?} {said}: {:?}", result.map(|plain| plain.len()));
            }
        }
    }

    #[test]
    fn a_decompression_bomb_is_limited_to_the_extent() {
        // Half a gigabyte of zeroes; the stream is not read to its end.
        let bomb = compress(Compression::Zlib, &vec![0; 64 << 20]);
        let error = decompress(Compression::Zlib, &bomb, sizes(MAX_EXTENT_BYTES)).unwrap_err();
        assert_eq!(error, CompressError::Long(Compression::Zlib, MAX_EXTENT_BYTES));
        let bomb = compress(Compression::Zstd, &vec![0; 64 << 20]);
        assert!(decompress(Compression::Zstd, &bomb, sizes(MAX_EXTENT_BYTES)).is_err());
        let bomb = compress(Compression::Lzo, &vec![0; 4 << 20]);
        let error = decompress(Compression::Lzo, &bomb, sizes(MAX_EXTENT_BYTES)).unwrap_err();
        assert_eq!(error, CompressError::Long(Compression::Lzo, MAX_EXTENT_BYTES));
        for said in [0, MAX_EXTENT_BYTES + 1, usize::MAX] {
            assert_eq!(decompress(Compression::Lzo, &bomb, sizes(said)), Err(CompressError::Extent(said)));
        }
    }

    #[test]
    fn cut_and_changed_streams_are_refused_or_decoded_and_never_more() {
        for kind in KINDS {
            let stored = compress(kind, &text(9000));
            for length in (0..stored.len()).step_by(7) {
                assert!(decompress(kind, &stored[..length], sizes(9000)).is_err(), "{kind:?} {length}");
            }
            for bit in (0..stored.len() * 8).step_by(11) {
                let mut bad = stored.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                if let Ok(plain) = decompress(kind, &bad, sizes(9000)) {
                    assert_eq!(plain.len(), 9000);
                }
            }
        }
        assert_eq!(decompress(Compression::None, b"", sizes(1)), Err(CompressError::NotCompressed));
    }

    #[test]
    fn lengths_of_lzo_that_lead_out_are_refused() {
        let good = lzo(&text(8192));
        for (at, value) in [(0, 3), (0, good.len() as u32 + 1), (0, u32::MAX), (4, u32::MAX), (4, 0)] {
            let mut bad = good.clone();
            bad[at..at + 4].copy_from_slice(&value.to_le_bytes());
            assert!(decompress(Compression::Lzo, &bad, sizes(8192)).is_err(), "{at} {value}");
        }
    }
}
