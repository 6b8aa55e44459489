//! I/O commands: checked before their data is fetched, translated to requests in one place, and executed by the
//! namespace's device.

use std::rc::Rc;
use std::time::Instant;

use sealblock_block::{Ability, Coverage, Device, Durability, ErrorKind, Request, RequestKind, Response};
use sealblock_integrity::Sealed;
use sealblock_layers_cross_core::Locked;
use sealblock_protocols_nvme::nvm::{BlockCommand, Checksum, DatasetManagement, DsmAttributes, IoCommand};
use sealblock_protocols_nvme::{Command, Fuse, Invalid, NSID_ALL, StatusCode};
use sealblock_protocols_nvme_tcp::{BlockCrcs, BlockLayout};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::{now, submitted};
use sealblock_transport::HeldBytes;
use sealblock_units::{BlockCount, BlockSize, Extent};
use smallvec::{SmallVec, smallvec};

use crate::command::copy;
use crate::command::queue_context::{NamespaceHandle, QueueContext, execute, execute_arrived, record};
use crate::command::reply::Reply;
use crate::model::command_error::CommandError;
use crate::model::damage_list::RequestSummary;
use crate::model::limits::{Limits, WRITE_ZEROES_BYTES};
use crate::model::namespace::{NO_TAGS, Namespace, inactive};

/// A command whose 64 bytes are valid.
pub(crate) struct IoRequest {
    io: IoCommand,
    /// One namespace, or all of them for a Flush with NSID FFFFFFFFh.
    namespaces: SmallVec<[Rc<NamespaceHandle>; 1]>,
    queue: Rc<QueueContext>,
    /// When it was received.
    arrived: Instant,
    /// The CRCs of the blocks of its data, if they were computed for a data digest.
    crcs: Option<BlockCrcs>,
    /// The memory that it holds in addition to its data.
    held: Option<HeldBytes>,
}

/// Bytes of the blocks in one step of a command without data that changes or checks blocks. Between two steps others
/// run, and the command stops if its queue has ended.
const STEP_BYTES: u64 = 16 << 20;
const CHECK_STEP_BYTES: u64 = 64 << 20;
/// The maximum number of bytes that a device reads or writes at a time for Verify or zeroes: its longest transfer.
const WORK_PIECE_BYTES: u64 = 1 << 20;

/// What remains to be done of a command.
pub(crate) enum RemainingWork {
    /// All of it, with its data. Commands of several requests stay in this state.
    All(Buffer),
    /// Execute its request.
    Request(Request),
}

/// Data that a command transfers, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TransferLengths {
    /// Data from the host, in the capsule or to be fetched.
    pub(crate) from_host_bytes: u64,
    /// The host's buffer for data from the controller.
    pub(crate) to_host_bytes: u64,
}

impl IoRequest {
    pub(crate) fn prepare(
        (queue, arrived): (&Rc<QueueContext>, Instant),
        limits: &Limits,
        command: &Command,
        lengths: TransferLengths,
    ) -> Result<IoRequest, CommandError> {
        let io = IoCommand::decode(command)?;
        match (command.fuse(), io) {
            (Fuse::Normal, _) | (Fuse::First, IoCommand::Compare(_)) | (Fuse::Second, IoCommand::Write(_)) => {}
            _ => return Err(Invalid::field("FUSE", 0, 8).into()),
        }
        let handles = queue.namespaces();
        let all = &handles.namespaces;
        let namespaces: SmallVec<[Rc<NamespaceHandle>; 1]> = match (command.nsid.get(), io) {
            (NSID_ALL, IoCommand::Flush) => all.values().cloned().collect(),
            (nsid, _) => smallvec![Rc::clone(all.get(&nsid).ok_or_else(|| inactive(nsid))?)],
        };
        if let [namespace] = namespaces.as_slice() {
            check(namespace, limits, &io, command, lengths)?;
        }
        Ok(IoRequest { io, namespaces, queue: Rc::clone(queue), arrived, crcs: None, held: None })
    }

    /// Bytes that a Read transfers to the host.
    pub(crate) fn read_bytes(&self) -> u64 {
        match (&self.io, self.namespaces.first()) {
            (IoCommand::Read(blocks), Some(namespace)) => namespace.wire_bytes(blocks),
            _ => 0,
        }
    }

