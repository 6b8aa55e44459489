//! The program that uses this library, a command or a server: what it is, and what it knows that lies above; its reactors; and what
//! to say where io_uring is refused: by whom, and what lets it in.
//!
//! Commands work without it, by system calls. A server that does so is slower than its operator expects and says so once;
//! with `SEALBLOCK_RUNTIME=uring` the program does not start.

use std::cell::RefCell;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};
use std::{fmt, fs};

use futures_channel::oneshot;
use sealblock_block::Clock;
use sealblock_runtime_reactor::{Backend, Config, CoreAddress, Reactor, StartError, UringUnavailable, spawn};

use crate::error::{Cause, MORE_DESCRIPTORS, StackError, out_of_descriptors};

/// The setting that forbids io_uring since Linux 6.6: 0 for no process, 1 for all but root and a group, 2 for all processes.
const SETTING: &str = "/proc/sys/kernel/io_uring_disabled";
/// The setting that disables io_uring on purpose.
const WITHOUT: &str = "SEALBLOCK_RUNTIME=syscalls";

/// What a program is and knows.
#[derive(Clone, Copy)]
pub struct Program {
    /// True if it is a server: a file that it has in use is served by it, and not named twice on a command line.
    pub is_server: bool,
    /// Prints a note to the user beside the result.
    pub note: fn(&dyn fmt::Display),
    /// What the process of this number does with a file if it is a sealblock server, and what to try instead; `None` if it is
    /// none or does not respond.
    pub server_of: fn(u32, &Path) -> Option<(String, String)>,
    /// When closes are given up, because a signal ends the program; `None` while none has come.
    pub ends_by: fn() -> Option<Instant>,
}

impl Program {
    /// A server: notes are lines of its log, and it queries no server, since that could be itself.
    pub const SERVER: Program = Program { is_server: true, ..Program::UNKNOWN };

    const UNKNOWN: Program =
        Program { is_server: false, note: |what| tracing::warn!("{what}"), server_of: |_, _| None, ends_by: || None };
}

static PROGRAM: RwLock<Program> = RwLock::new(Program::UNKNOWN);

/// Sets the program, once.
pub fn set_program(program: Program) {
    *PROGRAM.write().unwrap_or_else(PoisonError::into_inner) = program;
}

/// What the program is.
pub(crate) fn program() -> Program {
    *PROGRAM.read().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// See [`set_cores`].
    static CORES: RefCell<Vec<CoreAddress>> = const { RefCell::new(Vec::new()) };
}

/// Sets the cores, this one among them, over which devices that are opened on this core may be spread. Without them,
/// each device stays on the core that opens it, with all of its parts.
pub fn set_cores(cores: Vec<CoreAddress>) {
    CORES.set(cores);
}

/// The cores over which devices may be spread; none, or the only one, where they stay.
pub(crate) fn cores() -> Vec<CoreAddress> {
    CORES.with_borrow(Clone::clone)
}

/// Runs work on another core; `None` if that core stops before its end. It takes none of the core's permits for calls:
/// callers inside of such calls could wait for each other.
pub(crate) async fn on_core<W, F, T>(core: &CoreAddress, work: W) -> Option<T>
where
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let (reply, done) = oneshot::channel();
    let sent = core.send(move || {
        drop(spawn(async move {
            // Nobody waits any more if this fails.
            let _ = reply.send(work().await);
        }));
    });
    sent.ok()?;
    done.await.ok()
}

/// Prints a note to the program's user.
pub fn note(what: impl fmt::Display) {
    (program().note)(&what);
}

/// The time of the reactor.
#[derive(Clone, Copy, Debug)]
pub struct ReactorClock;

impl Clock for ReactorClock {
    async fn sleep(&self, delay: Duration) {
        sealblock_runtime_reactor::sleep(delay).await;
    }
}

/// The settings of a command's reactors: less registered memory than a server's, since registration dominates the time of a
/// short command, and an ordinary user may lock little memory.
pub fn config() -> Config {
    const POOL_BYTES: usize = 8 << 20;
    Config { pool_arena_bytes: POOL_BYTES, ..Config::default() }
}

/// Runs a command's work on a reactor of this thread.
pub fn on_reactor<T>(work: impl Future<Output = Result<T, StackError>>) -> Result<T, StackError> {
    let reactor = Reactor::new(config()).map_err(|error| start_error(&error))?;
    reactor.block_on(work)
}

/// What an operator should know of a server that runs on this.
pub fn warning(backend: &Backend) -> Option<String> {
    let Backend::Syscalls { reason: Some(refusal), .. } = backend else { return None };
    let remedy = remedy(refusal, fs::read_to_string(SETTING).ok().as_deref());
    Some(format!(
        "io_uring is not available ({refusal}), using slower system calls: {remedy}; {WITHOUT} disables io_uring"
    ))
}

