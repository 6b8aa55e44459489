//! Choosing a backend, and doing without what the kernel refuses.

mod common;

use sealblock_runtime_reactor::{
    Backend, BackendChoice, Config, Features, Reactor, StartError, UringUnavailable, backend,
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
        // The limit counts for all processes of a user together, so an ordinary user may have no room left for this one.
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
