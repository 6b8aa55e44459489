//! The program's arguments, and its report of failed trials.

use clap::Parser;

/// The maximum number of failed trials that are printed for one kind of damage; the others are only counted.
const MAX_REPORTED: usize = 2;

/// Damages protected volumes, one region at a time, and prints the cost.
#[derive(Parser)]
#[command(after_help = "Example: sealblock-fragility --trials 2000\n\n\
    Exit status: 0 every bound holds, 1 one is broken, 2 bad usage.")]
pub struct Arguments {
    /// Number of trials.
    #[arg(long, default_value_t = 2000)]
    pub trials: u64,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Run only this trial, and print all its findings.
    #[arg(long)]
    pub trial: Option<u64>,
    /// Only damage to regions whose name contains this.
    #[arg(long)]
    pub region: Option<String>,
    /// Damage mirrors and stripes of volumes, not single volumes.
    #[arg(long, conflicts_with_all = ["states", "short"])]
    pub groups: bool,
    /// Damage volumes in shards.
    #[arg(long, conflicts_with = "groups")]
    pub shards: bool,
    /// Print a line for each state of the volume, not one for all.
    #[arg(long)]
    pub states: bool,
    /// Print a short table: one line for all copies of a region and all kinds of damage of one size.
    #[arg(long, conflicts_with = "states")]
    pub short: bool,
    /// Number of threads; each runs its own volumes.
    #[arg(long, default_value_t = 2)]
    pub jobs: usize,
}

/// A trial with a violation.
pub struct FailedTrial {
    /// Its number.
    pub trial: u64,
    /// The damage.
    pub what: String,
    /// The violations.
    pub findings: Vec<String>,
}

/// Prints the failed trials of one kind of damage, and how to repeat each.
pub fn print_failed(broken: &[FailedTrial], arguments: &Arguments) {
    let most = if arguments.trial.is_some() { usize::MAX } else { MAX_REPORTED };
    for FailedTrial { trial, what, findings } in broken.iter().take(most) {
        println!("BROKEN {what}\n    {}", findings.join("\n    "));
        let of = if arguments.groups {
            " --groups"
        } else if arguments.shards {
            " --shards"
        } else {
            ""
        };
        let region = arguments.region.as_ref().map_or(String::new(), |region| format!(" --region '{region}'"));
        let seed = arguments.seed;
        println!("    again: cargo run --release -p sealblock-fragility --{of} --seed {seed} --trial {trial}{region}");
    }
    if broken.len() > most {
        println!("    and {} more of this kind", broken.len() - most);
    }
}

/// The message of a panic.
pub fn to_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
