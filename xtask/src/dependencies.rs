//! Which folders may use which.
//!
//! `units <- integrity <- block <- {layers, media, exports, filesystem}`; protocols are pure and use only units and
//! integrity; `stack` builds devices and `server` serves them; only tools, perf and proofs use everything. A folder
//! that is not in the table below is an error, so that a new folder gets its rule together with its manifest.
//! Development dependencies are unrestricted, because a test may set up whatever it needs; except under `protocols/`,
//! whose crates are separate in order to stay pure. Deliberate faults (the feature `mutations`) are compiled only for
//! proofs. The lock files must have all dependencies: of this workspace, and of the one of the fuzz targets.

use anyhow::{Result, bail};

use crate::fuzz;
use crate::workspace::{self, DependencyKind, Member};

/// Which folders of the tree a folder may use. A pattern is a whole path or `folder/*`.
struct Rule {
    folder: &'static str,
    may_use: &'static [&'static str],
    /// True if the rule also applies to development dependencies.
    tests_too: bool,
}

const fn rule(folder: &'static str, may_use: &'static [&'static str]) -> Rule {
    Rule { folder, may_use, tests_too: false }
}

/// The dependencies of a device in memory, or of one made of other devices.
const DEVICE: &[&str] = &["units", "integrity", "block", "runtime/memory"];
/// The dependencies of a device of the operating system.
const SYSTEM: &[&str] = &["units", "integrity", "block", "runtime/memory", "runtime/reactor"];
/// The dependencies of crates that speak a protocol to the outside.
const NETWORK: &[&str] =
    &["units", "integrity", "block", "runtime/memory", "runtime/reactor", "protocols/*", "transport"];
/// The dependencies of crates that send NVM commands.
const NVME: &[&str] =
    &["units", "integrity", "block", "runtime/memory", "runtime/reactor", "protocols/*", "transport", "media/nvme"];
/// The dependencies of drives of this machine: these crates send NVM and SCSI commands, and ask the kernel what block
/// devices support.
const LINUX: &[&str] =
    &["units", "integrity", "block", "runtime/memory", "runtime/reactor", "runtime/ioctl", "protocols/*", "media/nvme"];
/// The dependencies of crates that serve devices over a network, on several cores.
const EXPORT: &[&str] = &[
    "units",
    "integrity",
    "block",
    "runtime/memory",
    "runtime/reactor",
    "protocols/*",
    "transport",
    "layers/cross-core",
];
/// The dependencies of the crate that serves devices to this machine's kernel, on several cores.
const UBLK: &[&str] =
    &["units", "integrity", "block", "runtime/memory", "runtime/reactor", "runtime/ublk", "layers/cross-core"];
/// The dependencies of the crate that builds stacks of devices: every medium and every layer that a target name can
/// name.
const STACK: &[&str] = &[
    "units",
    "integrity",
    "block",
    "runtime/memory",
    "runtime/reactor",
    "runtime/ioctl",
    "protocols/nvme",
    "media/*",
    "layers/mirror",
    "layers/multipath",
    "layers/offset",
    "layers/fault",
    "layers/stripe",
    "layers/cross-core",
    "filesystem/btrfs",
    "scrub",
];
/// The dependencies of the crate that serves stacks of devices: no program and no command line.
const SERVER: &[&str] = &[
    "units",
    "integrity",
    "block",
    "scrub",
    "runtime/memory",
    "runtime/reactor",
    "protocols/nvme",
    "media/file",
    "media/volume",
    "layers/mirror",
    "layers/multipath",
    "layers/cross-core",
    "exports/*",
    "stack",
];
/// The feature with deliberate faults.
const MUTATIONS: &str = "mutations";
const EVERYTHING: &[&str] = &["*"];

/// The first rule whose pattern matches a folder applies to it.
const RULES: &[Rule] = &[
    rule("units", &[]),
    rule("runtime/memory", &[]),
    rule("runtime/ioctl", &[]),
    rule("runtime/reactor", &["runtime/memory"]),
    // The kernel's interface for block devices in user space: commands and shared memory, none of our blocks.
    rule("runtime/ublk", &["runtime/reactor"]),
    rule("integrity", &["units", "runtime/memory"]),
    rule("block", &["units", "integrity", "runtime/memory"]),
    // It decides when to check which blocks, and records results. It has no device and no clock, and uses only types of
    // `block`.
    rule("scrub", &["units", "integrity", "block"]),
    // The transport carries the commands of the specification that it belongs to.
    Rule {
        folder: "protocols/nvme-tcp",
        may_use: &["units", "integrity", "runtime/memory", "protocols/nvme"],
        tests_too: true,
    },
    Rule { folder: "protocols/*", may_use: &["units", "integrity", "runtime/memory"], tests_too: true },
    // Connections, for any protocol.
    rule("transport", SYSTEM),
    rule("media/memory", DEVICE),
    rule("media/null", DEVICE),
    rule("media/volume", DEVICE),
    rule("media/file", SYSTEM),
    // The NVM command set as a block device, for any transport.
    rule("media/nvme", &["units", "integrity", "block", "runtime/memory", "protocols/nvme"]),
    rule("media/linux", LINUX),
    rule("media/nvme-tcp", NVME),
    rule("media/nbd", NETWORK),
    rule("media/iscsi", NETWORK),
    // It carries requests from core to core through the reactor.
    rule("layers/cross-core", SYSTEM),
    rule("layers/*", DEVICE),
    rule("exports/ublk", UBLK),
    rule("exports/*", EXPORT),
    rule("filesystem/btrfs-format", &["units", "integrity", "runtime/memory"]),
    // What makes and changes a filesystem; it opens no target.
    rule(
        "filesystem/btrfs-engine",
        &["units", "runtime/memory", "block", "filesystem/btrfs-format", "filesystem/btrfs"],
    ),
    // The protocol between the kernel and any filesystem; it depends on none, nor on blocks.
    rule("filesystem/fuse", &["runtime/ioctl", "runtime/reactor"]),
    // What programs do with files: mount them, and copy them out.
    rule(
        "filesystem/btrfs-fuse",
        &[
            "runtime/memory",
            "block",
            "filesystem/btrfs-format",
            "filesystem/btrfs",
            "filesystem/btrfs-engine",
            "filesystem/fuse",
        ],
    ),
    rule("filesystem/btrfs-extract", &["runtime/memory", "filesystem/btrfs-format", "filesystem/btrfs"]),
    rule("filesystem/*", &["units", "integrity", "block", "runtime/memory", "filesystem/btrfs-format"]),
    rule("stack", STACK),
    rule("server", SERVER),
    rule("tools", EVERYTHING),
    rule("perf", EVERYTHING),
    rule("proofs/*", EVERYTHING),
    rule("xtask", &[]),
];

/// Checks the workspace. Returns a readable line; the error lists every dependency that no rule allows.
pub fn check() -> Result<String> {
    let workspace = workspace::load()?;
    let wrong = refused(&workspace.members);
    if !wrong.is_empty() {
        bail!("dependencies that no rule allows:\n  {}", wrong.join("\n  "));
    }
    for manifest in ["Cargo.toml", fuzz::MANIFEST] {
        workspace::check_lock_file(manifest)?;
    }
    let count: usize = workspace.members.iter().map(|member| member.dependencies.len()).sum();
    Ok(format!("{} folders, {count} dependencies, all allowed; lock files complete", workspace.members.len()))
}

/// The faults of the graph, one sentence for each dependency or folder.
fn refused(members: &[Member]) -> Vec<String> {
    let mut wrong = Vec::new();
    for member in members {
        let Some(rule) = rule_of(&member.folder) else {
            wrong.push(format!("{}: no rule for this folder; give it one in xtask/src/dependencies.rs", member.folder));
            continue;
        };
        for used in &member.dependencies {
            if used.features.iter().any(|feature| feature == MUTATIONS) && !member.folder.starts_with("proofs/") {
                let (by, of) = (&member.folder, &used.folder);
                wrong.push(format!(
                    "{by} -> {of}: only proofs may ask for the feature {MUTATIONS}: faults put in on purpose"
                ));
            }
            let is_bound = used.kind == DependencyKind::Normal || rule.tests_too;
            if is_bound && !rule.may_use.iter().any(|pattern| fits(pattern, &used.folder)) {
                let tests = if used.kind == DependencyKind::Dev { " even in its tests" } else { "" };
                wrong.push(format!(
                    "{} -> {}: {} may use {}{tests}",
                    member.folder,
                    used.folder,
                    member.folder,
                    list(rule.may_use)
                ));
            }
        }
    }
    wrong
}

fn rule_of(folder: &str) -> Option<&'static Rule> {
    RULES.iter().find(|rule| fits(rule.folder, folder))
}

