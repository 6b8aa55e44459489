//! Data are cut into segments, each of which becomes an extent, and compressed where that saves a sector.

use sealblock_btrfs_format::compress::MAX_EXTENT_BYTES;
use sealblock_btrfs_format::compress::encode::{DEFAULT_ZLIB_LEVEL, Method, compress, extent_limit, inline_limit};
use sealblock_btrfs_format::items::file_extent::Compression;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_runtime_memory::{Buffer, Slice};

use super::files::FileId;
use super::info::{FileInfo, now};
use super::io::Content;
use crate::file_map::{InlinePart, MAX_INLINE_BYTES};
use crate::plan::Plan;
use crate::transaction::{ChangeError, Transaction};
use crate::xattrs::COMPRESSION;

/// Data that become one extent, or several if they are not compressed.
pub(super) struct Segment {
    /// The first byte of the file.
    pub start: u64,
    pub plain: Content,
    /// Whole sectors.
    pub stored: Content,
    pub compression: Compression,
}

/// The level of a value such as `zlib:9`.
fn level_of(value: &[u8]) -> Option<u32> {
    let (_, level) = value.split_at(value.iter().position(|byte| *byte == b':')? + 1);
    std::str::from_utf8(level).ok()?.parse().ok().filter(|level| *level > 0)
}

/// The method that a value of the attribute names.
fn method_of(value: &[u8]) -> Option<Method> {
    match value.split(|byte| *byte == b':').next()? {
        b"zlib" => Some(Method::Zlib { level: level_of(value).unwrap_or(DEFAULT_ZLIB_LEVEL) }),
        b"lzo" => Some(Method::Lzo),
        b"zstd" => Some(Method::Zstd),
        _ => None,
    }
}

impl Transaction {
    /// How the data of a file are compressed: by its attribute, or with zlib if it only has the flag.
    pub(super) fn compression_of(&mut self, id: FileId, info: &FileInfo) -> Result<Option<Method>, ChangeError> {
        if !info.file.has_sums || info.has(InodeFlags::NOCOMPRESS | InodeFlags::NODATACOW) {
            return Ok(None);
        }
        let geometry = *self.geometry();
        let view = self.view(id.root)?;
        let plan = Plan::new(&view, self.plan_context(&geometry, now()));
        let by_value = plan.xattr(id.ino, COMPRESSION)?.and_then(method_of);
        let by_flag = info.has(InodeFlags::COMPRESS).then_some(Method::Zlib { level: DEFAULT_ZLIB_LEVEL });
        Ok(by_value.or(by_flag))
    }
}

/// Cuts data of whole sectors into segments.
pub(super) fn segments(start: u64, content: &Content, sector_bytes: u32, method: Option<Method>) -> Vec<Segment> {
    let as_it_is =
        |start, data: Content| Segment { start, plain: data.clone(), stored: data, compression: Compression::None };
    let plain = |start, data: Slice| as_it_is(start, data.into());
    let (Some(method), Content::Bytes(data)) = (method, content) else { return vec![as_it_is(start, content.clone())] };
    let sector = sector_bytes as usize;
    let mut all: Vec<Segment> = Vec::new();
    // Neighbours that stay as they are become one.
    let mut pending = 0..0;
    for at in (0..data.len()).step_by(MAX_EXTENT_BYTES) {
        let end = (at + MAX_EXTENT_BYTES).min(data.len());
        let part = &data[at..end];
        match compress(method, part, sector, extent_limit(part.len(), sector)) {
            Some(stream) => {
                if !pending.is_empty() {
                    all.push(plain(start + pending.start as u64, data.slice(pending.clone())));
                }
                let mut stored = Buffer::zeroed(stream.len().next_multiple_of(sector));
                stored[..stream.len()].copy_from_slice(&stream);
                let (plain, compression) = (data.slice(at..end).into(), method.compression());
                all.push(Segment { start: start + at as u64, plain, stored: stored.freeze().into(), compression });
                pending = end..end;
            }
            None => pending.end = end,
        }
    }
    if !pending.is_empty() {
        all.push(plain(start + pending.start as u64, data.slice(pending)));
    }
    all
}

/// A whole file as its item has it, if it may be there.
pub(super) fn inline_part(
    info: &FileInfo,
    content: &[u8],
    method: Option<Method>,
    generation: u64,
) -> Option<InlinePart> {
    let (size, sector) = (content.len(), info.file.sector_bytes as usize);
    let part = |compression, stored: Vec<u8>| {
        let may = info.file.may_be_inline(size as u64, stored.len() as u64, compression);
        may.then_some(InlinePart { generation, compression, plain_bytes: size as u64, stored })
    };
    let limit = inline_limit(size, MAX_INLINE_BYTES as usize);
    let stream = method.filter(|_| size <= sector).and_then(|method| compress(method, content, sector, limit));
    let stream = stream.zip(method).and_then(|(stream, method)| part(method.compression(), stream));
    stream.or_else(|| part(Compression::None, content.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_attribute() {
        assert_eq!(method_of(b"zlib"), Some(Method::Zlib { level: DEFAULT_ZLIB_LEVEL }));
        assert_eq!(method_of(b"zlib:9"), Some(Method::Zlib { level: 9 }));
        assert_eq!(method_of(b"zlib:x"), Some(Method::Zlib { level: DEFAULT_ZLIB_LEVEL }));
        assert_eq!((method_of(b"lzo"), method_of(b"zstd:3")), (Some(Method::Lzo), Some(Method::Zstd)));
        assert_eq!((method_of(b"none"), method_of(b"")), (None, None));
    }

    #[test]
    fn segments_are_compressed_where_that_saves_a_sector() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut data = vec![7; 5 * MAX_EXTENT_BYTES + 4096];
        random.fill(&mut data[MAX_EXTENT_BYTES..3 * MAX_EXTENT_BYTES]);
        let data = Content::from(Slice::copy_from(&data));
        let all = segments(1 << 20, &data, 4096, Some(Method::Lzo));
        let kinds: Vec<(u64, u64, bool)> = all
            .iter()
            .map(|one| (one.start - (1 << 20), one.plain.bytes(), one.compression != Compression::None))
            .collect();
        let most = MAX_EXTENT_BYTES as u64;
        let at = |parts: u64| parts * most;
        let expected = [
            (at(0), most, true),
            (at(1), 2 * most, false),
            (at(3), most, true),
            (at(4), most, true),
            (at(5), 4096, false),
        ];
        assert_eq!(kinds, expected);
        assert!(all.iter().all(|one| one.stored.bytes() % 4096 == 0 && one.stored.bytes() <= one.plain.bytes()));
        assert_eq!(segments(0, &data, 4096, None).len(), 1);
        assert_eq!(segments(0, &Content::Zeroes(1 << 30), 4096, Some(Method::Lzo)).len(), 1);
    }
}
