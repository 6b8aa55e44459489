//! What goes over a control socket: a request and an answer, each one JSON object on one line.
//!
//! Lines come from whoever may open the socket: they are bounded, and what they say is checked before anything is done. A
//! request of another version is refused with this one's number; fields that are not known are skipped, commands are not.

use std::net::SocketAddr;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::log::LogReport;
use super::mirror_status::MirrorStatus;
use super::resized::ResizeReport;
use super::server::ServerStatus;
use super::status::ScrubStatus;
use crate::cli::LogLevel;

/// The version of both.
pub const VERSION: u32 = 1;
/// Bytes of a request at most, its end of line included: more than the longest target needs.
pub const MAX_REQUEST_BYTES: usize = 256 << 10;
/// Bytes of an answer at most: more than how a server with thousands of devices is.
pub const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// What is asked of a server.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ControlRequest {
    /// [`VERSION`].
    pub version: u32,
    /// What it is about; the server as a whole for [`Order::Status`] and [`Order::Log`].
    #[serde(default)]
    pub target: TargetRef,
    /// What is to be done.
    #[serde(flatten)]
    pub command: ControlCommand,
}

/// What is to be done with a target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum ControlCommand {
    /// Tell how the server is, with all that it serves.
    Status,
    /// Log at another level from now on, or tell which it is.
    Log {
        /// The level, if it is to be another one.
        level: Option<LogLevel>,
    },
    /// Tell how its scrub is.
    ScrubStatus,
    /// Begin a run, or have one that is held go on.
    ScrubStart {
        /// The first block, if it is not 0.
        from: Option<u64>,
        /// Bytes a second, if not the usual.
        rate: Option<NonZeroU64>,
    },
    /// Hold the run.
    ScrubPause,
    /// End the run.
    ScrubStop,
    /// Report the state of a mirror.
    MirrorStatus,
    /// Add a replica to a mirror.
    MirrorAdd {
        /// The target that becomes a replica.
        replica: String,
        /// Whether what is on it may be replaced.
        #[serde(default)]
        force: bool,
    },
    /// Replace a replica by another device. One that is in sync is taken out when the resync of the other one has finished.
    MirrorReplace {
        /// The name of the replica.
        old: String,
        /// The target that becomes a replica.
        new: String,
        /// Whether what is on it may be replaced, and `old` counts where only labels could tell which of those that are away it is.
        #[serde(default)]
        force: bool,
    },
    /// Make the older copies on a replica the blocks' content.
    MirrorAcceptStale {
        /// The name of the replica.
        replica: String,
    },
    /// Take a replica out of a mirror.
    MirrorRemove {
        /// The name of the replica.
        replica: String,
        /// Whether its name counts where only labels could tell which of those that are away it is.
        #[serde(default)]
        force: bool,
    },
    /// Give a volume another size.
    Resize {
        /// Bytes of data that it is to hold.
        size: NonZeroU64,
    },
}

/// A target as a command has it: by what it is called, by where its file is, or by what it is called over NVMe/TCP.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TargetRef {
    /// Its canonical text.
    pub text: String,
    /// The canonical path, of a file or a block device.
    pub path: Option<String>,
    /// The NQN of the subsystem.
    pub nqn: Option<String>,
    /// Which namespace of it.
    pub nsid: Option<u32>,
    /// Where it is served, for a target that says so; only addresses of this machine.
    #[serde(default)]
    pub addresses: Vec<SocketAddr>,
}

/// What a server answers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ControlResponse {
    /// [`VERSION`].
    pub version: u32,
    /// What came of it.
    #[serde(flatten)]
    pub result: ControlResult,
}

/// What came of a request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlResult {
    /// It was done; this is how the scrub is now.
    Scrub(Box<ScrubStatus>),
    /// It was done; this is the state of the mirror now.
    Mirror(Box<MirrorStatus>),
    /// It was done; the volume has another size now.
    Resized(Box<ResizeReport>),
    /// This is how much the server logs now, and did before.
    Log(LogReport),
    /// This is how the server is.
    Server(Box<ServerStatus>),
    /// It was not done.
    Error(ControlError),
}

