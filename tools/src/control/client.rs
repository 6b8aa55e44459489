//! The command's side: finding the server that serves a target, and having it do something.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::log::LogReport;
use super::mirror_status::MirrorStatus;
use super::place;
use super::protocol::{
    ControlCommand, ControlError, ControlRequest, ControlResponse, ControlResult, MOST_ANSWER_BYTES, ProblemKind,
    TargetRef, VERSION, line_of,
};
use super::resized::ResizeReport;
use super::server::ServerStatus;
use super::status::ScrubStatus;
use crate::cli::LogLevel;
use crate::commands::resize::DOING;
use crate::exit::{Cause, CliError};

/// How long a server may take for anything but what is named below.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long it may take to change a size, behind others that were asked for before.
const RESIZING: Duration = Duration::from_secs(120);

/// A server that serves the target.
pub struct Found {
    socket: PathBuf,
    /// Another user, whose server it is.
    owner: Option<u32>,
    name: TargetRef,
    /// How the scrub was when it was found.
    pub status: ScrubStatus,
}

/// Asks this server, or all of this user's, for a target; nothing when none serves it. Root asks everybody's after that.
///
/// # Errors
/// When several do, or one that was named does not answer.
pub fn find(name: &TargetRef, only: Option<&Path>) -> Result<Option<Found>, CliError> {
    let at = |path: PathBuf, owner| place::Found { path, owner };
    if let Some(path) = only {
        return find_at(vec![at(path.to_owned(), None)], name, true);
    }
    match find_at(place::sockets().into_iter().map(|path| at(path, None)).collect(), name, false)? {
        None => find_at(place::sockets_of_others(), name, false),
        found => Ok(found),
    }
}

fn find_at(sockets: Vec<place::Found>, name: &TargetRef, is_named: bool) -> Result<Option<Found>, CliError> {
    let mut found: Option<Found> = None;
    for place::Found { path: socket, owner } in sockets {
        let only = is_named.then_some(&socket);
        let asked = owner.map_or_else(|| ask(&socket, name), |owner| ask_foreign(&socket, owner, name));
        let status = match (asked, only) {
            (Ok(Ok(status)), _) => status,
            (Ok(Err(problem)), _) if problem.kind == ProblemKind::UnknownTarget => continue,
            (Ok(Err(problem)), _) => return Err(of_problem("asking for the scrub", &problem).on(&name.text)),
            (Err(error), Some(path)) => return Err(of_socket(&error).on(path.display())),
            // The server is gone, or it is no server; another one may have the target.
            (Err(_), None) => continue,
        };
        if found.is_some() {
            let why = "several servers have it";
            let failure = CliError::new(Cause::Usage, "asking for the scrub", why).on(&name.text);
            return Err(failure.advise("--control PATH, or its nvme+tcp:// URI"));
        }
        found = Some(Found { socket, owner, name: name.clone(), status });
    }
    Ok(found)
}

