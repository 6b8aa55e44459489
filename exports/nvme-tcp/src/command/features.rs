//! Get Features and Set Features. Nothing is saved, so a saved value is the default value.
//!
//! Mandatory features without meaning here (arbitration, power, temperature, error recovery) have constant values, and
//! accept no others.

use std::sync::atomic::Ordering;

use sealblock_protocols_nvme::admin::{FeatureSelect, GetFeatures, SetFeatures};
use sealblock_protocols_nvme::features::{
    EventConfiguration, FeatureCapabilities, FeatureEffects, FeatureId, NumberOfQueues, TemperatureThreshold,
    Timestamp, feature_effects, write_cache_enabled,
};
use sealblock_protocols_nvme::{Invalid, StatusCode};
use sealblock_runtime_reactor::now;
use sealblock_transport::Signals;

use crate::command::reply::{Reply, cut};
use crate::command::reserved::default_reply;
use crate::model::async_events::SUPPORTED_EVENTS;
use crate::model::command_error::CommandError;
use crate::model::controller::{Controller, FeatureValues, THRESHOLDS_KELVINS, round_keep_alive};
use crate::model::limits::Limits;

/// The critical warnings of SMART / Health, which any host may enable. They never occur in this target.
const HEALTH_EVENTS: u32 = 0xFF;
/// Arbitration burst 7h: no limit.
const NO_ARBITRATION: u32 = 7;

pub(crate) fn get(
    controller: &Controller,
    args: &GetFeatures,
    host_buffer_bytes: usize,
) -> Result<Reply, CommandError> {
    let done = |value: u32| Ok(Reply::Done(u64::from(value)));
    let feature = supported(controller, args.fid)?;
    if args.select == FeatureSelect::Capabilities {
        return done(capabilities(feature).bits());
    }
    if args.select != FeatureSelect::Current
        && let Some(value) = default(controller, feature, args.cdw11)?
    {
        return done(value);
    }
    match feature {
        FeatureId::Arbitration => done(NO_ARBITRATION),
        FeatureId::PowerManagement | FeatureId::ErrorRecovery => done(0),
        FeatureId::TemperatureThreshold => {
            done(controller.feature_values.threshold(args.cdw11, false)?.load(Ordering::Relaxed))
        }
        FeatureId::WriteAtomicity => done(controller.feature_values.atomicity.load(Ordering::Relaxed)),
        FeatureId::LbaStatusInterval => done(controller.async_events.interval()),
        FeatureId::VolatileWriteCache => done(u32::from(controller.write_cache.get())),
        FeatureId::NumberOfQueues => done(queues(controller.queues_granted.get())),
        FeatureId::AsynchronousEvents => done(controller.async_events.config()),
        FeatureId::KeepAliveTimer => done(controller.keep_alive_ms.get()),
        FeatureId::Timestamp => {
            let (ms, at) = controller.timestamp.get();
            let elapsed_ms = now().saturating_duration_since(at).as_millis() as u64;
            cut(&Timestamp::set_by_host(ms.saturating_add(elapsed_ms)).encode(), host_buffer_bytes, 8)
        }
        FeatureId::HostBehavior => cut(&controller.behavior.get(), host_buffer_bytes, 512),
        FeatureId::HostIdentifier => cut(&controller.hostid, host_buffer_bytes, 16),
        // `reserved.rs` reads the current value of a reserved area; the default value is empty.
        FeatureId::ReservedGroupLabel | FeatureId::ReservedScrubState | FeatureId::ReservedBitmap
            if args.select != FeatureSelect::Current =>
        {
            default_reply(controller, feature, args.nsid, args.cdw11, host_buffer_bytes)
        }
        _ => Err(Invalid::Feature(args.fid).into()),
    }
}

pub(crate) fn set(
    limits: &Limits,
    controller: &Controller,
    args: &SetFeatures,
    data: &[u8],
) -> Result<u64, CommandError> {
    let feature = supported(controller, args.fid)?;
    if args.save {
        return Err(StatusCode::FEATURE_NOT_SAVEABLE.into());
    }
    let short = |needed: usize| Invalid::DataLength { needed_bytes: needed as u64, got_bytes: data.len() as u64 };
    match feature {
        FeatureId::LbaStatusInterval => controller.async_events.set_interval(args.cdw11),
        FeatureId::VolatileWriteCache => controller.write_cache.set(write_cache_enabled(args.cdw11)),
        FeatureId::NumberOfQueues => return grant_queues(controller, limits.io_queues, args.cdw11),
        FeatureId::AsynchronousEvents if args.cdw11 & !supported_events(controller) == 0 => {
            controller.async_events.configure(args.cdw11);
        }
        FeatureId::AsynchronousEvents => return Err(Invalid::field("AEC", 11, 8).into()),
        FeatureId::KeepAliveTimer => {
            controller.keep_alive_ms.set(round_keep_alive(args.cdw11));
            controller.signal_admin(Signals::TIMER);
        }
        FeatureId::Timestamp => {
            let stamp = Timestamp::decode(data).map_err(Invalid::from)?;
            controller.timestamp.set((stamp.ms(), now()));
        }
        FeatureId::HostBehavior => {
            controller.behavior.set(data.get(..512).ok_or(short(512))?.to_vec());
        }
        FeatureId::HostIdentifier => return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into()),
        _ => set_neutral(&controller.feature_values, feature, args.cdw11)?,
    }
    Ok(0)
}

/// Grants I/O queues; a host may request them only before it connects any (Base, "Number of Queues").
fn grant_queues(controller: &Controller, max: u16, requested: u32) -> Result<u64, CommandError> {
    if controller.has_io_queues() {
        return Err(StatusCode::COMMAND_SEQUENCE_ERROR.into());
    }
    let wanted = NumberOfQueues::from_bits(requested)?;
    controller.queues_granted.set(wanted.submission.min(wanted.completion).min(u32::from(max)));
    Ok(u64::from(queues(controller.queues_granted.get())))
}

