//! `sealblock` on this machine: volumes, and the server for the guests.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Time limit from the start of a server until it listens, and from the signal until it has exited.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The program under test, and a folder for its volumes and logs.
#[derive(Clone, Debug)]
pub struct Sealblock {
    /// The program.
    pub program: PathBuf,
    /// The folder.
    pub folder: PathBuf,
}

impl Sealblock {
    /// Runs a command until it exits.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&self, words: &[&str]) -> Result<Output> {
        let mut command = Command::new(&self.program);
        command.args(words).current_dir(&self.folder).stdin(Stdio::null());
        command.output().with_context(|| format!("starting {}", self.program.display()))
    }

    /// Runs a command that must succeed.
    ///
    /// # Errors
    /// If it fails.
    pub fn succeed(&self, words: &[&str]) -> Result<String> {
        let output = self.run(words)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            bail!("`sealblock {}` failed ({}): {}", words.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// If that fails.
    pub fn create(&self, name: &str, size: &str, options: &[&str]) -> Result<()> {
        self.succeed(&[&["create", name, "--size", size], options].concat()).map(drop)
    }

    /// Bytes that a volume's file occupies on this machine.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn allocated_bytes(&self, name: &str) -> Result<u64> {
        let file = File::open(self.folder.join(name)).with_context(|| format!("opening {name}"))?;
        file.sync_all().context("writing the volume's file back")?;
        let stat = rustix::fs::fstat(&file).context("reading the status of the volume's file")?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }

    /// The bytes of a volume's file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn content(&self, name: &str) -> Result<Vec<u8>> {
        fs::read(self.folder.join(name)).with_context(|| format!("reading {name}"))
    }

    /// Writes a configuration for servers, `serve.toml`.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn configure(&self, text: &str) -> Result<()> {
        fs::write(self.folder.join("serve.toml"), text).context("writing the configuration")
    }

    /// Serves the configuration.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn serve_configured(&self) -> Result<Server> {
        self.serve(&[], &["--config", "serve.toml"])
    }

    /// Serves volumes, each as a subsystem with its name.
    ///
    /// # Errors
    /// If the server does not start.
    pub fn serve(&self, volumes: &[&str], options: &[&str]) -> Result<Server> {
        let words = [&["serve"], volumes, options].concat();
        let mut server = Server {
            sealblock: self.clone(),
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            port: 0,
            nbd_port: 0,
            child: None,
            events: None,
        };
        server.start()?;
        Ok(server)
    }
}

/// A server. Dropping it kills it.
pub struct Server {
    sealblock: Sealblock,
    words: Vec<String>,
    /// Its port, on loopback.
    pub port: u16,
    /// Its port for NBD clients, on loopback; 0 if it has none.
    pub nbd_port: u16,
    child: Option<Child>,
    events: Option<Receiver<String>>,
}

