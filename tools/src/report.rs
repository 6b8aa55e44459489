//! What `verify --json` prints. `docs/formats/json.md` is the contract; these structures follow it.
//!
//! Guards and tags have up to 64 bits and more, and many readers of JSON keep only 53 of a number. They are texts of hexadecimal
//! digits, as wide as the field is.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sealblock_block::BadBlockCause;
use sealblock_integrity::Field;
use sealblock_media_volume::WhyLost;
use sealblock_runtime_reactor::{StandardStream, was_closed_at_start};
use sealblock_server::dates::moment;
use sealblock_server::line_writer::LineWriter;
use sealblock_server::status::health::Checked;
use sealblock_stack::range::BlockRange;
use sealblock_stack::{Cause, OpenTarget, StackError, lost_answers_of, printable_lines};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::exit::Exit;

/// Says on standard error where writes may be lost that were answered and not flushed before a volume was left, not in good order. No command
/// fails for that, since what was flushed is there, and it is said until the hosts of a server were told.
pub fn note_lost_answers(opened: &OpenTarget) {
    opened.lost_answers().iter().for_each(|reason| note_lost(reason));
}

/// The same of a volume that no target was opened for.
pub fn note_lost_answers_of(path: &Path, why: Option<WhyLost>) {
    why.iter().for_each(|why| note_lost(&lost_answers_of(path, *why)));
}

/// The same for one reason; once, however often the volume is opened.
fn note_lost(reason: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if !TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(reason.to_owned()) {
        return;
    }
    note(&format_args!("completed writes that were not flushed may be lost: {reason}"));
}

/// Says on standard error that blocks of a target may be older than what was written, if so, and what [`note_lost_answers`] says. True if so:
/// the command ends with [`Exit::unless_older`].
pub fn note_older(opened: &OpenTarget) -> bool {
    note_lost_answers(opened);
    let text = opened.older_text();
    text.iter().for_each(|text| note(&format_args!("{text}")));
    text.is_some()
}

/// The report of `verify`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VerifyReport {
    /// The target as its canonical name.
    pub target: String,
    /// Blocks that were checked, bad ones included.
    pub blocks_verified: u64,
    /// Bytes of data in these blocks.
    pub bytes_verified: u64,
    /// Bytes of payload that crossed from the device to this host.
    pub bytes_transferred: u64,
    /// Whether the device did the checking.
    pub offloaded: bool,
    /// How long it took, in seconds.
    pub elapsed_s: f64,
    /// What blocks were checked against.
    pub checked: Checked,
    /// What is wrong, in the order of the blocks; empty when nothing is.
    pub errors: Vec<BlockError>,
    /// How many more blocks are wrong than `errors` lists.
    pub errors_unlisted: u64,
    /// What was not checked, in the order of the blocks; empty when every copy of every block was.
    pub unchecked: Vec<NotChecked>,
    /// Copies of metadata that are lost and were not written anew, in words; empty when all are there.
    pub lost_metadata: Vec<String>,
    /// The blocks from the first one on that was not looked at, when it was ended by a signal; else nothing.
    #[serde(serialize_with = "as_text")]
    pub resume: Option<BlockRange>,
    /// With `--resume`, the parts that were verified and when, in the order of the blocks; empty otherwise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<VerifiedPart>,
    /// With `--resume`, what was verified by earlier runs and may have been written since; nothing otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified_before: Option<VerifiedBefore>,
    /// Why files may be missing in `errors`; empty when nothing kept them from being found.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files_notes: Vec<String>,
    /// True if files were looked for, so that people are told.
    #[serde(skip)]
    pub are_files_told: bool,
    /// Damaged blocks without a line that was printed for them.
    #[serde(skip)]
    pub unprinted: u64,
}

/// As a text, or null.
pub(crate) fn as_text<S: Serializer>(value: &Option<impl fmt::Display>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

/// Blocks that were verified without an interruption.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifiedPart {
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// When it began, in seconds since 1970.
    pub started_unix_s: u64,
    /// When it ended, in seconds since 1970.
    pub ended_unix_s: u64,
    /// How long it took, in seconds.
    pub elapsed_s: f64,
    /// Bytes of payload that crossed from the device to this host.
    pub bytes_transferred: u64,
    /// Whether the device did the checking.
    pub offloaded: bool,
}

/// Blocks that earlier runs verified, of a target that does not show whether it was written since.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct VerifiedBefore {
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// When the last of these runs ended, in seconds since 1970.
    pub ended_unix_s: u64,
}

