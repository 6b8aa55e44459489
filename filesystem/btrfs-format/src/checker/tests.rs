//! A leaf and a node pass. With any other header, order or packing they are refused, and the error names the place.

use zerocopy::FromBytes;

use super::*;
use crate::captured;
use crate::checker_items::geometry;
use crate::key::ItemType;
use crate::node::{HEADER_BYTES, Header, KeyPointer, write_inner, write_leaf};

const NODE_BYTES: u32 = 16_384;

fn header(level: u8, owner: u64) -> Header {
    let mut header = Header::read_from_bytes(&[0; HEADER_BYTES]).unwrap();
    (header.fsid, header.bytenr, header.owner) = ([3; 16], (1 << 20).into(), owner.into());
    (header.generation, header.level) = (77.into(), level);
    header.flags = (flags::WRITTEN | flags::MIXED_BACKREF).into();
    header
}

fn expected(level: u8, owner: u64) -> Expected {
    Expected { bytenr: 1 << 20, owner, level, generation: 77, first_key: None }
}

/// Items of one tree, in their order.
fn items(owner: u64) -> Vec<captured::Captured> {
    let mut items = captured::all();
    items.retain(|item| item.owner == owner);
    items.sort_by_key(|item| item.key);
    items
}

fn leaf(header: &Header) -> Vec<u8> {
    let items = items(3);
    let entries = items.iter().map(|item| (item.key, &item.data[..]));
    write_leaf(header, entries, NODE_BYTES, geometry().checksum).unwrap()
}

fn inner(header: &Header, pointers: &[(u64, u64, u64)]) -> Vec<u8> {
    let pointer = |(object, address, generation): &(u64, u64, u64)| {
        KeyPointer::new(Key::new(*object, ItemType::INODE_ITEM, 0), *address, *generation)
    };
    let pointers: Vec<KeyPointer> = pointers.iter().map(pointer).collect();
    write_inner(header, &pointers, NODE_BYTES, geometry().checksum).unwrap()
}

/// Updates the checksum after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    geometry().checksum.seal(&mut bytes);
    bytes
}

#[test]
fn a_good_leaf_and_a_good_node_pass() {
    let bytes = leaf(&header(0, 3));
    let first_key = Some(items(3)[0].key);
    for expected in [expected(0, 3), Expected { first_key, ..expected(0, 3) }] {
        let node = check_node(&bytes, &geometry(), &expected).unwrap();
        assert_eq!(node.items().len(), items(3).len());
    }
    let bytes = inner(&header(1, 5), &[(256, 1 << 21, 77), (300, 1 << 22, 5)]);
    let node = check_node(&bytes, &geometry(), &expected(1, 256)).unwrap();
    let child = node.child(1, 256).unwrap();
    assert_eq!((child.bytenr, child.level, child.generation, child.owner), (1 << 22, 0, 5, 256));
    assert_eq!(child.first_key, Some(Key::new(300, ItemType::INODE_ITEM, 0)));
    assert_eq!(node.child(2, 256), None);
}

#[test]
fn a_node_that_is_not_the_one_that_was_asked_for_is_refused() {
    type Change = fn(&mut Header);
    let changes: [(&str, Change); 6] = [
        ("it is of another filesystem", |header| header.fsid[15] = 4),
        ("address is 4096 instead of 1048576", |header| header.bytenr = 4096.into()),
        ("generation is 76 instead of 77", |header| header.generation = 76.into()),
        ("generation is 78 instead of 77", |header| header.generation = 78.into()),
        ("the node says it was never written", |header| header.flags = 0.into()),
        ("tree is 5 instead of 3", |header| header.owner = 5.into()),
    ];
    for (says, change) in changes {
        let mut header = header(0, 3);
        change(&mut header);
        let refusal = check_node(&leaf(&header), &geometry(), &expected(0, 3)).unwrap_err();
        assert_eq!((refusal.rule.to_string().as_str(), refusal.slot), (says, None));
    }
    let good = leaf(&header(0, 3));
    let refusal = check_node(&good, &geometry(), &expected(1, 3)).unwrap_err();
    assert_eq!(refusal.rule.to_string(), "level is 0 instead of 1");
    let other = Expected { first_key: Some(Key::MIN), ..expected(0, 3) };
    let refusal = check_node(&good, &geometry(), &other).unwrap_err();
    assert!(matches!(refusal.rule, Rule::OtherKey { expected: Key::MIN, .. }));
    assert!(check_node(&good[1..], &geometry(), &expected(0, 3)).is_err());
    for at in [0, 3, 32, 100, 8000, 16_383] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        let refusal = check_node(&bad, &geometry(), &expected(0, 3)).unwrap_err();
        assert!(matches!(refusal.rule, Rule::Checksum(_)), "{at}");
    }
}

