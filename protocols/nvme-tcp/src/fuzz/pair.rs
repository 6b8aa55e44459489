//! A host and a target that talk to each other over a wire which an input controls.
//!
//! Both sides make valid PDUs of their own, so an input reaches the middle of transfers with a few bytes: it chooses the
//! commands, how the export answers them, how the streams are cut, and what is spoilt on the way. While nothing is
//! spoilt neither side may close, every command must end, and its data must be right. When only data is spoilt, data digests
//! must have found it before anybody is given the data as good.

use std::num::{NonZeroU16, NonZeroU32};

use sealblock_protocols_nvme::{Command, Completion, Status, StatusCode};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::little_endian::U32;

use super::script::{Script, Spoilt, Wire};
use super::{MAX_BYTES, MAX_COMMANDS, bit, success};
use crate::config::LayoutOf;
use crate::host::{self, Host, HostData};
use crate::target::{self, CommandData, Target, Token};
use crate::{BlockLayout, HostConfig, Payload, TargetConfig, TransmitLimit};

const WRITE: u8 = 1;
const READ: u8 = 2;
/// Inputs that go on for longer are cut, so that each is fast.
const MAX_STEPS: usize = 400;

/// A command that the export has not answered.
struct Held {
    token: Token,
    command: Command,
    /// Bytes of the host's buffer that are left to send or fetch.
    left_bytes: usize,
    sent_bytes: usize,
    fetching: bool,
}

struct Pair<'a> {
    script: Script<'a>,
    host: Host,
    target: Target,
    to_target: Wire,
    to_host: Wire,
    held: Vec<Held>,
    spoilt: Spoilt,
    submitted: u32,
    completed: u32,
}

/// Runs a script; panics where something does not hold.
pub fn pair(data: &[u8]) {
    let mut script = Script::new(data);
    let (host, target) = sides(&mut script);
    let mut pair = Pair {
        script,
        host,
        target,
        to_target: Wire::default(),
        to_host: Wire::default(),
        held: Vec::new(),
        spoilt: Spoilt::No,
        submitted: 0,
        completed: 0,
    };
    for _ in 0..MAX_STEPS {
        if pair.script.is_over() {
            break;
        }
        pair.step();
        pair.check();
    }
    pair.finish();
}

fn sides(script: &mut Script<'_>) -> (Host, Target) {
    let (choice, more) = (script.byte(), script.byte());
    let mut target = TargetConfig::new(Pool::new(0, usize::MAX));
    target.max_commands = NonZeroU16::new(u16::from(more & 3) + MAX_COMMANDS.get() + 1).expect("a sum above 0");
    target.max_bytes_in_flight = MAX_BYTES;
    target.max_r2t_bytes = if bit(choice, 0) { 4096 } else { u32::MAX };
    target.max_h2c_data_bytes = if bit(choice, 1) { 4096 } else { 1 << 20 };
    target.max_c2h_data_bytes = if bit(choice, 2) { 516 } else { 256 << 10 };
    target.max_r2ts = NonZeroU32::new(1 + u32::from(more >> 2 & 3)).expect("a sum above 0");
    target.direct_bytes = if bit(choice, 3) { 1 } else { 8192 };
    target.staging_bytes = if bit(choice, 4) { 512 } else { 4096 };
    target.cpda = more >> 4 & 15;
    target.layout_of = Some(LayoutOf::new(|_| BlockLayout::new(512, 8)));
    let mut host = HostConfig::new(Pool::new(0, usize::MAX));
    host.max_commands = MAX_COMMANDS;
    (host.header_digest, host.data_digest) = (bit(choice, 4), bit(choice, 5));
    host.max_in_capsule_bytes = if bit(choice, 6) { 2048 } else { 0 };
    (host.direct_bytes, host.staging_bytes) = (target.direct_bytes, target.staging_bytes);
    host.hpda = more & 31;
    host.max_r2ts = NonZeroU32::new(1 + u32::from(more & 1)).expect("a sum above 0");
    let mut target = Target::new(target);
    target.set_success_flag(bit(choice, 7));
    (Host::new(host), target)
}

/// Data of the command with this number.
fn pattern(number: u32, at: usize, len: usize) -> Vec<u8> {
    (at..at + len)
        .map(|i| (i as u32 / 4).wrapping_mul(2_654_435_761).wrapping_add(number.wrapping_mul(97)) as u8)
        .collect()
}

fn join(slices: &[Slice]) -> Vec<u8> {
    let mut bytes = Vec::new();
    slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
    bytes
}

fn number(command: &Command) -> u32 {
    command.cdw12.get()
}

