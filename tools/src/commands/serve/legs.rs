//! A served mirror, reachable from any core.

use std::rc::Rc;

use sealblock_runtime_reactor::{CoreHandle, CoreLocal};

use crate::control::mirror_status::MirrorStatus;
use crate::control::protocol::{ControlCommand, ControlError, ControlErrorKind};
use crate::exit::{Cause, CliError};
use crate::stack::OpenMirror;

/// A handle of a mirror on another core.
#[derive(Clone)]
pub struct MirrorHandle {
    core: CoreHandle,
    mirror: CoreLocal<OpenMirror>,
}

impl MirrorHandle {
    /// A handle of a mirror on this core.
    pub fn new(core: CoreHandle, mirror: CoreLocal<OpenMirror>) -> MirrorHandle {
        MirrorHandle { core, mirror }
    }

    /// Executes a command; returns the state of the mirror after it.
    ///
    /// # Errors
    /// Why the command failed.
    pub async fn execute(&self, command: ControlCommand) -> Result<MirrorStatus, ControlError> {
        let mirror = self.mirror.clone();
        let done = self.core.call(move || async move {
            match mirror.get() {
                Some(mirror) => execute_on(&mirror, command).await,
                None => Err(ControlError::new(ControlErrorKind::Refused, "it is being closed")),
            }
        });
        done.await.unwrap_or_else(|gone| Err(ControlError::new(ControlErrorKind::Failed, gone)))
    }
}

async fn execute_on(mirror: &Rc<OpenMirror>, command: ControlCommand) -> Result<MirrorStatus, ControlError> {
    mirror.execute(&command).await.map_err(|failure| control_error(&failure))?;
    Ok(MirrorStatus::of(&mirror.describe()))
}

/// A failure as a response on the control socket.
pub fn control_error(failure: &CliError) -> ControlError {
    let kind = match failure.cause() {
        Cause::Usage => ControlErrorKind::Usage,
        Cause::Io | Cause::Full | Cause::Damaged | Cause::Unread => ControlErrorKind::Failed,
        Cause::Unsuitable | Cause::Absent | Cause::Unreachable | Cause::Refused => ControlErrorKind::Refused,
    };
    ControlError::new(kind, failure)
}