impl fmt::Display for VerifiedBefore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VerifiedBefore { first, last, ended_unix_s } = self;
        let ended = moment(i64::try_from(*ended_unix_s).unwrap_or(i64::MAX));
        write!(f, "blocks {first} to {last} were verified before, last on {ended}, and may have been written since")
    }
}

/// A run of blocks of which a copy was not checked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotChecked {
    /// The member of a group whose copy it is, where that is known.
    pub member: Option<String>,
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// Why not.
    pub why: Cow<'static, str>,
}

impl VerifyReport {
    /// The exit status: damage counts more than unchecked blocks.
    pub fn exit(&self) -> Exit {
        match (self.damaged(), self.is_complete()) {
            (0, true) => Exit::Clean,
            (0, false) => Exit::Incomplete,
            _ => Exit::DamageFound,
        }
    }

    /// True if every copy of every block was checked and is still what was checked, and no copy of the metadata is missing.
    fn is_complete(&self) -> bool {
        self.unchecked.is_empty() && self.lost_metadata.is_empty() && self.verified_before.is_none()
    }

    /// What is wrong with blocks, unlisted ones included.
    pub fn damaged(&self) -> u64 {
        self.errors.len() as u64 + self.errors_unlisted
    }

    /// The outcome in words. Only what was checked against seals, every copy of it, is clean.
    pub fn verdict(&self) -> String {
        let repaired = self.errors.iter().filter(|error| error.repaired).count();
        let damage = match (self.damaged(), repaired) {
            (0, _) => None,
            (bad, 0) => Some(format!("{bad} damaged")),
            (bad, repaired) => Some(format!("{bad} damaged, {repaired} repaired")),
        };
        let incomplete = (!self.is_complete()).then(|| match &self.verified_before {
            Some(before) => format!("incomplete: {before}"),
            None => "incomplete".to_owned(),
        });
        let words: Vec<String> = damage.into_iter().chain(incomplete).collect();
        match (words.is_empty(), self.checked) {
            (false, _) => words.join(", "),
            (true, Checked::Seals) => "clean".to_owned(),
            (true, Checked::Readability) => "readable; not every block has a seal".to_owned(),
        }
    }
}

/// One thing that is wrong with one block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockError {
    /// The address of the block.
    pub lba: u64,
    /// What does not match.
    #[serde(serialize_with = "by_name", deserialize_with = "named")]
    pub field: BadBlockCause,
    /// What the field should be; nothing for a block that cannot be read.
    pub expected: Option<Hex>,
    /// What the field is; nothing for a block that cannot be read.
    pub actual: Option<Hex>,
    /// The target that is the bad member of a group, where it was one.
    pub member: Option<String>,
    /// Whether the block was rewritten from another copy.
    pub repaired: bool,
    /// The files that have the block, of a target on this machine: none for free space, metadata, and files that were not found;
    /// `None` where that was not looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<FileAt>>,
}

/// A place in a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileAt {
    /// The file.
    pub path: String,
    /// Offset in it in bytes; `None` in a protected volume, which has its blocks where it likes.
    pub offset: Option<u64>,
}

fn by_name<S: Serializer>(cause: &BadBlockCause, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cause.as_str())
}

fn named<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BadBlockCause, D::Error> {
    let name = Cow::<str>::deserialize(deserializer)?;
    let known = CAUSES.into_iter().find(|cause| cause.as_str() == name);
    known.ok_or_else(|| de::Error::unknown_variant(&name, &[]))
}

/// Every cause.
const CAUSES: [BadBlockCause; 8] = [
    BadBlockCause::Tag(Field::Guard),
    BadBlockCause::Tag(Field::AppTag),
    BadBlockCause::Tag(Field::RefTag),
    BadBlockCause::Tag(Field::StorageTag),
    BadBlockCause::Media,
    BadBlockCause::Conflict,
    BadBlockCause::Stale,
    BadBlockCause::Unsettled,
];

/// What does not match, as people read it.
pub const fn cause_text(cause: BadBlockCause) -> &'static str {
    match cause {
        BadBlockCause::Tag(Field::Guard) => "guard",
        BadBlockCause::Tag(Field::AppTag) => "application tag",
        BadBlockCause::Tag(Field::RefTag) => "reference tag",
        BadBlockCause::Tag(Field::StorageTag) => "storage tag",
        BadBlockCause::Media => "medium",
        BadBlockCause::Conflict => "conflict",
        BadBlockCause::Stale => "stale",
        BadBlockCause::Unsettled => "unsettled",
    }
}

