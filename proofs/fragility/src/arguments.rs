//! What the program is asked for, and how it tells what was found.

use clap::Parser;

/// Broken trials of one kind of damage that are told; the others are counted.
const MAX_REPORTED: usize = 2;

/// Damages protected volumes, one region at a time, and tells what it costs.
#[derive(Parser)]
#[command(after_help = "Example: sealblock-fragility --trials 2000\n\n\
    Exit status: 0 every bound holds, 1 one is broken, 2 bad usage.")]
pub struct Arguments {
    /// Trials to run.
    #[arg(long, default_value_t = 2000)]
    pub trials: u64,
    /// What everything is drawn from.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One trial only, and everything it finds.
    #[arg(long)]
    pub trial: Option<u64>,
    /// Only damage to regions whose name contains this.
    #[arg(long)]
    pub region: Option<String>,
    /// Damages mirrors and stripes of volumes, and not volumes.
    #[arg(long, conflicts_with_all = ["states", "short"])]
    pub groups: bool,
    /// A line for each state of the volume, not one for all.
    #[arg(long)]
    pub states: bool,
    /// A short table: all copies of a region, and all that is done to as many bytes, in one line.
    #[arg(long, conflicts_with = "states")]
    pub short: bool,
    /// Threads; each runs volumes of its own.
    #[arg(long, default_value_t = 2)]
    pub jobs: usize,
}

/// A trial in which something was found that must not be.
pub struct Broken {
    /// Its number.
    pub trial: u64,
    /// What was damaged, and how.
    pub what: String,
    /// What was found.
    pub findings: Vec<String>,
}

/// Tells of the broken trials of one kind of damage, and how to see each again.
pub fn print_broken(broken: &[Broken], arguments: &Arguments) {
    let most = if arguments.trial.is_some() { usize::MAX } else { MAX_REPORTED };
    for Broken { trial, what, findings } in broken.iter().take(most) {
        println!("BROKEN {what}\n    {}", findings.join("\n    "));
        let groups = if arguments.groups { " --groups" } else { "" };
        let region = arguments.region.as_ref().map_or(String::new(), |region| format!(" --region '{region}'"));
        let seed = arguments.seed;
        println!(
            "    again: cargo run --release -p sealblock-fragility --{groups} --seed {seed} --trial {trial}{region}"
        );
    }
    if broken.len() > most {
        println!("    and {} more of this kind", broken.len() - most);
    }
}

/// What a panic says.
pub fn to_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
