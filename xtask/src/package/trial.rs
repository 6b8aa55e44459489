//! The life of a package: everything that an administrator does with it, from installation to removal.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::root::Root;
use super::service::Service;
use crate::step;
use crate::workspace::Workspace;

/// The folder with the package's units.
const UNITS: &str = "/usr/lib/systemd/system";
/// The units of the package.
const UNIT_FILES: [&str; 5] = [
    "sealblock.service",
    "sealblock.socket",
    "sealblock-nbd.socket",
    "sealblock-verify@.service",
    "sealblock-verify@.timer",
];
/// Some of the package's files.
const FILES: [&str; 6] = [
    "/usr/bin/sealblock",
    "/usr/share/man/man1/sealblock-serve.1.gz",
    "/etc/sealblock/sealblock.toml",
    "/usr/share/doc/sealblock/copyright",
    "/usr/share/doc/sealblock/changelog.gz",
    "/usr/share/doc/sealblock/changelog.Debian.gz",
];
/// The volume that is created, which belongs to the administrator and not to the package.
const VOLUME: &str = "/var/lib/sealblock/first.volume";
/// The highest exposure that `systemd-analyze security` may report, in tenths of its unit; 2.0 of 10 is well confined.
const MOST_EXPOSURE: &str = "--threshold=20";

/// Tries a package. Returns a readable line, which names what could not be tried.
pub fn run(workspace: &Workspace, package: &Path, log: &Path) -> Result<String> {
    let linted = lint(package)?;
    let root = Root::new()?;
    let printed = root.dpkg("--install", package)?;
    fs::write(log, printed).context("keeping the output of dpkg")?;
    for file in FILES {
        ensure!(root.path(file).is_file(), "the package has no {file}");
    }
    let units = units(&root)?;
    serve(&root)?;
    scheduled_verify(&root)?;
    without_uring(workspace, &root)?;
    enable(&root, "timers.target.wants", "sealblock-verify@.timer", "sealblock-verify@dev-sdb.timer")?;
    enable(&root, "multi-user.target.wants", "sealblock.service", "sealblock.service")?;
    root.dpkg("--purge", Path::new("sealblock"))?;
    let left = root.files()?;
    ensure!(left == [VOLUME], "after the package was purged there is {left:?}, and {VOLUME} should be");
    let bytes = fs::metadata(package).context("looking at the package")?.len();
    Ok(format!("{} KiB; installed, served, reloaded, verified, removed; {linted}; {units}", bytes >> 10))
}

/// Runs Debian's checker on the package, if it is installed.
fn lint(package: &Path) -> Result<String> {
    if !step::is_installed("lintian") {
        return Ok("not linted: there is no lintian".to_owned());
    }
    let mut lintian = Command::new("lintian");
    // Without settings of this user. The warning about running as root is not about the package.
    output_of(lintian.args(["--no-cfg", "--allow-root", "--fail-on", "error,warning"]).arg(package))?;
    Ok("no error or warning of lintian".to_owned())
}

/// Enables a unit as `systemctl enable` does, by a link, which a purge must remove.
fn enable(root: &Root, by: &str, unit: &str, name: &str) -> Result<()> {
    let folder = root.path("/etc/systemd/system").join(by);
    fs::create_dir_all(&folder).context("making a folder of enabled units")?;
    symlink(Path::new(UNITS).join(unit), folder.join(name)).with_context(|| format!("enabling {name}"))
}

/// Lets systemd create the user for the service, in a folder that serves as the root.
fn user(root: &Root, service: &str) -> Result<()> {
    let there = root.path("/tmp/users");
    fs::create_dir_all(there.join("etc")).context("making a folder for users")?;
    let described = root.path("/usr/lib/sysusers.d/sealblock.conf");
    let described = File::open(&described).with_context(|| format!("opening {}", described.display()))?;
    let mut sysusers = Command::new("systemd-sysusers");
    let output = sysusers.arg("--root").arg(&there).arg("-").stdin(described).output().context("making the user")?;
    let users = fs::read_to_string(there.join("etc/passwd")).unwrap_or_default();
    let user = users.lines().find(|line| line.contains(":/var/lib/sealblock:")).and_then(|line| line.split(':').next());
    let errors = String::from_utf8_lossy(&output.stderr);
    let user = user.with_context(|| format!("no user has the folder of volumes: {users}{errors}"))?;
    ensure!(service.lines().any(|line| line == format!("User={user}")), "the service does not run as {user}");
    fs::remove_dir_all(&there).context("removing users")
}

