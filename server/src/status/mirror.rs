//! The state of a mirror and its replicas, as `mirror status --json` prints it and a server sends it.

use sealblock_block::WhyOlder;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_mirror::{MirrorInfo, MirrorState, ReplicaInfo};
use sealblock_stack::OpenMirror;
use sealblock_stack::identity::uuid_text;
use serde::{Deserialize, Serialize};

use super::connections::LostConnection;
use super::damage::DamageStatus;
use super::files::FileError;
use super::health::Health;

/// The state of a device without a label that makes it a replica.
const UNLABELLED: &str = MirrorState::Unlabelled.as_str();

/// The state of a mirror. `docs/formats/json.md` defines it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// Its identity from its labels; `None` if there are none.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Its name, if it has one.
    #[serde(default)]
    pub name: Option<String>,
    /// `optimal`, `degraded`, `failed` or `unlabelled`.
    pub state: String,
    /// Bytes of a region, the unit of `out_of_sync_bytes`.
    pub region_bytes: u64,
    /// Bytes of the regions that are marked for changes, which would be compared after a crash.
    pub dirty_bytes: u64,
    /// The maximum of `dirty_bytes`, not counting regions in which replicas differ. An older server does not report it.
    #[serde(default)]
    pub max_dirty_bytes: Option<u64>,
    /// Bytes of the regions in which replicas may differ, until they are reconciled.
    #[serde(default)]
    pub nosync_bytes: u64,
    /// Why blocks may be older than the last writes, if they may: every in-sync replica lacks something, such as its
    /// log.
    #[serde(default)]
    pub may_be_older: Option<String>,
    /// Blocks that were requested but had no good copy.
    pub lost_blocks: u64,
    /// Its replicas; removed ones are listed as `removed` until another replica gets their index.
    pub replicas: Vec<ReplicaStatus>,
}

/// The state of a replica.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// The target name by which it was opened.
    pub name: String,
    /// `in_sync`, `out_of_sync`, `resyncing` or `removed`; `unlabelled` if there is no label.
    pub state: String,
    /// True if its device can be reached.
    pub online: bool,
    /// False if its device has no room for a label: only its name and size tell that it is the replica.
    #[serde(default = "yes")]
    pub has_label_room: bool,
    /// Why it is offline, or why it was marked out of sync.
    pub last_error: Option<String>,
    /// Bytes of the regions that remain to be resynced.
    pub out_of_sync_bytes: u64,
    /// Bytes that resyncs wrote since the mirror was opened.
    pub resynced_bytes: u64,
    /// Blocks that were rewritten from another replica since the mirror was opened.
    pub repaired_blocks: u64,
    /// Blocks of which it has an older copy while no replica has a newer one; `mirror accept-stale` makes these copies
    /// current.
    #[serde(default)]
    pub stale_blocks: u64,
    /// How often it was marked out of sync since the mirror was opened.
    pub failures: u64,
    /// The connections to other hosts that it lost while it was in use; then it is not online.
    #[serde(default)]
    pub lost_connections: Vec<LostConnection>,
    /// Its files that were deleted, renamed, replaced or truncated.
    #[serde(default)]
    pub file_errors: Vec<FileError>,
    /// Copies of its metadata that were lost when it was opened and have not been rewritten, as text for people.
    #[serde(default)]
    pub lost_metadata: Vec<String>,
    /// Its known bad blocks; `None` if it has not been open since the mirror was opened.
    #[serde(default)]
    pub damage: Option<DamageStatus>,
}

/// What servers that do not report it have.
fn yes() -> bool {
    true
}

impl MirrorStatus {
    /// The current state of `mirror`, as its labels, its replicas and their files show it.
    pub fn of(mirror: &OpenMirror) -> MirrorStatus {
        let files = mirror.files();
        let errors_of = |name: &str| {
            let files = files.iter().filter(|(replica, _)| replica == name).flat_map(|(_, files)| files);
            files.filter_map(|file| FileError::of(file)).collect()
        };
        let damage = mirror.damage().replicas();
        let damage_of = |name: &str| {
            let of = damage.iter().find(|(replica, _)| replica == name);
            of.map(|(_, damage)| DamageStatus::of(damage))
        };
        let why_older = mirror.why_older();
        let mut status = MirrorStatus::with(&mirror.describe(), errors_of, damage_of);
        for (name, lost) in mirror.lost_metadata().into_iter().filter(|(_, lost)| !lost.is_empty()) {
            let of = status.replicas.iter_mut().find(|replica| replica.name == name && replica.online);
            of.into_iter().for_each(|replica| replica.lost_metadata.clone_from(&lost));
            if status.state == MirrorState::Optimal.as_str() {
                status.state = MirrorState::Degraded.as_str().to_owned();
            }
        }
        for (name, lost) in mirror.lost_connections() {
            status.set_lost_connections(&name, lost.into_iter().map(Into::into).collect());
        }
        if let Some(why) = why_older {
            status.may_be_older = Some(why.as_str().to_owned());
            if status.state == MirrorState::Optimal.as_str() {
                status.state = MirrorState::Degraded.as_str().to_owned();
            }
        }
        status
    }

