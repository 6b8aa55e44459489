//! Probing devices: which label is on one, whether it fits a mirror, and whether it may become a replica.

use std::collections::BTreeMap;

use sealblock_block::{
    Device, DynDevice, Error, ErrorKind, Geometry, Request, ReservedArea, Response, WhyOlder, is_unwritten,
};
use sealblock_integrity::PiFormat;
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use crate::error::{MirrorError, ReplicaError};
use crate::label::assemble::{ReplicaProbe, is_held_elsewhere};
use crate::label::regions::RegionMap;
use crate::label::sets::{PageId, Pages, pages_of_set};
use crate::label::{Label, LabelError, MAX_SETS};
use crate::mirror::Mutation;
use crate::mirror::replica::{ReplicaSource, has_reserved_area, unexpected_response};

/// Why a device cannot be probed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub(crate) enum ProbeError {
    Label(LabelError),
    Device(Error),
}

/// Probes a device for a label.
pub(crate) async fn probe_device(device: &DynDevice, mutation: Mutation) -> Result<ReplicaProbe, ProbeError> {
    if !has_reserved_area(device) {
        return Ok(ReplicaProbe::Unlabelled { has_room: false });
    }
    match device.execute(Request::read_reserved(ReservedArea::GroupLabel)).await {
        Ok(Response::Reserved(bytes)) => match decode_label(device, &bytes, mutation).await {
            Ok(Some(label)) => Ok(ReplicaProbe::Labelled(Box::new(label))),
            Ok(None) => Ok(ReplicaProbe::Unlabelled { has_room: true }),
            Err(reason) => Err(ProbeError::Label(reason)),
        },
        // A mirror keeps this area for itself, so as a replica it has no room for a label.
        Err(error) if matches!(error.kind(), ErrorKind::Absent(_)) => Ok(ReplicaProbe::Unlabelled { has_room: false }),
        Ok(_) => Err(ProbeError::Device(unexpected_response())),
        Err(error) => Err(ProbeError::Device(error)),
    }
}

/// Decodes a label with the bitmap pages that it refers to. An unreadable page counts as all of its regions.
async fn decode_label(device: &DynDevice, bytes: &[u8], mutation: Mutation) -> Result<Option<Label>, LabelError> {
    let mut wanted = WantedPages::default();
    let label = Label::decode_with(bytes, &mut wanted)?;
    let Some(regions) = label.as_ref().map(|label| label.map.count()).filter(|_| !wanted.0.is_empty()) else {
        return Ok(label);
    };
    let mut pages = LoadedPages { pages: BTreeMap::new(), are_trusted: mutation.is(Mutation::TrustPages) };
    for id in wanted.0 {
        if let Ok(Response::Reserved(page)) = device.execute(Request::read_reserved(id.area(regions))).await {
            pages.pages.insert(id, page);
        }
    }
    Label::decode_with(bytes, &mut pages)
}

/// The pages that a label refers to.
#[derive(Default)]
struct WantedPages(Vec<PageId>);

impl Pages for WantedPages {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.0.push(id);
        None
    }
}

/// The pages that were read for a label.
struct LoadedPages {
    pages: BTreeMap<PageId, Slice>,
    are_trusted: bool,
}

impl Pages for LoadedPages {
    fn page(&mut self, id: PageId) -> Option<&[u8]> {
        self.pages.get(&id).map(|page| &page[..])
    }

    fn are_trusted(&self) -> bool {
        self.are_trusted
    }
}

/// Why a device may lack its last writes, if it may.
pub(crate) fn why_older(device: &DynDevice) -> Option<WhyOlder> {
    device.abilities().freshness.why_older()
}

/// Refuses a replica that is smaller than the mirror, or has another block size or format.
pub(crate) fn check_fit(
    source: &ReplicaSource,
    block_size: BlockSize,
    capacity_blocks: u64,
    protection: Option<PiFormat>,
) -> Result<(), MirrorError> {
    let Ok(device) = &source.device else { return Ok(()) };
    let geometry = device.geometry();
    let replica = source.name.clone();
    if geometry.block_size != block_size {
        return Err(MirrorError::BlockSize { replica, expected: block_size, actual: geometry.block_size });
    }
    if geometry.protection != protection {
        return Err(MirrorError::Protection { replica, expected: protection, actual: geometry.protection });
    }
    if geometry.capacity_blocks < capacity_blocks {
        return Err(MirrorError::Size { replica, expected: capacity_blocks, actual: geometry.capacity_blocks });
    }
    Ok(())
}

/// Why a device is not what its own label says: it is smaller. A larger one may be a replica, and another format depends
/// on how it is served.
pub(crate) fn why_unfit(source: &ReplicaSource, label: &Label) -> Option<String> {
    let fit = check_fit(source, label.block_size, label.capacity_blocks, label.protection);
    let MirrorError::Size { expected, actual, .. } = fit.err()? else { return None };
    Some(format!("its device has {actual} blocks, and its label says {expected}"))
}

/// Refuses a device whose reserved area has too few bitmap pages for the sets of such a map.
pub(crate) fn check_pages(name: &str, device: &DynDevice, map: &RegionMap) -> Result<(), MirrorError> {
    let (expected, actual) = (MAX_SETS as u32 * pages_of_set(map.count()), device.abilities().bitmap_pages);
    match actual >= expected {
        true => Ok(()),
        false => Err(MirrorError::Pages { replica: name.to_owned(), expected, actual }),
    }
}

