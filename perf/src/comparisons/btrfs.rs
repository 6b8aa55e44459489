//! A Btrfs filesystem read in this process, compared with the kernel's mount of the same image.
//!
//! Thresholds: one large file is read at least at 80 % of the kernel's speed, and a tree of small files is listed, with
//! all attributes of stat(2), at least at 50 %. Both start with cold caches in every turn. The kernel mounts the image
//! anew, on a loop device with direct I/O, whose cache is dropped; ours is a new process that reads the image with
//! direct I/O. Needs root, loop devices and `btrfs-progs`.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use fastrand::Rng;

use super::options::BtrfsOptions;
use super::rounds::verdict;
use crate::programs::{Loop, Turn, turn, words};
use crate::report::{Spread, shuffled};
use crate::setup::Scratch;

/// Bytes of one write.
const PIECE_BYTES: usize = 1 << 20;
/// Small files in a directory.
const FILES_OF_DIRECTORY: u64 = 1000;

/// Measures both and prints it.
pub fn run(options: &BtrfsOptions) -> anyhow::Result<()> {
    let image = Scratch(options.dir.join("sealblock-perf-btrfs"));
    let point = options.dir.join("sealblock-perf-btrfs-mount");
    fs::create_dir_all(&point).with_context(|| format!("making {}", point.display()))?;
    let made = fill(options, &image.0, &point).and_then(|()| compare(options, &image.0, &point));
    // If it is still mounted, the folder is left for the user to remove.
    let _ = fs::remove_dir(&point);
    made
}

fn fill(options: &BtrfsOptions, image: &Path, point: &Path) -> anyhow::Result<()> {
    let bytes = options.size.get();
    // Leaves room for metadata, and for small files stored in it.
    File::create(image)?.set_len((bytes * 3 / 2 + (2 << 30)).next_multiple_of(1 << 20))?;
    let path = image.to_str().context("the path is text")?;
    let made = turn(&words("mkfs.btrfs", &["-q", "-f", "-m", "single", "-d", "single", path]));
    if let Err(why) = made {
        println!("btrfs: skipped: {why}");
        return Ok(());
    }
    let Some(device) = Loop::new(image) else {
        println!("btrfs: skipped: losetup makes no loop device here");
        return Ok(());
    };
    let mount = Mount::new(&device.0, point, "noatime")?;
    let mut file = File::create(point.join("large"))?;
    let (mut rng, mut piece) = (Rng::with_seed(7), vec![0; PIECE_BYTES]);
    for _ in 0..bytes / PIECE_BYTES as u64 {
        rng.fill(&mut piece);
        file.write_all(&piece)?;
    }
    // A mount with open files cannot be unmounted.
    drop(file);
    for number in 0..options.files {
        let folder = point.join(format!("small/{}", number / FILES_OF_DIRECTORY));
        if number % FILES_OF_DIRECTORY == 0 {
            fs::create_dir_all(&folder)?;
        }
        fs::write(folder.join(format!("file-{number}")), number.to_string())?;
    }
    mount.end()
}

fn compare(options: &BtrfsOptions, image: &Path, point: &Path) -> anyhow::Result<()> {
    let Some(device) = Loop::new(image) else { return Ok(()) };
    let path = image.to_str().context("the path is text")?;
    let (point_text, ours) = (point.to_str().context("the path is text")?, options.binary.to_string_lossy());
    let from = format!("if={point_text}/large");
    let (large, small) = (format!("raw:{path}/large"), format!("raw:{path}/small"));
    // Through a shell, because the output of a turn goes to a pipe, which `dd` does not need.
    let cat = format!("exec '{ours}' fs cat '{large}' >/dev/null");
    let loads = [
        ("one large file", words("dd", &[&from, "of=/dev/null", "bs=1M"]), words("sh", &["-c", &cat]), 0.8),
        (
            "listing of small files",
            words("find", &[&format!("{point_text}/small"), "-printf", "%m %n %u %g %s %T@ %P\\n"]),
            words(&ours, &["fs", "ls", "-lR", &small]),
            0.5,
        ),
    ];
    for (what, kernel, ours, threshold) in loads {
        let (mut rounds, mut rng) = (Vec::new(), Rng::with_seed(1));
        for _ in 0..options.rounds {
            let mut turns = [None; 2];
            for number in shuffled(2, &mut rng) {
                turns[number] = Some(match number {
                    0 => {
                        let mount = Mount::new(&device.0, point, "ro")?;
                        drop_caches()?;
                        let done = turn(&kernel)?;
                        mount.end()?;
                        done
                    }
                    _ => {
                        drop_caches()?;
                        turn(&ours)?
                    }
                });
            }
            rounds.push(turns.map(|turn| turn.expect("both had their turn")));
        }
        print(options, what, &rounds, threshold);
    }
    Ok(())
}

fn print(options: &BtrfsOptions, what: &str, rounds: &[[Turn; 2]], threshold: f64) {
    let of = |value: &dyn Fn(&[Turn; 2]) -> f64| Spread::of(rounds.iter().map(value));
    let speed = of(&|round| round[0].seconds / round[1].seconds);
    println!("{what}, {} and {} files, {} rounds", options.size, options.files, rounds.len());
    for (number, name) in ["kernel", "sealblock"].into_iter().enumerate() {
        let (seconds, cpu) = (of(&|round| round[number].seconds).median, of(&|round| round[number].cpu_seconds).median);
        println!("  {name:10} {seconds:7.2} s {cpu:7.2} s CPU of the process");
    }
    println!("  {:10} speed {speed}{}", "", verdict(speed.median, Some(threshold)));
}

fn drop_caches() -> anyhow::Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").context("dropping the page cache, which takes root")
}

/// A mount, ended when dropped.
struct Mount<'a>(Option<&'a Path>);

impl<'a> Mount<'a> {
    fn new(device: &str, point: &'a Path, options: &str) -> anyhow::Result<Mount<'a>> {
        let path = point.to_str().context("the path is text")?;
        turn(&words("mount", &["-t", "btrfs", "-o", options, device, path]))?;
        Ok(Mount(Some(point)))
    }

    fn end(mut self) -> anyhow::Result<()> {
        let point = self.0.take().context("it is mounted")?;
        let done = turn(&words("umount", &[point.to_str().context("the path is text")?]));
        if let Err(why) = done {
            bail!("unmounting: {why}");
        }
        Ok(())
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if let Some(point) = self.0 {
            let _ = std::process::Command::new("umount").arg(point).status();
        }
    }
}
