//! The tests.

mod copy;
mod damage;
mod dix;
mod drives;
mod identify;
mod io;
mod kills;
mod maps;
mod namespaces;
mod nbd;
mod passthrough;
mod protection;
mod read_only;
mod reload;
mod resize;
mod restart;
mod returns;
mod scsi;
mod several;
mod statuses;
mod storage_tags;
mod ublk;
mod zeroes;

use crate::context::{OwnGuestContext, TestContext};

/// A test.
pub struct Case {
    /// Its name, for the command line.
    pub name: &'static str,
    /// Its purpose, in a line.
    pub about: &'static str,
    /// The first kernel version that supports it, and the first that no longer does.
    pub kernels: Kernels,
    /// The test.
    pub run: Run,
}

/// A test, by the kind of its guest.
#[derive(Clone, Copy)]
pub enum Run {
    /// A test in the shared guest of a kernel.
    Shared(fn(&mut TestContext<'_>) -> anyhow::Result<()>),
    /// A test that boots its own guest, with its own drives or programs.
    Own(fn(&OwnGuestContext<'_>) -> anyhow::Result<()>),
}

/// Major and minor version of a kernel.
pub type Version = (u32, u32);
type Kernels = (Version, Version);
/// Every kernel.
const ANY: Kernels = ((0, 0), (u32::MAX, 0));

/// Kernels whose packages have the ublk driver; also used for tests that need no host, which then run on the newest
/// kernel.
const DRIVERS: Kernels = ((6, 12), (u32::MAX, 0));
/// Kernels with io_uring passthrough that works with fio's checks of tags.
const PASSTHROUGH: Kernels = ((6, 12), (u32::MAX, 0));
/// The oldest kernel for tests that kill a server again and again.
const KILLS: Kernels = ((6, 12), (u32::MAX, 0));
/// Measurements, which run only when they are named on the command line.
const MEASUREMENTS: [&str; 1] = ["dix"];
/// Kernels that report a capacity for a namespace with metadata over TCP.
const BLOCK_LAYER: Kernels = ((0, 0), (6, 12));

const fn case(
    name: &'static str,
    about: &'static str,
    kernels: Kernels,
    run: fn(&mut TestContext<'_>) -> anyhow::Result<()>,
) -> Case {
    Case { name, about, kernels, run: Run::Shared(run) }
}

const fn own(
    name: &'static str,
    about: &'static str,
    kernels: Kernels,
    run: fn(&OwnGuestContext<'_>) -> anyhow::Result<()>,
) -> Case {
    Case { name, about, kernels, run: Run::Own(run) }
}

/// The choice of kernels for the tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Coverage {
    /// Each kernel runs the tests that it supports, and the measurements that are named on the command line.
    Named,
    /// Each kernel runs the tests that it supports.
    EveryKernel,
    /// Each test runs on one kernel that supports it, which the number chooses. With as many consecutive numbers as
    /// there are kernels, each kernel runs each test that it supports.
    Turn(u64),
}

impl Case {
    /// True if a kernel runs the test, given the versions of all kernels.
    pub fn is_for(&self, version: Version, versions: &[Version], coverage: Coverage) -> bool {
        let able: Vec<Version> = versions.iter().copied().filter(|version| self.runs_on(*version)).collect();
        match coverage {
            Coverage::Named => able.contains(&version),
            _ if MEASUREMENTS.contains(&self.name) => false,
            Coverage::Turn(turn) if !able.is_empty() => {
                // Neighbours in the list go to different kernels, which run at the same time.
                let place = CASES.iter().position(|case| case.name == self.name).unwrap_or_default() as u64;
                able[(turn.wrapping_add(place) % able.len() as u64) as usize] == version
            }
            Coverage::EveryKernel | Coverage::Turn(_) => able.contains(&version),
        }
    }

    /// True if a kernel of this version supports it.
    fn runs_on(&self, version: Version) -> bool {
        self.kernels.0 <= version && version < self.kernels.1
    }
}

/// All tests. Tests in the shared guest run in this order; those with their own guests also do, at the same time.
pub const CASES: &[Case] = &[
    case("identify", "discovery, what controllers and namespaces say, log pages, reset", ANY, identify::run),
    case(
        "statuses",
        "what is refused and how, logs that were promised, and no word of the kernel's about it",
        ANY,
        statuses::run,
    ),
    case(
        "commands",
        "read, write, compare, verify, write zeroes, deallocate, flush, and what is refused",
        ANY,
        io::commands,
    ),
    case("copy", "copied ranges, what is refused, damage that is not copied, flags that Linux refuses", ANY, copy::run),
    case("files", "ext4 and btrfs, there and back", ANY, io::files),
    case("traffic", "random and mixed traffic with every block checked, digests on and off", ANY, io::traffic),
    case(
        "nbd",
        "the kernel's NBD client: ext4 there and back, zeroes, errors for exactly the damaged blocks",
        ANY,
        nbd::run,
    ),
    case("several", "several subsystems, namespaces and formats; who may connect to which", ANY, several::run),
    case("read-only", "a file system that can be read and not changed", ANY, read_only::run),
    case("zeroes", "fallocate, discard, and the space they give back", ANY, zeroes::run),
    case("damage", "errors for exactly the damaged blocks; every way to verify names them", ANY, damage::run),
    own(
        "drives",
        "NVMe drives of the host itself: verified by the drive, exact bad blocks, tags of every format",
        ANY,
        drives::run,
    ),
    own(
        "passthrough",
        "namespaces that are served, as drives of the host itself: verified and zeroed there, and errors that are clear",
        DRIVERS,
        passthrough::run,
    ),
    own(
        "scsi",
        "SCSI drives of the host itself: what they verify and compare, medium errors, tags of every type, zeroes",
        ANY,
        scsi::run,
    ),
    own(
        "maps",
        "partitions, tables of device-mapper and arrays of md over drives that verify: offloaded, exact addresses and copies",
        DRIVERS,
        maps::run,
    ),
    own(
        "ublk",
        "block devices of the kernel: file systems, exact errors, recovery of a killed server, protection information",
        DRIVERS,
        ublk::run,
    ),
    own("dix", "what tags of the kernel's own cost, by ublk; only if it is named", (ublk::PROTECTION, ANY.1), dix::run),
    case(
        "protection",
        "tags made and checked on either side, through passthrough",
        PASSTHROUGH,
        protection::passthrough,
    ),
    case(
        "block-layer",
        "protection information as the kernel itself uses it over TCP",
        BLOCK_LAYER,
        protection::block_layer,
    ),
    case("storage-tags", "tuples with storage tags, made and checked on either side", ANY, storage_tags::run),
    case("reload", "namespaces, subsystems and hosts that come and go under load", ANY, reload::run),
    case(
        "namespaces",
        "namespaces added and removed under load, round after round, the first one too",
        ANY,
        namespaces::run,
    ),
    case(
        "returns",
        "a subsystem that goes under load and comes back before its host stops retrying",
        ANY,
        returns::run,
    ),
    case("resize", "a volume that grows and shrinks under load, and hosts that see it by themselves", ANY, resize::run),
    case("restart", "a server that dies or stops, and a reset, under load", ANY, restart::run),
    case(
        "kills",
        "servers of volumes and mirrors killed over and over: what fsync acknowledged is there, on ext4 and xfs",
        KILLS,
        kills::run,
    ),
];

/// Their names.
pub fn names() -> Vec<&'static str> {
    CASES.iter().map(|case| case.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_case_runs_on_some_kernel() {
        for (i, case) in CASES.iter().enumerate() {
            assert!(CASES[..i].iter().all(|other| other.name != case.name), "{}", case.name);
            assert!([(6, 1), (7, 2)].iter().any(|version| case.runs_on(*version)), "{}", case.name);
        }
    }

    const VERSIONS: [Version; 3] = [(6, 1), (6, 12), (7, 2)];

    fn gets(version: Version, coverage: Coverage) -> Vec<&'static str> {
        let due = CASES.iter().filter(|case| case.is_for(version, &VERSIONS, coverage));
        due.map(|case| case.name).collect()
    }

    #[test]
    fn in_a_turn_each_test_has_a_kernel_and_after_three_every_kernel_that_can() {
        for case in CASES.iter().filter(|case| !MEASUREMENTS.contains(&case.name)) {
            let able: Vec<Version> = VERSIONS.into_iter().filter(|version| case.runs_on(*version)).collect();
            let mut had = Vec::new();
            for turn in 41..41 + able.len() as u64 {
                let of_turn = able.iter().filter(|version| case.is_for(**version, &VERSIONS, Coverage::Turn(turn)));
                let of_turn: Vec<Version> = of_turn.copied().collect();
                assert_eq!(of_turn.len(), 1, "{} in turn {turn}", case.name);
                had.extend(of_turn);
            }
            had.sort_unstable();
            had.dedup();
            assert_eq!(had, able, "{}", case.name);
        }
    }

    #[test]
    fn every_kernel_gets_all_that_it_can_do_and_measurements_only_if_they_are_named() {
        for version in VERSIONS {
            let (all, named) = (gets(version, Coverage::EveryKernel), gets(version, Coverage::Named));
            let able: Vec<_> = CASES.iter().filter(|case| case.runs_on(version)).map(|case| case.name).collect();
            assert_eq!(named, able);
            assert_eq!(all, able.into_iter().filter(|name| !MEASUREMENTS.contains(name)).collect::<Vec<_>>());
            assert!(gets(version, Coverage::Turn(0)).len() < all.len());
        }
    }

    #[test]
    fn a_kernel_that_is_missing_leaves_its_tests_to_the_others() {
        let there = [(6, 1), (7, 2)];
        let case = CASES.iter().find(|case| case.name == "files").expect("there is a test of files");
        for turn in 0..3 {
            let count = there.iter().filter(|version| case.is_for(**version, &there, Coverage::Turn(turn))).count();
            assert_eq!(count, 1, "turn {turn}");
        }
    }
}
