//! Creates a volume in shards, and opens it.

use std::sync::Arc;

use futures_util::future::{join, join_all};
use sealblock_block::{Clock, Medium, SyncGroup};

use crate::format::{Container, TAIL_BYTES, uuid_text};
use crate::life::{self, CreateOptions, OpenVolume, write_zeroes};
use crate::medium::container_probe::{ContainerProbe, probe_shards};
use crate::medium::padded;
use crate::medium::superblocks::{self, COPIES, SuperblockCopy};
use crate::medium::window::VolumeMedium;
use crate::options::{OpenOptions, VolumeError};

/// The minimum memory for map pages of one shard, in bytes.
const MIN_CACHE_BYTES: usize = 16 << 20;

/// Creates an empty volume in shards on a medium, which may contain anything. It must be as long as
/// [`Container::medium_bytes`] of a container with these properties.
///
/// # Errors
/// When the layout is impossible or too small for so many shards, or the medium is too short, lacks the space, cannot
/// reserve it, or fails. An earlier volume on it may be destroyed by then.
pub async fn create_shards<M: Medium>(
    medium: &M,
    options: &CreateOptions,
    shards: u32,
) -> Result<Container, VolumeError> {
    let profile = (options.block_size, medium.sector_bytes());
    let (capacity_blocks, protection) = (options.capacity_blocks, options.protection);
    let container = Container::new(options.uuid, profile, capacity_blocks, protection, (shards, medium.len_bytes()))?;
    create_container(medium, options, &container).await?;
    Ok(container)
}

/// Creates the volume of a container, of which its identity, size and protection count.
///
/// # Errors
/// As [`create_shards`].
pub async fn create_container<M: Medium>(
    medium: &M,
    options: &CreateOptions,
    container: &Container,
) -> Result<(), VolumeError> {
    let (medium_bytes, needed_bytes) = (medium.len_bytes(), container.medium_bytes());
    if medium_bytes < needed_bytes {
        return Err(VolumeError::Truncated { medium_bytes, needed_bytes });
    }
    // The old superblocks are destroyed first: a half-made volume must not look like the previous one.
    superblocks::wipe(medium, container.shard_layout(), container.copy_offsets()[2]).await?;
    medium.sync().await?;
    write_zeroes(medium, 0, Container::windows_offset()).await?;
    write_zeroes(medium, container.windows_end(), TAIL_BYTES).await?;
    let group = Arc::new(SyncGroup::default());
    let created = (0..container.shards()).map(|shard| {
        let window = VolumeMedium::of_shard(medium, container.window(shard), shard, Arc::clone(&group));
        let (uuid, capacity_blocks) = (container.shard_uuid(shard), container.shard_layout().capacity_blocks());
        let options = CreateOptions { uuid, capacity_blocks, ..*options };
        async move { life::create(&window, &options).await }
    });
    join_all(created).await.into_iter().collect::<Result<(), VolumeError>>()?;
    // Each shard is durable now, and what is written here makes a volume of them.
    for offset in container.copy_offsets() {
        medium.write(offset, image(medium, container)).await?;
    }
    Ok(medium.sync().await?)
}

fn image<M: Medium>(medium: &M, container: &Container) -> sealblock_runtime_memory::Slice {
    let sector_bytes = container.shard_layout().sector_bytes().max(medium.sector_bytes());
    padded(medium, &container.encode(), sector_bytes as usize)
}

/// What the shards of one volume share, and what opens them. Clones are of the same volume, for use on any core.
#[derive(Clone)]
pub struct Shards {
    probe: ContainerProbe,
    group: Arc<SyncGroup>,
    options: OpenOptions,
}

impl Shards {
    /// Finds a volume in shards and checks, before any shard is opened, that all of them are there; not where what is
    /// left of a truncated one is read, where [`Shards::open`] says of each whether it is. `None` if none is on the
    /// medium. All shards must be opened with the result of one call.
    ///
    /// # Errors
    /// See [`VolumeError`]. The medium is unchanged.
    pub async fn find<M: Medium>(medium: &M, options: &OpenOptions) -> Result<Option<Shards>, VolumeError> {
        let Some(probe) = probe_shards(medium).await? else { return Ok(None) };
        let (medium_bytes, needed_bytes) = (medium.len_bytes(), probe.container.windows_end());
        if medium_bytes < needed_bytes && !(options.truncated && options.read_only) {
            return Err(VolumeError::Truncated { medium_bytes, needed_bytes });
        }
        let cache_bytes = (options.cache_bytes / probe.container.shards() as usize).max(MIN_CACHE_BYTES);
        let options = OpenOptions { identity: None, cache_bytes: cache_bytes.min(options.cache_bytes), ..*options };
        let shards = Shards { probe, group: Arc::default(), options };
        if shards.reads_what_is_left() {
            return Ok(Some(shards));
        }
        for shard in shards.numbers() {
            let checked = shards.check(&shards.window(medium, shard), shard).await;
            checked.map_err(|error| VolumeError::of_shard(shard, error))?;
        }
        Ok(Some(shards))
    }

