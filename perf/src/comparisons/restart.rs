//! The time until a volume is served again after its server was killed, and the memory of the server.
//!
//! The server is `sealblock serve` as built, in its own process, so the figures contain nothing of this process. An NBD
//! client writes 4 KiB at random and flushes, so that the log and the entries for the tables are as full as after that
//! number of writes. Then the server is killed (SIGKILL) and started again. The time is from the start of the process
//! until the first block has been read. Two more figures are printed: the server's CPU time, which does not grow when
//! other processes use the CPUs, and the time of a start after a close, which needs no recovery.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::process::Signal;

use super::nbd::client::{Client, Load};
use super::options::RestartOptions;
use super::server::Server;
use crate::load::Until;
use crate::setup::new_path;

const RANDOM_WRITES: Load = Load { name: "", write: true, bytes: 4096, is_random: true, depth: 32 };
const ONE_READ: Load = Load { name: "", write: false, bytes: 4096, is_random: true, depth: 1 };
/// Measures everything and prints it.
pub fn run(options: &RestartOptions) -> Result<()> {
    let volume = new_path(&options.dir, "restart")?;
    create(options, &volume.0)?;
    println!("{} GiB; memory is the most that the server ever had (VmHWM), in MiB", options.size.get() >> 30);
    println!(
        "{:>9} {:>9} | {:>9} | {:>9} {:>7} {:>7} | {:>9} {:>7} {:>7}",
        "writes", "file, MiB", "memory", "killed, s", "CPU, s", "memory", "closed, s", "CPU, s", "memory"
    );
    let (mut rng, mut written) = (Rng::with_seed(0), 0);
    for writes in &options.writes {
        written += writes;
        let mut server = start(options, &volume.0)?.0;
        let mut client = Client::connect(server.nbd()?, "")?;
        client.drive(RANDOM_WRITES, Until::Asked(*writes), rng.u64(..))?;
        client.sync()?;
        let (_, in_use) = server.cost()?;
        server.kill(Signal::KILL)?;
        let (mut server, after_kill) = start(options, &volume.0)?;
        let recovered = server.cost()?;
        server.kill(Signal::TERM)?;
        let (mut server, after_close) = start(options, &volume.0)?;
        let closed = server.cost()?;
        server.kill(Signal::TERM)?;
        println!(
            "{written:>9} {:>9} | {in_use:>9} | {:>9.3} {:>7.2} {:>7} | {:>9.3} {:>7.2} {:>7}",
            std::fs::metadata(&volume.0)?.blocks() >> 11,
            after_kill.as_secs_f64(),
            recovered.0,
            recovered.1,
            after_close.as_secs_f64(),
            closed.0,
            closed.1,
        );
    }
    Ok(())
}

fn create(options: &RestartOptions, volume: &Path) -> Result<()> {
    let mut create = Command::new(&options.binary);
    create.arg("create").arg(volume).args(["--size", &options.size.get().to_string()]).stdout(Stdio::null());
    let made = create.status().with_context(|| format!("starting {}", options.binary.display()))?;
    ensure!(made.success(), "the volume was not made");
    Ok(())
}

/// Starts a server for the volume and reads a block; returns the duration.
fn start(options: &RestartOptions, volume: &Path) -> Result<(Server, Duration)> {
    let (begun, volume) = (Instant::now(), volume.to_str().context("the folder's name is no text")?);
    let server = Server::start(&options.binary, &["--nbd", "127.0.0.1:0", volume])?;
    Client::connect(server.nbd()?, "")?.drive(ONE_READ, Until::Asked(1), 1)?;
    Ok((server, begun.elapsed()))
}
