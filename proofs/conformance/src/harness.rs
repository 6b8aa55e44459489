//! Guests: stock Linux kernels under QEMU, with everything they need made from packages.
//!
//! A guest is booted once and runs many scripts: a script goes in through a serial port, its output and exit status come back.
//! So the host side of a test can stop and start servers between two scripts, and a boot is paid once.
//!
//! Everything made stays in one folder below the target folder; nothing of the machine is changed.

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

/// Kernels, the oldest first, as suites of the package archive: the oldest that is held to the suite, one between, and the newest that is
/// packaged. The number is how many processors the guest has that tests share: hosts with one queue and with several are held to the
/// suite, and emulating a second processor takes half as much time again.
pub const KERNELS: [(&str, u32); 3] = [("bookworm", 1), ("trixie", 1), ("sid", 2)];

/// Unpacks packages of the oldest suite into a folder, anew if something is there. Package lists are kept below `home`.
///
/// # Errors
/// [`Unavailable`] if they cannot be fetched.
pub fn unpack(packages: &[String], home: &Path, into: &Path) -> Result<()> {
    // Unpacked elsewhere first, so that what is there is whole.
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

/// All that guests are made from.
pub struct Parts {
    /// The emulator.
    pub qemu: Qemu,
    /// The programs in every guest.
    pub programs: Programs,
    /// Kernels, the oldest first.
    pub kernels: Vec<Kernel>,
    /// Kernels that could not be fetched, each with the reason.
    pub missing: Vec<String>,
    home: PathBuf,
}

impl Parts {
    /// Finds or makes everything, in the folder `home`. Another process that does so is waited for.
    ///
    /// # Errors
    /// [`Unavailable`] where the machine has no way to get what is missing.
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

    /// Where the parts are.
    pub fn home(&self) -> &Path {
        &self.home
    }
}

/// Those that are there, and what is said of those that could not be fetched.
///
/// # Errors
/// [`Unavailable`] if there is none, and whatever else went wrong with one.
fn available<T>(all: impl IntoIterator<Item = (&'static str, Result<T>)>) -> Result<(Vec<T>, Vec<String>)> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for (suite, kernel) in all {
        match kernel {
            Ok(kernel) => found.push(kernel),
            Err(error) if error.is::<Unavailable>() => {
                // One line, whatever a server says.
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
