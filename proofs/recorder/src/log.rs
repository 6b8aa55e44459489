//! The log of all devices of a recorder: what started, reached the medium and ended, in which order.
//!
//! Time is the index of an event. A *crash point* `p` lies before event `p`: the events below `p` have happened.

use std::fmt;
use std::rc::Rc;

use sealblock_block::{Durability, RequestKind};

use crate::image::{Image, Piece};

/// The number of a request in its log, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId(pub usize);

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A device received the request.
    Start(RequestId),
    /// A change whose future was dropped reached the medium. A change that is awaited does so when it ends.
    Land(RequestId),
    /// The request completed, with success or not.
    End(RequestId),
    /// The test promises something from here on.
    Mark(Rc<str>),
}

/// One Write, WriteZeroes, Discard or Flush.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The index of the device.
    pub device: usize,
    /// The kind of the request.
    pub kind: RequestKind,
    /// True if a WriteZeroes may deallocate the blocks.
    pub may_unmap: bool,
    /// Force unit access or not.
    pub durability: Durability,
    /// What the request changes.
    pub pieces: Vec<Piece>,
    /// When it started.
    pub started: usize,
    /// When its change reached the medium.
    pub landed: Option<usize>,
    /// When it ended.
    pub ended: Option<usize>,
    /// Of a change that failed: the part of it that is stored nevertheless.
    pub(crate) stored: Option<Vec<Piece>>,
    /// True if it ended with an error.
    pub failed: bool,
}

impl Recorded {
    /// True for a Flush.
    pub fn is_flush(&self) -> bool {
        self.kind == RequestKind::Flush
    }

    /// What of it can be on the medium if the power is cut at `point`.
    pub(crate) fn pieces_at(&self, point: usize) -> &[Piece] {
        match &self.stored {
            Some(stored) if self.landed_by(point).is_some() => stored,
            _ => &self.pieces,
        }
    }

    /// When it reached the medium, if that was before `point`.
    pub(crate) fn landed_by(&self, point: usize) -> Option<usize> {
        self.landed.filter(|landed| *landed < point)
    }

    /// When it ended, if that was with success.
    fn succeeded(&self) -> Option<usize> {
        self.ended.filter(|_| !self.failed)
    }
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on device {}", self.kind.name(), self.device)?;
        if let Some(first) = self.pieces.first() {
            write!(f, " at byte {}, {} bytes", first.offset, first.len)?;
        }
        if self.pieces.len() > 1 {
            write!(f, " and {} more pieces", self.pieces.len() - 1)?;
        }
        f.write_str(if self.durability == Durability::ForceUnitAccess { ", FUA" } else { "" })?;
        f.write_str(match (self.ended, self.failed) {
            (None, _) => ", in flight",
            (Some(_), true) => ", failed",
            (Some(_), false) => "",
        })
    }
}

/// What the devices had before, and everything that happened since.
#[derive(Clone)]
pub struct Log {
    pub(crate) before: Vec<Image>,
    pub(crate) requests: Vec<Recorded>,
    pub(crate) events: Vec<Event>,
}

impl Log {
    pub(crate) fn new(before: Vec<Image>) -> Log {
        Log { before, requests: Vec::new(), events: Vec::new() }
    }

    /// The events, in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The requests, in the order in which they started.
    pub fn requests(&self) -> &[Recorded] {
        &self.requests
    }

    /// The request with this number.
    ///
    /// # Panics
    /// If it is of another log.
    pub fn request(&self, id: RequestId) -> &Recorded {
        &self.requests[id.0]
    }

    /// The marks before `point`, in order.
    pub(crate) fn marks(&self, point: usize) -> impl Iterator<Item = &str> {
        self.events[..point].iter().filter_map(|event| match event {
            Event::Mark(name) => Some(&**name),
            _ => None,
        })
    }

    pub(crate) fn mark(&mut self, name: Rc<str>) {
        self.events.push(Event::Mark(name));
    }

    /// Adds a request that starts now.
    pub(crate) fn start(&mut self, request: Recorded) -> RequestId {
        let id = RequestId(self.requests.len());
        self.requests.push(Recorded { started: self.events.len(), ..request });
        self.events.push(Event::Start(id));
        id
    }

    /// The request ends. If it fails, `stored` is the part of its change that reaches the medium.
    pub(crate) fn end(&mut self, id: RequestId, stored: Option<Vec<Piece>>) {
        let (now, request) = (self.events.len(), &mut self.requests[id.0]);
        request.ended = Some(now);
        request.landed = Some(now).filter(|_| !request.is_flush());
        request.failed = stored.is_some();
        request.stored = stored;
        self.events.push(Event::End(id));
    }

