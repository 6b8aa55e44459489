//! Plots as SVG, readable on white and on dark pages.
//!
//! The background is white in both cases, so the contrast is the same everywhere. Each axis has its unit, and the
//! legend is above the drawing. A logarithmic axis has no zero for bars to stand on, so values are drawn as dots there.
//! A thin line through the end of a bar or through a dot shows the least and the greatest of its rounds, and a dashed
//! line across a group shows the threshold of the claim.

use std::ops::Range;

use anyhow::{Context, ensure};
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::combinators::IntoLogRange;
use plotters::coord::ranged1d::{AsRangedCoord, DefaultFormatting, KeyPointHint, Ranged, ValueFormatter};
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, DashedPathElement, EmptyElement, PathElement, Rectangle, Text};
use plotters::prelude::{Cartesian2d, SVGBackend};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, IntoFont, RGBColor, ShapeStyle, TextStyle, WHITE};

use super::outcome::{Axis, Curve, Drawing, Plot, Series, ThresholdLine};
use crate::report::number;

/// Width and height in pixels.
const SIZE: (u32, u32) = (1000, 470);
/// Pixels of the title and of a line of the legend.
const TITLE_HEIGHT: u32 = 34;
const LEGEND_HEIGHT: u32 = 22;
/// The approximate width of a letter of the legend, in pixels.
const LETTER: i32 = 8;
const FONT: &str = "sans-serif";
/// The margins of the drawing in pixels, and those of the numbers beside it.
const MARGIN: u32 = 8;
const RIGHT_MARGIN: u32 = 16;
const NUMBERS_WIDTH: u32 = 72;
/// The approximate width of a letter, relative to its font size.
const LETTER_PART: f64 = 0.57;
/// The factor by which plotters divides a font size.
const FONT_SCALE: f64 = 1.24;
/// Font sizes of names under an axis and of values above bars, and the smallest readable one, in pixels.
const NAME_SIZE: u32 = 13;
const VALUE_SIZE: u32 = 12;
const LEAST_SIZE: u32 = 11;
/// The least gap between two values, in pixels: closer ones read as one number.
const VALUE_GAP: f64 = 5.0;
/// The radius of a dot, in pixels.
const DOT: u32 = 6;
/// Contrast: 7 to 1 on white.
const INK: RGBColor = RGBColor(0x59, 0x59, 0x59);
/// Colours that most colour-blind readers can distinguish as well.
const PALETTE: [RGBColor; 6] = [
    RGBColor(0x3b, 0x82, 0xc4),
    RGBColor(0xd9, 0x82, 0x2b),
    RGBColor(0x2f, 0x9e, 0x6e),
    RGBColor(0x9b, 0x6b, 0xbf),
    RGBColor(0xcc, 0x5b, 0x5b),
    RGBColor(0x8a, 0x8a, 0x3a),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The plot as a complete file.
///
/// # Errors
/// If there is nothing to draw: no value, or none above 0 for a logarithmic axis.
pub fn svg(plot: &Plot) -> anyhow::Result<String> {
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (title, rest) = root.split_vertically(TITLE_HEIGHT);
        title.draw(&Text::new(plot.title.clone(), (SIZE.0 as i32 / 2, 12), words(18, HPos::Center, VPos::Top)))?;
        let (names, threshold): (Vec<&str>, Option<&ThresholdLine>) = match &plot.drawing {
            Drawing::Bars { series, threshold, .. } => {
                (series.iter().map(|series| series.name.as_str()).collect(), threshold.as_ref())
            }
            Drawing::Curves(curves) => (curves.iter().map(|curve| curve.name.as_str()).collect(), None),
        };
        let chart = legend(&rest, &names, threshold)?;
        let drawn = match &plot.drawing {
            Drawing::Bars { groups, series, threshold } => bars(&chart, plot, groups, series, threshold.as_ref()),
            Drawing::Curves(curves) => curves_in(&chart, plot, curves),
        };
        drawn.with_context(|| format!("drawing {}", plot.name))?;
        root.present()?;
    }
    Ok(with_title(&text, &plot.title))
}

/// The same file with a title, which screen readers read out.
fn with_title(svg: &str, title: &str) -> String {
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    match svg.split_once(">\n") {
        Some((head, rest)) => format!("{head} role=\"img\">\n<title>{title}</title>\n{rest}"),
        None => svg.to_owned(),
    }
}

