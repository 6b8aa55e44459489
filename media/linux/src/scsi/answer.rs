//! What the reply to a command means. One table; an unknown reply keeps its numbers.

use std::fmt;

use sealblock_block::{BadBlockCause, Error, ErrorKind, RequestKind};
use sealblock_integrity::Field;
use sealblock_protocols_scsi::{AdditionalSense, SenseKey, Status};
use sealblock_units::Extent;

use super::transport::Answer;

/// What a reply means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AnswerClass {
    /// The command succeeded.
    Good,
    /// A block of it is bad.
    Bad(BadBlockCause),
    /// The data of the command differ from those on the medium.
    Miscompare,
    /// The device does not support the command, or not in this form.
    Unsupported,
    /// The device supports the command, and refuses it.
    Refused,
    /// The device executed the command, and failed.
    Failed,
    /// The command was not executed, and may be sent again.
    Again,
    /// The device cannot be reached.
    Unreachable,
}

impl AnswerClass {
    pub(crate) fn of(answer: &Answer) -> AnswerClass {
        if answer.host_status != 0 {
            return AnswerClass::Unreachable;
        }
        match answer.status {
            Status::GOOD => AnswerClass::Good,
            Status::CHECK_CONDITION => AnswerClass::of_sense(answer),
            Status::BUSY | Status::TASK_SET_FULL | Status::TASK_ABORTED => AnswerClass::Again,
            Status::RESERVATION_CONFLICT => AnswerClass::Refused,
            _ => AnswerClass::Failed,
        }
    }

    fn of_sense(answer: &Answer) -> AnswerClass {
        let Some(sense) = answer.sense else { return AnswerClass::Failed };
        // A deferred error is about an earlier command; this one was not executed (SPC-5, "Deferred errors").
        if sense.is_deferred {
            return AnswerClass::Again;
        }
        // Checks of protection information fail with the key ABORTED COMMAND (SBC-4, "VRPROTECT field").
        let field = match sense.code {
            AdditionalSense::GUARD_CHECK => Some(Field::Guard),
            AdditionalSense::APP_TAG_CHECK => Some(Field::AppTag),
            AdditionalSense::REF_TAG_CHECK => Some(Field::RefTag),
            _ => None,
        };
        match (sense.key, field) {
            (SenseKey::ABORTED_COMMAND | SenseKey::MEDIUM_ERROR, Some(field)) => {
                AnswerClass::Bad(BadBlockCause::Tag(field))
            }
            (SenseKey::NO_SENSE | SenseKey::RECOVERED_ERROR, _) => AnswerClass::Good,
            (SenseKey::MEDIUM_ERROR, _) => AnswerClass::Bad(BadBlockCause::Media),
            (SenseKey::MISCOMPARE, _) => AnswerClass::Miscompare,
            (SenseKey::UNIT_ATTENTION | SenseKey::ABORTED_COMMAND, _) => AnswerClass::Again,
            (SenseKey::NOT_READY, _) => AnswerClass::Again,
            (SenseKey::ILLEGAL_REQUEST, _) => match sense.code {
                AdditionalSense::INVALID_OPCODE | AdditionalSense::INVALID_FIELD_IN_CDB => AnswerClass::Unsupported,
                _ => AnswerClass::Refused,
            },
            (SenseKey::DATA_PROTECT, _) => AnswerClass::Refused,
            _ => AnswerClass::Failed,
        }
    }
}

/// True if the reply says that the command was not executed at all: it was refused first, or another condition is
/// reported in its place (SAM-5, "Status codes"; SPC-5, "Deferred errors" and "Unit attention"). An aborted command may
/// have been executed in part.
pub(crate) fn is_unexecuted(answer: &Answer) -> bool {
    if answer.host_status != 0 {
        return false;
    }
    match (answer.status, answer.sense) {
        (Status::BUSY | Status::TASK_SET_FULL | Status::RESERVATION_CONFLICT, _) => true,
        (Status::CHECK_CONDITION, Some(sense)) => {
            let before =
                [SenseKey::UNIT_ATTENTION, SenseKey::NOT_READY, SenseKey::ILLEGAL_REQUEST, SenseKey::DATA_PROTECT];
            sense.is_deferred || before.contains(&sense.key)
        }
        _ => false,
    }
}

/// The reply as text.
pub(crate) struct AnswerText<'a>(pub(crate) &'a Answer);

impl fmt::Display for AnswerText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Answer { host_status: 3, .. } => f.write_str("nothing in time"),
            Answer { host_status: host @ 1.., .. } => write!(f, "nothing (the host adapter says {host:02x}h)"),
            Answer { status: Status::CHECK_CONDITION, sense: Some(sense), .. } => sense.fmt(f),
            Answer { status, .. } => status.fmt(f),
        }
    }
}

