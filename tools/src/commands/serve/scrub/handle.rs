//! A scrub, reachable from any core.

use std::num::NonZeroU64;
use std::rc::Rc;

use sealblock_runtime_reactor::{CoreGone, CoreHandle, CoreLocal};
use sealblock_scrub::{CommandError, Settings};

use super::ScrubTask;
use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind};
use crate::control::status::ScrubStatus;

/// A handle of the scrub of a device.
#[derive(Clone)]
pub struct ScrubHandle {
    core: CoreHandle,
    scrub_task: CoreLocal<ScrubTask>,
}

impl ScrubHandle {
    /// A handle of a scrub on this core.
    pub fn new(core: CoreHandle, scrub_task: CoreLocal<ScrubTask>) -> ScrubHandle {
        ScrubHandle { core, scrub_task }
    }

    /// Sets the settings.
    pub async fn configure(&self, settings: Settings) {
        // A core that has stopped scrubs nothing; requests to its devices report it.
        let _ = self.call(move |scrub_task| async move { scrub_task.configure(settings) }).await;
    }

    /// Ends the scrub and saves its state.
    pub async fn close(&self) {
        if let Err(gone) = self.call(|scrub_task| async move { scrub_task.close().await }).await {
            tracing::warn!("a scrub was not ended in good order: {gone}");
        }
    }

    /// Executes a command; returns the state of the scrub after it.
    ///
    /// # Errors
    /// Why the command failed.
    pub async fn execute(&self, command: ControlCommand) -> Result<ScrubStatus, ControlError> {
        let done = self.call(move |scrub_task| async move {
            scrub_task.settle().await;
            execute_on(&scrub_task, &command)
        });
        let done = done.await;
        done.unwrap_or_else(|gone| Err(ControlError::new(ControlErrorKind::Failed, gone)))
    }

    async fn call<W, F, T>(&self, work: W) -> Result<T, CoreGone>
    where
        W: FnOnce(Rc<ScrubTask>) -> F + Send + 'static,
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let scrub_task = self.scrub_task.clone();
        let called = self.core.call(move || async move {
            match scrub_task.get() {
                Some(scrub_task) => Ok(work(scrub_task).await),
                None => Err(CoreGone::Stopped),
            }
        });
        called.await?
    }
}

fn execute_on(scrub_task: &ScrubTask, command: &ControlCommand) -> Result<ScrubStatus, ControlError> {
    let gate = scrub_task.gate.borrow().clone().filter(|_| !scrub_task.closing.get());
    let Some(gate) = gate else {
        return Err(ControlError::new(ControlErrorKind::Refused, "it is closed, or is being closed"));
    };
    let start =
        |from: Option<u64>, rate: Option<NonZeroU64>| scrub_task.with_scrub(|scrub, now| scrub.start(now, from, rate));
    let done = match command {
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
        ControlCommand::ScrubPause => scrub_task.with_scrub(|scrub, _| scrub.pause()),
        ControlCommand::ScrubStop => scrub_task.with_scrub(|scrub, now| scrub.stop(now)),
    };
    match done {
        Ok(()) => Ok(scrub_task.status(&gate)),
        Err(refusal @ CommandError::NotRunning) => Err(ControlError::new(ControlErrorKind::Refused, refusal)),
        Err(refusal @ CommandError::PastEnd { .. }) => Err(ControlError::new(ControlErrorKind::Usage, refusal)),
    }
}
