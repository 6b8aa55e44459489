//! A device of this machine whose drives verify its blocks.
//!
//! Shape: everything goes to the device itself, by the kernel, but Verify. Each drive verifies the blocks that lie on it, of every copy in
//! sync, against its own tags; bad blocks are reported by the device's addresses and the drive's number.
//!
//! Invariant: a Verify succeeds only if the device lay on its drives as planned when it ended. How it lay in between is not known: a table
//! that is replaced and put back during a Verify goes unseen.

use std::io;

use futures_util::stream::{self, StreamExt};
use sealblock_block::{
    Abilities, Ability, BadBlock, BadBlocks, Device, DynDevice, Error, ErrorKind, Expectations, Geometry, MemberPath,
    Operation, Outcome, Request, RequestKind, Response, Unchecked, VerifyStats,
};
use sealblock_units::{BlockCount, Extent, Lba};

use super::plan::{Plan, Span};
use crate::kernel::below::DeviceNode;

/// Bytes that one Verify covers at most. Drives cut it to what they take.
const VERIFY_BYTES: u64 = 64 << 20;
/// Spans of one Verify that are with drives at the same time.
const SPANS_IN_FLIGHT: usize = 8;

/// Reads the mapping of the device again.
type Look = Box<dyn Fn() -> io::Result<DeviceNode>>;

/// A device whose drives verify. `D` is the device by way of the kernel.
pub(crate) struct MappedDevice<D> {
    ordinary: D,
    plan: Plan,
    drives: Vec<DynDevice>,
    look: Look,
    geometry: Geometry,
    abilities: Abilities,
}

/// What drives found of one Verify.
#[derive(Default)]
struct Found {
    stats: VerifyStats,
    bad_blocks: Vec<BadBlock>,
}

impl<D: Device> MappedDevice<D> {
    /// The device with its drives, in the order of the plan. Each drive supports Verify.
    pub(crate) fn new(ordinary: D, plan: Plan, drives: Vec<DynDevice>, look: Look) -> MappedDevice<D> {
        let mut geometry = ordinary.geometry().clone();
        let most = u32::try_from(VERIFY_BYTES >> geometry.block_size.shift()).unwrap_or(u32::MAX);
        geometry.limits.max_verify_blocks = BlockCount::new(most).unwrap_or(BlockCount::ONE);
        // Not `copies`: those of an array are its kernel's, and cannot be repaired or waited for here.
        let abilities = Abilities { offloads: true, ..ordinary.abilities() };
        let abilities = abilities.with([RequestKind::Verify], Ability::Native);
        MappedDevice { ordinary, plan, drives, look, geometry, abilities }
    }

    async fn verify(&self, extent: Extent) -> Outcome {
        let (spans, coverage) = self.plan.spans(extent)?;
        let mut found = Found { stats: VerifyStats { coverage, ..VerifyStats::default() }, ..Found::default() };
        let mut answers = stream::iter(&spans)
            .map(async |span| (span, self.verify_span(span).await))
            .buffer_unordered(SPANS_IN_FLIGHT);
        let mut failed = None;
        while let Some((span, outcome)) = answers.next().await {
            if let Err(error) = found.add(span, outcome) {
                failed = failed.or(Some(error));
            }
        }
        drop(answers);
        self.check_plan()?;
        if let Some(error) = failed {
            return Err(error);
        }
        match BadBlocks::new(found.bad_blocks) {
            Some(bad_blocks) => Err(bad_blocks.with_coverage(found.stats.coverage).into()),
            None => Ok(Response::Verified(found.stats)),
        }
    }

    async fn verify_span(&self, span: &Span) -> Outcome {
        let drive = &self.drives[span.drive];
        drive.execute(Request::verify(span.extent, Expectations::NONE)).await
    }

    /// Fails if the device is mapped to other blocks than planned.
    fn check_plan(&self) -> Result<(), Error> {
        let reason = match (self.look)() {
            Ok(now) if now == *self.plan.node() => return Ok(()),
            Ok(_) => "its mapping to drives changed since it was opened; verify it again".to_owned(),
            Err(error) => format!("its mapping to drives can no longer be read: {error}"),
        };
        Err(ErrorKind::Unreachable { reason }.into())
    }
}

impl Found {
    /// Adds what a drive answered.
    fn add(&mut self, span: &Span, outcome: Outcome) -> Result<(), Error> {
        let member = MemberPath::NONE.within(span.drive);
        let coverage = match outcome {
            Ok(Response::Verified(stats)) => {
                self.stats.bytes_transferred += stats.bytes_transferred;
                stats.coverage
            }
            Ok(_) => return Err(ErrorKind::Absent(RequestKind::Verify).into()),
            Err(error) => {
                let (bad_blocks, coverage) = error.into_damage()?;
                for bad in bad_blocks {
                    let lba = span.up(bad.lba).ok_or_else(|| outside(span, bad.lba))?;
                    self.bad_blocks.push(BadBlock { lba, member, ..bad });
                }
                coverage
            }
        };
        // A run on the drive is, on the device, what lies between its ends.
        let up = |run: Unchecked| {
            let (first, last) = (span.up(run.first), span.up(run.last));
            let (first, last) = (first.unwrap_or(run.first), last.unwrap_or(run.last));
            Unchecked { first: first.min(last), last: first.max(last), member, ..run }
        };
        self.stats.coverage.merge(coverage.map(up));
        Ok(())
    }
}

fn outside(span: &Span, lba: Lba) -> Error {
    ErrorKind::Media { reason: format!("a drive asked to verify {} reported block {lba}", span.extent) }.into()
}

impl<D: Device> Device for MappedDevice<D> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        self.abilities
    }

    async fn execute(&self, request: Request) -> Outcome {
        match request.operation {
            Operation::Verify(_) => self.verify(request.extents.one()).await,
            _ => self.ordinary.execute(request).await,
        }
    }

    fn executes_in_place(&self) -> bool {
        self.ordinary.executes_in_place()
    }

    fn try_execute(&self, request: &Request) -> Option<Outcome> {
        match request.operation {
            Operation::Verify(_) => None,
            _ => self.ordinary.try_execute(request),
        }
    }
}
