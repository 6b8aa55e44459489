//! Attaches a device as a block device, and takes over a block device whose server has ended.
//!
//! A block device outlives its server: meanwhile its requests wait, including those that were being executed, and the
//! next server gets them. So the next server must serve the same blocks. The driver keeps what identifies them: the
//! size, the block size, the protection information, and an identity of the target.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use sealblock_block::{Durability, FlushCursor};
use sealblock_layers_cross_core::SharedDevice;
use sealblock_runtime_ublk::{
    CharacterDevice, Control, ControlError, DeviceInfo, DeviceState, Features, MAX_DEPTH, Params, SECTOR_BYTES,
    block_path,
};

use crate::requests::{MAX_TRANSFER_BYTES, params};
use crate::server::{CurrentDevice, QueueServer, Tampering};
use crate::tags::HostGuard;
use crate::users::{self, User, Users};

/// The maximum number of queues of a block device.
pub const MAX_QUEUES: u16 = 64;

/// How long the driver may take to notice that a server has ended, and the interval between checks.
const LEAVING: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// The folder with the driver's character devices.
const CHARACTER_DEVICES: &str = "/sys/class/ublk-char";
/// How long the kernel may take to write back its dirty data for a device.
const WRITING_BACK: Duration = Duration::from_secs(60);
/// How long a device to be removed may still be in use: system programs examine a device after a writer has closed it.
const LOOKING: Duration = Duration::from_secs(1);
/// How long a server may take to close a deleted device.
const CLOSING: Duration = Duration::from_secs(2);

/// The properties of a block device.
#[derive(Clone, Debug)]
pub struct Options {
    /// N of `/dev/ublkbN` [default: the next free one]. A quiesced device with this number is taken over.
    pub number: Option<u32>,
    /// The number of queues, each served on its own core: 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Requests of a queue at a time: 1 to [`MAX_DEPTH`].
    pub depth: u16,
    /// How the kernel protects blocks.
    pub guard: Option<HostGuard>,
    /// True if it refuses writes.
    pub is_read_only: bool,
    /// True if changes are durable before they are acknowledged, and the kernel is told that there is no cache. For
    /// devices that lose unflushed changes when their process dies, because the kernel treats acknowledged data as
    /// written, whichever server replies next.
    pub is_write_through: bool,
    /// The identity of the target, which the device's next server must have too.
    pub identity: u64,
    /// Bits that are changed in between, for proofs.
    pub tampering: Option<Tampering>,
}

impl Options {
    /// The minimum durability of a change when it is acknowledged.
    fn durability(&self) -> Durability {
        if self.is_write_through { Durability::ForceUnitAccess } else { Durability::Volatile }
    }
}

/// Why a device cannot be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The driver refuses.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The kernel lacks a required feature.
    #[error("this kernel's ublk cannot {0}")]
    Lacks(&'static str),
    /// Blocks are larger than the kernel supports.
    #[error("its blocks have {0} bytes, and the kernel takes at most 4096")]
    BlockSize(usize),
    /// Queues or depth are out of range.
    #[error("{what}: {actual}, possible are 1 to {limit}")]
    Limit {
        /// Which of them.
        what: &'static str,
        /// The requested value.
        actual: u16,
        /// The limit.
        limit: u16,
    },
    /// Another process serves it.
    #[error("/dev/ublkb{number} is served by process {pid}")]
    Served {
        /// Its number.
        number: u32,
        /// The process.
        pid: u32,
    },
    /// A device with this number exists, but cannot be taken over.
    #[error("/dev/ublkb{number} is there and does not wait for a server")]
    NotQuiesced {
        /// Its number.
        number: u32,
    },
    /// A device with this number waits for another target.
    #[error("/dev/ublkb{number} waits for a server of something else: {what}")]
    Differs {
        /// Its number.
        number: u32,
        /// What differs.
        what: &'static str,
    },
    /// Another block device of the same target waits for a server. With two of them, two file systems would write its
    /// blocks.
    #[error("it is /dev/ublkb{number} already, which waits for its next server")]
    Waiting {
        /// Its number.
        number: u32,
    },
    /// The character device cannot be opened.
    #[error("/dev/ublkc{number}: {error}")]
    Open {
        /// Its number.
        number: u32,
        /// The reason.
        error: io::Error,
    },
    /// The block device is in use.
    #[error("/dev/ublkb{number} is in use: {users}")]
    InUse {
        /// Its number.
        number: u32,
        /// The users.
        users: Users,
    },
    /// The kernel's dirty data for it could not be written back.
    #[error("what was written to /dev/ublkb{number} cannot be written back: {error}")]
    WriteBack {
        /// Its number.
        number: u32,
        /// The reason.
        error: io::Error,
    },
    /// There is no such device.
    #[error("there is no /dev/ublkb{number}")]
    Unknown {
        /// Its number.
        number: u32,
    },
}

