//! A mounted filesystem: that of the kernel, or ours through FUSE. `fio` sends the requests; files are created, looked
//! up and deleted by system calls of this process.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use fastrand::Rng;
use rustix::fs::{FallocateFlags, IFlags, fallocate, ioctl_setflags};
use serde_json::Value;

use super::library::Setting;
use super::loads::{Data, Synced, Work};
use crate::meter::{Meter, Turn};
use crate::mounts::{Mount, Server};

/// Bytes of a write that fills a file.
const PIECE_BYTES: u64 = 1 << 20;
/// The options of the kernel's mount. The other side does not discard either.
const MOUNT_OPTIONS: &str = "noatime,nodiscard";
/// One turn.
pub fn turn(server: Server<'_>, setting: &Setting<'_>, point: &Path, work: &Work) -> anyhow::Result<Vec<Turn>> {
    let mount = Mount::new(server, setting.device, point, MOUNT_OPTIONS)?;
    let bytes = setting.bytes / work.files().max(1) as u64;
    let turns = match work {
        Work::Data(data) => {
            make_files(point, data.jobs, bytes, IFlags::empty(), true)?;
            mount.sync()?;
            vec![data_turn(&mount, setting, data, bytes)?]
        }
        Work::Synced(synced) => {
            let flags = if synced.is_nodatacow { IFlags::NOCOW } else { IFlags::empty() };
            make_files(point, synced.jobs, bytes, flags, synced.is_written)?;
            mount.sync()?;
            vec![synced_turn(&mount, setting, synced, bytes)?]
        }
        Work::Names => names_turn(&mount, setting)?,
    };
    mount.end()?;
    Ok(turns)
}

fn make_files(point: &Path, jobs: usize, bytes: u64, flags: IFlags, is_written: bool) -> anyhow::Result<()> {
    let mut piece = vec![0; PIECE_BYTES as usize];
    Rng::with_seed(7).fill(&mut piece);
    for job in 0..jobs {
        let mut file = File::create(point.join(format!("file-{job}")))?;
        if !flags.is_empty() {
            ioctl_setflags(&file, flags).context("setting flags of a file")?;
        }
        match is_written {
            true => (0..bytes / PIECE_BYTES).try_for_each(|_| file.write_all(&piece))?,
            false => fallocate(&file, FallocateFlags::empty(), 0, bytes)?,
        }
        file.sync_all()?;
    }
    Ok(())
}

fn data_turn(mount: &Mount, setting: &Setting<'_>, data: &Data, bytes: u64) -> anyhow::Result<Turn> {
    let kind = match (data.is_random, data.is_write) {
        (false, false) => "read",
        (false, true) => "write",
        (true, false) => "randread",
        (true, true) => "randwrite",
    };
    let mut fio = fio(mount.point(), setting, kind, (data.jobs, data.bytes, bytes));
    fio.push("--time_based".into());
    // Places may come twice, as they do in the library.
    fio.push("--norandommap".into());
    match data.is_direct {
        true => fio.extend(["--ioengine=io_uring".into(), "--direct=1".into(), format!("--iodepth={}", data.depth)]),
        false => fio.push("--ioengine=psync".into()),
    }
    let meter = Meter::start(Some(setting.device), mount.pid())?;
    let (requests, mut seconds) = run_fio(&fio)?;
    if data.is_write {
        let begin = Instant::now();
        mount.sync()?;
        seconds += begin.elapsed().as_secs_f64();
    }
    meter.stop(requests, Some(seconds))
}

fn synced_turn(mount: &Mount, setting: &Setting<'_>, synced: &Synced, bytes: u64) -> anyhow::Result<Turn> {
    let mut fio = fio(mount.point(), setting, "randwrite", (synced.jobs, 4096, bytes));
    fio.push("--ioengine=psync".into());
    fio.push(if synced.is_data_only { "--fdatasync=1" } else { "--fsync=1" }.into());
    let meter = Meter::start(Some(setting.device), mount.pid())?;
    let (requests, seconds) = run_fio(&fio)?;
    meter.stop(requests, Some(seconds))
}

fn fio(point: &Path, setting: &Setting<'_>, kind: &str, (jobs, request, bytes): (usize, u64, u64)) -> Vec<String> {
    let directory = format!("--directory={}", point.display());
    let (runtime, seed) = (setting.time.as_secs_f64(), setting.seed);
    vec![
        "fio".into(),
        "--name=file".into(),
        directory,
        "--filename_format=file-$jobnum".into(),
        format!("--rw={kind}"),
        format!("--bs={request}"),
        format!("--size={bytes}"),
        format!("--numjobs={jobs}"),
        format!("--runtime={}ms", (runtime * 1000.0) as u64),
        format!("--randseed={seed}"),
        "--fallocate=none".into(),
        "--thread".into(),
        "--group_reporting".into(),
        "--output-format=json".into(),
    ]
}

/// Runs `fio`. Returns its requests and the time that it measured.
fn run_fio(command: &[String]) -> anyhow::Result<(u64, f64)> {
    let output = Command::new(&command[0]).args(&command[1..]).stdin(Stdio::null()).output().context("starting fio")?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    // Notes may come before it.
    let begin = output.stdout.iter().position(|byte| *byte == b'{').context("fio prints no JSON")?;
    let report: Value = serde_json::from_slice(&output.stdout[begin..]).context("reading what fio prints")?;
    let job = &report["jobs"][0];
    let of = |field: &str| ["read", "write"].map(|kind| job[kind][field].as_u64().unwrap_or(0));
    let (requests, milliseconds) = (of("total_ios").iter().sum(), of("runtime").into_iter().max().unwrap_or(0));
    ensure!(requests > 0 && milliseconds > 0, "fio did nothing: {report}");
    Ok((requests, milliseconds as f64 / 1000.0))
}

/// Creates, looks up and deletes; each is durable at the end.
fn names_turn(mount: &Mount, setting: &Setting<'_>) -> anyhow::Result<Vec<Turn>> {
    let paths = (0..setting.names).map(|index| mount.point().join(format!("a-file-{index:08}")));
    let (paths, mut turns): (Vec<PathBuf>, _) = (paths.collect(), Vec::new());
    let meter = Meter::start(Some(setting.device), mount.pid())?;
    for path in &paths {
        OpenOptions::new().write(true).create_new(true).open(path)?;
    }
    mount.sync()?;
    turns.push(meter.stop(setting.names, None)?);
    let meter = Meter::start(Some(setting.device), mount.pid())?;
    for path in &paths {
        fs::symlink_metadata(path)?;
    }
    turns.push(meter.stop(setting.names, None)?);
    let meter = Meter::start(Some(setting.device), mount.pid())?;
    for path in &paths {
        fs::remove_file(path)?;
    }
    mount.sync()?;
    turns.push(meter.stop(setting.names, None)?);
    Ok(turns)
}
