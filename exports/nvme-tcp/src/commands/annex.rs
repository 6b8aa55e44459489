//! Room beside the blocks of a namespace, as features of sealblock: Get Features reads a slot, Set Features replaces it.
//!
//! What is written is durable when it is answered, and nothing is saved apart from it: the bit SV is refused as for every
//! other feature, and the default value is an empty slot.

use std::sync::Arc;

use sealblock_block::{Ability, Device, Request, RequestKind, ReservedArea, Response};
use sealblock_protocols_nvme::admin::{AdminCommand, FeatureSelect};
use sealblock_protocols_nvme::extensions::ReservedArea as Frame;
use sealblock_protocols_nvme::features::FeatureId;
use sealblock_protocols_nvme::{Command, Invalid, StatusCode};
use sealblock_runtime_memory::Slice;

use crate::admin::cut;
use crate::command_error::CommandError;
use crate::connection::Reply;
use crate::controller::{Controller, DeviceChangeGuard};
use crate::member::NamespaceHandle;

/// What is to be done with a slot.
pub(crate) struct Work {
    namespace: NamespaceHandle,
    frame: Frame,
    operation: Request,
    /// Bytes of the host's buffer.
    room: usize,
    /// Of a write.
    _change: Option<DeviceChangeGuard>,
}

/// Whether a command reads or writes a slot.
pub(crate) fn is_asked(controller: &Controller, command: &Command) -> bool {
    match AdminCommand::decode(command) {
        Ok(AdminCommand::GetFeatures(ask)) => {
            ask.select == FeatureSelect::Current && frame(controller, ask.fid).is_some()
        }
        Ok(AdminCommand::SetFeatures(ask)) => frame(controller, ask.fid).is_some(),
        _ => false,
    }
}

/// The bytes that a command brings which writes a slot.
pub(crate) fn brings(controller: &Controller, command: &Command) -> Option<u64> {
    match AdminCommand::decode(command) {
        Ok(AdminCommand::SetFeatures(ask)) => frame(controller, ask.fid).map(|frame| frame.frame_bytes() as u64),
        _ => None,
    }
}

/// Checks the command as far as its namespace and its data tell.
pub(crate) fn begin(
    controller: &Arc<Controller>,
    command: &Command,
    data: &[u8],
    room: usize,
) -> Result<Work, CommandError> {
    let (fid, nsid, page, save, writes) = match AdminCommand::decode(command)? {
        AdminCommand::GetFeatures(ask) => (ask.fid, ask.nsid, ask.cdw11, false, false),
        AdminCommand::SetFeatures(ask) => (ask.fid, ask.nsid, ask.cdw11, ask.save, true),
        _ => return Err(StatusCode::INVALID_OPCODE.into()),
    };
    let frame = frame(controller, fid).ok_or(Invalid::Feature(fid))?;
    let (namespace, slot) = with_annex(controller, frame, nsid, page)?;
    if save {
        return Err(StatusCode::FEATURE_NOT_SAVEABLE.into());
    }
    let (operation, change) = match writes {
        true => {
            let bytes = Slice::copy_from(frame.decode(data).map_err(Invalid::from)?);
            let change = controller.begin_change().ok_or(StatusCode::COMMAND_SEQUENCE_ERROR)?;
            (Request::WriteReserved { slot, bytes }, Some(change))
        }
        false if room < frame.frame_bytes() => return Err(StatusCode::DATA_SGL_LENGTH_INVALID.into()),
        false => (Request::ReadReserved { slot }, None),
    };
    Ok(Work { namespace, frame, operation, room, _change: change })
}

/// The answer to a Get Features for the value of a new namespace.
pub(crate) fn nothing(
    controller: &Controller,
    feature: FeatureId,
    nsid: u32,
    page: u32,
    room: usize,
) -> Result<Reply, CommandError> {
    let frame = frame(controller, feature.code()).ok_or(Invalid::Feature(feature.code()))?;
    with_annex(controller, frame, nsid, page)?;
    reply(frame, &[], room)
}

impl Work {
    /// Carries it out.
    pub(crate) async fn run(self) -> Result<Reply, CommandError> {
        let kind = self.operation.kind();
        match (self.namespace.device.execute(self.operation).await, kind) {
            (Ok(Response::Reserved(bytes)), RequestKind::ReadReserved) => reply(self.frame, &bytes, self.room),
            (Ok(Response::Done), RequestKind::WriteReserved) => Ok(Reply::Done(0)),
            (Ok(_), _) => Err(StatusCode::INTERNAL_ERROR.into()),
            (Err(error), kind) => Err(CommandError::of_error(&error, kind)),
        }
    }
}

fn reply(frame: Frame, bytes: &[u8], room: usize) -> Result<Reply, CommandError> {
    let data = frame.encode(bytes).ok_or(StatusCode::INTERNAL_ERROR)?;
    cut(&data, room, data.len() as u64)
}

/// The slot of a feature. A discovery controller has none.
fn frame(controller: &Controller, fid: u8) -> Option<Frame> {
    FeatureId::from_code(fid).and_then(Frame::of_feature).filter(|_| !controller.is_discovery)
}

/// The namespace, if its device has room beside its blocks, and the slot or bitmap page that is meant.
fn with_annex(
    controller: &Controller,
    frame: Frame,
    nsid: u32,
    page: u32,
) -> Result<(NamespaceHandle, ReservedArea), CommandError> {
    let namespace = NamespaceHandle::new(&controller.namespace(nsid)?, controller);
    let (abilities, slot) = (namespace.device.abilities(), slot(frame, page));
    if abilities.reserved == Ability::Absent {
        return Err(Invalid::Feature(frame.feature().code()).into());
    }
    if slot.pages() > abilities.annex_pages {
        return Err(Invalid::field("CDW11", 11, 0).into());
    }
    Ok((namespace, slot))
}

const fn slot(frame: Frame, page: u32) -> ReservedArea {
    match frame {
        Frame::Group => ReservedArea::GroupLabel,
        Frame::Scrub => ReservedArea::ScrubState,
        Frame::Bitmap => ReservedArea::Bitmap { page },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_room_for_all_that_a_slot_holds() {
        for frame in [Frame::Group, Frame::Scrub, Frame::Bitmap] {
            assert_eq!(frame.max_bytes(), slot(frame, 0).max_bytes());
        }
    }
}