    /// Bytes of memory that the rest of the command needs in addition to its data.
    pub(crate) fn work_bytes(&self, work: &RemainingWork) -> u64 {
        let Some(namespace) = self.namespaces.first() else { return 0 };
        match (&self.io, work) {
            // A device without Verify reads in pieces, and a device without zeroes writes in pieces. Even of commands
            // that need no memory only some start at a time, because those that have not started end with their queue.
            (IoCommand::Verify(blocks) | IoCommand::Checksum(Checksum { blocks, .. }), _) => {
                namespace.wire_bytes(blocks).min(WORK_PIECE_BYTES)
            }
            (IoCommand::WriteZeroes(zeroes), _) => namespace.wire_bytes(&zeroes.blocks).min(WORK_PIECE_BYTES),
            (IoCommand::WriteUncorrectable(extent), _) => namespace.data_bytes(*extent).min(WORK_PIECE_BYTES),
            (IoCommand::DatasetManagement(dsm), RemainingWork::All(list)) => {
                let blocks = dsm
                    .parse(list)
                    .map_or(0, |ranges| ranges.iter().map(|range| u64::from(range.length_blocks.get())).sum::<u64>());
                (blocks << namespace.device.geometry().block_size.shift()).min(WORK_PIECE_BYTES)
            }
            (IoCommand::Compare(blocks), _) => namespace.wire_bytes(blocks),
            (IoCommand::Copy(copy), RemainingWork::All(list)) => copy::held_bytes(namespace, copy, list),
            _ => 0,
        }
    }

    /// Assigns that memory to it.
    pub(crate) fn set_held(&mut self, held: HeldBytes) {
        self.held = Some(held);
    }

    /// The namespace and blocks of a Compare.
    pub(crate) fn compared_extent(&self) -> Option<(&Rc<NamespaceHandle>, Extent)> {
        match &self.io {
            IoCommand::Compare(blocks) => Some((self.namespaces.first()?, blocks.extent)),
            _ => None,
        }
    }

    /// The namespace and blocks that a command writes. Does not decode lists of ranges.
    pub(crate) fn written_extent(&self) -> Option<(&Rc<NamespaceHandle>, Extent)> {
        match &self.io {
            IoCommand::Write(blocks) => Some((self.namespaces.first()?, blocks.extent)),
            IoCommand::WriteZeroes(zeroes) => Some((self.namespaces.first()?, zeroes.blocks.extent)),
            IoCommand::WriteUncorrectable(extent) => Some((self.namespaces.first()?, *extent)),
            _ => None,
        }
    }

    /// Sets the CRCs of the blocks of its data, which were computed on receipt.
    pub(crate) fn set_crcs(&mut self, crcs: BlockCrcs) {
        self.crcs = Some(crcs);
    }

    /// How its data is divided into blocks, if the CRCs of blocks are useful.
    pub(crate) fn block_layout(&self) -> Option<BlockLayout> {
        match (&self.io, self.namespaces.first()) {
            (IoCommand::Write(blocks) | IoCommand::Compare(blocks), Some(namespace)) => namespace.block_layout(blocks),
            _ => None,
        }
    }

    /// Executes the command now if its device need not wait; otherwise returns what remains to be done.
    pub(crate) fn try_execute(&self, data: Buffer) -> Result<Result<Reply, CommandError>, RemainingWork> {
        let Some(namespace) = self.namespaces.first() else { return Err(RemainingWork::All(data)) };
        let request = match self.translate(namespace, data) {
            Ok(RemainingWork::Request(request)) => request,
            Ok(steps) => return Err(steps),
            Err(error) => return Ok(self.finish(namespace, Err(error))),
        };
        match namespace.device.try_execute_arrived(&request, self.arrived) {
            None => Err(RemainingWork::Request(request)),
            Some(outcome) => {
                let summary = RequestSummary::of(&request, namespace.device.geometry());
                let outcome = record(namespace, &summary, outcome);
                Ok(self.finish(namespace, outcome.and_then(|response| self.reply(namespace, response))))
            }
        }
    }

    /// Executes the command.
    pub(crate) async fn execute(&self, work: RemainingWork) -> Result<Reply, CommandError> {
        self.execute_with_lock(work, None).await
    }

