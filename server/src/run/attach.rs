//! What `sealblock attach` runs: opens a target, attaches it as a block device, and serves it until a signal arrives or
//! it is detached.
//!
//! A signal removes the block device unless it is in use; then it stays, and its requests wait for the next server. So
//! a mounted file system survives an update of its server, and a server that is stopped too early loses nothing.

use std::path::PathBuf;
use std::pin::pin;

use futures_util::future::{Either, FutureExt, select};
use sealblock_runtime_reactor::{Config, CoreHandle, Cores, Placement, Reactor, ShutdownSignal, shutdown_signal};
use sealblock_stack::target::TargetName;
use sealblock_stack::{StackError, Usage};
use serde::Serialize;

use crate::devices::{DeviceTable, ServedDevice};
use crate::events::{AttachedInfo, Event, EventSender};
use crate::exports::block_device::{BlockDevice, Ended, check_backend};
use crate::plan::{BlockDevicePlan, NamespacePlan};
use crate::run::service::{ServiceState, notify};
use crate::run::{SHUTDOWN_GRACE, SPIN_US};

/// What is to be attached, and how.
#[derive(Clone, Debug)]
pub struct AttachPlan {
    /// The target.
    pub target: TargetName,
    /// What it is opened for, if it is a member of a group.
    pub usage: Usage,
    /// How it is attached.
    pub block_device: BlockDevicePlan,
}

/// What happens while a target is attached.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum AttachEvent {
    /// The block device exists.
    Attached(AttachedInfo),
    /// It was removed, because a signal arrived or it was detached.
    Detached {
        /// Its device node.
        path: PathBuf,
    },
    /// A signal arrived while it is in use: it stays, and its requests wait for the next server.
    Left {
        /// Its device node.
        path: PathBuf,
    },
}

/// Attaches until a signal or `detach` ends it, and passes events to `report`.
///
/// # Errors
/// If it could not be attached, or the target could not be closed cleanly.
pub fn run(plan: &AttachPlan, report: impl Fn(&AttachEvent)) -> Result<(), StackError> {
    let failed = |error| sealblock_stack::start_error(&error);
    // This thread only coordinates; the cores handle blocks.
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).map_err(failed)?;
    let config = Config { spin_us: SPIN_US, ..Config::default() };
    let cores = Cores::start(Placement::Count(plan.block_device.queues.into()), config).map_err(failed)?;
    check_backend(&cores).map_err(|error| error.on(&plan.target))?;
    let served = reactor.block_on(live(plan, &cores.handles(), &report));
    match served {
        Ok(Ended::Gone) => _ = cores.shutdown(SHUTDOWN_GRACE),
        // Commands for a block device that still exists, or of a device that did not close, end only with the process,
        // and a core would wait for them.
        Ok(Ended::Left) | Err(_) => std::mem::forget(cores),
    }
    served.map(drop)
}

async fn live(plan: &AttachPlan, cores: &[CoreHandle], report: &impl Fn(&AttachEvent)) -> Result<Ended, StackError> {
    // From here on a signal requests an orderly end, even while volumes are being opened.
    let mut signal = shutdown_signal();
    // The first poll installs its handlers.
    let _ = (&mut signal).now_or_never();
    let table = DeviceTable::new(cores.to_vec(), EventSender::here(ignore));
    let device = table.open(&namespace(plan)).await?;
    let served = attach(plan, cores, &device, signal, report).await;
    let closed = table.close([device], DeviceTable::idle_limit()).await;
    let (ended, path) = served?;
    closed?;
    report(&match ended {
        Ended::Gone => AttachEvent::Detached { path },
        Ended::Left => AttachEvent::Left { path },
    });
    Ok(ended)
}

/// Nothing is scrubbed here, so there are no events.
fn ignore(_: &Event) {}

/// The target as the server opens it.
fn namespace(plan: &AttachPlan) -> NamespacePlan {
    NamespacePlan {
        read_only: plan.block_device.read_only,
        usage: plan.usage,
        ..NamespacePlan::new(plan.target.clone())
    }
}

/// Serves an open device until a signal arrives or the block device is detached; returns how it ended.
async fn attach(
    plan: &AttachPlan,
    cores: &[CoreHandle],
    device: &ServedDevice,
    signal: ShutdownSignal,
    report: &impl Fn(&AttachEvent),
) -> Result<(Ended, PathBuf), StackError> {
    let mut served = BlockDevice::make(&plan.block_device, &plan.target, device, cores).await?;
    let path = served.info().path.clone();
    report(&AttachEvent::Attached(served.info().clone()));
    notify(ServiceState::Ready);
    match select(pin!(served.detached()), signal).await {
        // The process that stopped the device deletes it.
        Either::Left((ended, _)) => return ended.map(|()| (Ended::Gone, path)),
        Either::Right((signal, _)) => _ = signal.map_err(|error| StackError::io("wait for signals", &error))?,
    }
    notify(ServiceState::Stopping);
    served.end().await.map(|ended| (ended, path)).map_err(|error| error.on(&plan.target))
}
