//! The workers of a verify: on each core a few pieces in flight keep the device busy.
//!
//! A target that several readers may open is opened once more on every other core: checksums then run at the speed of memory
//! and not of one core.

use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use sealblock_block::Device;
use sealblock_runtime_reactor::{Cores, Placement};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, Cause, OpenTarget, StackError, config, open};

use super::job::VerifyJob;
use crate::interrupt;

/// Pieces in flight on one core.
const LANES: usize = 2;
/// Pieces in flight at another host, which has cores of its own and a network latency.
const LANES_AWAY: usize = 16;

/// Executes the job until its end or a signal.
pub(super) async fn run(job: &Arc<VerifyJob>, opened: &OpenTarget) -> Result<(), StackError> {
    let cores = available_parallelism().map_or(1, usize::from);
    match opened.target() {
        target if cores > 1 && shareable(target) && job.is_long() && !job.repairs() && !job.is_alone() => {
            on_cores(job, target, cores).await?
        }
        _ => on_this_core(job, opened).await?,
    }
    if interrupt::came() { Ok(()) } else { job.check_sync_again(opened).await }
}

async fn on_this_core(job: &VerifyJob, opened: &OpenTarget) -> Result<(), StackError> {
    let lanes = match (job.is_alone(), opened.device.abilities().offloads) {
        (true, _) => 1,
        (false, true) => LANES_AWAY,
        (false, false) => LANES,
    };
    try_join_all((0..lanes).map(|_| job.run(opened))).await.map(drop)
}

async fn on_cores(job: &Arc<VerifyJob>, target: &TargetName, cores: usize) -> Result<(), StackError> {
    let cores =
        Cores::start(Placement::Count(cores), config()).map_err(|error| sealblock_stack::start_error(&error))?;
    let handles = cores.handles();
    let calls = handles.iter().map(|handle| {
        let (job, target) = (job.clone(), target.clone());
        handle.call(move || async move {
            open(&target, Access::ReadOlder).await?.close_after(async |opened| on_this_core(&job, opened).await).await
        })
    });
    let results = join_all(calls).await;
    cores.shutdown(Duration::from_secs(1));
    for result in results {
        result.map_err(|gone| StackError::new(Cause::Io, "verify", gone).on(target))??;
    }
    Ok(())
}

/// True if another core can open the target and read the same blocks.
fn shareable(target: &TargetName) -> bool {
    match (target, target.inner()) {
        // Each reader would count for itself which request is to fail.
        (TargetName::Fault { .. }, _) => false,
        (leaf, []) => leaf.path().is_some(),
        (_, inner) => inner.iter().all(shareable),
    }
}
