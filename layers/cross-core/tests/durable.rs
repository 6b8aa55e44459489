//! Flushes of several cores in flight, under random interleavings of their steps: a client whose writes were lost always
//! learns of it, although the device reports the loss to only one of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sealblock_block::{Error, ErrorKind, FlushCursor, FlushErrors, Outcome, Response};
use shuttle::future::block_on;
use shuttle::{check_random, thread};

/// The model checker's lock replaces the standard one for the file that is included below.
mod primitives {
    pub use shuttle::sync::{Mutex, MutexGuard};
}

#[path = "../src/durable.rs"]
mod durable;

use durable::DurableRequests;

const INTERLEAVINGS: usize = 20_000;
const CLIENTS: usize = 3;

/// A device that has lost writes, and reports it to the first flush only.
#[derive(Default)]
struct Device {
    has_reported: AtomicBool,
    requests: DurableRequests,
    errors: Arc<FlushErrors>,
}

impl Device {
    fn flush(&self) -> Outcome {
        thread::yield_now();
        let outcome = match self.has_reported.swap(true, Ordering::SeqCst) {
            false => Err(Error::from(ErrorKind::Media { reason: "lost".to_owned() })),
            true => Ok(Response::Done),
        };
        thread::yield_now();
        outcome
    }
}

type Flush = fn(&Device) -> Outcome;

/// As `SharedDevice::execute` does.
fn execute(device: &Device) -> Outcome {
    let guard = device.requests.start(&device.errors);
    let outcome = device.flush();
    guard.complete(&outcome);
    if outcome.is_ok() {
        block_on(device.requests.wait_for_earlier());
    }
    outcome
}

/// As `SharedDevice::try_execute` does, and `execute` where that executes nothing.
fn execute_in_place(device: &Device) -> Outcome {
    let Some(guard) = device.requests.start_alone(&device.errors) else { return execute(device) };
    let outcome = device.flush();
    match guard.complete(&outcome) || outcome.is_err() {
        true => outcome,
        false => execute(device),
    }
}

/// Each client has written, and flushes once.
fn run(flushes: [Flush; CLIENTS]) {
    let device = Arc::new(Device::default());
    // All have written before the first one flushes.
    let wrote = flushes.map(|flush| {
        let cursor: FlushCursor = device.errors.alone();
        cursor.write_completed(cursor.write_started());
        (flush, cursor)
    });
    let clients = wrote.map(|(flush, cursor)| {
        let device = Arc::clone(&device);
        thread::spawn(move || {
            let ticket = cursor.flush_started();
            let outcome = ticket.complete(flush(&device));
            assert!(outcome.is_err(), "a client took lost writes for durable");
        })
    });
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert!(device.requests.start_alone(&device.errors).is_some_and(|guard| {
        guard.cancel();
        true
    }));
}

#[test]
fn each_client_learns_of_lost_writes() {
    check_random(|| run([execute; CLIENTS]), INTERLEAVINGS);
}

#[test]
fn each_client_learns_of_lost_writes_in_place_too() {
    check_random(|| run([execute_in_place, execute_in_place, execute]), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "took lost writes for durable")]
fn a_flush_that_is_listed_after_its_execution_is_caught() {
    let listed_late: Flush = |device| {
        let outcome = device.flush();
        device.requests.start(&device.errors).complete(&outcome);
        if outcome.is_ok() {
            block_on(device.requests.wait_for_earlier());
        }
        outcome
    };
    check_random(move || run([listed_late; CLIENTS]), INTERLEAVINGS);
}

#[test]
#[should_panic(expected = "took lost writes for durable")]
fn a_flush_in_place_that_does_not_look_again_is_caught() {
    let looks_once: Flush = |device| {
        let Some(guard) = device.requests.start_alone(&device.errors) else { return execute(device) };
        let outcome = device.flush();
        guard.complete(&outcome);
        outcome
    };
    check_random(move || run([looks_once, execute, execute]), INTERLEAVINGS);
}

#[test]
fn a_request_that_is_dropped_counts_as_failed_and_one_that_did_not_begin_does_not() {
    check_random(
        || {
            let device = Device::default();
            let cursor = device.errors.alone();
            cursor.write_completed(cursor.write_started());
            device.requests.start(&device.errors).cancel();
            assert!(cursor.flush_started().complete(Ok(Response::Done)).is_ok());
            cursor.write_completed(cursor.write_started());
            let guard = device.requests.start(&device.errors);
            assert!(device.requests.start_alone(&device.errors).is_none());
            drop(guard);
            assert!(cursor.flush_started().complete(Ok(Response::Done)).is_err());
        },
        1,
    );
}