    /// Executes the command; if it is one request, it may run under a caller's lock of the blocks that it changes.
    pub(crate) async fn execute_with_lock(
        &self,
        work: RemainingWork,
        locked: Option<&Locked<'_>>,
    ) -> Result<Reply, CommandError> {
        let Some(namespace) = self.namespaces.first() else { return Ok(Reply::Done(0)) };
        let work = match work {
            RemainingWork::All(data) => self.translate(namespace, data),
            begun => Ok(begun),
        };
        let outcome = match work {
            Ok(RemainingWork::Request(request)) => {
                let summary = RequestSummary::of(&request, namespace.device.geometry());
                let outcome = match locked {
                    Some(locked) => locked.execute(request).await,
                    None => namespace.device.execute_arrived(request, self.arrived).await,
                };
                record(namespace, &summary, outcome).and_then(|response| self.reply(namespace, response))
            }
            Ok(RemainingWork::All(data)) => self.execute_steps(namespace, data).await,
            Err(error) => Err(error),
        };
        self.finish(namespace, outcome)
    }

    /// Translates the command to a request; the data of a Write is checked, or will get tags. A command of several
    /// requests is returned unchanged.
    pub(crate) fn translate(&self, namespace: &NamespaceHandle, data: Buffer) -> Result<RemainingWork, CommandError> {
        let checksums = &self.queue.traffic.checksums;
        if long_extent(&self.io, namespace).is_some() {
            return Ok(RemainingWork::All(data));
        }
        Ok(RemainingWork::Request(match self.io {
            IoCommand::Read(blocks) => {
                checksums.stored_bytes_checked.add(namespace.checked_bytes(&blocks));
                Request::read(blocks.extent, namespace.expectations(&blocks.protection))
            }
            IoCommand::Write(blocks) => {
                let (extent, data) = (blocks.extent, namespace.seal(&blocks, data, self.crcs.as_ref())?);
                checksums.guard_bytes_summed.add(namespace.guard_bytes(&blocks, self.crcs.as_ref()));
                Request::write(extent, data, self.durability(blocks.force_unit_access))
            }
            IoCommand::WriteZeroes(zeroes) => Request::write_zeroes(
                zeroes.blocks.extent,
                zeroes.deallocate,
                self.durability(zeroes.blocks.force_unit_access),
            ),
            IoCommand::Verify(blocks) => Request::verify(blocks.extent, namespace.expectations(&blocks.protection)),
            IoCommand::Checksum(Checksum { blocks, kind }) => {
                Request::checksum(blocks.extent, kind, namespace.expectations(&blocks.protection))
            }
            IoCommand::WriteUncorrectable(extent) => Request::write_uncorrectable(extent, self.durability(false)),
            IoCommand::Flush | IoCommand::Compare(_) | IoCommand::DatasetManagement(_) | IoCommand::Copy(_) => {
                return Ok(RemainingWork::All(data));
            }
        }))
    }

    /// Returns the reply to the host for a response to the request of [`IoRequest::translate`].
    fn reply(&self, namespace: &NamespaceHandle, response: Response) -> Result<Reply, CommandError> {
        match (&self.io, response) {
            (IoCommand::Read(blocks), Response::Data(read)) => Ok(Reply::Data(namespace.payload(blocks, read), 0)),
            (IoCommand::Checksum(asked), Response::Checksum(found)) if found.kind == asked.kind => {
                Ok(Reply::Done(asked.result(found.value)))
            }
            // Foreign hosts ignore dword 0 of a Verify.
            (IoCommand::Verify(_), Response::Verified(verified)) => Ok(Reply::Done(verified.coverage.bits().into())),
            (IoCommand::Read(_) | IoCommand::Checksum(_), _) => Err(StatusCode::INTERNAL_ERROR.into()),
            _ => Ok(Reply::Done(0)),
        }
    }

    /// Executes a command of several requests.
    async fn execute_steps(&self, namespace: &NamespaceHandle, data: Buffer) -> Result<Reply, CommandError> {
        match self.io {
            IoCommand::Flush => self.flush().await,
            IoCommand::Compare(blocks) => self.compare(namespace, blocks, data).await,
            IoCommand::DatasetManagement(dsm) => deallocate(namespace, &self.queue, dsm, &data).await,
            IoCommand::Copy(args) => {
                let durability = self.durability(args.force_unit_access);
                copy::copy(namespace, &self.queue, &args, &data, durability).await
            }
            IoCommand::WriteZeroes(_)
            | IoCommand::Verify(_)
            | IoCommand::Checksum(_)
            | IoCommand::WriteUncorrectable(_) => self.execute_long(namespace).await,
            IoCommand::Read(_) | IoCommand::Write(_) => Err(StatusCode::INTERNAL_ERROR.into()),
        }
    }

