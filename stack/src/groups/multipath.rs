//! Opens multipath devices: checks that all paths lead to one device, reopens paths, and chooses timeouts.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::{LocalBoxFuture, join_all};
use sealblock_block::{DeviceOpener, DynDevice, Error, ErrorKind as BlockFailure};
use sealblock_layers_multipath::{LateChanges, MultipathLayer, PathConfig, Quiesce, RetryPolicy};
use sealblock_media_nvme_tcp::ListedIdentities;
use sealblock_runtime_reactor::{now, sleep, timeout};

use crate::error::{Cause, StackError, printable};
use crate::identity::{device_id, namespace_text, uuid_text};
use crate::opened::closing::CloseLimit;
use crate::opened::held::{
    Access, CloseHandle, Members, Usage, close_all, forget_lost, lost_answers, received_bytes, settle,
};
use crate::opened::info::TargetInfo;
use crate::opened::{OpenTarget, Opener};
use crate::program::ReactorClock;
use crate::remote::{SHORT_TIMEOUT, is_remote, remotes, with_short_timeouts};
use crate::target::{GroupKind, RemoteOptions, TargetName};

/// The paths of one device.
struct Paths {
    paths: Vec<Rc<Path>>,
    late: RefCell<Option<LateChanges>>,
}

/// Devices that were closed although a lost path may still deliver changes, and until when it may, on all cores of this process.
static CLOSED_LATE: Mutex<Vec<(String, Instant)>> = Mutex::new(Vec::new());

fn closed_late() -> MutexGuard<'static, Vec<(String, Instant)>> {
    CLOSED_LATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A path, which is reopened after each loss.
struct Path {
    target: TargetName,
    access: Access,
    usage: Usage,
    opener: Opener,
    /// The identity of the device, the same for all paths; `None` before one was open.
    identity: Rc<RefCell<Option<String>>>,
    /// What its server lists of the device that it has open, as of the last open.
    listed: RefCell<ListedIdentities>,
    /// The open path, as long as the layer uses it.
    open: RefCell<Weak<Live>>,
    /// Bytes received in earlier opens.
    received_bytes: Rc<Cell<u64>>,
}

/// What an open path holds besides its device, which keeps it. Dropping it closes its connections at once.
struct Live {
    held: Vec<CloseHandle>,
    received_bytes: Rc<Cell<u64>>,
}

impl Drop for Live {
    fn drop(&mut self) {
        let more = received_bytes(&self.held).unwrap_or(0);
        self.received_bytes.set(self.received_bytes.get() + more);
    }
}

impl Paths {
    /// Paths for these targets, none of them open yet.
    fn of(paths: &[TargetName], access: Access, usage: Usage, opener: Opener) -> Paths {
        let identity = Rc::default();
        let path = |path: &TargetName| {
            let (target, identity) = (with_short_timeouts(path), Rc::clone(&identity));
            let (listed, open, received_bytes) = Default::default();
            Rc::new(Path { target, access, usage, opener, identity, listed, open, received_bytes })
        };
        Paths { paths: paths.iter().map(path).collect(), late: RefCell::default() }
    }

    fn identity(&self) -> Option<String> {
        self.paths.first()?.identity.borrow().clone()
    }

    /// Waits until no path that was lost can deliver a change any more.
    async fn settle(&self, limit: CloseLimit) -> Result<(), Error> {
        let Some(late) = self.late.borrow().clone() else { return Ok(()) };
        let settled = settle(limit, async { timeout(late.longest, late.settled()).await == Ok(true) }).await;
        if let (Err(_), Some(identity)) = (&settled, self.identity()) {
            closed_late().push((identity, now() + late.longest));
        }
        settled
    }

    /// Waits for what an earlier device of these paths has left.
    async fn wait_for_earlier(&self) {
        let identity = self.identity();
        let until = {
            let mut closed = closed_late();
            closed.retain(|(_, until)| *until > now());
            closed.iter().filter(|(of, _)| Some(of) == identity.as_ref()).map(|(_, until)| *until).max()
        };
        if let Some(until) = until {
            tracing::warn!("waiting until a path that was lost earlier can deliver nothing more");
            sleep(until.saturating_duration_since(now())).await;
        }
    }
}

