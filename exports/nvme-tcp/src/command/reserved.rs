//! The reserved area beside the blocks of a namespace, as vendor features: Get Features reads an area, Set Features
//! replaces it.
//!
//! A write is durable when it completes. No other value is saved: bit SV fails, as for every other feature, and the
//! default value is empty.

use std::sync::Arc;

use sealblock_block::{Ability, Device, Request, RequestKind, ReservedArea, Response};
use sealblock_protocols_nvme::admin::{AdminCommand, FeatureSelect};
use sealblock_protocols_nvme::extensions::ReservedArea as Frame;
use sealblock_protocols_nvme::features::FeatureId;
use sealblock_protocols_nvme::{Command, Invalid, StatusCode};
use sealblock_runtime_memory::Slice;

use crate::command::queue_context::NamespaceHandle;
use crate::command::reply::{Reply, cut};
use crate::model::command_error::CommandError;
use crate::model::controller::{Controller, DeviceChangeGuard};

/// A read or write of a reserved area.
pub(crate) struct ReservedAccess {
    namespace: NamespaceHandle,
    frame: Frame,
    request: Request,
    /// Bytes of the host's buffer.
    host_buffer_bytes: usize,
    /// Held by a write until it completes.
    _change: Option<DeviceChangeGuard>,
}

/// True if a command reads or writes a reserved area.
pub(crate) fn is_access(controller: &Controller, command: &Command) -> bool {
    match AdminCommand::decode(command) {
        Ok(AdminCommand::GetFeatures(args)) => {
            args.select == FeatureSelect::Current && frame(controller, args.fid).is_some()
        }
        Ok(AdminCommand::SetFeatures(args)) => frame(controller, args.fid).is_some(),
        _ => false,
    }
}

/// The length of the data of a command that writes a reserved area.
pub(crate) fn write_bytes(controller: &Controller, command: &Command) -> Option<u64> {
    match AdminCommand::decode(command) {
        Ok(AdminCommand::SetFeatures(args)) => frame(controller, args.fid).map(|frame| frame.frame_bytes() as u64),
        _ => None,
    }
}

/// Checks the command and its data.
pub(crate) fn begin(
    controller: &Arc<Controller>,
    command: &Command,
    data: &[u8],
    host_buffer_bytes: usize,
) -> Result<ReservedAccess, CommandError> {
    let (fid, nsid, page, save, writes) = match AdminCommand::decode(command)? {
        AdminCommand::GetFeatures(args) => (args.fid, args.nsid, args.cdw11, false, false),
        AdminCommand::SetFeatures(args) => (args.fid, args.nsid, args.cdw11, args.save, true),
        _ => return Err(StatusCode::INVALID_OPCODE.into()),
    };
    let frame = frame(controller, fid).ok_or(Invalid::Feature(fid))?;
    let (namespace, slot) = with_reserved_area(controller, frame, nsid, page)?;
    if save {
        return Err(StatusCode::FEATURE_NOT_SAVEABLE.into());
    }
    let (request, change) = match writes {
        true => {
            let bytes = Slice::copy_from(frame.decode(data).map_err(Invalid::from)?);
            let change = controller.begin_device_change().ok_or(StatusCode::COMMAND_SEQUENCE_ERROR)?;
            (Request::write_reserved(slot, bytes), Some(change))
        }
        false if host_buffer_bytes < frame.frame_bytes() => return Err(StatusCode::DATA_SGL_LENGTH_INVALID.into()),
        false => (Request::read_reserved(slot), None),
    };
    Ok(ReservedAccess { namespace, frame, request, host_buffer_bytes, _change: change })
}

/// Returns the reply to Get Features for the default value, which is empty.
pub(crate) fn default_reply(
    controller: &Controller,
    feature: FeatureId,
    nsid: u32,
    page: u32,
    host_buffer_bytes: usize,
) -> Result<Reply, CommandError> {
    let frame = frame(controller, feature.code()).ok_or(Invalid::Feature(feature.code()))?;
    with_reserved_area(controller, frame, nsid, page)?;
    reply(frame, &[], host_buffer_bytes)
}

impl ReservedAccess {
    /// Executes the request.
    pub(crate) async fn execute(self) -> Result<Reply, CommandError> {
        let kind = self.request.kind();
        match (self.namespace.device.execute(self.request).await, kind) {
            (Ok(Response::Reserved(bytes)), RequestKind::ReadReserved) => {
                reply(self.frame, &bytes, self.host_buffer_bytes)
            }
            (Ok(Response::Done), RequestKind::WriteReserved) => Ok(Reply::Done(0)),
            (Ok(_), _) => Err(StatusCode::INTERNAL_ERROR.into()),
            (Err(error), kind) => Err(CommandError::of_error(&error, kind)),
        }
    }
}

fn reply(frame: Frame, bytes: &[u8], host_buffer_bytes: usize) -> Result<Reply, CommandError> {
    let data = frame.encode(bytes).ok_or(StatusCode::INTERNAL_ERROR)?;
    cut(&data, host_buffer_bytes, data.len() as u64)
}

/// Returns the frame of a feature; `None` for other features, and on discovery controllers.
fn frame(controller: &Controller, fid: u8) -> Option<Frame> {
    FeatureId::from_code(fid).and_then(Frame::of_feature).filter(|_| !controller.is_discovery)
}

/// Returns the namespace and the reserved area, if the namespace's device has that area.
fn with_reserved_area(
    controller: &Controller,
    frame: Frame,
    nsid: u32,
    page: u32,
) -> Result<(NamespaceHandle, ReservedArea), CommandError> {
    let namespace = NamespaceHandle::new(&controller.namespace(nsid)?, controller);
    let (abilities, slot) = (namespace.device.abilities(), reserved_area(frame, page));
    if abilities.get(RequestKind::ReadReserved) == Ability::Absent {
        return Err(Invalid::Feature(frame.feature().code()).into());
    }
    if slot.pages() > abilities.bitmap_pages {
        return Err(Invalid::field("CDW11", 11, 0).into());
    }
    Ok((namespace, slot))
}

const fn reserved_area(frame: Frame, page: u32) -> ReservedArea {
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
    fn a_frame_has_room_for_the_largest_reserved_area() {
        for frame in [Frame::Group, Frame::Scrub, Frame::Bitmap] {
            assert_eq!(frame.max_bytes(), reserved_area(frame, 0).max_bytes());
        }
    }
}
