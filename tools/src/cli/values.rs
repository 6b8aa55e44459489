//! Values of options: each with its own type, so that a wrong one is bad usage.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::{OsStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Args, Command, ValueEnum};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_exports_ublk::HostGuard;
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_media_volume::CorruptionKind;
use sealblock_server::control::protocol::LogLevel;
use sealblock_stack::Usage;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::identity::uuid_from;
use sealblock_stack::target::{Address, NbdAddress, TargetError, TargetErrorKind, TargetName};
use sealblock_units::{BlockSize, Lba};

/// Reads the name of a filesystem.
pub(super) fn filesystem() -> impl TypedValueParser<Value = FilesystemName> {
    OsStringValueParser::new().try_map(|text: OsString| FilesystemName::parse(&text))
}

/// Names of values: each with its help.
pub(super) type Names<T> = [(&'static str, &'static str, T)];

/// Reads one of these names.
pub(super) fn one_of<T: Clone + Send + Sync>(names: &'static Names<T>) -> impl TypedValueParser<Value = T> {
    let values = names.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).map(|given| {
        let named = names.iter().find(|(name, ..)| *name == given);
        named.expect("the parser lets only these names through").2.clone()
    })
}

/// The checksum in a block's seal; `None` for a volume without protection information, whose map has a CRC-32C of the data.
pub type Guard = Option<GuardKind>;

pub(super) const GUARDS: &Names<Guard> = &[
    ("crc16", "CRC-16/T10-DIF: 16-bit guard, 8 bytes of tags for a block", Some(GuardKind::Crc16)),
    ("crc32c", "CRC-32C: 32-bit guard, 16 bytes of tags for a block", Some(GuardKind::Crc32c)),
    ("crc64", "CRC-64/NVME: 64-bit guard, 16 bytes of tags for a block", Some(GuardKind::Crc64)),
    (
        "none",
        "No protection information for hosts: data are still checked, by a CRC-32C that the volume keeps in its map",
        None,
    ),
];

/// What the reference tag of a block means (NVM Command Set Specification, "Protection Information").
pub(super) const PROTECTION_TYPES: &Names<ProtectionType> = &[
    ("1", "The block's address", ProtectionType::Type1),
    ("2", "An address relative to a start that each command gives", ProtectionType::Type2),
    ("3", "Not checked", ProtectionType::Type3),
];

/// A number of shards that `create` makes.
pub(super) fn parse_shards(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(shards @ (1 | 2 | 4 | 8 | 16)) => Ok(shards),
        _ => Err("must be 1, 2, 4, 8 or 16".to_owned()),
    }
}

/// Ways of damaging a block.
pub(super) const CORRUPTIONS: &Names<CorruptionKind> = &[
    ("data", "One bit of its data flips", CorruptionKind::Data),
    ("guard", "One bit of its guard flips", CorruptionKind::Guard),
    ("ref-tag", "Its reference tag changes", CorruptionKind::RefTag),
    ("app-tag", "Its application tag changes", CorruptionKind::AppTag),
    ("lost-write", "Its last write is undone: older data with a matching seal", CorruptionKind::LostWrite),
    ("misdirected", "Another block's data and seal are written here", CorruptionKind::Misdirected),
];

/// Checksums by which the kernel protects blocks.
pub(super) const HOST_GUARDS: &Names<HostGuard> = &[
    ("ip", "The Internet checksum: cheapest, but does not detect swapped 16-bit words", HostGuard::Ip),
    ("crc16", "CRC-16/T10-DIF", HostGuard::Crc16),
    ("crc64", "CRC-64/NVME", HostGuard::Crc64),
];

/// Reads N or /dev/ublkbN.
pub(super) fn block_device(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("/dev/ublkb").unwrap_or(text);
    number.parse().map_err(|_| "must be N or /dev/ublkbN".to_owned())
}

/// What hosts see of protection information.
pub(super) const VISIBILITIES: &Names<PiVisibility> = &[
    ("plain", "Plain blocks: the server generates and checks protection information", PiVisibility::Plain),
    (
        "shown",
        "Blocks with their tags: hosts choose in each command where tags are generated and checked",
        PiVisibility::Protected,
    ),
];

/// How much a server logs besides events.
pub(super) const LOG_LEVELS: &[(&str, &str, LogLevel); 5] = &[
    ("off", "Nothing", LogLevel::Off),
    ("error", "Permanent failures", LogLevel::Error),
    ("warn", "Problems that may need attention", LogLevel::Warn),
    ("info", "Normal operation", LogLevel::Info),
    ("debug", "Also ended connections and failed requests, each with its reason", LogLevel::Debug),
];

/// Reads the level of `sealblock log`, which comes before the server.
pub(super) fn level_before_server() -> impl TypedValueParser<Value = LogLevel> {
    LevelParser
}

#[derive(Clone)]
struct LevelParser;

impl TypedValueParser for LevelParser {
    type Value = LogLevel;

