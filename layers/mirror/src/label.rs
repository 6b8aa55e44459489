//! The label: what a mirror notes beside the blocks of its replicas. Drawn in `docs/formats/mirror-label.md`.
//!
//! Everything read here is hostile until its checksum and its ranges have been checked.

use sealblock_block::ReservedArea;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, guard};
use sealblock_units::BlockSize;

use crate::lineage::{Lineage, MAX_SESSIONS, SESSION_BYTES};
use crate::regions::{RegionMap, Regions};
use crate::sets::{LabelReader, NoPages, Pages, encode_plain, put_varint};

/// Replicas of a mirror at most, those that are gone and not forgotten included.
pub const MAX_REPLICAS: usize = 8;

/// Stale blocks of all replicas of a mirror, at most.
pub const MAX_STALE_BLOCKS: usize = 2048;

/// Bytes that the stale blocks of all replicas take in a label, at most. Blocks that lie close together take one to three
/// bytes each.
pub const MAX_STALE_BYTES: usize = 6 << 10;

/// No label has a higher generation.
const MAX_EVENTS: u64 = 1 << 62;

const MAGIC: [u8; 8] = *b"SBMIRROR";
const VERSION: u64 = 2;
const HEAD_BYTES: usize = 96;
const RECORD_BYTES: usize = 48;

const AT_VERSION: usize = 8;
const AT_CHECKSUM: usize = 12;
const AT_UUID: usize = 16;
const AT_EVENTS: usize = 32;
const AT_CAPACITY: usize = 40;
const AT_BLOCK_BYTES: usize = 48;
const AT_REGION_SHIFT: usize = 52;
const AT_GUARD: usize = 53;
const AT_TYPE: usize = 54;
const AT_STORAGE_TAG: usize = 55;
const AT_REPLICAS: usize = 56;
const AT_OWN: usize = 57;
const AT_SESSIONS: usize = 58;
const AT_TENTATIVE: usize = 60;
const AT_CHANGED: usize = 64;
const AT_STATE: usize = 16;
const AT_HAS_ROOM: usize = 18;
const AT_IS_NEW: usize = 19;
const AT_STALE: usize = 20;
const AT_ACKED: usize = 24;
const AT_SENT: usize = 32;

/// What a replica is to the mirror.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReplicaState {
    /// It has everything.
    InSync,
    /// It was left behind: it lacks what was written since.
    OutOfSync,
    /// It is being brought up to date.
    Resyncing,
    /// It was taken out. Its place may be given away.
    Removed,
}

impl ReplicaState {
    /// The name in JSON; people read it with spaces.
    pub const fn as_str(self) -> &'static str {
        match self {
            ReplicaState::InSync => "in_sync",
            ReplicaState::OutOfSync => "out_of_sync",
            ReplicaState::Resyncing => "resyncing",
            ReplicaState::Removed => "removed",
        }
    }

    const ALL: [ReplicaState; 4] =
        [ReplicaState::InSync, ReplicaState::OutOfSync, ReplicaState::Resyncing, ReplicaState::Removed];
}

/// A replica as a label names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaRecord {
    /// Its identity, which no other replica of the mirror ever had.
    pub id: [u8; 16],
    /// What it is to the mirror.
    pub state: ReplicaState,
    /// It has room for a label, so a device without one is not this replica.
    pub has_room: bool,
    /// It was never in sync since it was made a replica: outside what was brought to it its content is not this mirror's.
    pub is_new: bool,
    /// The regions it may lack; empty where it is current.
    pub out_of_sync: Regions,
    /// Blocks (LBAs, rising) of which it holds only an older copy although it is current: every other current replica had lost
    /// its copy when it was brought up to date. All replicas together have at most [`MOST_STALE`]; see [`stale_fits`].
    pub stale: Vec<u64>,
    /// The generation of the last label that is known to be on it. With an earlier one it is an old image of itself.
    pub acked_events: u64,
    /// The generation of the last label that was sent to it, which may have reached it unheard.
    pub sent_events: u64,
}

/// Whether a label has room for these stale blocks of its replicas.
pub fn stale_fits<'a>(lists: impl IntoIterator<Item = &'a [u64]>) -> bool {
    let (mut blocks, mut bytes) = (0, 0);
    for list in lists {
        blocks += list.len();
        bytes += stale_bytes(list).len();
    }
    blocks <= MAX_STALE_BLOCKS && bytes <= MAX_STALE_BYTES
}

