//! What a target is made of, for `info`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::UNIX_EPOCH;

use sealblock_integrity::PiFormat;
use sealblock_layers_multipath::PathMonitor;
use sealblock_layers_stripe::label::Label as StripeLabel;
use sealblock_media_file::{Backing, FileInfo as FileDescription, open_files};
use sealblock_media_linux::{NvmeInfo, ScsiInfo, TagProfile};
use sealblock_media_nbd::ConnectionInfo as NbdConnectionInfo;
use sealblock_media_nvme_tcp::{ConnectionInfo as NvmeConnectionInfo, NvmeTcpDevice};
use sealblock_media_volume::VolumeInfo as VolumeDescription;

use crate::groups::replicas::OpenMirror;
use crate::identity::{hex, namespace_identity, uuid_of};
use crate::kernel::DeviceNumber;
use crate::kernel::below::{NodeKind, node};
use crate::kernel::leaves::{Leaf, Storage, leaves_at, leaves_of_device};
use crate::opened::connections::RemoteConnection;
use crate::opened::damage_view::DamageView;
use crate::opened::lost_metadata::LostMetadata;
use crate::opened::own_label::OwnLabel;
use crate::opened::same_remote::{RemoteDevices, is_whole_namespace};
use crate::opened::target_identity::TargetIdentity;
use crate::target::{GroupKind, TargetName};

/// How a drive of this machine is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriveInfo {
    /// Through NVMe passthrough.
    Nvme {
        /// What the drive reports.
        info: NvmeInfo,
        /// True if blocks are read and written the kernel's ordinary way.
        ordinary: bool,
    },
    /// As a block device, with SCSI commands for what that has no request for. What the drive says.
    Scsi(Box<ScsiInfo>),
    /// As a block device that is made of drives, which verify its blocks.
    Mapped {
        /// The paths of the drives, by their numbers in what a Verify finds.
        drives: Vec<String>,
    },
    /// As an ordinary block device, and why.
    Ordinary {
        /// Why the drive cannot do integrity work.
        why: String,
    },
}

/// Whether the tags of a block device travel with ordinary reads and writes, if its kernel knows of any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OrdinaryTags {
    /// They do.
    Travel(TagProfile),
    /// They do not, and why.
    Stay {
        /// What the device or the kernel lacks.
        why: String,
    },
}

/// What a target is made of.
#[derive(Clone, Debug)]
pub struct TargetInfo {
    /// The kind of device, as text.
    pub kind: &'static str,
    /// The volume, where it is one.
    pub volume: Option<VolumeDescription>,
    /// The file, where it lies in one.
    pub file: Option<FileDescription>,
    /// How it is reached, if it is a drive of this machine.
    pub drive: Option<DriveInfo>,
    /// Its tags, if it is a block device that has some and is read and written the kernel's ordinary way.
    pub tags: Option<OrdinaryTags>,
    /// The namespace and its controller, if it is remote.
    pub remote: Option<NvmeConnectionInfo>,
    /// The open namespace, if it is remote.
    pub(crate) namespace: Option<NvmeTcpDevice>,
    /// The export, where it is one over NBD.
    pub export: Option<NbdConnectionInfo>,
    /// The connection, if it is remote, over whichever protocol.
    pub connection: Option<RemoteConnection>,
    /// The state of its paths, if it is multipath.
    pub paths: Option<PathMonitor>,
    /// The mirror, where it is one.
    pub mirror: Option<Rc<OpenMirror>>,
    /// What its label says, if it is a member that is open for writing by itself.
    pub(crate) own_label: Option<OwnLabel>,
    /// The label of the stripe that it is a member of, if it is open outside of it.
    pub(crate) stripe_label: Option<Box<StripeLabel>>,
    /// The bad blocks that are known of the devices at the bottom, in its own addresses.
    pub damage: DamageView,
    /// The devices under it, if it is a layer, in order. Paths that could not be opened are left out.
    pub inner: Vec<TargetInfo>,
}

impl TargetInfo {
    /// What the target of this name was when it was opened.
    pub fn identity(&self, target: &TargetName) -> TargetIdentity {
        if let (Some(mirror), TargetName::Group { kind: GroupKind::Mirror, .. }) = (&self.mirror, target) {
            return mirror.identity();
        }
        let opened = self.all();
        TargetIdentity::with(target, &|path| {
            let mut files = opened.iter().filter_map(|info| info.file.as_ref()).filter(|file| file.path == path);
            files.next().map_or_else(|| leaves_at(path).unwrap_or_default(), leaves_of_open)
        })
    }

