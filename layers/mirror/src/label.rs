//! The label: what a mirror notes beside the blocks of its legs. Drawn in `docs/formats/mirror-label.md`.
//!
//! Everything read here is hostile until its checksum and its ranges have been checked.

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, guard};
use sealblock_units::BlockSize;

use crate::regions::{RegionMap, Regions, bytes_of};

/// Legs of a mirror at most, those that are gone and not forgotten included.
pub const MOST_LEGS: usize = 8;

/// No label has a higher generation.
const MOST_GENERATION: u64 = 1 << 62;

const MAGIC: [u8; 8] = *b"SBMIRROR";
const VERSION: u64 = 1;
const HEAD_BYTES: usize = 96;
const MEMBER_BYTES: usize = 32;

const AT_VERSION: usize = 8;
const AT_CHECKSUM: usize = 12;
const AT_UUID: usize = 16;
const AT_GENERATION: usize = 32;
const AT_CAPACITY: usize = 40;
const AT_BLOCK_BYTES: usize = 48;
const AT_REGION_SHIFT: usize = 52;
const AT_GUARD: usize = 53;
const AT_TYPE: usize = 54;
const AT_STORAGE_TAG: usize = 55;
const AT_MEMBERS: usize = 56;
const AT_OWN: usize = 57;
const AT_STATE: usize = 16;
const AT_HAS_MISSED: usize = 17;
const AT_HAS_ROOM: usize = 18;
const AT_UNHEARD: usize = 20;
const AT_SEEN: usize = 24;

/// What a leg is to the mirror.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Standing {
    /// It has everything.
    Current,
    /// It was left behind: it lacks what was written since.
    Missing,
    /// It is being brought up to date.
    Rebuilding,
    /// It was taken out. Its place may be given away.
    Removed,
}

impl Standing {
    /// The name as people read it and as JSON has it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Standing::Current => "current",
            Standing::Missing => "missing",
            Standing::Rebuilding => "rebuilding",
            Standing::Removed => "removed",
        }
    }

    const ALL: [Standing; 4] = [Standing::Current, Standing::Missing, Standing::Rebuilding, Standing::Removed];
}

/// A leg as a label names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its identity, which no other leg of the mirror ever had.
    pub id: [u8; 16],
    /// What it is to the mirror.
    pub standing: Standing,
    /// It has room for a label, so a device without one is not this leg.
    pub has_room: bool,
    /// The regions it may lack; empty where it is current.
    pub missed: Regions,
    /// The generation of the last label that is known to be on it. With an earlier one it is an old image of itself.
    pub seen: u64,
    /// The generation of the last label that was sent to it, which may have reached it unheard.
    pub sent: u64,
}

/// What is noted on a leg.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The mirror's identity.
    pub uuid: [u8; 16],
    /// Counts the labels of the mirror; a label with a higher one was written later.
    pub generation: u64,
    /// Blocks of the mirror, and with them its regions.
    pub map: RegionMap,
    /// Blocks of the mirror.
    pub capacity_blocks: u64,
    /// Their size.
    pub block_size: BlockSize,
    /// Protection information of the mirror, which all legs have alike; nothing where they differ or have none.
    pub protection: Option<PiFormat>,
    /// Which of the members the leg is.
    pub own: usize,
    /// All legs.
    pub members: Vec<Member>,
    /// Regions in which the current legs may differ.
    pub dirty: Regions,
}

/// Why these bytes are no label that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LabelError {
    /// They are cut off, damaged, or no label at all.
    #[error("the mirror's label is damaged")]
    Damaged,
    /// Another version of the format.
    #[error("the mirror's label has version {0}; this program knows version 1")]
    Version(u64),
    /// A field has an impossible value.
    #[error("the {0} in the mirror's label cannot be")]
    Field(&'static str),
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + N].copy_from_slice(&value.to_le_bytes()[..N]);
}

