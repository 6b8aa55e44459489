//! The program: runs attacks for a given time, and is also the target under attack.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, Subcommand};
use sealblock::cli::Cli;
use sealblock::exit::Exit;
use sealblock_exports_nvme_tcp::Limits;
use sealblock_hostile::attacks::{ATTACKS, Attack, TestContext};
use sealblock_hostile::fairness;
use sealblock_hostile::floods::{self, Effort};
use sealblock_hostile::formats;
use sealblock_hostile::host;
use sealblock_hostile::process::{self, Process};
use sealblock_hostile::restart::{self, RestartConfig};
use sealblock_hostile::served::Program;
use sealblock_hostile::suite;
use sealblock_integrity::{GuardKind, ProtectionType};
use sealblock_units::BlockSize;

/// Attacks an NVMe/TCP target from outside, with a correct host during each attack.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// The seed of random attacks; it is incremented for each round.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long rounds of all attacks are repeated, in seconds; at least one round.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Repetitions of attacks that repeat; with 50 the flood has 100,000 connections, with 500 a million.
    #[arg(long, default_value_t = 5)]
    effort: usize,
    /// Seconds after which a flood ends, even if it is not complete.
    #[arg(long, default_value_t = 150)]
    flood_seconds: u64,
    /// How often each attack alternates with a pause, to measure the bystander's speed with and without it.
    #[arg(long, default_value_t = 3)]
    turns: usize,
    /// Run only these attacks.
    #[arg(long = "attack")]
    attacks: Vec<String>,
    /// Run this number of sessions of our own host against a target that replies wrongly, instead of the attacks.
    #[arg(long)]
    sessions: Option<u64>,
    /// Kill `sealblock serve` this number of times under the load of our own host, instead of the attacks.
    #[arg(long)]
    kills: Option<u64>,
    /// Flood a server with each command and print a table of its memory and stop times, instead of the attacks.
    #[arg(long)]
    floods: bool,
    /// Flood a server with each I/O command and print a table of the waits of neighbours, instead of the attacks.
    #[arg(long)]
    fairness: bool,
    /// Commands outstanding on each queue of a flood.
    #[arg(long, default_value_t = 200)]
    outstanding: u16,
    /// Milliseconds that a flood lasts.
    #[arg(long, default_value_t = 2000)]
    flood_ms: u64,
    /// List the attacks.
    #[arg(long)]
    list: bool,
    /// Attack the `sealblock serve` of this program, instead of a target of the library.
    #[arg(long)]
    sealblock: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Role {
    /// Run as the target under attack.
    #[command(hide = true)]
    Target {
        #[arg(long)]
        patient: bool,
    },
    /// Run as `sealblock`, with this command line.
    #[command(hide = true)]
    Sealblock {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.role {
        Some(Role::Target { patient: true }) => return process::run(process::patient_limits()),
        Some(Role::Target { patient: false }) => return process::run(process::limits()),
        Some(Role::Sealblock { arguments }) => return be_sealblock(arguments),
        None => {}
    }
    if arguments.list {
        ATTACKS.iter().for_each(|attack| println!("{:<12} {}", attack.name, attack.what));
        return Ok(());
    }
    let this = std::env::current_exe().context("finding this program")?;
    if let Some(rounds) = arguments.kills {
        let program = arguments.sealblock.map_or_else(|| Program::hostile(this), Program::sealblock);
        return kills(program, rounds, arguments.seed);
    }
    let wanted = |name: &str| arguments.attacks.is_empty() || arguments.attacks.iter().any(|wanted| wanted == name);
    if arguments.floods || arguments.fairness {
        let program = arguments.sealblock.clone().map_or_else(|| Program::hostile(this), Program::sealblock);
        let (outstanding, time) = (arguments.outstanding, Duration::from_millis(arguments.flood_ms));
        let effort = Effort { limits: Limits::default(), outstanding, time };
        let table = if arguments.fairness {
            fairness::table(&program, &effort, wanted)
        } else {
            floods::table(&program, &effort, wanted)
        };
        return table;
    }
    let chosen: Vec<_> = ATTACKS.iter().filter(|attack| wanted(attack.name)).collect();
    ensure!(!chosen.is_empty(), "there is no such attack; --list names those there are");
    let mut target = match &arguments.sealblock {
        Some(program) => Process::start_sealblock(&Program::sealblock(program))?,
        None if arguments.sessions.is_some() => Process::start_patient(&this)?,
        None => Process::start(&this)?,
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

/// Executes the command line as `sealblock` does; any result but success is an error.
fn be_sealblock(arguments: Vec<OsString>) -> Result<()> {
    let words = std::iter::once("sealblock".into()).chain(arguments);
    let exit = sealblock::commands::run(&Cli::parse_from(words).command).map_err(|failure| anyhow!("{failure}"))?;
    ensure!(exit == Exit::Clean, "sealblock found damage or a difference");
    Ok(())
}

/// Kills a server under load, with a volume of each guard.
fn kills(program: Program, rounds: u64, seed: u64) -> Result<()> {
    for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
        let folder = tempfile::tempdir().context("making a folder")?;
        let kind = formats::of(guard, ProtectionType::Type1, BlockSize::B4096);
        let program = program.clone();
        let config = RestartConfig { program, folder: folder.path().into(), kind, forgets: false, rounds, seed };
        let summary = restart::run(&config).with_context(|| format!("guard {guard}, seed {seed}"))?;
        println!("{rounds} kills, guard {guard}, seed {seed}: {summary:?}");
    }
    Ok(())
}

fn rounds(target: &mut Process, chosen: &[&Attack], arguments: &Arguments) -> Result<()> {
    let (start, mut seed) = (Instant::now(), arguments.seed);
    loop {
        println!("seed {seed}");
        let time = Duration::from_secs(arguments.flood_seconds);
        let context = TestContext { address: target.address, seed, effort: arguments.effort.max(1), time };
        for attack in chosen {
            let report = suite::run(target, attack, &context, Duration::from_millis(500), arguments.turns);
            println!("{}", report.with_context(|| format!("attack {}, seed {seed}", attack.name))?);
        }
        suite::check_memory(target)?;
        seed += 1;
        if start.elapsed() >= Duration::from_secs(arguments.seconds) {
            break;
        }
    }
    Ok(())
}
