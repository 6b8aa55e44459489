//! Btrfs filesystems that `mkfs.btrfs` and the kernel make, and their content through the kernel's own mount: the
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
//! filesystem in the kernel. A test without one of these prints it and passes; [`has_mounts`] tells whether all are
//! there, and then a test must not skip.

// From the bottom up: `content` and `manifest` do not depend on Btrfs, `programs` makes and mounts empty filesystems,
// the other modules fill them, and `sets` combines them.
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

/// True if `mkfs.btrfs` is installed; prints it if not.
pub fn has_mkfs() -> bool {
    let version = run("mkfs.btrfs", ["--version"]);
    version.as_ref().err().into_iter().for_each(|why| skip(why));
    version.is_ok()
}

/// Checks whether images can be made and mounted here, by trying it with the smallest one.
///
/// # Errors
/// The missing requirement.
pub fn has_mounts() -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let image = [folder.path().join("probe")];
    mkfs(&image, 128, &[])?;
    run("btrfs", ["--version"])?;
    Mount::new(&image, "noatime")?.unmount()
}
