//! `sealblock resize`: another size for a protected volume.
//!
//! A server that serves the volume changes its size, and its hosts see it; without one it is changed here.

use std::num::NonZeroU64;
use std::path::Path;
use std::rc::Rc;

use sealblock_media_file::{OpenError, Options};
use sealblock_media_volume::probe;
use sealblock_media_volume::shards::probe_shards;
use sealblock_stack::target::TargetName;
use sealblock_stack::{
    Cause, FileKind, StackError, inspect, on_reactor, open_error, open_medium, remains_error, resize_volume,
    shards_keep_their_size, volume_error,
};

use crate::cli::{Resize, ServedName};
use crate::commands::scrub::{name_of, unserved_with};
use crate::commands::serve::text::resized_text;
use crate::exit::Exit;
use crate::report::{attributed, note_lost_answers_of, print_report};
use sealblock_server::control::client::find_to_change;
use sealblock_server::control::protocol::{RESIZING, ResizeReport};
use sealblock_server::devices::resize::blocks_of;

/// Does it.
pub fn run(arguments: &Resize) -> Result<Exit, StackError> {
    let target = &arguments.target;
    let size = NonZeroU64::new(arguments.size.get()).ok_or_else(|| {
        StackError::new(Cause::Usage, RESIZING, "a volume has at least one block").on(target).advise("a larger size")
    })?;
    let (report, stranger) = match find_to_change(&name_of(target)?, arguments.control.as_deref())? {
        Some(server) => (server.resize(size)?, server.stranger()),
        None => (alone(target, size, arguments.control.is_some())?, None),
    };
    print_report(arguments.json, &report, || attributed(&resized_text(&report), stranger))?;
    Ok(Exit::Clean)
}

/// Resizes a volume that no server has open.
fn alone(target: &ServedName, size: NonZeroU64, is_to_be_served: bool) -> Result<ResizeReport, StackError> {
    let path = match target {
        _ if is_to_be_served => return Err(unserved(target)),
        ServedName::Subsystem(..) | ServedName::Target(TargetName::NvmeTcp { .. }) => return Err(unserved(target)),
        ServedName::Target(TargetName::File(path) | TargetName::Linux { path, .. }) => path,
        ServedName::Target(_) => {
            return Err(StackError::new(Cause::Unsuitable, RESIZING, "only a protected volume can be resized")
                .on(target)
                .advise("give the path of a volume"));
        }
    };
    let (before_bytes, size_bytes) = on_reactor(on_medium(path, size)).map_err(|failure| failure.on(target))?;
    Ok(ResizeReport { target: target.to_string(), before_bytes, size_bytes, pause_us: None })
}

fn unserved(target: &ServedName) -> StackError {
    unserved_with(RESIZING, "give the volume's path; or --control PATH for a server with its own control socket")
        .on(target)
}

/// Bytes of data before and after.
async fn on_medium(path: &Path, size: NonZeroU64) -> Result<(u64, u64), StackError> {
    let medium = open_medium(path, Options::WRITE).await.map_err(|error| {
        let failure = open_error(RESIZING, &error);
        match error {
            OpenError::InUse { .. } => {
                failure.advise("--control PATH, if the server that uses it has its own control socket")
            }
            _ => failure,
        }
    })?;
    match inspect(&medium).await? {
        FileKind::Volume => {}
        FileKind::Remains(parts) => return Err(remains_error(RESIZING, path, &parts)),
        FileKind::Raw => return Err(StackError::new(Cause::Unsuitable, RESIZING, "it is not a protected volume")),
    }
    if !matches!(probe_shards(&medium).await, Ok(None)) {
        return Err(shards_keep_their_size(RESIZING));
    }
    let block_size = probe(&medium).await.map_err(|error| volume_error(RESIZING, &error))?.layout.block_size();
    let capacity_blocks = blocks_of(size.get(), block_size)?;
    let resized = resize_volume(RESIZING, &Rc::new(medium), capacity_blocks).await?;
    note_lost_answers_of(path, resized.may_be_lost);
    let bytes = |blocks: u64| blocks << block_size.shift();
    Ok((bytes(resized.before_blocks), bytes(resized.capacity_blocks)))
}
