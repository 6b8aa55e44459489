//! The label: a record in the reserved area of each member. `docs/formats/stripe-label.md` shows its layout.
//!
//! The order of the members and the chunk size determine where each block is, but the members verify clean in any
//! order. So the label contains both, and an open with other values is refused. The label uses
//! [`ReservedArea::GroupLabel`], so a member of a stripe cannot be a member of a mirror at the same time. If the stripe
//! is itself a member of a group, the label of that group follows the header of the first member's label.
//!
//! Every byte read here is untrusted until its checksum and its ranges have been checked.

use sealblock_block::ReservedArea;
use sealblock_integrity::guard;
use sealblock_units::little_endian::{get, put};
use sealblock_units::{BlockSize, ByteCount};

/// The maximum number of members of a stripe.
pub const MAX_MEMBERS: usize = 64;
/// Bytes of a label without the group label that may follow it.
pub const HEAD_BYTES: usize = 64;

/// The first bytes of a label.
pub const MAGIC: [u8; 8] = *b"SBSTRIPE";
const VERSION: u64 = 1;
const AT_VERSION: usize = 8;
const AT_MEMBERS: usize = 10;
const AT_OWN: usize = 11;
const AT_CHECKSUM: usize = 12;
const AT_UUID: usize = 16;
const AT_CHUNK: usize = 32;
const AT_CAPACITY: usize = 40;
const AT_BLOCK_BYTES: usize = 48;
const AT_LENGTH: usize = 52;
const AT_GROUP_SEQ: usize = 56;

/// The label of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label {
    /// The stripe's identity.
    pub uuid: [u8; 16],
    /// The number of members.
    pub members: usize,
    /// The index of this member, from 0: the order of the chunks.
    pub own_index: usize,
    /// Bytes of a chunk.
    pub chunk: ByteCount,
    /// Blocks of the whole stripe.
    pub capacity_blocks: u64,
    /// Size of a block.
    pub block_size: BlockSize,
    /// The label of a group that the stripe is a member of; empty on every member but the first.
    pub group_label: Vec<u8>,
    /// The number of writes of that group's label, on all members. A member with a lower number than the first one was
    /// restored from an earlier state.
    pub group_seq: u64,
}

/// Why these bytes are not a usable label.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LabelError {
    /// They are truncated or damaged.
    #[error("the stripe's label is damaged")]
    Damaged,
    /// Another version of the format.
    #[error("the stripe's label has version {0}; this program knows version 1")]
    Version(u64),
    /// A field has an invalid value.
    #[error("invalid {0} in the stripe's label")]
    Field(&'static str),
}

impl Label {
    /// Encodes the label.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        put::<2>(&mut bytes, AT_VERSION, VERSION);
        put::<1>(&mut bytes, AT_MEMBERS, self.members as u64);
        put::<1>(&mut bytes, AT_OWN, self.own_index as u64);
        bytes[AT_UUID..AT_UUID + 16].copy_from_slice(&self.uuid);
        put::<8>(&mut bytes, AT_CHUNK, self.chunk.get());
        put::<8>(&mut bytes, AT_CAPACITY, self.capacity_blocks);
        put::<4>(&mut bytes, AT_BLOCK_BYTES, self.block_size.bytes() as u64);
        put::<4>(&mut bytes, AT_LENGTH, self.group_label.len() as u64);
        put::<8>(&mut bytes, AT_GROUP_SEQ, self.group_seq);
        bytes.extend_from_slice(&self.group_label);
        let checksum = checksum(&bytes);
        put::<4>(&mut bytes, AT_CHECKSUM, checksum);
        bytes
    }

    /// Decodes a label and checks every field. `None` for bytes that are not the label of a stripe.
    ///
    /// # Errors
    /// When it is a label, but damaged or of an unknown version.
    pub fn decode(bytes: &[u8]) -> Result<Option<Label>, LabelError> {
        if !bytes.starts_with(&MAGIC) {
            return Ok(None);
        }
        if bytes.len() < HEAD_BYTES {
            return Err(LabelError::Damaged);
        }
        let version = get::<2>(bytes, AT_VERSION);
        if version != VERSION {
            return Err(LabelError::Version(version));
        }
        if get::<4>(bytes, AT_CHECKSUM) != checksum(bytes) {
            return Err(LabelError::Damaged);
        }
        let (members, own_index) = (get::<1>(bytes, AT_MEMBERS) as usize, get::<1>(bytes, AT_OWN) as usize);
        if !(1..=MAX_MEMBERS).contains(&members) {
            return Err(LabelError::Field("number of members"));
        }
        if own_index >= members {
            return Err(LabelError::Field("number of the member"));
        }
        let block_size =
            BlockSize::from_bytes(get::<4>(bytes, AT_BLOCK_BYTES)).ok_or(LabelError::Field("block size"))?;
        let chunk = get::<8>(bytes, AT_CHUNK);
        if chunk < block_size.bytes() as u64 || !chunk.is_power_of_two() {
            return Err(LabelError::Field("size of chunks"));
        }
        let group_label = &bytes[HEAD_BYTES..];
        if get::<4>(bytes, AT_LENGTH) != group_label.len() as u64 || bytes.len() > ReservedArea::GroupLabel.max_bytes()
        {
            return Err(LabelError::Field("length"));
        }
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[AT_UUID..AT_UUID + 16]);
        let capacity_blocks = get::<8>(bytes, AT_CAPACITY);
        let (chunk, group_label) = (ByteCount::new(chunk), group_label.to_vec());
        let group_seq = get::<8>(bytes, AT_GROUP_SEQ);
        Ok(Some(Label { uuid, members, own_index, chunk, capacity_blocks, block_size, group_label, group_seq }))
    }

    /// True if two members' labels describe the same stripe.
    pub(crate) fn agrees(&self, other: &Label) -> bool {
        let of = |label: &Label| (label.uuid, label.members, label.chunk, label.capacity_blocks, label.block_size);
        of(self) == of(other)
    }
}

