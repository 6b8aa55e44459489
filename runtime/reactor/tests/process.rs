//! Things that concern the whole process: its signals, and a low limit on locked memory, which costs the fixed buffers
//! but not the ring.

#![allow(unsafe_code)]

mod common;

use std::time::Duration;

use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{
    Backend, File, Options, Reactor, Signal, UringUnavailable, pool, shutdown_signal, sleep, spawn, timeout,
};

const LIMIT_BYTES: u64 = 64 << 10;

/// Lowers the limit for the process and drops, only on this thread, the privilege to ignore it.
fn restrict() {
    let limit = libc::rlimit { rlim_cur: LIMIT_BYTES, rlim_max: LIMIT_BYTES };
    // SAFETY: the call reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
    // SAFETY: the call takes no pointers; made directly, it changes the calling thread only.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534), 0);
    }
}

#[test]
fn without_locked_memory_the_ring_does_without_fixed_buffers() {
    if !common::has_uring() {
        return;
    }
    // SAFETY: the call takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        // The limit applies to all processes of a user together, including the rings of other tests that are running.
        eprintln!("skipped: only root can lower the limit for a user who has nothing else running");
        return;
    }
    let (read, write) = std::io::pipe().expect("a pipe");
    restrict();
    let reactor = Reactor::new(common::uring()).expect("the ring itself needs no locked memory");
    let Backend::Uring(features) = reactor.backend() else { panic!("a ring was required") };
    assert_eq!(features.fixed_buffers, Err(UringUnavailable::LockedMemory { limit_bytes: LIMIT_BYTES }));
    assert_eq!(features.fixed_files, Ok(()));
    reactor.block_on(async {
        assert_eq!(pool().take(4096).registration(), None);
        let writer = File::from_fd(write.into());
        writer.write_all_at(Slice::copy_from(b"through"), 0).await.expect("writes");
        let (result, buffer) = File::from_fd(read.into()).read_exact_at(pool().take(7), 0).await;
        result.expect("reads");
        assert_eq!(&buffer[..], b"through");
        let missing = File::open("/nonexistent", Options { read: true, ..Options::default() });
        assert!(missing.is_err());
    });
}

#[test]
fn a_signal_ends_every_waiting_future_and_later_ones() {
    let reactor = Reactor::new(common::small()).expect("starts");
    reactor.block_on(async {
        let early = timeout(Duration::from_millis(5), shutdown_signal()).await;
        assert!(early.is_err(), "no signal was sent");
        let waiting: Vec<_> = (0..3).map(|_| spawn(shutdown_signal())).collect();
        sleep(Duration::from_millis(1)).await;
        // SAFETY: the handler is installed, since the future was polled above.
        assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGTERM) }, 0);
        for task in waiting {
            let signal = task.await.expect("not aborted").expect("the handlers are installed");
            assert_eq!(signal, Signal::Terminate);
        }
        assert_eq!(shutdown_signal().await.expect("installed"), Signal::Terminate);
    });
}
