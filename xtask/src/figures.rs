//! `cargo xtask figures FILE.json`: puts the output of `sealblock bench --json` into the documents.
//!
//! No figure in them is typed by hand. `docs/performance.md` has a pair of markers for each claim, `<!-- figures: NAME
//! -->` and `<!-- end of figures -->`, and the text between them is replaced; `README.md` has a row for each claim,
//! which counts its verdicts. `docs/formats/json.md` describes the JSON. Its cells and verdicts include their text, so
//! nothing is formatted a second time here.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace;

/// The supported version of the JSON.
const VERSION: u64 = 1;
/// The document with the tables, the folder of pictures relative to it, and the document with the counts of verdicts.
const TABLES: &str = "docs/performance.md";
const FIGURES: &str = "figures";
const VERDICTS: &str = "README.md";
const END: &str = "<!-- end of figures -->";

/// Rewrites the documents. Returns a readable line.
pub fn rewrite(path: &str) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    let report: Value = serde_json::from_str(&text).with_context(|| format!("{path} is no JSON"))?;
    let root = workspace::root();
    let document = |name: &str| fs::read_to_string(root.join(name)).with_context(|| format!("reading {name}"));
    // Both are made before either is written, so that an error changes nothing.
    let tables = rewritten(&document(TABLES)?, &report, tables).with_context(|| TABLES.to_owned())?;
    let verdicts = counted(&document(VERDICTS)?, &report).with_context(|| VERDICTS.to_owned())?;
    write(root, TABLES, &tables)?;
    write(root, VERDICTS, &verdicts)?;
    let names: Vec<&str> = claims(&report)?.iter().filter_map(|claim| claim["name"].as_str()).collect();
    Ok(format!("{TABLES} and {VERDICTS} have the figures of {}", names.join(", ")))
}

fn write(root: &Path, name: &str, text: &str) -> Result<()> {
    fs::write(root.join(name), text).with_context(|| format!("writing {name}"))
}

fn claims(report: &Value) -> Result<&[Value]> {
    let version = &report["version"];
    ensure!(version.as_u64() == Some(VERSION), "it has version {version}; version {VERSION} of the JSON is understood");
    let build = text(report, "/machine/build")?;
    ensure!(build == "release", "it is of a {build} build: measure with a release build, cargo run --release -- bench");
    let claims = report["claims"].as_array().context("it has no claims")?;
    ensure!(!claims.is_empty(), "no claim was measured");
    Ok(claims)
}

/// The document, with the result of `put` for each claim between the claim's markers.
fn rewritten(document: &str, report: &Value, put: fn(&Value, &Value) -> Result<String>) -> Result<String> {
    let mut document = document.to_owned();
    for claim in claims(report)? {
        let name = text(claim, "/name")?;
        if let Some(failure) = claim["failure"].as_str() {
            bail!("{name} was not measured: {failure}");
        }
        let content = put(report, claim).with_context(|| name.to_owned())?;
        document = between_markers(&document, name, &content)?;
    }
    Ok(document)
}

fn between_markers(document: &str, name: &str, content: &str) -> Result<String> {
    let begin = format!("<!-- figures: {name} -->");
    let (before, rest) = document.split_once(&begin).with_context(|| format!("there is no marker {begin}"))?;
    let (old, after) = rest.split_once(END).with_context(|| format!("there is no marker {END} behind {begin}"))?;
    ensure!(!old.contains("<!-- figures: "), "there is no marker {END} between {begin} and the next one");
    ensure!(!after.contains(&begin), "the marker {begin} is there twice");
    Ok(format!("{before}{begin}\n{content}{END}{after}"))
}

/// A text that must be there.
fn text<'a>(value: &'a Value, pointer: &str) -> Result<&'a str> {
    value.pointer(pointer).and_then(Value::as_str).with_context(|| format!("there is no text {pointer}"))
}

fn list<'a>(value: &'a Value, name: &str) -> Result<&'a [Value]> {
    value[name].as_array().map(Vec::as_slice).with_context(|| format!("there is no list {name}"))
}

