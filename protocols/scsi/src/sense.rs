//! Status and sense data: what a device server says of a command (SAM-5, "Status"; SPC-5, "Sense data").

use std::fmt;

use crate::wire::{TooShort, flag, put_u32, put_u64, u32_at, u64_at};

/// The status byte of a command (SAM-5, "Status codes").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Status(pub u8);

impl Status {
    /// The command completed without error.
    pub const GOOD: Status = Status(0x00);
    /// There is sense data.
    pub const CHECK_CONDITION: Status = Status(0x02);
    /// The logical unit is busy.
    pub const BUSY: Status = Status(0x08);
    /// A reservation of another initiator forbids the command.
    pub const RESERVATION_CONFLICT: Status = Status(0x18);
    /// The logical unit has no room for another command.
    pub const TASK_SET_FULL: Status = Status(0x28);
    /// The command was aborted by another one.
    pub const TASK_ABORTED: Status = Status(0x40);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Status::GOOD => f.write_str("GOOD"),
            Status::CHECK_CONDITION => f.write_str("CHECK CONDITION"),
            Status::BUSY => f.write_str("BUSY"),
            Status::RESERVATION_CONFLICT => f.write_str("RESERVATION CONFLICT"),
            Status::TASK_SET_FULL => f.write_str("TASK SET FULL"),
            Status::TASK_ABORTED => f.write_str("TASK ABORTED"),
            Status(other) => write!(f, "status {other:02x}h"),
        }
    }
}

/// A sense key, of four bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SenseKey(u8);

impl SenseKey {
    /// Nothing to say.
    pub const NO_SENSE: SenseKey = SenseKey(0x0);
    /// Completed, with some recovery by the device.
    pub const RECOVERED_ERROR: SenseKey = SenseKey(0x1);
    /// Not accessible at present.
    pub const NOT_READY: SenseKey = SenseKey(0x2);
    /// A flaw of the medium, or of what is on it.
    pub const MEDIUM_ERROR: SenseKey = SenseKey(0x3);
    /// A failure of the device.
    pub const HARDWARE_ERROR: SenseKey = SenseKey(0x4);
    /// An invalid command or parameter.
    pub const ILLEGAL_REQUEST: SenseKey = SenseKey(0x5);
    /// Something has changed since the last command.
    pub const UNIT_ATTENTION: SenseKey = SenseKey(0x6);
    /// The blocks may not be read or written.
    pub const DATA_PROTECT: SenseKey = SenseKey(0x7);
    /// The device aborted the command.
    pub const ABORTED_COMMAND: SenseKey = SenseKey(0xB);
    /// The data do not match those on the medium.
    pub const MISCOMPARE: SenseKey = SenseKey(0xE);

    /// The low four bits.
    pub const fn from_bits(bits: u8) -> SenseKey {
        SenseKey(bits & 0xF)
    }

    /// The four bits.
    pub const fn bits(self) -> u8 {
        self.0
    }
}

impl fmt::Display for SenseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            SenseKey::NO_SENSE => "no sense",
            SenseKey::RECOVERED_ERROR => "recovered error",
            SenseKey::NOT_READY => "not ready",
            SenseKey::MEDIUM_ERROR => "medium error",
            SenseKey::HARDWARE_ERROR => "hardware error",
            SenseKey::ILLEGAL_REQUEST => "illegal request",
            SenseKey::UNIT_ATTENTION => "unit attention",
            SenseKey::DATA_PROTECT => "data protect",
            SenseKey::ABORTED_COMMAND => "aborted command",
            SenseKey::MISCOMPARE => "miscompare",
            SenseKey(other) => return write!(f, "sense key {other:x}h"),
        })
    }
}

/// ADDITIONAL SENSE CODE and ADDITIONAL SENSE CODE QUALIFIER (SPC-5, "ASC and ASCQ assignments").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AdditionalSense(pub u8, pub u8);

impl AdditionalSense {
    /// Nothing to add.
    pub const NONE: AdditionalSense = AdditionalSense(0x00, 0x00);
    /// LOGICAL BLOCK GUARD CHECK FAILED.
    pub const GUARD_CHECK: AdditionalSense = AdditionalSense(0x10, 0x01);
    /// LOGICAL BLOCK APPLICATION TAG CHECK FAILED.
    pub const APP_TAG_CHECK: AdditionalSense = AdditionalSense(0x10, 0x02);
    /// LOGICAL BLOCK REFERENCE TAG CHECK FAILED.
    pub const REF_TAG_CHECK: AdditionalSense = AdditionalSense(0x10, 0x03);
    /// UNRECOVERED READ ERROR.
    pub const UNRECOVERED_READ: AdditionalSense = AdditionalSense(0x11, 0x00);
    /// MISCOMPARE DURING VERIFY OPERATION.
    pub const MISCOMPARE: AdditionalSense = AdditionalSense(0x1D, 0x00);
    /// INVALID COMMAND OPERATION CODE.
    pub const INVALID_OPCODE: AdditionalSense = AdditionalSense(0x20, 0x00);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub const LBA_OUT_OF_RANGE: AdditionalSense = AdditionalSense(0x21, 0x00);
    /// INVALID FIELD IN CDB.
    pub const INVALID_FIELD_IN_CDB: AdditionalSense = AdditionalSense(0x24, 0x00);
    /// INVALID FIELD IN PARAMETER LIST.
    pub const INVALID_FIELD_IN_LIST: AdditionalSense = AdditionalSense(0x26, 0x00);
    /// CAPACITY DATA HAS CHANGED.
    pub const CAPACITY_CHANGED: AdditionalSense = AdditionalSense(0x2A, 0x09);
}