/// The number at a line of an axis, without meaningless zeroes: 10, not 10.0.
fn tick(value: f64) -> String {
    let text = number(value);
    match text.contains('.') && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn words(size: u32, across: HPos, down: VPos) -> TextStyle<'static> {
    (FONT, f64::from(size) * FONT_SCALE).into_font().color(&INK).pos(Pos::new(across, down))
}

/// The font size at which the words fit into this number of pixels, if it is readable.
fn fitting(words: &str, width: f64, most: u32) -> Option<u32> {
    let size = (width / (LETTER_PART * words.chars().count().max(1) as f64)) as u32;
    (size >= LEAST_SIZE).then_some(size.min(most))
}

fn colour(index: usize) -> ShapeStyle {
    PALETTE[index % PALETTE.len()].filled()
}

/// Draws a square and a name for each series, and a dashed line for the threshold; returns the area below.
fn legend<'a>(area: &Area<'a>, names: &[&str], threshold: Option<&ThresholdLine>) -> anyhow::Result<Area<'a>> {
    let (mut at, mut places) = ((70, 4), Vec::new());
    let all = || names.iter().copied().chain(threshold.map(|line| line.name.as_str()));
    for name in all() {
        let width = 24 + LETTER * name.chars().count() as i32;
        if at.0 + width > SIZE.0 as i32 - 10 && at.0 > 70 {
            at = (70, at.1 + LEGEND_HEIGHT as i32);
        }
        places.push(at);
        at.0 += width + 14;
    }
    let (line, chart) = area.split_vertically(at.1 + LEGEND_HEIGHT as i32);
    for (index, (name, (x, y))) in all().zip(places).enumerate() {
        match index < names.len() {
            true => line.draw(&Rectangle::new([(x, y), (x + 12, y + 12)], colour(index)))?,
            false => line.draw(&dashes(vec![(x, y + 6), (x + 14, y + 6)]))?,
        }
        line.draw(&Text::new(name.to_owned(), (x + 18, y), words(13, HPos::Left, VPos::Top)))?;
    }
    Ok(chart)
}

/// The line of a threshold.
fn dashes<C: Clone>(points: Vec<C>) -> DashedPathElement<std::vec::IntoIter<C>, u32> {
    DashedPathElement::new(points, 4_u32, 3_u32, INK.stroke_width(2))
}

/// The range of an axis, for these values.
fn range(axis: &Axis, values: impl Iterator<Item = f64>) -> anyhow::Result<(f64, f64)> {
    let is_drawn = |value: &f64| value.is_finite() && (!axis.logarithmic || *value > 0.0);
    let (least, most) = values
        .filter(is_drawn)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)));
    ensure!(least <= most, "there is no value for the axis '{axis}'");
    Ok(match axis.logarithmic {
        true => (10_f64.powf((least / 2.0).log10().floor()), most * 3.0),
        false if least == most && most == 0.0 => (0.0, 1.0),
        false => (least.min(0.0), most.max(0.0) * 1.12),
    })
}

/// An axis with a slot of width 1 for each group of bars; the group's name is in the middle of its slot.
struct Groups(usize);

impl Ranged for Groups {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let part = value / self.0.max(1) as f64;
        limit.0 + (f64::from(limit.1 - limit.0) * part).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        (0..self.0).map(|group| group as f64 + 0.5).collect()
    }

    fn range(&self) -> Range<f64> {
        0.0..self.0 as f64
    }
}