    /// Executes a command without data for many blocks step by step, as long as the queue exists. As in one request, a
    /// check continues after bad blocks, and fails with the first of them.
    async fn execute_long(&self, namespace: &NamespaceHandle) -> Result<Reply, CommandError> {
        let Some(extent) = long_extent(&self.io, namespace) else { return Err(StatusCode::INTERNAL_ERROR.into()) };
        let (geometry, checks) =
            (namespace.device.geometry(), matches!(self.io, IoCommand::Verify(_) | IoCommand::Checksum(_)));
        let (mut coverage, mut checksum, mut failed) = (Coverage::default(), 0, None);
        let mut arrived = self.arrived;
        for step in extent.split_aligned(step_blocks(&self.io, geometry.block_size)) {
            self.queue.check_goes_on()?;
            let offset = step.start().get() - extent.start().get();
            match execute_arrived(namespace, self.step(namespace, step, offset)?, arrived).await {
                Ok(Response::Verified(verified)) => coverage.merge(verified.coverage),
                Ok(Response::Checksum(found)) => {
                    checksum = found.kind.combine(checksum, found.value, step.bytes(geometry.block_size));
                }
                Ok(_) => {}
                Err(error) if checks && error.is_damage => failed = failed.or(Some(error)),
                Err(error) => return Err(error),
            }
            // The wait of a step begins with the end of the one before.
            arrived = now();
            submitted().await;
        }
        match (failed, &self.io) {
            (Some(error), _) => Err(error),
            (None, IoCommand::Checksum(asked)) => Ok(Reply::Done(asked.result(checksum))),
            // Foreign hosts ignore dword 0 of a Verify.
            (None, IoCommand::Verify(_)) => Ok(Reply::Done(coverage.bits().into())),
            (None, _) => Ok(Reply::Done(0)),
        }
    }

    /// The request for one step of such a command, `offset` blocks after its start.
    fn step(&self, namespace: &NamespaceHandle, step: Extent, offset: u64) -> Result<Request, CommandError> {
        let protection = namespace.device.geometry().protection;
        Ok(match self.io {
            IoCommand::Verify(blocks) => {
                Request::verify(step, namespace.expectations(&blocks.protection).advance(offset, protection))
            }
            IoCommand::Checksum(Checksum { blocks, kind }) => {
                let expected = namespace.expectations(&blocks.protection).advance(offset, protection);
                Request::checksum(step, kind, expected)
            }
            IoCommand::WriteZeroes(zeroes) => {
                Request::write_zeroes(step, zeroes.deallocate, self.durability(zeroes.blocks.force_unit_access))
            }
            IoCommand::WriteUncorrectable(_) => Request::write_uncorrectable(step, self.durability(false)),
            _ => return Err(StatusCode::INTERNAL_ERROR.into()),
        })
    }

    /// Counts the command, and sets the first block of a failed one.
    pub(crate) fn finish(
        &self,
        namespace: &Namespace,
        outcome: Result<Reply, CommandError>,
    ) -> Result<Reply, CommandError> {
        self.count(namespace, &outcome);
        outcome.map_err(|error| match extent(&self.io) {
            Some(extent) => error.or_at(extent.start()),
            None => error,
        })
    }

    /// Executes Compare. The device compares plain blocks; protected blocks are read, so that tags are compared as well.
    async fn compare(
        &self,
        namespace: &NamespaceHandle,
        blocks: BlockCommand,
        data: Buffer,
    ) -> Result<Reply, CommandError> {
        let extent = blocks.extent;
        let size = namespace.device.geometry().block_size;
        if namespace.format().is_none() {
            let data = Sealed::seal(data.freeze(), size, None, &NO_TAGS);
            let compared = execute_arrived(namespace, Request::compare(extent, data), self.arrived).await;
            return compared.map(|_| Reply::Done(0));
        }
        // With PRACT the data has no tags, and tags are not compared.
        let wanted = match blocks.protection.pract {
            true => Sealed::seal(data.freeze(), size, None, &NO_TAGS),
            false => namespace.verify_wire(&blocks, &data, self.crcs.as_ref())?,
        };
        let read = Request::read(extent, namespace.expectations(&blocks.protection));
        let Response::Data(stored) = execute_arrived(namespace, read, self.arrived).await? else {
            return Err(StatusCode::INTERNAL_ERROR.into());
        };
        match wanted.first_difference(&stored, !blocks.protection.pract).and_then(|index| extent.iter().nth(index)) {
            None => Ok(Reply::Done(0)),
            Some(lba) => Err(CommandError::of_error(&ErrorKind::Miscompare { lba }.into(), RequestKind::Compare)),
        }
    }

