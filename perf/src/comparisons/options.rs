//! The options of the benchmarks.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use sealblock_units::{BlockSize, ByteCount};

use crate::setup::Protection;

/// Folder, size and duration, for benchmarks on files.
#[derive(Args, Clone)]
pub struct FileOptions {
    /// Directory of the files, on the file system to be measured. They are removed afterwards.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Bytes of data of each file.
    #[arg(long, default_value = "1GiB")]
    pub size: ByteCount,
    /// Seconds of one turn of one contender.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Rounds, in each of which every contender has one turn.
    #[arg(long, default_value_t = 7)]
    pub rounds: u32,
    /// Kinds of protected volumes: none, crc16, crc32c, crc64, ip.
    #[arg(long, value_delimiter = ',', default_value = "crc16,crc32c,crc64")]
    pub guards: Vec<Protection>,
    /// Only loads whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
    /// Seconds that volumes stay idle before loads that come after idle time.
    #[arg(long, default_value_t = 60.0)]
    pub idle: f64,
}

/// Sizes of mirrors, and the load on them.
#[derive(Args, Clone)]
pub struct MirrorSizeOptions {
    /// Directory of the files, on the file system to be measured. They are sparse, and removed afterwards.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Bytes of each volume.
    #[arg(long, value_delimiter = ',', default_value = "64MiB,8GiB,64GiB")]
    pub sizes: Vec<ByteCount>,
    /// Writes in flight to a mirror, and to each of two volumes.
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    pub depths: Vec<u64>,
    /// Seconds of one turn.
    #[arg(long, default_value_t = 6.0)]
    pub seconds: f64,
    /// Rounds, in each of which the volumes and the mirror have one turn.
    #[arg(long, default_value_t = 4)]
    pub rounds: u32,
    /// Guard of the volumes: none, crc16, crc32c, crc64, ip.
    #[arg(long, default_value = "crc32c")]
    pub guard: Protection,
    /// Also measure with all volumes at a target on another core, over loopback.
    #[arg(long)]
    pub remote: bool,
    /// A `sealblock` that serves the volumes and the mirror over NVMe/TCP from its own process; can be repeated. Then
    /// nothing else is measured, and the last program is compared with the first.
    #[arg(long, value_name = "PROGRAM")]
    pub server: Vec<PathBuf>,
}

/// The number of writes, for the benchmark that counts bytes.
#[derive(Args, Clone)]
pub struct AmplificationOptions {
    /// Application writes for each line.
    #[arg(long, default_value_t = 1 << 20)]
    pub writes: u64,
    /// Sizes of volumes.
    #[arg(long, value_delimiter = ',', default_value = "256MiB,1GiB,4GiB,16GiB,64GiB,256GiB")]
    pub sizes: Vec<ByteCount>,
    /// Only these loads, by line number from 1; 1 is 32 random writes at a time without a flush, 5 is one flushing
    /// writer.
    #[arg(long, value_delimiter = ',')]
    pub loads: Vec<usize>,
    /// Memory for the tables of each volume [default: the volume's own].
    #[arg(long)]
    pub cache: Option<ByteCount>,
}

/// A server that is killed.
#[derive(Args, Clone)]
pub struct RestartOptions {
    /// The `sealblock` that serves.
    #[arg(long, default_value = "target/release/sealblock")]
    pub binary: PathBuf,
    /// Directory of the volume, which is removed afterwards. On a file system in memory, the figures are not those of a
    /// disk.
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Bytes of the volume. Its file is sparse.
    #[arg(long, default_value = "64GiB")]
    pub size: ByteCount,
    /// Random writes before the server is killed, for each line; volumes keep what earlier lines wrote.
    #[arg(long, value_delimiter = ',', default_value = "65536,524288,524288")]
    pub writes: Vec<u64>,
}

/// A file, and a loop device over it.
#[derive(Args, Clone)]
pub struct VerifyLinuxOptions {
    /// The `sealblock` that verifies.
    #[arg(long, default_value = "target/release/sealblock")]
    pub binary: PathBuf,
    /// Directory of the file, which is removed afterwards.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Bytes of the file.
    #[arg(long, default_value = "4GiB")]
    pub size: ByteCount,
    /// Rounds, in each of which every contender has one turn.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
}

/// An image of a Btrfs filesystem.
#[derive(Args, Clone)]
pub struct BtrfsOptions {
    /// The `sealblock` that reads.
    #[arg(long, default_value = "target/release/sealblock")]
    pub binary: PathBuf,
    /// Directory of the image, which is removed afterwards, and of the mount.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// Bytes of the large file.
    #[arg(long, default_value = "2GiB")]
    pub size: ByteCount,
    /// Number of small files.
    #[arg(long, default_value_t = 200_000)]
    pub files: u64,
    /// Rounds, in each of which both have one turn.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
}

