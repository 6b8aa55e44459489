//! What `sealblock attach` runs: opens a target, has the kernel use it as a block device, and serves that until a signal, or until it is
//! detached.
//!
//! At a signal the block device is taken away, unless somebody uses it: then it stays, and its requests wait for the next server. So a
//! mounted file system outlives an update of its server, and a server that is stopped too early loses nothing.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::{env, io, thread};

use futures_channel::oneshot;
use futures_util::future::{Either, FutureExt, LocalBoxFuture, Shared, join, select};
use sealblock_exports_ublk::{AttachError, Attachment, CONTROL_PATH, HostGuard, Options, Tampering, all_or_none};
use sealblock_integrity::guard::crc64;
use sealblock_runtime_reactor::{
    Backend, Config, CoreGone, CoreHandle, Cores, Placement, Reactor, ShutdownSignal, shutdown_signal,
};
use sealblock_scrub::Settings;
use sealblock_stack::identity::new_uuid;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError, Usage};
use serde::Serialize;

use crate::devices::{DeviceTable, ServedDevice};
use crate::events::{Event, EventSender};
use crate::offered::derived_identity;
use crate::plan::NamespacePlan;
use crate::run::{REST, SPIN_US};
use crate::service::{ServiceState, notify};

const DOING: &str = "attaching";
/// Ends the servers of all queues when it is taken and dropped.
type Stop = Rc<Cell<Option<oneshot::Sender<()>>>>;

/// An order that was refused, and what it was for, if that is still there.
type Refused = (StackError, Option<Box<Attachment>>);

/// What is to be attached, and how.
#[derive(Clone, Debug)]
pub struct AttachPlan {
    /// The target.
    pub target: TargetName,
    /// What it is opened for, should it be a member of a group.
    pub usage: Usage,
    /// N of `/dev/ublkbN`; the next free one if nothing is said.
    pub number: Option<u32>,
    /// Queues, and cores to serve them.
    pub queues: u16,
    /// Requests of a queue at once.
    pub depth: u16,
    /// How the kernel protects blocks.
    pub guard: Option<HostGuard>,
    /// It takes no writes.
    pub read_only: bool,
    /// Bits that change on the way, in proofs.
    pub tampering: Option<Tampering>,
}

/// What happens while a target is attached.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum AttachEvent {
    /// The block device is there.
    Attached(AttachedInfo),
    /// It is gone: a signal came, or it was detached.
    Detached {
        /// Its node.
        path: PathBuf,
    },
    /// A signal came while it is in use: it stays, and its requests wait for the next server.
    Left {
        /// Its node.
        path: PathBuf,
    },
}

/// A block device that is there.
#[derive(Serialize)]
pub struct AttachedInfo {
    /// Its node.
    pub path: PathBuf,
    /// What it is.
    pub target: String,
    /// True if it was there, and its last server gone.
    pub taken_over: bool,
    /// Bytes in a block.
    pub block_size: usize,
    /// How many blocks it has.
    pub blocks: u64,
    /// Its queues.
    pub queues: u16,
    /// Requests of a queue at once.
    pub depth: u16,
    /// The checksum by which the kernel protects blocks, if it does.
    pub host_guard: Option<&'static str>,
    /// True if it takes no writes.
    pub read_only: bool,
    /// True if changes are durable before they are answered.
    pub write_through: bool,
}

/// Attaches until a signal ends it or somebody detaches the block device, and says what happens to `report`.
///
/// # Errors
/// What kept it from being attached, or from being left clean.
pub fn run(plan: &AttachPlan, report: impl Fn(&AttachEvent)) -> Result<(), StackError> {
    let failed = |error| sealblock_stack::of_start(&error);
    // This thread only gives orders; blocks are the cores' business.
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).map_err(failed)?;
    let config = Config { spin_us: SPIN_US, ..Config::default() };
    let cores = Cores::start(Placement::Count(plan.queues.into()), config).map_err(failed)?;
    if let Some(Backend::Syscalls { reason, .. }) = cores.backend(0) {
        let why = reason.as_ref().map_or_else(|| "it is turned off".to_owned(), ToString::to_string);
        let failure = StackError::new(Cause::Unsuitable, DOING, format!("ublk needs io_uring, and {why}"));
        return Err(failure.on(&plan.target));
    }
    let served = reactor.block_on(live(plan, &cores.handles(), &report));
    match served {
        Ok(Ended::Gone) => _ = cores.shutdown(REST),
        // Commands for a block device that is still there end with the process and not before, and a core waits for its commands.
        Ok(Ended::Left) | Err(_) => std::mem::forget(cores),
    }
    served.map(drop)
}

