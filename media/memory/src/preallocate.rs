//! A store whose data are in memory before it is used, and how much memory there is for that.
//!
//! Linux hands out memory that it does not have, and ends a process when it is used. So a store that is filled ahead
//! compares what it still needs with what is left, at the beginning and again and again, and fails before that.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use sealblock_runtime_memory::Buffer;

use crate::store::MemoryStore;

/// The number of chunks between two looks at the memory that is left: 128 MiB, of which other programs may take as
/// much meanwhile.
const CHUNKS_BETWEEN_LOOKS: u64 = 1024;

/// Why a store could not be filled ahead. All its memory was given back.
#[derive(Debug)]
pub enum PreallocateError {
    /// More would be used than the system or this process's control group has left.
    NoRoom {
        /// The bytes that are still missing.
        needed_bytes: u64,
        /// The bytes that are left.
        available_bytes: u64,
    },
    /// The system refused.
    System(io::Error),
}

impl fmt::Display for PreallocateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PreallocateError::NoRoom { needed_bytes, available_bytes } => {
                let (needed, available) = (needed_bytes.div_ceil(1 << 20), available_bytes >> 20);
                write!(f, "{needed} MiB of memory are needed, and {available} MiB are available")
            }
            PreallocateError::System(error) => write!(f, "the system has no more memory: {error}"),
        }
    }
}

impl std::error::Error for PreallocateError {}

impl MemoryStore {
    /// Puts all data of a new store into memory, where they stay: what is discarded is not given back. Then a write needs
    /// other memory only to replace a chunk that responses still share. Blocks that were not written are holes all the
    /// same. Takes about 0.1 s for each GiB. The tags of a store with protection information are not included.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn preallocate(self) -> Result<MemoryStore, PreallocateError> {
        self.preallocate_within(available_bytes)
    }

    fn preallocate_within(mut self, available: impl Fn() -> Option<u64>) -> Result<MemoryStore, PreallocateError> {
        let (shape, blocks) = (self.chunks.shape, self.geometry().capacity_blocks);
        let (count, mut ready) = (blocks.div_ceil(shape.blocks() as u64), Vec::new());
        for number in 0..count {
            if number % CHUNKS_BETWEEN_LOOKS == 0
                && let Some(available_bytes) = available()
            {
                let needed_bytes = (count - number).saturating_mul(shape.chunk_bytes() as u64);
                if needed_bytes > available_bytes {
                    return Err(PreallocateError::NoRoom { needed_bytes, available_bytes });
                }
            }
            if ready.is_empty() {
                ready = self.some_in_memory().map_err(PreallocateError::System)?;
            }
            let chunk = ready.pop().expect("there is at least one");
            self.chunks.fill(number, chunk);
        }
        self.chunks.is_preallocated = true;
        Ok(self)
    }

    /// Some zeroed chunks that have all their pages.
    fn some_in_memory(&self) -> io::Result<Vec<Buffer>> {
        match self.chunks.slabs() {
            Some(slabs) => slabs.take_slab(),
            None => {
                let mut chunk = Buffer::zeroed(self.chunks.shape.chunk_bytes());
                chunk.fill(0);
                Ok(vec![chunk])
            }
        }
    }
}

