//! The cores that serve a server's connections, and which of them each connection goes to: when it is accepted, the one
//! with the fewest; once it is known which devices it uses, the one where these are.
//!
//! Invariants: a connection counts on one core, from when that core is chosen until the connection ends or is excluded.
//! Cores are compared and counted under one lock, so that two connections that begin at once are not both sent to the
//! core that had the fewest.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sealblock_runtime_reactor::{CoreAddress, CoreHandle, pool, shutdown_requested, spawn, timeout};

/// How long a core looks, after a connection has ended, which of its spare memory the others need.
const WATCH_SPARE: Duration = Duration::from_secs(2);

/// The cores of a server.
pub(crate) struct ServingCores {
    addresses: Vec<CoreAddress>,
    /// Connections on each core, without those that are excluded.
    loads: Mutex<Vec<usize>>,
}

/// The core of one connection, which counts there until this is dropped.
pub(crate) struct CorePlace {
    cores: Arc<ServingCores>,
    index: usize,
    counts: bool,
}

impl ServingCores {
    pub(crate) fn new(cores: impl IntoIterator<Item = CoreHandle>) -> ServingCores {
        let addresses: Vec<CoreAddress> = cores.into_iter().map(|core| core.address()).collect();
        let loads = Mutex::new(vec![0; addresses.len()]);
        ServingCores { addresses, loads }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections on each core.
    pub(crate) fn loads(&self) -> Vec<usize> {
        self.lock().clone()
    }

    /// The indices of these cores, as far as they serve connections.
    fn indices(&self, of: &[CoreAddress]) -> Vec<usize> {
        of.iter().filter_map(|address| self.addresses.iter().position(|own| own == address)).collect()
    }
}

impl CorePlace {
    /// A place on the core with the fewest connections; cores with equally many take turns. `None` without cores.
    pub(crate) fn choose(cores: &Arc<ServingCores>, turn: u64) -> Option<CorePlace> {
        let mut loads = cores.lock();
        let index = fewest(&loads, in_turn(loads.len(), turn))?;
        loads[index] += 1;
        drop(loads);
        Some(CorePlace { cores: Arc::clone(cores), index, counts: true })
    }

    /// Chooses again, for a connection whose devices are on these cores only, or on all if there are none; true if it
    /// is another core.
    pub(crate) fn choose_again(&mut self, homes: &[CoreAddress], turn: u64) -> bool {
        let homes = self.cores.indices(homes);
        let mut loads = self.cores.lock();
        loads[self.index] -= usize::from(self.counts);
        let index = better(&loads, self.index, &homes, turn);
        loads[index] += usize::from(self.counts);
        drop(loads);
        std::mem::replace(&mut self.index, index) != index
    }

    /// Counts the connection on this core, if this is one of those that serve connections.
    pub(crate) fn stay_here(&mut self) {
        let Some(here) = self.cores.addresses.iter().position(CoreAddress::is_here) else { return };
        let mut loads = self.cores.lock();
        loads[self.index] -= usize::from(self.counts);
        loads[here] += usize::from(self.counts);
        drop(loads);
        self.index = here;
    }

    /// The connection does not count any more.
    pub(crate) fn exclude(&mut self) {
        if std::mem::take(&mut self.counts) {
            self.cores.lock()[self.index] -= 1;
        }
    }

    pub(crate) fn address(&self) -> &CoreAddress {
        &self.cores.addresses[self.index]
    }

