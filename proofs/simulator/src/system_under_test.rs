//! What can be put to the test, by the names of the command line.

use sealblock_layers_mirror::Mutation as MirrorMutation;
use sealblock_media_volume::Mutation as VolumeMutation;

use crate::mirror;
use crate::system::Volumes;
use crate::trial::{self, FailureReport, Order, Report};
use crate::workload::Workload;

/// A kind of device, and the fault that is put into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// Protected volumes.
    Volume(VolumeMutation),
    /// Mirrors of protected volumes.
    Mirror(MirrorMutation),
    /// Walks of mirrors through histories.
    Walk(MirrorMutation),
}

const OF_VOLUMES: [(&str, VolumeMutation); 25] = [
    ("none", VolumeMutation::None),
    ("skip-sync", VolumeMutation::SkipSync),
    ("late-tags", VolumeMutation::LateTags),
    ("reuse-early", VolumeMutation::ReuseEarly),
    ("trust-log", VolumeMutation::TrustLog),
    ("repeat-nothing", VolumeMutation::RepeatNothing),
    ("repeat-as-new", VolumeMutation::RepeatAsNew),
    ("one-region", VolumeMutation::OneRegion),
    ("never-settle", VolumeMutation::NeverSettle),
    ("short-run", VolumeMutation::ShortRun),
    ("runs-first", VolumeMutation::RunsFirst),
    ("tail-early", VolumeMutation::TailEarly),
    ("map-first", VolumeMutation::MapFirst),
    ("one-copy", VolumeMutation::OneCopy),
    ("unsynced-tables", VolumeMutation::UnsyncedTables),
    ("move-over-newer", VolumeMutation::MoveOverNewer),
    ("punch-beyond", VolumeMutation::PunchBeyond),
    ("name-early", VolumeMutation::NameEarly),
    ("cut-early", VolumeMutation::CutEarly),
    ("join-taken", VolumeMutation::JoinTaken),
    ("join-in-place", VolumeMutation::JoinInPlace),
    ("shorter-copy", VolumeMutation::ShorterCopy),
    ("tail-earlier", VolumeMutation::TailEarlier),
    ("cut-mapped", VolumeMutation::CutMapped),
    ("keep-bits", VolumeMutation::KeepBits),
];

const OF_MIRRORS: [(&str, MirrorMutation); 19] = [
    ("none", MirrorMutation::None),
    ("skip-mark", MirrorMutation::SkipMark),
    ("answer-early", MirrorMutation::CompleteEarly),
    ("read-rebuilding", MirrorMutation::ReadResyncing),
    ("clear-unflushed", MirrorMutation::ClearUnflushed),
    ("unordered", MirrorMutation::Unordered),
    ("spoil-last-copy", MirrorMutation::PoisonLastCopy),
    ("forget-stale", MirrorMutation::ForgetStale),
    ("forget-flushing", MirrorMutation::ForgetFlushing),
    ("forget-missed", MirrorMutation::ForgetOutOfSync),
    ("skip-lineage", MirrorMutation::SkipLineage),
    ("untold", MirrorMutation::SkipOwnLabel),
    ("remove-untold", MirrorMutation::SkipRemovedLabel),
    ("forget-sessions", MirrorMutation::ForgetSessions),
    ("believe-order", MirrorMutation::TrustOrder),
    ("take-anybody", MirrorMutation::ReattachDiverged),
    ("late-label", MirrorMutation::LateLabel),
    ("count-on", MirrorMutation::CountOn),
    ("believe-pages", MirrorMutation::TrustPages),
];

fn find<T: Copy>(known: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = known.iter().find(|(known, _)| *known == name).map(|(_, mutation)| *mutation);
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| format!("the faults are {}", names.join(", ")))
}

impl Subject {
    /// The subject of this name, with this fault.
    ///
    /// # Errors
    /// When there is none; the message says what there is.
    pub fn new(system: &str, mutation: &str) -> Result<Subject, String> {
        match system {
            "volume" => find(&OF_VOLUMES, mutation).map(Subject::Volume),
            "mirror" => find(&OF_MIRRORS, mutation).map(Subject::Mirror),
            "walk" => find(&OF_MIRRORS, mutation).map(Subject::Walk),
            _ => Err("the systems are volume, mirror, walk".to_owned()),
        }
    }

    /// The loads it is put under.
    pub fn loads(self) -> &'static [Workload] {
        match self {
            Subject::Volume(_) => &Workload::ALL,
            Subject::Mirror(_) => &mirror::LOADS,
            Subject::Walk(_) => &mirror::walk::LOADS,
        }
    }

    /// Runs one seed.
    ///
    /// # Errors
    /// The first thing that must not be.
    pub fn run(self, order: Order) -> Result<Report, Box<FailureReport>> {
        match self {
            Subject::Volume(mutation) => trial::run(&Volumes { mutation }, order),
            Subject::Mirror(mutation) => mirror::run(mutation, order),
            Subject::Walk(mutation) => mirror::walk::run(mutation, order),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert_eq!(Subject::new("mirror", "unordered"), Ok(Subject::Mirror(MirrorMutation::Unordered)));
        assert_eq!(Subject::new("volume", "none"), Ok(Subject::Volume(VolumeMutation::None)));
        assert!(Subject::new("volume", "unordered").is_err() && Subject::new("disk", "none").is_err());
    }
}
