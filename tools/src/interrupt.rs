//! Ctrl-C while a command works: requests in flight complete, the command prints how far it came, and ends.
//!
//! The first SIGINT or SIGTERM only sets a flag, which the work looks at between two pieces; the same signal once more ends the
//! process at once, as does the first one if requests in flight do not complete within `GRACE`. A command that ends early ends
//! by the signal itself ([`end`]): a shell shows 130 or 143 for it, and a loop in a script stops, which it would not for an
//! ordinary exit.

use std::io::Write;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{fmt, fs, io};

use futures_util::future::{Either, select};
use futures_util::stream::{self, StreamExt};
use sealblock_stack::StackError;
use sealblock_stack::range::BlockRange;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

use crate::progress;
use crate::report::note;

/// How long requests in flight may take to complete.
const GRACE: Duration = Duration::from_secs(5);
/// How long the close of targets may take after that.
const CLOSE_TIME: Duration = Duration::from_secs(1);
/// How often a waiting task checks for a signal.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// What handlers write to: whether a signal came, and which one.
struct Flags {
    came: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

static FLAGS: OnceLock<Flags> = OnceLock::new();

/// Handles signals from now on. One that the process was started to ignore stays ignored, as for a job in the background of a script.
pub fn watch() {
    FLAGS.get_or_init(|| {
        let flags = Flags { came: Arc::default(), signal: Arc::default() };
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        for signal in [SIGINT, SIGTERM].into_iter().filter(|signal| !is_ignored(&status, *signal)) {
            // In this order: the first signal finds the flag unset and sets it, the second one finds it set. A signal that no
            // handler can be set for does what it always did.
            let _ = flag::register_conditional_default(signal, Arc::clone(&flags.came))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&flags.signal), signal as usize))
                .and_then(|_| flag::register(signal, Arc::clone(&flags.came)));
        }
        flags
    });
}

/// When it was first seen that a signal came.
static SEEN: OnceLock<Instant> = OnceLock::new();

/// Whether a signal came since [`watch`].
pub fn came() -> bool {
    let came = FLAGS.get().is_some_and(|flags| flags.came.load(Ordering::Relaxed));
    if came {
        SEEN.get_or_init(Instant::now);
    }
    came
}

/// When the close of targets is given up, because a signal came.
pub fn ends_by() -> Option<Instant> {
    came().then(|| *SEEN.get_or_init(Instant::now) + GRACE + CLOSE_TIME)
}

/// Ends the process by the signal that came, or else with the status that a shell shows for it.
pub fn end() -> ! {
    progress::erase();
    let signal = FLAGS.get().map_or(0, |flags| flags.signal.load(Ordering::Relaxed)) as i32;
    let signal = if signal == 0 { SIGINT } else { signal };
    let _ = low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}

/// Prints on standard error how far the work came and how to resume it.
pub fn report(what: impl fmt::Display, how_far: impl fmt::Display, go_on: impl fmt::Display) {
    progress::erase();
    // A closed standard error is no failure of the work.
    writeln!(io::stderr(), "sealblock: {what}: interrupted {how_far}\ntry: {go_on}").ok();
}

/// The same of work on blocks, of which `rest` is left.
pub fn report_rest(what: impl fmt::Display, rest: BlockRange) {
    report(what, format_args!("at block {}", rest.first()), format_args!("--range {rest} resumes the command"));
}

/// Says what becomes of changes that are in flight when the process ends.
pub fn report_in_flight() {
    note(
        &"changes were still in flight, and another server may execute them for up to a minute: write the same blocks again only then",
    );
}

/// Does pieces of work, some of them in flight, until a signal comes. `done` gets their results in the order of the pieces.
///
/// # Errors
/// That of the first piece that fails; none behind it is done.
pub async fn in_order<T, F: Future<Output = Result<T, StackError>>>(
    pieces: impl Iterator<Item = F>,
    in_flight: usize,
    mut done: impl FnMut(T),
) -> Result<(), StackError> {
    let mut results = stream::iter(pieces.take_while(|_| !came())).buffered(in_flight);
    while let Some(result) = results.next().await {
        done(result?);
    }
    Ok(())
}

/// Runs the work, which should end early once a signal [`came`]. If it does not, calls `last_words` and ends the process.
pub async fn or_end<T>(work: impl Future<Output = T>, last_words: impl FnOnce()) -> T {
    match select(pin!(work), pin!(shutdown_timeout())).await {
        Either::Left((done, _)) => done,
        Either::Right(((), _work)) => {
            // The work is not dropped: the kernel may write into its buffers until the process is gone.
            last_words();
            end()
        }
    }
}

/// Sleeps, but for no longer than until a signal comes.
pub async fn sleep(time: Duration) {
    let mut left = time;
    while !left.is_zero() && !came() {
        let step = left.min(PROBE_INTERVAL);
        sealblock_runtime_reactor::sleep(step).await;
        left -= step;
    }
}

/// Ends `GRACE` after a signal.
async fn shutdown_timeout() {
    while !came() {
        sealblock_runtime_reactor::sleep(PROBE_INTERVAL).await;
    }
    sealblock_runtime_reactor::sleep(GRACE).await;
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
/// True if the process was started to ignore SIGHUP, as by nohup(1).
pub fn ignores_hangup() -> bool {
    is_ignored(&fs::read_to_string("/proc/self/status").unwrap_or_default(), SIGHUP)
}

fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_those_of_the_mask() {
        let status = "Name:\tsealblock\nSigIgn:\t0000000000001002\nSigCgt:\tffffffffffffffff\n";
        assert!(is_ignored(status, SIGINT) && !is_ignored(status, SIGTERM));
        assert!(!is_ignored("", SIGINT) && !is_ignored("SigIgn:\tx", SIGINT));
    }

    #[test]
    fn nothing_came_before_anybody_watches() {
        assert!(!came());
    }
}
