//! The client side of the control socket: finds the server of a target and sends it commands.
//!
//! A target is found by its identity, never by its text. A search queries processes of this user and of root. A socket
//! that the user names is queried too; if another user owns it, that is printed.

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sealblock_stack::kernel::leaves::leaves_at;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError, TargetIdentity, member_of, note, shell_word};

use super::exchange::{ask_all, exchange, printable};
use super::folder::{FoundSocket, foreign, trusted};
use super::peer::{Peer, user_text};
use super::protocol::{
    ControlCommand, ControlError, ControlErrorKind, ControlRequest, ControlResult, FoundTarget, LogLevel, LogReport,
    RESIZING, ResizeReport, TargetRef,
};
use crate::status::mirror::MirrorStatus;
use crate::status::scrub::ScrubStatus;
use crate::status::server::{DeviceStatus, ServerStatus};

/// How long a server may take to respond, except to a resize.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long all servers together may take to respond to a search. A server that has a file of the target open gets more
/// time: it is the target's server, and if it is busy, that does not mean that there is none.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a resize may take, including the wait for earlier ones.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(120);
/// Separates the reason from the advice in the text of [`StackError::reason`].
const ADVICE_MARK: &str = "; try: ";
const ASKING: &str = "query the server";
const LOOKING: &str = "find the server";
/// The maximum number of other users' sockets that are named.
const MAX_FOREIGN: usize = 3;

/// A server that serves the target.
pub struct FoundServer {
    socket: FoundSocket,
    peer: Peer,
    name: TargetRef,
    target: FoundTarget,
    stranger: Option<String>,
}

/// Finds the server of a target: the given server, or one of this user or of root. `None` if no server has it.
///
/// # Errors
/// If several servers serve it, one serves a part of it, or the given server does not respond.
pub fn find(name: &TargetRef, only: Option<&Path>) -> Result<Option<FoundServer>, StackError> {
    look(name, only).map(|(found, _)| found)
}

/// The same for a command that changes the target locally if no server has it. If a server does not respond, its locks
/// protect files, but nothing protects its devices on other servers.
///
/// # Errors
/// As for [`find`]; also if a server that did not respond may have the target and no lock shows it.
pub fn find_to_change(name: &TargetRef, only: Option<&Path>) -> Result<Option<FoundServer>, StackError> {
    match look(name, only)? {
        (None, Some(path)) if name.identity.as_ref().is_some_and(TargetIdentity::is_remote) => {
            let why = format!("the server of {} did not respond, and may be using it", path.display());
            let failure = StackError::new(Cause::Unreachable, LOOKING, why).on(&name.text);
            Err(failure.advise("wait until that server responds or has exited"))
        }
        (found, _) => Ok(found),
    }
}

/// The server of a target, and the socket of one that did not respond.
fn look(name: &TargetRef, only: Option<&Path>) -> Result<(Option<FoundServer>, Option<PathBuf>), StackError> {
    let mut silent = None;
    let request = ControlRequest::new(name, ControlCommand::Find);
    let answers = match only {
        Some(path) => {
            let socket = FoundSocket::named(path);
            let answer = exchange(&socket, None, &request, RESPONSE_TIMEOUT);
            vec![(socket, Ok(answer.map_err(|error| socket_error(&error, path))?))]
        }
        None => ask_all(trusted(), &request, |peer| patience(name, peer)),
    };
    let (mut found, mut refusal): (Option<FoundServer>, Option<StackError>) = (None, None);
    for (socket, answer) in answers {
        let (peer, result) = match answer {
            Ok(answer) => answer,
            Err(error) => {
                let path = socket.path.display();
                note(format!(
                    "the server of {path} did not respond: {error}; whether it serves {} is unknown",
                    name.text
                ));
                silent.get_or_insert(socket.path.clone());
                continue;
            }
        };
        let target = match result {
            ControlResult::Found(target) => *target,
            ControlResult::Error(problem) if problem.kind == ControlErrorKind::UnknownTarget => continue,
            ControlResult::Error(problem) => {
                let why = format!("{} ({} at {})", problem.why, process_text(peer), socket.path.display());
                let problem = ControlResult::Error(ControlError { why, ..problem });
                refusal.get_or_insert(refused(LOOKING, problem).on(&name.text));
                continue;
            }
            other => {
                refusal.get_or_insert(refused(LOOKING, other).on(&name.text));
                continue;
            }
        };
        let stranger = stranger(peer, &socket.path);
        let server = FoundServer { socket, peer, name: name.clone(), target, stranger };
        if only.is_none() && !server.has_its_file() {
            let (path, whose) = (server.socket.path.display(), process_text(peer));
            note(format!("{whose}, at {path}, claims to serve {}, but does not have it open: skipped", name.text));
            continue;
        }
        if found.is_some() {
            let failure = StackError::new(Cause::Usage, LOOKING, "several servers serve it").on(&name.text);
            return Err(failure.advise("use --control PATH, or its nvme+tcp:// URI"));
        }
        found = Some(server);
    }
    match (found, refusal) {
        (None, Some(failure)) => Err(failure),
        (found, _) => Ok((found, silent)),
    }
}

