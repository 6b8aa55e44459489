//! Edits of single nodes of Btrfs, and the record of a commit in the superblock.
//!
//! Two nodes are made of raw bytes, or empty, and edited; then some of their bytes change, and if they can still be opened,
//! they are edited again. A list of the same items or pointers gets the same edits: afterwards a node has the bytes of that
//! list and nothing else, so that a checker finds in it what it finds in the list.

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::commit_record::{CommitRecord, MAX_DEVICES, RECORD_OFFSET};
use sealblock_btrfs_format::inner_edit::InnerMut;
use sealblock_btrfs_format::key::{Key, objectid};
use sealblock_btrfs_format::leaf_edit::LeafMut;
use sealblock_btrfs_format::leaf_split::{LeafSplit, balance};
use sealblock_btrfs_format::node::{HEADER_BYTES, Header, KeyPointer, flags, write_inner, write_leaf};
use sealblock_btrfs_format::superblock::{SUPERBLOCK_BYTES, Superblock};
use zerocopy::{FromBytes, IntoBytes};

use crate::Pieces;
use crate::btrfs::key;

const BYTENR: u64 = 1 << 20;
const MAX_EDITS: usize = 200;
const ROUNDS: usize = 3;

type Items = Vec<(Key, Vec<u8>)>;

fn header(level: u8) -> Header {
    let mut header = Header::read_from_bytes(&[0; HEADER_BYTES]).expect("a header has as many bytes");
    (header.bytenr, header.owner, header.level) = (BYTENR.into(), objectid::FS_TREE.into(), level);
    (header.generation, header.flags) = (9.into(), flags::WRITTEN.into());
    header
}

/// A node of the input's bytes, as they are.
fn raw(pieces: &mut Pieces, level: u8, node_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; node_bytes];
    let mut header = header(level);
    header.nritems = u32::from(pieces.byte() % 40).into();
    let count = node_bytes.saturating_sub(HEADER_BYTES);
    let length = usize::from(pieces.short()).min(count);
    let rest = pieces.bytes(length);
    let head = HEADER_BYTES.min(node_bytes);
    bytes[..head].copy_from_slice(&header.as_bytes()[..head]);
    bytes[head..head + rest.len()].copy_from_slice(rest);
    bytes
}

/// The sizes of nodes, and some that no node has.
fn node_bytes(pieces: &mut Pieces) -> usize {
    [4096, 4096, 16384, 65536, HEADER_BYTES, HEADER_BYTES + 30, 50, 65537][usize::from(pieces.byte() % 8)]
}

/// Changes some bytes.
fn poke(pieces: &mut Pieces, buffers: &mut [Vec<u8>; 2]) {
    for _ in 0..pieces.byte() % 4 {
        let (at, value) = (usize::from(pieces.short()), pieces.byte());
        let bytes = &mut buffers[at % 2];
        let length = bytes.len();
        bytes[at / 2 % length] = value;
    }
}

/// Nodes to begin with: raw bytes, or empty ones.
fn nodes(pieces: &mut Pieces, level: u8) -> [Vec<u8>; 2] {
    let (size, is_raw) = (node_bytes(pieces), pieces.byte() % 4 == 0);
    [(); 2].map(|()| {
        if is_raw {
            return raw(pieces, level, size);
        }
        let mut bytes = vec![0; size];
        let head = HEADER_BYTES.min(size);
        bytes[..head].copy_from_slice(&header(level).as_bytes()[..head]);
        bytes
    })
}

