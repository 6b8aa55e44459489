//! Twin tests on real files, in a directory of the test's own.

use std::os::unix::fs::MetadataExt;

use sealblock_block::{Medium, MediumError, MediumErrorKind};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{Config, Reactor};
use tempfile::TempDir;

use super::Zeroing;
use crate::{BackingError, FileMedium, OpenError, Options};

const MIB: u64 = 1 << 20;

/// Runs a test on a reactor, with an empty directory.
fn on_reactor<F: AsyncFnOnce(&TempDir)>(test: F) {
    let directory = tempfile::tempdir().unwrap();
    Reactor::new(Config::default()).unwrap().block_on(test(&directory));
}

fn create(directory: &TempDir, length_bytes: u64) -> FileMedium {
    let medium = FileMedium::open(directory.path().join("file"), Options::CREATE).unwrap();
    medium.set_len_bytes(length_bytes).unwrap();
    medium
}

fn kind<T>(result: Result<T, MediumError>) -> Option<MediumErrorKind> {
    result.err().map(|error| error.kind)
}

async fn read(medium: &FileMedium, offset_bytes: u64, length: usize) -> Result<Vec<u8>, MediumError> {
    let mut buffer = medium.buffer(length);
    buffer.fill(0xA5);
    let (result, buffer) = medium.read(offset_bytes, buffer).await;
    result.map(|()| buffer.to_vec())
}

async fn assert_bytes(medium: &FileMedium, offset_bytes: u64, length: usize, byte: u8) {
    let bytes = read(medium, offset_bytes, length).await.unwrap();
    assert!(bytes.iter().all(|&found| found == byte), "{length} bytes from {offset_bytes} are not all {byte}");
}

#[test]
fn what_is_written_is_there_when_the_file_is_opened_again() {
    for buffered in [false, true] {
        on_reactor(async |directory| {
            let path = directory.path().join("file");
            let medium = FileMedium::open(&path, Options { buffered, ..Options::CREATE }).unwrap();
            medium.set_len_bytes(MIB).unwrap();
            medium.write(8192, Slice::copy_from(&[7; 4096])).await.unwrap();
            medium.sync().await.unwrap();
            drop(medium);
            let medium = FileMedium::open(&path, Options { buffered, ..Options::READ }).unwrap();
            assert!(!(buffered && medium.is_direct()), "asked for the page cache");
            assert_eq!(medium.len_bytes(), MIB);
            assert_bytes(&medium, 4096, 4096, 0).await;
            assert_bytes(&medium, 8192, 4096, 7).await;
            assert_bytes(&medium, 12288, 4096, 0).await;
        });
    }
}

#[test]
fn a_file_system_in_memory_is_said_to_go_through_the_page_cache() {
    on_reactor(async |disk| {
        let memory = tempfile::tempdir_in("/dev/shm").ok();
        for directory in memory.iter().chain([disk]) {
            let medium = create(directory, MIB);
            let known = medium.describe().unwrap();
            assert!(known.is_locked, "the lock is taken again after opening anew");
            assert_eq!(medium.is_direct(), known.is_direct);
            assert!(!(known.is_direct && known.file_system.as_deref() == Some("tmpfs")));
            medium.write(0, Slice::copy_from(&[7; 512 * 8])).await.unwrap();
            assert_bytes(&medium, 0, 512 * 8, 7).await;
        }
    });
}