/// The error of a command that failed, but not because of bad blocks.
pub(crate) fn failure(kind: RequestKind, extent: Extent, answer: &Answer) -> Error {
    let reason = format!("the drive answered {} of {extent} with {}", kind.name(), AnswerText(answer));
    match AnswerClass::of(answer) {
        AnswerClass::Unreachable | AnswerClass::Again => ErrorKind::Unreachable { reason },
        AnswerClass::Unsupported => ErrorKind::Media { reason: format!("{reason}, though it has this command") },
        AnswerClass::Good
        | AnswerClass::Bad(_)
        | AnswerClass::Miscompare
        | AnswerClass::Refused
        | AnswerClass::Failed => ErrorKind::Media { reason },
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_protocols_scsi::Sense;

    fn sensed(key: SenseKey, code: AdditionalSense) -> Answer {
        let sense = Some(Sense::new(key, code));
        Answer { status: Status::CHECK_CONDITION, sense, host_status: 0, moved_bytes: 0 }
    }

    fn plain(status: Status, host_status: u16) -> Answer {
        Answer { status, sense: None, host_status, moved_bytes: 0 }
    }

    #[test]
    fn each_answer_means_one_thing() {
        let code = AdditionalSense::NONE;
        let guard = AnswerClass::Bad(BadBlockCause::Tag(Field::Guard));
        for (answer, class) in [
            (plain(Status::GOOD, 0), AnswerClass::Good),
            (plain(Status::GOOD, 3), AnswerClass::Unreachable),
            (plain(Status::BUSY, 0), AnswerClass::Again),
            (plain(Status::RESERVATION_CONFLICT, 0), AnswerClass::Refused),
            (plain(Status::CHECK_CONDITION, 0), AnswerClass::Failed),
            (plain(Status(0x7E), 0), AnswerClass::Failed),
            (sensed(SenseKey::RECOVERED_ERROR, code), AnswerClass::Good),
            (sensed(SenseKey::MEDIUM_ERROR, AdditionalSense::UNRECOVERED_READ), AnswerClass::Bad(BadBlockCause::Media)),
            (sensed(SenseKey::ABORTED_COMMAND, AdditionalSense::GUARD_CHECK), guard),
            (sensed(SenseKey::ABORTED_COMMAND, code), AnswerClass::Again),
            (sensed(SenseKey::UNIT_ATTENTION, AdditionalSense::CAPACITY_CHANGED), AnswerClass::Again),
            (sensed(SenseKey::MISCOMPARE, AdditionalSense::MISCOMPARE), AnswerClass::Miscompare),
            (sensed(SenseKey::ILLEGAL_REQUEST, AdditionalSense::INVALID_OPCODE), AnswerClass::Unsupported),
            (sensed(SenseKey::ILLEGAL_REQUEST, AdditionalSense::LBA_OUT_OF_RANGE), AnswerClass::Refused),
            (sensed(SenseKey::HARDWARE_ERROR, code), AnswerClass::Failed),
            (sensed(SenseKey::from_bits(0xD), code), AnswerClass::Failed),
        ] {
            assert_eq!(AnswerClass::of(&answer), class, "{answer:?}");
        }
        let mut deferred = sensed(SenseKey::MEDIUM_ERROR, AdditionalSense::UNRECOVERED_READ);
        deferred.sense = deferred.sense.map(|sense| Sense { is_deferred: true, ..sense });
        assert_eq!(AnswerClass::of(&deferred), AnswerClass::Again);
    }

    #[test]
    fn only_answers_that_say_so_mean_that_nothing_was_executed() {
        let code = AdditionalSense::NONE;
        let mut deferred = sensed(SenseKey::MEDIUM_ERROR, code);
        deferred.sense = deferred.sense.map(|sense| Sense { is_deferred: true, ..sense });
        for (answer, is_so) in [
            (plain(Status::BUSY, 0), true),
            (plain(Status::TASK_SET_FULL, 0), true),
            (plain(Status::RESERVATION_CONFLICT, 0), true),
            (plain(Status::BUSY, 3), false),
            (plain(Status::GOOD, 0), false),
            (plain(Status::TASK_ABORTED, 0), false),
            (plain(Status::CHECK_CONDITION, 0), false),
            (sensed(SenseKey::UNIT_ATTENTION, code), true),
            (sensed(SenseKey::NOT_READY, code), true),
            (sensed(SenseKey::ILLEGAL_REQUEST, AdditionalSense::INVALID_OPCODE), true),
            (sensed(SenseKey::ABORTED_COMMAND, code), false),
            (sensed(SenseKey::HARDWARE_ERROR, code), false),
            (sensed(SenseKey::MEDIUM_ERROR, code), false),
            (deferred, true),
        ] {
            assert_eq!(is_unexecuted(&answer), is_so, "{answer:?}");
        }
    }

    #[test]
    fn an_error_says_what_was_done_and_what_the_drive_said() {
        let extent = Extent::from_raw(8, 4).unwrap();
        let hardware = sensed(SenseKey::HARDWARE_ERROR, AdditionalSense(0x44, 0));
        let error = failure(RequestKind::Verify, extent, &hardware);
        assert!(matches!(error.kind(), ErrorKind::Media { .. }));
        assert!(error.to_string().contains("hardware error, additional sense 44h/00h"), "{error}");
        let late = failure(RequestKind::Verify, extent, &plain(Status::GOOD, 3));
        assert!(matches!(late.kind(), ErrorKind::Unreachable { .. }) && late.to_string().contains("in time"), "{late}");
    }
}
