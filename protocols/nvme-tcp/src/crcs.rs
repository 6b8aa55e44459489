//! Data digests and block guards from one pass over the data.
//!
//! A data digest is the CRC-32C of the data of one PDU; a 32-bit guard is the CRC-32C of the data of one block. If both are
//! wanted, each part between two edges of blocks or PDUs is checksummed once, and the CRCs of the parts are combined into
//! both, also for a block that several PDUs share.
//!
//! Invariant: every byte given to [`CrcAccumulator::update`] is checksummed exactly once, and counted.

use std::fmt;
use std::sync::Arc;

use sealblock_integrity::combine::{self, Combiner, Crc32c};
use sealblock_integrity::guard;
use smallvec::SmallVec;

/// The block layout of a command's data: alternating bytes of data and metadata.
///
/// Create it once for a format and share it: it holds the tables that combine CRCs.
#[derive(Clone)]
pub struct BlockLayout(Arc<Tables>);

struct Tables {
    data_bytes: usize,
    metadata_bytes: usize,
    data: Combiner<Crc32c>,
    metadata: Combiner<Crc32c>,
}

impl BlockLayout {
    /// Blocks of `data_bytes`, each followed by `metadata_bytes` (0 if none travels). `None` if `data_bytes` is less
    /// than 512, the smallest logical block of NVMe.
    pub fn new(data_bytes: usize, metadata_bytes: usize) -> Option<BlockLayout> {
        let (data, metadata) = (Combiner::new(data_bytes as u64), Combiner::new(metadata_bytes as u64));
        let tables = Tables { data_bytes, metadata_bytes, data, metadata };
        (data_bytes >= 512).then(|| BlockLayout(Arc::new(tables)))
    }

    /// Bytes of data in a block, which a guard covers.
    pub fn data_bytes(&self) -> usize {
        self.0.data_bytes
    }

    /// Bytes of metadata after each block's data.
    pub fn metadata_bytes(&self) -> usize {
        self.0.metadata_bytes
    }

    /// Bytes from one block to the next.
    pub fn stride_bytes(&self) -> usize {
        self.0.data_bytes + self.0.metadata_bytes
    }

    /// The CRC-32C of bytes with `crc` followed by `part_bytes` bytes with `part`.
    fn join(&self, crc: u32, part: u32, part_bytes: usize) -> u32 {
        match part_bytes {
            0 => crc,
            n if n == self.0.data_bytes => self.0.data.join(crc, part),
            n if n == self.0.metadata_bytes => self.0.metadata.join(crc, part),
            n => combine::crc32c(crc, part, n as u64),
        }
    }
}

impl fmt::Debug for BlockLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockLayout({} + {} bytes)", self.data_bytes(), self.metadata_bytes())
    }
}

/// The CRC-32C of each block's data, in order: with the 32-bit guard format, the guards.
#[derive(Clone, Debug)]
pub struct BlockCrcs {
    /// The layout of the data.
    pub layout: BlockLayout,
    /// One CRC-32C for each block's data; metadata is not covered.
    pub guards: SmallVec<[u32; 4]>,
}

impl BlockCrcs {
    /// Bytes that these CRCs cover, with metadata between them.
    pub fn len_bytes(&self) -> usize {
        self.guards.len() * self.layout.stride_bytes()
    }
}

/// Appends `bytes` to `crc`; faster for the first bytes.
pub(crate) fn append(crc: u32, before_bytes: usize, bytes: &[u8]) -> u32 {
    if before_bytes == 0 { guard::crc32c(bytes) } else { guard::crc32c_append(crc, bytes) }
}

/// Computes the digests of PDUs and the CRCs of blocks in one pass over arriving data.
#[derive(Debug)]
pub(crate) struct CrcAccumulator {
    layout: Option<BlockLayout>,
    guards: SmallVec<[u32; 4]>,
    /// Bytes since the start of the block.
    at: usize,
    /// CRC and length of the data since the last edge of a block or PDU.
    cut: (u32, usize),
    /// CRC and length of the part of the block's data from earlier PDUs.
    head: (u32, usize),
    /// CRC and length of the PDU's data up to the last edge.
    pdu: (u32, usize),
}

impl CrcAccumulator {
    pub(crate) fn new(layout: Option<BlockLayout>) -> CrcAccumulator {
        CrcAccumulator { layout, guards: SmallVec::new(), at: 0, cut: (0, 0), head: (0, 0), pdu: (0, 0) }
    }

    /// Adds the next bytes; `checksummed` counts them.
    pub(crate) fn update(&mut self, mut bytes: &[u8], checksummed: &mut u64) {
        *checksummed += bytes.len() as u64;
        // Take the layout instead of cloning it: a clone costs two atomic operations.
        let Some(layout) = self.layout.take() else {
            self.pdu = (append(self.pdu.0, self.pdu.1, bytes), self.pdu.1 + bytes.len());
            return;
        };
        while !bytes.is_empty() {
            let end = if self.at < layout.data_bytes() { layout.data_bytes() } else { layout.stride_bytes() };
            let (now, later) = bytes.split_at(bytes.len().min(end - self.at));
            self.cut = (append(self.cut.0, self.cut.1, now), self.cut.1 + now.len());
            self.at += now.len();
            if self.at == end {
                self.close_cut(&layout);
            }
            bytes = later;
        }
        self.layout = Some(layout);
    }

    /// Ends the PDU; returns the CRC-32C of its data.
    pub(crate) fn end_pdu(&mut self) -> u32 {
        if let Some(layout) = self.layout.take() {
            self.close_cut(&layout);
            self.layout = Some(layout);
        }
        std::mem::take(&mut self.pdu).0
    }

