//! A report as one self-contained HTML file: pictures and style are embedded, and it has no script.
//!
//! Colours follow the reader's preference. All text from a measurement is escaped.

use std::fmt::{self, Write};

use sealblock_units::ByteCount;

use super::outcome::{Column, Table};
use super::verdict::Ruling;
use super::{Measured, Report, plot};

const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1d2026; --paper: #fff; --line: #c9ccd2; --soft: #666c76; --good: #1c7c4f; --bad: #b03030; --unsure: #96660a }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --paper: #15171b; --line: #444a54; --soft: #a0a6b0; --good: #5fc493; --bad: #ec8080; --unsure: #e0b050 } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3 { line-height: 1.25 } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1.5rem } h3 { font-size: 1rem; margin: 2rem 0 .5rem }
.soft { color: var(--soft) } .table { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th { white-space: normal; vertical-align: bottom } th:first-child, td:first-child { text-align: left }
.holds { color: var(--good) } .fails { color: var(--bad) } .unsure { color: var(--unsure) } .ruling { font-weight: 600 }
svg { width: 100%; height: auto }
";

/// The whole report.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn report(report: &Report) -> anyhow::Result<String> {
    let mut page = String::new();
    let machine = escape(&report.machine.text);
    writeln!(page, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">")?;
    writeln!(page, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">")?;
    writeln!(page, "<title>sealblock bench</title>\n<style>\n{STYLE}</style>\n</head>\n<body>")?;
    writeln!(page, "<h1>sealblock bench</h1>\n<p>{machine}.<br>Measured in {:.0} seconds.</p>", report.elapsed_s)?;
    writeln!(
        page,
        "<p class=\"soft\">Figures are medians over rounds with the least and the greatest in brackets. Ratios are taken within a"
    )?;
    writeln!(
        page,
        "round, in which every contender has a turn and the baseline has two: what these two differ by is the error of all ratios.</p>"
    )?;
    if report.interrupted {
        writeln!(
            page,
            "<p class=\"unsure\">It was interrupted: claims that were not measured to the end are left out.</p>"
        )?;
    }
    for claim in &report.claims {
        put_claim(&mut page, claim)?;
    }
    writeln!(page, "</body>\n</html>")?;
    Ok(page)
}

fn put_claim(page: &mut String, measured: &Measured) -> anyhow::Result<()> {
    let Measured { name, claim, published, outcome, .. } = measured;
    writeln!(page, "<h2 id=\"{0}\">{0}</h2>\n<p>{1}</p>\n<ul class=\"soft\">", escape(name), escape(claim))?;
    for published in published {
        writeln!(page, "<li>Published: {} ({}).</li>", escape(published.figure), escape(published.source))?;
    }
    let size = ByteCount::new(measured.size_bytes);
    let (seconds, rounds, took) = (measured.seconds, measured.rounds, measured.elapsed_s);
    writeln!(page, "<li>Measured here: {size}, {rounds} rounds, turns of {seconds} s, in {took:.0} s.</li>\n</ul>")?;
    if let Some(failure) = &measured.failure {
        writeln!(page, "<p class=\"fails\">Not measured: {}</p>", escape(failure))?;
        return Ok(());
    }
    put_verdicts(page, measured)?;
    for plot in &outcome.plots {
        writeln!(page, "<figure>\n{}</figure>", plot::svg(plot)?)?;
    }
    for table in &outcome.tables {
        put_table(page, table)?;
    }
    for note in &outcome.notes {
        writeln!(page, "<p class=\"soft\">{}</p>", escape(note))?;
    }
    Ok(())
}

fn put_verdicts(page: &mut String, measured: &Measured) -> fmt::Result {
    writeln!(page, "<ul>")?;
    for verdict in &measured.outcome.verdicts {
        let (class, ruling) = (class(verdict.ruling), verdict.ruling.as_str());
        let marked = format!(": <span class=\"ruling {class}\">{ruling}</span>;");
        let sentence = escape(&verdict.sentence).replacen(&format!(": {ruling};"), &marked, 1);
        writeln!(page, "<li>{sentence}</li>")?;
    }
    writeln!(page, "</ul>")
}

const fn class(ruling: Ruling) -> &'static str {
    match ruling {
        Ruling::Holds => "holds",
        Ruling::DoesNotHold => "fails",
        Ruling::TooNoisy => "unsure",
    }
}

fn put_table(page: &mut String, table: &Table) -> fmt::Result {
    writeln!(page, "<h3>{}</h3>\n<div class=\"table\"><table>", escape(&table.title))?;
    write!(page, "<tr><th>{}</th>", escape(&table.rows_are))?;
    for Column { name, unit } in &table.columns {
        match unit.is_empty() {
            true => write!(page, "<th>{}</th>", escape(name))?,
            false => write!(page, "<th>{}, {}</th>", escape(name), escape(unit))?,
        }
    }
    writeln!(page, "</tr>")?;
    for row in &table.rows {
        write!(page, "<tr><td>{}</td>", escape(&row.name))?;
        row.cells.iter().try_for_each(|cell| write!(page, "<td>{}</td>", escape(&cell.text)))?;
        writeln!(page, "</tr>")?;
    }
    writeln!(page, "</table></div>")
}

/// Escapes text for HTML, also between double quotes.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::machine::Machine;
    use crate::bench::outcome::{Axis, Cell, Drawing, Outcome, Plot, Series};
    use crate::bench::verdict::{Threshold, Verdict};

    fn sample() -> Report {
        let mut table = Table::new("A <table>", "way", &[("time", "s"), ("times", "")]);
        table.push("by \"reading\"", vec![Cell::counted(1.5), Cell::words("a & b")]);
        let series = vec![Series::counted("here", vec![2.0])];
        let plot = Plot {
            name: "p".to_owned(),
            title: "A plot".to_owned(),
            x: Axis::linear("x", ""),
            y: Axis::linear("y", "s"),
            drawing: Drawing::Bars { groups: vec!["g".to_owned()], series, threshold: None },
        };
        let verdicts = vec![Verdict::counted("ratio", Threshold::AtLeast(6.0), 5.0)];
        let outcome = Outcome { tables: vec![table], plots: vec![plot], verdicts, notes: vec!["Quiet.".to_owned()] };
        let claim = Measured::sample(outcome);
        let failed = Measured { failure: Some("no <disk>".to_owned()), outcome: Outcome::default(), ..claim.clone() };
        let claims = vec![claim, failed];
        Report { version: 1, machine: Machine::this(), started_unix_s: 0, elapsed_s: 4.0, interrupted: false, claims }
    }

    #[test]
    fn a_page_has_all_and_needs_nothing_else() {
        let page = report(&sample()).unwrap();
        for words in ["A &lt;table&gt;", "by &quot;reading&quot;", "a &amp; b", "5.97 times", "does not hold", "Quiet."]
        {
            assert!(page.contains(words), "{words} is not in {page}");
        }
        assert!(page.contains("<svg ") && page.contains("Not measured: no &lt;disk&gt;"), "{page}");
        assert!(page.contains("<span class=\"ruling fails\">does not hold</span>;"), "{page}");
        assert!(page.contains("prefers-color-scheme: dark"));
        for foreign in ["<script", "<link", "src=", "@import", "url("] {
            assert!(!page.contains(foreign), "{foreign} is in {page}");
        }
    }

    #[test]
    fn an_interrupted_run_says_so() {
        assert!(!report(&sample()).unwrap().contains("interrupted"));
        assert!(report(&Report { interrupted: true, ..sample() }).unwrap().contains("It was interrupted"));
    }
}
