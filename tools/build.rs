//! Names the commit that a release build is made of, for `sealblock --version`.
//!
//! Only release builds have it: a development build is made again and again between commits, and would be made anew for each. The
//! commit comes from `SEALBLOCK_COMMIT`, which whoever packages an archive of the sources may set, or else from the repository, whose
//! files are read here: no `git` is needed. Where neither is there, the version stands alone.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Set by who builds without a repository.
const VARIABLE: &str = "SEALBLOCK_COMMIT";
/// Digits of a commit that are shown.
const DIGITS: usize = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = env::var(VARIABLE).ok().filter(|commit| is_commit(commit));
    let commit = given.or_else(|| if is_release { of_repository() } else { None });
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match commit {
        Some(commit) => format!("{version} ({})", &commit[..commit.len().min(DIGITS)]),
        None => version,
    };
    println!("cargo::rustc-env=SEALBLOCK_VERSION={version}");
}

fn is_commit(text: &str) -> bool {
    text.len() >= 7 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The commit that the repository around this folder has checked out. What says so is looked at again when it changes.
fn of_repository() -> Option<String> {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").ok()?).parent()?.to_owned();
    let own = git_folder(&root.join(".git"))?;
    // A worktree has its branch by itself, and shares branches with the repository that it is of.
    let shared = fs::read_to_string(own.join("commondir")).map_or(own.clone(), |path| own.join(path.trim()));
    let head = watched(&own.join("HEAD"))?;
    let Some(branch) = head.trim().strip_prefix("ref: ") else { return Some(head.trim().to_owned()) };
    let loose = watched(&shared.join(branch)).map(|commit| commit.trim().to_owned());
    let packed = || {
        let refs = watched(&shared.join("packed-refs"))?;
        let mut lines = refs.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(_, name)| *name == branch).map(|(commit, _)| commit.to_owned())
    };
    loose.or_else(packed).filter(|commit| is_commit(commit))
}

/// The folder itself, or the one that a worktree's file names.
fn git_folder(path: &Path) -> Option<PathBuf> {
    match fs::read_to_string(path) {
        Ok(text) => text.trim().strip_prefix("gitdir: ").map(|folder| path.with_file_name(folder)),
        Err(_) => path.is_dir().then(|| path.to_owned()),
    }
}

/// A file's content, if it is there; the build is made again when it is another one.
fn watched(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text)
}
