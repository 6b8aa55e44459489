//! Fabrics commands: Connect, Property Get and Set, Disconnect (Base, "Fabrics Command Set").
//!
//! They share opcode 7Fh on every queue and tell their type in byte 4, where other commands have their namespace.

use zerocopy::little_endian::{U32, U64};

use crate::command::Command;
use crate::completion::Completion;
use crate::error::Invalid;
use crate::nqn::{Nqn, PaddedText};
use crate::opcodes::{FABRICS_OPCODE, FabricsType};
use crate::status::StatusCode;
use crate::wire::{bits, flags, layout};

/// The controller identifier that a host sends when it wants the subsystem to choose (dynamic controller model).
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;

flags! {
    /// Connect attributes (Base, Connect, field CATTR); bits 1:0 are the priority class.
    pub struct ConnectAttributes(u8) {
        /// Submission queue flow control is off.
        DISABLE_SQ_FLOW_CONTROL = 2,
    }
}

flags! {
    /// What authentication the controller demands (Base, Connect, field AUTHREQ of the answer).
    pub struct AuthenticationRequired(u16) {
        /// ATR: in-band authentication.
        TRANSACTION = 1,
        /// ASCR: a secure channel.
        SECURE_CHANNEL = 2,
    }
}

/// A Fabrics command, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FabricsCommand {
    /// Connect; its data is a [`ConnectData`].
    Connect(Connect),
    /// Property Get.
    PropertyGet(PropertyGet),
    /// Property Set.
    PropertySet(PropertySet),
    /// Disconnect: delete this I/O queue.
    Disconnect,
}

/// Connect: make a queue (Base, "Connect Command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connect {
    /// QID: 0 for the admin queue.
    pub queue: u16,
    /// SQSIZE: entries of the submission queue, 2 to 65,536 (0's based on the wire; 1 entry is refused).
    pub entries: u32,
    /// CATTR: attributes.
    pub attributes: ConnectAttributes,
    /// KATO: keep alive timeout in milliseconds, 0 for none. Controllers round it up to what KAS says.
    pub keep_alive_ms: u32,
}

/// Property Get (Base, "Property Get Command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PropertyGet {
    /// OFST: which property, see [`crate::registers::Property`].
    pub offset: u32,
    /// ATTRIB bits 2:0: 4 or 8 bytes.
    pub bytes: usize,
}

/// Property Set (Base, "Property Set Command").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PropertySet {
    /// OFST: which property.
    pub offset: u32,
    /// ATTRIB bits 2:0: 4 or 8 bytes.
    pub bytes: usize,
    /// VALUE: with 4 bytes only the low half counts.
    pub value: u64,
}

layout! {
    /// The data of Connect as it stands on the wire; [`ConnectData::parse`] makes names of it.
    pub struct ConnectPage[1024] {
        /// HOSTID: host identifier.
        0 => hostid: [u8; 16],
        /// CNTLID: controller identifier.
        16 => cntlid: u16,
        /// SUBNQN: subsystem.
        256 => subnqn: PaddedText<256>,
        /// HOSTNQN: host.
        512 => hostnqn: PaddedText<256>,
    }
}

/// The data of Connect: who wants to talk to whom.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectData {
    /// HOSTID: the same for all connections of a host.
    pub hostid: [u8; 16],
    /// CNTLID: for I/O queues the controller; for the admin queue mostly [`CNTLID_DYNAMIC`].
    pub cntlid: u16,
    /// SUBNQN: the subsystem.
    pub subnqn: Nqn,
    /// HOSTNQN: the host; `None` where it does not say who it is.
    pub hostnqn: Option<Nqn>,
}

/// Connect Invalid Parameters: which parameter (Base, Connect, fields IPO and IATTR of the answer).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[error("byte {offset_bytes} of the Connect {} is not valid", if *.in_data { "data" } else { "command" })]
pub struct InvalidParameter {
    /// IATTR bit 0: in the data rather than in the command.
    pub in_data: bool,
    /// IPO: byte at which the parameter starts.
    pub offset_bytes: u16,
}

