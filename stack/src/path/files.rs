//! Files and block devices: protected volumes, recognised by their superblock, and bytes without seals.
//!
//! The remains of a volume are neither: no command reads, writes or replaces them by accident. A plain file's bytes are blocks only
//! as `raw:PATH`, so that a volume that is no longer recognised is never served or verified as a plain file.

use std::fmt::Display;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use sealblock_block::{Error, ErrorKind, Medium};
use sealblock_media_file::{FileMedium, OpenError, Options, RawDevice};
use sealblock_media_volume::shards::probe_shards;
use sealblock_media_volume::{
    Mutation, OpenOptions, Recognised, ResizeOptions, Resized, VolumeInfo, VolumeMedium, recognise, resize,
};
use sealblock_runtime_ioctl::range_lock::Use;
use sealblock_units::{BlockSize, Lba};

use crate::error::{Cause, StackError, shell_word};
use crate::failures::{medium_error, open_error, resize_error, volume_error};
use crate::groups::membership::bars_resizing;
use crate::kernel::claims::{Conflict, claim};
use crate::kernel::holder::held_by_live_process;
use crate::opened::OpenTarget;
use crate::opened::held::Access;
use crate::opened::info::TargetInfo;
use crate::opened::lost_metadata::warn_of_losses;
use crate::opened::shards::FileVolume;
use crate::path::shards::{open_shard, open_shards};
use crate::program::ReactorClock;
use crate::target::TargetName;

/// The kind of a plain file's bytes.
pub const RAW_FILE: &str = "raw file";
/// Why no list of bad blocks is kept on a device without a reserved area.
pub(crate) const NO_ROOM: &str = "the device has no reserved area";

/// The content of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A protected volume, perhaps one that cannot be used.
    Volume,
    /// Remains of one, and which parts.
    Remains(String),
    /// No volume.
    Raw,
}

/// An open volume, and what was found when it was opened.
pub struct OpenVolume {
    /// The volume.
    pub volume: Rc<FileVolume>,
    /// What was found.
    pub description: VolumeInfo,
    /// The file it lies in.
    pub file: Option<sealblock_media_file::FileInfo>,
}

/// Recognises the content of a medium.
///
/// # Errors
/// When it fails where it would be recognised.
pub fn inspect(medium: &FileMedium) -> LocalBoxFuture<'_, Result<FileKind, StackError>> {
    Box::pin(async move {
        /// Parts that are named.
        const NAMED: usize = 3;
        match recognise(medium).await {
            Ok(Recognised::Volume) => Ok(FileKind::Volume),
            Ok(Recognised::Nothing) => Ok(FileKind::Raw),
            Ok(Recognised::Remains(traces)) => {
                let named: Vec<String> = traces.iter().take(NAMED).map(ToString::to_string).collect();
                let more = if traces.len() > NAMED { ", and more" } else { "" };
                Ok(FileKind::Remains(format!("{}{more}", named.join(", "))))
            }
            Err(error) => Err(medium_error("read", &error).on(medium.path().display())),
        }
    })
}

/// How long an open retries while the process that has the file is ending, or is not found: more than the second by which Linux 6.1
/// closes the files of a ring late.
const LOCK_TIMEOUT: Duration = Duration::from_millis(2500);
/// How long it retries while a process has the file that goes on running.
const LIVE_HOLDER_TIMEOUT: Duration = Duration::from_millis(300);
/// The delay before a retry, and that once the process is looked for before each.
const PAUSE: Duration = Duration::from_millis(10);
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// Opens a file or block device, waiting a moment for one that is in use. One that is opened for writing is alone on its bytes, and
/// none that is opened for reading is beside a writer, whatever it is called; see `claims`.
///
/// After a kill the kernel keeps the files and locks of a process until its io_uring requests in flight have ended, for some time
/// after the process is gone. A restart at once must not fail for that.
pub fn open_medium(path: &Path, options: Options) -> LocalBoxFuture<'_, Result<FileMedium, OpenError>> {
    Box::pin(async move {
        let since = Instant::now();
        loop {
            let error = match open_alone(path, options) {
                Err(error) => error,
                opened => return opened,
            };
            let used = match &error {
                OpenError::InUse { .. } => path,
                OpenError::Shared { below, .. } => below,
                _ => return Err(error),
            };
            match since.elapsed() {
                waited if waited < LIVE_HOLDER_TIMEOUT => sealblock_runtime_reactor::sleep(PAUSE).await,
                waited if waited < LOCK_TIMEOUT && !held_by_live_process(used) => {
                    sealblock_runtime_reactor::sleep(LONG_PAUSE).await
                }
                _ => return Err(error),
            }
        }
    })
}