/// Refuses devices for a new mirror that differ from the first one in size or format.
pub(crate) fn check_same_geometry(sources: &[ReplicaSource]) -> Result<(), MirrorError> {
    let Some(first) = sources.iter().find_map(|source| source.device.as_ref().ok()) else { return Ok(()) };
    let Geometry { block_size, capacity_blocks, protection, .. } = first.geometry().clone();
    for source in sources {
        check_fit(source, block_size, capacity_blocks, protection)?;
        let Ok(device) = &source.device else { continue };
        let actual = device.geometry().capacity_blocks;
        if actual != capacity_blocks {
            return Err(MirrorError::Size { replica: source.name.clone(), expected: capacity_blocks, actual });
        }
    }
    Ok(())
}

/// A device for a replica, and its probed state.
pub(crate) struct Candidate {
    pub probe: ReplicaProbe,
    /// Why its label is no valid one of a mirror, if it is not.
    label_error: Option<LabelError>,
    pub is_written: bool,
}

/// Inspects a device for a replica.
///
/// # Errors
/// When it is offline or read only.
pub(crate) async fn inspect(source: &ReplicaSource) -> Result<Candidate, ReplicaError> {
    let absent = |reason: String| ReplicaError::Offline { replica: source.name.clone(), reason };
    let device = source.device.as_ref().map_err(|reason| absent(reason.clone()))?;
    if !device.abilities().writable {
        return Err(absent("the device is read only".to_owned()));
    }
    let (found, other) = match probe_device(device, Mutation::None).await {
        Ok(found) => (found, None),
        Err(ProbeError::Label(reason)) => (ReplicaProbe::Unlabelled { has_room: true }, Some(reason)),
        // Nothing of the label is left, so an explicit request may replace it.
        Err(ProbeError::Device(reason)) if matches!(reason.kind(), ErrorKind::Media { .. }) => {
            (ReplicaProbe::Unlabelled { has_room: true }, Some(LabelError::Damaged))
        }
        Err(ProbeError::Device(reason)) => return Err(absent(reason.to_string())),
    };
    // A device that may lack its last writes is not known to be blank.
    let is_written =
        why_older(device).is_some() || !is_unwritten(device).await.map_err(|reason| absent(reason.to_string()))?;
    Ok(Candidate { probe: found, label_error: other, is_written })
}

impl Candidate {
    /// True if its label is no valid one of a mirror.
    pub fn has_other_label(&self) -> bool {
        self.label_error.is_some()
    }

    /// Refuses a device with a label, or with data that would be replaced, unless forced. What may be the only good copy of a mirror's
    /// content, or the only one of a part of another group, is not replaced by force either. `beside` are labels of other replicas that
    /// keep what they have.
    pub fn check(&self, name: &str, force: bool, is_replaced: bool, beside: &[Label]) -> Result<(), ReplicaError> {
        let replica = name.to_owned();
        let what = match (&self.probe, self.label_error) {
            (ReplicaProbe::Labelled(label), _) => {
                if is_replaced && !is_held_elsewhere(label, beside) {
                    let what = format!(
                        "{}, and by the labels no other one that is given is in sync and has its changes",
                        label_text(label)
                    );
                    return Err(ReplicaError::OnlyCopy { replica, what });
                }
                label_text(label)
            }
            (_, Some(LabelError::Other(_))) if is_replaced && force => {
                return Err(ReplicaError::OnlyCopy { replica, what: "a member of another kind of group".to_owned() });
            }
            (_, Some(_)) if force => return Ok(()),
            (_, Some(reason)) => return Err(ReplicaError::BadLabel { replica, reason }),
            (..) if self.is_written && is_replaced && !force => {
                return Err(ReplicaError::NotBlank { replica });
            }
            _ => return Ok(()),
        };
        if force { Ok(()) } else { Err(ReplicaError::Labelled { replica, what }) }
    }

    /// Clears the label of a device, before the device gets a new one.
    ///
    /// # Errors
    /// When the device fails.
    pub async fn clear_label(&self, source: &ReplicaSource) -> Result<(), ReplicaError> {
        let Ok(device) = &source.device else { return Ok(()) };
        if matches!(self.probe, ReplicaProbe::Unlabelled { .. }) && self.label_error.is_none() {
            return Ok(());
        }
        write_label(device, &[]).await.map_err(ReplicaError::WriteLabels)
    }
}

pub(crate) async fn write_label(device: &DynDevice, bytes: &[u8]) -> Result<(), Error> {
    device.execute(Request::write_reserved(ReservedArea::GroupLabel, Slice::copy_from(bytes))).await.map(drop)
}

/// What a device is by its label.
pub(crate) fn label_text(label: &Label) -> String {
    let state = label.replicas[label.own_index].state.as_str().replace('_', " ");
    format!("replica {} ({state}) of mirror {}", label.own_index, uuid_to_text(&label.uuid))
}

/// Name of a replica that was not given.
pub(crate) fn default_name(index: usize) -> String {
    format!("replica {index}")
}

/// An identity in its form of 36 characters.
pub(crate) fn uuid_to_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex).join("-")
}
