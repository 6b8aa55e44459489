//! Guests: stock Linux kernels under QEMU, made from packages with everything they need.
//!
//! A guest boots once and runs many scripts: a script is sent through a serial port, and its output and exit status are
//! returned. So a test can stop and start servers on this machine between two scripts, without another boot.
//!
//! Everything that is made goes to one folder below the target folder; nothing else on the machine is changed.

mod cpio;
mod guest;
mod kernel;
mod packages;
mod parts;
mod programs;
mod qemu;
pub mod wire;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use guest::{Extras, Guest, GuestDied, ScriptOutput, longest_script};
pub use kernel::Kernel;
pub use packages::Unavailable;
pub use programs::Programs;
pub use qemu::{Drive, Qemu};

/// Kernels, the oldest first, as suites of the package archive: the oldest supported one, one in between, and the
/// newest packaged one. The number is the processors of the shared guest, so that hosts with one queue and with several
/// are tested; emulating a second processor takes 50 % more time.
pub const KERNELS: [(&str, u32); 3] = [("bookworm", 1), ("trixie", 1), ("sid", 2)];

/// Unpacks packages of the oldest suite into a folder, which is replaced if it exists. Package lists are kept below
/// `home`.
///
/// # Errors
/// [`Unavailable`] if they cannot be fetched.
pub fn unpack(packages: &[String], home: &Path, into: &Path) -> Result<()> {
    // Unpacked in another place first, so that an existing folder is always complete.
    let partial = into.with_extension("partial");
    for folder in [&partial, into] {
        fs::remove_dir_all(folder).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error).with_context(|| format!("removing {}", folder.display())),
        })?;
    }
    packages::Suite::open(KERNELS[0].0, home)?.unpack(packages, &partial)?;
    fs::rename(&partial, into).with_context(|| format!("making {}", into.display()))
}

/// The parts from which guests are made.
pub struct Parts {
    /// The emulator.
    pub qemu: Qemu,
    /// The programs in every guest.
    pub programs: Programs,
    /// Kernels, the oldest first.
    pub kernels: Vec<Kernel>,
    /// Kernels that could not be fetched, with the reasons.
    pub missing: Vec<String>,
    home: PathBuf,
}

impl Parts {
    /// Finds or makes all parts, in the folder `home`. Waits for another process that does the same.
    ///
    /// # Errors
    /// [`Unavailable`] if the machine cannot fetch missing parts.
    pub fn prepare(home: &Path) -> Result<Parts> {
        if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
            anyhow::bail!(Unavailable("guests are made for Linux on x86-64 only".to_owned()));
        }
        fs::create_dir_all(home).with_context(|| format!("making {}", home.display()))?;
        let lock = fs::File::create(home.join("lock")).context("making the lock file")?;
        lock.lock().context("waiting for the lock file")?;
        let qemu = Qemu::find(home)?;
        let programs = Programs::prepare(home)?;
        let kernels = KERNELS.map(|(suite, processors)| (suite, Kernel::of(suite, processors, home, &programs.folder)));
        let (kernels, missing) = available(kernels)?;
        Ok(Parts { qemu, programs, kernels, missing, home: home.to_owned() })
    }

    /// The folder of the parts.
    pub fn home(&self) -> &Path {
        &self.home
    }
}

/// The available kernels, and the reasons why others are not.
///
/// # Errors
/// [`Unavailable`] if none is available, and any other error.
fn available<T>(all: impl IntoIterator<Item = (&'static str, Result<T>)>) -> Result<(Vec<T>, Vec<String>)> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for (suite, kernel) in all {
        match kernel {
            Ok(kernel) => found.push(kernel),
            Err(error) if error.is::<Unavailable>() => {
                // Joins the server's message to one line.
                let why: Vec<String> = error.to_string().lines().map(|line| line.trim().to_owned()).collect();
                missing.push(format!("the kernel of {suite} ({})", why.join("; ")));
            }
            Err(error) => return Err(error.context(format!("the kernel of {suite}"))),
        }
    }
    if found.is_empty() {
        anyhow::bail!(Unavailable(missing.join(", ")));
    }
    Ok((found, missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_cannot_be_fetched_is_named_and_the_others_are_not_left_out() {
        let absent = || Err(Unavailable("no server:\n x".to_owned()).into());
        let (found, missing) = available([("old", Ok(1)), ("middle", absent()), ("new", Ok(3))]).unwrap();
        assert_eq!((found, missing), (vec![1, 3], vec!["the kernel of middle (no server:; x)".to_owned()]));
        let none = available::<u8>([("old", absent()), ("new", absent())]).unwrap_err();
        assert!(none.is::<Unavailable>() && none.to_string().contains("old") && none.to_string().contains("new"));
        let broken = available([("old", Ok(1)), ("new", Err(anyhow::anyhow!("it has no modules")))]).unwrap_err();
        assert!(!broken.is::<Unavailable>(), "what is broken is not left out");
    }
}
