//! One step of the check: its name, what it runs, and its elapsed and CPU time.
//!
//! The output of a command goes to a file and is printed only if the command fails, so that a successful run has one
//! line per step, and a failed one ends with the failure. The name is printed before the step begins, so that a step
//! that hangs can be identified.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::workspace::{self, Workspace};

/// The result of a step that did not fail.
#[derive(Debug, PartialEq, Eq)]
pub enum Done {
    /// It ran; this line is printed.
    Ok(String),
    /// It ran except for a part that this machine cannot run, which this line names.
    Partly(String),
    /// It did not run, for this reason.
    Skipped(String),
}

/// Ticks per second in `/proc`. Linux uses this unit there whatever its internal clock is (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// The beginning of the first line of every run.
pub const HEADING: &str = "checking ";

/// Runs steps one after the other and prints the result of each.
pub struct Steps<S> {
    logs: PathBuf,
    is_selected: S,
    started: Times,
    done: Vec<(&'static str, Times)>,
    failed: Option<&'static str>,
    beside: Vec<Beside>,
}

/// Steps that another process of this program runs at the lowest priority.
struct Beside {
    process: Child,
    output: PathBuf,
}

/// Seconds, of a moment or a duration.
#[derive(Clone, Copy)]
struct Times {
    wall_s: f64,
    cpu_s: f64,
}

impl<S: Fn(&str) -> bool> Steps<S> {
    /// Steps whose output goes to the folder `logs`, which is created. Steps whose names are not selected do not run.
    pub fn new(logs: PathBuf, is_selected: S) -> Result<Steps<S>> {
        fs::create_dir_all(&logs).with_context(|| format!("making {}", logs.display()))?;
        let (started, done) = (Times::now(), Vec::new());
        Ok(Steps { logs, is_selected, started, done, failed: None, beside: Vec::new() })
    }

    /// Lets another process run these steps from now on, with these flags, unless a step has failed. [`Steps::finish`]
    /// waits for it and prints its lines.
    pub fn start_beside(&mut self, names: &[&str], flags: &[&str]) -> Result<()> {
        if self.failed.is_some() {
            return Ok(());
        }
        // Cargo may have relinked this program since it started; then its path no longer exists, but the kernel still
        // has the program.
        let program = format!("/proc/{}/exe", std::process::id());
        let output = self.logs.join(format!("beside-{}.log", self.beside.len()));
        let file = File::create(&output).with_context(|| format!("making {}", output.display()))?;
        let errors = file.try_clone().context("sharing the log file")?;
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(program).args(["check", "--beside"]).args(flags).args(names);
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let process = command.spawn().context("starting nice")?;
        self.beside.push(Beside { process, output });
        Ok(())
    }

    /// Waits for the steps of other processes, and prints their output.
    fn wait_for_beside(&mut self) -> Result<()> {
        for Beside { mut process, output } in std::mem::take(&mut self.beside) {
            let started = Times::now();
            let status = process.wait().context("waiting for the steps beside")?;
            let text = fs::read_to_string(&output).with_context(|| format!("reading {}", output.display()))?;
            println!("beside, in another process at low priority:");
            text.lines().filter(|line| !line.starts_with(HEADING)).for_each(|line| println!("{line}"));
            self.done.push(("beside", Times::now().since(started)));
            if !status.success() {
                self.failed.get_or_insert("beside");
            }
        }
        Ok(())
    }

    /// Runs one step if it is selected, unless an earlier one failed. Prints its line.
    pub fn run(&mut self, name: &'static str, step: impl FnOnce(&Path) -> Result<Done>) {
        if self.failed.is_some() || !(self.is_selected)(name) {
            return;
        }
        print!("{name:<12} ");
        // If standard output is closed, this is noticed at the latest at the end of the line.
        io::stdout().flush().ok();
        let started = Times::now();
        let result = step(&self.logs.join(format!("{name}.log")));
        let times = Times::now().since(started);
        self.done.push((name, times));
        let times = times.to_text();
        match result {
            Ok(Done::Ok(detail) | Done::Partly(detail)) => println!("ok      {times}  {detail}"),
            Ok(Done::Skipped(why)) => println!("skipped {times}  {why}"),
            Err(error) => {
                println!("FAILED  {times}");
                eprintln!("\n{error:#}");
                self.failed = Some(name);
            }
        }
    }

