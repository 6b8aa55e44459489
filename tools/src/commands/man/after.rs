//! What stands behind a command's options, as sections of a manual page.
//!
//! The text is the one that `--help` shows: a line that ends in a colon begins a section, lines with two spaces in front are a
//! table (a name, spaces, what it is) or examples, and everything else is a paragraph. On a page a section is a section, a
//! table is a list whose texts are filled, and an example keeps its lines.

use super::roff::Page;

/// Indent of a continuation line.
const INDENT: usize = 2;

/// Puts the sections of a text on a page. What comes before the first heading goes into a section of its own.
pub fn put(page: &mut Page, text: &str) {
    let mut section = Section { is_example: false, column: None, has_heading: false };
    let lines: Vec<&str> = text.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let rest = &lines[index..];
        match line.strip_suffix(':').filter(|heading| is_heading(heading)) {
            Some(heading) => section = Section::begin(page, heading, &rest[1..]),
            None => section.put(page, line, index.checked_sub(1).map(|before| lines[before])),
        }
    }
    section.end(page);
}

fn is_heading(line: &str) -> bool {
    !line.starts_with(' ') && line.len() < 40 && !line.contains(". ")
}

struct Section {
    is_example: bool,
    /// Where the texts of its table begin.
    column: Option<usize>,
    has_heading: bool,
}

impl Section {
    fn begin(page: &mut Page, heading: &str, rest: &[&str]) -> Section {
        let is_example = heading.starts_with("Example");
        page.heading(&if is_example { "Examples".to_owned() } else { heading.to_owned() });
        let table = rest.iter().take_while(|line| line.starts_with(' '));
        let column = table.filter_map(|line| column_of(line)).next();
        Section { is_example, column: column.filter(|_| !is_example), has_heading: true }
    }

    fn put(&mut self, page: &mut Page, line: &str, before: Option<&str>) {
        let indent = line.len() - line.trim_start().len();
        if line.trim().is_empty() {
            return;
        }
        if !self.has_heading {
            page.heading("Notes");
            self.has_heading = true;
        }
        match (indent, self.column) {
            (INDENT, Some(column)) => {
                let (name, text) = line.split_at_checked(column).unwrap_or((line, ""));
                page.entry(name.trim(), text.trim());
            }
            (INDENT.., _) if self.is_example => page.example(line.trim()),
            (1.., _) => page.text(line.trim()),
            _ => {
                let is_new = before.is_none_or(|before| before.trim().is_empty() || before.starts_with(' '));
                if is_new {
                    page.paragraph();
                }
                page.text(line.trim());
            }
        }
    }

    fn end(self, page: &mut Page) {
        page.close_example();
    }
}

/// Where the text of a line of a table begins: behind two spaces or more.
fn column_of(line: &str) -> Option<usize> {
    let name = line.get(INDENT..).filter(|rest| !rest.starts_with(' '))?;
    let gap = name.find("  ")?;
    let text = name[gap..].trim_start();
    (!text.is_empty()).then(|| line.len() - text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> String {
        let mut page = Page::default();
        put(&mut page, text);
        page.into_text()
    }

    #[test]
    fn tables_become_lists_and_examples_keep_their_lines() {
        let text = "Targets:\n  PATH           a volume; for copy\n                 also a file\n  a:A,B b:A,B c: \
                    one of many\n\nSizes are 4096.\nRanges are more.\n\nExample:\n  a b && c\n  .d";
        assert_eq!(
            page(text),
            ".SH TARGETS\n.TP\n\\fBPATH\\fR\na volume; for copy\nalso a file\n.TP\n\\fBa:A,B b:A,B c:\\fR\none of many\n.PP\n\
             Sizes are 4096.\nRanges are more.\n.SH EXAMPLES\n.EX\na b && c\n\\&.d\n.EE\n"
        );
    }

    #[test]
    fn text_without_a_heading_has_a_section() {
        assert_eq!(page("Only\nwords."), ".SH NOTES\n.PP\nOnly\nwords.\n");
        assert_eq!(
            page("Example:\n  a\n\nExit status 1: bad."),
            ".SH EXAMPLES\n.EX\na\n.EE\n.PP\nExit status 1: bad.\n"
        );
    }
}
