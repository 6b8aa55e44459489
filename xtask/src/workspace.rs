//! What the workspace consists of, as Cargo itself parses the manifests.
//!
//! Cargo resolves renames, workspace inheritance and target-specific tables, which a simple parser would not.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// When a dependency is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DependencyKind {
    /// To build or run the crate.
    Normal,
    /// For tests, examples and benchmarks only.
    Dev,
}

/// A dependency of a member: another folder of the tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dependency {
    /// The folder used, relative to the root.
    pub folder: String,
    /// When it is needed.
    pub kind: DependencyKind,
    /// Features that are requested.
    pub features: Vec<String>,
}

/// A crate of the workspace.
#[derive(Clone, Debug)]
pub struct Member {
    /// Folder relative to the root, with `/` between its parts.
    pub folder: String,
    /// Folders of the tree that the crate depends on.
    pub dependencies: Vec<Dependency>,
    /// Root source files of its targets, relative to the root; not those of tests.
    pub roots: Vec<String>,
    /// Whether the examples in the documentation of its library are tested; `None` without a library.
    pub doctest: Option<bool>,
}

/// The members and the folders of a workspace.
#[derive(Debug)]
pub struct Workspace {
    /// The folder of the root manifest.
    pub root: PathBuf,
    /// The folder for Cargo's build output.
    pub target: PathBuf,
    /// All members.
    pub members: Vec<Member>,
}

/// The Cargo that runs this program, so that every step uses the toolchain that `rust-toolchain.toml` names.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The root of the repository: the folder above this crate's.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// Loads the workspace from Cargo. If a manifest cannot be read.
pub fn load() -> Result<Workspace> {
    parse(&metadata("Cargo.toml")?)
}

impl Workspace {
    /// The path of a program built in the dev profile; for an example, put `examples/` before its name.
    pub fn built(&self, program: &str) -> PathBuf {
        self.target.join("debug").join(program)
    }

    /// The members of another workspace inside this one, with its manifest at this path below the root.
    pub fn members_of(&self, manifest: &str) -> Result<Vec<Member>> {
        members(&metadata(manifest)?, &self.root)
    }
}

/// Checks that the lock file beside a manifest has what the manifest and those of its dependencies in this tree need. If
/// it has not, a build that may not change it fails, perhaps after many minutes.
pub fn check_lock_file(manifest: &str) -> Result<()> {
    cargo_metadata(&["--locked", "--manifest-path", manifest]).map(drop)
}

fn metadata(manifest: &str) -> Result<Value> {
    let output = cargo_metadata(&["--no-deps", "--manifest-path", manifest])?;
    serde_json::from_slice(&output).context("reading the output of cargo metadata")
}

fn cargo_metadata(options: &[&str]) -> Result<Vec<u8>> {
    let output = cargo().args(["metadata", "--format-version", "1"]).args(options).output();
    let output = output.context("starting cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

fn parse(metadata: &Value) -> Result<Workspace> {
    let root = PathBuf::from(text(metadata, "workspace_root")?);
    let target = PathBuf::from(text(metadata, "target_directory")?);
    let members = members(metadata, &root)?;
    Ok(Workspace { root, target, members })
}

fn members(metadata: &Value, root: &Path) -> Result<Vec<Member>> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    packages.iter().map(|package| member(package, root)).collect()
}

fn member(package: &Value, root: &Path) -> Result<Member> {
    let manifest = Path::new(text(package, "manifest_path")?);
    let folder = relative(manifest.parent().unwrap_or(manifest), root);
    let listed = package["dependencies"].as_array().context("a package lists no dependencies")?;
    let dependencies = listed.iter().filter_map(|dependency| {
        let path = dependency["path"].as_str()?;
        let kind = if dependency["kind"] == "dev" { DependencyKind::Dev } else { DependencyKind::Normal };
        let features = dependency["features"].as_array().into_iter().flatten();
        let features = features.filter_map(|name| Some(name.as_str()?.to_owned())).collect();
        Some(Dependency { folder: relative(Path::new(path), root), kind, features })
    });
    let library = targets(package).find(|target| is_of(target, "lib"));
    let doctest = library.and_then(|library| library["doctest"].as_bool());
    Ok(Member { folder, dependencies: dependencies.collect(), roots: roots(package, root), doctest })
}

fn targets(package: &Value) -> impl Iterator<Item = &Value> {
    package["targets"].as_array().into_iter().flatten()
}

fn is_of(target: &Value, kind: &str) -> bool {
    target["kind"].as_array().into_iter().flatten().any(|own| own == kind)
}

fn roots(package: &Value, root: &Path) -> Vec<String> {
    let targets = targets(package).filter(|target| !is_of(target, "test") && !is_of(target, "custom-build"));
    targets.filter_map(|target| Some(relative(Path::new(target["src_path"].as_str()?), root))).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("cargo metadata has no '{key}'"))
}

/// `path` relative to `root`; a path elsewhere stays complete, so that no rule matches it.
fn relative(path: &Path, root: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn metadata_becomes_folders_and_dependencies() {
        let metadata = json!({
            "workspace_root": "/w", "target_directory": "/w/target",
            "packages": [{
                "name": "b", "manifest_path": "/w/layers/b/Cargo.toml",
                "targets": [
                    {"kind": ["lib"], "src_path": "/w/layers/b/src/lib.rs", "doctest": false},
                    {"kind": ["bin"], "src_path": "/w/layers/b/src/main.rs"},
                    {"kind": ["test"], "src_path": "/w/layers/b/tests/t.rs"},
                ],
                "dependencies": [
                    {"name": "u", "path": "/w/units", "kind": null},
                    {"name": "t", "path": "/w/tools", "kind": "dev"},
                    {"name": "x", "path": "/elsewhere/x", "kind": "build"},
                    {"name": "serde", "kind": null},
                ],
            }],
        });
        let workspace = parse(&metadata).unwrap();
        let member = &workspace.members[0];
        assert_eq!(member.folder, "layers/b");
        assert_eq!(member.doctest, Some(false));
        assert_eq!(member.roots, ["layers/b/src/lib.rs", "layers/b/src/main.rs"]);
        let found: Vec<_> = member.dependencies.iter().map(|d| (d.folder.as_str(), d.kind)).collect();
        assert_eq!(
            found,
            [
                ("units", DependencyKind::Normal),
                ("tools", DependencyKind::Dev),
                ("/elsewhere/x", DependencyKind::Normal)
            ]
        );
    }

    #[test]
    fn features_are_those_that_are_asked_for() {
        let package = json!({
            "manifest_path": "/w/b/Cargo.toml",
            "dependencies": [{"path": "/w/u", "kind": null, "features": ["f", "g"]}, {"path": "/w/v", "kind": null}],
        });
        let member = member(&package, Path::new("/w")).unwrap();
        let features: Vec<_> = member.dependencies.iter().map(|used| used.features.join(" ")).collect();
        assert_eq!(features, ["f g", ""]);
    }

    #[test]
    fn metadata_without_packages_is_refused() {
        let error = parse(&json!({"workspace_root": "/w", "target_directory": "/t"})).unwrap_err();
        assert!(error.to_string().contains("no packages"), "{error}");
    }
}
