//! `sealblock copy`: bytes from one place to another.
//!
//! A place is a device, standard input or output, or a plain file. Bytes need not end at a block's end: a file that is written
//! has as many as there were, and the rest of a device's last block is zeroes. Zeroes are not written where the device can
//! unmap instead, or the file has a hole.

mod sink;
mod source;

use futures_util::stream::{StreamExt, TryStreamExt};
use sealblock_units::ByteCount;

use crate::cli::Copy;
use crate::exit::{Cause, Exit, Failure};
use crate::progress::{Progress, Show};
use crate::stack::on_reactor;

pub(super) use sink::Sink;
use source::Source;

/// Bytes read and written at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Chunks under way at once, on either side.
const IN_FLIGHT: usize = 8;

/// Copies.
pub fn run(arguments: &Copy) -> Result<Exit, Failure> {
    on_reactor(async {
        let source = Source::open(&arguments.from).await?;
        let sink = Sink::open(&arguments.to, arguments.force, arguments.members.usage()).await?;
        let room = sink.room_bytes();
        let copied = copy(arguments, &source, &sink).await;
        let copied = sink.close(copied).await;
        let bytes = source.close(copied).await?;
        // Standard output may be where the data went.
        eprintln!("{} copied from {} to {}", ByteCount::new(bytes), arguments.from, arguments.to);
        if let Some(behind) = room.and_then(|room| room.checked_sub(bytes)).filter(|behind| *behind > 0) {
            eprintln!(
                "{behind} bytes of {} lie behind them: zeroes to the block's end, then what was there",
                arguments.to
            );
        }
        Ok(Exit::Clean)
    })
}

async fn copy(arguments: &Copy, source: &Source, sink: &Sink) -> Result<u64, Failure> {
    let size = source.bytes();
    if let (Some(size), Some(room)) = (size, sink.room_bytes())
        && size > room
    {
        let why = format!("{size} bytes do not fit into its {room} bytes");
        return Err(Failure::new(Cause::Unsuitable, "copying", why).on(&arguments.to).advise("a larger volume"));
    }
    let progress = Progress::new("copying", size.map(ByteCount::new), Show::OnTerminal);
    let chunks = source.chunks();
    let lanes = if sink.in_order() { 1 } else { IN_FLIGHT };
    let total = chunks
        .map(|chunk| {
            let progress = &progress;
            async move {
                let (offset, data) = chunk?;
                sink.write(offset, &data).await?;
                progress.advance(data.len() as u64);
                Ok::<u64, Failure>(data.len() as u64)
            }
        })
        .buffered(lanes)
        .try_fold(0, |sum, bytes| async move { Ok(sum + bytes) })
        .await?;
    sink.finish(total).await?;
    Ok(total)
}