/// Edits of two leaves that may be neighbours.
pub fn try_leaf_edit(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let mut buffers = nodes(&mut pieces, 0);
    for _ in 0..ROUNDS {
        let [first, second] = &mut buffers;
        let (Ok(mut left), Ok(mut right)) = (LeafMut::open(first), LeafMut::open(second)) else { return };
        let (mut models, headers) = ([items(&left), items(&right)], [*left.header(), *right.header()]);
        for _ in 0..MAX_EDITS {
            if pieces.is_empty() {
                break;
            }
            edit_leaves(&mut pieces, &mut left, &mut right, &mut models);
            assert_eq!([items(&left), items(&right)], models);
        }
        left.zero_gap();
        right.zero_gap();
        for ((bytes, model), header) in buffers.iter_mut().zip(&models).zip(&headers) {
            let (entries, size) = (model.iter().map(|(key, data)| (*key, &data[..])), bytes.len() as u32);
            let wanted = write_leaf(header, entries, size, ChecksumType::Crc32c).expect("they fitted");
            LeafMut::open(bytes).expect("what was edited can be edited");
            ChecksumType::Crc32c.seal(bytes);
            assert_eq!(*bytes, wanted);
        }
        poke(&mut pieces, &mut buffers);
    }
}

fn items(leaf: &LeafMut) -> Items {
    (0..leaf.len())
        .map(|slot| (leaf.key(slot).expect("it is there"), leaf.data(slot).unwrap_or(&[]).to_vec()))
        .collect()
}

/// One edit. What fails changes nothing, which the caller sees.
fn edit_leaves<'a>(pieces: &mut Pieces, left: &mut LeafMut<'a>, right: &mut LeafMut<'a>, models: &mut [Items; 2]) {
    let (what, slot, end) = (pieces.byte(), usize::from(pieces.byte() % 64), usize::from(pieces.byte()));
    let leaf = if what & 0x80 == 0 { &mut *left } else { &mut *right };
    let model = &mut models[usize::from(what >> 7)];
    match what % 8 {
        0 | 1 => {
            let (key, length) = (key(pieces), end * if what % 8 == 0 { 1 } else { 40 });
            let data = pieces.bytes(length).to_vec();
            // Most keys would not fit in at random.
            let slot = if what & 0x40 == 0 { leaf.search(key).unwrap_or_else(|slot| slot) } else { slot };
            if leaf.insert(slot, key, &data).is_ok() {
                model.insert(slot, (key, data));
            }
        }
        2 if leaf.delete(slot..end).is_ok() => drop(model.drain(slot..end)),
        3 => {
            let (start, length) = (usize::from(pieces.byte()), usize::from(pieces.byte()));
            let data = pieces.bytes(length);
            if leaf.splice(slot, start..end, data).is_ok() {
                model[slot].1.splice(start..end, data.iter().copied());
            }
        }
        4 => {
            let key = key(pieces);
            if leaf.set_key(slot, key).is_ok() {
                model[slot].0 = key;
            }
        }
        5 if left.shift_right(right, slot).is_ok() => {
            let moved = models[0].split_off(models[0].len() - slot);
            models[1].splice(0..0, moved);
        }
        6 if left.shift_left(right, slot).is_ok() => {
            let moved: Items = models[1].drain(..slot).collect();
            models[0].extend(moved);
        }
        7 => {
            // Whatever is moved, they have the same in the same order.
            let _ = balance(left, right);
            let mut all: Items = models.concat();
            models[1] = all.split_off(left.len().min(all.len()));
            models[0] = all;
            let _ = LeafSplit::choose(left, slot, end * 40);
        }
        _ => {}
    }
}

/// Edits of two inner nodes that may be neighbours.
pub fn try_inner_edit(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let level = pieces.byte() % 10;
    let mut buffers = nodes(&mut pieces, level);
    for _ in 0..ROUNDS {
        let [first, second] = &mut buffers;
        let (Ok(mut left), Ok(mut right)) = (InnerMut::open(first), InnerMut::open(second)) else { return };
        let mut models = [left.pointers().to_vec(), right.pointers().to_vec()];
        let headers = [*left.header(), *right.header()];
        for _ in 0..MAX_EDITS {
            if pieces.is_empty() {
                break;
            }
            edit_inner(&mut pieces, &mut left, &mut right, &mut models);
            let found = [left.pointers().as_bytes(), right.pointers().as_bytes()];
            assert_eq!(found, models.each_ref().map(|one| one.as_bytes()));
        }
        left.zero_gap();
        right.zero_gap();
        for ((bytes, model), header) in buffers.iter_mut().zip(&models).zip(&headers) {
            InnerMut::open(bytes).expect("what was edited can be edited");
            ChecksumType::Crc32c.seal(bytes);
            let wanted = write_inner(header, model, bytes.len() as u32, ChecksumType::Crc32c);
            assert_eq!(*bytes, wanted.expect("they fitted"));
        }
        poke(&mut pieces, &mut buffers);
    }
}

