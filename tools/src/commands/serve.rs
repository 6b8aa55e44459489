//! `sealblock serve`: targets for other hosts, over NVMe/TCP and NBD.
//!
//! The plan is made here, from the command line or a configuration; `server/` serves it and sends events, which are
//! printed here.

pub mod text;

use std::fs;
use std::path::{Path, PathBuf};

use sealblock_exports_nvme_tcp::Hosts;
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_scrub::Settings;
use sealblock_server::exports::listeners::Inherited;
use sealblock_server::plan::{Listening, NBD, NamespacePlan, Plan, SubsystemPlan, names};
use sealblock_server::run::service::Hangups;
use sealblock_server::{log, plan::config, run::run as serve_plan};
use sealblock_stack::quantity::Rate;
use sealblock_stack::target::TargetName;
use sealblock_stack::{
    Cause, FileKind, StackError, Usage, inspect, on_reactor, open_error, open_medium, remains_error,
};
use sealblock_units::ByteCount;

use super::create;
use crate::cli::Serve;
use crate::exit::Exit;
use crate::outputs;
use crate::report::start_events;

/// The folder of the default volume, in the working directory; shared with the demonstration.
const FOLDER: &str = "sealblock-data";
/// The volume in it.
const DEFAULT_VOLUME: &str = "default.volume";
/// Bytes of data it holds. The file is sparse: it takes space as it is written to.
const DEFAULT_SIZE: ByteCount = ByteCount::new(1 << 30);

/// Serves.
pub fn run(arguments: &Serve) -> Result<Exit, StackError> {
    let log = log::install(arguments.log, arguments.json)?;
    let served = serve(arguments).map_err(|failure| match arguments.json {
        false => failure,
        true if !failure.is_unreported() => failure,
        true => {
            log.report_end(&failure);
            failure.reported()
        }
    });
    served.map(|()| Exit::Clean)
}

fn serve(arguments: &Serve) -> Result<(), StackError> {
    Hangups::keep().map_err(|error| StackError::io("wait for signals", &error))?;
    let source = Source::of(arguments)?;
    let inherited = Inherited::take()?;
    let again = || source.plan(arguments, &inherited);
    let plan = again()?;
    for warning in plan.warnings() {
        tracing::warn!("{warning}");
    }
    let _events = start_events()?;
    let events = if arguments.json { text::print_event } else { text::say_event };
    serve_plan(&plan, events, arguments.control.as_ref(), again)
}

/// What was said, or else what was planned.
fn or<T: Clone>(said: &[T], planned: Vec<T>) -> Vec<T> {
    if said.is_empty() { planned } else { said.to_vec() }
}

/// The source of the plan.
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
            None => Ok(Source::Targets(vec![default_volume()?])),
        }
    }

    /// A configuration sets per subsystem what these options set for all targets; both at once would be ambiguous.
    fn config(arguments: &Serve, path: PathBuf) -> Result<Source, StackError> {
        let options = [
            ("--allow-host", !arguments.allow_host.is_empty()),
            ("--protection", arguments.protection.is_some()),
            ("--read-only", arguments.read_only),
            ("--as-member", arguments.as_member),
            ("--force-member", arguments.members.force_member),
            ("--no-label", arguments.labels.no_label),
            ("--scrub-every", arguments.scrub_every.is_some()),
            ("--scrub-rate", arguments.scrub_rate.is_some()),
        ];
        match options.iter().find(|(_, given)| *given) {
            None => Ok(Source::Config(path)),
            Some((option, _)) => {
                let why = format!("{option} applies to targets on the command line; set it in the configuration");
                Err(StackError::new(Cause::Usage, "use the command line with", why).on(path.display()))
            }
        }
    }

    /// The plan; read anew each time. What the command line says of addresses and cores goes first.
    fn plan(&self, arguments: &Serve, inherited: &Inherited) -> Result<Plan, StackError> {
        let plan = match self {
            Source::Targets(targets) => plan_of(arguments, targets),
            Source::Config(path) => config::read(path)?,
        };
        // Sockets of the service manager take precedence over both: they are open already, and its units name them.
        let (nvme, nbd) = inherited.addresses();
        let mut listening = plan.listening;
        let Listening { addresses, sockets } = listening.remove(NBD).unwrap_or_default();
        let clients_of_nbd = Listening {
            addresses: or(&nbd, or(&arguments.nbd, addresses)),
            sockets: or(&arguments.nbd_socket, sockets),
        };
        listening.insert(NBD, clients_of_nbd);
        let plan = Plan {
            listeners: or(&nvme, or(&arguments.listen, plan.listeners)),
            inherited: inherited.clone(),
            listening,
            strict: arguments.strict || plan.strict,
            cores: arguments.cores.or(plan.cores),
            ..plan
        };
        plan.check()?;
        let namespaces = plan.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        let targets: Vec<TargetName> = namespaces.map(|namespace| namespace.target.clone()).collect();
        outputs::check_streams("serve", &targets, true)?;
        Ok(plan)
    }
}

