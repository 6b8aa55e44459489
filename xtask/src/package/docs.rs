//! The documents of the package: the tree of the repository's documents, so that links between them lead to each other.
//!
//! What a link names and the package does not have, such as a folder of sources, loses its link and keeps its words.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

/// Files and folders of the repository that the package has.
const PARTS: [&str; 5] = ["README.md", "CHANGELOG.md", "SECURITY.md", "docs", "packaging/README.md"];

/// Writes the documents of a repository below a folder.
pub fn write(root: &Path, to: &Path) -> Result<()> {
    let mut files = BTreeSet::new();
    for part in PARTS {
        collect(root, Path::new(part), &mut files)?;
    }
    for file in &files {
        let from = root.join(file);
        let target = to.join(file);
        let folder = target.parent().context("a file is in a folder")?;
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let written = match file.extension().is_some_and(|end| end == "md") {
            true => {
                let text = fs::read_to_string(&from).with_context(|| format!("reading {}", from.display()))?;
                fs::write(&target, linked(&text, |link| is_there(file, link, &files)))
            }
            false => fs::copy(&from, &target).map(drop),
        };
        written.with_context(|| format!("writing {}", target.display()))?;
    }
    Ok(())
}

/// The files at a path, or below it.
fn collect(root: &Path, path: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    if !root.join(path).is_dir() {
        files.insert(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(root.join(path)).with_context(|| format!("listing {}", path.display()))? {
        collect(root, &path.join(entry.context("listing documents")?.file_name()), files)?;
    }
    Ok(())
}

/// True if a link in a file leads somewhere: within the file, to a page of the web, or to another file of the package.
fn is_there(file: &Path, link: &str, files: &BTreeSet<PathBuf>) -> bool {
    let path = link.split('#').next().unwrap_or_default();
    if path.is_empty() || link.contains("://") || link.starts_with("mailto:") {
        return true;
    }
    let mut at = file.parent().unwrap_or(Path::new("")).to_owned();
    for component in Path::new(path).components() {
        match component {
            Component::ParentDir if !at.pop() => return false,
            Component::ParentDir | Component::CurDir => {}
            other => at.push(other),
        }
    }
    files.contains(&at)
}

/// A text in Markdown in which only links that lead somewhere are links.
fn linked(text: &str, leads_somewhere: impl Fn(&str) -> bool) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(middle) = rest.find("](") {
        let Some(end) = rest[middle..].find(')').map(|end| middle + end) else { break };
        let link = &rest[middle + 2..end];
        // A link in a code block or behind a bracket that is none is not looked for: such text has no such path.
        match rest[..middle].rfind('[').filter(|_| !leads_somewhere(link) && !link.contains(char::is_whitespace)) {
            Some(start) => {
                out.push_str(&rest[..start]);
                out.push_str(&rest[start + 1..middle]);
            }
            None => out.push_str(&rest[..=end]),
        }
        rest = &rest[end + 1..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn only_links_that_lead_nowhere_lose_their_link() {
        let text = "See [a](docs/a.md), [`b`](../src), ![c](docs/c.svg) and [d](https://d.example/#e).";
        let kept = "See [a](docs/a.md), `b`, ![c](docs/c.svg) and [d](https://d.example/#e).";
        assert_eq!(linked(text, |link| link != "../src"), kept);
        assert_eq!(linked("[open](", |_| false), "[open](");
    }

    #[test]
    fn the_documents_of_the_package_have_no_dead_link() {
        let folder = tempfile::tempdir().unwrap();
        write(workspace::root(), folder.path()).unwrap();
        let mut files = BTreeSet::new();
        collect(folder.path(), Path::new(""), &mut files).unwrap();
        assert!(files.contains(Path::new("docs/formats/json.md")) && files.len() > 60, "{files:?}");
        for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "md")) {
            let text = fs::read_to_string(folder.path().join(file)).unwrap();
            let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            for link in links.filter(|link| !link.contains(char::is_whitespace)) {
                assert!(is_there(file, link, &files), "{}: {link}", file.display());
            }
        }
    }
}
