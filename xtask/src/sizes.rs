//! Sizes of files and functions, and words that must not stand in the source.
//!
//! Two limits each: a cap that nothing passes, and an aim below it. How many files and functions lie over their aim is
//! recorded in `sizes.toml`, and the record only goes down: whoever makes a new long function shortens an old one.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::scan::{self, Restricted, Source};
use crate::workspace;

const FILE_CAP_LINES: usize = 800;
const FILE_AIM_LINES: usize = 600;
const FUNCTION_CAP_LINES: usize = 70;
const FUNCTION_AIM_LINES: usize = 40;
/// The only folder where `unsafe` may stand.
const UNSAFE_FOLDER: &str = "runtime/";
const RECORD: &str = "xtask/sizes.toml";
/// Folders with other people's files, or built ones.
const NOT_OURS: &[&str] = &["target", "sealblock-data", "corpus", "artifacts"];

/// How many files and functions may lie over their aim.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Record {
    files: usize,
    functions: usize,
}

/// What was found in the whole tree.
#[derive(Debug, Default)]
struct Findings {
    scanned: usize,
    /// What may never be.
    wrong: Vec<String>,
    long_files: Vec<String>,
    long_functions: Vec<String>,
}

/// Checks the tree against the caps, the record and the restricted words. The answer is a line for people.
pub fn check() -> Result<String> {
    let (findings, record) = (measure(workspace::root())?, read_record()?);
    let wrong = judge(&findings, record);
    if !wrong.is_empty() {
        bail!("the source does not keep to its limits:\n  {}", wrong.join("\n  "));
    }
    Ok(summary(&findings, record))
}

/// Lowers the record to what is there. Never raises it.
pub fn update() -> Result<String> {
    let (findings, record) = (measure(workspace::root())?, read_record()?);
    let wrong = judge(&findings, record);
    if !wrong.is_empty() {
        bail!("the record is not raised; first put right:\n  {}", wrong.join("\n  "));
    }
    let now = findings.record();
    let path = workspace::root().join(RECORD);
    fs::write(&path, now.to_text()).with_context(|| format!("writing {}", path.display()))?;
    Ok(summary(&findings, now))
}

impl Findings {
    fn record(&self) -> Record {
        Record { files: self.long_files.len(), functions: self.long_functions.len() }
    }

