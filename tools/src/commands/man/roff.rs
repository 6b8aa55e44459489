//! A manual page being written: lines of man(7).

use crate::cli::after_help::{Part, parts_of};

/// Text that grows.
#[derive(Default)]
pub struct Page {
    text: String,
    is_in_example: bool,
}

impl Page {
    /// Lines that are in order already.
    pub fn raw(&mut self, lines: &str) {
        self.close_example();
        self.text.push_str(lines);
    }

    /// A section begins.
    pub fn heading(&mut self, words: &str) {
        self.close_example();
        self.line(&format!(".SH {}", escape(&words.to_uppercase())));
    }

    /// A paragraph begins.
    pub fn paragraph(&mut self) {
        self.close_example();
        self.line(".PP");
    }

    /// A line of the paragraph or entry.
    pub fn text(&mut self, words: &str) {
        self.close_example();
        self.line(&escape(words));
    }

    /// An entry of a list: a name, and what it is.
    pub fn entry(&mut self, name: &str, words: &str) {
        self.close_example();
        self.line(".TP");
        self.line(&format!("\\fB{}\\fR", escape(name)));
        self.line(&escape(words));
    }

    /// A line that stays a line.
    pub fn example(&mut self, words: &str) {
        if !self.is_in_example {
            self.line(".EX");
            self.is_in_example = true;
        }
        self.line(&escape(words));
    }

    /// What `--help` shows behind the options, as sections. What comes before the first heading goes into a section of its own.
    pub fn sections(&mut self, text: &str) {
        let parts = parts_of(text);
        if parts.first().is_some_and(|part| !matches!(part, Part::Heading(_))) {
            self.heading("Notes");
        }
        for part in parts {
            match part {
                Part::Heading(title) => self.heading(&title),
                Part::Row(name, text) => self.entry(&name, &text),
                Part::Example(line) => self.example(&line),
                Part::Paragraph(words) => {
                    self.paragraph();
                    self.text(&words);
                }
            }
        }
        self.close_example();
    }

    /// Ends lines that stay lines.
    pub fn close_example(&mut self) {
        if std::mem::take(&mut self.is_in_example) {
            self.line(".EE");
        }
    }

    /// Whether it has a section of this title.
    pub fn has(&self, title: &str) -> bool {
        self.text.contains(&format!(".SH {title}\n"))
    }

    /// All of it.
    pub fn into_text(mut self) -> String {
        self.close_example();
        self.text
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }
}

/// Words as they are, whatever man(7) would make of them.
pub fn escape(words: &str) -> String {
    let escaped = words.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if escaped.starts_with('.') { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sections(text: &str) -> String {
        let mut page = Page::default();
        page.sections(text);
        page.into_text()
    }

    #[test]
    fn tables_become_lists_and_examples_keep_their_lines() {
        let text = "Targets:\n  PATH           a volume; for copy\n                 also a file\n  a:A,B b:A,B c: \
                    one of many\n\nSizes are 4096.\nRanges are more.\n\nExample:\n  a b && c\n  .d";
        assert_eq!(
            sections(text),
            ".SH TARGETS\n.TP\n\\fBPATH\\fR\na volume; for copy also a file\n.TP\n\\fBa:A,B b:A,B c:\\fR\none of many\n.PP\n\
             Sizes are 4096. Ranges are more.\n.SH EXAMPLES\n.EX\na b && c\n\\&.d\n.EE\n"
        );
    }

    #[test]
    fn text_without_a_heading_has_a_section() {
        assert_eq!(sections("Only\nwords."), ".SH NOTES\n.PP\nOnly words.\n");
        let text = "Example:\n  a\n\nExit status 1: bad.";
        assert_eq!(sections(text), ".SH EXAMPLES\n.EX\na\n.EE\n.PP\nExit status 1: bad.\n");
    }

    #[test]
    fn words_stay_as_they_are() {
        for (words, escaped) in [("a-b", "a\\-b"), (".b", "\\&.b"), ("'tis", "\\(aqtis"), ("\\n", "\\en"), ("", "")] {
            assert_eq!(escape(words), escaped);
        }
    }
}
