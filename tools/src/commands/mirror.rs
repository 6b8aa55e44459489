//! `sealblock mirror`: shows and changes the replicas of a mirror.
//!
//! A server that has the mirror open is asked; else the mirror is opened here.

use std::path::Path;
use std::rc::Rc;
use std::slice;
use std::time::Duration;

use sealblock_layers_mirror::MirrorState;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::label::name::MirrorName;
use sealblock_stack::target::{GroupKind, TargetName};
use sealblock_stack::{
    Access, Cause, MirrorOptions, OpenMirror, OpenTarget, StackError, create_mirror, member_of, on_reactor, open,
    shell_word,
};
use sealblock_units::ByteCount;

use crate::cli::{Mirror, MirrorAcceptStale, MirrorCommand, MirrorCreate, MirrorStatus as Arguments, ServedName};
use crate::commands::scrub::name_of;
use crate::exit::Exit;
use crate::progress::{Progress, Show};
use crate::report::{Lines, attributed, note, note_lost_answers, print_report, say};
use sealblock_server::control::client::{FoundServer, find, find_to_change};
use sealblock_server::control::protocol::{ControlCommand, TargetRef};
use sealblock_server::devices::mirrors::execute;
use sealblock_server::status::health::Health;
use sealblock_server::status::mirror::{MirrorStatus, ReplicaStatus, state_text};

/// How often progress is looked at.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
const CHANGING: &str = "change";

/// Does it.
pub fn run(arguments: &Mirror) -> Result<Exit, StackError> {
    match &arguments.command {
        MirrorCommand::Status(status) => report(status),
        MirrorCommand::Create(create) => make(create),
        MirrorCommand::Add(add) => {
            let server = server_to_change(&add.target, add.control.as_deref())?;
            check_names("add a replica", slice::from_ref(&add.replica))?;
            let is_mirror = matches!(add.target, TargetName::Group { .. }) || server.is_some();
            if !is_mirror {
                let replicas = vec![add.target.clone(), add.replica.clone()];
                let (from, force) = (Some(add.target.clone()), add.force);
                return make(&MirrorCreate { replicas, from, name: None, force, no_wait: false });
            }
            let replica = name_for(&add.replica, server.as_ref())?;
            change(&add.target, server, Change::Add { new: replica, force: add.force })
        }
        MirrorCommand::Remove(remove) => {
            let server = server_to_change(&remove.target, remove.control.as_deref())?;
            change(&remove.target, server, Change::Remove { old: &remove.replica, force: remove.force })
        }
        MirrorCommand::AcceptStale(accept) => accept_stale(accept),
        MirrorCommand::Replace(replace) => {
            let server = server_to_change(&replace.target, replace.control.as_deref())?;
            check_names("replace a replica", replace.new.as_slice())?;
            let new = replace.new.as_ref().map(|new| name_for(new, server.as_ref())).transpose()?;
            change(&replace.target, server, Change::Replace { old: &replace.old, new, force: replace.force })
        }
    }
}

/// The name of a new replica for the process that has the mirror open. In a server's folder the same relative name is another file.
fn name_for(replica: &TargetName, server: Option<&FoundServer>) -> Result<String, StackError> {
    let Some(server) = server else { return Ok(replica.to_string()) };
    let here = std::env::current_dir().map_err(|error| StackError::io("find", &error).on(replica))?;
    if server.folder().as_ref() == Some(&here) {
        return Ok(replica.to_string());
    }
    Ok(replica.clone().relative_to(&here).to_string())
}

/// A change of the replicas.
enum Change<'a> {
    /// A replica more, by its name for the process that has the mirror.
    Add { new: String, force: bool },
    /// One less.
    Remove { old: &'a TargetName, force: bool },
    /// Another one for it; without a name, what is there under the old name.
    Replace { old: &'a TargetName, new: Option<String>, force: bool },
}

impl Change<'_> {
    fn is_forced(&self) -> bool {
        match self {
            Change::Add { force, .. } | Change::Remove { force, .. } | Change::Replace { force, .. } => *force,
        }
    }
}

/// The process that has the mirror open.
enum Holder {
    /// A server.
    Server(Box<FoundServer>),
    /// This process.
    Here(Rc<OpenMirror>),
}

impl Holder {
    async fn execute(&self, order: &ControlCommand) -> Result<MirrorStatus, StackError> {
        match self {
            Holder::Server(server) => server.mirror_command(CHANGING, order.clone()),
            Holder::Here(mirror) => {
                execute(mirror, order).await?;
                self.status().await
            }
        }
    }

