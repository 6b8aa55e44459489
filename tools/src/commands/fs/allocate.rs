//! `sealblock fs fallocate`: space for a file in advance, written zeroes, and holes.

use sealblock_btrfs_engine::engine::{Engine, EngineError};
use sealblock_btrfs_engine::inode::{Ownership, SETTABLE_FLAGS};
use sealblock_btrfs_engine::names::NewFile;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_stack::{Cause, StackError};
use sealblock_units::ByteCount;
use serde::Serialize;

use super::names::ownership;
use super::write::{Done, Order, Writer, change, engine_error, now};
use crate::cli::FsFallocate;
use crate::exit::Exit;
use crate::interrupt;
use crate::progress::{Progress, Show};
use crate::report::note;

/// Permissions of a new file, before the umask.
const FILE_PERMISSIONS: u32 = 0o666;
/// Bytes that become zeroes before a signal is looked for: those of the longest extent.
const ZERO_STEP_BYTES: u64 = 128 << 20;
const ACTION: &str = "allocate space for";

/// The file, in JSON.
#[derive(Serialize)]
struct Allocated {
    name: String,
    subvolume: u64,
    ino: u64,
    /// Whether it did not exist before.
    created: bool,
    size: u64,
    /// Bytes that are written zeroes now.
    zeroed_bytes: u64,
    /// Devices to which these zeroes were transferred, since they cannot make them.
    slow_devices: Vec<String>,
}

impl Done for Allocated {}

/// Allocates space, or makes a hole.
pub fn run(arguments: &FsFallocate) -> Result<Exit, StackError> {
    let order = Order { names: &[&arguments.name], json: arguments.json, needs_subvolumes: false };
    change(&order, async |writer| {
        let slow_devices = match arguments.write_zeroes {
            true => slow_devices(writer, arguments)?,
            false => Vec::new(),
        };
        let (root, ino, created) = file(writer, arguments).await?;
        let (offset, bytes) = (arguments.offset.get(), arguments.length.get());
        let failed = |error: EngineError| engine_error(ACTION, &error).on(&arguments.name);
        let mut zeroed_bytes = 0;
        match (arguments.punch_hole, arguments.write_zeroes) {
            (true, _) => writer.engine.punch(root, ino, offset, bytes).await,
            (_, true) => write_zeroes(writer, arguments, (root, ino), &mut zeroed_bytes).await,
            _ => writer.engine.allocate_range(root, ino, (offset, bytes), arguments.keep_size).await,
        }
        .map_err(failed)?;
        let size = writer.engine.stat(root, ino).await.map_err(failed)?.size.get();
        let name = arguments.name.to_string();
        Ok(Allocated { name, subvolume: root, ino, created, size, zeroed_bytes, slow_devices })
    })
}

/// The names of devices that cannot make zeroes.
pub(super) fn without_zeroes(engine: &Engine) -> Vec<String> {
    let devices = engine.devices().iter().filter(|(_, device)| !device.has_native_zeroes());
    devices.map(|(_, device)| device.name.clone()).collect()
}

/// The devices that cannot make zeroes, which are named before the work begins, or for which it is refused.
fn slow_devices(writer: &Writer, arguments: &FsFallocate) -> Result<Vec<String>, StackError> {
    let slow = without_zeroes(&writer.engine);
    if slow.is_empty() {
        return Ok(slow);
    }
    let why = format!("{} cannot make zeroes", slow.join(", "));
    if arguments.require_offload {
        let refused = StackError::new(Cause::Unsuitable, ACTION, why).on(&arguments.name);
        return Err(refused.advise("without --require-offload, zeroes are transferred"));
    }
    note(&format_args!("{why}, so that {} of zeroes are transferred", ByteCount::new(arguments.length.get())));
    Ok(slow)
}

/// Writes zeroes until all are there, or a signal comes.
async fn write_zeroes(
    writer: &Writer,
    arguments: &FsFallocate,
    (root, ino): (u64, u64),
    done: &mut u64,
) -> Result<(), EngineError> {
    let (offset, bytes) = (arguments.offset.get(), arguments.length.get());
    let show = if arguments.json { Show::Never } else { Show::OnTerminal };
    let progress = Progress::new("zeroing", Some(arguments.length), show);
    loop {
        // The first step is what the engine judges, also one of no bytes.
        let step = ZERO_STEP_BYTES.min(bytes - *done);
        let at = offset.saturating_add(*done);
        writer.engine.write_zeroes(root, ino, at, step).await?;
        *done += step;
        progress.advance(step);
        if *done >= bytes {
            return Ok(());
        }
        writer.checkpoint().await?;
        if writer.stops() {
            let go_on = format!("--offset {} --length {} does the rest", offset + *done, bytes - *done);
            interrupt::report("zeroing", format_args!("after {done} bytes"), go_on);
            return Ok(());
        }
    }
}

/// The file, which is made if it does not exist and space is allocated for it. If it is to have written zeroes, it is
/// one whose data are not copied on write.
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
    let made = async {
        let ino = writer.engine.create(root, entry.place(), NewFile::Regular, &owner, now()).await?;
        if arguments.write_zeroes {
            let inherited = writer.engine.stat(root, ino).await?.flags().intersection(SETTABLE_FLAGS);
            let flags = inherited.difference(InodeFlags::COMPRESS) | InodeFlags::NODATACOW;
            writer.engine.set_flags(root, ino, flags, now()).await?;
        }
        Ok(ino)
    };
    Ok((root, made.await.map_err(entry.failed("create"))?, true))
}
