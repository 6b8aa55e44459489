//! Where the sectors of a device lie that is made of others, and which of its sectors lie at a place of a member.
//!
//! Pure: no device and no sysfs. Invariants: segments follow each other from sector 0 on without a gap; every member that a segment names is
//! there; no address wraps. [`Map::down`] and [`Map::up`] are inverse to each other: what goes down comes up at the same sector.

use std::iter;

/// Bytes of a sector: of Linux's, whatever blocks a device has.
pub const SECTOR_BYTES: u64 = 512;

/// A run of sectors. It may be empty, and never wraps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Sectors {
    /// The first sector.
    pub start: u64,
    /// How many there are.
    pub count: u64,
}

impl Sectors {
    /// From `start` on, cut off at the last address there is.
    pub fn new(start: u64, count: u64) -> Sectors {
        Sectors { start, count: count.min(u64::MAX - start) }
    }

    /// The first sector behind it.
    pub fn end(self) -> u64 {
        self.start + self.count
    }

    /// What both have, which may be empty.
    fn common(self, other: Sectors) -> Sectors {
        let start = self.start.max(other.start);
        Sectors { start, count: self.end().min(other.end()).saturating_sub(start) }
    }
}

/// A part of a member: its number, and its first sector on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct On {
    /// Which member.
    pub member: usize,
    /// The sector of the member.
    pub sector: u64,
}

/// How the sectors of a segment lie on members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Arrangement {
    /// In order, from a sector of a member on: a partition, dm-linear.
    Linear(On),
    /// In turns: chunk 0 on the first member, chunk 1 on the second (dm-stripe, RAID0 of members of one size).
    Striped {
        /// Sectors of a chunk.
        chunk: u64,
        /// Where the first chunk of each member is.
        members: Vec<On>,
    },
    /// All of them on each member: dm-mirror, RAID1.
    Copies(Vec<On>),
    /// On no member: dm-zero, dm-error.
    Nowhere,
    /// In a way that is not known here.
    Unknown,
}

impl Arrangement {
    /// The parts of members that it lies on; none where that is not known.
    pub fn ons(&self) -> &[On] {
        match self {
            Arrangement::Linear(on) => std::slice::from_ref(on),
            Arrangement::Copies(ons) | Arrangement::Striped { members: ons, .. } => ons,
            Arrangement::Nowhere | Arrangement::Unknown => &[],
        }
    }
}

/// Sectors of a device that lie in one way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Which sectors.
    pub sectors: Sectors,
    /// How they lie.
    pub how: Arrangement,
}

/// Why segments are no map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// A segment does not begin where the one before ends, or is empty.
    #[error("its segments are not contiguous")]
    Gap,
    /// A segment lies past the last address of a member.
    #[error("a segment overflows")]
    Wraps,
    /// A segment has no member, or one that is not there.
    #[error("a segment refers to a missing member")]
    Member,
    /// A stripe is no whole number of chunks on each member.
    #[error("a stripe has an incomplete chunk")]
    Chunks,
}

/// Where sectors lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// There.
    On(On),
    /// On no member.
    Nowhere,
    /// That is not known.
    Unknown,
}

/// Sectors that lie at one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The sectors, on the device itself.
    pub sectors: Sectors,
    /// Where they lie.
    pub place: Place,
}

/// The mapping of a device to its members.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Map {
    segments: Vec<Segment>,
}

impl Map {
    /// The map of these segments on so many members.
    ///
    /// # Errors
    /// When an invariant would not hold.
    pub fn new(segments: Vec<Segment>, members: usize) -> Result<Map, MapError> {
        let mut next = 0;
        for segment in &segments {
            if segment.sectors.start != next || segment.sectors.count == 0 {
                return Err(MapError::Gap);
            }
            next = segment.sectors.end();
            check(segment, members)?;
        }
        Ok(Map { segments })
    }

    /// Sectors of the device.
    pub fn sectors(&self) -> u64 {
        self.segments.last().map_or(0, |segment| segment.sectors.end())
    }

    /// The segments, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Where these sectors lie, in order: each sector once, or once for each copy. What is past the end lies nowhere and is left
    /// out.
    pub fn down(&self, wanted: Sectors) -> impl Iterator<Item = Piece> + '_ {
        let first = self.segments.partition_point(|segment| segment.sectors.end() <= wanted.start);
        let touched = self.segments[first..]
            .iter()
            .take_while(move |segment| wanted.count > 0 && segment.sectors.start < wanted.end());
        touched.flat_map(move |segment| segment.down(segment.sectors.common(wanted)))
    }

    /// Which sectors of the device lie in these of a member.
    pub fn up(&self, member: usize, wanted: Sectors) -> impl Iterator<Item = Piece> + '_ {
        self.segments.iter().flat_map(move |segment| segment.up(member, wanted))
    }
}