impl Members for Paths {
    fn close(&self, limit: CloseLimit) -> LocalBoxFuture<'_, Result<(), Error>> {
        Box::pin(async move {
            let settled = self.settle(limit).await;
            let open: Vec<_> = self.paths.iter().filter_map(|path| path.open.borrow().upgrade()).collect();
            let closings = join_all(open.iter().map(|live| close_all(&live.held, limit)));
            closings.await.into_iter().fold(settled, Result::and)
        })
    }

    fn received_bytes(&self) -> Option<u64> {
        let each = self.paths.iter().map(|path| {
            let now = path.open.borrow().upgrade().and_then(|live| received_bytes(&live.held));
            is_remote(&path.target).then(|| now.unwrap_or(0) + path.received_bytes.get())
        });
        each.flatten().reduce(u64::saturating_add)
    }

    fn lost_answers(&self) -> Vec<String> {
        let open = self.paths.iter().filter_map(|path| path.open.borrow().upgrade());
        open.flat_map(|live| lost_answers(&live.held)).collect()
    }

    fn forget_lost(&self) -> LocalBoxFuture<'_, Result<(), Error>> {
        let open = self.paths.iter().filter_map(|path| path.open.borrow().upgrade());
        let forgetting = join_all(open.map(|live| async move { forget_lost(&live.held).await }));
        Box::pin(async { forgetting.await.into_iter().fold(Ok(()), Result::and) })
    }
}

impl Path {
    /// Opens the path, if it leads to the device that the others lead to.
    async fn open(&self) -> Result<(DynDevice, TargetInfo), StackError> {
        let OpenTarget { device, info, held, .. } = self.open_checked().await?;
        let live = Rc::new(Live { held, received_bytes: Rc::clone(&self.received_bytes) });
        self.open.replace(Rc::downgrade(&live));
        if let Some(remote) = info.all().iter().find_map(|info| info.remote.as_ref()) {
            self.listed.replace(remote.identities.clone());
        }
        Ok((device.with_companion(live), info))
    }

    /// Opens the target, and closes it again if it is another device.
    async fn open_checked(&self) -> Result<OpenTarget, StackError> {
        let opened = (self.opener)(&self.target, self.access, self.usage).await?;
        let Err(why) = self.check(&opened.info) else { return Ok(opened) };
        let _ = opened.close(Ok(())).await;
        Err(StackError::new(Cause::Unsuitable, "open", why)
            .on(&self.target)
            .advise("give paths to one device: copies of a volume have the same UUID, and are different devices"))
    }

    fn check(&self, info: &TargetInfo) -> Result<(), String> {
        let Some(identity) = identity(&self.target, info) else {
            return Err("it has no identity to compare with the other paths".to_owned());
        };
        let mut known = self.identity.borrow_mut();
        let expected = known.get_or_insert_with(|| identity.clone());
        if *expected == identity {
            return Ok(());
        }
        Err(format!("it leads to another device than the other paths: {identity} instead of {expected}"))
    }

    fn source(self: &Rc<Self>) -> DeviceOpener {
        let path = Rc::clone(self);
        DeviceOpener::new(self.target.to_string(), move || {
            let path = Rc::clone(&path);
            async move { path.open().await.map(|(device, _)| device).map_err(unreachable) }
        })
    }

    /// Opens the path again beside the one that may be open. A target of sealblock delays that until no request of the lost
    /// path is in flight; another device knows nothing of them.
    fn quiesce(self: &Rc<Self>) -> Option<Quiesce> {
        is_remote(&self.target).then(|| {
            let path = Rc::clone(self);
            let opener = DeviceOpener::new(self.target.to_string(), move || {
                let path = Rc::clone(&path);
                async move {
                    let opened = path.open_checked().await.map_err(unreachable)?;
                    let (device, _, closer) = opened.share();
                    let _ = closer.close(CloseLimit::OF_PROGRAM).await;
                    Ok(device)
                }
            });
            let path = Rc::clone(self);
            // The first one is drawn by the server that has the device open.
            let target = Rc::new(move || path.listed.borrow().get().first().copied());
            Quiesce { opener, target }
        })
    }
}

fn unreachable(failure: StackError) -> Error {
    BlockFailure::Unreachable { reason: failure.in_short() }.into()
}