/// The checksum of all bytes except its own.
fn checksum(bytes: &[u8]) -> u64 {
    let head = guard::crc32c(&bytes[..AT_CHECKSUM]);
    u64::from(head ^ guard::crc32c(&bytes[AT_UUID..]).rotate_left(1))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn label() -> Label {
        Label {
            uuid: [5; 16],
            members: 3,
            own_index: 1,
            chunk: ByteCount::new(64 << 10),
            capacity_blocks: 3 << 20,
            block_size: BlockSize::B4096,
            group_label: b"a mirror's notes".to_vec(),
            group_seq: 12,
        }
    }

    #[test]
    fn a_label_comes_back_and_no_bit_may_change() {
        let bytes = label().encode();
        assert_eq!(Label::decode(&bytes), Ok(Some(label())));
        assert_eq!((Label::decode(&[]), Label::decode(b"SBMIRROR and more")), (Ok(None), Ok(None)));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // Without its magic it is not the label of a stripe.
            assert_eq!(Label::decode(&bad).is_err(), bit / 8 >= MAGIC.len(), "bit {bit}");
        }
        for length in MAGIC.len()..bytes.len() {
            assert!(Label::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn invalid_fields_are_refused_by_name() {
        let refused = |label: Label| Label::decode(&label.encode());
        let field = |name| Err(LabelError::Field(name));
        assert_eq!(refused(Label { members: 0, ..label() }), field("number of members"));
        assert_eq!(refused(Label { members: MAX_MEMBERS + 1, ..label() }), field("number of members"));
        assert_eq!(refused(Label { own_index: 3, ..label() }), field("number of the member"));
        for chunk in [0, 512, 4097, 12 << 10] {
            assert_eq!(refused(Label { chunk: ByteCount::new(chunk), ..label() }), field("size of chunks"), "{chunk}");
        }
        let room = ReservedArea::GroupLabel.max_bytes() - HEAD_BYTES;
        let full = Label { group_label: vec![1; room], members: MAX_MEMBERS, own_index: MAX_MEMBERS - 1, ..label() };
        assert_eq!(refused(full.clone()), Ok(Some(full)));
        assert_eq!(refused(Label { group_label: vec![1; room + 1], ..label() }), field("length"));
    }

    proptest! {
        #[test]
        fn any_label_comes_back(
            uuid: [u8; 16],
            members in 1..=MAX_MEMBERS,
            own_index: usize,
            shift in 12u32..63,
            capacity: u64,
            group_seq: u64,
        ) {
            let (own_index, chunk) = (own_index % members, ByteCount::new(1 << shift));
            let label = Label { uuid, members, own_index, chunk, capacity_blocks: capacity, group_seq, ..label() };
            prop_assert_eq!(Label::decode(&label.encode()), Ok(Some(label)));
        }

        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), repair in any::<bool>()) {
            if repair && bytes.len() >= HEAD_BYTES {
                bytes[..8].copy_from_slice(&MAGIC);
                put::<2>(&mut bytes, AT_VERSION, VERSION);
                let sum = checksum(&bytes);
                put::<4>(&mut bytes, AT_CHECKSUM, sum);
            }
            let _ = Label::decode(&bytes);
        }
    }
}
