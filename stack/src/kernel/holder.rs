//! Finds the process that has a file in use, as far as the system shows it.
//!
//! The kernel lists locks with their processes. If no lock is listed, as of a block device that is open exclusively,
//! the open files of processes are searched; only root sees those of all users. The program may know more of a process that is a sealblock server.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::error::{Cause, StackError};
use crate::program::program;

/// How often the list of locks is looked at for those of a file that has some. The system hands it out in pieces, so while
/// others lock and unlock, a lock that stays may be missing.
const LOOKS: usize = 4;
/// Processes that are named.
const MAX_NAMED: usize = 3;

/// The user of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Holder {
    /// This process.
    Own,
    /// Other processes, by number.
    Others(Vec<u32>),
    /// The kernel: it is mounted there.
    Mounted(String),
    /// Not found.
    Unknown,
}

/// The failure of opening a file that is in use.
pub fn in_use(doing: &str, path: &Path) -> StackError {
    of_holder(doing, path, |why| StackError::new(Cause::Refused, doing, why).on(path.display()))
}

/// The failure of opening what shares bytes with a file or device that is in use, where one of the two writes.
pub fn in_use_below(doing: &str, path: &Path, below: &Path) -> StackError {
    let shared = format!("it shares its data with {}, which is", below.display());
    of_holder(doing, below, |why| StackError::new(Cause::Refused, doing, format!("{shared} {why}")).on(path.display()))
}

fn of_holder(doing: &str, path: &Path, failure: impl Fn(String) -> StackError) -> StackError {
    match holder_of(path) {
        Holder::Own if program().is_server => {
            failure("in use by this server already".to_owned()).advise("use another file or device")
        }
        Holder::Own => failure("in use by this command already".to_owned()).advise("give two different targets"),
        Holder::Others(pids) => {
            let named: Vec<String> = pids.iter().take(MAX_NAMED).map(|pid| process_text(*pid)).collect();
            let more = if pids.len() > MAX_NAMED { " and others" } else { "" };
            let why = format!("in use by another process, {}{more}", named.join(" and "));
            match pids.iter().find_map(|pid| (program().server_of)(*pid, path)) {
                Some((serves, advice)) => {
                    // What replaces the file, or reads its records, cannot use what the server exports.
                    let advice = if doing == "open" { &advice } else { "use another path, or stop the server first" };
                    failure(format!("{why}, {serves}")).advise(advice)
                }
                None => failure(why).advise("wait until the other process has closed it"),
            }
        }
        Holder::Mounted(at) => failure(format!("in use: it is mounted at {at}")).advise(format!("`umount {at}`")),
        Holder::Unknown => failure("in use by an unknown process".to_owned())
            .advise("wait until the other process has closed it; as root, the command may show which process it is"),
    }
}

/// Whether another process has a file in use and goes on running, so that waiting for it is useless.
pub fn held_by_live_process(path: &Path) -> bool {
    matches!(holder_of(path), Holder::Others(pids) if pids.iter().any(|pid| goes_on(*pid)))
}

/// Whether a process is there, and neither is ending nor has been sent SIGKILL.
fn goes_on(pid: u32) -> bool {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    is_running(&read("stat")) && !is_killed(&read("status"))
}

/// Whether `/proc/PID/stat` is of a process that is not ending.
fn is_running(stat: &str) -> bool {
    const PF_EXITING: u64 = 0x4;
    // The name before may hold blanks and brackets itself.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let [state, _, _, _, _, _, flags, ..] = fields[..] else { return false };
    !matches!(state, "Z" | "X" | "x") && flags.parse().is_ok_and(|flags: u64| flags & PF_EXITING == 0)
}

/// Whether SIGKILL waits for the process of `/proc/PID/status`.
fn is_killed(status: &str) -> bool {
    let pending = |line: &str| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    status.lines().filter_map(pending).any(|mask| mask >> (libc::SIGKILL - 1) & 1 == 1)
}