/// What became of the block device.
enum Ended {
    Gone,
    Left,
}

async fn live(plan: &AttachPlan, cores: &[CoreHandle], report: &impl Fn(&AttachEvent)) -> Result<Ended, StackError> {
    // From here on a signal is an order to end in good order, even while volumes are being opened.
    let mut signal = shutdown_signal();
    // The first poll installs its handlers.
    let _ = (&mut signal).now_or_never();
    let table = DeviceTable::new(cores.to_vec(), EventSender::here(ignore));
    let device = table.open(&namespace(plan)).await?;
    let served = attach(plan, cores, &device, signal, report).await;
    let closed = table.close([device]).await;
    let (ended, path) = served.map_err(|error| error.on(&plan.target))?;
    closed?;
    report(&match ended {
        Ended::Gone => AttachEvent::Detached { path },
        Ended::Left => AttachEvent::Left { path },
    });
    Ok(ended)
}

/// Nothing is scrubbed here, so nothing happens of its own accord.
fn ignore(_: &Event) {}

/// The target as the server opens it.
fn namespace(plan: &AttachPlan) -> NamespacePlan {
    NamespacePlan {
        nsid: 1,
        target: plan.target.clone(),
        protection: Default::default(),
        read_only: plan.read_only,
        relocate: true,
        usage: plan.usage,
        uuid: None,
        scrub: Settings::default(),
        nbd: None,
    }
}

/// What a server that takes the block device over has to serve as well. What is in memory is gone with its server.
fn identity(plan: &AttachPlan, device: &ServedDevice) -> Result<u64, StackError> {
    let identity = match device.volume_uuid {
        Some(uuid) => uuid,
        None if is_volatile(&plan.target) => new_uuid()?,
        None => derived_from(&plan.target, &env::current_dir().map_err(|error| StackError::io(DOING, &error))?),
    };
    Ok(crc64(&identity))
}

/// By its name, in which relative paths begin at this folder: the same name is another target elsewhere.
fn derived_from(target: &TargetName, folder: &Path) -> [u8; 16] {
    derived_identity(&target.clone().relative_to(folder), "ublk")
}

fn is_volatile(target: &TargetName) -> bool {
    match target {
        TargetName::Memory(_) => true,
        TargetName::Offset { target, .. } | TargetName::Fault { target, .. } => is_volatile(target),
        TargetName::Group { members, .. } => members.iter().any(is_volatile),
        TargetName::File(_)
        | TargetName::Raw(_)
        | TargetName::Linux { .. }
        | TargetName::Null(_)
        | TargetName::NvmeTcp { .. }
        | TargetName::Nbd { .. } => false,
    }
}

