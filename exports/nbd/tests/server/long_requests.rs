//! Requests without data, whose length the client chooses: only some start at a time, and none continues for a client
//! that is gone.

use std::io::Read;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::common::*;
use sealblock_block::{Abilities, Device, DynDevice, Geometry, Outcome, Request, RequestKind};
use sealblock_exports_nbd::Limits;
use sealblock_media_memory::MemoryDevice;
use sealblock_protocols_nbd::wire::{ErrorCode, command as c};
use sealblock_units::BlockSize;

/// More requests than memory for work allows to begin.
const REQUESTS: u64 = 48;
/// Bytes of each of them: several pieces.
const LONG: u64 = 64 << 20;

/// Counts discards and block status requests.
#[derive(Default)]
struct HeldState {
    begun: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
    is_released: AtomicBool,
}

/// A device in memory that holds these requests until they are released.
struct Held {
    below: MemoryDevice,
    state: Arc<HeldState>,
}

impl Device for Held {
    fn geometry(&self) -> &Geometry {
        self.below.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.below.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        let state = &self.state;
        if !matches!(request.kind(), RequestKind::Discard | RequestKind::BlockStatus) {
            return self.below.execute(request).await;
        }
        state.begun.fetch_add(1, Ordering::SeqCst);
        state.most.fetch_max(state.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        while !state.is_released.load(Ordering::SeqCst) {
            sealblock_runtime_reactor::sleep(Duration::from_millis(1)).await;
        }
        let outcome = self.below.execute(request).await;
        state.now.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

/// Serves such a device as `long`; returns also its counters.
fn serve_long() -> (Served, Arc<HeldState>) {
    let (served, state) = (serve(narrow()), Arc::new(HeldState::default()));
    let held = Arc::clone(&state);
    served.add("long", || {
        let below = MemoryDevice::new(BlockSize::B4096, 1 << 20, None);
        DynDevice::new("mem", Held { below, state: held })
    });
    (served, state)
}

/// The minimum of memory: one long request at a time.
fn narrow() -> Limits {
    let mut limits =
        Limits { connections: 4, total_bytes_in_flight: 0, drain: Duration::from_millis(100), ..Limits::default() };
    limits.connection.payload_bytes = 64 << 10;
    limits
}

fn begun(held: &HeldState) -> usize {
    held.begun.load(Ordering::SeqCst)
}

#[test]
fn one_client_after_the_other_has_its_turn_and_all_are_answered() {
    for kind in [c::TRIM, c::BLOCK_STATUS] {
        let (served, held) = serve_long();
        let mut clients = [false, true].map(|_| Client::open(served.address, "long", true));
        let sent: Vec<Vec<u64>> = clients
            .iter_mut()
            .map(|client| (0..REQUESTS).map(|at| client.send(0, kind, at * LONG, LONG, &[])).collect())
            .collect();
        until("nothing begins", || begun(&held) > 0);
        let mut other = Client::open(served.address, "long", false);
        assert_eq!(other.read(0, BLOCK).len(), BLOCK as usize, "a read does not wait for them");
        // Nothing shows that no other request starts; the counter below covers the whole test.
        sleep(Duration::from_millis(50));
        held.is_released.store(true, Ordering::SeqCst);
        for (client, sent) in clients.iter_mut().zip(sent) {
            let mut replied: Vec<u64> = sent.iter().map(|_| client.receive().0).collect();
            replied.sort_unstable();
            assert_eq!(replied, sent);
        }
        let most = held.most.load(Ordering::SeqCst);
        // The device divides its requests once more.
        assert!(most <= 16, "{most} requests of {REQUESTS} were at the device at once");
    }
}

#[test]
fn nothing_goes_on_for_a_client_that_is_gone() {
    let (served, held) = serve_long();
    let mut gone = Client::open(served.address, "long", false);
    for at in 0..REQUESTS {
        gone.send(0, c::TRIM, at * LONG, LONG, &[]);
    }
    until("nothing begins", || begun(&held) > 0);
    gone.stream.shutdown(Shutdown::Write).unwrap();
    // The server closes once it has noticed; a reset is an end, too.
    let _ = gone.stream.read_to_end(&mut Vec::new());
    let before = begun(&held);
    held.is_released.store(true, Ordering::SeqCst);
    until("what has begun goes on", || held.now.load(Ordering::SeqCst) == 0);
    let mut other = Client::open(served.address, "long", false);
    assert_eq!(other.read(0, BLOCK).len(), BLOCK as usize);
    let after = begun(&held) - before;
    assert!(after <= 16, "{after} further requests began, of {} pieces", REQUESTS * LONG / (16 << 20));
}

#[test]
fn what_has_not_begun_is_refused_by_a_server_that_stops() {
    let (served, held) = serve_long();
    let mut client = Client::open(served.address, "long", true);
    let sent: Vec<u64> = (0..REQUESTS).map(|at| client.send(0, c::TRIM, at * LONG, LONG, &[])).collect();
    until("nothing begins", || begun(&held) > 0);
    // A read after them: when it is answered, all of them have been received.
    let read = client.send(0, c::READ, 0, BLOCK, &[]);
    assert_eq!(client.receive().0, read);
    served.server.stop();
    let (cookie, chunks) = client.receive();
    let [(_, error)] = &chunks[..] else { panic!("{chunks:?}") };
    assert!(cookie != sent[0] && error[..4] == (ErrorCode::Shutdown as u32).to_be_bytes(), "{cookie}: {error:?}");
    held.is_released.store(true, Ordering::SeqCst);
    served.served.recv_timeout(LATE).unwrap().unwrap();
}
