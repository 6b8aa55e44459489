//! A client and a server against each other, whatever the pieces: what is read is what was written.

use proptest::prelude::*;
use sealblock_runtime_memory::{Buffer, Pool, Slice};

use crate::client::{self, Client, ClientRequest, Goal, Reply};
use crate::{Command, ErrorCode, ErrorReply, Event, Export, Limits, Request, Server, ServerConfig, StatusDescriptor};

const SIZE: usize = 64 << 10;
const BLOCK: usize = 512;

/// Bytes on their way, cut as they like.
#[derive(Default)]
struct Wire(Vec<u8>);

impl Wire {
    fn put(&mut self, slices: Vec<Slice>) {
        slices.iter().for_each(|slice| self.0.extend_from_slice(slice));
    }

    /// At most this much of what is there.
    fn take(&mut self, max_bytes: usize) -> Vec<u8> {
        self.0.drain(..max_bytes.min(self.0.len())).collect()
    }
}

struct Pair {
    client: Client,
    server: Server,
    to_server: Wire,
    to_client: Wire,
    /// What the server stores, and the blocks that it cannot read.
    stored: Vec<u8>,
    bad: Vec<u64>,
    /// Requests that the server has not answered.
    held: Vec<Request>,
}

fn pair(extended: bool, bad: Vec<u64>, direct_bytes: usize) -> Pair {
    let export = Export {
        name: "disk".into(),
        description: String::new(),
        size_bytes: SIZE as u64,
        block_bytes: BLOCK as u32,
        writable: true,
        trim: true,
        write_zeroes: true,
        older: 4,
        identity: crate::IdentitySource::new(|| crate::Identity { uuid: Some([6; 16]), devices: vec![[7; 16]] }),
    };
    let mut served = ServerConfig::new(Pool::new(0, usize::MAX), [export]);
    served.limits = Limits { commands: 6, bytes_in_flight: 16 << 10, payload_bytes: 8192, ..Limits::default() };
    let mut config = client::Config::new(Pool::new(0, usize::MAX), Goal::Go("disk".into()));
    (config.wants_extended, config.direct_bytes) = (extended, direct_bytes);
    Pair {
        client: Client::new(config),
        server: Server::new(served),
        to_server: Wire::default(),
        to_client: Wire::default(),
        stored: vec![0; SIZE],
        bad,
        held: Vec::new(),
    }
}

impl Pair {
    /// Moves some bytes each way; returns the client's events.
    fn turn(&mut self, max_bytes: usize, newest_first: bool) -> Vec<client::Event> {
        let mut out = Vec::new();
        self.client.transmit(&mut out);
        self.to_server.put(std::mem::take(&mut out));
        if let Some(mut buffer) = self.server.receive_buffer() {
            let bytes = self.to_server.take(max_bytes.min(buffer.len()));
            buffer[..bytes.len()].copy_from_slice(&bytes);
            self.server.received(buffer, bytes.len());
        }
        while let Some(event) = self.server.next_event() {
            match event {
                Event::Request(request) => self.held.push(request),
                Event::Chosen(_) | Event::Unknown(_) | Event::Closed(_) => {}
            }
        }
        if !self.held.is_empty() {
            let at = if newest_first { self.held.len() - 1 } else { 0 };
            let request = self.held.remove(at);
            self.answer(request);
        }
        self.server.transmit(&mut out);
        self.server.sent();
        self.to_client.put(out);
        if let Some(mut buffer) = self.client.receive_buffer() {
            let bytes = self.to_client.take(max_bytes.min(buffer.len()));
            buffer[..bytes.len()].copy_from_slice(&bytes);
            self.client.received(buffer, bytes.len());
        }
        std::iter::from_fn(|| self.client.next_event()).collect()
    }

    fn answer(&mut self, Request { ticket, command }: Request) {
        let range = |offset: u64, length: u64| offset as usize..(offset + length) as usize;
        match command {
            Command::Read { offset, length } => {
                let all = range(offset, length.into());
                let bad = self.bad.iter().map(|block| *block as usize * BLOCK).filter(|at| all.contains(at)).min();
                let good = |range: std::ops::Range<usize>| vec![Slice::copy_from(&self.stored[range])];
                match bad {
                    None => self.server.data(ticket, good(all)),
                    Some(at) => {
                        let before = if at > all.start { good(all.start..at) } else { Vec::new() };
                        let offset = Some(at as u64);
                        let failed = ErrorReply { code: ErrorCode::Io, offset, message: "bad".into() };
                        self.server.fail(ticket, before, &failed);
                    }
                }
            }
            Command::Write { offset, data, .. } => {
                self.stored[range(offset, data.len() as u64)].copy_from_slice(&data);
                self.server.done(ticket);
            }
            Command::WriteZeroes { offset, length, .. } | Command::Trim { offset, length, .. } => {
                self.stored[range(offset, length)].fill(0);
                self.server.done(ticket);
            }
            Command::BlockStatus { offset, length, .. } => {
                let half = (length / 2).next_multiple_of(BLOCK as u64);
                let rest = length - half;
                let runs = [
                    StatusDescriptor { length: half, status: (offset >> 9) as u32 & 3 },
                    StatusDescriptor { length: rest, status: 0 },
                ];
                self.server.status(ticket, &runs[..if rest > 0 { 2 } else { 1 }]);
            }
            Command::Flush | Command::Cache { .. } => self.server.done(ticket),
        }
    }
}