/// Asks another user's server, which may not hold up who asks.
fn ask_foreign(socket: &Path, owner: u32, name: &TargetRef) -> io::Result<Result<ScrubStatus, ControlError>> {
    let (answered, answer) = mpsc::channel();
    let (socket, name) = (socket.to_owned(), name.clone());
    thread::spawn(move || {
        let request = ControlRequest { version: VERSION, target: name, order: ControlCommand::ScrubStatus };
        // Nobody waits any more for an answer that is late.
        let _ = answered.send(exchange(&socket, Some(owner), &request, PATIENCE).map(scrub_of));
    });
    answer.recv_timeout(PATIENCE).unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

impl Found {
    /// The socket of the server.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The folder in which the server reads names, where this user may see it.
    pub fn folder(&self) -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/{}/cwd", place::listener_of(&self.socket)?)).ok()
    }

    fn ask(&self, order: ControlCommand, patience: Duration) -> io::Result<ControlResult> {
        let request = ControlRequest { version: VERSION, target: self.name.clone(), order };
        exchange(&self.socket, self.owner, &request, patience)
    }

    /// Has the server do something; gives how the scrub is then.
    ///
    /// # Errors
    /// Why it was not done.
    pub fn order(&self, doing: &str, order: ControlCommand) -> Result<ScrubStatus, CliError> {
        match self.ask(order, PATIENCE).map(scrub_of) {
            Ok(Ok(status)) => Ok(status),
            Ok(Err(problem)) => Err(of_problem(doing, &problem).on(&self.name.text)),
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }

    /// Has the server do something with the legs of a mirror; gives how they are then.
    ///
    /// # Errors
    /// Why it was not done.
    pub fn order_legs(&self, doing: &str, order: ControlCommand) -> Result<MirrorStatus, CliError> {
        match self.ask(order, PATIENCE) {
            Ok(ControlResult::Mirror(status)) => Ok(*status),
            Ok(ControlResult::Error(problem)) => Err(of_problem(doing, &problem).on(&self.name.text)),
            Ok(_) => Err(of_problem(doing, &answered_otherwise()).on(&self.name.text)),
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }

    /// Has the server give the volume another size; gives what came of it.
    ///
    /// # Errors
    /// Why it was not done. A server that does not answer in time may do it still.
    pub fn resize(&self, size: NonZeroU64) -> Result<ResizeReport, CliError> {
        match self.ask(ControlCommand::Resize { size }, RESIZING) {
            Ok(ControlResult::Resized(report)) => Ok(*report),
            Ok(ControlResult::Error(problem)) => Err(of_problem(DOING, &problem).on(&self.name.text)),
            Ok(_) => Err(of_problem(DOING, &answered_otherwise()).on(&self.name.text)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let why = format!("the server did not answer within {} s, and may do it still", RESIZING.as_secs());
                Err(CliError::new(Cause::Io, DOING, why)
                    .on(&self.name.text)
                    .advise("`sealblock info` of what is served"))
            }
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }
}

/// How the server behind a socket is. `owner`, where it is known, is the user that it has to be one of.
///
/// # Errors
/// Why it does not tell.
pub fn look(socket: &Path, owner: Option<u32>) -> Result<ServerStatus, CliError> {
    let request = ControlRequest { version: VERSION, target: TargetRef::default(), order: ControlCommand::Status };
    let outcome =
        exchange(socket, owner, &request, PATIENCE).map_err(|error| of_socket(&error).on(socket.display()))?;
    match outcome {
        ControlResult::Server(status) => Ok(*status),
        ControlResult::Error(problem) => Err(of_problem("asking the server", &problem).on(socket.display())),
        _ => Err(of_problem("asking the server", &answered_otherwise()).on(socket.display())),
    }
}

/// Has the server behind a socket log at another level, or tell which it is. `owner` is as for [`look`].
///
/// # Errors
/// Why it does not.
pub fn log(socket: &Path, owner: Option<u32>, level: Option<LogLevel>) -> Result<LogReport, CliError> {
    let doing = if level.is_some() { "changing the log level" } else { "asking for the log level" };
    let request =
        ControlRequest { version: VERSION, target: TargetRef::default(), order: ControlCommand::Log { level } };
    let outcome =
        exchange(socket, owner, &request, PATIENCE).map_err(|error| of_socket(&error).on(socket.display()))?;
    match outcome {
        ControlResult::Log(report) => Ok(report),
        ControlResult::Error(problem) => Err(of_problem(doing, &problem).on(socket.display())),
        _ => Err(of_problem(doing, &answered_otherwise()).on(socket.display())),
    }
}

/// Whether somebody listens on a socket. Those of servers that are gone stay until another one is started.
pub fn is_alive(socket: &Path) -> bool {
    let gone = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    UnixStream::connect(socket).map_or_else(|error| !gone.contains(&error.kind()), |_| true)
}

fn ask(socket: &Path, name: &TargetRef) -> io::Result<Result<ScrubStatus, ControlError>> {
    let request = ControlRequest { version: VERSION, target: name.clone(), order: ControlCommand::ScrubStatus };
    exchange(socket, None, &request, PATIENCE).map(scrub_of)
}

fn scrub_of(outcome: ControlResult) -> Result<ScrubStatus, ControlError> {
    match outcome {
        ControlResult::Scrub(status) => Ok(*status),
        ControlResult::Mirror(_) | ControlResult::Resized(_) | ControlResult::Server(_) | ControlResult::Log(_) => {
            Err(answered_otherwise())
        }
        ControlResult::Error(problem) => Err(problem),
    }
}

fn answered_otherwise() -> ControlError {
    ControlError::new(ProblemKind::Failed, "the server answers something else than it was asked for")
}

fn exchange(
    socket: &Path,
    owner: Option<u32>,
    request: &ControlRequest,
    patience: Duration,
) -> io::Result<ControlResult> {
    let mut stream = UnixStream::connect(socket)?;
    if let Some(owner) = owner {
        // Before anything is said: a link may lead to somebody else's socket.
        let peer = rustix::net::sockopt::socket_peercred(&stream)?.uid.as_raw();
        if peer != owner {
            return Err(io::Error::other(format!("it is of user {owner}, and user {peer} listens there")));
        }
    }
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&line_of(request))?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MOST_ANSWER_BYTES as u64)).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server's answer ends too soon"));
    }
    let mut answer: Value = serde_json::from_slice(&line).map_err(io::Error::from)?;
    calm(&mut answer);
    let answer: ControlResponse = serde_json::from_value(answer).map_err(io::Error::from)?;
    if answer.version != VERSION {
        let why = format!("the server answers in version {}", answer.version);
        return Ok(ControlResult::Error(ControlError::new(ProblemKind::Version, why)));
    }
    Ok(answer.outcome)
}

/// Takes out what ends a line or moves a cursor: a server is trusted with its answer, and not with the terminal.
fn calm(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = text.replace(char::is_control, " "),
        Value::Array(values) => values.iter_mut().for_each(calm),
        Value::Object(fields) => fields.values_mut().for_each(calm),
        _ => {}
    }
}

fn of_problem(doing: &str, problem: &ControlError) -> CliError {
    let failure = |cause| CliError::new(cause, doing, &problem.why);
    match problem.kind {
        ProblemKind::Usage => failure(Cause::Usage),
        ProblemKind::AmbiguousTarget => failure(Cause::Usage).advise("its NQN and namespace: NQN/NSID"),
        ProblemKind::UnknownTarget => failure(Cause::Unreachable),
        ProblemKind::Refused => failure(Cause::Refused),
        ProblemKind::BadRequest | ProblemKind::Version => {
            failure(Cause::Unsuitable).advise("the same version of sealblock for server and command")
        }
        ProblemKind::Failed | ProblemKind::Other => failure(Cause::Io),
    }
}

fn of_socket(error: &io::Error) -> CliError {
    let cause = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Cause::Unreachable,
        io::ErrorKind::PermissionDenied => Cause::Refused,
        _ => Cause::Io,
    };
    CliError::new(cause, "asking the server", error).advise("the socket of a server that runs")
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
        let failure = look(&path, Some(4_000_000_000)).unwrap_err();
        assert!(failure.to_string().contains("it is of user 4000000000, and user"), "{failure}");
        let mut said = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"");
    }
}