/// Lets systemd check the units, if it is installed.
fn units(root: &Root) -> Result<String> {
    if !step::is_installed("systemd-analyze") {
        return Ok("units not checked: there is no systemd-analyze".to_owned());
    }
    let copies = root.path("/tmp/units");
    fs::create_dir_all(&copies).context("making a folder for units")?;
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]);
    for name in UNIT_FILES {
        let unit = fs::read_to_string(root.path(UNITS).join(name)).with_context(|| format!("reading {name}"))?;
        // systemd also looks for the program.
        let program = root.path("/usr/bin/sealblock").display().to_string();
        fs::write(copies.join(name), unit.replace("/usr/bin/sealblock", &program)).context("copying a unit")?;
        verify.arg(copies.join(name));
    }
    // For an unknown key, systemd-analyze only prints a warning.
    let printed = output_of(&mut verify)?;
    ensure!(printed.trim().is_empty(), "systemd-analyze verify prints:\n{printed}");
    user(root, &fs::read_to_string(copies.join("sealblock.service")).context("reading the unit")?)?;
    for name in ["sealblock.service", "sealblock-verify@.service"] {
        let mut security = Command::new("systemd-analyze");
        security.args(["security", "--offline=true", "--no-pager", MOST_EXPOSURE]).arg(copies.join(name));
        output_of(&mut security)?;
    }
    fs::remove_dir_all(&copies).context("removing copies of units")?;
    Ok("units checked by systemd-analyze".to_owned())
}

/// Starts the service as it is shipped, gives it a volume, reloads it, writes, verifies, and stops it.
fn serve(root: &Root) -> Result<()> {
    let unit = fs::read_to_string(root.path(UNITS).join("sealblock.service")).context("reading the unit")?;
    // The manager would create these (`StateDirectory=`, `RuntimeDirectory=`).
    for folder in ["/var/lib/sealblock", "/run/sealblock"] {
        fs::create_dir_all(root.path(folder)).with_context(|| format!("making {folder}"))?;
    }
    let volume = root.path(VOLUME).display().to_string();
    let mut service = Service::start(&unit, root)?;
    service.expect_state("READY=1")?;
    ensure!(
        service.output_until_ready()?.contains("subsystem nqn.2026-11.io.sealblock:default\n"),
        "the shipped configuration serves"
    );
    sealblock(root, &["create", &volume, "--size", "64MiB"])?;
    let config = root.path("/etc/sealblock/sealblock.toml");
    let shipped = fs::read_to_string(&config).context("reading the configuration")?;
    let with_volume = shipped.replace("#[[subsystems.namespaces]]", "[[subsystems.namespaces]]");
    // A path that does not begin with / is relative to the configuration's folder, wherever the manager starts the
    // server.
    let with_volume = with_volume.replace("#target = \"/var", "target = \"../../var");
    fs::write(&config, with_volume).context("writing the configuration")?;
    service.reload()?;
    service.expect_state("RELOADING=1")?;
    service.expect_state("READY=1")?;
    let printed = service.output_until_ready()?;
    let uri = printed.split_whitespace().find(|word| word.starts_with("nvme+tcp://"));
    let uri = uri.with_context(|| format!("the reloaded server names no namespace:\n{printed}"))?;
    let program = root.path("/usr/bin/sealblock").display().to_string();
    sealblock(root, &["copy", &program, uri])?;
    let verified = sealblock(root, &["verify", uri])?;
    ensure!(verified.contains("clean"), "the served volume is not clean: {verified}");
    let control = root.path("/run/sealblock/control.sock").display().to_string();
    sealblock(root, &["scrub", "status", uri, "--control", &control])?;
    let errors = service.stop()?;
    ensure!(errors.is_empty(), "the server wrote to standard error:\n{errors}");
    sealblock(root, &["verify", &volume])?;
    fs::remove_file(root.path("/tmp/notify")).context("removing the manager's socket")
}

