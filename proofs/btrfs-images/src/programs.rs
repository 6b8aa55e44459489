//! Programs of the system, filesystems in sparse files, loop devices over these, and mounts; dropping them undoes each.
//!
//! A missing requirement is an error here; tests print it with [`crate::skip`]. Images need root, loop devices,
//! `mkfs.btrfs`, `btrfs` and the filesystem in the kernel.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Runs a program and returns its standard output; an error contains the program's messages.
///
/// # Errors
/// If the program cannot be started, or ends with a status other than 0.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = S>) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("{program}: {}", String::from_utf8_lossy(&said).trim()))
}

/// Makes a sparse file.
///
/// # Errors
/// If it cannot be made.
pub fn sparse(image: &Path, mebibytes: u64) -> Result<(), String> {
    let made = File::create(image).and_then(|file| file.set_len(mebibytes << 20));
    made.map_err(|error| format!("{}: {error}", image.display()))
}

/// Makes a filesystem on sparse files of this size, one for each device.
///
/// # Errors
/// If files or loop devices cannot be made, or if `mkfs.btrfs` fails, for instance because of an unknown option.
pub fn mkfs(images: &[PathBuf], mebibytes: u64, options: &[&str]) -> Result<(), String> {
    images.iter().try_for_each(|image| sparse(image, mebibytes))?;
    let arguments = ["-q", "-f", "-K", "-L", "a label"].iter().chain(options).map(OsStr::new);
    // With one device, `mkfs.btrfs` works on the file itself, without a block device and so without root.
    if let [image] = images {
        return run("mkfs.btrfs", arguments.chain([image.as_os_str()])).map(drop);
    }
    let loops = Loops::attach(images, false)?;
    run("mkfs.btrfs", arguments.chain(loops.devices.iter().map(OsStr::new))).map(drop)
}

/// Loop devices over images; detached when dropped.
pub struct Loops {
    devices: Vec<String>,
}

impl Loops {
    /// Attaches a loop device to each image. Later writes to an image are visible on its device, as long as nothing is
    /// mounted.
    ///
    /// # Errors
    /// If `losetup` fails; the error has its message.
    pub fn attach(images: &[PathBuf], read_only: bool) -> Result<Loops, String> {
        let mut loops = Loops { devices: Vec::new() };
        for image in images {
            let access = if read_only { &["-r"][..] } else { &[] };
            let arguments = access.iter().chain(&["-f", "--show"]).map(OsStr::new).chain([image.as_os_str()]);
            loops.devices.push(run("losetup", arguments)?);
        }
        Ok(loops)
    }

    /// The paths of the devices, in the order of the images.
    pub fn devices(&self) -> &[String] {
        &self.devices
    }

    /// Registers the devices of one filesystem with the kernel.
    fn scan(&self) -> Result<(), String> {
        run("btrfs", ["device", "scan"].into_iter().chain(self.devices.iter().map(String::as_str))).map(drop)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for device in &self.devices {
            // Otherwise the kernel would keep its record of a device whose name may be reused. An error is ignored: the
            // kernel has no record of a device that was never scanned or mounted.
            let _ = run("btrfs", ["device", "scan", "--forget", device]);
            if let Err(why) = run("losetup", ["-d", device]) {
                eprintln!("{device} stays: {why}");
            }
        }
    }
}

/// A mounted filesystem. Dropping it unmounts, which writes all data.
pub struct Mount {
    point: PathBuf,
    is_mounted: bool,
    /// Where the kernel describes the filesystem while it is mounted anywhere.
    active: PathBuf,
    /// Detached after the unmount, because fields are dropped after the struct itself; `None` if the devices stay
    /// attached.
    _loops: Option<Loops>,
}

impl Mount {
    /// Mounts the filesystem on these devices for writing, on a new folder beside the first image.
    ///
    /// # Errors
    /// If there is no image, or a program fails; the error has its message.
    pub fn new(images: &[PathBuf], options: &str) -> Result<Mount, String> {
        // Nothing here must survive a crash of the machine, so writes need no barriers. Discard is off, so that unused
        // blocks keep their old content: a reader must not mistake it for current data.
        Mount::of(images, &format!("nobarrier,nodiscard,{options}"), false)
    }

