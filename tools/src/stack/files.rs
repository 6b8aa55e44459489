//! Files and block devices: protected volumes, recognised by their superblock, and everything else, raw.

use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use sealblock_block::Medium;
use sealblock_media_file::{FileBlock, FileMedium, OpenError, Options};
use sealblock_media_volume::format::SuperblockError;
use sealblock_media_volume::{Description, OpenOptions, VolumeError, probe};

use super::{Access, Facts, FileVolume, Held, Opened, ReactorClock, of_open, of_volume, raw_block_size};
use crate::exit::{Cause, Failure};
use crate::target::Target;

/// What lies at a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A protected volume, perhaps one that cannot be used.
    Volume,
    /// Anything else.
    Raw,
}

/// An open volume, and what was found when it was opened.
pub struct OpenVolume {
    /// The volume.
    pub volume: Rc<FileVolume>,
    /// What was found.
    pub description: Description,
    /// The file it lies in.
    pub file: Option<sealblock_media_file::Description>,
}

/// Says what a medium holds.
pub async fn inspect(medium: &FileMedium) -> FileKind {
    match probe(medium).await {
        Err(VolumeError::Superblock(SuperblockError::Magic)) => FileKind::Raw,
        _ => FileKind::Volume,
    }
}

/// How long a file that somebody else has is asked for again.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long to wait before asking again.
const PAUSE: Duration = Duration::from_millis(10);

/// Opens a file or block device, waiting a moment for one that is in use.
///
/// A process that was killed keeps its files, and so its locks, until the kernel has ended what it had under way in its
/// ring, which is some time after the process is gone. Whoever restarts it at once must not be told to come back later.
pub async fn open_medium(path: &Path, options: Options) -> Result<FileMedium, OpenError> {
    let since = Instant::now();
    loop {
        match FileMedium::open(path, options) {
            Err(OpenError::InUse { .. }) if since.elapsed() < PATIENCE => sealblock_runtime_reactor::sleep(PAUSE).await,
            opened => return opened,
        }
    }
}

async fn medium_of(path: &Path, access: Access) -> Result<FileMedium, Failure> {
    let options = match access {
        Access::Read => Options::READ,
        Access::Write => Options::WRITE,
    };
    open_medium(path, options).await.map_err(|error| of_open("opening", &error))
}

/// Opens a path as a device.
pub(super) async fn open(target: &Target, path: &Path, access: Access) -> Result<Opened, Failure> {
    let medium = medium_of(path, access).await?;
    if inspect(&medium).await == FileKind::Volume {
        let open = volume_on(medium, path, access).await?;
        let facts = Facts { volume: Some(open.description), file: open.file, ..Facts::plain("protected volume") };
        return Ok(Opened::new(target, open.volume.clone(), facts, vec![Held::Volume(open.volume)]));
    }
    let block_size = raw_block_size(&medium);
    let kind = if medium.is_block_device() { "raw block device" } else { "raw file" };
    let facts = Facts { file: medium.describe().ok(), ..Facts::plain(kind) };
    let device = FileBlock::new(medium, block_size)
        .map_err(|error| Failure::new(Cause::Unsuitable, "opening", error).on(path.display()))?;
    Ok(Opened::new(target, device, facts, Vec::new()))
}

/// Opens the volume at a path; anything else there is refused.
pub async fn open_volume(path: &Path, access: Access) -> Result<OpenVolume, Failure> {
    volume_on(medium_of(path, access).await?, path, access).await
}

async fn volume_on(medium: FileMedium, path: &Path, access: Access) -> Result<OpenVolume, Failure> {
    let file = medium.describe().ok();
    let options = OpenOptions { read_only: access == Access::Read || medium.read_only(), ..OpenOptions::default() };
    let opened = sealblock_media_volume::open(medium, ReactorClock, &options)
        .await
        .map_err(|error| of_volume("opening", &error).on(path.display()))?;
    drop(sealblock_runtime_reactor::spawn(opened.worker.run()));
    Ok(OpenVolume { volume: opened.volume, description: opened.description, file })
}