/// Runs the service for scheduled verification of the volume as a manager would: first clean, then with the exit status
/// for damage.
fn scheduled_verify(root: &Root) -> Result<()> {
    let unit = fs::read_to_string(root.path(UNITS).join("sealblock-verify@.service")).context("reading the unit")?;
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).context("the unit starts something")?;
    let volume = root.path(VOLUME).display().to_string();
    // The manager would create it (`StateDirectory=`); the instance's name is the escaped path.
    let state = root.path("/var/lib/sealblock-verify");
    fs::create_dir_all(&state).context("making the folder of a scheduled verify")?;
    let line = line.replace("%S", &root.path("/var/lib").display().to_string());
    let line = line.replace("%i", "var-lib-sealblock-first.volume").replace("%f", &volume);
    let mut words = line.split(' ');
    let program = root.path(words.next().context("the unit starts something")?);
    let mut arguments: Vec<&str> = words.collect();
    // The folder of the trial may be on a file system without its own device, for which it is not known how busy it is.
    let is_on_device = Command::new(&program).args(&arguments).output().context("running a scheduled verify")?;
    if String::from_utf8_lossy(&is_on_device.stderr).contains("--idle cannot determine") {
        arguments.retain(|word| *word != "--idle");
    }
    let clean = output_of(Command::new(&program).args(&arguments))?;
    ensure!(clean.contains(": clean"), "a scheduled verify prints: {clean}");
    sealblock(root, &["corrupt", &volume, "--lba", "9", "--kind", "data"])?;
    let damaged = Command::new(&program).args(&arguments).output().context("running a scheduled verify")?;
    ensure!(damaged.status.code() == Some(1), "a scheduled verify of a damaged volume ends with {}", damaged.status);
    let left: Vec<_> = fs::read_dir(&state).context("listing")?.flatten().map(|entry| entry.file_name()).collect();
    ensure!(left.is_empty(), "a scheduled verify leaves {left:?}");
    Ok(())
}

/// If io_uring is forbidden, the server logs that and what to do, and serves nevertheless.
fn without_uring(workspace: &Workspace, root: &Root) -> Result<()> {
    let forbid = workspace.built("examples/forbid_uring");
    for (error, needed) in [("EPERM", "seccomp filter"), ("ENOSYS", "CONFIG_IO_URING")] {
        let mut command = Command::new(&forbid);
        command.arg(error).arg(root.path("/usr/bin/sealblock"));
        command.args(["serve", "mem:1MiB", "--listen", "127.0.0.1:0", "--control", "none"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env_remove("SEALBLOCK_RUNTIME");
        let mut child = command.spawn().with_context(|| format!("starting {}", forbid.display()))?;
        let output = BufReader::new(child.stdout.take().context("standard output is a pipe")?);
        let is_ready = output.lines().map_while(Result::ok).any(|line| line == "ready");
        child.kill().context("ending the server")?;
        let output = child.wait_with_output().context("ending the server")?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(is_ready, "the server does not serve without io_uring:\n{errors}");
        let logged: Vec<&str> =
            errors.lines().filter(|line| line.contains(&format!("io_uring is not available ({error})"))).collect();
        ensure!(
            logged.len() == 1 && logged[0].contains(needed),
            "what to do is not logged once, with '{needed}':\n{errors}"
        );
    }
    Ok(())
}

/// Runs the installed program.
fn sealblock(root: &Root, words: &[&str]) -> Result<String> {
    output_of(Command::new(root.path("/usr/bin/sealblock")).args(words))
}

/// The output of a command, which must succeed.
fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {command:?}"))?;
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if !output.status.success() {
        bail!("{command:?} failed ({}):\n{printed}", output.status);
    }
    Ok(printed)
}
