//! Failures: what could not be done, on which target, why, and what to try.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The action of a close.
pub(crate) const CLOSE: &str = "close";

/// The cause of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Cause {
    /// The arguments are invalid: a range past the end, a size that is no multiple of a block.
    Usage,
    /// The target is not what the command needs, or is of a format that is not understood.
    Unsuitable,
    /// The target cannot do this.
    Absent,
    /// There is no target of that name, or no response.
    Unreachable,
    /// Permission is missing, or another process has the target.
    Refused,
    /// No space is left.
    Full,
    /// Data or tags are damaged where the command needs them whole.
    Damaged,
    /// What was written last may be missing, and that was not accepted.
    Older,
    /// Input or output failed.
    Io,
    /// The reader of the output is gone, as in a pipe into `head`.
    Unread,
}

/// Why something was not done.
///
/// Prints as `sealblock: cannot <action> '<target>': <why>`, with a second line `try: <advice>` when there is advice. An action of
/// several words is followed by `of` before the target, unless it ends in a preposition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StackError {
    cause: Cause,
    action: String,
    target: Option<String>,
    why: String,
    advice: Option<String>,
    is_reported: bool,
    is_lasting: bool,
    is_of_known_volume: bool,
}

impl StackError {
    /// A failure of an action (`open`, `write block 7`, `connect to`), with its reason.
    pub fn new(cause: Cause, action: impl Into<String>, why: impl fmt::Display) -> StackError {
        StackError {
            cause,
            action: action.into(),
            target: None,
            why: plain_text(&why.to_string()),
            advice: None,
            is_reported: false,
            is_lasting: false,
            is_of_known_volume: false,
        }
    }

    /// A failure of input or output. The cause, and advice where there is any, come from the kind of the error.
    pub fn io(action: impl Into<String>, error: &io::Error) -> StackError {
        if let Some(why) = out_of_descriptors(error) {
            return StackError::new(Cause::Io, action, why).advise(MORE_DESCRIPTORS);
        }
        let (cause, advice) = classify(error.kind());
        StackError::new(cause, action, error).advise_if(advice)
    }

    /// A failure at a path. Of a path that leads nowhere it names what is missing: a directory on the way, or a device.
    pub fn at_path(action: impl Into<String>, error: &io::Error, path: &Path) -> StackError {
        let failure = StackError::io(action, error).on(path.display());
        match missing_part(path).filter(|_| error.kind() == io::ErrorKind::NotFound) {
            Some(MissingPart::Directory(folder)) => {
                let folder = printable(&folder.to_string_lossy()).into_owned();
                StackError { why: format!("there is no directory '{folder}'"), ..failure }
                    .advise("check the path, or create the directory")
            }
            Some(MissingPart::Device) => StackError { why: "there is no such device".to_owned(), ..failure }
                .advise("check the name; `lsblk` lists the block devices of this machine"),
            None => failure,
        }
    }

    /// On which target it happened.
    #[must_use]
    pub fn on(self, target: impl fmt::Display) -> StackError {
        StackError { target: Some(printable(&target.to_string()).into_owned()), ..self }
    }

    /// In which part of the target it happened.
    #[must_use]
    pub(crate) fn of_part(self, part: &str) -> StackError {
        StackError { why: format!("{part}: {}", self.why), ..self }
    }

    /// What to try instead. Replaces earlier advice.
    #[must_use]
    pub fn advise(self, advice: impl Into<String>) -> StackError {
        StackError { advice: Some(advice.into()), ..self }
    }

    /// What to try instead, where anything is known to help.
    #[must_use]
    pub fn advise_if(self, advice: Option<&str>) -> StackError {
        match advice {
            Some(advice) => self.advise(advice),
            None => self,
        }
    }

    /// Why it failed and what to try, without the target; without the action, too, if it is this one.
    pub fn reason(&self, action: &str) -> String {
        if self.action != action {
            return self.to_string();
        }
        self.advice.as_ref().map_or(self.why.clone(), |advice| format!("{}; try: {advice}", self.why))
    }

    /// The same, marked as reported already.
    #[must_use]
    pub fn reported(self) -> StackError {
        StackError { is_reported: true, ..self }
    }

    /// The same, marked as permanent: a retry cannot succeed.
    #[must_use]
    pub fn lasting(self) -> StackError {
        StackError { is_lasting: true, ..self }
    }

    /// The same, marked as that of a volume that is there and cannot be opened.
    #[must_use]
    pub fn of_known_volume(self) -> StackError {
        StackError { is_of_known_volume: true, ..self }
    }

    /// True if a volume is there and cannot be opened: what its reserved area says is lost with it.
    pub const fn is_of_known_volume(&self) -> bool {
        self.is_of_known_volume
    }

    /// True if a retry cannot succeed.
    pub const fn is_lasting(&self) -> bool {
        self.is_lasting
    }

