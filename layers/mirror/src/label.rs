//! The label: mirror metadata on each replica, in its reserved area. Its format is in `docs/formats/mirror-label.md`.
//!
//! All bytes are untrusted until their checksum and ranges were checked.

pub mod assemble;
pub(crate) mod codec;
pub mod lineage;
pub mod name;
pub mod regions;
pub mod sets;

use sealblock_block::ReservedArea;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, guard};
use sealblock_units::BlockSize;

pub use crate::label::codec::LabelError;
use crate::label::codec::{LabelReader, VERSION, get, put, put_varint};
use crate::label::lineage::{Lineage, MAX_SESSIONS, SESSION_BYTES};
use crate::label::name::MirrorName;
use crate::label::regions::{RegionMap, Regions};
use crate::label::sets::{NoPages, Pages, encode_plain};

/// Most records of a mirror, those of removed replicas included until they are reused.
pub const MAX_REPLICAS: usize = 8;

/// Most sets of a mirror: dirty regions, and the out-of-sync regions of each replica.
pub const MAX_SETS: usize = 1 + MAX_REPLICAS;

/// Most stale blocks of all replicas of a mirror together.
pub const MAX_STALE_BLOCKS: usize = 2048;

/// Most bytes that the stale blocks of all replicas take in a label. Blocks that lie close together take one to three
/// bytes each.
pub const MAX_STALE_BYTES: usize = 6 << 10;

/// Highest event count of a label.
const MAX_EVENTS: u64 = 1 << 62;

const MAGIC: [u8; 8] = *b"SBMIRROR";
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
const AT_UNREPORTED_LOSS: usize = 61;
const AT_CHANGED: usize = 64;
const AT_NAME: usize = 72;
const AT_STATE: usize = 16;
const AT_HAS_ROOM: usize = 18;
const AT_IS_NEW: usize = 19;
const AT_STALE: usize = 20;
const AT_ACKED: usize = 24;
const AT_SENT: usize = 32;

/// State of a replica.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ReplicaState {
    /// It has all completed changes.
    InSync,
    /// It lacks changes, and no resync to it runs.
    OutOfSync,
    /// A resync to it runs.
    Resyncing,
    /// It was removed. A new replica may take its index.
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

/// Record of a replica in a label.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaRecord {
    /// Identity, which no other replica of the mirror ever had.
    pub id: [u8; 16],
    /// State of the replica.
    pub state: ReplicaState,
    /// It has room for a label, so a device without one is not this replica.
    pub has_room: bool,
    /// It never was in sync since it was added: except for resynced regions, its content is not the mirror's.
    pub is_new: bool,
    /// The regions that it may lack; empty if it is in sync.
    pub out_of_sync: Regions,
    /// LBAs in rising order of which it has only an older copy although it is in sync: every other in-sync replica
    /// had lost its copy at the resync. All replicas together have at most [`MAX_STALE_BLOCKS`]; see [`stale_fits`].
    pub stale: Vec<u64>,
    /// Event count of the last label that it acknowledged. With an earlier label it is an older image.
    pub acked_events: u64,
    /// Event count of the last label that was sent to it; it may have it without an acknowledgement.
    pub sent_events: u64,
}

/// True if a label has room for these lists of stale blocks.
pub fn stale_fits<'a>(lists: impl IntoIterator<Item = &'a [u64]>) -> bool {
    let (mut blocks, mut bytes) = (0, 0);
    for list in lists {
        blocks += list.len();
        bytes += stale_bytes(list).len();
    }
    blocks <= MAX_STALE_BLOCKS && bytes <= MAX_STALE_BYTES
}

/// Mirror metadata as one replica has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// Identity of the mirror.
    pub uuid: [u8; 16],
    /// Its name, if it has one.
    pub name: Option<MirrorName>,
    /// Event count: every label of the mirror has a higher one than those before.
    pub events: u64,
    /// Event count up to which the newest session was known before this label, if it is `tentative`.
    pub changed: u64,
    /// The last label before a change may have been in flight at a crash: nothing was changed after it unless all
    /// replicas that it calls in sync have it.
    pub is_tentative: bool,
    /// Completed but unflushed changes may be lost, and hosts do not know it yet. Programs that do not know the field
    /// drop it.
    pub unreported_loss: bool,
    /// The sessions that changed the mirror.
    pub lineage: Lineage,
    /// Regions of the mirror.
    pub map: RegionMap,
    /// Blocks of the mirror.
    pub capacity_blocks: u64,
    /// Block size of the mirror.
    pub block_size: BlockSize,
    /// Format of protection information of all replicas; `None` if they have none.
    pub protection: Option<PiFormat>,
    /// Index of the own record.
    pub own_index: usize,
    /// Records of all replicas.
    pub replicas: Vec<ReplicaRecord>,
    /// Regions in which in-sync replicas may differ.
    pub dirty: Regions,
}

/// Most bytes of each set of regions in a label with so many records. A bit for each of
/// [`crate::label::regions::MAX_REGIONS_IN_LABEL`] regions always fits.
pub const fn max_set_bytes(replicas: usize) -> usize {
    let rest = HEAD_BYTES + replicas * RECORD_BYTES + MAX_SESSIONS * SESSION_BYTES + MAX_STALE_BYTES;
    (ReservedArea::GroupLabel.max_bytes() - rest) / (1 + replicas)
}

impl Label {
    /// Encodes the label with all of its sets of regions, however long they are.
    pub fn encode(&self) -> Vec<u8> {
        let whole = |set| encode_plain(set, usize::MAX).expect("any set can be written without pages");
        self.encode_with(&self.sets().map(whole).collect::<Vec<_>>())
    }

