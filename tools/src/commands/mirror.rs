//! `sealblock mirror`: how the legs of a mirror are, and changing them.

use std::rc::Rc;
use std::time::Duration;

use sealblock_layers_mirror::Description;
use sealblock_units::ByteCount;

use crate::cli::{Mirror, MirrorCommand, MirrorStatus};
use crate::commands::info::{mirror_json, mirror_text};
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::report::{print_json, say};
use crate::stack::{Access, OpenMirror, Opened, on_reactor, open};
use crate::target::Target;

/// How often progress is looked at.
const LOOK: Duration = Duration::from_millis(100);

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

fn tell(arguments: &MirrorStatus) -> Result<Exit, Failure> {
    on_reactor(async {
        let opened = open(&arguments.target, Access::Read).await?;
        let told = mirror_of(&opened).and_then(|mirror| {
            let mirror = mirror.describe();
            if arguments.json { print_json(&mirror_json(&mirror)) } else { say(mirror_text(&mirror).trim_end()) }
        });
        opened.close(told).await
    })?;
    Ok(Exit::Clean)
}

fn mirror_of(opened: &Opened) -> Result<Rc<OpenMirror>, Failure> {
    opened.facts.mirror.clone().ok_or_else(|| {
        Failure::new(Cause::Usage, "looking at its legs", "it is no mirror").on(opened.target()).advise("mirror:A,B")
    })
}

fn change(target: &Target, change: Change<'_>) -> Result<Exit, Failure> {
    on_reactor(async {
        let opened = open(target, Access::Write).await?;
        let changed = match mirror_of(&opened) {
            Ok(mirror) => carry_out(&mirror, target, change).await.map(|()| mirror.describe()),
            Err(failure) => Err(failure),
        };
        let mirror = opened.close(changed).await?;
        say(mirror_text(&mirror).trim_end())?;
        Ok(Exit::Clean)
    })
}

async fn carry_out(mirror: &OpenMirror, target: &Target, change: Change<'_>) -> Result<(), Failure> {
    if let Some(old) = change.remove {
        let name = old.to_string();
        if !mirror.describe().legs.iter().any(|leg| leg.name == name) {
            return Err(Failure::new(Cause::Usage, "changing the legs", format!("the mirror has no leg {name}"))
                .on(target)
                .advise("`sealblock mirror status` names the legs"));
        }
    }
    if let Some(new) = change.add {
        mirror.add(new).await?;
        wait(mirror, new).await?;
    }
    match change.remove {
        Some(old) => mirror.remove(old).await,
        None => Ok(()),
    }
}

/// Waits until a new leg has everything.
async fn wait(mirror: &OpenMirror, leg: &Target) -> Result<(), Failure> {
    let name = leg.to_string();
    let missed = |mirror: &Description| {
        let leg = mirror.legs.iter().rev().find(|leg| leg.name == name);
        leg.map_or(0, |leg| leg.missed_bytes)
    };
    let total = missed(&mirror.describe());
    let progress = Progress::new(&format!("bringing {name} up to date"), Some(ByteCount::new(total)), Show::OnTerminal);
    let mut done = 0;
    loop {
        let settled = sealblock_runtime_reactor::timeout(LOOK, mirror.settled()).await;
        let now = total.saturating_sub(missed(&mirror.describe()));
        progress.advance(now.saturating_sub(done));
        done = done.max(now);
        match settled {
            Ok(true) => break,
            Ok(false) => return Err(left_behind(&mirror.describe(), &name)),
            Err(_) => {}
        }
    }
    let mirror = mirror.describe();
    let leg = mirror.legs.iter().rev().find(|leg| leg.name == name);
    match leg.is_some_and(|leg| leg.missed_bytes == 0 && leg.is_here) {
        true => Ok(()),
        false => Err(left_behind(&mirror, &name)),
    }
}

fn left_behind(mirror: &Description, name: &str) -> Failure {
    let leg = mirror.legs.iter().rev().find(|leg| leg.name == name);
    let why = leg.map_or(String::new(), |leg| leg.why.clone());
    Failure::new(Cause::Io, "bringing it up to date", format!("it was left behind: {why}")).on(name)
}
