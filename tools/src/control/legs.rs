//! How the legs of a mirror are, as it is told: what `mirror status --json` prints, and what a server answers.

use std::fmt::Write;

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{Description, LegDescription, State};
use sealblock_units::ByteCount;
use serde::{Deserialize, Serialize};

use crate::commands::create::uuid_words;
use crate::exit::Exit;

/// How a mirror is. `docs/formats/json.md` is the contract.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// Its identity.
    pub uuid: String,
    /// `optimal`, `degraded` or `failed`.
    pub state: String,
    /// Bytes of a region, the unit of what a leg has missed.
    pub region_bytes: u64,
    /// Bytes of the regions in which legs may differ just now.
    pub unsettled_bytes: u64,
    /// Blocks that were asked for and had no good copy.
    pub lost_blocks: u64,
    /// Its legs; those that were taken out are `removed` until their place is given away.
    pub legs: Vec<LegStatus>,
}

/// How a leg is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LegStatus {
    /// What it is called.
    pub leg: String,
    /// `current`, `missing`, `rebuilding` or `removed`.
    pub standing: String,
    /// Whether it can be reached.
    pub here: bool,
    /// Why not, or why it was left behind.
    pub trouble: Option<String>,
    /// Bytes of the regions that it still lacks.
    pub missed_bytes: u64,
    /// Bytes copied to bring it up to date since the mirror was opened.
    pub copied_bytes: u64,
    /// Blocks on it that were written anew from another leg since then.
    pub healed_blocks: u64,
    /// Blocks of which it keeps an older copy and nobody has a newer one; `mirror accept-stale` takes them.
    #[serde(default)]
    pub stale_blocks: u64,
    /// How often it was left behind since then.
    pub failures: u64,
}

impl MirrorStatus {
    /// A mirror as it is now.
    pub fn of(mirror: &Description) -> MirrorStatus {
        MirrorStatus {
            uuid: uuid_words(&mirror.uuid),
            state: mirror.state.as_str().to_owned(),
            region_bytes: mirror.region_bytes,
            unsettled_bytes: mirror.unsettled_bytes,
            lost_blocks: mirror.lost_blocks,
            legs: mirror.legs.iter().map(LegStatus::of).collect(),
        }
    }

    /// How a command ends that tells this: only a mirror whose copies are all there and in sync is as it should be.
    pub fn exit(&self) -> Exit {
        if self.state == State::Optimal.as_str() { Exit::Clean } else { Exit::Incomplete }
    }

    /// The leg of this name: the newest, should an earlier one have had it.
    pub fn leg(&self, name: &str) -> Option<&LegStatus> {
        self.legs.iter().rev().find(|leg| leg.leg == name && leg.standing != "removed")
    }

    /// A mirror for people: a line for its identity and each leg.
    pub fn words(&self) -> String {
        let mut words = format!("{:<16}{}\n{:<16}{}\n", "uuid", self.uuid, "state", self.state);
        for leg in self.legs_words() {
            writeln!(words, "{:<16}{leg}", "leg").expect("a text takes what is written to it");
        }
        if self.unsettled_bytes > 0 {
            let bytes = ByteCount::new(self.unsettled_bytes);
            writeln!(words, "{:<16}{bytes}, where legs may differ just now", "unsettled")
                .expect("a text takes what is written to it");
        }
        words
    }

    /// Each leg for people.
    pub fn legs_words(&self) -> Vec<String> {
        let legs = self.legs.iter().filter(|leg| leg.standing != "removed").map(|leg| {
            let missed = match leg.missed_bytes {
                0 => String::new(),
                bytes => format!(", lacks {} at most", ByteCount::new(bytes)),
            };
            let healed = if leg.healed_blocks == 0 { String::new() } else { format!(", {} healed", leg.healed_blocks) };
            let stale = match leg.stale_blocks {
                0 => String::new(),
                blocks => format!(", {blocks} older copies kept"),
            };
            let trouble = leg.trouble.as_ref().map_or(String::new(), |why| format!(": {why}"));
            let here = if leg.here { "" } else { ", not here" };
            // One that is here again and was not looked after yet.
            let is_behind = leg.here && leg.standing == ReplicaState::OutOfSync.as_str();
            let standing = if is_behind { "out of sync" } else { &leg.standing };
            format!("{}: {standing}{here}{missed}{healed}{stale}{trouble}", leg.leg)
        });
        legs.collect()
    }
}

impl LegStatus {
    fn of(leg: &LegDescription) -> LegStatus {
        LegStatus {
            leg: leg.name.clone(),
            standing: leg.standing.as_str().to_owned(),
            here: leg.is_here,
            trouble: Some(leg.why.clone()).filter(|why| !why.is_empty()),
            missed_bytes: leg.missed_bytes,
            copied_bytes: leg.copied_bytes,
            healed_blocks: leg.healed_blocks,
            stale_blocks: leg.stale_blocks,
            failures: leg.failures,
        }
    }
}