#[test]
fn notes_lie_beside_what_is_written_and_synced_and_direct_reads_see_them() {
    for buffered in [false, true] {
        on_reactor(async |directory| {
            let path = directory.path().join("file");
            let medium = FileMedium::open(&path, Options { buffered, ..Options::CREATE }).unwrap();
            medium.set_len_bytes(MIB).unwrap();
            medium.write(0, Slice::copy_from(&vec![1; MIB as usize])).await.unwrap();
            for byte in 2..6 {
                medium.note(256 << 10, &[byte; 8192]).unwrap();
                medium.note(320 << 10, &[byte; 4096]).unwrap();
                medium.write(512, Slice::copy_from(&[byte; 512])).await.unwrap();
                medium.write(MIB - 512, Slice::copy_from(&[byte; 512])).await.unwrap();
                medium.sync().await.unwrap();
                assert_bytes(&medium, 256 << 10, 8192, byte).await;
                assert_bytes(&medium, 320 << 10, 4096, byte).await;
                assert_bytes(&medium, 264 << 10, 56 << 10, 1).await;
            }
            assert_eq!(kind(medium.note(MIB, &[0; 4096])), Some(MediumErrorKind::PastEnd));
            drop(medium);
            // Another process sees the notes that it left, and accepts no notes if it cannot write.
            let medium = FileMedium::open(&path, Options::READ).unwrap();
            assert_bytes(&medium, 256 << 10, 8192, 5).await;
            assert_bytes(&medium, MIB - 512, 512, 5).await;
            assert_eq!(kind(medium.note(0, &[0; 4096])), Some(MediumErrorKind::ReadOnly));
        });
    }
}

#[test]
fn addresses_between_alignments_are_copied_to_where_the_kernel_takes_them() {
    on_reactor(async |directory| {
        let medium = create(directory, MIB);
        let mut bytes = vec![0; 4096 + 1];
        bytes[1..].fill(9);
        medium.write(4096, Slice::copy_from(&bytes).slice(1..)).await.unwrap();
        let mut odd = Buffer::zeroed(4096 + 3);
        let (result, odd) = medium.read(4096, odd.split_off(3)).await;
        result.unwrap();
        assert_eq!(odd[..], [9; 4096]);
    });
}

#[test]
fn the_end_is_the_end_until_the_file_grows() {
    on_reactor(async |directory| {
        let medium = create(directory, 8192);
        let page = || Slice::copy_from(&[1; 4096]);
        assert!(medium.write(4096, page()).await.is_ok());
        assert_eq!(kind(medium.write(8192, page()).await), Some(MediumErrorKind::PastEnd));
        assert_eq!(kind(read(&medium, 4096, 8192).await), Some(MediumErrorKind::PastEnd));
        assert_eq!(kind(medium.zero(8192, 4096).await), Some(MediumErrorKind::PastEnd));
        medium.set_len_bytes(12288).unwrap();
        assert!(medium.write(8192, page()).await.is_ok());
    });
}

/// Otherwise it would read as zeroes once the file has its length again, also by our own writes behind it.
#[test]
fn what_another_process_cut_off_stays_lost_when_the_length_is_back() {
    on_reactor(async |directory| {
        let medium = create(directory, 12288);
        let elsewhere = medium.elsewhere().unwrap().open_here().unwrap();
        let page = || Slice::copy_from(&[1; 4096]);
        let by_another = std::fs::OpenOptions::new().write(true).open(medium.path()).unwrap();
        by_another.set_len(16384).unwrap();
        assert!(read(&medium, 8192, 4096).await.is_ok());
        by_another.set_len(4096).unwrap();
        assert!(medium.backing.cut_off().is_none(), "nobody knows it yet");
        assert_eq!(kind(read(&medium, 4096, 4096).await), Some(MediumErrorKind::PastEnd));
        let cut = BackingError::CutOff { left_bytes: 4096, length_bytes: 12288 };
        assert_eq!(medium.backing.cut_off(), Some(cut));
        by_another.set_len(12288).unwrap();
        for medium in [&medium, &elsewhere] {
            let error = read(medium, 4096, 512).await.unwrap_err();
            assert_eq!(error.kind, MediumErrorKind::PastEnd);
            assert!(error.reason.contains("truncated to 4096 bytes while it was in use"), "{error}");
            assert_eq!(kind(medium.write(8192, page()).await), Some(MediumErrorKind::PastEnd));
            assert_eq!(kind(medium.zero(0, 8192).await), Some(MediumErrorKind::PastEnd));
            assert!(read(medium, 0, 4096).await.is_ok());
            assert!(medium.write(0, page()).await.is_ok());
        }
        // Cut off on purpose it is whole, and grows with zeroes.
        medium.set_len_bytes(4096).unwrap();
        medium.set_len_bytes(8192).unwrap();
        assert!(read(&medium, 4096, 4096).await.is_ok());
    });
}

