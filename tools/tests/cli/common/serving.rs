//! Mounts that a process of the binary serves.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use super::devices::system;
use super::{Place, has, is_root, skipped};

/// A mount that a process of ours serves; killed and unmounted when dropped.
pub struct Serving {
    child: Child,
    point: String,
}

impl Serving {
    /// Mounts on `point` of the place, with the arguments of `fs mount`.
    #[track_caller]
    pub fn new(place: &Place, arguments: &str) -> Serving {
        Serving::start(place, place.start(&format!("fs mount {arguments}")))
    }

    /// As [`Serving::new`], as root without the right to open any file, as in many containers.
    #[track_caller]
    pub fn without_search(place: &Place, arguments: &str) -> Serving {
        let command = place.command(&format!("fs mount {arguments}"));
        let mut limited = Command::new("setpriv");
        limited.arg("--bounding-set=-dac_read_search").arg(command.get_program()).args(command.get_args());
        limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        limited.current_dir(place.path("")).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Serving::start(place, limited.spawn().unwrap())
    }

    #[track_caller]
    fn start(place: &Place, mut child: Child) -> Serving {
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains(" is mounted on "), "{line}: {:?}", child.wait());
        let point = place.path("point").to_str().unwrap().to_owned();
        Serving { child, point }
    }

    /// Ends it by SIGTERM. Returns its exit status.
    pub fn end(self) -> i32 {
        self.end_by("-TERM")
    }

    /// Ends it by a signal. Returns its exit status.
    pub fn end_by(self, signal: &str) -> i32 {
        self.signal(signal);
        self.wait().code().unwrap_or(-1)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: &str) {
        assert!(system("kill", &[signal, &self.child.id().to_string()]));
    }

    /// Unmounts, and waits for the process.
    pub fn unmount(self) -> i32 {
        assert!(system("umount", &[&self.point]), "nobody uses {}", self.point);
        self.wait().code().unwrap_or(-1)
    }

    fn wait(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!said.contains("panicked"), "{said}");
        status
    }

    /// Kills the process, and unmounts what it leaves.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        system("umount", &["-l", &self.point]);
    }
}

/// Whether this machine lets the tests mount.
pub fn can_mount() -> bool {
    if Path::new("/dev/fuse").exists() && has("umount") && is_root() {
        return true;
    }
    skipped("mounts need root and /dev/fuse");
    false
}
