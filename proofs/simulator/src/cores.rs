//! Several cores of one machine. They are tasks of one executor, which runs them in any order; what is added here is
//! that a request and its answer take time from one core to another, so that they overtake others, and that a core
//! stands still for a while.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use sealblock_block::{Abilities, Device, Geometry, Outcome, Request};

use crate::executor::Executor;
use crate::random::Random;

/// Messages of a hundred after which the core that gets them stands still.
const STALLS_PERCENT: u64 = 1;
/// The longest standstill.
const LONGEST_STALL_US: u64 = 20_000;

/// The cores of a machine. Clones are the same cores.
#[derive(Clone)]
pub struct Cores(Rc<CoresState>);

struct CoresState {
    executor: Executor,
    random: Random,
    /// By core: until when it executes nothing that comes from others.
    stalled_until: Vec<Cell<Duration>>,
}

impl Cores {
    /// So many cores.
    pub fn new(count: usize, executor: Executor, random: Random) -> Cores {
        let stalled_until = (0..count.max(1)).map(|_| Cell::default()).collect();
        Cores(Rc::new(CoresState { executor, random, stalled_until }))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.stalled_until.len()
    }

    /// The time that a message takes; none within a core.
    async fn message(&self, from: usize, to: usize) {
        let CoresState { executor, random, stalled_until } = &*self.0;
        if from == to {
            return;
        }
        match random.below(4) {
            0 => executor.yield_now().await,
            1 => {}
            2 => executor.delay(Duration::from_micros(random.between(1, 10))).await,
            _ => executor.delay(Duration::from_micros(random.between(1, 300))).await,
        }
        let until = &stalled_until[to];
        if random.chance(STALLS_PERCENT) {
            until.set(executor.now() + Duration::from_micros(random.between(1, LONGEST_STALL_US)));
        }
        if let Some(left) = until.get().checked_sub(executor.now()).filter(|left| !left.is_zero()) {
            executor.delay(left).await;
        }
    }

    /// A device of core `home` as core `from` uses it.
    pub fn seen_from<D: Device>(&self, from: usize, home: usize, device: D) -> Crossing<D> {
        Crossing { cores: self.clone(), from, home, device }
    }
}

/// See [`Cores::seen_from`].
pub struct Crossing<D> {
    cores: Cores,
    from: usize,
    home: usize,
    device: D,
}

impl<D: Device> Device for Crossing<D> {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn abilities(&self) -> Abilities {
        self.device.abilities()
    }

    async fn execute(&self, request: Request) -> Outcome {
        self.cores.message(self.from, self.home).await;
        let outcome = self.device.execute(request).await;
        self.cores.message(self.home, self.from).await;
        outcome
    }
}