#[test]
fn offsets_between_sectors_are_refused() {
    on_reactor(async |directory| {
        let medium = create(directory, MIB);
        let sector = medium.sector_bytes() as usize;
        assert!(sector == 512 || sector == 4096);
        assert!(read(&medium, sector as u64, sector).await.is_ok());
        assert_eq!(kind(read(&medium, 1, sector).await), Some(MediumErrorKind::Failed));
        assert_eq!(kind(read(&medium, 0, sector - 1).await), Some(MediumErrorKind::Failed));
        assert_eq!(kind(medium.set_len_bytes(MIB + 1)), Some(MediumErrorKind::Failed));
    });
}

#[test]
fn a_writer_is_alone_and_readers_share() {
    on_reactor(async |directory| {
        let path = directory.path().join("file");
        let writer = create(directory, MIB);
        for options in [Options::READ, Options::WRITE] {
            let refused = FileMedium::open(&path, options).err().expect("the writer is alone");
            assert!(matches!(refused, OpenError::InUse { .. }));
            assert!(refused.to_string().contains("in use by another process"));
            assert!(refused.to_string().contains(path.to_str().unwrap()));
        }
        drop(writer);
        let reader = FileMedium::open(&path, Options::READ).unwrap();
        let other = FileMedium::open(&path, Options::READ).unwrap();
        assert!(matches!(FileMedium::open(&path, Options::WRITE), Err(OpenError::InUse { .. })));
        drop((reader, other));
        assert!(FileMedium::open(&path, Options::WRITE).is_ok());
    });
}

#[test]
fn what_is_no_file_is_refused_by_name() {
    on_reactor(async |directory| {
        let of = |path: &std::path::Path, options| FileMedium::open(path, options).err().expect("no file").to_string();
        assert!(of(directory.path(), Options::READ).contains("is a directory"));
        assert!(of("/dev/zero".as_ref(), Options::READ).contains("is a character device"));
        assert!(of(&directory.path().join("none"), Options::WRITE).contains("No such file"));
        drop(create(directory, 0));
        assert!(of(&directory.path().join("file"), Options::CREATE).contains("cannot create"));
    });
}

#[test]
fn a_medium_for_reading_takes_no_changes() {
    on_reactor(async |directory| {
        drop(create(directory, MIB));
        let medium = FileMedium::open(directory.path().join("file"), Options::READ).unwrap();
        assert!(medium.is_read_only());
        let page = Slice::copy_from(&[1; 4096]);
        let outcomes = [medium.write(0, page).await, medium.punch(0, 4096).await, medium.zero(0, 4096).await];
        assert!(outcomes.into_iter().all(|outcome| kind(outcome) == Some(MediumErrorKind::ReadOnly)));
        assert_eq!(kind(medium.set_len_bytes(0)), Some(MediumErrorKind::ReadOnly));
        assert_bytes(&medium, 0, 4096, 0).await;
    });
}

#[test]
fn punched_ranges_are_zeroes_and_give_their_space_back() {
    on_reactor(async |directory| {
        let medium = create(directory, 4 * MIB);
        medium.write(0, Slice::copy_from(&vec![3; 4 << 20])).await.unwrap();
        medium.sync().await.unwrap();
        let before = std::fs::metadata(medium.path()).unwrap().blocks();
        medium.punch(MIB, 2 * MIB).await.unwrap();
        medium.punch(0, 0).await.unwrap();
        assert_bytes(&medium, MIB, 2 << 20, 0).await;
        assert_bytes(&medium, 0, 1 << 20, 3).await;
        assert_bytes(&medium, 3 * MIB, 1 << 20, 3).await;
        assert_eq!(medium.len_bytes(), 4 * MIB);
        let after = std::fs::metadata(medium.path()).unwrap().blocks();
        assert_eq!(medium.can_punch(), after < before, "{before} blocks before, {after} after");
        let path = medium.path().to_owned();
        drop(medium);
        let reader = FileMedium::open(&path, Options::READ).unwrap();
        if let Some(beside) = crate::punches_beside(&path) {
            assert_eq!(
                (reader.can_punch(), beside),
                (after < before, after < before),
                "a reader says what a writer says"
            );
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "what was tried leaves nothing behind");
    });
}

