//! Which standard streams the process was started without.
//!
//! Rust's runtime opens `/dev/null` in their place before `main`, so that no file that is opened later gets their number. From then on
//! a stream that was closed looks like one that was redirected to `/dev/null`, possibly by a caller that opened it for reading and
//! writing, too. So it is recorded before the runtime starts. On a C library that calls no initialisers, every stream counts as open.

use std::sync::atomic::{AtomicU8, Ordering};

/// A standard stream, as its file descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum StandardStream {
    /// Standard input.
    Input = 0,
    /// Standard output.
    Output = 1,
    /// Standard error.
    Error = 2,
}

/// A bit for each closed stream.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
// SAFETY: the section has addresses of functions with this calling convention, which the C library calls once before `main`. This one only
// asks the kernel about file descriptors and sets an atomic integer; it needs nothing of Rust's runtime, and does not panic.
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

extern "C" fn record() {
    for fd in [StandardStream::Input, StandardStream::Output, StandardStream::Error] {
        // SAFETY: F_GETFD takes any number, and touches no memory.
        if unsafe { libc::fcntl(fd as libc::c_int, libc::F_GETFD) } < 0 {
            CLOSED.fetch_or(1 << fd as u8, Ordering::Relaxed);
        }
    }
}

/// Whether the process was started without this stream: nothing that is written there arrives, and nothing can be read.
pub fn was_closed_at_start(stream: StandardStream) -> bool {
    CLOSED.load(Ordering::Relaxed) >> stream as u8 & 1 == 1
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    const IN_CHILD: &str = "SEALBLOCK_TEST_STREAMS";

    #[test]
    fn streams_that_were_closed_are_known_and_null_devices_are_not_closed() {
        if std::env::var_os(IN_CHILD).is_some() {
            let all = [StandardStream::Input, StandardStream::Output, StandardStream::Error];
            let closed = all.map(was_closed_at_start);
            std::process::exit(closed.iter().fold(100, |sum, closed| 2 * sum + i32::from(*closed)) - 800);
        }
        let test = std::env::current_exe().unwrap();
        for (redirected, closed) in
            [("<&- >/dev/null", 0b100), (">&-", 0b010), ("2>&-", 0b001), ("<>/dev/null 1<>/dev/null 2>&1", 0)]
        {
            let line = format!("exec \"$0\" --exact {} --nocapture {redirected}", test_name());
            let mut shell = Command::new("sh");
            shell.args(["-c", &line]).arg(&test).env(IN_CHILD, "1").stdin(Stdio::null());
            assert_eq!(shell.status().unwrap().code(), Some(closed), "{redirected}");
        }
    }

    fn test_name() -> &'static str {
        "standard_streams::tests::streams_that_were_closed_are_known_and_null_devices_are_not_closed"
    }
}