/// A block device that this process serves or is about to serve.
pub struct Attachment {
    control: Control,
    info: DeviceInfo,
    params: Params,
    is_taken_over: bool,
    /// True if the target now has another size than the block device that was taken over.
    is_resized: bool,
    device: Arc<CurrentDevice>,
}

impl Attachment {
    /// Makes a block device, or takes over a quiesced one. It appears only after [`Attachment::start`].
    ///
    /// # Errors
    /// See [`AttachError`]; then nothing is left of a new device, and a quiesced one keeps waiting.
    pub fn make(options: &Options, device: &SharedDevice) -> Result<Attachment, AttachError> {
        for (what, actual, limit) in [("queues", options.queues, MAX_QUEUES), ("depth", options.depth, MAX_DEPTH)] {
            if !(1..=limit).contains(&actual) {
                return Err(AttachError::Limit { what, actual, limit });
            }
        }
        let geometry = device.geometry();
        let params =
            params(geometry, &device.abilities(), (options.is_read_only, options.is_write_through), options.guard)
                .ok_or(AttachError::BlockSize(geometry.block_size.bytes()))?;
        let mut control = Control::open()?;
        let features = features(&mut control, options.guard)?;
        let current = Arc::new(CurrentDevice::new(device.clone()));
        if let Some(number) = options.number {
            match control.info(number) {
                Ok(info) => return take_over(control, info, params, options.identity, current),
                Err(error) if error.errno() == Some(libc::ENODEV) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(number) =
            waiting(attached().filter_map(|number| control.info(number).ok()), options.identity, is_alive)
        {
            return Err(AttachError::Waiting { number });
        }
        let wanted = DeviceInfo {
            number: options.number.unwrap_or(u32::MAX),
            queues: options.queues,
            depth: options.depth,
            state: DeviceState::Dead,
            max_transfer_bytes: MAX_TRANSFER_BYTES,
            server_pid: None,
            features,
            server_flags: options.identity,
        };
        let info = control.add(wanted)?;
        let mut made = Attachment { control, info, params, is_taken_over: false, is_resized: false, device: current };
        match made.describe(features) {
            Ok(()) => Ok(made),
            Err(error) => {
                made.abandon();
                Err(error)
            }
        }
    }

    /// Describes the new device to the driver. A driver ignores what it does not support, so the granted features are
    /// checked.
    fn describe(&mut self, features: Features) -> Result<(), AttachError> {
        if !self.info.features.contains(features) {
            return Err(AttachError::Lacks("do what its features say"));
        }
        Ok(self.control.set_params(self.info.number, self.params)?)
    }

    /// The node of the block device.
    pub fn path(&self) -> PathBuf {
        block_path(self.info.number)
    }

    /// The number of its queues; for a device that was taken over, the number with which it was made.
    pub fn queues(&self) -> u16 {
        self.info.queues
    }

    /// Requests of a queue at a time.
    pub fn depth(&self) -> u16 {
        self.info.depth
    }

    /// True if it already existed and waited for a server.
    pub fn is_taken_over(&self) -> bool {
        self.is_taken_over
    }

    /// The servers of its queues, each of which must run on its own core before [`Attachment::start`].
    ///
    /// # Errors
    /// [`AttachError::Open`].
    pub fn servers(&self, options: &Options) -> Result<Vec<QueueServer>, AttachError> {
        let number = self.info.number;
        let character = CharacterDevice::open(number).map_err(|error| AttachError::Open { number, error })?;
        // All queues count as one writer, so a lost write is reported once.
        let cursor: Arc<FlushCursor> = Arc::new(self.device.get().flush_cursor(&format!("ublk {number}")));
        let server = |number| QueueServer {
            character: character.clone(),
            number,
            depth: self.info.depth,
            host: options.guard.map(HostGuard::format),
            durability: options.durability(),
            tampering: options.tampering,
            device: Arc::clone(&self.device),
            cursor: Arc::clone(&cursor),
        };
        Ok((0..self.info.queues).map(server).collect())
    }

    /// Starts the block device; returns when it has appeared. Meanwhile the servers of all queues must run.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn start(&mut self) -> Result<(), AttachError> {
        if !self.is_taken_over {
            return Ok(self.control.start(self.info.number)?);
        }
        self.control.end_recovery(self.info.number)?;
        if self.is_resized {
            self.control.update_size(self.info.number, self.params.capacity_sectors)?;
        }
        Ok(())
    }

    /// True if its size can change while it exists.
    pub fn can_resize(&self) -> bool {
        self.info.features.contains(Features::UPDATE_SIZE)
    }

    /// Gives it the current size of its device, of which `device` is a newer handle. Its users are notified.
    ///
    /// # Errors
    /// The error of the driver; then the block device keeps its old size, and requests beyond the end of the device
    /// fail.
    pub fn resize(&mut self, device: &SharedDevice) -> Result<(), AttachError> {
        let sectors = device.geometry().capacity_bytes() / SECTOR_BYTES;
        self.device.set(device.clone());
        self.control.update_size(self.info.number, sectors)?;
        self.params.capacity_sectors = sectors;
        Ok(())
    }

    /// The users of the block device, if any: it is mounted, part of another device, swap, exclusively held, or open in
    /// a process.
    pub fn users(&self) -> Option<Users> {
        users::of_block_device(self.info.number)
    }

    /// Removes the block device unless it is in use; returns when the kernel's dirty data for it have been written back
    /// and its requests have been completed, so the servers must run. This ends the servers.
    ///
    /// # Errors
    /// [`AttachError::InUse`], or the error of the driver.
    pub fn stop(&mut self) -> Result<(), AttachError> {
        let number = self.info.number;
        refuse_users(number)?;
        if let Err(error) = write_back(number, &[]) {
            // It has no users, so nobody else can get the error.
            tracing::error!(%error, "the block device is taken away all the same");
        }
        refuse_users(number)?;
        Ok(self.control.stop(number)?)
    }

    /// Deletes a stopped device whose servers have ended.
    ///
    /// # Errors
    /// The error of the driver; none if it no longer exists.
    pub fn delete(&mut self) -> Result<(), AttachError> {
        delete(&mut self.control, self.info.number)
    }

    /// Deletes a device that was not started; one that was taken over keeps waiting.
    pub fn abandon(&mut self) {
        // Stopping ends the commands of its queues.
        if !self.is_taken_over
            && let Err(error) =
                self.control.stop(self.info.number).map_err(AttachError::from).and_then(|()| self.delete())
        {
            tracing::warn!(%error, "the device that did not start cannot be deleted");
        }
    }
}

/// Stops and deletes a block device, whoever serves it, after the kernel's dirty data for it have been written back. If
/// it is in use, or its data cannot be written back, this requires `force`.
///
/// # Errors
/// See [`AttachError`].
pub fn detach(number: u32, force: bool) -> Result<(), AttachError> {
    let mut control = Control::open()?;
    let info = match control.info(number) {
        Ok(info) => info,
        Err(error) if error.errno() == Some(libc::ENODEV) => return Err(AttachError::Unknown { number }),
        Err(error) => return Err(error.into()),
    };
    // Without a server nothing can be written, and the kernel would wait for the next one.
    let is_served = info.state == DeviceState::Live && info.server_pid.is_some_and(is_alive);
    if !force {
        refuse_users(number)?;
    }
    let users = users::of_block_device(number);
    let written = if is_served { write_back(number, users.as_ref().map_or(&[], Users::each)) } else { Ok(()) };
    match (written, force) {
        (Err(error), false) => return Err(error),
        (Err(error), true) => tracing::error!(%error, "the block device is taken away all the same"),
        (Ok(()), _) => {}
    }
    if !force {
        refuse_users(number)?;
    }
    control.stop(number)?;
    delete(&mut control, number)
}

/// Deletes a device, and waits a moment until its number is free. Before Linux 6.13, a server that serves other devices
/// on the same core closes it only when it gets their next requests, so there is a time limit.
fn delete(control: &mut Control, number: u32) -> Result<(), AttachError> {
    let is_gone = |error: &ControlError| error.errno() == Some(libc::ENODEV);
    match control.delete_later(number) {
        Ok(()) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        // Linux 6.8 and older do not have this command.
        Err(_) => {
            return control.delete(number).or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error.into()) });
        }
    }
    let deadline = Instant::now() + CLOSING;
    while Instant::now() < deadline && control.info(number).is_ok() {
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

/// Refuses to remove a device in use; processes that have it open for a moment are waited for.
fn refuse_users(number: u32) -> Result<(), AttachError> {
    let deadline = Instant::now() + LOOKING;
    loop {
        match users::of_block_device(number) {
            None => return Ok(()),
            Some(users) if users.are_processes() && Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            Some(users) => return Err(AttachError::InUse { number, users }),
        }
    }
}

/// Lets the kernel write back its dirty data for a block device: first of mounted file systems, then of the device
/// itself.
fn write_back(number: u32, users: &[User]) -> Result<(), AttachError> {
    let points = users.iter().filter_map(|user| match user {
        User::Mount(point) => Some(point.clone()),
        _ => None,
    });
    let (points, path): (Vec<PathBuf>, PathBuf) = (points.collect(), block_path(number));
    let work = move || {
        let of_file_systems = points.iter().map(|point| Ok(rustix::fs::syncfs(File::open(point)?)?));
        // Each is tried, whatever the result of the others is.
        let of_file_systems: Vec<io::Result<()>> = of_file_systems.collect();
        let of_device = File::open(&path).and_then(|device| device.sync_all());
        of_file_systems.into_iter().chain([of_device]).collect::<io::Result<()>>()
    };
    in_time(WRITING_BACK, work).map_err(|error| AttachError::WriteBack { number, error })
}

/// Does something that may never end in a separate thread, which is abandoned if it takes too long.
fn in_time(limit: Duration, work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let (send, receive) = mpsc::channel();
    // A late response has no receiver.
    thread::Builder::new().name("ublk-write-back".to_owned()).spawn(move || drop(send.send(work())))?;
    let too_late = || io::Error::new(io::ErrorKind::TimedOut, format!("not within {limit:?}"));
    receive.recv_timeout(limit).unwrap_or_else(|_| Err(too_late()))
}

/// The numbers of the existing devices.
fn attached() -> impl Iterator<Item = u32> {
    let nodes = std::fs::read_dir(CHARACTER_DEVICES).into_iter().flatten().flatten();
    nodes.filter_map(|node| node.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok())
}

/// The device of this target that waits for a server, or whose server has just ended.
fn waiting(devices: impl Iterator<Item = DeviceInfo>, identity: u64, is_alive: impl Fn(u32) -> bool) -> Option<u32> {
    let is_left = |info: &DeviceInfo| match (info.state, info.server_pid) {
        (DeviceState::Quiesced, _) => true,
        (DeviceState::Live, Some(pid)) => !is_alive(pid),
        _ => false,
    };
    devices.filter(is_left).find(|info| info.server_flags == identity).map(|info| info.number)
}

/// The features of a device, each of which this kernel must have.
fn features(control: &mut Control, guard: Option<HostGuard>) -> Result<Features, AttachError> {
    let there = match control.features() {
        Ok(there) => there,
        // Linux 6.0 to 6.4 do not have this command.
        Err(ControlError::Command { .. }) => {
            return Err(AttachError::Lacks("say what it can do (Linux 6.5 and later can)"));
        }
        Err(error) => return Err(error.into()),
    };
    let needed = [
        (Features::USER_COPY, "copy data on demand (Linux 6.5 and later can)"),
        (Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE, "keep a device for its next server"),
        (Features::IOCTL_ENCODE, "take commands that are numbered like ioctls"),
    ];
    let protected = guard.map(|_| (Features::INTEGRITY, "carry protection information (Linux 7.0 and later can)"));
    // Before Linux 6.16, the size of a block device cannot change.
    let mut features = there & Features::UPDATE_SIZE;
    for (feature, what) in needed.into_iter().chain(protected) {
        if !there.contains(feature) {
            return Err(AttachError::Lacks(what));
        }
        features |= feature;
    }
    Ok(features)
}

/// Takes over a device that waits for a server of exactly these blocks.
fn take_over(
    mut control: Control,
    info: DeviceInfo,
    params: Params,
    identity: u64,
    device: Arc<CurrentDevice>,
) -> Result<Attachment, AttachError> {
    let (number, mut info) = (info.number, info);
    let deadline = Instant::now() + LEAVING;
    loop {
        match (info.state, info.server_pid) {
            (DeviceState::Quiesced, _) => break,
            // The driver has not yet noticed that its server has ended.
            (DeviceState::Live, Some(pid)) if !is_alive(pid) && Instant::now() < deadline => {}
            (DeviceState::Live, Some(pid)) => return Err(AttachError::Served { number, pid }),
            _ => return Err(AttachError::NotQuiesced { number }),
        }
        thread::sleep(LOOK_AGAIN);
        info = control.info(number)?;
    }
    let there = control.params(number)?;
    // The target may have been resized while nobody served it, or just before its server was killed.
    let is_resized = there.capacity_sectors != params.capacity_sectors && info.features.contains(Features::UPDATE_SIZE);
    let expected = if is_resized { Params { capacity_sectors: params.capacity_sectors, ..there } } else { there };
    if let Some(what) = difference(&expected, &params, info.server_flags == identity) {
        return Err(AttachError::Differs { number, what });
    }
    loop {
        match control.start_recovery(number) {
            Ok(()) => return Ok(Attachment { control, info, params, is_taken_over: true, is_resized, device }),
            // The character device of the last server is not closed yet.
            Err(error) if error.errno() == Some(libc::EBUSY) && Instant::now() < deadline => {
                thread::sleep(LOOK_AGAIN);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// True if a process with this number exists; it may be another process by now.
fn is_alive(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// In what a target differs from the waiting device.
fn difference(there: &Params, ours: &Params, is_same_target: bool) -> Option<&'static str> {
    [
        ("another target", is_same_target),
        ("another size", there.capacity_sectors == ours.capacity_sectors),
        ("another block size", there.block_shift == ours.block_shift),
        ("other protection information", there.integrity == ours.integrity),
        ("other attributes or limits", there == ours),
    ]
    .into_iter()
    .find_map(|(what, is_same)| (!is_same).then_some(what))
}

#[cfg(test)]
mod tests {
    use sealblock_runtime_ublk::{Attributes, IntegrityChecksum};

    use super::*;

    #[test]
    fn a_target_whose_device_waits_for_a_server_gets_no_second_one() {
        let device = |number, state, server_pid, server_flags| DeviceInfo {
            number,
            queues: 1,
            depth: 1,
            state,
            max_transfer_bytes: 1 << 20,
            server_pid,
            features: Features::USER_COPY,
            server_flags,
        };
        let devices = [
            device(0, DeviceState::Live, Some(7), 5),
            device(1, DeviceState::Quiesced, None, 6),
            device(2, DeviceState::Quiesced, None, 5),
            device(3, DeviceState::Live, Some(8), 9),
            device(4, DeviceState::Dead, None, 4),
        ];
        let find = |identity| waiting(devices.iter().copied(), identity, |pid| pid == 7);
        assert_eq!(find(5), Some(2), "its first one is served, and its second one waits");
        assert_eq!((find(6), find(9)), (Some(1), Some(3)), "also one whose server was killed just now");
        assert_eq!((find(4), find(1)), (None, None));
        assert_eq!(waiting(devices[..1].iter().copied(), 5, |pid| pid == 7), None, "a served one is the same server's");
    }

    #[test]
    fn what_takes_too_long_is_left_and_what_ends_in_time_is_not() {
        let (send, receive) = mpsc::channel::<()>();
        let waits = move || receive.recv().map_err(io::Error::other);
        assert_eq!(in_time(Duration::from_millis(10), waits).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(send);
        let fails = || Err(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(in_time(Duration::from_secs(60), fails).unwrap_err().raw_os_error(), Some(libc::EIO));
        in_time(Duration::from_secs(60), || Ok(())).unwrap();
    }

    #[test]
    fn only_a_server_of_the_same_blocks_takes_over() {
        let params = Params {
            attributes: Attributes::VOLATILE_CACHE | Attributes::FUA,
            block_shift: 12,
            capacity_sectors: 8000,
            max_transfer_sectors: 1024,
            max_discard_sectors: 7,
            max_zero_sectors: 7,
            integrity: Some(IntegrityChecksum::Crc64),
        };
        assert_eq!(difference(&params, &params, true), None);
        assert_eq!(difference(&params, &params, false), Some("another target"));
        for (other, what) in [
            (Params { capacity_sectors: 8008, ..params }, "another size"),
            (Params { block_shift: 9, ..params }, "another block size"),
            (Params { integrity: None, ..params }, "other protection information"),
            (Params { attributes: Attributes::READ_ONLY, ..params }, "other attributes or limits"),
        ] {
            assert_eq!(difference(&params, &other, true), Some(what));
        }
    }
}
