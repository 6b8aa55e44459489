//! What became of a command: status code type, status code, and what the host may do about it.
//!
//! A [`StatusCode`] is SCT and SC as one number, `SCT << 8 | SC`. A [`Status`] is the whole field of the completion
//! with CRD, M and DNR. Numbers that this table does not know stay usable: a host must be able to report them.
//!
//! The Do Not Retry policy is part of the table. A code is marked `dnr` when the same command to the same controller
//! would fail again: the command is malformed, or names what is not there, or the media and every copy were already
//! tried. It is not marked when time or another path may cure it: a namespace that is not ready, a path that is gone, an
//! internal error, an abort. Linux repeats commands that fail without DNR up to five times, so a damaged block without
//! DNR costs six reads.

use std::fmt;

/// Status code type and status code as one number: `SCT << 8 | SC` (Base, "Status Field Definition").
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StatusCode(u16);

/// The status field of a completion without the phase tag: SC in bits 7:0, SCT in 10:8, CRD in 12:11, M in 13, DNR
/// in 14 (Base, "Status Field Definition").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(u16);

macro_rules! status_codes {
    ($($(#[$doc:meta])* $id:ident = $value:literal, $dnr:ident, $name:literal;)*) => {
        impl StatusCode {
            $(
                #[doc = concat!("`", stringify!($value), "`: ", $name, ".")]
                $(#[$doc])*
                pub const $id: StatusCode = StatusCode($value);
            )*

            /// Every code that has a name here.
            pub const NAMED: &'static [StatusCode] = &[$(StatusCode::$id),*];

            /// The name in the specification, if the code is a known one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($name),)*
                    _ => None,
                }
            }

            /// Whether a completion with this code says Do Not Retry, by the policy above. Unknown codes do not.
            pub const fn do_not_retry(self) -> bool {
                match self.0 {
                    $($value => status_codes!(@ $dnr),)*
                    _ => false,
                }
            }
        }
    };
    (@ dnr) => { true };
    (@ retry) => { false };
}

// Clause "Status Field Definition" of the base specification, and of the NVM command set specification for the codes
// 80h and above. The command specific codes of Fabrics share numbers with those of other command sets.
status_codes! {
    // Generic Command Status.
    SUCCESS = 0x000, retry, "Successful Completion";
    INVALID_OPCODE = 0x001, dnr, "Invalid Command Opcode";
    INVALID_FIELD = 0x002, dnr, "Invalid Field in Command";
    COMMAND_ID_CONFLICT = 0x003, dnr, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0x004, retry, "Data Transfer Error";
    POWER_LOSS_ABORT = 0x005, retry, "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0x006, retry, "Internal Error";
    ABORT_REQUESTED = 0x007, retry, "Command Abort Requested";
    ABORTED_SQ_DELETION = 0x008, retry, "Command Aborted due to SQ Deletion";
    ABORTED_FAILED_FUSED = 0x009, retry, "Command Aborted due to Failed Fused Command";
    ABORTED_MISSING_FUSED = 0x00A, dnr, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0x00B, dnr, "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0x00C, dnr, "Command Sequence Error";
    INVALID_SGL_SEGMENT_DESCRIPTOR = 0x00D, dnr, "Invalid SGL Segment Descriptor";
    INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0x00E, dnr, "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = 0x00F, dnr, "Data SGL Length Invalid";
    METADATA_SGL_LENGTH_INVALID = 0x010, dnr, "Metadata SGL Length Invalid";
    SGL_DESCRIPTOR_TYPE_INVALID = 0x011, dnr, "SGL Descriptor Type Invalid";
    INVALID_USE_OF_CMB = 0x012, dnr, "Invalid Use of Controller Memory Buffer";
    PRP_OFFSET_INVALID = 0x013, dnr, "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, dnr, "Atomic Write Unit Exceeded";
    OPERATION_DENIED = 0x015, dnr, "Operation Denied";
    SGL_OFFSET_INVALID = 0x016, dnr, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT_FORMAT = 0x018, dnr, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0x019, retry, "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = 0x01A, dnr, "Keep Alive Timeout Invalid";
    ABORTED_PREEMPT = 0x01B, retry, "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = 0x01C, dnr, "Sanitize Failed";
    SANITIZE_IN_PROGRESS = 0x01D, retry, "Sanitize In Progress";
    SGL_GRANULARITY_INVALID = 0x01E, dnr, "SGL Data Block Granularity Invalid";
    COMMAND_NOT_SUPPORTED_IN_CMB = 0x01F, dnr, "Command Not Supported for Queue in CMB";
    NAMESPACE_WRITE_PROTECTED = 0x020, dnr, "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0x021, retry, "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0x022, retry, "Transient Transport Error";
    PROHIBITED_BY_LOCKDOWN = 0x023, dnr, "Command Prohibited by Command and Feature Lockdown";
    ADMIN_MEDIA_NOT_READY = 0x024, retry, "Admin Command Media Not Ready";
    LBA_OUT_OF_RANGE = 0x080, dnr, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0x081, dnr, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0x082, retry, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0x083, dnr, "Reservation Conflict";
    FORMAT_IN_PROGRESS = 0x084, retry, "Format In Progress";

    // Command Specific Status.
    INVALID_COMPLETION_QUEUE = 0x100, dnr, "Completion Queue Invalid";
    INVALID_QUEUE_IDENTIFIER = 0x101, dnr, "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = 0x102, dnr, "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = 0x103, retry, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 0x105, dnr, "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = 0x106, dnr, "Invalid Firmware Slot";
    INVALID_LOG_PAGE = 0x109, dnr, "Invalid Log Page";
    INVALID_FORMAT = 0x10A, dnr, "Invalid Format";
    FEATURE_NOT_SAVEABLE = 0x10D, dnr, "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 0x10E, dnr, "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F, dnr, "Feature Not Namespace Specific";
    OVERLAPPING_RANGE = 0x114, dnr, "Overlapping Range";
    NAMESPACE_NOT_ATTACHED = 0x11A, dnr, "Namespace Not Attached";
    INVALID_CONTROLLER_IDENTIFIER = 0x11F, dnr, "Invalid Controller Identifier";
    ANA_GROUP_ID_INVALID = 0x124, dnr, "ANA Group Identifier Invalid";
    COMMAND_SET_NOT_SUPPORTED = 0x129, dnr, "I/O Command Set Not Supported";
    COMMAND_SET_NOT_ENABLED = 0x12A, dnr, "I/O Command Set Not Enabled";
    COMMAND_SET_COMBINATION_REJECTED = 0x12B, dnr, "I/O Command Set Combination Rejected";
    INVALID_COMMAND_SET = 0x12C, dnr, "Invalid I/O Command Set";

    // Command Specific Status of Fabrics commands.
    CONNECT_INCOMPATIBLE_FORMAT = 0x180, dnr, "Connect Incompatible Format";
    CONNECT_CONTROLLER_BUSY = 0x181, retry, "Connect Controller Busy";
    CONNECT_INVALID_PARAMETERS = 0x182, dnr, "Connect Invalid Parameters";
    CONNECT_RESTART_DISCOVERY = 0x183, dnr, "Connect Restart Discovery";
    CONNECT_INVALID_HOST = 0x184, dnr, "Connect Invalid Host";
    INVALID_QUEUE_TYPE = 0x185, dnr, "Invalid Queue Type";
    DISCOVER_RESTART = 0x190, retry, "Discover Restart";
    AUTHENTICATION_REQUIRED = 0x191, dnr, "Authentication Required";

    // Media and Data Integrity Errors.
    WRITE_FAULT = 0x280, dnr, "Write Fault";
    UNRECOVERED_READ_ERROR = 0x281, dnr, "Unrecovered Read Error";
    GUARD_CHECK_ERROR = 0x282, dnr, "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK_ERROR = 0x283, dnr, "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK_ERROR = 0x284, dnr, "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = 0x285, dnr, "Compare Failure";
    ACCESS_DENIED = 0x286, dnr, "Access Denied";
    DEALLOCATED_OR_UNWRITTEN = 0x287, dnr, "Deallocated or Unwritten Logical Block";
    STORAGE_TAG_CHECK_ERROR = 0x288, dnr, "End-to-End Storage Tag Check Error";

    // Path Related Status.
    PATH_INTERNAL_ERROR = 0x300, retry, "Internal Path Error";
    ANA_PERSISTENT_LOSS = 0x301, retry, "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 0x302, retry, "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 0x303, retry, "Asymmetric Access Transition";
    CONTROLLER_PATHING_ERROR = 0x360, retry, "Controller Pathing Error";
    HOST_PATHING_ERROR = 0x370, retry, "Host Pathing Error";
    ABORTED_BY_HOST = 0x371, retry, "Command Aborted By Host";
}

// Command Specific Status of the NVM command set: these numbers are shared with Fabrics commands, so a number alone
// does not name them.
impl StatusCode {
    /// `0x181` of an NVM command: Invalid Protection Information.
    pub const INVALID_PROTECTION_INFORMATION: StatusCode = StatusCode(0x181);
    /// `0x182` of an NVM command: Attempted Write to Read Only Range.
    pub const WRITE_TO_READ_ONLY_RANGE: StatusCode = StatusCode(0x182);
    /// `0x183` of an NVM command: Command Size Limit Exceeded.
    pub const COMMAND_SIZE_LIMIT_EXCEEDED: StatusCode = StatusCode(0x183);
    /// `0x187` of an NVM command: Overlapping I/O Range.
    pub const OVERLAPPING_IO_RANGE: StatusCode = StatusCode(0x187);
    /// `0x189` of an NVM command: Insufficient Resources.
    pub const INSUFFICIENT_RESOURCES: StatusCode = StatusCode(0x189);

    /// The name of the code as the answer to an NVM I/O command, where it differs from [`StatusCode::name`].
    pub const fn io_name(self) -> Option<&'static str> {
        match self.0 {
            0x180 => Some("Conflicting Attributes"),
            0x181 => Some("Invalid Protection Information"),
            0x182 => Some("Attempted Write to Read Only Range"),
            0x183 => Some("Command Size Limit Exceeded"),
            0x185 => Some("Incompatible Namespace or Format"),
            0x186 => Some("Fast Copy Not Possible"),
            0x187 => Some("Overlapping I/O Range"),
            0x189 => Some("Insufficient Resources"),
            _ => self.name(),
        }
    }
}