fn open_alone(path: &Path, options: Options) -> Result<FileMedium, OpenError> {
    let mut medium = FileMedium::open(path, options)?;
    let what = if medium.is_read_only() { Use::Read } else { Use::Write };
    let claimed = claim(path, what).map_err(|conflict| match conflict {
        Conflict::Opened(below) => OpenError::Shared { path: path.to_owned(), below },
        Conflict::Mount { device, at } => OpenError::Mounted { path: path.to_owned(), device, at },
    });
    medium.keep(claimed?);
    Ok(medium)
}

pub(crate) async fn medium_of(path: &Path, access: Access) -> Result<FileMedium, StackError> {
    let options = if access.writes() { Options::WRITE } else { Options::READ };
    open_medium(path, options).await.map_err(|error| open_error("open", &error))
}

pub(crate) fn volume_as<'a>(
    target: &'a TargetName,
    medium: Rc<FileMedium>,
    path: &'a Path,
    access: Access,
) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>> {
    let options = options(&medium, access);
    open_on(target, medium, path, options)
}

/// Opens the volume on a medium, whether or not it is in shards.
pub(crate) fn open_on<'a>(
    target: &'a TargetName,
    medium: Rc<FileMedium>,
    path: &'a Path,
    options: OpenOptions,
) -> LocalBoxFuture<'a, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        match open_shards(target, Rc::clone(&medium), path, options).await? {
            Some(opened) => Ok(opened),
            None => Ok(whole(target, volume_on(medium, path, &options).await?).await),
        }
    })
}

/// Opens the shard of a block for writing, by itself, and returns the block's place in it. `None` if the volume at the
/// path is not in shards.
///
/// # Errors
/// Why it does not open.
pub async fn open_shard_of(path: &Path, lba: Lba) -> Result<Option<(Rc<FileVolume>, Lba)>, StackError> {
    let medium = Rc::new(medium_of(path, Access::Write).await?);
    let options = options(&medium, Access::Write);
    open_shard(medium, path, lba, &options).await
}

/// Reopens a closed volume on its medium, which stayed open. The first open has checked its use.
///
/// # Errors
/// Why it does not open.
pub fn open_again(
    target: &TargetName,
    medium: Rc<FileMedium>,
    access: Access,
) -> LocalBoxFuture<'_, Result<OpenTarget, StackError>> {
    Box::pin(async move {
        let path = medium.path().to_owned();
        volume_as(target, medium, &path, access).await
    })
}

pub(crate) async fn whole(target: &TargetName, open: OpenVolume) -> OpenTarget {
    let info = TargetInfo { volume: Some(open.description), file: open.file, ..TargetInfo::plain("protected volume") };
    OpenTarget::volume(target, open.volume, info).await
}

/// Opens the bytes at a path as a device, if they are no volume's.
pub(crate) async fn open_raw(target: &TargetName, path: &Path, access: Access) -> Result<OpenTarget, StackError> {
    let medium = medium_of(path, access).await?;
    match inspect(&medium).await? {
        FileKind::Raw => raw(target, path, medium),
        FileKind::Remains(parts) => Err(remains_error("open", path, &parts)),
        FileKind::Volume => {
            Err(StackError::new(Cause::Refused, "open", "it is a protected volume, whose blocks have seals")
                .lasting()
                .on(target)
                .advise(TargetName::File(path.to_owned()).to_string()))
        }
    }
}

