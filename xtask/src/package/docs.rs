//! The documents of the package: the same tree as in the repository, so that links between them work.
//!
//! The changelogs are beside them, under the names that Debian requires.
//!
//! A link to something that the package does not have, such as a folder of sources, is replaced by its text.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

/// Files and folders of the repository that the package has.
const PARTS: [&str; 4] = ["README.md", "SECURITY.md", "docs", "packaging/README.md"];

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

/// Writes the two changelogs that Debian requires, before compression: that of the program, and that of the package.
/// Returns their paths.
pub fn write_changelogs(root: &Path, to: &Path) -> Result<[PathBuf; 2]> {
    let text = fs::read_to_string(root.join("CHANGELOG.md")).context("reading the changelog")?;
    let package = fs::read_to_string(root.join("tools/Cargo.toml")).context("reading who maintains the package")?;
    let maintainer = package.lines().find_map(|line| line.strip_prefix("maintainer = \"")?.strip_suffix('"'));
    let debian = debian_changelog(&text, maintainer.context("tools/Cargo.toml names no maintainer")?)?;
    let paths = [to.join("changelog"), to.join("changelog.Debian")];
    for (path, text) in paths.iter().zip([text, debian]) {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(paths)
}

/// The versions in a changelog in Debian's format, the newest first. The changes themselves are described in the
/// changelog.
fn debian_changelog(changelog: &str, maintainer: &str) -> Result<String> {
    let mut out = String::new();
    let released = changelog.lines().filter_map(|line| line.strip_prefix("## [")?.split_once("] - "));
    for (version, date) in released {
        let date = debian_date(date).with_context(|| format!("{date}, of version {version}, is no date"))?;
        out += &format!("sealblock ({version}-1) unstable; urgency=medium\n\n  * Version {version} of the program: ");
        out += &format!("changelog.gz says what changed.\n\n -- {maintainer}  {date} 00:00:00 +0000\n\n");
    }
    Ok(out)
}

/// `2026-11-28` as Debian writes it. The day of the week is computed with Sakamoto's algorithm.
fn debian_date(date: &str) -> Option<String> {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [(&str, u32); 12] = [
        ("Jan", 0),
        ("Feb", 3),
        ("Mar", 2),
        ("Apr", 5),
        ("May", 0),
        ("Jun", 3),
        ("Jul", 5),
        ("Aug", 1),
        ("Sep", 4),
        ("Oct", 6),
        ("Nov", 2),
        ("Dec", 4),
    ];
    let mut numbers = date.splitn(3, '-').map(|word| word.parse::<u32>().ok().filter(|number| *number < 10_000));
    let (year, month, day) = (numbers.next()??, numbers.next()??, numbers.next()??);
    let (name, offset) = MONTHS.get(month.checked_sub(1)? as usize)?;
    let counted = if month < 3 { year.checked_sub(1)? } else { year };
    let weekday = (counted + counted / 4 - counted / 100 + counted / 400 + offset + day) % 7;
    (1..=31).contains(&day).then(|| format!("{}, {day:02} {name} {year}", DAYS[weekday as usize]))
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

/// True if a link in a file works: within the file, to a web page, or to another file of the package.
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

/// Markdown text in which only working links are kept as links.
fn linked(text: &str, leads_somewhere: impl Fn(&str) -> bool) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(middle) = rest.find("](") {
        let Some(end) = rest[middle..].find(')').map(|end| middle + end) else { break };
        let link = &rest[middle + 2..end];
        // Links in code blocks and unmatched brackets are not handled, because such text never has these paths.
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
    fn debian_has_every_released_version_with_its_day_of_the_week() {
        let text = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-11-28\n\n## [0.1.0] - 2024-02-29\n";
        let told = debian_changelog(text, "A <a@b>").unwrap();
        let lines: Vec<&str> =
            told.lines().filter(|line| line.starts_with(['s', ' ']) && !line.contains('*')).collect();
        let (newer, older) =
            ("sealblock (0.2.0-1) unstable; urgency=medium", "sealblock (0.1.0-1) unstable; urgency=medium");
        let dates = [" -- A <a@b>  Sat, 28 Nov 2026 00:00:00 +0000", " -- A <a@b>  Thu, 29 Feb 2024 00:00:00 +0000"];
        assert_eq!(lines, [newer, dates[0], older, dates[1]]);
        for wrong in ["today", "2026-13-01", "2026-00-01", "2026-01-32", "2026-01", "4294967295-01-01", "0-01-01"] {
            assert_eq!(debian_date(wrong), None, "{wrong}");
        }
        assert!(debian_changelog("## [1.0.0] - soon", "A <a@b>").is_err());
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
