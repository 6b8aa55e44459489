//! The command line of `bench`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sealblock_perf::bench::outcome::Claim;
use sealblock_perf::bench::{CLAIMS, find};
use sealblock_units::{ByteCount, SizeError};

/// The smallest device that a claim is measured with, and the step of its size.
const SIZE_STEP: ByteCount = ByteCount::new(1 << 20);
/// The longest turn, in seconds.
const MAX_SECONDS: f64 = 3600.0;
/// The most rounds.
const MAX_ROUNDS: i64 = 1000;

const BENCH_HELP: &str = "\
Examples:
  sealblock bench                                     # all claims, within ten minutes
  sealblock bench verify-offload --dir /mnt/disk --report bench.html
  sealblock bench --json=bench.json --plot pictures   # figures for programs, and pictures

Each claim is measured in rounds, in which every contender has a turn and the yardstick has two. A claim holds if the median of its
ratios beats the bar by more than the yardstick misses itself by, does not hold if it misses the bar by more, and is too noisy to tell
otherwise. Exit status 0 says that all was measured, whatever the verdicts are; 3, that something could not be.

Files are made in --dir, past the page cache, and are removed at the end, after Ctrl-C as well. What listens listens on loopback.";

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = BENCH_HELP)]
pub struct Bench {
    /// Which claims; all of them unless given.
    #[arg(value_name = "CLAIM", value_parser = claims())]
    pub claims: Vec<&'static Claim>,
    /// Print the claims and what others have published, and measure nothing.
    #[arg(long, conflicts_with_all = ["claims", "size", "seconds", "rounds", "json", "plot", "report"])]
    pub list: bool,
    /// Bytes of each device: a multiple of 1 MiB. Each claim has a default of its own.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<ByteCount>,
    /// Seconds of one turn of one contender, where a turn is not a fixed amount of work.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Rounds, in each of which every contender has a turn. Fewer than 3 decide nothing.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_ROUNDS))]
    pub rounds: Option<u32>,
    /// The folder for files, on the file system that is to be measured.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Write one JSON object to this file, or to standard output in place of the tables if there is no FILE or it is -.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", value_parser = file_of_json)]
    pub json: Option<PathBuf>,
    /// Write a picture (SVG) for each plot into this folder, which is made if it is not there.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Write all of it as one HTML file that needs nothing else.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

fn claims() -> impl TypedValueParser<Value = &'static Claim> {
    let names = CLAIMS.iter().map(|claim| PossibleValue::new(claim.name).help(claim.sentence));
    PossibleValuesParser::new(names).map(|name| find(&name).expect("the parser lets only names of claims through"))
}

fn size(text: &str) -> Result<ByteCount, String> {
    let size: ByteCount = text.parse().map_err(|error: SizeError| error.to_string())?;
    match size.get() > 0 && size.get().is_multiple_of(SIZE_STEP.get()) {
        true => Ok(size),
        false => Err(format!("devices have a multiple of {SIZE_STEP}, and at least that")),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= MAX_SECONDS => Ok(seconds),
        _ => Err(format!("a turn takes more than 0 and at most {MAX_SECONDS} seconds")),
    }
}

/// The option takes a file or none, so a claim behind it would be taken for a file.
fn file_of_json(text: &str) -> Result<PathBuf, String> {
    match find(text) {
        None => Ok(PathBuf::from(text)),
        Some(claim) => {
            Err(format!("{0} is a claim: name claims before --json, or write --json=./{0} for a file", claim.name))
        }
    }
}
