//! What a benchmark may be told.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Parser, Subcommand};
use sealblock_integrity::{GuardKind, PiFormat, ProtectionType};
use sealblock_units::{BlockSize, ByteCount};

/// Holds one claim of the project against a yardstick measured in the same run.
#[derive(Parser)]
#[command(name = "sealblock-perf")]
pub struct Command {
    /// What is claimed.
    #[command(subcommand)]
    pub claim: Claim,
}

/// The claims.
#[derive(Subcommand)]
pub enum Claim {
    /// Checksums against crc-fast and memory.
    Guards,
    /// A protected volume against the same file without tags.
    Volume(FileOptions),
    /// Bytes written to the medium per byte of application data.
    Amplification(AmplificationOptions),
    /// Verify of a cached volume against plain reading and memory.
    Verify(FileOptions),
    /// Ways to lay out a volume, as patterns of real writes and syncs.
    Layouts(FileOptions),
}

/// Where, how large and how long, for benchmarks on files.
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
}

/// How many writes, for the benchmark that counts bytes.
#[derive(Args, Clone)]
pub struct AmplificationOptions {
    /// Application writes for each line.
    #[arg(long, default_value_t = 1 << 20)]
    pub writes: u64,
    /// Sizes of volumes.
    #[arg(long, value_delimiter = ',', default_value = "256MiB,1GiB,4GiB,16GiB,64GiB,256GiB")]
    pub sizes: Vec<ByteCount>,
    /// Memory for the tables of each volume; the volume's own default if left out.
    #[arg(long)]
    pub cache: Option<ByteCount>,
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

/// A guard kind in Type 1, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Protection(pub Option<PiFormat>);

impl Protection {
    /// What tables call it.
    pub fn name(self) -> &'static str {
        self.0.map_or("none", |format| format.guard().as_str())
    }
}

impl FromStr for Protection {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Protection> {
        let Some(kind) = GuardKind::ALL.into_iter().find(|kind| kind.as_str() == name) else {
            return if name == "none" { Ok(Protection(None)) } else { bail!("'{name}' is no guard") };
        };
        Ok(Protection(Some(PiFormat::with_default_storage_tag(kind, ProtectionType::Type1))))
    }
}
