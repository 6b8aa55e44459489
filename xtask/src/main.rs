//! `cargo xtask`: everything that continuous integration runs.
//!
//! Each check is a module with a pure core (a graph or a text in, findings out) and a thin shell that reads the tree,
//! so that the rules themselves have tests. It has no argument parser, because it is built first on a fresh machine and
//! has few commands.

mod check;
mod circles;
mod dependencies;
mod doctests;
mod figures;
mod fuzz;
mod inputs;
mod links;
mod modules;
mod package;
mod scan;
mod sizes;
mod step;
mod test_output;
mod workspace;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use check::Request;

const HELP: &str = "\
cargo xtask: the checks of this repository

  cargo xtask check                all that continuous integration runs, but for steps that passed with the same inputs
                      --all        those, too
                      --every-kernel  every conformance test on each kernel that can do it, and not in turns
                      --fast       leaves out deny, docs, fuzz and what runs long (simulation, conformance, package)
  cargo xtask check STEP...        these steps of it
  cargo xtask dependencies         which folder may use which
  cargo xtask circles              files of a crate that use each other in a circle
  cargo xtask sizes                sizes of files and functions, and what must not stand in the source
  cargo xtask links                files and headings that documents link to and that are not there
  cargo xtask package              a Debian package, in target/package
                      --symbols    and a second one of its debug symbols
                      --try        and installs, starts, uses and removes it in a folder, as the check does
  cargo xtask figures FILE.json    tables of docs/performance.md and verdicts of README.md, from sealblock bench --json=FILE.json
  cargo xtask fuzz [--seconds N]   each target of proofs/fuzz for N seconds (60 by default), with the nightly toolchain

Exit status: 0 when all is well, 1 when a check fails, 2 for an unknown word.
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        ["check", asked @ ..] => match Request::parse(asked) {
            Some(request) => check::run(&request),
            None => return unknown(&words),
        },
        ["dependencies"] => print_summary(dependencies::check()),
        ["circles"] => print_summary(circles::check()),
        ["sizes"] => print_summary(sizes::check()),
        ["links"] => print_summary(links::check()),
        ["package"] => print_summary(package::make(false)),
        ["package", "--try"] => print_summary(package::make_and_try()),
        ["package", "--symbols"] => print_summary(package::make(true)),
        ["figures", path] => print_summary(figures::rewrite(path)),
        ["fuzz"] => fuzz::run(60),
        ["fuzz", "--seconds", seconds] => seconds_of(seconds).and_then(fuzz::run),
        _ => return unknown(&words),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn unknown(words: &[&str]) -> ExitCode {
    eprint!("xtask: '{}' is not a command\n\n{HELP}", words.join(" "));
    ExitCode::from(2)
}

fn print_summary(summary: Result<String>) -> Result<()> {
    println!("{}", summary?);
    Ok(())
}

fn seconds_of(text: &str) -> Result<u64> {
    let seconds: u64 = text.parse().with_context(|| format!("'{text}' is not a number of seconds"))?;
    if seconds == 0 {
        bail!("0 seconds would fuzz nothing: ask for at least one second");
    }
    Ok(seconds)
}
