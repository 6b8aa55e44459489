//! Stripes are assembled as they were created, or refused.

use sealblock_block::{Freshness, Request, ReservedArea, WhyOlder};

use super::*;
use crate::AssembleError;
use crate::label::Label;

const UUID: [u8; 16] = [7; 16];

fn plain(blocks: u64) -> Member {
    member(blocks, None)
}

fn opened(members: &[&Member], chunk_blocks: u64, writable: bool) -> Result<Gate<StripeLayer<Member>>, AssembleError> {
    assembled(members, chunk_blocks, UUID, writable)
}

fn assembled(
    members: &[&Member],
    chunk_blocks: u64,
    uuid: [u8; 16],
    writable: bool,
) -> Result<Gate<StripeLayer<Member>>, AssembleError> {
    let members = members.iter().map(|member| Rc::clone(member)).collect();
    let layer = StripeLayer::new(members, ByteCount::new(chunk_blocks * 512)).unwrap();
    let layer = layer.labelled(uuid, writable).now_or_never().expect("RAM never waits")?;
    Ok(Gate::new("stripe", layer))
}

fn refusal(members: &[&Member], chunk_blocks: u64) -> AssembleError {
    opened(members, chunk_blocks, true).err().expect("it is refused")
}

fn group_label(device: &impl Device) -> Slice {
    match run(device, Request::read_reserved(ReservedArea::GroupLabel)) {
        Ok(Response::Reserved(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

fn put_group_label(device: &impl Device, bytes: &[u8]) {
    let write = Request::write_reserved(ReservedArea::GroupLabel, Slice::copy_from(bytes));
    assert!(matches!(run(device, write), Ok(Response::Done)));
}

#[test]
fn a_new_stripe_is_labelled_and_opens_only_as_it_was_made() {
    let (a, b, c) = (plain(64), plain(64), plain(64));
    let stripe = opened(&[&a, &b, &c], 4, true).unwrap();
    write(&stripe, extent(0, 192), 9);
    for (own_index, member) in [&a, &b, &c].into_iter().enumerate() {
        let label = Label::decode(&group_label(member)).unwrap().unwrap();
        assert_eq!((label.uuid, label.members, label.own_index, label.chunk.get()), (UUID, 3, own_index, 2048));
    }
    assert!(assembled(&[&a, &b, &c], 4, [8; 16], true).is_ok(), "an old stripe keeps its identity");
    assert!(opened(&[&a, &b, &c], 4, false).is_ok());
    assert_eq!(Label::decode(&group_label(&a)).unwrap().unwrap().uuid, UUID);
    assert_eq!(refusal(&[&b, &a, &c], 4), AssembleError::Order(vec![1, 0, 2]));
    assert_eq!(refusal(&[&a, &b, &b], 4), AssembleError::Order(vec![0, 1, 1]));
    assert_eq!(refusal(&[&a, &b], 4), AssembleError::Count { members: 3, given: 2 });
    assert_eq!(refusal(&[&a, &b, &c, &plain(64)], 4), AssembleError::Count { members: 3, given: 4 });
    let chunks = AssembleError::Chunk { actual: ByteCount::new(2048), expected: ByteCount::new(4096) };
    assert_eq!(refusal(&[&a, &b, &c], 8), chunks);
    assert_eq!(refusal(&[&a, &plain(64), &c], 4), AssembleError::NoLabel(1));
    // A read-only open follows the same rules.
    assert_eq!(opened(&[&c, &b, &a], 4, false).err(), Some(AssembleError::Order(vec![2, 1, 0])));
}

#[test]
fn members_of_other_groups_are_refused() {
    let (a, b, other, third) = (plain(64), plain(64), plain(64), plain(64));
    opened(&[&a, &b], 4, true).unwrap();
    assembled(&[&other, &third], 4, [9; 16], true).unwrap();
    assert_eq!(refusal(&[&a, &third], 4), AssembleError::Foreign { member: 1, first: 0 });
    put_group_label(&other, b"SBMIRROR and what else a mirror notes");
    assert_eq!(refusal(&[&other, &b], 4), AssembleError::OtherGroup(0));
    let mut damaged = group_label(&b).to_vec();
    damaged[20] ^= 1;
    put_group_label(&b, &damaged);
    assert!(matches!(refusal(&[&a, &b], 4), AssembleError::Label { member: 1, .. }));
}

#[test]
fn devices_that_hold_data_are_not_labelled() {
    let (a, b) = (plain(64), plain(64));
    write(&b, extent(5, 1), 3);
    assert_eq!(refusal(&[&a, &b], 4), AssembleError::Unlabelled(vec![0, 1]));
    assert!(group_label(&a).is_empty() && group_label(&b).is_empty());
    // A read-only open writes nothing, with or without labels.
    let (a, b) = (plain(64), plain(64));
    opened(&[&a, &b], 4, false).unwrap();
    assert!(group_label(&a).is_empty() && group_label(&b).is_empty());
}

#[test]
fn an_interrupted_labelling_is_finished_only_while_all_members_are_blank() {
    for done in 1..3 {
        let members = [plain(64), plain(64), plain(64)];
        let all: Vec<&Member> = members.iter().collect();
        opened(&all, 4, true).unwrap();
        members[done..].iter().for_each(|member| put_group_label(member, b""));
        assert!(assembled(&all, 4, [8; 16], true).is_ok());
        let uuid = |member| Label::decode(&group_label(member)).unwrap().unwrap().uuid;
        assert!(members.iter().all(|member| uuid(member) == UUID), "{done} were labelled");
        members[done..].iter().for_each(|member| put_group_label(member, b""));
        write(&members[0], extent(0, 1), 3);
        assert_eq!(refusal(&all, 4), AssembleError::NoLabel(done));
    }
}

#[test]
fn the_label_of_an_outer_group_is_kept_in_the_first_members_label() {
    let (a, b) = (plain(64), plain(64));
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    assert!(group_label(&stripe).is_empty());
    put_group_label(&stripe, b"a mirror's notes");
    assert_eq!(group_label(&stripe)[..], b"a mirror's notes"[..]);
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    assert_eq!(group_label(&stripe)[..], b"a mirror's notes"[..], "an open keeps it");
    // A stripe of stripes has labels of both.
    let (c, d) = (plain(64), plain(64));
    let two = [Rc::new(stripe), Rc::new(opened(&[&c, &d], 4, true).unwrap())];
    put_group_label(&two[0], b"");
    let make = |members: [usize; 2]| {
        let members = members.map(|member| Rc::clone(&two[member])).to_vec();
        let layer = StripeLayer::new(members, ByteCount::new(2048)).unwrap();
        layer.labelled([3; 16], true).now_or_never().expect("RAM never waits").map(drop)
    };
    assert_eq!((make([0, 1]), make([1, 0])), (Ok(()), Err(AssembleError::Order(vec![1, 0]))));
    assert!(opened(&[&a, &b], 4, true).is_ok());
}

#[test]
fn every_record_of_another_on_every_member_is_named_and_nothing_is_overwritten() {
    let stripe = || {
        let members = [plain(64), plain(64), plain(64)];
        write(&opened(&members.iter().collect::<Vec<_>>(), 4, true).unwrap(), extent(0, 192), 9);
        members
    };
    let others = [plain(64), plain(64), plain(64)];
    assembled(&others.iter().collect::<Vec<_>>(), 4, [9; 16], true).unwrap();
    for own in 0..3 {
        let foreign = group_label(&others[own]).to_vec();
        let first = usize::from(own == 0);
        let cases: [(&[u8], AssembleError); 4] = [
            (&foreign, AssembleError::Foreign { member: own, first }),
            (b"", AssembleError::NoLabel(own)),
            (b"SBMIRROR and what else a mirror notes", AssembleError::OtherGroup(own)),
            (&foreign[..60], AssembleError::Label { member: own, why: crate::label::LabelError::Damaged }),
        ];
        for (record, why) in cases {
            let members = stripe();
            put_group_label(&members[own], record);
            let labels = |members: &[Member; 3]| members.each_ref().map(|member| group_label(member).to_vec());
            let before = labels(&members);
            for writable in [false, true] {
                let refused = opened(&members.iter().collect::<Vec<_>>(), 4, writable).err();
                assert_eq!(refused.as_ref(), Some(&why), "member {own}");
                assert!(labels(&members) == before, "member {own}: a label was written");
            }
        }
    }
}

/// A device with the current content and label of another one.
fn copy_of(member: &Member) -> Member {
    let copy = plain(64);
    let Ok(Response::Data(data)) = read(member, extent(0, 64)) else { panic!("it reads") };
    assert!(run(&copy, Request::write(extent(0, 64), data, Durability::Volatile)).is_ok());
    put_group_label(&copy, &group_label(member));
    copy
}

#[test]
fn a_member_that_was_put_back_under_a_group_makes_the_stripe_older_until_the_group_writes_its_label() {
    let (a, b, c) = (plain(64), plain(64), plain(64));
    let freshness = |members: [&Member; 3], writable| opened(&members, 4, writable).unwrap().abilities().freshness;
    let older = Freshness::MayBeOlder(WhyOlder::RolledBack);
    let stripe = opened(&[&a, &b, &c], 4, true).unwrap();
    put_group_label(&stripe, b"as it was");
    let yesterday = [&a, &b, &c].map(copy_of);
    assert_eq!(freshness(yesterday.each_ref(), true), Freshness::Current, "all of them together");
    put_group_label(&stripe, b"before a change");
    write(&stripe, extent(0, 192), 5);
    drop(stripe);
    assert_eq!(freshness([&a, &b, &c], false), Freshness::Current);
    for writable in [false, true, true] {
        // An open for writing rewrites the labels, and each keeps its count.
        assert_eq!(freshness([&a, &yesterday[1], &c], writable), older);
        assert_eq!(freshness([&a, &b, &yesterday[2]], writable), older);
    }
    let stripe = opened(&[&a, &yesterday[1], &c], 4, true).unwrap();
    put_group_label(&stripe, b"nothing on it counts");
    assert_eq!(freshness([&a, &yesterday[1], &c], true), Freshness::Current);
}

#[test]
fn a_crash_between_the_members_labels_leaves_the_label_of_before_and_nothing_older() {
    let (a, b) = (plain(64), plain(64));
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    put_group_label(&stripe, b"as it was");
    let first = group_label(&a);
    put_group_label(&stripe, b"in flight");
    put_group_label(&a, &first);
    let stripe = opened(&[&a, &b], 4, true).unwrap();
    assert_eq!((stripe.abilities().freshness, &group_label(&stripe)[..]), (Freshness::Current, &b"as it was"[..]));
    put_group_label(&stripe, b"again");
    assert_eq!(Label::decode(&group_label(&a)).unwrap().unwrap().group_seq, 3);
    assert_eq!(Label::decode(&group_label(&b)).unwrap().unwrap().group_seq, 3);
}
