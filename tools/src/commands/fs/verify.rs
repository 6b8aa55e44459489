//! `sealblock fs verify`: checks every copy of a filesystem, of a file in it, or of all below a directory.
//!
//! The work is that of [`sealblock_btrfs::verify`]; here it gets its pace, its progress and its end by a signal, and its report is told.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use sealblock_btrfs::verify::{Mode, Progress as Reached, VerifyOptions, Watch, expected_bytes, verify, verify_files};
use sealblock_scrub::{Activity, Pace};
use sealblock_stack::filesystem::OpenFilesystem;
use sealblock_stack::quantity::Rate;
use sealblock_stack::{Cause, StackError};
use sealblock_units::ByteCount;

use super::place::{resolve, why_older, with_filesystem};
use super::reseal::{RepairReport, ResealReport, forget_tags, repair, reseal};
use super::verify_report::{Outcome, lines, summary};
use crate::cli::{self, FsVerify};
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::{note, print_json, say};

/// Checks it.
pub fn run(arguments: &FsVerify) -> Result<Exit, StackError> {
    interrupt::watch();
    let repaired = match arguments.repair {
        true => Some(repair(&arguments.place, &Watcher::new(arguments, "looking for damage", None))?),
        false => None,
    };
    let resealed = match arguments.reseal {
        true => Some(reseal(&arguments.place, &Watcher::new(arguments, "resealing", None))?),
        false => None,
    };
    if arguments.forget_tags {
        forget_tags(&arguments.place)?;
    }
    with_filesystem(&arguments.place, async |open| {
        let outcome = interrupt::or_end(check(arguments, open), || {
            note(&format_args!("verifying {}: interrupted while a request was in flight", arguments.place));
        });
        let outcome = Outcome { repaired, resealed, ..outcome.await? };
        tell(arguments, &outcome)?;
        Ok(outcome.exit())
    })
}

async fn check(arguments: &FsVerify, open: &OpenFilesystem) -> Result<Outcome, StackError> {
    let filesystem = &open.filesystem;
    let mode = match arguments.mode {
        cli::Mode::Auto => Mode::Auto,
        cli::Mode::Offload => Mode::Offload,
        cli::Mode::Emulate => Mode::Emulate,
    };
    let options = VerifyOptions { mode, ..VerifyOptions::default() };
    let started = Instant::now();
    let place = &arguments.place;
    let total = (!place.has_place).then(|| ByteCount::new(expected_bytes(filesystem)));
    let watch = Watcher::new(arguments, "verifying", total);
    let report = if place.has_place {
        let start = resolve(open, place, true).await?;
        if place.path.is_empty() {
            note(&"only this path is checked; without a path, the whole filesystem is");
        }
        verify_files(filesystem, start, options, &watch).await
    } else {
        verify(filesystem, options, &watch).await
    };
    let report = report.map_err(|error| {
        let unable = StackError::new(Cause::Absent, "verify", error).on(place);
        unable.advise("use --mode auto or --mode emulate")
    })?;
    let devices = filesystem.storage().devices.iter();
    let names = devices.map(|(devid, device)| (devid, device.name.clone())).collect();
    let older = why_older(open);
    Ok(Outcome {
        target: place.to_string(),
        report,
        older,
        names,
        elapsed: started.elapsed(),
        repaired: None,
        resealed: None,
    })
}

/// Prints the outcome.
fn tell(arguments: &FsVerify, outcome: &Outcome) -> Result<(), StackError> {
    if arguments.json {
        return print_json(&outcome.to_json());
    }
    let repaired = outcome.repaired.iter().flat_map(RepairReport::lines);
    let resealed = outcome.resealed.iter().flat_map(ResealReport::lines);
    repaired.chain(resealed).chain(lines(outcome)).try_for_each(|line| say(&line))?;
    if arguments.quiet && outcome.exit() == Exit::Clean { Ok(()) } else { say(&summary(outcome)) }
}

/// Shows how far it is, keeps the pace, and stops at a signal.
struct Watcher {
    progress: Progress,
    reached: Cell<Reached>,
    rate: Option<Rate>,
    pace: RefCell<Pace>,
    started: Instant,
}

impl Watcher {
    fn new(arguments: &FsVerify, doing: &'static str, total: Option<ByteCount>) -> Watcher {
        let show = if arguments.json || arguments.quiet { Show::Never } else { Show::OnTerminal };
        Watcher {
            progress: Progress::new(doing, total, show),
            reached: Cell::default(),
            rate: arguments.rate,
            pace: RefCell::new(Pace::from(Duration::ZERO)),
            started: Instant::now(),
        }
    }

    /// Waits as long as so many bytes take at the rate.
    async fn wait_for(&self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        self.pace.borrow_mut().started(self.started.elapsed(), bytes, Some(rate.bytes_per_second()));
        while !interrupt::came() {
            let wait = self.pace.borrow_mut().wait(self.started.elapsed(), Activity::default(), false);
            let Some(wait) = wait else { return };
            interrupt::sleep(wait).await;
        }
    }
}

impl Watch for Watcher {
    fn go_on(&self, reached: Reached) -> LocalBoxFuture<'_, bool> {
        let before = self.reached.replace(reached);
        let bytes = reached.bytes.saturating_sub(before.bytes);
        self.progress.advance(bytes);
        if reached.damage_count > before.damage_count {
            self.progress.bad(reached.damage_count - before.damage_count);
        }
        Box::pin(async move {
            self.wait_for(bytes).await;
            !interrupt::came()
        })
    }
}
