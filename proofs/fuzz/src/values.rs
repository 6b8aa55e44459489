//! Tuples, SCSI structures, and text: target names, fault rules, and the resume file of a verify.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use sealblock::commands::verify::record::Record;
use sealblock_integrity::{Checks, Masked, Tags, Tuple, seal, verify};
use sealblock_layers_fault::Rules;
use sealblock_protocols_scsi::{
    BlockCharacteristics, BlockLimits, CachingPage, Command, ControlPage, ExtendedInquiry, Inquiry, LbaStatusList,
    ModeSense, Page, Provisioning, ReadCapacity16, Sense, UnmapList, designators, text,
};
use sealblock_stack::target::TargetName;
use sealblock_units::BlockSize;

use crate::{Pieces, format};

/// Tuples and checks: any bytes can be checked in any format, and sealed blocks pass.
pub fn try_tags(input: &[u8]) {
    let mut pieces = Pieces::new(input);
    let Some(format) = format(&mut pieces) else { return };
    let (flags, size) = (pieces.byte(), BlockSize::B512);
    let checks = Checks {
        guard: flags & 1 != 0,
        app_tag: (flags & 2 != 0).then(|| Masked { expected: pieces.short(), mask: pieces.short() }),
        storage_tag: (flags & 4 != 0).then(|| Masked { expected: pieces.word(), mask: pieces.word() }),
        initial_ref_tag: (flags & 8 != 0).then(|| pieces.word()),
        checks_escapes: flags & 16 != 0,
    };
    let with = Tags { app_tag: pieces.short(), storage_tag: pieces.word(), initial_ref_tag: pieces.word() };
    let blocks = usize::from(pieces.byte() % 4);
    let mut tags = vec![0; blocks * format.tuple_bytes()];
    let given = pieces.bytes(tags.len());
    tags[..given.len()].copy_from_slice(given);
    let mut data = vec![0; blocks * size.bytes()];
    let rest = pieces.rest();
    let length = rest.len().min(data.len());
    data[..length].copy_from_slice(&rest[..length]);

    let mut found = Vec::new();
    let bad = verify(format, size, &data, &tags, &checks, &mut |mismatch| found.push(mismatch));
    assert_eq!(bad, found.len());
    assert!(found.is_sorted_by(|a, b| a.block < b.block) && found.iter().all(|mismatch| mismatch.block < blocks));
    assert!(found.iter().all(|mismatch| mismatch.expected != mismatch.actual));
    for tuple in tags.chunks_exact_mut(format.tuple_bytes()) {
        let read = Tuple::read(format, tuple);
        let mut again = tuple.to_vec();
        read.write(format, &mut again);
        assert_eq!(again, tuple);
    }
    seal(format, size, &data, &mut tags, &with);
    let due = Checks {
        guard: true,
        app_tag: Some(Masked { expected: with.app_tag, mask: u16::MAX }),
        storage_tag: Some(Masked { expected: with.storage_tag, mask: u64::MAX }),
        initial_ref_tag: Some(with.initial_ref_tag),
        checks_escapes: true,
    };
    assert_eq!(verify(format, size, &data, &tags, &due, &mut |mismatch| panic!("{mismatch:?}")), 0);
}

/// The file of `verify --resume`, raw and with a valid checksum: any bytes are refused, or parse to a run with
/// consecutive parts that is written and parsed as the same run.
pub fn try_resume(input: &[u8]) {
    let _ = Record::decode(input);
    let Ok(record) = Record::decode(&Record::framed(input)) else { return };
    assert!((record.asked.first..=record.asked.last + 1).contains(&record.next()));
    assert!(record.errors.iter().all(|error| (record.asked.first..record.next()).contains(&error.lba)));
    let again = Record::decode(&record.encode()).expect("what was read is written as something to read");
    assert_eq!((&again.asked, again.next(), &again.errors), (&record.asked, record.next(), &record.errors));
}

/// Target names: any text is refused, or parses to a target that prints and parses as itself.
pub fn try_target(input: &[u8]) {
    try_text::<TargetName>(input);
}

/// Fault rules: any text is refused, or parses to rules that print and parse as themselves.
pub fn try_rules(input: &[u8]) {
    try_text::<Rules>(input);
}

fn try_text<T: FromStr + Display + PartialEq + Debug>(input: &[u8]) {
    // The text before the first invalid byte.
    let text = input.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    let Ok(value) = text.parse::<T>() else { return };
    let printed = value.to_string();
    assert_eq!(printed.parse::<T>().ok().as_ref(), Some(&value), "{printed}");
}

/// Data from a SCSI device or an initiator: the input is parsed as each structure in turn. The first byte is the page
/// code.
pub fn try_scsi(input: &[u8]) {
    let Some((&code, bytes)) = input.split_first() else { return };
    if let Ok(command) = Command::decode(bytes) {
        let cdb = command.encode().expect("what was read can be written");
        assert_eq!(Command::decode(cdb.as_bytes()), Ok(command));
    }
    if let Ok(sense) = Sense::decode(bytes) {
        assert!(!sense.to_string().is_empty());
        for as_descriptors in [false, true] {
            Sense::decode(&sense.encode(as_descriptors)).expect("what was written can be read");
        }
    }
    if let Ok(capacity) = ReadCapacity16::decode(bytes) {
        assert_eq!(ReadCapacity16::decode(&capacity.encode()), Ok(capacity));
        let _ = capacity.protection();
    }
    if let Ok(inquiry) = Inquiry::decode(bytes) {
        Inquiry::decode(&inquiry.encode()).expect("what was written can be read");
    }
    if let Ok(Some(page)) = Page::decode(code, bytes) {
        assert!(page.body.len() <= bytes.len());
        let limits = BlockLimits::decode(page.body);
        assert_eq!(BlockLimits::decode(&limits.encode()), limits);
        let _ = (ExtendedInquiry::decode(page.body), BlockCharacteristics::decode(page.body));
        let _ = (Provisioning::decode(page.body), text(page.body));
        designators(page.body).for_each(|designator| drop(designator.name()));
    }
    if let Ok(mode) = ModeSense::decode(bytes) {
        let page = mode.page(code).unwrap_or_default();
        let _ = (CachingPage::decode(page), ControlPage::decode(page));
    }
    if let Ok(Some(list)) = UnmapList::decode(bytes)
        && let Some(written) = list.encode()
    {
        assert_eq!(UnmapList::decode(&written), Ok(Some(list)));
    }
    if let Ok(list) = LbaStatusList::decode(bytes) {
        assert_eq!(LbaStatusList::decode(&list.encode()), Ok(list));
    }
}