/// What is noted on a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The mirror's identity.
    pub uuid: [u8; 16],
    /// Counts the labels of the mirror; a label with a higher one was written later.
    pub events: u64,
    /// Where the label is `tentative`, how far its newest session was known to be before it.
    pub changed: u64,
    /// The last label that came before a change may have been under way when all stopped: nothing was changed after it
    /// unless all replicas that it calls current have got it, too.
    pub is_tentative: bool,
    /// The openings that have changed the mirror.
    pub lineage: Lineage,
    /// Blocks of the mirror, and with them its regions.
    pub map: RegionMap,
    /// Blocks of the mirror.
    pub capacity_blocks: u64,
    /// Their size.
    pub block_size: BlockSize,
    /// Protection information of the mirror, which all replicas have alike; nothing where they differ or have none.
    pub protection: Option<PiFormat>,
    /// Which of the members the replica is.
    pub own_index: usize,
    /// All replicas.
    pub replicas: Vec<ReplicaRecord>,
    /// Regions in which the current replicas may differ.
    pub dirty: Regions,
}

/// Why these bytes are no label that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LabelError {
    /// They are cut off, damaged, or no label at all.
    #[error("the mirror's label is damaged")]
    Damaged,
    /// Another version of the format.
    #[error("the mirror's label has version {0}; this program knows version {VERSION}")]
    Version(u64),
    /// A field has an impossible value.
    #[error("invalid {0} in the mirror's label")]
    Field(&'static str),
}

pub(crate) fn get<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

pub(crate) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + N].copy_from_slice(&value.to_le_bytes()[..N]);
}

/// The most that each set of regions takes in the label of a mirror with so many members, in bytes. A bit for each of
/// [`crate::regions::MOST_REGIONS_IN_LABEL`] always fits.
pub const fn max_set_bytes(replicas: usize) -> usize {
    let rest = HEAD_BYTES + replicas * RECORD_BYTES + MAX_SESSIONS * SESSION_BYTES + MAX_STALE_BYTES;
    (ReservedArea::GroupLabel.max_bytes() - rest) / (1 + replicas)
}

impl Label {
    /// The bytes of the label, with all of its sets of regions, however long they are.
    pub fn encode(&self) -> Vec<u8> {
        let whole = |set| encode_plain(set, usize::MAX).expect("any set can be written without pages");
        self.encode_with(&self.sets().map(whole).collect::<Vec<_>>())
    }

    /// The bytes of the label without any pages, for a device whose pages nobody writes. A set that does not fit becomes all
    /// regions: more is compared then.
    pub fn encode_alone(&self) -> Vec<u8> {
        let most_bytes = max_set_bytes(self.replicas.len());
        let fit = |set: &Regions| {
            encode_plain(set, most_bytes).or_else(|| encode_plain(&Regions::all(set.capacity()), most_bytes))
        };
        self.encode_with(&self.sets().map(|set| fit(set).expect("all regions are one run")).collect::<Vec<_>>())
    }

    /// The sets of regions in the order in which they are written: what is dirty, and what each member has missed.
    pub fn sets(&self) -> impl Iterator<Item = &Regions> {
        [&self.dirty].into_iter().chain(self.replicas.iter().map(|record| &record.out_of_sync))
    }