/// A request: kind, first block, blocks.
fn request() -> impl Strategy<Value = (u8, u64, u64, u8)> {
    let blocks = SIZE as u64 / BLOCK as u64;
    (0..6u8, 0..blocks, 1..16u64, any::<u8>())
        .prop_map(move |(kind, first, count, seed)| (kind, first, count.min(blocks - first), seed))
}

fn ask(kind: u8, first: u64, count: u64, seed: u8) -> ClientRequest {
    let (offset, length) = (first * BLOCK as u64, count * BLOCK as u64);
    match kind {
        0 => ClientRequest::Read { offset, length: length as u32, whole: false },
        1 => {
            let mut data = Buffer::zeroed(length as usize);
            data.iter_mut().enumerate().for_each(|(i, byte)| *byte = seed ^ i as u8);
            ClientRequest::Write { offset, data: data.freeze(), fua: seed & 1 == 0 }
        }
        2 => ClientRequest::WriteZeroes { offset, length, fua: false, no_hole: seed & 1 == 0, fast: false },
        3 => ClientRequest::BlockStatus { offset, length, one: seed & 1 == 0 },
        4 => ClientRequest::Cache { offset, length },
        _ => ClientRequest::Flush,
    }
}

/// Sends the requests one after the other and compares each answer with what is stored at that time.
fn one_by_one(mut pair: Pair, requests: &[(u8, u64, u64, u8)], max_bytes: usize) -> Result<(), TestCaseError> {
    let mut requests = requests.iter();
    let mut now: Option<(usize, (u8, u64, u64, u8))> = None;
    let mut is_ready = false;
    for _ in 0..1_000_000 {
        if is_ready && now.is_none() {
            let Some(&next) = requests.next() else { return Ok(()) };
            let (kind, first, count, seed) = next;
            now = Some((pair.client.submit(ask(kind, first, count, seed)).expect("it is offered"), next));
        }
        for event in pair.turn(max_bytes, false) {
            match event {
                client::Event::Ready(_) => is_ready = true,
                client::Event::Completed(completed) => {
                    let (place, asked) = now.take().expect("one is in flight");
                    prop_assert_eq!(completed.place, place);
                    compare(&pair, asked, completed.outcome)?;
                }
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            }
        }
    }
    Err(TestCaseError::fail("it does not end"))
}

fn compare(
    pair: &Pair,
    (kind, first, count, seed): (u8, u64, u64, u8),
    outcome: Result<Reply, Vec<client::ServerError>>,
) -> Result<(), TestCaseError> {
    let first_bad = pair.bad.iter().filter(|block| (first..first + count).contains(block)).min();
    match (outcome, first_bad) {
        (Ok(Reply::Data(data)), None) => {
            let from = first as usize * BLOCK;
            prop_assert!(data[..] == pair.stored[from..from + count as usize * BLOCK]);
        }
        (Ok(Reply::Status(runs)), _) => {
            prop_assert_eq!(kind, 3);
            prop_assert_eq!(runs[0].status, first as u32 & 3);
            prop_assert!(runs.len() == 1 || seed & 1 == 1, "one descriptor was requested");
        }
        (Ok(Reply::Done), _) => prop_assert!(kind != 0 && kind != 3),
        (Err(errors), Some(bad)) => {
            prop_assert_eq!(kind, 0);
            prop_assert_eq!(errors[0].offset, Some(bad * BLOCK as u64));
        }
        (other, bad) => return Err(TestCaseError::fail(format!("{other:?} with {bad:?}"))),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_read_is_what_was_written(
        extended in any::<bool>(),
        direct_bytes in prop_oneof![Just(1usize), Just(700), Just(usize::MAX)],
        requests in proptest::collection::vec(request(), 1..24),
        bad in proptest::collection::vec(0..SIZE as u64 / BLOCK as u64, 0..4),
        max_bytes in prop_oneof![1..40usize, 40..9000usize],
    ) {
        one_by_one(pair(extended, bad, direct_bytes), &requests, max_bytes)?;
    }

    #[test]
    fn many_at_once_are_each_answered_once(
        extended in any::<bool>(),
        newest_first in any::<bool>(),
        requests in proptest::collection::vec(request(), 1..48),
        max_bytes in 1..3000usize,
    ) {
        let mut pair = pair(extended, Vec::new(), 700);
        let (mut is_ready, mut completed, mut open) = (false, 0, std::collections::BTreeSet::new());
        let mut next = requests.iter();
        for _ in 0..200_000 {
            while is_ready && pair.client.can_submit() {
                let Some(&(kind, first, count, seed)) = next.next() else { break };
                prop_assert!(open.insert(pair.client.submit(ask(kind, first, count, seed)).expect("it is offered")));
            }
            for event in pair.turn(max_bytes, newest_first) {
                match event {
                    client::Event::Ready(_) => is_ready = true,
                    client::Event::Completed(answer) => {
                        prop_assert!(open.remove(&answer.place));
                        prop_assert!(answer.outcome.is_ok());
                        completed += 1;
                    }
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                }
            }
            if completed == requests.len() {
                return Ok(());
            }
        }
        Err(TestCaseError::fail("it does not end"))?;
    }

    #[test]
    fn noise_does_a_client_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        crate::fuzz::client::run(&bytes);
    }

    #[test]
    fn changed_bytes_do_a_client_no_harm(
        style in 0..3u8,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        piece in 1..64usize,
    ) {
        use crate::fuzz::client::{client, play, preamble};
        let mut bytes = preamble(style);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let goal = Goal::Go("disk".into());
        let whole = play(&mut client(goal.clone(), 1), [&bytes[..]]);
        prop_assert_eq!(play(&mut client(goal, 1), bytes.chunks(piece)), whole);
    }
}
