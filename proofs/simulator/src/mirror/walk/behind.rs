//! Steps of a session in which a replica is offline or out of sync at a critical moment.

use std::time::Duration;

use sealblock_units::{Extent, Lba};

use super::replica::{BLOCKS, HeldRequests, Replica, ReplicaLink};
use super::session::Host;

impl Host {
    /// A replica goes offline while neighbouring blocks are written, and stays so until no write there is in flight any
    /// more.
    pub async fn write_behind(&self) {
        let (replica, random) = (self.named(), &self.harness.random);
        self.disconnect(&replica);
        let first = random.below(BLOCKS - 8);
        for _ in 0..random.between(2, 4) {
            self.write(Extent::one(Lba::new(first + random.below(8)))).await;
        }
        self.wait(20).await;
        self.reconnect(&replica);
        self.wait(6).await;
    }

    /// While a partly resynced replica flushes, writes that only this replica executes fail. It goes offline again
    /// before those regions are resynced, and again after all I/O to it has ended.
    pub async fn fail_beside_flush(&self) {
        let replica = self.named();
        let random = &self.harness.random;
        self.disconnect(&replica);
        self.write(Extent::one(Lba::new(random.below(BLOCKS)))).await;
        replica.is_waiting.set(false);
        replica.held.set(Some(HeldRequests::Flushes));
        replica.link.set(ReplicaLink::Up);
        let is_flushing = self.waits(&replica).await;
        let others: Vec<_> =
            self.harness.in_sync().into_iter().filter(|other| other.number != replica.number).collect();
        if is_flushing {
            others.iter().for_each(|other| other.link.set(ReplicaLink::Worn));
            for block in [random.below(8), BLOCKS - 1 - random.below(8)] {
                self.write(Extent::one(Lba::new(block))).await;
            }
            others.iter().for_each(|other| other.link.set(ReplicaLink::Up));
        }
        replica.held.set(Some(HeldRequests::Looks));
        self.wait(20).await;
        self.disconnect(&replica);
        replica.held.set(None);
        self.wait(3).await;
        self.reconnect(&replica);
        self.wait(6).await;
    }

    /// Waits until a replica holds a request back; false if it never does.
    async fn waits(&self, replica: &Replica) -> bool {
        for _ in 0..200 {
            if replica.is_waiting.get() {
                return true;
            }
            self.executor.delay(Duration::from_millis(50)).await;
        }
        self.log(format!("{} has nothing to flush", replica.name));
        false
    }
}
