//! The medium and the clock of every measured volume. The medium is a file, memory, or memory with a delay; the clock
//! runs only in a contender's turns.
//!
//! All use one type, so that a volume, the largest part of the program, is compiled only once. The cost is a comparison
//! for each operation.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sealblock_block::{Clock, Medium, MediumError, NoteKeeping};
use sealblock_layers_fault::FaultMedium;
use sealblock_media_file::FileMedium;
use sealblock_media_memory::MemoryMedium;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::sleep;

/// A step of the clock of volumes.
const TICK: Duration = Duration::from_millis(20);
/// True during a contender's turn; the measuring core sets it.
#[derive(Clone, Default)]
pub struct Turn(Arc<AtomicBool>);

impl Turn {
    /// A turn that never ends.
    pub fn endless() -> Turn {
        Turn(Arc::new(AtomicBool::new(true)))
    }

    /// Begins or ends it.
    pub fn set(&self, is_on: bool) {
        self.0.store(is_on, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A clock that stops outside its owner's turns, so that no contender uses another's time.
#[derive(Clone)]
pub struct TurnClock(Option<Turn>);

impl TurnClock {
    /// The time of the reactor.
    pub const REAL: TurnClock = TurnClock(None);

    /// A clock that runs while `on_turn` is set.
    pub fn new(on_turn: Turn) -> TurnClock {
        TurnClock(Some(on_turn))
    }
}

impl Clock for TurnClock {
    async fn sleep(&self, delay: Duration) {
        let Some(turn) = &self.0 else { return sleep(delay).await };
        let mut left = delay;
        while !left.is_zero() {
            sleep(TICK.min(left)).await;
            if turn.is_on() {
                left = left.saturating_sub(TICK);
            }
        }
    }
}

/// Memory with a delay for each write.
pub type PacedMemory = FaultMedium<Rc<MemoryMedium>, TurnClock>;

/// A medium.
pub enum AnyMedium {
    /// A file.
    File(FileMedium),
    /// Memory.
    Memory(MemoryMedium),
    /// Memory with a delay.
    Paced(PacedMemory),
}

/// Calls the same method of each variant.
macro_rules! of_each {
    ($medium:expr, $inner:ident => $call:expr) => {
        match $medium {
            AnyMedium::File($inner) => $call,
            AnyMedium::Memory($inner) => $call,
            AnyMedium::Paced($inner) => $call,
        }
    };
}

impl Medium for AnyMedium {
    fn len_bytes(&self) -> u64 {
        of_each!(self, inner => inner.len_bytes())
    }

    fn sector_bytes(&self) -> u32 {
        of_each!(self, inner => inner.sector_bytes())
    }

    fn read_unit_bytes(&self) -> u32 {
        of_each!(self, inner => inner.read_unit_bytes())
    }

    fn reads_wait(&self) -> bool {
        of_each!(self, inner => inner.reads_wait())
    }

    fn is_read_only(&self) -> bool {
        of_each!(self, inner => inner.is_read_only())
    }

    fn can_punch(&self) -> bool {
        of_each!(self, inner => inner.can_punch())
    }

    fn buffer(&self, len_bytes: usize) -> Buffer {
        of_each!(self, inner => inner.buffer(len_bytes))
    }

    async fn read(&self, offset_bytes: u64, into: Buffer) -> (Result<(), MediumError>, Buffer) {
        of_each!(self, inner => inner.read(offset_bytes, into).await)
    }

    async fn write(&self, offset_bytes: u64, from: Slice) -> Result<(), MediumError> {
        of_each!(self, inner => inner.write(offset_bytes, from).await)
    }

    fn note_keeping(&self) -> NoteKeeping {
        of_each!(self, inner => inner.note_keeping())
    }

    fn note(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediumError> {
        of_each!(self, inner => inner.note(offset_bytes, bytes))
    }

    async fn submitted(&self) {
        of_each!(self, inner => inner.submitted().await)
    }

    async fn sync(&self) -> Result<(), MediumError> {
        of_each!(self, inner => inner.sync().await)
    }

    async fn drain(&self) {
        of_each!(self, inner => inner.drain().await)
    }

    async fn punch(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        of_each!(self, inner => inner.punch(offset_bytes, length_bytes).await)
    }

    fn can_discard(&self) -> bool {
        of_each!(self, inner => inner.can_discard())
    }

    async fn discard(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        of_each!(self, inner => inner.discard(offset_bytes, length_bytes).await)
    }

    async fn reserve(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        of_each!(self, inner => inner.reserve(offset_bytes, length_bytes).await)
    }

    fn is_hole(&self, offset_bytes: u64, length_bytes: u64) -> bool {
        of_each!(self, inner => inner.is_hole(offset_bytes, length_bytes))
    }

    fn status_at(&self, offset_bytes: u64, length_bytes: u64) -> (u64, bool) {
        of_each!(self, inner => inner.status_at(offset_bytes, length_bytes))
    }

    async fn zero(&self, offset_bytes: u64, length_bytes: u64) -> Result<(), MediumError> {
        of_each!(self, inner => inner.zero(offset_bytes, length_bytes).await)
    }

    async fn set_len(&self, length_bytes: u64) -> Result<(), MediumError> {
        of_each!(self, inner => inner.set_len(length_bytes).await)
    }
}
