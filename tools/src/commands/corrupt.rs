//! `sealblock corrupt`: damage on purpose.

use sealblock_block::Device;
use sealblock_media_volume::{CorruptionError, CorruptionKind};
use sealblock_stack::{Access, Cause, FileVolume, StackError, of_block, on_reactor, open_volume};
use sealblock_units::Lba;

use crate::cli::Corrupt;
use crate::exit::Exit;
use crate::report::say;

/// Damages one block.
pub fn run(arguments: &Corrupt) -> Result<Exit, StackError> {
    let path = arguments.volume.path();
    on_reactor(async {
        let open = open_volume(path, Access::Write).await?;
        let damaged = damage(&open.volume, arguments.lba, arguments.kind).await;
        let closed = open.volume.close().await.map_err(|error| of_block("closing", &error));
        damaged.and(closed).map_err(|failure| failure.on(path.display()))
    })?;
    say(&format!("{}: block {} is damaged now ({})", path.display(), arguments.lba, to_text(arguments.kind)))?;
    Ok(Exit::Clean)
}

/// Damages one block of an open volume.
pub async fn damage(volume: &FileVolume, lba: Lba, kind: CorruptionKind) -> Result<(), StackError> {
    volume.damage(lba, kind).await.map_err(|error| {
        let doing = format!("damaging block {lba}");
        match error {
            CorruptionError::Range { .. } => StackError::new(Cause::Usage, doing, error)
                .advise(format!("a block from 0 to {}", volume.geometry().capacity_blocks - 1)),
            CorruptionError::Unprotected | CorruptionError::Single => StackError::new(Cause::Usage, doing, error),
            CorruptionError::Empty(_) => {
                StackError::new(Cause::Unsuitable, doing, error).advise("`sealblock copy FILE VOLUME` first")
            }
            CorruptionError::Damaged(_) => StackError::new(Cause::Unsuitable, doing, error),
            CorruptionError::Volume(error) => of_block(doing, &error),
        }
    })
}

fn to_text(kind: CorruptionKind) -> &'static str {
    match kind {
        CorruptionKind::Data => "its data changed",
        CorruptionKind::Guard => "its guard changed",
        CorruptionKind::RefTag => "its reference tag changed",
        CorruptionKind::AppTag => "its application tag changed",
        CorruptionKind::LostWrite => "its last write was lost: an older block with matching tags is back",
        CorruptionKind::Misdirected => "a write meant for another block landed on it",
    }
}