    /// True if what is left of a volume is read, although shards may be lost.
    pub fn reads_what_is_left(&self) -> bool {
        self.options.truncated && self.options.read_only
    }

    /// The container of the shards.
    pub fn container(&self) -> &Container {
        &self.probe.container
    }

    /// The copies of the container's superblock, as they were found.
    pub fn copies(&self) -> &[SuperblockCopy; COPIES] {
        &self.probe.copies
    }

    /// The numbers of the shards.
    pub fn numbers(&self) -> std::ops::Range<u32> {
        0..self.container().shards()
    }

    fn window<M: Medium>(&self, medium: M, shard: u32) -> VolumeMedium<M> {
        VolumeMedium::of_shard(medium, self.container().window(shard), shard, Arc::clone(&self.group))
    }

    /// Refuses a window that does not have the shard which belongs there.
    async fn check<M: Medium>(&self, window: &VolumeMedium<M>, shard: u32) -> Result<(), VolumeError> {
        let found = superblocks::read(window).await?.superblock;
        let container = self.container();
        let uuid = container.shard_uuid(shard);
        if found.uuid != uuid {
            return Err(VolumeError::ForeignShard { found: uuid_text(&found.uuid), due: uuid_text(&uuid) });
        }
        let has_layout = found.layout == *container.shard_layout() && found.protection == container.protection();
        has_layout.then_some(()).ok_or(VolumeError::OtherShard)
    }

    /// Opens a shard on this core. `medium` is a handle of the medium that was given to [`Shards::find`].
    ///
    /// # Errors
    /// See [`VolumeError`]; it names the shard.
    pub async fn open<M: Medium, C: Clock>(
        &self,
        medium: M,
        clock: C,
        shard: u32,
    ) -> Result<OpenVolume<VolumeMedium<M>, C>, VolumeError> {
        let window = self.window(medium, shard);
        let of_shard = |error| VolumeError::of_shard(shard, error);
        if self.reads_what_is_left() {
            self.check(&window, shard).await.map_err(of_shard)?;
        }
        life::open(window, clock, &self.options).await.map_err(of_shard)
    }

    /// Rewrites lost copies of the container's superblock, if the volume is open for writing. Call it when all shards
    /// are open.
    pub async fn repair<M: Medium>(&self, medium: &M) {
        if self.options.read_only {
            return;
        }
        let lost = self.copies().iter().filter(|copy| copy.lost.is_some());
        for copy in lost.filter(|copy| copy.offset_bytes + u64::from(medium.sector_bytes()) <= medium.len_bytes()) {
            if let Err(error) = medium.write(copy.offset_bytes, image(medium, self.container())).await {
                tracing::warn!(%error, "cannot rewrite a copy of the superblock");
            }
        }
    }
}

/// A volume in shards, of which all shards are open on one core.
pub struct OpenShards<M, C> {
    /// What they share.
    pub shards: Shards,
    /// The shards in order. The worker of each must run beside it.
    pub volumes: Vec<OpenVolume<VolumeMedium<M>, C>>,
}

/// Opens all shards on this core, where a volume in shards is on the medium; `None` where none is.
///
/// # Errors
/// See [`VolumeError`]. If one shard cannot be opened, those that were opened before are closed again. A volume of which
/// not all shards are there is unchanged.
pub async fn open_shards<M: Medium + Clone, C: Clock + Clone>(
    medium: M,
    clock: C,
    options: &OpenOptions,
) -> Result<Option<OpenShards<M, C>>, VolumeError> {
    let Some(shards) = Shards::find(&medium, options).await? else { return Ok(None) };
    let opening = shards.numbers().map(|shard| shards.open(medium.clone(), clock.clone(), shard));
    let (mut volumes, mut failed) = (Vec::new(), None);
    for opened in join_all(opening).await {
        match opened {
            Ok(opened) => volumes.push(opened),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    if let Some(error) = failed {
        for OpenVolume { volume, worker, .. } in volumes {
            // The error that is returned counts; a shard that is not closed is recovered by the next open.
            let (closed, ()) = join(volume.close_for_a_moment(), worker.run()).await;
            drop(closed);
        }
        return Err(error);
    }
    shards.repair(&medium).await;
    Ok(Some(OpenShards { shards, volumes }))
}
