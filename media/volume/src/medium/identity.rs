//! Which volume owns a medium: the one that most independent witnesses name.
//!
//! A superblock names its volume, but so does a foreign one. So before sequence numbers are compared, other records are
//! read where the layouts in the superblocks place them. Their checksums are salted by the volume, and the salt for
//! which a record is valid identifies its volume. A *unit* is a place such that no 64 KiB that begin with a sector
//! overlap two units, so one fault changes at most one witness. The start of the medium, which most accidents
//! overwrite, is no witness: it only names candidates.
//!
//! Records of an earlier volume on the medium are witnesses, too. Creating a volume over it leaves at most its map
//! pages.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use sealblock_block::{Medium, ReservedArea};

use crate::format::{
    Generations, GroupMapSector, Layout, LogSector, ReservedCopy, Seed, Superblock, TAIL_BYTES, uuid_text,
};
use crate::medium::read_probe;

/// The number of witnesses that make an identity certain.
const CERTAIN: usize = 2;
/// In a place with many records, the number that must have the same unknown salt: one could be damage.
const MIN_AGREEING: usize = 2;
/// The number of map pages that are read.
const PAGES: u64 = 16;

/// A place whose records identify the owner of the medium.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unit {
    /// Both superblocks at the start. They name candidates and are no witness.
    Start,
    /// A region of the log.
    Log(u8),
    /// A copy of the block group map.
    GroupMap(u8),
    /// The map pages.
    MapPages,
    /// The third superblock, or without one the copies of the reserved areas beside it.
    Tail,
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unit::Start => f.write_str("the start"),
            Unit::Log(region) => write!(f, "region {region} of the log"),
            Unit::GroupMap(copy) => write!(f, "copy {copy} of the block group map"),
            Unit::MapPages => f.write_str("the map pages"),
            Unit::Tail => f.write_str("the end"),
        }
    }
}

/// A record that is valid under this salt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Sighting {
    /// The salt of the volume's checksums.
    pub salt: Seed,
    /// Where it was found.
    pub unit: Unit,
}

/// The conclusion from all sightings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// More witnesses name this volume than any other, and at least two do.
    Certain(Seed),
    /// No other volume is named, and fewer than two witnesses name this one.
    Unopposed(Seed),
    /// Several are named, and none has a majority: each with the places that name it, most witnesses first.
    Doubtful(Vec<(Seed, Vec<Unit>)>),
    /// Nothing was found.
    Nothing,
}

/// Decides which volume owns the medium.
pub fn decide(sightings: &[Sighting]) -> Verdict {
    let mut named = ranked(sightings);
    let witnesses = |at: usize| named.get(at).map_or(0, |(_, units)| witnesses(units));
    match (named.len(), witnesses(0), witnesses(1)) {
        (0, ..) => Verdict::Nothing,
        (_, most, next) if most >= CERTAIN && most > next => Verdict::Certain(named.remove(0).0),
        (1, ..) => Verdict::Unopposed(named.remove(0).0),
        _ => Verdict::Doubtful(named),
    }
}

/// Each identity that was sighted, with its places, most witnesses first.
fn ranked(sightings: &[Sighting]) -> Vec<(Seed, Vec<Unit>)> {
    let mut units: BTreeMap<Seed, BTreeSet<Unit>> = BTreeMap::new();
    for sighting in sightings {
        units.entry(sighting.salt).or_default().insert(sighting.unit);
    }
    let mut named: Vec<(Seed, Vec<Unit>)> =
        units.into_iter().map(|(salt, units)| (salt, units.into_iter().collect())).collect();
    named.sort_by_key(|(salt, units)| (std::cmp::Reverse(witnesses(units)), *salt));
    named
}

/// The number of these places that are witnesses.
pub(crate) fn witnesses(units: &[Unit]) -> usize {
    units.iter().filter(|unit| **unit != Unit::Start).count()
}

/// A volume that may own the medium.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Its identity, which only a superblock has.
    pub uuid: Option<[u8; 16]>,
    /// The offsets of its superblocks.
    pub superblocks: Vec<u64>,
    /// The witnesses that name it.
    pub witnesses: Vec<Unit>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |parts: Vec<String>| match parts.len() {
            0 => "nothing else".to_owned(),
            _ => parts.join(", "),
        };
        let named_by = list(self.witnesses.iter().map(ToString::to_string).collect());
        match &self.uuid {
            Some(uuid) => {
                let places = list(self.superblocks.iter().map(ToString::to_string).collect());
                write!(f, "volume {}, by the superblock at byte {places}, with {named_by}", uuid_text(uuid))
            }
            None => write!(f, "a volume none of whose superblocks is left, by {named_by}"),
        }
    }
}