    /// Adds what stands in the file at `path`, which is relative to the root.
    fn add(&mut self, path: &str, source: &Source) {
        self.scanned += 1;
        let lines = source.length_lines;
        if lines > FILE_CAP_LINES {
            self.wrong.push(format!("{path}: {lines} lines, more than {FILE_CAP_LINES}"));
        }
        if lines > FILE_AIM_LINES {
            self.long_files.push(format!("{path}: {lines} lines"));
        }
        for function in &source.functions {
            let (name, lines) = (&function.name, function.length_lines);
            let place = format!("{path}:{}: {name}: {lines} lines", function.line);
            if lines > FUNCTION_CAP_LINES {
                self.wrong.push(format!("{place}, more than {FUNCTION_CAP_LINES}"));
            }
            if lines > FUNCTION_AIM_LINES {
                self.long_functions.push(place);
            }
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

impl Record {
    fn to_text(self) -> String {
        format!(
            "# How many files are longer than {FILE_AIM_LINES} lines and how many functions are longer than \
             {FUNCTION_AIM_LINES}.\n# These numbers only go down: `cargo xtask sizes --update` lowers them.\n\
             files_over_{FILE_AIM_LINES} = {}\nfunctions_over_{FUNCTION_AIM_LINES} = {}\n",
            self.files, self.functions
        )
    }

    fn parse(text: &str) -> Result<Record> {
        let (mut files, mut functions) = (None, None);
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (key, value) = line.split_once('=').with_context(|| format!("'{line}' is no 'name = number'"))?;
            let value = value.trim().parse().with_context(|| format!("'{line}' ends in no number"))?;
            match key.trim() {
                "files_over_600" => files = Some(value),
                "functions_over_40" => functions = Some(value),
                other => bail!("'{other}' is not recorded here"),
            }
        }
        Ok(Record {
            files: files.context("files_over_600 is missing")?,
            functions: functions.context("functions_over_40 is missing")?,
        })
    }
}

fn read_record() -> Result<Record> {
    let path = workspace::root().join(RECORD);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Record::parse(&text).with_context(|| format!("reading {}", path.display()))
}

/// What is wrong with these findings under this record, one sentence each.
fn judge(findings: &Findings, record: Record) -> Vec<String> {
    let mut wrong = findings.wrong.clone();
    let mut over = |what: &str, aim: usize, found: &[String], recorded: usize| {
        if found.len() > recorded {
            wrong.push(format!("{} {what} over {aim} lines, and the record allows {recorded}:", found.len()));
            wrong.extend(found.iter().map(|name| format!("  {name}")));
        }
    };
    over("files", FILE_AIM_LINES, &findings.long_files, record.files);
    over("functions", FUNCTION_AIM_LINES, &findings.long_functions, record.functions);
    wrong
}

fn summary(findings: &Findings, record: Record) -> String {
    let now = findings.record();
    let mut line = format!(
        "{} files; {} over {FILE_AIM_LINES} lines, {} functions over {FUNCTION_AIM_LINES}",
        findings.scanned, now.files, now.functions
    );
    if now != record {
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
    fn the_aim_passes_and_a_line_more_is_counted() {
        let record = Record::default();
        assert_eq!(judge(&findings("a.rs", &function_of(40)), record), Vec::<String>::new());
        let wrong = judge(&findings("a.rs", &function_of(41)), record);
        assert_eq!(wrong.len(), 2);
        assert!(wrong[0].contains("1 functions over 40") && wrong[1].contains("a.rs:1: long: 41 lines"), "{wrong:?}");
        assert_eq!(judge(&findings("a.rs", &function_of(41)), Record { files: 0, functions: 1 }), Vec::<String>::new());
    }

    #[test]
    fn no_record_lifts_the_cap() {
        let record = Record { files: 9, functions: 9 };
        assert_eq!(judge(&findings("a.rs", &function_of(70)), record), Vec::<String>::new());
        let wrong = judge(&findings("a.rs", &function_of(71)), record);
        assert_eq!(wrong, ["a.rs:1: long: 71 lines, more than 70"]);
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(800)), record), Vec::<String>::new());
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(801)), record), ["a.rs: 801 lines, more than 800"]);
    }

    #[test]
    fn long_files_are_counted_too() {
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(600)), Record::default()), Vec::<String>::new());
        assert_eq!(judge(&findings("a.rs", &"// x\n".repeat(601)), Record::default()).len(), 2);
    }

    #[test]
    fn unsafe_code_stands_only_under_runtime() {
        let text = "fn a() { unsafe { b() } }";
        assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), Record::default()), Vec::<String>::new());
        for path in ["media/file/src/lib.rs", "proofs/fuzz/runtime/a.rs"] {
            let wrong = judge(&findings(path, text), Record::default());
            assert_eq!(wrong, [format!("{path}:1: unsafe code stands only under runtime/")]);
        }
    }

    #[test]
    fn unfinished_code_and_ignored_tests_are_refused_everywhere() {
        for text in ["fn a() { todo!() }", "fn a() { unimplemented!() }", "#[ignore]\nfn a() {}"] {
            assert_eq!(judge(&findings("runtime/memory/src/lib.rs", text), Record::default()).len(), 1, "{text}");
        }
    }

    #[test]
    fn the_record_reads_back_and_a_broken_one_is_refused() {
        let record = Record { files: 3, functions: 17 };
        assert_eq!(Record::parse(&record.to_text()).unwrap(), record);
        for (text, why) in [
            ("files_over_600 = 1", "functions_over_40 is missing"),
            ("files_over_600 = many\nfunctions_over_40 = 1", "ends in no number"),
            ("files_over_500 = 1", "not recorded here"),
            ("files_over_600", "no 'name = number'"),
        ] {
            let error = Record::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_lower_count_asks_for_a_lower_record() {
        let few = findings("a.rs", "fn a() {}");
        assert!(summary(&few, Record { files: 0, functions: 1 }).contains("sizes --update"));
        assert!(!summary(&few, Record::default()).contains("sizes --update"));
    }
}