impl Server {
    /// Starts the server: the first time on a port that the system chooses, later on the same port. The NBD port is
    /// different each time.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.sealblock.folder.join("serve.log"));
        let mut command = Command::new(&self.sealblock.program);
        command.args(&self.words).args(["--listen", &format!("127.0.0.1:{}", self.port), "--json"]);
        command.current_dir(&self.sealblock.folder).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(log.context("opening the server's log")?);
        let mut child = command.spawn().with_context(|| format!("starting {}", self.sealblock.program.display()))?;
        let output = child.stdout.take().context("the server has no standard output")?;
        self.child = Some(child);
        let (sender, lines) = channel();
        let copy = self.sealblock.folder.join("serve.out");
        thread::spawn(move || {
            let mut said = String::new();
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                said = said + &line + "\n";
                // The copy is for people; the test does not use it.
                let _ = fs::write(&copy, &said);
                let _ = sender.send(line);
            }
        });
        self.events = Some(lines);
        let ready = self.event(&["ready"])?;
        self.port = listening_port(&ready).context("the server does not say where it listens")?;
        self.nbd_port = listening_port(&ready["nbd"]).unwrap_or(0);
        Ok(())
    }

    /// Waits for an event of one of these names.
    fn event(&self, names: &[&str]) -> Result<Value> {
        let events = self.events.as_ref().context("the server was never started")?;
        let deadline = Instant::now() + SERVER_TIMEOUT;
        while let Ok(line) = events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            let event: Value = serde_json::from_str(&line).with_context(|| format!("reading the event {line}"))?;
            if event["event"].as_str().is_some_and(|name| names.contains(&name)) {
                return Ok(event);
            }
        }
        bail!("`sealblock {}` does not say {}; {}", self.words.join(" "), names.join(" or "), self.log())
    }

    /// Makes the server reload its configuration, which must succeed.
    ///
    /// # Errors
    /// If the server rejects it.
    pub fn reload(&mut self) -> Result<()> {
        self.signal(Signal::HUP)?;
        let event = self.event(&["reloaded", "reload_failed"])?;
        if event["event"] == "reload_failed" {
            bail!("the configuration was refused: {}", event["reason"]);
        }
        Ok(())
    }

    /// Makes the server reload its configuration, which it must reject; returns the reason.
    ///
    /// # Errors
    /// If the server accepts it.
    pub fn reload_refused(&mut self) -> Result<String> {
        self.signal(Signal::HUP)?;
        let event = self.event(&["reloaded", "reload_failed"])?;
        match event["reason"].as_str() {
            Some(reason) => Ok(reason.to_owned()),
            None => bail!("a configuration was taken that cannot be served"),
        }
    }

    /// The server's standard error.
    pub fn log(&self) -> String {
        let log = fs::read_to_string(self.sealblock.folder.join("serve.log")).unwrap_or_default();
        format!("its log: {}", log.trim())
    }

    /// Kills the server, as in a crash.
    ///
    /// # Errors
    /// If it has already ended.
    pub fn kill(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { bail!("there is no server to kill") };
        if let Some(status) = child.try_wait().context("looking at the server")? {
            bail!("the server has ended by itself ({status}); {}", self.log());
        }
        child.kill().context("killing the server")?;
        child.wait().context("waiting for the server").map(drop)
    }

    /// Stops the server, and waits until it has ended.
    ///
    /// # Errors
    /// If it has already ended, or exits with a status other than 0.
    pub fn stop(&mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        let Some(mut child) = self.child.take() else { bail!("there is no server to stop") };
        let deadline = Instant::now() + SERVER_TIMEOUT;
        while Instant::now() < deadline {
            match child.try_wait().context("waiting for the server")? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("the server ended with {status}; {}", self.log()),
                None => thread::sleep(Duration::from_millis(10)),
            }
        }
        self.child = Some(child);
        bail!("the server does not end on SIGTERM; {}", self.log())
    }

    /// Sends a signal to it.
    ///
    /// # Errors
    /// If the server is not running.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        let child = self.child.as_mut().context("there is no server")?;
        if let Some(status) = child.try_wait().context("looking at the server")? {
            bail!("the server has ended by itself ({status}); {}", self.log());
        }
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process has an identifier")?;
        kill_process(pid, signal).context("sending a signal")
    }

    /// The target name of a served volume, for commands of `sealblock`.
    pub fn target(&self, volume: &str) -> String {
        format!("nvme+tcp://127.0.0.1:{}/{}/1", self.port, nqn(volume))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // The process may have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The name of the subsystem of a volume.
pub fn nqn(volume: &str) -> String {
    let name = Path::new(volume).file_name().unwrap_or_default().to_string_lossy().into_owned();
    format!("nqn.2026-11.io.sealblock:{name}")
}

/// The port in the `ready` event of the server, or in its NBD event.
fn listening_port(event: &Value) -> Option<u16> {
    let address = event.get("listeners")?.get(0)?.as_str()?;
    address.rsplit_once(':')?.1.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_found_in_its_event_only() {
        let port = |text: &str| listening_port(&serde_json::from_str(text).unwrap());
        assert_eq!(port(r#"{"event":"ready","listeners":["127.0.0.1:4420"]}"#), Some(4420));
        assert_eq!(port(r#"{"event":"ready","listeners":["[::1]:99"]}"#), Some(99));
        for other in [r#""ready""#, r#"{"event":"stopped"}"#, r#"{"listeners":[]}"#, r#"{"listeners":["127.0.0.1:0"]}"#]
        {
            assert_eq!(port(other), None, "{other}");
        }
    }
}
