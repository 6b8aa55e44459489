//! What a saved verify is of: the identity and state of everything that an open target is made of, as texts.
//!
//! Blocks that were verified count only as long as all of it is the same: another file under the same name, another replica of a mirror, or
//! one that went out of sync, and a volume that was written are differences. A remote target tells its identity alone.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use sealblock_block::Device;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_stack::identity::{hex, uuid_text};
use sealblock_stack::kernel::below::nodes_under;
use sealblock_stack::{OpenTarget, TargetInfo, protection_text};

use super::record::{Identity, MAX_IDS};

/// What an open target is, and in what state.
pub(super) fn identity_of(opened: &OpenTarget) -> Identity {
    let geometry = opened.device.geometry();
    let (mut ids, mut states) = (Vec::new(), Vec::new());
    add(&opened.info, &mut ids, &mut states);
    ids.truncate(MAX_IDS);
    states.truncate(MAX_IDS);
    Identity {
        blocks: geometry.capacity_blocks,
        block_size: geometry.block_size.bytes() as u64,
        protection: protection_text(geometry.protection),
        ids,
        states,
    }
}

fn add(info: &TargetInfo, ids: &mut Vec<String>, states: &mut Vec<String>) {
    if let Some(mirror) = &info.mirror {
        let mirror = mirror.describe();
        ids.extend(mirror.uuid.iter().map(|uuid| format!("mirror {}", uuid_text(uuid))));
        let replicas = mirror.replicas.iter().filter(|replica| replica.state != ReplicaState::Removed);
        // Without a label their identities are made up, too.
        ids.extend(
            replicas
                .filter(|_| mirror.uuid.is_some())
                .map(|replica| format!("replica {}, {}", hex(&replica.id), replica.state.as_str())),
        );
    }
    if let Some(volume) = &info.volume {
        let uuid = uuid_text(&volume.uuid);
        states.push(format!("volume {uuid} at superblock {}", volume.write_seq));
        ids.push(format!("volume {uuid}"));
    }
    if let Some(uuid) = info.remote.as_ref().and_then(|remote| remote.uuid) {
        ids.push(format!("namespace {}", uuid_text(&uuid)));
    }
    if let Some(file) = &info.file {
        match file.is_block_device {
            true => {
                let id = nodes_under(&file.path).ok().and_then(|nodes| nodes.first()?.id.clone());
                ids.push(format!(
                    "device {}",
                    sealblock_stack::printable(&id.unwrap_or_else(|| file.device.to_string()))
                ));
            }
            false => add_file(file, ids, states),
        }
    }
    // All paths of a multipath device lead to one device.
    let inner = if info.paths.is_some() { info.inner.get(..1).unwrap_or(&[]) } else { &info.inner[..] };
    inner.iter().for_each(|info| add(info, ids, states));
}

/// A file by its number and the time of its birth: numbers are used again. Its state is the time of its last change, which, unlike that of
/// the last write, no program can set back: a volume that was put back to an earlier state and written again can have the same count.
fn add_file(file: &sealblock_media_file::FileInfo, ids: &mut Vec<String>, states: &mut Vec<String>) {
    let about = fs::metadata(&file.path).ok().filter(|about| (about.dev(), about.ino()) == (file.device, file.inode));
    let born = about.as_ref().and_then(|about| about.created().ok()?.duration_since(UNIX_EPOCH).ok());
    let born =
        born.map_or("at an unknown time".to_owned(), |born| format!("{}.{:09}", born.as_secs(), born.subsec_nanos()));
    ids.push(format!("file {} on {}, made {born}", file.inode, file.device));
    if let Some(about) = about {
        states.push(format!("file {} changed {}.{:09}", file.inode, about.ctime(), about.ctime_nsec()));
    }
}
