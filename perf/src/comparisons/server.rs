//! `sealblock serve` in its own process, so the figures contain nothing of this process.

use std::fs::read_to_string;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// The text before the first address of each protocol in the server's ready message.
const NVME: &str = "\"listeners\":[\"";
const NBD: &str = "\"nbd\":{\"listeners\":[\"";

/// A server that accepts connections. Dropping it kills it.
pub struct Server {
    child: Child,
    /// Its ready message.
    ready: String,
}

impl Server {
    /// Starts `program serve` with these additional arguments, and waits until it is ready.
    pub fn start(program: &Path, arguments: &[&str]) -> Result<Server> {
        let mut child = Command::new(program)
            .arg("serve")
            .args(["--json", "--control", "none", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let output = child.stdout.take().context("it was given a pipe")?;
        let mut server = Server { child, ready: String::new() };
        // Later output fails, which does not affect the server.
        BufReader::new(output).read_line(&mut server.ready)?;
        Ok(server)
    }

    /// Its address for NVMe/TCP.
    pub fn nvme(&self) -> Result<SocketAddr> {
        self.listener(NVME)
    }

    /// Its address for NBD.
    pub fn nbd(&self) -> Result<SocketAddr> {
        self.listener(NBD)
    }

    fn listener(&self, before: &str) -> Result<SocketAddr> {
        listener(&self.ready, before)
            .with_context(|| format!("the server is not ready: it said '{}'", self.ready.trim_end()))
    }

    /// Its CPU seconds so far, and its peak memory, in MiB.
    pub fn cost(&self) -> Result<(f64, u64)> {
        let kib = self.number("status", "VmHWM:")?;
        Ok((process_cpu(self.child.id()), kib >> 10))
    }

    /// Bytes that it caused the kernel to write to disks. None if its files are in memory.
    pub fn written_bytes(&self) -> Result<u64> {
        self.number("io", "write_bytes:")
    }

    /// The kernel's value of this name for the process.
    fn number(&self, file: &str, name: &str) -> Result<u64> {
        let text = read_to_string(format!("/proc/{}/{file}", self.child.id()))?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
        Ok(value.with_context(|| format!("the kernel does not report {name}"))?.parse()?)
    }

    /// Ends it with this signal, and waits until it has ended.
    pub fn kill(&mut self, signal: Signal) -> Result<()> {
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

/// The address after `before`.
fn listener(ready: &str, before: &str) -> Option<SocketAddr> {
    let (_, rest) = ready.split_once(before)?;
    rest.split('"').next()?.parse().ok()
}

/// Seconds that the threads of a process have spent on CPUs.
pub fn process_cpu(pid: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_task = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<f64>().ok()
    };
    tasks.filter_map(of_task).sum::<f64>() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_found_and_no_other() {
        let ready =
            r#"{"event":"ready","listeners":["127.0.0.1:1"],"nbd":{"listeners":["127.0.0.1:2"],"exports":["v"]}}"#;
        assert_eq!(listener(ready, NVME), Some(([127, 0, 0, 1], 1).into()));
        assert_eq!(listener(ready, NBD), Some(([127, 0, 0, 1], 2).into()));
        assert_eq!(listener(r#"{"event":"ready","listeners":["127.0.0.1:1"],"nbd":null}"#, NBD), None);
    }
}