/// Why no volume is accepted as the owner of a medium.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdentityError {
    /// There are records of several volumes, and none has a majority.
    #[error("whose volume this is cannot be told, and nothing was written. It may be {}", join(.0))]
    Doubtful(Vec<Candidate>),
    /// All superblocks are one volume's, and all other records are another's.
    #[error(
        "every superblock is another volume's. It has the superblocks of {foreign}, and everything else is of {owner}"
    )]
    Foreign {
        /// The volume of the superblocks.
        foreign: Box<Candidate>,
        /// The volume of the other records.
        owner: Box<Candidate>,
    },
    /// Only superblocks name this volume.
    #[error(
        "nothing but a superblock says that this is volume {}: it opens for reading only, and what was never written there \
         reads as damage", uuid_text(.0)
    )]
    Unproven([u8; 16]),
    /// The requested identity is not on the medium.
    #[error("no superblock of volume {} is there. There is {}", uuid_text(.asked), join(.found))]
    Absent {
        /// The identity requested.
        asked: [u8; 16],
        /// The volumes found.
        found: Vec<Candidate>,
    },
}

fn join(candidates: &[Candidate]) -> String {
    candidates.iter().map(ToString::to_string).collect::<Vec<_>>().join("; or ")
}

/// How an identity was determined.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// By a majority of witnesses.
    Certain,
    /// It is the only one, but not proven.
    Unopposed,
    /// The caller requested it.
    Chosen,
}

impl Standing {
    /// As text.
    pub fn as_str(self) -> &'static str {
        match self {
            Standing::Certain => "certain",
            Standing::Unopposed => "unproven",
            Standing::Chosen => "chosen",
        }
    }
}

/// A superblock that is where it belongs.
#[derive(Clone, Copy)]
pub(crate) struct Claim {
    pub superblock: Superblock,
    pub offset: u64,
}

impl Claim {
    fn unit(&self) -> Unit {
        if self.offset == self.superblock.layout.third_offset() { Unit::Tail } else { Unit::Start }
    }
}

/// Determines which of the volumes that superblocks name owns the medium, or accepts the one that is `chosen`.
///
/// # Errors
/// When it cannot be determined, or it is none of them.
pub(crate) async fn establish<M: Medium>(
    medium: &M,
    claims: &[Claim],
    chosen: Option<[u8; 16]>,
) -> Result<([u8; 16], Standing), IdentityError> {
    if let Some(asked) = chosen {
        let is_there = claims.iter().any(|claim| claim.superblock.uuid == asked);
        let found = || candidates(&claims.iter().map(seen).collect::<Vec<_>>(), claims);
        return if is_there {
            Ok((asked, Standing::Chosen))
        } else {
            Err(IdentityError::Absent { asked, found: found() })
        };
    }
    let newest = claims.iter().max_by_key(|claim| claim.superblock.write_seq);
    if let Some(newest) = newest.map(|claim| claim.superblock)
        && claims.iter().all(|claim| claim.superblock.uuid == newest.uuid)
        && is_confirmed(medium, claims, &newest).await
    {
        return Ok((newest.uuid, Standing::Certain));
    }
    let sightings = gather(medium, claims).await;
    let found = candidates(&sightings, claims);
    let of_salt = |salt: Seed| claims.iter().find(|claim| claim.superblock.seed() == salt);
    // Witnesses cannot distinguish two volumes with the same salt.
    let is_shared = |one: &Claim| {
        let mut same = claims.iter().filter(|claim| claim.superblock.seed() == one.superblock.seed());
        same.any(|claim| claim.superblock.uuid != one.superblock.uuid)
    };
    match decide(&sightings) {
        Verdict::Certain(salt) => match of_salt(salt) {
            Some(claim) if !is_shared(claim) => Ok((claim.superblock.uuid, Standing::Certain)),
            Some(_) => Err(IdentityError::Doubtful(found)),
            None => Err(owned_by_another(found)),
        },
        Verdict::Unopposed(salt) => match of_salt(salt) {
            Some(claim) if !is_shared(claim) => Ok((claim.superblock.uuid, Standing::Unopposed)),
            _ => Err(IdentityError::Doubtful(found)),
        },
        Verdict::Doubtful(_) | Verdict::Nothing => Err(IdentityError::Doubtful(found)),
    }
}

