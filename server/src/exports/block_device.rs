//! A block device of the kernel that this process serves, by ublk: its queues on cores, and starting and stopping it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::{env, io, thread};

use futures_channel::oneshot;
use futures_util::future::{Either, FutureExt, Shared, select};
use sealblock_exports_ublk::{
    AttachError, Attachment, CONTROL_PATH, HostGuard, Options, QueueServer, Users, all_or_none,
};
use sealblock_integrity::guard::crc64;
use sealblock_runtime_reactor::{Backend, CoreAddress, CoreGone, CoreHandle, Cores, JoinHandle, spawn};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};

use crate::devices::ServedDevice;
use crate::events::AttachedInfo;
use crate::exports::offered::derived_identity;
use crate::plan::BlockDevicePlan;

const ACTION: &str = "attach";
/// Taking and dropping it ends the servers of all queues.
type Stop = Rc<Cell<Option<oneshot::Sender<()>>>>;

/// An operation that failed, and the attachment, if it still exists.
type Refused = (StackError, Option<Box<Attachment>>);

/// What happened to a block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// It was removed.
    Gone,
    /// It is in use: it stays, and its requests wait for the next server. Its commands end only with this process.
    Left,
}

/// A block device that exists and is served. Dropping it ends nothing.
pub struct BlockDevice {
    attachment: Attachment,
    queues: JoinHandle<Result<(), StackError>>,
    stop: Stop,
    info: AttachedInfo,
}

impl BlockDevice {
    /// Attaches an open device, served on these cores.
    ///
    /// # Errors
    /// If it cannot; the error has the reason, and nothing of it remains.
    pub async fn make(
        plan: &BlockDevicePlan,
        target: &TargetName,
        device: &ServedDevice,
        cores: &[CoreHandle],
    ) -> Result<BlockDevice, StackError> {
        let made = BlockDevice::made(plan, target, device, cores).await;
        made.map_err(|error| error.on(target))
    }

    async fn made(
        plan: &BlockDevicePlan,
        target: &TargetName,
        device: &ServedDevice,
        cores: &[CoreHandle],
    ) -> Result<BlockDevice, StackError> {
        let options = Options {
            number: plan.number,
            queues: plan.queues,
            depth: plan.depth,
            guard: plan.guard,
            is_read_only: plan.read_only,
            is_write_through: device.gathers_changes,
            identity: identity(target, device)?,
            tampering: plan.tampering,
        };
        let shared = device.shared();
        let attachment = Attachment::make(&options, &shared).map_err(|error| attach_error(&error))?;
        let info = AttachedInfo {
            path: attachment.path(),
            target: target.to_string(),
            taken_over: attachment.is_taken_over(),
            block_size: shared.geometry().block_size.bytes(),
            blocks: shared.geometry().capacity_blocks,
            queues: attachment.queues(),
            depth: attachment.depth(),
            host_guard: plan.guard.map(HostGuard::as_str),
            read_only: plan.read_only,
            write_through: device.gathers_changes,
        };
        let servers = match attachment.servers(&options) {
            Ok(servers) => servers,
            Err(error) => {
                abandon(attachment).await;
                return Err(attach_error(&error));
            }
        };
        let (stop, mut queues) = serve(servers, &beginning_at(cores, shared.only_core()), info.path.clone());
        let started = blocking(attachment, Attachment::start);
        match select(pin!(started), &mut queues).await {
            Either::Left((Ok(attachment), _)) => Ok(BlockDevice { attachment, queues, stop, info }),
            Either::Left((Err((error, attachment)), _)) => {
                drop(stop.take());
                // An error of the queues is a consequence of this one.
                let _ = queues.await;
                if let Some(attachment) = attachment {
                    abandon(*attachment).await;
                }
                Err(error)
            }
            // The driver waits forever for queues that do not fetch; the thread that waits with it ends with the
            // process.
            Either::Right((ended, _)) => {
                Err(ended.unwrap_or(Ok(())).err().unwrap_or_else(|| never_started(&info.path)))
            }
        }
    }

    /// Its description.
    pub fn info(&self) -> &AttachedInfo {
        &self.info
    }

    /// True if its size can change while it exists.
    pub fn can_resize(&self) -> bool {
        self.attachment.can_resize()
    }

