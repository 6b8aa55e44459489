//! The command line of `bench`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sealblock_perf::bench::outcome::Claim;
use sealblock_perf::bench::{CLAIMS, find};
use sealblock_units::{ByteCount, SizeError};

/// The smallest device that a claim is measured with, and the step of its size.
pub(super) const SIZE_STEP: ByteCount = ByteCount::new(1 << 20);
/// The longest turn, in seconds.
const MAX_SECONDS: f64 = 3600.0;
/// The most rounds.
const MAX_ROUNDS: i64 = 1000;

const BENCH_HELP: &str = "\
Examples:
  sealblock bench                                     # all claims, in ten minutes at most
  sealblock bench verify-offload --dir /mnt/disk --report bench.html
  sealblock bench --json=bench.json --plot pictures   # results as JSON, and plots

Each claim is measured in rounds. In a round every contender runs once and the baseline twice; the two baseline runs show the
noise. A claim holds if the median of its ratios passes the threshold by more than the noise, does not hold if it misses the
threshold by more than the noise, and is undecided otherwise. The exit status is 0 if everything was measured, whatever the
results, and 3 if a measurement failed.

Files are created in --dir, bypass the page cache, and are removed at the end, also after Ctrl-C. Servers listen on loopback only.";

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = BENCH_HELP)]
pub struct Bench {
    /// Claims to measure. [default: all]
    #[arg(value_name = "CLAIM", value_parser = claims())]
    pub claims: Vec<&'static Claim>,
    /// Print the claims and the published figures, and measure nothing.
    #[arg(long, conflicts_with_all = ["claims", "size", "seconds", "rounds", "json", "plot", "report"])]
    pub list: bool,
    /// Size of each device: a multiple of 1 MiB. [default: depends on the claim]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub size: Option<ByteCount>,
    /// Seconds per run of a contender, where a run is not a fixed amount of work. [default: depends on the claim]
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Number of rounds. Fewer than 3 rounds decide nothing. [default: depends on the claim]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_ROUNDS))]
    pub rounds: Option<u32>,
    /// Directory for files, on the file system to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Write one JSON object to FILE, or to standard output instead of the tables if FILE is missing or -.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", value_parser = file_of_json)]
    pub json: Option<PathBuf>,
    /// Write each plot as SVG into this directory; created if missing.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Write a self-contained HTML report to this file.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

fn claims() -> impl TypedValueParser<Value = &'static Claim> {
    let names = CLAIMS.iter().map(|claim| PossibleValue::new(claim.name).help(claim.sentence));
    PossibleValuesParser::new(names).map(|name| find(&name).expect("the parser lets only names of claims through"))
}

pub(super) fn size(text: &str) -> Result<ByteCount, String> {
    let size: ByteCount = text.parse().map_err(|error: SizeError| error.to_string())?;
    match size.get() > 0 && size.get().is_multiple_of(SIZE_STEP.get()) {
        true => Ok(size),
        false => Err(format!("must be a multiple of {SIZE_STEP}, and at least {SIZE_STEP}")),
    }
}

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= MAX_SECONDS => Ok(seconds),
        _ => Err(format!("must be more than 0 and at most {MAX_SECONDS} seconds")),
    }
}

/// The option takes a file or none, so a claim behind it would be taken for a file.
fn file_of_json(text: &str) -> Result<PathBuf, String> {
    match find(text) {
        None => Ok(PathBuf::from(text)),
        Some(claim) => Err(format!(
            "{0} is a claim: put claims before --json, or use --json=./{0} for a file of that name",
            claim.name
        )),
    }
}
