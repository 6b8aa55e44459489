//! Choosing a backend, and working without what the kernel refuses.
#![allow(unsafe_code)]

mod common;

use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::{
    Backend, BackendChoice, Config, Features, File, Options, Reactor, StartError, UringUnavailable, backend,
};

#[test]
fn a_refused_ring_falls_back_and_says_so() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let config = Config { runtime: BackendChoice::Auto, refuse_uring: Some(errno), ..common::small() };
        let reactor = Reactor::new(config).expect("falls back");
        // With the variable set to `syscalls` the tests requested system calls, which is then the reason.
        if std::env::var_os("SEALBLOCK_RUNTIME").is_none() {
            assert_eq!(
                *reactor.backend(),
                Backend::Syscalls { threads: 4, reason: Some(UringUnavailable::Errno(errno)) }
            );
        }
        assert_eq!(reactor.block_on(async { backend() }), *reactor.backend());
    }
}

#[test]
fn a_ring_that_is_required_is_not_replaced() {
    let config = Config { refuse_uring: Some(libc::EPERM), ..common::uring() };
    let error = Reactor::new(config).expect_err("a ring was required");
    assert!(matches!(error, StartError::Uring(UringUnavailable::Errno(libc::EPERM))));
    assert!(error.to_string().contains("EPERM"), "{error}");
}

#[test]
fn what_is_turned_off_is_missing_visibly() {
    if !common::has_uring() {
        return;
    }
    let features = |config| match Reactor::new(config).expect("starts").backend().clone() {
        Backend::Uring(features) => features,
        other => panic!("{other} although a ring was required"),
    };
    let Features { fixed_files, fixed_buffers, .. } = features(common::uring());
    assert_eq!(fixed_files, Ok(()));
    match fixed_buffers {
        Ok(()) => {}
        // The limit applies to all processes of a user together, so an ordinary user may have no room left for this
        // one.
        Err(UringUnavailable::LockedMemory { .. }) => eprintln!("skipped: this user may lock no more memory"),
        Err(other) => panic!("fixed buffers were refused: {other}"),
    }
    let bare = features(Config { fixed_files_limit: 0, pool_arena_bytes: 0, ..common::uring() });
    assert_eq!(
        (bare.fixed_files, bare.fixed_buffers),
        (Err(UringUnavailable::TurnedOff), Err(UringUnavailable::TurnedOff))
    );
    let large = features(Config { pool_arena_bytes: (1 << 30) + 1, ..common::uring() });
    assert_eq!(large.fixed_buffers, Err(UringUnavailable::ArenaTooLarge));
}

/// Makes `io_uring_setup` fail with `EPERM` on this thread and on threads that it starts.
fn forbid_rings() {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        // The number of the system call is the first field of what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter and its program live until the calls return; the kernel copies them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

#[test]
fn a_filtered_thread_works_with_system_calls() {
    forbid_rings();
    let required = Reactor::new(common::uring()).expect_err("a ring was required");
    assert!(matches!(required, StartError::Uring(UringUnavailable::Errno(libc::EPERM))), "{required}");
    if std::env::var_os("SEALBLOCK_RUNTIME").is_some() {
        // The variable decides then, not the kernel.
        return;
    }
    let reactor = Reactor::new(Config { runtime: BackendChoice::Auto, ..common::small() }).expect("falls back");
    assert_eq!(
        *reactor.backend(),
        Backend::Syscalls { threads: 4, reason: Some(UringUnavailable::Errno(libc::EPERM)) }
    );
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("the target folder can be written");
    reactor.block_on(async {
        let options = Options { write: true, create: true, ..Options::default() };
        let file = File::open(dir.path().join("f"), options).expect("opens");
        file.write_all_at(Slice::copy_from(b"abc"), 0).await.expect("writes");
        assert_eq!(file.len_bytes().expect("has a length"), 3);
    });
}