/// Sense data, in its fixed or its descriptor format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sense {
    /// SENSE KEY.
    pub key: SenseKey,
    /// ADDITIONAL SENSE CODE with its qualifier.
    pub code: AdditionalSense,
    /// INFORMATION, if it is VALID: the block that failed first, or an offset, as the command says.
    pub information: Option<u64>,
    /// It is about an earlier command.
    pub is_deferred: bool,
}

/// RESPONSE CODE of current errors; the next one is that of deferred errors.
const FIXED: u8 = 0x70;
const DESCRIPTOR: u8 = 0x72;
/// DESCRIPTOR TYPE of an information sense data descriptor, and its ADDITIONAL LENGTH.
const INFORMATION: u8 = 0x00;
const INFORMATION_LENGTH: u8 = 0x0A;

impl Sense {
    /// Bytes that [`Sense::encode`] makes at most.
    pub const MAX_BYTES: usize = 20;

    /// Sense data without more than a key and a code.
    pub const fn new(key: SenseKey, code: AdditionalSense) -> Sense {
        Sense { key, code, information: None, is_deferred: false }
    }

    /// Reads sense data. What a device has not sent, or says not to have sent, is zero (SPC-5, "Fixed format sense data").
    ///
    /// # Errors
    /// Fewer bytes than have a sense key, and response codes other than those of sense data.
    pub fn decode(bytes: &[u8]) -> Result<Sense, TooShort> {
        let short = TooShort { structure: "sense data", needed: 8, got: bytes.len() };
        let response = bytes.first().ok_or(short)? & 0x7F;
        match response {
            0x70 | 0x71 if bytes.len() >= 3 => Ok(Sense::decode_fixed(bytes, response == 0x71)),
            0x72 | 0x73 if bytes.len() >= 4 => Ok(Sense::decode_descriptors(bytes, response == 0x73)),
            _ => Err(short),
        }
    }

    fn decode_fixed(bytes: &[u8], is_deferred: bool) -> Sense {
        // ADDITIONAL SENSE LENGTH counts the bytes behind itself.
        let end = bytes.get(7).map_or(3, |more| bytes.len().min(8 + usize::from(*more)));
        let byte = |at: usize| bytes[..end].get(at).copied().unwrap_or(0);
        let information = (bytes[0] & 0x80 != 0 && end >= 7).then(|| u64::from(u32_at(bytes, 3)));
        let code = AdditionalSense(byte(12), byte(13));
        Sense { key: SenseKey::from_bits(bytes[2]), code, information, is_deferred }
    }

    fn decode_descriptors(bytes: &[u8], is_deferred: bool) -> Sense {
        let end = bytes.get(7).map_or(bytes.len(), |more| bytes.len().min(8 + usize::from(*more)));
        let mut rest = bytes.get(8..end).unwrap_or_default();
        let mut information = None;
        while let [kind, length, ..] = *rest {
            let (descriptor, after) = rest.split_at(rest.len().min(2 + usize::from(length)));
            let is_whole = descriptor.len() >= 12;
            if kind == INFORMATION && is_whole && descriptor[2] & 0x80 != 0 {
                information = information.or(Some(u64_at(descriptor, 4)));
            }
            rest = after;
        }
        let code = AdditionalSense(bytes[2], bytes[3]);
        Sense { key: SenseKey::from_bits(bytes[1]), code, information, is_deferred }
    }

    /// Writes sense data: in fixed format, or with descriptors where INFORMATION has no room in it or the D_SENSE bit asks for them.
    pub fn encode(&self, as_descriptors: bool) -> Vec<u8> {
        let deferred = u8::from(self.is_deferred);
        let fits = self.information.is_none_or(|information| u32::try_from(information).is_ok());
        if fits && !as_descriptors {
            let mut bytes = vec![0; 18];
            bytes[0] = FIXED | deferred | flag(self.information.is_some(), 7);
            bytes[2] = self.key.bits();
            put_u32(&mut bytes, 3, self.information.unwrap_or(0) as u32);
            (bytes[7], bytes[12], bytes[13]) = (10, self.code.0, self.code.1);
            return bytes;
        }
        let mut bytes = vec![DESCRIPTOR | deferred, self.key.bits(), self.code.0, self.code.1, 0, 0, 0, 0];
        if let Some(information) = self.information {
            let mut descriptor = [0; 12];
            (descriptor[0], descriptor[1], descriptor[2]) = (INFORMATION, INFORMATION_LENGTH, 0x80);
            put_u64(&mut descriptor, 4, information);
            bytes.extend(descriptor);
        }
        bytes[7] = (bytes.len() - 8) as u8;
        bytes
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AdditionalSense(code, qualifier) = self.code;
        write!(f, "{}, additional sense {code:02x}h/{qualifier:02x}h", self.key)?;
        self.information.map_or(Ok(()), |information| write!(f, ", information {information}"))
    }
}