/// The error for a medium whose owner, the first of these, has no superblock.
fn owned_by_another(mut found: Vec<Candidate>) -> IdentityError {
    match found.iter().position(|candidate| candidate.uuid.is_some()) {
        Some(at) if found.iter().filter(|candidate| candidate.uuid.is_some()).count() == 1 => {
            let foreign = Box::new(found.remove(at));
            IdentityError::Foreign { foreign, owner: Box::new(found.remove(0)) }
        }
        _ => IdentityError::Doubtful(found),
    }
}

/// True if two witnesses name the volume of all superblocks. This is the usual case, and costs one read or two.
async fn is_confirmed<M: Medium>(medium: &M, claims: &[Claim], newest: &Superblock) -> bool {
    let mut found = usize::from(claims.iter().any(|claim| claim.unit() == Unit::Tail));
    for copy in 0..2 {
        if found < CERTAIN && in_group_map(medium, &newest.layout, copy).await == Some(newest.seed()) {
            found += 1;
        }
    }
    found >= CERTAIN
}

/// The volumes that were sighted, most witnesses first.
fn candidates(sightings: &[Sighting], claims: &[Claim]) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (salt, units) in ranked(sightings) {
        let mut uuids: Vec<[u8; 16]> = Vec::new();
        for claim in claims.iter().filter(|claim| claim.superblock.seed() == salt) {
            if !uuids.contains(&claim.superblock.uuid) {
                uuids.push(claim.superblock.uuid);
            }
        }
        let witnesses: Vec<Unit> = units.into_iter().filter(|unit| *unit != Unit::Start).collect();
        if uuids.is_empty() {
            found.push(Candidate { uuid: None, superblocks: Vec::new(), witnesses: witnesses.clone() });
        }
        for uuid in uuids {
            let of = claims.iter().filter(|claim| claim.superblock.uuid == uuid);
            let superblocks = of.map(|claim| claim.offset).collect();
            found.push(Candidate { uuid: Some(uuid), superblocks, witnesses: witnesses.clone() });
        }
    }
    found
}

fn seen(claim: &Claim) -> Sighting {
    Sighting { salt: claim.superblock.seed(), unit: claim.unit() }
}

/// All records that name a volume, at the positions in the layouts of all superblocks. A position in one volume's
/// layout does not count for a volume whose superblocks have other layouts.
async fn gather<M: Medium>(medium: &M, claims: &[Claim]) -> Vec<Sighting> {
    let mut sightings: Vec<Sighting> = claims.iter().map(seen).collect();
    let salts: Vec<Seed> = claims.iter().map(|claim| claim.superblock.seed()).collect();
    let mut layouts: Vec<Layout> = Vec::new();
    for claim in claims {
        if !layouts.contains(&claim.superblock.layout) {
            layouts.push(claim.superblock.layout);
        }
    }
    for layout in layouts {
        let lies_so = |salt: Seed| {
            let mut own = claims.iter().filter(|claim| claim.superblock.seed() == salt).peekable();
            own.peek().is_none() || own.any(|claim| claim.superblock.layout == layout)
        };
        let here = sightings_in(medium, &layout, &salts).await;
        sightings.extend(here.into_iter().filter(|sighting| lies_so(sighting.salt)));
    }
    sightings
}

/// All records that name a volume, at the positions in this layout. In a place with several records, a salt that is not
/// `known` counts only if two agree.
pub(crate) async fn sightings_in<M: Medium>(medium: &M, layout: &Layout, known: &[Seed]) -> Vec<Sighting> {
    let mut sightings = Vec::new();
    let mut add =
        |unit: Unit, salts: Vec<Seed>| sightings.extend(salts.into_iter().map(|salt| Sighting { salt, unit }));
    for region in [0, 1] {
        let salts = in_log(&read_probe(medium, layout.log_sector_offset(0, region)).await, layout);
        add(Unit::Log(region as u8), agreeing(salts, known));
    }
    for copy in [0, 1] {
        add(Unit::GroupMap(copy as u8), in_group_map(medium, layout, copy).await.into_iter().collect());
    }
    let tail = in_tail(&read_probe(medium, layout.tail_offset()).await, layout);
    add(Unit::MapPages, agreeing(in_map_pages(medium, layout, known, &tail).await, known));
    add(Unit::Tail, tail);
    sightings
}

