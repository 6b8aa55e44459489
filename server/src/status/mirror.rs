//! The state of a mirror and its replicas: what `mirror status --json` prints and a server sends.

use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{MirrorInfo, MirrorState, ReplicaInfo};
use sealblock_stack::identity::uuid_text;
use serde::{Deserialize, Serialize};

use super::health::Health;

/// The state of a mirror. `docs/formats/json.md` is the contract.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// Its identity.
    pub uuid: String,
    /// Its name, if it has one.
    #[serde(default)]
    pub name: Option<String>,
    /// `optimal`, `degraded` or `failed`.
    pub state: String,
    /// Bytes of a region, the unit of `out_of_sync_bytes`.
    pub region_bytes: u64,
    /// Bytes of the regions in which replicas may differ now.
    pub dirty_bytes: u64,
    /// Blocks that were requested and had no good copy.
    pub lost_blocks: u64,
    /// Its replicas; those that were taken out are `removed` until another replica gets their index.
    pub replicas: Vec<ReplicaStatus>,
}

/// The state of a replica.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// The target name it was opened by.
    pub name: String,
    /// `in_sync`, `out_of_sync`, `resyncing` or `removed`.
    pub state: String,
    /// True if its device can be reached.
    pub online: bool,
    /// Why it is offline or was marked out of sync.
    pub last_error: Option<String>,
    /// Bytes of the regions that are still to resync.
    pub out_of_sync_bytes: u64,
    /// Bytes that resyncs wrote since the mirror was opened.
    pub resynced_bytes: u64,
    /// Blocks that were rewritten from another replica since the mirror was opened.
    pub repaired_blocks: u64,
    /// Blocks of which it has an older copy and no replica has a newer one; `mirror accept-stale` makes these current.
    #[serde(default)]
    pub stale_blocks: u64,
    /// How often it was marked out of sync since the mirror was opened.
    pub failures: u64,
}

impl MirrorStatus {
    /// The state of `mirror` now.
    pub fn of(mirror: &MirrorInfo) -> MirrorStatus {
        MirrorStatus {
            uuid: uuid_text(&mirror.uuid),
            name: mirror.name.map(|name| name.to_string()),
            state: mirror.state.as_str().to_owned(),
            region_bytes: mirror.region_bytes,
            dirty_bytes: mirror.dirty_bytes,
            lost_blocks: mirror.lost_blocks,
            replicas: mirror.replicas.iter().map(ReplicaStatus::of).collect(),
        }
    }

    /// How well it is: healthy only if every replica is online and in sync.
    pub fn health(&self) -> Health {
        if self.state == MirrorState::Optimal.as_str() { Health::Healthy } else { Health::Degraded }
    }

    /// The replica of this name; the newest if an earlier one had the same name.
    pub fn replica(&self, name: &str) -> Option<&ReplicaStatus> {
        self.replicas.iter().rev().find(|replica| replica.name == name && !replica.is(ReplicaState::Removed))
    }
}

impl ReplicaStatus {
    fn of(replica: &ReplicaInfo) -> ReplicaStatus {
        ReplicaStatus {
            name: replica.name.clone(),
            state: replica.state.as_str().to_owned(),
            online: replica.is_online,
            last_error: Some(replica.last_error.clone()).filter(|why| !why.is_empty()),
            out_of_sync_bytes: replica.out_of_sync_bytes,
            resynced_bytes: replica.resynced_bytes,
            repaired_blocks: replica.repaired_blocks,
            stale_blocks: replica.stale_blocks,
            failures: replica.failures,
        }
    }

    /// True if this is its state.
    pub fn is(&self, state: ReplicaState) -> bool {
        self.state == state.as_str()
    }
}

/// A state of a replica for people.
pub fn state_text(state: &str) -> String {
    state.replace('_', " ")
}
