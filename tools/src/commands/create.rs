//! `sealblock create`: a new, empty volume.

use std::path::Path;
use std::time::Instant;

use sealblock_block::Medium;
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_media_file::{FileMedium, Options};
use sealblock_media_volume::format::{Container, Layout};
use sealblock_media_volume::shards::create_shards;
use sealblock_media_volume::{CreateOptions, create};
use sealblock_stack::identity::{new_uuid, uuid_text};
use sealblock_stack::quantity::count;
use sealblock_stack::{
    Cause, FileKind, StackError, file_format, file_start, inspect, medium_error, on_reactor, open_error, open_medium,
    protection_text, signature, volume_error, wipe,
};
use sealblock_units::{BlockSize, ByteCount};
use serde::Serialize;

use crate::cli::{Create, Guard};
use crate::exit::Exit;
use crate::new_file::{UnnamedFile, check_new};
use crate::report::{print_json, say};

/// The answer of `create`.
#[derive(Serialize)]
struct Report {
    volume: String,
    uuid: String,
    bytes: u64,
    blocks: u64,
    block_size: usize,
    protection: Option<serde_json::Value>,
    shards: u32,
    elapsed_s: f64,
}

/// Makes the volume.
pub fn run(arguments: &Create) -> Result<Exit, StackError> {
    let path = arguments.volume.path();
    let options = options(arguments).map_err(|failure| failure.on(path.display()))?;
    let started = Instant::now();
    make_in(path, &options, arguments.shards, arguments.force)?;
    if arguments.json {
        print_json(&Report {
            volume: arguments.volume.to_string(),
            uuid: uuid_text(&options.uuid),
            bytes: arguments.size.get(),
            blocks: options.capacity_blocks,
            block_size: options.block_size.bytes(),
            protection: options.protection.map(protection_json),
            shards: arguments.shards,
            elapsed_s: started.elapsed().as_secs_f64(),
        })?;
        return Ok(Exit::Clean);
    }
    say(&format!(
        "{}: {} in {} of {} bytes, {}{}",
        path.display(),
        arguments.size,
        count(options.capacity_blocks, "block"),
        options.block_size,
        protection_text(options.protection),
        if arguments.shards > 1 { format!(", {} shards", arguments.shards) } else { String::new() },
    ))?;
    Ok(Exit::Clean)
}

/// Makes a volume at `path`; a file that was not there before is taken away again if that fails, or if this process is
/// killed where the file system has files without names.
pub fn make(path: &Path, options: &CreateOptions, force: bool) -> Result<(), StackError> {
    make_in(path, options, 1, force)
}

/// The same, in this number of shards.
fn make_in(path: &Path, options: &CreateOptions, shards: u32, force: bool) -> Result<(), StackError> {
    let fresh = !path.exists();
    if let Some(new) = check_new(path).ok().filter(|()| fresh).and_then(|()| UnnamedFile::begin(path)) {
        let present = new.present_path();
        let made = on_reactor(async { fill(&open(&present, false, true).await?, options, shards).await });
        let named = made.and_then(|()| new.complete().map_err(|error| StackError::at_path("create", &error, path)));
        return named.map_err(|failure| failure.on(path.display()));
    }
    let made = on_reactor(async {
        let medium = open(path, fresh, force).await?;
        let made = fill(&medium, options, shards).await;
        if made.is_err() && fresh {
            // This call created it, so no data is lost. A failure to remove it would hide the first failure, which matters.
            std::fs::remove_file(path).ok();
        }
        made
    });
    made.map_err(|failure| failure.on(path.display()))
}

/// Turns a medium into a volume. Its content is discarded only after the volume's size was found to be valid.
async fn fill(medium: &FileMedium, options: &CreateOptions, shards: u32) -> Result<(), StackError> {
    let failed = |error| medium_error("create", &error);
    let medium_bytes = medium_bytes(options, medium.sector_bytes(), shards)?;
    if !medium.is_block_device() && medium.len_bytes() > 0 {
        medium.set_len_bytes(medium_bytes.max(medium.len_bytes())).map_err(failed)?;
        // The old content goes at once, and its space with it.
        medium.set_len_bytes(0).map_err(failed)?;
    }
    medium.set_len_bytes(medium_bytes).map_err(failed)?;
    if medium.is_block_device() && signature(medium).await.is_some() {
        // What others left, at the end or as backups, would have them find themselves there, where the volume does not reach it.
        wipe(medium).await.map_err(failed)?;
    }
    let created = match shards {
        1 => create(medium, options).await,
        _ => create_shards(medium, options, shards).await.map(drop),
    };
    created.map_err(|error| volume_error("create", &error))
}