    /// Gives it the current size of its device.
    ///
    /// # Errors
    /// The error of the driver; then it keeps its old size.
    pub fn resize(&mut self, device: &ServedDevice) -> Result<(), StackError> {
        let shared = device.shared();
        self.attachment.resize(&shared).map_err(|error| attach_error(&error).on(&device.target))?;
        self.info.blocks = shared.geometry().capacity_blocks;
        Ok(())
    }

    /// The users of the device, if any.
    pub fn users(&self) -> Option<Users> {
        self.attachment.users()
    }

    /// True if the device is no longer served: it was detached, or its queues failed.
    pub fn has_ended(&self) -> bool {
        self.queues.is_finished()
    }

    /// Waits until the device is detached. Cancel safe.
    ///
    /// # Errors
    /// If its queues can no longer be served; the error has the reason.
    pub async fn detached(&mut self) -> Result<(), StackError> {
        (&mut self.queues).await.unwrap_or(Ok(()))
    }

    /// Removes it after the kernel's dirty data for it have been written back and the remaining requests have been
    /// completed. If it is in use, it is left to the next server.
    ///
    /// # Errors
    /// The error of the driver, or of its queues.
    pub async fn end(self) -> Result<Ended, StackError> {
        let BlockDevice { attachment, queues, stop, info } = self;
        // Its servers still complete the remaining requests.
        let attachment = match blocking(attachment, Attachment::stop).await {
            Ok(attachment) => attachment,
            Err((error, attachment)) => {
                let Some(users) = attachment.and_then(|attachment| attachment.users()) else { return Err(error) };
                drop(stop.take());
                queues.await.unwrap_or(Ok(()))?;
                tracing::warn!(device = %info.path.display(), %users, "the device is in use and stays: its requests wait for the next server");
                return Ok(Ended::Left);
            }
        };
        queues.await.unwrap_or(Ok(()))?;
        blocking(attachment, Attachment::delete).await.map_err(|(error, _)| error)?;
        Ok(Ended::Gone)
    }
}

/// Refuses cores without io_uring, through which the driver receives its commands.
///
/// # Errors
/// If they have none; the error has the reason.
pub fn check_backend(cores: &Cores) -> Result<(), StackError> {
    let Some(Backend::Syscalls { reason, .. }) = cores.backend(0) else { return Ok(()) };
    let why = reason.as_ref().map_or_else(|| "it is disabled".to_owned(), ToString::to_string);
    Err(StackError::new(Cause::Unsuitable, ACTION, format!("ublk needs io_uring, and {why}")))
}

/// The cores of queues in turn. If one core executes all requests of the device, it gets the first queue, and with that
/// all requests of a device with a single queue.
fn beginning_at(cores: &[CoreHandle], only: Option<CoreAddress>) -> Vec<CoreHandle> {
    let first = cores.iter().position(|core| Some(core.address()) == only).unwrap_or(0);
    let mut cores = cores.to_vec();
    cores.rotate_left(first);
    cores
}

/// Starts to serve the queues of a block device on cores. If they fail, that is logged at once, because a server that
/// also serves other things does not wait for them.
fn serve(servers: Vec<QueueServer>, cores: &[CoreHandle], path: PathBuf) -> (Stop, JoinHandle<Result<(), StackError>>) {
    let (stop, stopped) = oneshot::channel::<()>();
    let stop: Stop = Rc::new(Cell::new(Some(stop)));
    let stopped = stopped.map(drop).shared();
    let queues = servers.into_iter().zip(cores.iter().cycle()).map(|(server, core)| {
        let stopped: Shared<_> = stopped.clone();
        let core = core.clone();
        async move { queue_result(core.call(move || server.run(stopped)).await) }
    });
    let queues: Vec<_> = queues.collect();
    let stop_others = Rc::clone(&stop);
    let served = async move {
        let served = all_or_none(queues, move || drop(stop_others.take())).await;
        served.inspect_err(|error| {
            tracing::error!(device = %path.display(), %error, "the block device has no server now: its requests wait for another one");
        })
    };
    (stop, spawn(served))
}

/// The identity that another server must have to take over the block device. A target in memory is lost with its
/// server.
fn identity(target: &TargetName, device: &ServedDevice) -> Result<u64, StackError> {
    let identity = match device.content_uuid {
        Some(uuid) => uuid,
        None => derived_from(target, &env::current_dir().map_err(|error| StackError::io(ACTION, &error))?),
    };
    Ok(crc64(&identity))
}

