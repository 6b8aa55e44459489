//! `sealblock bench`: claims that others have published, measured on this machine.
//!
//! The library `sealblock-perf` measures; this file selects claims, shows progress and writes results. Files for the results are created
//! before anything is measured, so that ten minutes of figures are not lost for a wrong path.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use sealblock_perf::bench::outcome::{Claim, Listener, Step};
use sealblock_perf::bench::{CLAIMS, Report, Wishes, html, measure, plot, text};
use sealblock_stack::{Cause, StackError};

use crate::cli::Bench;
use crate::exit::Exit;
use crate::interrupt;
use crate::new_file::{self, NewFile};
use crate::progress::{Show, Steps};
use crate::report::{print_json, say};

/// The file name that stands for standard output.
const STDOUT: &str = "-";

/// Measures, and writes what came out.
pub fn run(arguments: &Bench) -> Result<Exit, StackError> {
    if arguments.list {
        return list();
    }
    let is_stdout = |path: &Path| path == Path::new(STDOUT);
    let json = arguments.json.as_deref();
    let json_file = json.filter(|path| !is_stdout(path)).map(begun).transpose()?;
    let page_file = arguments.report.as_deref().map(begun).transpose()?;
    if let Some(dir) = &arguments.plot {
        fs::create_dir_all(dir).map_err(|error| failed(&error, dir))?;
    }
    interrupt::watch();
    let claims: &[&'static Claim] = if arguments.claims.is_empty() { CLAIMS } else { &arguments.claims };
    let wishes = Wishes {
        size: arguments.size,
        seconds: arguments.seconds,
        rounds: arguments.rounds,
        dir: arguments.dir.clone(),
    };
    let report = measure(claims, &wishes, &listener(claims));
    if let Some(file) = json_file {
        write_json(&report, file).map_err(|error| failed(&error, json.unwrap_or(Path::new(STDOUT))))?;
    }
    match json.is_some_and(is_stdout) {
        true => print_json(&report)?,
        false => say(text::report(&report).trim_end())?,
    }
    if let (Some(file), Some(path)) = (page_file, &arguments.report) {
        let page = html::report(&report).map_err(|error| undrawn(&error))?;
        file.complete(page.as_bytes()).map_err(|error| failed(&error, path))?;
    }
    if let Some(dir) = &arguments.plot {
        draw(&report, dir)?;
    }
    if report.interrupted {
        interrupt::report("bench", "between two rounds", "the claims that are not listed, by their names");
        return Ok(Exit::Interrupted);
    }
    let failure = report.claims.iter().find_map(|claim| Some((claim.name, claim.failure.as_ref()?)));
    match failure {
        None => Ok(Exit::Clean),
        Some((name, why)) => Err(StackError::new(Cause::Io, format!("measure {name}"), why)),
    }
}

/// The claims, and what others have published.
fn list() -> Result<Exit, StackError> {
    for claim in CLAIMS {
        say(&format!("{}: {}", claim.name, claim.sentence))?;
        for published in claim.published {
            say(&format!("  published: {} ({})", published.figure, published.source))?;
        }
    }
    Ok(Exit::Clean)
}

/// Shows each step on a terminal, and ends the measurement after a signal.
fn listener(claims: &[&'static Claim]) -> Arc<Listener> {
    let names: Vec<&'static str> = claims.iter().map(|claim| claim.name).collect();
    let steps = Steps::new(Show::OnTerminal);
    Arc::new(move |step: &Step| {
        let number = names.iter().position(|name| *name == step.claim).map_or(0, |index| index + 1);
        let Step { claim, part, round, of } = step;
        steps.at(format!("{claim} ({number} of {}), {part}, round {round} of {of}", names.len()));
        match interrupt::came() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
}

/// Writes a picture for each plot.
fn draw(report: &Report, dir: &Path) -> Result<(), StackError> {
    for plot in report.claims.iter().flat_map(|claim| &claim.outcome.plots) {
        let path = dir.join(format!("{}.svg", plot.name));
        let picture = plot::svg(plot).map_err(|error| undrawn(&error))?;
        new_file::replace(&path, &picture.into_bytes()).map_err(|error| failed(&error, &path))?;
    }
    Ok(())
}

fn undrawn(error: &impl std::fmt::Display) -> StackError {
    StackError::new(Cause::Io, "draw the plots", format!("{error:#}"))
}

/// A file for results, made before there are any.
fn begun(path: &Path) -> Result<NewFile, StackError> {
    NewFile::begin(path).map_err(|error| failed(&error, path))
}

fn failed(error: &io::Error, path: &Path) -> StackError {
    StackError::at_path("write results to", error, path)
}

fn write_json(report: &Report, file: NewFile) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(report)?;
    bytes.push(b'\n');
    file.complete(&bytes)
}
