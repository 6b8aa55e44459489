//! What stands behind a command's options, on a terminal and on a manual page: one text, read into parts.
//!
//! A line that ends in a colon is a heading. Below `Example:` indented lines are examples; elsewhere a line with two spaces in front is
//! a row of a table (a name, two spaces or more, what it is), and lines with more spaces continue it. Everything else is
//! paragraphs: line breaks in them mean nothing.
//!
//! The lines are broken here, and clap must not break them again: it breaks at spaces and counts them as it does, so all spaces of a
//! laid-out text are no-break spaces, which [`printed`] makes spaces.

use clap::Command;

/// A space at which clap breaks no line.
const HARD_SPACE: char = '\u{a0}';
/// Spaces before rows and examples.
const INDENT: usize = 2;
/// Spaces before the text of a row that has its lines to itself.
const DEEP_INDENT: usize = 6;
/// The longest name of a row that the texts of a table begin behind.
const MAX_NAME: usize = 34;
/// Fewer columns than these are too narrow for the texts of a table.
const MIN_TEXT: usize = 38;

/// A part of the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Part {
    /// A section begins, with this title.
    Heading(String),
    /// A row of a table: a name, and what it is.
    Row(String, String),
    /// A line that stays a line.
    Example(String),
    /// Words to be filled.
    Paragraph(String),
}

/// The parts of a text, in order.
pub fn parts_of(text: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let (mut is_example, mut is_new, mut column) = (false, true, None);
    for line in text.lines() {
        let (indent, words) = (line.len() - line.trim_start().len(), line.trim());
        // Behind a line of a paragraph it is the next one.
        let is_apart = is_new || !matches!(parts.last(), Some(Part::Paragraph(_)));
        if let Some(heading) = line.strip_suffix(':').filter(|heading| is_apart && is_heading(heading)) {
            (is_example, column) = (heading.starts_with("Example"), None);
            parts.push(Part::Heading(if is_example { "Examples".to_owned() } else { heading.to_owned() }));
        } else if indent == 0 {
            is_example = is_example && words.is_empty();
            match parts.last_mut() {
                Some(Part::Paragraph(before)) if !is_new && !words.is_empty() => {
                    before.push(' ');
                    before.push_str(words);
                }
                _ if words.is_empty() => {}
                _ => parts.push(Part::Paragraph(words.to_owned())),
            }
        } else if is_example {
            parts.push(Part::Example(words.to_owned()));
        } else if let (true, Some(Part::Row(_, text))) = (indent > INDENT, parts.last_mut()) {
            text.push(' ');
            text.push_str(words);
        } else {
            column = column
                .or_else(|| line[indent..].find("  ").map(|gap| line.len() - line[indent + gap..].trim_start().len()));
            parts.push(row(line, column));
        }
        is_new = words.is_empty();
    }
    parts
}

fn is_heading(line: &str) -> bool {
    !line.starts_with(' ') && line.len() < 40 && !line.contains(". ")
}

/// A row: its name ends at two spaces, or else where the texts of its table begin.
fn row(line: &str, column: Option<usize>) -> Part {
    let (name, text) = match (line.trim_start().split_once("  "), column) {
        (Some(split), _) => split,
        (None, Some(column)) => line.split_at_checked(column).unwrap_or((line, "")),
        (None, None) => (line, ""),
    };
    Part::Row(name.trim().to_owned(), text.trim().to_owned())
}

/// The text in lines of at most `width` columns, but for examples and words that are longer.
fn lay_out(text: &str, width: usize) -> String {
    let parts = parts_of(text);
    let mut lines: Vec<String> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| &parts[before]);
        let is_apart = match (before, part) {
            (None | Some(Part::Heading(_)), _) => false,
            (Some(Part::Row(..)), Part::Row(..)) | (Some(Part::Example(_)), Part::Example(_)) => false,
            (Some(Part::Paragraph(words)), Part::Row(..)) => !words.ends_with(':'),
            _ => true,
        };
        if is_apart {
            lines.push(String::new());
        }
        match part {
            Part::Heading(title) => lines.push(format!("{title}:")),
            Part::Paragraph(words) => lines.extend(filled(words, width)),
            Part::Row(name, text) => lines.extend(row_lines(name, text, names_of_table(&parts, index), width)),
            Part::Example(line) => lines.extend(example_lines(line, &parts, width)),
        }
    }
    lines.join("\n")
}

