//! One copy, chunk by chunk, some of them in flight: what `copy` and `rescue` do.

use std::cell::Cell;

use futures_util::stream::{StreamExt, TryStreamExt};
use sealblock_stack::range::Run;
use sealblock_stack::{Lost, StackError};
use sealblock_units::{ByteCount, Lba};

use super::sink::{Losses, Sink, byte_ranges};
use super::source::{Chunk, ChunkData, IN_FLIGHT, Reading, Source};
use crate::findings::Findings;
use crate::progress::{Progress, Show};
use crate::tally::Tally;

/// What a copy is about, and how far it is.
pub(in crate::commands) struct CopyJob<'a> {
    source: &'a Source,
    reading: Reading,
    sink: &'a Sink,
    losses: Losses,
    /// What is shown of it.
    pub progress: Progress,
    /// Bytes from the start on that are copied.
    total: Cell<u64>,
}

/// What a copy has moved and met.
#[derive(Default)]
pub(in crate::commands) struct Moved {
    /// Bytes that were read and written.
    pub tally: Tally,
    /// Blocks of the source that are lost.
    pub blocks_lost: u64,
}

impl<'a> CopyJob<'a> {
    /// A copy that has not begun.
    pub fn new(doing: &str, source: &'a Source, reading: Reading, sink: &'a Sink, show: Show) -> CopyJob<'a> {
        let progress = Progress::new(doing, source.bytes().map(ByteCount::new), show);
        let losses = Losses::new(sink, source.block_size(), source.bytes());
        CopyJob { source, reading, sink, losses, progress, total: Cell::new(0) }
    }

    /// Bytes from the start on that are copied.
    pub fn total(&self) -> u64 {
        self.total.get()
    }

    /// Copies chunk by chunk until nothing is left or a signal comes, and makes it durable.
    pub async fn run(&self, findings: &mut Findings<Lost>) -> Result<Moved, StackError> {
        let lanes = if self.sink.in_order() { 1 } else { IN_FLIGHT };
        let shift = self.losses.block_size().shift();
        let chunks = self.source.chunks(self.reading).map(|chunk| write(chunk, &self.losses, self.sink));
        let (mut written, mut moved) = (chunks.buffered(lanes), Moved::default());
        while let Some(chunk) = written.try_next().await? {
            self.total.set(self.total.get() + chunk.bytes);
            moved.tally.read += chunk.read;
            moved.tally.written += chunk.written;
            self.progress.advance_by(chunk.bytes, chunk.read.max(chunk.written));
            for run in chunk.lost {
                moved.blocks_lost += run.blocks;
                self.progress.bad(run.blocks);
                findings.note(run);
            }
            findings.reached(Lba::new(self.total.get() >> shift), &self.progress);
        }
        self.sink.finish(self.total.get()).await?;
        Ok(moved)
    }
}

/// What came of a chunk.
struct Written {
    bytes: u64,
    read: u64,
    written: u64,
    lost: Vec<Run<Lost>>,
}

async fn write(chunk: Result<Chunk, StackError>, losses: &Losses, sink: &Sink) -> Result<Written, StackError> {
    let Chunk { offset, data, read, lost } = chunk?;
    let (bytes, lost) = (data.len_bytes(), losses.widened(lost));
    let written = match data {
        ChunkData::Bytes(data) => {
            let ranges = byte_ranges(&lost, losses.block_size(), offset + bytes);
            sink.write_around(offset, &data, &ranges).await?
        }
        ChunkData::Hole(length) => sink.write_hole(offset, length).await?,
    };
    Ok(Written { bytes, read, written, lost })
}
