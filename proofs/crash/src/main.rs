//! Runs more rounds than the tests do; this program is also the worker that is killed.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use sealblock_crash::rounds::{Plan, mutation, run};
use sealblock_crash::worker;
use sealblock_media_volume::Mutation;

/// Kills a process that writes a volume, again and again, and checks every block.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// Number of kills.
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the volumes [default: a temporary folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A mutation of the volume: skip-sync, late-tags, reuse-early or trust-log.
    #[arg(long, default_value = "none", value_parser = mutation)]
    mutation: Mutation,
}

#[derive(Subcommand)]
enum Role {
    /// Run as the process that is killed.
    #[command(hide = true)]
    Worker {
        volume: PathBuf,
        seed: u64,
        round: u64,
        #[arg(value_parser = mutation)]
        mutation: Mutation,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(Role::Worker { volume, seed, round, mutation }) = arguments.role {
        return worker::run(&volume, seed, round, mutation);
    }
    let folder = match &arguments.dir {
        Some(folder) => folder.clone(),
        // Kept for analysis if a round fails; otherwise removed below.
        None => tempfile::tempdir().context("making a folder")?.keep(),
    };
    let program = std::env::current_exe().context("finding this program")?;
    let plan = Plan { program, folder, rounds: arguments.rounds, seed: arguments.seed, mutation: arguments.mutation };
    let totals = run(&plan)?;
    println!("seed {}, {} rounds: nothing lost; {totals:?}", plan.seed, plan.rounds);
    if arguments.dir.is_none() {
        std::fs::remove_dir_all(&plan.folder).context("removing the volumes")?;
    }
    Ok(())
}