/// Why nothing was started.
pub fn start_error(error: &StartError) -> StackError {
    let failure = StackError::new(Cause::Io, "start", error);
    match error {
        StartError::Uring(refusal) => {
            let remedy = remedy(refusal, fs::read_to_string(SETTING).ok().as_deref());
            failure.advise(format!("use {WITHOUT}, or allow io_uring: {remedy}"))
        }
        StartError::System { source, .. } => match out_of_descriptors(source) {
            Some(why) => StackError::new(Cause::Io, "start", format!("{error}: {why}")).advise(MORE_DESCRIPTORS),
            None => failure.advise(WITHOUT),
        },
        StartError::UnknownChoice(_) => failure.advise(WITHOUT),
    }
}

/// Who refused, and what would help. `setting` is what stands in [`SETTING`].
fn remedy(refusal: &UringUnavailable, setting: Option<&str>) -> String {
    const FILTER: &str = "a seccomp filter of the service manager or container has to allow io_uring_setup, io_uring_enter \
         and io_uring_register (systemd: SystemCallFilter=@aio; Docker and Podman: --security-opt seccomp=PROFILE)";
    let words = match (refusal, setting.map(str::trim)) {
        (UringUnavailable::Errno(libc::EPERM), Some("2")) => {
            "kernel.io_uring_disabled is 2, which forbids it for all users; `sysctl kernel.io_uring_disabled=0` allows it"
        }
        (UringUnavailable::Errno(libc::EPERM), Some("1")) => {
            "kernel.io_uring_disabled is 1, which allows it to root and the group kernel.io_uring_group only; `sysctl \
             kernel.io_uring_disabled=0` allows it to everybody"
        }
        (UringUnavailable::Errno(libc::EPERM), _) => FILTER,
        (UringUnavailable::Errno(libc::ENOSYS), _) => {
            return format!(
                "either the kernel was built without it (Linux 5.11 or newer, CONFIG_IO_URING=y), or {FILTER}"
            );
        }
        (UringUnavailable::Errno(libc::EACCES), _) => "a security module (SELinux, AppArmor) must allow it",
        (UringUnavailable::Errno(libc::ENOMEM) | UringUnavailable::LockedMemory { .. }, _) => {
            "the limit on locked memory must be higher (systemd: LimitMEMLOCK=; shells: ulimit -l)"
        }
        (UringUnavailable::Lacks(_) | UringUnavailable::Errno(libc::EINVAL), _) => {
            "a newer kernel is needed, best Linux 6.1 or later"
        }
        (UringUnavailable::Errno(_) | UringUnavailable::TurnedOff | UringUnavailable::ArenaTooLarge, _) => {
            "the system log may show more"
        }
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use sealblock_runtime_reactor::Attempt;

    use super::*;

    #[test]
    fn who_refused_is_named_with_what_helps() {
        for (errno, setting, needed) in [
            (libc::EPERM, Some("2\n"), ["is 2", "sysctl kernel.io_uring_disabled=0"]),
            (libc::EPERM, Some("1\n"), ["is 1", "kernel.io_uring_group"]),
            (libc::EPERM, Some("0\n"), ["seccomp", "SystemCallFilter=@aio"]),
            (libc::EPERM, None, ["seccomp", "io_uring_setup, io_uring_enter and io_uring_register"]),
            (libc::ENOSYS, Some("0\n"), ["CONFIG_IO_URING", "seccomp"]),
            (libc::EACCES, None, ["SELinux", "AppArmor"]),
            (libc::ENOMEM, None, ["locked memory", "LimitMEMLOCK="]),
            (libc::EINVAL, None, ["newer kernel", "6.1"]),
        ] {
            let words = remedy(&UringUnavailable::Errno(errno), setting);
            assert!(needed.iter().all(|word| words.contains(word)), "{errno} {setting:?}: {words}");
        }
        let words = remedy(&UringUnavailable::Errno(libc::EPERM), Some("0\n"));
        assert!(!words.contains("sysctl"), "a setting that allows it is no reason: {words}");
    }

    #[test]
    fn a_server_warns_once_and_only_of_what_was_not_asked_for() {
        let refused = Backend::Syscalls { threads: 4, reason: Some(UringUnavailable::Errno(libc::ENOSYS)) };
        let words = warning(&refused).unwrap();
        assert!(words.starts_with("io_uring is not available (ENOSYS)") && words.contains(WITHOUT), "{words}");
        assert!(!words.contains('\n'), "{words}");
        assert_eq!(warning(&Backend::Syscalls { threads: 4, reason: None }), None);
    }

    #[test]
    fn a_ring_that_was_asked_for_is_a_failure_with_advice() {
        let failure = start_error(&StartError::Uring(UringUnavailable::Errno(libc::ENOSYS)));
        let said = failure.to_string();
        assert!(said.contains("ENOSYS") && said.contains("try: use SEALBLOCK_RUNTIME=syscalls, or"), "{said}");
        let source = std::io::Error::from_raw_os_error(libc::EMFILE);
        let said = start_error(&StartError::System { what: Attempt::CreateEvent, source }).to_string();
        assert!(said.contains("its limit allows\ntry: a higher limit of open files"), "{said}");
        let failure = start_error(&StartError::UnknownChoice("ring".to_owned()));
        assert_eq!(failure.advice(), Some(WITHOUT));
    }
}
