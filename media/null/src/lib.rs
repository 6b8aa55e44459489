//! A device that stores nothing: writes are dropped, reads return zeroes.
//!
//! It costs nothing itself, so that benchmarks measure the rest of the stack.
//!
//! Invariants: every operation is native and ends immediately. With protection information the tuples read are all
//! ones, which disables checks, like those of a deallocated block; any other tuples would claim that the written data
//! were kept.

use std::cell::RefCell;

use sealblock_block::{
    Abilities, Ability, BlockState, Coverage, Device, ErrorKind, Geometry, Limits, Operation, Outcome, Request,
    RequestKind, Response, StatusRun, VerifyStats, WriteData,
};
use sealblock_integrity::{Checks, PiFormat, Sealed, Unverified};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_units::{BlockSize, Extent};

/// Bytes of data in one transfer; the gate splits larger requests.
const TRANSFER_BYTES: usize = 4 << 20;

/// The device behind `null:SIZE`. See the crate's header.
pub struct NullDevice {
    geometry: Geometry,
    /// The data of read responses, as long as the longest one so far; shared by all of them, since it is immutable.
    zeroes: RefCell<Slice>,
    ones: RefCell<Slice>,
}

impl NullDevice {
    /// `capacity_blocks` blocks that are always zeroes.
    pub fn new(block_size: BlockSize, capacity_blocks: u64, protection: Option<PiFormat>) -> NullDevice {
        // Blocks without payload cost nothing, so those limits are as large as possible.
        let most = Limits::new(block_size, usize::MAX, u32::MAX);
        let limits =
            Limits { max_transfer_blocks: Limits::new(block_size, TRANSFER_BYTES, 1).max_transfer_blocks, ..most };
        NullDevice {
            geometry: Geometry { block_size, capacity_blocks, protection, limits },
            zeroes: RefCell::default(),
            ones: RefCell::default(),
        }
    }

    fn read(&self, extent: Extent) -> Sealed {
        let (size, format) = (self.geometry.block_size, self.geometry.protection);
        let data = constant(&self.zeroes, 0, extent.bytes(size) as usize);
        let tags = constant(&self.ones, 0xFF, extent.len() as usize * format.map_or(0, PiFormat::tuple_bytes));
        let read = Unverified::new(data, tags, size, format).expect("as many tuples as blocks were made");
        read.verify(&Checks::NONE).expect("nothing was asked to be checked")
    }

    fn carry_out(&self, request: &Request) -> Outcome {
        let extents = &request.extents;
        match &request.operation {
            Operation::Read(_) => Ok(Response::Data(self.read(extents.one()))),
            // Nothing is stored, so there are no tags to check.
            Operation::Verify(_) => {
                Ok(Response::Verified(VerifyStats { bytes_transferred: 0, coverage: Coverage::of(false) }))
            }
            Operation::Compare(data) => self.compare(extents.one(), data),
            Operation::BlockStatus => {
                let run = StatusRun { blocks: extents.one().blocks(), state: BlockState::Hole };
                Ok(Response::BlockStatus(vec![run]))
            }
            // Tags are made and dropped, so that measurements above this device include the same work as above others.
            Operation::Write(WriteData::Unsealed(data)) => {
                drop(data.clone().seal());
                Ok(Response::Done)
            }
            Operation::Write(WriteData::Sealed(_))
            | Operation::Flush
            | Operation::Discard
            | Operation::WriteZeroes { .. } => Ok(Response::Done),
            Operation::WriteUncorrectable { .. }
            | Operation::Copy { .. }
            | Operation::CompareAndWrite(_)
            | Operation::Checksum(..)
            | Operation::Repair
            | Operation::Salvage
            | Operation::ReadReserved(_)
            | Operation::WriteReserved(..) => Err(ErrorKind::Absent(request.kind()).into()),
        }
    }

    /// Compares with zeroes, which is what a read returns.
    fn compare(&self, extent: Extent, wanted: &Sealed) -> Outcome {
        match extent.iter().zip(wanted.iter()).find(|(_, (block, _))| block.iter().any(|&byte| byte != 0)) {
            Some((lba, _)) => Err(ErrorKind::Miscompare { lba }.into()),
            None => Ok(Response::Done),
        }
    }
}

/// `length` bytes of `fill`, from a shared buffer that grows when it is too short.
fn constant(shared: &RefCell<Slice>, fill: u8, length: usize) -> Slice {
    let mut shared = shared.borrow_mut();
    if shared.len() < length {
        let mut buffer = Buffer::zeroed(length.next_power_of_two());
        buffer.fill(fill);
        *shared = buffer.freeze();
    }
    shared.slice(..length)
}

