//! Checks the links of the documents: every file, folder and heading that a document of this tree links to must exist.
//!
//! Only links within the tree are followed; web addresses are not checked. Text in code is not a link.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::sizes;
use crate::workspace;

/// A link as it is written, and its place.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    destination: String,
}

/// A document: its links, and its headings, to which others can link.
#[derive(Debug, Default)]
struct Document {
    links: Vec<Link>,
    anchors: Vec<String>,
}

/// Checks all documents of the tree. Returns a readable line.
pub fn check() -> Result<String> {
    let root = workspace::root();
    let mut paths = Vec::new();
    sizes::files_below(root, ".md", &mut paths)?;
    let mut documents = BTreeMap::new();
    for path in paths {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {name}"))?;
        documents.insert(name, read(&text));
    }
    let dead = dead(&documents, |path| root.join(path).exists());
    if !dead.is_empty() {
        bail!("links lead nowhere:\n  {}", dead.join("\n  "));
    }
    let links: usize = documents.values().map(|document| document.links.len()).sum();
    Ok(format!("{links} links in {} documents", documents.len()))
}

/// A sentence for each broken link within the tree.
fn dead(documents: &BTreeMap<String, Document>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut dead = Vec::new();
    for (name, document) in documents {
        for Link { line, destination } in &document.links {
            let is_remote = ["http:", "https:", "mailto:"].iter().any(|scheme| destination.starts_with(scheme));
            if let Some(why) = (!is_remote).then(|| why_dead(documents, &exists, name, destination)).flatten() {
                dead.push(format!("{name}:{line}: {destination}: {why}"));
            }
        }
    }
    dead
}

fn why_dead(
    documents: &BTreeMap<String, Document>,
    exists: impl Fn(&str) -> bool,
    from: &str,
    destination: &str,
) -> Option<&'static str> {
    let (file, anchor) = destination.split_once('#').map_or((destination, None), |(file, at)| (file, Some(at)));
    let path = match file {
        "" => from.to_owned(),
        _ => match resolved(from, file) {
            Some(path) => path,
            None => return Some("it leaves the tree"),
        },
    };
    if !exists(&path) {
        return Some("no such file");
    }
    match (anchor, documents.get(&path)) {
        (None, _) => None,
        (Some(anchor), Some(document)) if document.anchors.iter().any(|known| known == anchor) => None,
        (Some(_), Some(_)) => Some("no such heading"),
        (Some(_), None) => Some("only headings of documents can be linked to"),
    }
}

/// The path, from the root of the tree, of a path in the document `from`; `None` if it leads out of the tree.
fn resolved(from: &str, file: &str) -> Option<String> {
    let mut path = PathBuf::new();
    for part in Path::new(from).parent().unwrap_or(Path::new("")).join(file).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(path.to_string_lossy().into_owned())
}

/// Finds the links and the headings of a document.
fn read(text: &str) -> Document {
    let (mut prose, mut anchors, mut seen) = (String::new(), Vec::new(), HashMap::new());
    let mut fence: Option<&str> = None;
    for line in text.lines() {
        let begin = line.trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| begin.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            (Some(_), _) => {}
            (None, None) => {
                if let Some(heading) = heading(line) {
                    anchors.push(anchor(heading, &mut seen));
                }
                prose.push_str(line);
            }
        }
        prose.push('\n');
    }
    Document { links: links(&without_code(&prose)), anchors }
}

fn heading(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches('#');
    let level = line.len() - rest.len();
    (1..=6).contains(&level).then(|| rest.strip_prefix(' ')).flatten()
}

/// The anchor of a heading, as GitHub forms it; the second heading with the same words gets `-1` at the end.
fn anchor(heading: &str, seen: &mut HashMap<String, usize>) -> String {
    let mut words = String::new();
    let mut rest = heading.trim();
    // Of a link in a heading, only the text counts.
    while let Some((before, (text, after))) = rest.split_once('[').and_then(|(before, behind)| {
        let (text, after) = behind.split_once("](")?;
        Some((before, (text, after.split_once(')')?.1)))
    }) {
        words += before;
        words += text;
        rest = after;
    }
    words += rest;
    let kept = words.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
    let name: String = kept.map(|char| if char == ' ' { '-' } else { char }).flat_map(char::to_lowercase).collect();
    let count = seen.entry(name.clone()).or_insert(0);
    *count += 1;
    if *count == 1 { name } else { format!("{name}-{}", *count - 1) }
}