    /// True if the failure still has to be printed. A closed pipe is not reported: its reader has closed it.
    pub fn is_unreported(&self) -> bool {
        !self.is_reported && self.cause != Cause::Unread
    }

    /// What kind of failure it is.
    pub const fn cause(&self) -> Cause {
        self.cause
    }

    /// True if what failed is the close of a target.
    pub fn is_of_close(&self) -> bool {
        self.action == CLOSE
    }

    /// What to try, where anything is known to help.
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }

    /// The failure in one line without advice, to be a part of another message.
    pub fn in_short(&self) -> String {
        let StackError { action, why, .. } = self;
        let Some(target) = &self.target else { return format!("cannot {action}: {why}") };
        let takes_target = match action.rsplit_once(' ') {
            None => true,
            Some((_, last)) => matches!(last, "on" | "of" | "to" | "for" | "from" | "with" | "at"),
        };
        format!("cannot {action}{} '{target}': {why}", if takes_target { "" } else { " of" })
    }
}

impl std::error::Error for StackError {}

impl fmt::Display for StackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sealblock: {}", printable_lines(&self.in_short()))?;
        self.advice.as_ref().map_or(Ok(()), |advice| write!(f, "\ntry: {}", printable_lines(advice)))
    }
}

/// A name as people may see it, on a terminal or in a log: what ends a line, controls a terminal or turns the direction of writing is
/// spelled, as `\n` and `\u{1b}`. Everything that shows names uses this or [`printable_lines`].
pub fn printable(text: &str) -> Cow<'_, str> {
    spelled(text, is_control)
}

/// The same of a text of several lines, which stay lines.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    spelled(text, |c| is_control(c) && !matches!(c, '\n' | '\t'))
}

/// A name as one word of a shell, for commands that are advised.
pub fn shell_word(name: impl fmt::Display) -> String {
    let name = name.to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/:@+,".contains(c);
    match !name.is_empty() && name.chars().all(is_plain) {
        true => name,
        false => format!("'{}'", name.replace('\'', r"'\''")),
    }
}

fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn spelled(text: &str, is_spelled: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_spelled) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match is_spelled(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out.into()
}

/// The text of a failure with errors of the operating system as people say them: "no such file" for "No such file or directory (os
/// error 2)".
fn plain_text(text: &str) -> String {
    let mut text = text.replace("No such file or directory (os error 2)", "no such file");
    while let Some(start) = text.find(" (os error ") {
        let Some(end) = text[start..].find(')') else { break };
        text.replace_range(start..=start + end, "");
        let first = text[..start].rfind([':', ';']).map_or(0, |at| (at + 2).min(start));
        if let Some(letter) = text.get_mut(first..=first) {
            letter.make_ascii_lowercase();
        }
    }
    text
}

/// What helps where there is nothing at a path.
pub(crate) const CHECK_PATH: &str = "check the path";
/// What helps where no file can be opened any more.
pub(crate) const MORE_DESCRIPTORS: &str = "a higher limit of open files: `ulimit -n 1024`, or LimitNOFILE= of the unit";

/// Why no file can be opened any more, if the error says so.
pub(crate) fn out_of_descriptors(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error() {
        Some(libc::EMFILE) => Some("this process has as many files open as its limit allows"),
        Some(libc::ENFILE) => Some("this machine has as many files open as its limit allows"),
        _ => None,
    }
}

/// True if nothing can be opened any more, whatever its name.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    out_of_descriptors(error).is_some()
}

/// What is missing of a path that leads nowhere.
enum MissingPart {
    /// The first directory that is not there.
    Directory(PathBuf),
    /// A node among those of devices.
    Device,
}

fn missing_part(path: &Path) -> Option<MissingPart> {
    let folders: Vec<&Path> = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).collect();
    match folders.iter().rev().find(|folder| !folder.exists()) {
        Some(folder) => Some(MissingPart::Directory(folder.to_path_buf())),
        None => path.starts_with("/dev").then_some(MissingPart::Device),
    }
}

