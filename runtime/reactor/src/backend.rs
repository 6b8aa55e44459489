//! How a reactor says what it runs on.

use std::fmt;

/// What carries out a reactor's operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// An io_uring of the reactor's own.
    Uring(Features),
    /// System calls: on threads for files, after epoll for sockets.
    Syscalls {
        /// How many threads.
        threads: u32,
        /// Why there is no ring; `None` when system calls were asked for.
        reason: Option<UringUnavailable>,
    },
}

/// What a ring could be set up with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features {
    /// When completions are handled.
    pub completion: TaskrunMode,
    /// Files live in the ring's own table, or why not.
    pub fixed_files: Result<(), UringUnavailable>,
    /// The pool's arena is registered, or why not.
    pub fixed_buffers: Result<(), UringUnavailable>,
}

/// When the kernel does its part of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskrunMode {
    /// When the reactor asks (`IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN`, Linux 6.1).
    Deferred,
    /// At the next system call of the thread (`IORING_SETUP_COOP_TASKRUN`, Linux 5.19).
    Cooperative,
    /// At once, interrupting the thread.
    Plain,
}

/// Why the kernel, or the configuration, does not provide something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UringUnavailable {
    /// The kernel answered with this error number.
    Errno(i32),
    /// The limit on locked memory (`RLIMIT_MEMLOCK`, in bytes) is too low.
    LockedMemory {
        /// The limit.
        limit_bytes: u64,
    },
    /// The kernel has rings, but they lack this.
    Lacks(&'static str),
    /// The configuration does without.
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
        f.write_str(match self.completion {
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

/// The names of the errors that setting up a ring is known to meet.
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
    fn backends_describe_themselves() {
        let full = Features { completion: TaskrunMode::Deferred, fixed_files: Ok(()), fixed_buffers: Ok(()) };
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