/// The salts that are known, or that occur twice.
fn agreeing(mut salts: Vec<Seed>, known: &[Seed]) -> Vec<Seed> {
    salts.sort_unstable();
    let groups = salts.chunk_by(|a, b| a == b).filter(|same| same.len() >= MIN_AGREEING || known.contains(&same[0]));
    groups.map(|same| same[0]).collect()
}

/// The salts of the log sectors at the beginning of a region.
fn in_log(bytes: &[u8], layout: &Layout) -> Vec<Seed> {
    let sectors = (0_u64..).zip(bytes.chunks_exact(layout.sector_bytes() as usize));
    let salts = sectors.filter_map(|(position, bytes)| {
        let (sequence, salt) = LogSector::trace_salt(bytes)?;
        (sequence % layout.log_sectors() == position).then_some(salt)
    });
    salts.collect()
}

/// The salt of the first sector of a copy of the group map, which every volume has.
async fn in_group_map<M: Medium>(medium: &M, layout: &Layout, copy: u64) -> Option<Seed> {
    GroupMapSector::trace_salt(&read_sector(medium, layout, layout.group_map_offset(copy)).await?, 0)
}

/// A sector of the volume; `None` if it cannot be read.
async fn read_sector<M: Medium>(medium: &M, layout: &Layout, offset: u64) -> Option<Vec<u8>> {
    let sector = layout.sector_bytes() as usize;
    let length = sector.max(medium.sector_bytes() as usize);
    if offset + length as u64 > medium.len_bytes() {
        return None;
    }
    let (read, bytes) = medium.read(offset, medium.buffer(length)).await;
    read.ok().map(|()| bytes[..sector].to_vec())
}

/// The salts of the generations of some pages. If both copies of the group map and the tail belong to one known volume,
/// only initialized block groups are read: in others there may be generations of an earlier volume. If the tail belongs
/// to another volume, the creation of this one did not write it. Then the group map, which is also written at creation,
/// may be the foreign part, and all pages are candidates.
async fn in_map_pages<M: Medium>(medium: &M, layout: &Layout, known: &[Seed], tail: &[Seed]) -> Vec<Seed> {
    let [first, second] = [0, 1].map(|copy| read_sector(medium, layout, layout.group_map_offset(copy)));
    let (first, second) = (first.await, second.await);
    let decode = |bytes: &Option<Vec<u8>>, seed: Seed| GroupMapSector::decode(bytes.as_deref()?, seed, 0);
    let of_tail = |seed: &&Seed| tail.is_empty() || tail.contains(*seed);
    let map = known.iter().filter(of_tail).find_map(|seed| decode(&second, *seed).and(decode(&first, *seed)));
    let groups = layout.block_groups();
    let in_map = layout.groups_per_map_sector().min(groups);
    let made: Vec<u64> = match &map {
        Some(map) => (0..in_map).filter(|group| map.has(*group as usize)).collect(),
        None => (0..groups.min(PAGES)).map(|at| at * groups / groups.min(PAGES)).collect(),
    };
    let stride = made.len().div_ceil(PAGES as usize).max(1);
    let chosen: Vec<u64> = made.into_iter().step_by(stride).collect();
    let each = PAGES / (chosen.len() as u64).max(1);
    let mut salts = Vec::new();
    for group in chosen {
        let pages = layout.pages_of_group(group);
        let count = pages.end - pages.start;
        for at in 0..each.min(count) {
            let Some(place) = layout.page_offsets(pages.start + at * count / each.min(count)) else { continue };
            let sector = read_sector(medium, layout, place.offset).await;
            let found = sector.and_then(|sector| Generations::trace_salt(&sector));
            salts.extend(found.filter(|(first, _)| *first == place.first).map(|(_, salt)| salt));
        }
    }
    salts
}