/// The bytes of memory that this process can still get: of the system, and of the control groups that it is in. `None`
/// if the system does not tell.
fn available_bytes() -> Option<u64> {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_system(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").ok();
    let group = groups.and_then(|text| of_groups(Path::new("/sys/fs/cgroup"), &text));
    [system, group].into_iter().flatten().min()
}

/// `MemAvailable` in the text of `/proc/meminfo`.
fn of_system(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least that is left in the control group of this process (version 2) and in those above it, by the text of
/// `/proc/self/cgroup`; `None` without a limit.
fn of_groups(root: &Path, groups: &str) -> Option<u64> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = root.join(path);
    let within = group.ancestors().take_while(|folder| folder.starts_with(root));
    within.map(PathBuf::from).filter_map(|folder| of_group(&folder)).min()
}

/// What is left below the limit of a control group, if it has one. Files that are cached and not in use give way.
fn of_group(folder: &Path) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, used) = (number("memory.max")?, number("memory.current")?);
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse::<u64>().ok()).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDevice;
    use sealblock_block::{BlockState, Device, Durability, Expectations, Request, Response};
    use sealblock_integrity::{Sealed, Tags};
    use sealblock_runtime_memory::Slice;
    use sealblock_units::{BlockSize, Extent};
    use std::sync::Arc;

    fn store(blocks: u64) -> MemoryStore {
        MemoryStore::new(BlockSize::B4096, blocks, None)
    }

    fn run(device: &MemoryDevice, request: &Request) -> Response {
        device.try_execute(request).expect("short").expect("memory does not fail")
    }

    #[test]
    fn all_data_are_in_memory_and_stay_but_are_holes_until_they_are_written() {
        // With slabs, with a last chunk that is not whole; and without.
        for (blocks, bytes) in [(1040, 33 << 17), (64, 2 << 17)] {
            let store = store(blocks).preallocate_within(|| Some(1 << 30)).expect("there is room");
            let device = MemoryDevice::on(Arc::new(store));
            assert_eq!(device.allocated_bytes(), bytes);
            let whole = Extent::from_raw(0, 64).unwrap();
            let data = Slice::copy_from(&[7; 64 * 4096]);
            let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: 0 };
            let write = Request::write(whole, Sealed::seal(data, BlockSize::B4096, None, &tags), Durability::Volatile);
            run(&device, &write);
            let states = |device: &MemoryDevice| {
                let request = Request::block_status(whole);
                let outcome = device
                    .try_execute(&request)
                    .or_else(|| futures_util::FutureExt::now_or_never(device.execute(request.clone())));
                let Some(Ok(Response::BlockStatus(runs))) = outcome else { panic!("no runs") };
                runs.iter().map(|run| run.state).collect::<Vec<_>>()
            };
            assert_eq!(states(&device), [BlockState::Allocated]);
            for at in [0, 16, 32, 48] {
                run(&device, &Request::discard([Extent::from_raw(at, 16).unwrap()]));
            }
            assert_eq!((states(&device), device.allocated_bytes()), (vec![BlockState::Hole], bytes));
            let Response::Data(read) = run(&device, &Request::read(whole, Expectations::NONE)) else { panic!("data") };
            assert!(read.joined_data().iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_or_while_it_is_filled() {
        let refused = store(1 << 20).preallocate_within(|| Some(1 << 30)).err().expect("4 GiB are more");
        let PreallocateError::NoRoom { needed_bytes, available_bytes } = refused else { panic!("{refused}") };
        assert_eq!((needed_bytes, available_bytes), (4 << 30, 1 << 30));
        assert_eq!(refused.to_string(), "4096 MiB of memory are needed, and 1024 MiB are available");
        // Other programs take memory meanwhile.
        let looks = std::cell::Cell::new(0);
        let shrinking = || {
            looks.set(looks.get() + 1);
            Some((256 << 20) / looks.get())
        };
        assert!(store(64 << 10).preallocate_within(shrinking).is_ok(), "256 MiB, and then 128 MiB are left");
        looks.set(1);
        assert!(matches!(store(64 << 10).preallocate_within(shrinking), Err(PreallocateError::NoRoom { .. })));
        assert!(store(1 << 52).preallocate().is_err(), "no machine has as much");
    }

    #[test]
    fn what_is_left_is_that_of_the_system_and_of_each_control_group() {
        assert_eq!(of_system("MemTotal: 9 kB\nMemAvailable:   1000 kB\nMemFree: 1 kB\n"), Some(1_024_000));
        assert_eq!((of_system("MemAvailable: many kB"), of_system("")), (None, None));
        let root = std::env::temp_dir().join(format!("sealblock-groups-{}", std::process::id()));
        let inner = root.join("a/b");
        fs::create_dir_all(&inner).unwrap();
        let set = |folder: &Path, limit: &str, used: u64| {
            fs::write(folder.join("memory.max"), limit).unwrap();
            fs::write(folder.join("memory.current"), format!("{used}\n")).unwrap();
        };
        set(&inner, "max\n", 5);
        assert_eq!(of_groups(&root, "1:memory:/x\n0::/a/b\n"), None);
        set(&root.join("a"), "1000\n", 400);
        assert_eq!(of_groups(&root, "0::/a/b\n"), Some(600), "the limit of the group above");
        fs::write(root.join("a/memory.stat"), "anon 300\ninactive_file 100\n").unwrap();
        assert_eq!(of_groups(&root, "0::/a/b\n"), Some(700), "the cache gives way");
        set(&inner, "10\n", 50);
        assert_eq!((of_groups(&root, "0::/a/b\n"), of_groups(&root, "0::/\n")), (Some(0), None));
        assert!(available_bytes().is_some(), "Linux tells");
        fs::remove_dir_all(&root).unwrap();
    }
}
