//! `sealblock corrupt`: damage on purpose.

use std::path::Path;

use sealblock_block::Device;
use sealblock_media_volume::{CorruptionError, CorruptionKind};
use sealblock_stack::{Access, Cause, FileVolume, StackError, device_error, on_reactor, open_shard_of, open_volume};
use sealblock_units::Lba;

use crate::cli::Corrupt;
use crate::exit::Exit;
use crate::report::{note_lost_answers_of, say};

/// Damages one block.
pub fn run(arguments: &Corrupt) -> Result<Exit, StackError> {
    let path = arguments.volume.path();
    on_reactor(async {
        if let Some((volume, place)) = open_shard_of(path, arguments.lba).await? {
            return damage_and_close(&volume, path, place, arguments).await;
        }
        let open = open_volume(path, Access::Write).await?;
        damage_and_close(&open.volume, path, arguments.lba, arguments).await
    })?;
    say(&format!("{}: block {} damaged ({})", path.display(), arguments.lba, to_text(arguments.kind)))?;
    Ok(Exit::Clean)
}

/// Damages the block at this place of an open volume, or of one shard.
async fn damage_and_close(volume: &FileVolume, path: &Path, place: Lba, arguments: &Corrupt) -> Result<(), StackError> {
    note_lost_answers_of(path, volume.may_be_lost());
    let damaged = damage_at(volume, place, (arguments.lba, arguments.kind)).await;
    let closed = volume.close().await.map_err(|error| device_error("close", &error));
    damaged.and(closed).map_err(|failure| failure.on(path.display()))
}

/// Damages one block of an open volume.
pub async fn damage(volume: &FileVolume, lba: Lba, kind: CorruptionKind) -> Result<(), StackError> {
    damage_at(volume, lba, (lba, kind)).await
}

/// Damages the block at a place, which is block `lba` of the whole volume.
async fn damage_at(volume: &FileVolume, place: Lba, (lba, kind): (Lba, CorruptionKind)) -> Result<(), StackError> {
    volume.damage(place, kind).await.map_err(|error| {
        let error = error.at(lba);
        let doing = format!("corrupt block {lba}");
        match error {
            CorruptionError::Range { .. } => StackError::new(Cause::Usage, doing, error)
                .advise(format!("give a block from 0 to {}", volume.geometry().capacity_blocks - 1)),
            CorruptionError::Unprotected | CorruptionError::Single => StackError::new(Cause::Usage, doing, error),
            CorruptionError::Empty(_) => StackError::new(Cause::Unsuitable, doing, error)
                .advise("write data first, with `sealblock copy FILE VOLUME`"),
            CorruptionError::Damaged(_) => StackError::new(Cause::Unsuitable, doing, error),
            CorruptionError::Volume(error) => device_error(doing, &error),
        }
    })
}

fn to_text(kind: CorruptionKind) -> &'static str {
    match kind {
        CorruptionKind::Data => "its data changed",
        CorruptionKind::Guard => "its guard changed",
        CorruptionKind::RefTag => "its reference tag changed",
        CorruptionKind::AppTag => "its application tag changed",
        CorruptionKind::LostWrite => "its last write was lost: it has older data with a matching seal",
        CorruptionKind::Misdirected => "it has another block's data and seal",
    }
}
