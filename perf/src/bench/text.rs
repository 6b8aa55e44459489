//! A report as text for a terminal.

use std::fmt::{self, Write};

use sealblock_units::ByteCount;

use super::outcome::Table;
use super::{Measured, Report};

/// The whole report.
pub fn report(report: &Report) -> String {
    let mut text = format!("{}\n", report.machine.text);
    for claim in &report.claims {
        // Writing to a string cannot fail.
        let _ = write_claim(&mut text, claim);
    }
    text
}

/// The figures of one claim.
pub fn write_claim(text: &mut String, measured: &Measured) -> fmt::Result {
    let Measured { name, claim, published, outcome, .. } = measured;
    writeln!(text, "\n{name}: {claim}")?;
    for published in published {
        writeln!(text, "  published: {} ({})", published.figure, published.source)?;
    }
    let size = ByteCount::new(measured.size_bytes);
    let (seconds, rounds, took) = (measured.seconds, measured.rounds, measured.elapsed_s);
    writeln!(text, "  measured: {size}, {rounds} rounds, turns of {seconds} s, in {took:.0} s")?;
    if let Some(failure) = &measured.failure {
        return writeln!(text, "  not measured: {failure}");
    }
    for table in &outcome.tables {
        write_table(text, table)?;
    }
    text.push('\n');
    for verdict in &outcome.verdicts {
        writeln!(text, "  {}", verdict.sentence)?;
    }
    for note in &outcome.notes {
        writeln!(text, "  Note: {note}")?;
    }
    Ok(())
}

fn write_table(text: &mut String, table: &Table) -> fmt::Result {
    let heading = |column: &super::outcome::Column| match column.unit.is_empty() {
        true => column.name.clone(),
        false => format!("{}, {}", column.name, column.unit),
    };
    let mut lines = vec![std::iter::once(table.rows_are.clone()).chain(table.columns.iter().map(heading)).collect()];
    for row in &table.rows {
        let cells = row.cells.iter().map(|cell| cell.text.clone());
        lines.push(std::iter::once(row.name.clone()).chain(cells).collect::<Vec<_>>());
    }
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    writeln!(text, "\n  {}", table.title)?;
    for line in &lines {
        text.push_str("   ");
        for (index, (cell, width)) in line.iter().zip(&widths).enumerate() {
            match index {
                0 => write!(text, " {cell:width$}")?,
                _ => write!(text, "   {cell:>width$}")?,
            }
        }
        text.push('\n');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::outcome::{Cell, Outcome};
    use crate::bench::verdict::{Threshold, Verdict};

    fn measured() -> Measured {
        let mut table = Table::new("memory", "way", &[("time", "s"), ("ratio", "")]);
        table.push("by reading", vec![Cell::counted(1.5), Cell::words("baseline")]);
        table.push("offloaded", vec![Cell::counted(0.25), Cell::counted(6.0)]);
        let verdicts = vec![Verdict::counted("ratio", Threshold::AtLeast(6.0), 6.0)];
        let notes = vec!["quiet".to_owned()];
        Measured::sample(Outcome { tables: vec![table], verdicts, notes, plots: Vec::new() })
    }

    #[test]
    fn columns_stand_below_their_headings() {
        let mut text = String::new();
        write_claim(&mut text, &measured()).unwrap();
        let table = "  memory\n    way          time, s      ratio\n    by reading      1.50   baseline\n    offloaded      0.250       6.00\n";
        assert!(text.contains(table), "{text}");
        assert!(text.contains("published: 5.97 times (a cover letter)") && text.contains("Note: quiet"), "{text}");
        assert!(text.contains("ratio: 6.00, threshold at least 6.00: holds"), "{text}");
    }

    #[test]
    fn what_could_not_be_measured_says_why() {
        let mut text = String::new();
        let failed = Measured { failure: Some("no disk".to_owned()), outcome: Outcome::default(), ..measured() };
        write_claim(&mut text, &failed).unwrap();
        assert!(text.ends_with("  not measured: no disk\n"), "{text}");
    }
}