/// Why Connect is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum ConnectError {
    /// A parameter is not valid.
    #[error(transparent)]
    Parameter(#[from] InvalidParameter),
    /// RECFMT is not 0.
    #[error("record format {0} of Connect is not supported")]
    Format(u16),
    /// There are fewer than 1024 bytes of data.
    #[error("Connect needs 1024 bytes of data and has {got_bytes}")]
    DataLength {
        /// Bytes there are.
        got_bytes: usize,
    },
}

impl InvalidParameter {
    /// QID of the command.
    pub const QID: InvalidParameter = InvalidParameter { in_data: false, offset_bytes: 42 };
    /// SQSIZE of the command.
    pub const SQSIZE: InvalidParameter = InvalidParameter { in_data: false, offset_bytes: 44 };
    /// KATO of the command.
    pub const KATO: InvalidParameter = InvalidParameter { in_data: false, offset_bytes: 48 };
    /// HOSTID of the data.
    pub const HOSTID: InvalidParameter = InvalidParameter { in_data: true, offset_bytes: 0 };
    /// CNTLID of the data.
    pub const CNTLID: InvalidParameter = InvalidParameter { in_data: true, offset_bytes: 16 };
    /// SUBNQN of the data.
    pub const SUBNQN: InvalidParameter = InvalidParameter { in_data: true, offset_bytes: 256 };
    /// HOSTNQN of the data.
    pub const HOSTNQN: InvalidParameter = InvalidParameter { in_data: true, offset_bytes: 512 };

    /// Dword 0 of the answer.
    pub const fn dword0(self) -> u32 {
        self.offset_bytes as u32 | (self.in_data as u32) << 16
    }

    /// What dword 0 of an answer with this status says.
    pub const fn from_dword0(dword0: u32) -> InvalidParameter {
        InvalidParameter { in_data: dword0 & 1 << 16 != 0, offset_bytes: dword0 as u16 }
    }
}

impl ConnectError {
    /// The answer to command `cid`.
    pub fn completion(self, cid: u16) -> Completion {
        match self {
            ConnectError::Parameter(parameter) => {
                let status = StatusCode::CONNECT_INVALID_PARAMETERS.status();
                Completion::new(cid, status, u64::from(parameter.dword0()))
            }
            ConnectError::Format(_) => Completion::new(cid, StatusCode::CONNECT_INCOMPATIBLE_FORMAT.status(), 0),
            ConnectError::DataLength { .. } => Completion::new(cid, StatusCode::DATA_SGL_LENGTH_INVALID.status(), 0),
        }
    }
}

impl Connect {
    /// The command. Fails with the answer that Connect has for it, so it stands apart from [`FabricsCommand::decode`].
    pub fn decode(command: &Command) -> Result<Connect, ConnectError> {
        let (cdw10, cdw11) = (command.cdw10.get(), command.cdw11.get());
        match cdw10 as u16 {
            0 => {}
            format => return Err(ConnectError::Format(format)),
        }
        // A queue of one entry could never hold a command, because a full queue has one entry free.
        if cdw11 & 0xFFFF == 0 {
            return Err(InvalidParameter::SQSIZE.into());
        }
        Ok(Connect {
            queue: (cdw10 >> 16) as u16,
            entries: (cdw11 & 0xFFFF) + 1,
            attributes: ConnectAttributes::from_bits_retain((cdw11 >> 16) as u8),
            keep_alive_ms: command.cdw12.get(),
        })
    }

    /// The submission queue entry; entries outside 2 to 65,536 become the nearest legal number.
    pub fn encode(&self) -> Command {
        let mut command = fabrics(FabricsType::Connect);
        command.cdw10 = U32::new(u32::from(self.queue) << 16);
        let sqsize = self.entries.clamp(2, 1 << 16) - 1;
        command.cdw11 = U32::new(sqsize | u32::from(self.attributes.bits()) << 16);
        command.cdw12 = U32::new(self.keep_alive_ms);
        command
    }

    /// The result of a successful answer.
    pub const fn result(cntlid: u16, required: AuthenticationRequired) -> u64 {
        cntlid as u64 | (required.bits() as u64) << 16
    }

    /// Controller identifier and demands in the result of a successful answer.
    pub const fn from_result(result: u64) -> (u16, AuthenticationRequired) {
        (result as u16, AuthenticationRequired::from_bits_retain((result >> 16) as u16))
    }
}

