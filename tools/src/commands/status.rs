//! `sealblock status`: the state of servers, their clients, and what is wrong; and `sealblock log`: how much they log.
//!
//! Servers report what they know over their control sockets and check nothing for it. Each server has a thread of its own, so
//! a server that hangs does not delay the others.

mod text;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use crate::cli::{Log, ServedName, ServerName, Status};
use crate::commands::scrub::name_of;
use crate::exit::Exit;
use crate::report::{attributed, print_json, print_report, reader_has_gone, redraw, say};
use sealblock_server::control::client::{self, find, not_asked, query, query_all};
use sealblock_server::control::exchange::printable;
use sealblock_server::control::protocol::LogReport;
use sealblock_server::status::server::ServerStatus;
use sealblock_server::status::server_info::reaches;

/// Time between two updates of `--watch`.
const BETWEEN: Duration = Duration::from_secs(2);
/// How often it is looked whether somebody still reads.
const NAP: Duration = Duration::from_millis(100);
const ACTION: &str = "read the status";

/// The report.
#[derive(Serialize)]
struct Report {
    /// The servers that responded, in the order of their processes.
    servers: Vec<ServerStatus>,
    /// The servers that did not respond.
    unresponsive: Vec<Unresponsive>,
    /// The user of the only server, if this user need not believe that one.
    #[serde(skip)]
    stranger: Option<String>,
}

/// A server that did not respond.
#[derive(Serialize)]
struct Unresponsive {
    /// Its control socket.
    control: String,
    /// Why.
    why: String,
}

/// Runs the command.
pub fn run(arguments: &Status) -> Result<Exit, StackError> {
    let mut before: Option<(Instant, Report)> = None;
    loop {
        let (began, report) = (Instant::now(), gather(arguments.server.as_ref(), arguments.control.as_deref())?);
        let earlier = before.as_ref().map(|(at, report)| (began - *at, report.servers.as_slice()));
        print(arguments, &report, earlier)?;
        let next = began + BETWEEN;
        while arguments.watch && Instant::now() < next && !reader_has_gone() {
            thread::sleep(NAP);
        }
        if !arguments.watch || reader_has_gone() {
            return Ok(report.exit());
        }
        before = Some((began, report));
    }
}

fn print(arguments: &Status, report: &Report, earlier: Option<(Duration, &[ServerStatus])>) -> Result<(), StackError> {
    if arguments.json {
        return print_json(report);
    }
    let mut text = String::new();
    for server in &report.servers {
        let earlier = earlier.and_then(|(since, servers)| {
            let is_it =
                |other: &&ServerStatus| (other.pid, other.started_unix_s) == (server.pid, server.started_unix_s);
            servers.iter().find(is_it).map(|server| (since, server))
        });
        text.push_str(&attributed(&text::of(server, earlier), report.stranger.clone()));
        text.push_str("\n\n");
    }
    for unresponsive in &report.unresponsive {
        text.push_str(&format!("{:<13}{}: {}\n", "unresponsive", unresponsive.control, unresponsive.why));
    }
    // On a terminal an update replaces the one before; on a pipe it follows behind an empty line.
    let text = text.trim_end();
    if arguments.watch { redraw(&format!("{text}\n")) } else { say(text) }
}

impl Report {
    fn exit(&self) -> Exit {
        let has = |exit| self.servers.iter().any(|server| Exit::from(server.health) == exit);
        if has(Exit::DamageFound) {
            Exit::DamageFound
        } else if has(Exit::Incomplete) || !self.unresponsive.is_empty() {
            Exit::Incomplete
        } else {
            Exit::Clean
        }
    }
}

/// The reports of the selected servers.
///
/// # Errors
/// When there is none.
fn servers(server: Option<&ServerName>) -> Result<Vec<ServerStatus>, StackError> {
    let Report { servers, unresponsive, .. } = gather(server, None)?;
    match unresponsive.first() {
        Some(Unresponsive { control, why }) if servers.is_empty() => {
            Err(StackError::new(Cause::Unreachable, ACTION, why).on(control))
        }
        _ => Ok(servers),
    }
}

/// Shows or changes the log level of a running server.
pub fn log(arguments: &Log) -> Result<Exit, StackError> {
    let (report, stranger) = match &arguments.control {
        Some(path) => client::log(Some(path), None, arguments.level)?,
        None => {
            let servers = servers(arguments.server.as_ref())?;
            let [server] = &servers[..] else {
                let pids: Vec<String> = servers.iter().map(|server| server.pid.to_string()).collect();
                let why = format!("several servers are running: processes {}", pids.join(", "));
                return Err(StackError::new(Cause::Usage, "find the server", why)
                    .advise("use `sealblock log LEVEL SERVER` with one of these as SERVER"));
            };
            client::log(None, Some(server), arguments.level)?
        }
    };
    let text = || attributed(&log_text(&report, arguments.level.is_some()), stranger);
    print_report(arguments.json, &report, text)?;
    Ok(Exit::Clean)
}

