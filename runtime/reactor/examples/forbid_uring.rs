//! Runs a program where io_uring is forbidden, as in many containers: a filter answers its system calls with EPERM, or
//! with another error.
//!
//! ```console
//! $ cargo run -p sealblock-runtime-reactor --example forbid_uring -- EPERM target/debug/sealblock info mem:1MiB
//! ```
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Makes the three system calls of io_uring fail from now on, here and in programs that replace this one.
fn forbid(errno: i32) -> io::Result<()> {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let equals =
        |number: libc::c_long, jt| statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, 0, number as u32);
    let mut program = [
        // The number of the system call is the first field of what a filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        equals(libc::SYS_io_uring_setup, 3),
        equals(libc::SYS_io_uring_enter, 2),
        equals(libc::SYS_io_uring_register, 1),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter and its program live until the calls return; the kernel copies them.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter),
        ]
    };
    if results == [0, 0] { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let errno = match words.next().and_then(|word| word.into_string().ok()).as_deref() {
        Some("EPERM") => libc::EPERM,
        Some("ENOSYS") => libc::ENOSYS,
        _ => {
            eprintln!("usage: forbid_uring EPERM|ENOSYS PROGRAM ARGUMENTS ...");
            return ExitCode::from(2);
        }
    };
    let Some(program) = words.next() else { return ExitCode::from(2) };
    let error = match forbid(errno) {
        // The program replaces this one, so this does not return.
        Ok(()) => Command::new(&program).args(words).exec(),
        Err(error) => error,
    };
    eprintln!("forbid_uring: {}: {error}", program.to_string_lossy());
    ExitCode::from(3)
}