    /// Only a kind.
    pub fn plain(kind: &'static str) -> TargetInfo {
        let (drive, paths, mirror, inner) = (None, None, None, Vec::new());
        let (own_label, stripe_label) = (None, None);
        let (volume, file, tags, remote, namespace, export, connection) = (None, None, None, None, None, None, None);
        let damage = DamageView::all(Vec::new());
        TargetInfo {
            kind,
            volume,
            file,
            drive,
            tags,
            remote,
            namespace,
            export,
            connection,
            paths,
            mirror,
            own_label,
            stripe_label,
            damage,
            inner,
        }
    }

    /// A layer.
    pub fn over(kind: &'static str, below: impl IntoIterator<Item = TargetInfo>) -> TargetInfo {
        let inner: Vec<TargetInfo> = below.into_iter().collect();
        let damage = DamageView::all(inner.iter().map(|info| info.damage.clone()).collect());
        TargetInfo { inner, damage, ..TargetInfo::plain(kind) }
    }

    /// True if it is a group, however many members are online.
    pub fn is_group(&self) -> bool {
        self.inner.len() > 1 || self.paths.is_some() || self.mirror.is_some()
    }

    /// The devices at other servers that it lies on, as the target of this name.
    pub fn remote_devices(&self, target: &TargetName) -> RemoteDevices {
        let mut found = RemoteDevices::none_of(target);
        self.collect_remote(&mut found);
        found
    }

    fn collect_remote(&self, found: &mut RemoteDevices) {
        if let Some(mirror) = &self.mirror {
            return found.add_mirror(mirror.remote_devices());
        }
        self.remote.iter().for_each(|namespace| found.add_namespace(namespace));
        self.export.iter().for_each(|export| found.add_export(export));
        self.inner.iter().for_each(|inner| inner.collect_remote(found));
    }

    /// A number for what it lies on, as the target of this name: plain files, volumes, mirrors, and what servers say of their devices;
    /// and which blocks of that it has. It is another one if something else is in the place of one of them; `None` if nothing is known
    /// of any.
    pub fn content(&self, target: &TargetName) -> Option<u64> {
        let mut parts: Vec<String> = target.arrangement().into_iter().collect();
        self.collect_content(&mut parts);
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        // Zero stands for none.
        (!parts.is_empty()).then(|| u128::from_be_bytes(uuid_of(&parts)) as u64 | 1)
    }

    fn collect_content(&self, parts: &mut Vec<String>) {
        if let Some(mirror) = &self.mirror {
            // Commands change its replicas.
            return parts.extend(mirror.describe().uuid.map(|uuid| hex(&uuid)));
        }
        match (&self.volume, &self.file, &self.remote, &self.export) {
            (Some(volume), ..) => parts.push(hex(&volume.uuid)),
            (_, Some(file), ..) if file.is_block_device => {
                parts.extend(texts_of_device(DeviceNumber::from_raw(file.device)));
            }
            (_, Some(file), ..) => parts.push(text_of_file(&file.path, file.inode)),
            (.., Some(remote), _) => {
                parts.extend(remote.uuid.map(|uuid| hex(&uuid)));
                parts.extend(remote.content.map(|content| content.to_string()));
            }
            (.., Some(export)) => parts.extend(export.uuid.map(|uuid| hex(&uuid))),
            _ => {}
        }
        // All paths lead to one device, and not each of them is there.
        let inner = self.inner.iter().take(if self.paths.is_some() { 1 } else { usize::MAX });
        inner.for_each(|inner| inner.collect_content(parts));
    }

    /// The identity of the namespace over NVMe/TCP that it is, block for block, as the target of this name.
    pub fn namespace_behind(&self, target: &TargetName) -> Option<[u8; 16]> {
        let all = self.all();
        let remote = all.into_iter().find_map(|info| info.remote.as_ref()).filter(|_| is_whole_namespace(target));
        remote.map(namespace_identity)
    }

    /// This and all devices under it.
    pub fn all(&self) -> Vec<&TargetInfo> {
        std::iter::once(self).chain(self.inner.iter().flat_map(TargetInfo::all)).collect()
    }

