//! The messages of a control socket: a request and a response, each one JSON object on one line.
//!
//! Any process that may open the socket can send lines, so their length is limited, and they are checked before a
//! command is executed. A request of another version is refused with the number of this version; unknown fields are
//! ignored, unknown commands are refused.

use std::net::SocketAddr;
use std::num::NonZeroU64;

use sealblock_stack::TargetIdentity;
use serde::{Deserialize, Serialize};

use crate::status::mirror::MirrorStatus;
use crate::status::scrub::ScrubStatus;
use crate::status::server::ServerStatus;

/// The version of requests and responses.
pub const VERSION: u32 = 2;
/// The maximum bytes of a request, including the line end: more than the longest target needs.
pub const MAX_REQUEST_BYTES: usize = 256 << 10;
/// What a resize does, for error messages; a server leaves it out of the reason if the command prints it.
pub const RESIZING: &str = "resize";

/// A request to a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ControlRequest {
    /// [`VERSION`].
    pub version: u32,
    /// Its target; empty for [`ControlCommand::Status`] and [`ControlCommand::Log`].
    #[serde(default)]
    pub target: TargetRef,
    /// The command.
    #[serde(flatten)]
    pub command: ControlCommand,
}

/// A command for a target, or for the server as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum ControlCommand {
    /// Report the state of the server and its devices.
    Status,
    /// Set or report the log level.
    Log {
        /// The new level; `None` to leave it.
        level: Option<LogLevel>,
    },
    /// Report whether the server has the target.
    Find,
    /// Report the state of its scrub.
    ScrubStatus,
    /// Begin a run, or resume a paused one.
    ScrubStart {
        /// The first block, if not 0.
        from: Option<u64>,
        /// Bytes per second, if not the default.
        rate: Option<NonZeroU64>,
    },
    /// Pause the run.
    ScrubPause,
    /// End the run.
    ScrubStop,
    /// Report the state of a mirror.
    MirrorStatus,
    /// Add a replica to a mirror.
    MirrorAdd {
        /// The target that becomes a replica.
        replica: String,
        /// True if its content may be replaced.
        #[serde(default)]
        force: bool,
    },
    /// Replace a replica by another device. A replica in sync is removed only when the resync of the new one has
    /// finished.
    MirrorReplace {
        /// The name of the replica.
        old: String,
        /// The target that becomes a replica.
        new: String,
        /// True if the new device's content may be replaced, and if the name `old` is trusted even if only labels could
        /// identify an offline replica.
        #[serde(default)]
        force: bool,
    },
    /// Make the older copies on a replica the current content of their blocks.
    MirrorAcceptStale {
        /// The name of the replica.
        replica: String,
    },
    /// Remove a replica from a mirror.
    MirrorRemove {
        /// The name of the replica.
        replica: String,
        /// True if its name is trusted even if only labels could identify an offline replica.
        #[serde(default)]
        force: bool,
    },
    /// Resize a volume.
    Resize {
        /// The new size in bytes of data.
        size: NonZeroU64,
    },
}

/// A target in a command: given by its identity, by the path of its file, by its name over NVMe/TCP, or by the server's
/// own text for it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TargetRef {
    /// Its canonical text. It is compared only if there is nothing else, because names mean other things in other
    /// folders.
    #[serde(default)]
    pub text: String,
    /// Its identity.
    #[serde(default)]
    pub identity: Option<TargetIdentity>,
    /// The absolute path of a file or a block device, if there is no identity.
    #[serde(default)]
    pub path: Option<String>,
    /// The NQN of the subsystem.
    #[serde(default)]
    pub nqn: Option<String>,
    /// The identifier of the namespace in it.
    #[serde(default)]
    pub nsid: Option<u32>,
    /// Addresses of this machine at which the target should be served, if its name has any.
    #[serde(default)]
    pub addresses: Vec<SocketAddr>,
}

