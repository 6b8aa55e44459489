//! A claim, the size of its measurement, and its result: tables, plots and verdicts.
//!
//! A result has only figures, no layout: text, JSON, plots and HTML are made from the same values. Each cell of a table
//! has readable text beside its numbers, so that programs that read the JSON need not format them.

use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use sealblock_units::{BlockSize, ByteCount};
use serde::Serialize;

use super::verdict::Verdict;
use crate::report::{Spread, interleaved, number};

/// A published claim, and its measurement.
#[derive(Debug)]
pub struct Claim {
    /// Its name on the command line.
    pub name: &'static str,
    /// The claim, in one sentence.
    pub sentence: &'static str,
    /// The published figures.
    pub published: &'static [Published],
    /// The default size of the measurement.
    pub defaults: Defaults,
    /// True if it makes files, which must be possible in the folder of the scale.
    pub makes_files: bool,
    /// Measures it. Files are made in the folder of the scale and are removed before this returns.
    pub measure: fn(&Scale, &Progress) -> anyhow::Result<Outcome>,
}

/// A published figure.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Published {
    /// The subject, and the figures with their units.
    pub figure: &'static str,
    /// The publisher.
    pub source: &'static str,
}

/// The default size of a measurement: all together take about 80 seconds on two cores.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Defaults {
    /// Bytes of each device.
    pub size: ByteCount,
    /// Seconds of one turn of one contender, if a turn is not a fixed amount of work.
    pub seconds: f64,
    /// Rounds; every contender has a turn in each, and the baseline has two.
    pub rounds: u32,
}

/// The size of a claim's measurement, and the folder of its files.
#[derive(Clone, PartialEq, Debug)]
pub struct Scale {
    /// Bytes of each device.
    pub size: ByteCount,
    /// Seconds of one turn of one contender, if a turn is not a fixed amount of work.
    pub seconds: f64,
    /// Rounds; every contender has a turn in each, and the baseline has two.
    pub rounds: u32,
    /// Folder for temporary files.
    pub dir: PathBuf,
}

impl Scale {
    /// Blocks of 4 KiB in each device.
    pub fn blocks(&self) -> u64 {
        self.size.get() >> BlockSize::B4096.shift()
    }
}

/// The progress of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step<'a> {
    /// The claim.
    pub claim: &'static str,
    /// The part of its measurement.
    pub part: &'a str,
    /// The round that is starting, counted from 1.
    pub round: u32,
    /// The number of rounds of this part.
    pub of: u32,
}

/// Called at each step on the measuring thread; it decides whether to continue.
pub type Listener = dyn Fn(&Step) -> ControlFlow<()> + Send + Sync;

/// Reports the progress of a claim's measurement.
#[derive(Clone)]
pub struct Progress {
    claim: &'static str,
    listener: Arc<Listener>,
}

impl Progress {
    /// Reports for this claim.
    pub fn new(claim: &'static str, listener: Arc<Listener>) -> Progress {
        Progress { claim, listener }
    }

    /// Reports the start of a round of `part`, counted from 1.
    ///
    /// # Errors
    /// [`Interrupted`] if the measurement must end; its files are removed when it returns.
    pub fn step(&self, part: &str, round: u32, of: u32) -> Result<(), Interrupted> {
        match (self.listener)(&Step { claim: self.claim, part, round, of }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Interrupted),
        }
    }

    /// Runs the rounds of `part`, and reports each: every contender has a turn in each, in a new order each time.
    ///
    /// # Errors
    /// [`Interrupted`], or the first error of a turn.
    pub async fn rounds<T>(
        &self,
        part: &str,
        rounds: u32,
        contenders: usize,
        turn: impl AsyncFnMut(usize, u32) -> anyhow::Result<T>,
    ) -> anyhow::Result<Vec<Vec<T>>> {
        interleaved(rounds, contenders, |round| Ok(self.step(part, round, rounds)?), turn).await
    }
}

/// A measurement ended early because the user requested it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the measurement was interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The result of a measurement.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Outcome {
    /// The figures.
    pub tables: Vec<Table>,
    /// Pictures of them.
    pub plots: Vec<Plot>,
    /// The verdicts on the claim.
    pub verdicts: Vec<Verdict>,
    /// Notes about the figures: limits, and parts that were skipped on this machine with the reason.
    pub notes: Vec<String>,
}

/// A table of figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Table {
    /// Its title.
    pub title: String,
    /// What its rows are.
    pub rows_are: String,
    /// Its columns, not counting the one with the names of rows.
    pub columns: Vec<Column>,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// A column of figures.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Column {
    /// Its title.
    pub name: String,
    /// The unit of its figures; empty for plain numbers and words.
    pub unit: String,
}

/// A row of figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Row {
    /// The name of the row.
    pub name: String,
    /// One for each column.
    pub cells: Vec<Cell>,
}

/// A figure, or text instead of one.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Cell {
    /// The text for people, without the unit.
    pub text: String,
    /// The median over rounds, or the counted figure.
    pub median: Option<f64>,
    /// The least over rounds.
    pub least: Option<f64>,
    /// The greatest over rounds.
    pub most: Option<f64>,
}

