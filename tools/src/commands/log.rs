//! `sealblock log`: shows and changes the log level of a running server.

use std::path::Path;

use sealblock_stack::{Cause, StackError};

use crate::cli::Log;
use crate::commands::status::servers;
use crate::exit::Exit;
use crate::report::{print_json, say};
use sealblock_server::control::client::log;
use sealblock_server::control::protocol::LogReport;

/// Does it.
pub fn run(arguments: &Log) -> Result<Exit, StackError> {
    let report = match &arguments.control {
        Some(path) => log(path, None, arguments.level)?,
        None => {
            let servers = servers(arguments.server.as_ref())?;
            let [server] = &servers[..] else {
                let pids: Vec<String> = servers.iter().map(|server| server.pid.to_string()).collect();
                let why = format!("several servers run: processes {}", pids.join(", "));
                return Err(StackError::new(Cause::Usage, "looking for the server", why)
                    .advise("`sealblock log LEVEL SERVER`, with one of these for SERVER"));
            };
            log(Path::new(&server.control), Some(server.uid), arguments.level)?
        }
    };
    if arguments.json {
        print_json(&report)?;
    } else {
        say(&to_text(&report, arguments.level.is_some()))?;
    }
    Ok(Exit::Clean)
}

fn to_text(report: &LogReport, is_order: bool) -> String {
    let LogReport { pid, before, level } = report;
    match (is_order, before == level) {
        (false, _) => format!("process {pid} logs at level {}", level.as_str()),
        (true, true) => format!("process {pid} logs at level {}, as before", level.as_str()),
        (true, false) => format!("process {pid} logs at level {} now; before, at {}", level.as_str(), before.as_str()),
    }
}
