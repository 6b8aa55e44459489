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
use crate::harness::{Kernel, Share};

/// A test.
pub struct Case {
    /// Its name, for the command line.
    pub name: &'static str,
    /// What it shows, in a line.
    pub about: &'static str,
    /// The oldest kernel that can do it, and the one that no longer can, by major and minor version.
    pub kernels: Kernels,
    /// The test.
    pub run: Run,
}

/// A test, by the guest that it works with.
#[derive(Clone, Copy)]
pub enum Run {
    /// The guest that the tests of a kernel share.
    Shared(fn(&mut TestContext<'_>) -> anyhow::Result<()>),
    /// One that it boots, with drives or programs that no other test needs.
    Own(fn(&OwnGuestContext<'_>) -> anyhow::Result<()>),
}

type Version = (u32, u32);
type Kernels = (Version, Version);
/// Every kernel.
const ANY: Kernels = ((0, 0), (u32::MAX, 0));

/// Those whose packages have ublk's driver, and the newest of what is no host.
const DRIVERS: Kernels = ((6, 12), (u32::MAX, 0));
/// Those with passthrough by io_uring that fio's checks of tags work with.
const PASSTHROUGH: Kernels = ((6, 12), (u32::MAX, 0));
/// The oldest that gets a server killed over and over.
const KILLS: Kernels = ((6, 12), (u32::MAX, 0));
/// Tests that kernels with some of the tests get: how hosts take what comes and goes, and what they send, changed from version to
/// version. What becomes of blocks did not, and takes the most time.
const SOME: [&str; 8] = ["identify", "statuses", "several", "reload", "namespaces", "returns", "ublk", "kills"];
/// Measurements, which run only if they are named.
const MEASUREMENTS: [&str; 1] = ["dix"];
/// Those that give a namespace with metadata a capacity when it is behind TCP.
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

impl Case {
    /// True if a kernel gets it. One that is named on the command line runs wherever it can.
    pub fn is_for(&self, kernel: &Kernel, is_named: bool) -> bool {
        let is_in_share = kernel.share == Share::All || SOME.contains(&self.name);
        self.runs_on(kernel.version()) && (is_named || is_in_share && !MEASUREMENTS.contains(&self.name))
    }

    /// True if a kernel of this version can do it.
    fn runs_on(&self, version: Version) -> bool {
        self.kernels.0 <= version && version < self.kernels.1
    }
}

/// All tests. Those that share a guest run in this order, and beside them those with guests of their own, in this order too.
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

    #[test]
    fn a_kernel_between_gets_some_tests_and_all_that_are_named() {
        let kernel = |release: &str, share| {
            let (release, image, modules) = (release.to_owned(), "i".into(), "m".into());
            Kernel { release, share, processors: 1, image, modules }
        };
        let (between, newest) = (kernel("6.12.1-amd64", Share::Some), kernel("7.2-amd64", Share::All));
        let count = |kernel, is_named| CASES.iter().filter(|case| case.is_for(kernel, is_named)).count();
        assert_eq!(count(&between, false), SOME.len(), "names of tests");
        assert_eq!((count(&between, true), count(&newest, true)), (CASES.len() - 2, CASES.len() - 1));
        assert_eq!(count(&newest, false), CASES.len() - 1 - MEASUREMENTS.len());
    }
}
