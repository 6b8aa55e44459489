//! How long a volume takes to be served again after its server was killed, and how much memory serving it takes.
//!
//! The server is a process of its own, `sealblock serve` as built: nothing of this process is in its figures. An NBD client writes
//! 4 KiB at random and flushes, so the log and what waits for the tables are as full as that many writes leave them; then the server
//! is killed (SIGKILL), and started again. The time is from starting the process to the first block read, and beside it stand the
//! CPU time of the server, which does not grow where others have the CPUs, and a start after a close in good order, which has
//! nothing to recover.

use std::fs::read_to_string;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::load::Until;
use crate::nbd::client::{Client, Load};
use crate::options::RestartOptions;
use crate::remote::process_cpu;
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
        let mut server = Server::start(options, &volume.0)?.0;
        let mut client = Client::connect(server.address, "")?;
        client.drive(RANDOM_WRITES, Until::Asked(*writes), rng.u64(..))?;
        client.sync()?;
        let (_, in_use) = server.cost()?;
        server.kill(Signal::KILL)?;
        let (mut server, after_kill) = Server::start(options, &volume.0)?;
        let recovered = server.cost()?;
        server.kill(Signal::TERM)?;
        let (mut server, after_close) = Server::start(options, &volume.0)?;
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

/// A server that is ready.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    /// Starts it, and reads a block; how long that took.
    fn start(options: &RestartOptions, volume: &Path) -> Result<(Server, Duration)> {
        let begun = Instant::now();
        let mut child = Command::new(&options.binary)
            .arg("serve")
            .arg(volume)
            .args(["--json", "--control", "none", "--listen", "127.0.0.1:0", "--nbd", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", options.binary.display()))?;
        let mut line = String::new();
        let output = child.stdout.take().context("it was given a pipe")?;
        // What it says later goes nowhere; it takes no harm from that.
        let ready = BufReader::new(output).read_line(&mut line).map(|_| nbd_address(&line));
        let mut server = Server { child, address: (std::net::Ipv4Addr::LOCALHOST, 0).into() };
        server.address = ready?.with_context(|| format!("the server is not ready: it said '{}'", line.trim_end()))?;
        Client::connect(server.address, "")?.drive(ONE_READ, Until::Asked(1), 1)?;
        Ok((server, begun.elapsed()))
    }

    /// Seconds of CPU time that it has spent, and the most memory that it ever had, in MiB.
    fn cost(&self) -> Result<(f64, u64)> {
        let status = read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()).context("the kernel does not report VmHWM")?;
        Ok((process_cpu(self.child.id()), kib.parse::<u64>()? >> 10))
    }

    /// Ends it with this signal, and waits until it has ended.
    fn kill(&mut self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal)?;
        let status = self.child.wait()?;
        ensure!(signal == Signal::KILL || status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where NBD is served, of what a server says when it is ready.
fn nbd_address(ready: &str) -> Option<SocketAddr> {
    let (_, nbd) = ready.split_once("\"nbd\":{\"listeners\":[\"")?;
    nbd.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_nbd_is_found_and_no_other() {
        let ready =
            r#"{"event":"ready","listeners":["127.0.0.1:1"],"nbd":{"listeners":["127.0.0.1:2"],"exports":["v"]}}"#;
        assert_eq!(nbd_address(ready), Some(([127, 0, 0, 1], 2).into()));
        assert_eq!(nbd_address(r#"{"event":"ready","listeners":["127.0.0.1:1"],"nbd":null}"#), None);
    }
}