fn check(segment: &Segment, members: usize) -> Result<(), MapError> {
    let ons = segment.how.ons();
    let count = match &segment.how {
        Arrangement::Linear(_) | Arrangement::Copies(_) => segment.sectors.count,
        Arrangement::Striped { chunk, .. } => {
            let row = chunk.checked_mul(ons.len() as u64).filter(|row| *row > 0).ok_or(MapError::Chunks)?;
            if !segment.sectors.count.is_multiple_of(row) {
                return Err(MapError::Chunks);
            }
            segment.sectors.count / ons.len() as u64
        }
        Arrangement::Nowhere | Arrangement::Unknown => return Ok(()),
    };
    if ons.is_empty() || ons.iter().any(|on| on.member >= members) {
        return Err(MapError::Member);
    }
    let fits = ons.iter().all(|on| on.sector.checked_add(count).is_some());
    fits.then_some(()).ok_or(MapError::Wraps)
}

type Pieces<'a> = Box<dyn Iterator<Item = Piece> + 'a>;

impl Segment {
    /// Where sectors of the segment lie; all of `part` is in it.
    fn down(&self, part: Sectors) -> Pieces<'_> {
        let from = part.start - self.sectors.start;
        let whole = move |place| Piece { sectors: part, place };
        match &self.how {
            Arrangement::Linear(on) => Box::new(iter::once(whole(Place::On(on.behind(from))))),
            Arrangement::Copies(ons) => Box::new(ons.iter().map(move |on| whole(Place::On(on.behind(from))))),
            Arrangement::Nowhere => Box::new(iter::once(whole(Place::Nowhere))),
            Arrangement::Unknown => Box::new(iter::once(whole(Place::Unknown))),
            Arrangement::Striped { chunk, members } => {
                Box::new(chunks(part, self.sectors.start, *chunk).map(move |piece| {
                    let at = piece.start - self.sectors.start;
                    let (number, within) = (at / chunk, at % chunk);
                    let on = members[(number % members.len() as u64) as usize];
                    let on = on.behind(number / members.len() as u64 * chunk + within);
                    Piece { sectors: piece, place: Place::On(on) }
                }))
            }
        }
    }

    /// Which sectors of the segment lie in these of a member.
    fn up(&self, member: usize, wanted: Sectors) -> Pieces<'_> {
        match &self.how {
            Arrangement::Linear(on) => Box::new(self.straight(*on, member, wanted).into_iter()),
            Arrangement::Copies(ons) => Box::new(ons.iter().filter_map(move |on| self.straight(*on, member, wanted))),
            Arrangement::Nowhere | Arrangement::Unknown => Box::new(iter::empty()),
            Arrangement::Striped { chunk, members } => {
                let width = members.len() as u64;
                let ons = members.iter().enumerate().filter(move |(_, on)| on.member == member);
                Box::new(ons.flat_map(move |(place, on)| {
                    let part = Sectors { start: on.sector, count: self.sectors.count / width }.common(wanted);
                    chunks(part, on.sector, *chunk).map(move |piece| {
                        let at = piece.start - on.sector;
                        let start = (at / chunk * width + place as u64) * chunk + at % chunk;
                        let sectors = Sectors { start: self.sectors.start + start, count: piece.count };
                        Piece { sectors, place: Place::On(On { member, sector: piece.start }) }
                    })
                }))
            }
        }
    }

    /// What of these sectors of a member is a part of the segment that lies there in order.
    fn straight(&self, on: On, member: usize, wanted: Sectors) -> Option<Piece> {
        let part = Sectors { start: on.sector, count: self.sectors.count }.common(wanted);
        let sectors = Sectors { start: self.sectors.start + part.start.checked_sub(on.sector)?, count: part.count };
        let place = Place::On(On { member, sector: part.start });
        (on.member == member && part.count > 0).then_some(Piece { sectors, place })
    }
}

impl On {
    fn behind(self, sectors: u64) -> On {
        On { sector: self.sector + sectors, ..self }
    }
}

