//! Files, on every backend.

mod common;

use std::io::ErrorKind;

use common::everywhere;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{File, Options, Reactor, pool, spawn};

const RW: Options =
    Options { read: true, write: true, create: true, create_new: false, truncate: false, direct: false };

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7 + i + seed * 31) as u8).collect()
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written")
}

#[test]
fn what_is_written_is_read() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = File::open(dir.path().join("f"), RW).expect("opens");
            let mut buffer = pool().take(10_000);
            buffer.copy_from_slice(&pattern(10_000, 1));
            file.write_all_at(buffer.freeze(), 5).await.expect("writes from the pool");
            file.write_all_at(Slice::copy_from(&pattern(3, 2)), 1_000_000).await.expect("writes from the heap");
            file.sync_data().await.expect("syncs data");
            file.sync_all().await.expect("syncs all");
            assert_eq!(file.len_bytes().expect("has a length"), 1_000_003);

            let (result, buffer) = file.read_exact_at(pool().take(10_000), 5).await;
            result.expect("reads into the pool");
            assert_eq!(&buffer[..], pattern(10_000, 1));
            let (result, buffer) = file.read_exact_at(Buffer::zeroed(3), 1_000_000).await;
            result.expect("reads into the heap");
            assert_eq!(&buffer[..], pattern(3, 2));
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}

#[test]
fn a_part_of_a_pool_buffer_is_read_without_touching_the_rest() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = File::open(dir.path().join("f"), RW).expect("opens");
            file.write_all_at(Slice::copy_from(&pattern(1000, 3)), 0).await.expect("writes");
            let mut whole = pool().take(3000);
            whole.fill(0xee);
            let mut middle = whole.split_off(1000);
            let end = middle.split_off(1000);
            let (result, middle) = file.read_exact_at(middle, 0).await;
            result.expect("reads");
            assert_eq!(&middle[..], pattern(1000, 3));
            assert!(whole.iter().chain(&end[..]).all(|&byte| byte == 0xee));
        });
    });
}

#[test]
fn reads_end_with_the_file() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = File::open(dir.path().join("f"), RW).expect("opens");
            file.write_all_at(Slice::copy_from(&[7; 100]), 0).await.expect("writes");
            let (result, buffer) = file.read_at(Buffer::zeroed(4096), 40).await;
            assert_eq!(result.expect("a short read is no error"), 60);
            assert!(buffer[..60].iter().all(|&byte| byte == 7) && buffer[60..].iter().all(|&byte| byte == 0));
            let (result, _) = file.read_at(Buffer::zeroed(10), 100).await;
            assert_eq!(result.expect("a read at the end is no error"), 0);
            let (result, buffer) = file.read_exact_at(Buffer::zeroed(4096), 40).await;
            assert_eq!(result.expect_err("cannot be filled").kind(), ErrorKind::UnexpectedEof);
            assert_eq!(buffer.len(), 4096);
            let (result, _) = file.read_exact_at(Buffer::zeroed(60), 40).await;
            result.expect("exactly what there is");
            let (result, _) = file.read_at(Buffer::zeroed(0), 0).await;
            assert_eq!(result.expect("nothing is read"), 0);
        });
    });
}

#[test]
fn errors_arrive_with_the_buffer() {
    everywhere(|reactor| {
        let dir = temporary();
        let path = dir.path().join("f");
        reactor.block_on(async {
            assert_eq!(
                File::open(&path, Options { create: false, ..RW }).expect_err("none yet").kind(),
                ErrorKind::NotFound
            );
            let writer = File::open(&path, Options { read: false, ..RW }).expect("opens");
            let (result, buffer) = writer.read_at(Buffer::zeroed(512), 0).await;
            assert_eq!(result.expect_err("not open for reading").raw_os_error(), Some(9));
            assert_eq!(buffer.len(), 512);
            let again = File::open(&path, Options { create_new: true, ..RW });
            assert_eq!(again.expect_err("exists").kind(), ErrorKind::AlreadyExists);
            let reader = File::open(&path, Options { read: true, ..Options::default() }).expect("opens");
            let result = reader.write_at(Slice::copy_from(b"x"), 0).await;
            assert_eq!(result.expect_err("not open for writing").raw_os_error(), Some(9));
        });
    });
}

#[test]
fn offsets_that_no_file_has_are_refused() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = File::open(dir.path().join("f"), RW).expect("opens");
            file.write_all_at(Slice::copy_from(b"abc"), 0).await.expect("writes");
            for offset in [u64::MAX, i64::MAX as u64 + 1] {
                let (result, _) = file.read_at(Buffer::zeroed(3), offset).await;
                assert_eq!(result.expect_err("no such offset").kind(), ErrorKind::InvalidInput);
                let result = file.write_at(Slice::copy_from(b"x"), offset).await;
                assert_eq!(result.expect_err("no such offset").kind(), ErrorKind::InvalidInput);
            }
            let (result, buffer) = file.read_at(Buffer::zeroed(3), 0).await;
            assert_eq!((result.expect("reads"), &buffer[..]), (3, &b"abc"[..]));
        });
    });
}

