//! Requests that fail on purpose.

use std::ops::Range;

use sealblock_block::{Request, RequestKind};
use sealblock_units::BlockSize;

/// Requests that fail with an error of the medium: those that match, from the `nth` on or that one alone.
#[derive(Clone, Debug)]
pub struct Fault {
    device: Option<usize>,
    kind: Option<RequestKind>,
    within: Option<Range<u64>>,
    nth: u64,
    repeat: Repeat,
    stores: FailedWrite,
    /// How many requests have matched so far.
    matched: u64,
}

/// Which of the matching requests fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeat {
    /// The nth alone.
    Once,
    /// The nth and all later ones.
    Forever,
}

/// How much of a failed change reaches the medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailedWrite {
    /// Nothing.
    Lost,
    /// All of it.
    Stored,
    /// Some of its sectors.
    Torn,
}

impl Fault {
    /// The `nth` request from now on fails, counted from 1, whatever its kind, once; nothing of it is stored. A request
    /// is counted when it starts.
    pub fn nth(nth: u64) -> Fault {
        let (device, kind, within) = (None, None, None);
        Fault { device, kind, within, nth, repeat: Repeat::Once, stores: FailedWrite::Lost, matched: 0 }
    }

    /// Only requests to this device match.
    #[must_use]
    pub fn on(self, device: usize) -> Fault {
        Fault { device: Some(device), ..self }
    }

    /// Only requests of this kind match.
    #[must_use]
    pub fn of_kind(self, kind: RequestKind) -> Fault {
        Fault { kind: Some(kind), ..self }
    }

    /// Only requests of which some byte lies in this range of the device match; a Flush never does.
    #[must_use]
    pub fn within(self, bytes: Range<u64>) -> Fault {
        Fault { within: Some(bytes), ..self }
    }

    /// Which of the matching requests fail.
    #[must_use]
    pub fn repeated(self, repeat: Repeat) -> Fault {
        Fault { repeat, ..self }
    }

    /// How much of a failed change reaches the medium.
    #[must_use]
    pub fn storing(self, stores: FailedWrite) -> Fault {
        Fault { stores, ..self }
    }

    /// Counts a request that starts; returns how it fails, if it does.
    pub(crate) fn hit(&mut self, device: usize, request: &Request, size: BlockSize) -> Option<FailedWrite> {
        let is_within = |range: &Range<u64>| {
            request.extents.iter().any(|extent| {
                let start = extent.start().get() << size.shift();
                start < range.end && range.start < start + extent.bytes(size)
            })
        };
        let is_match = self.device.is_none_or(|wanted| wanted == device)
            && self.kind.is_none_or(|wanted| wanted == request.kind())
            && self.within.as_ref().is_none_or(is_within);
        self.matched += u64::from(is_match);
        let is_hit = is_match
            && match self.repeat {
                Repeat::Once => self.matched == self.nth,
                Repeat::Forever => self.matched >= self.nth,
            };
        is_hit.then_some(self.stores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::Expectations;
    use sealblock_units::Extent;

    /// Which of these requests fail: (device, block), or a Flush without a block.
    fn failed(mut fault: Fault, requests: &[(usize, Option<u64>)]) -> Vec<usize> {
        let request = |block: Option<u64>| match block {
            Some(block) => Request::read(Extent::from_raw(block, 2).unwrap(), Expectations::NONE),
            None => Request::flush(),
        };
        let hits = requests
            .iter()
            .enumerate()
            .filter(|(_, (device, block))| fault.hit(*device, &request(*block), BlockSize::B4096).is_some());
        hits.map(|(at, _)| at).collect()
    }

    #[test]
    fn a_fault_counts_what_matches_and_fails_once_or_for_ever() {
        let requests = [(0, Some(1)), (1, None), (1, Some(1)), (0, None), (1, Some(9)), (1, Some(2)), (1, None)];
        let of = |fault| failed(fault, &requests);
        assert_eq!(of(Fault::nth(2)), [1]);
        assert_eq!(of(Fault::nth(5).repeated(Repeat::Forever)), [4, 5, 6]);
        assert_eq!(of(Fault::nth(2).of_kind(RequestKind::Flush)), [3]);
        assert_eq!(of(Fault::nth(2).of_kind(RequestKind::Flush).on(1)), [6]);
        assert_eq!(of(Fault::nth(2).within(8192..8193)), [2], "a Flush has no bytes");
        assert_eq!(of(Fault::nth(1).within(0..4096).repeated(Repeat::Forever)), [0; 0]);
        assert_eq!(of(Fault::nth(1).on(2).repeated(Repeat::Forever)), [0; 0]);
    }
}
