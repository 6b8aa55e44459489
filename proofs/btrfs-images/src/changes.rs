//! Changes of a whole filesystem: an interrupted balance, another identity, other devices, a conversion from another
//! filesystem, and a seed device.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::content::noise;
use crate::items::fill_folder;
use crate::programs::{Loops, Mount, run, sparse};

/// Bytes of data that a balance moves: several chunks in a small filesystem.
const BALANCED_BYTES: usize = 120 << 20;
/// The number of attempts to interrupt it.
const TRIES: usize = 20;
/// The pause between two checks whether a balance has begun.
const PAUSE: Duration = Duration::from_millis(2);
/// The maximum number of checks until a balance has begun.
const MOST_LOOKS: u32 = 1000;

fn plain<T>(result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

/// The program's dump of a tree of an image.
fn dump(image: &Path, tree: &str) -> Result<String, String> {
    let command = ["inspect-internal", "dump-tree", "-t", tree].map(OsStr::new);
    run("btrfs", command.into_iter().chain([image.as_os_str()]))
}

/// Begins to convert the data of an image to chunks of another profile, pauses the balance and unmounts.
///
/// The filesystem then has chunks of both profiles, and a balance that continues at the next writable mount. The kernel
/// pauses only between two chunks, so this is tried several times, in both directions. Returns false if the balance was
/// complete each time.
///
/// # Errors
/// If a program fails.
pub fn pause_balance(images: &[PathBuf]) -> Result<bool, String> {
    let mount = Mount::new(images, "noatime")?;
    plain(fs::write(mount.path("balanced"), noise(BALANCED_BYTES, 40)))?;
    mount.sync()?;
    mount.unmount()?;
    for profile in ["dup", "single"].iter().cycle().take(TRIES) {
        let mount = Mount::new(images, "noatime")?;
        let arguments =
            ["balance", "start", "-f", &format!("-dconvert={profile}")].map(OsStr::new).map(ToOwned::to_owned);
        let mut balance = Command::new("btrfs");
        balance.args(arguments).arg(mount.path("")).stdout(Stdio::null()).stderr(Stdio::null());
        let mut balance = plain(balance.spawn())?;
        let is_running = || {
            // The status is 1 while a balance exists.
            run("btrfs", ["balance".as_ref(), "status".as_ref(), mount.path("").as_os_str()])
                .is_err_and(|said| said.contains("is running"))
        };
        let has_begun = (0..MOST_LOOKS).any(|_| {
            let is_running = is_running();
            sleep(if is_running { Duration::ZERO } else { PAUSE });
            is_running || balance.try_wait().is_ok_and(|ended| ended.is_some())
        });
        if has_begun {
            // The balance may have completed already.
            let _ = run("btrfs", ["balance".as_ref(), "pause".as_ref(), mount.path("").as_os_str()]);
        }
        plain(balance.wait())?;
        mount.unmount()?;
        if is_balance_paused(&images[0])? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if an image has an incomplete balance, and chunks of two profiles for data.
///
/// # Errors
/// If the program fails.
pub fn is_balance_paused(image: &Path) -> Result<bool, String> {
    let chunks = dump(image, "chunk")?;
    let has_both = ["type DATA|DUP", "type DATA|single"].iter().all(|kind| chunks.contains(kind));
    Ok(has_both && dump(image, "root")?.contains("(BALANCE TEMPORARY_ITEM 0)"))
}

/// Gives an image another UUID, while its nodes keep the old one.
///
/// # Errors
/// If the program fails.
pub fn change_uuid(image: &Path) -> Result<(), String> {
    run("btrfstune", ["-f".as_ref(), "-m".as_ref(), image.as_os_str()]).map(drop)
}

/// Makes a seed of an image: a read-only filesystem, and the base of others.
///
/// # Errors
/// If the program fails.
pub fn make_seed(image: &Path) -> Result<(), String> {
    run("btrfstune", ["-f".as_ref(), "-S".as_ref(), "1".as_ref(), image.as_os_str()]).map(drop)
}

/// Adds a device to a seed, which makes another filesystem on both devices, with a file of its own.
///
/// # Errors
/// If a program fails.
pub fn grow(seed: &Path, added: &Path, mebibytes: u64) -> Result<(), String> {
    sparse(added, mebibytes)?;
    let new = Loops::attach(&[added.to_owned()], false)?;
    let mount = Mount::new(&[seed.to_owned()], "noatime")?;
    let point = mount.path("");
    let add = ["device", "add", "-K", "-f", &new.devices()[0]].map(OsStr::new);
    run("btrfs", add.into_iter().chain([point.as_os_str()]))?;
    run("mount", ["-o".as_ref(), "remount,rw".as_ref(), point.as_os_str()])?;
    plain(fs::write(mount.path("grown"), b"not of the seed"))?;
    mount.unmount()
}

/// Adds a device to a filesystem, shrinks it, and removes the first device. Returns the remaining images; their numbers
/// begin with 2.
///
/// # Errors
/// If a program fails.
pub fn exchange_devices(images: &[PathBuf], mebibytes: u64) -> Result<Vec<PathBuf>, String> {
    let first = images.first().ok_or("no image")?;
    let added = first.with_extension("added");
    sparse(&added, mebibytes)?;
    // The mount still uses the device while its loop device is detached.
    let new = Loops::attach(std::slice::from_ref(&added), false)?;
    let mount = Mount::new(images, "noatime")?;
    let point = mount.path("");
    let btrfs =
        |arguments: &[&str]| run("btrfs", arguments.iter().map(OsStr::new).chain([point.as_os_str()])).map(drop);
    btrfs(&["device", "add", "-K", "-f", &new.devices()[0]])?;
    btrfs(&["filesystem", "resize", &format!("{}:-20M", images.len() + 1)])?;
    btrfs(&["device", "remove", "1"])?;
    mount.unmount()?;
    let left = images.iter().skip(1).cloned().chain([added]).collect();
    plain(fs::remove_file(first))?;
    Ok(left)
}

/// Makes a filesystem of another type (ext4) with the files of a folder, and converts it in place: its blocks stay, as
/// an image in a subvolume of their own.
///
/// # Errors
/// If a program fails or is missing.
pub fn convert(image: &Path, mebibytes: u64) -> Result<(), String> {
    let folder = image.with_extension("folder");
    plain(fs::create_dir_all(&folder))?;
    plain(fill_folder(&folder))?;
    sparse(image, mebibytes)?;
    let arguments = ["-q", "-F", "-t", "ext4", "-b", "4096", "-d"].map(OsStr::new);
    run("mke2fs", arguments.into_iter().chain([folder.as_os_str(), image.as_os_str()]))?;
    run("btrfs-convert", ["--no-progress".as_ref(), image.as_os_str()])?;
    plain(fs::remove_dir_all(folder))
}
