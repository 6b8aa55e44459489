//! Verify of targets without protection information, a plain file and a loop device, compared with administrators'
//! tools.
//!
//! Threshold: `sealblock verify --mode emulate` takes no longer than `dd iflag=direct bs=1M`, and at most half of its
//! CPU time for each GiB. All of them read every byte with direct I/O; `badblocks -sv` is measured only for comparison.
//! The loop device uses direct I/O as well. CPU time is that of the processes, which the kernel adds up for ended child
//! processes in hundredths of a second; the kernel's own threads are not included.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use fastrand::Rng;

use super::options::VerifyLinuxOptions;
use super::rounds::verdict;
use crate::programs::{Loop, TICKS_PER_SECOND, Turn, turn, words};
use crate::report::{Spread, shuffled};
use crate::setup::Scratch;

/// Bytes of one write.
const PIECE_BYTES: usize = 1 << 20;

/// Measures both and prints it.
pub fn run(options: &VerifyLinuxOptions) -> anyhow::Result<()> {
    let file = Scratch(options.dir.join("sealblock-perf-verify-linux"));
    fill(&file.0, options.size.get())?;
    let path = file.0.to_str().context("the path is text")?;
    compare(options, &format!("raw:{path}"), path, "file")?;
    match Loop::new(&file.0) {
        Some(device) => compare(options, &device.0, &device.0, "loop device"),
        None => {
            println!("loop device: skipped: losetup makes none here");
            Ok(())
        }
    }
}

/// Every byte is written, because reserved space is read without the disk.
fn fill(path: &Path, bytes: u64) -> anyhow::Result<()> {
    ensure!(bytes.is_multiple_of(PIECE_BYTES as u64) && bytes > 0, "the size is a multiple of 1 MiB");
    let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    let (mut rng, mut piece) = (Rng::with_seed(7), vec![0; PIECE_BYTES]);
    for _ in 0..bytes / PIECE_BYTES as u64 {
        rng.fill(&mut piece);
        file.write_all(&piece)?;
    }
    file.sync_all().context("making the file durable")
}

fn compare(options: &VerifyLinuxOptions, target: &str, path: &str, what: &str) -> anyhow::Result<()> {
    let verify = words(&options.binary.to_string_lossy(), &["verify", target, "--mode", "emulate", "--json"]);
    let from = format!("if={path}");
    let mut contenders =
        vec![("dd", words("dd", &[&from, "of=/dev/null", "bs=1M", "iflag=direct"])), ("verify", verify)];
    match has("badblocks") {
        true => contenders.push(("badblocks", words("badblocks", &["-sv", path]))),
        false => println!("badblocks: skipped: it is not installed"),
    }
    let (mut rounds, mut rng) = (Vec::new(), Rng::with_seed(1));
    for _ in 0..options.rounds {
        let mut turns = vec![None; contenders.len()];
        for number in shuffled(contenders.len(), &mut rng) {
            turns[number] = Some(turn(&contenders[number].1)?);
        }
        rounds.push(turns.into_iter().flatten().collect::<Vec<Turn>>());
    }
    print(options, what, &contenders, &rounds);
    Ok(())
}

fn print(options: &VerifyLinuxOptions, what: &str, contenders: &[(&str, Vec<String>)], rounds: &[Vec<Turn>]) {
    let gib = options.size.get() as f64 / f64::from(1 << 30);
    println!("{what}, {}, {} rounds", options.size, rounds.len());
    for (number, (name, _)) in contenders.iter().enumerate() {
        let of = |value: &dyn Fn(&[Turn]) -> f64| Spread::of(rounds.iter().map(|round| value(round)));
        let seconds = of(&|round| round[number].seconds).median;
        let cpu = of(&|round| round[number].cpu_seconds / gib).median;
        let speed = of(&|round| round[0].seconds / round[number].seconds);
        let saved = of(&|round| round[0].cpu_seconds / round[number].cpu_seconds.max(1.0 / TICKS_PER_SECOND));
        print!(
            "  {name:10} {seconds:7.2} s {:7.0} MB/s {cpu:7.3} s CPU a GiB",
            options.size.get() as f64 / seconds / 1e6
        );
        match (number, *name) {
            (0, _) => println!("   (baseline)"),
            (_, "verify") => {
                println!("   speed {speed}{}", verdict(speed.median, Some(1.0)));
                println!("  {:56} CPU of dd {saved}{}", "", verdict(saved.median, Some(2.0)));
            }
            _ => println!("   speed {speed}"),
        }
    }
}

fn has(program: &str) -> bool {
    Command::new(program).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}
