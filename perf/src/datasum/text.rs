//! The result as tables for people.

use std::fmt::Write;

use sealblock_units::ByteCount;

use super::report::{Figure, ModeReport, PointReport, Ratios, Report};
use crate::report::number;

/// All of it.
pub fn report(report: &Report) -> String {
    let mut text = format!("{}\n", report.machine.text);
    let place = report.dir.as_deref().map_or("in memory".to_owned(), |dir| format!("in files in {dir}"));
    let requests = if report.buffered { "collected until the commit" } else { "direct" };
    writeln!(
        text,
        "devices {place}; random writes of 4 KiB, {requests}, {} in flight; {} commits a turn; at most {} of changed nodes",
        report.queue_depth,
        report.commits,
        ByteCount::new(report.dirty_memory_bytes)
    )
    .ok();
    report.points.iter().for_each(|one| point(&mut text, one));
    text
}

fn point(text: &mut String, point: &PointReport) {
    let (size, metadata) = (ByteCount::new(point.size_bytes), point.metadata_name());
    let batch = match (point.commit_writes, point.commit_interval_s) {
        (Some(writes), _) => format!("{writes} writes"),
        (None, seconds) => format!("{} s", number(seconds.unwrap_or(0.0))),
    };
    let model =
        point.model_amplification.map_or(String::new(), |model| format!("; by the model {model:.3} bytes a byte"));
    write!(text, "\nfile of {size}, metadata {metadata}, {batch} between commits{model}; {} rounds\n", point.rounds)
        .ok();
    writeln!(
        text,
        "  {:16} {:>24} {:>24} {:>24} {:>7} {:>9} {:>9} {:>6}  compared with",
        "mode", "writes/s", "CPU us a write", "bytes written a byte", "data", "metadata", "tags", "read"
    )
    .ok();
    point.modes.iter().for_each(|one| mode(text, one));
    trees(text, point);
}

fn spread(figure: &Figure, text: impl Fn(f64) -> String) -> String {
    format!("{} [{} .. {}]", text(figure.median), text(figure.least), text(figure.most))
}

fn mode(text: &mut String, mode: &ModeReport) {
    let fine = |value: f64| format!("{value:.3}");
    let part = |of: fn(&super::report::WrittenReport) -> &Figure| {
        mode.written.as_ref().map_or("-".to_owned(), |written| fine(of(written).median))
    };
    write!(
        text,
        "  {:16} {:>24} {:>24} {:>24} {:>7} {:>9} {:>9} {:>6}",
        mode.mode,
        spread(&mode.iops, number),
        spread(&mode.cpu_us, number),
        spread(&mode.amplification, fine),
        part(|written| &written.data),
        part(|written| &written.metadata),
        part(|written| &written.protection),
        fine(mode.read.median)
    )
    .ok();
    if let (Some(baseline), Some(of)) = (mode.baseline, &mode.ratios) {
        write!(text, "  {baseline}: {}", ratios(of)).ok();
    }
    if let Some(of) = &mode.kernel_ratios {
        write!(text, "{} the kernel: {}", if mode.baseline.is_some() { ";" } else { " " }, ratios(of)).ok();
    }
    text.push('\n');
}

fn ratios(ratios: &Ratios) -> String {
    let of = |figure: &Figure| spread(figure, |value| format!("{value:.2}"));
    format!("writes/s {}, CPU {}, bytes {}", of(&ratios.iops), of(&ratios.cpu), of(&ratios.amplification))
}

/// Which trees the nodes are of, in each mode in which that was counted.
fn trees(text: &mut String, point: &PointReport) {
    for mode in &point.modes {
        let Some(written) = &mode.written else { continue };
        let parts: Vec<String> =
            written.trees.iter().map(|(name, of)| format!("{} {:.4}", name.replace('_', " "), of.median)).collect();
        writeln!(text, "  nodes of {:12} {}", mode.mode, parts.join(", ")).ok();
    }
}
