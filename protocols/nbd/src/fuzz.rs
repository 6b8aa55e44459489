//! Entry functions for fuzzers and property tests: bytes against a server whose caller completes every request.
//!
//! Asserts for any input: no limit is exceeded, requests are in range, and a closed connection stays closed and quiet.

pub mod client;

use sealblock_runtime_memory::{Buffer, Pool, Slice};

use crate::wire::{self, option};
use crate::{
    Closed, Command, ErrorCode, ErrorReply, Event, Export, Limits, Request, Server, ServerConfig, StatusDescriptor,
};

const SIZE_BYTES: u64 = 1 << 40;
const LIMITS: Limits = Limits {
    options: 16,
    option_bytes: 512,
    negotiation_bytes: 4096,
    payload_bytes: 8192,
    commands: 4,
    bytes_in_flight: 16384,
};

/// Events of a server, and the bytes that it sent.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct Transcript {
    /// Events in order, as text.
    pub events: Vec<String>,
    /// Bytes that were sent.
    pub sent: Vec<u8>,
    /// How it ended, if it did.
    pub closed: Option<Closed>,
}

/// A server with a writable export of blocks of 512 bytes, and one that is read-only.
pub fn server(direct_bytes: usize) -> Server {
    let export = |name: &str, writable| Export {
        name: name.into(),
        description: "for tests".into(),
        size_bytes: SIZE_BYTES,
        block_bytes: 512,
        writable,
        trim: true,
        write_zeroes: true,
        older: if writable { 0 } else { 3 },
        identity: crate::IdentitySource::new(|| crate::Identity {
            uuid: Some([6; 16]),
            devices: vec![[7; 16], [8; 16]],
        }),
    };
    let mut config = ServerConfig::new(Pool::new(0, usize::MAX), [export("disk", true), export("fixed", false)]);
    (config.limits, config.direct_bytes, config.staging_bytes) = (LIMITS, direct_bytes, 4096);
    config.fences_sessions = true;
    Server::new(config)
}

/// The bytes of a client that chooses the default export, with replies of one of the three forms.
pub fn preamble(style: u8) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 3];
    let mut say = |option: u32, data: &[u8]| {
        bytes.extend(wire::OPTION_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    match style % 3 {
        0 => {}
        1 => say(option::STRUCTURED_REPLY, &[]),
        _ => say(option::EXTENDED_HEADERS, &[]),
    }
    if !style.is_multiple_of(3) {
        let name = wire::BASE_ALLOCATION.as_bytes();
        let head = [0u32, 1, name.len() as u32].map(u32::to_be_bytes).concat();
        say(option::SET_META_CONTEXT, &[&head, name].concat());
    }
    say(option::GO, &[0; 6]);
    bytes
}

/// Feeds `pieces` one after the other, and completes every request.
pub fn play<'a>(server: &mut Server, pieces: impl IntoIterator<Item = &'a [u8]>) -> Transcript {
    let mut transcript = Transcript::default();
    settle(server, &mut transcript);
    for mut piece in pieces {
        while !piece.is_empty() {
            let Some(mut buffer) = server.receive_buffer() else {
                assert!(server.closed().is_some(), "a server with nothing in flight reads on");
                break;
            };
            assert!(server.receive_buffer().is_none(), "one buffer is out");
            let len = piece.len().min(buffer.len());
            buffer[..len].copy_from_slice(&piece[..len]);
            piece = &piece[len..];
            server.received(buffer, len);
            settle(server, &mut transcript);
        }
    }
    transcript.closed = server.closed();
    transcript
}

/// Takes events and output until there is neither.
fn settle(server: &mut Server, transcript: &mut Transcript) {
    loop {
        let mut was_quiet = true;
        while let Some(event) = server.next_event() {
            was_quiet = false;
            transcript.events.push(to_text(&event));
            if let Event::Request(request) = event {
                answer(server, request);
            }
            assert!(server.requests_in_flight() <= LIMITS.commands);
            assert!(server.bytes_in_flight() <= LIMITS.bytes_in_flight);
        }
        let mut out = Vec::new();
        was_quiet &= server.transmit(&mut out) == 0;
        server.sent();
        out.iter().for_each(|slice| transcript.sent.extend_from_slice(slice));
        if was_quiet {
            return;
        }
    }
}

fn to_text(event: &Event) -> String {
    match event {
        Event::Request(Request { command: Command::Write { offset, data, fua }, .. }) => {
            let sum = data.iter().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
            format!("write {offset} {} {fua} {sum:x}", data.len())
        }
        Event::Request(request) => format!("{:?}", request.command),
        other => format!("{other:?}"),
    }
}

/// Completes a request by its offset: most succeed, some fail.
fn answer(server: &mut Server, Request { ticket, command }: Request) {
    let in_range = |offset: u64, length: u64| {
        assert!(length > 0 && offset.checked_add(length).is_some_and(|end| end <= SIZE_BYTES));
        assert!(offset.is_multiple_of(512) && length.is_multiple_of(512));
    };
    match command {
        Command::Read { offset, length } => {
            in_range(offset, length.into());
            let data = |len: usize| vec![Slice::from(Buffer::zeroed(len))];
            match offset >> 9 & 3 {
                3 if length > 512 => {
                    let failed = ErrorReply { code: ErrorCode::Io, offset: Some(offset + 512), message: "bad".into() };
                    server.fail(ticket, data(512), &failed);
                }
                _ => server.data(ticket, data(length as usize)),
            }
        }
        Command::BlockStatus { offset, length, .. } => {
            in_range(offset, length);
            server
                .status(ticket, &[StatusDescriptor { length, status: 0 }, StatusDescriptor { length: 512, status: 3 }]);
        }
        Command::Write { offset, data, .. } => {
            in_range(offset, data.len() as u64);
            server.done(ticket);
        }
        Command::Trim { offset, length, .. } | Command::WriteZeroes { offset, length, .. } => {
            in_range(offset, length);
            server.done(ticket);
        }
        Command::Cache { offset, length } => {
            in_range(offset, length.into());
            server.fail(ticket, Vec::new(), &ErrorCode::Io.into());
        }
        Command::Flush => server.done(ticket),
    }
}

/// Arbitrary bytes against a server. The first byte chooses the negotiation before, if any, and where long
/// data is received; the second the length of the pieces in which the rest arrives.
pub fn run(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let start = if choice & 1 == 1 { preamble(choice >> 1) } else { Vec::new() };
    let all = [&start[..], stream].concat();
    let direct_bytes = if choice & 0x80 == 0 { 1 } else { usize::MAX };
    let cut = play(&mut server(direct_bytes), all.chunks(usize::from(*piece) + 1));
    let whole = play(&mut server(usize::MAX), [&all[..]]);
    assert_eq!(cut, whole, "how the input is cut makes no difference");
}