/// A target that the server has.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FoundTarget {
    /// The server's own name for it.
    pub target: String,
    /// True if it is not open and the server waits for it.
    pub waiting: bool,
    /// The members of a mirror: the server's name and the identity of each.
    #[serde(default)]
    pub members: Vec<(String, TargetIdentity)>,
}

/// A response of a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ControlResponse {
    /// [`VERSION`].
    pub version: u32,
    /// The result.
    #[serde(flatten)]
    pub result: ControlResult,
}

/// The result of a request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlResult {
    /// The server has the target.
    Found(Box<FoundTarget>),
    /// Success; the new state of the scrub.
    Scrub(Box<ScrubStatus>),
    /// Success; the new state of the mirror.
    Mirror(Box<MirrorStatus>),
    /// Success; the sizes of the volume.
    Resized(Box<ResizeReport>),
    /// The log level now and before.
    Log(LogReport),
    /// The state of the server.
    Server(Box<ServerStatus>),
    /// The request failed.
    Error(ControlError),
}

/// How much a server logs besides events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Errors that are permanent.
    Error,
    /// Warnings.
    #[default]
    Warn,
    /// Normal activity.
    Info,
    /// Connections that end and requests that fail, each with the reason.
    Debug,
}

impl LogLevel {
    /// The level as text.
    pub const fn as_str(self) -> &'static str {
        match self {
            LogLevel::Off => "off",
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
        }
    }

    /// Parses a level; upper and lower case are equal.
    pub fn from_name(name: &str) -> Option<LogLevel> {
        let levels = [LogLevel::Off, LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug];
        levels.into_iter().find(|level| level.as_str().eq_ignore_ascii_case(name))
    }
}

/// The log level of a server. `docs/formats/json.md` defines it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LogReport {
    /// The server's process.
    pub pid: u32,
    /// The previous level.
    pub before: LogLevel,
    /// The current level.
    pub level: LogLevel,
}

/// A resized volume. `docs/formats/json.md` defines it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ResizeReport {
    /// The target.
    pub target: String,
    /// Its previous size in bytes of data.
    pub before_bytes: u64,
    /// Its new size in bytes of data.
    pub size_bytes: u64,
    /// For how many microseconds requests of hosts waited; `None` if no server had it open.
    pub pause_us: Option<u64>,
}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ControlError {
    /// For programs.
    pub kind: ControlErrorKind,
    /// For people.
    pub why: String,
}

/// The kind of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlErrorKind {
    /// The server has no such target.
    UnknownTarget,
    /// The server has several such targets.
    AmbiguousTarget,
    /// The server does not have this target, but one that shares some of its devices, or one with another file of the
    /// same name.
    SharesDevices,
    /// The request cannot be parsed.
    BadRequest,
    /// The request has another version.
    Version,
    /// The request is invalid, for instance a block past the end.
    Usage,
    /// It cannot be executed now.
    Refused,
    /// It failed.
    Failed,
    /// A kind from a later version.
    #[serde(other)]
    Other,
}

impl ControlError {
    /// A problem with its reason.
    pub fn new(kind: ControlErrorKind, why: impl std::fmt::Display) -> ControlError {
        ControlError { kind, why: why.to_string() }
    }
}

impl ControlRequest {
    /// A request of this version.
    pub fn new(target: &TargetRef, command: ControlCommand) -> ControlRequest {
        ControlRequest { version: VERSION, target: target.clone(), command }
    }

    /// Parses a line without its end.
    ///
    /// # Errors
    /// If it is invalid; the error has the reason.
    pub fn read(line: &[u8]) -> Result<ControlRequest, ControlError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let bad = |error: serde_json::Error| ControlError::new(ControlErrorKind::BadRequest, error);
        let Versioned { version } = serde_json::from_slice(line).map_err(bad)?;
        if version != VERSION {
            let why = format!("the request has version {version}, and this server supports version {VERSION}");
            return Err(ControlError::new(ControlErrorKind::Version, why));
        }
        let request: ControlRequest = serde_json::from_slice(line).map_err(bad)?;
        let is_for_server = matches!(request.command, ControlCommand::Status | ControlCommand::Log { .. });
        if request.target == TargetRef::default() && !is_for_server {
            return Err(ControlError::new(ControlErrorKind::BadRequest, "the request has no target"));
        }
        Ok(request)
    }
}