    /// The block CRCs, if a layout was given and the data ended with a block.
    pub(crate) fn finish(self) -> Option<BlockCrcs> {
        let layout = self.layout.filter(|_| self.at == 0)?;
        Some(BlockCrcs { layout, guards: self.guards })
    }

    fn close_cut(&mut self, layout: &BlockLayout) {
        let (crc, len) = std::mem::take(&mut self.cut);
        if len == 0 {
            return;
        }
        self.pdu = (join(layout, self.pdu, crc, len), self.pdu.1 + len);
        if self.at <= layout.data_bytes() {
            self.head = (join(layout, self.head, crc, len), self.head.1 + len);
            if self.at == layout.data_bytes() {
                self.guards.push(std::mem::take(&mut self.head).0);
            }
        }
        if self.at == layout.stride_bytes() {
            self.at = 0;
        }
    }
}

/// Combines two CRCs; nothing before needs no combination.
fn join(layout: &BlockLayout, before: (u32, usize), crc: u32, len: usize) -> u32 {
    if before.1 == 0 { crc } else { layout.join(before.0, crc, len) }
}

/// The CRC-32C of bytes `from..to` of data with known block CRCs. `read` returns the pieces of a range without a known CRC:
/// metadata, and blocks that are in the range only in part.
pub(crate) fn digest_of(
    crcs: &BlockCrcs,
    (from, to): (usize, usize),
    mut read: impl FnMut(usize, usize, &mut dyn FnMut(&[u8])),
    checksummed: &mut u64,
) -> u32 {
    let (layout, mut at, mut crc) = (&crcs.layout, from, (0, 0));
    while at < to {
        let (block, within) = (at / layout.stride_bytes(), at % layout.stride_bytes());
        let edge = if within < layout.data_bytes() { layout.data_bytes() } else { layout.stride_bytes() };
        let len = (edge - within).min(to - at);
        let known = crcs.guards.get(block).filter(|_| within == 0 && len == layout.data_bytes());
        let part = known.copied().unwrap_or_else(|| {
            let mut part = (0, 0);
            read(at, at + len, &mut |bytes| part = (append(part.0, part.1, bytes), part.1 + bytes.len()));
            *checksummed += part.1 as u64;
            part.0
        });
        crc = (join(layout, crc, part, len), crc.1 + len);
        at += len;
    }
    crc.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_smaller_than_any_of_nvme_are_refused() {
        assert!(BlockLayout::new(511, 0).is_none());
        assert!(BlockLayout::new(512, 0).is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the chunks and PDUs, each PDU's digest and each block's guard is that of its bytes, in one pass.
        #[test]
        fn one_pass_gives_digests_and_guards(
            blocks in 1_usize..5, metadata_bytes in prop::sample::select(vec![0_usize, 8, 16, 512]),
            chunks in prop::collection::vec((1_usize..1500, any::<bool>()), 1..30),
        ) {
            let layout = BlockLayout::new(512, metadata_bytes).unwrap();
            let data: Vec<u8> = (0..blocks * layout.stride_bytes()).map(|i| (i * 7 + i / 251) as u8).collect();
            let (mut accumulator, mut checksummed) = (CrcAccumulator::new(Some(layout.clone())), 0);
            let (mut at, mut pdu_from) = (0, 0);
            for (len, ends) in chunks {
                let next = data.len().min(at + len);
                accumulator.update(&data[at..next], &mut checksummed);
                at = next;
                if ends {
                    prop_assert_eq!(accumulator.end_pdu(), guard::crc32c(&data[pdu_from..at]));
                    pdu_from = at;
                }
            }
            accumulator.update(&data[at..], &mut checksummed);
            prop_assert_eq!(accumulator.end_pdu(), guard::crc32c(&data[pdu_from..]));
            prop_assert_eq!(checksummed, data.len() as u64);
            let guards: Vec<u32> = data.chunks(layout.stride_bytes()).map(|b| guard::crc32c(&b[..512])).collect();
            prop_assert_eq!(accumulator.finish().unwrap().guards.to_vec(), guards);
        }

        /// Known CRCs give the digest of any range; only metadata and cut blocks are read.
        #[test]
        fn known_crcs_give_the_digest_of_any_range(
            metadata_bytes in prop::sample::select(vec![0_usize, 8, 16]),
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let layout = BlockLayout::new(512, metadata_bytes).unwrap();
            let data: Vec<u8> = (0..4 * layout.stride_bytes()).map(|i| (i * 11) as u8).collect();
            let guards = data.chunks(layout.stride_bytes()).map(|b| guard::crc32c(&b[..512])).collect();
            let crcs = BlockCrcs { layout: layout.clone(), guards };
            let (a, b) = (cut.0.index(data.len() + 1), cut.1.index(data.len() + 1));
            let range = (a.min(b), a.max(b));
            let mut checksummed = 0;
            let crc = digest_of(&crcs, range, |from, to, sum| sum(&data[from..to]), &mut checksummed);
            prop_assert_eq!(crc, guard::crc32c(&data[range.0..range.1]));
            let mut all = 0;
            digest_of(&crcs, (0, data.len()), |from, to, sum| sum(&data[from..to]), &mut all);
            prop_assert_eq!(all, 4 * metadata_bytes as u64);
        }
    }

    #[test]
    fn data_that_ends_within_a_block_has_no_guards() {
        let mut accumulator = CrcAccumulator::new(BlockLayout::new(512, 0));
        accumulator.update(&[1; 700], &mut 0);
        accumulator.end_pdu();
        assert!(accumulator.finish().is_none());
    }
}