/// How long to wait for a process that may serve the target.
fn patience(name: &TargetRef, peer: Option<&Peer>) -> Duration {
    let leaves = name.identity.as_ref().map(TargetIdentity::leaves).unwrap_or_default();
    match peer.and_then(|peer| peer.has_open(&leaves)) {
        Some(true) => RESPONSE_TIMEOUT,
        _ => SEARCH_TIMEOUT,
    }
}

/// The user of an untrusted process: neither this user nor root. It is reported, also with JSON output.
fn stranger(peer: Peer, socket: &Path) -> Option<String> {
    let user = (!peer.is_trusted()).then(|| peer.user_text())?;
    note(format!("the server at {} runs as {user}: its answers are not verified", socket.display()));
    Some(user)
}

/// What a command adds if no server was found: for root, the sockets of other users that were not queried.
pub fn not_asked() -> Option<String> {
    let foreign = foreign(MAX_FOREIGN);
    let texts: Vec<String> =
        foreign.iter().map(|(path, owner)| format!("{} of {}", path.display(), user_text(*owner))).collect();
    (!texts.is_empty()).then(|| format!("servers of other users are skipped: {}", texts.join(", ")))
}

fn process_text(peer: Peer) -> String {
    let pid = peer.pid.map_or("a process of another namespace".to_owned(), |pid| format!("process {pid}"));
    format!("{pid} of {}", peer.user_text())
}

impl FoundServer {
    /// The socket of the server.
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// The user of the server, if this user need not trust it: another user, and not root.
    pub fn stranger(&self) -> Option<String> {
        self.stranger.clone()
    }

    /// True if the target is open there; false if the server waits for it.
    pub fn is_open(&self) -> bool {
        !self.target.waiting
    }

    /// The working folder of the server, if this user may see it.
    pub fn folder(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/{}/cwd", self.peer.pid?)).ok()
    }

    /// The server's name for a member of the mirror, whatever its name is here.
    pub fn member(&self, named: &TargetName) -> Option<String> {
        member_of(&self.target.members, named).map(str::to_owned)
    }

    /// False if the target is a file, and the process does not have it open.
    fn has_its_file(&self) -> bool {
        // A target that waits is not open anywhere, a mirror may have other members by now, and a process in another
        // namespace cannot be inspected.
        match &self.name.identity {
            Some(TargetIdentity::Device { leaves, .. }) if !self.target.waiting => {
                self.peer.has_open(leaves) != Some(false)
            }
            _ => true,
        }
    }

    fn ask(&self, command: ControlCommand, timeout: Duration) -> io::Result<ControlResult> {
        let request = ControlRequest::new(&self.name, command);
        exchange(&self.socket, Some(self.peer), &request, timeout).map(|(_, result)| result)
    }

    /// The state of the scrub.
    ///
    /// # Errors
    /// If it cannot be read; the error has the reason.
    pub fn scrub_status(&self) -> Result<ScrubStatus, StackError> {
        self.scrub_command("read the scrub state", ControlCommand::ScrubStatus)
    }

