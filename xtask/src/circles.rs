//! Circles of files: a file of a crate uses another one, and that one uses the first, directly or through others.
//!
//! Files in a circle cannot be read, tested or moved separately, so no crate may have one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, bail};

use crate::modules::{self, FileUse};
use crate::workspace::{self, Member};

/// A separate workspace, whose files are checked too.
const FUZZ_MANIFEST: &str = "proofs/fuzz/Cargo.toml";

/// Files each of which uses all the others, directly or through others.
#[derive(Debug)]
struct Circle {
    files: BTreeSet<String>,
    /// One place for each use of a file of the circle by another.
    uses: Vec<FileUse>,
}

/// A crate with circles.
#[derive(Debug)]
struct Tangle {
    folder: String,
    circles: Vec<Circle>,
}

/// Checks all crates. Returns a readable line; the error lists every circle, with one place for each use in it.
pub fn check() -> Result<String> {
    let (crates, tangles) = find()?;
    verdict(&tangles)?;
    Ok(format!("{crates} crates, no circle"))
}

/// The number of crates, and those that have circles.
fn find() -> Result<(usize, Vec<Tangle>)> {
    let workspace = workspace::load()?;
    let members = [workspace.members_of(FUZZ_MANIFEST)?, workspace.members].concat();
    let read = |path: &str| fs::read_to_string(workspace.root.join(path)).ok();
    let (crates, mut tangles) = (members.len(), Vec::new());
    for Member { folder, roots, .. } in members {
        let mut uses = Vec::new();
        for root in roots {
            uses.extend(modules::uses(&root, &read).with_context(|| format!("reading the modules of {folder}"))?);
        }
        let circles = circles(uses);
        if !circles.is_empty() {
            tangles.push(Tangle { folder, circles });
        }
    }
    Ok((crates, tangles))
}

/// The circles in these uses, those with the most files first.
fn circles(mut uses: Vec<FileUse>) -> Vec<Circle> {
    // One place for each pair of files: the first one.
    uses.sort();
    uses.dedup_by(|next, first| next.from == first.from && next.to == first.to);
    let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for FileUse { from, to, .. } in &uses {
        next.entry(from).or_default().push(to);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> = next.keys().map(|file| (*file, reach(file, &next))).collect();
    let reaches = |from: &str, to: &str| reached.get(from).is_some_and(|files| files.contains(to));
    let mut found: Vec<Circle> = Vec::new();
    for (file, others) in &reached {
        if others.contains(file) && !found.iter().any(|circle| circle.files.contains(*file)) {
            let files = others.iter().filter(|other| reaches(other, file)).map(|file| (*file).to_owned()).collect();
            found.push(Circle { files, uses: Vec::new() });
        }
    }
    for circle in &mut found {
        let is_inside = |used: &&FileUse| circle.files.contains(&used.from) && circle.files.contains(&used.to);
        circle.uses = uses.iter().filter(is_inside).cloned().collect();
    }
    found.sort_by_key(|circle| std::cmp::Reverse(circle.files.len()));
    found
}

/// What `file` uses, directly or through others.
fn reach<'a>(file: &'a str, next: &BTreeMap<&'a str, Vec<&'a str>>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![file];
    while let Some(file) = open.pop() {
        open.extend(next.get(file).into_iter().flatten().copied().filter(|other| reached.insert(*other)));
    }
    reached
}

/// An error with all circles, if there are any.
fn verdict(tangles: &[Tangle]) -> Result<()> {
    if tangles.is_empty() {
        return Ok(());
    }
    bail!("files use each other in a circle:\n{}", tangles.iter().map(Tangle::to_text).collect::<String>());
}

impl Tangle {
    fn file_count(&self) -> usize {
        self.circles.iter().map(|circle| circle.files.len()).sum()
    }

    fn to_text(&self) -> String {
        let mut text = format!("{}: {} files in circles\n", self.folder, self.file_count());
        // Paths are relative to the crate's folder.
        let short = |path: &str| path.strip_prefix(&format!("{}/", self.folder)).unwrap_or(path).to_owned();
        for circle in &self.circles {
            let files: Vec<String> = circle.files.iter().map(|file| short(file)).collect();
            text += &format!("  a circle of {}: {}\n", files.len(), files.join(", "));
            for FileUse { from, to, line, path } in &circle.uses {
                text += &format!("    {}:{line} -> {}: {path}\n", short(from), short(to));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a crate of these files, whose root is `c/lib.rs`.
    fn tangle(files: &[(&str, &str)]) -> Vec<Tangle> {
        let read = |path: &str| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned());
        let circles = circles(modules::uses("c/lib.rs", &read).unwrap());
        if circles.is_empty() { Vec::new() } else { vec![Tangle { folder: "c".to_owned(), circles }] }
    }

    #[test]
    fn this_tree_has_no_circle() {
        let line = check().unwrap();
        assert!(line.ends_with("crates, no circle"), "{line}");
    }

    #[test]
    fn a_tree_without_a_circle_passes() {
        let found = tangle(&[
            ("c/lib.rs", "mod a; mod b; mod base;\npub use a::A; pub use b::B;"),
            ("c/a.rs", "use crate::b::B; use crate::base::Base; pub struct A(B, Base);"),
            ("c/b.rs", "use super::base::Base; pub struct B(Base);\n#[cfg(test)] mod tests { use crate::A; }"),
            ("c/base.rs", "pub struct Base;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
        verdict(&found).unwrap();
    }

    #[test]
    fn a_circle_through_a_re_export_is_refused_and_named() {
        let found = tangle(&[
            ("c/lib.rs", "mod a; mod b; mod base;\npub use a::A;"),
            ("c/a.rs", "use crate::base::Base;\nuse crate::b::B;\npub struct A(B, Base);"),
            ("c/b.rs", "// See A.\npub struct B(Box<crate::A>);"),
            ("c/base.rs", "pub struct Base;"),
        ]);
        let error = verdict(&found).unwrap_err().to_string();
        let expected = "files use each other in a circle:\n\
                        c: 2 files in circles\n  a circle of 2: a.rs, b.rs\n    \
                        a.rs:2 -> b.rs: crate::b::B\n    b.rs:2 -> a.rs: crate::A\n";
        assert_eq!(error, expected);
    }

    #[test]
    fn a_child_and_a_parent_that_name_each_other_are_a_circle() {
        let parent = "mod b;\nuse b::B;\npub struct Own(B);";
        let found = tangle(&[("c/lib.rs", parent), ("c/b.rs", "pub struct B;\nimpl From<super::Own> for B {}")]);
        assert_eq!(found[0].file_count(), 2);
        let found = tangle(&[("c/lib.rs", parent), ("c/b.rs", "pub struct B;")]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn circles_that_share_no_file_are_told_apart() {
        let of = |from: &str, to: &str| FileUse { from: from.into(), to: to.into(), line: 1, path: String::new() };
        let uses =
            vec![of("a", "b"), of("b", "a"), of("b", "c"), of("c", "d"), of("d", "e"), of("e", "c"), of("e", "f")];
        let found = circles(uses);
        let files: Vec<Vec<&str>> = found.iter().map(|c| c.files.iter().map(String::as_str).collect()).collect();
        assert_eq!(files, [vec!["c", "d", "e"], vec!["a", "b"]]);
        assert_eq!(found[0].uses.len(), 3);
    }
}
