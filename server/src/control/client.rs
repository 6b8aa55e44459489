//! The client side of the control socket: finds the server of a target and sends it commands.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use sealblock_stack::{Cause, StackError};
use serde_json::Value;

use super::protocol::{
    ControlCommand, ControlError, ControlErrorKind, ControlRequest, ControlResponse, ControlResult, LogLevel,
    LogReport, MAX_RESPONSE_BYTES, RESIZING, ResizeReport, TargetRef, VERSION, line_of,
};
use super::socket_path::{self, FoundSocket};
use crate::status::mirror::MirrorStatus;
use crate::status::scrub::ScrubStatus;
use crate::status::server::{DeviceStatus, ServerStatus};

/// How long a server may take to respond, except to a resize.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the servers may take to respond that may have a file open.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a resize may take, behind earlier ones.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(120);
const ASKING: &str = "asking the server";

/// A server that serves the target.
pub struct FoundServer {
    socket: FoundSocket,
    name: TargetRef,
    /// The state of the scrub when the server was found.
    pub status: ScrubStatus,
}

/// Finds the server of a target: the given one, or one of this user, then for root one of any user. `None` if no server has it.
///
/// # Errors
/// When several serve it, or the given server does not respond.
pub fn find(name: &TargetRef, only: Option<&Path>) -> Result<Option<FoundServer>, StackError> {
    if let Some(path) = only {
        return find_at(vec![FoundSocket { path: path.to_owned(), owner: None }], name, true);
    }
    match find_at(socket_path::own(), name, false)? {
        None => find_at(socket_path::others(), name, false),
        found => Ok(found),
    }
}

fn find_at(sockets: Vec<FoundSocket>, name: &TargetRef, is_named: bool) -> Result<Option<FoundServer>, StackError> {
    const DOING: &str = "asking for the scrub";
    let mut found: Option<FoundServer> = None;
    for socket in sockets {
        let status = match ask_in_time(&socket, ControlRequest::new(name, ControlCommand::ScrubStatus)) {
            Ok(ControlResult::Scrub(status)) => *status,
            Ok(ControlResult::Error(problem)) if problem.kind == ControlErrorKind::UnknownTarget => continue,
            Ok(other) => return Err(refused(DOING, other).on(&name.text)),
            Err(error) if is_named => return Err(of_socket(&error, &socket.path)),
            // The server is gone, or it is no server; another one may serve the target.
            Err(_) => continue,
        };
        if found.is_some() {
            let failure = StackError::new(Cause::Usage, DOING, "several servers have it").on(&name.text);
            return Err(failure.advise("--control PATH, or its nvme+tcp:// URI"));
        }
        found = Some(FoundServer { socket, name: name.clone(), status });
    }
    Ok(found)
}

