//! LBA Status Information: where a host should look for bad blocks (NVM, "LBA Status Information").

use sealblock_units::Extent;

use crate::error::Invalid;
use crate::nvm::LbaStatusAction;
use crate::wire::{Field, layout};

/// NLRD that means "no list, query the whole namespace".
const WHOLE_NAMESPACE: u32 = u32::MAX;

/// A range of a namespace that a host should query.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LbaStatusRanges {
    /// In these ranges.
    Ranges(Vec<Extent>),
    /// Everywhere: the controller does not know where.
    WholeNamespace,
}

/// One namespace with blocks that may be unreadable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LbaStatusElement {
    /// NEID: the namespace.
    pub nsid: u32,
    /// RATYPE: the action to request.
    pub action: LbaStatusAction,
    /// Where.
    pub ranges: LbaStatusRanges,
}

/// The page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LbaStatusLog {
    /// ESTULB: about how many blocks are unreadable; `None` if there is no estimate.
    pub estimate_blocks: Option<u32>,
    /// LSGC: grows when blocks are added.
    pub generation: u16,
    /// LBASLNEL: the namespaces.
    pub elements: Vec<LbaStatusElement>,
}

layout! {
    /// Head of the page.
    pub struct LogHead[16] {
        /// LSLPLEN: bytes of the page.
        0 => lslplen: u32,
        /// NLSLNE: elements.
        4 => nlslne: u32,
        /// ESTULB: estimate, FFFFFFFFh for none.
        8 => estulb: u32,
        /// LSGC: generation.
        14 => lsgc: u16,
    }
}

layout! {
    /// Head of an element; its ranges follow.
    pub struct ElementHead[16] {
        /// NEID: the namespace.
        0 => neid: u32,
        /// NLRD: ranges, FFFFFFFFh for the whole namespace.
        4 => nlrd: u32,
        /// RATYPE: the action to request.
        8 => ratype: u8,
    }
}

layout! {
    /// LBA Range Descriptor.
    pub struct RangeEntry[16] {
        /// RSLBA: first block.
        0 => rslba: u64,
        /// RNLB: blocks, 0's based.
        8 => rnlb: u32,
    }
}

impl LbaStatusLog {
    /// The page.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        for element in &self.elements {
            let (nlrd, ranges): (u32, &[Extent]) = match &element.ranges {
                LbaStatusRanges::Ranges(ranges) => (ranges.len() as u32, ranges),
                LbaStatusRanges::WholeNamespace => (WHOLE_NAMESPACE, &[]),
            };
            body.extend(ElementHead { neid: element.nsid, nlrd, ratype: element.action.code() }.encode());
            for range in ranges {
                body.extend(RangeEntry { rslba: range.start().get(), rnlb: range.blocks().get() - 1 }.encode());
            }
        }
        let head = LogHead {
            lslplen: (LogHead::BYTES + body.len()) as u32,
            nlslne: self.elements.len() as u32,
            estulb: self.estimate_blocks.unwrap_or(u32::MAX),
            lsgc: self.generation,
        };
        [head.encode().as_slice(), &body].concat()
    }

    /// Bytes of the whole page, from the first 16 of it.
    pub fn length_bytes(head: &[u8]) -> Result<u32, Invalid> {
        Ok(LogHead::decode(head)?.lslplen)
    }

    /// The page that was read; refused if it ends before its last range, if an action is unknown, or if a range goes
    /// past the last address.
    pub fn decode(page: &[u8]) -> Result<LbaStatusLog, Invalid> {
        let head = LogHead::decode(page)?;
        let mut rest = &page[LogHead::BYTES..];
        let mut elements = Vec::new();
        for _ in 0..head.nlslne {
            let (element, behind) = decode_element(rest)?;
            elements.push(element);
            rest = behind;
        }
        let estimate_blocks = Some(head.estulb).filter(|&blocks| blocks != u32::MAX);
        Ok(LbaStatusLog { estimate_blocks, generation: head.lsgc, elements })
    }
}

fn decode_element(bytes: &[u8]) -> Result<(LbaStatusElement, &[u8]), Invalid> {
    let head = ElementHead::decode(bytes)?;
    let rest = &bytes[ElementHead::BYTES..];
    let action = LbaStatusAction::from_code(head.ratype).ok_or(Invalid::field("RATYPE", 2, 0))?;
    if head.nlrd == WHOLE_NAMESPACE {
        let ranges = LbaStatusRanges::WholeNamespace;
        return Ok((LbaStatusElement { nsid: head.neid, action, ranges }, rest));
    }
    let (needed_bytes, got_bytes) = (u64::from(head.nlrd) * RangeEntry::BYTES as u64, rest.len() as u64);
    let (list, behind) = usize::try_from(needed_bytes)
        .ok()
        .and_then(|bytes| rest.split_at_checked(bytes))
        .ok_or(Invalid::DataLength { needed_bytes, got_bytes })?;
    let ranges: Result<Vec<_>, _> = list
        .chunks_exact(RangeEntry::BYTES)
        .map(RangeEntry::get)
        .map(|range| Extent::from_raw(range.rslba, u64::from(range.rnlb) + 1))
        .collect();
    Ok((LbaStatusElement { nsid: head.neid, action, ranges: LbaStatusRanges::Ranges(ranges?) }, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> LbaStatusLog {
        let ranges = LbaStatusRanges::Ranges(vec![Extent::from_raw(8, 2).unwrap()]);
        let action = LbaStatusAction::Tracked;
        LbaStatusLog {
            estimate_blocks: Some(2),
            generation: 3,
            elements: vec![
                LbaStatusElement { nsid: 1, action, ranges },
                LbaStatusElement { nsid: 2, action, ranges: LbaStatusRanges::WholeNamespace },
            ],
        }
    }

    #[test]
    fn a_page_has_these_bytes_and_round_trips() {
        let page = log().encode();
        assert_eq!(page[..16], [64, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 3, 0]);
        assert_eq!(page[16..25], [1, 0, 0, 0, 1, 0, 0, 0, 0x11]);
        assert_eq!(page[32..41], [8, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(page[48..56], [2, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]);
        assert_eq!((LbaStatusLog::decode(&page), LbaStatusLog::length_bytes(&page)), (Ok(log()), Ok(64)));
    }

    #[test]
    fn pages_that_lie_are_refused() {
        let page = log().encode();
        assert!(matches!(LbaStatusLog::decode(&page[..63]), Err(Invalid::DataLength { .. })));
        let mut many = page.clone();
        many[20..24].copy_from_slice(&[0xFE, 0xFF, 0xFF, 0xFF]);
        assert!(matches!(LbaStatusLog::decode(&many), Err(Invalid::DataLength { .. })));
        let mut wraps = page;
        wraps[32..40].fill(0xFF);
        assert!(matches!(LbaStatusLog::decode(&wraps), Err(Invalid::Range(_))));
    }
}
