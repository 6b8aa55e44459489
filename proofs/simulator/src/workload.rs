//! The load of hosts on a device: one loop, and a table of profiles.

use std::cell::Cell;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use clap::ValueEnum;
use sealblock_units::Extent;

use crate::client::{Client, Stop};
use crate::executor::Executor;
use crate::random::Random;

/// Blocks of a full block group of a protected volume with the smaller block size.
pub const GROUP_BLOCKS: u64 = 1 << 18;

/// A kind of load. To add one, add a variant and its profile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum)]
pub enum Workload {
    /// Random writes of 1 to 8 blocks, with flushes.
    Mixed,
    /// Every write with force unit access.
    Forced,
    /// The whole device overwritten in order, again and again, with few free physical blocks left.
    Laps,
    /// Many hosts on few blocks.
    Hot,
    /// Writes, discards and zeroes.
    Trim,
    /// Many hosts everywhere.
    Crowd,
    /// Blocks on both sides of the boundary between two block groups.
    Zones,
    /// The whole device, with tables larger than the cache.
    Wide,
    /// Pauses, in which timers commit.
    Idle,
    /// Blocks made unreadable, and restored by writes, discards and zeroes.
    Spoil,
    /// Like `Mixed`, on a disk whose writes and syncs sometimes fail.
    Faulty,
    /// Like mixed, by hosts that drop some of their requests half-way.
    Abandon,
}

/// The weight of each operation.
#[derive(Clone, Copy, Debug)]
struct OpMix {
    write: u64,
    flush: u64,
    discard: u64,
    zero: u64,
    read: u64,
    verify: u64,
    compare: u64,
    spoil: u64,
    idle: u64,
}

/// The behaviour of hosts.
#[derive(Clone, Copy, Debug)]
struct ClientProfile {
    hosts: u64,
    readers: u64,
    /// The maximum number of changes per host.
    steps: u64,
    mix: OpMix,
    blocks_max: u64,
    /// The percentage of changes with force unit access.
    forced_percent: u64,
    /// True if each write begins where the last one ended.
    in_order: bool,
    /// Only this number of blocks of the region is used.
    region_blocks: u64,
    /// The percentage of requests that are dropped before they have ended.
    dropped_percent: u64,
}

const MIX: OpMix =
    OpMix { write: 60, flush: 6, discard: 2, zero: 2, read: 20, verify: 3, compare: 3, spoil: 0, idle: 1 };
const HABITS: ClientProfile = ClientProfile {
    hosts: 3,
    readers: 1,
    steps: 60,
    mix: MIX,
    blocks_max: 8,
    forced_percent: 5,
    in_order: false,
    region_blocks: u64::MAX,
    dropped_percent: 0,
};

impl Workload {
    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no load is hidden").get_name().to_owned()
    }

    const fn habits(self) -> ClientProfile {
        match self {
            Workload::Mixed | Workload::Zones => HABITS,
            Workload::Wide => ClientProfile { forced_percent: 30, mix: OpMix { write: 75, ..MIX }, ..HABITS },
            // Many commits, so that logs wrap around and checkpoints fail as well.
            Workload::Faulty => ClientProfile { forced_percent: 40, steps: 90, ..HABITS },
            Workload::Forced => ClientProfile { forced_percent: 100, ..HABITS },
            Workload::Laps => ClientProfile {
                hosts: 2,
                steps: 90,
                in_order: true,
                mix: OpMix { write: 90, flush: 2, ..MIX },
                ..HABITS
            },
            Workload::Hot => {
                ClientProfile { hosts: 10, readers: 2, steps: 25, region_blocks: 4, blocks_max: 4, ..HABITS }
            }
            Workload::Trim => ClientProfile { mix: OpMix { write: 40, discard: 20, zero: 20, ..MIX }, ..HABITS },
            Workload::Spoil => {
                ClientProfile { mix: OpMix { write: 40, discard: 8, zero: 8, spoil: 16, ..MIX }, ..HABITS }
            }
            Workload::Crowd => ClientProfile { hosts: 32, readers: 4, steps: 12, ..HABITS },
            Workload::Abandon => ClientProfile {
                hosts: 6,
                dropped_percent: 30,
                mix: OpMix { discard: 6, zero: 6, flush: 10, ..MIX },
                region_blocks: 24,
                ..HABITS
            },
            Workload::Idle => ClientProfile { mix: OpMix { idle: 20, flush: 1, ..MIX }, steps: 40, ..HABITS },
        }
    }

    /// The usual number of starts and ends of I/Os of one machine with this load; stops are chosen below it.
    pub const fn likely_boundaries(self) -> u64 {
        let habits = self.habits();
        habits.hosts * habits.steps * 4
    }
}

