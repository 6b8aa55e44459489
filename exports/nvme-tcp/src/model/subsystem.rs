//! A subsystem: a name, namespaces, and the hosts that may connect. All cores share it; namespaces and hosts may change
//! while the target serves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sealblock_block::{Ability, RequestKind};
use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::CoreAddress;

use crate::model::checksums::{ChecksumCounters, ChecksumStats};
use crate::model::handover::ControllerHandover;
use crate::model::namespace::{MAX_NSID, Namespace, SetupError};
use crate::model::sync::{Counter, Flag, Locked};

/// Which hosts may connect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Hosts {
    /// Every host.
    #[default]
    Any,
    /// The hosts with these NQNs. Without authentication, an NQN is only a claim, which prevents mistakes but not
    /// attacks.
    Only(Vec<Nqn>),
}

/// A subsystem with namespaces.
pub struct Subsystem {
    pub(crate) nqn: Nqn,
    pub(crate) serial: String,
    pub(crate) model: String,
    /// True if the target has removed it.
    pub(crate) is_removed: Flag,
    pub(crate) handover: ControllerHandover,
    namespaces: Locked<Arc<Namespaces>>,
    /// The number of changes of the namespaces, which every command reads.
    changes: AtomicU64,
    hosts: Locked<Hosts>,
    traffic: Locked<TrafficCounts>,
}

/// The namespaces of a subsystem by their identifiers.
pub(crate) type Namespaces = BTreeMap<u32, Arc<Namespace>>;

/// The traffic of a queue. Its own core changes the counters, other cores read them.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct QueueCounters {
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
    pub(crate) reads: Counter,
    pub(crate) writes: Counter,
    pub(crate) media_errors: Counter,
    pub(crate) checksums: ChecksumCounters,
}

/// Totals over queues.
#[derive(Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) media_errors: u64,
    pub(crate) checksums: ChecksumStats,
}

impl Traffic {
    fn with(self, counters: &QueueCounters) -> Traffic {
        Traffic {
            read_bytes: self.read_bytes.saturating_add(counters.read_bytes.get()),
            written_bytes: self.written_bytes.saturating_add(counters.written_bytes.get()),
            reads: self.reads.saturating_add(counters.reads.get()),
            writes: self.writes.saturating_add(counters.writes.get()),
            media_errors: self.media_errors.saturating_add(counters.media_errors.get()),
            checksums: counters.checksums.add_to(self.checksums),
        }
    }
}

/// The counters of the queues that exist, and the totals of those that have ended.
#[derive(Default)]
struct TrafficCounts {
    ended: Traffic,
    queues: Vec<Arc<QueueCounters>>,
}

impl Subsystem {
    /// Returns a subsystem without namespaces, for any host. `serial` is truncated to 20 ASCII characters on the wire.
    pub fn new(nqn: Nqn, serial: impl Into<String>) -> Subsystem {
        Subsystem {
            nqn,
            serial: serial.into(),
            model: "sealblock".to_owned(),
            is_removed: Flag::new(false),
            handover: ControllerHandover::default(),
            namespaces: Locked::default(),
            changes: AtomicU64::new(0),
            hosts: Locked::new(Hosts::Any),
            traffic: Locked::default(),
        }
    }

    /// Returns the same with this model number, which is truncated to 40 ASCII characters on the wire.
    pub fn with_model(mut self, model: impl Into<String>) -> Subsystem {
        self.model = model.into();
        self
    }

    /// Returns the same for these hosts.
    pub fn with_hosts(self, hosts: Hosts) -> Subsystem {
        self.hosts.set(hosts);
        self
    }

    /// Returns the same with this namespace.
    ///
    /// # Errors
    /// [`SetupError::Nsid`] and [`SetupError::DuplicateNsid`].
    pub fn with_namespace(self, nsid: u32, namespace: Namespace) -> Result<Subsystem, SetupError> {
        self.add(nsid, namespace)?;
        Ok(self)
    }

    /// The subsystem's name.
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    /// Adds a namespace, for all commands from now on.
    pub(crate) fn add(&self, nsid: u32, namespace: Namespace) -> Result<(), SetupError> {
        self.exchange(&[], vec![(nsid, namespace)]).map(drop)
    }

    /// Removes namespaces and adds others, in one step: no host sees only a part of the change. Returns the removed
    /// ones; commands that have already resolved them still use them.
    pub(crate) fn exchange(
        &self,
        removed: &[u32],
        added: Vec<(u32, Namespace)>,
    ) -> Result<Vec<(u32, Arc<Namespace>)>, SetupError> {
        if let Some((nsid, _)) = added.iter().find(|(nsid, _)| *nsid == 0 || *nsid > MAX_NSID) {
            return Err(SetupError::Nsid(*nsid));
        }
        self.change(|namespaces| {
            let mut remove =
                |nsid| namespaces.remove(&nsid).map(|gone| (nsid, gone)).ok_or(SetupError::UnknownNsid(nsid));
            let gone = removed.iter().map(|nsid| remove(*nsid)).collect::<Result<_, _>>()?;
            for (nsid, namespace) in added {
                if namespaces.insert(nsid, Arc::new(namespace)).is_some() {
                    return Err(SetupError::DuplicateNsid(nsid));
                }
            }
            Ok(gone)
        })
    }

