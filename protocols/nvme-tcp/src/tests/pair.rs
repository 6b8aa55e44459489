//! A host and a target joined in memory, with an export that keeps one array of bytes.

use std::collections::VecDeque;

use sealblock_protocols_nvme::{Command, Completion, Status};
use sealblock_runtime_memory::{Buffer, Slice};

use crate::host::{self, Host};
use crate::target::{self, CommandData, Target, Token};
use crate::{BlockLayout, HostConfig, Payload, TargetConfig, TransmitLimit};

pub(super) const WRITE: u8 = 0x01;
pub(super) const READ: u8 = 0x02;

/// Bytes on their way, delivered in pieces whose lengths go round a list.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    pieces: Vec<usize>,
    next: usize,
}

impl Pipe {
    fn push(&mut self, slices: &[Slice]) {
        slices.iter().for_each(|slice| self.bytes.extend(slice.iter()));
    }

    fn fill(&mut self, buffer: &mut Buffer) -> usize {
        let piece = self.pieces[self.next % self.pieces.len()];
        self.next += 1;
        let len = piece.max(1).min(buffer.len()).min(self.bytes.len());
        for (to, from) in buffer.iter_mut().zip(self.bytes.drain(..len)) {
            *to = from;
        }
        len
    }
}

pub(super) struct Pair {
    pub(super) host: Host,
    pub(super) target: Target,
    to_target: Pipe,
    to_host: Pipe,
    pub(super) disk: Vec<u8>,
    /// How the export sees the data.
    pub(super) layout: Option<BlockLayout>,
    /// True if reads are sent with the CRCs of their blocks.
    pub(super) send_crcs: bool,
    /// Commands answered only now and then, in an order that is not theirs.
    waiting: Vec<(Token, Answer)>,
    /// Writes whose data is on the way.
    writes: Vec<(Token, Command)>,
    pub(super) turns: usize,
    pub(super) reorder: bool,
    pub(super) limit: TransmitLimit,
    pub(super) completed: Vec<host::Event>,
    pub(super) sums_seen: usize,
}

enum Answer {
    Response(Status),
    Read { at: usize, len: usize },
}

impl Pair {
    pub(super) fn new(host: HostConfig, target: TargetConfig, pieces: &[usize]) -> Pair {
        let pipe = || Pipe { pieces: pieces.to_vec(), ..Pipe::default() };
        let mut pair = Pair {
            host: Host::new(host),
            target: Target::new(target),
            to_target: pipe(),
            to_host: pipe(),
            disk: vec![0; 1 << 20],
            layout: None,
            send_crcs: false,
            waiting: Vec::new(),
            writes: Vec::new(),
            turns: 0,
            reorder: false,
            limit: TransmitLimit::default(),
            completed: Vec::new(),
            sums_seen: 0,
        };
        pair.run();
        assert_eq!(pair.host.closed(), None);
        assert_eq!(pair.host.negotiated().map(|n| n.data_digest), pair.target.negotiated().map(|n| n.data_digest));
        pair
    }

    /// Runs until nothing moves any more.
    pub(super) fn run(&mut self) {
        while self.turn() {
            self.turns += 1;
            assert!(self.turns < 10_000_000, "the connection never comes to rest");
        }
    }

    fn turn(&mut self) -> bool {
        let mut moved = false;
        let mut out = Vec::new();
        moved |= self.host.transmit(&mut out, self.limit) > 0;
        self.to_target.push(&out);
        out.clear();
        moved |= self.target.transmit(&mut out, self.limit) > 0;
        self.to_host.push(&out);
        if !self.to_target.bytes.is_empty()
            && let Some(mut buffer) = self.target.receive_buffer()
        {
            let len = self.to_target.fill(&mut buffer);
            self.target.received(buffer, len);
            moved = true;
        }
        if !self.to_host.bytes.is_empty()
            && let Some(mut buffer) = self.host.receive_buffer()
        {
            let len = self.to_host.fill(&mut buffer);
            self.host.received(buffer, len);
            moved = true;
        }
        while let Some(event) = self.target.next_event() {
            self.export(event);
        }
        while let Some(event) = self.host.next_event() {
            if !matches!(event, host::Event::Established(_)) {
                self.completed.push(event);
            }
        }
        moved | self.answer_one(moved)
    }

    /// The LBA is a byte offset here.
    fn export(&mut self, event: target::Event) {
        match event {
            target::Event::Established(_) | target::Event::Closed(_) => {}
            target::Event::Command { token, command, data } => match data {
                CommandData::None => self.waiting.push((token, Answer::Response(Status::SUCCESS))),
                CommandData::Unusable(error) => {
                    self.waiting.push((token, Answer::Response(error.status_code().status())));
                }
                CommandData::InCapsule(received) => self.store(token, &command, received),
                CommandData::Transport { len_bytes } if command.opcode == READ => {
                    let read = Answer::Read { at: command.cdw10_11() as usize, len: len_bytes as usize };
                    self.waiting.push((token, read));
                }
                CommandData::Transport { len_bytes } => {
                    let buffer = Buffer::zeroed(len_bytes as usize);
                    self.target.fetch_data(token, buffer, self.layout.clone()).unwrap();
                    self.writes.push((token, command));
                }
            },
            target::Event::DataReady { token, data } => {
                let at = self.writes.iter().position(|(waiting, _)| *waiting == token).unwrap();
                let (_, command) = self.writes.swap_remove(at);
                match data {
                    Ok(received) => self.store(token, &command, received),
                    Err(error) => self.waiting.push((token, Answer::Response(error.status_code().status()))),
                }
            }
        }
    }

    fn store(&mut self, token: Token, command: &Command, received: target::Received) {
        let at = command.cdw10_11() as usize;
        self.disk[at..at + received.buffer.len()].copy_from_slice(&received.buffer);
        if let Some(crcs) = received.crcs {
            self.sums_seen += 1;
            let stride = crcs.layout.stride_bytes();
            for (block, &guard) in received.buffer.chunks(stride).zip(&crcs.guards) {
                assert_eq!(guard, sealblock_integrity::guard::crc32c(&block[..crcs.layout.data_bytes()]));
            }
        }
        self.waiting.push((token, Answer::Response(Status::SUCCESS)));
    }

    /// Answers the oldest command, or, to reorder, another one and only when nothing else moves or every third turn.
    fn answer_one(&mut self, moved: bool) -> bool {
        if self.waiting.is_empty() || (self.reorder && moved && !self.turns.is_multiple_of(3)) {
            return false;
        }
        let index = if self.reorder { self.turns * 7 % self.waiting.len() } else { 0 };
        let (token, answer) = self.waiting.remove(index);
        match answer {
            Answer::Response(status) => self.target.respond(token, Completion::new(0, status, 0)).unwrap(),
            Answer::Read { at, len } => {
                let data = Slice::copy_from(&self.disk[at..at + len]);
                let mut payload = Payload::new([data.slice(..len / 2), data.slice(len / 2..)]);
                if let Some(layout) = self.layout.clone().filter(|_| self.send_crcs) {
                    let crc = |block: &[u8]| sealblock_integrity::guard::crc32c(&block[..layout.data_bytes()]);
                    let whole = len.is_multiple_of(layout.stride_bytes());
                    let guards =
                        if whole { data.chunks(layout.stride_bytes()).map(crc).collect() } else { Default::default() };
                    payload = payload.with_crcs(crate::BlockCrcs { layout, guards });
                }
                self.target.send_data(token, payload, Some(Completion::new(0, Status::SUCCESS, 0))).unwrap();
            }
        }
        true
    }
}