impl Table {
    /// A table without rows; columns by name and unit.
    pub fn new(title: impl Into<String>, rows_are: &str, columns: &[(&str, &str)]) -> Table {
        let column = |&(name, unit): &(&str, &str)| Column { name: name.to_owned(), unit: unit.to_owned() };
        let columns = columns.iter().map(column).collect();
        Table { title: title.into(), rows_are: rows_are.to_owned(), columns, rows: Vec::new() }
    }

    /// Adds a row with a cell for each column.
    pub fn push(&mut self, name: impl Into<String>, cells: Vec<Cell>) {
        debug_assert_eq!(cells.len(), self.columns.len(), "{}", self.title);
        self.rows.push(Row { name: name.into(), cells });
    }
}

impl Cell {
    /// A figure that was measured in several rounds.
    pub fn measured(spread: Spread) -> Cell {
        let Spread { median, least, most } = spread;
        let text = match least.to_bits() == most.to_bits() {
            true => number(median),
            false => format!("{} [{} .. {}]", number(median), number(least), number(most)),
        };
        Cell { text, median: Some(median), least: Some(least), most: Some(most) }
    }

    /// A counted figure: the same on every machine and in every round.
    pub fn counted(value: f64) -> Cell {
        Cell { text: number(value), median: Some(value), least: None, most: None }
    }

    /// Text instead of a figure.
    pub fn words(text: impl Into<String>) -> Cell {
        Cell { text: text.into(), median: None, least: None, most: None }
    }
}

/// A picture of figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Plot {
    /// The name of its file, without an extension.
    pub name: String,
    /// Its title.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The drawing.
    #[serde(flatten)]
    pub drawing: Drawing,
}

/// An axis.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Its unit; empty for plain numbers and names.
    pub unit: String,
    /// True for a logarithmic axis.
    pub logarithmic: bool,
}

impl Axis {
    /// A linear axis.
    pub fn linear(name: &str, unit: &str) -> Axis {
        Axis { name: name.to_owned(), unit: unit.to_owned(), logarithmic: false }
    }

    /// A logarithmic axis; values that are not above 0 are not drawn.
    pub fn logarithmic(name: &str, unit: &str) -> Axis {
        Axis { logarithmic: true, ..Axis::linear(name, unit) }
    }
}

/// Its name and its unit.
impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit.is_empty() {
            true => f.write_str(&self.name),
            false => write!(f, "{}, {}", self.name, self.unit),
        }
    }
}

/// The drawing of a plot.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Drawing {
    /// A bar of each series in each group.
    Bars {
        /// The names under the axis.
        groups: Vec<String>,
        /// A value for each group.
        series: Vec<Series>,
        /// The threshold of the claim, if it is one of these values.
        #[serde(skip_serializing_if = "Option::is_none")]
        threshold: Option<ThresholdLine>,
    },
    /// A curve for each series.
    Curves(Vec<Curve>),
}

/// Bars of one colour.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// A value for each group.
    pub values: Vec<f64>,
    /// The least and the greatest over rounds, for each group; empty if values are counted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spreads: Vec<(f64, f64)>,
}

impl Series {
    /// Values that were measured in several rounds.
    pub fn measured(name: impl Into<String>, of: impl Iterator<Item = Spread>) -> Series {
        let (values, spreads) = of.map(|spread| (spread.median, (spread.least, spread.most))).unzip();
        Series { name: name.into(), values, spreads }
    }

    /// Values that are the same in every round.
    pub fn counted(name: impl Into<String>, values: Vec<f64>) -> Series {
        Series { name: name.into(), values, spreads: Vec::new() }
    }
}

/// A line across each group.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ThresholdLine {
    /// Its name.
    pub name: String,
    /// A value for each group; `None` where the line is interrupted.
    pub values: Vec<Option<f64>>,
}

/// Points of one colour, joined in their order.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Horizontal and vertical values.
    pub points: Vec<(f64, f64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_shows_its_spread_where_it_has_one() {
        let cell = Cell::measured(Spread::of([1.0, 3.0, 2.0].into_iter()));
        assert_eq!((cell.text.as_str(), cell.median, cell.most), ("2.00 [1.00 .. 3.00]", Some(2.0), Some(3.0)));
        assert_eq!(Cell::measured(Spread::of([2.0].into_iter())).text, "2.00");
        assert_eq!((Cell::counted(4096.0).text.as_str(), Cell::counted(1.0).least), ("4,096", None));
        assert_eq!(Cell::words("not installed").median, None);
    }

    #[test]
    fn a_listener_ends_a_measurement() {
        let until_second = |step: &Step| match step.round {
            1 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        };
        let progress = Progress::new("claim", Arc::new(until_second));
        assert_eq!(progress.step("part", 1, 2), Ok(()));
        let ended: anyhow::Result<()> = progress.step("part", 2, 2).map_err(anyhow::Error::from);
        assert!(ended.unwrap_err().context("measuring").is::<Interrupted>());
    }
}
