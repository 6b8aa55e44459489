//! `sealblock zero` and `sealblock discard`.

use futures_util::stream::{self, StreamExt, TryStreamExt};
use sealblock_block::{Device, Durability, Operation};
use sealblock_units::{ByteCount, Extent};

use crate::cli::{Discard, Zero};
use crate::exit::{Exit, Failure};
use crate::progress::{Progress, Show};
use crate::range::BlockRange;
use crate::report::say;
use crate::stack::{Access, Opened, Usage, of_block, on_reactor, open_for};
use crate::target::Target;

/// Bytes covered by one request at most, so that progress moves.
const STEP_BYTES: u64 = 256 << 20;
/// Requests under way at once.
const IN_FLIGHT: usize = 4;

/// Makes blocks read as zeroes.
pub fn zero(arguments: &Zero) -> Result<Exit, Failure> {
    let may_unmap = !arguments.no_unmap;
    let usage = arguments.members.usage();
    cover("zeroing", (&arguments.target, usage), arguments.range, move |extent| Operation::WriteZeroes {
        extent,
        may_unmap,
        durability: Durability::Volatile,
    })
}

/// Gives up blocks.
pub fn discard(arguments: &Discard) -> Result<Exit, Failure> {
    let usage = arguments.members.usage();
    cover("discarding", (&arguments.target, usage), arguments.range, |extent| Operation::Discard {
        extents: vec![extent],
    })
}

/// Carries an operation out over a whole range, then flushes.
fn cover(
    doing: &'static str,
    (target, usage): (&Target, Usage),
    range: Option<BlockRange>,
    operation: impl Fn(Extent) -> Operation,
) -> Result<Exit, Failure> {
    on_reactor(async {
        let opened = open_for(target, Access::Write, usage).await?;
        let done = pieces(doing, &opened, target, range, operation).await;
        let blocks = opened.close(done).await?;
        say(&format!("{target}: {blocks} blocks {}", if doing == "zeroing" { "zeroed" } else { "discarded" }))?;
        Ok(Exit::Clean)
    })
}

async fn pieces(
    doing: &'static str,
    opened: &Opened,
    target: &Target,
    range: Option<BlockRange>,
    operation: impl Fn(Extent) -> Operation,
) -> Result<u64, Failure> {
    let span = opened.span(range)?;
    let geometry = opened.gate.geometry();
    let step = sealblock_units::BlockCount::new((STEP_BYTES >> geometry.block_size.shift()) as u32)
        .expect("a step has blocks of every size");
    let total = ByteCount::new(span.blocks().saturating_mul(geometry.block_size.bytes() as u64));
    let progress = Progress::new(&format!("{doing} {target}"), Some(total), Show::OnTerminal);
    let (progress, operation) = (&progress, &operation);
    stream::iter(span.extents(step))
        .map(|extent| async move {
            opened.gate.execute(operation(extent)).await.map_err(|error| of_block(doing, &error))?;
            progress.advance(extent.bytes(geometry.block_size));
            Ok::<(), Failure>(())
        })
        .buffer_unordered(IN_FLIGHT)
        .try_collect::<()>()
        .await?;
    opened.flush().await?;
    Ok(span.blocks())
}