    async fn flush(&self) -> Result<Reply, CommandError> {
        for namespace in &self.namespaces {
            execute_arrived(namespace, Request::flush(), self.arrived).await?;
        }
        Ok(Reply::Done(0))
    }

    /// With the write cache disabled, every write is durable before it completes.
    fn durability(&self, force_unit_access: bool) -> Durability {
        match force_unit_access || !self.queue.write_cache.get() {
            true => Durability::ForceUnitAccess,
            false => Durability::Volatile,
        }
    }

    fn count(&self, namespace: &Namespace, outcome: &Result<Reply, CommandError>) {
        let traffic = &self.queue.traffic;
        let bytes = extent(&self.io).map_or(0, |extent| namespace.data_bytes(extent));
        match (&self.io, outcome) {
            (IoCommand::Read(_) | IoCommand::Compare(_) | IoCommand::Verify(_) | IoCommand::Checksum(_), Ok(_)) => {
                traffic.reads.add(1);
                traffic.read_bytes.add(bytes);
            }
            (IoCommand::Write(_), Ok(_)) => {
                traffic.writes.add(1);
                traffic.written_bytes.add(bytes);
            }
            (_, Err(error)) if error.is_damage => traffic.media_errors.add(1),
            _ => {}
        }
    }
}

/// The blocks of a command without data that is executed in several steps.
fn long_extent(io: &IoCommand, namespace: &NamespaceHandle) -> Option<Extent> {
    let extent = match io {
        IoCommand::Verify(blocks) | IoCommand::Checksum(Checksum { blocks, .. }) => blocks.extent,
        IoCommand::WriteZeroes(zeroes) => zeroes.blocks.extent,
        IoCommand::WriteUncorrectable(extent) => *extent,
        _ => return None,
    };
    (extent.blocks() > step_blocks(io, namespace.device.geometry().block_size)).then_some(extent)
}

/// Blocks of a step.
fn step_blocks(io: &IoCommand, size: BlockSize) -> BlockCount {
    let bytes = match io {
        IoCommand::Verify(_) | IoCommand::Checksum(_) => CHECK_STEP_BYTES,
        _ => STEP_BYTES,
    };
    BlockCount::new((bytes >> size.shift()) as u32).unwrap_or(BlockCount::ONE)
}

/// The blocks of a command with one extent.
fn extent(io: &IoCommand) -> Option<Extent> {
    match io {
        IoCommand::Write(blocks)
        | IoCommand::Read(blocks)
        | IoCommand::Compare(blocks)
        | IoCommand::Verify(blocks)
        | IoCommand::Checksum(Checksum { blocks, .. }) => Some(blocks.extent),
        IoCommand::WriteZeroes(zeroes) => Some(zeroes.blocks.extent),
        IoCommand::WriteUncorrectable(extent) => Some(*extent),
        IoCommand::Flush | IoCommand::DatasetManagement(_) | IoCommand::Copy(_) => None,
    }
}