/// Filesystems that are written.
#[derive(Args, Clone)]
pub struct BtrfsWriteOptions {
    /// A `sealblock` whose `fs mount -o rw` is a contender.
    #[arg(long)]
    pub fuse: Option<PathBuf>,
    /// Directory of the image, which is removed afterwards, and of the mounts.
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
    /// Bytes of the image.
    #[arg(long, default_value = "4GiB")]
    pub image: ByteCount,
    /// Bytes of the files of a load.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Files that are created, looked up and deleted.
    #[arg(long, default_value_t = 20_000)]
    pub files: u64,
    /// Seconds of one turn.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    /// Rounds, in each of which every contender has one turn under each load.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// The checksum: crc32c, xxhash, sha256, blake2.
    #[arg(long, default_value = "crc32c")]
    pub csum: String,
    /// Only loads whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
}

/// Two ends of a connection.
#[derive(Args, Clone)]
pub struct RemoteOptions {
    /// Bytes of each device.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Seconds of one turn of one contender.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Rounds, in each of which every contender has one turn.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// What the target serves: null, memory, volume, file.
    #[arg(long, value_delimiter = ',', default_value = "null,memory")]
    pub devices: Vec<String>,
    /// Whether header and data digests are used: off, on.
    #[arg(long, value_delimiter = ',', default_value = "off,on")]
    pub digests: Vec<String>,
    /// Who makes tags: none (no tags), made (the target), host.
    #[arg(long, value_delimiter = ',', default_value = "none,made,host")]
    pub tags: Vec<String>,
    /// Guards of the tags.
    #[arg(long, value_delimiter = ',', default_value = "crc16,crc32c,crc64")]
    pub guards: Vec<Protection>,
    /// Only loads whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
    /// Also print percentiles of the latency, as the host sees it: the medians over the rounds, and the longest of all.
    #[arg(long)]
    pub latency: bool,
    /// CPU of the target.
    #[arg(long, default_value_t = 1)]
    pub target_cpu: usize,
    /// CPU of the host.
    #[arg(long, default_value_t = 0)]
    pub host_cpu: usize,
    /// How long an idle end polls before it sleeps, in microseconds.
    #[arg(long, default_value_t = 50)]
    pub spin_us: u32,
    /// Another target, measured in the same rounds by the same host: ADDR:PORT/NQN.
    #[arg(long)]
    pub peer: Vec<Peer>,
    /// The names of the peers in tables, in order.
    #[arg(long)]
    pub peer_name: Vec<String>,
    /// Process of each peer, in order. It is stopped (SIGSTOP) outside its turns, because one that polls leaves no CPU
    /// to the others.
    #[arg(long)]
    pub peer_pid: Vec<i32>,
    /// Measure nothing, but serve for this number of seconds and print the address, for other hosts.
    #[arg(long)]
    pub serve: Option<u64>,
    /// Directory of the files and volumes.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
}

/// A kind of device of the benchmark for several cores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// Stores nothing.
    Null,
    /// Memory, completely written.
    Memory,
    /// A raw file.
    File,
    /// A volume in a file, with CRC-32C.
    Volume,
    /// The same in shards, each on a core in turn.
    Shards,
    /// A volume in memory, with CRC-32C.
    MemoryVolume,
}

impl DeviceKind {
    const ALL: [(DeviceKind, &str); 6] = [
        (DeviceKind::Null, "null"),
        (DeviceKind::Memory, "memory"),
        (DeviceKind::File, "file"),
        (DeviceKind::Volume, "volume"),
        (DeviceKind::Shards, "shards"),
        (DeviceKind::MemoryVolume, "memory-volume"),
    ];

    /// Its name on the command line and in tables.
    pub fn name(self) -> &'static str {
        DeviceKind::ALL.into_iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    /// Requests per second of eight cores as a multiple of those of one core: the goal. `None` for a file, which scales
    /// as its file system does.
    pub fn goal_of_eight_cores(self) -> Option<f64> {
        match self {
            DeviceKind::Null => Some(7.0),
            DeviceKind::Memory => Some(6.6),
            DeviceKind::File => None,
            DeviceKind::Volume | DeviceKind::Shards | DeviceKind::MemoryVolume => Some(4.0),
        }
    }

