//! The command's side: finding the server that serves a target, and having it do something.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::legs::MirrorStatus;
use super::place;
use super::protocol::{
    Answer, MOST_ANSWER_BYTES, Name, Order, Outcome, Problem, ProblemKind, Request, VERSION, line_of,
};
use super::resized::ResizeReport;
use super::status::ScrubStatus;
use crate::commands::resize::DOING;
use crate::exit::{Cause, Failure};

/// How long a server may take for anything but what is named below.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long it may take to change a size, behind others that were asked for before.
const RESIZING: Duration = Duration::from_secs(120);

/// A server that serves the target.
pub struct Found {
    socket: PathBuf,
    name: Name,
    /// How the scrub was when it was found.
    pub status: ScrubStatus,
}

/// Asks this server, or all of this user's, for a target; nothing when none serves it.
///
/// # Errors
/// When several do, or one that was named does not answer.
pub fn find(name: &Name, only: Option<&Path>) -> Result<Option<Found>, Failure> {
    let sockets = only.map_or_else(place::sockets, |path| vec![path.to_owned()]);
    let mut found: Option<Found> = None;
    for socket in sockets {
        let status = match (ask(&socket, name, Order::ScrubStatus), only) {
            (Ok(Ok(status)), _) => status,
            (Ok(Err(problem)), _) if problem.kind == ProblemKind::UnknownTarget => continue,
            (Ok(Err(problem)), _) => return Err(of_problem("asking for the scrub", &problem).on(&name.text)),
            (Err(error), Some(path)) => return Err(of_socket(&error).on(path.display())),
            // The server is gone, or it is no server; another one may have the target.
            (Err(_), None) => continue,
        };
        if found.is_some() {
            let why = "several servers have it";
            let failure = Failure::new(Cause::Usage, "asking for the scrub", why).on(&name.text);
            return Err(failure.advise("--control PATH, or its nvme+tcp:// URI"));
        }
        found = Some(Found { socket, name: name.clone(), status });
    }
    Ok(found)
}

impl Found {
    /// Has the server do something; gives how the scrub is then.
    ///
    /// # Errors
    /// Why it was not done.
    pub fn order(&self, doing: &str, order: Order) -> Result<ScrubStatus, Failure> {
        match ask(&self.socket, &self.name, order) {
            Ok(Ok(status)) => Ok(status),
            Ok(Err(problem)) => Err(of_problem(doing, &problem).on(&self.name.text)),
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }

    /// Has the server do something with the legs of a mirror; gives how they are then.
    ///
    /// # Errors
    /// Why it was not done.
    pub fn order_legs(&self, doing: &str, order: Order) -> Result<MirrorStatus, Failure> {
        match ask_anything(&self.socket, &self.name, order, PATIENCE) {
            Ok(Outcome::Mirror(status)) => Ok(*status),
            Ok(Outcome::Error(problem)) => Err(of_problem(doing, &problem).on(&self.name.text)),
            Ok(_) => Err(of_problem(doing, &answered_otherwise()).on(&self.name.text)),
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }

    /// Has the server give the volume another size; gives what came of it.
    ///
    /// # Errors
    /// Why it was not done. A server that does not answer in time may do it still.
    pub fn resize(&self, size: NonZeroU64) -> Result<ResizeReport, Failure> {
        match ask_anything(&self.socket, &self.name, Order::Resize { size }, RESIZING) {
            Ok(Outcome::Resized(report)) => Ok(*report),
            Ok(Outcome::Error(problem)) => Err(of_problem(DOING, &problem).on(&self.name.text)),
            Ok(_) => Err(of_problem(DOING, &answered_otherwise()).on(&self.name.text)),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                let why = format!("the server did not answer within {} s, and may do it still", RESIZING.as_secs());
                Err(Failure::new(Cause::Io, DOING, why)
                    .on(&self.name.text)
                    .advise("`sealblock info` of what is served"))
            }
            Err(error) => Err(of_socket(&error).on(self.socket.display())),
        }
    }
}

fn ask(socket: &Path, name: &Name, order: Order) -> io::Result<Result<ScrubStatus, Problem>> {
    Ok(match ask_anything(socket, name, order, PATIENCE)? {
        Outcome::Scrub(status) => Ok(*status),
        Outcome::Mirror(_) | Outcome::Resized(_) => Err(answered_otherwise()),
        Outcome::Error(problem) => Err(problem),
    })
}

fn answered_otherwise() -> Problem {
    Problem::new(ProblemKind::Failed, "the server answers something else than it was asked for")
}

fn ask_anything(socket: &Path, name: &Name, order: Order, patience: Duration) -> io::Result<Outcome> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&line_of(&Request { version: VERSION, target: name.clone(), order }))?;
    let mut line = Vec::new();
    BufReader::new(stream.take(MOST_ANSWER_BYTES as u64)).read_until(b'\n', &mut line)?;
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server's answer ends too soon"));
    }
    let answer: Answer = serde_json::from_slice(&line).map_err(io::Error::from)?;
    if answer.version != VERSION {
        let why = format!("the server answers in version {}", answer.version);
        return Ok(Outcome::Error(Problem::new(ProblemKind::Version, why)));
    }
    Ok(answer.outcome)
}

fn of_problem(doing: &str, problem: &Problem) -> Failure {
    let failure = |cause| Failure::new(cause, doing, &problem.why);
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

fn of_socket(error: &io::Error) -> Failure {
    let cause = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Cause::Unreachable,
        io::ErrorKind::PermissionDenied => Cause::Refused,
        _ => Cause::Io,
    };
    Failure::new(cause, "asking the server", error).advise("the socket of a server that runs")
}
