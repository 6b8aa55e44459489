//! The state of a served device for `status`, read on its own core without sending a request to the device.

use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Weak as FileWeak};

use sealblock_block::{Latency, RequestKind};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_layers_mirror::label::ReplicaState;
use sealblock_layers_multipath::{PathMonitor, PathStatus as MultipathPathStatus};
use sealblock_media_file::Backing;
use sealblock_stack::{DamageView, LostMetadata, OpenMirror, RemoteConnection, TargetInfo};

use crate::devices::scrub::ScrubTask;
use crate::status::damage::DamageStatus;
use crate::status::files::FileError;
use crate::status::mirror::MirrorStatus;
use crate::status::scrub::ScrubStatus;
use crate::status::server::{CountStatus, DeviceSnapshot, IoStatus, LatencyStatus, NamedMirror, PathStatus};

/// A device on its own core; it exists as long as its scrub.
pub struct InspectedDevice {
    scrub_task: Rc<ScrubTask>,
    /// Weak, because closing a mirror waits for its owners.
    mirrors: Vec<Weak<OpenMirror>>,
    paths: Vec<PathMonitor>,
    /// Its connections to other hosts, but for those of paths and of replicas.
    connections: Vec<RemoteConnection>,
    files: Vec<String>,
    /// The same files as long as they are open.
    open_files: Vec<FileWeak<Backing>>,
    /// Its bad blocks, and where the record of them is kept.
    damage: DamageView,
    /// Copies of metadata that its volumes have lost, but for those of the replicas of mirrors.
    lost_copies: LostMetadata,
}

/// The files of a device.
fn files(info: &TargetInfo) -> Vec<String> {
    let files = info.all().into_iter().filter_map(|info| info.file.as_ref());
    let paths = files.filter_map(|file| file.path.canonicalize().ok());
    paths.map(|path| path.to_string_lossy().into_owned()).collect()
}

impl InspectedDevice {
    /// A device of this core.
    pub fn new(scrub_task: &Rc<ScrubTask>, info: &TargetInfo) -> InspectedDevice {
        let all = info.all();
        InspectedDevice {
            scrub_task: Rc::clone(scrub_task),
            mirrors: all.iter().filter_map(|info| info.mirror.as_ref()).map(Rc::downgrade).collect(),
            paths: all.iter().filter_map(|info| info.paths.clone()).collect(),
            connections: info.connections(),
            files: files(info),
            open_files: info.open_files(),
            damage: info.damage.clone(),
            lost_copies: info.lost_beside_mirrors(),
        }
    }

    /// Its state, except for what cores share.
    pub fn snapshot(&self) -> DeviceSnapshot {
        let Some(scrub) = self.scrub_task.glance() else {
            return unresponsive("it is closed or being changed");
        };
        let mirrors: Vec<_> = self.mirrors.iter().filter_map(Weak::upgrade).collect();
        DeviceSnapshot {
            files: self.files.clone(),
            file_errors: self.file_errors(&mirrors),
            mirrors: mirrors.iter().map(|mirror| named(mirror)).collect(),
            paths: self.paths.iter().flat_map(PathMonitor::paths).map(path).collect(),
            lost_connections: self.connections.iter().filter_map(RemoteConnection::lost).map(Into::into).collect(),
            damage: DamageStatus::of(&self.damage),
            lost_metadata: older_text(&scrub).into_iter().collect(),
            lost_copies: self.lost_copies.unwritten(),
            scrub: Some(scrub),
            io: io(self.scrub_task.shared()),
            ..DeviceSnapshot::default()
        }
    }
}

impl InspectedDevice {
    /// The errors of the files with which it was opened, and of those of replicas that were added later.
    fn file_errors(&self, mirrors: &[Rc<OpenMirror>]) -> Vec<FileError> {
        let opened = self.open_files.iter().filter_map(FileWeak::upgrade);
        let replicas = mirrors.iter().flat_map(|mirror| mirror.files()).flat_map(|(_, files)| files);
        let mut files: Vec<Arc<Backing>> = Vec::new();
        for file in opened.chain(replicas) {
            if !files.iter().any(|other| Arc::ptr_eq(other, &file)) {
                files.push(file);
            }
        }
        files.iter().filter_map(|file| FileError::of(file)).collect()
    }
}

/// A device that does not respond, with the reason.
pub fn unresponsive(why: &str) -> DeviceSnapshot {
    DeviceSnapshot { unresponsive: Some(why.to_owned()), ..DeviceSnapshot::default() }
}

/// Why the last writes may be missing, in words; reads do not notice this, and writes do not repair it.
fn older_text(scrub: &ScrubStatus) -> Option<String> {
    let why = scrub.why_older()?;
    Some(format!("blocks may be older than what was written: {why}"))
}

fn named(mirror: &OpenMirror) -> NamedMirror {
    let mut status = MirrorStatus::of(mirror);
    // Removed replicas are not shown.
    status.replicas.retain(|replica| !replica.is(ReplicaState::Removed));
    NamedMirror { target: mirror.target().to_string(), status }
}

fn path(path: MultipathPathStatus) -> PathStatus {
    PathStatus {
        path: path.name,
        live: path.is_live,
        error: path.last_error.filter(|_| !path.is_live),
        failures: path.failures,
    }
}

fn io(device: &SharedDevice) -> IoStatus {
    let counters = device.counters();
    let count = |kind: RequestKind| {
        let Latency { queue, device: taken } = device.latency(kind);
        CountStatus {
            requests: counters.requests(kind),
            bytes: counters.bytes(kind),
            errors: counters.errors(kind),
            queue_us: LatencyStatus::of(&queue),
            device_us: LatencyStatus::of(&taken),
        }
    };
    let operations: BTreeMap<_, _> = RequestKind::ALL.into_iter().map(|kind| (name(kind), count(kind))).collect();
    IoStatus { in_flight: counters.in_flight(), operations }
}

/// The name of an operation in JSON.
fn name(kind: RequestKind) -> String {
    match kind {
        RequestKind::ReadReserved => "reserved_reads".to_owned(),
        RequestKind::WriteReserved => "reserved_writes".to_owned(),
        other => other.name().replace(' ', "_"),
    }
}
