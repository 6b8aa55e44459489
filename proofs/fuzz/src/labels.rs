//! Labels of mirrors and stripes.

use sealblock_layers_mirror::label::assemble::{Assembly, ReplicaProbe, assemble};
use sealblock_layers_mirror::label::{Label, ReplicaRecord, ReplicaState};
use sealblock_layers_mirror::label::lineage::Lineage;
use sealblock_layers_mirror::label::regions::{RegionMap, Regions};
use sealblock_layers_stripe::label::{Label as StripeLabel, MAX_MEMBERS};
use sealblock_units::{BlockSize, ByteCount};

use crate::{Pieces, forge_label, forge_stripe_label};

/// Labels of mirrors: any bytes are refused, or decode to a value that encodes and decodes to itself; any set of labels
/// is assembled or refused.
pub fn try_mirror_label(input: &[u8]) {
    check_mirror_label(input);
    let mut pieces = Pieces::new(input);
    let count = usize::from(pieces.byte() % 4) + 1;
    let labels = (0..count).filter_map(|own| {
        let bytes = changed(&mut pieces, own);
        check_mirror_label(&bytes)
    });
    let mut found: Vec<ReplicaProbe> = labels.map(|label| ReplicaProbe::Labelled(Box::new(label))).collect();
    if let (0, Some(first)) = (pieces.byte() % 4, found.first_mut())
        && let Some(label) = first.label().cloned()
    {
        *first = ReplicaProbe::Unfit(Box::new(label));
    }
    match pieces.byte() % 4 {
        0 => found.push(ReplicaProbe::Absent),
        1 => found.push(ReplicaProbe::Unlabelled { has_room: pieces.byte() & 1 == 1 }),
        _ => {}
    }
    if let Ok(Assembly::Known(known)) = assemble(&found) {
        assert_eq!(known.indices.len(), found.len());
        let in_sync = |at: &usize| known.label.replicas[*at].state == ReplicaState::InSync;
        assert!(known.indices.iter().any(in_sync), "a mirror has a replica that is in sync");
        let authority = known.indices.iter().position(|at| *at == known.label.own_index);
        assert!(authority.is_some_and(|at| matches!(found[at], ReplicaProbe::Labelled(_))), "its device is used");
    }
}

/// A valid label of three replicas with some bytes changed, and its checksum updated.
fn changed(pieces: &mut Pieces, own: usize) -> Vec<u8> {
    let map = RegionMap::with_shift(BlockSize::B4096, 64 * 256, 8).expect("64 regions");
    let replica = |at: usize, pieces: &mut Pieces| ReplicaRecord {
        id: [at as u8 + 1; 16],
        state: [ReplicaState::InSync, ReplicaState::InSync, ReplicaState::OutOfSync, ReplicaState::Resyncing]
            [usize::from(pieces.byte() % 4)],
        has_room: true,
        is_new: false,
        stale: (0..u64::from(pieces.byte() % 4)).map(|at| at * 300).collect(),
        out_of_sync: Regions::none(map.count()),
        acked_events: u64::from(pieces.byte()),
        sent_events: u64::from(pieces.byte()),
    };
    let lineage = lineage(pieces);
    let label = Label {
        uuid: [9; 16],
        name: None,
        events: u64::from(pieces.byte()),
        changed: u64::from(pieces.byte()),
        is_tentative: pieces.byte() & 1 == 1,
        unreported_loss: pieces.byte() & 1 == 1,
        lineage,
        map,
        capacity_blocks: 64 * 256,
        block_size: BlockSize::B4096,
        protection: None,
        own_index: own % 3,
        replicas: (0..3).map(|at| replica(at, pieces)).collect(),
        dirty: Regions::none(map.count()),
    };
    let mut bytes = label.encode();
    for _ in 0..pieces.byte() % 4 {
        let at = usize::from(pieces.short()) % bytes.len();
        bytes[at] = pieces.byte();
    }
    forge_label(&mut bytes);
    bytes
}

/// Up to three sessions, some with the same identity.
fn lineage(pieces: &mut Pieces) -> Lineage {
    let mut lineage = Lineage::default();
    for _ in 0..pieces.byte() % 4 {
        let generation = u64::from(pieces.byte());
        lineage.begin(u64::from(pieces.byte() % 8), generation);
        if pieces.byte() % 4 > 0 {
            lineage.confirm(generation + 1);
        }
    }
    lineage
}

fn check_mirror_label(bytes: &[u8]) -> Option<Label> {
    let label = Label::decode(bytes).ok().flatten()?;
    assert_eq!(Label::decode(&label.encode()), Ok(Some(label.clone())));
    Some(label)
}

/// Labels of stripes: any bytes are refused, count as no label, or decode to a value that encodes and decodes to
/// itself.
pub fn try_stripe_label(input: &[u8]) {
    check_stripe_label(input);
    // A valid label with some bytes changed, and its checksum updated.
    let mut pieces = Pieces::new(input);
    let members = usize::from(pieces.byte()) % MAX_MEMBERS + 1;
    let label = StripeLabel {
        uuid: [7; 16],
        members,
        own_index: usize::from(pieces.byte()) % members,
        chunk: ByteCount::new(4096 << (pieces.byte() % 20)),
        capacity_blocks: pieces.word(),
        block_size: BlockSize::B4096,
        group_label: vec![1; usize::from(pieces.byte())],
        group_seq: pieces.word(),
    };
    let mut bytes = label.encode();
    assert_eq!(StripeLabel::decode(&bytes), Ok(Some(label)));
    while !pieces.is_empty() {
        let at = usize::from(pieces.short()) % bytes.len();
        bytes[at] = pieces.byte();
    }
    forge_stripe_label(&mut bytes);
    check_stripe_label(&bytes);
}

fn check_stripe_label(bytes: &[u8]) {
    if let Ok(Some(label)) = StripeLabel::decode(bytes) {
        assert!(label.own_index < label.members && label.members <= MAX_MEMBERS);
        assert_eq!(StripeLabel::decode(&label.encode()), Ok(Some(label)));
    }
}
