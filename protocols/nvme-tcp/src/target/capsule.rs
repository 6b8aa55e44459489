//! Commands that arrive, with or without data in their capsule (NVMe/TCP 3.3.1, 3.6.2.6).

use sealblock_protocols_nvme::{Command, DataPointer};
use smallvec::SmallVec;
use zerocopy::FromBytes;

use super::state::{CommandStage, CommandState, TargetState};
use super::{CommandData, DataError, Event, Received, Token};
use crate::pdu::{CapsuleCmd, Frame};
use crate::receive::{Fill, Sink};
use crate::violation::{Violation, clause};

impl TargetState {
    pub(super) fn capsule(&mut self, header: &[u8], frame: &Frame, sink: &mut Sink) -> Result<(), Violation> {
        let command = CapsuleCmd::ref_from_bytes(header).expect("the header of a capsule has its length").command;
        if frame.data_bytes > self.config.max_in_capsule_bytes {
            return Err(Violation::field(4, clause::CAPSULES, "more in-capsule data than the controller takes"));
        }
        let data = self.capsule_data_of(&command, frame)?;
        let cid = command.cid.get();
        if self.cids.contains(cid) && !self.forget_unanswered(cid) {
            return Err(Violation::field(CapsuleCmd::CID_AT, clause::CAPSULE_CMD, "the CID is in use"));
        }
        let slot = || CommandState {
            cid,
            len_bytes: 0,
            held_bytes: 0,
            may_stay_unanswered: false,
            stage: CommandStage::Received { fetched: false },
            sends: SmallVec::new(),
            queued_bytes: 0,
            sent_bytes: 0,
            completion: None,
        };
        let Some(token) = self.commands.insert_with(slot) else {
            return Err(Violation::sequence(clause::CAPSULES, "more commands than the queue has entries"));
        };
        self.cids.insert(cid);
        self.deliver(token, command, data, (frame, sink));
        Ok(())
    }

    /// What the data pointer says, held against what the capsule has.
    fn capsule_data_of(&self, command: &Command, frame: &Frame) -> Result<CommandData, Violation> {
        let unusable = |error| Ok(CommandData::Unusable(error));
        match command.data() {
            Err(error) => unusable(DataError::Sgl(error)),
            Ok(DataPointer::None | DataPointer::Transport { .. }) if frame.data_bytes > 0 => {
                Err(Violation::field(4, clause::CAPSULES, "data in a capsule whose command has none there"))
            }
            Ok(DataPointer::None) => Ok(CommandData::None),
            Ok(DataPointer::Transport { length_bytes }) => Ok(CommandData::Transport { len_bytes: length_bytes }),
            Ok(DataPointer::InCapsule { length_bytes, .. }) if length_bytes != frame.data_bytes => {
                unusable(DataError::Length)
            }
            Ok(DataPointer::InCapsule { offset_bytes, .. }) if offset_bytes != 0 => unusable(DataError::Offset),
            Ok(DataPointer::InCapsule { length_bytes, .. }) => {
                let buffer = self.config.pool.take(length_bytes as usize);
                Ok(CommandData::InCapsule(Received { buffer, crcs: None }))
            }
        }
    }

    /// Forgets a kept command with this CID, if there is one.
    fn forget_unanswered(&mut self, cid: u16) -> bool {
        let mut all = self.commands.tokens();
        let kept = all.find(|&token| self.commands.get(token).is_some_and(|s| s.may_stay_unanswered && s.cid == cid));
        drop(all);
        kept.is_some_and(|token| {
            self.release(token);
            true
        })
    }

    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.bytes_in_flight.saturating_add(bytes) <= self.config.max_bytes_in_flight
    }

    /// Tells of the command, now or when its in-capsule data has come.
    fn deliver(&mut self, token: u32, command: Command, data: CommandData, (frame, sink): (&Frame, &mut Sink)) {
        let slot = self.commands.get_mut(token).expect("the caller has just made the entry");
        match data {
            CommandData::InCapsule(Received { buffer, .. }) => {
                slot.stage = CommandStage::Capsule(command);
                slot.held_bytes = buffer.len();
                self.bytes_in_flight += buffer.len();
                self.capsule_bytes += buffer.len();
                let shape =
                    self.config.layout_of.as_ref().filter(|_| frame.data_digest).and_then(|shape| shape.of(&command));
                *sink = Sink { token, fill: Some(Fill::new(buffer, frame.data_digest, shape)) };
            }
            data => {
                if let CommandData::Transport { len_bytes } = data {
                    slot.len_bytes = len_bytes;
                }
                self.events.push_back(Event::Command { token: Token(token), command, data });
            }
        }
    }

    /// The in-capsule data is there.
    pub(super) fn capsule_data(&mut self, sink: Sink, command: Command) {
        let (Some(slot), Some(fill)) = (self.commands.get_mut(sink.token), sink.fill) else { return };
        slot.stage = CommandStage::Received { fetched: true };
        let data = if fill.is_damaged() {
            CommandData::Unusable(DataError::Digest)
        } else {
            let (buffer, sums) = fill.finish();
            CommandData::InCapsule(Received { buffer, crcs: sums })
        };
        self.events.push_back(Event::Command { token: Token(sink.token), command, data });
    }
}
