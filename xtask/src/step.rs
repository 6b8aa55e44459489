//! One step of the check: a name, what it runs, how long it took.
//!
//! The output of a command goes to a file and is shown only when the command fails, so that a good run is one line a step
//! and a bad one ends with what is bad. The name stands on the screen before the work begins: a step that hangs is known.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Workspace};

/// How a step went, when it did not fail.
#[derive(Debug, PartialEq, Eq)]
pub enum Done {
    /// It ran, and this is worth saying.
    Ok(String),
    /// It did not run, and this is why.
    Skipped(String),
}

/// Runs steps one after the other and says how each went.
pub struct Steps {
    logs: PathBuf,
    started: Instant,
    failed: Option<&'static str>,
}

impl Steps {
    /// Steps whose output goes to the folder `logs`, which is made.
    pub fn new(logs: PathBuf) -> Result<Steps> {
        fs::create_dir_all(&logs).with_context(|| format!("making {}", logs.display()))?;
        Ok(Steps { logs, started: Instant::now(), failed: None })
    }

    /// Runs one step, unless one before it failed. Prints its line.
    pub fn run(&mut self, name: &'static str, step: impl FnOnce(&Path) -> Result<Done>) {
        if self.failed.is_some() {
            return;
        }
        print!("{name:<12} ");
        // A closed standard output is noticed at the end of the line at the latest.
        io::stdout().flush().ok();
        let started = Instant::now();
        let result = step(&self.logs.join(format!("{name}.log")));
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(Done::Ok(detail)) => println!("ok      {seconds:>7.1} s  {detail}"),
            Ok(Done::Skipped(why)) => println!("skipped {seconds:>7.1} s  {why}"),
            Err(error) => {
                println!("FAILED  {seconds:>7.1} s");
                eprintln!("\n{error:#}");
                self.failed = Some(name);
            }
        }
    }

    /// The end of the run: fails with the name of the step that did.
    pub fn finish(self) -> Result<()> {
        let seconds = self.started.elapsed().as_secs_f64();
        match self.failed {
            Some(name) => bail!("'{name}' failed after {seconds:.1} s; the steps behind it did not run"),
            None => {
                println!("all well     {seconds:>15.1} s");
                Ok(())
            }
        }
    }
}

/// Runs a command with no input and its output in `log`. Answers with the output; fails with it, too.
pub fn run(command: &mut Command, log: &Path) -> Result<String> {
    let shown = shown(command);
    let file = File::create(log).with_context(|| format!("making {}", log.display()))?;
    let errors = file.try_clone().context("sharing the log file")?;
    let status = command.stdin(Stdio::null()).stdout(file).stderr(errors).status();
    let status = status.with_context(|| format!("starting `{shown}`"))?;
    let output = fs::read(log).with_context(|| format!("reading {}", log.display()))?;
    let output = String::from_utf8_lossy(&output).into_owned();
    if !status.success() {
        bail!("{output}\n`{shown}` failed ({status}); all of its output is in {}", log.display());
    }
    Ok(output)
}

/// True if a program of this name is there.
pub fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The path of a tool that Cargo builds: once, into the target folder. The version is part of the path, so another one is
/// built anew.
pub fn tool(workspace: &Workspace, name: &str, version: &str, log: &Path) -> Result<PathBuf> {
    let tools = workspace.target.join("tools");
    let home = tools.join(format!("{name}-{version}"));
    let program = home.join("bin").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if program.is_file() {
        return Ok(program);
    }
    print!("(building {name} {version}, once) ");
    let build = tools.join("build");
    let mut install = workspace::cargo();
    install.args(["install", "--locked", "--version", version]);
    // They run for seconds and would be optimised for minutes.
    install.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_LTO", "off");
    install.arg("--root").arg(&home).arg("--target-dir").arg(&build).arg(name);
    run(&mut install, log).with_context(|| format!("{name} is needed; `cargo xtask check --fast` does without it"))?;
    fs::remove_dir_all(&build).with_context(|| format!("removing {}", build.display()))?;
    Ok(program)
}

/// The command as a person would type it.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
    std::iter::once(name).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logs(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()))
    }

    #[test]
    fn the_steps_behind_a_failure_do_not_run() {
        let mut steps = Steps::new(logs("steps")).unwrap();
        let mut ran = Vec::new();
        steps.run("first", |_| Ok(Done::Ok(String::new())));
        steps.run("second", |_| bail!("broken"));
        steps.run("third", |_| {
            ran.push("third");
            Ok(Done::Ok(String::new()))
        });
        fs::remove_dir_all(logs("steps")).unwrap();
        let error = steps.finish().unwrap_err().to_string();
        assert!(error.starts_with("'second' failed"), "{error}");
        assert!(ran.is_empty());
    }

    #[test]
    fn steps_without_a_failure_are_well() {
        let mut steps = Steps::new(logs("well")).unwrap();
        steps.run("only", |_| Ok(Done::Skipped("for the test".to_owned())));
        fs::remove_dir_all(logs("well")).unwrap();
        assert!(steps.finish().is_ok());
    }

    #[test]
    fn a_command_answers_with_its_output_and_fails_with_it() {
        let folder = logs("command");
        fs::create_dir_all(&folder).unwrap();
        let log = folder.join("a.log");
        let said = run(Command::new("sh").args(["-c", "echo out; echo err >&2; cat"]), &log).unwrap();
        assert_eq!(said, "out\nerr\n");
        let error = run(Command::new("sh").args(["-c", "echo bad; exit 3"]), &log).unwrap_err().to_string();
        fs::remove_dir_all(&folder).unwrap();
        assert!(error.starts_with("bad\n") && error.contains("`sh -c") && error.contains("exit status: 3"), "{error}");
    }

    #[test]
    fn a_program_that_is_absent_is_named() {
        let folder = logs("absent");
        fs::create_dir_all(&folder).unwrap();
        let error = run(&mut Command::new("no-such-program-here"), &folder.join("a.log")).unwrap_err();
        fs::remove_dir_all(&folder).unwrap();
        assert!(format!("{error:#}").contains("starting `no-such-program-here`"), "{error:#}");
    }
}