    /// Ends the run: prints the times of the steps, and `tests` about the times of tests. If a step failed; the error
    /// has its name.
    pub fn finish(mut self, tests: &str) -> Result<()> {
        self.wait_for_beside()?;
        let times = Times::now().since(self.started);
        if let Some(name) = self.failed {
            bail!("'{name}' failed after {:.1} s; the steps behind it did not run", times.wall_s);
        }
        self.done.sort_by(|(_, a), (_, b)| b.wall_s.total_cmp(&a.wall_s));
        println!("\nslowest steps");
        for (name, times) in &self.done {
            println!("{name:<12} {}", times.to_text());
        }
        println!("{tests}\nall well     {}", times.to_text());
        Ok(())
    }

    /// Ends a run of named steps. If a step failed, or one of the names is not a step; the error has the name.
    pub fn finish_named(self, names: &[&str]) -> Result<()> {
        if let Some(name) = self.failed {
            bail!("'{name}' failed; the steps behind it did not run");
        }
        let unknown = names.iter().find(|name| self.done.iter().all(|(done, _)| done != *name));
        unknown.map_or(Ok(()), |name| bail!("'{name}' is no step of the check"))
    }
}

impl Times {
    fn now() -> Times {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        // If /proc cannot be read, CPU time is shown as 0.
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let ticks = cpu_ticks(&stat).unwrap_or_default();
        Times { wall_s: START.elapsed().as_secs_f64(), cpu_s: ticks as f64 / TICKS_PER_SECOND }
    }

    fn since(self, before: Times) -> Times {
        Times { wall_s: self.wall_s - before.wall_s, cpu_s: self.cpu_s - before.cpu_s }
    }

    fn to_text(self) -> String {
        format!("{:>7.1} s  {:>7.1} s CPU", self.wall_s, self.cpu_s)
    }
}

/// CPU time of a process and of its children that have ended, from its `/proc/PID/stat`: fields 14 to 17 of proc(5).
fn cpu_ticks(stat: &str) -> Option<u64> {
    // The second field, a file name in parentheses, may contain anything.
    let (_, from_third) = stat.rsplit_once(") ")?;
    from_third.split(' ').skip(11).take(4).map(|ticks| ticks.parse::<u64>().ok()).sum()
}

/// Runs a command with no input, and with its output in `log`. Returns the output, which an error contains too.
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

/// True if a program of this name is installed.
pub fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The path of a tool that Cargo builds once, into the target folder. The version is part of the path, so another
/// version is built anew.
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
    // The tools run for seconds, but optimising them would take minutes. Code for unwinding is part of what is
    // compiled, so it is left out.
    for (setting, value) in [("OPT_LEVEL", "0"), ("LTO", "off"), ("DEBUG", "0"), ("PANIC", "abort")] {
        install.env(format!("CARGO_PROFILE_RELEASE_{setting}"), value);
    }
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
        let mut steps = Steps::new(logs("steps"), |_| true).unwrap();
        let mut ran = Vec::new();
        steps.run("first", |_| Ok(Done::Ok(String::new())));
        steps.run("second", |_| bail!("broken"));
        steps.run("third", |_| {
            ran.push("third");
            Ok(Done::Ok(String::new()))
        });
        fs::remove_dir_all(logs("steps")).unwrap();
        let error = steps.finish("").unwrap_err().to_string();
        assert!(error.starts_with("'second' failed"), "{error}");
        assert!(ran.is_empty());
    }

    #[test]
    fn steps_without_a_failure_are_well() {
        let mut steps = Steps::new(logs("well"), |_| true).unwrap();
        steps.run("only", |_| Ok(Done::Skipped("for the test".to_owned())));
        fs::remove_dir_all(logs("well")).unwrap();
        assert!(steps.finish("").is_ok());
    }

    #[test]
    fn steps_beside_that_did_not_start_fail_the_run() {
        let folder = logs("beside");
        let mut steps = Steps::new(folder.clone(), |_| true).unwrap();
        // The program of this test does not know these arguments.
        steps.start_beside(&["docs"], &[]).unwrap();
        let error = steps.finish("").unwrap_err().to_string();
        let said = fs::read_to_string(folder.join("beside-0.log")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert!(error.starts_with("'beside' failed"), "{error}");
        assert!(said.contains("'beside'"), "{said}");
    }

    #[test]
    fn processor_time_is_read_behind_any_file_name() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194304 88 900 0 0 10 2 300 40 20 0 1 0 5 6 7";
        assert_eq!(cpu_ticks(stat), Some(352));
        assert_eq!(cpu_ticks("7 (a) S 1 7 7 0 -1 4194304 88 900 0 0 ten 2 300 40 20"), None);
        assert_eq!(cpu_ticks(""), None);
        assert!(cpu_ticks(&fs::read_to_string("/proc/self/stat").unwrap()).is_some());
    }

    #[test]
    fn a_command_returns_its_output_and_fails_with_it() {
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