    /// Replaces the namespace with this identifier. Commands that have already resolved the old one complete.
    pub(crate) fn replace(&self, nsid: u32, by: impl FnOnce(&Namespace) -> Namespace) -> Result<(), SetupError> {
        let before = self.change(|namespaces| {
            let entry = namespaces.get_mut(&nsid).ok_or(SetupError::UnknownNsid(nsid))?;
            let new = Arc::new(by(entry));
            Ok(std::mem::replace(entry, new))
        })?;
        drop(before);
        Ok(())
    }

    fn change<T>(&self, edit: impl FnOnce(&mut Namespaces) -> Result<T, SetupError>) -> Result<T, SetupError> {
        let mut guard = self.namespaces.lock();
        let mut namespaces = Namespaces::clone(&guard);
        let changed = edit(&mut namespaces)?;
        let before = std::mem::replace(&mut *guard, Arc::new(namespaces));
        self.changes.fetch_add(1, Ordering::Release);
        drop(guard);
        drop(before);
        Ok(changed)
    }

    /// The namespaces as they are now.
    pub(crate) fn namespaces(&self) -> Arc<Namespaces> {
        self.namespaces.get()
    }

    /// Number of changes of the namespaces.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The namespaces, and the number of changes up to them.
    pub(crate) fn snapshot(&self) -> (u64, Arc<Namespaces>) {
        let namespaces = self.namespaces.lock();
        (self.changes(), Arc::clone(&namespaces))
    }

    /// The cores that execute the requests of the most namespaces, of those that one core executes; none if every core
    /// can open them all.
    pub(crate) fn homes(&self) -> Vec<CoreAddress> {
        let mut homes: Vec<(CoreAddress, usize)> = Vec::new();
        for home in self.namespaces().values().filter_map(|namespace| namespace.device.only_core()) {
            match homes.iter_mut().find(|(known, _)| *known == home) {
                Some((_, namespaces)) => *namespaces += 1,
                None => homes.push((home, 1)),
            }
        }
        let most = homes.iter().map(|(_, namespaces)| *namespaces).max();
        homes.into_iter().filter(|(_, namespaces)| Some(*namespaces) == most).map(|(home, _)| home).collect()
    }

    /// True if this host may connect. A host without an NQN may connect only where any host may.
    pub(crate) fn allows(&self, host: Option<&Nqn>) -> bool {
        match &*self.hosts.lock() {
            Hosts::Any => true,
            Hosts::Only(hosts) => host.is_some_and(|host| hosts.contains(host)),
        }
    }

    /// True if any namespace supports Write Uncorrectable.
    pub(crate) fn can_write_uncorrectable(&self) -> bool {
        let can = |namespace: &Arc<Namespace>| namespace.device.abilities().of(RequestKind::WriteUncorrectable);
        self.namespaces().values().any(|namespace| can(namespace) != Ability::Absent)
    }

    pub(crate) fn set_hosts(&self, hosts: Hosts) {
        self.hosts.set(hosts);
    }

    /// Totals since the subsystem was made, for SMART / Health Information.
    pub(crate) fn traffic(&self) -> Traffic {
        let tally = self.traffic.lock();
        tally.queues.iter().fold(tally.ended, |total, counters| total.with(counters))
    }

    /// Registers the counters of one more queue.
    pub(crate) fn start_counting(&self) -> Arc<QueueCounters> {
        let counters = Arc::new(QueueCounters::default());
        self.traffic.lock().queues.push(Arc::clone(&counters));
        counters
    }

