//! Guests: stock Linux kernels under QEMU, with everything they need made from packages.
//!
//! A guest is booted once and asked many times: a script goes in through a serial port, its output and exit status come back.
//! So the host side of a test can stop and start servers between two scripts, and a boot is paid once.
//!
//! Everything made stays in one folder below the target folder; nothing of the machine is changed.

mod cpio;
mod elf;
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

pub use guest::{Guest, GuestDied, Said};
pub use kernel::Kernel;
pub use programs::Programs;
pub use qemu::Qemu;

/// Something that the machine lacks and that cannot be fetched: a reason to leave the suite out, and to say so.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// The oldest kernel that is held to the suite, and the newest that is packaged, as suites of the package archive.
pub const KERNELS: [&str; 2] = ["bookworm", "sid"];

/// All that guests are made from.
pub struct Parts {
    /// The emulator.
    pub qemu: Qemu,
    /// The programs in every guest.
    pub programs: Programs,
    /// Kernels, the oldest first.
    pub kernels: Vec<Kernel>,
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
        let kernels: Result<Vec<Kernel>> =
            KERNELS.iter().map(|suite| Kernel::of(suite, home, &programs.folder)).collect();
        Ok(Parts { qemu, programs, kernels: kernels?, home: home.to_owned() })
    }

    /// Where the parts are.
    pub fn home(&self) -> &Path {
        &self.home
    }
}