    /// The name that the mirror has for a replica. A name that is typed here may mean another file there.
    /// One that was not given has the name that its status shows.
    async fn member(&self, named: &TargetName, target: &TargetName) -> Result<String, StackError> {
        let name = match self {
            Holder::Server(server) => server.member(named),
            Holder::Here(mirror) => member_of(&mirror.members(), named).map(str::to_owned),
        };
        if let Some(name) = name {
            return Ok(name);
        }
        let shown = named.to_string();
        let is_shown = self.status().await?.replica(&shown).is_some();
        is_shown.then_some(shown).ok_or_else(|| {
            StackError::new(Cause::Usage, CHANGING, format!("the mirror has no replica {named}"))
                .on(target)
                .advise("`sealblock mirror status` lists the replicas")
        })
    }

    /// The user of a server that this user need not believe.
    fn stranger(&self) -> Option<String> {
        match self {
            Holder::Server(server) => server.stranger(),
            Holder::Here(_) => None,
        }
    }

    async fn status(&self) -> Result<MirrorStatus, StackError> {
        match self {
            Holder::Server(server) => server.mirror_command("read the mirror state", ControlCommand::MirrorStatus),
            Holder::Here(mirror) => Ok(MirrorStatus::of(mirror)),
        }
    }
}

/// Creates a mirror, and waits for its first resync.
fn make(arguments: &MirrorCreate) -> Result<Exit, StackError> {
    let target = TargetName::Group { kind: GroupKind::Mirror, members: arguments.replicas.clone() };
    check_names("create a mirror", &arguments.replicas)?;
    let from = match &arguments.from {
        Some(from) => Some(arguments.replicas.iter().position(|replica| replica == from).ok_or_else(|| {
            StackError::new(Cause::Usage, "create a mirror", format!("{from} is not one of its devices")).on(&target)
        })?),
        None => None,
    };
    let options = MirrorOptions { name: arguments.name, from, force: arguments.force };
    let status = on_reactor(async {
        let opened = create_mirror(&target, &arguments.replicas, &options).await?;
        note_lost_answers(&opened);
        opened
            .close_after(async |opened| synchronise(&Holder::Here(mirror_of(opened)?), &target, arguments).await)
            .await
    })?;
    say(&to_text(&status))?;
    say(&format!("{:<16}{}", "use it as", shell_word(&target)))?;
    Ok(exit_of_change(&status))
}

/// Refuses replicas that no name of a mirror can have.
///
/// # Errors
/// Which one, and why.
fn check_names(doing: &str, replicas: &[TargetName]) -> Result<(), StackError> {
    for replica in replicas {
        let group = TargetName::Group { kind: GroupKind::Mirror, members: vec![replica.clone(), replica.clone()] };
        let why = match group.to_string().parse::<TargetName>() {
            Ok(parsed) if parsed == group => continue,
            Ok(_) => "it means something else there".to_owned(),
            Err(error) => error.to_string(),
        };
        let refused = StackError::new(Cause::Usage, doing, format!("its name cannot be in that of a mirror: {why}"));
        return Err(refused.on(replica).advise("rename it, or use a link with another name"));
    }
    Ok(())
}

/// The exit status of a change that was made: blocks that are lost on a replica are damage, and a resync that is left to later is not.
fn exit_of_change(status: &MirrorStatus) -> Exit {
    if status.health() == Health::Damaged { Exit::DamageFound } else { Exit::Clean }
}

async fn synchronise(
    mirror: &Holder,
    target: &TargetName,
    arguments: &MirrorCreate,
) -> Result<MirrorStatus, StackError> {
    let mut status = mirror.status().await?;
    let lacking: Vec<String> = status
        .replicas
        .iter()
        .filter(|replica| replica.out_of_sync_bytes > 0)
        .map(|replica| replica.name.clone())
        .collect();
    if arguments.no_wait || lacking.is_empty() {
        return Ok(status);
    }
    let later = format!("it continues when {target} is next opened for writing or served");
    note(&format_args!("the devices are labelled, the resync has started and may be interrupted: {later}"));
    for replica in &lacking {
        status = wait(mirror, replica, status).await?;
    }
    Ok(status)
}