    /// The change of a request that never ends reaches the medium.
    pub(crate) fn land(&mut self, id: RequestId) {
        self.requests[id.0].landed = Some(self.events.len());
        self.events.push(Event::Land(id));
    }

    /// For each request, when it became durable: at the end of itself (FUA) or of the first Flush of its device that
    /// started after it had ended. `None` for flushes, and for changes that are volatile to the end of the log.
    pub(crate) fn durable_at(&self) -> Vec<Option<usize>> {
        let flushes: Vec<Vec<FlushFrom>> = (0..self.before.len()).map(|device| self.flushes(device)).collect();
        let when = |request: &Recorded| match request.durability {
            _ if request.is_flush() => None,
            Durability::ForceUnitAccess if !request.failed => request.ended,
            _ => {
                let (of_device, ended) = (&flushes[request.device], request.ended?);
                let next = of_device.partition_point(|flush| flush.started <= ended);
                of_device.get(next)?.durable
            }
        };
        self.requests.iter().map(when).collect()
    }

    /// The flushes of a device that ended, in the order of their starts.
    fn flushes(&self, device: usize) -> Vec<FlushFrom> {
        let of_device = self.requests.iter().filter(|request| request.is_flush() && request.device == device);
        let mut flushes: Vec<FlushFrom> = Vec::new();
        for flush in of_device.rev() {
            let Some(ended) = flush.ended else { continue };
            // After a failed flush, no later one proves anything of what it should have covered.
            let own = FlushFrom { started: flush.started, first_end: ended, durable: flush.succeeded() };
            let later = flushes.last().filter(|later| later.first_end < ended);
            flushes.push(later.map_or(own, |later| FlushFrom { started: flush.started, ..*later }));
        }
        flushes.reverse();
        flushes
    }
}

/// A Flush and all later ones of its device, of which the first to end decides.
#[derive(Clone, Copy)]
struct FlushFrom {
    started: usize,
    first_end: usize,
    /// When what had ended before `started` is durable; `None` if the first to end failed.
    durable: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of random starts and ends of changes and flushes, some of which fail or never end.
    fn random_log(rng: &mut fastrand::Rng) -> Log {
        let mut log = Log::new(vec![Image::blank(sealblock_units::BlockSize::B512, 1); 2]);
        let mut in_flight = Vec::new();
        for _ in 0..60 {
            if in_flight.is_empty() || rng.bool() {
                let kind = if rng.u8(..3) == 0 { RequestKind::Flush } else { RequestKind::Write };
                let is_fua = kind == RequestKind::Write && rng.u8(..5) == 0;
                let durability = if is_fua { Durability::ForceUnitAccess } else { Durability::Volatile };
                in_flight.push(log.start(Recorded {
                    device: rng.usize(..2),
                    kind,
                    may_unmap: false,
                    durability,
                    pieces: Vec::new(),
                    started: 0,
                    landed: None,
                    ended: None,
                    stored: None,
                    failed: false,
                }));
            } else {
                let id = in_flight.swap_remove(rng.usize(..in_flight.len()));
                log.end(id, (rng.u8(..6) == 0).then(Vec::new));
            }
        }
        log
    }

    /// What [`Log::durable_at`] returns, request by request from its definition.
    fn expected(log: &Log, request: &Recorded) -> Option<usize> {
        if request.is_flush() {
            return None;
        }
        let ended = request.ended?;
        if request.durability == Durability::ForceUnitAccess && !request.failed {
            return Some(ended);
        }
        let is_later = |flush: &&Recorded| flush.is_flush() && flush.device == request.device && flush.started > ended;
        let flushes = log.requests().iter().filter(is_later).filter(|flush| flush.ended.is_some());
        flushes.min_by_key(|flush| flush.ended).and_then(Recorded::succeeded)
    }

    #[test]
    fn what_is_durable_when_is_as_defined_whatever_the_order() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut durable, mut volatile) = (0, 0);
        for _ in 0..300 {
            let log = random_log(&mut rng);
            for (request, at) in log.requests().iter().zip(log.durable_at()) {
                assert_eq!(at, expected(&log, request), "{request} of {:?}", log.events());
                *(if at.is_some() { &mut durable } else { &mut volatile }) += 1;
            }
        }
        assert!(durable > 1000 && volatile > 1000);
    }
}
