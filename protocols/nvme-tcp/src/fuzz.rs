//! Entry functions for fuzzers: a stream of bytes against either side, with an export or a user that always answers.
//!
//! The first byte chooses the configuration, the second the length of the pieces in which the rest arrives. What must
//! hold whatever comes is asserted here: no limit is exceeded, and a closed connection stays closed and quiet.
//! [`pair`] reads its input as a script instead, which leads deeper.

mod pair;
mod script;

pub use pair::pair;

use std::num::{NonZeroU16, NonZeroU32};

use sealblock_protocols_nvme::{Command, Completion, Status};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::IntoBytes;

use crate::config::LayoutOf;
use crate::host::{self, Host, HostData};
use crate::pdu::{IcReq, IcResp};
use crate::target::{self, CommandData, Target, Token};
use crate::{BlockLayout, HostConfig, Payload, TargetConfig, TransmitLimit};

const MAX_COMMANDS: NonZeroU16 = NonZeroU16::new(8).expect("8 is not 0");
const MAX_BYTES: usize = 64 << 10;

fn bit(byte: u8, bit: u32) -> bool {
    byte >> bit & 1 == 1
}

/// Arbitrary bytes against a target. Bit 0 of the first byte puts a valid ICReq before them.
pub fn target(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let choice = *choice;
    let mut config = TargetConfig::new(Pool::new(0, usize::MAX));
    config.max_commands = MAX_COMMANDS;
    config.max_bytes_in_flight = MAX_BYTES;
    config.max_r2t_bytes = if bit(choice, 1) { 4096 } else { u32::MAX };
    config.max_r2ts = NonZeroU32::new(3).expect("3 is not 0");
    config.direct_bytes = if bit(choice, 2) { 1 } else { 8192 };
    config.staging_bytes = 4096;
    config.cpda = if bit(choice, 3) { 15 } else { 0 };
    config.layout_of = Some(LayoutOf::new(|_| BlockLayout::new(512, 8)));
    let mut target = Target::new(config);
    target.set_success_flag(bit(choice, 4));
    let digests = choice >> 5 & 3;
    let request = IcReq::new(0, digests, 1);
    let start = if bit(choice, 0) { request.as_bytes() } else { &[] };
    for piece in start.chunks(128).chain(stream.chunks(usize::from(*piece) + 1)) {
        feed(piece, |bytes| match target.receive_buffer() {
            None => 0,
            Some(mut buffer) => {
                let len = copy(&mut buffer, bytes);
                target.received(buffer, len);
                len
            }
        });
        while let Some(event) = target.next_event() {
            export(&mut target, event);
        }
        assert!(target.commands_in_flight() <= usize::from(MAX_COMMANDS.get()));
        assert!(target.bytes_in_flight() <= MAX_BYTES);
        let mut out = Vec::new();
        while target.has_output() {
            target.transmit(&mut out, TransmitLimit { bytes: 1, slices: 1 });
        }
    }
}

/// An export that fetches, sends or answers, by the direction of the opcode.
fn export(target: &mut Target, event: target::Event) {
    match event {
        target::Event::Command { token, command, data: CommandData::Transport { len_bytes } } => {
            let len = (len_bytes as usize).min(MAX_BYTES);
            let done = match command.opcode & 3 {
                1 => target.fetch_data(token, Buffer::zeroed(len), BlockLayout::new(512, 0)).is_ok(),
                2 => target.send_data(token, Slice::from(Buffer::zeroed(len)), Some(success())).is_ok(),
                _ => false,
            };
            if !done {
                answer(target, token);
            }
        }
        target::Event::Command { token, .. } | target::Event::DataReady { token, .. } => answer(target, token),
        target::Event::Established(_) => {}
        target::Event::Closed(_) => assert!(target.receive_buffer().is_none()),
    }
}

fn answer(target: &mut Target, token: Token) {
    // The connection may have been closed by what followed the command.
    let _ = target.respond(token, success());
}

fn success() -> Completion {
    Completion::new(0, Status::SUCCESS, 0)
}

/// Arbitrary bytes against a host with reads and writes in flight. Bit 0 of the first byte puts a valid ICResp before
/// them.
pub fn host(data: &[u8]) {
    let [choice, piece, stream @ ..] = data else { return };
    let choice = *choice;
    let mut config = HostConfig::new(Pool::new(0, usize::MAX));
    config.max_commands = MAX_COMMANDS;
    config.max_in_capsule_bytes = 0;
    config.direct_bytes = if bit(choice, 2) { 1 } else { 8192 };
    config.staging_bytes = 4096;
    config.hpda = if bit(choice, 3) { 15 } else { 0 };
    (config.header_digest, config.data_digest) = (bit(choice, 5), bit(choice, 6));
    let mut host = Host::new(config);
    let mut out = Vec::new();
    host.transmit(&mut out, TransmitLimit::default());
    let response = IcResp::new(0, choice >> 5 & 3, 4096);
    let start = if bit(choice, 0) { response.as_bytes() } else { &[] };
    for piece in start.chunks(128).chain(stream.chunks(usize::from(*piece) + 1)) {
        feed(piece, |bytes| match host.receive_buffer() {
            None => 0,
            Some(mut buffer) => {
                let len = copy(&mut buffer, bytes);
                host.received(buffer, len);
                len
            }
        });
        while let Some(event) = host.next_event() {
            if matches!(event, host::Event::Closed(_)) {
                assert!(host.receive_buffer().is_none());
            }
        }
        fill(&mut host);
        assert!(host.commands_in_flight() <= usize::from(MAX_COMMANDS.get()));
        out.clear();
        while host.has_output() {
            host.transmit(&mut out, TransmitLimit { bytes: 1, slices: 1 });
        }
    }
}

/// Submits reads and writes in turn while the host takes more.
fn fill(host: &mut Host) {
    while host.can_submit() {
        let data = match host.commands_in_flight() % 2 {
            0 => HostData::Read { buffer: Buffer::zeroed(8192), layout: BlockLayout::new(512, 8) },
            _ => HostData::Write(Payload::from(Slice::from(Buffer::zeroed(8192)))),
        };
        host.submit(Command::new(1, 1), data).expect("a host that says it takes a command takes it");
    }
}

/// Gives `bytes` to `take` until it has taken all, or takes none.
fn feed(mut bytes: &[u8], mut take: impl FnMut(&[u8]) -> usize) {
    while !bytes.is_empty() {
        match take(bytes) {
            0 => return,
            len => bytes = &bytes[len..],
        }
    }
}

fn copy(buffer: &mut Buffer, bytes: &[u8]) -> usize {
    let len = buffer.len().min(bytes.len());
    buffer[..len].copy_from_slice(&bytes[..len]);
    len
}