    /// Sends a command for the scrub; returns the state of the scrub after it.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub fn scrub_command(&self, doing: &str, command: ControlCommand) -> Result<ScrubStatus, StackError> {
        match self.ask(command, RESPONSE_TIMEOUT).map_err(|error| socket_error(&error, self.socket()))? {
            ControlResult::Scrub(status) => Ok(*status),
            other => Err(refused(doing, other).on(&self.name.text)),
        }
    }

    /// Sends a command for a mirror; returns the state of the mirror after it.
    ///
    /// # Errors
    /// If the command failed; the error has the reason.
    pub fn mirror_command(&self, doing: &str, command: ControlCommand) -> Result<MirrorStatus, StackError> {
        match self.ask(command, RESPONSE_TIMEOUT).map_err(|error| socket_error(&error, self.socket()))? {
            ControlResult::Mirror(status) => Ok(*status),
            other => Err(refused(doing, other).on(&self.name.text)),
        }
    }

    /// Lets the server resize the volume.
    ///
    /// # Errors
    /// If the resize failed; the error has the reason. After a timeout the server may still execute it.
    pub fn resize(&self, size: NonZeroU64) -> Result<ResizeReport, StackError> {
        match self.ask(ControlCommand::Resize { size }, RESIZE_TIMEOUT) {
            Ok(ControlResult::Resized(report)) => Ok(*report),
            Ok(other) => Err(refused(RESIZING, other).on(&self.name.text)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let why = format!(
                    "the server did not respond within {} s, and may still complete the resize",
                    RESIZE_TIMEOUT.as_secs()
                );
                Err(StackError::new(Cause::Io, RESIZING, why)
                    .on(&self.name.text)
                    .advise("`sealblock info` of the served target"))
            }
            Err(error) => Err(socket_error(&error, self.socket())),
        }
    }

    /// The state of the server.
    ///
    /// # Errors
    /// If there is no response; the error has the reason.
    pub fn server_status(&self) -> Result<ServerStatus, StackError> {
        let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Status);
        let answer = exchange(&self.socket, Some(self.peer), &request, RESPONSE_TIMEOUT);
        status_of(answer.map_err(|error| socket_error(&error, self.socket()))?.1, self.socket())
    }
}

/// The state of the server behind a socket, and its user if this user need not trust it.
///
/// # Errors
/// If there is no response; the error has the reason.
pub fn query(path: &Path) -> Result<(ServerStatus, Option<String>), StackError> {
    let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Status);
    let answer = exchange(&FoundSocket::named(path), None, &request, RESPONSE_TIMEOUT);
    let (peer, result) = answer.map_err(|error| socket_error(&error, path))?;
    let stranger = stranger(peer, path);
    Ok((status_of(result, path)?, stranger))
}

fn status_of(result: ControlResult, socket: &Path) -> Result<ServerStatus, StackError> {
    match result {
        ControlResult::Server(status) => Ok(*status),
        other => Err(refused(ASKING, other).on(socket.display())),
    }
}

/// Sets or reads the log level of the server behind a socket, or of one that was found; returns its user too, as for
/// [`query`].
///
/// # Errors
/// If the command failed; the error has the reason.
pub fn log(
    named: Option<&Path>,
    found: Option<&ServerStatus>,
    level: Option<LogLevel>,
) -> Result<(LogReport, Option<String>), StackError> {
    let doing = if level.is_some() { "change the log level" } else { "read the log level" };
    let is_it = |socket: &FoundSocket| found.is_some_and(|of| printable(&socket.path.to_string_lossy()) == of.control);
    let socket = named.map(FoundSocket::named).or_else(|| trusted().into_iter().find(is_it));
    let gone = || StackError::new(Cause::Unreachable, LOOKING, "it exited meanwhile");
    let socket = socket.ok_or_else(gone)?;
    let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Log { level });
    let answer = exchange(&socket, None, &request, RESPONSE_TIMEOUT);
    let (peer, result) = answer.map_err(|error| socket_error(&error, &socket.path))?;
    let stranger = stranger(peer, &socket.path);
    match result {
        ControlResult::Log(report) => Ok((LogReport { pid: peer.pid.unwrap_or(report.pid), ..report }, stranger)),
        other => Err(refused(doing, other).on(socket.path.display())),
    }
}

