//! What a saved verify is of: the identity and state of everything that an open target is made of, as texts.
//!
//! Blocks that were verified count only as long as all of it is the same: another file under the same name, another replica of a mirror, or
//! one that went out of sync, and a volume that was written are differences.
//!
//! Not everything shows them. Namespaces of servers and block devices without a volume have an identity, but no count of writes: blocks that
//! were verified before may have been written since, and no run calls them clean. Exports over NBD and memory have no identity either, so
//! that a run cannot resume.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use sealblock_block::Device;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_media_file::FileInfo;
use sealblock_stack::identity::{device_id, hex, namespace_text, uuid_text};
use sealblock_stack::{OpenMirror, OpenTarget, TargetInfo, printable, protection_text};

use super::record::{Identity, MAX_IDS};

/// An open target, and what is known of whether it is still as it was.
pub(super) struct Current {
    /// What it is, and in what state.
    pub(super) identity: Identity,
    /// The kind of a device in it that nothing identifies.
    pub(super) unidentified: Option<&'static str>,
    /// True if a device in it may be written without a difference in `identity`.
    pub(super) is_untraced: bool,
}

/// What an open target is now.
pub(super) fn current(opened: &OpenTarget) -> Current {
    let geometry = opened.device.geometry();
    let mut found = Found::default();
    found.add(&opened.info, false);
    let Found { mut ids, mut states, unidentified, is_untraced } = found;
    ids.truncate(MAX_IDS);
    states.truncate(MAX_IDS);
    let identity = Identity {
        blocks: geometry.capacity_blocks,
        block_size: geometry.block_size.bytes() as u64,
        protection: protection_text(geometry.protection),
        ids,
        states,
    };
    Current { identity, unidentified, is_untraced }
}

/// What was found of the parts of a target until now.
#[derive(Default)]
struct Found {
    ids: Vec<String>,
    states: Vec<String>,
    unidentified: Option<&'static str>,
    is_untraced: bool,
}

impl Found {
    /// Adds a part and all parts below. `is_labelled`: a label on it distinguishes it from other members of groups.
    fn add(&mut self, info: &TargetInfo, is_labelled: bool) {
        let mut is_labelled = is_labelled;
        if let Some(mirror) = &info.mirror {
            is_labelled |= self.add_mirror(mirror);
        }
        let (mut is_identified, mut is_traced) = (is_labelled, false);
        if let Some(volume) = &info.volume {
            let uuid = uuid_text(&volume.uuid);
            self.states.push(format!("volume {uuid} at superblock {}", volume.write_seq));
            self.ids.push(format!("volume {uuid}"));
            (is_identified, is_traced) = (true, true);
        }
        if let Some(remote) = &info.remote {
            self.ids.push(namespace_text(remote));
            is_identified = true;
        }
        match &info.file {
            Some(file) if file.is_block_device => {
                let id = device_id(file);
                is_identified |= id.is_some();
                self.ids.push(format!("device {}", printable(&id.unwrap_or_else(|| file.device.to_string()))));
            }
            Some(file) => {
                is_identified = true;
                is_traced |= self.add_file(file);
            }
            None => {}
        }
        if info.inner.is_empty() {
            self.is_untraced |= !is_traced;
            self.unidentified = self.unidentified.or((!is_identified).then_some(info.kind));
        }
        // All paths of a multipath device lead to one device.
        let inner = if info.paths.is_some() { info.inner.get(..1).unwrap_or(&[]) } else { &info.inner[..] };
        inner.iter().for_each(|info| self.add(info, is_labelled));
    }

    /// Adds a mirror; true if it has labels.
    fn add_mirror(&mut self, mirror: &OpenMirror) -> bool {
        let mirror = mirror.describe();
        let Some(uuid) = &mirror.uuid else {
            // Without a label the identities of replicas are made up, too.
            return false;
        };
        self.ids.push(format!("mirror {}", uuid_text(uuid)));
        let replicas = mirror.replicas.iter().filter(|replica| replica.state != ReplicaState::Removed);
        self.ids.extend(replicas.map(|replica| format!("replica {}, {}", hex(&replica.id), replica.state.as_str())));
        true
    }

    /// Adds a file by its number and the time of its birth: numbers are used again. Its state is the time of its last change, which,
    /// unlike that of the last write, no program can set back: a volume that was put back to an earlier state and written again can
    /// have the same count. True if that time is known.
    fn add_file(&mut self, file: &FileInfo) -> bool {
        let about =
            fs::metadata(&file.path).ok().filter(|about| (about.dev(), about.ino()) == (file.device, file.inode));
        let born = about.as_ref().and_then(|about| about.created().ok()?.duration_since(UNIX_EPOCH).ok());
        let born = born
            .map_or("at an unknown time".to_owned(), |born| format!("{}.{:09}", born.as_secs(), born.subsec_nanos()));
        self.ids.push(format!("file {} on {}, made {born}", file.inode, file.device));
        let changed =
            about.map(|about| format!("file {} changed {}.{:09}", file.inode, about.ctime(), about.ctime_nsec()));
        let is_known = changed.is_some();
        self.states.extend(changed);
        is_known
    }
}