    /// True if there are other cores.
    pub(crate) fn has_others(&self) -> bool {
        self.cores.addresses.len() > 1
    }
}

impl Drop for CorePlace {
    fn drop(&mut self) {
        self.exclude();
        // A core that has stopped has no memory left to give back.
        let _ = self.address().send(give_back_memory);
    }
}

thread_local! {
    /// Connections of this core that ended and whose memory has not been looked at since.
    static ENDED: Cell<usize> = const { Cell::new(0) };
}

/// Gives back what no connection of this core needs any more, some time after the last ones ended.
fn give_back_memory() {
    if ENDED.replace(ENDED.get() + 1) > 0 {
        return;
    }
    drop(spawn(async {
        loop {
            let seen = ENDED.get();
            pool().watch_spare();
            let is_stopping = timeout(WATCH_SPARE, shutdown_requested()).await.is_ok();
            pool().give_back_unneeded();
            if is_stopping || ENDED.get() == seen {
                break ENDED.set(0);
            }
        }
    }));
}

/// All cores, from another one on each turn.
fn in_turn(cores: usize, turn: u64) -> impl Iterator<Item = usize> {
    (0..cores as u64).map(move |i| (turn.wrapping_add(i) % cores as u64) as usize)
}

/// The first of those with the fewest connections.
fn fewest(loads: &[usize], among: impl Iterator<Item = usize>) -> Option<usize> {
    among.min_by_key(|&core| loads[core])
}

/// The core for a connection that is on `own` and not counted: one of `homes`, if it has at most one and a half times
/// as many connections as the average core, and two. Otherwise the one with the fewest. It stays where it is if that is
/// as good.
fn better(loads: &[usize], own: usize, homes: &[usize], turn: u64) -> usize {
    let (cores, all) = (loads.len(), loads.iter().sum::<usize>());
    let has_room = |core: &usize| 2 * cores * loads[*core] <= 3 * all + 4 * cores;
    let among = |wanted: &dyn Fn(usize) -> bool| {
        let from_own = [own].into_iter().chain(in_turn(cores, turn));
        fewest(loads, from_own.filter(|core| wanted(*core)))
    };
    among(&|core| homes.contains(&core)).filter(has_room).or_else(|| among(&|_| true)).unwrap_or(own)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use sealblock_runtime_reactor::{Config, Cores, Placement, sleep};

    use super::*;

    #[test]
    fn after_the_end_of_a_connection_its_core_gives_back_memory_that_others_do_not_need() {
        let config = Config { pool_arena_bytes: 0, ..Config::default() };
        let own = Cores::start(Placement::Count(1), config).unwrap();
        let core = own.handle(0).unwrap();
        let (address, (send, spare)) = (core.address(), mpsc::channel());
        let work = move || {
            drop((pool().take(1 << 20), pool().take(1 << 20)));
            let before = pool().counters().spare_bytes;
            drop(CorePlace::choose(&Arc::new(ServingCores::new([core])), 0));
            let after = async move {
                while pool().counters().spare_bytes > 0 {
                    sleep(WATCH_SPARE / 10).await;
                }
                send.send(before).unwrap();
            };
            drop(spawn(after));
        };
        address.send(work).unwrap();
        assert_eq!(spare.recv_timeout(Duration::from_secs(60)).unwrap(), 2 << 20);
    }

    #[test]
    fn a_connection_goes_where_its_device_is_and_stays_if_that_is_as_good() {
        assert_eq!(better(&[2, 0, 0], 1, &[0], 7), 0);
        assert_eq!(better(&[2, 0, 0], 0, &[0], 7), 0);
        assert_eq!(better(&[2, 1, 0], 2, &[0, 1], 7), 1, "of two homes, the one with fewer");
        assert_eq!(better(&[1, 5, 1], 2, &[0, 2], 0), 2, "of two that are alike, its own");
        assert_eq!((better(&[1, 5, 1], 1, &[0, 2], 0), better(&[1, 5, 1], 1, &[0, 2], 1)), (0, 2), "else in turn");
    }

    #[test]
    fn a_home_with_too_many_is_left_alone() {
        // One and a half times the average of 4 connections on each of two cores, and two.
        assert_eq!((better(&[8, 0], 1, &[0], 0), better(&[9, 0], 1, &[0], 0)), (0, 1));
        let mut loads = [0; 4];
        for turn in 0..40 {
            loads[better(&loads, 3, &[0], turn)] += 1;
        }
        assert_eq!(loads, [17, 8, 7, 8]);
    }

    #[test]
    fn without_a_home_the_fewest_count_and_a_tie_moves_nothing() {
        for own in 0..3 {
            assert_eq!(better(&[1, 1, 1], own, &[], 5), own);
        }
        assert_eq!(better(&[1, 0, 1], 1, &[], 5), 1);
        assert_eq!(better(&[1, 0, 0], 0, &[], 5), 2, "in turn");
        assert_eq!(better(&[1, 0, 0], 0, &[], 4), 1);
    }
}
