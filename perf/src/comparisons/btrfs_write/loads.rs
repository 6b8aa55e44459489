//! The loads on a filesystem.

/// Bytes of a sequential request.
const LARGE: u64 = 1 << 20;
/// Bytes of a random request.
const SMALL: u64 = 4 << 10;

/// A load.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Its name in tables.
    pub name: &'static str,
    /// What is done.
    pub work: Work,
    /// The least acceptable rate of the library, relative to the kernel's.
    pub threshold: Option<f64>,
}

/// What is done.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// Data of files that have data are read or written.
    Data(Data),
    /// A write of 4 KiB at a random place where there was none before, then a request to make it durable, and again.
    Synced(Synced),
    /// Files are created in one directory, looked up with their attributes, and deleted.
    Names,
}

/// Requests to data.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Writes or reads.
    pub is_write: bool,
    /// At random places, or one after the other.
    pub is_random: bool,
    /// Bytes of a request.
    pub bytes: u64,
    /// Programs, each with its own file.
    pub jobs: usize,
    /// Requests of each in flight.
    pub depth: usize,
    /// True if the kernel's page cache is not used.
    pub is_direct: bool,
}

/// Writes that are made durable.
#[derive(Clone, Copy, Debug)]
pub struct Synced {
    /// Programs, each with its own file.
    pub jobs: usize,
    /// True for files with NODATACOW.
    pub is_nodatacow: bool,
    /// True if the file was written before, or false if space was allocated for it.
    pub is_written: bool,
    /// `fdatasync` in place of `fsync`.
    pub is_data_only: bool,
}

const fn data(name: &'static str, is_write: bool, is_random: bool, (jobs, depth): (usize, usize)) -> Load {
    let bytes = if is_random { SMALL } else { LARGE };
    let work = Work::Data(Data { is_write, is_random, bytes, jobs, depth, is_direct: true });
    Load { name, work, threshold: None }
}

const fn synced(name: &'static str, jobs: usize, in_place: Option<bool>) -> Load {
    let (is_nodatacow, is_data_only) = (in_place.is_some(), in_place.is_some());
    let is_written = matches!(in_place, None | Some(true));
    let work = Work::Synced(Synced { jobs, is_nodatacow, is_written, is_data_only });
    Load { name, work, threshold: None }
}

/// Writes in place with fdatasync, to blocks that were written before and to others.
pub const WRITTEN: &str = "4 KiB random write and fdatasync, NODATACOW, written";
/// See [`WRITTEN`].
pub const UNWRITTEN: &str = "4 KiB random write and fdatasync, NODATACOW, allocated and not written";

/// All of them.
pub const LOADS: [Load; 12] = [
    data("1 MiB sequential write, direct, QD 4", true, false, (1, 4)),
    data("1 MiB sequential read, direct, QD 4", false, false, (1, 4)),
    Load { threshold: Some(1.0), ..data("4 KiB random write, direct, 4 jobs x QD 32", true, true, (4, 32)) },
    data("4 KiB random write, direct, 1 job x QD 1", true, true, (1, 1)),
    Load {
        work: Work::Data(Data { is_write: true, is_random: true, bytes: SMALL, jobs: 4, depth: 1, is_direct: false }),
        ..data("4 KiB random write, buffered, 4 jobs", true, true, (4, 1))
    },
    data("4 KiB random read, direct, 4 jobs x QD 32", false, true, (4, 32)),
    synced("4 KiB random write and fsync, 1 job", 1, None),
    synced("4 KiB random write and fsync, 4 jobs", 4, None),
    synced("4 KiB random write and fsync, 32 jobs", 32, None),
    synced(WRITTEN, 1, Some(true)),
    synced(UNWRITTEN, 1, Some(false)),
    Load { name: "names", work: Work::Names, threshold: None },
];

impl Work {
    /// The files that it needs.
    pub fn files(&self) -> usize {
        match self {
            Work::Data(data) => data.jobs,
            Work::Synced(synced) => synced.jobs,
            Work::Names => 0,
        }
    }
}