/// Cuts a part at the ends of chunks that are counted from `origin`.
fn chunks(part: Sectors, origin: u64, chunk: u64) -> impl Iterator<Item = Sectors> {
    let mut next = part.start;
    iter::from_fn(move || {
        let left = part.end().checked_sub(next).filter(|left| *left > 0)?;
        let piece = Sectors { start: next, count: left.min(chunk - (next - origin) % chunk) };
        next = piece.end();
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMBERS: usize = 3;

    fn on() -> impl Strategy<Value = On> {
        (0..MEMBERS, 0..5000_u64).prop_map(|(member, sector)| On { member, sector })
    }

    fn arrangement() -> impl Strategy<Value = (u64, Arrangement)> {
        prop_oneof![
            (1..500_u64, on()).prop_map(|(count, on)| (count, Arrangement::Linear(on))),
            (1..500_u64, prop::collection::vec(on(), 1..4)).prop_map(|(count, ons)| (count, Arrangement::Copies(ons))),
            (1..9_u64, 1..20_u64, prop::collection::vec(on(), 1..4)).prop_map(|(chunk, rows, members)| (
                chunk * rows * members.len() as u64,
                Arrangement::Striped { chunk, members }
            )),
            (1..500_u64).prop_map(|count| (count, Arrangement::Nowhere)),
            (1..500_u64).prop_map(|count| (count, Arrangement::Unknown)),
        ]
    }

    fn map() -> impl Strategy<Value = Map> {
        prop::collection::vec(arrangement(), 1..6).prop_map(|parts| {
            let mut next = 0;
            let segments = parts.into_iter().map(|(count, how)| {
                let sectors = Sectors { start: next, count };
                next += count;
                Segment { sectors, how }
            });
            Map::new(segments.collect(), MEMBERS).unwrap()
        })
    }

    /// How often each sector has to be found.
    fn copies(map: &Map, sector: u64) -> usize {
        let segment = map.segments().iter().find(|segment| segment.sectors.end() > sector).unwrap();
        if let Arrangement::Copies(ons) = &segment.how { ons.len() } else { 1 }
    }

    proptest! {
        #[test]
        fn every_sector_is_found_once_for_each_copy_and_comes_up_where_it_went_down(map in map(), start in 0..2000_u64, count in 0..600_u64) {
            let wanted = Sectors { start, count };
            let mut found = std::collections::BTreeMap::new();
            for piece in map.down(wanted) {
                prop_assert!(piece.sectors.count > 0 && piece.sectors.start >= start && piece.sectors.end() <= wanted.end());
                for sector in piece.sectors.start..piece.sectors.end() {
                    *found.entry(sector).or_insert(0) += 1;
                }
                if let Place::On(on) = piece.place {
                    let up: Vec<Piece> = map.up(on.member, Sectors { start: on.sector, count: piece.sectors.count }).collect();
                    prop_assert!(up.contains(&piece), "{piece:?} comes up as {up:?}");
                }
            }
            for sector in start..wanted.end().min(map.sectors()) {
                prop_assert_eq!(found.remove(&sector), Some(copies(&map, sector)), "sector {}", sector);
            }
            prop_assert!(found.is_empty());
        }

        #[test]
        fn what_comes_up_lies_in_what_was_asked_for(map in map(), member in 0..MEMBERS, start in 0..6000_u64, count in 0..600_u64) {
            for piece in map.up(member, Sectors { start, count }) {
                let Place::On(on) = piece.place else { panic!("it lies on a member") };
                prop_assert!(on.member == member && on.sector >= start && on.sector + piece.sectors.count <= start + count);
                let down: Vec<Piece> = map.down(piece.sectors).collect();
                prop_assert!(down.contains(&piece), "{piece:?} goes down as {down:?}");
            }
        }
    }

    #[test]
    fn segments_that_cannot_be_are_no_map() {
        let at = |start, count, how| Segment { sectors: Sectors { start, count }, how };
        let linear = |member, sector| Arrangement::Linear(On { member, sector });
        let striped = |chunk, members| Arrangement::Striped { chunk, members };
        let first = || On { member: 0, sector: 0 };
        for (segments, error) in [
            (vec![at(1, 5, linear(0, 0))], MapError::Gap),
            (vec![at(0, 0, linear(0, 0))], MapError::Gap),
            (vec![at(0, 5, linear(0, 0)), at(6, 5, linear(0, 0))], MapError::Gap),
            (vec![at(0, 5, linear(1, 0))], MapError::Member),
            (vec![at(0, 5, linear(0, u64::MAX))], MapError::Wraps),
            (vec![at(0, 5, Arrangement::Copies(Vec::new()))], MapError::Member),
            (vec![at(0, 5, striped(0, vec![first()]))], MapError::Chunks),
            (vec![at(0, 5, striped(2, vec![first()]))], MapError::Chunks),
            (vec![at(0, 4, striped(2, Vec::new()))], MapError::Chunks),
            (vec![at(0, 8, striped(u64::MAX, vec![first(), first()]))], MapError::Chunks),
        ] {
            assert_eq!(Map::new(segments, 1), Err(error));
        }
        assert!(Map::new(vec![at(0, 4, striped(2, vec![first(), first()]))], 1).is_ok());
    }

    #[test]
    fn a_long_range_of_a_stripe_is_made_piece_by_piece() {
        let how = Arrangement::Striped { chunk: 1, members: vec![On { member: 0, sector: 0 }] };
        let segment = Segment { sectors: Sectors { start: 0, count: u64::MAX }, how };
        let map = Map::new(vec![segment], 1).unwrap();
        assert_eq!(map.down(Sectors { start: 0, count: u64::MAX }).take(3).count(), 3);
        assert_eq!(map.up(0, Sectors { start: 5, count: u64::MAX - 5 }).take(3).count(), 3);
        let nothing = Sectors { start: 5, count: 0 };
        assert_eq!((map.down(nothing).count(), map.up(0, nothing).count()), (0, 0));
    }
}