fn report(arguments: &Arguments) -> Result<Exit, StackError> {
    let server = server_of(&arguments.target, arguments.control.as_deref())?;
    let report = async |mirror: &Holder| Ok((mirror.status().await?, mirror.stranger()));
    let (status, stranger) = on_holder(&arguments.target, server, Access::ReadOlder, report)?;
    print_report(arguments.json, &status, || attributed(&to_text(&status), stranger))?;
    Ok(status.health().into())
}

/// The server that has the mirror. One that was named has to have it.
fn server_of(target: &TargetName, control: Option<&Path>) -> Result<Option<FoundServer>, StackError> {
    found_of(target, control, find)
}

/// The same for a change of the mirror.
fn server_to_change(target: &TargetName, control: Option<&Path>) -> Result<Option<FoundServer>, StackError> {
    found_of(target, control, find_to_change)
}

fn found_of(
    target: &TargetName,
    control: Option<&Path>,
    find: fn(&TargetRef, Option<&Path>) -> Result<Option<FoundServer>, StackError>,
) -> Result<Option<FoundServer>, StackError> {
    let found = find(&name_of(&ServedName::Target(target.clone()))?, control)?;
    match control {
        Some(socket) if found.is_none() => {
            let why = format!("the server behind {} does not serve it", socket.display());
            let failure = StackError::new(Cause::Unreachable, "find the server", why).on(target);
            Err(failure
                .advise(format!("`sealblock status --control {}` says what it serves", shell_word(socket.display()))))
        }
        _ => Ok(found),
    }
}

/// Works on a mirror where it is open: at its server, or else here.
fn on_holder<T>(
    target: &TargetName,
    server: Option<FoundServer>,
    access: Access,
    work: impl AsyncFnOnce(&Holder) -> Result<T, StackError>,
) -> Result<T, StackError> {
    on_reactor(async {
        if let Some(server) = server {
            return work(&Holder::Server(Box::new(server))).await;
        }
        let opened = open(target, access).await?;
        note_lost_answers(&opened);
        opened.learn_damage().await;
        opened.close_after(async |opened| work(&Holder::Here(mirror_of(opened)?)).await).await
    })
}

fn mirror_of(opened: &OpenTarget) -> Result<Rc<OpenMirror>, StackError> {
    opened.info.mirror.clone().ok_or_else(|| {
        StackError::new(Cause::Usage, "read the mirror state", "it is not a mirror")
            .on(opened.target())
            .advise("mirror:A,B")
    })
}

/// Accepts the older copies on a replica.
fn accept_stale(arguments: &MirrorAcceptStale) -> Result<Exit, StackError> {
    let MirrorAcceptStale { target, replica, control } = arguments;
    let kept = |status: &MirrorStatus, name: &str| status.replica(name).map_or(0, |replica| replica.stale_blocks);
    let take = async |mirror: &Holder| {
        let name = mirror.member(replica, target).await?;
        let before = kept(&mirror.status().await?, &name);
        let status = mirror.execute(&ControlCommand::MirrorAcceptStale { replica: name.clone() }).await?;
        Ok((before, kept(&status, &name), status, mirror.stranger()))
    };
    let server = server_to_change(target, control.as_deref())?;
    let (before, left, status, stranger) = on_holder(target, server, Access::Write, take)?;
    let taken = format!("{:<16}{} of {before} older copies on {replica}", "taken", before.saturating_sub(left));
    say(&attributed(&format!("{taken}\n{}", to_text(&status)), stranger))?;
    Ok(if left == 0 { exit_of_change(&status) } else { Exit::DamageFound })
}

fn change(target: &TargetName, server: Option<FoundServer>, change: Change<'_>) -> Result<Exit, StackError> {
    let is_served = server.is_some();
    let access = if change.is_forced() { Access::WriteWithoutLabel } else { Access::Write };
    let apply = async |mirror: &Holder| Ok((execute_change(mirror, target, change).await?, mirror.stranger()));
    let (status, stranger) = on_holder(target, server, access, apply)?;
    say(&attributed(&to_text(&status), stranger))?;
    if is_served {
        note(
            &"have the server's configuration or command line name these replicas before its next start; on SIGHUP the server reads a \
              configuration again without disturbing its clients",
        );
    }
    Ok(exit_of_change(&status))
}