    fn parse_ref(&self, command: &Command, _: Option<&Arg>, value: &OsStr) -> Result<LogLevel, clap::Error> {
        let level = LOG_LEVELS.iter().find(|(name, ..)| value == OsStr::new(name));
        level.map(|(.., level)| *level).ok_or_else(|| {
            let (given, names) = (value.to_string_lossy(), LOG_LEVELS.map(|(name, ..)| name).join(", "));
            let why = format!(
                "'{given}' is not a log level: {names}\n\nThe level comes first: sealblock log LEVEL [SERVER]. `sealblock status \
                 {given}` shows the level of a server.\n"
            );
            clap::Error::raw(ErrorKind::ValueValidation, why).with_cmd(command)
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(LOG_LEVELS.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help))))
    }
}

/// A server that can list its exports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RemoteServer {
    /// Over NVMe/TCP.
    NvmeTcp(Address),
    /// Over NBD.
    Nbd(NbdAddress),
}

impl FromStr for RemoteServer {
    type Err = TargetError;

    /// Reads `HOST[:PORT]`, `nbd://HOST[:PORT]` or `nbd+unix:///?socket=PATH`; a trailing slash of the second is ignored.
    fn from_str(text: &str) -> Result<RemoteServer, TargetError> {
        if text.starts_with("nbd+unix:") {
            return match text.parse()? {
                TargetName::Nbd { address, export, connections: None } if export.is_empty() => {
                    Ok(RemoteServer::Nbd(address))
                }
                _ => Err(TargetError { column: 1, problem: TargetErrorKind::ServerOnly }),
            };
        }
        match text.strip_prefix("nbd://") {
            Some(rest) => rest
                .strip_suffix('/')
                .unwrap_or(rest)
                .parse()
                .map(|address| RemoteServer::Nbd(NbdAddress::Tcp(address))),
            None => text.parse().map(RemoteServer::NvmeTcp),
        }
    }
}

impl fmt::Display for RemoteServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoteServer::NvmeTcp(address) => write!(f, "{address}"),
            RemoteServer::Nbd(address) => address.fmt(f),
        }
    }
}

/// Who does the checking of `verify`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum)]
pub enum Mode {
    /// The device if it supports verification, else this process.
    Auto,
    /// The device; fails if it does not support verification.
    Offload,
    /// This process, by reading every block.
    Emulate,
}

/// A target that is a file or a block device, as a volume must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Volume(PathBuf);

impl Volume {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The target that opens it.
    pub fn target(&self) -> TargetName {
        TargetName::File(self.0.clone())
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.target().fmt(f)
    }
}

/// Why a text names no volume.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum VolumeError {
    /// It names no target at all.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// It names another kind of target.
    #[error("a volume must be a file or a block device, given as a path such as ./volume")]
    Kind,
}

impl FromStr for Volume {
    type Err = VolumeError;

    fn from_str(text: &str) -> Result<Volume, VolumeError> {
        match text.parse()? {
            TargetName::File(path) | TargetName::Linux { path, .. } => Ok(Volume(path)),
            _ => Err(VolumeError::Kind),
        }
    }
}

/// One end of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// Standard input or output: `-`.
    Standard,
    /// A target.
    Target(TargetName),
}

impl FromStr for Endpoint {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Endpoint, TargetError> {
        if text == "-" { Ok(Endpoint::Standard) } else { text.parse().map(Endpoint::Target) }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Standard => f.write_str("-"),
            Endpoint::Target(target) => target.fmt(f),
        }
    }
}

/// Whether labels of groups are used.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Labels {
    /// If the members of a stripe have no labels, trust the given order and chunk size; the same as stripe-nolabel:.
    #[arg(long)]
    pub no_label: bool,
}

/// Whether a single member of a mirror or stripe may be written.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Members {
    /// Allow writing to a single member of a mirror or stripe. A mirror resyncs the member afterwards.
    #[arg(long)]
    pub force_member: bool,
}

impl Members {
    /// What a target is opened for.
    pub fn usage(self) -> Usage {
        if self.force_member { Usage::Forced } else { Usage::Alone }
    }
}

impl Labels {
    pub(super) fn apply_to(self, target: &mut TargetName) {
        if self.no_label {
            *target = target.clone().without_label();
        }
    }
}

/// A block size in bytes.
pub(super) fn block_size(text: &str) -> Result<BlockSize, String> {
    let size = text.parse().ok().and_then(BlockSize::from_bytes);
    size.ok_or_else(|| "must be 512 or 4096".to_owned())
}

/// A volume's identity.
pub(super) fn uuid(text: &str) -> Result<[u8; 16], String> {
    uuid_from(text).ok_or_else(|| "must be a UUID, as printed by `sealblock info`".to_owned())
}

/// A block's address, in decimal digits.
pub(super) fn lba(text: &str) -> Result<Lba, String> {
    let number = if text.starts_with('+') { None } else { text.parse().ok() };
    number.map(Lba::new).ok_or_else(|| "must be a number from 0 to 2^64 - 1".to_owned())
}