/// The text without the parts between backquotes; line numbers do not change.
fn without_code(text: &str) -> String {
    let (mut result, mut rest) = (String::new(), text);
    while let Some(start) = rest.find('`') {
        let marks = rest[start..].len() - rest[start..].trim_start_matches('`').len();
        let (mark, behind) = rest[start..].split_at(marks);
        result += &rest[..start];
        // Code ends within its paragraph; a mark without a counterpart is an ordinary character.
        let paragraph = behind.find("\n\n").map_or(behind, |end| &behind[..end]);
        match paragraph.find(mark) {
            Some(end) => {
                result.extend(behind[..end].chars().filter(|char| *char == '\n'));
                rest = &behind[end + marks..];
            }
            None => rest = behind,
        }
    }
    result + rest
}

/// The destinations of `[text](destination)` and of `[name]: destination`.
fn links(text: &str) -> Vec<Link> {
    let first_word = |text: &str| text.split_whitespace().next().unwrap_or_default().to_owned();
    let mut links = Vec::new();
    for (at, _) in text.match_indices("](") {
        let behind = &text[at + 2..];
        let line = text[..at].matches('\n').count() + 1;
        if let Some(end) = behind.find(')') {
            links.push(Link { line, destination: first_word(&behind[..end]) });
        }
    }
    for (at, line) in text.lines().enumerate() {
        if let Some((_, destination)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) {
            links.push(Link { line: at + 1, destination: first_word(destination) });
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead_in(text: &str) -> Vec<String> {
        let other = read("# Other\n## Two `words`, and more\n## Same\n## Same\n## See [the path](c.md)\n");
        let documents = BTreeMap::from([("docs/a.md".to_owned(), read(text)), ("docs/b/c.md".to_owned(), other)]);
        dead(&documents, |path| ["docs/a.md", "docs/b/c.md", "docs/b", "src/main.rs"].contains(&path))
    }

    #[test]
    fn no_link_of_this_tree_is_dead() {
        let summary = check().unwrap();
        assert!(summary.contains("links in"), "{summary}");
    }

    #[test]
    fn links_to_what_is_there_are_good() {
        for good in [
            "[x](b/c.md) ![x](../src/main.rs) [x](b) [x](https://nowhere.invalid/x#y) [x](mailto:a@b.invalid)",
            "[x](b/c.md#two-words-and-more) [x](b/c.md#same) [x](b/c.md#same-1) [x](b/c.md#see-the-path)",
            "# Here\n[x](#here)\n\n[y]: b/c.md\n[two\nlines](b/c.md#other)",
            "`[x](gone.md)` ``[x](gone.md) ` ``\n```text\n[x](gone.md)\n```\n~~~\n```\n[x](gone.md)\n~~~",
        ] {
            assert_eq!(dead_in(good), [""; 0], "{good}");
        }
    }

    #[test]
    fn links_to_what_is_not_there_are_named_with_their_line() {
        for (bad, expected) in [
            ("a\n\n[x](gone.md)", "docs/a.md:3: gone.md: no such file"),
            ("![x](gone.svg \"title\")", "docs/a.md:1: gone.svg: no such file"),
            ("[x](b/c.md#three)", "docs/a.md:1: b/c.md#three: no such heading"),
            ("[x](b/c.md#same-2)", "docs/a.md:1: b/c.md#same-2: no such heading"),
            ("# Here\n[x](#there)", "docs/a.md:2: #there: no such heading"),
            ("```\n# Here\n```\n[x](#here)", "docs/a.md:4: #here: no such heading"),
            ("[x](../../etc)", "docs/a.md:1: ../../etc: it leaves the tree"),
            ("[x](../src/main.rs#L1)", "docs/a.md:1: ../src/main.rs#L1: only headings of documents can be linked to"),
            ("[y]: gone.md", "docs/a.md:1: gone.md: no such file"),
            ("a ` is no code\n\n[x](gone.md) `", "docs/a.md:3: gone.md: no such file"),
            ("`a\nb` [x](gone.md)", "docs/a.md:2: gone.md: no such file"),
        ] {
            assert_eq!(dead_in(bad), [expected], "{bad}");
        }
    }
}
