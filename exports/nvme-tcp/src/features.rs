//! Get and Set Features. Nothing is saved, so every selection of Get Features is the current value.

use std::rc::Rc;

use sealblock_protocols_nvme::admin::{GetFeatures, SetFeatures};
use sealblock_protocols_nvme::features::{FeatureId, NumberOfQueues, Timestamp, write_cache_enabled};
use sealblock_protocols_nvme::{Invalid, StatusCode};
use sealblock_runtime_reactor::now;

use crate::admin::cut;
use crate::connection::{Connection, Reply};
use crate::controller::Controller;
use crate::refusal::Refusal;

/// Events of SMART / health, which any host may ask for; they never happen here.
const HEALTH_EVENTS: u32 = 0xFF;

pub(crate) fn get(controller: &Controller, ask: &GetFeatures, room: usize) -> Result<Reply, Refusal> {
    let done = |value: u32| Ok(Reply::Done(u64::from(value)));
    match known(controller, ask.fid)? {
        FeatureId::VolatileWriteCache => done(u32::from(controller.write_cache.get())),
        FeatureId::NumberOfQueues => done(queues(controller.queues_granted.get())),
        FeatureId::AsynchronousEvents => done(controller.event_config.get()),
        FeatureId::KeepAliveTimer => done(controller.keep_alive_ms.get()),
        FeatureId::Timestamp => {
            let (ms, at) = controller.timestamp.get();
            let elapsed_ms = now().saturating_duration_since(at).as_millis() as u64;
            cut(&Timestamp::set_by_host(ms.saturating_add(elapsed_ms)).encode(), room, 8)
        }
        FeatureId::HostBehavior => cut(&controller.behavior.get(), room, 512),
        FeatureId::HostIdentifier => cut(&controller.hostid, room, 16),
        _ => Err(Invalid::Feature(ask.fid).into()),
    }
}

pub(crate) fn set(
    connection: &Rc<Connection>,
    controller: &Controller,
    ask: &SetFeatures,
    data: &[u8],
) -> Result<u64, Refusal> {
    let feature = known(controller, ask.fid)?;
    if ask.save {
        return Err(StatusCode::FEATURE_NOT_SAVEABLE.into());
    }
    let short = |needed: usize| Invalid::DataLength { needed_bytes: needed as u64, got_bytes: data.len() as u64 };
    match feature {
        FeatureId::VolatileWriteCache => controller.write_cache.set(write_cache_enabled(ask.cdw11)),
        FeatureId::NumberOfQueues => {
            let wanted = NumberOfQueues::from_bits(ask.cdw11)?;
            let most = u32::from(connection.target.limits.io_queues);
            controller.queues_granted.set(wanted.submission.min(wanted.completion).min(most));
            return Ok(u64::from(queues(controller.queues_granted.get())));
        }
        FeatureId::AsynchronousEvents if ask.cdw11 & !HEALTH_EVENTS == 0 => controller.event_config.set(ask.cdw11),
        FeatureId::AsynchronousEvents => return Err(Invalid::field("AEC", 11, 8).into()),
        FeatureId::KeepAliveTimer => {
            controller.keep_alive_ms.set(ask.cdw11);
            connection.watch();
        }
        FeatureId::Timestamp => {
            let stamp = Timestamp::decode(data).map_err(Invalid::from)?;
            controller.timestamp.set((stamp.ms(), now()));
        }
        FeatureId::HostBehavior => {
            controller.behavior.set(data.get(..512).ok_or(short(512))?.to_vec());
        }
        FeatureId::HostIdentifier => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()),
        _ => return Err(Invalid::Feature(ask.fid).into()),
    }
    Ok(0)
}

/// A discovery controller has no I/O queues and no write cache.
fn known(controller: &Controller, fid: u8) -> Result<FeatureId, Refusal> {
    let feature = FeatureId::from_code(fid).ok_or(Invalid::Feature(fid))?;
    let needs_namespaces = matches!(feature, FeatureId::VolatileWriteCache | FeatureId::NumberOfQueues);
    if controller.is_discovery && needs_namespaces { Err(Invalid::Feature(fid).into()) } else { Ok(feature) }
}

fn queues(granted: u32) -> u32 {
    NumberOfQueues { submission: granted, completion: granted }.bits()
}