fn holder_of(path: &Path) -> Holder {
    let Ok(there) = fs::metadata(path) else { return Holder::Unknown };
    let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let device = (libc::major(there.dev()), libc::minor(there.dev()));
    let look = |_| lock_owners(&fs::read_to_string("/proc/locks").unwrap_or_default(), device, there.ino());
    let mut pids = (0..LOOKS).map(look).find(|pids| !pids.is_empty()).unwrap_or_default();
    // A killed process is listed until the kernel has ended its requests in flight.
    pids.retain(|pid| Path::new(&format!("/proc/{pid}")).exists());
    if pids.is_empty() {
        pids = openers(&canonical);
        // This process may have it open only to recognise its content.
        pids.retain(|pid| *pid != std::process::id());
    }
    match pids {
        pids if pids.contains(&std::process::id()) => Holder::Own,
        pids if !pids.is_empty() => Holder::Others(pids),
        _ if there.file_type().is_block_device() => mounted(&canonical).map_or(Holder::Unknown, Holder::Mounted),
        _ => Holder::Unknown,
    }
}

/// The processes that have locked a file, in the form of `proc_locks(5)`: writers first.
fn lock_owners(locks: &str, device: (u32, u32), inode: u64) -> Vec<u32> {
    let mut owners: Vec<(bool, u32)> = Vec::new();
    for line in locks.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // A waiting process has an arrow in the second column.
        let [_, "FLOCK", _, access, pid, file, ..] = fields[..] else { continue };
        let mut file = file.split(':');
        let mut hex = || file.next().and_then(|number| u32::from_str_radix(number, 16).ok());
        let is_device = (hex(), hex()) == (Some(device.0), Some(device.1));
        let is_it = is_device && file.next().and_then(|number| number.parse().ok()) == Some(inode);
        // A process of another namespace has no number here.
        if let Some(pid) = pid.parse().ok().filter(|pid| is_it && *pid > 0) {
            owners.push((access != "WRITE", pid));
        }
    }
    owners.sort_unstable();
    owners.dedup();
    owners.into_iter().map(|(_, pid)| pid).collect()
}

/// The processes that have a path open, as far as this user can see.
fn openers(path: &Path) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    let has_it = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().filter_map(Result::ok);
        files.filter_map(|file| fs::read_link(file.path()).ok()).any(|open| open == path)
    };
    pids.filter(has_it).collect()
}

fn mounted(device: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut mounts = mounts.lines().filter_map(|line| line.split_once(' '));
    let (_, rest) = mounts.find(|(source, _)| Path::new(source).canonicalize().is_ok_and(|source| source == device))?;
    Some(rest.split(' ').next()?.to_owned())
}

