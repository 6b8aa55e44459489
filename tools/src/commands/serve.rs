//! `sealblock serve`: targets for other hosts, over NVMe/TCP and NBD.
//!
//! A plan says what is to be served (`plan.rs`); it is made from the command line or a configuration (`config.rs`) before
//! anything is opened. The server (`server.rs`) opens what opens of it, and the rest later (`waiting.rs`), serves until a
//! signal comes, and leaves every volume clean.

mod announce;
mod backing;
mod bad_runs;
mod config;
mod control;
mod devices;
mod embedded;
mod failing;
mod front;
mod health;
mod identity;
mod inspect;
mod listeners;
mod log;
mod members;
pub mod mirrors;
mod observer;
mod plan;
mod recent;
mod resize;
mod resize_queue;
mod run;
mod scrub;
mod server;
mod service;
mod sockets;
mod waiting;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::cli::Serve;
use crate::exit::Exit;
use announce::EventWriter;
use listeners::Inherited;
use plan::Plan;

/// Serves.
pub fn run(arguments: &Serve) -> Result<Exit, StackError> {
    log::install(arguments.log, arguments.json)?;
    // Settled before anything is opened.
    front::started_unix_s();
    serve(arguments).map_err(|failure| match arguments.json {
        false => failure,
        true => {
            log::report_end(&failure);
            failure.reported()
        }
    })
}

fn serve(arguments: &Serve) -> Result<Exit, StackError> {
    let source = Source::of(arguments)?;
    let inherited = Inherited::take()?;
    let again = || source.plan(arguments, &inherited);
    let plan = again()?;
    for warning in plan.warnings() {
        tracing::warn!("{warning}");
    }
    let (announcer, control) = (EventWriter::new(arguments.json), arguments.control.as_ref());
    run::run(&plan, cores(plan.cores), announcer, control, again)
}

/// How many cores to serve on: what is said, but no more than there are CPUs, since two threads on one only get in each
/// other's way; else all up to eight. A host opens a connection for each CPU of its own and all of them spread, but a
/// volume's work stays on one core, so that further ones seldom pay for their memory.
fn cores(said: Option<NonZeroUsize>) -> usize {
    const MAX_DEFAULT_NAMESPACES: usize = 8;
    let cpus = available_parallelism().map_or(1, usize::from);
    said.map_or(cpus.min(MAX_DEFAULT_NAMESPACES), |said| said.get().min(cpus))
}

/// What was said, or else what was planned.
fn or<T: Clone>(said: &[T], planned: Vec<T>) -> Vec<T> {
    if said.is_empty() { planned } else { said.to_vec() }
}

/// What says what is to be served.
enum Source {
    /// The command line.
    Targets(Vec<TargetName>),
    /// A file.
    Config(PathBuf),
}

impl Source {
    fn of(arguments: &Serve) -> Result<Source, StackError> {
        if !arguments.targets.is_empty() {
            return Ok(Source::Targets(arguments.targets.clone()));
        }
        let default = || Path::new(config::DEFAULT_NAME).exists().then(|| config::DEFAULT_NAME.into());
        match arguments.config.clone().or_else(default) {
            Some(path) => Source::config(arguments, path),
            None => Ok(Source::Targets(vec![embedded::volume()?])),
        }
    }

    /// A configuration says by subsystem what these options say for all targets; both at once would be a riddle.
    fn config(arguments: &Serve, path: PathBuf) -> Result<Source, StackError> {
        let options = [
            ("--allow-host", !arguments.allow_host.is_empty()),
            ("--protection", arguments.protection.is_some()),
            ("--read-only", arguments.read_only),
            ("--as-member", arguments.as_member),
            ("--force-leg", arguments.members.force_leg),
            ("--no-label", arguments.labels.no_label),
            ("--scrub-every", arguments.scrub_every.is_some()),
            ("--scrub-rate", arguments.scrub_rate.is_some()),
        ];
        match options.iter().find(|(_, given)| *given) {
            None => Ok(Source::Config(path)),
            Some((option, _)) => {
                let why = format!("{option} is for targets of the command line; the configuration has its own");
                Err(StackError::new(Cause::Usage, "reading the command line", why).on(path.display()))
            }
        }
    }

    /// The plan; read anew each time. What the command line says of addresses and cores goes first.
    fn plan(&self, arguments: &Serve, inherited: &Inherited) -> Result<Plan, StackError> {
        let plan = match self {
            Source::Targets(targets) => Plan::of_targets(arguments, targets),
            Source::Config(path) => {
                let plan = config::read(path)?;
                let strict = arguments.strict || plan.strict;
                let plan = Plan { cores: arguments.cores.or(plan.cores), strict, ..plan };
                Plan {
                    listeners: or(&arguments.listen, plan.listeners),
                    nbd: or(&arguments.nbd, plan.nbd),
                    nbd_sockets: or(&arguments.nbd_socket, plan.nbd_sockets),
                    ..plan
                }
            }
        };
        // Sockets of the service manager take precedence over both: they are open already, and its units name them.
        let (nvme, nbd) = inherited.addresses();
        let (listeners, nbd) = (or(&nvme, plan.listeners), or(&nbd, plan.nbd));
        let plan = Plan { listeners, nbd, inherited: inherited.clone(), ..plan };
        plan.check()?;
        Ok(plan)
    }
}
