//! The context of a test: a guest on one side, `sealblock` on the other.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::harness::{Drive, Extras, Guest, Kernel, Parts, ScriptOutput};
use crate::served::{Sealblock, Server};

/// Time limit of a script. Emulated machines are slow, and so are machines of continuous integration.
pub const LIMIT: Duration = Duration::from_secs(150);

/// Kernel messages about the kernel's own faults, about hung tasks, and about unexpected effects of commands.
const COMPLAINTS: &str = "WARNING:|BUG:|Oops|Call Trace|blocked for more than|unusual effects";

/// Both sides of a test.
pub struct TestContext<'a> {
    /// The host, with its own kernel.
    pub guest: &'a mut Guest,
    /// Volumes and servers, in a folder of the test.
    pub sealblock: Sealblock,
    /// Major and minor version of the guest's kernel.
    pub version: (u32, u32),
    /// The number of kills in tests that kill a server again and again.
    pub kills: u32,
}

/// The context of a test that boots its own guest, which contains a `sealblock`.
pub struct OwnGuestContext<'a> {
    /// The parts from which the guest is made.
    pub parts: &'a Parts,
    /// Its kernel.
    pub kernel: &'a Kernel,
    /// Volumes and servers on this machine, in a folder of the test.
    pub sealblock: Sealblock,
    /// Major and minor version of the kernel.
    pub version: (u32, u32),
}

impl OwnGuestContext<'_> {
    /// The guest's folder.
    pub fn guest_folder(&self) -> PathBuf {
        self.sealblock.folder.join("guest")
    }

    /// Boots the guest, with these drives and this number of processors.
    ///
    /// # Errors
    /// If it does not start.
    pub fn boot(&self, drives: Vec<Drive>, processors: u32) -> Result<Guest> {
        let extras = Extras { processors, drives, programs: vec![("sealblock", self.sealblock.program.clone())] };
        Guest::boot_with(self.parts, self.kernel, &self.guest_folder(), &extras)
    }
}

impl TestContext<'_> {
    /// Runs a script in the guest, with `PORT` and `NBD_PORT` set to the server's ports. Returns its output.
    ///
    /// # Errors
    /// If its status is not 0; the error has its output and the kernel's last messages.
    pub fn sh(&mut self, server: &Server, script: &str) -> Result<String> {
        let said = self.said(server, script)?;
        if said.status != 0 {
            let messages = self.guest.run("dmesg | tail -n 25", LIMIT).map(|said| said.output).unwrap_or_default();
            bail!(
                "the guest's script ended with status {}:\n{}\n{}\nthe guest's kernel said last:\n{}\nthe server's {}",
                said.status,
                said.output.trim_end(),
                said.errors.trim_end(),
                messages.trim_end(),
                server.log()
            );
        }
        Ok(said.output)
    }

    /// The same for a script that may fail; returns its status as well.
    ///
    /// # Errors
    /// If the guest dies.
    pub fn said(&mut self, server: &Server, script: &str) -> Result<ScriptOutput> {
        self.guest.run(&format!("PORT={}\nNBD_PORT={}\nset -e\n{script}", server.port, server.nbd_port), LIMIT)
    }
}

/// Fails unless two values are equal.
///
/// # Errors
/// If they differ; the error has both values.
pub fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, wanted: &T) -> Result<()> {
    if got != wanted {
        bail!("{what}: got {got:?}, wanted {wanted:?}");
    }
    Ok(())
}

/// Runs a script in a guest with its own sealblock. Returns its output.
///
/// # Errors
/// If its status is not 0; the error has its output and the kernel's last messages.
pub fn succeed(guest: &mut Guest, script: &str) -> Result<String> {
    let said = guest.run(script, LIMIT)?;
    if said.status != 0 {
        let messages = guest.run("dmesg | tail -n 25", LIMIT).map(|said| said.output).unwrap_or_default();
        bail!(
            "the script ended with status {}:\n{}\n{}\nthe kernel said last:\n{}",
            said.status,
            said.output.trim_end(),
            said.errors.trim_end(),
            messages.trim_end()
        );
    }
    Ok(said.output)
}

/// Fails if the guest's kernel reports a fault of its own or of the target; no test causes one on purpose.
///
/// # Errors
/// If there is one; the error has the kernel's message.
pub fn quiet(guest: &mut Guest) -> Result<()> {
    let said = guest.run(&format!("dmesg | grep -E '{COMPLAINTS}'"), Duration::from_secs(60))?;
    if said.status != 1 {
        bail!("the guest's kernel complains:\n{}", said.output.trim_end());
    }
    Ok(())
}