/// Sends a request; to another user's server in a thread of its own: it must not block this process.
fn ask_in_time(socket: &FoundSocket, request: ControlRequest) -> io::Result<ControlResult> {
    if socket.owner.is_none() {
        return exchange(&socket.path, None, &request, RESPONSE_TIMEOUT);
    }
    let (answered, answer) = mpsc::channel();
    let FoundSocket { path, owner } = socket.clone();
    thread::spawn(move || {
        // The receiver has timed out.
        let _ = answered.send(exchange(&path, owner, &request, RESPONSE_TIMEOUT));
    });
    answer.recv_timeout(RESPONSE_TIMEOUT).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

impl FoundServer {
    /// The socket of the server.
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// The working folder of the server, if this user may see it.
    pub fn folder(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/{}/cwd", socket_path::listener_of(self.socket())?)).ok()
    }

    fn ask(&self, command: ControlCommand, timeout: Duration) -> io::Result<ControlResult> {
        exchange(self.socket(), self.socket.owner, &ControlRequest::new(&self.name, command), timeout)
    }

    /// Sends a command for the scrub; returns the state of the scrub after it.
    ///
    /// # Errors
    /// Why the command failed.
    pub fn scrub_command(&self, doing: &str, command: ControlCommand) -> Result<ScrubStatus, StackError> {
        match self.ask(command, RESPONSE_TIMEOUT).map_err(|error| of_socket(&error, self.socket()))? {
            ControlResult::Scrub(status) => Ok(*status),
            other => Err(refused(doing, other).on(&self.name.text)),
        }
    }

    /// Sends a command for a mirror; returns the state of the mirror after it.
    ///
    /// # Errors
    /// Why the command failed.
    pub fn mirror_command(&self, doing: &str, command: ControlCommand) -> Result<MirrorStatus, StackError> {
        match self.ask(command, RESPONSE_TIMEOUT).map_err(|error| of_socket(&error, self.socket()))? {
            ControlResult::Mirror(status) => Ok(*status),
            other => Err(refused(doing, other).on(&self.name.text)),
        }
    }

    /// Has the server resize the volume.
    ///
    /// # Errors
    /// Why the resize failed. After a timeout the server may still execute it.
    pub fn resize(&self, size: NonZeroU64) -> Result<ResizeReport, StackError> {
        match self.ask(ControlCommand::Resize { size }, RESIZE_TIMEOUT) {
            Ok(ControlResult::Resized(report)) => Ok(*report),
            Ok(other) => Err(refused(RESIZING, other).on(&self.name.text)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let why =
                    format!("the server did not answer within {} s, and may do it still", RESIZE_TIMEOUT.as_secs());
                Err(StackError::new(Cause::Io, RESIZING, why)
                    .on(&self.name.text)
                    .advise("`sealblock info` of what is served"))
            }
            Err(error) => Err(of_socket(&error, self.socket())),
        }
    }
}

/// The state of the server behind a socket. `owner`, if given, is the user that it has to run as.
///
/// # Errors
/// Why there is no response.
pub fn query(socket: &Path, owner: Option<u32>) -> Result<ServerStatus, StackError> {
    let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Status);
    match exchange(socket, owner, &request, RESPONSE_TIMEOUT).map_err(|error| of_socket(&error, socket))? {
        ControlResult::Server(status) => Ok(*status),
        other => Err(refused(ASKING, other).on(socket.display())),
    }
}

/// Sets or reads the log level of the server behind a socket. `owner` is as for [`query`].
///
/// # Errors
/// Why the command failed.
pub fn log(socket: &Path, owner: Option<u32>, level: Option<LogLevel>) -> Result<LogReport, StackError> {
    let doing = if level.is_some() { "changing the log level" } else { "asking for the log level" };
    let request = ControlRequest::new(&TargetRef::default(), ControlCommand::Log { level });
    match exchange(socket, owner, &request, RESPONSE_TIMEOUT).map_err(|error| of_socket(&error, socket))? {
        ControlResult::Log(report) => Ok(report),
        other => Err(refused(doing, other).on(socket.display())),
    }
}

/// What the process does with a file if it is a sealblock server, and what to type instead; `None` if it is none or does not
/// respond. A server must not ask: that could be itself.
pub fn server_of_file(pid: u32, path: &Path) -> Option<(String, String)> {
    let server = server_of(pid)?;
    let canonical = path.canonicalize().ok()?;
    let serves = |device: &&DeviceStatus| device.seen.files.iter().any(|file| Path::new(file) == canonical);
    let device = server.devices.iter().find(serves);
    let Some((device, uri)) =
        device.and_then(|device| Some((device, device.exports.iter().find_map(|e| e.uri.clone())?)))
    else {
        return Some(("a `sealblock serve`".to_owned(), format!("`sealblock status {pid}` says what it serves")));
    };
    let target = &device.target;
    // Commands find servers with the usual socket without `--control`.
    let is_usual = socket_path::own().iter().any(|socket| socket.path == Path::new(&server.control));
    let scrub = if is_usual { String::new() } else { format!(" --control {}", server.control) };
    let advice = format!(
        "`sealblock verify {uri}` or `sealblock scrub start {target}{scrub}` while it is served; `sealblock status {pid}` tells more"
    );
    Some((format!("which serves {target} as {uri}"), advice))
}

/// The state of the server with this process number, if this user can reach its socket.
fn server_of(pid: u32) -> Option<ServerStatus> {
    // Servers with a usual socket have it by their number; others may have any name.
    let number = |path: &PathBuf| path.file_stem().and_then(|stem| stem.to_str()?.parse::<u32>().ok());
    let fitting = socket_path::all().into_iter().filter(|found| number(&found.path).is_none_or(|number| number == pid));
    query_all(fitting, SEARCH_TIMEOUT).filter_map(|(_, answer)| answer.ok()).find(|server| server.pid == pid)
}