pub(crate) fn raw(target: &TargetName, path: &Path, medium: FileMedium) -> Result<OpenTarget, StackError> {
    let block_size = raw_block_size(&medium);
    let kind = if medium.is_block_device() { "raw block device" } else { RAW_FILE };
    let info = TargetInfo { file: medium.describe().ok(), ..TargetInfo::plain(kind) };
    let elsewhere = medium.is_direct().then(|| medium.elsewhere());
    let device = RawDevice::new(medium, block_size)
        .map_err(|error| StackError::new(Cause::Unsuitable, "open", error).on(path.display()))?;
    // In the page cache, a read beside a write of the same block on another core may see half of it.
    let Some(elsewhere) = elsewhere else {
        return Ok(OpenTarget::leaf(target, device, info, Vec::new(), NO_ROOM));
    };
    let elsewhere = elsewhere
        .map_err(|error| StackError::new(Cause::Io, "duplicate the descriptor of", error).on(path.display()))?;
    let open = move || {
        let failed = |error: &dyn Display| Error::from(ErrorKind::Unreachable { reason: error.to_string() });
        let medium = elsewhere.open_here().map_err(|error| failed(&error))?;
        RawDevice::new(medium, block_size).map_err(|error| failed(&error))
    };
    Ok(OpenTarget::leaf_on_every_core(target, device, open, info, NO_ROOM))
}

pub(crate) fn plain_file(path: &Path) -> StackError {
    StackError::new(Cause::Unsuitable, "open", "it is a plain file, not a protected volume").on(path.display()).advise(
        format!(
            "use raw:{} for its bytes as blocks without seals, or `sealblock create` for a new volume",
            path.display()
        ),
    )
}

/// Remains of a volume without a usable superblock.
pub fn remains_error(doing: &str, path: &Path, parts: &str) -> StackError {
    let why = format!("it has the remains of a protected volume without a usable superblock: {parts}");
    StackError::new(Cause::Damaged, doing, why)
        .on(path.display())
        .advise(format!("use `sealblock rescue {} TO`, or another copy of the data", shell_word(path.display())))
}

/// Opens the volume at a path; anything else there is refused.
pub fn open_volume(path: &Path, access: Access) -> LocalBoxFuture<'_, Result<OpenVolume, StackError>> {
    Box::pin(async move {
        let medium = medium_of(path, access).await?;
        match inspect(&medium).await? {
            FileKind::Remains(parts) => Err(remains_error("open", path, &parts)),
            FileKind::Volume | FileKind::Raw => {
                let options = options(&medium, access);
                volume_on(Rc::new(medium), path, &options).await
            }
        }
    })
}

pub(crate) fn options(medium: &FileMedium, access: Access) -> OpenOptions {
    OpenOptions {
        read_only: !access.writes() || medium.is_read_only(),
        accept_older: access.accepts_older(),
        relocate: access.relocates(),
        ..OpenOptions::default()
    }
}

pub(crate) async fn volume_on(
    medium: Rc<FileMedium>,
    path: &Path,
    options: &OpenOptions,
) -> Result<OpenVolume, StackError> {
    let file = medium.describe().ok();
    let opened = sealblock_media_volume::open(VolumeMedium::whole(medium), ReactorClock, options)
        .await
        .map_err(|error| volume_error("open", &error).on(path.display()))?;
    warn_of_losses(path, &opened.description, options.read_only);
    drop(sealblock_runtime_reactor::spawn(opened.worker.run()));
    Ok(OpenVolume { volume: opened.volume, description: opened.description, file })
}

/// Gives the volume on a medium that no volume is open on another capacity.
///
/// # Errors
/// Why it keeps its own.
pub fn resize_volume<'a>(
    doing: &'a str,
    medium: &'a Rc<FileMedium>,
    capacity_blocks: u64,
) -> LocalBoxFuture<'a, Result<Resized, StackError>> {
    Box::pin(async move {
        // What cannot be read is the resize's to tell.
        if let Ok(Some(_)) = probe_shards(medium).await {
            return Err(shards_keep_their_size(doing));
        }
        let options = ResizeOptions { capacity_blocks, bars: bars_resizing, mutation: Mutation::None };
        resize(&VolumeMedium::whole(Rc::clone(medium)), ReactorClock, &options)
            .await
            .map_err(|error| resize_error(doing, &error))
    })
}

/// Why a volume in shards is not resized, and what to do instead.
pub fn shards_keep_their_size(doing: &str) -> StackError {
    StackError::new(Cause::Unsuitable, doing, "a volume in shards cannot be resized")
        .advise("create a new one of that size, and use `sealblock copy`")
}

/// The size of the blocks that a medium without seals is parted into.
pub(crate) fn raw_block_size(medium: &impl Medium) -> BlockSize {
    if medium.sector_bytes() > 512 { BlockSize::B4096 } else { BlockSize::B512 }
}