impl Label {
    /// The bytes of the label.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<2>(&mut bytes, AT_VERSION, VERSION);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(&self.uuid);
        put::<8>(&mut bytes, AT_GENERATION, self.generation);
        put::<8>(&mut bytes, AT_CAPACITY, self.capacity_blocks);
        put::<4>(&mut bytes, AT_BLOCK_BYTES, self.block_size.bytes() as u64);
        put::<1>(&mut bytes, AT_REGION_SHIFT, u64::from(self.map.shift()));
        if let Some(format) = self.protection {
            put::<1>(&mut bytes, AT_GUARD, guard_code(format.guard()));
            put::<1>(&mut bytes, AT_TYPE, format.protection() as u64 + 1);
            put::<1>(&mut bytes, AT_STORAGE_TAG, u64::from(format.storage_tag_bits()));
        }
        put::<1>(&mut bytes, AT_MEMBERS, self.members.len() as u64);
        put::<1>(&mut bytes, AT_OWN, self.own as u64);
        for member in &self.members {
            let mut entry = [0; MEMBER_BYTES];
            entry[..16].copy_from_slice(&member.id);
            put::<1>(&mut entry, AT_STATE, member.standing as u64);
            put::<1>(&mut entry, AT_HAS_MISSED, u64::from(!member.missed.is_empty()));
            put::<1>(&mut entry, AT_HAS_ROOM, u64::from(member.has_room));
            put::<4>(&mut entry, AT_UNHEARD, member.sent.saturating_sub(member.seen).min(u64::from(u32::MAX)));
            put::<8>(&mut entry, AT_SEEN, member.seen);
            bytes.extend_from_slice(&entry);
        }
        bytes.extend_from_slice(&self.dirty.to_bytes());
        for member in self.members.iter().filter(|member| !member.missed.is_empty()) {
            bytes.extend_from_slice(&member.missed.to_bytes());
        }
        let checksum = guard::crc32c(&bytes[AT_UUID..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Reads a label, checking every field. No bytes are no label.
    ///
    /// # Errors
    /// When there is one that cannot be used.
    pub fn decode(bytes: &[u8]) -> Result<Option<Label>, LabelError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        if bytes.len() < HEAD_BYTES || !bytes.starts_with(&MAGIC) {
            return Err(LabelError::Damaged);
        }
        if get::<2>(bytes, AT_VERSION) != VERSION {
            return Err(LabelError::Version(get::<2>(bytes, AT_VERSION)));
        }
        if get::<4>(bytes, AT_CHECKSUM) != u64::from(guard::crc32c(&bytes[AT_UUID..])) {
            return Err(LabelError::Damaged);
        }
        let generation = generation_at(bytes, AT_GENERATION)?;
        let capacity_blocks = get::<8>(bytes, AT_CAPACITY);
        let map = RegionMap::with_shift(capacity_blocks, get::<1>(bytes, AT_REGION_SHIFT) as u32)
            .filter(|map| capacity_blocks <= 1 << 52 && map.count() > 0)
            .ok_or(LabelError::Field("capacity"))?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
        let (members, dirty) = decode_members(bytes, &map)?;
        let own = get::<1>(bytes, AT_OWN) as usize;
        if own >= members.len() {
            return Err(LabelError::Field("number of the leg"));
        }
        Ok(Some(Label {
            uuid,
            generation,
            map,
            capacity_blocks,
            block_size: BlockSize::from_bytes(get::<4>(bytes, AT_BLOCK_BYTES))
                .ok_or(LabelError::Field("block size"))?,
            protection: decode_protection(bytes)?,
            own,
            members,
            dirty,
        }))
    }
}

/// A generation; far from where counting on would begin anew.
fn generation_at(bytes: &[u8], at: usize) -> Result<u64, LabelError> {
    Some(get::<8>(bytes, at)).filter(|generation| *generation <= MOST_GENERATION).ok_or(LabelError::Field("generation"))
}

/// The legs and the regions in which they may differ.
fn decode_members(bytes: &[u8], map: &RegionMap) -> Result<(Vec<Member>, Regions), LabelError> {
    let count = get::<1>(bytes, AT_MEMBERS) as usize;
    if count == 0 || count > MOST_LEGS {
        return Err(LabelError::Field("number of legs"));
    }
    let entries = bytes.get(HEAD_BYTES..HEAD_BYTES + count * MEMBER_BYTES).ok_or(LabelError::Damaged)?;
    let mut rest = &bytes[HEAD_BYTES + entries.len()..];
    let mut take = || {
        let set = Regions::from_bytes(rest, map.count()).ok_or(LabelError::Field("regions"))?;
        rest = &rest[bytes_of(map.count())..];
        Ok(set)
    };
    let dirty = take()?;
    let mut members = Vec::with_capacity(count);
    for entry in entries.chunks_exact(MEMBER_BYTES) {
        let mut id = [0; 16];
        id.copy_from_slice(&entry[..16]);
        let standing = Standing::ALL.get(usize::from(entry[AT_STATE])).ok_or(LabelError::Field("state of a leg"))?;
        let missed = if entry[AT_HAS_MISSED] == 0 { Regions::none(map.count()) } else { take()? };
        let (has_room, seen) = (entry[AT_HAS_ROOM] != 0, generation_at(entry, AT_SEEN)?);
        let sent = seen + get::<4>(entry, AT_UNHEARD);
        members.push(Member { id, standing: *standing, has_room, missed, seen, sent });
    }
    Ok((members, dirty))
}

fn guard_code(kind: GuardKind) -> u64 {
    match kind {
        GuardKind::Crc16 => 1,
        GuardKind::Crc32c => 2,
        GuardKind::Crc64 => 3,
        GuardKind::IpChecksum => 4,
    }
}

fn decode_protection(bytes: &[u8]) -> Result<Option<PiFormat>, LabelError> {
    let guards = [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64, GuardKind::IpChecksum];
    let code = get::<1>(bytes, AT_GUARD);
    if code == 0 {
        return Ok(None);
    }
    let guard = guards.into_iter().find(|kind| guard_code(*kind) == code).ok_or(LabelError::Field("guard"))?;
    let kind = ProtectionType::ALL.into_iter().find(|kind| *kind as u64 + 1 == get::<1>(bytes, AT_TYPE));
    let kind = kind.ok_or(LabelError::Field("protection type"))?;
    let format = PiFormat::new(guard, kind, get::<1>(bytes, AT_STORAGE_TAG) as u8);
    format.map(Some).map_err(|_| LabelError::Field("storage tag size"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use sealblock_block::AnnexSlot;

    /// A label of `legs` current legs over 64 regions, as leg `own` has it.
    pub(crate) fn label(legs: usize, own: usize, generation: u64) -> Label {
        let map = RegionMap::new(BlockSize::B4096, 64 * 256);
        let none = Regions::none(map.count());
        let member = |at| Member {
            id: [at as u8 + 1; 16],
            standing: Standing::Current,
            has_room: true,
            missed: none.clone(),
            seen: 0,
            sent: 0,
        };
        Label {
            uuid: [9; 16],
            generation,
            map,
            capacity_blocks: 64 * 256,
            block_size: BlockSize::B4096,
            protection: Some(PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1)),
            own,
            members: (0..legs).map(member).collect(),
            dirty: none.clone(),
        }
    }

    #[test]
    fn a_label_comes_back_and_no_bit_may_change() {
        let mut good = label(3, 1, 77);
        good.dirty.insert(63);
        good.members[2].standing = Standing::Missing;
        good.members[2].missed.insert(5);
        (good.members[1].seen, good.members[1].sent) = (76, 77);
        let bytes = good.encode();
        assert_eq!(Label::decode(&bytes), Ok(Some(good)));
        assert_eq!(Label::decode(&[]), Ok(None));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // Bytes 10 and 11 are free for later and not looked at.
            assert!(Label::decode(&bad).is_err() || matches!(bit / 8, 10 | 11), "bit {bit}");
        }
        for length in 1..bytes.len() {
            assert!(Label::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn generations_that_leave_no_room_to_count_on_are_refused() {
        let highest = label(2, 0, MOST_GENERATION);
        assert_eq!(Label::decode(&highest.encode()), Ok(Some(highest.clone())));
        let beyond = Label { generation: MOST_GENERATION + 1, ..highest.clone() };
        let mut seen = highest;
        (seen.members[1].seen, seen.members[1].sent) = (u64::MAX, u64::MAX);
        for bad in [beyond, seen] {
            assert_eq!(Label::decode(&bad.encode()), Err(LabelError::Field("generation")));
        }
    }

    #[test]
    fn the_longest_label_fits_the_annex() {
        let map = RegionMap::new(BlockSize::B512, 1 << 40);
        let mut longest =
            Label { map, capacity_blocks: 1 << 40, block_size: BlockSize::B512, ..label(MOST_LEGS, 0, 1) };
        longest.dirty = Regions::all(map.count());
        longest.members.iter_mut().for_each(|member| member.missed = Regions::all(map.count()));
        assert!(longest.encode().len() <= AnnexSlot::Group.most_bytes());
        assert_eq!(Label::decode(&longest.encode()), Ok(Some(longest)));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), mend in any::<bool>()) {
            if mend && bytes.len() >= HEAD_BYTES {
                bytes[..8].copy_from_slice(&MAGIC);
                put::<2>(&mut bytes, AT_VERSION, VERSION);
                let checksum = guard::crc32c(&bytes[AT_UUID..]);
                put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
            }
            let _ = Label::decode(&bytes);
        }
    }
}
