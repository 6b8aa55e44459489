//! Futures that are dropped while the kernel, or a thread, works on their buffers.

#![allow(clippy::async_yields_async, reason = "handles are taken out of a reactor on purpose")]

mod common;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::rc::Rc;

use common::{everywhere, is_uring, start};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{Config, File, Options, Reactor, pool, spawn, yield_now};

/// A read of a pipe does not end before something is written, so the order of events is certain. Only a ring can wait
/// like that: the system call backend reads at offsets, which a pipe refuses at once.
#[test]
fn a_dropped_read_keeps_its_buffer_until_it_ends() {
    everywhere(|reactor| {
        if !is_uring(reactor) {
            return;
        }
        let (read, mut write) = std::io::pipe().expect("a pipe");
        let from_arena = reactor.pool().arena().len_bytes > 0;
        reactor.block_on(async {
            let file = File::from_fd(OwnedFd::from(read));
            let buffer = pool().take(4096);
            let address = buffer.as_ptr();
            {
                let mut reading = pin!(file.read_at(buffer, 0));
                assert!(start(reading.as_mut()).await, "nothing was written yet");
                yield_now().await;
            }
            drop(file);
            let held = pool().counters();
            assert_eq!(held.in_use_bytes + held.heap_bytes, 4096, "the dropped read still holds its buffer");
            let others: Vec<Buffer> = (0..64).map(|_| pool().take(4096)).collect();
            assert!(others.iter().all(|other| other.as_ptr() != address));

            write.write_all(&[0xaa; 4096]).expect("the pipe has room");
            while {
                let now = pool().counters();
                now.in_use_bytes + now.heap_bytes
            } > 64 * 4096
            {
                yield_now().await;
            }
            assert!(others.iter().all(|other| other.iter().all(|&byte| byte != 0xaa)));
            if from_arena {
                assert_eq!(pool().take(4096).as_ptr(), address, "after the end the buffer is free again");
            }
        });
    });
}

