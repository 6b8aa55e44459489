//! The configuration of a reactor with all its limits, and the backend that it started with.

use std::fmt;

/// The environment variable that chooses the backend if the configuration does not: `uring` or `syscalls`.
pub const RUNTIME_VARIABLE: &str = "SEALBLOCK_RUNTIME";

/// Which backend executes operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The value of [`RUNTIME_VARIABLE`]; without it io_uring, or system calls if the kernel refuses it.
    #[default]
    Auto,
    /// io_uring; the reactor does not start without it.
    Uring,
    /// System calls on a few threads.
    Syscalls,
}

/// The settings of one reactor. All limits are per reactor.
#[derive(Clone, Debug)]
pub struct Config {
    /// The backend.
    pub runtime: BackendChoice,
    /// The best mode of handling completions to request from the kernel. The ring falls back to the other modes by
    /// itself; requesting them is for tests and comparisons.
    pub best_taskrun: TaskrunMode,
    /// The maximum number of file operations in the kernel or on threads; further ones queue. At least 1. Operations
    /// that wait for a peer do not count, because idle peers would use up any limit: callers that accept connections
    /// limit their number.
    pub operations_in_flight_limit: u32,
    /// Threads of the system call backend. At least 1. On a pinned core they share its CPU.
    pub syscall_threads: u32,
    /// The maximum number of threads for commands to devices, such as [`crate::File::nvme`], which block their thread
    /// on every backend. They are started when they are needed; further commands queue. At least 1.
    pub blocking_threads_limit: u32,
    /// Slots in the ring's table of fixed files; zero for no table. Files and sockets beyond it use plain descriptors.
    pub fixed_files_limit: u32,
    /// Size of the pool's arena, which is registered with the ring and then counts as locked memory.
    pub pool_arena_bytes: usize,
    /// The limit of the reactor's pool for [`sealblock_runtime_memory::Pool::try_take`].
    pub pool_limit_bytes: usize,
    /// How long an idle reactor with operations in flight polls for completions before it sleeps, in microseconds.
    /// After a few polls without a completion it sleeps at once, until a sleep turns out to be short.
    pub spin_us: u32,
    /// The maximum number of calls from other threads that a core holds; further callers wait.
    pub calls_in_flight_limit: u32,
    /// Pretends that the kernel refuses rings with this error number, so that the fallback can be tested anywhere.
    pub refuse_uring: Option<i32>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            runtime: BackendChoice::Auto,
            best_taskrun: TaskrunMode::Deferred,
            operations_in_flight_limit: 1024,
            syscall_threads: 4,
            blocking_threads_limit: 16,
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
    /// The requested backend: from the configuration, or else from the environment.
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
    /// io_uring was required and is unavailable.
    #[error("io_uring was asked for, but {0}; {RUNTIME_VARIABLE}=syscalls does without")]
    Uring(UringUnavailable),
    /// The system refused something that every backend needs.
    #[error("cannot {what}")]
    System {
        /// What was attempted.
        what: Attempt,
        /// The error of the system.
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
    /// Reading the set of CPUs that the process may use.
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

/// The backend that executes a reactor's operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// An io_uring of the reactor's own.
    Uring(Features),
    /// System calls: on threads for files, after epoll for sockets.
    Syscalls {
        /// The number of threads.
        threads: u32,
        /// Why there is no ring; `None` if system calls were requested.
        reason: Option<UringUnavailable>,
    },
}

/// The features that the kernel granted to a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    /// When completions are handled.
    pub taskrun: TaskrunMode,
    /// Whether files are in the ring's own table, or why not.
    pub fixed_files: Result<(), UringUnavailable>,
    /// Whether the pool's arena is registered, or why not.
    pub fixed_buffers: Result<(), UringUnavailable>,
}

/// When the kernel runs its part of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskrunMode {
    /// When the reactor enters the ring (`IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN`, Linux 6.1).
    Deferred,
    /// At the next system call of the thread (`IORING_SETUP_COOP_TASKRUN`, Linux 5.19).
    Cooperative,
    /// At once, interrupting the thread.
    Plain,
}

/// Why the kernel, or the configuration, does not provide something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UringUnavailable {
    /// The kernel returned this error number.
    Errno(i32),
    /// The limit on locked memory (`RLIMIT_MEMLOCK`, in bytes) is too low.
    LockedMemory {
        /// The limit.
        limit_bytes: u64,
    },
    /// The kernel's rings lack this feature.
    Lacks(&'static str),
    /// The configuration turns it off.
    TurnedOff,
    /// A registered buffer holds at most 1 GiB.
    ArenaTooLarge,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Backend::Uring(features) => write!(f, "io_uring ({features})"),
            Backend::Syscalls { threads, reason: None } => write!(f, "system calls on {threads} threads"),
            Backend::Syscalls { threads, reason: Some(reason) } => {
                write!(f, "system calls on {threads} threads (io_uring refused: {reason})")
            }
        }
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.taskrun {
            TaskrunMode::Deferred => "single issuer, deferred task run",
            TaskrunMode::Cooperative => "cooperative task run",
            TaskrunMode::Plain => "plain task run",
        })?;
        for (name, state) in [("files", &self.fixed_files), ("buffers", &self.fixed_buffers)] {
            match state {
                Ok(()) => write!(f, ", fixed {name}")?,
                Err(reason) => write!(f, ", no fixed {name}: {reason}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for UringUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UringUnavailable::Errno(errno) => match name_of(*errno) {
                Some(name) => f.write_str(name),
                None => write!(f, "error {errno}"),
            },
            UringUnavailable::LockedMemory { limit_bytes } => {
                write!(f, "locked memory is limited to {limit_bytes} bytes")
            }
            UringUnavailable::Lacks(what) => write!(f, "the kernel lacks {what}"),
            UringUnavailable::TurnedOff => f.write_str("turned off"),
            UringUnavailable::ArenaTooLarge => f.write_str("the arena is larger than 1 GiB"),
        }
    }
}

/// The names of the known errors of a ring's setup.
fn name_of(errno: i32) -> Option<&'static str> {
    Some(match errno {
        libc::EPERM => "EPERM",
        libc::ENOSYS => "ENOSYS",
        libc::EACCES => "EACCES",
        libc::EINVAL => "EINVAL",
        libc::ENOMEM => "ENOMEM",
        libc::EMFILE => "EMFILE",
        libc::ENFILE => "ENFILE",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        _ => return None,
    })
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

    #[test]
    fn backends_describe_themselves() {
        let full = Features { taskrun: TaskrunMode::Deferred, fixed_files: Ok(()), fixed_buffers: Ok(()) };
        assert_eq!(
            Backend::Uring(full.clone()).to_string(),
            "io_uring (single issuer, deferred task run, fixed files, fixed buffers)"
        );
        let locked = Err(UringUnavailable::LockedMemory { limit_bytes: 65536 });
        assert_eq!(
            Backend::Uring(Features { fixed_buffers: locked, ..full }).to_string(),
            "io_uring (single issuer, deferred task run, fixed files, no fixed buffers: locked memory is limited to 65536 bytes)"
        );
        let refused = Backend::Syscalls { threads: 4, reason: Some(UringUnavailable::Errno(libc::EPERM)) };
        assert_eq!(refused.to_string(), "system calls on 4 threads (io_uring refused: EPERM)");
    }
}