async fn execute_change(mirror: &Holder, target: &TargetName, change: Change<'_>) -> Result<MirrorStatus, StackError> {
    let (old, new, is_forced, command) = match change {
        Change::Add { new, force } => {
            (None, Some(new.clone()), force, ControlCommand::MirrorAdd { replica: new, force })
        }
        Change::Remove { old, force } => {
            let old = mirror.member(old, target).await?;
            (None, None, force, ControlCommand::MirrorRemove { replica: old, force })
        }
        Change::Replace { old, new, force } => {
            let old = mirror.member(old, target).await?;
            let new = new.unwrap_or_else(|| old.clone());
            let command = ControlCommand::MirrorReplace { old: old.clone(), new: new.clone(), force };
            (Some(old), Some(new), force, command)
        }
    };
    let mut status = mirror.execute(&command).await?;
    if let Some(new) = &new {
        if status.replica(new).is_some_and(is_going_on) {
            note(&how_to_go_on(target, new, old.as_deref().filter(|old| *old != new && status.replica(old).is_some())));
        }
        status = wait(mirror, new, status).await?;
    }
    // A replica that was in sync stays until the resync of the new one has finished.
    match old.filter(|old| new.as_ref() != Some(old) && status.replica(old).is_some()) {
        Some(replica) => mirror.execute(&ControlCommand::MirrorRemove { replica, force: is_forced }).await,
        None => Ok(status),
    }
}

/// What is to be done if the resync of a new replica, in place of `old`, is interrupted.
fn how_to_go_on(target: &TargetName, new: &str, old: Option<&str>) -> String {
    let mut all = target.clone();
    if let (TargetName::Group { members, .. }, Ok(new)) = (&mut all, new.parse()) {
        members.push(new);
    }
    let (all, new) = (shell_word(&all), shell_word(new));
    let then = old.map_or(String::new(), |old| {
        format!(", and `sealblock mirror remove {all} {}` ends the replacement", shell_word(old))
    });
    format!(
        "{new} is a replica now, and its resync has started. If it is interrupted, `sealblock verify {all} --repair` or a server of it \
         goes on{then}"
    )
}

/// Waits for the resync of a new replica.
async fn wait(mirror: &Holder, name: &str, mut status: MirrorStatus) -> Result<MirrorStatus, StackError> {
    let missed = |status: &MirrorStatus| status.replica(name).map_or(0, |replica| replica.out_of_sync_bytes);
    let total = missed(&status);
    let doing = format!("resyncing {name}");
    let progress = Progress::new(&doing, Some(ByteCount::new(total)), Show::OnTerminal);
    let mut done = 0;
    while status.replica(name).is_some_and(is_going_on) {
        sealblock_runtime_reactor::sleep(PROBE_INTERVAL).await;
        status = mirror.status().await?;
        let now = total.saturating_sub(missed(&status));
        progress.advance(now.saturating_sub(done));
        done = done.max(now);
    }
    match status.replica(name) {
        Some(replica) if replica.is(ReplicaState::InSync) => Ok(status),
        replica => {
            let why = replica.and_then(|replica| replica.last_error.clone()).unwrap_or_default();
            Err(StackError::new(Cause::Io, doing, format!("it is out of sync: {why}")).on(name))
        }
    }
}

/// True if a replica is resynced, or will be without a reason why not: after an opening that takes a moment.
fn is_going_on(replica: &ReplicaStatus) -> bool {
    let is_next = replica.is(ReplicaState::OutOfSync) && replica.online && replica.last_error.is_none();
    replica.is(ReplicaState::Resyncing) || is_next
}

/// A mirror for people: a line for its identity, its state and each replica.
pub fn put(lines: &mut Lines, status: &MirrorStatus) {
    // A server's words are shown only as what they should be.
    if let Some(name) = status.name.as_ref().and_then(|name| name.parse::<MirrorName>().ok()) {
        lines.put("name", name);
    }
    if let Some(uuid) = &status.uuid {
        lines.put("uuid", uuid);
    }
    lines.put("state", &status.state);
    if status.state == MirrorState::Unlabelled.as_str() {
        let is_left_over = status.replicas.iter().any(|replica| replica.is(ReplicaState::Removed));
        lines.put(
            "content",
            match is_left_over {
                true => "no replica that is left has room for a label, so that nothing makes it a mirror any more",
                false => "blank: no device has a mirror label; the first open for writing creates the mirror",
            },
        );
    }
    if let Some(why) = status.why_older() {
        lines.put("content", format_args!("may be older than what was written: {why}"));
    }
    for replica in replica_texts(status) {
        lines.put("replica", replica);
    }
    if status.nosync_bytes > 0 {
        let bytes = ByteCount::new(status.nosync_bytes);
        lines.put("not compared", format_args!("{bytes} may differ between replicas until they are reconciled"));
    }
    if status.dirty_bytes > 0 || status.max_dirty_bytes.is_some() {
        let bytes = ByteCount::new(status.dirty_bytes);
        let most = status.max_dirty_bytes.map_or(String::new(), |most| format!(" of at most {}", ByteCount::new(most)));
        lines.put("write intent", format_args!("{bytes}{most} dirty; after a crash replicas are compared there"));
    }
}