/// Derived from its name, in which relative paths begin at this folder, because the same name is another target
/// elsewhere.
fn derived_from(target: &TargetName, folder: &Path) -> [u8; 16] {
    derived_identity(&target.clone().relative_to(folder), "ublk")
}

/// Removes everything of a block device that was not started.
async fn abandon(attachment: Attachment) {
    let abandoned = blocking(attachment, |attachment| {
        attachment.abandon();
        Ok(())
    });
    // The earlier error is the one to report.
    let _ = abandoned.await;
}

/// Runs a long operation on a separate thread, so that signals are noticed meanwhile.
async fn blocking(
    attachment: Attachment,
    order: impl FnOnce(&mut Attachment) -> Result<(), AttachError> + Send + 'static,
) -> Result<Attachment, Refused> {
    let (send, receive) = oneshot::channel();
    let mut attachment = attachment;
    let work = move || {
        let done = order(&mut attachment);
        // Without a receiver the process is about to exit.
        let _ = send.send(match done {
            Ok(()) => Ok(attachment),
            Err(error) => Err((attach_error(&error), Some(Box::new(attachment)))),
        });
    };
    match thread::Builder::new().name("ublk-control".to_owned()).spawn(work) {
        Ok(_) => receive
            .await
            .unwrap_or_else(|_| Err((StackError::new(Cause::Io, ACTION, "a control command failed"), None))),
        Err(error) => Err((StackError::io("start a thread", &error), None)),
    }
}

fn never_started(path: &Path) -> StackError {
    StackError::new(Cause::Io, ACTION, format!("{} was stopped before it was ready", path.display()))
}

fn queue_result(ended: Result<io::Result<()>, CoreGone>) -> Result<(), StackError> {
    match ended {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(StackError::io("serve a queue", &error)),
        Err(gone) => Err(StackError::new(Cause::Io, "serve a queue", gone)),
    }
}

/// Removes a block device, even one of another server; if it is in use, only with `force`.
///
/// # Errors
/// If it stays; the error has the reason.
pub fn detach(number: u32, force: bool) -> Result<(), StackError> {
    sealblock_exports_ublk::detach(number, force).map_err(|error| of(&error, "detach"))
}

fn attach_error(error: &AttachError) -> StackError {
    of(error, ACTION)
}

/// The error, with advice.
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
        AttachError::Lacks(_) => failure(Cause::Unsuitable).advise("use a newer kernel, or omit the option"),
        AttachError::BlockSize(_) => failure(Cause::Unsuitable),
        AttachError::Limit { .. } => failure(Cause::Usage),
        AttachError::Served { number, .. } | AttachError::NotQuiesced { number } => {
            failure(Cause::Refused).advise(format!("use another --device, or run `sealblock detach {number}` first"))
        }
        AttachError::Waiting { number } => failure(Cause::Refused).advise(format!(
            "use --device {number} to serve that block device again, or run `sealblock detach {number}` first"
        )),
        AttachError::Differs { number, .. } => failure(Cause::Refused).advise(format!(
            "give the target and options that it was attached with, or run `sealblock detach {number}` first"
        )),
        AttachError::Open { .. } => failure(Cause::Refused),
        AttachError::InUse { .. } => failure(Cause::Refused).advise("stop its users first, or use --force"),
        AttachError::WriteBack { .. } => failure(Cause::Io).advise("check its server; --force drops unwritten data"),
        AttachError::Unknown { .. } => failure(Cause::Unreachable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_begin_at_the_core_of_the_device() {
        let config = sealblock_runtime_reactor::Config { pool_arena_bytes: 0, ..Default::default() };
        let cores = Cores::start(sealblock_runtime_reactor::Placement::Count(3), config).unwrap();
        let (cores, of) = (cores.handles(), |core: &CoreHandle| core.address());
        let order = |only| beginning_at(&cores, only).iter().map(of).collect::<Vec<_>>();
        assert_eq!(order(None), [0, 1, 2].map(|at| of(&cores[at])));
        assert_eq!(order(Some(of(&cores[1]))), [1, 2, 0].map(|at| of(&cores[at])));
    }

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
}
