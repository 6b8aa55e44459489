//! Tests the program as a script would use it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use sealblock_proofs_btrfs_images::{has_mounts, skip};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sealblock-proofs-btrfs-images")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_manifest_is_shown_and_compared_with_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (tree, file) = (folder.path().join("tree"), folder.path().join("manifest"));
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), b"content").unwrap();
    // Reading may update the access time, so the first output is not compared.
    run(&["show", name(&tree)]);
    let shown = run(&["show", name(&tree)]);
    assert!(shown.status.success() && text(&shown.stdout).starts_with("sealblock manifest 1\n-e dir "));
    fs::write(&file, &shown.stdout).unwrap();
    let equal = run(&["compare", name(&file), name(&tree)]);
    assert_eq!((equal.status.code(), text(&equal.stdout)), (Some(0), ""));

    fs::write(tree.join("file"), b"another").unwrap();
    let differs = run(&["compare", name(&file), name(&tree)]);
    assert_eq!(differs.status.code(), Some(1));
    assert!(text(&differs.stdout).contains("file: content: expected "), "{}", text(&differs.stdout));
}

#[test]
fn errors_and_invalid_arguments_are_reported() {
    for (arguments, code, why) in [
        (&["show", "/no/such/folder"][..], 3, "/no/such/folder: No such file"),
        (&["compare", "/no/such/folder", "/proc/version"], 3, "/no/such/folder"),
        (&["compare", "/proc/version", "/proc/version"], 3, "/proc/version: not a manifest"),
        (&["make", "/tmp", "no-such-name"], 3, "no-such-name; there are crc32c, "),
        (&["compare", "/tmp"], 2, "Exit status"),
        (&[], 2, "Exit status"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}");
        assert!(text(&output.stderr).contains(why), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_filesystem_is_made_to_keep() {
    if let Err(why) = has_mounts() {
        return skip(&why);
    }
    let folder = tempfile::tempdir().unwrap();
    let made = run(&["make", name(folder.path()), "many"]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert_eq!(text(&made.stdout), "many: 1 devices, 3008 paths\n");
    let manifest = fs::read_to_string(folder.path().join("many.manifest")).unwrap();
    assert!(manifest.lines().count() == 3009 && folder.path().join("many-0").exists());
}
