//! `sealblock fs cat`: what files hold, to standard output.

use std::io::{self, Write};

use futures_util::StreamExt;
use futures_util::stream;
use sealblock_btrfs::inode::Inode;
use sealblock_btrfs::{Filesystem, FsError};
use sealblock_runtime_memory::Slice;
use sealblock_stack::filesystem::of_filesystem;
use sealblock_stack::{Cause, StackError};

use super::place::{resolve, with_filesystem};
use crate::cli::FsCat;
use crate::exit::Exit;

/// Bytes of one read: one request to a device where the file lies together, whose data are written from where they arrived.
const STEP_BYTES: u64 = 1 << 20;
/// Reads in flight.
const IN_FLIGHT: usize = 12;

/// Writes them one after the other.
pub fn run(arguments: &FsCat) -> Result<Exit, StackError> {
    for file in &arguments.files {
        with_filesystem(file, async |open| {
            let inode = resolve(open, file, true).await?;
            let output = io::stdout();
            let write = |data: Slice| match output.lock().write_all(&data) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    Err(StackError::new(Cause::Unread, "writing", "the reader is gone"))
                }
                written => written.map_err(|error| StackError::io("writing to standard output", &error)),
            };
            let doing = |error: FsError| of_filesystem("reading", &error).on(file);
            read_all(&open.filesystem, &inode, doing, write).await
        })?;
    }
    io::stdout().flush().map_err(|error| StackError::io("writing to standard output", &error))?;
    Ok(Exit::Clean)
}

/// Reads a file from its beginning to its end, several steps at once, and hands over each step in order.
async fn read_all(
    filesystem: &Filesystem,
    inode: &Inode,
    fail: impl Fn(FsError) -> StackError,
    mut write: impl FnMut(Slice) -> Result<(), StackError>,
) -> Result<(), StackError> {
    let steps = (0..inode.size().div_ceil(STEP_BYTES)).map(|step| step * STEP_BYTES);
    let read = |at| filesystem.read(inode, at, STEP_BYTES as usize);
    // A file that is no file is told as one even if it is empty.
    if inode.size() == 0 {
        read(0).await.map_err(&fail)?;
    }
    let mut steps = stream::iter(steps).map(read).buffered(IN_FLIGHT);
    while let Some(data) = steps.next().await {
        write(data.map_err(&fail)?)?;
    }
    Ok(())
}