/// Why a request was not carried out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ControlError {
    /// For programs.
    pub kind: ControlErrorKind,
    /// For people.
    pub why: String,
}

/// What kind of a problem it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlErrorKind {
    /// Nothing of that name is served here.
    UnknownTarget,
    /// Several things of that name are.
    AmbiguousTarget,
    /// The request cannot be read.
    BadRequest,
    /// It is of another version.
    Version,
    /// It cannot be meant: a block past the end.
    Usage,
    /// It cannot be done now.
    Refused,
    /// It failed.
    Failed,
    /// One that a later version has.
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
    /// Reads a line without its end.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(line: &[u8]) -> Result<ControlRequest, ControlError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let bad = |error: serde_json::Error| ControlError::new(ControlErrorKind::BadRequest, error);
        let Versioned { version } = serde_json::from_slice(line).map_err(bad)?;
        if version != VERSION {
            let why = format!("the request has version {version}, and this server knows version {VERSION}");
            return Err(ControlError::new(ControlErrorKind::Version, why));
        }
        let request: ControlRequest = serde_json::from_slice(line).map_err(bad)?;
        let is_for_server = matches!(request.command, ControlCommand::Status | ControlCommand::Log { .. });
        if request.target == TargetRef::default() && !is_for_server {
            return Err(ControlError::new(ControlErrorKind::BadRequest, "the request names no target"));
        }
        Ok(request)
    }
}

/// The line of a request or an answer, with its end.
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
        ControlRequest { version: VERSION, target, command: command }
    }

    #[test]
    fn requests_come_back() {
        for command in [
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
        let line = br#"{"version":1,"command":"scrub_start","target":{"text":"v"},"rate":1048576,"new":true}"#;
        let read = ControlRequest::read(line).unwrap();
        assert_eq!(read.command, ControlCommand::ScrubStart { from: None, rate: NonZeroU64::new(1 << 20) });
        assert_eq!(read.target, TargetRef { text: "v".to_owned(), ..TargetRef::default() });
    }

    #[test]
    fn only_what_is_about_the_server_needs_no_target() {
        let read = ControlRequest::read(br#"{"version":1,"command":"log","level":"info"}"#).unwrap();
        assert_eq!(read.command, ControlCommand::Log { level: Some(LogLevel::Info) });
        let read = ControlRequest::read(br#"{"version":1,"command":"status"}"#).unwrap();
        assert_eq!((read.command, read.target), (ControlCommand::Status, TargetRef::default()));
    }

    #[test]
    fn what_is_no_request_is_refused_for_its_reason() {
        for (line, kind) in [
            ("", ControlErrorKind::BadRequest),
            ("{", ControlErrorKind::BadRequest),
            ("[1]", ControlErrorKind::BadRequest),
            (r#"{"version":2,"anything":1}"#, ControlErrorKind::Version),
            (r#"{"version":1}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"reboot","target":{"text":"v"}}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"scrub_stop"}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"log","level":"loud"}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"scrub_start","target":{"text":"v"},"rate":0}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"scrub_start","target":{"text":"v"},"from":-1}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"resize","target":{"text":"v"}}"#, ControlErrorKind::BadRequest),
            (r#"{"version":1,"command":"resize","target":{"text":"v"},"size":0}"#, ControlErrorKind::BadRequest),
        ] {
            assert_eq!(ControlRequest::read(line.as_bytes()).unwrap_err().kind, kind, "{line}");
        }
    }

    #[test]
    fn a_problem_of_a_later_version_is_still_one() {
        let line = r#"{"version":1,"error":{"kind":"moon_phase","why":"full"}}"#;
        let answer: ControlResponse = serde_json::from_str(line).unwrap();
        let ControlResult::Error(problem) = answer.result else { panic!("an error") };
        assert_eq!((problem.kind, problem.why.as_str()), (ControlErrorKind::Other, "full"));
    }
}