/// Attaches an open device; returns how it ended.
async fn attach(
    plan: &AttachPlan,
    cores: &[CoreHandle],
    device: &ServedDevice,
    signal: ShutdownSignal,
    report: &impl Fn(&AttachEvent),
) -> Result<(Ended, PathBuf), StackError> {
    let options = Options {
        number: plan.number,
        queues: plan.queues,
        depth: plan.depth,
        guard: plan.guard,
        is_read_only: plan.read_only,
        is_write_through: device.gathers_changes,
        identity: identity(plan, device)?,
        tampering: plan.tampering,
    };
    let shared = device.shared();
    let attachment = Attachment::make(&options, &shared).map_err(|error| of_attach(&error))?;
    let info = AttachedInfo {
        path: attachment.path(),
        target: plan.target.to_string(),
        taken_over: attachment.is_taken_over(),
        block_size: shared.geometry().block_size.bytes(),
        blocks: shared.geometry().capacity_blocks,
        queues: attachment.queues(),
        depth: attachment.depth(),
        host_guard: plan.guard.map(HostGuard::as_str),
        read_only: plan.read_only,
        write_through: device.gathers_changes,
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let stop: Stop = Rc::new(Cell::new(Some(stop)));
    let servers = match attachment.servers(&options, &shared) {
        Ok(servers) => servers,
        Err(error) => {
            abandon(attachment).await;
            return Err(of_attach(&error));
        }
    };
    let stopped = stopped.map(drop).shared();
    let queues = servers.into_iter().zip(cores.iter().cycle()).map(|(server, core)| {
        let stopped: Shared<_> = stopped.clone();
        let core = core.clone();
        async move { of_queue(core.call(move || server.run(stopped)).await) }
    });
    let stop_others = Rc::clone(&stop);
    let mut queues = all_or_none(queues.collect::<Vec<_>>(), move || drop(stop_others.take())).boxed_local();
    let started = blocking(attachment, Attachment::start);
    let attachment = match select(pin!(started), &mut queues).await {
        Either::Left((Ok(attachment), _)) => attachment,
        Either::Left((Err((error, attachment)), _)) => {
            drop(stop.take());
            // An error of the queues is a consequence of this one.
            let _: Result<(), StackError> = queues.await;
            if let Some(attachment) = attachment {
                abandon(*attachment).await;
            }
            return Err(error);
        }
        // The driver waits for queues that do not fetch, for ever: the thread that waits with it ends with the process.
        Either::Right((ended, _)) => return Err(ended.err().unwrap_or_else(|| never_started(&info.path))),
    };
    report(&AttachEvent::Attached(info));
    notify(ServiceState::Ready);
    until_ended(attachment, queues, &stop, signal).await
}

/// Serves until a signal comes or the block device is detached.
async fn until_ended(
    attachment: Attachment,
    mut queues: LocalBoxFuture<'_, Result<(), StackError>>,
    stop: &Stop,
    signal: ShutdownSignal,
) -> Result<(Ended, PathBuf), StackError> {
    let path = attachment.path();
    match select(&mut queues, signal).await {
        Either::Left((ended, _)) => {
            // Whoever stopped it deletes it.
            return ended.map(|()| (Ended::Gone, path));
        }
        Either::Right((signal, _)) => _ = signal.map_err(|error| StackError::io("waiting for signals", &error))?,
    }
    notify(ServiceState::Stopping);
    if attachment.is_in_use() {
        drop(stop.take());
        queues.await?;
        tracing::warn!(device = %path.display(), "the device is in use: it stays, and its requests wait for the next server");
        return Ok((Ended::Left, path));
    }
    // Its servers answer what is still asked.
    let (stopped, ended) = join(blocking(attachment, Attachment::stop), queues).await;
    let attachment = stopped.map_err(|(error, _)| error)?;
    ended?;
    blocking(attachment, Attachment::delete).await.map_err(|(error, _)| error)?;
    Ok((Ended::Gone, path))
}

/// Leaves nothing of a block device that was not started.
async fn abandon(attachment: Attachment) {
    let abandoned = blocking(attachment, |attachment| {
        attachment.abandon();
        Ok(())
    });
    // It is the failure before this one that counts.
    let _ = abandoned.await;
}

/// Gives an order whose end is far, on a thread of its own: the signal is heard meanwhile.
async fn blocking(
    attachment: Attachment,
    order: impl FnOnce(&mut Attachment) -> Result<(), AttachError> + Send + 'static,
) -> Result<Attachment, Refused> {
    let (send, receive) = oneshot::channel();
    let mut attachment = attachment;
    let work = move || {
        let done = order(&mut attachment);
        // The process is about to end if nobody waits.
        let _ = send.send(match done {
            Ok(()) => Ok(attachment),
            Err(error) => Err((of_attach(&error), Some(Box::new(attachment)))),
        });
    };
    match thread::Builder::new().name("ublk-control".to_owned()).spawn(work) {
        Ok(_) => receive.await.unwrap_or_else(|_| Err((StackError::new(Cause::Io, DOING, "an order failed"), None))),
        Err(error) => Err((StackError::io("starting a thread", &error), None)),
    }
}

fn never_started(path: &Path) -> StackError {
    StackError::new(Cause::Io, DOING, format!("{} was stopped before it was there", path.display()))
}

fn of_queue(ended: Result<io::Result<()>, CoreGone>) -> Result<(), StackError> {
    match ended {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(StackError::io("serving a queue", &error)),
        Err(gone) => Err(StackError::new(Cause::Io, "serving a queue", gone)),
    }
}

/// Takes a block device away, whoever serves it; one that is in use only by `force`.
///
/// # Errors
/// Why it stays.
pub fn detach(number: u32, force: bool) -> Result<(), StackError> {
    sealblock_exports_ublk::detach(number, force).map_err(|error| of(&error, "detaching"))
}

fn of_attach(error: &AttachError) -> StackError {
    of(error, DOING)
}

/// An error, with what would help.
fn of(error: &AttachError, doing: &str) -> StackError {
    let failure = |cause| StackError::new(cause, doing, error);
    match error {
        AttachError::Control(refused) => {
            match refused.errno().map(|errno| io::Error::from_raw_os_error(errno).kind()) {
                Some(io::ErrorKind::NotFound) => failure(Cause::Unreachable)
                    .advise(format!("`modprobe ublk_drv`, which makes {CONTROL_PATH} (Linux 6.5 and later)")),
                Some(io::ErrorKind::PermissionDenied) => failure(Cause::Refused).advise("root"),
                _ => failure(Cause::Io),
            }
        }
        AttachError::Lacks(_) => failure(Cause::Unsuitable).advise("a newer kernel, or less of it"),
        AttachError::BlockSize(_) => failure(Cause::Unsuitable),
        AttachError::Limit { .. } => failure(Cause::Usage),
        AttachError::Served { number, .. } | AttachError::NotQuiesced { number } => {
            failure(Cause::Refused).advise(format!("another --device, or `sealblock detach {number}` first"))
        }
        AttachError::Differs { number, .. } => failure(Cause::Refused)
            .advise(format!("the target and options that it was attached with, or `sealblock detach {number}` first")),
        AttachError::Open { .. } => failure(Cause::Refused),
        AttachError::InUse { .. } => failure(Cause::Refused).advise("unmounting it, or --force"),
        AttachError::Unknown { .. } => failure(Cause::Unreachable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(name: &str) -> TargetName {
        name.parse().unwrap()
    }

    #[test]
    fn a_name_is_another_target_in_another_folder_and_of_other_blocks() {
        let derived = |name: &str, folder: &str| derived_from(&target(name), Path::new(folder));
        for name in ["offset:0..9,v", "stripe:a,b", "raw:v"] {
            assert_eq!(derived(name, "/nowhere/a"), derived(name, "/nowhere/a"));
            assert_ne!(derived(name, "/nowhere/a"), derived(name, "/nowhere/b"), "{name}");
        }
        assert_ne!(derived("offset:0..9,v", "/nowhere"), derived("offset:10..19,v", "/nowhere"));
        assert_eq!(derived("raw:/nowhere/v", "/a"), derived("raw:v", "/nowhere"));
    }

    #[test]
    fn what_is_in_memory_anywhere_is_gone_with_its_server() {
        for name in ["mem:1MiB", "offset:0..9,mem:1MiB", "mirror:a,[fault:[flip@5],mem:1MiB]"] {
            assert!(is_volatile(&target(name)), "{name}");
        }
        for name in ["v", "raw:v", "null:1MiB", "mirror:a,b", "nbd://localhost/e"] {
            assert!(!is_volatile(&target(name)), "{name}");
        }
    }
}