/// All figures of a claim.
fn tables(report: &Value, claim: &Value) -> Result<String> {
    let (name, machine) = (text(claim, "/name")?, text(report, "/machine/text")?);
    let (size, seconds, rounds) = (&claim["size_bytes"], &claim["seconds"], &claim["rounds"]);
    let mut content =
        format!("`sealblock bench {name} --size {size} --seconds {seconds} --rounds {rounds}`: {machine}.\n\n");
    writeln!(content, "Claim: {}\n", text(claim, "/claim")?)?;
    for published in list(claim, "published")? {
        writeln!(content, "- Published: {} ({}).", text(published, "/figure")?, text(published, "/source")?)?;
    }
    put_verdicts(&mut content, claim)?;
    for table in list(claim, "tables")? {
        put_table(&mut content, table)?;
    }
    content.push('\n');
    for note in list(claim, "notes")? {
        writeln!(content, "{}", note.as_str().context("a note is a text")?)?;
    }
    content.push('\n');
    for plot in list(claim, "plots")? {
        writeln!(content, "![{}]({FIGURES}/{}.svg)", text(plot, "/title")?, text(plot, "/name")?)?;
    }
    Ok(content)
}

fn put_verdicts(content: &mut String, claim: &Value) -> Result<()> {
    for verdict in list(claim, "verdicts")? {
        let (ruling, sentence) = (text(verdict, "/ruling")?, text(verdict, "/sentence")?);
        writeln!(content, "- {}.", sentence.replacen(&format!(": {ruling};"), &format!(": **{ruling}**;"), 1))?;
    }
    Ok(())
}

fn put_table(content: &mut String, table: &Value) -> Result<()> {
    let cell = |text: &str| text.replace('|', "\\|");
    write!(content, "\n{}:\n\n| {} |", text(table, "/title")?, cell(text(table, "/rows_are")?))?;
    let columns = list(table, "columns")?;
    for column in columns {
        match text(column, "/unit")? {
            "" => write!(content, " {} |", cell(text(column, "/name")?))?,
            unit => write!(content, " {}, {} |", cell(text(column, "/name")?), cell(unit))?,
        }
    }
    writeln!(content, "\n| --- |{}", " ---: |".repeat(columns.len()))?;
    for row in list(table, "rows")? {
        // The second measurement of the baseline is in the verdicts, as its deviation from the first.
        if text(row, "/name")?.ends_with(" again") {
            continue;
        }
        write!(content, "| {} |", cell(text(row, "/name")?))?;
        for figure in list(row, "cells")? {
            write!(content, " {} |", cell(text(figure, "/text")?))?;
        }
        content.push('\n');
    }
    Ok(())
}

/// The document, with a new row for each claim in the table that already has one.
fn counted(document: &str, report: &Value) -> Result<String> {
    let mut document = document.to_owned();
    for claim in claims(report)? {
        let name = text(claim, "/name")?;
        let begin = format!("| [`{name}`]");
        let is_row = |line: &&str| line.starts_with(&begin);
        let old = document.lines().find(is_row).with_context(|| format!("there is no row {begin}"))?.to_owned();
        ensure!(document.lines().filter(is_row).count() == 1, "the row {begin} is there twice");
        let row = format!("{begin}({TABLES}#{name}) | {} | {} |", text(claim, "/claim")?, counts(claim)?);
        document = document.replacen(&old, &row, 1);
    }
    Ok(document)
}

