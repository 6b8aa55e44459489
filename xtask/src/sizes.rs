//! Sizes of files and functions, and words that must not stand in the source.
//!
//! Nothing passes the limits. At the other end, a file of a few lines is seldom a thought of its own: how many files are
//! that short is recorded in `sizes.toml`, and the record only goes down. A new short file takes the place of an old one.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::record::Record;
use crate::scan::{self, Restricted, Source};
use crate::workspace;

const MAX_FILE_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;
/// A file of fewer lines counts as short.
const MIN_FILE_LINES: usize = 60;
const SHORT_FILES: &str = "files_under_60";
const HEADING: &[&str] = &[
    "How many Rust files have fewer than 60 lines.",
    "This number only goes down: `cargo xtask sizes --update` lowers it.",
];
/// The only folder where `unsafe` may stand.
const UNSAFE_FOLDER: &str = "runtime/";
const RECORD: &str = "xtask/sizes.toml";
/// Folders with other people's files, or built ones.
const NOT_OURS: &[&str] = &["target", "sealblock-data", "corpus", "artifacts"];

/// What was found in the whole tree.
#[derive(Debug, Default)]
struct Findings {
    scanned: usize,
    /// What is not allowed.
    wrong: Vec<String>,
    short_files: Vec<String>,
}

/// Checks the tree against the limits, the record and the restricted words. Returns a line for people.
pub fn check() -> Result<String> {
    let (findings, record) = (measure(workspace::root())?, Record::load(RECORD)?);
    let wrong = judge(&findings, &record);
    if !wrong.is_empty() {
        bail!("the source does not keep to its limits:\n  {}", wrong.join("\n  "));
    }
    Ok(summary(&findings, &record))
}

/// Lowers the record to what is there. Never raises it.
pub fn update() -> Result<String> {
    let (findings, record) = (measure(workspace::root())?, Record::load(RECORD)?);
    let wrong = judge(&findings, &record);
    if !wrong.is_empty() {
        bail!("the record is not raised; first put right:\n  {}", wrong.join("\n  "));
    }
    let now = findings.record();
    now.save(RECORD, HEADING)?;
    Ok(summary(&findings, &now))
}

impl Findings {
    fn record(&self) -> Record {
        Record::new([(SHORT_FILES, self.short_files.len())])
    }

    /// Adds what stands in the file at `path`, which is relative to the root.
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

/// What is wrong with these findings under this record, one sentence each.
fn judge(findings: &Findings, record: &Record) -> Vec<String> {
    let mut wrong = findings.wrong.clone();
    let (found, allowed) = (findings.short_files.len(), record.allowed(SHORT_FILES));
    if found > allowed {
        wrong.push(format!("{found} files under {MIN_FILE_LINES} lines, and the record allows {allowed}:"));
        wrong.extend(findings.short_files.iter().map(|name| format!("  {name}")));
    }
    wrong
}

fn summary(findings: &Findings, record: &Record) -> String {
    let short = findings.short_files.len();
    let mut line = format!("{} files; {short} under {MIN_FILE_LINES} lines", findings.scanned);
    if findings.record() != *record {
        line.push_str("; fewer than recorded: run `cargo xtask sizes --update` and commit it");
    }
    line
}

fn measure(root: &Path) -> Result<Findings> {
    let mut paths = Vec::new();
    sources(root, &mut paths)?;
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

/// Every Rust source below `folder` that is ours. Symbolic links are not followed.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        let name = name.to_string_lossy();
        if kind.is_dir() && !name.starts_with('.') && !NOT_OURS.contains(&name.as_ref()) {
            sources(&entry.path(), found)?;
        } else if kind.is_file() && name.ends_with(".rs") {
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

    fn short(files: usize) -> Record {
        Record::new([(SHORT_FILES, files)])
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
        let wrong = judge(&findings("a.rs", &"// x\n".repeat(59)), &Record::default());
        assert_eq!(wrong, ["1 files under 60 lines, and the record allows 0:", "  a.rs: 59 lines"]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(60)), &Record::default()), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(59)), &short(1)), [""; 0]);
    }

    #[test]
    fn no_record_lifts_the_limits() {
        assert_eq!(judge(&findings("a.rs", &function_of(70)), &short(9)), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &function_of(71)), &short(9)), ["a.rs:1: long: 71 lines, more than 70"]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(800)), &short(9)), [""; 0]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(801)), &short(9)), ["a.rs: 801 lines, more than 800"]);
    }

    #[test]
    fn unsafe_code_stands_only_under_runtime() {
        let text = "fn a() { unsafe { b() } }";
        assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), &short(1)), [""; 0]);
        for path in ["media/file/src/lib.rs", "proofs/fuzz/runtime/a.rs"] {
            let wrong = judge(&findings(path, text), &short(1));
            assert_eq!(wrong, [format!("{path}:1: unsafe code stands only under runtime/")]);
        }
    }

    #[test]
    fn unfinished_code_and_ignored_tests_are_refused_everywhere() {
        for text in ["fn a() { todo!() }", "fn a() { unimplemented!() }", "#[ignore]\nfn a() {}"] {
            assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), &short(1)).len(), 1, "{text}");
        }
    }

    #[test]
    fn a_lower_count_asks_for_a_lower_record() {
        let one = findings("a.rs", "fn a() {}");
        assert!(summary(&one, &short(2)).contains("sizes --update"));
        assert!(!summary(&one, &short(1)).contains("sizes --update"));
    }
}