#[test]
fn subvolumes_share_nodes_and_no_other_trees_do() {
    for (owner, of, passes) in [(5, 256, true), (257, 5, true), (5, 3, false), (3, 5, false), (4, 3, false)] {
        let bytes = inner(&header(1, owner), &[(256, 1 << 21, 77)]);
        assert_eq!(check_node(&bytes, &geometry(), &expected(1, of)).is_ok(), passes, "{owner} in {of}");
    }
}

#[test]
fn only_some_trees_are_ever_empty_and_only_at_their_root() {
    let empty = |owner| write_leaf(&header(0, owner), [], NODE_BYTES, geometry().checksum).unwrap();
    for (owner, passes) in
        [(7, true), (9, true), (256, true), (1, false), (2, false), (5, false), (11, false), (0, false)]
    {
        assert_eq!(check_node(&empty(owner), &geometry(), &expected(0, owner)).is_ok(), passes, "{owner}");
        let child = Expected { first_key: Some(Key::MIN), ..expected(0, owner) };
        assert!(check_node(&empty(owner), &geometry(), &child).is_err());
    }
    let refusal = check_node(&inner(&header(1, 7), &[]), &geometry(), &expected(1, 7)).unwrap_err();
    assert_eq!(refusal.rule.to_string(), "a node without pointers");
}

#[test]
fn a_leaf_is_packed_and_its_keys_rise() {
    let good = leaf(&header(0, 3));
    let item_at = |slot: usize| HEADER_BYTES + 25 * slot;
    for (at, says) in [
        (item_at(0) + 17, "end of the data is"),
        (item_at(0) + 21, "end of the data is"),
        (item_at(1) + 17, "end of the data is"),
        (item_at(1) + 20, "end of the data is"),
    ] {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        let refusal = check_node(&sealed(bad), &geometry(), &expected(0, 3)).unwrap_err();
        assert!(refusal.rule.to_string().starts_with(says), "{at}: {refusal}");
    }
    let mut bad = good.clone();
    let first = bad[item_at(0)..][..17].to_vec();
    bad[item_at(1)..][..17].copy_from_slice(&first);
    let refusal = check_node(&sealed(bad), &geometry(), &expected(0, 3)).unwrap_err();
    assert_eq!((refusal.rule, refusal.slot), (Rule::KeyOrder(items(3)[0].key), Some(1)));
}

#[test]
fn a_broken_item_is_named_with_its_place() {
    let mut items = items(3);
    items[1].data[18] = 9;
    let entries = items.iter().map(|item| (item.key, &item.data[..]));
    let bytes = write_leaf(&header(0, 3), entries, NODE_BYTES, geometry().checksum).unwrap();
    let refusal = check_node(&bytes, &geometry(), &expected(0, 3)).unwrap_err();
    assert_eq!((refusal.slot, refusal.key), (Some(1), Some(items[1].key)));
    let text = refusal.to_string();
    assert!(text.starts_with("node 1048576 of tree 3, slot 1, (256 CHUNK_ITEM "), "{text}");
}

#[test]
fn pointers_rise_and_lead_to_nodes_that_can_be() {
    for (second, says) in [
        ((256, 1 << 22, 5), "it follows (256 INODE_ITEM 0)"),
        ((255, 1 << 22, 5), "it follows (256 INODE_ITEM 0)"),
        ((300, 0, 5), "address of a child is 0"),
        ((300, 4097, 5), "address of a child is 4097"),
        ((300, 4096, 78), "generation of a child is 78"),
    ] {
        let bytes = inner(&header(1, 5), &[(256, 1 << 21, 77), second]);
        let refusal = check_node(&bytes, &geometry(), &expected(1, 5)).unwrap_err();
        assert!(refusal.rule.to_string().starts_with(says), "{refusal}");
        assert_eq!(refusal.slot, Some(1));
    }
}

#[test]
fn data_that_lie_over_the_heads_are_refused() {
    // One item whose data fill the node, and one more item head, which would overlap these data.
    let data = vec![0; leaf_capacity(NODE_BYTES) - 25];
    let key = Key::new(9, ItemType(99), 0);
    let mut bytes = write_leaf(&header(0, 7), [(key, &data[..])], NODE_BYTES, geometry().checksum).unwrap();
    assert!(check_node(&bytes, &geometry(), &expected(0, 7)).is_ok());
    bytes[96] = 2;
    let refusal = check_node(&sealed(bytes), &geometry(), &expected(0, 7)).unwrap_err();
    assert_eq!(refusal.rule, Rule::Contradiction("the data overlap the heads of the items"));
}
