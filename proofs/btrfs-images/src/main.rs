//! Makes filesystems of the chosen set to keep, prints manifests, and compares them, for uses outside the tests of this
//! workspace, such as a mount that another process serves.

use std::path::Path;
use std::process::ExitCode;

use sealblock_proofs_btrfs_images::manifest::Manifest;
use sealblock_proofs_btrfs_images::{sets, skip};

const USAGE: &str = "\
sealblock-proofs-btrfs-images make FOLDER [NAME...]    the filesystems of the set that the environment chooses, or
                                                       those of these names, each with NAME.manifest beside it
sealblock-proofs-btrfs-images show FOLDER              the manifest of a folder
sealblock-proofs-btrfs-images compare EXPECTED FOUND   two manifests, each of a folder or in a file

Exit status: 0 when all is well or equal, 1 for a difference, 2 for a wrong command line, 3 for what cannot be done.";

/// Exit statuses of failures.
enum Failure {
    /// The manifests differ.
    Differs,
    /// An operation failed.
    Cannot(String),
    /// The command line is invalid.
    Usage,
}

impl From<String> for Failure {
    fn from(why: String) -> Failure {
        Failure::Cannot(why)
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["make", folder, ref names @ ..] => make(Path::new(folder), names),
        ["show", folder] => show(Path::new(folder)),
        ["compare", expected, found] => compare(Path::new(expected), Path::new(found)),
        _ => Err(Failure::Usage),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Differs) => ExitCode::from(1),
        Err(Failure::Usage) => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
        Err(Failure::Cannot(why)) => {
            eprintln!("{why}");
            ExitCode::from(3)
        }
    }
}

fn make(folder: &Path, names: &[&str]) -> Result<(), Failure> {
    let recipes = sets::chosen();
    if let Some(unknown) = names.iter().find(|name| !recipes.iter().any(|recipe| recipe.name == **name)) {
        let known: Vec<_> = recipes.iter().map(|recipe| recipe.name.as_str()).collect();
        return Err(Failure::Cannot(format!("no filesystem is called {unknown}; there are {}", known.join(", "))));
    }
    for recipe in recipes.iter().filter(|recipe| names.is_empty() || names.contains(&recipe.name.as_str())) {
        match recipe.make(folder) {
            Ok(made) => {
                let manifest = folder.join(format!("{}.manifest", recipe.name));
                let written = std::fs::write(&manifest, made.manifest.to_text());
                written.map_err(|error| format!("{}: {error}", manifest.display()))?;
                println!("{}: {} devices, {} paths", recipe.name, made.images.len(), made.manifest.entries.len());
            }
            // If this machine cannot make a filesystem, the others are still made, unless it was named on the command
            // line.
            Err(why) if names.is_empty() => skip(&why),
            Err(why) => return Err(Failure::Cannot(why)),
        }
    }
    Ok(())
}

fn show(folder: &Path) -> Result<(), Failure> {
    print!("{}", Manifest::scan(folder)?.to_text());
    Ok(())
}

fn compare(expected: &Path, found: &Path) -> Result<(), Failure> {
    let lines = manifest(expected)?.difference(&manifest(found)?);
    lines.iter().for_each(|line| println!("{line}"));
    if lines.is_empty() { Ok(()) } else { Err(Failure::Differs) }
}

/// The manifest of a folder, or from a file.
fn manifest(path: &Path) -> Result<Manifest, Failure> {
    if path.is_dir() {
        return Ok(Manifest::scan(path)?);
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(Manifest::from_text(&text).map_err(|why| format!("{}: {why}", path.display()))?)
}