fn bars(
    area: &Area,
    plot: &Plot,
    groups: &[String],
    series: &[Series],
    threshold: Option<&ThresholdLine>,
) -> anyhow::Result<()> {
    let medians = series.iter().flat_map(|series| series.values.iter().copied());
    let spreads = series.iter().flat_map(|series| series.spreads.iter().flat_map(|&(least, most)| [least, most]));
    let lines = threshold.iter().flat_map(|line| line.values.iter().flatten().copied());
    let y = range(&plot.y, medians.chain(spreads).chain(lines))?;
    let x = Groups(groups.len());
    let name = |at: &f64| groups.get(*at as usize).cloned().unwrap_or_default();
    let group_width = f64::from(SIZE.0 - MARGIN - RIGHT_MARGIN - NUMBERS_WIDTH) / groups.len().max(1) as f64;
    let sizes = groups.iter().map(|name| fitting(name, group_width, NAME_SIZE).unwrap_or(LEAST_SIZE));
    let names = Names { of: &name, size: sizes.min().unwrap_or(NAME_SIZE), has_lines_upwards: false };
    match plot.y.logarithmic {
        true => {
            let mut chart = builder(area).build_cartesian_2d(x, (y.0..y.1).log_scale())?;
            mesh(&mut chart, plot, &names)?;
            let labels = bars_in(&mut chart, series, None, group_width)?;
            lines_in(&mut chart, threshold)?;
            labels_in(&mut chart, labels, DOT as i32 + 1)
        }
        false => {
            let mut chart = builder(area).build_cartesian_2d(x, y.0..y.1)?;
            mesh(&mut chart, plot, &names)?;
            let labels = bars_in(&mut chart, series, Some(0.0), group_width)?;
            lines_in(&mut chart, threshold)?;
            labels_in(&mut chart, labels, 0)
        }
    }
}

/// A value above its bar or dot.
struct Label {
    /// The top of the bar, the dot or its spread.
    at: (f64, f64),
    text: String,
    size: u32,
}

/// Bars from `floor` upwards, or dots if there is none. Returns their values that have room above them.
fn bars_in<'a, 'b, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>,
    series: &[Series],
    floor: Option<f64>,
    group_width: f64,
) -> anyhow::Result<Vec<Label>>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let mut labels = Vec::new();
    let width = 0.84 / series.len().max(1) as f64;
    for (index, series) in series.iter().enumerate() {
        let is_drawn = |value: f64| value.is_finite() && floor.map_or(value > 0.0, |floor| value >= floor);
        let drawn = series.values.iter().enumerate().filter(|(_, value)| is_drawn(**value));
        for (group, &value) in drawn {
            let left = group as f64 + 0.08 + width * index as f64;
            let middle = left + width * 0.46;
            match floor {
                Some(floor) => {
                    let bar = Rectangle::new([(left, floor), (left + width * 0.92, value)], colour(index));
                    chart.draw_series(std::iter::once(bar))?;
                }
                None => drop(chart.draw_series(std::iter::once(Circle::new((middle, value), DOT, colour(index))))?),
            }
            let (least, most) = series.spreads.get(group).copied().unwrap_or((value, value));
            if is_drawn(least) && most > least {
                let whisker = PathElement::new(vec![(middle, least), (middle, most)], INK.stroke_width(1));
                chart.draw_series(std::iter::once(whisker))?;
            }
            let text = number(value);
            if let Some(size) = fitting(&text, width * group_width - VALUE_GAP, VALUE_SIZE) {
                labels.push(Label { at: (middle, value.max(most)), text, size });
            }
        }
    }
    Ok(labels)
}

/// Values, this many pixels above their places. They are drawn last, on white, so that no line crosses a number.
fn labels_in<'b, X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'b>, Cartesian2d<X, Y>>,
    labels: Vec<Label>,
    above: i32,
) -> anyhow::Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    for Label { at, text, size } in labels {
        let half = (LETTER_PART * f64::from(size) * text.chars().count() as f64 / 2.0) as i32;
        let label = EmptyElement::at(at)
            + Rectangle::new([(-half, -above - size as i32), (half, -above - 1)], WHITE.filled())
            + Text::new(text, (0, -above), words(size, HPos::Center, VPos::Bottom));
        chart.draw_series(std::iter::once(label))?;
    }
    Ok(())
}

/// The threshold of the claim, across each group.
fn lines_in<'b, X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'b>, Cartesian2d<X, Y>>,
    threshold: Option<&ThresholdLine>,
) -> anyhow::Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let values = threshold.iter().flat_map(|line| line.values.iter().enumerate());
    for (group, value) in values.filter_map(|(group, value)| Some((group as f64, (*value)?))) {
        chart.draw_series(std::iter::once(dashes(vec![(group + 0.04, value), (group + 0.96, value)])))?;
    }
    Ok(())
}

