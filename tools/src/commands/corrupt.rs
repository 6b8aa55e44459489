//! `sealblock corrupt`: damage on purpose.

use sealblock_block::Device;
use sealblock_media_volume::{CorruptionError, CorruptionKind};
use sealblock_units::Lba;

use crate::cli::{Corrupt, CorruptKind};
use crate::exit::{Cause, CliError, Exit};
use crate::report::say;
use crate::stack::{Access, FileVolume, of_block, on_reactor, open_volume};

/// Damages one block.
pub fn run(arguments: &Corrupt) -> Result<Exit, CliError> {
    let path = arguments.volume.path();
    on_reactor(async {
        let open = open_volume(path, Access::Write).await?;
        let damaged = damage(&open.volume, arguments.lba, kind(arguments.kind)).await;
        let closed = open.volume.close().await.map_err(|error| of_block("closing", &error));
        damaged.and(closed).map_err(|failure| failure.on(path.display()))
    })?;
    say(&format!("{}: block {} is damaged now ({})", path.display(), arguments.lba, to_text(arguments.kind)))?;
    Ok(Exit::Clean)
}

/// Damages one block of an open volume.
pub async fn damage(volume: &FileVolume, lba: Lba, kind: CorruptionKind) -> Result<(), CliError> {
    volume.damage(lba, kind).await.map_err(|error| {
        let doing = format!("damaging block {lba}");
        match error {
            CorruptionError::Range { .. } => CliError::new(Cause::Usage, doing, error)
                .advise(format!("a block from 0 to {}", volume.geometry().capacity_blocks - 1)),
            CorruptionError::Unprotected | CorruptionError::Single => CliError::new(Cause::Usage, doing, error),
            CorruptionError::Empty(_) => {
                CliError::new(Cause::Unsuitable, doing, error).advise("`sealblock copy FILE VOLUME` first")
            }
            CorruptionError::Damaged(_) => CliError::new(Cause::Unsuitable, doing, error),
            CorruptionError::Volume(error) => of_block(doing, &error),
        }
    })
}

fn kind(kind: CorruptKind) -> CorruptionKind {
    match kind {
        CorruptKind::Data => CorruptionKind::Data,
        CorruptKind::Guard => CorruptionKind::Guard,
        CorruptKind::RefTag => CorruptionKind::RefTag,
        CorruptKind::AppTag => CorruptionKind::AppTag,
        CorruptKind::LostWrite => CorruptionKind::LostWrite,
        CorruptKind::Misdirected => CorruptionKind::Misdirected,
    }
}

fn to_text(kind: CorruptKind) -> &'static str {
    match kind {
        CorruptKind::Data => "its data changed",
        CorruptKind::Guard => "its guard changed",
        CorruptKind::RefTag => "its reference tag changed",
        CorruptKind::AppTag => "its application tag changed",
        CorruptKind::LostWrite => "its last write was lost: an older block with matching tags is back",
        CorruptKind::Misdirected => "a write meant for another block landed on it",
    }
}