fn to_text(status: &MirrorStatus) -> String {
    let mut lines = Lines::new(16);
    put(&mut lines, status);
    lines.into_text()
}

/// Each replica for people.
pub fn replica_texts(status: &MirrorStatus) -> Vec<String> {
    let listed = status.replicas.iter().filter(|replica| !replica.is(ReplicaState::Removed));
    listed.map(|replica| replica_text(replica, status.nosync_bytes)).collect()
}

/// A replica of a mirror in which so many bytes may differ between replicas.
fn replica_text(replica: &ReplicaStatus, nosync_bytes: u64) -> String {
    // Its label says no more than that it lacks no write; after a crash a write may be on one replica alone.
    let state = match nosync_bytes {
        1.. if replica.is(ReplicaState::InSync) => {
            format!("{} not compared yet, the rest in sync", ByteCount::new(nosync_bytes))
        }
        _ => state_text(&replica.state),
    };
    let out_of_sync = match replica.out_of_sync_bytes {
        0 => String::new(),
        bytes if replica.is(ReplicaState::OutOfSync) => format!(": up to {}", ByteCount::new(bytes)),
        bytes => format!(", out of sync: up to {}", ByteCount::new(bytes)),
    };
    let offline = if replica.online { "" } else { ", offline" };
    let by_name = if replica.has_label_room { "" } else { ", without a label: known only by its name" };
    let repaired = match replica.repaired_blocks {
        0 => String::new(),
        blocks => format!(", {blocks} repaired"),
    };
    let stale = match replica.stale_blocks {
        0 => String::new(),
        blocks => format!(", {blocks} older copies kept"),
    };
    let error = replica.last_error.as_ref().map_or(String::new(), |why| format!(": {why}"));
    let damage = replica.damage.as_ref().filter(|damage| damage.has_any());
    let damage = damage.map_or(String::new(), |damage| format!("; {}", damage.to_text()));
    let unknown = replica.damage.as_ref().is_some_and(|damage| !damage.not_asked.is_empty());
    let unknown = if unknown { "; its server's list of bad blocks is not available here" } else { "" };
    let files: String = replica.file_errors.iter().map(|file| format!("; {}", file.to_text())).collect();
    let lost: String = replica.lost_metadata.iter().map(|lost| format!("; {lost}")).collect();
    format!(
        "{}: {state}{out_of_sync}{offline}{by_name}{repaired}{stale}{error}{damage}{unknown}{files}{lost}",
        replica.name
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_in_a_line_names_its_state_once() {
        let text_of = |state: &str, online, out_of_sync_bytes, nosync_bytes| {
            let status = ReplicaStatus {
                name: "b".to_owned(),
                state: state.to_owned(),
                online,
                has_label_room: true,
                last_error: Some("refused".to_owned()).filter(|_| !online),
                out_of_sync_bytes,
                resynced_bytes: 0,
                repaired_blocks: u64::from(online),
                stale_blocks: 0,
                failures: 0,
                lost_connections: Vec::new(),
                file_errors: Vec::new(),
                lost_metadata: Vec::new(),
                damage: None,
            };
            replica_text(&status, nosync_bytes)
        };
        let text = |state: &str, online, out_of_sync_bytes| text_of(state, online, out_of_sync_bytes, 0);
        assert_eq!(text("in_sync", true, 0), "b: in sync, 1 repaired");
        assert_eq!(text("in_sync", false, 0), "b: in sync, offline: refused");
        assert_eq!(text("out_of_sync", false, 1 << 16), "b: out of sync: up to 64 KiB, offline: refused");
        assert_eq!(text("resyncing", true, 1 << 16), "b: resyncing, out of sync: up to 64 KiB, 1 repaired");
        // What is not compared after a crash is not called in sync.
        let not_compared = text_of("in_sync", true, 0, 1 << 20);
        assert_eq!(not_compared, "b: 1 MiB not compared yet, the rest in sync, 1 repaired");
        assert_eq!(text_of("out_of_sync", false, 1 << 16, 1 << 20), text("out_of_sync", false, 1 << 16));
    }
}