/// Sets a feature whose value has no effect.
fn set_neutral(values: &FeatureValues, feature: FeatureId, value: u32) -> Result<(), CommandError> {
    match feature {
        FeatureId::Arbitration | FeatureId::PowerManagement | FeatureId::ErrorRecovery => {
            return unchangeable(feature, value);
        }
        FeatureId::TemperatureThreshold => {
            values.threshold(value, true)?.store(value & 0xFFFF, Ordering::Relaxed);
        }
        FeatureId::WriteAtomicity => values.atomicity.store(value & 1, Ordering::Relaxed),
        _ => return Err(Invalid::Feature(feature.code()).into()),
    }
    Ok(())
}

/// Returns the feature if the controller supports it. A discovery controller has no I/O queues and no write cache.
fn supported(controller: &Controller, fid: u8) -> Result<FeatureId, CommandError> {
    let feature = FeatureId::from_code(fid).ok_or(Invalid::Feature(fid))?;
    let pages: &[FeatureId] = if controller.is_discovery { &DISCOVERY_FEATURES } else { &FEATURES };
    if pages.contains(&feature) { Ok(feature) } else { Err(Invalid::Feature(fid).into()) }
}

const DISCOVERY_FEATURES: [FeatureId; 5] = [
    FeatureId::AsynchronousEvents,
    FeatureId::Timestamp,
    FeatureId::KeepAliveTimer,
    FeatureId::HostBehavior,
    FeatureId::HostIdentifier,
];

const FEATURES: [FeatureId; 17] = [
    FeatureId::Arbitration,
    FeatureId::PowerManagement,
    FeatureId::TemperatureThreshold,
    FeatureId::ErrorRecovery,
    FeatureId::VolatileWriteCache,
    FeatureId::NumberOfQueues,
    FeatureId::WriteAtomicity,
    FeatureId::AsynchronousEvents,
    FeatureId::Timestamp,
    FeatureId::KeepAliveTimer,
    FeatureId::LbaStatusInterval,
    FeatureId::HostBehavior,
    FeatureId::HostIdentifier,
    FeatureId::ReservedGroupLabel,
    FeatureId::ReservedScrubState,
    FeatureId::ReservedBitmap,
    FeatureId::EndController,
];

/// Returns the log page Feature Identifiers Supported and Effects (Base, clause of the same name).
pub(crate) fn effects() -> [u8; 1024] {
    let scope = |feature| match feature {
        // Each namespace would have its own value.
        FeatureId::ErrorRecovery => FeatureEffects::NAMESPACE_SCOPE,
        FeatureId::ReservedGroupLabel | FeatureId::ReservedScrubState | FeatureId::ReservedBitmap => {
            FeatureEffects::NAMESPACE_SCOPE
        }
        _ => FeatureEffects::CONTROLLER_SCOPE,
    };
    feature_effects(FEATURES.into_iter().map(|feature| (feature, scope(feature))))
}

/// The capabilities of a feature; none is saveable.
fn capabilities(feature: FeatureId) -> FeatureCapabilities {
    match feature {
        FeatureId::Arbitration | FeatureId::PowerManagement | FeatureId::HostIdentifier => FeatureCapabilities::NONE,
        FeatureId::ErrorRecovery => FeatureCapabilities::NAMESPACE_SPECIFIC,
        FeatureId::ReservedGroupLabel | FeatureId::ReservedScrubState | FeatureId::ReservedBitmap => {
            FeatureCapabilities::NAMESPACE_SPECIFIC | FeatureCapabilities::CHANGEABLE
        }
        _ => FeatureCapabilities::CHANGEABLE,
    }
}

/// The default value of a changeable feature that fits in a dword.
fn default(controller: &Controller, feature: FeatureId, cdw11: u32) -> Result<Option<u32>, CommandError> {
    Ok(match feature {
        FeatureId::TemperatureThreshold => {
            controller.feature_values.threshold(cdw11, false)?;
            Some(THRESHOLDS_KELVINS[usize::from(TemperatureThreshold::from_bits(cdw11)?.under)])
        }
        FeatureId::WriteAtomicity | FeatureId::AsynchronousEvents | FeatureId::LbaStatusInterval => Some(0),
        FeatureId::VolatileWriteCache => Some(1),
        _ => None,
    })
}

/// Accepts the constant value of a feature, and fails for any other.
fn unchangeable(feature: FeatureId, value: u32) -> Result<(), CommandError> {
    let (field, is_current) = match feature {
        FeatureId::Arbitration => ("AB", value == NO_ARBITRATION),
        FeatureId::PowerManagement => ("PS", value & 0x1F == 0),
        _ => ("TLER", value == 0),
    };
    match (feature, is_current) {
        (_, true) => Ok(()),
        // There is no other power state, and DULBE is not supported.
        (FeatureId::PowerManagement | FeatureId::ErrorRecovery, false) => Err(Invalid::field(field, 11, 0).into()),
        _ => Err(StatusCode::FEATURE_NOT_CHANGEABLE.into()),
    }
}

/// The events that a host may enable.
fn supported_events(controller: &Controller) -> u32 {
    if controller.is_discovery {
        HEALTH_EVENTS | EventConfiguration::DISCOVERY_LOG_CHANGE.bits()
    } else {
        HEALTH_EVENTS | SUPPORTED_EVENTS.bits()
    }
}

fn queues(granted: u32) -> u32 {
    NumberOfQueues { submission: granted, completion: granted }.bits()
}