/// Status code types (Base, field SCT).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StatusCodeType {
    /// 0h: the same meaning for every command.
    Generic,
    /// 1h: the meaning depends on the opcode.
    CommandSpecific,
    /// 2h: errors of the media and of data integrity.
    Media,
    /// 3h: errors of the way to the controller.
    Path,
    /// 4h to 6h: reserved.
    Reserved,
    /// 7h: vendor specific.
    Vendor,
}

impl StatusCode {
    /// The code of this type (three bits count) and number.
    pub const fn new(sct: u8, sc: u8) -> StatusCode {
        StatusCode((sct as u16 & 7) << 8 | sc as u16)
    }

    /// `SCT << 8 | SC`.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The status code type (SCT).
    pub const fn code_type(self) -> StatusCodeType {
        match self.0 >> 8 {
            0 => StatusCodeType::Generic,
            1 => StatusCodeType::CommandSpecific,
            2 => StatusCodeType::Media,
            3 => StatusCodeType::Path,
            7 => StatusCodeType::Vendor,
            _ => StatusCodeType::Reserved,
        }
    }

    /// The status with this code, DNR by the policy of this module, CRD and M zero.
    pub const fn status(self) -> Status {
        // The names of 181h and 183h for Fabrics are retryable and for NVM commands are not; who answers an NVM command
        // with one of them says so with `Status::with_dnr`.
        Status(self.0).with_dnr(self.do_not_retry())
    }
}

