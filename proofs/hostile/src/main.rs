//! Attacks for as long as one likes; and the target that they attack.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use sealblock_hostile::attacks::{ATTACKS, Attack, Scene};
use sealblock_hostile::host;
use sealblock_hostile::process::{self, Process};
use sealblock_hostile::suite;

/// Attacks an NVMe/TCP target from outside, with a well-behaved host beside each attack.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// What random attacks are drawn from; counts up with each round.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds of all attacks go on for this long; one round at least.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// How often attacks that repeat themselves do so; 50 makes the flood one of 100,000 connections.
    #[arg(long, default_value_t = 5)]
    effort: usize,
    /// These attacks alone.
    #[arg(long = "attack")]
    attacks: Vec<String>,
    /// So many sessions of our own host with a target that answers wrongly, in place of the attacks.
    #[arg(long)]
    sessions: Option<u64>,
    /// Says which attacks there are.
    #[arg(long)]
    list: bool,
    /// Attacks what this program, `sealblock`, serves, in place of a target of the library.
    #[arg(long)]
    sealblock: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Role {
    /// Be the target that is attacked.
    #[command(hide = true)]
    Target,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(Role::Target) = arguments.role {
        return process::run();
    }
    if arguments.list {
        ATTACKS.iter().for_each(|attack| println!("{:<12} {}", attack.name, attack.what));
        return Ok(());
    }
    let wanted = |name: &str| arguments.attacks.is_empty() || arguments.attacks.iter().any(|wanted| wanted == name);
    let chosen: Vec<_> = ATTACKS.iter().filter(|attack| wanted(attack.name)).collect();
    ensure!(!chosen.is_empty(), "there is no such attack; --list names those there are");
    let mut target = match &arguments.sealblock {
        Some(program) => Process::start_sealblock(program)?,
        None => Process::start(&std::env::current_exe().context("finding this program")?)?,
    };
    if let Some(sessions) = arguments.sessions {
        let summary = host::sessions(target.address, arguments.seed, sessions)?;
        println!(
            "{sessions} sessions from seed {}: {summary:?}; memory peak {} MiB",
            arguments.seed,
            host::peak_mib()?
        );
        return target.stop();
    }
    rounds(&mut target, &chosen, &arguments)?;
    target.stop()
}

fn rounds(target: &mut Process, chosen: &[&Attack], arguments: &Arguments) -> Result<()> {
    let (start, mut seed) = (Instant::now(), arguments.seed);
    loop {
        println!("seed {seed}");
        let scene = Scene { address: target.address, seed, effort: arguments.effort.max(1) };
        for attack in chosen {
            let report = suite::run(target, attack, &scene, Duration::from_millis(500));
            println!("{}", report.with_context(|| format!("attack {}, seed {seed}", attack.name))?);
        }
        suite::kept(target)?;
        seed += 1;
        if start.elapsed() >= Duration::from_secs(arguments.seconds) {
            break;
        }
    }
    Ok(())
}