    /// The bytes of the label with its sets of regions written as these bytes.
    pub fn encode_with(&self, sets: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<2>(&mut bytes, AT_VERSION, VERSION);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(&self.uuid);
        put::<8>(&mut bytes, AT_EVENTS, self.events);
        put::<8>(&mut bytes, AT_CAPACITY, self.capacity_blocks);
        put::<4>(&mut bytes, AT_BLOCK_BYTES, self.block_size.bytes() as u64);
        put::<1>(&mut bytes, AT_REGION_SHIFT, u64::from(self.map.shift()));
        if let Some(format) = self.protection {
            put::<1>(&mut bytes, AT_GUARD, guard_code(format.guard()));
            put::<1>(&mut bytes, AT_TYPE, format.protection() as u64 + 1);
            put::<1>(&mut bytes, AT_STORAGE_TAG, u64::from(format.storage_tag_bits()));
        }
        put::<1>(&mut bytes, AT_REPLICAS, self.replicas.len() as u64);
        put::<1>(&mut bytes, AT_OWN, self.own_index as u64);
        put::<2>(&mut bytes, AT_SESSIONS, self.lineage.sessions().len() as u64);
        put::<1>(&mut bytes, AT_TENTATIVE, u64::from(self.is_tentative));
        put::<8>(&mut bytes, AT_CHANGED, self.changed);
        for record in &self.replicas {
            let mut entry = [0; RECORD_BYTES];
            entry[..16].copy_from_slice(&record.id);
            put::<1>(&mut entry, AT_STATE, record.state as u64);
            put::<1>(&mut entry, AT_HAS_ROOM, u64::from(record.has_room));
            put::<1>(&mut entry, AT_IS_NEW, u64::from(record.is_new));
            put::<2>(&mut entry, AT_STALE, record.stale.len() as u64);
            put::<8>(&mut entry, AT_ACKED, record.acked_events);
            put::<8>(&mut entry, AT_SENT, record.sent_events.max(record.acked_events));
            bytes.extend_from_slice(&entry);
        }
        bytes.extend_from_slice(&self.lineage.to_bytes());
        self.replicas.iter().for_each(|record| bytes.extend_from_slice(&stale_bytes(&record.stale)));
        sets.iter().for_each(|set| bytes.extend_from_slice(set));
        let checksum = guard::crc32c(&bytes[AT_UUID..]);
        put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
        bytes
    }

    /// Reads a label, checking every field. No bytes are no label. Pages that it refers to count as all of their regions.
    ///
    /// # Errors
    /// When there is one that cannot be used.
    pub fn decode(bytes: &[u8]) -> Result<Option<Label>, LabelError> {
        Label::decode_with(bytes, &mut NoPages)
    }

    /// The same with the pages that it refers to.
    ///
    /// # Errors
    /// When there is one that cannot be used, whatever is in the pages.
    pub fn decode_with(bytes: &[u8], pages: &mut dyn Pages) -> Result<Option<Label>, LabelError> {
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
        let events = events_at(bytes, AT_EVENTS)?;
        let capacity_blocks = get::<8>(bytes, AT_CAPACITY);
        let block_size =
            BlockSize::from_bytes(get::<4>(bytes, AT_BLOCK_BYTES)).ok_or(LabelError::Field("block size"))?;
        let map = RegionMap::with_shift(block_size, capacity_blocks, get::<1>(bytes, AT_REGION_SHIFT) as u32)
            .ok_or(LabelError::Field("capacity"))?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
        let (lineage, replicas, dirty) = decode_body(bytes, &map, capacity_blocks, pages)?;
        let own = Some(get::<1>(bytes, AT_OWN) as usize).filter(|own| *own < replicas.len());
        Ok(Some(Label {
            uuid,
            events,
            changed: events_at(bytes, AT_CHANGED)?,
            is_tentative: get::<1>(bytes, AT_TENTATIVE) != 0,
            lineage,
            map,
            capacity_blocks,
            block_size,
            protection: decode_protection(bytes)?,
            own_index: own.ok_or(LabelError::Field("number of the replica"))?,
            replicas,
            dirty,
        }))
    }
}

/// A generation; far from where counting on would begin anew.
fn events_at(bytes: &[u8], at: usize) -> Result<u64, LabelError> {
    Some(get::<8>(bytes, at)).filter(|events| *events <= MAX_EVENTS).ok_or(LabelError::Field("generation"))
}

/// Blocks in rising order, each as its distance from the one before, seven bits a byte.
fn decode_stale(rest: &mut LabelReader<'_>, count: usize, capacity_blocks: u64) -> Result<Vec<u64>, LabelError> {
    let mut stale = Vec::with_capacity(count);
    let mut next = 0_u64;
    for _ in 0..count {
        let lba = next + rest.varint("stale blocks")?;
        if lba >= capacity_blocks {
            return Err(LabelError::Field("stale blocks"));
        }
        stale.push(lba);
        next = lba + 1;
    }
    Ok(stale)
}

/// The stale blocks of a replica as a label has them.
fn stale_bytes(stale: &[u64]) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), 0);
    for lba in stale {
        put_varint(&mut bytes, lba.saturating_sub(next));
        next = lba + 1;
    }
    bytes
}

