//! Runs one test on every way to set up a reactor.
#![allow(dead_code, reason = "each test binary uses its part")]

use sealblock_runtime_reactor::{Backend, Choice, Completion, Config, Reactor};

/// A small configuration, since tests start many reactors.
pub fn small() -> Config {
    Config { pool_arena_bytes: 4 << 20, ..Config::default() }
}

pub fn uring() -> Config {
    Config { runtime: Choice::Uring, ..small() }
}

pub fn syscalls() -> Config {
    Config { runtime: Choice::Syscalls, ..small() }
}

/// Whether this kernel lets us have a ring. Where it does not, the tests still run on the other backend.
pub fn has_uring() -> bool {
    let has = Reactor::new(uring()).is_ok();
    if !has {
        eprintln!("no io_uring here: only the system call backend is tested");
    }
    has
}

pub fn configurations() -> Vec<Config> {
    let mut all = vec![syscalls(), Config { syscall_threads: 1, ..syscalls() }];
    if has_uring() {
        all.push(uring());
        all.push(Config { fixed_files_limit: 0, pool_arena_bytes: 0, ..uring() });
        all.push(Config { operations_in_flight_limit: 2, fixed_files_limit: 1, ..uring() });
        all.push(Config { spin_us: 50, ..uring() });
        all.push(Config { best_completion: Completion::Cooperative, ..uring() });
        all.push(Config { best_completion: Completion::Plain, ..uring() });
    }
    all
}

pub fn everywhere(test: impl Fn(&Reactor)) {
    for config in configurations() {
        let reactor = Reactor::new(config).expect("a reactor starts");
        eprintln!("on {}", reactor.backend());
        test(&reactor);
    }
}

pub fn is_uring(reactor: &Reactor) -> bool {
    matches!(reactor.backend(), Backend::Uring(_))
}