impl Device for NullDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn abilities(&self) -> Abilities {
        // This device has no state, so it cannot mark blocks bad.
        const {
            Abilities::COMPLETE
                .with([RequestKind::WriteUncorrectable], Ability::Absent)
                .with_checksums(Ability::Absent)
                .with([RequestKind::BlockStatus], Ability::Native)
        }
    }

    async fn execute(&self, operation: Request) -> Outcome {
        self.carry_out(&operation)
    }

    fn executes_in_place(&self) -> bool {
        true
    }

    fn try_execute(&self, operation: &Request) -> Option<Outcome> {
        Some(self.carry_out(operation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use sealblock_block::Expectations;
    use sealblock_block::{Durability, Gate};
    use sealblock_integrity::{GuardKind, ProtectionType, Tags};
    use sealblock_units::Lba;

    fn run(gate: &Gate<NullDevice>, operation: Request) -> Outcome {
        gate.execute(operation).now_or_never().expect("a device without a medium never waits")
    }

    fn extent(start: u64, blocks: u64) -> Extent {
        Extent::from_raw(start, blocks).unwrap()
    }

    /// A gate on a device of 2^40 blocks, which no memory could hold.
    fn gate(format: Option<PiFormat>) -> Gate<NullDevice> {
        Gate::new("null", NullDevice::new(BlockSize::B4096, 1 << 40, format))
    }

    fn sealed(format: Option<PiFormat>, at: Extent, byte: u8) -> Sealed {
        let data = Slice::copy_from(&vec![byte; at.bytes(BlockSize::B4096) as usize]);
        Sealed::seal(data, BlockSize::B4096, format, &Tags { initial_ref_tag: at.start().get(), ..Tags::default() })
    }

    #[test]
    fn everything_is_one_hole() {
        let Ok(Response::BlockStatus(runs)) = run(&gate(None), Request::block_status(extent(7, 1 << 20))) else {
            panic!("no runs")
        };
        let told: Vec<_> = runs.iter().map(|run| (run.blocks.get(), run.state)).collect();
        assert_eq!(told, [(1 << 20, BlockState::Hole)]);
    }

    #[test]
    fn writes_vanish_and_reads_are_unchecked_zeroes() {
        for kind in ProtectionType::ALL {
            let format = PiFormat::with_default_storage_tag(GuardKind::Crc64, kind);
            for format in [None, Some(format)] {
                let (gate, at) = (gate(format), extent((1 << 40) - 3, 3));
                let data = sealed(format, at, 7);
                let write = Request::write(at, data, Durability::ForceUnitAccess);
                assert!(matches!(run(&gate, write), Ok(Response::Done)));
                let checks = format.map_or(Checks::NONE, |format| Checks::full(format, at.start()));
                let Ok(Response::Data(data)) = run(&gate, Request::read(at, Expectations::NONE)) else {
                    panic!("reads")
                };
                assert!(data.blocks() == 3 && data.joined_data().iter().all(|&byte| byte == 0));
                // A second check, as an export would make, must succeed.
                let (size, again) = (data.size(), data.format());
                let read = Unverified::new(data.joined_data(), data.joined_tags(), size, again).unwrap();
                assert!(read.verify(&checks).is_ok());
            }
        }
    }

    #[test]
    fn only_zeroes_compare_equal() {
        let (gate, at) = (gate(None), extent(5, 4));
        let compare = |data| run(&gate, Request::compare(at, data));
        assert!(matches!(compare(sealed(None, at, 0)), Ok(Response::Done)));
        let mut bytes = vec![0; 4 * 4096];
        bytes[2 * 4096 + 9] = 1;
        let data = Sealed::seal(Slice::copy_from(&bytes), BlockSize::B4096, None, &Tags::default());
        assert_eq!(compare(data).unwrap_err().into_kind(), ErrorKind::Miscompare { lba: Lba::new(7) });
    }

    #[test]
    fn operations_without_payload_take_the_longest_extent() {
        let gate = gate(None);
        let at = extent(0, u64::from(u32::MAX));
        assert!(matches!(run(&gate, Request::verify(at, Expectations::NONE)), Ok(Response::Verified(_))));
        let zero = Request::write_zeroes(at, true, Durability::Volatile);
        for operation in [zero, Request::discard([at]), Request::flush()] {
            assert!(matches!(run(&gate, operation), Ok(Response::Done)));
        }
        let past = Request::verify(extent(1 << 40, 1), Expectations::NONE);
        assert!(matches!(run(&gate, past).unwrap_err().into_kind(), ErrorKind::Range { .. }));
    }
}