    /// Mounts read-only, from read-only devices, at the last commit: the log is not replayed. `subvolume` is an id; 5
    /// is the top one, and `None` is the default subvolume.
    ///
    /// # Errors
    /// As for [`Mount::new`].
    pub fn read_only(images: &[PathBuf], subvolume: Option<u64>) -> Result<Mount, String> {
        let subvolume = subvolume.map_or(String::new(), |id| format!(",subvolid={id}"));
        Mount::of(images, &format!("ro,rescue=nologreplay{subvolume}"), true)
    }

    /// Mounts the filesystem on attached devices, which stay attached, on an existing folder. The options list the
    /// devices of the filesystem for the kernel.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn on(loops: &Loops, point: &Path, options: &str) -> Result<Mount, String> {
        let (first, others) = loops.devices.split_first().ok_or("no device to mount")?;
        let others: String = others.iter().map(|device| format!(",device={device}")).collect();
        let options = format!("{options}{others}");
        let active = Path::new("/sys/fs/btrfs").join(run("blkid", ["-p", "-o", "value", "-s", "UUID", first])?);
        let arguments = ["-t", "btrfs", "-o", &options, first].map(OsStr::new);
        run("mount", arguments.into_iter().chain([point.as_os_str()]))?;
        Ok(Mount { point: point.to_owned(), is_mounted: true, active, _loops: None })
    }

    fn of(images: &[PathBuf], options: &str, read_only: bool) -> Result<Mount, String> {
        let first = images.first().ok_or("no image to mount")?;
        let point = first.with_extension("mount");
        fs::create_dir_all(&point).map_err(|error| format!("{}: {error}", point.display()))?;
        let loops = Loops::attach(images, read_only)?;
        if loops.devices.len() > 1 {
            loops.scan()?;
        }
        let mut mount = Mount::on(&loops, &point, options)?;
        mount._loops = Some(loops);
        Ok(mount)
    }

    /// The path of an entry; for an empty name, the mount point.
    pub fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.point.clone() } else { self.point.join(name) }
    }

    /// Makes the kernel commit all writes.
    ///
    /// # Errors
    /// If the kernel cannot.
    pub fn sync(&self) -> Result<(), String> {
        run("sync", ["-f".as_ref(), self.point.as_os_str()]).map(drop)
    }

    /// Unmounts it, and waits until all data are written. A process that has just been given mounts of its own has a copy of
    /// this one, and the last of them writes.
    ///
    /// # Errors
    /// If it is in use, or cannot be written.
    pub fn unmount(mut self) -> Result<(), String> {
        unmount(&self.point)?;
        self.is_mounted = false;
        let begun = Instant::now();
        while self.active.exists() {
            if begun.elapsed() > OTHER_MOUNTS {
                return Err(format!("{}: still there after the unmount", self.active.display()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// Longer than a process with mounts of its own runs in any test.
const OTHER_MOUNTS: Duration = Duration::from_secs(300);

/// Unmounts a folder. A child process that another thread is just starting has copies of all open files of this process
/// until it executes its program, even of files that are closed here meanwhile. So a busy mount is retried for a while.
fn unmount(point: &Path) -> Result<(), String> {
    const TRIES: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(100);
    let mut tries = 0;
    loop {
        tries += 1;
        match run("umount", [point]) {
            Err(why) if tries < TRIES && why.contains("busy") => thread::sleep(PAUSE),
            unmounted => return unmounted.map(drop),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted
            && let Err(why) = unmount(&self.point)
        {
            eprintln!("{} stays mounted: {why}", self.point.display());
        }
    }
}

/// Copies images in use; the copy is in the state after a crash.
///
/// # Errors
/// If `cp` fails.
pub fn copy_images(images: &[PathBuf], extension: &str) -> Result<Vec<PathBuf>, String> {
    let copy = |image: &PathBuf| {
        let copy = image.with_extension(extension);
        run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]).map(|_| copy)
    };
    images.iter().map(copy).collect()
}