#[test]
fn a_reactor_ends_although_a_read_waits_for_ever() {
    everywhere(|reactor| {
        if !is_uring(reactor) {
            return;
        }
        let reactor = Reactor::new(common::uring()).expect("starts");
        let pool = reactor.pool().clone();
        let (read, write) = std::io::pipe().expect("a pipe");
        let task = reactor.block_on(async {
            let task = spawn(async move {
                let file = File::from_fd(OwnedFd::from(read));
                file.read_at(sealblock_runtime_reactor::pool().take(4096), 0).await
            });
            yield_now().await;
            task
        });
        drop(reactor);
        assert!(task.is_finished());
        assert_eq!(pool.counters().in_use_bytes, 0);
        drop(write);
    });
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

#[test]
fn a_reactor_ends_what_is_in_flight_although_a_task_panics_when_it_is_dropped() {
    everywhere(|reactor| {
        if !is_uring(reactor) {
            return;
        }
        // A ring that has the file in its table holds it until the kernel has destroyed the ring.
        let config = Config { fixed_files_limit: 0, ..common::uring() };
        let reactor = Reactor::new(config).expect("starts");
        let pool = reactor.pool().clone();
        let (read, mut write) = std::io::pipe().expect("a pipe");
        reactor.block_on(async {
            let file = File::from_fd(OwnedFd::from(read));
            drop(spawn(async move {
                let _held = PanicsWhenDropped;
                std::future::pending::<()>().await;
            }));
            {
                let mut reading = pin!(file.read_at(sealblock_runtime_reactor::pool().take(4096), 0));
                assert!(start(reading.as_mut()).await, "nothing was written yet");
            }
            yield_now().await;
        });
        let ended = catch_unwind(AssertUnwindSafe(|| drop(reactor)));
        assert_eq!(ended.unwrap_err().downcast_ref::<&str>(), Some(&"dropped"));
        let error =
            write.write_all(b"late").expect_err("the read still waits, for a buffer that may be another's by now");
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(pool.counters().in_use_bytes, 0);
    });
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Reads that are dropped at random times, between buffers that must not change.
#[test]
fn buffers_taken_after_drops_are_never_written_to() {
    everywhere(|reactor| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
        reactor.block_on(async {
            let options = Options { read: true, write: true, create: true, ..Options::default() };
            let file = File::open(dir.path().join("f"), options).expect("opens");
            file.write_all_at(Slice::copy_from(&[0xaa; 1 << 16]), 0).await.expect("writes");
            let mut state = 0x9e37_79b9_7f4a_7c15;
            for round in 0..3000u64 {
                let dropped = 1 + random(&mut state) % 8;
                for _ in 0..dropped {
                    let len = 512usize << (random(&mut state) % 4);
                    let mut reading = pin!(file.read_at(pool().take(len), random(&mut state) % 60_000));
                    let _going_on = start(reading.as_mut()).await;
                    if random(&mut state).is_multiple_of(2) {
                        yield_now().await;
                    }
                }
                let mut kept: Vec<Buffer> = (0..8).map(|i| pool().take(512 << (i % 4))).collect();
                for buffer in &mut kept {
                    buffer.fill(round as u8 & 0x7f);
                }
                yield_now().await;
                assert!(kept.iter().all(|buffer| buffer.iter().all(|&byte| byte == round as u8 & 0x7f)));
            }
        });
        let pool = reactor.pool().clone();
        while pool.counters().in_use_bytes + pool.counters().heap_bytes > 0 {
            reactor.block_on(yield_now());
        }
    });
}

/// A write into a full pipe does not end before something is read; as above, only a ring can wait like that.
#[test]
fn a_drain_waits_for_a_dropped_write_and_for_no_other() {
    everywhere(|reactor| {
        if !is_uring(reactor) {
            return;
        }
        let (mut read, write) = std::io::pipe().expect("a pipe");
        reactor.block_on(async {
            let file = File::from_fd(OwnedFd::from(write));
            let bytes = || Slice::copy_from(&[0; 64 << 10]);
            let mut room = vec![0; 64 << 10];
            file.write_all_at(bytes(), 0).await.expect("the pipe has room");
            let mut kept = pin!(file.write_at(bytes(), 0));
            assert!(start(kept.as_mut()).await, "nothing was read yet");
            file.drain().await;
            std::io::Read::read_exact(&mut read, &mut room).expect("reads");
            assert_eq!(kept.await.expect("writes"), room.len());
            {
                let mut dropped = pin!(file.write_at(bytes(), 0));
                assert!(start(dropped.as_mut()).await, "nothing was read yet");
                yield_now().await;
            }
            let mut drain = pin!(file.drain());
            for _ in 0..100 {
                assert!(start(drain.as_mut()).await, "the dropped write has not ended");
                yield_now().await;
            }
            std::io::Read::read_exact(&mut read, &mut room).expect("reads");
            drain.await;
            file.drain().await;
        });
    });
}

#[test]
fn after_a_drain_dropped_writes_change_nothing() {
    everywhere(|reactor| {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
        reactor.block_on(async {
            let options = Options { read: true, write: true, create: true, ..Options::default() };
            let file = File::open(dir.path().join("f"), options).expect("opens");
            let mut state = 0x9e37_79b9_7f4a_7c15;
            for round in 0..200u64 {
                for _ in 0..1 + random(&mut state) % 8 {
                    let mut writing = pin!(file.write_at(Slice::copy_from(&[0xaa; 4096]), 0));
                    let _going_on = start(writing.as_mut()).await;
                    if random(&mut state).is_multiple_of(2) {
                        yield_now().await;
                    }
                }
                file.drain().await;
                let newer = [round as u8 & 0x7f; 4096];
                file.write_all_at(Slice::copy_from(&newer), 0).await.expect("writes");
                yield_now().await;
                let (result, found) = file.read_exact_at(Buffer::zeroed(4096), 0).await;
                result.expect("reads");
                assert_eq!(found[..], newer[..]);
            }
        });
    });
}

/// Dropping a reactor with operations in flight, including some that were never submitted, returns every buffer.
#[test]
fn a_reactor_waits_for_its_operations() {
    for config in common::configurations() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
        let reactor = Reactor::new(config).expect("starts");
        let pool = reactor.pool().clone();
        reactor.block_on(async {
            let options = Options { read: true, write: true, create: true, ..Options::default() };
            let file = Rc::new(File::open(dir.path().join("f"), options).expect("opens"));
            for i in 0..2000 {
                let file = Rc::clone(&file);
                drop(spawn(async move {
                    let data = sealblock_runtime_reactor::pool().take(4096).freeze();
                    file.write_all_at(data, i * 4096).await.expect("writes");
                }));
            }
            yield_now().await;
        });
        assert!(pool.counters().in_use_bytes + pool.counters().heap_bytes > 0, "the premise: work is in flight");
        drop(reactor);
        let after = pool.counters();
        assert_eq!((after.in_use_bytes, after.heap_bytes), (0, 0));
    }
}

/// Reads of empty pipes fill the limit; another, which could end at once, is held back until one of them has ended.
#[test]
fn operations_beyond_the_limit_wait_for_others_to_end() {
    if !common::has_uring() {
        return;
    }
    let reactor = Reactor::new(Config { operations_in_flight_limit: 2, ..common::uring() }).expect("starts");
    let mut pipes: Vec<_> = (0..3).map(|_| std::io::pipe().expect("a pipe")).collect();
    pipes[2].1.write_all(b"x").expect("the pipe has room");
    reactor.block_on(async {
        let tasks: Vec<_> = pipes
            .iter()
            .map(|(read, _)| {
                let file = File::from_fd(read.try_clone().expect("a descriptor").into());
                spawn(async move { file.read_at(Buffer::zeroed(1), 0).await.0.expect("reads") })
            })
            .collect();
        for _ in 0..100 {
            yield_now().await;
        }
        assert!(tasks.iter().all(|task| !task.is_finished()));
        pipes[0].1.write_all(b"x").expect("the pipe has room");
        while !(tasks[0].is_finished() && tasks[2].is_finished()) {
            yield_now().await;
        }
        assert!(!tasks[1].is_finished());
    });
}