#[test]
fn holes_differ_from_data_and_reserved_space_keeps_what_is_there() {
    on_reactor(async |directory| {
        let medium = create(directory, 4 << 20);
        let data = Buffer::copy_from(&[7; 8192]).freeze();
        medium.write(1 << 20, data.clone()).await.unwrap();
        assert!(medium.is_hole(0, 1 << 20));
        assert!(!medium.is_hole(0, (1 << 20) + 4096));
        assert!(medium.is_hole(2 << 20, 2 << 20));
        medium.reserve(0, 4 << 20).await.unwrap();
        let (read, bytes) = medium.read(1 << 20, Buffer::zeroed(8192)).await;
        read.unwrap();
        assert!(bytes[..] == data[..]);
        assert_eq!(kind(medium.reserve(4 << 20, 4096).await), Some(MediumErrorKind::PastEnd));
    });
}

#[test]
fn every_way_of_zeroing_leaves_zeroes_and_nothing_else() {
    for zeroing in [Zeroing::Device, Zeroing::Range, Zeroing::Written] {
        on_reactor(async |directory| {
            let medium = create(directory, 4 * MIB);
            medium.zeroing.set(zeroing);
            medium.write(0, Slice::copy_from(&vec![3; 4 << 20])).await.unwrap();
            medium.zero(4096, 2 * MIB).await.unwrap();
            medium.zero(4096, 0).await.unwrap();
            assert_bytes(&medium, 0, 4096, 3).await;
            assert_bytes(&medium, 4096, 2 << 20, 0).await;
            assert_bytes(&medium, 4096 + 2 * MIB, (2 << 20) - 4096, 3).await;
        });
    }
}

#[test]
fn a_medium_describes_itself() {
    on_reactor(async |directory| {
        let medium = create(directory, MIB);
        let sparse = medium.describe().unwrap();
        assert_eq!((sparse.length_bytes, sparse.is_read_only, sparse.is_block_device), (MIB, false, false));
        assert_eq!((sparse.is_direct, sparse.sector_bytes), (medium.is_direct(), medium.sector_bytes()));
        assert!(sparse.is_locked && !sparse.backend.is_empty() && sparse.file_system.is_some());
        medium.write(0, Slice::copy_from(&vec![3; 1 << 20])).await.unwrap();
        medium.sync().await.unwrap();
        let full = medium.describe().unwrap();
        assert!(full.allocated_bytes.unwrap() >= MIB && sparse.allocated_bytes.unwrap() < MIB);
    });
}

#[test]
fn parts_of_sectors_are_read_and_not_written() {
    on_reactor(async |directory| {
        let mut medium = create(directory, 16384);
        let data: Vec<u8> = (0..16384_u32).map(|at| (at / 512 + at) as u8).collect();
        medium.write(0, Slice::copy_from(&data)).await.unwrap();
        medium.alignment.sector_bytes = 4096;
        assert_eq!((medium.sector_bytes(), medium.read_unit_bytes()), (4096, 512));
        for (offset, length) in
            [(0, 512), (512, 512), (3584, 1024), (512, 8192), (15872, 512), (4096, 4096), (0, 16384)]
        {
            let found = read(&medium, offset, length).await.unwrap();
            assert!(found == data[offset as usize..][..length], "{length} bytes from {offset}");
        }
        assert_eq!(kind(read(&medium, 100, 512).await), Some(MediumErrorKind::Failed));
        assert_eq!(kind(read(&medium, 15872, 1024).await), Some(MediumErrorKind::PastEnd));
        let part = medium.write(512, Slice::copy_from(&[1; 512])).await;
        assert_eq!(kind(part), Some(MediumErrorKind::Failed));
        assert!(read(&medium, 0, 16384).await.unwrap() == data);
    });
}