/// The value of a guard or a tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Hex {
    value: u128,
    bits: u32,
}

impl Hex {
    /// A field of this many bits. Bits of `value` above them are shown too: a value that is too large is itself a finding.
    pub const fn new(value: u128, bits: u32) -> Hex {
        Hex { value, bits }
    }
}

impl fmt::Display for Hex {
    /// `0x` and lower-case digits, as many as the field is wide.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:0digits$x}", self.value, digits = self.bits.div_ceil(4) as usize)
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() <= 32 && !digits.starts_with('+'));
        let value = digits.and_then(|digits| Some((u128::from_str_radix(digits, 16).ok()?, digits.len() as u32 * 4)));
        let (value, bits) =
            value.ok_or_else(|| de::Error::custom("a value of a field is 0x and hexadecimal digits"))?;
        Ok(Hex { value, bits })
    }
}

/// Lines for people, each a name and a value behind a column.
pub struct Lines {
    text: String,
    column: usize,
}

impl Lines {
    /// No lines; values begin behind this column.
    pub fn new(column: usize) -> Lines {
        Lines { text: String::new(), column }
    }

    /// A line.
    pub fn put(&mut self, name: &str, value: impl fmt::Display) {
        let column = self.column;
        self.text.push_str(&format!("{name:<column$}{value}\n"));
    }

    /// A line without a name: an empty one for an empty text.
    pub fn line(&mut self, line: impl fmt::Display) {
        self.text.push_str(&format!("{line}\n"));
    }

    /// All of them, without the end of the last one.
    pub fn into_text(self) -> String {
        self.text.trim_end().to_owned()
    }
}

/// Prints a note for the user on standard error, beside the result.
pub fn note(what: &dyn fmt::Display) {
    say_aside(format_args!("sealblock: {what}"));
}

/// Whether the reader of standard output has gone, as `head` does when it has enough.
static UNREAD: AtomicBool = AtomicBool::new(false);

/// Prints one JSON object and the end of its line on standard output.
///
/// # Errors
/// When it cannot be written. A reader that has gone is no error: the work was done.
pub fn print_json(report: &impl Serialize) -> Result<(), StackError> {
    print(|output| write_json(report, output)).map_err(|error| output_error(&error))
}

/// A failure to write to standard output. A reader that has gone ends the command without a word.
pub fn output_error(error: &io::Error) -> StackError {
    const ACTION: &str = "write to standard output";
    match StackError::io(ACTION, error) {
        failure if failure.cause() == Cause::Full => failure.advise("write it to where there is space"),
        failure if failure.cause() == Cause::Unread => failure,
        // Advice for files that have names does not fit.
        failure => StackError::new(failure.cause(), ACTION, error),
    }
}

/// Refuses a command whose data go to standard output if the process was started without one.
///
/// # Errors
/// If so.
pub fn check_output_open() -> Result<(), StackError> {
    match was_closed_at_start(StandardStream::Output) {
        true => Err(StackError::new(Cause::Io, "write to standard output", "it is closed")
            .advise("give a file, or redirect standard output; `>/dev/null` discards the data")),
        false => Ok(()),
    }
}