impl Pair<'_> {
    fn step(&mut self) {
        match self.script.below(10) {
            0 | 1 => self.submit(),
            2 => self.send(usize::MAX),
            3 => {
                let bytes = usize::from(self.script.short());
                self.send(bytes);
            }
            4 => self.deliver(usize::MAX),
            5 => {
                let bytes = self.script.below(64);
                self.deliver(bytes);
            }
            6 => self.answer(),
            7 => {
                let towards = self.script.byte();
                let wire = if bit(towards, 0) { &mut self.to_host } else { &mut self.to_target };
                self.spoilt = self.spoilt.max(wire.spoil(&mut self.script));
            }
            8 => self.misuse(),
            _ => {
                self.send(usize::MAX);
                self.deliver(usize::MAX);
                self.answer();
            }
        }
    }

    fn submit(&mut self) {
        if self.host.negotiated().is_none() || !self.host.can_submit() {
            return;
        }
        let (choice, dwords) = (self.script.byte(), usize::from(self.script.short()) % 4096 + 1);
        let number = self.submitted;
        let (opcode, data) = match choice & 3 {
            0 => (0, HostData::None),
            1 => (WRITE, HostData::Write(Payload::from(Slice::copy_from(&pattern(number, 0, dwords * 4))))),
            2 => (WRITE, HostData::Write(Payload::from(Slice::copy_from(&pattern(number, 0, 2048))))),
            _ => {
                let layout = if bit(choice, 2) { BlockLayout::new(512, 8) } else { None };
                (READ, HostData::Read { buffer: Buffer::zeroed(dwords * 4), layout })
            }
        };
        let mut command = Command::new(opcode, 1);
        command.cdw12 = U32::new(number);
        self.submitted += 1;
        self.host.submit(command, data).expect("a host that says it takes a command takes it");
    }

    /// Moves output of both sides to the wires.
    fn send(&mut self, bytes: usize) {
        let limit = TransmitLimit { bytes: bytes.max(1), slices: bytes.clamp(1, 256) };
        let mut out = Vec::new();
        self.host.transmit(&mut out, limit);
        self.to_target.push(&join(&out));
        out.clear();
        self.target.transmit(&mut out, limit);
        self.to_host.push(&join(&out));
    }

    fn deliver(&mut self, bytes: usize) {
        if !self.to_target.is_empty()
            && let Some(mut buffer) = self.target.receive_buffer()
        {
            let len = self.to_target.deliver(&mut buffer, bytes);
            self.target.received(buffer, len);
        }
        if !self.to_host.is_empty()
            && let Some(mut buffer) = self.host.receive_buffer()
        {
            let len = self.to_host.deliver(&mut buffer, bytes);
            self.host.received(buffer, len);
        }
        while let Some(event) = self.target.next_event() {
            self.on_target(event);
        }
        while let Some(event) = self.host.next_event() {
            self.on_host(event);
        }
    }

    fn on_target(&mut self, event: target::Event) {
        match event {
            target::Event::Command { token, command, data } => {
                let left_bytes = match &data {
                    CommandData::Transport { len_bytes } => (*len_bytes as usize).min(MAX_BYTES),
                    CommandData::InCapsule(received) => {
                        self.is_right(&command, &received.buffer);
                        0
                    }
                    CommandData::None => 0,
                    CommandData::Unusable(error) => {
                        assert!(self.spoilt > Spoilt::No, "{error}");
                        0
                    }
                };
                self.held.push(Held { token, command, left_bytes, sent_bytes: 0, fetching: false });
            }
            target::Event::DataReady { token, data } => {
                let held = self.held.iter_mut().find(|held| held.token == token).expect("its command is held");
                (held.fetching, held.left_bytes) = (false, 0);
                let command = held.command;
                match data {
                    Ok(received) => self.is_right(&command, &received.buffer),
                    Err(error) => assert!(self.spoilt > Spoilt::No, "{error}"),
                }
            }
            target::Event::Established(_) => {}
            target::Event::Closed(reason) => {
                assert!(self.spoilt > Spoilt::No, "{reason}");
                self.held.clear();
            }
        }
    }

    fn on_host(&mut self, event: host::Event) {
        match event {
            host::Event::Completed { completion, data, .. } => {
                self.completed += 1;
                let Some(data) = data.filter(|data| !data.is_damaged && completion.status().is_success()) else {
                    return;
                };
                let number = completion.result.get() as u32;
                // A response that SUCCESS stands for has no result, so it does not say which command it is for.
                if self.can_trust() && number != 0 {
                    assert_eq!(data.buffer[..], pattern(number - 1, 0, data.buffer.len()), "data of {number}");
                }
            }
            host::Event::Established(_) => {}
            host::Event::Closed(reason) => assert!(self.spoilt > Spoilt::No, "{reason}"),
        }
    }

    /// Whether data that is given out as good must be that of its command.
    fn can_trust(&self) -> bool {
        let digests = self.target.negotiated().is_some_and(|agreed| agreed.data_digest);
        self.spoilt == Spoilt::No || self.spoilt == Spoilt::Data && digests
    }

    fn is_right(&self, command: &Command, data: &[u8]) {
        if self.can_trust() {
            assert_eq!(data, pattern(number(command), 0, data.len()), "data of {}", number(command));
        }
    }

    /// The export does something for one of the commands it holds.
    fn answer(&mut self) {
        if self.held.is_empty() {
            return;
        }
        // Once the script is over all that is left is sent at once, not dword by dword.
        let is_over = self.script.is_over();
        let (index, choice) = (self.script.below(self.held.len()), if is_over { 1 } else { self.script.byte() });
        let held = &mut self.held[index];
        let result = u64::from(number(&held.command)) + 1;
        if held.fetching {
            return;
        }
        if held.left_bytes > 0 && held.command.opcode == WRITE && !bit(choice, 7) {
            let layout = if bit(choice, 0) { BlockLayout::new(512, 0) } else { None };
            held.fetching = self.target.fetch_data(held.token, Buffer::zeroed(held.left_bytes), layout).is_ok();
            return;
        }
        if held.left_bytes > 0 && held.command.opcode == READ && !bit(choice, 7) {
            // A length that was spoilt on the way may be less than a dword.
            let dwords = held.left_bytes / 4;
            let takes_all = bit(choice, 0) || dwords == 0;
            let len = if takes_all { held.left_bytes } else { (1 + usize::from(self.script.short()) % dwords) * 4 };
            let data = pattern(number(&held.command), held.sent_bytes, len);
            let is_last = len == held.left_bytes || bit(choice, 1);
            // Without a result the response may be left to the SUCCESS flag.
            let completion = Completion::new(0, Status::SUCCESS, if bit(choice, 2) { result } else { 0 });
            let payload = Payload::from(Slice::copy_from(&data));
            if self.target.send_data(held.token, payload, is_last.then_some(completion)).is_ok() {
                (held.left_bytes, held.sent_bytes) = (held.left_bytes - len, held.sent_bytes + len);
                if is_last {
                    self.held.swap_remove(index);
                }
            }
            return;
        }
        let held = self.held.swap_remove(index);
        let status = if bit(choice, 0) { Status::SUCCESS } else { StatusCode::INTERNAL_ERROR.status() };
        // A host whose write failed has no data to send, and one that is closed has no commands.
        let _ = self.target.respond(held.token, Completion::new(0, status, 0));
    }

    /// Calls that are refused, or that end the connection; they change nothing else.
    fn misuse(&mut self) {
        let choice = self.script.byte();
        if bit(choice, 7) && self.script.byte() == 0x5A {
            self.spoilt = Spoilt::Yes;
            if bit(choice, 0) {
                self.host.close();
            } else {
                self.target.close();
                self.held.clear();
            }
            return;
        }
        let Some(held) = self.held.get(usize::from(choice & 7)) else { return };
        // A length that was spoilt may be longer than what the export here would ever ask for, and a command whose data was
        // fetched might send some as well.
        if self.spoilt > Spoilt::Data || held.command.opcode != READ {
            return;
        }
        let len = held.left_bytes + 4;
        assert!(self.target.fetch_data(held.token, Buffer::zeroed(len), None).is_err());
        let too_long = Payload::from(Slice::from(Buffer::zeroed(len)));
        assert!(self.target.send_data(held.token, too_long, Some(success())).is_err());
    }

    fn check(&mut self) {
        assert!(self.target.commands_in_flight() <= usize::from(MAX_COMMANDS.get()) + 4);
        assert!(self.target.bytes_in_flight() <= MAX_BYTES);
        assert!(self.host.commands_in_flight() <= usize::from(MAX_COMMANDS.get()));
        if self.target.closed().is_some() {
            assert!(self.target.receive_buffer().is_none() && self.target.commands_in_flight() == 0);
        }
        if self.host.closed().is_some() {
            assert!(self.host.receive_buffer().is_none() && self.host.commands_in_flight() == 0);
        }
    }

    /// Lets everything come to its end, which it must if nothing was spoilt.
    fn finish(&mut self) {
        // What was spoilt may never come to an end by itself.
        let most = if self.spoilt == Spoilt::No { 100_000 } else { 100 };
        for _ in 0..most {
            self.send(usize::MAX);
            self.deliver(usize::MAX);
            let held = self.held.len();
            self.answer();
            self.check();
            let rests = !self.host.has_output() && !self.target.has_output();
            if rests && held == 0 && self.to_target.is_empty() && self.to_host.is_empty() {
                break;
            }
            if self.target.closed().is_some() || self.host.closed().is_some() {
                break;
            }
        }
        if self.spoilt == Spoilt::No {
            assert_eq!((self.host.commands_in_flight(), self.completed), (0, self.submitted));
            assert_eq!((self.target.commands_in_flight(), self.target.bytes_in_flight()), (0, 0));
        }
    }
}
