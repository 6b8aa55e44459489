//! A scrub as others reach it, from any core.

use std::num::NonZeroU64;
use std::rc::Rc;

use sealblock_runtime_reactor::{CoreGone, CoreHandle, CoreLocal};
use sealblock_scrub::{Refusal, Settings};

use super::ScrubTask;
use crate::control::protocol::{ControlCommand, ControlError, ProblemKind};
use crate::control::status::ScrubStatus;

/// A way to the scrub of a device.
#[derive(Clone)]
pub struct ScrubHandle {
    core: CoreHandle,
    keeper: CoreLocal<ScrubTask>,
}

impl ScrubHandle {
    /// The way to a keeper on this core.
    pub fn new(core: CoreHandle, keeper: CoreLocal<ScrubTask>) -> ScrubHandle {
        ScrubHandle { core, keeper }
    }

    /// Has these settings count from now on.
    pub async fn configure(&self, settings: Settings) {
        // A core that has stopped scrubs nothing, and its devices say so louder.
        let _ = self.call(move |keeper| async move { keeper.configure(settings) }).await;
    }

    /// Ends it for good; what it remembers is written then.
    pub async fn close(&self) {
        if let Err(gone) = self.call(|keeper| async move { keeper.close().await }).await {
            tracing::warn!("a scrub was not ended in good order: {gone}");
        }
    }

    /// Does what was ordered; tells how the scrub is then.
    ///
    /// # Errors
    /// Why it was not done.
    pub async fn order(&self, order: ControlCommand) -> Result<ScrubStatus, ControlError> {
        let done = self.call(move |keeper| async move {
            keeper.settle().await;
            carry_out(&keeper, &order)
        });
        let done = done.await;
        done.unwrap_or_else(|gone| Err(ControlError::new(ProblemKind::Failed, gone)))
    }

    async fn call<W, F, T>(&self, work: W) -> Result<T, CoreGone>
    where
        W: FnOnce(Rc<ScrubTask>) -> F + Send + 'static,
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let keeper = self.keeper.clone();
        let called = self.core.call(move || async move {
            match keeper.get() {
                Some(keeper) => Ok(work(keeper).await),
                None => Err(CoreGone::Stopped),
            }
        });
        called.await?
    }
}

fn carry_out(keeper: &ScrubTask, order: &ControlCommand) -> Result<ScrubStatus, ControlError> {
    let gate = keeper.gate.borrow().clone().filter(|_| !keeper.closing.get());
    let Some(gate) = gate else {
        return Err(ControlError::new(ProblemKind::Refused, "it is closed, or is being closed"));
    };
    let start = |from: Option<u64>, rate: Option<NonZeroU64>| keeper.order(|scrub, now| scrub.start(now, from, rate));
    let done = match order {
        ControlCommand::Status
        | ControlCommand::Log { .. }
        | ControlCommand::ScrubStatus
        | ControlCommand::MirrorStatus
        | ControlCommand::MirrorAdd { .. }
        | ControlCommand::MirrorReplace { .. }
        | ControlCommand::MirrorAcceptStale { .. }
        | ControlCommand::MirrorRemove { .. }
        | ControlCommand::Resize { .. } => Ok(()),
        ControlCommand::ScrubStart { from, rate } => start(*from, *rate),
        ControlCommand::ScrubPause => keeper.order(|scrub, _| scrub.pause()),
        ControlCommand::ScrubStop => keeper.order(|scrub, now| scrub.stop(now)),
    };
    match done {
        Ok(()) => Ok(keeper.status(&gate)),
        Err(refusal @ Refusal::NotRunning) => Err(ControlError::new(ProblemKind::Refused, refusal)),
        Err(refusal @ Refusal::PastEnd { .. }) => Err(ControlError::new(ProblemKind::Usage, refusal)),
    }
}
