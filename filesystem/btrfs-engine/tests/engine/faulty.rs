//! A device that fails, delays or holds back writes.

use std::cell::Cell;
use std::rc::Rc;

use sealblock_block::{
    Abilities, Ability, Condition, Device, ErrorKind, Geometry, Outcome, Request, RequestKind, yield_once,
};
use sealblock_media_memory::MemoryDevice;

/// What becomes of the writes of a device.
#[derive(Default)]
pub struct Faults {
    /// The number of writes that fail from now on.
    pub failing: Cell<u32>,
    /// Writes that begin at this block fail.
    pub failing_at: Cell<Option<u64>>,
    /// The number of writes that are held back until [`Faults::release`].
    pub holding: Cell<u32>,
    /// How often each write lets other tasks run.
    pub delays: Cell<u32>,
    /// How often it does so at most besides, at random.
    pub random_delays: Cell<u32>,
    /// True if it cannot make zeroes itself.
    pub lacks_zeroes: Cell<bool>,
    /// Bytes that were transferred to it.
    pub written_bytes: Cell<u64>,
    held: Cell<bool>,
    released: Condition,
}

impl Faults {
    pub fn hold(&self, writes: u32) {
        self.held.set(true);
        self.holding.set(writes);
    }

    pub fn release(&self) {
        self.held.set(false);
        self.released.notify();
    }
}

pub struct FaultyDevice {
    pub memory: Rc<MemoryDevice>,
    pub faults: Rc<Faults>,
}

fn take(count: &Cell<u32>) -> bool {
    let is_some = count.get() > 0;
    count.set(count.get().saturating_sub(1));
    is_some
}

impl Device for FaultyDevice {
    fn geometry(&self) -> &Geometry {
        Device::geometry(&*self.memory)
    }

    fn abilities(&self) -> Abilities {
        let abilities = Device::abilities(&*self.memory);
        match self.faults.lacks_zeroes.get() {
            true => abilities.with([RequestKind::WriteZeroes], Ability::Absent),
            false => abilities,
        }
    }

    async fn execute(&self, request: Request) -> Outcome {
        let kind = request.kind();
        if kind == RequestKind::Write {
            let bytes = request.extents.one().bytes(Device::geometry(&*self.memory).block_size);
            self.faults.written_bytes.set(self.faults.written_bytes.get() + bytes);
        }
        if matches!(kind, RequestKind::Write | RequestKind::WriteZeroes) {
            let is_there = self.faults.failing_at.get() == Some(request.extents.one().start().get());
            if take(&self.faults.failing) || is_there {
                return Err(ErrorKind::Media { reason: "a test".into() }.into());
            }
            if take(&self.faults.holding) {
                self.faults.released.wait_until(|| !self.faults.held.get()).await;
            }
            for _ in 0..self.faults.delays.get() + fastrand::u32(..=self.faults.random_delays.get()) {
                yield_once().await;
            }
        }
        Device::execute(&*self.memory, request).await
    }
}