/// The columns of the longest name, of those that count, in the table around a row.
fn names_of_table(parts: &[Part], index: usize) -> usize {
    let is_row = |part: &&Part| matches!(part, Part::Row(..));
    let (above, below) = (parts[..index].iter().rev().take_while(is_row), parts[index..].iter().take_while(is_row));
    let names = above.chain(below).filter_map(|part| match part {
        Part::Row(name, _) => Some(name.len()),
        _ => None,
    });
    names.filter(|length| *length <= MAX_NAME).max().unwrap_or(MAX_NAME)
}

fn row_lines(name: &str, text: &str, longest: usize, width: usize) -> Vec<String> {
    let column = INDENT + longest + INDENT;
    let is_narrow = width < column + MIN_TEXT && text.len() + column > width;
    let indent = if is_narrow { DEEP_INDENT } else { column };
    let mut texts = filled(text, width.saturating_sub(indent)).into_iter();
    let mut lines = Vec::new();
    match is_narrow || name.len() > longest {
        true => lines.push(format!("{:INDENT$}{name}", "")),
        false => lines.push(format!("{:INDENT$}{name:longest$}{:INDENT$}{}", "", "", texts.next().unwrap_or_default())),
    }
    lines.extend(texts.map(|text| format!("{:indent$}{text}", "")));
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// An example, which is never broken. A remark behind it goes above it where any remark of the text does not fit.
fn example_lines(line: &str, parts: &[Part], width: usize) -> Vec<String> {
    let is_wide =
        |part: &Part| matches!(part, Part::Example(line) if line.contains("  # ") && line.len() + INDENT > width);
    match line.split_once("  # ").filter(|_| parts.iter().any(is_wide)) {
        None => vec![format!("{:INDENT$}{line}", "")],
        Some((command, remark)) => {
            let remark = filled(remark, width.saturating_sub(INDENT + 2));
            let remark = remark.into_iter().map(|words| format!("{:INDENT$}# {words}", ""));
            remark.chain([format!("{:INDENT$}{}", "", command.trim_end())]).collect()
        }
    }
}

/// Words in lines of at most `width` columns.
fn filled(words: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        let line = lines.last_mut().expect("there is one from the start");
        match line.chars().count() {
            0 => line.push_str(word),
            length if length + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The command and those below it with all texts laid out for a terminal of `width` columns.
pub fn laid_out(command: Command, width: usize) -> Command {
    let text = command
        .get_after_help()
        .map(|text| lay_out(&text.to_string(), width).replace(' ', HARD_SPACE.encode_utf8(&mut [0; 4])));
    let command = command.term_width(width);
    let command = if let Some(text) = text { command.after_help(text) } else { command };
    command.mut_subcommands(|below| laid_out(below, width))
}

/// A help text as it is printed.
pub fn printed(help: &str) -> String {
    let lines = help.lines().map(|line| line.trim_end().replace(HARD_SPACE, " ") + "\n");
    lines.collect()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::cli::Cli;
    use crate::cli::tests::typed_commands;

    const TEXT: &str = "Example:\n  a b        # a remark\n  c\n\nWords that\nare filled:\n  one    1\n  four   4, and more\n         of it\n\nEnd.";

    #[test]
    fn a_text_is_read_into_parts() {
        let (row, text) = (|name: &str, text: &str| Part::Row(name.into(), text.into()), |text: &str| text.to_owned());
        let parts = [
            Part::Heading(text("Examples")),
            Part::Example(text("a b        # a remark")),
            Part::Example(text("c")),
            Part::Paragraph(text("Words that are filled:")),
            row("one", "1"),
            row("four", "4, and more of it"),
            Part::Paragraph(text("End.")),
        ];
        assert_eq!(parts_of(TEXT), parts);
        let table =
            "Exit status:\n  0  clean\n  130, 143  by a signal\nNames:\n  A               one\n  A:B C:D E:F,G H more";
        assert!(parts_of(table).contains(&row("130, 143", "by a signal")), "{:?}", parts_of(table));
        assert!(parts_of(table).contains(&row("A:B C:D E:F,G H", "more")), "{:?}", parts_of(table));
    }

    #[test]
    fn lines_are_as_wide_as_the_terminal_and_examples_are_whole() {
        let wide = "Examples:\n  a b        # a remark\n  c\n\nWords that are filled:\n  one   1\n  four  4, and more of it\n\nEnd.";
        assert_eq!(lay_out(TEXT, 80), wide);
        let narrow = "Examples:\n  # a remark\n  a b\n  c\n\nWords that are\nfilled:\n  one   1\n  four\n      4, and\n      more of\n      it\n\nEnd.";
        assert_eq!(lay_out(TEXT, 14), narrow);
    }

    /// Every command, with the names by which it is called.
    fn commands(command: &Command, name: &str) -> Vec<(String, Command)> {
        let below = command.get_subcommands().filter(|below| below.get_name() != "help");
        let below = below.flat_map(|below| commands(below, &format!("{name} {}", below.get_name())));
        std::iter::once((name.to_owned(), command.clone())).chain(below).collect()
    }

    #[test]
    fn no_line_of_a_help_is_wider_than_the_terminal_but_for_examples() {
        for width in [60, 80, 100, 120] {
            let mut all = laid_out(Cli::command(), width);
            all.build();
            for (name, mut command) in commands(&all, "sealblock") {
                let help = printed(&command.render_long_help().to_string());
                assert!(!help.contains(HARD_SPACE));
                for line in help.lines().filter(|line| line.chars().count() > width) {
                    let is_one_word = !line.trim().contains(' ');
                    let is_usage = line.starts_with("Usage: ");
                    assert!(line.starts_with("  sealblock ") || is_one_word || is_usage, "{name} at {width}: {line}");
                }
                // A paragraph that was broken twice has a line of a word or two before a full one.
                let lines: Vec<&str> = help.lines().collect();
                for pair in lines.windows(2) {
                    let next = pair[1].split_whitespace().next().unwrap_or_default().len();
                    let is_prose =
                        |line: &str| !line.is_empty() && !line.starts_with([' ', '-']) && !line.ends_with(':');
                    if is_prose(pair[0]) && is_prose(pair[1]) {
                        assert!(
                            pair[0].len() + 1 + next > width.min(100),
                            "{name} at {width}: {} / {}",
                            pair[0],
                            pair[1]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_command_has_examples_that_are_command_lines() {
        for (name, command) in commands(&Cli::command(), "sealblock") {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let parts = parts_of(&text);
            let examples = parts.iter().filter_map(|part| match part {
                Part::Example(line) => Some(line.replace("uuid:...", "uuid:9c323d42-bc01-804a-bf48-4199606eb519")),
                _ => None,
            });
            let mut own = 0;
            for words in examples.flat_map(|line| typed_commands(&line)) {
                let line = ["sealblock".to_owned()].into_iter().chain(words).collect::<Vec<_>>();
                own += usize::from(line.join(" ").starts_with(&name));
                // The files of a filesystem's name have to be there.
                let error = Cli::try_parse_from(&line).err().map(|error| error.to_string());
                let error = error.filter(|error| !error.contains("no prefix of"));
                assert_eq!(error, None, "{name}: {line:?}");
            }
            assert!(own > 0, "{name} has no example");
        }
    }
}
