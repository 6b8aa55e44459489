//! What a reactor may be told, and every limit it keeps.

use std::fmt;

use crate::backend::{TaskrunMode, UringUnavailable};

/// The environment variable that chooses the backend where the configuration leaves it open: `uring` or `syscalls`.
pub const RUNTIME_VARIABLE: &str = "SEALBLOCK_RUNTIME";

/// Which backend carries out operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// What [`RUNTIME_VARIABLE`] says, else io_uring, else, when that is refused, system calls.
    #[default]
    Auto,
    /// io_uring; a reactor does not start without it.
    Uring,
    /// System calls on a few threads.
    Syscalls,
}

/// The settings of one reactor. All limits are per reactor.
#[derive(Clone, Debug)]
pub struct Config {
    /// The backend.
    pub runtime: BackendChoice,
    /// The best way of handling completions to ask the kernel for. Lesser ones are for tests and comparisons: the ring
    /// falls back to them by itself.
    pub best_completion: TaskrunMode,
    /// Operations on files that the kernel or the threads hold at once; further ones queue. At least 1. Operations that wait
    /// for a peer do not count, as idle peers would use up any limit: whoever accepts connections limits their number.
    pub operations_in_flight_limit: u32,
    /// Threads of the system call backend. At least 1. On a pinned core they share its CPU.
    pub syscall_threads: u32,
    /// Slots in the ring's table of fixed files; zero does without. Files and sockets beyond it use plain descriptors.
    pub fixed_files_limit: u32,
    /// Size of the pool's arena, which is registered with the ring and then counts as locked memory.
    pub pool_arena_bytes: usize,
    /// Limit that [`sealblock_runtime_memory::Pool::try_take`] keeps for the reactor's pool.
    pub pool_limit_bytes: usize,
    /// How long an idle reactor with operations in flight looks for completions before it sleeps, in microseconds. After a few
    /// times in vain it stops, until a sleep turns out to have been short.
    pub spin_us: u32,
    /// Calls from other threads that a core holds at once; further callers wait.
    pub calls_in_flight_limit: u32,
    /// Pretends that the kernel refuses rings with this error number, so that the fallback can be tested anywhere.
    pub refuse_uring: Option<i32>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            runtime: BackendChoice::Auto,
            best_completion: TaskrunMode::Deferred,
            operations_in_flight_limit: 1024,
            syscall_threads: 4,
            fixed_files_limit: 256,
            pool_arena_bytes: 32 << 20,
            pool_limit_bytes: 256 << 20,
            spin_us: 0,
            calls_in_flight_limit: 1024,
            refuse_uring: None,
        }
    }
}

impl Config {
    /// The backend asked for, by the configuration or else by the environment.
    pub(crate) fn choice(&self) -> Result<BackendChoice, StartError> {
        if self.runtime != BackendChoice::Auto {
            return Ok(self.runtime);
        }
        match std::env::var_os(RUNTIME_VARIABLE) {
            None => Ok(BackendChoice::Auto),
            Some(value) => parse(&value.to_string_lossy()),
        }
    }
}

fn parse(value: &str) -> Result<BackendChoice, StartError> {
    match value {
        "" | "auto" => Ok(BackendChoice::Auto),
        "uring" => Ok(BackendChoice::Uring),
        "syscalls" => Ok(BackendChoice::Syscalls),
        other => Err(StartError::UnknownChoice(other.to_owned())),
    }
}

/// Why a reactor did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The environment names no backend.
    #[error("{RUNTIME_VARIABLE}={0} names no backend; use uring, syscalls or auto")]
    UnknownChoice(String),
    /// io_uring was required and is not to be had.
    #[error("io_uring was asked for, but {0}; {RUNTIME_VARIABLE}=syscalls does without")]
    Uring(UringUnavailable),
    /// The system refused something that every backend needs.
    #[error("cannot {what}")]
    System {
        /// What was attempted.
        what: Attempt,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Steps of starting that the system may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// Creating the descriptor that wakes a sleeping reactor.
    CreateEvent,
    /// Starting a thread.
    StartThread,
    /// Reading which CPUs the process may use.
    ReadAffinity,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Attempt::CreateEvent => "create an event descriptor",
            Attempt::StartThread => "start a thread",
            Attempt::ReadAffinity => "read which CPUs may be used",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_choose_and_others_are_refused() {
        assert_eq!(parse("uring").ok(), Some(BackendChoice::Uring));
        assert_eq!(parse("syscalls").ok(), Some(BackendChoice::Syscalls));
        assert_eq!(parse("").ok(), Some(BackendChoice::Auto));
        assert!(matches!(parse("epoll"), Err(StartError::UnknownChoice(name)) if name == "epoll"));
    }
}