/// The plan of a command line: a subsystem for each target.
fn plan_of(arguments: &Serve, targets: &[TargetName]) -> Plan {
    let hosts = match arguments.allow_host.as_slice() {
        [] => Hosts::Any,
        names => Hosts::Only(names.to_vec()),
    };
    let scrub = Settings {
        every: arguments.scrub_every.map(|time| time.0),
        rate: arguments.scrub_rate.map(Rate::bytes_per_second),
        ..Settings::default()
    };
    let subsystem = |(nqn, target): (Nqn, &TargetName)| SubsystemPlan {
        nqn,
        hosts: hosts.clone(),
        serial: None,
        model: None,
        namespaces: vec![NamespacePlan {
            protection: arguments.protection.unwrap_or_default(),
            read_only: arguments.read_only,
            relocate: !arguments.no_relocate,
            accept_older: arguments.accept_older,
            usage: if arguments.as_member { Usage::AsMember } else { arguments.members.usage() },
            scrub,
            ..NamespacePlan::new(target.clone())
        }],
    };
    Plan::new(names(targets).into_iter().zip(targets).map(subsystem).collect())
}

/// The default volume; made if nothing has its name, never over a file that is there.
///
/// # Errors
/// When it cannot be made, or something else is there.
fn default_volume() -> Result<TargetName, StackError> {
    let path = Path::new(FOLDER).join(DEFAULT_VOLUME);
    // A link that leads nowhere is something, too.
    if path.symlink_metadata().is_err() {
        make_default(&path)?;
    } else {
        check_default(&path)?;
    }
    Ok(TargetName::File(path))
}

/// Makes it under another name first, so that a half-made volume never has this one.
fn make_default(path: &Path) -> Result<(), StackError> {
    let failed = |error: &std::io::Error| StackError::at_path("create", error, path);
    fs::create_dir_all(FOLDER).map_err(|error| failed(&error))?;
    let draft = path.with_extension(format!("volume.{}", std::process::id()));
    create::make(&draft, &create::default_options(DEFAULT_SIZE)?, false)?;
    // Unlike a rename, a link replaces no file.
    let placed = fs::hard_link(&draft, path);
    // It has its own name now, or is not wanted; a draft that cannot be removed is harmless.
    fs::remove_file(&draft).ok();
    placed.map_err(|error| failed(&error))
}

fn check_default(path: &Path) -> Result<(), StackError> {
    on_reactor(async {
        let medium =
            open_medium(path, sealblock_media_file::Options::READ).await.map_err(|error| open_error("open", &error))?;
        match inspect(&medium).await? {
            FileKind::Volume => Ok(()),
            FileKind::Remains(parts) => Err(remains_error("open", path, &parts)),
            FileKind::Raw => Err(StackError::new(Cause::Unsuitable, "open", "it is not a volume")
                .on(path.display())
                .advise("move it away, or give the targets to serve")),
        }
    })
}
