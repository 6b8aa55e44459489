//! `sealblock corrupt`: damage on purpose.

use sealblock_block::Device;
use sealblock_media_volume::{DamageError, DamageKind};
use sealblock_units::Lba;

use crate::cli::{Corrupt, Harm};
use crate::exit::{Cause, Exit, Failure};
use crate::report::say;
use crate::stack::{Access, FileVolume, of_block, on_reactor, open_volume};

/// Damages one block.
pub fn run(arguments: &Corrupt) -> Result<Exit, Failure> {
    let path = arguments.volume.path();
    on_reactor(async {
        let open = open_volume(path, Access::Write).await?;
        let damaged = damage(&open.volume, arguments.lba, kind(arguments.kind)).await;
        let closed = open.volume.close().await.map_err(|error| of_block("closing", &error));
        damaged.and(closed).map_err(|failure| failure.on(path.display()))
    })?;
    say(&format!("{}: block {} is damaged now ({})", path.display(), arguments.lba, words(arguments.kind)))?;
    Ok(Exit::Clean)
}

/// Damages one block of an open volume.
pub async fn damage(volume: &FileVolume, lba: Lba, kind: DamageKind) -> Result<(), Failure> {
    volume.damage(lba, kind).await.map_err(|error| {
        let doing = format!("damaging block {lba}");
        match error {
            DamageError::Range { .. } => Failure::new(Cause::Usage, doing, error)
                .advise(format!("a block from 0 to {}", volume.geometry().capacity_blocks - 1)),
            DamageError::Unprotected | DamageError::Single => Failure::new(Cause::Usage, doing, error),
            DamageError::Empty(_) => {
                Failure::new(Cause::Unsuitable, doing, error).advise("`sealblock copy FILE VOLUME` first")
            }
            DamageError::Damaged(_) => Failure::new(Cause::Unsuitable, doing, error),
            DamageError::Volume(error) => of_block(doing, &error),
        }
    })
}

fn kind(harm: Harm) -> DamageKind {
    match harm {
        Harm::Data => DamageKind::Data,
        Harm::Guard => DamageKind::Guard,
        Harm::RefTag => DamageKind::RefTag,
        Harm::AppTag => DamageKind::AppTag,
        Harm::LostWrite => DamageKind::LostWrite,
        Harm::Misdirected => DamageKind::Misdirected,
    }
}

fn words(harm: Harm) -> &'static str {
    match harm {
        Harm::Data => "its data changed",
        Harm::Guard => "its guard changed",
        Harm::RefTag => "its reference tag changed",
        Harm::AppTag => "its application tag changed",
        Harm::LostWrite => "its last write was lost: an older block with matching tags is back",
        Harm::Misdirected => "a write meant for another block landed on it",
    }
}