    /// Shows a replica whose connections are lost as offline, even if no request has failed because of that yet.
    fn set_lost_connections(&mut self, name: &str, lost: Vec<LostConnection>) {
        let is_named =
            |replica: &&mut ReplicaStatus| replica.name == name && replica.online && !replica.is(ReplicaState::Removed);
        let Some(replica) = self.replicas.iter_mut().find(is_named).filter(|_| !lost.is_empty()) else { return };
        replica.online = false;
        replica.last_error = Some(lost.iter().map(LostConnection::to_text).collect::<Vec<_>>().join("; "));
        replica.lost_connections = lost;
        let is_current = |replica: &ReplicaStatus| replica.is(ReplicaState::InSync) && replica.online;
        let state = match self.replicas.iter().any(is_current) {
            true => MirrorState::Degraded,
            false => MirrorState::Failed,
        };
        state.as_str().clone_into(&mut self.state);
    }

    /// Why blocks may be older than the last writes, if they may.
    pub fn why_older(&self) -> Option<WhyOlder> {
        self.may_be_older.as_deref().map(WhyOlder::named)
    }

    /// The state of a mirror whose replicas' files have these errors and these bad blocks. A mirror with a replica that
    /// has lost its file or blocks is not optimal, even if no request has failed because of it yet.
    fn with(
        mirror: &MirrorInfo,
        errors_of: impl Fn(&str) -> Vec<FileError>,
        damage_of: impl Fn(&str) -> Option<DamageStatus>,
    ) -> MirrorStatus {
        let is_labelled = mirror.uuid.is_some();
        let of = |replica: &ReplicaInfo| {
            let is_member = replica.state != ReplicaState::Removed;
            let files = if is_member && replica.is_online { errors_of(&replica.name) } else { Vec::new() };
            let damage = Some(&replica.name).filter(|_| is_member).and_then(|name| damage_of(name));
            let of = ReplicaStatus::of(replica);
            let state = if is_labelled || !is_member { of.state.clone() } else { UNLABELLED.to_owned() };
            ReplicaStatus { state, file_errors: files, damage, ..of }
        };
        let is_sound = |replica: &ReplicaStatus| replica.file_errors.is_empty() && !replica.has_damage();
        let replicas: Vec<ReplicaStatus> = mirror.replicas.iter().map(of).collect();
        let state = match mirror.state {
            MirrorState::Optimal | MirrorState::Unlabelled if !replicas.iter().all(is_sound) => MirrorState::Degraded,
            state => state,
        };
        MirrorStatus {
            uuid: mirror.uuid.as_ref().map(uuid_text),
            name: mirror.name.map(|name| name.to_string()),
            state: state.as_str().to_owned(),
            region_bytes: mirror.region_bytes,
            dirty_bytes: mirror.dirty_bytes,
            max_dirty_bytes: Some(mirror.max_dirty_bytes).filter(|_| is_labelled),
            nosync_bytes: mirror.nosync_bytes,
            may_be_older: None,
            lost_blocks: mirror.lost_blocks,
            replicas,
        }
    }

    /// Its health: healthy only if every replica is online, in sync, and has its file.
    pub fn health(&self) -> Health {
        let state = match &self.state {
            state if state == MirrorState::Optimal.as_str() => Health::Healthy,
            // Blank devices lack nothing, but nothing makes them a mirror.
            state if state == MirrorState::Unlabelled.as_str() => Health::Incomplete,
            _ => Health::Degraded,
        };
        let files = self.replicas.iter().flat_map(|replica| &replica.file_errors);
        let blocks = self.replicas.iter().filter_map(|replica| replica.damage.as_ref()).map(DamageStatus::health);
        files.map(FileError::health).chain(blocks).max().unwrap_or_default().max(state)
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
            has_label_room: replica.has_label_room,
            last_error: Some(replica.last_error.clone()).filter(|why| !why.is_empty()),
            out_of_sync_bytes: replica.out_of_sync_bytes,
            resynced_bytes: replica.resynced_bytes,
            repaired_blocks: replica.repaired_blocks,
            stale_blocks: replica.stale_blocks,
            failures: replica.failures,
            lost_connections: Vec::new(),
            file_errors: Vec::new(),
            lost_metadata: Vec::new(),
            damage: None,
        }
    }

    /// True if it has blocks that are bad, or may be.
    pub fn has_damage(&self) -> bool {
        self.damage.as_ref().is_some_and(DamageStatus::has_any)
    }

    /// True if it is in this state.
    pub fn is(&self, state: ReplicaState) -> bool {
        self.state == state.as_str()
    }
}

