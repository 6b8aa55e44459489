//! What of a command's output stands in the table: the lines that say how the data are, or why nothing was done, without what differs
//! from run to run.

use crate::common::Place;

/// How lines begin that say nothing of how the data are: what a target is, advice, data rates, and who is connected.
const LEFT_OUT: &[&str] = &[
    "I/O ",
    "absent ",
    "checksums ",
    "client ",
    "connections ",
    "controller ",
    "device ",
    "emulated ",
    "features ",
    "file ",
    "filesystem ",
    "generation ",
    "kind ",
    "lies on ",
    "log level ",
    "name ",
    "native ",
    "no direct I/O",
    "offloaded ",
    "one request ",
    "over",
    "process ",
    "protection ",
    "runtime ",
    "sectors, nodes ",
    "sealblock: have the server",
    "sealblock: the devices are labelled",
    "sealblock: the server of",
    "served as ",
    "server ",
    "size ",
    "size, used ",
    "space ",
    "space taken ",
    "subsystem ",
    "superblocks ",
    "tags made by ",
    "target ",
    "log       20",
    "try ",
    "try: ",
    "unknown ",
    "unmapped reads ",
    "use it as ",
    "uuid ",
    "scrub idle",
    "write intent ",
    "listening ",
];
/// What servers log of what passes.
const PASSING: [&str; 3] =
    ["is optimal again: all members are in sync", "is resyncing", "a crash may have left its members different"];
/// Where a line ends in the table: numbers of records behind it differ from run to run.
const ENDS: &[&str] = &["state not closed", "not compared"];
/// What of a replica was not compared differs from run to run, too.
const NOT_COMPARED: &str = " not compared yet";
/// Longer lines are cut.
const MOST_CHARACTERS: usize = 160;

/// The line without what stands before [`NOT_COMPARED`].
fn without_amount(line: String) -> String {
    let Some((before, behind)) = line.split_once(NOT_COMPARED) else { return line };
    let Some((replica, _)) = before.rsplit_once(": ") else { return line };
    format!("{replica}: …{NOT_COMPARED}{behind}")
}

/// Makes cells.
pub struct Words {
    /// Texts of this run, and what stands for them.
    replaced: Vec<(String, String)>,
}

impl Words {
    /// For a place, and names with their values.
    pub fn new(place: &Place, names: &[(&str, &str)]) -> Words {
        let folder = place.path("").display().to_string();
        let mut replaced = vec![(folder, String::new())];
        let served = names.iter().filter(|(name, _)| *name == "S");
        replaced.extend(served.map(|(name, value)| ((*value).to_owned(), (*name).to_owned())));
        Words { replaced }
    }

    /// The cell of what was printed on both sides.
    pub fn of(&self, stdout: &[u8], stderr: &str) -> String {
        let stdout = std::str::from_utf8(stdout).unwrap_or("(the data)");
        let lines = stdout.lines().chain(stderr.lines()).map(str::trim);
        let is_left_out = |line: &str| LEFT_OUT.iter().any(|start| line.starts_with(start));
        let is_passing = |line: &str| PASSING.iter().any(|words| line.ends_with(words));
        // How long requests took is of each run.
        let is_latency = |line: &str| line.contains(": p50 ");
        let is_said = |line: &&str| !line.is_empty() && !is_left_out(line) && !is_passing(line) && !is_latency(line);
        let mut words: Vec<String> = lines.filter(is_said).map(|line| self.normal(line)).collect();
        words.dedup();
        words.join("<br>").replace('|', "\\|")
    }

    fn normal(&self, line: &str) -> String {
        let line = self.replaced.iter().fold(line.to_owned(), |line, (from, to)| line.replace(from, to));
        let is_counted = line.contains("of the log ") || line.starts_with("log ");
        let words = without_dates(&without_time(&line));
        let of_any_run = |word: &str| if is_counted { without_number(word) } else { of_any_run(word) };
        let words: Vec<String> = words.split_whitespace().map(of_any_run).collect();
        let line = without_amount(words.join(" "));
        if ENDS.iter().any(|start| line.starts_with(start)) {
            let shown = line.split(|end: char| end.is_ascii_digit() || end == ';').next().unwrap_or_default();
            return format!("{shown}…");
        }
        match line.char_indices().nth(MOST_CHARACTERS) {
            Some((at, _)) => format!("{}…", &line[..at]),
            None => line,
        }
    }
}

/// Without ` in 0.12 s` and the rates behind it, and without what a run of `scrub` took.
fn without_time(line: &str) -> String {
    let is_time = |rest: &str| rest.split_once(" s").is_some_and(|(time, _)| time.parse::<f64>().is_ok());
    for before in [" in ", " after "] {
        let found = line.match_indices(before).find(|(at, _)| is_time(&line[at + before.len()..]));
        let Some((at, _)) = found else { continue };
        let rest = line[at + before.len()..].split_once(" s").map_or("", |(_, rest)| rest);
        let rest = match rest.strip_prefix(" (").and_then(|rest| rest.split_once(')')) {
            Some((_, rest)) => rest,
            None => rest,
        };
        return format!("{}{rest}", &line[..at]);
    }
    line.to_owned()
}

/// `DATE` for a date, a time and how long ago it was.
fn without_dates(line: &str) -> String {
    match line.split_once(" UTC (") {
        Some((before, after)) if before.len() >= 16 => {
            let rest = after.split_once(')').map_or("", |(_, rest)| rest);
            format!("{}DATE{rest}", &before[..before.len() - 16])
        }
        _ => line.to_owned(),
    }
}

/// A word that is the same in any run: checksums, identities and ports are not.
fn of_any_run(word: &str) -> String {
    let is_hex = |word: &str| word.chars().all(|digit| digit.is_ascii_hexdigit() || digit == '-');
    let bare = word.trim_matches(|end: char| !end.is_ascii_alphanumeric());
    if bare.starts_with("0x") {
        return word.replace(bare, "0x…");
    }
    if bare.len() >= 32 && is_hex(bare) {
        return word.replace(bare, "UUID");
    }
    match word.split_once("127.0.0.1:") {
        Some((before, after)) => {
            format!("{before}SERVER{}", after.trim_start_matches(|digit: char| digit.is_ascii_digit()))
        }
        None => word.to_owned(),
    }
}

/// A word in which a number is `…`.
fn without_number(word: &str) -> String {
    let bare = word.trim_matches(|end: char| !end.is_ascii_alphanumeric());
    let is_number = !bare.is_empty() && bare.chars().all(|digit| digit.is_ascii_digit());
    if is_number { word.replace(bare, "…") } else { word.to_owned() }
}
