//! Log sectors and map entries: any bytes are refused or mean what writing them again would mean.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_fuzz::{forge_log_sector, forge_map_entry};
use sealblock_media_volume::format::{LogSector, MAP_ENTRY_BYTES, MapEntry, MapEntryKind, MapEntryRun, Seed};

const UUID: [u8; 16] = [9; 16];

fuzz_target!(|input: &[u8]| {
    check_entry(input);
    check_sector(input);
    if let Some(bytes) = input.first_chunk::<MAP_ENTRY_BYTES>() {
        let mut bytes = *bytes;
        forge_map_entry(&mut bytes, &UUID);
        check_entry(&bytes);
    }
    for sector_bytes in [512, 4096] {
        let mut sector = vec![0; sector_bytes];
        let length = input.len().min(sector_bytes);
        sector[..length].copy_from_slice(&input[..length]);
        forge_log_sector(&mut sector, &UUID);
        check_sector(&sector);
    }
});

fn check_entry(bytes: &[u8]) {
    let Some(bytes) = bytes.first_chunk::<MAP_ENTRY_BYTES>() else { return };
    let seed = Seed::of(&UUID);
    if let Ok(entry) = MapEntry::decode(bytes, seed) {
        assert_eq!(entry.encode(seed), *bytes);
        assert_eq!(MapEntry::decode_unchecked(bytes), entry);
    }
    if let Ok(run) = MapEntryRun::decode(bytes, seed) {
        assert_eq!(run.encode(seed), *bytes);
        assert_eq!(MapEntry::decode(bytes, seed).ok(), (run.blocks == 1).then_some(run.first));
        assert!(run.blocks == 1 || run.blocks <= MapEntryRun::MAX_BLOCKS && run.first.kind != MapEntryKind::Stored);
        assert_eq!(run.extent().last().get() + 1, run.end());
    } else {
        assert!(MapEntry::decode(bytes, seed).is_err());
    }
    let _ = MapEntry::decode_unchecked(bytes);
}

fn check_sector(bytes: &[u8]) {
    let seed = Seed::of(&UUID);
    let Ok(sector) = LogSector::decode(bytes, seed) else { return };
    let (entries, repeats) = (sector.entries(), sector.repeats());
    assert!(entries.len() + repeats.len() <= LogSector::capacity(bytes.len() as u32));
    entries.iter().chain(repeats).for_each(|entry| check_entry(entry));
    let mut again = vec![0; bytes.len()];
    LogSector::encode(&mut again, seed, sector.header, entries.iter(), repeats);
    let read = LogSector::decode(&again, seed).expect("what was written is read");
    assert_eq!(read, LogSector::of_encoded(&again));
    assert_eq!((read.header, read.entries(), read.repeats()), (sector.header, entries, repeats));
    assert!(usize::from(read.header.earlier) <= entries.len());
}