/// Executes Dataset Management. Deallocation is a hint: a device without it does nothing, which is no error. Many
/// blocks are deallocated in parts, and other tasks run in between; if the queue has ended, no further part is
/// deallocated.
async fn deallocate(
    namespace: &NamespaceHandle,
    queue: &QueueContext,
    dsm: DatasetManagement,
    data: &[u8],
) -> Result<Reply, CommandError> {
    let ranges = dsm.parse(data)?.iter().map(|range| range.extent());
    let ranges: Result<Vec<Option<Extent>>, _> = ranges.collect();
    let extents: Vec<Extent> = ranges.map_err(Invalid::from)?.into_iter().flatten().collect();
    let geometry = namespace.device.geometry();
    for extent in &extents {
        geometry.check(*extent).map_err(|error| CommandError::of_error(&error, RequestKind::Discard))?;
    }
    let is_asked = dsm.attributes.contains(DsmAttributes::DEALLOCATE) && !extents.is_empty();
    if !is_asked || namespace.device.abilities().get(RequestKind::Discard) == Ability::Absent {
        return Ok(Reply::Done(0));
    }
    let most = step_blocks(&IoCommand::DatasetManagement(dsm), geometry.block_size);
    let mut pieces = extents.iter().flat_map(|extent| extent.split_aligned(most)).peekable();
    while pieces.peek().is_some() {
        let (mut part, mut blocks) = (SmallVec::<[Extent; 4]>::new(), 0);
        while let Some(piece) = pieces.next_if(|piece| blocks == 0 || blocks + piece.len() <= u64::from(most.get())) {
            blocks += piece.len();
            part.push(piece);
        }
        execute(namespace, Request::discard(part.iter().copied())).await?;
        part.into_iter().for_each(|extent| namespace.state.damage_list.clear(extent));
        if pieces.peek().is_some() {
            submitted().await;
            queue.check_goes_on()?;
        }
    }
    Ok(Reply::Done(0))
}

/// The maximum length of a list of ranges in bytes: 256 ranges of the longest format.
const LIST_BYTES: u64 = 256 * 40;

/// Checks whether a command can be executed; the error is its status. Verify and other commands without data may have
/// any length.
pub(crate) fn check(
    namespace: &Namespace,
    limits: &Limits,
    io: &IoCommand,
    command: &Command,
    lengths: TransferLengths,
) -> Result<(), CommandError> {
    io.validate(namespace.device.geometry().capacity_blocks, namespace.format())?;
    has_operation(namespace, io, command)?;
    let is_too_long = |extent, max_bytes| namespace.data_bytes(extent) > max_bytes;
    let too_long = Invalid::field("NLB", 12, 0);
    match io {
        IoCommand::Read(blocks) | IoCommand::Write(blocks) | IoCommand::Compare(blocks) => {
            if is_too_long(blocks.extent, u64::from(limits.transfer_bytes)) {
                return Err(too_long.into());
            }
            let got_bytes =
                if matches!(io, IoCommand::Read(_)) { lengths.to_host_bytes } else { lengths.from_host_bytes };
            same(namespace.wire_bytes(blocks), got_bytes)
        }
        IoCommand::WriteZeroes(zeroes) if zeroes.whole_namespace => Err(Invalid::field("NSZ", 12, 23).into()),
        IoCommand::WriteZeroes(zeroes) if is_too_long(zeroes.blocks.extent, WRITE_ZEROES_BYTES) => Err(too_long.into()),
        IoCommand::DatasetManagement(dsm) => match lengths.from_host_bytes {
            got_bytes if got_bytes < dsm.data_bytes() as u64 || got_bytes > 4096 => {
                same(dsm.data_bytes() as u64, got_bytes)
            }
            _ => Ok(()),
        },
        IoCommand::Copy(copy) => match lengths.from_host_bytes {
            got_bytes if got_bytes < copy.data_bytes() as u64 || got_bytes > LIST_BYTES => {
                same(copy.data_bytes() as u64, got_bytes)
            }
            _ => Ok(()),
        },
        IoCommand::Flush
        | IoCommand::Verify(_)
        | IoCommand::Checksum(_)
        | IoCommand::WriteZeroes(_)
        | IoCommand::WriteUncorrectable(_) => Ok(()),
    }
}

/// Fails commands that the device does not support.
fn has_operation(namespace: &Namespace, io: &IoCommand, command: &Command) -> Result<(), CommandError> {
    let abilities = namespace.device.abilities();
    let is_absent = |ability| ability == Ability::Absent;
    match io {
        IoCommand::WriteUncorrectable(_) if is_absent(abilities.get(RequestKind::WriteUncorrectable)) => {
            Err(Invalid::Opcode(command.opcode).into())
        }
        IoCommand::Checksum(_) if is_absent(abilities.get(RequestKind::Checksum)) => {
            Err(Invalid::Opcode(command.opcode).into())
        }
        IoCommand::Checksum(asked) if is_absent(abilities.of_checksum(asked.kind)) => Err(Checksum::UNKNOWN.into()),
        _ => Ok(()),
    }
}

fn same(needed_bytes: u64, got_bytes: u64) -> Result<(), CommandError> {
    if needed_bytes == got_bytes { Ok(()) } else { Err(Invalid::DataLength { needed_bytes, got_bytes }.into()) }
}
