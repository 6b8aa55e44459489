//! Copies of metadata that volumes have lost, as text. The other copy of each is used, so nothing is wrong until that
//! one is lost, too.
//!
//! Invariant: the text is what is lost now. Copies are found lost when they are read, those of a group's label after its
//! volume was opened, and volumes that are open for writing rewrite them. So no text is made when a volume is opened.

use std::path::Path;

use sealblock_media_volume::{LostCopies, Standing, VolumeInfo as VolumeDescription};

use crate::identity::uuid_text;
use crate::quantity::count;

/// Logs what an open has found lost.
pub(crate) fn warn_of_losses(path: &Path, found: &VolumeDescription, read_only: bool) {
    let path = path.display();
    if found.log_lost > 0 {
        let sectors = count(found.log_lost, "sector");
        tracing::warn!("{path}: {sectors} of the log lost; blocks written last may be older than what was written");
    }
    for (place, records) in found.lost_copies.foreign() {
        tracing::warn!("{path}: {} of another volume in {place}", count(records, "record"));
    }
    if found.standing != Standing::Certain {
        let uuid = uuid_text(&found.uuid);
        tracing::warn!("{path}: not proven to be volume {uuid}; unproven blocks read as damaged");
    }
    for lba in &found.unreadable {
        tracing::warn!("{path}: block {lba} was written before a crash and is unreadable");
    }
    for copy in &found.superblocks {
        if let Some(why) = &copy.lost {
            let at = copy.offset_bytes;
            let then = if read_only { "the next open for writing rewrites it" } else { "it was rewritten" };
            tracing::warn!("{path}: the superblock at byte {at} was lost ({why}); {then}");
        }
    }
}

/// What volumes have lost.
#[derive(Clone, Default, Debug)]
pub struct LostMetadata(Vec<OfVolume>);

#[derive(Clone, Debug)]
struct OfVolume {
    /// ` of ` and its path, if it has one.
    of: String,
    /// Lost copies of the superblock: the offset of each, and why it is lost.
    superblocks: Vec<(u64, String)>,
    copies: LostCopies,
    is_read_only: bool,
}

impl LostMetadata {
    /// What is lost of these volumes, each with the path of its file, if it has one.
    pub(crate) fn of<'a>(volumes: impl Iterator<Item = (Option<&'a Path>, &'a VolumeDescription)>) -> LostMetadata {
        let of = |path: Option<&Path>| path.map_or(String::new(), |path| format!(" of {}", path.display()));
        LostMetadata(volumes.map(|(path, volume)| OfVolume::new(of(path), volume)).collect())
    }

    /// Copies of superblocks that were lost when their volume was opened.
    pub fn superblocks(&self) -> Vec<String> {
        self.0.iter().flat_map(OfVolume::superblocks).collect()
    }

    /// How many other copies were found lost until now, for each volume that has lost any, and the records of other
    /// volumes.
    pub fn copies(&self) -> Vec<String> {
        let lost = self.0.iter().filter_map(OfVolume::copies);
        let foreign = self.0.iter().flat_map(|volume| {
            let places = volume.copies.foreign().into_iter();
            places.map(|(place, records)| format!("records of another volume in {place}{}: {records}", volume.of))
        });
        lost.chain(foreign).collect()
    }

    /// What is lost and has not been rewritten. A volume that is open for writing has written its superblocks, and
    /// rewrites everything else with its next checkpoint, but labels and scrub states a minute after they were found.
    pub fn unwritten(&self) -> Vec<String> {
        let (read_only, writing): (Vec<_>, Vec<_>) = self.0.iter().cloned().partition(|volume| volume.is_read_only);
        let read_only = LostMetadata(read_only);
        let areas = writing.iter().filter(|volume| volume.copies.of_areas() > 0);
        let areas = areas.map(|volume| {
            let (of, copies) = (&volume.of, volume.copies.of_areas());
            format!("lost copies of labels and scrub states{of}, of which the other copy is used: {copies}")
        });
        [read_only.superblocks(), read_only.copies(), areas.collect()].concat()
    }
}

impl OfVolume {
    fn new(of: String, volume: &VolumeDescription) -> OfVolume {
        let lost = volume.superblocks.iter().filter_map(|copy| Some((copy.offset_bytes, copy.lost.clone()?)));
        let (superblocks, copies) = (lost.collect(), volume.lost_copies.clone());
        OfVolume { of, superblocks, copies, is_read_only: volume.is_read_only }
    }

    fn superblocks(&self) -> impl Iterator<Item = String> {
        let text = |(at, why): &(u64, String)| format!("the superblock{} at byte {at} is lost: {why}", self.of);
        self.superblocks.iter().map(text)
    }

    fn copies(&self) -> Option<String> {
        let (of, copies) = (&self.of, self.copies.to_text());
        (self.copies.count() > 0)
            .then(|| format!("lost copies of metadata{of}, of which the other copy is used: {copies}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(of: &str, is_read_only: bool) -> OfVolume {
        let superblocks = vec![(32_768, "it is zeroes".to_owned())];
        OfVolume { of: of.to_owned(), superblocks, copies: LostCopies::default(), is_read_only }
    }

    #[test]
    fn a_volume_that_is_not_written_keeps_what_it_has_lost_and_one_that_is_written_does_not() {
        let superblock = "the superblock of a at byte 32768 is lost: it is zeroes";
        assert_eq!(LostMetadata(vec![volume(" of a", true)]).unwritten(), [superblock]);
        let both = LostMetadata(vec![volume(" of a", false), volume("", true)]);
        assert_eq!(both.superblocks().len(), 2, "what was found is found");
        assert_eq!(both.unwritten(), ["the superblock at byte 32768 is lost: it is zeroes"]);
        assert!(both.copies().is_empty() && LostMetadata::default().unwritten().is_empty());
    }
}