/// The lineage, the replicas, and the regions in which they may differ.
fn decode_body(
    bytes: &[u8],
    map: &RegionMap,
    capacity_blocks: u64,
    pages: &mut dyn Pages,
) -> Result<(Lineage, Vec<ReplicaRecord>, Regions), LabelError> {
    let count = get::<1>(bytes, AT_REPLICAS) as usize;
    if count == 0 || count > MAX_REPLICAS {
        return Err(LabelError::Field("number of replicas"));
    }
    let sessions = get::<2>(bytes, AT_SESSIONS) as usize;
    if sessions > MAX_SESSIONS {
        return Err(LabelError::Field("number of sessions"));
    }
    let mut rest = LabelReader(&bytes[HEAD_BYTES..]);
    let entries = rest.bytes(count * RECORD_BYTES)?;
    let lineage = Lineage::from_bytes(rest.bytes(sessions * SESSION_BYTES)?).ok_or(LabelError::Field("lineage"))?;
    let mut replicas = Vec::with_capacity(count);
    for entry in entries.chunks_exact(RECORD_BYTES) {
        replicas.push(decode_record(entry, &mut rest, map, capacity_blocks)?);
    }
    if !stale_fits(replicas.iter().map(|record| &record.stale[..])) {
        return Err(LabelError::Field("number of stale blocks"));
    }
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
    let dirty = rest.set(0, map.count(), &uuid, pages)?;
    for (place, record) in replicas.iter_mut().enumerate() {
        record.out_of_sync = rest.set(1 + place, map.count(), &uuid, pages)?;
    }
    Ok((lineage, replicas, dirty))
}

