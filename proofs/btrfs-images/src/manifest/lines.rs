//! The text form of a manifest: a line with the version, and one for each path.
//!
//! ```text
//! sealblock manifest 1
//! PATH KIND MODE UID GID NLINK SIZE ATIME MTIME CTIME MAJOR:MINOR SAME-AS TARGET CONTENT [NAME=VALUE]...
//! ```
//!
//! Fields are separated by one space. Bytes that are not printable ASCII, and the space, `%`, `=` and `-`, are written
//! as `%` and two hexadecimal digits, an empty path or value as `-e`, and an absent one as `-`. So any name fits in a
//! line, and two manifests can be compared line by line.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{Entry, Kind, Manifest, Time};

const FORM: &str = "sealblock manifest 1";
const ABSENT: &str = "-";
const EMPTY: &str = "-e";

const KINDS: [(&str, Kind); 7] = [
    ("file", Kind::Regular),
    ("dir", Kind::Directory),
    ("link", Kind::Symlink),
    ("fifo", Kind::Fifo),
    ("socket", Kind::Socket),
    ("char", Kind::CharDevice),
    ("block", Kind::BlockDevice),
];

/// Bytes as text without spaces.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        if byte.is_ascii_graphic() && !b"%=-".contains(byte) {
            text.push(*byte as char);
        } else {
            write!(text, "%{byte:02x}").expect("a string takes everything");
        }
    }
    text
}

fn unescape(text: &str) -> Result<Vec<u8>, String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, tail @ ..] = rest {
        if *first != b'%' {
            bytes.push(*first);
            rest = tail;
            continue;
        }
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.ok_or_else(|| format!("{text}: two hexadecimal digits must follow %"))?);
        rest = &tail[2..];
    }
    Ok(bytes)
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}

fn value(bytes: &[u8]) -> String {
    if bytes.is_empty() { EMPTY.to_owned() } else { escape(bytes) }
}

fn optional(bytes: Option<&Vec<u8>>) -> String {
    bytes.map_or(ABSENT.to_owned(), |bytes| value(bytes))
}

impl Manifest {
    /// One line for each path, in byte order. [`Manifest::from_text`] reads it.
    pub fn to_text(&self) -> String {
        let mut text = format!("{FORM}\n");
        for (path, entry) in &self.entries {
            write_entry(&mut text, path, entry).expect("a string takes everything");
        }
        text
    }

    /// Parses the output of [`Manifest::to_text`].
    ///
    /// # Errors
    /// The first invalid line, and what is wrong with it.
    pub fn from_text(text: &str) -> Result<Manifest, String> {
        read(text)
    }
}

fn write_entry(text: &mut String, path: &[u8], entry: &Entry) -> std::fmt::Result {
    let kind = KINDS.iter().find(|(_, kind)| *kind == entry.kind).map_or("", |(name, _)| name);
    let Entry { mode, uid, gid, nlink, size, atime, mtime, ctime, device: (major, minor), .. } = entry;
    write!(text, "{} {kind} {mode:04o} {uid} {gid} {nlink} {size} {atime} {mtime} {ctime}", value(path))?;
    let (same_as, target) = (optional(entry.same_as.as_ref()), optional(entry.target.as_ref()));
    let content = entry.content.map_or(ABSENT.to_owned(), |digest| hex(&digest));
    write!(text, " {major}:{minor} {same_as} {target} {content}")?;
    for (attribute, content) in &entry.xattrs {
        write!(text, " {}={}", escape(attribute), value(content))?;
    }
    text.push('\n');
    Ok(())
}

fn read(text: &str) -> Result<Manifest, String> {
    let mut lines = text.lines().zip(1..);
    match lines.next() {
        Some((FORM, _)) => {}
        first => return Err(format!("not a manifest: it begins with {:?}", first.map_or("", |(line, _)| line))),
    }
    let mut entries = BTreeMap::new();
    for (line, number) in lines {
        let (path, entry) = read_entry(line).map_err(|why| format!("line {number}: {why}"))?;
        if entries.insert(path, entry).is_some() {
            return Err(format!("line {number}: a path that was there before"));
        }
    }
    Ok(Manifest { entries })
}

/// The fields of a line, in order.
struct Fields<'a>(std::str::Split<'a, char>);

impl<'a> Fields<'a> {
    fn next(&mut self, name: &str) -> Result<&'a str, String> {
        self.0.next().filter(|field| !field.is_empty()).ok_or_else(|| format!("no {name}"))
    }

    fn number<N: std::str::FromStr>(&mut self, name: &str) -> Result<N, String> {
        let field = self.next(name)?;
        field.parse().map_err(|_| format!("{name} {field}: not a number of its range"))
    }

    fn bytes(&mut self, name: &str) -> Result<Option<Vec<u8>>, String> {
        match self.next(name)? {
            ABSENT => Ok(None),
            EMPTY => Ok(Some(Vec::new())),
            field => unescape(field).map(Some),
        }
    }

    fn time(&mut self, name: &str) -> Result<Time, String> {
        let field = self.next(name)?;
        let time = field.split_once('.').and_then(|(seconds, nanoseconds)| {
            Some(Time { seconds: seconds.parse().ok()?, nanoseconds: nanoseconds.parse().ok()? })
        });
        time.ok_or_else(|| format!("{name} {field}: not seconds, a point and nanoseconds"))
    }

    fn digest(&mut self) -> Result<Option<[u8; 32]>, String> {
        let field = self.next("content")?;
        if field == ABSENT {
            return Ok(None);
        }
        let wrong = || format!("content {field}: not 64 hexadecimal digits");
        if field.len() != 64 || !field.is_ascii() {
            return Err(wrong());
        }
        let mut digest = [0; 32];
        for (index, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&field[2 * index..2 * index + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Some(digest))
    }
}

fn read_entry(line: &str) -> Result<(Vec<u8>, Entry), String> {
    let mut fields = Fields(line.split(' '));
    let path = fields.bytes("path")?.ok_or("no path")?;
    let kind = fields.next("kind")?;
    let (_, kind) = KINDS.iter().find(|(name, _)| *name == kind).ok_or_else(|| format!("unknown kind {kind}"))?;
    let mode = fields.next("mode")?;
    let mode = u32::from_str_radix(mode, 8).map_err(|_| format!("mode {mode}: not an octal number"))?;
    let (uid, gid) = (fields.number("uid")?, fields.number("gid")?);
    let (nlink, size) = (fields.number("nlink")?, fields.number("size")?);
    let (atime, mtime, ctime) = (fields.time("atime")?, fields.time("mtime")?, fields.time("ctime")?);
    let device = fields.next("device")?;
    let numbers = device.split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let device = numbers.ok_or_else(|| format!("device {device}: not two numbers"))?;
    let (same_as, target) = (fields.bytes("inode")?, fields.bytes("target")?);
    let content = fields.digest()?;
    let mut xattrs = BTreeMap::new();
    for field in fields.0 {
        let (name, content) = field.split_once('=').ok_or_else(|| format!("attribute {field}: no ="))?;
        let content = if content == EMPTY { Vec::new() } else { unescape(content)? };
        xattrs.insert(unescape(name)?, content);
    }
    let kind = *kind;
    let entry =
        Entry { kind, mode, uid, gid, nlink, size, atime, mtime, ctime, device, target, content, xattrs, same_as };
    Ok((path, entry))
}