/// The salt of the third superblock, or without one those of the reserved areas beside it, which may be those of an
/// earlier volume.
fn in_tail(bytes: &[u8], layout: &Layout) -> Vec<Seed> {
    let at = (layout.third_offset() - layout.tail_offset()) as usize;
    let third = bytes.get(at..).and_then(|bytes| Superblock::decode(bytes).ok());
    if let Some(third) = third.filter(|third| third.layout.third_offset() == layout.third_offset()) {
        return vec![third.seed()];
    }
    if bytes.len() < TAIL_BYTES as usize {
        return Vec::new();
    }
    let places = ReservedArea::ALL.into_iter().flat_map(|area| [0, 1].map(|turn| (area, turn)));
    let salts = places.filter_map(|(area, turn)| {
        let at = layout.reserved_offsets(area, turn)[1] - layout.tail_offset();
        ReservedCopy::trace_salt(&bytes[at as usize..], area, turn)
    });
    let mut salts: Vec<Seed> = salts.collect();
    salts.sort_unstable();
    salts.dedup();
    salts
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: [Unit; 6] =
        [Unit::Log(0), Unit::Log(1), Unit::GroupMap(0), Unit::GroupMap(1), Unit::MapPages, Unit::Tail];
    const OWN: Seed = Seed(1);
    const OTHER: Seed = Seed(2);

    /// All combinations in which each unit names one volume, the other, or none.
    fn all() -> impl Iterator<Item = [Option<Seed>; 6]> {
        (0..3_usize.pow(6)).map(|number| {
            std::array::from_fn(|unit| [None, Some(OWN), Some(OTHER)][number / 3_usize.pow(unit as u32) % 3])
        })
    }

    /// Both volumes have a superblock at the start.
    fn sightings(units: &[Option<Seed>; 6]) -> Vec<Sighting> {
        let start = [OWN, OTHER].map(|salt| Sighting { salt, unit: Unit::Start });
        let found = UNITS.into_iter().zip(units).filter_map(|(unit, salt)| Some(Sighting { salt: (*salt)?, unit }));
        start.into_iter().chain(found).collect()
    }

    fn count(units: &[Option<Seed>; 6], salt: Seed) -> usize {
        units.iter().filter(|unit| **unit == Some(salt)).count()
    }

    #[test]
    fn the_identity_with_more_witnesses_is_certain_and_no_other_ever() {
        for units in all() {
            let (own, other) = (count(&units, OWN), count(&units, OTHER));
            let due = match own.cmp(&other) {
                std::cmp::Ordering::Greater if own >= CERTAIN => Some(OWN),
                std::cmp::Ordering::Less if other >= CERTAIN => Some(OTHER),
                _ => None,
            };
            let found = sightings(&units);
            let verdict = decide(&found);
            match due {
                Some(salt) => assert_eq!(verdict, Verdict::Certain(salt), "{units:?}"),
                None => assert!(matches!(verdict, Verdict::Doubtful(ref named) if named.len() == 2), "{units:?}"),
            }
            let mut backwards = found.clone();
            backwards.reverse();
            assert_eq!(decide(&backwards), verdict, "the order does not count");
            assert_eq!(decide(&[found.clone(), found].concat()), verdict, "nor how often");
        }
    }

    #[test]
    fn no_single_fault_gives_a_volume_to_another() {
        for units in all().filter(|units| count(units, OWN) >= count(units, OTHER) + 2) {
            for hit in 0..UNITS.len() {
                for becomes in [None, Some(OWN), Some(OTHER)] {
                    let mut after = units;
                    after[hit] = becomes;
                    assert_ne!(decide(&sightings(&after)), Verdict::Certain(OTHER), "{units:?} becomes {after:?}");
                }
            }
        }
    }

    #[test]
    fn a_volume_alone_is_certain_with_two_witnesses_and_unopposed_with_fewer() {
        let start = Sighting { salt: OWN, unit: Unit::Start };
        let found: Vec<Sighting> = [start].into_iter().chain(UNITS.map(|unit| Sighting { salt: OWN, unit })).collect();
        assert_eq!(decide(&[]), Verdict::Nothing);
        assert_eq!(decide(&found[..1]), Verdict::Unopposed(OWN));
        assert_eq!(decide(&found[..2]), Verdict::Unopposed(OWN));
        assert_eq!(decide(&found[..3]), Verdict::Certain(OWN));
        let other = Sighting { salt: OTHER, unit: Unit::Start };
        assert!(matches!(decide(&[found[0], other]), Verdict::Doubtful(_)));
        assert!(matches!(decide(&[found[0], found[1], other]), Verdict::Doubtful(_)));
    }
}