    /// Adds the counters of an ended queue to the totals.
    pub(crate) fn stop_counting(&self, counters: &Arc<QueueCounters>) {
        let mut tally = self.traffic.lock();
        tally.ended = tally.ended.with(counters);
        tally.queues.retain(|other| !Arc::ptr_eq(other, counters));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sealblock_block::DynDevice;
    use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
    use sealblock_layers_cross_core::SharedDevice;
    use sealblock_media_memory::MemoryDevice;
    use sealblock_runtime_reactor::{Config, Reactor};
    use sealblock_units::BlockSize;

    use crate::PiVisibility;

    fn namespace(format: Option<PiFormat>) -> Namespace {
        let device = MemoryDevice::new(BlockSize::from_bytes(512).unwrap(), 8, format);
        Namespace::new(SharedDevice::publish(DynDevice::new("mem", device)), [1; 16])
    }

    /// Runs a test in an environment where devices can be published.
    fn run(test: impl FnOnce()) {
        let config = Config { pool_arena_bytes: 0, ..Config::default() };
        Reactor::new(config).unwrap().block_on(async { test() });
    }

    fn subsystem() -> Subsystem {
        Subsystem::new("nqn.2026-11.org.example:a".parse().unwrap(), "1")
    }

    #[test]
    fn identifiers_are_legal_and_unique() {
        run(|| {
            let one = subsystem().with_namespace(1, namespace(None)).unwrap();
            assert_eq!(one.with_namespace(1, namespace(None)).err(), Some(SetupError::DuplicateNsid(1)));
            assert!(subsystem().with_namespace(MAX_NSID, namespace(None)).is_ok());
            for nsid in [0, MAX_NSID + 1, 0xFFFF_FFFE, 0xFFFF_FFFF] {
                assert_eq!(subsystem().with_namespace(nsid, namespace(None)).err(), Some(SetupError::Nsid(nsid)));
            }
        });
    }

    #[test]
    fn only_protection_that_nvme_knows_is_shown() {
        run(|| {
            let of = |guard| Some(PiFormat::with_default_storage_tag(guard, ProtectionType::Type1));
            assert!(namespace(of(GuardKind::Crc16)).with_visibility(PiVisibility::Protected).is_ok());
            for format in [None, of(GuardKind::IpChecksum)] {
                assert_eq!(
                    namespace(format).with_visibility(PiVisibility::Protected).err(),
                    Some(SetupError::NotProtected)
                );
                assert!(namespace(format).with_visibility(PiVisibility::Plain).is_ok());
            }
        });
    }

    #[test]
    fn hosts_that_are_not_listed_are_refused() {
        let host: Nqn = "nqn.2026-11.org.example:host".parse().unwrap();
        assert!(subsystem().allows(Some(&host)) && subsystem().allows(None));
        let only = |hosts| subsystem().with_hosts(Hosts::Only(hosts));
        assert!(only(vec![host.clone()]).allows(Some(&host)) && !only(vec![]).allows(Some(&host)));
        assert!(!only(vec![host.clone()]).allows(None), "a host without a name is none of those named");
    }

    #[test]
    fn adding_and_removing_namespaces_counts_changes() {
        run(|| {
            let one = subsystem().with_namespace(1, namespace(None)).unwrap();
            let (before, had) = one.snapshot();
            one.add(2, namespace(None)).unwrap();
            assert_eq!(one.add(2, namespace(None)), Err(SetupError::DuplicateNsid(2)));
            one.exchange(&[1], Vec::new()).unwrap();
            assert_eq!(one.exchange(&[1], Vec::new()).err(), Some(SetupError::UnknownNsid(1)));
            assert_eq!(one.changes(), before + 2, "what failed changed nothing");
            assert!(had.contains_key(&1) && !had.contains_key(&2), "an earlier snapshot is unchanged");
        });
    }

    #[test]
    fn an_exchange_is_one_change_and_none_if_a_part_of_it_fails() {
        Reactor::new(Config::default()).unwrap().block_on(async {
            let one = (1..=3).fold(subsystem(), |one, nsid| one.with_namespace(nsid, namespace(None)).unwrap());
            let (before, _) = one.snapshot();
            let numbers = || one.namespaces().keys().copied().collect::<Vec<_>>();
            for (removed, added, due) in [
                (&[1, 4][..], 5, SetupError::UnknownNsid(4)),
                (&[1, 2], 3, SetupError::DuplicateNsid(3)),
                (&[1], 0, SetupError::Nsid(0)),
                (&[1], MAX_NSID + 1, SetupError::Nsid(MAX_NSID + 1)),
            ] {
                assert_eq!(one.exchange(removed, vec![(added, namespace(None))]).err(), Some(due));
            }
            assert_eq!((numbers(), one.changes()), (vec![1, 2, 3], before));
            let gone = one.exchange(&[3, 1], vec![(4, namespace(None)), (1, namespace(None))]).unwrap();
            assert_eq!(gone.iter().map(|(nsid, _)| *nsid).collect::<Vec<_>>(), [3, 1]);
            assert_eq!((numbers(), one.changes()), (vec![1, 2, 4], before + 1));
        });
    }

    #[test]
    fn traffic_of_ended_queues_is_kept() {
        let one = subsystem();
        let (first, second) = (one.start_counting(), one.start_counting());
        first.reads.add(3);
        second.reads.add(4);
        assert_eq!(one.traffic().reads, 7);
        one.stop_counting(&first);
        second.reads.add(1);
        assert_eq!((one.traffic().reads, one.traffic().writes), (8, 0));
    }
}