/// What the process does with a file, and what to type instead, if it is a sealblock server; `None` if it is not, or
/// does not respond. A server must not call this, because the process could be the server itself.
pub fn server_of_file(pid: u32, path: &Path) -> Option<(String, String)> {
    let server = query_all().into_iter().filter_map(|(_, answer)| answer.ok()).find(|server| server.pid == pid)?;
    let canonical = path.canonicalize().ok()?;
    let leaves = leaves_at(&canonical).ok()?;
    let is_it = |file: &Path| file == canonical || leaves_at(file).is_ok_and(|other| other == leaves);
    let serves = |device: &&DeviceStatus| device.seen.files.iter().any(|file| is_it(Path::new(file)));
    let device = server.devices.iter().find(serves);
    let Some((device, uri)) =
        device.and_then(|device| Some((device, device.exports.iter().find_map(|e| e.uri.clone())?)))
    else {
        return Some(("a `sealblock serve`".to_owned(), format!("`sealblock status {pid}` shows what it serves")));
    };
    let target = &device.target;
    let advice = format!(
        "{uri} in its place while it is served (`sealblock scrub start {}` checks it there); `sealblock status {pid}` shows more",
        shell_word(target)
    );
    Some((format!("which serves {target} as {uri}"), advice))
}

/// The states of all servers of this user and of root, each with its socket; or the reason why there is none.
pub fn query_all() -> Vec<(PathBuf, Result<ServerStatus, StackError>)> {
    let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Status);
    let answers = ask_all(trusted(), &request, |_| SEARCH_TIMEOUT).into_iter();
    let status = |(socket, answer): (FoundSocket, io::Result<(Peer, ControlResult)>)| {
        let status = answer.map_err(|error| socket_error(&error, &socket.path));
        let status = status.and_then(|(_, result)| status_of(result, &socket.path));
        (socket.path, status)
    };
    answers.map(status).collect()
}

/// The error for a command whose result has an unexpected type.
fn refused(doing: &str, result: ControlResult) -> StackError {
    let problem = match result {
        ControlResult::Error(problem) => problem,
        _ => {
            let why = "the server's response does not match the request";
            ControlError::new(ControlErrorKind::Failed, why)
        }
    };
    // A server sends reason and advice in one text; here the advice gets its own line.
    let (why, advice) = match problem.why.rsplit_once(ADVICE_MARK) {
        Some((why, advice)) => (why, Some(advice)),
        None => (&*problem.why, None),
    };
    let failure = |cause| StackError::new(cause, doing, why).advise_if(advice);
    match problem.kind {
        ControlErrorKind::Usage => failure(Cause::Usage),
        ControlErrorKind::AmbiguousTarget => failure(Cause::Usage).advise("use its NQN and namespace: NQN/NSID"),
        ControlErrorKind::SharesDevices => {
            failure(Cause::Refused).advise("use the name of a served target; `sealblock status` lists them")
        }
        ControlErrorKind::UnknownTarget => failure(Cause::Unreachable),
        ControlErrorKind::Refused => failure(Cause::Refused),
        ControlErrorKind::BadRequest | ControlErrorKind::Version => {
            failure(Cause::Unsuitable).advise("use the same version of sealblock for server and command")
        }
        ControlErrorKind::Failed | ControlErrorKind::Other => failure(Cause::Io),
    }
}

fn socket_error(error: &io::Error, socket: &Path) -> StackError {
    let cause = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Cause::Unreachable,
        io::ErrorKind::PermissionDenied => Cause::Refused,
        _ => Cause::Io,
    };
    StackError::new(cause, ASKING, error).on(socket.display()).advise("give the socket of a running server")
}