fn log_text(report: &LogReport, is_order: bool) -> String {
    let LogReport { pid, before, level } = report;
    match (is_order, before == level) {
        (false, _) => format!("process {pid} logs at level {}", level.as_str()),
        (true, true) => format!("process {pid} logs at level {}, as before", level.as_str()),
        (true, false) => format!("process {pid} now logs at level {}; before, at {}", level.as_str(), before.as_str()),
    }
}

/// Queries the selected servers.
fn gather(server: Option<&ServerName>, control: Option<&Path>) -> Result<Report, StackError> {
    if let Some(path) = control {
        return one(path);
    }
    match server {
        None => {
            let report = ask_all();
            let is_nobody = report.servers.is_empty() && report.unresponsive.is_empty();
            if is_nobody { Err(nobody("no server of this user runs on this machine")) } else { Ok(report) }
        }
        Some(ServerName::Serving(served)) => match socket_at(served) {
            Some(path) => one(&path),
            None => serving(served),
        },
        Some(name @ ServerName::Process(pid)) => {
            chosen(name, "no server of this user has this process ID", |server| server.pid == *pid)
        }
        Some(name @ ServerName::Address(address)) => chosen(name, "no server of this user listens there", |server| {
            let mut listeners = server.listeners.iter().chain(&server.nbd_listeners);
            listeners.any(|own| reaches(*own, *address))
        }),
    }
}

fn nobody(why: &str) -> StackError {
    let others = not_asked().map_or(String::new(), |others| format!("; {others}"));
    StackError::new(Cause::Unreachable, ACTION, format!("{why}{others}"))
        .advise("`sealblock serve`; --control PATH for a server with its own control socket")
}

/// The server behind one socket, which has to respond.
fn one(path: &Path) -> Result<Report, StackError> {
    let (status, stranger) = query(path)?;
    Ok(Report { servers: vec![status], unresponsive: Vec::new(), stranger })
}

/// A control socket that is given instead of a target.
fn socket_at(served: &ServedName) -> Option<PathBuf> {
    let ServedName::Target(target) = served else { return None };
    let path = target.path().filter(|_| matches!(target, TargetName::File { .. }))?;
    let is_socket = fs::metadata(path).is_ok_and(|there| there.file_type().is_socket());
    is_socket.then(|| path.to_owned())
}

/// The server that serves this, or is configured to and could not open it.
fn serving(served: &ServedName) -> Result<Report, StackError> {
    match find(&name_of(served)?, None)? {
        Some(found) => {
            Ok(Report { servers: vec![found.server_status()?], unresponsive: Vec::new(), stranger: found.stranger() })
        }
        None => by_export(served),
    }
}

/// The servers that have an export of this name. A name of NBD means the same in every folder.
fn by_export(served: &ServedName) -> Result<Report, StackError> {
    let name = served.to_string();
    let has = |server: &ServerStatus| {
        server
            .devices
            .iter()
            .any(|device| device.opening.is_some() && device.exports.iter().any(|export| export.name == name))
    };
    chosen(served, "no server of this user on this machine serves it", has)
}

/// The servers that match.
fn chosen(
    name: impl std::fmt::Display,
    why: &str,
    is_it: impl Fn(&ServerStatus) -> bool,
) -> Result<Report, StackError> {
    let mut report = ask_all();
    report.servers.retain(is_it);
    match (report.servers.is_empty(), report.unresponsive.first()) {
        (true, None) => Err(nobody(why).on(name)),
        // It may be the one that is meant.
        (true, Some(Unresponsive { control, why: silence })) => {
            let why = format!("{why}, and the server at {control} did not respond: {silence}");
            Err(StackError::new(Cause::Unreachable, ACTION, why).on(name).advise("repeat the command"))
        }
        (false, _) => Ok(Report { unresponsive: Vec::new(), ..report }),
    }
}

fn ask_all() -> Report {
    let mut report = Report { servers: Vec::new(), unresponsive: Vec::new(), stranger: None };
    for (path, answer) in query_all() {
        match answer {
            Ok(status) => report.servers.push(status),
            // The socket of a server that is gone stays until another one starts.
            Err(failure) if failure.cause() == Cause::Unreachable => {}
            Err(failure) => report.unresponsive.push(Unresponsive::new(&path, failure.in_short())),
        }
    }
    report.servers.sort_by_key(|server| server.pid);
    report.unresponsive.sort_by(|a, b| a.control.cmp(&b.control));
    report
}

impl Unresponsive {
    fn new(path: &Path, why: String) -> Unresponsive {
        Unresponsive { control: printable(&path.to_string_lossy()), why }
    }
}
