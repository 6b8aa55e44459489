//! Btrfs filesystems that `mkfs.btrfs` and the kernel make, and what the kernel's own mount shows of them: what a reader is proven with.
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
//! Everything is made through system calls and programs, so this needs Linux, root, loop devices, `btrfs-progs` and the filesystem in the
//! kernel. A test that finds one of these absent says so and passes; a test that finds them all must not skip, which
//! [`has_mounts`] tells.

// From the bottom up: `content` and `manifest` know nothing of Btrfs, `programs` makes and mounts it empty, and what fills it
// is put together in `sets`.
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

/// Says what a test leaves out on this machine, and why.
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
}

/// True if `mkfs.btrfs` is installed; says so if it is not.
pub fn has_mkfs() -> bool {
    let version = run("mkfs.btrfs", ["--version"]);
    version.as_ref().err().into_iter().for_each(|why| skip(why));
    version.is_ok()
}

/// Whether images can be made and mounted here, found by doing it with the smallest one.
///
/// # Errors
/// What is absent.
pub fn has_mounts() -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let image = [folder.path().join("probe")];
    mkfs(&image, 128, &[])?;
    run("btrfs", ["--version"])?;
    Mount::new(&image, "noatime")?.unmount()
}