/// A replica, without the regions it has missed.
fn decode_record(
    entry: &[u8],
    rest: &mut LabelReader<'_>,
    map: &RegionMap,
    capacity_blocks: u64,
) -> Result<ReplicaRecord, LabelError> {
    let mut id = [0; 16];
    id.copy_from_slice(&entry[..16]);
    let state = *ReplicaState::ALL.get(usize::from(entry[AT_STATE])).ok_or(LabelError::Field("state of a replica"))?;
    let is_new = entry[AT_IS_NEW] != 0;
    if is_new && state == ReplicaState::InSync {
        return Err(LabelError::Field("state of a replica"));
    }
    let (acked_events, sent) = (events_at(entry, AT_ACKED)?, events_at(entry, AT_SENT)?);
    if sent < acked_events {
        return Err(LabelError::Field("generation"));
    }
    Ok(ReplicaRecord {
        id,
        state,
        has_room: entry[AT_HAS_ROOM] != 0,
        is_new,
        out_of_sync: Regions::none(map.count()),
        stale: decode_stale(rest, get::<2>(entry, AT_STALE) as usize, capacity_blocks)?,
        acked_events,
        sent_events: sent,
    })
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
    use crate::regions::MAX_REGIONS_IN_LABEL;
    use proptest::prelude::*;

    /// A label of `replicas` current replicas over 64 regions, as replica `own` has it.
    pub(crate) fn label(replicas: usize, own: usize, events: u64) -> Label {
        let map = RegionMap::with_shift(BlockSize::B4096, 64 * 256, 8).unwrap();
        let none = Regions::none(map.count());
        let record = |at| ReplicaRecord {
            id: [at as u8 + 1; 16],
            state: ReplicaState::InSync,
            has_room: true,
            is_new: false,
            out_of_sync: none.clone(),
            stale: Vec::new(),
            acked_events: 0,
            sent_events: 0,
        };
        Label {
            uuid: [9; 16],
            events,
            changed: 0,
            is_tentative: false,
            lineage: Lineage::default(),
            map,
            capacity_blocks: 64 * 256,
            block_size: BlockSize::B4096,
            protection: Some(PiFormat::with_default_storage_tag(GuardKind::Crc64, ProtectionType::Type1)),
            own_index: own,
            replicas: (0..replicas).map(record).collect(),
            dirty: none.clone(),
        }
    }

    #[test]
    fn a_label_comes_back_and_no_bit_may_change() {
        let mut good = label(3, 1, 77);
        good.dirty.insert(63);
        good.replicas[2].state = ReplicaState::OutOfSync;
        good.replicas[2].out_of_sync.insert(5);
        good.replicas[2].is_new = true;
        good.replicas[0].stale = vec![0, 1, 127, 256, 16_383];
        good.replicas[1].stale = vec![9000];
        (good.replicas[1].acked_events, good.replicas[1].sent_events) = (76, 77);
        good.lineage.begin(5, 70);
        good.lineage.confirm(71);
        good.lineage.begin(6, 77);
        (good.changed, good.is_tentative) = (60, true);
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
        let highest = label(2, 0, MAX_EVENTS);
        assert_eq!(Label::decode(&highest.encode()), Ok(Some(highest.clone())));
        let beyond = Label { events: MAX_EVENTS + 1, ..highest.clone() };
        let mut seen = highest;
        (seen.replicas[1].acked_events, seen.replicas[1].sent_events) = (u64::MAX, u64::MAX);
        for bad in [beyond, seen] {
            assert_eq!(Label::decode(&bad.encode()), Err(LabelError::Field("generation")));
        }
    }

    #[test]
    fn the_longest_label_fits_the_annex() {
        let map = RegionMap::new(BlockSize::B512, 1 << 40, MAX_REGIONS_IN_LABEL).unwrap();
        let mut longest =
            Label { map, capacity_blocks: 1 << 40, block_size: BlockSize::B512, ..label(MAX_REPLICAS, 0, 1) };
        longest.dirty = Regions::none(map.count());
        // Nothing in a row, so that bits are the shortest.
        (0..map.count()).step_by(2).for_each(|region| assert!(longest.dirty.insert(region)));
        let dirty = longest.dirty.clone();
        longest.replicas.iter_mut().for_each(|record| record.out_of_sync = dirty.clone());
        (0..300).for_each(|id| longest.lineage.begin(id, id));
        // As far apart as blocks of a large device can be.
        longest.replicas[7].stale = (0..1024).map(|at| at << 30).collect();
        assert!(stale_fits([&longest.replicas[7].stale[..]]));
        assert!(longest.encode().len() <= ReservedArea::GroupLabel.max_bytes());
        assert!(encode_plain(&longest.dirty, max_set_bytes(MAX_REPLICAS)).is_some());
        assert_eq!(Label::decode(&longest.encode()), Ok(Some(longest)));
    }

    #[test]
    fn more_stale_blocks_than_fit_are_refused() {
        let mut label = Label { capacity_blocks: 1 << 22, ..label(2, 0, 1) };
        label.map = RegionMap::new(BlockSize::B4096, 1 << 22, MAX_REGIONS_IN_LABEL).unwrap();
        label.dirty = Regions::none(label.map.count());
        label.replicas.iter_mut().for_each(|record| record.out_of_sync = label.dirty.clone());
        label.replicas[0].stale = (0..MAX_STALE_BLOCKS as u64).collect();
        assert_eq!(Label::decode(&label.encode()), Ok(Some(label.clone())));
        label.replicas[1].stale = vec![9];
        assert_eq!(Label::decode(&label.encode()), Err(LabelError::Field("number of stale blocks")));
        label.replicas[0].stale.clear();
        label.replicas[1].stale = vec![1 << 22];
        assert_eq!(Label::decode(&label.encode()), Err(LabelError::Field("stale blocks")));
        let sparse: Vec<u64> = (0..1000).map(|at| at << 43).collect();
        assert!(!stale_fits([&sparse[..]]), "they would take 7,000 bytes");
    }

    #[test]
    fn a_replica_that_is_current_is_not_new() {
        let mut label = label(2, 0, 1);
        label.replicas[1].is_new = true;
        assert_eq!(Label::decode(&label.encode()), Err(LabelError::Field("state of a replica")));
    }

    proptest! {
        #[test]
        fn stale_blocks_and_sessions_come_back(
            stale in proptest::collection::btree_set(0_u64..64 * 256, 0..200),
            sessions in proptest::collection::vec((any::<u64>(), any::<bool>()), 0..300),
        ) {
            let mut label = label(3, 2, 9);
            label.replicas[1].stale = stale.into_iter().collect();
            for (id, is_confirmed) in sessions {
                label.lineage.begin(id, 5);
                if is_confirmed {
                    label.lineage.confirm(6);
                }
            }
            prop_assert_eq!(Label::decode(&label.encode()), Ok(Some(label)));
        }

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
