//! `sealblock scrub`: how the background scrub of a target is, and what it is to do.
//!
//! The server that serves the target does the work. Without one, the saved state of a target with a path is shown.

pub mod text;
mod watch;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};

use sealblock_block::{Ability, Device, Request, RequestKind, ReservedArea, Response};
use sealblock_scrub::SavedState;
use sealblock_stack::target::{Address, NVME_TCP_PORT, TargetName};
use sealblock_stack::{
    Access, Cause, OpenTarget, StackError, TargetIdentity, device_error, on_reactor, open, shell_word,
};

use crate::cli::{Scrub, ScrubCommand, ScrubStart, Scrubbed, ServedName};
use crate::exit::Exit;
use crate::interrupt;
use crate::report::{attributed, note, note_lost_answers, print_report, say};
use sealblock_server::control::client::{FoundServer, find, not_asked};
use sealblock_server::control::protocol::{ControlCommand, TargetRef};
use sealblock_server::status::damage::DamageStatus;
use sealblock_server::status::health::Health;
use sealblock_server::status::scrub::ScrubStatus;
use watch::{Until, Waited};

/// Does it.
pub fn run(arguments: &Scrub) -> Result<Exit, StackError> {
    match &arguments.command {
        ScrubCommand::Status(status) => report(&status.what, status.json, status.watch),
        ScrubCommand::Start(start) => begin(start),
        ScrubCommand::Pause(what) => execute(what, "pause the scrub", ControlCommand::ScrubPause),
        ScrubCommand::Stop(what) => execute(what, "stop the scrub", ControlCommand::ScrubStop),
    }
}

fn begin(start: &ScrubStart) -> Result<Exit, StackError> {
    const ACTION: &str = "start the scrub";
    let from = start.from.map(|lba| lba.get());
    let rate = start.rate.map(|rate| rate.bytes_per_second());
    let found = find_server(&start.what)?.ok_or_else(|| unserved(ACTION, &start.what.target))?;
    let status = found.scrub_command(ACTION, ControlCommand::ScrubStart { from, rate })?;
    if start.wait {
        return wait(&found, status, start.json, Until::End);
    }
    print_report(start.json, &status, || attributed(&text::line(&status), found.stranger()))?;
    Ok(Exit::Clean)
}

fn report(what: &Scrubbed, json: bool, watch: bool) -> Result<Exit, StackError> {
    let status = match find_server(what)? {
        Some(found) if watch => return wait(&found, found.scrub_status()?, json, Until::EndOrUnread),
        Some(found) => {
            let status = found.scrub_status()?;
            print(&status, json, found.stranger())?;
            status
        }
        None => {
            let status = saved(what)?;
            print(&status, json, None)?;
            status
        }
    };
    Ok(Exit::from(status.health()))
}

fn print(status: &ScrubStatus, json: bool, stranger: Option<String>) -> Result<(), StackError> {
    print_report(json, status, || attributed(&text::to_text(status), stranger))?;
    if let Some(why) = status.why_older() {
        note(&format_args!("{}: blocks may be older than what was written: {why}", status.target));
    }
    Ok(())
}

/// Waits for the end of the run and reports what it found.
fn wait(found: &FoundServer, first: ScrubStatus, json: bool, until: Until) -> Result<Exit, StackError> {
    match watch::wait(found, first, json, until)? {
        Waited::Unread(status) => Ok(Exit::from(status.health())),
        Waited::Ended(status) => {
            print(&status, json, found.stranger())?;
            // After a pause the rest is unchecked.
            let is_held = status.run.is_some() && status.health() == Health::Healthy;
            Ok(if is_held { Exit::Incomplete } else { Exit::from(status.health()) })
        }
        Waited::Interrupted(status) => {
            print_report(json, &*status, || attributed(&text::line(&status), found.stranger()))?;
            let how_far = format!("at block {}; the scrub continues", status.position);
            let target = shell_word(&status.target);
            let go_on =
                format!("`sealblock scrub status {target} --watch`; to stop it, `sealblock scrub stop {target}`");
            interrupt::report(format!("waiting for the scrub of {target}"), how_far, go_on);
            Ok(Exit::Interrupted)
        }
    }
}

