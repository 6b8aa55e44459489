//! The kernel's Btrfs on a loop device, with the same filesystem and the same load.

use std::fs::{self, File};
use std::path::PathBuf;
use std::rc::Rc;

use anyhow::{Context, bail, ensure};
use rustix::process::geteuid;
use sealblock_block::DynDevice;
use sealblock_media_file::{FileMedium, Options as FileOptions, RawDevice};
use sealblock_units::BlockSize;

use super::load::{Target, TurnLoad};
use super::modes::{Mode, Options, Point};
use super::scratch::{FILE, Ground, image_file, kernel_dir};
use crate::meter::{Meter, Turn};
use crate::mounts::{Mount, Server};
use crate::programs::Loop;
use crate::setup;

/// The longest interval between commits of which the kernel does not warn, and longer than a turn should take.
const COMMIT_OPTION: &str = "commit=300";

/// Why the kernel cannot be measured here.
///
/// # Errors
/// What is missing.
pub fn check() -> anyhow::Result<()> {
    ensure!(geteuid().is_root(), "mounting needs root");
    let known = fs::read_to_string("/proc/filesystems").context("reading /proc/filesystems")?;
    ensure!(known.lines().any(|line| line.trim() == "btrfs"), "this kernel has no Btrfs, or has not loaded it");
    Ok(())
}

/// A folder that is removed on drop, if nothing is mounted there.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // If it is still mounted, it is left for the user.
        let _ = fs::remove_dir(&self.0);
    }
}

fn mount_options(mode: Mode) -> anyhow::Result<String> {
    let more = match mode {
        Mode::KernelCsum => "",
        Mode::KernelNodatasum => ",nodatasum",
        Mode::KernelNodatacow => ",nodatacow",
        _ => bail!("{} is no mode of the kernel", mode.name()),
    };
    Ok(format!("noatime,nodiscard,{COMMIT_OPTION}{more}"))
}

/// A turn of a mode of the kernel.
pub async fn turn(
    mode: Mode,
    (point, options): (&Point, &Options),
    ground: Ground<'_>,
    seed: u64,
    check: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Turn> {
    let dir = kernel_dir(&ground);
    let image = setup::new_path(&dir, mode.name())?;
    image_file(&image.0, ground, point.metadata).await?;
    let device = Loop::new(&image.0).context("losetup makes no loop device here")?;
    let point_dir = Folder(dir.join(format!("sealblock-perf-{}-mount", std::process::id())));
    fs::create_dir_all(&point_dir.0).with_context(|| format!("making {}", point_dir.0.display()))?;
    let mount = Mount::new(Server::Kernel, &device.0, &point_dir.0, &mount_options(mode)?)?;
    let measured = measure(&device, &mount, (point, options), seed, check).await;
    mount.end()?;
    measured
}

async fn measure(
    device: &Loop,
    mount: &Mount,
    (point, options): (&Point, &Options),
    seed: u64,
    check: &dyn Fn() -> anyhow::Result<()>,
) -> anyhow::Result<Turn> {
    let path = mount.point().join(FILE);
    let target = if options.is_buffered {
        Target::Buffered(Rc::new(File::create(&path)?))
    } else {
        let medium = FileMedium::open(&path, FileOptions::CREATE)?;
        ensure!(medium.is_direct(), "the kernel's Btrfs has no direct I/O here");
        medium.set_len_bytes(point.size.get())?;
        let raw = RawDevice::new(medium, BlockSize::B4096)?;
        Target::Direct(Rc::new(DynDevice::new("mounted file", raw)), Rc::new(File::open(&path)?))
    };
    let load = TurnLoad::new(target, point, options, seed, check);
    load.prepare().await?;
    let meter = Meter::start(Some(&device.0), None)?;
    let requests = load.run().await?;
    meter.stop(requests, None)
}