/// Asks servers at the same time, each in a thread of its own, so that one that hangs does not delay the others. Gives the answers
/// as they come, for so long.
pub fn query_all(
    sockets: impl IntoIterator<Item = FoundSocket>,
    timeout: Duration,
) -> impl Iterator<Item = (PathBuf, Result<ServerStatus, StackError>)> {
    let (answered, answers) = mpsc::channel();
    for FoundSocket { path, owner } in sockets {
        let answered = answered.clone();
        thread::spawn(move || {
            let answer = query(&path, owner);
            // The receiver has timed out.
            let _ = answered.send((path, answer));
        });
    }
    let deadline = Instant::now() + timeout;
    std::iter::from_fn(move || answers.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok())
}

fn exchange(
    socket: &Path,
    owner: Option<u32>,
    request: &ControlRequest,
    timeout: Duration,
) -> io::Result<ControlResult> {
    let mut stream = UnixStream::connect(socket)?;
    if let Some(owner) = owner {
        // Before anything is sent: a link may lead to another user's socket.
        let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
        if peer != owner {
            return Err(io::Error::other(format!("it is of user {owner}, and user {peer} listens there")));
        }
    }
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(RESPONSE_TIMEOUT))?;
    stream.write_all(&line_of(request))?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MAX_RESPONSE_BYTES as u64)).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server's answer ends too soon"));
    }
    let mut answer: Value = serde_json::from_slice(&line).map_err(io::Error::from)?;
    calm(&mut answer);
    let answer: ControlResponse = serde_json::from_value(answer).map_err(io::Error::from)?;
    if answer.version != VERSION {
        let why = format!("the server answers in version {}", answer.version);
        return Ok(ControlResult::Error(ControlError::new(ControlErrorKind::Version, why)));
    }
    Ok(answer.result)
}

/// Replaces control characters: a response of a server must not control the terminal.
fn calm(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = text.replace(char::is_control, " "),
        Value::Array(values) => values.iter_mut().for_each(calm),
        Value::Object(fields) => fields.values_mut().for_each(calm),
        _ => {}
    }
}

/// The failure of a command whose result is not the one that it has when it succeeds.
fn refused(doing: &str, result: ControlResult) -> StackError {
    let problem = match result {
        ControlResult::Error(problem) => problem,
        _ => {
            let why = "the server answers something else than it was asked for";
            ControlError::new(ControlErrorKind::Failed, why)
        }
    };
    let failure = |cause| StackError::new(cause, doing, &problem.why);
    match problem.kind {
        ControlErrorKind::Usage => failure(Cause::Usage),
        ControlErrorKind::AmbiguousTarget => failure(Cause::Usage).advise("its NQN and namespace: NQN/NSID"),
        ControlErrorKind::UnknownTarget => failure(Cause::Unreachable),
        ControlErrorKind::Refused => failure(Cause::Refused),
        ControlErrorKind::BadRequest | ControlErrorKind::Version => {
            failure(Cause::Unsuitable).advise("the same version of sealblock for server and command")
        }
        ControlErrorKind::Failed | ControlErrorKind::Other => failure(Cause::Io),
    }
}

fn of_socket(error: &io::Error, socket: &Path) -> StackError {
    let cause = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Cause::Unreachable,
        io::ErrorKind::PermissionDenied => Cause::Refused,
        _ => Cause::Io,
    };
    StackError::new(cause, ASKING, error).on(socket.display()).advise("the socket of a server that runs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn answers_do_nothing_to_a_terminal() {
        let mut value =
            serde_json::json!({"why": "a\u{1b}[2Jb\nc", "runs": [{"text": "\u{7}"}], "n": 1, "good": "a b"});
        calm(&mut value);
        assert_eq!(value, serde_json::json!({"why": "a [2Jb c", "runs": [{"text": " "}], "n": 1, "good": "a b"}));
    }

    #[test]
    fn nothing_is_said_to_a_socket_of_another_user() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let failure = query(&path, Some(4_000_000_000)).unwrap_err();
        assert!(failure.to_string().contains("it is of user 4000000000, and user"), "{failure}");
        let mut said = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"");
    }
}
