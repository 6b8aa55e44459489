//! `sealblock fs fallocate`: space for a file in advance, and holes.

use sealblock_btrfs_engine::engine::EngineError;
use sealblock_btrfs_engine::inode::Ownership;
use sealblock_btrfs_engine::names::NewFile;
use sealblock_stack::StackError;
use serde::Serialize;

use super::names::ownership;
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::FsFallocate;
use crate::exit::Exit;

/// Permissions of a new file, before the umask.
const FILE_PERMISSIONS: u32 = 0o666;

/// The file, in JSON.
#[derive(Serialize)]
struct Allocated {
    name: String,
    subvolume: u64,
    ino: u64,
    /// Whether it did not exist before.
    created: bool,
    size: u64,
}

impl Done for Allocated {}

/// Allocates space, or makes a hole.
pub fn run(arguments: &FsFallocate) -> Result<Exit, StackError> {
    let order = Order { names: &[&arguments.name], json: arguments.json, needs_subvolumes: false };
    change(&order, async |writer| {
        let (root, ino, created) = file(writer, arguments).await?;
        let (offset, bytes) = (arguments.offset.get(), arguments.length.get());
        let failed = |error: EngineError| engine_error("allocate space for", &error).on(&arguments.name);
        let allocated = match arguments.punch_hole {
            true => writer.engine.punch(root, ino, offset, bytes).await,
            false => writer.engine.allocate_range(root, ino, (offset, bytes), arguments.keep_size).await,
        };
        allocated.map_err(failed)?;
        let size = writer.engine.stat(root, ino).await.map_err(failed)?.size.get();
        Ok(Allocated { name: arguments.name.to_string(), subvolume: root, ino, created, size })
    })
}

/// The file, which is made if it does not exist and space is allocated for it.
async fn file(writer: &Writer, arguments: &FsFallocate) -> Result<(u64, u64, bool), StackError> {
    if arguments.punch_hole {
        let node = writer.existing(&arguments.name).await?;
        return Ok((node.root, node.ino, false));
    }
    if let Some(node) = writer.find(&arguments.name, true).await? {
        return Ok((node.root, node.ino, false));
    }
    let entry = writer.entry(&arguments.name).await?;
    let own = ownership(None, None);
    let owner = Ownership { permissions: own.permissions & FILE_PERMISSIONS, ..own };
    let root = entry.directory.root;
    let made = writer.engine.create(root, entry.place(), NewFile::Regular, &owner, now()).await;
    Ok((root, made.map_err(entry.failed("create"))?, true))
}