    /// Encodes the label without bitmap pages, for a device whose pages nothing writes. A set that does not fit
    /// becomes all regions: then more is compared.
    pub fn encode_alone(&self) -> Vec<u8> {
        let max_bytes = max_set_bytes(self.replicas.len());
        let fit = |set: &Regions| {
            encode_plain(set, max_bytes).or_else(|| encode_plain(&Regions::all(set.capacity()), max_bytes))
        };
        self.encode_with(&self.sets().map(|set| fit(set).expect("all regions are one run")).collect::<Vec<_>>())
    }

    /// The sets of regions in the order of the format: dirty regions, and the out-of-sync regions of each replica.
    pub fn sets(&self) -> impl Iterator<Item = &Regions> {
        [&self.dirty].into_iter().chain(self.replicas.iter().map(|record| &record.out_of_sync))
    }

    /// Encodes the label with these encoded sets of regions.
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
        put::<1>(&mut bytes, AT_UNREPORTED_LOSS, u64::from(self.unreported_loss));
        put::<8>(&mut bytes, AT_CHANGED, self.changed);
        if let Some(name) = &self.name {
            bytes[AT_NAME..HEAD_BYTES].copy_from_slice(name.bytes());
        }
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

    /// Decodes a label and checks every field. Empty bytes are no label. A page that it refers to counts as all of
    /// its regions.
    ///
    /// # Errors
    /// When the bytes are no valid label.
    pub fn decode(bytes: &[u8]) -> Result<Option<Label>, LabelError> {
        Label::decode_with(bytes, &mut NoPages)
    }

    /// Decodes a label with the bitmap pages that it refers to.
    ///
    /// # Errors
    /// When the bytes are no valid label, whatever the pages hold.
    pub fn decode_with(bytes: &[u8], pages: &mut dyn Pages) -> Result<Option<Label>, LabelError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        if !bytes.starts_with(&MAGIC) {
            return Err(LabelError::Other(bytes.first_chunk().copied().unwrap_or_default()));
        }
        if bytes.len() < HEAD_BYTES {
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
        let name = MirrorName::from_bytes(&bytes[AT_NAME..HEAD_BYTES]).map_err(|_| LabelError::Field("name"))?;
        Ok(Some(Label {
            uuid,
            name,
            events,
            changed: events_at(bytes, AT_CHANGED)?,
            is_tentative: get::<1>(bytes, AT_TENTATIVE) != 0,
            unreported_loss: get::<1>(bytes, AT_UNREPORTED_LOSS) != 0,
            lineage,
            map,
            capacity_blocks,
            block_size,
            protection: decode_protection(bytes)?,
            own_index: own.ok_or(LabelError::Field("index of the replica"))?,
            replicas,
            dirty,
        }))
    }
}

/// An event count, far below where increments overflow.
fn events_at(bytes: &[u8], at: usize) -> Result<u64, LabelError> {
    Some(get::<8>(bytes, at)).filter(|events| *events <= MAX_EVENTS).ok_or(LabelError::Field("event count"))
}

/// Blocks in rising order, each as a varint of its distance from the one before.
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

/// The stale blocks of a replica in the format of labels.
fn stale_bytes(stale: &[u64]) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), 0);
    for lba in stale {
        put_varint(&mut bytes, lba.saturating_sub(next));
        next = lba + 1;
    }
    bytes
}

/// Lineage, records, and dirty regions.
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
    for (index, record) in replicas.iter_mut().enumerate() {
        record.out_of_sync = rest.set(1 + index, map.count(), &uuid, pages)?;
    }
    Ok((lineage, replicas, dirty))
}

/// A record, without its out-of-sync regions.
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
        return Err(LabelError::Field("event count"));
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
    use crate::label::regions::MAX_REGIONS_IN_LABEL;
    use proptest::prelude::*;

    /// A label of `replicas` in-sync replicas over 64 regions, as replica `own` has it.
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
            name: None,
            events,
            changed: 0,
            is_tentative: false,
            unreported_loss: false,
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
        (good.changed, good.is_tentative, good.unreported_loss) = (60, true, true);
        good.name = "photos".parse().ok();
        let bytes = good.encode();
        assert_eq!(Label::decode(&bytes), Ok(Some(good)));
        assert_eq!(Label::decode(&[]), Ok(None));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // Bytes 10 and 11 are reserved and ignored.
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
            assert_eq!(Label::decode(&bad.encode()), Err(LabelError::Field("event count")));
        }
    }

    #[test]
    fn the_longest_label_fits_its_reserved_area() {
        let map = RegionMap::new(BlockSize::B512, 1 << 40, MAX_REGIONS_IN_LABEL).unwrap();
        let mut longest =
            Label { map, capacity_blocks: 1 << 40, block_size: BlockSize::B512, ..label(MAX_REPLICAS, 0, 1) };
        longest.dirty = Regions::none(map.count());
        // No two adjacent regions, so that bits are the shortest form.
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
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), repair_checksum in any::<bool>()) {
            if repair_checksum && bytes.len() >= HEAD_BYTES {
                bytes[..8].copy_from_slice(&MAGIC);
                put::<2>(&mut bytes, AT_VERSION, VERSION);
                let checksum = guard::crc32c(&bytes[AT_UUID..]);
                put::<4>(&mut bytes, AT_CHECKSUM, u64::from(checksum));
            }
            let _ = Label::decode(&bytes);
        }
    }
}