    /// True for a device that is meant to be open on every core, so that no request to its blocks crosses. Of a file this
    /// depends on its file system.
    pub fn is_on_every_core(self) -> bool {
        matches!(self, DeviceKind::Null | DeviceKind::Memory)
    }
}

impl FromStr for DeviceKind {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<DeviceKind> {
        let found = DeviceKind::ALL.into_iter().find(|(_, known)| *known == name);
        let Some((kind, _)) = found else { bail!("'{name}' is no device here") };
        Ok(kind)
    }
}

/// Namespaces on several cores.
#[derive(Args, Clone)]
pub struct ScaleOptions {
    /// Numbers of cores of the target; the first one is the baseline [default: 1, 2, 4 and so on, up to half of the
    /// CPUs, at least up to 2].
    #[arg(long, value_delimiter = ',')]
    pub cores: Vec<NonZeroUsize>,
    /// Cores of the host, at most. They are on CPUs that the target does not use, and on all CPUs if there are no
    /// others [default: the CPUs that the most cores of the target leave].
    #[arg(long)]
    pub host_cores: Option<NonZeroUsize>,
    /// I/O queues, in turn for each namespace [default: as many as the target has cores]. A namespace has at least one.
    #[arg(long)]
    pub queues: Option<NonZeroUsize>,
    /// Namespaces, each a device of its own.
    #[arg(long, default_value = "1")]
    pub namespaces: NonZeroUsize,
    /// The devices: null, memory, file, volume, shards (a volume in shards; requests between its shards' cores are not
    /// counted as crossings), memory-volume.
    #[arg(long, value_delimiter = ',', default_value = "null,memory,file,volume")]
    pub devices: Vec<DeviceKind>,
    /// Shards of a volume in shards.
    #[arg(long, default_value_t = 4)]
    pub shards: u32,
    /// Bytes of all namespaces together.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Seconds of one turn of one number of cores.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Rounds, in each of which every number of cores has one turn.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// Only loads whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
    /// No network: the cores of the target send the requests to the devices themselves.
    #[arg(long)]
    pub in_process: bool,
    /// How long an idle core polls before it sleeps, in microseconds.
    #[arg(long, default_value_t = 50)]
    pub spin_us: u32,
    /// Directory of the files and volumes.
    #[arg(long, default_value = "/dev/shm")]
    pub dir: PathBuf,
}

/// Folder, size and duration, for NBD.
#[derive(Args, Clone)]
pub struct NbdOptions {
    /// Bytes of each device.
    #[arg(long, default_value = "256MiB")]
    pub size: ByteCount,
    /// Seconds of one turn of one server.
    #[arg(long, default_value_t = 1.0)]
    pub seconds: f64,
    /// Rounds, in each of which every server has one turn.
    #[arg(long, default_value_t = 5)]
    pub rounds: u32,
    /// Tags of our device: none, crc16, crc32c, crc64.
    #[arg(long, default_value = "none")]
    pub guard: Protection,
    /// Only loads whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
    /// CPU of the servers.
    #[arg(long, default_value_t = 1)]
    pub server_cpu: usize,
    /// CPU of the client.
    #[arg(long, default_value_t = 0)]
    pub client_cpu: usize,
    /// How long our server polls before it sleeps, in microseconds; in `sealblock serve` it is 50.
    #[arg(long, default_value_t = 50)]
    pub spin_us: u32,
}

/// A namespace of another target, the only one of its subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its subsystem.
    pub nqn: String,
}

impl FromStr for Peer {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Peer> {
        let Some((address, nqn)) = text.split_once('/') else { bail!("'{text}' is not ADDR:PORT/NQN") };
        Ok(Peer { address: address.parse().with_context(|| format!("'{address}'"))?, nqn: nqn.to_owned() })
    }
}

impl RemoteOptions {
    /// Length of a turn.
    pub fn turn(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Blocks of 4 KiB of each device.
    pub fn blocks(&self) -> u64 {
        self.size.get() >> BlockSize::B4096.shift()
    }
}

impl ScaleOptions {
    /// Length of a turn.
    pub fn turn(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Blocks of 4 KiB of each namespace.
    pub fn blocks(&self) -> u64 {
        (self.size.get() >> BlockSize::B4096.shift()) / self.namespaces.get() as u64
    }
}

impl MirrorSizeOptions {
    /// Length of a turn.
    pub fn turn(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

impl FileOptions {
    /// Length of a turn.
    pub fn turn(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Blocks of 4 KiB in each file.
    pub fn blocks(&self) -> u64 {
        self.size.get() >> BlockSize::B4096.shift()
    }
}
