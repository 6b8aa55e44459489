//! The legs of a mirror that is served, as others reach them, from any core.

use std::rc::Rc;

use sealblock_runtime_reactor::{CoreHandle, CoreLocal};

use crate::control::mirror_status::MirrorStatus;
use crate::control::protocol::{ControlCommand, ControlError, ProblemKind};
use crate::exit::{Cause, CliError};
use crate::stack::OpenMirror;

/// A way to a mirror.
#[derive(Clone)]
pub struct MirrorHandle {
    core: CoreHandle,
    mirror: CoreLocal<OpenMirror>,
}

impl MirrorHandle {
    /// The way to a mirror on this core.
    pub fn new(core: CoreHandle, mirror: CoreLocal<OpenMirror>) -> MirrorHandle {
        MirrorHandle { core, mirror }
    }

    /// Does what was ordered; tells how the legs are then.
    ///
    /// # Errors
    /// Why it was not done.
    pub async fn order(&self, order: ControlCommand) -> Result<MirrorStatus, ControlError> {
        let mirror = self.mirror.clone();
        let done = self.core.call(move || async move {
            match mirror.get() {
                Some(mirror) => carry_out(&mirror, order).await,
                None => Err(ControlError::new(ProblemKind::Refused, "it is being closed")),
            }
        });
        done.await.unwrap_or_else(|gone| Err(ControlError::new(ProblemKind::Failed, gone)))
    }
}

async fn carry_out(mirror: &Rc<OpenMirror>, order: ControlCommand) -> Result<MirrorStatus, ControlError> {
    mirror.order(&order).await.map_err(|failure| problem(&failure))?;
    Ok(MirrorStatus::of(&mirror.describe()))
}

/// Why something was not done, for whoever asked over the control socket.
pub fn problem(failure: &CliError) -> ControlError {
    let kind = match failure.cause() {
        Cause::Usage => ProblemKind::Usage,
        Cause::Io | Cause::Full | Cause::Damaged | Cause::Unread => ProblemKind::Failed,
        Cause::Unsuitable | Cause::Absent | Cause::Unreachable | Cause::Refused => ProblemKind::Refused,
    };
    ControlError::new(kind, failure)
}