/// What an error of the operating system means here, and what helps.
fn classify(kind: io::ErrorKind) -> (Cause, Option<&'static str>) {
    use io::ErrorKind as Kind;
    match kind {
        Kind::NotFound => (Cause::Unreachable, Some(CHECK_PATH)),
        Kind::PermissionDenied => (Cause::Refused, Some("check the permissions of the file")),
        Kind::ReadOnlyFilesystem => (Cause::Refused, Some("use a path on a writable file system")),
        Kind::ResourceBusy => (Cause::Refused, Some("wait until no other process uses it")),
        // Threads, memory and watches have limits; nothing that blocks is asked here.
        Kind::WouldBlock => (Cause::Io, Some("higher limits of this process: `ulimit -u` and `ulimit -v`")),
        Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => {
            (Cause::Full, Some("free space, or use a smaller size"))
        }
        Kind::ConnectionRefused | Kind::ConnectionReset | Kind::TimedOut | Kind::HostUnreachable => {
            (Cause::Unreachable, Some("check that the server is running, and its address and port"))
        }
        Kind::IsADirectory => (Cause::Unsuitable, Some("give the path of a file or a block device")),
        Kind::Unsupported => (Cause::Absent, None),
        Kind::BrokenPipe => (Cause::Unread, None),
        _ => (Cause::Io, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_nothing_to_a_terminal() {
        assert_eq!(printable("a\u{1b}[2J\nb\u{202e}c\u{9b}"), "a\\u{1b}[2J\\nb\\u{202e}c\\u{9b}");
        assert_eq!(printable_lines("a\u{1b}\nb\tc\r"), "a\\u{1b}\nb\tc\\r");
        assert!(matches!(printable("photos \u{e9}"), Cow::Borrowed(_)));
        let error = StackError::new(Cause::Usage, "open", "no \u{7}").on("a\nb").advise("\u{1b}c");
        assert_eq!(error.to_string(), "sealblock: cannot open 'a\\nb': no \\u{7}\ntry: \\u{1b}c");
    }

    #[test]
    fn a_failure_says_what_where_why_and_what_to_try() {
        let failure = StackError::new(Cause::Usage, "use the range on", "block 100 is past the end")
            .on("v")
            .advise("a smaller range");
        assert_eq!(
            failure.to_string(),
            "sealblock: cannot use the range on 'v': block 100 is past the end\ntry: a smaller range"
        );
        assert_eq!(failure.reason("use the range on"), "block 100 is past the end; try: a smaller range");
        assert_eq!(failure.reason("read"), failure.to_string(), "another action is worth telling");
        let bare = StackError::new(Cause::Io, "write", "broken");
        assert_eq!(bare.to_string(), "sealblock: cannot write: broken");
    }

    #[test]
    fn errors_of_the_system_have_a_cause_and_advice() {
        let of = |errno| StackError::io("open", &io::Error::from_raw_os_error(errno));
        for (errno, cause) in [
            (libc::ENOENT, Cause::Unreachable),
            (libc::EACCES, Cause::Refused),
            (libc::EROFS, Cause::Refused),
            (libc::EBUSY, Cause::Refused),
            (libc::EAGAIN, Cause::Io),
            (libc::ENOSPC, Cause::Full),
            (libc::ECONNREFUSED, Cause::Unreachable),
            (libc::EISDIR, Cause::Unsuitable),
        ] {
            assert_eq!(of(errno).cause(), cause, "{errno}");
            assert!(of(errno).advice().is_some(), "{errno}");
        }
        assert_eq!((of(libc::EIO).cause(), of(libc::EIO).advice()), (Cause::Io, None));
        assert_eq!(of(libc::EIO).to_string(), "sealblock: cannot open: input/output error");
        assert_eq!(of(libc::ENOENT).on("v").in_short(), "cannot open 'v': no such file");
        let full = StackError::new(Cause::Full, "allocate space for", "none").on("v");
        assert_eq!(full.in_short(), "cannot allocate space for 'v': none");
        let nested = StackError::new(Cause::Io, "open", "a: Broken pipe (os error 32); b: Is (os error 5)");
        assert_eq!(nested.in_short(), "cannot open: a: broken pipe; b: is");
        assert_eq!(StackError::new(Cause::Io, "open", "a (os error ").in_short(), "cannot open: a (os error ");
    }

    #[test]
    fn what_is_missing_of_a_path_is_named() {
        let missing = io::Error::from_raw_os_error(libc::ENOENT);
        let of = |path: &str| StackError::at_path("create", &missing, Path::new(path)).to_string();
        let folder = "there is no directory '/nowhere-at-all'\ntry: check the path, or create the directory";
        assert_eq!(of("/nowhere-at-all/a/x"), format!("sealblock: cannot create '/nowhere-at-all/a/x': {folder}"));
        assert!(of("/dev/nvme99n1").contains("'/dev/nvme99n1': there is no such device\ntry: check the name; `lsblk`"));
        assert!(of("nothere").ends_with("'nothere': no such file\ntry: check the path"), "{}", of("nothere"));
        let busy = io::Error::from_raw_os_error(libc::EBUSY);
        assert!(!StackError::at_path("open", &busy, Path::new("/dev/x")).to_string().contains("no such device"));
    }

    #[test]
    fn a_limit_of_open_files_is_called_so() {
        let error = StackError::io("open", &io::Error::from_raw_os_error(libc::EMFILE)).on("v").to_string();
        assert!(error.contains("as many files open as its limit allows\ntry: a higher limit of open files"), "{error}");
    }

    #[test]
    fn the_target_follows_the_action_as_in_a_sentence() {
        let of = |action: &str| StackError::new(Cause::Io, action, "no").on("v").in_short();
        assert_eq!(of("verify"), "cannot verify 'v': no");
        assert_eq!(of("connect to"), "cannot connect to 'v': no");
        assert_eq!(of("write block 7"), "cannot write block 7 of 'v': no");
    }
}