impl ConnectData {
    /// The data, or which part of it is not valid.
    pub fn parse(data: &[u8]) -> Result<ConnectData, ConnectError> {
        let page = ConnectPage::decode(data).map_err(|short| ConnectError::DataLength { got_bytes: short.got })?;
        Ok(ConnectData {
            hostid: page.hostid,
            cntlid: page.cntlid,
            subnqn: Nqn::from_field(page.subnqn.bytes()).map_err(|_| InvalidParameter::SUBNQN)?,
            hostnqn: match page.hostnqn.bytes() {
                [0, ..] => None,
                named => Some(Nqn::from_field(named).map_err(|_| InvalidParameter::HOSTNQN)?),
            },
        })
    }

    /// The 1024 bytes of the wire.
    pub fn encode(&self) -> [u8; ConnectPage::BYTES] {
        let hostnqn = PaddedText::new(self.hostnqn.as_ref().map_or("", Nqn::as_str));
        let subnqn = PaddedText::new(self.subnqn.as_str());
        ConnectPage { hostid: self.hostid, cntlid: self.cntlid, subnqn, hostnqn }.encode()
    }
}

impl FabricsCommand {
    /// The type of a Fabrics command, if it is one and of a known type.
    pub fn kind(command: &Command) -> Option<FabricsType> {
        if command.opcode != FABRICS_OPCODE {
            return None;
        }
        FabricsType::from_code(command.nsid.get() as u8)
    }

    /// The command, or why it is none; what is wrong with a Connect is better asked from [`Connect::decode`].
    pub fn decode(command: &Command) -> Result<FabricsCommand, Invalid> {
        let (cdw10, offset) = (command.cdw10.get(), command.cdw11.get());
        match FabricsCommand::kind(command) {
            Some(FabricsType::Connect) => {
                let refused = |_| Invalid::field("SQSIZE", 11, 0);
                Connect::decode(command).map(FabricsCommand::Connect).map_err(refused)
            }
            Some(FabricsType::PropertyGet) => {
                Ok(FabricsCommand::PropertyGet(PropertyGet { offset, bytes: property_bytes(cdw10)? }))
            }
            Some(FabricsType::PropertySet) => {
                let value = u64::from(command.cdw13.get()) << 32 | u64::from(command.cdw12.get());
                Ok(FabricsCommand::PropertySet(PropertySet { offset, bytes: property_bytes(cdw10)?, value }))
            }
            Some(FabricsType::Disconnect) if cdw10 as u16 == 0 => Ok(FabricsCommand::Disconnect),
            Some(FabricsType::Disconnect) => Err(Invalid::field("RECFMT", 10, 0)),
            None => Err(Invalid::Opcode(command.opcode)),
        }
    }

    /// The submission queue entry, without identifier and data pointer.
    pub fn encode(&self) -> Command {
        match self {
            FabricsCommand::Connect(connect) => connect.encode(),
            FabricsCommand::PropertyGet(get) => property(FabricsType::PropertyGet, get.offset, get.bytes),
            FabricsCommand::PropertySet(set) => {
                let mut command = property(FabricsType::PropertySet, set.offset, set.bytes);
                command.cdw12 = U32::new(set.value as u32);
                command.cdw13 = U32::new((set.value >> 32) as u32);
                command
            }
            FabricsCommand::Disconnect => fabrics(FabricsType::Disconnect),
        }
    }
}

/// An entry of this type, everything else zero.
fn fabrics(kind: FabricsType) -> Command {
    let mut command = Command::new(FABRICS_OPCODE, u32::from(kind.code()));
    command.mptr = U64::ZERO;
    command
}

fn property(kind: FabricsType, offset: u32, bytes: usize) -> Command {
    let mut command = fabrics(kind);
    command.cdw10 = U32::new(u32::from(bytes == 8));
    command.cdw11 = U32::new(offset);
    command
}

/// Bytes of a property by ATTRIB bits 2:0.
fn property_bytes(cdw10: u32) -> Result<usize, Invalid> {
    match bits(cdw10, 0, 3) {
        0 => Ok(4),
        1 => Ok(8),
        _ => Err(Invalid::field("ATTRIB", 10, 0)),
    }
}

#[cfg(test)]
#[path = "fabrics_tests.rs"]
mod tests;
