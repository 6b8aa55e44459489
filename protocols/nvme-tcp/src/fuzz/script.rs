//! An input as a script, and PDUs that are changed on their way.

use std::collections::VecDeque;

use sealblock_integrity::guard;
use sealblock_runtime_memory::Buffer;

use crate::pdu::{DIGEST_BYTES, PduType};

/// What an input asks for, number by number; zeroes once it has ended.
pub(super) struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    pub(super) fn new(input: &'a [u8]) -> Script<'a> {
        Script(input)
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(count.min(self.0.len()));
        self.0 = later;
        now
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    pub(super) fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// A number below `count`, which is not 0.
    pub(super) fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count
    }

    /// A number at which arithmetic goes wrong, or any other.
    fn odd_number(&mut self) -> u32 {
        const ODD: [u32; 12] = [0, 1, 3, 4, 8, 24, 128, 4096, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFC, u32::MAX];
        let choice = self.byte();
        match ODD.get(usize::from(choice & 15)) {
            Some(&number) => number,
            None => u32::from(self.short()) << (choice >> 4),
        }
    }
}

/// How far a stream has been spoilt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Spoilt {
    /// Not at all.
    No,
    /// Data was changed behind headers that are right, as a bad network would: data digests find it.
    Data,
    /// Anything.
    Yes,
}

/// PDUs on their way in one direction.
#[derive(Default)]
pub(super) struct Wire {
    pdus: VecDeque<Vec<u8>>,
    /// Bytes of the first PDU that have been delivered.
    delivered: usize,
}

impl Wire {
    pub(super) fn is_empty(&self) -> bool {
        self.pdus.is_empty()
    }

    /// Adds output, which is whole PDUs.
    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        while let Some(plen) = bytes.get(4..8) {
            let plen = u32::from_le_bytes(plen.try_into().expect("four bytes are four bytes")) as usize;
            let (pdu, rest) = bytes.split_at(plen);
            self.pdus.push_back(pdu.to_vec());
            bytes = rest;
        }
        assert!(bytes.is_empty(), "output ends with a whole PDU");
    }

    /// Moves at most `most` bytes into a receive buffer; at least one.
    pub(super) fn deliver(&mut self, buffer: &mut Buffer, most: usize) -> usize {
        let room = buffer.len().min(most.max(1));
        let mut len = 0;
        while len < room
            && let Some(pdu) = self.pdus.front()
        {
            let rest = &pdu[self.delivered..];
            let now = rest.len().min(room - len);
            buffer[len..len + now].copy_from_slice(&rest[..now]);
            (len, self.delivered) = (len + now, self.delivered + now);
            if self.delivered == pdu.len() {
                self.pdus.pop_front();
                self.delivered = 0;
            }
        }
        len
    }

    /// Changes what has not been delivered yet, as the script says.
    pub(super) fn spoil(&mut self, script: &mut Script<'_>) -> Spoilt {
        // The first PDU may be half delivered, and is then left alone.
        let first = usize::from(self.delivered > 0);
        let Some(count) = self.pdus.len().checked_sub(first).filter(|count| *count > 0) else {
            return Spoilt::No;
        };
        let index = first + script.below(count);
        match script.below(9) {
            0 => return self.spoil_data(index, script),
            1 => self.pdus.insert(index, self.pdus[index].clone()),
            2 => self.pdus.swap(index, first),
            3 => drop(self.pdus.remove(index)),
            4 => {
                let len = script.below(80) + 1;
                let noise = script.bytes(len).to_vec();
                if !noise.is_empty() {
                    self.pdus.insert(index, noise);
                }
            }
            5 => {
                let len = 1 + usize::from(script.short()) % self.pdus[index].len();
                self.pdus[index].truncate(len);
            }
            6 => {
                let (at, number) = (script.below(18) * 4, script.odd_number());
                change(&mut self.pdus[index], at, &number.to_le_bytes());
            }
            7 => {
                let (at, number) = (script.below(36) * 2, script.odd_number() as u16);
                change(&mut self.pdus[index], at, &number.to_le_bytes());
            }
            _ => {
                let (at, value) = (script.below(128), script.byte());
                change(&mut self.pdus[index], at, &[value]);
            }
        }
        Spoilt::Yes
    }

    /// Flips a bit behind the header and its digest, if there is anything.
    fn spoil_data(&mut self, index: usize, script: &mut Script<'_>) -> Spoilt {
        let (at, bit) = (usize::from(script.short()), script.byte() & 7);
        let pdu = &mut self.pdus[index];
        let start = header_bytes(pdu) + DIGEST_BYTES;
        if pdu.len() <= start {
            return Spoilt::No;
        }
        let at = start + at % (pdu.len() - start);
        pdu[at] ^= 1 << bit;
        Spoilt::Data
    }
}

fn header_bytes(pdu: &[u8]) -> usize {
    pdu.first().and_then(|&opcode| PduType::from_opcode(opcode)).map_or(pdu.len(), PduType::header_bytes)
}

/// Changes bytes of a header, and makes its digest right again if it says that it has one.
fn change(pdu: &mut [u8], at: usize, bytes: &[u8]) {
    let Some(field) = pdu.get_mut(at..at + bytes.len()) else { return };
    field.copy_from_slice(bytes);
    let header = header_bytes(pdu);
    if at < header && pdu.len() >= header + DIGEST_BYTES && pdu[1] & crate::pdu::flags::HEADER_DIGEST != 0 {
        let digest = guard::crc32c(&pdu[..header]);
        pdu[header..header + DIGEST_BYTES].copy_from_slice(&digest.to_le_bytes());
    }
}
