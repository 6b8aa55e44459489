//! How long a close may take.
//!
//! A close waits for requests in flight, and for devices that may never answer. Once a signal has ended the program, neither may keep the
//! process: what is not closed by then is left as in a crash, from which the next opening recovers. Nothing is recorded as closed before
//! it is, so a close can be left at any point.

use std::future::pending;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use sealblock_block::{Error, ErrorKind};
use sealblock_runtime_reactor::{now, sleep};

use crate::program::program;

/// Of the time for a close, what is kept for the work after the wait for requests in flight: flushes, labels, and what is known of
/// scrubs and bad blocks.
const OWN_WORK: Duration = Duration::from_millis(500);
/// The time of a volume after the limit: only its medium can delay it, and it has not begun to close before what lies above it.
const VOLUME: Duration = Duration::from_secs(10);
/// How often it is checked whether a program without a limit has one now.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// When a close is given up.
#[derive(Clone, Copy, Debug)]
pub struct CloseLimit {
    by: Option<Instant>,
}

impl CloseLimit {
    /// That of the program ([`Program::ends_by`](crate::Program::ends_by)), which may get one at any time.
    pub const OF_PROGRAM: CloseLimit = CloseLimit { by: None };

    /// Requests in flight have until `requests_by`, and what is left to do then a short time more.
    pub fn after(requests_by: Instant) -> CloseLimit {
        CloseLimit { by: Some(requests_by + OWN_WORK) }
    }

    /// Completes when requests in flight are given up.
    pub async fn requests_overdue(self) {
        self.passed(|by| by - OWN_WORK).await;
    }

    /// Does a part of a close that has to end before the close itself goes on; `None` if it did not end in time.
    pub async fn part<T>(self, part: impl Future<Output = T>) -> Option<T> {
        let overdue = self.passed(|by| by - OWN_WORK / 2);
        match select(pin!(part), pin!(overdue)).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
    }

    /// Closes something, until the limit.
    pub(crate) async fn close<T>(self, closing: impl Future<Output = T>) -> Result<T, Error> {
        self.close_by(closing, |by| by).await
    }

    /// Closes a volume.
    pub(crate) async fn close_volume<T>(self, closing: impl Future<Output = T>) -> Result<T, Error> {
        self.close_by(closing, |by| by + VOLUME).await
    }

    async fn close_by<T>(self, closing: impl Future<Output = T>, by: impl Fn(Instant) -> Instant) -> Result<T, Error> {
        match select(pin!(closing), pin!(self.passed(by))).await {
            Either::Left((closed, _)) => Ok(closed),
            Either::Right(_) => Err(not_in_time()),
        }
    }

    /// Completes at this time, counted from the limit.
    async fn passed(self, at: impl Fn(Instant) -> Instant) {
        loop {
            let limit = self.by.or_else(|| (program().ends_by)());
            match limit.map(|by| at(by).saturating_duration_since(now())) {
                Some(Duration::ZERO) => return,
                Some(left) => sleep(left).await,
                // A server says it for each close.
                None if program().is_server => pending().await,
                None => sleep(PROBE_INTERVAL).await,
            }
        }
    }
}

#[cold]
fn not_in_time() -> Error {
    let reason = "it did not close in time; the next opening recovers what was completed".to_owned();
    ErrorKind::Unreachable { reason }.into()
}
