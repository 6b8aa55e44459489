//! Files of a Btrfs filesystem that is open in this process.

use sealblock_btrfs_engine::change::Change;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::{NewFile, Place};
use sealblock_btrfs_engine::plan::Plan;
use sealblock_btrfs_format::items::inode::{InodeFlags, Timespec};
use sealblock_btrfs_format::key::objectid;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::submitted;

/// The first subvolume, and its directory.
pub const ROOT: u64 = objectid::FS_TREE;
/// See [`ROOT`].
pub const DIRECTORY: u64 = objectid::FIRST_FREE;
/// Bytes of a write that fills a file.
const FILL_BYTES: u64 = 1 << 20;

/// Who owns new files.
const OWNER: Ownership = Ownership { uid: 0, gid: 0, permissions: 0o644 };

/// The options of an engine on a reactor.
pub fn engine_options() -> EngineOptions {
    EngineOptions { submitted: Some(|| Box::pin(submitted())), ..EngineOptions::default() }
}

/// The time now, for new files.
pub fn now() -> Timespec {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timespec { seconds: (since.as_secs() as i64).into(), nanoseconds: since.subsec_nanos().into() }
}

/// Creates a file.
pub async fn create(engine: &Engine, name: &str, flags: InodeFlags) -> anyhow::Result<u64> {
    let place = Place { directory: DIRECTORY, name: name.as_bytes() };
    let ino = engine.create(ROOT, place, NewFile::Regular, &OWNER, now()).await?;
    if !flags.is_empty() {
        engine.set_flags(ROOT, ino, flags, now()).await?;
    }
    Ok(ino)
}

/// Writes a whole file.
pub async fn fill(engine: &Engine, ino: u64, bytes: u64, payload: &Slice) -> anyhow::Result<()> {
    for offset in (0..bytes).step_by(FILL_BYTES as usize) {
        let piece = payload.slice(..FILL_BYTES.min(bytes - offset) as usize);
        write(engine, ino, offset, piece).await?;
    }
    Ok(())
}

/// Writes all of these bytes.
pub async fn write(engine: &Engine, ino: u64, offset: u64, data: Slice) -> anyhow::Result<()> {
    let bytes = data.len() as u64;
    let written = engine.write(ROOT, ino, offset, data).await?;
    anyhow::ensure!(written == bytes, "only {written} bytes of {bytes} were written");
    Ok(())
}

/// The file gets the flag NODATASUM, which programs cannot set alone.
pub async fn forbid_sums(engine: &Engine, ino: u64) -> anyhow::Result<()> {
    engine
        .change(|transaction| {
            let geometry = *transaction.geometry();
            let view = transaction.view(objectid::FS_TREE)?;
            let mut plan = Plan::new(&view, transaction.plan_context(&geometry, now()));
            plan.edit_inode(ino, |inode| {
                inode.flags = InodeFlags::NODATASUM.bits().into();
                Ok(())
            })?;
            let changes = plan.into_changes();
            transaction.apply_change(&Change::of(objectid::FS_TREE, changes))
        })
        .await?;
    Ok(())
}