/// A process by its number and the name of its program.
pub fn process_text(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{pid} ({})", name.trim().replace(char::is_control, " ")),
        Err(_) => pid.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const LOCKS: &str = "\
1: FLOCK  ADVISORY  READ  22462 fe:00:5824677 0 EOF
2: FLOCK  ADVISORY  WRITE 22357 fe:00:5824677 0 EOF
2: -> FLOCK  ADVISORY  WRITE 1 fe:00:5824677 0 EOF
3: POSIX  ADVISORY  WRITE 2 fe:00:5824677 0 EOF
4: FLOCK  ADVISORY  READ 22462 fe:00:5824677 0 EOF
5: FLOCK  ADVISORY  READ 3 fe:01:5824677 0 EOF
6: FLOCK  ADVISORY  READ 4 fe:00:5824678 0 EOF
7: FLOCK  ADVISORY  READ -1 fe:00:7 0 EOF
8: FLOCK
9: OFDLCK ADVISORY  READ  -1 103:02:7 0 EOF
10: FLOCK ADVISORY  WRITE 5 103:02:8 0 EOF
";

    #[test]
    fn owners_of_locks_are_told_by_device_and_inode() {
        assert_eq!(lock_owners(LOCKS, (0xfe, 0), 5_824_677), [22357, 22462], "who may write first, and each once");
        assert_eq!(lock_owners(LOCKS, (0xfe, 1), 5_824_677), [3]);
        assert_eq!(lock_owners(LOCKS, (0xfe, 0), 7), [] as [u32; 0], "of another namespace");
        assert_eq!(lock_owners(LOCKS, (0x103, 2), 8), [5]);
        assert_eq!(lock_owners("", (0, 0), 0), [] as [u32; 0]);
    }

    #[test]
    fn a_lock_that_stays_is_found_while_others_come_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let stays = fs::File::create(folder.path().join("stays")).unwrap();
        stays.lock().unwrap();
        let is_over = AtomicBool::new(false);
        let come_and_go = |number: usize| {
            let name = |file: usize| folder.path().join(format!("{number}-{file}"));
            let files: Vec<fs::File> = (0..150).map(|file| fs::File::create(name(file)).unwrap()).collect();
            while !is_over.load(Ordering::Relaxed) {
                files.iter().for_each(|file| file.lock().unwrap());
                files.iter().for_each(|file| file.unlock().unwrap());
            }
        };
        std::thread::scope(|scope| {
            (0..2).for_each(|number| drop(scope.spawn(move || come_and_go(number))));
            let lost = (0..1000).filter(|_| holder_of(&folder.path().join("stays")) != Holder::Own).count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(lost, 0);
        });
    }

    #[test]
    fn a_process_that_ends_is_told_from_one_that_goes_on() {
        let stat = |state: &str, flags: u64| format!("7 (a b) c) {state} 1 7 7 0 -1 {flags} 100 0 0");
        assert!(is_running(&stat("S", 0x40_4000)) && is_running(&stat("D", 0)));
        assert!(!is_running(&stat("Z", 0)) && !is_running(&stat("D", 0x40_4004)) && !is_running(""));
        let status = |thread: &str, all: &str| {
            format!("Name:\tx\nSigPnd:\t{thread}\nShdPnd:\t{all}\nSigBlk:\t0000000000000100\n")
        };
        assert!(!is_killed(&status("0000000000004000", "0000000000000000")), "SIGTERM alone");
        assert!(is_killed(&status("0000000000000100", "0")) && is_killed(&status("0", "0000000000004100")));
        assert!(goes_on(std::process::id()) && !goes_on(u32::MAX));
    }

    #[test]
    fn a_file_that_another_process_has_locked_is_held_until_that_one_ends() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut flock = std::process::Command::new("flock");
        flock.arg("--close").arg(file.path()).args(["sh", "-c", "echo locked; read line"]);
        let piped = std::process::Stdio::piped;
        let mut process = flock.stdin(piped()).stdout(piped()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(process.stdout.take().unwrap()), &mut line).unwrap();
        assert!(held_by_live_process(file.path()), "{line}");
        drop(process.stdin.take());
        process.wait().unwrap();
        assert!(!held_by_live_process(file.path()));
    }

    #[test]
    fn a_file_that_this_process_has_locked_is_its_own() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(holder_of(file.path()), Holder::Unknown, "open and not locked, by this process alone");
        file.as_file().lock().unwrap();
        assert_eq!(holder_of(file.path()), Holder::Own);
        assert!(openers(&file.path().canonicalize().unwrap()).contains(&std::process::id()));
        let failure = in_use("open", file.path()).to_string();
        assert!(failure.contains("in use by this command already"), "{failure}");
    }

    #[test]
    fn what_cannot_be_told_is_said_so() {
        assert_eq!(holder_of(Path::new("/nowhere/v")), Holder::Unknown);
        let failure = in_use("open", Path::new("/nowhere/v")).to_string();
        assert!(failure.contains("in use by an unknown process"), "{failure}");
    }
}
