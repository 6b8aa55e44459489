//! Sizes of files and functions, and words that are not allowed in the source.
//!
//! There is also a limit for the number of very short files, because a few lines seldom make a thought of their own.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::scan::{self, Restricted, Source};
use crate::workspace;

const MAX_FILE_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;
/// A file with fewer lines counts as short.
const MIN_FILE_LINES: usize = 60;
/// The maximum number of short files in the whole tree; most of them are roots of crates.
const MAX_SHORT_FILES: usize = 39;
/// The only folder that may contain `unsafe`.
const UNSAFE_FOLDER: &str = "runtime/";
/// Folders with external or generated files.
const NOT_OURS: &[&str] = &["target", "sealblock-data", "corpus", "artifacts"];

/// What was found in the whole tree.
#[derive(Debug, Default)]
struct Findings {
    scanned: usize,
    /// What is not allowed.
    wrong: Vec<String>,
    short_files: Vec<String>,
}

/// Checks the tree against the limits and the restricted words. Returns a readable line.
pub fn check() -> Result<String> {
    let findings = measure(workspace::root())?;
    let wrong = judge(&findings, MAX_SHORT_FILES);
    if !wrong.is_empty() {
        bail!("the source does not keep to its limits:\n  {}", wrong.join("\n  "));
    }
    Ok(format!("{} files; {} under {MIN_FILE_LINES} lines", findings.scanned, findings.short_files.len()))
}

impl Findings {
    /// Adds what was found in the file at `path`, which is relative to the root.
    fn add(&mut self, path: &str, source: &Source) {
        self.scanned += 1;
        let lines = source.length_lines;
        if lines > MAX_FILE_LINES {
            self.wrong.push(format!("{path}: {lines} lines, more than {MAX_FILE_LINES}"));
        }
        if lines < MIN_FILE_LINES {
            self.short_files.push(format!("{path}: {lines} lines"));
        }
        for function in source.functions.iter().filter(|function| function.length_lines > MAX_FUNCTION_LINES) {
            let (name, line, lines) = (&function.name, function.line, function.length_lines);
            self.wrong.push(format!("{path}:{line}: {name}: {lines} lines, more than {MAX_FUNCTION_LINES}"));
        }
        for word in &source.words {
            let why = match word.word {
                Restricted::Unsafe if path.starts_with(UNSAFE_FOLDER) => continue,
                Restricted::Unsafe => "unsafe code stands only under runtime/",
                Restricted::Unfinished => "todo! and unimplemented! do not go into the tree",
                Restricted::IgnoredTest => "a test that never runs proves nothing; make it run or remove it",
            };
            self.wrong.push(format!("{path}:{}: {why}", word.line));
        }
    }
}

/// The faults in these findings, one sentence each.
fn judge(findings: &Findings, max_short_files: usize) -> Vec<String> {
    let mut wrong = findings.wrong.clone();
    let found = findings.short_files.len();
    if found > max_short_files {
        wrong.push(format!("{found} files under {MIN_FILE_LINES} lines, more than {max_short_files}:"));
        wrong.extend(findings.short_files.iter().map(|name| format!("  {name}")));
    }
    wrong
}

fn measure(root: &Path) -> Result<Findings> {
    let mut paths = Vec::new();
    files_below(root, ".rs", &mut paths)?;
    paths.sort();
    let mut findings = Findings::default();
    for path in paths {
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(&path).with_context(|| format!("reading {name}"))?;
        let source = scan::scan(&text).with_context(|| name.clone())?;
        findings.add(&name, &source);
    }
    Ok(findings)
}

/// Every file of ours below `folder` whose name has this ending. Symbolic links are not followed.
pub fn files_below(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let name = name.to_string_lossy();
        if kind.is_dir() && !name.starts_with('.') && !NOT_OURS.contains(&name.as_ref()) {
            files_below(&entry.path(), ending, found)?;
        } else if kind.is_file() && name.ends_with(ending) {
            found.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Findings {
        let mut findings = Findings::default();
        findings.add(path, &scan::scan(text).unwrap());
        findings
    }

    /// A source with one function of this many lines.
    fn function_of(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    x();\n".repeat(lines - 2))
    }

    #[test]
    fn this_tree_keeps_to_its_limits() {
        let summary = check().unwrap();
        assert!(summary.contains("files;"), "{summary}");
    }

    #[test]
    fn a_short_file_is_counted_and_a_line_more_is_not() {
        let wrong = judge(&findings("a.rs", &"// x\n".repeat(59)), 0);
        assert_eq!(wrong, ["1 files under 60 lines, more than 0:", "  a.rs: 59 lines"]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(60)), 0), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(59)), 1), [""; 0]);
    }

    #[test]
    fn long_files_and_functions_are_refused() {
        assert_eq!(judge(&findings("a.rs", &function_of(70)), 9), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &function_of(71)), 9), ["a.rs:1: long: 71 lines, more than 70"]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(800)), 9), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(801)), 9), ["a.rs: 801 lines, more than 800"]);
    }

    #[test]
    fn unsafe_code_stands_only_under_runtime() {
        let text = "fn a() { unsafe { b() } }";
        assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), 1), [""; 0]);
        for path in ["media/file/src/lib.rs", "proofs/fuzz/runtime/a.rs"] {
            let wrong = judge(&findings(path, text), 1);
            assert_eq!(wrong, [format!("{path}:1: unsafe code stands only under runtime/")]);
        }
    }

    #[test]
    fn unfinished_code_and_ignored_tests_are_refused_everywhere() {
        for text in ["fn a() { todo!() }", "fn a() { unimplemented!() }", "#[ignore]\nfn a() {}"] {
            assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), 1).len(), 1, "{text}");
        }
    }
}
