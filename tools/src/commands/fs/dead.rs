//! Frees the space of deleted subvolumes, step by step, also of those that an earlier command or a crash left.

use sealblock_btrfs_engine::drop::Dropped;
use sealblock_btrfs_engine::engine::EngineError;
use serde::Serialize;

use super::write::Writer;
use crate::interrupt;
use crate::progress::{Show, Steps};
use crate::report::note;

/// Steps between two looks at how much is in memory.
const STEPS_AT_ONCE: usize = 64;

/// What became of deleted subvolumes, in JSON.
#[derive(Default, Serialize)]
pub(super) struct Dead {
    /// Those whose space was freed.
    pub dropped: Vec<u64>,
    /// Those that still use space.
    pub left: Vec<u64>,
}

/// Commits, so that the subvolumes are gone whatever becomes of the rest, and frees as much space as there is time for.
///
/// # Errors
/// Those of the engine.
pub(super) async fn drop_dead(writer: &Writer, show: Show) -> Result<Dead, EngineError> {
    writer.engine.commit().await?;
    let (steps, mut dead, mut from) = (Steps::new(show), Dead::default(), 0);
    while let Some(id) = writer.engine.change(|transaction| transaction.next_dead(from)).await? {
        from = id + 1;
        match drop_one(writer, id, &steps).await? {
            Dropped::All => dead.dropped.push(id),
            Dropped::LeftToLinux => {
                dead.left.push(id);
                note(&format_args!("Linux began to free the space of subvolume {id}, and continues at the next mount"));
            }
            Dropped::Some => {
                dead.left.push(id);
                let go_on = "`sealblock fs subvolume delete FILESYSTEM`, or a mount by Linux, continues";
                interrupt::report("freeing space", format_args!("in subvolume {id}"), go_on);
                break;
            }
        }
    }
    Ok(dead)
}

/// Drops a subvolume. [`Dropped::Some`] if a signal came meanwhile.
async fn drop_one(writer: &Writer, id: u64, steps: &Steps) -> Result<Dropped, EngineError> {
    writer.engine.change(|transaction| transaction.open_tree(id)).await?;
    for done in 0_usize.. {
        if writer.stops() {
            return Ok(Dropped::Some);
        }
        if done.is_multiple_of(STEPS_AT_ONCE) {
            steps.at(format!("freeing the space of subvolume {id}: {done} nodes"));
            writer.checkpoint().await?;
        }
        match writer.engine.change(|transaction| transaction.drop_step(id)).await? {
            Dropped::Some => {}
            end => return Ok(end),
        }
    }
    Ok(Dropped::Some)
}
