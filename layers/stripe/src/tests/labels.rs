//! Stripes are put together again as they were made, or not at all.

use sealblock_block::ReservedArea;

use super::*;
use crate::Refusal;
use crate::label::Label;

const UUID: [u8; 16] = [7; 16];

fn plain(blocks: u64) -> Below {
    leg(blocks, None)
}

fn opened(legs: &[&Below], chunk_blocks: u64, writable: bool) -> Result<Gate<StripeLayer<Below>>, Refusal> {
    identified(legs, chunk_blocks, UUID, writable)
}

fn identified(
    legs: &[&Below],
    chunk_blocks: u64,
    uuid: [u8; 16],
    writable: bool,
) -> Result<Gate<StripeLayer<Below>>, Refusal> {
    let legs = legs.iter().map(|leg| Rc::clone(leg)).collect();
    let layer = StripeLayer::new(legs, ByteCount::new(chunk_blocks * 512)).unwrap();
    let layer = layer.labelled(uuid, writable).now_or_never().expect("RAM never waits")?;
    Ok(Gate::new("stripe", layer))
}

fn refused(legs: &[&Below], chunk_blocks: u64) -> Refusal {
    opened(legs, chunk_blocks, true).err().expect("it is refused")
}

fn slot(device: &impl Device) -> Slice {
    match run(device, Request::ReadReserved { slot: ReservedArea::GroupLabel }) {
        Ok(Response::Reserved(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

fn put_slot(device: &impl Device, bytes: &[u8]) {
    let write = Request::WriteReserved { slot: ReservedArea::GroupLabel, bytes: Slice::copy_from(bytes) };
    assert!(matches!(run(device, write), Ok(Response::Done)));
}

#[test]
fn a_new_stripe_is_labelled_and_opens_only_as_it_was_made() {
    let (a, b, c) = (plain(64), plain(64), plain(64));
    let stripe = opened(&[&a, &b, &c], 4, true).unwrap();
    write(&stripe, extent(0, 192), 9);
    for (own, leg) in [&a, &b, &c].into_iter().enumerate() {
        let label = Label::decode(&slot(leg)).unwrap().unwrap();
        assert_eq!((label.uuid, label.members, label.own, label.chunk.get()), (UUID, 3, own, 2048));
    }
    assert!(identified(&[&a, &b, &c], 4, [8; 16], true).is_ok(), "an old stripe keeps its identity");
    assert!(opened(&[&a, &b, &c], 4, false).is_ok());
    assert_eq!(Label::decode(&slot(&a)).unwrap().unwrap().uuid, UUID);
    assert_eq!(refused(&[&b, &a, &c], 4), Refusal::Order(vec![1, 0, 2]));
    assert_eq!(refused(&[&a, &b, &b], 4), Refusal::Order(vec![0, 1, 1]));
    assert_eq!(refused(&[&a, &b], 4), Refusal::Count { members: 3, given: 2 });
    assert_eq!(refused(&[&a, &b, &c, &plain(64)], 4), Refusal::Count { members: 3, given: 4 });
    let chunks = Refusal::Chunk { there: ByteCount::new(2048), asked: ByteCount::new(4096) };
    assert_eq!(refused(&[&a, &b, &c], 8), chunks);
    assert_eq!(refused(&[&a, &plain(64), &c], 4), Refusal::Stranger(1));
    // Reading goes by the same rules.
    assert_eq!(opened(&[&c, &b, &a], 4, false).err(), Some(Refusal::Order(vec![2, 1, 0])));
}

#[test]
fn members_of_other_groups_are_refused() {
    let (a, b, other, third) = (plain(64), plain(64), plain(64), plain(64));
    opened(&[&a, &b], 4, true).unwrap();
    identified(&[&other, &third], 4, [9; 16], true).unwrap();
    assert_eq!(refused(&[&a, &third], 4), Refusal::Foreign { member: 1, first: 0 });
    put_slot(&other, b"SBMIRROR and what else a mirror notes");
    assert_eq!(refused(&[&other, &b], 4), Refusal::OtherGroup(0));
    let mut damaged = slot(&b).to_vec();
    damaged[20] ^= 1;
    put_slot(&b, &damaged);
    assert!(matches!(refused(&[&a, &b], 4), Refusal::Label { member: 1, .. }));
}

#[test]
fn devices_that_hold_something_are_not_labelled() {
    let (a, b) = (plain(64), plain(64));
    write(&b, extent(5, 1), 3);
    assert_eq!(refused(&[&a, &b], 4), Refusal::Unlabelled(vec![0, 1]));
    assert!(slot(&a).is_empty() && slot(&b).is_empty());
    // Nothing is written by who only looks, labelled or not.
    let (a, b) = (plain(64), plain(64));
    opened(&[&a, &b], 4, false).unwrap();
    assert!(slot(&a).is_empty() && slot(&b).is_empty());
}

#[test]
fn a_first_labelling_that_was_cut_short_is_finished_only_while_all_are_blank() {
    for done in 1..3 {
        let members = [plain(64), plain(64), plain(64)];
        let all: Vec<&Below> = members.iter().collect();
        opened(&all, 4, true).unwrap();
        members[done..].iter().for_each(|member| put_slot(member, b""));
        assert!(identified(&all, 4, [8; 16], true).is_ok());
        let uuid = |member| Label::decode(&slot(member)).unwrap().unwrap().uuid;
        assert!(members.iter().all(|member| uuid(member) == UUID), "{done} were labelled");
        members[done..].iter().for_each(|member| put_slot(member, b""));
        write(&members[0], extent(0, 1), 3);
        assert_eq!(refused(&all, 4), Refusal::Stranger(done));
    }
}

#[test]
fn notes_of_a_group_above_are_kept_beside_the_label() {
    let (a, b) = (plain(64), plain(64));
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    assert!(slot(&stripe).is_empty());
    put_slot(&stripe, b"a mirror's notes");
    assert_eq!(slot(&stripe)[..], b"a mirror's notes"[..]);
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    assert_eq!(slot(&stripe)[..], b"a mirror's notes"[..], "an opening changes nothing of them");
    // A stripe of stripes has labels of both.
    let (c, d) = (plain(64), plain(64));
    let two = [Rc::new(stripe), Rc::new(opened(&[&c, &d], 4, true).unwrap())];
    put_slot(&two[0], b"");
    let make = |legs: [usize; 2]| {
        let legs = legs.map(|leg| Rc::clone(&two[leg])).to_vec();
        let layer = StripeLayer::new(legs, ByteCount::new(2048)).unwrap();
        layer.labelled([3; 16], true).now_or_never().expect("RAM never waits").map(drop)
    };
    assert_eq!((make([0, 1]), make([1, 0])), (Ok(()), Err(Refusal::Order(vec![1, 0]))));
    assert!(opened(&[&a, &b], 4, true).is_ok());
}