/// The state of a replica as text for people.
pub fn state_text(state: &str) -> String {
    state.replace('_', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_of_which_a_replica_has_lost_its_file_is_not_optimal() {
        let replica = |name: &str, is_online| ReplicaInfo {
            id: [0; 16],
            name: name.to_owned(),
            state: ReplicaState::InSync,
            is_online,
            has_label_room: true,
            last_error: String::new(),
            out_of_sync_bytes: 0,
            resynced_bytes: 0,
            repaired_blocks: 0,
            stale_blocks: 0,
            failures: 0,
        };
        let mirror = |state, is_b_online| MirrorInfo {
            uuid: Some([1; 16]),
            name: None,
            region_bytes: 65536,
            state,
            dirty_bytes: 0,
            max_dirty_bytes: 1 << 30,
            nosync_bytes: 0,
            lost_blocks: 0,
            replicas: vec![replica("a", true), replica("b", is_b_online)],
        };
        let of = |error: &str, left_bytes: Option<u64>| {
            let (path, length_bytes) = ("/d/b".to_owned(), left_bytes.map(|_| 4096));
            FileError { path, error: error.to_owned(), left_bytes, length_bytes }
        };
        let seen = |mirror: &MirrorInfo, error: Option<FileError>| {
            let errors_of = |name: &str| if name == "b" { error.iter().cloned().collect() } else { Vec::new() };
            let status = MirrorStatus::with(mirror, errors_of, |_| None);
            (status.state.clone(), status.health(), status.replicas[1].file_errors.len())
        };
        let words = |state: MirrorState, health, files| (state.as_str().to_owned(), health, files);
        let whole = mirror(MirrorState::Optimal, true);
        assert_eq!(seen(&whole, None), words(MirrorState::Optimal, Health::Healthy, 0));
        let gone = seen(&whole, Some(of("gone", None)));
        assert_eq!(gone, words(MirrorState::Degraded, Health::Degraded, 1));
        let cut = seen(&whole, Some(of("cut_off", Some(7))));
        assert_eq!(cut, words(MirrorState::Degraded, Health::Damaged, 1));
        let bad = DamageStatus { blocks: 1, blocks_at_most: 1, complete: true, ..DamageStatus::default() };
        let status = MirrorStatus::with(&whole, |_| Vec::new(), |name| Some(bad.clone()).filter(|_| name == "b"));
        assert_eq!((status.state.as_str(), status.health()), (MirrorState::Degraded.as_str(), Health::Damaged));
        // No request has failed on the lost connection yet.
        let mut status = MirrorStatus::with(&whole, |_| Vec::new(), |_| None);
        status.set_lost_connections("b", Vec::new());
        assert_eq!((status.state.as_str(), status.replicas[1].online), (MirrorState::Optimal.as_str(), true));
        let lost = |target: &str| {
            let (target, reason) = (target.to_owned(), "closed".to_owned());
            vec![LostConnection { target, since_unix_s: 0, reason, reconnecting: true }]
        };
        status.set_lost_connections("b", lost("nbd://h/b"));
        assert_eq!((status.state.as_str(), status.health()), (MirrorState::Degraded.as_str(), Health::Degraded));
        assert!(!status.replicas[1].online);
        let why = status.replicas[1].last_error.clone().unwrap();
        assert!(
            why.starts_with("connection to nbd://h/b lost since") && why.ends_with("reconnecting: closed"),
            "{why}"
        );
        status.set_lost_connections("a", lost("nbd://h/a"));
        assert_eq!((status.state.as_str(), status.health()), (MirrorState::Failed.as_str(), Health::Degraded));
        // An offline replica serves nothing from its file.
        let away = seen(&mirror(MirrorState::Degraded, false), Some(of("gone", None)));
        assert_eq!(away, words(MirrorState::Degraded, Health::Degraded, 0));
    }
}
