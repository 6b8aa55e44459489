//! File systems and block devices of a test's own, which take root. Where they cannot be had a test is skipped, visibly.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{is_root, skipped};

/// Runs a system's program; tells whether it succeeded.
pub fn system(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A mounted file system, unmounted in the end.
pub struct Mount(pub PathBuf);

impl Mount {
    pub fn new(at: PathBuf, arguments: &[&str]) -> Option<Mount> {
        std::fs::create_dir_all(&at).unwrap();
        let name = at.to_str().unwrap().to_owned();
        let arguments: Vec<_> = arguments.iter().copied().chain([name.as_str()]).collect();
        if is_root() && system("mount", &arguments) {
            return Some(Mount(at));
        }
        skipped(&format!("mount {} is not allowed here", arguments.join(" ")));
        None
    }

    pub fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        system("umount", &[self.path()]);
    }
}

/// A block device over a file, detached in the end.
pub struct Loop(pub String);

impl Loop {
    pub fn new(file: &Path, arguments: &[&str]) -> Option<Loop> {
        let output = Command::new("losetup").args(["--find", "--show"]).args(arguments).arg(file).output();
        match output {
            Ok(output) if is_root() && output.status.success() => {
                Some(Loop(String::from_utf8(output.stdout).unwrap().trim().to_owned()))
            }
            _ => {
                skipped("there are no loop devices here");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        system("losetup", &["--detach", &self.0]);
    }
}
