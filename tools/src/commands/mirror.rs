//! `sealblock mirror`: how the legs of a mirror are, and changing them.
//!
//! A server that has the mirror open is asked; else the mirror is opened here.

use std::rc::Rc;
use std::time::Duration;

use sealblock_units::ByteCount;

use crate::cli::{Mirror, MirrorCommand, MirrorStatus as Arguments, ServedName};
use crate::commands::scrub::name_of;
use crate::control::client::{Found, find};
use crate::control::legs::MirrorStatus;
use crate::control::protocol::Order;
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::report::{print_json, say};
use crate::stack::{Access, OpenMirror, Opened, on_reactor, open};
use crate::target::Target;

/// How often progress is looked at.
const LOOK: Duration = Duration::from_millis(100);
const CHANGING: &str = "changing the legs";

/// Does it.
pub fn run(arguments: &Mirror) -> Result<Exit, Failure> {
    match &arguments.command {
        MirrorCommand::Status(status) => tell(status),
        MirrorCommand::Add(add) => change(&add.target, Change { add: Some(&add.leg), remove: None }),
        MirrorCommand::Remove(remove) => change(&remove.target, Change { add: None, remove: Some(&remove.leg) }),
        MirrorCommand::Replace(replace) => {
            change(&replace.target, Change { add: Some(&replace.new), remove: Some(&replace.old) })
        }
    }
}

/// Legs to be added and taken out.
#[derive(Clone, Copy)]
struct Change<'a> {
    add: Option<&'a Target>,
    remove: Option<&'a Target>,
}

/// Whoever has the mirror open.
enum Holder {
    /// A server.
    Server(Box<Found>),
    /// This process.
    Here(Rc<OpenMirror>),
}

impl Holder {
    async fn order(&self, order: Order) -> Result<MirrorStatus, Failure> {
        let parsed = |leg: &str| leg.parse::<Target>().map_err(|error| Failure::new(Cause::Usage, CHANGING, error));
        match (self, order) {
            (Holder::Server(server), order) => return server.order_legs(CHANGING, order),
            (Holder::Here(mirror), Order::MirrorAdd { leg }) => mirror.add(&parsed(&leg)?).await?,
            (Holder::Here(mirror), Order::MirrorRemove { leg }) => mirror.remove(&parsed(&leg)?).await?,
            (Holder::Here(_), _) => {}
        }
        self.status().await
    }

    async fn status(&self) -> Result<MirrorStatus, Failure> {
        match self {
            Holder::Server(server) => server.order_legs("looking at the legs", Order::MirrorStatus),
            Holder::Here(mirror) => Ok(MirrorStatus::of(&mirror.describe())),
        }
    }
}

fn tell(arguments: &Arguments) -> Result<Exit, Failure> {
    let status = match server_of(&arguments.target)? {
        Some(server) => server.order_legs("looking at the legs", Order::MirrorStatus)?,
        None => on_reactor(async {
            let opened = open(&arguments.target, Access::Read).await?;
            let status = mirror_of(&opened).map(|mirror| MirrorStatus::of(&mirror.describe()));
            opened.close(status).await
        })?,
    };
    if arguments.json {
        print_json(&status)?;
    } else {
        say(status.words().trim_end())?;
    }
    Ok(status.exit())
}

fn server_of(target: &Target) -> Result<Option<Found>, Failure> {
    find(&name_of(&ServedName::Target(target.clone()))?, None)
}

fn mirror_of(opened: &Opened) -> Result<Rc<OpenMirror>, Failure> {
    opened.facts.mirror.clone().ok_or_else(|| {
        Failure::new(Cause::Usage, "looking at its legs", "it is no mirror").on(opened.target()).advise("mirror:A,B")
    })
}

fn change(target: &Target, change: Change<'_>) -> Result<Exit, Failure> {
    let server = server_of(target)?;
    let is_served = server.is_some();
    let status = on_reactor(async {
        if let Some(server) = server {
            return carry_out(&Holder::Server(Box::new(server)), target, change).await;
        }
        let opened = open(target, Access::Write).await?;
        let changed = match mirror_of(&opened) {
            Ok(mirror) => carry_out(&Holder::Here(mirror), target, change).await,
            Err(failure) => Err(failure),
        };
        opened.close(changed).await
    })?;
    say(status.words().trim_end())?;
    if is_served {
        eprintln!("sealblock: name the legs so the next time it is served");
    }
    Ok(Exit::Clean)
}

async fn carry_out(mirror: &Holder, target: &Target, change: Change<'_>) -> Result<MirrorStatus, Failure> {
    let mut status = mirror.status().await?;
    if let Some(old) = change.remove.map(Target::to_string).filter(|old| status.leg(old).is_none()) {
        return Err(Failure::new(Cause::Usage, CHANGING, format!("the mirror has no leg {old}"))
            .on(target)
            .advise("`sealblock mirror status` names the legs"));
    }
    if let Some(new) = change.add {
        status = mirror.order(Order::MirrorAdd { leg: new.to_string() }).await?;
        status = wait(mirror, &new.to_string(), status).await?;
    }
    match change.remove {
        Some(old) => mirror.order(Order::MirrorRemove { leg: old.to_string() }).await,
        None => Ok(status),
    }
}

/// Waits until a new leg has everything.
async fn wait(mirror: &Holder, name: &str, mut status: MirrorStatus) -> Result<MirrorStatus, Failure> {
    let missed = |status: &MirrorStatus| status.leg(name).map_or(0, |leg| leg.missed_bytes);
    let total = missed(&status);
    let doing = format!("bringing {name} up to date");
    let progress = Progress::new(&doing, Some(ByteCount::new(total)), Show::OnTerminal);
    let mut done = 0;
    while status.leg(name).is_some_and(|leg| leg.standing == "rebuilding") {
        sealblock_runtime_reactor::sleep(LOOK).await;
        status = mirror.status().await?;
        let now = total.saturating_sub(missed(&status));
        progress.advance(now.saturating_sub(done));
        done = done.max(now);
    }
    match status.leg(name) {
        Some(leg) if leg.standing == "current" => Ok(status),
        leg => {
            let why = leg.and_then(|leg| leg.trouble.clone()).unwrap_or_default();
            Err(Failure::new(Cause::Io, doing, format!("it was left behind: {why}")).on(name))
        }
    }
}