/// The number of verdicts of each kind that a claim has.
fn counts(claim: &Value) -> Result<String> {
    const RULINGS: [(&str, &str, &str); 3] = [
        ("holds", "holds", "hold"),
        ("does not hold", "does not hold", "do not hold"),
        ("too noisy to tell", "too noisy to tell", "too noisy to tell"),
    ];
    let rulings =
        list(claim, "verdicts")?.iter().map(|verdict| text(verdict, "/ruling")).collect::<Result<Vec<_>>>()?;
    if let Some(unknown) = rulings.iter().find(|ruling| !RULINGS.iter().any(|(known, ..)| known == *ruling)) {
        bail!("there is a verdict '{unknown}'");
    }
    let parts = RULINGS.iter().filter_map(|(ruling, one, several)| {
        match rulings.iter().filter(|found| *found == ruling).count() {
            0 => None,
            1 => Some(format!("1 {one}")),
            count => Some(format!("{count} {several}")),
        }
    });
    Ok(parts.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> Value {
        json!({
            "version": 1,
            "machine": {"build": "release", "text": "A CPU, 2 CPUs"},
            "claims": [{
                "name": "c", "claim": "It is so.", "size_bytes": 4096, "seconds": 0.5, "rounds": 3, "failure": null,
                "published": [{"figure": "5.97 times", "source": "a letter"}],
                "tables": [{
                    "title": "A table", "rows_are": "way",
                    "columns": [{"name": "time", "unit": "s"}, {"name": "times", "unit": ""}],
                    "rows": [{"name": "a|b", "cells": [{"text": "1.00"}, {"text": "6.00"}]},
                             {"name": "a|b, again", "cells": [{"text": "1.01"}, {"text": "6.06"}]}]
                }],
                "plots": [{"name": "c-time", "title": "Time"}],
                "verdicts": [{"ruling": "holds", "sentence": "times: 6.00: holds; counted"}],
                "notes": ["Quiet."]
            }]
        })
    }

    const DOCUMENT: &str = "before\n<!-- figures: c -->\nstale\n<!-- end of figures -->\nafter\n";

    #[test]
    fn figures_are_put_between_their_markers_and_nothing_else_changes() {
        let new = rewritten(DOCUMENT, &report(), tables).unwrap();
        assert!(
            new.starts_with("before\n<!-- figures: c -->\n`sealblock bench c --size 4096 --seconds 0.5 --rounds 3`")
        );
        assert!(new.ends_with("![Time](figures/c-time.svg)\n<!-- end of figures -->\nafter\n"), "{new}");
        let table = "\nA table:\n\n| way | time, s | times |\n| --- | ---: | ---: |\n| a\\|b | 1.00 | 6.00 |\n";
        assert!(new.contains(table) && !new.contains("stale") && !new.contains("again"), "{new}");
        assert!(
            new.contains("- times: 6.00: **holds**; counted.\n")
                && new.contains("- Published: 5.97 times (a letter).\n")
        );
        assert_eq!(rewritten(&new, &report(), tables).unwrap(), new, "a second time changes nothing");
    }

    #[test]
    fn verdicts_are_counted_in_the_row_of_their_claim() {
        const README: &str =
            "| claim |\n| [`b`](x) | stays |\n| [`c`](docs/performance.md#c) | stale | 9 hold |\nafter\n";
        let row = |report: &Value| counted(README, report).map(|readme| readme.lines().nth(2).unwrap().to_owned());
        let mut report = report();
        assert_eq!(row(&report).unwrap(), "| [`c`](docs/performance.md#c) | It is so. | 1 holds |");
        let verdict = |ruling: &str| json!({ "ruling": ruling, "sentence": "" });
        let all = ["holds", "holds", "does not hold", "does not hold", "too noisy to tell"].map(verdict);
        report["claims"][0]["verdicts"] = json!(all);
        let new = counted(README, &report).unwrap();
        assert!(new.contains("| It is so. | 2 hold, 2 do not hold, 1 too noisy to tell |\nafter\n"), "{new}");
        assert!(new.starts_with("| claim |\n| [`b`](x) | stays |\n"), "{new}");
        report["claims"][0]["verdicts"] = json!([verdict("perhaps")]);
        assert!(row(&report).unwrap_err().to_string().contains("'perhaps'"));
        assert!(counted("", &report).is_err() && counted(&README.repeat(2), &report).is_err());
    }

    #[test]
    fn a_document_without_its_markers_is_refused() {
        for (document, why) in [
            ("", "there is no marker <!-- figures: c -->"),
            ("<!-- figures: c -->\n", "there is no marker <!-- end of figures -->"),
            ("<!-- figures: c -->\n<!-- figures: d -->\n<!-- end of figures -->\n", "and the next one"),
            (&format!("{DOCUMENT}{DOCUMENT}"), "is there twice"),
        ] {
            let error = rewritten(document, &report(), tables).unwrap_err();
            assert!(format!("{error:#}").contains(why), "{error:#}");
        }
    }

    #[test]
    fn what_no_figures_can_be_taken_from_is_refused() {
        let with = |pointer: &str, value: Value| {
            let mut report = report();
            *report.pointer_mut(pointer).unwrap() = value;
            format!("{:#}", rewritten(DOCUMENT, &report, tables).unwrap_err())
        };
        assert!(with("/version", json!(2)).contains("version 2"));
        assert!(with("/machine/build", json!("debug")).contains("debug build"));
        assert!(with("/claims", json!([])).contains("no claim was measured"));
        assert!(with("/claims/0/failure", json!("no disk")).contains("c was not measured: no disk"));
        assert!(with("/claims/0/tables/0/rows/0/cells/0", json!({})).contains("there is no text /text"));
    }
}
