//! Counts of what should be less: a file of `name = number` lines, whose numbers only go down.
//!
//! A rule that the tree does not yet keep everywhere is held by such a record: a count above it fails the check, a count
//! below it asks for a lower record. What is not recorded counts as 0.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

use crate::workspace;

/// Counts by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record(BTreeMap<String, usize>);

impl Record {
    /// A record of these counts.
    pub fn new<'a>(counts: impl IntoIterator<Item = (&'a str, usize)>) -> Record {
        Record(counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect())
    }

    /// Reads the record in `file`, a path from the root. Fails when it is absent or has a line of another form.
    pub fn load(file: &str) -> Result<Record> {
        let path = workspace::root().join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {file}"))?;
        Record::parse(&text).with_context(|| format!("reading {file}"))
    }

    /// Writes it to `file`, a path from the root, below a comment of these lines.
    pub fn save(&self, file: &str, heading: &[&str]) -> Result<()> {
        fs::write(workspace::root().join(file), self.to_text(heading)).with_context(|| format!("writing {file}"))
    }

    /// How much of `name` is recorded.
    pub fn allowed(&self, name: &str) -> usize {
        self.0.get(name).copied().unwrap_or_default()
    }

    fn to_text(&self, heading: &[&str]) -> String {
        let comments = heading.iter().map(|line| format!("# {line}\n"));
        let counts = self.0.iter().map(|(name, count)| match name.contains('/') {
            true => format!("\"{name}\" = {count}\n"),
            false => format!("{name} = {count}\n"),
        });
        comments.chain(counts).collect()
    }

    fn parse(text: &str) -> Result<Record> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let counts = lines.map(|line| {
            let (name, count) = line.split_once('=').with_context(|| format!("'{line}' is no 'name = number'"))?;
            let count = count.trim().parse().with_context(|| format!("'{line}' ends in no number"))?;
            Ok((name.trim().trim_matches('"').to_owned(), count))
        });
        Ok(Record(counts.collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_and_what_is_not_in_it_counts_as_none() {
        let record = Record::new([("few_files", 3), ("exports/nbd", 17)]);
        let text = record.to_text(&["How many.", "Less is better."]);
        assert_eq!(text, "# How many.\n# Less is better.\n\"exports/nbd\" = 17\nfew_files = 3\n");
        assert_eq!(Record::parse(&text).unwrap(), record);
        assert_eq!((record.allowed("exports/nbd"), record.allowed("exports")), (17, 0));
    }

    #[test]
    fn a_broken_record_is_refused() {
        for (text, why) in [("few_files = many", "ends in no number"), ("few_files", "no 'name = number'")] {
            let error = Record::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