fn curves_in(area: &Area, plot: &Plot, curves: &[Curve]) -> anyhow::Result<()> {
    let points = || curves.iter().flat_map(|curve| curve.points.iter());
    let x = range(&plot.x, points().map(|point| point.0))?;
    let y = range(&plot.y, points().map(|point| point.1))?;
    match (plot.x.logarithmic, plot.y.logarithmic) {
        (false, false) => curves_on(area, plot, curves, x.0..x.1, y.0..y.1),
        (true, false) => curves_on(area, plot, curves, (x.0..x.1).log_scale(), y.0..y.1),
        (false, true) => curves_on(area, plot, curves, x.0..x.1, (y.0..y.1).log_scale()),
        (true, true) => curves_on(area, plot, curves, (x.0..x.1).log_scale(), (y.0..y.1).log_scale()),
    }
}

fn curves_on<X, Y>(area: &Area, plot: &Plot, curves: &[Curve], x: X, y: Y) -> anyhow::Result<()>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut chart = builder(area).build_cartesian_2d(x, y)?;
    mesh(&mut chart, plot, &Names { of: &|value| tick(*value), size: NAME_SIZE, has_lines_upwards: true })?;
    let is_drawn = |&(right, up): &(f64, f64)| {
        let fits = |axis: &Axis, value: f64| value.is_finite() && (!axis.logarithmic || value > 0.0);
        fits(&plot.x, right) && fits(&plot.y, up)
    };
    for (index, curve) in curves.iter().enumerate() {
        let points: Vec<(f64, f64)> = curve.points.iter().copied().filter(is_drawn).collect();
        chart.draw_series(LineSeries::new(points.clone(), colour(index).stroke_width(2)))?;
        chart.draw_series(points.into_iter().map(|point| Circle::new(point, 4, colour(index))))?;
    }
    Ok(())
}

fn builder<'a, 'b>(area: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(MARGIN).margin_right(RIGHT_MARGIN).x_label_area_size(52).y_label_area_size(NUMBERS_WIDTH);
    builder
}

/// The labels under an axis.
struct Names<'a> {
    of: &'a dyn Fn(&f64) -> String,
    /// The font size.
    size: u32,
    has_lines_upwards: bool,
}