fn execute(what: &Scrubbed, doing: &str, command: ControlCommand) -> Result<Exit, StackError> {
    let found = find_server(what)?.ok_or_else(|| unserved(doing, &what.target))?;
    let status = found.scrub_command(doing, command)?;
    say(&attributed(&text::line(&status), found.stranger()))?;
    Ok(Exit::Clean)
}

fn find_server(what: &Scrubbed) -> Result<Option<FoundServer>, StackError> {
    find(&name_of(&what.target)?, what.control.as_deref())
}

fn unserved(doing: &str, target: &ServedName) -> StackError {
    unserved_with(doing, format!("`sealblock serve {}`; `sealblock verify` needs no server; --control PATH for a server with its own control socket", shell_word(target)))
        .on(target)
}

/// No server of this user or of root has the target.
pub fn unserved_with(doing: &str, advice: impl Into<String>) -> StackError {
    let others = not_asked().map_or(String::new(), |others| format!("; {others}"));
    let why = format!("no server of this user on this machine serves it{others}");
    StackError::new(Cause::Unreachable, doing, why).advise(advice)
}

/// What servers know a target by.
pub fn name_of(target: &ServedName) -> Result<TargetRef, StackError> {
    let name = TargetRef { text: target.to_string(), ..TargetRef::default() };
    Ok(match target {
        ServedName::Subsystem(nqn, nsid) => {
            TargetRef { nqn: Some(nqn.to_string()), nsid: nsid.map(|nsid| nsid.get()), ..name }
        }
        ServedName::Target(TargetName::NvmeTcp { address, nqn, nsid, .. }) => {
            let resolved = resolve(address);
            let resolved = resolved.map_err(|error| StackError::io("find the server", &error).on(target))?;
            let addresses: Vec<SocketAddr> = resolved.into_iter().filter(|address| is_here(address.ip())).collect();
            if addresses.is_empty() {
                let failure = StackError::new(Cause::Refused, "find the server", "it is served by another machine");
                return Err(failure
                    .on(target)
                    .advise("run the command on that machine, or `sealblock verify` from here"));
            }
            TargetRef { nqn: Some(nqn.clone()), nsid: nsid.map(|nsid| nsid.get()), addresses, ..name }
        }
        ServedName::Target(other) => TargetRef { identity: Some(TargetIdentity::of(other)), ..name },
    })
}

fn resolve(address: &Address) -> std::io::Result<Vec<SocketAddr>> {
    let port = address.port.map_or(NVME_TCP_PORT, Into::into);
    (address.host_name().as_str(), port).to_socket_addrs().map(Iterator::collect)
}

/// Whether an address is this machine's: only then something can be bound to it.
fn is_here(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// The saved state of a target that no server has open.
fn saved(what: &Scrubbed) -> Result<ScrubStatus, StackError> {
    const ACTION: &str = "read the scrub state";
    let target = match &what.target {
        ServedName::Target(target) if target.path().is_some() && what.control.is_none() => target,
        other => return Err(unserved(ACTION, other)),
    };
    on_reactor(async {
        let opened = open(target, Access::ReadOlder).await?;
        note_lost_answers(&opened);
        opened.close_after(async |opened| status_of(target, opened).await).await
    })
}

async fn status_of(target: &TargetName, opened: &OpenTarget) -> Result<ScrubStatus, StackError> {
    let (geometry, abilities) = (opened.device.geometry(), opened.device.abilities());
    if abilities.of(RequestKind::ReadReserved) != Ability::Native {
        let why = "it has no reserved area for scrub results, and no server has it open";
        return Err(StackError::new(Cause::Absent, "read the scrub state", why).on(target));
    }
    let doing = "read the saved scrub state";
    let answer = opened.device.execute(Request::read_reserved(ReservedArea::ScrubState)).await;
    let state = match answer.map_err(|error| device_error(doing, &error))? {
        Response::Reserved(bytes) if bytes.is_empty() => SavedState::default(),
        Response::Reserved(bytes) => SavedState::decode(&bytes).map_err(|error| {
            let failure = StackError::new(Cause::Unsuitable, doing, error).on(target);
            failure.advise("serve it: a damaged state is replaced, a state of a later version is kept")
        })?,
        _ => SavedState::default(),
    };
    let record = state.record_for(geometry.capacity_blocks);
    let damage = Some(DamageStatus::of(&opened.info.damage));
    Ok(ScrubStatus { damage, ..ScrubStatus::saved(target.to_string(), &opened.device, &record) })
}
