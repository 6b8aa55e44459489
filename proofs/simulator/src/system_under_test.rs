//! The systems under test, by their names on the command line.

use clap::ValueEnum;
use sealblock_layers_mirror::Mutation as MirrorMutation;
use sealblock_media_volume::Mutation as VolumeMutation;

use crate::mirror;
use crate::shards::{ShardMutation, ShardedVolumes};
use crate::system::Volumes;
use crate::trial::{self, FailureReport, Report, TrialConfig};
use crate::workload::Workload;

/// A kind of device, and the injected defect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SystemUnderTest {
    /// Protected volumes.
    Volume(VolumeMutation),
    /// Protected volumes in shards.
    Shards(ShardMutation),
    /// Mirrors of protected volumes.
    Mirror(MirrorMutation),
    /// Walks of mirrors through histories.
    Walk(MirrorMutation),
}

const OF_VOLUMES: [(&str, VolumeMutation); 35] = [
    ("none", VolumeMutation::None),
    ("skip-sync", VolumeMutation::SkipSync),
    ("late-tags", VolumeMutation::LateTags),
    ("reuse-early", VolumeMutation::ReuseEarly),
    ("entry-in-flight", VolumeMutation::EntryInFlight),
    ("trust-log", VolumeMutation::TrustLog),
    ("repeat-nothing", VolumeMutation::RepeatNothing),
    ("repeat-as-new", VolumeMutation::RepeatAsNew),
    ("one-region", VolumeMutation::OneRegion),
    ("skip-second-copy", VolumeMutation::SkipSecondCopy),
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
    ("no-anchor", VolumeMutation::NoAnchor),
    ("keep-clean", VolumeMutation::KeepClean),
    ("note-late", VolumeMutation::NoteLate),
    ("note-dropped", VolumeMutation::NoteDropped),
    ("note-early", VolumeMutation::NoteEarly),
    ("base-behind", VolumeMutation::BaseBehind),
    ("half-early", VolumeMutation::HalfEarly),
    ("trust-notes", VolumeMutation::TrustNotes),
    ("forget-lost", VolumeMutation::ForgetLost),
];

const OF_MIRRORS: [(&str, MirrorMutation); 22] = [
    ("none", MirrorMutation::None),
    ("skip-mark", MirrorMutation::SkipMark),
    ("complete-early", MirrorMutation::CompleteEarly),
    ("read-resyncing", MirrorMutation::ReadResyncing),
    ("clear-unflushed", MirrorMutation::ClearUnflushed),
    ("evict-unflushed", MirrorMutation::EvictUnflushed),
    ("unordered", MirrorMutation::Unordered),
    ("close-in-flight", MirrorMutation::CloseInFlight),
    ("poison-last-copy", MirrorMutation::PoisonLastCopy),
    ("forget-stale", MirrorMutation::ForgetStale),
    ("forget-flushing", MirrorMutation::ForgetFlushing),
    ("forget-out-of-sync", MirrorMutation::ForgetOutOfSync),
    ("skip-lineage", MirrorMutation::SkipLineage),
    ("skip-own-label", MirrorMutation::SkipOwnLabel),
    ("skip-removed-label", MirrorMutation::SkipRemovedLabel),
    ("forget-sessions", MirrorMutation::ForgetSessions),
    ("trust-order", MirrorMutation::TrustOrder),
    ("reattach-diverged", MirrorMutation::ReattachDiverged),
    ("late-label", MirrorMutation::LateLabel),
    ("count-on", MirrorMutation::CountOn),
    ("trust-pages", MirrorMutation::TrustPages),
    ("keep-delegating", MirrorMutation::KeepDelegating),
];

const OF_SHARDS: [(&str, ShardMutation); 3] =
    [("none", ShardMutation::None), ("flush-one", ShardMutation::FlushOne), ("other-units", ShardMutation::OtherUnits)];

fn find<T: Copy>(known: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = known.iter().find(|(known, _)| *known == name).map(|(_, mutation)| *mutation);
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| format!("the faults are {}", names.join(", ")))
}

impl SystemUnderTest {
    /// The system of this name, with the mutation of this name.
    ///
    /// # Errors
    /// If there is none; the error lists the names.
    pub fn new(system: &str, mutation: &str) -> Result<SystemUnderTest, String> {
        match system {
            "volume" => find(&OF_VOLUMES, mutation).map(SystemUnderTest::Volume),
            "shards" => find(&OF_SHARDS, mutation).map(SystemUnderTest::Shards),
            "mirror" => find(&OF_MIRRORS, mutation).map(SystemUnderTest::Mirror),
            "walk" => find(&OF_MIRRORS, mutation).map(SystemUnderTest::Walk),
            _ => Err("the systems are volume, shards, mirror, walk".to_owned()),
        }
    }

    /// The loads of the system.
    pub fn loads(self) -> &'static [Workload] {
        match self {
            SystemUnderTest::Volume(_) | SystemUnderTest::Shards(_) => Workload::value_variants(),
            SystemUnderTest::Mirror(_) => &mirror::LOADS,
            SystemUnderTest::Walk(_) => &mirror::walk::LOADS,
        }
    }

    /// Runs one seed.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(self, config: TrialConfig) -> Result<Report, Box<FailureReport>> {
        match self {
            SystemUnderTest::Volume(mutation) => trial::run(&Volumes { mutation }, config),
            SystemUnderTest::Shards(mutation) => trial::run(&ShardedVolumes { mutation }, config),
            SystemUnderTest::Mirror(mutation) => mirror::run(mutation, config),
            SystemUnderTest::Walk(mutation) => mirror::walk::run(mutation, config),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `TrustOrder` becomes `trust-order`.
    fn kebab_case(mutation: impl std::fmt::Debug) -> String {
        let mut name = String::new();
        for letter in format!("{mutation:?}").chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }

    #[test]
    fn the_names_of_mutations_are_those_in_the_code() {
        for (name, mutation) in OF_VOLUMES {
            assert_eq!(name, kebab_case(mutation));
        }
        for (name, mutation) in OF_SHARDS {
            assert_eq!(name, kebab_case(mutation));
        }
        for (name, mutation) in OF_MIRRORS {
            assert_eq!(name, kebab_case(mutation));
        }
    }

    #[test]
    fn names_of_one_system_are_unknown_to_another() {
        assert_eq!(SystemUnderTest::new("mirror", "unordered"), Ok(SystemUnderTest::Mirror(MirrorMutation::Unordered)));
        assert_eq!(SystemUnderTest::new("volume", "none"), Ok(SystemUnderTest::Volume(VolumeMutation::None)));
        assert!(SystemUnderTest::new("volume", "unordered").is_err() && SystemUnderTest::new("disk", "none").is_err());
    }
}