/// Axes with their names, units and numbers.
fn mesh<'b, X, Y>(
    chart: &mut ChartContext<'_, SVGBackend<'b>, Cartesian2d<X, Y>>,
    plot: &Plot,
    names: &Names<'_>,
) -> anyhow::Result<()>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut mesh = chart.configure_mesh();
    mesh.axis_style(INK).bold_line_style(INK.mix(0.35)).light_line_style(INK.mix(0.0));
    mesh.label_style(words(NAME_SIZE, HPos::Center, VPos::Top)).axis_desc_style(words(14, HPos::Center, VPos::Top));
    mesh.x_desc(plot.x.to_string()).y_desc(plot.y.to_string()).x_label_formatter(names.of);
    mesh.x_label_style(words(names.size, HPos::Center, VPos::Top));
    mesh.y_label_formatter(&|value| tick(*value)).y_labels(6);
    if !names.has_lines_upwards {
        mesh.disable_x_mesh();
    }
    mesh.draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Spread;

    fn plot(logarithmic: bool, drawing: Drawing) -> Plot {
        let y = if logarithmic { Axis::logarithmic("time", "ms") } else { Axis::linear("time", "ms") };
        Plot { name: "p".to_owned(), title: "Some <title>".to_owned(), x: Axis::linear("medium", ""), y, drawing }
    }

    fn bars_of(values: &[f64]) -> Drawing {
        let groups = values.iter().map(|value| format!("group {value}")).collect();
        Drawing::Bars { groups, series: vec![Series::counted("a series", values.to_vec())], threshold: None }
    }

    #[test]
    fn a_plot_has_its_title_names_units_and_values() {
        for logarithmic in [false, true] {
            let text = svg(&plot(logarithmic, bars_of(&[1.5, 1234.0]))).unwrap();
            for words in ["Some &lt;title&gt;", "a series", "group 1.5", "group 1234", "time, ms", "medium", "1,234"] {
                assert!(text.contains(words), "{words} is not in {text}");
            }
            assert!(text.starts_with("<svg ") && text.trim_end().ends_with("</svg>"));
        }
    }

    #[test]
    fn numbers_of_axes_have_no_zeroes_that_measure_nothing() {
        let ticks = [0.1, 1.0, 1.5, 10.0, 100.0, 1e4, 1e-5].map(tick);
        assert_eq!(ticks, ["0.1", "1", "1.5", "10", "100", "10,000", "1.00e-5"]);
    }

    #[test]
    fn text_can_be_read_and_a_logarithmic_axis_has_dots() {
        for logarithmic in [false, true] {
            let text = svg(&plot(logarithmic, bars_of(&[1.5, 1234.0, 7.0]))).unwrap();
            let sizes = text.split("font-size=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
            let least = sizes.map(|size| size.parse::<f64>().unwrap()).fold(f64::INFINITY, f64::min);
            assert!(least >= f64::from(LEAST_SIZE) - 0.1, "{least} px");
            assert_eq!(text.matches("<circle").count(), if logarithmic { 3 } else { 0 });
            assert!(text.contains("<title>Some &lt;title&gt;</title>"), "{text}");
        }
    }

    #[test]
    fn curves_are_drawn_on_all_kinds_of_axes() {
        let curve = Curve { name: "curve".to_owned(), points: vec![(1.0, 2.0), (10.0, 30.0), (f64::NAN, 1.0)] };
        for (x, y) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut plot = plot(y, Drawing::Curves(vec![curve.clone()]));
            plot.x.logarithmic = x;
            let text = svg(&plot).unwrap();
            assert_eq!(text.matches("<circle").count(), 2, "what is no number is not drawn");
            assert!(text.contains("<polyline"), "{text}");
        }
    }

    #[test]
    fn words_without_room_are_smaller_or_left_out() {
        assert_eq!(fitting("verify 4096, memory", 400.0, NAME_SIZE), Some(NAME_SIZE));
        assert_eq!(fitting("verify 4096, memory", 130.0, NAME_SIZE), Some(12));
        assert_eq!(fitting("verify 4096, memory", 88.0, NAME_SIZE), None, "nothing is smaller than can be read");
        assert_eq!(fitting("1.50e-5", 12.0, VALUE_SIZE), None);
        let groups: Vec<String> = (0..12).map(|group| format!("group {group}")).collect();
        let series = |name: &str| Series::counted(name, vec![0.000_012_5; 12]);
        let text = svg(&plot(
            true,
            Drawing::Bars { groups, series: vec![series("a"), series("b"), series("c")], threshold: None },
        ))
        .unwrap();
        assert!(text.contains("group 11") && !text.contains("1.25e-5"));
    }

    #[test]
    fn spreads_and_the_threshold_are_drawn_and_within_the_axis() {
        let spread = |median, least, most| Spread { median, least, most };
        let series = vec![Series::measured("s", [spread(4.0, 3.0, 9.0), spread(5.0, 5.0, 5.0)].into_iter())];
        for logarithmic in [false, true] {
            let drawn = |threshold: Option<ThresholdLine>| {
                let groups = vec!["a".to_owned(), "b".to_owned()];
                svg(&plot(logarithmic, Drawing::Bars { groups, series: series.clone(), threshold })).unwrap()
            };
            let lines = |text: &str| text.matches("<polyline").count();
            let line = ThresholdLine { name: "at most 7".to_owned(), values: vec![Some(7.0), None] };
            let (without, with) = (drawn(None), drawn(Some(line)));
            // No line crosses a number: values come behind all lines, on white.
            let (last_line, first_value) = (with.rfind("<polyline").unwrap(), with.find("\n4.00\n").unwrap());
            assert!(last_line < first_value, "{with}");
            assert!(with.contains("at most 7") && lines(&with) > lines(&without), "{with}");
            let whisker = plot(logarithmic, bars_of(&[4.0, 5.0]));
            assert_eq!(lines(&without), lines(&svg(&whisker).unwrap()) + 1, "one value has a spread");
        }
    }

    #[test]
    fn what_has_no_value_is_refused() {
        for (logarithmic, values) in [(false, &[][..]), (false, &[f64::NAN]), (true, &[0.0, -1.0])] {
            let error = svg(&plot(logarithmic, bars_of(values))).unwrap_err();
            assert!(format!("{error:#}").contains("drawing p: there is no value for the axis 'time, ms'"), "{error:#}");
        }
        // Bars of 0 are drawn.
        assert!(svg(&plot(false, bars_of(&[0.0]))).is_ok());
    }
}