/// The bytes that a volume needs.
fn medium_bytes(options: &CreateOptions, sector_bytes: u32, shards: u32) -> Result<u64, StackError> {
    let (profile, capacity_blocks) = ((options.block_size, sector_bytes), options.capacity_blocks);
    if shards == 1 {
        let layout = Layout::new(options.block_size, sector_bytes, capacity_blocks);
        return Ok(layout.map_err(|error| StackError::new(Cause::Usage, "create", error))?.medium_bytes());
    }
    let container = Container::new(options.uuid, profile, capacity_blocks, options.protection, (shards, 0));
    Ok(container.map_err(|error| volume_error("create", &error.into()))?.medium_bytes())
}

fn options(arguments: &Create) -> Result<CreateOptions, StackError> {
    let usage = |why: String| StackError::new(Cause::Usage, "create", why);
    let (size, block_size) = (arguments.size.get(), arguments.block_size);
    if size == 0 {
        return Err(usage("the size must be at least one block".to_owned()).advise("--size 1GiB"));
    }
    if !size.is_multiple_of(block_size.bytes() as u64) {
        let up = size.checked_next_multiple_of(block_size.bytes() as u64);
        let failure = usage(format!("the size, {size} bytes, must be a multiple of the block size, {block_size}"));
        return Err(up.map_or(failure.clone(), |up| failure.advise(format!("--size {up}"))));
    }
    let protection = protection(arguments.guard, arguments.protection_type);
    let preallocate = arguments.preallocate;
    Ok(CreateOptions { preallocate, ..options_of(arguments.size, block_size, protection)? })
}

fn options_of(
    size: ByteCount,
    block_size: BlockSize,
    protection: Option<PiFormat>,
) -> Result<CreateOptions, StackError> {
    let (capacity_blocks, uuid) = (size.get() >> block_size.shift(), new_uuid()?);
    Ok(CreateOptions { block_size, capacity_blocks, protection, uuid, preallocate: false })
}

/// The protection format of these choices.
fn protection(guard: Guard, kind: ProtectionType) -> Option<PiFormat> {
    guard.map(|guard| PiFormat::with_default_storage_tag(guard, kind))
}

/// A protection format as JSON has it.
pub fn protection_json(format: PiFormat) -> serde_json::Value {
    serde_json::json!({
        "guard": format.guard().as_str(),
        "type": format.protection() as u8 + 1,
        "storage_tag_bits": format.storage_tag_bits(),
        "tuple_bytes": format.tuple_bytes(),
    })
}

/// Opens the place for a volume; one that holds something already only with `force`.
async fn open(path: &Path, fresh: bool, force: bool) -> Result<FileMedium, StackError> {
    check_new(path)?;
    let options = if fresh { Options::CREATE } else { Options::WRITE };
    let medium = open_medium(path, options).await.map_err(|error| {
        let failure = open_error("create", &error);
        match failure.cause() {
            // Only the folder can be what is missing.
            Cause::Unreachable => failure.advise("give a path in an existing directory"),
            _ => failure,
        }
    })?;
    if fresh || force {
        return Ok(medium);
    }
    let there = match inspect(&medium).await? {
        FileKind::Volume => "it is already a protected volume".to_owned(),
        FileKind::Remains(parts) => {
            format!("it has the remains of a protected volume, or what a killed `create` left: {parts}")
        }
        FileKind::Raw => match what_is_there(&medium).await? {
            Some(there) => there,
            None => return Ok(medium),
        },
    };
    Err(StackError::new(Cause::Refused, "create", there)
        .on(path.display())
        .advise("use another path, or --force to overwrite it"))
}

/// What is there, unless it is an empty file, or a block device that begins with zeroes and has no signature.
async fn what_is_there(medium: &FileMedium) -> Result<Option<String>, StackError> {
    const PROBE_BYTES: u64 = 64 << 10;
    if let Some(found) = signature(medium).await {
        return Ok(Some(format!("it has {found}")));
    }
    if !medium.is_block_device() {
        let start = file_start(medium.path()).map_err(|error| StackError::io("read", &error))?;
        let there = file_format(&start).unwrap_or("data");
        return Ok((!start.is_empty()).then(|| format!("it has {there}")));
    }
    let length = PROBE_BYTES.min(medium.len_bytes()) as usize;
    let (read, bytes) = medium.read(0, medium.buffer(length)).await;
    read.map_err(|error| medium_error("read", &error))?;
    Ok(bytes.iter().any(|&byte| byte != 0).then(|| "it already has data".to_owned()))
}

/// The options of a volume for a demonstration: the defaults of the command line.
pub fn default_options(size: ByteCount) -> Result<CreateOptions, StackError> {
    options_of(size, BlockSize::B4096, protection(Some(GuardKind::Crc32c), ProtectionType::Type1))
}
