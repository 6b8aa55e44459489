//! Compares another build of this program with this one by alternating between them: the effect of a change.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};

use super::rounds::verdict;
use crate::report::Spread;

/// The threshold: the smallest fraction of the other's rate.
const THRESHOLD: f64 = 0.95;

/// The result of one contender under one load in one turn.
#[derive(Clone, PartialEq, Debug)]
struct Figure {
    load: String,
    name: String,
    rate: f64,
    cpu_us: f64,
}

/// Runs both builds `turns` times, alternating which one is first, and prints the common contenders.
pub fn run(other: &Path, turns: u32, words: &[String]) -> anyhow::Result<()> {
    ensure!(turns > 0, "at least one turn is needed");
    let this = std::env::current_exe().context("where this program is")?;
    let mut pairs = Vec::new();
    for turn in 0..turns {
        let mut figures = [Vec::new(), Vec::new()];
        let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
        for of in order {
            figures[of] = measure(if of == 0 { &this } else { other }, words)?;
        }
        eprintln!("turn {} of {turns}", turn + 1);
        pairs.push(figures);
    }
    print(&pairs);
    Ok(())
}

fn measure(program: &Path, words: &[String]) -> anyhow::Result<Vec<Figure>> {
    let output = Command::new(program).args(words).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    if !output.status.success() {
        bail!("{} ended with {}", program.display(), output.status);
    }
    let figures = figures(&String::from_utf8_lossy(&output.stdout));
    ensure!(!figures.is_empty(), "{} printed no rates", program.display());
    Ok(figures)
}

/// Parses the rates in the output of a benchmark: a load at the start of a line, and below it a line for each
/// contender.
fn figures(text: &str) -> Vec<Figure> {
    let (mut load, mut found) = (String::new(), Vec::new());
    for line in text.lines() {
        let Some(contender) = line.strip_prefix("  ") else {
            line.clone_into(&mut load);
            continue;
        };
        let words: Vec<&str> = contender.split_whitespace().collect();
        let place = |word: &str| words.iter().position(|there| *there == word);
        let number = |at: Option<usize>| words.get(at?)?.parse::<f64>().ok();
        // "5.5 us CPU", or "CPU 3.2 + 3.1 us" of target and host.
        let cpu = place("CPU").map(|at| if words.get(at + 2) == Some(&"+") { at + 1 } else { at.saturating_sub(2) });
        if let (Some(rate), Some(cpu_us)) = (number(place("/s").and_then(|at| at.checked_sub(1))), number(cpu)) {
            let name = contender.get(..16).unwrap_or(contender).trim().to_owned();
            found.push(Figure { load: load.clone(), name, rate, cpu_us });
        }
    }
    found
}

/// Prints a line for each contender and load of both builds, without raw files.
fn print(pairs: &[[Vec<Figure>; 2]]) {
    let mut load = "";
    for first in pairs.iter().take(1).flat_map(|[this, _]| this) {
        let of = |figures: &[Figure]| {
            let is_same = |figure: &&Figure| figure.load == first.load && figure.name == first.name;
            figures.iter().find(is_same).cloned()
        };
        let both: Vec<(Figure, Figure)> =
            pairs.iter().filter_map(|[this, other]| Some((of(this)?, of(other)?))).collect();
        if both.is_empty() || first.name.starts_with("raw") {
            continue;
        }
        if load != first.load {
            println!("{}", first.load);
            load = &first.load;
        }
        let rate = Spread::of(both.iter().map(|(this, other)| this.rate / other.rate));
        let cpu = Spread::of(both.iter().map(|(this, other)| this.cpu_us / other.cpu_us));
        println!(
            "  {:16} {:5.1} % [{:5.1} .. {:5.1}] of the other's rate, {:5.1} % of its CPU time{}",
            first.name,
            rate.median * 100.0,
            rate.least * 100.0,
            rate.most * 100.0,
            cpu.median * 100.0,
            verdict(rate.median, Some(THRESHOLD)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_below_their_load() {
        let text = "io_uring\n\nread 4 KiB, random\n  raw                  61285 /s     251 MB/s      5.5 us CPU   (baseline)\n  \
                    volume crc32c        39568 /s     162 MB/s      7.9 us CPU    64.6 % [ 64.6 ..  64.6]\n  volume crc32c    5 \
                    syncs of 8.83 ms\nwrite\n  mirror of in step   106.2 %\nread 4 KiB, random, QD 1\n  none              50738 \
                    /s (best    50738)  latency    19.7 us, median   18.7, p99    25.3  CPU  19.1 +  19.2 us, host summed 0.00\n";
        let figure =
            |name: &str, rate, cpu_us| Figure { load: "read 4 KiB, random".into(), name: name.into(), rate, cpu_us };
        let target_only =
            Figure { load: "read 4 KiB, random, QD 1".into(), name: "none".into(), rate: 50738.0, cpu_us: 19.1 };
        assert_eq!(figures(text), [figure("raw", 61285.0, 5.5), figure("volume crc32c", 39568.0, 7.9), target_only]);
    }
}
