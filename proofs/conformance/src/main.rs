//! Conformance: tests foreign hosts with sealblock's servers.
//!
//! Stock Linux kernels run under QEMU ([`harness`]), connect to `sealblock serve` on this machine, and use it as hosts
//! do ([`suite`]). The same program also runs in the guests ([`guest`]), for operations that no other program has.
//!
//! A test is a function that alternates between the two sides: it serves a volume, makes the guest use it, damages it
//! or kills the server, and checks the guest again.
//!
//! `cargo run -p sealblock-proofs-conformance -- --list` prints the tests.

mod context;
mod guest;
mod harness;
mod runner;
mod served;
mod suite;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

use harness::{Parts, Unavailable};
use runner::RunPlan;
use suite::Coverage;

/// Tests stock Linux kernels as hosts of `sealblock serve`.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Option<Role>,
    /// Run only these tests.
    #[arg(value_name = "NAME", value_parser = suite::names())]
    names: Vec<String>,
    /// Print the tests.
    #[arg(long)]
    list: bool,
    /// Use only kernels whose release begins with this, such as 6.1.
    #[arg(long, value_name = "RELEASE", default_value = "")]
    kernel: String,
    /// Run each test on one of the kernels that support it, chosen by this number [default: on all]
    #[arg(long, value_name = "NUMBER", conflicts_with = "names")]
    turn: Option<u64>,
    /// Keep the folders of passed tests as well.
    #[arg(long)]
    keep: bool,
    /// Number of kills of each server in `kills`.
    #[arg(long, value_name = "COUNT", default_value_t = 4)]
    kills: u32,
    /// The program to test [default: build it].
    #[arg(long, value_name = "PATH")]
    sealblock: Option<PathBuf>,
    /// Folder for kernels, programs and logs [default: target/conformance].
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Role {
    /// Unpack Debian packages into a folder, for tests on this machine that need their programs.
    Unpack {
        /// The packages. Their dependencies are not unpacked.
        #[arg(value_name = "PACKAGE", required = true)]
        packages: Vec<String>,
        /// The folder.
        #[arg(long, value_name = "DIR")]
        into: PathBuf,
    },
    /// Work inside a guest.
    #[command(hide = true, subcommand)]
    Guest(guest::GuestCommand),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(unavailable) = error.downcast_ref::<Unavailable>() {
                // `cargo xtask check` shows a single line.
                let why: Vec<String> = unavailable.0.lines().map(|line| line.trim().to_owned()).collect();
                println!("skipped: {}", why.join("; "));
                return ExitCode::SUCCESS;
            }
            eprintln!("conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    if let Some(Role::Guest(command)) = &arguments.role {
        return guest::run(command);
    }
    if arguments.list {
        suite::CASES.iter().for_each(|case| println!("{:<12} {}", case.name, case.about));
        return Ok(());
    }
    let program = std::env::current_exe().context("finding this program")?;
    let folder = program.parent().context("finding the folder of this program")?;
    let home = match &arguments.home {
        // apt-get resolves relative paths below its own folders.
        Some(home) => std::path::absolute(home).with_context(|| format!("finding {}", home.display()))?,
        None => folder.parent().context("finding the target folder")?.join("conformance"),
    };
    if let Some(Role::Unpack { packages, into }) = &arguments.role {
        let into = std::path::absolute(into).with_context(|| format!("finding {}", into.display()))?;
        return harness::unpack(packages, &home, &into);
    }
    let parts = Parts::prepare(&home)?;
    let sealblock = match &arguments.sealblock {
        Some(path) => path.canonicalize().with_context(|| format!("finding {}", path.display()))?,
        None => built(folder)?,
    };
    let Arguments { names, kernel, keep, kills, turn, .. } = arguments;
    let coverage = match (names.as_slice(), turn) {
        ([], None) => Coverage::EveryKernel,
        ([], Some(turn)) => Coverage::Turn(*turn),
        _ => Coverage::Named,
    };
    let plan =
        RunPlan { sealblock, names: names.clone(), coverage, kernel: kernel.clone(), keep: *keep, kills: *kills };
    runner::run(&parts, &plan)
}

/// Builds `sealblock` in the folder of this program, and returns its path.
fn built(folder: &std::path::Path) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--package", "sealblock"]);
    if folder.ends_with("release") {
        build.arg("--release");
    }
    let status = build.status().context("starting cargo (--sealblock PATH names a program that is there)")?;
    if !status.success() {
        bail!("building sealblock failed ({status})");
    }
    Ok(folder.join("sealblock"))
}
