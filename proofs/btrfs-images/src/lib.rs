//! Btrfs filesystems made by `mkfs.btrfs` and the kernel, with their content as the kernel's own mount shows it: the
//! reference for readers.
//!
//! ```no_run
//! use sealblock_proofs_btrfs_images::{sets, skip};
//!
//! let folder = tempfile::tempdir()?;
//! for recipe in sets::chosen() {
//!     match recipe.make(folder.path()) {
//!         Ok(made) => {
//!             // Read `made.images`, make a `Manifest` of what was read, and require that there is no difference:
//!             let found = made.manifest.clone();
//!             assert_eq!(made.manifest.difference(&found), Vec::<String>::new());
//!         }
//!         Err(why) => skip(&why),
//!     }
//! }
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Everything is made through system calls and programs, so this needs Linux, root, loop devices, `btrfs-progs` and the
//! filesystem in the kernel. If one of these is missing, a test prints it and passes; [`has_mounts`] checks whether all
//! are there, and then a test must not skip.

// Modules from the bottom up: `content` and `manifest` do not depend on Btrfs, `programs` makes and mounts empty
// filesystems, the other modules fill them, and `sets` combines everything.
pub mod activity;
pub mod changes;
pub mod content;
pub mod files;
pub mod handmade;
pub mod inodes;
pub mod items;
pub mod manifest;
pub mod programs;
pub mod scrub;
pub mod sets;
pub mod subvolumes;

use programs::{Mount, mkfs, run};

/// Prints what a test skips on this machine, and why.
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
}

/// Checks whether `mkfs.btrfs` is installed; prints a line if not.
pub fn has_mkfs() -> bool {
    let version = run("mkfs.btrfs", ["--version"]);
    version.as_ref().err().into_iter().for_each(|why| skip(why));
    version.is_ok()
}

/// Checks whether images can be made and mounted here, by making and mounting the smallest one.
///
/// # Errors
/// If something is missing; the error names it.
pub fn has_mounts() -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let image = [folder.path().join("probe")];
    mkfs(&image, 128, &[])?;
    run("btrfs", ["--version"])?;
    Mount::new(&image, "noatime")?.unmount()
}