/// Whether nobody reads standard output any more, so that work whose only purpose is to print may end.
pub fn reader_has_gone() -> bool {
    if was_closed_at_start(StandardStream::Output) {
        return true;
    }
    let stdout = io::stdout();
    let mut output = [PollFd::new(&stdout, PollFlags::empty())];
    UNREAD.load(Ordering::Relaxed)
        || poll(&mut output, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
            .is_ok_and(|_| output[0].revents().contains(PollFlags::ERR))
}

/// Prints lines on standard output, in place of what is on the screen of a terminal.
///
/// # Errors
/// As [`print_json`].
pub fn redraw(lines: &str) -> Result<(), StackError> {
    const HOME_AND_CLEAR: &str = "\x1b[H\x1b[2J";
    let clear = if io::stdout().is_terminal() { HOME_AND_CLEAR } else { "" };
    print(|output| writeln!(output, "{clear}{}", printable_lines(lines)).and_then(|()| output.flush()))
        .map_err(|error| output_error(&error))
}

/// Prints a line on standard output.
///
/// # Errors
/// As [`print_json`].
pub fn say(line: &str) -> Result<(), StackError> {
    print(|output| write_text(line, output)).map_err(|error| output_error(&error))
}

/// Prints one JSON object, or else the text.
///
/// # Errors
/// As [`print_json`].
pub fn print_report(json: bool, report: &impl Serialize, text: impl FnOnce() -> String) -> Result<(), StackError> {
    if json { print_json(report) } else { say(&text()) }
}

/// Where the reports of a server go.
static EVENTS: OnceLock<LineWriter> = OnceLock::new();

/// From now on [`put_event`] does not wait for the reader of standard output.
///
/// # Errors
/// If the process cannot have another thread.
pub fn start_events() -> Result<EventsGuard, StackError> {
    let lost_text = |lost| {
        tracing::warn!(events = lost, "events were dropped because standard output was not read");
        Vec::new()
    };
    let writer = LineWriter::start(io::stdout(), lost_text).map_err(|error| StackError::io("start", &error))?;
    let _ = EVENTS.set(writer);
    Ok(EventsGuard)
}

/// The end of the events: dropping it writes the remaining ones.
pub struct EventsGuard;

impl Drop for EventsGuard {
    fn drop(&mut self) {
        EVENTS.get().into_iter().for_each(LineWriter::finish);
    }
}

/// Writes an event of a server, as one JSON object or else as text.
pub fn put_event(json: bool, event: &impl Serialize, text: impl FnOnce() -> String) {
    let mut bytes = Vec::new();
    let written = if json { write_json(event, &mut bytes) } else { write_text(&text(), &mut bytes) };
    written.expect("a vector takes all bytes");
    if let Some(events) = EVENTS.get() {
        events.put(bytes);
    }
}

/// Prints a line on standard error, beside a result that is data. A closed or full standard error is no error.
pub fn say_aside(line: impl fmt::Display) {
    writeln!(io::stderr(), "{}", printable_lines(&line.to_string())).ok();
}

fn print(write: impl FnOnce(&mut io::StdoutLock<'static>) -> io::Result<()>) -> io::Result<()> {
    if UNREAD.load(Ordering::Relaxed) {
        return Ok(());
    }
    heard(write(&mut io::stdout().lock()), &UNREAD)
}

/// Remembers that a reader has gone, which ends the printing and nothing else.
fn heard(printed: io::Result<()>, unread: &AtomicBool) -> io::Result<()> {
    match printed {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            unread.store(true, Ordering::Relaxed);
            Ok(())
        }
        printed => printed,
    }
}

/// A text of a server that need not be believed: each line says whose it is.
pub fn attributed(text: &str, stranger: Option<String>) -> String {
    match stranger {
        Some(user) => text.lines().map(|line| format!("[{user}] {line}")).collect::<Vec<_>>().join("\n"),
        None => text.to_owned(),
    }
}

fn write_text(text: &str, output: &mut impl Write) -> io::Result<()> {
    writeln!(output, "{}", printable_lines(text))?;
    output.flush()
}

fn write_json(report: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, report).map_err(io::Error::from)?;
    writeln!(output)?;
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(report: &impl Serialize) -> String {
        let mut text = Vec::new();
        write_json(report, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn error(field: BadBlockCause, values: Option<(Hex, Hex)>) -> BlockError {
        let (expected, actual) = values.unzip();
        BlockError { lba: 7, field, expected, actual, member: None, repaired: false, files: None }
    }

    fn report() -> VerifyReport {
        let guards = (Hex::new(0x1d0f, 32), Hex::new(u128::from(u32::MAX), 32));
        let media = BlockError { member: Some("b".to_owned()), repaired: true, ..error(BadBlockCause::Media, None) };
        let why = "the member is offline".into();
        VerifyReport {
            target: "mirror:a,b".to_owned(),
            blocks_verified: 16,
            bytes_verified: 65536,
            bytes_transferred: 0,
            offloaded: true,
            elapsed_s: 0.25,
            checked: Checked::Seals,
            errors: vec![error(BadBlockCause::Tag(Field::Guard), Some(guards)), media],
            errors_unlisted: 0,
            unchecked: vec![NotChecked { member: Some("c".to_owned()), first: 0, last: 15, why }],
            lost_metadata: Vec::new(),
            resume: None,
            parts: Vec::new(),
            verified_before: None,
            files_notes: Vec::new(),
            are_files_told: false,
            unprinted: 0,
        }
    }

    #[test]
    fn clean_is_said_and_0_returned_only_when_every_copy_was_checked_against_a_seal() {
        let clean = VerifyReport { errors: Vec::new(), unchecked: Vec::new(), ..report() };
        assert_eq!((clean.verdict().as_str(), clean.exit()), ("clean", Exit::Clean));
        let readable = VerifyReport { checked: Checked::Readability, ..clean.clone() };
        assert_eq!(
            (readable.verdict().as_str(), readable.exit()),
            ("readable; not every block has a seal", Exit::Clean)
        );
        let incomplete = VerifyReport { errors: Vec::new(), ..report() };
        assert_eq!((incomplete.verdict().as_str(), incomplete.exit()), ("incomplete", Exit::Incomplete));
        let unsealed = VerifyReport { checked: Checked::Readability, ..incomplete };
        assert_eq!((unsealed.verdict().as_str(), unsealed.exit()), ("incomplete", Exit::Incomplete));
        assert_eq!(
            (report().verdict().as_str(), report().exit()),
            ("2 damaged, 1 repaired, incomplete", Exit::DamageFound)
        );
        let lost_metadata = vec!["a superblock".to_owned()];
        let metadata = VerifyReport { lost_metadata, ..clean.clone() };
        assert_eq!((metadata.verdict().as_str(), metadata.exit()), ("incomplete", Exit::Incomplete));
        let before = VerifiedBefore { first: 0, last: 9, ended_unix_s: 1_790_000_000 };
        let before = VerifyReport { verified_before: Some(before), ..clean.clone() };
        let why = "incomplete: blocks 0 to 9 were verified before, last on 2026-09-21 14:13:20 UTC, and may have been written since";
        assert_eq!((before.exit(), &*before.verdict()), (Exit::Incomplete, why));
        assert_eq!(VerifyReport { errors_unlisted: 3, ..before }.exit(), Exit::DamageFound);
        let interrupted = VerifyReport { resume: Some("5..15".parse().unwrap()), ..clean.clone() };
        assert!(printed(&interrupted).ends_with("\"resume\":\"5..15\"}\n"));
        let unlisted = VerifyReport { errors_unlisted: 3, ..clean };
        assert_eq!((unlisted.verdict().as_str(), unlisted.exit()), ("3 damaged", Exit::DamageFound));
    }

    #[test]
    fn a_report_is_printed_as_it_is_documented() {
        let report = report();
        assert_eq!(
            printed(&report),
            concat!(
                r#"{"target":"mirror:a,b","blocks_verified":16,"bytes_verified":65536,"bytes_transferred":0,"#,
                r#""offloaded":true,"elapsed_s":0.25,"checked":"seals","errors":["#,
                r#"{"lba":7,"field":"guard","expected":"0x00001d0f","actual":"0xffffffff","member":null,"repaired":false},"#,
                r#"{"lba":7,"field":"media","expected":null,"actual":null,"member":"b","repaired":true}],"#,
                r#""errors_unlisted":0,"#,
                r#""unchecked":[{"member":"c","first":0,"last":15,"why":"the member is offline"}],"lost_metadata":[],"resume":null}"#,
                "\n"
            )
        );
    }

    #[test]
    fn fields_have_the_documented_names() {
        let names = CAUSES.map(BadBlockCause::as_str);
        assert_eq!(names, ["guard", "app_tag", "ref_tag", "storage_tag", "media", "conflict", "stale", "unsettled"]);
    }

    #[test]
    fn values_are_as_wide_as_their_field() {
        assert_eq!(Hex::new(0xab, 16).to_string(), "0x00ab");
        assert_eq!(Hex::new(u128::from(u64::MAX), 64).to_string(), "0xffffffffffffffff");
        assert_eq!(Hex::new(1, 80).to_string(), "0x00000000000000000001");
        assert_eq!(Hex::new(1, 7).to_string(), "0x01");
        assert_eq!(Hex::new(0x12345, 16).to_string(), "0x12345");
    }

    #[test]
    fn a_reader_that_went_away_ends_the_printing_and_a_full_disk_the_work() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let unread = AtomicBool::new(false);
        heard(write_json(&1, &mut Closed), &unread).unwrap();
        assert!(unread.load(Ordering::Relaxed));
        let unread = AtomicBool::new(false);
        let full = heard(Err(io::ErrorKind::StorageFull.into()), &unread).unwrap_err();
        assert_eq!((full.kind(), unread.load(Ordering::Relaxed)), (io::ErrorKind::StorageFull, false));
    }
}