/// Opens the paths, all at once. One is enough.
pub(crate) async fn open(
    target: &TargetName,
    paths: &[TargetName],
    access: Access,
    usage: Usage,
    opener: Opener,
) -> Result<OpenTarget, StackError> {
    // Every path has the same label; the layer hides it.
    let paths = Paths::of(paths, access, usage.hidden(), opener);
    let (mut configs, mut info, mut failed) = (Vec::new(), Vec::new(), None);
    for (path, opened) in paths.paths.iter().zip(join_all(paths.paths.iter().map(|path| path.open())).await) {
        let device = match opened {
            Ok((device, of)) => {
                info.push(of);
                Some(device)
            }
            Err(failure) if failure.cause() == Cause::Unreachable => {
                failed = failed.or(Some(failure));
                None
            }
            Err(failure) => {
                let _ = paths.close(CloseLimit::OF_PROGRAM).await;
                return Err(failure);
            }
        };
        configs.push(PathConfig { source: path.source(), quiesce: path.quiesce(), device });
    }
    if let (true, Some(failure)) = (info.is_empty(), failed) {
        return Err(failure);
    }
    if access.writes() {
        paths.wait_for_earlier().await;
    }
    join(target, paths, configs, info).await
}

/// The open paths as one device.
async fn join(
    target: &TargetName,
    paths: Paths,
    configs: Vec<PathConfig>,
    info: Vec<TargetInfo>,
) -> Result<OpenTarget, StackError> {
    match MultipathLayer::new(configs, ReactorClock, retry_policy(&paths, &info)) {
        Ok((device, worker)) => {
            paths.late.replace(Some(device.late_changes()));
            drop(sealblock_runtime_reactor::spawn(worker.run()));
            let info = TargetInfo { paths: Some(device.monitor()), ..TargetInfo::over("multipath", info) };
            Ok(OpenTarget::new(target, device, info, vec![CloseHandle::Members(Rc::new(paths))]))
        }
        Err(error) => {
            let _ = paths.close(CloseLimit::OF_PROGRAM).await;
            Err(StackError::new(Cause::Unsuitable, "open", error).on(target))
        }
    }
}

/// The timeouts and retries of the layer for these paths.
fn retry_policy(paths: &Paths, info: &[TargetInfo]) -> RetryPolicy {
    let usual = RetryPolicy::default();
    let longest = |of: fn(&RemoteOptions) -> Option<Duration>| {
        let remotes = paths.paths.iter().flat_map(|path| remotes(&path.target));
        remotes.filter_map(of).max().unwrap_or(SHORT_TIMEOUT)
    };
    let is_volatile = |info: &&TargetInfo| info.remote.as_ref().is_none_or(|remote| remote.volatile_write_cache);
    let leaves = info.iter().flat_map(TargetInfo::all).filter(|info| info.inner.is_empty());
    RetryPolicy {
        // Longer than the timeouts of the devices, which fail first with a better reason.
        request_timeout: usual.request_timeout.max(longest(|options| options.timeout) * 3),
        // A target with traffic based keep alive may need twice the keep-alive timeout to notice a lost host.
        quiesce_time: longest(|options| options.keep_alive) * 2 + Duration::from_secs(1),
        has_volatile_cache: leaves.filter(is_volatile).count() > 0,
        ..usual
    }
}

/// The identity of a device, if it has one.
fn identity(target: &TargetName, info: &TargetInfo) -> Option<String> {
    let below = || info.inner.first();
    match target {
        TargetName::Offset { range, target } => Some(format!("blocks {range} of {}", identity(target, below()?)?)),
        TargetName::Fault { target, .. } => identity(target, below()?),
        TargetName::Group { kind: GroupKind::Stripe { chunk, .. }, members } => {
            let each: Option<Vec<String>> =
                members.iter().zip(&info.inner).map(|(member, of)| identity(member, of)).collect();
            let chunk = chunk.unwrap_or(sealblock_layers_stripe::CHUNK);
            Some(format!("a stripe in chunks of {} bytes of {}", chunk.get(), each?.join(" and ")))
        }
        TargetName::Group { kind: GroupKind::Multipath, members } => identity(members.first()?, below()?),
        TargetName::Group { kind: GroupKind::Mirror, .. } => None,
        _ => leaf(info),
    }
}

fn leaf(info: &TargetInfo) -> Option<String> {
    let Some(volume) = &info.volume else { return info.remote.as_ref().map(namespace_text) };
    let volume = format!("volume {}", uuid_text(&volume.uuid));
    // A copy has the identity of the volume, and is another device. Block devices may be paths to one disk, which the kernel knows.
    Some(match &info.file {
        None => volume,
        Some(file) if file.is_block_device => match device_id(file) {
            Some(id) => format!("{volume} on device {}", printable(&id)),
            None => format!("{volume} on block device {}", file.device),
        },
        Some(file) => format!("{volume} in file {}:{}", file.device, file.inode),
    })
}