/// Runs a load to its end. Hosts that meet a planned fault end early.
pub async fn drive(workload: Workload, client: &Client, executor: &Executor, random: &Random) {
    let habits = workload.habits();
    let region = Region::of(workload, client.capacity_blocks(), habits.region_blocks);
    let done = Rc::new(Cell::new(false));
    let spawn = |reader: bool, name: &'static str| {
        let host = Host {
            client: client.clone(),
            executor: executor.clone(),
            random: random.fork(name),
            habits,
            region,
            at: Cell::new(0),
        };
        let done = Rc::clone(&done);
        executor.spawn(name, async move { if reader { host.watch(&done).await } else { host.work().await } })
    };
    let hosts: Vec<_> = (0..habits.hosts).map(|_| spawn(false, "host")).collect();
    let readers: Vec<_> = (0..habits.readers).map(|_| spawn(true, "reader")).collect();
    for host in hosts {
        host.await;
    }
    done.set(true);
    for reader in readers {
        reader.await;
    }
}

/// The number of polls before which requests are dropped.
const MAX_POLLS: u64 = 12;

/// Polls a request so many times at most, and drops it then.
async fn dropped_after(request: impl Future<Output = Result<(), Stop>>, polls: u64) -> Result<(), Stop> {
    let (mut request, mut left) = (std::pin::pin!(request), polls);
    std::future::poll_fn(|cx| match left.checked_sub(1) {
        None => Poll::Ready(Ok(())),
        Some(rest) => {
            left = rest;
            request.as_mut().poll(cx)
        }
    })
    .await
}

/// The blocks that hosts use.
#[derive(Clone, Copy, Debug)]
struct Region {
    first: u64,
    blocks: u64,
}

impl Region {
    fn of(workload: Workload, capacity_blocks: u64, most: u64) -> Region {
        const AROUND_BORDER: u64 = 48;
        if workload == Workload::Zones {
            let border = GROUP_BLOCKS.min(capacity_blocks.saturating_sub(AROUND_BORDER));
            let first = border.saturating_sub(AROUND_BORDER);
            return Region { first, blocks: (2 * AROUND_BORDER).min(capacity_blocks - first) };
        }
        Region { first: 0, blocks: capacity_blocks.min(most) }
    }
}

struct Host {
    client: Client,
    executor: Executor,
    random: Random,
    habits: ClientProfile,
    region: Region,
    /// The next block for hosts that work in order.
    at: Cell<u64>,
}

impl Host {
    async fn work(&self) {
        for _ in 0..self.random.between(self.habits.steps / 2, self.habits.steps) {
            let is_dropped = self.habits.dropped_percent > 0 && self.random.chance(self.habits.dropped_percent);
            let ended = match is_dropped {
                true => dropped_after(self.step(), self.random.below(MAX_POLLS)).await,
                false => self.step().await,
            };
            if ended == Err(Stop) && self.is_over() {
                return;
            }
        }
    }

    /// True if the host must end because there is a finding. A planned fault alone does not end it, because the device
    /// may recover.
    fn is_over(&self) -> bool {
        let over = self.client.context().finding.borrow().is_some();
        if over {
            self.executor.halt();
        }
        over
    }

    /// Reads and verifies while others write.
    async fn watch(&self, done: &Cell<bool>) {
        while !done.get() {
            let extent = self.extent();
            let read =
                if self.random.chance(85) { self.client.read(extent).await } else { self.client.verify(extent).await };
            if read == Err(Stop) && self.is_over() {
                return;
            }
            self.executor.delay(Duration::from_micros(self.random.between(50, 2_000))).await;
        }
    }

    async fn step(&self) -> Result<(), Stop> {
        let mix = self.habits.mix;
        let forced = self.random.chance(self.habits.forced_percent);
        let weights =
            [mix.write, mix.flush, mix.discard, mix.zero, mix.read, mix.verify, mix.compare, mix.spoil, mix.idle];
        let mut drawn = self.random.below(weights.iter().sum());
        let choice = weights.iter().position(|weight| drawn.checked_sub(*weight).map(|left| drawn = left).is_none());
        match choice {
            Some(0) => self.client.write(self.write_extent(), forced, &self.random).await,
            Some(1) => self.client.flush().await,
            Some(2) => {
                let extents = (0..self.random.between(1, 3)).map(|_| self.extent()).collect();
                self.client.discard(extents).await
            }
            Some(3) => self.client.zeroes(self.extent(), self.random.chance(60), forced).await,
            Some(4) => self.client.read(self.extent()).await,
            Some(5) => self.client.verify(self.extent()).await,
            Some(6) => self.client.compare(self.extent().start()).await,
            Some(7) => self.client.spoil(self.extent(), forced).await,
            _ => {
                self.executor.delay(Duration::from_millis(self.random.between(1, 3_000))).await;
                Ok(())
            }
        }
    }

    fn extent(&self) -> Extent {
        let blocks = self.random.between(1, self.habits.blocks_max.min(self.region.blocks));
        let first = self.region.first + self.random.below(self.region.blocks - blocks + 1);
        Extent::from_raw(first, blocks).expect("a region has blocks and lies within a device")
    }

    fn write_extent(&self) -> Extent {
        if !self.habits.in_order {
            return self.extent();
        }
        let blocks = self.habits.blocks_max.min(self.region.blocks - self.at.get());
        let first = self.region.first + self.at.get();
        self.at.set((self.at.get() + blocks) % self.region.blocks);
        Extent::from_raw(first, blocks).expect("a lap stays within its region")
    }
}