/// True if a pattern matches `folder`: its own path, `parent/*` for a folder directly below `parent`, or `*`.
fn fits(pattern: &str, folder: &str) -> bool {
    if pattern == "*" {
        return true;
    }
    match pattern.strip_suffix("/*") {
        Some(parent) => folder.strip_prefix(parent).and_then(|rest| rest.strip_prefix('/')).is_some_and(is_one_name),
        None => pattern == folder,
    }
}

fn is_one_name(rest: &str) -> bool {
    !rest.is_empty() && !rest.contains('/')
}

fn list(patterns: &[&str]) -> String {
    if patterns.is_empty() { "no other folder".to_owned() } else { format!("only {}", patterns.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn member(folder: &str, uses: &[&str], dev: &[&str]) -> Member {
        let of = |folders: &[&str], kind| -> Vec<Dependency> {
            folders
                .iter()
                .map(|folder| Dependency { folder: (*folder).to_owned(), kind, features: Vec::new() })
                .collect()
        };
        Member {
            folder: folder.to_owned(),
            dependencies: [of(uses, DependencyKind::Normal), of(dev, DependencyKind::Dev)].concat(),
            roots: Vec::new(),
            doctest: None,
        }
    }

    #[test]
    fn this_workspace_keeps_to_the_rules() {
        let summary = check().unwrap();
        assert!(summary.contains("all allowed"), "{summary}");
    }

    #[test]
    fn an_allowed_graph_passes() {
        let members = [
            member("units", &[], &["proofs/simulator"]),
            member("runtime/memory", &[], &[]),
            member("runtime/reactor", &["runtime/memory"], &[]),
            member("integrity", &["units", "runtime/memory"], &[]),
            member("block", &["units", "integrity"], &["media/memory"]),
            member("protocols/nvme", &["units", "integrity"], &["runtime/memory"]),
            member("protocols/nvme-tcp", &["protocols/nvme", "units"], &[]),
            member("layers/mirror", &["block", "units"], &["layers/fault", "media/memory"]),
            member("media/file", &["block", "runtime/reactor"], &["media/volume"]),
            member("transport", &["block", "runtime/reactor"], &[]),
            member("media/nvme-tcp", &["block", "runtime/reactor", "protocols/nvme", "transport"], &[]),
            member("exports/nbd", &["block", "protocols/nbd", "runtime/reactor", "layers/cross-core"], &[]),
            member("layers/cross-core", &["block", "runtime/reactor"], &["media/memory"]),
            member("stack", &["media/file", "layers/mirror", "runtime/reactor"], &[]),
            member("server", &["stack", "scrub", "layers/cross-core", "exports/nvme-tcp"], &[]),
            member("tools", &["server", "stack", "layers/mirror", "exports/nbd"], &["proofs/simulator"]),
            member("proofs/simulator", &["tools", "media/volume"], &[]),
        ];
        assert_eq!(refused(&members), Vec::<String>::new());
    }

    #[test]
    fn a_forbidden_dependency_is_refused_and_named() {
        for (from, to) in [
            ("units", "integrity"),
            ("integrity", "block"),
            ("block", "layers/offset"),
            ("block", "runtime/reactor"),
            ("runtime/memory", "units"),
            ("runtime/reactor", "block"),
            ("protocols/nvme", "block"),
            ("protocols/nvme", "runtime/reactor"),
            ("protocols/nvme", "protocols/nvme-tcp"),
            ("protocols/nvme-tcp", "runtime/reactor"),
            ("layers/offset", "layers/fault"),
            ("layers/offset", "runtime/reactor"),
            ("media/file", "media/volume"),
            ("media/memory", "runtime/reactor"),
            ("transport", "protocols/nbd"),
            ("transport", "media/nbd"),
            ("media/file", "protocols/nbd"),
            ("media/nvme", "runtime/reactor"),
            ("media/nbd", "media/nvme"),
            ("exports/nbd", "media/file"),
            ("exports/nbd", "layers/offset"),
            ("layers/mirror", "layers/cross-core"),
            ("filesystem/btrfs-format", "block"),
            ("filesystem/fuse", "filesystem/btrfs"),
            ("filesystem/btrfs", "filesystem/btrfs-extract"),
            ("filesystem/btrfs-fuse", "stack"),
            ("media/file", "tools"),
            ("media/file", "stack"),
            ("stack", "exports/nbd"),
            ("stack", "tools"),
            ("stack", "server"),
            ("server", "tools"),
            ("server", "media/nbd"),
            ("xtask", "units"),
            ("block", "/elsewhere/block"),
        ] {
            let wrong = refused(&[member(from, &["units", to], &[])]);
            assert!(wrong.iter().any(|line| line.starts_with(&format!("{from} -> {to}: "))), "{from} {to}: {wrong:?}");
        }
    }

    #[test]
    fn tests_of_a_protocol_keep_to_its_rule_and_other_tests_are_free() {
        assert_eq!(refused(&[member("layers/offset", &[], &["layers/fault"])]).len(), 0);
        let wrong = refused(&[member("protocols/nvme", &[], &["block"])]);
        assert_eq!(wrong.len(), 1);
        assert!(wrong[0].starts_with("protocols/nvme -> block: ") && wrong[0].ends_with("even in its tests"));
    }

    #[test]
    fn only_proofs_ask_for_faults_on_purpose() {
        let asking = |folder: &str, kind| {
            let mut member = member(folder, &[], &[]);
            let features = vec![MUTATIONS.to_owned()];
            member.dependencies.push(Dependency { folder: "media/volume".to_owned(), kind, features });
            refused(&[member])
        };
        assert_eq!(asking("proofs/crash", DependencyKind::Normal).len(), 0);
        for kind in [DependencyKind::Normal, DependencyKind::Dev] {
            let wrong = asking("tools", kind);
            assert!(wrong.len() == 1 && wrong[0].contains("only proofs may ask"), "{wrong:?}");
        }
    }

    #[test]
    fn a_folder_without_a_rule_is_refused() {
        for folder in ["gadgets", "media/tape", "runtime/other", "layers/a/b", "layers"] {
            let wrong = refused(&[member(folder, &[], &[])]);
            assert_eq!(wrong.len(), 1, "{folder}");
            assert!(wrong[0].starts_with(&format!("{folder}: no rule")), "{}", wrong[0]);
        }
    }
}