#[test]
fn a_punched_hole_reads_as_zeroes() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = File::open(dir.path().join("f"), RW).expect("opens");
            file.write_all_at(Slice::copy_from(&[1; 65536]), 0).await.expect("writes");
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            file.fallocate(mode, 8192, 16384).await.expect("punches");
            let (result, buffer) = file.read_exact_at(Buffer::zeroed(65536), 0).await;
            result.expect("reads");
            assert!(buffer.iter().enumerate().all(|(i, &byte)| byte == u8::from(!(8192..24576).contains(&i))));
            file.fallocate(0, 0, 100_000).await.expect("allocates");
            assert_eq!(file.len_bytes().expect("has a length"), 100_000);
            let error = file.fallocate(libc::FALLOC_FL_PUNCH_HOLE, 0, 4096).await.expect_err("must keep the size");
            assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
            file.set_len_bytes(10).expect("cuts");
            assert_eq!(file.len_bytes().expect("has a length"), 10);
        });
    });
}

#[test]
fn direct_io_takes_aligned_buffers() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            let file = match File::open(dir.path().join("f"), Options { direct: true, ..RW }) {
                Ok(file) => file,
                // Some file systems do not support direct I/O; then there is only the error to check.
                Err(error) => return assert_eq!(error.raw_os_error(), Some(libc::EINVAL)),
            };
            for (from_pool, offset) in [(true, 0), (false, 8192)] {
                let mut buffer = if from_pool { pool().take(8192) } else { Buffer::zeroed(8192) };
                buffer.copy_from_slice(&pattern(8192, 4));
                file.write_all_at(buffer.freeze(), offset).await.expect("writes");
                let (result, buffer) = file.read_exact_at(pool().take(8192), offset).await;
                result.expect("reads");
                assert_eq!(&buffer[..], pattern(8192, 4));
            }
        });
    });
}

/// More operations at once than the submission queue, the completion queue or any limit has room for.
fn many(reactor: &Reactor, count: usize) {
    let dir = temporary();
    reactor.block_on(async {
        let file = File::open(dir.path().join("f"), RW).expect("opens");
        let writes: Vec<_> = (0..count)
            .map(|i| {
                let file = file.clone();
                spawn(async move { file.write_all_at(Slice::copy_from(&pattern(512, i)), i as u64 * 512).await })
            })
            .collect();
        for write in writes {
            write.await.expect("not aborted").expect("writes");
        }
        let reads: Vec<_> = (0..count)
            .map(|i| {
                let file = file.clone();
                spawn(async move { file.read_exact_at(pool().take(512), i as u64 * 512).await })
            })
            .collect();
        for (i, read) in reads.into_iter().enumerate() {
            let (result, buffer) = read.await.expect("not aborted");
            result.expect("reads");
            assert_eq!(&buffer[..], pattern(512, i));
        }
    });
}

#[test]
fn operations_beyond_every_queue_are_all_answered() {
    everywhere(|reactor| many(reactor, 5000));
}

#[test]
fn more_files_than_slots_can_be_open() {
    everywhere(|reactor| {
        let dir = temporary();
        reactor.block_on(async {
            for round in 0..3 {
                let files: Vec<File> =
                    (0..300).map(|i| File::open(dir.path().join(i.to_string()), RW).expect("opens")).collect();
                for (i, file) in files.iter().enumerate() {
                    file.write_all_at(Slice::copy_from(&pattern(64, i + round)), 0).await.expect("writes");
                }
                for (i, file) in files.iter().enumerate().rev() {
                    let (result, buffer) = file.read_exact_at(Buffer::zeroed(64), 0).await;
                    result.expect("reads");
                    assert_eq!(&buffer[..], pattern(64, i + round), "file {i} in round {round}");
                }
            }
        });
    });
}

#[test]
fn a_lock_ends_when_the_file_is_dropped() {
    everywhere(|reactor| {
        let dir = temporary();
        let path = dir.path().join("f");
        let locked = std::fs::File::create(&path).expect("creates");
        locked.try_lock().expect("no other lock is held");
        let file = reactor.block_on(async { File::from_fd(locked.into()) });
        let other = std::fs::File::open(&path).expect("opens");
        assert!(other.try_lock().is_err());
        drop(file);
        other.try_lock().expect("the lock is gone with the file");
    });
}
