//! A manual page being written: lines of man(7).

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

    /// Ends lines that stay lines.
    pub fn close_example(&mut self) {
        if std::mem::take(&mut self.is_in_example) {
            self.line(".EE");
        }
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

    #[test]
    fn words_stay_as_they_are() {
        for (words, escaped) in [("a-b", "a\\-b"), (".b", "\\&.b"), ("'tis", "\\(aqtis"), ("\\n", "\\en"), ("", "")] {
            assert_eq!(escape(words), escaped);
        }
    }
}
