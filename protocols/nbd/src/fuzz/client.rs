//! Bytes against a client that sends a request of every kind.
//!
//! Asserts for any input: a request completes once, data of a read has the requested length, status stays within its
//! request, no limit is exceeded, and a closed connection stays closed.

use sealblock_runtime_memory::{Buffer, Pool};

use crate::client::{Client, ClientRequest, Closed, CompletedRequest, Config, Event, Goal, Limits, Reply};
use crate::wire::{self, info, option, rep};

/// Bytes of the export that [`preamble`] describes.
pub const SIZE_BYTES: u64 = 1 << 30;
const LIMITS: Limits = Limits {
    option_replies: 8,
    negotiation_bytes: 4096,
    payload_bytes: 8192,
    commands: 8,
    pieces: 4,
    runs: 8,
    errors: 4,
};

/// Events of a client, and the bytes that it sent.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct Transcript {
    /// Events in order, as text.
    pub events: Vec<String>,
    /// Bytes that were sent.
    pub sent: Vec<u8>,
    /// How it ended, if it did.
    pub closed: Option<Closed>,
}

/// A client for this goal.
pub fn client(goal: Goal, direct_bytes: usize) -> Client {
    let mut config = Config::new(Pool::new(0, usize::MAX), goal);
    (config.limits, config.direct_bytes, config.staging_bytes) = (LIMITS, direct_bytes, 1);
    Client::new(config)
}

/// A reply to an option.
pub fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = wire::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend([option, kind, data.len() as u32].into_iter().flat_map(u32::to_be_bytes));
    bytes.extend(data);
    bytes
}

/// The greeting of a server.
pub fn greeting() -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &[0, 3]].concat()
}

/// The bytes of a server with an export of [`SIZE_BYTES`] and all features, with replies of one of the three forms.
pub fn preamble(style: u8) -> Vec<u8> {
    let mut bytes = greeting();
    match style % 3 {
        0 => {
            bytes.extend(option_reply(option::EXTENDED_HEADERS, rep::ERR_UNSUP, b"no"));
            bytes.extend(option_reply(option::STRUCTURED_REPLY, rep::ERR_UNSUP, b"neither"));
        }
        1 => {
            bytes.extend(option_reply(option::EXTENDED_HEADERS, rep::ERR_UNSUP, &[]));
            bytes.extend(option_reply(option::STRUCTURED_REPLY, rep::ACK, &[]));
        }
        _ => bytes.extend(option_reply(option::EXTENDED_HEADERS, rep::ACK, &[])),
    }
    if !style.is_multiple_of(3) {
        let context = [&7_u32.to_be_bytes()[..], wire::BASE_ALLOCATION.as_bytes()].concat();
        bytes.extend(option_reply(option::SET_META_CONTEXT, rep::META_CONTEXT, &context));
        bytes.extend(option_reply(option::SET_META_CONTEXT, rep::ACK, &[]));
    }
    let flags = 0x0ded_u16;
    let about = [&info::EXPORT.to_be_bytes()[..], &SIZE_BYTES.to_be_bytes(), &flags.to_be_bytes()].concat();
    bytes.extend(option_reply(option::GO, rep::INFO, &about));
    bytes.extend(option_reply(option::GO, rep::ACK, &[]));
    bytes
}

/// Submits one request of each kind, in this order at indexes 0 to 7; those that the server does not support are refused.
fn submit_all(client: &mut Client) -> Vec<u64> {
    let (offset, length, fua) = (4096, 4096, true);
    let requests = [
        ClientRequest::Read { offset, length: 4096, whole: false },
        ClientRequest::Read { offset: 0, length: 512, whole: true },
        ClientRequest::Write { offset, data: Buffer::zeroed(512).freeze(), fua },
        ClientRequest::Flush,
        ClientRequest::Trim { offset, length, fua },
        ClientRequest::WriteZeroes { offset, length, fua, no_hole: true, fast: true },
        ClientRequest::BlockStatus { offset, length, one: false },
        ClientRequest::BlockStatus { offset, length, one: true },
    ];
    requests
        .into_iter()
        .map(|ask| (length_of(&ask), client.submit(ask).is_ok()))
        .map(|(len, ok)| if ok { len } else { 0 })
        .collect()
}

fn length_of(ask: &ClientRequest) -> u64 {
    match ask {
        ClientRequest::Read { length, .. } => u64::from(*length),
        ClientRequest::BlockStatus { length, .. } => *length,
        _ => 0,
    }
}

/// Feeds `pieces` one after the other.
pub fn play<'a>(client: &mut Client, pieces: impl IntoIterator<Item = &'a [u8]>) -> Transcript {
    let (mut transcript, mut open) = (Transcript::default(), Vec::new());
    for mut piece in pieces {
        while !piece.is_empty() {
            let Some(mut buffer) = client.receive_buffer() else {
                assert!(client.closed().is_some(), "a client that is open reads on");
                break;
            };
            assert!(client.receive_buffer().is_none(), "one buffer is out");
            let len = piece.len().min(buffer.len());
            buffer[..len].copy_from_slice(&piece[..len]);
            piece = &piece[len..];
            client.received(buffer, len);
            settle(client, &mut transcript, &mut open);
        }
    }
    transcript.closed = client.closed().cloned();
    transcript
}

/// Takes events and output until there is neither.
fn settle(client: &mut Client, transcript: &mut Transcript, open: &mut Vec<Option<u64>>) {
    while let Some(event) = client.next_event() {
        match &event {
            Event::Ready(_) => *open = submit_all(client).into_iter().map(Some).collect(),
            Event::Completed(completed) => check(completed, open),
            Event::Closed(_) => assert_eq!(client.in_flight(), 0),
            Event::Listed(_) | Event::Described(_) => {}
        }
        transcript.events.push(format!("{event:?}"));
        assert!(client.in_flight() <= LIMITS.commands);
    }
    let mut out = Vec::new();
    client.transmit(&mut out);
    out.iter().for_each(|slice| transcript.sent.extend_from_slice(slice));
}

/// Asserts that a completion belongs to a request in flight and fits it.
fn check(completed: &CompletedRequest, open: &mut [Option<u64>]) {
    let asked = open[completed.place].take().expect("a request is answered once");
    match &completed.outcome {
        Ok(Reply::Done) => {}
        Ok(Reply::Data(data)) => assert_eq!(data.len() as u64, asked),
        Ok(Reply::Status(runs)) => {
            assert!((1..=LIMITS.runs).contains(&runs.len()) && runs.iter().all(|run| run.length > 0));
            assert!(runs.iter().map(|run| run.length).sum::<u64>() <= asked);
        }
        Err(errors) => assert!((1..=LIMITS.errors).contains(&errors.len())),
    }
}

/// Arbitrary bytes against a client. The first byte chooses its goal, the negotiation before, if any, and
/// where long data is received; the second the length of the pieces in which the rest arrives.
pub fn run(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let goal = match choice >> 4 & 3 {
        0 => Goal::List,
        1 => Goal::Info("disk".into()),
        _ => Goal::Go("disk".into()),
    };
    let start = match choice & 3 {
        3 => greeting(),
        style if matches!(goal, Goal::Go(_)) => preamble(style),
        _ => Vec::new(),
    };
    let all = [&start[..], stream].concat();
    let direct_bytes = if choice & 0x80 == 0 { 1 } else { usize::MAX };
    let cut = play(&mut client(goal.clone(), direct_bytes), all.chunks(usize::from(*piece) + 1));
    let whole = play(&mut client(goal, usize::MAX), [&all[..]]);
    assert_eq!(cut, whole, "how the input is cut makes no difference");
}