    /// The label of the stripe that the device belongs to which this is, or is a part of or a path to, whichever layers hide it.
    pub(crate) fn stripe_label_below(&self) -> Option<&StripeLabel> {
        let is_one_device = matches!(self.kind, "offset" | "fault" | "multipath");
        let below = || self.inner.first().filter(|_| is_one_device).and_then(TargetInfo::stripe_label_below);
        self.stripe_label.as_deref().or_else(below)
    }

    /// The labels of members in it that are open for writing by themselves.
    pub fn own_labels(&self) -> Vec<OwnLabel> {
        self.all().into_iter().filter_map(|info| info.own_label.clone()).collect()
    }

    /// The files that it lies in, of this and all devices under it, as long as they are open.
    pub fn open_files(&self) -> Vec<Weak<Backing>> {
        let all = self.all();
        let is_of = |open: &&Arc<Backing>| {
            let mut files = all.iter().filter_map(|info| info.file.as_ref());
            files.any(|file| file.path == open.path())
        };
        open_files().iter().filter(is_of).map(Arc::downgrade).collect()
    }

    /// The connections of this and the devices under it, but for those of paths and of replicas of mirrors: these are
    /// opened again, and their groups report them.
    pub fn connections(&self) -> Vec<RemoteConnection> {
        let is_group = self.paths.is_some() || self.mirror.is_some();
        let inner = self.inner.iter().filter(|_| !is_group).flat_map(TargetInfo::connections);
        self.connection.iter().cloned().chain(inner).collect()
    }

    /// The copies of metadata that its volumes have lost, at any time.
    pub fn lost_metadata(&self) -> LostMetadata {
        LostMetadata::of(self.all().into_iter().filter_map(TargetInfo::own_volume))
    }

    /// The same, without the replicas of mirrors, which mirrors report themselves.
    pub fn lost_beside_mirrors(&self) -> LostMetadata {
        fn all(info: &TargetInfo) -> Vec<&TargetInfo> {
            let inner = info.inner.iter().filter(|_| info.mirror.is_none());
            std::iter::once(info).chain(inner.flat_map(all)).collect()
        }
        LostMetadata::of(all(self).into_iter().filter_map(TargetInfo::own_volume))
    }

    /// The volume that this is, without devices under it, and the path of its file.
    fn own_volume(&self) -> Option<(Option<&Path>, &VolumeDescription)> {
        Some((self.file.as_ref().map(|file| file.path.as_path()), self.volume.as_ref()?))
    }

    /// Map entries that recovery dropped from the logs of volumes, because their data was not on the medium.
    pub fn left_out(&self) -> u64 {
        let here = self.volume.as_ref().map_or(0, |volume| volume.dropped);
        here + self.inner.iter().map(TargetInfo::left_out).sum::<u64>()
    }
}

/// The bytes of an open file or block device, whatever is at its path by now.
fn leaves_of_open(file: &FileDescription) -> Vec<Leaf> {
    match file.is_block_device {
        true => leaves_of_device(DeviceNumber::from_raw(file.device)),
        false => vec![Leaf::whole(Storage::File { device: file.device, inode: file.inode })],
    }
}

/// What tells a file from others of its file system, also after a restart, in which device numbers may change.
fn text_of_file(path: &Path, inode: u64) -> String {
    let about = fs::metadata(path).ok().filter(|about| about.ino() == inode);
    let made = about.and_then(|about| about.created().ok()).and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    format!("{inode} {}", made.map_or(0, |made| made.as_nanos()))
}

/// The same of a block device: of all that it lies on which has an identity that stays.
fn texts_of_device(number: DeviceNumber) -> Vec<String> {
    let text = |leaf: &Leaf| {
        let storage = match (leaf.storage, node(number).map(|node| node.kind)) {
            (Storage::File { inode, .. }, Ok(NodeKind::Loop { file, .. })) => text_of_file(&file, inode),
            (Storage::File { inode, .. }, _) => inode.to_string(),
            (Storage::Device(below), _) => node(below).ok()?.id?,
        };
        Some(format!("{storage} {} {}", leaf.first_byte, leaf.end_byte))
    };
    leaves_of_device(number).iter().filter_map(text).collect()
}

/// A protection format in words.
pub fn protection_text(format: Option<PiFormat>) -> String {
    match format {
        None => "no protection information".to_owned(),
        Some(format) => format!("guard {}, Type {}", format.guard(), format.protection() as u8 + 1),
    }
}