fn edit_inner<'a>(
    pieces: &mut Pieces,
    left: &mut InnerMut<'a>,
    right: &mut InnerMut<'a>,
    models: &mut [Vec<KeyPointer>; 2],
) {
    let (what, slot, end) = (pieces.byte(), usize::from(pieces.byte()), usize::from(pieces.byte()));
    let node = if what & 0x80 == 0 { &mut *left } else { &mut *right };
    let model = &mut models[usize::from(what >> 7)];
    let mut pointer = || KeyPointer::new(key(pieces), u64::from(pieces.short()) << 12, u64::from(pieces.byte()));
    match what % 8 {
        0 | 1 => {
            let pointer = pointer();
            let before = model.partition_point(|other| other.key() < pointer.key());
            let slot = if what & 0x40 == 0 { before } else { slot };
            assert!(node.child_of(pointer.key()) <= node.len());
            if node.insert(slot, pointer).is_ok() {
                model.insert(slot, pointer);
            }
        }
        2 if node.delete(slot..end).is_ok() => drop(model.drain(slot..end)),
        3 => {
            let pointer = pointer();
            if node.replace(slot, pointer).is_ok() {
                model[slot] = pointer;
            }
        }
        4 => assert!(node.split_point(slot).is_ok_and(|point| point <= node.len()) || slot > node.len()),
        5 if left.shift_right(right, slot).is_ok() => {
            let moved = models[0].split_off(models[0].len() - slot);
            models[1].splice(0..0, moved);
        }
        6 if left.shift_left(right, slot).is_ok() => {
            let moved: Vec<KeyPointer> = models[1].drain(..slot).collect();
            models[0].extend(moved);
        }
        _ => {}
    }
}

/// The record of a commit: raw bytes, bytes with a right checksum, and one that was written.
pub fn try_commit_record(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let mut superblock = Superblock::read_from_bytes(&[0; SUPERBLOCK_BYTES]).expect("a superblock has as many bytes");
    superblock.generation = u64::from(pieces.byte() % 4).into();
    let (choice, uuid, oldest) = (pieces.byte(), [pieces.byte(); 16], pieces.word());
    let record = &mut superblock.as_mut_bytes()[RECORD_OFFSET..];
    if choice % 4 == 0 {
        let count = usize::from(choice);
        let generation = superblock.generation.get();
        let devices = (0..count).map(|index| ([index as u8; 16], index % 3 == 0));
        CommitRecord::new(generation, oldest, devices).write(&mut superblock);
        let read = CommitRecord::read(&superblock).expect("what was written can be read");
        assert_eq!(read.oldest, oldest);
        let last = count.saturating_sub(1);
        let has_last = read.missed_only_superblocks([last as u8; 16], oldest);
        assert_eq!(has_last, (1..=MAX_DEVICES).contains(&count));
        assert_eq!(read.is_tagged([last as u8; 16]), has_last && last % 3 == 0);
        superblock.generation = (generation + 1).into();
        let later = CommitRecord::read(&superblock).expect("another program keeps it");
        assert!(!later.is_of(&superblock) && later == read, "another program wrote a transaction");
        return;
    }
    let bytes = pieces.rest();
    let length = bytes.len().min(record.len());
    record[..length].copy_from_slice(&bytes[..length]);
    if choice % 4 > 1 {
        record[..8].copy_from_slice(b"sealbtrf");
        let crc = ChecksumType::Crc32c.compute(&record[12..]);
        record[8..12].copy_from_slice(&crc.as_bytes()[..4]);
    }
    let Some(read) = CommitRecord::read(&superblock) else { return };
    assert!(!read.missed_only_superblocks(uuid, read.oldest.wrapping_sub(1)) || read.oldest == 0);
    let mut again = superblock;
    read.write(&mut again);
    assert_eq!(CommitRecord::read(&again), Some(read));
}
