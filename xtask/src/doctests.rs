//! Which crates have examples in their documentation, and which say `doctest = false`, without which Cargo would start
//! rustdoc for nothing.
//!
//! An example in a crate that says so would never be compiled, so that is an error.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::workspace::{Member, Workspace};

/// Words after the three backquotes that mark an example as text.
const NO_CODE: [&str; 4] = ["text", "console", "toml", "json"];

/// Fails unless exactly the libraries with examples have doctests enabled. Returns how many do.
pub fn check(workspace: &Workspace) -> Result<usize> {
    let mut wrong = Vec::new();
    let mut tested = 0;
    for member in &workspace.members {
        let Some(doctest) = member.doctest else { continue };
        tested += usize::from(doctest);
        wrong.extend(judge(member, doctest, has_examples(&workspace.root.join(&member.folder).join("src"))?));
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(tested)
}

fn judge(member: &Member, doctest: bool, has_examples: bool) -> Option<String> {
    let folder = &member.folder;
    match (doctest, has_examples) {
        (false, true) => Some(format!("{folder} has examples in its documentation and says `doctest = false`")),
        (true, false) => {
            Some(format!("{folder} has no example in its documentation: say `doctest = false` below [lib]"))
        }
        _ => None,
    }
}

fn has_examples(folder: &Path) -> Result<bool> {
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let path = entry?.path();
        let is_one = match path.extension() {
            Some(extension) if extension == "rs" => {
                shows_code(&fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?)
            }
            _ => path.is_dir() && has_examples(&path)?,
        };
        if is_one {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if a documentation comment begins a block of code.
fn shows_code(source: &str) -> bool {
    let mut is_open = false;
    let comments = source.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim_start)
    });
    for words in comments.filter_map(|line| line.strip_prefix("```")) {
        if !is_open && !NO_CODE.contains(&words.trim()) {
            return true;
        }
        is_open = !is_open;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_an_example_and_text_is_none() {
        assert!(shows_code("//! ```\n//! let a = 1;\n//! ```\n"));
        assert!(shows_code("    /// ```no_run\n"));
        assert!(!shows_code("//! ```text\n//! a\n//! ```\nfn a() {}\n// ```\n"));
        assert!(shows_code("//! ```text\n//! a\n//! ```\n//! ```\n"), "the second one is code");
        assert!(!shows_code("let a = \"```\";"));
    }

    #[test]
    fn what_has_examples_has_them_tested_and_nothing_else() {
        let member = Member { folder: "a".to_owned(), dependencies: Vec::new(), roots: Vec::new(), doctest: None };
        assert_eq!(judge(&member, true, true), None);
        assert_eq!(judge(&member, false, false), None);
        assert!(judge(&member, false, true).is_some_and(|why| why.contains("has examples")));
        assert!(judge(&member, true, false).is_some_and(|why| why.contains("no example")));
    }
}
