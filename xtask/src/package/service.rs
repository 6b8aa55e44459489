//! The service of a unit, run as the service manager would run it, but as this user and in a folder: `ExecStart=` with
//! `NOTIFY_SOCKET`, `ExecReload=`, SIGTERM.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::root::Root;

/// How long to wait for a state.
const STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The running service. Dropping this kills it.
pub struct Service {
    child: Child,
    notify: UnixDatagram,
    output: BufReader<ChildStdout>,
    reload: Vec<String>,
}

impl Service {
    /// Starts it as the unit's text says, listening on a free port.
    pub fn start(unit: &str, root: &Root) -> Result<Service> {
        let socket = root.path("/tmp/notify");
        std::fs::remove_file(&socket).ok();
        let notify = UnixDatagram::bind(&socket).context("making the manager's socket")?;
        notify.set_read_timeout(Some(Duration::from_millis(100))).context("setting a timeout")?;
        let words = words(unit, "ExecStart", root)?;
        let (program, arguments) = words.split_first().context("ExecStart= is empty")?;
        let mut command = Command::new(program);
        command.args(arguments).args(["--listen", "127.0.0.1:0"]).current_dir("/");
        command.env("NOTIFY_SOCKET", &socket).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {program}"))?;
        let output = BufReader::new(child.stdout.take().context("standard output is a pipe")?);
        Ok(Service { child, notify, output, reload: words_of(unit, "ExecReload")? })
    }

    /// Waits for the next state that it reports to the manager, which must be this one.
    pub fn expect_state(&mut self, state: &str) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < STATE_TIMEOUT {
            let mut bytes = [0; 256];
            if let Ok(length) = self.notify.recv(&mut bytes) {
                let reported = String::from_utf8_lossy(&bytes[..length]).into_owned();
                if reported.lines().next() == Some(state) {
                    return Ok(());
                }
                bail!("the server reported '{reported}' to the service manager, not {state}");
            }
            if self.child.try_wait().context("asking after the server")?.is_some() {
                let mut errors = String::new();
                self.child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut errors));
                bail!("the server ended before {state}:\n{errors}");
            }
        }
        bail!("the server did not report {state} to the service manager within {STATE_TIMEOUT:?}")
    }

    /// Returns its output up to the line `ready`.
    pub fn output_until_ready(&mut self) -> Result<String> {
        let mut text = String::new();
        while !text.ends_with("\nready\n") {
            if self.output.read_line(&mut text).context("reading the server's output")? == 0 {
                bail!("the server ended:\n{text}");
            }
        }
        Ok(text)
    }

    /// Reloads it as the unit says.
    pub fn reload(&self) -> Result<()> {
        let pid = self.child.id().to_string();
        let words: Vec<&str> =
            self.reload.iter().map(|word| if word == "$MAINPID" { &pid } else { word.as_str() }).collect();
        let status =
            Command::new(words[0]).args(&words[1..]).status().with_context(|| format!("starting {}", words[0]))?;
        if status.success() { Ok(()) } else { bail!("{} failed ({status})", words.join(" ")) }
    }

    /// Stops it as the manager does. Returns what it wrote to standard error.
    pub fn stop(mut self) -> Result<String> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-s", "TERM", &pid]).status().context("starting kill")?;
        self.expect_state("STOPPING=1")?;
        let mut errors = String::new();
        self.child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut errors));
        let status = self.child.wait().context("waiting for the server")?;
        if !status.success() {
            bail!("the server ended badly ({status}):\n{errors}");
        }
        Ok(errors)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A service that has already ended cannot be killed, which is not an error here.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The words of a command in a unit.
fn words_of(unit: &str, key: &str) -> Result<Vec<String>> {
    let line = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let words: Vec<String> = line.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    if words.is_empty() { bail!("the unit has no {key}=") } else { Ok(words) }
}

/// The same, with paths replaced by those in the folder.
fn words(unit: &str, key: &str, root: &Root) -> Result<Vec<String>> {
    let place = |word: String| {
        let word = word.replace("%t", "/run");
        if word.starts_with('/') { root.path(&word).display().to_string() } else { word }
    };
    Ok(words_of(unit, key)?.into_iter().map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_units_are_found_and_put_below_the_folder() {
        let root = Root::new().unwrap();
        let unit = "[Service]\nExecStart=/usr/bin/a --b %t/c d\nExecReload=/bin/kill -HUP $MAINPID\n";
        let (a, c) = (root.path("/usr/bin/a").display().to_string(), root.path("/run/c").display().to_string());
        assert_eq!(words(unit, "ExecStart", &root).unwrap(), [&a, "--b", &c, "d"]);
        assert_eq!(words_of(unit, "ExecReload").unwrap(), ["/bin/kill", "-HUP", "$MAINPID"]);
        assert!(words_of(unit, "ExecStop").is_err());
    }
}