impl Status {
    /// Successful completion.
    pub const SUCCESS: Status = Status(0);

    /// The status with these 15 bits; the highest bit of `bits` is ignored.
    pub const fn from_bits(bits: u16) -> Status {
        Status(bits & 0x7FFF)
    }

    /// The 15 bits of the field.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Status code type and status code.
    pub const fn code(self) -> StatusCode {
        StatusCode(self.0 & 0x7FF)
    }

    /// Whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// Which Command Retry Delay Time of Identify Controller applies: 1 to 3, or 0 for none (CRD).
    pub const fn retry_delay(self) -> u8 {
        (self.0 >> 11) as u8 & 3
    }

    /// Whether the Error Information log has more about this command (M).
    pub const fn more(self) -> bool {
        self.0 & (1 << 13) != 0
    }

    /// Whether the same command to any controller of the subsystem is expected to fail again (DNR).
    pub const fn do_not_retry(self) -> bool {
        self.0 & (1 << 14) != 0
    }

    /// The same status with DNR so.
    pub const fn with_dnr(self, dnr: bool) -> Status {
        Status(self.0 & !(1 << 14) | (dnr as u16) << 14)
    }

    /// The same status with M so.
    pub const fn with_more(self, more: bool) -> Status {
        Status(self.0 & !(1 << 13) | (more as u16) << 13)
    }

    /// The same status with this command retry delay (two bits count).
    pub const fn with_retry_delay(self, crd: u8) -> Status {
        Status(self.0 & !(3 << 11) | (crd as u16 & 3) << 11)
    }
}

impl From<StatusCode> for Status {
    fn from(code: StatusCode) -> Status {
        code.status()
    }
}

impl fmt::Display for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({:#05x})", self.0),
            None => write!(f, "status {:#05x}", self.0),
        }
    }
}

impl fmt::Debug for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.code(), f)?;
        if self.do_not_retry() {
            f.write_str(", do not retry")?;
        }
        if self.more() {
            f.write_str(", more in the error log")?;
        }
        match self.retry_delay() {
            0 => Ok(()),
            crd => write!(f, ", retry delay {crd}"),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
