//! Volumes in files: their type, and the shards of an open volume, each on the core that opened it, with what is done
//! with all of them.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use futures_util::future::join_all;
use sealblock_block::{Error, ErrorKind};
use sealblock_media_file::FileMedium;
use sealblock_media_volume::{IdleWorkCounts, Volume, VolumeMedium, WhyLost};
use sealblock_runtime_reactor::CoreLocal;

use crate::program::{ReactorClock, on_core};

/// The file that a volume lies in, or the window of a shard in it.
type VolumeFile = VolumeMedium<Rc<FileMedium>>;

/// A volume in a file, or a shard of one, on the reactor's clock. The file and its lock may outlive the volume.
pub type FileVolume = Volume<VolumeFile, ReactorClock>;

/// The shards of an open volume, which are closed together.
pub(crate) struct ShardedVolume {
    path: PathBuf,
    shards: Vec<CoreLocal<FileVolume>>,
    /// Why completed changes may be lost, as long as nobody was told.
    may_be_lost: Cell<Option<WhyLost>>,
}

impl ShardedVolume {
    /// The shards of a volume in the file at `path`, each on the core that opened it.
    pub fn new(path: &Path, shards: Vec<CoreLocal<FileVolume>>, may_be_lost: Option<WhyLost>) -> ShardedVolume {
        ShardedVolume { path: path.to_owned(), shards, may_be_lost: Cell::new(may_be_lost) }
    }

    /// The file that the volume lies in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why completed changes may be lost, if that has not been reported yet.
    pub fn may_be_lost(&self) -> Option<WhyLost> {
        self.may_be_lost.get()
    }

    /// Closes all shards at once, each on its core.
    ///
    /// # Errors
    /// The first one that is not closed cleanly.
    pub async fn close(&self) -> Result<(), Error> {
        self.each(|volume| async move {
            let closed = volume.close().await;
            log_maintenance(volume.medium().below().path(), volume.upkeep());
            closed
        })
        .await
    }

    /// Has no shard report any more that changes may be lost.
    ///
    /// # Errors
    /// The first one whose medium fails.
    pub async fn forget_lost(&self) -> Result<(), Error> {
        self.each(|volume| async move { volume.forget_lost().await }).await?;
        self.may_be_lost.set(None);
        Ok(())
    }

    /// Does something with each shard, at once, on the core of each.
    async fn each<F>(&self, work: impl Fn(Rc<FileVolume>) -> F + Copy + Send + 'static) -> Result<(), Error>
    where
        F: Future<Output = Result<(), Error>> + 'static,
    {
        let each = self.shards.iter().map(|shard| async move {
            if let Some(volume) = shard.get() {
                return work(volume).await;
            }
            let there = shard.clone();
            let done = on_core(shard.home(), move || async move {
                match there.get() {
                    Some(volume) => work(volume).await,
                    None => Err(stopped()),
                }
            });
            done.await.unwrap_or_else(|| Err(stopped()))
        });
        join_all(each).await.into_iter().collect()
    }
}

#[cold]
fn stopped() -> Error {
    ErrorKind::Unreachable { reason: "the core of a shard has stopped".to_owned() }.into()
}

/// Logs background work of a volume.
pub(crate) fn log_maintenance(path: &Path, done: IdleWorkCounts) {
    let IdleWorkCounts { blocks_moved, blocks_unfit, bytes_punched } = done;
    if blocks_moved + blocks_unfit + bytes_punched > 0 {
        let path = path.display();
        tracing::info!(%path, blocks_moved, blocks_unfit, bytes_punched, "what the volume did while it was idle");
    }
}