/// The line for a request or a response, with its end.
pub fn line_of(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("there is nothing in it that JSON does not have");
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: ControlCommand) -> ControlRequest {
        let target = TargetRef { text: "v".to_owned(), path: Some("/v".to_owned()), ..TargetRef::default() };
        ControlRequest { version: VERSION, target, command }
    }

    #[test]
    fn requests_come_back() {
        for command in [
            ControlCommand::Find,
            ControlCommand::Status,
            ControlCommand::Log { level: Some(LogLevel::Debug) },
            ControlCommand::Log { level: None },
            ControlCommand::ScrubStatus,
            ControlCommand::ScrubStart { from: Some(7), rate: NonZeroU64::new(9) },
            ControlCommand::ScrubStart { from: None, rate: None },
            ControlCommand::ScrubPause,
            ControlCommand::ScrubStop,
            ControlCommand::MirrorStatus,
            ControlCommand::MirrorAdd { replica: "v".to_owned(), force: false },
            ControlCommand::MirrorReplace { old: "v".to_owned(), new: "w".to_owned(), force: true },
            ControlCommand::MirrorAcceptStale { replica: "a".to_owned() },
            ControlCommand::MirrorRemove { replica: "mirror:a,b".to_owned(), force: true },
            ControlCommand::Resize { size: NonZeroU64::MAX },
        ] {
            let line = line_of(&request(command.clone()));
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(ControlRequest::read(&line[..line.len() - 1]), Ok(request(command)));
        }
    }

    #[test]
    fn a_request_is_what_is_documented() {
        let line = br#"{"version":2,"command":"scrub_start","target":{"text":"v"},"rate":1048576,"new":true}"#;
        let read = ControlRequest::read(line).unwrap();
        assert_eq!(read.command, ControlCommand::ScrubStart { from: None, rate: NonZeroU64::new(1 << 20) });
        assert_eq!(read.target, TargetRef { text: "v".to_owned(), ..TargetRef::default() });
    }

    #[test]
    fn only_what_is_about_the_server_needs_no_target() {
        let read = ControlRequest::read(br#"{"version":2,"command":"log","level":"info"}"#).unwrap();
        assert_eq!(read.command, ControlCommand::Log { level: Some(LogLevel::Info) });
        let read = ControlRequest::read(br#"{"version":2,"command":"status"}"#).unwrap();
        assert_eq!((read.command, read.target), (ControlCommand::Status, TargetRef::default()));
    }

    #[test]
    fn what_is_no_request_is_refused_for_its_reason() {
        for (line, kind) in [
            ("", ControlErrorKind::BadRequest),
            ("{", ControlErrorKind::BadRequest),
            ("[2]", ControlErrorKind::BadRequest),
            (r#"{"version":1,"anything":1}"#, ControlErrorKind::Version),
            (r#"{"version":2}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"reboot","target":{"text":"v"}}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"scrub_stop"}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"log","level":"loud"}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"scrub_start","target":{"text":"v"},"rate":0}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"scrub_start","target":{"text":"v"},"from":-1}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"resize","target":{"text":"v"}}"#, ControlErrorKind::BadRequest),
            (r#"{"version":2,"command":"resize","target":{"text":"v"},"size":0}"#, ControlErrorKind::BadRequest),
        ] {
            assert_eq!(ControlRequest::read(line.as_bytes()).unwrap_err().kind, kind, "{line}");
        }
    }

    #[test]
    fn a_problem_of_a_later_version_is_still_one() {
        let line = r#"{"version":2,"error":{"kind":"moon_phase","why":"full"}}"#;
        let answer: ControlResponse = serde_json::from_str(line).unwrap();
        let ControlResult::Error(problem) = answer.result else { panic!("an error") };
        assert_eq!((problem.kind, problem.why.as_str()), (ControlErrorKind::Other, "full"));
    }
}
